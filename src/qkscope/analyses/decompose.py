"""The features of chosen heads: one pass over each contrast's prompts, with the nulls and the baselines beside it.

With an output folder the sums are saved every few batches together with the number of batches they hold, so a run that
dies goes on from there; the list of batches is fixed, so it ends where it would have ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qkscope.analyses.find import job
from qkscope.analyses.units import batches_of, capture_units, contrast_rows
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.maths.baselines import Covariance
from qkscope.maths.controls import run_controls
from qkscope.maths.moments import Moments
from qkscope.maths.store import read_tensors, write_tensors
from qkscope.maths.subspace import Subspace
from qkscope.result import Result, provenance
from qkscope.tasks.task import Contrast, Task

_SAVE_EVERY = 8  # batches


@dataclass(frozen=True)
class Sums:
    """What one contrast's pass accumulates: the moments, and the covariances of queries and keys for the baselines."""

    moments: Moments
    cov_q: Covariance
    cov_k: Covariance

    def save(self, path: Path, batches: int) -> None:
        """Write the state after this many batches."""
        tensors = {**self.moments.tensors(), "cov_q": self.cov_q.sums, "cov_k": self.cov_k.sums}
        write_tensors(path, "sums", tensors, {"moments": self.moments.manifest(), "batches": batches})

    def load(self, path: Path) -> int:
        """Take up a saved state of the same job; returns how many batches it holds."""
        tensors, manifest = read_tensors(path, "sums")
        for name, value in self.moments.manifest().items():
            if manifest["moments"].get(name) != value:
                raise BadInput(f"{path} was made by another job ({name} differs): use another folder.")
        state = {**self.moments.tensors(), "cov_q": self.cov_q.sums, "cov_k": self.cov_k.sums}
        for name, tensor in state.items():
            tensor.copy_(tensors[name])
        return int(manifest["batches"])


@dataclass(frozen=True)
class Fit(Result):
    """Subspaces of every contrast and head: ``fit["lexical", "L18H6"]``."""

    subspaces: Mapping[tuple[str, Head], Subspace] = field(default_factory=dict)
    sums: Mapping[str, Sums] = field(default_factory=dict)
    heads: tuple[Head, ...] = ()
    space: Space = "post_rope"
    chat: bool = False

    def __getitem__(self, which: tuple[str, str | Head]) -> Subspace:
        contrast, head = which[0], Head.parse(which[1])
        if (contrast, head) not in self.subspaces:
            raise BadInput(f"nothing was fitted for {contrast!r} at {head}: there is {', '.join(self.contrasts)} at "
                           f"{', '.join(map(str, self.heads))}.")  # fmt: skip
        return self.subspaces[contrast, head]

    def __iter__(self) -> Iterator[tuple[str, Head]]:
        return iter(self.subspaces)

    @property
    def contrasts(self) -> list[str]:
        """Names of the fitted contrasts."""
        return list(dict.fromkeys(contrast for contrast, _ in self.subspaces))

    def table(self) -> list[dict[str, Any]]:
        """One row per contrast and head."""
        return [dict(row) for row in self.tables["ranks"]]


