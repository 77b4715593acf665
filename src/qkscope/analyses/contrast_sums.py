"""The sums of one contrast: its moments, and the covariances of queries and keys for the baselines; and their file.

The list of batches is fixed by the task and the batch size. A shard takes every n-th of it, whole, and sums add, so
neither how many processes share the work nor where one of them died changes the numbers (to rounding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.maths.moments import Moments
from qkscope.maths.nulls import NULL_KINDS
from qkscope.maths.sums import Accumulator, Covariance
from qkscope.runs.folder import file_name
from qkscope.runs.shards import Shard, is_shard
from qkscope.runs.store import read_tensors, write_tensors


class ContrastSums(Accumulator):
    """What the pass of one contrast adds up, and how much of it there is.

    Parameters
    ----------
    moments : of the contrast; their tensors are shared.
    batches, of : how many batches are in it, of how many of its shard.
    cut : numbers of those that did not fit into memory and came in parts: the model ran on the parts, so another run
        agrees to rounding and not bit for bit.
    shard : which share of the job it is.
    """

    kind = "sums"

    def __init__(
        self, moments: Moments, batches: int = 0, of: int = 0, cut: Sequence[int] = (), shard: Sequence[int] = (0, 1)
    ) -> None:
        self.moments, self.batches, self.of, self.cut, self.shard = (
            moments,
            batches,
            of,
            list(cut),
            (shard[0], shard[1]),
        )
        device = next(iter(moments.sums.values())).device
        self.cov_q, self.cov_k = (Covariance(len(moments.heads), moments.d_head, device) for _ in range(2))

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        return {**self.moments.tensors(), "cov_q": self.cov_q.sums, "cov_k": self.cov_k.sums}

    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""
        counts = {"batches": self.batches, "of": self.of, "cut": list(self.cut), "shard": list(self.shard)}
        return {"moments": self.moments.manifest(), **counts}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """Empty sums for the same job.

        Parameters
        ----------
        manifest : what `manifest` gave.
        device : where the sums are kept.
        """
        counts = {name: manifest[name] for name in ("batches", "of", "cut", "shard")}
        return cls(Moments.from_manifest(manifest["moments"], device), **counts)

    def merge(self, *others: Accumulator) -> Self:
        """The sums of all shards, added in this order.

        Parameters
        ----------
        others : the other shards of the job.
        """
        merged = super().merge(*others)
        merged.shard = (0, 1)
        for other in others:
            assert isinstance(other, ContrastSums)
            merged.batches, merged.of, merged.cut = (
                merged.batches + other.batches,
                merged.of + other.of,
                merged.cut + other.cut,
            )
        return merged

    def _check_same_job(self, other: Accumulator) -> None:
        assert isinstance(other, ContrastSums)
        self.moments._check_same_job(other.moments)

    def save(self, path: str | Path, batches: int | None = None) -> None:
        """Write the state into a folder that is there.

        Parameters
        ----------
        path : the file; one that is there is replaced, whole.
        batches : how many are in it now.
        """
        self.batches = self.batches if batches is None else batches
        write_tensors(path, self.kind, self.tensors(), self.manifest(), new_folder=False)

    def take_up(self, path: str | Path) -> int:
        """Go on from a saved state of the same job; gives how many batches it holds.

        Parameters
        ----------
        path : the file.
        """
        tensors, manifest = _read(Path(path), self.shard)
        theirs = manifest["moments"]
        for name, value in self.moments.manifest().items():
            if theirs.get(name) != value:
                told = theirs.get(name) if name == "about" else None
                parts = [part for part in value if told.get(part) != value[part]] if isinstance(told, dict) else []
                raise BadInput(
                    f"{path} was made by another job ({', '.join(parts) or name} differs): use another folder."
                )
        if manifest["of"] != self.of:
            raise BadInput(f"{path} is of {manifest['of']} batches, not of {self.of}: use another folder.")
        read = self.from_tensors(manifest, tensors, path)
        for mine, found in zip(self.tensors().values(), read.tensors().values(), strict=True):
            mine.copy_(found)
        self.batches, self.cut = read.batches, read.cut
        return self.batches

    @classmethod
    def read(cls, path: Path, shard: Shard = (0, 1), device: torch.device | str = "cpu") -> Self:
        """Finished sums, of whatever job made them; refused while some are missing.

        Parameters
        ----------
        path : the file.
        shard : whose it must be.
        device : where the sums are kept.
        """
        tensors, manifest = _read(path, shard)
        if manifest["batches"] != manifest["of"]:
            raise BadInput(
                f"{path} holds {manifest['batches']} of {manifest['of']} batches: run the command that makes it again, "
                "it goes on where it stopped."
            )
        return cls.from_tensors(manifest, tensors, path, device)


def _read(path: Path, shard: Shard) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A file of sums with a manifest that can be believed; refused where it is another shard's."""
    tensors, manifest = read_tensors(path, ContrastSums.kind)
    moments, cut, of, batches = (manifest.get(name) for name in ("moments", "cut", "of", "batches"))
    about = moments.get("about") if isinstance(moments, dict) else None
    numbers = [of, batches, *cut] if isinstance(cut, list) else []
    counted = bool(numbers) and all(type(number) is int and 0 <= number <= numbers[0] for number in numbers)
    known = isinstance(about, dict) and {"model", "space", "n"} <= set(about)
    if not (counted and known and is_shard(manifest.get("shard"))):
        raise BadInput(f"{path} is damaged: its manifest is not what a run writes; make it again, elsewhere.")
    if not set(manifest["moments"].get("nulls", ())) <= set(NULL_KINDS):
        raise BadInput(f"{path} was made by an older qkscope, whose nulls were others: run decompose again, elsewhere.")
    if tuple(manifest["shard"]) != shard:
        (i, n), (mine, all_of) = manifest["shard"], shard
        raise BadInput(
            f"{path} holds the sums of shard {i}/{n} and stands where those of {mine}/{all_of} belong: put it back, or "
            "run the shard again into another folder."
        )
    odd = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if odd:
        raise BadInput(f"{path} is damaged: {odd[0]} holds NaN or infinity; make it again, elsewhere.")
    return tensors, manifest


def sums_file(folder: str | Path, contrast: str) -> Path:
    """Where a contrast's sums are kept. A name is not a path: it may hold anything a user calls a contrast."""
    return Path(folder) / f"{file_name(contrast)}.safetensors"
