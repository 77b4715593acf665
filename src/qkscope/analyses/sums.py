"""One pass over a contrast's prompts: the sums it leaves, saved as it goes, and added up over shards.

The list of batches is fixed by the task and the batch size. A shard takes every n-th of it, whole, and sums add, so
neither how many processes share the work nor where one of them died changes the numbers (to rounding).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate as running_sum
from pathlib import Path
from typing import Any

from torch import Tensor

from qkscope.analyses.prompts import Rows, batches_of, capture_units, contrast_rows, null_units, units_hash, whole_rows
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.moments import Moments
from qkscope.maths.nulls import NULL_KINDS, NullKind
from qkscope.maths.sums import Covariance
from qkscope.runs.folder import file_name
from qkscope.runs.job import patient_interrupt
from qkscope.runs.shards import Shard, is_shard
from qkscope.runs.store import check_shapes, read_tensors, write_tensors
from qkscope.runs.stream import out_of_memory
from qkscope.tasks.task import Contrast, Task

log = logging.getLogger(__name__)

_REST = 100  # times what a save takes, until the next: saving is 1% of a run however large the sums are
_LONGEST_REST = 600.0  # seconds: what a kill can lose, also where a slow disk would have it wait for days
_FIRST_SAVE = (0.01, 400e6)  # what the first one is taken to cost: seconds, and bytes a second


@dataclass(frozen=True)
class Sums:
    """What one contrast's pass accumulates: the moments, and the covariances of queries and keys for the baselines.

    ``cut`` holds the batches that did not fit into memory and came in parts: the model ran on the parts, so another run
    agrees to rounding and not bit for bit.
    """

    moments: Moments
    cov_q: Covariance
    cov_k: Covariance
    cut: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, moments: Moments) -> Sums:
        """Sums of nothing yet, beside these moments."""
        device = next(iter(moments.sums.values())).device
        cov_q, cov_k = (Covariance(len(moments.heads), moments.d_head, device) for _ in range(2))
        return cls(moments, cov_q, cov_k)

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        return {**self.moments.tensors(), "cov_q": self.cov_q.sums, "cov_k": self.cov_k.sums}

    def save(self, path: Path, batches: int, of: int, shard: Shard = (0, 1)) -> float:
        """Write the state after this many batches of all of a shard's; returns the seconds it took."""
        start = time.monotonic()
        counts = {"batches": batches, "of": of, "cut": self.cut, "shard": list(shard)}
        manifest = {"moments": self.moments.manifest(), **counts}
        write_tensors(path, "sums", self.tensors(), manifest, new_folder=False)
        return time.monotonic() - start

    def load(self, path: Path, of: int | None = None, shard: Shard = (0, 1)) -> int:
        """Take up a saved state of the same job; returns how many batches it holds."""
        tensors, manifest = _read(path, shard)
        theirs = manifest["moments"]
        for name, value in self.moments.manifest().items():
            if theirs.get(name) != value:
                parts = (
                    [part for part in value if theirs.get(name, {}).get(part) != value[part]] if name == "about" else []
                )
                raise BadInput(
                    f"{path} was made by another job ({', '.join(parts) or name} differs): use another folder."
                )
        if of not in (None, manifest["of"]):
            raise BadInput(f"{path} is of {manifest['of']} batches, not of {of}: use another folder.")
        self._fill(tensors, path)
        self.cut[:] = manifest["cut"]
        return int(manifest["batches"])

    @classmethod
    def read(cls, path: Path, shard: Shard = (0, 1), device: Any = "cpu") -> tuple[Sums, int]:
        """Finished sums, of whatever job made them, and of how many batches; refused while some are missing."""
        tensors, manifest = _read(path, shard)
        if manifest["batches"] != manifest["of"]:
            raise BadInput(f"{path} holds {manifest['batches']} of {manifest['of']} batches: run the command "
                           "that makes it again, it goes on where it stopped.")  # fmt: skip
        check_shapes(path, lambda: cls.empty(Moments.from_manifest(manifest["moments"], "meta")).tensors(), tensors)
        sums = cls.empty(Moments.from_manifest(manifest["moments"], device))
        sums._fill(tensors, path)
        sums.cut[:] = manifest["cut"]
        return sums, int(manifest["of"])

    def _fill(self, tensors: dict[str, Tensor], path: Path) -> None:
        check_shapes(path, self.tensors, tensors)
        odd = [name for name in self.moments.tensors() if not bool(tensors[name].isfinite().all())]
        if odd:
            raise BadInput(f"{path} is damaged: {odd[0]} holds numbers that are none; make it again, elsewhere.")
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])

    def merge(self, *others: Sums) -> Sums:
        """New sums with the data of all, added in this order."""
        return Sums(
            self.moments.merge(*(other.moments for other in others)),
            self.cov_q.merge(*(other.cov_q for other in others)),
            self.cov_k.merge(*(other.cov_k for other in others)),
            [number for one in (self, *others) for number in one.cut],
        )