def decompose(
    scope: Scope,
    task: Task,
    heads: str | Head | Sequence[str | Head],
    n: int = 1024,
    *,
    contrasts: Sequence[str] | None = None,
    rank: int | Literal["energy", "null"] | Mapping[str, int | Literal["energy", "null"]] = "energy",
    center: Mapping[str, Literal["none", "query", "both"]] | None = None,
    space: Space = "post_rope",
    batch_size: int = 32,
    replicates: int = 199,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> Fit:
    """Fit the task's contrasts at these heads on ``n`` units each, controls included.

    Parameters
    ----------
    contrasts : names; all of the task's by default.
    rank : how subspaces are cut: the paper's 99% ``energy``, above the ``null``, a number, or a number per contrast.
    center : overrides a contrast's own centring.
    out : folder for the sums; a run that died there is taken up where it stopped.
    """
    start = time.perf_counter()
    chosen = [scope.check(head) for head in parse_heads(heads)]
    names = list(task.contrasts) if contrasts is None else list(contrasts)
    for name in names:
        task.fit(name, 1)  # an unknown contrast is refused before the model runs
    subspaces: dict[tuple[str, Head], Subspace] = {}
    sums: dict[str, Sums] = {}
    rows: list[dict[str, Any]] = []
    about = job(scope, task, space)
    for name in names:
        contrast = task.contrasts[name]
        path = None if out is None else Path(out) / f"{name.replace(' ', '_')}.safetensors"
        sums[name] = _accumulate(
            scope, task, contrast, chosen, n, space, batch_size, replicates, seed, {**about, "n": n}, path, progress
        )
        moments = sums[name].moments
        centring = (center or {}).get(name, contrast.center)
        controls = run_controls(moments, name)
        cut: int | Literal["energy", "null"] = rank.get(name, "energy") if isinstance(rank, Mapping) else rank
        found = Subspace.from_deltas(
            moments.delta(name, centring), chosen, cut, contrast=name, controls=controls, about=about
        )
        for head, subspace in found.items():
            subspaces[name, head] = subspace
            c = controls[head]
            rows.append({
                "head": str(head), "contrast": name, "center": centring, "rank": subspace.rank,
                "rank_99": c.energy_rank, "rank_null": c.null_rank, "rank_99_centred": c.centred_energy_rank,
                "interaction_rank": c.interaction_rank, "mean_dominance": c.mean_dominance,
                "p_difference": c.p_difference, "p_interaction": c.p_interaction, "verdict": c.verdict,
            })  # fmt: skip
    return Fit(
        experiment=f"decompose/{task.name}",
        answer=_answer(rows),
        tables={"ranks": rows},
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**about, n=n, replicates=replicates, rank=str(rank)),
        subspaces=subspaces,
        sums=sums,
        heads=tuple(chosen),
        space=space,
        chat=task.chat,
    )


def _answer(rows: list[dict[str, Any]]) -> str:
    counts = {v: sum(row["verdict"] == v for row in rows) for v in ("interaction", "mean only", "not above null")}
    return (
        f"Of {len(rows)} contrasts at heads, {counts['interaction']} depend on the query, {counts['mean only']} are "
        f"the mean only and {counts['not above null']} are not above their null."
    )


def _accumulate(
    scope: Scope,
    task: Task,
    contrast: Contrast,
    heads: list[Head],
    n: int,
    space: Space,
    batch_size: int,
    replicates: int,
    seed: int,
    about: dict[str, Any],
    path: Path | None,
    progress: bool | None,
) -> Sums:
    units = task.fit(contrast.name, n)
    device = scope.device
    sums = Sums(
        Moments(
            heads, [contrast.name], scope.d_head, group_size=scope.group_size,
            nulls=("sign_flip" if contrast.paired else "label_permutation", "query_shuffle"),
            replicates=replicates, seed=seed, about=about, device=device,
        ),
        Covariance(len(heads), scope.d_head, device),
        Covariance(len(heads), scope.d_head, device),
    )  # fmt: skip
    done = sums.load(path) if path is not None and path.exists() else 0
    total = len(batches_of(units, batch_size))
    stream = capture_units(
        scope,
        units,
        heads,
        space=space,
        batch_size=batch_size,
        chat=task.chat,
        rest=False,
        first=done,
        progress=progress,
    )
    for count, batch in enumerate(stream, done + 1):
        q, k, labels, prompts = contrast_rows(batch, contrast)
        sums.moments.update(q, k, {contrast.name: labels}, prompts=prompts)
        captured = batch.captured
        sums.cov_q.update(captured.q)
        own = captured.k[:, captured.kv_of_head].transpose(1, 2)  # b k h d
        sums.cov_k.update(own[captured.key_mask])
        if path is not None and (count % _SAVE_EVERY == 0 or count >= total):
            sums.save(path, count)
    return sums
