"""Sums that stream: batches, pieces and machines add up to the same numbers, whatever their order (to rounding).

An accumulator is tensors that grow by addition, and a manifest that says what they are sums of. All else follows:
merging adds, a copy is filled, a file holds both, and what a file's manifest promises is compared with what it holds
before any memory is taken.

Vectors are summed with a constant 1 appended: ``M = Σ w [x; 1][y; 1]ᵀ`` holds ``Σ w x yᵀ``, ``Σ w x``, ``Σ w y`` and
``Σ w``, so that averages are blocks of it, and centring is the shear ``[I, −x̄] M [I, −ȳ]ᵀ``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.kinds import came, checked_class
from qkscope.runs.folder import read_tensors, tensor_bytes, write_tensors

Center = Literal["none", "query", "both"]  # what is taken out of ΔC: nothing, the mean query, or the mean key too


@checked_class
class Accumulator(ABC):
    """What streaming sums have in common. A subclass says `tensors` and `manifest`, and is made with ``device=``."""

    kind: ClassVar[str]  # of its files

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""

    @abstractmethod
    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any], device: torch.device | str = "cpu") -> Self:
        """Empty sums for the same job.

        Parameters
        ----------
        manifest : what `manifest` gave.
        device : where the sums are kept.
        """
        return cls(**manifest, device=device)  # type: ignore[call-arg]

    @classmethod
    def from_tensors(
        cls,
        manifest: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        path: str | Path,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The sums that a file at ``path`` held; refused where they are not what their manifest promises.

        Parameters
        ----------
        manifest, tensors : what the file says and holds.
        path : the file, for the message.
        device : where the sums are kept.
        """
        promised = cls.from_manifest(manifest, "meta").tensors()  # which take no memory: it may promise anything
        if {name: x.shape for name, x in promised.items()} != {name: x.shape for name, x in tensors.items()}:
            raise BadInput(f"{path} is damaged: a tensor is missing or of another shape; make it again, elsewhere.")
        made = cls.from_manifest(manifest, device)
        for name, mine in made.tensors().items():
            mine.copy_(tensors[name])
        return made

    def merge(self, *others: Accumulator) -> Self:
        """New sums with the data of all: addition, so neither order nor grouping matters (to rounding).

        Parameters
        ----------
        others : sums of the same job over other data.
        """
        merged = self.copy()
        for other in others:
            merged._check_same_job(other)
            for mine, theirs in zip(merged.tensors().values(), other.tensors().values(), strict=True):
                mine += theirs.to(mine.device)
        return merged

    def _check_same_job(self, other: Accumulator) -> None:
        mine, theirs = self.manifest(), other.manifest()
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                raise BadInput(
                    f"sums of different jobs cannot be merged: {name} is {came(mine.get(name))} in one and "
                    f"{came(theirs.get(name))} in the other."
                )

    def copy(self) -> Self:
        """An independent copy."""
        return deepcopy(self)

    def to_bytes(self) -> bytes:
        """The content of the file that `load` reads."""
        return tensor_bytes(self.kind, self.tensors(), self.manifest())

    def save(self, path: str | Path) -> None:
        """Write sums and manifest to one safetensors file.

        Parameters
        ----------
        path : the file; one that is there is replaced, whole.
        """
        write_tensors(path, self.kind, self.tensors(), self.manifest())

    @classmethod
    def load(
        cls, path: str | Path, *, expect: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Read a file that `save` wrote.

        Parameters
        ----------
        path : the file.
        expect : the parts of its manifest's ``about`` that must agree, as ``{"weights": scope.weights_hash}``.
        device : where the sums are kept.
        """
        tensors, manifest = read_tensors(path, cls.kind, expect)
        return cls.from_tensors(manifest, tensors, path, device)


class Covariance(Accumulator):
    """Covariance of vectors for many heads, from the sums ``Σ [x; 1][x; 1]ᵀ`` in float64.

    Examples
    --------
    >>> covariance = Covariance(columns=2, d_head=4)
    >>> covariance.update(torch.randn(100, 2, 4))
    >>> covariance.matrix().shape
    torch.Size([2, 4, 4])
    """

    kind = "covariance"

    def __init__(self, columns: int, d_head: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(columns, d_head + 1, d_head + 1, dtype=torch.float64, device=device)

    def update(self, x: Float[Tensor, "n c d"]) -> None:
        """Add n vectors per column."""
        rows = augmented(x.transpose(0, 1))
        self.sums.baddbmm_(rows.mT, rows)

    def matrix(self) -> Float[Tensor, "c d d"]:
        """Covariance of every column."""
        count = self.sums[:, -1:, -1:]
        if bool((count < 2).any()):
            raise BadInput("a covariance needs at least two vectors: fit on more prompts.")
        mean = self.sums[:, :-1, -1:] / count
        return self.sums[:, :-1, :-1] / count - mean @ mean.mT

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        return {"sums": self.sums}

    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""
        return {"columns": self.sums.shape[0], "d_head": self.sums.shape[1] - 1}


def check_shape(what: str, tensor: Tensor, want: tuple[int, ...], axes: str) -> None:
    """Refuse a tensor of another shape, by its name and the names of its axes."""
    if tuple(tensor.shape) != want:
        raise BadInput(f"{what} should have shape {want} ({axes}), but have {tuple(tensor.shape)}.")


def augmented(vectors: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d+1"]:
    """``[v; 1]`` in float64."""
    out = vectors.new_ones((*vectors.shape[:-1], vectors.shape[-1] + 1), dtype=torch.float64)
    out[..., :-1] = vectors
    return out


def add_outer(
    state: Float[Tensor, "h a *x"], queries: Float[Tensor, "b h a"], keys: Float[Tensor, "b g x"], kv_of_head: list[int]
) -> None:
    """``state[h] += Σ_b queries[b, h] keys[b, kv_of_head[h]]ᵀ``, in place."""
    heads, groups = len(kv_of_head), keys.shape[1]
    flat, size = state.flatten(2), heads // groups
    if kv_of_head == [h // size for h in range(heads)]:
        # Whole groups: the queries of a group stand side by side and meet their shared keys in one product.
        stacked = queries.unflatten(1, (groups, size)).flatten(2).permute(1, 2, 0)
        flat.view(groups, -1, keys.shape[2]).baddbmm_(stacked, keys.transpose(0, 1))
    else:
        flat += queries.permute(1, 2, 0) @ keys.transpose(0, 1)[kv_of_head]


def centred_delta(
    sums: Float[Tensor, "*n a 2 a"], center: Center = "none", *, reference: Float[Tensor, "*n a 2 a"] | None = None
) -> Float[Tensor, "*n d d"]:
    """ΔC from augmented sums; normalised by, and centred on, the means of ``reference`` (themselves by default)."""
    reference = sums if reference is None else reference
    count = reference[..., -1:, :, -1:]
    conditional = sums / count
    delta = conditional[..., 0, :] - conditional[..., 1, :]  # the augmented difference, (d + 1) × (d + 1)
    if center == "none":
        return delta[..., :-1, :-1]
    means = reference / count
    mean_query = means[..., :-1, :, -1:].mean(dim=-2)  # d × 1, halfway between the conditions
    mean_key = means[..., -1:, :, :-1].mean(dim=-2)  # 1 × d
    delta = delta[..., :-1, :] - mean_query * delta[..., -1:, :]
    return delta[..., :-1] - delta[..., -1:] * mean_key if center == "both" else delta[..., :-1]