def _read(path: Path, shard: Shard) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A file of sums with a manifest that can be believed; refused where it is another shard's."""
    tensors, manifest = read_tensors(path, "sums")
    moments, cut, of, batches = (manifest.get(name) for name in ("moments", "cut", "of", "batches"))
    fine = (
        isinstance(moments, dict) and isinstance(moments.get("about"), dict)
        and {"model", "space", "n"} <= set(moments["about"])
        and type(of) is int and type(batches) is int and 0 <= batches <= of
        and isinstance(cut, list) and all(type(number) is int and 0 <= number < of for number in cut)
        and is_shard(manifest.get("shard"))
    )  # fmt: skip
    if isinstance(moments, dict) and fine and not set(moments.get("nulls", ())) <= set(NULL_KINDS):
        raise BadInput(f"{path} was made by an older qkscope, whose nulls were others: run decompose again, elsewhere.")
    if not fine:
        raise BadInput(f"{path} is damaged: its manifest is not what a run writes; make it again, elsewhere.")
    if tuple(manifest["shard"]) != shard:
        i, n = manifest["shard"]
        raise BadInput(f"{path} holds the sums of shard {i}/{n} and stands where those of {shard[0]}/{shard[1]} "
                       "belong: put it back, or run the shard again into another folder.")  # fmt: skip
    return tensors, manifest


def sums_file(folder: str | Path, contrast: str) -> Path:
    """Where a contrast's sums are kept. A name is not a path: it may hold anything a user calls a contrast."""
    return Path(folder) / f"{file_name(contrast)}.safetensors"


def _nulls(contrast: Contrast) -> tuple[NullKind, ...]:
    """Which nulls a contrast needs.

    Across a prompt and its copy each difference stands with both signs, so there is nothing but the interaction. Labels
    are dealt out again within a prompt; where words are the unit, their signs are flipped instead.
    """
    if contrast.across:
        return ("interaction",)
    return ("label_permutation" if contrast.unit == "prompt" and not contrast.paired else "sign_flip", "interaction")


@contextmanager
def _room(heads: int, replicates: int) -> Iterator[None]:
    """Say what to do where the sums do not fit into memory: halving a batch would not help, as they do not grow."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise BadInput(f"the null sums of {heads} heads with {replicates} replicates do not fit into memory: take "
                       "fewer heads at a time, or fewer replicates.") from None  # fmt: skip


def accumulate(
    scope: Scope,
    task: Task,
    contrast: Contrast,
    heads: Sequence[Head],
    n: int,
    space: Space,
    batch_size: int,
    replicates: int,
    seed: int,
    about: dict[str, Any],
    path: Path | None,
    shard: Shard = (0, 1),
    progress: bool | None = None,
) -> Sums:
    """Sums of one contrast over this shard's batches; with a path, saved now and then and taken up from there."""
    units = task.fit(contrast.name, n)
    every = batches_of(units, batch_size)
    if len(every) < shard[1]:
        raise BadInput(f"{len(every)} batches cannot be shared among {shard[1]}: take fewer shards or smaller batches.")
    batches = every[shard[0] :: shard[1]]
    unit_of = null_units(units, contrast)
    about = {**about, "batch_size": batch_size, "examples": units_hash(units)}
    with _room(len(heads), replicates):
        moments = Moments(
            heads, [contrast.name], scope.d_head, group_size=scope.group_size, nulls=_nulls(contrast),
            replicates=replicates, seed=seed, about=about, device=scope.device,
        )  # fmt: skip
        sums = Sums.empty(moments)
    done = sums.load(path, len(batches), shard) if path is not None and path.exists() else 0
    running = list(running_sum(map(len, batches)))
    ends = {units_done: count for count, units_done in enumerate(running, 1)}
    units_done = sum(map(len, batches[:done]))
    stream = capture_units(
        scope,
        units,
        heads,
        space=space,
        batch_size=batch_size,
        chat=task.chat,
        rest=False,
        first=done,
        shard=shard,
        progress=progress,
    )
    once, rate = _FIRST_SAVE
    saved, cost = time.monotonic(), once + sum(tensor.nbytes for tensor in sums.tensors().values()) / rate
    parts: list[Rows] = []
    with patient_interrupt() as interrupted:
        for batch in stream:
            q, k, labels, _ = contrast_rows(batch, contrast)
            parts.append((q, k, labels, unit_of(batch)))
            captured = batch.captured
            sums.cov_q.update(captured.q)
            own = captured.k[:, captured.kv_of_head].transpose(1, 2)  # b k h d
            sums.cov_k.update(own[captured.key_mask])
            units_done += len(batch.unit.unique())
            count = ends.get(units_done, 0)  # 0: in the middle of a batch that memory cut into parts
            if not count and (number := bisect(running, units_done)) not in sums.cut:
                sums.cut.append(number)
            if count:
                q, k, labels, prompts = whole_rows(parts)
                with _room(len(heads), replicates):
                    moments.update(q, k, {contrast.name: labels}, prompts=prompts)
                parts.clear()
            rest = min(_REST * cost, _LONGEST_REST)
            due = interrupted() or time.monotonic() - saved >= rest or count == len(batches)
            if path is not None and count and due:
                cost = sums.save(path, count, len(batches), shard)
                saved = time.monotonic()
                log.debug("saved %d of %d batches in %.3f s", count, len(batches), cost)
            if interrupted() and (count or path is None):
                raise KeyboardInterrupt
    return sums
