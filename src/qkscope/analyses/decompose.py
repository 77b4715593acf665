"""The features of chosen heads: one pass over each contrast's prompts, with the nulls and the baselines beside it.

With an output folder the sums are saved every few batches together with the number of batches they hold, so a run that
dies goes on from there; the list of batches is fixed, so it ends where it would have ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from qkscope.analyses.find import job
from qkscope.analyses.units import batches_of, capture_units, contrast_rows, units_hash
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.maths.baselines import Covariance
from qkscope.maths.controls import Controls, run_controls
from qkscope.maths.moments import Moments
from qkscope.maths.store import read_tensors, write_tensors
from qkscope.maths.subspace import Subspace
from qkscope.maths.svd import energy_rank
from qkscope.result import Result, provenance
from qkscope.tasks.task import Contrast, Task

log = logging.getLogger(__name__)

Rank = int | Literal["energy", "null"]
Center = Literal["none", "query", "both"]

_SAVE_EVERY = 8  # batches
_FEW_TO_SHUFFLE = 4  # units in a batch
_ALPHA = 0.05
_ROUNDING = 1e-5  # of float32 queries and keys, with room


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
        theirs = manifest.get("moments", {})
        for name, value in self.moments.manifest().items():
            if theirs.get(name) != value:
                parts = (
                    [part for part in value if theirs.get(name, {}).get(part) != value[part]] if name == "about" else []
                )
                raise BadInput(
                    f"{path} was made by another job ({', '.join(parts) or name} differs): use another folder."
                )
        state = {**self.moments.tensors(), "cov_q": self.cov_q.sums, "cov_k": self.cov_k.sums}
        for name, tensor in state.items():
            if name not in tensors or tensors[name].shape != tensor.shape:
                raise BadInput(f"{path} is damaged: {name} is missing or of another shape; use another folder.")
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
    rank: Rank | Mapping[str, Rank] = "energy",
    center: Mapping[str, Center] | None = None,
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
    rank : how subspaces are cut: the paper's 99% ``energy``, above the ``null`` (of the query shuffle, where the
        contrast is centred), a number, or one of these per contrast. One direction is kept also where there is none.
    center : overrides a contrast's own centring.
    out : folder for the sums; a run that died there is taken up where it stopped.
    """
    start = time.perf_counter()
    chosen = [scope.check(head) for head in parse_heads(heads)]
    names = checked_contrasts(task, contrasts)
    _check_options(names, rank, center or {}, scope.d_head)
    subspaces: dict[tuple[str, Head], Subspace] = {}
    sums: dict[str, Sums] = {}
    rows: list[dict[str, Any]] = []
    about = job(scope, task, space)
    for name in names:
        contrast = task.contrasts[name]
        path = None if out is None else sums_file(out, name)
        sums[name] = _accumulate(
            scope, task, contrast, chosen, n, space, batch_size, replicates, seed, {**about, "n": n}, path, progress
        )
        moments = sums[name].moments
        centring = (center or {}).get(name, contrast.center)
        controls = {head: _judged(c, centring) for head, c in run_controls(moments, name).items()}
        cut: Rank = rank.get(name, "energy") if isinstance(rank, Mapping) else rank
        found = Subspace.from_deltas(
            moments.delta(name, centring), chosen, scope.d_head, contrast=name, controls=controls, about=about
        )
        found = {head: whole.cut(_rank(cut, whole, centring)) for head, whole in found.items()}
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


def checked_contrasts(task: Task, contrasts: Sequence[str] | None) -> list[str]:
    """The contrasts to fit, all by default; an unknown one is refused before the model runs."""
    names = list(task.contrasts) if contrasts is None else list(contrasts)
    for i, name in enumerate(names):
        task.fit(name, 1)
        if name in names[:i]:
            raise BadInput(f"contrast {name!r} is named twice: name each once.")
    if not names:
        raise BadInput(f"no contrast was named: there is {', '.join(task.contrasts)}.")
    return names


def sums_file(folder: str | Path, contrast: str) -> Path:
    """Where a contrast's sums are kept. A name is not a path: it may hold anything a user calls a contrast."""
    return Path(folder) / f"{quote(contrast, safe='')}.safetensors"


def _check_options(names: list[str], rank: Any, center: Mapping[str, str], d_head: int) -> None:
    ranks = dict(rank) if isinstance(rank, Mapping) else {}
    for what, given in (("rank", ranks), ("center", center)):
        for name in given:
            if name not in names:
                raise BadInput(f"{what} is given for {name!r}, which is not fitted: there is {', '.join(names)}.")
    for value in ranks.values() if ranks else [rank]:
        if value not in ("energy", "null") and (type(value) is not int or not 1 <= value <= d_head):
            raise BadInput(f"rank is 'energy', 'null' or a number from 1 to {d_head}, but got {value!r}.")
    for value in center.values():
        if value not in ("none", "query", "both"):
            raise BadInput(f"center is one of none, query, both, but got {value!r}.")


def _judged(controls: Controls, centring: Center) -> Controls:
    """Of a centred contrast, what depends on the query is tested by itself.

    The difference as it is also holds the mean part, whose noise can hide an interaction that centring lays bare.
    """
    if centring == "none" or controls.q_interaction > _ALPHA:
        return controls
    return replace(controls, verdict="interaction")


def _rank(cut: Rank, whole: Subspace, centring: Center) -> int:
    """How many directions to keep: one at least, also of a contrast that is nothing; the verdict says so."""
    if isinstance(cut, int):
        return cut
    assert whole.controls is not None
    if cut == "energy":
        left = float(whole.S[0]) > _ROUNDING * whole.controls.spectrum[0]  # else centring has left but rounding errors
        return max(int(energy_rank(whole.S)), 1) if left else 1
    # labels dealt out again are the null of ΔC as it is; of what centring leaves, shuffled queries are
    return max(whole.controls.null_rank if centring == "none" else whole.controls.interaction_rank, 1)


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
    batches = batches_of(units, batch_size)
    if max(map(len, batches)) < _FEW_TO_SHUFFLE < len(units):
        log.warning("Queries are shuffled within a batch, and %d a batch are few: raise batch_size to see whether %s "
                    "depends on the query.", max(map(len, batches)), contrast.name)  # fmt: skip
    about = {**about, "batch_size": batch_size, "examples": units_hash(units)}
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
    ends = {units_done: count for count, units_done in enumerate(accumulate(map(len, batches)), 1)}
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
        progress=progress,
    )
    for batch in stream:
        q, k, labels, prompts = contrast_rows(batch, contrast)
        sums.moments.update(q, k, {contrast.name: labels}, prompts=prompts)
        captured = batch.captured
        sums.cov_q.update(captured.q)
        own = captured.k[:, captured.kv_of_head].transpose(1, 2)  # b k h d
        sums.cov_k.update(own[captured.key_mask])
        units_done += len(batch.unit.unique())
        count = ends.get(units_done, 0)  # 0: in the middle of a batch that memory cut into parts
        if path is not None and count and (count % _SAVE_EVERY == 0 or count == len(batches)):
            sums.save(path, count)
    return sums
