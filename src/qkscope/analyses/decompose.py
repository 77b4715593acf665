"""The features of chosen heads: one pass over each contrast's prompts, with the nulls and the baselines beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from qkscope.analyses.find import check_scope_and_task, job, with_notes
from qkscope.analyses.sums import Shard, Sums, accumulate, sums_file
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import checked_call, checked_class
from qkscope.maths.controls import FEW_UNITS, VERDICTS, Controls, run_controls
from qkscope.maths.subspace import Subspace
from qkscope.maths.svd import energy_rank
from qkscope.runs.folder import check_writable
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.tasks.task import Task

Rank = int | Literal["energy", "null"]
Center = Literal["none", "query", "both"]
MOST_REPLICATES = 100_000
_SHOWN_SPECTRUM = 16  # singular values, at the least


@checked_class
@dataclass(frozen=True)
class Fit(Result):
    """Subspaces of every contrast and head: ``fit["lexical", "L18H6"]``."""

    comes_from = "as decompose gives"

    subspaces: Mapping[tuple[str, Head], Subspace] = field(default_factory=dict)
    sums: Mapping[str, Sums] = field(default_factory=dict)
    heads: tuple[Head, ...] = ()
    space: Space = "post_rope"
    chat: bool = False

    def __getitem__(self, which: tuple[str, str | Head]) -> Subspace:
        if not isinstance(which, tuple) or len(which) != 2 or not isinstance(which[0], str):
            raise BadInput(f"a fit is asked for a contrast and a head, as fit['lexical', 'L18H6'], but got {which!r}.")
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


@checked_call
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
    rank : how subspaces are cut: the paper's 99% ``energy``, the directions detected against the ``null`` of the
        matrix that the contrast's centring gives, a number, or one of these per contrast. One direction is kept also
        where there is none.
    replicates : of each null; they are pooled over heads, so that 199 do for any number of them.
    center : overrides a contrast's own centring.
    out : folder for the sums; a run that died there is taken up where it stopped.
    """
    start = time.perf_counter()
    check_scope_and_task(scope, task)
    if out is not None and not Path(out).is_dir():  # a finished fit may well be read-only
        check_writable(Path(out))
    chosen = [scope.check(head) for head in parse_heads(heads)]
    names = checked_contrasts(task, contrasts)
    _check_options(names, rank, center or {}, scope.d_head)
    check_replicates(replicates)
    about = job(scope, task, space)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    sums = collect(
        scope, task, chosen, n, contrasts=names, space=space, batch_size=batch_size, replicates=replicates, seed=seed,
        out=out, progress=progress,
    )  # fmt: skip
    fit = fit_of(sums, task, about, rank=rank, center=center)
    return replace(fit, seed=seed, seconds=time.perf_counter() - start)


def collect(
    scope: Scope,
    task: Task,
    heads: Sequence[Head],
    n: int,
    *,
    contrasts: Sequence[str],
    space: Space = "post_rope",
    batch_size: int = 32,
    replicates: int = 199,
    seed: int = 0,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool | None = None,
) -> dict[str, Sums]:
    """The sums of every contrast, as in `decompose`; of a shard ``(i, n)``, over every n-th batch from the i-th on."""
    about = {**job(scope, task, space), "n": n}
    return {
        name: accumulate(
            scope, task, task.contrasts[name], heads, n, space, batch_size, replicates, seed, about,
            None if out is None else sums_file(out, name), shard, progress,
        )
        for name in contrasts
    }  # fmt: skip


def fit_of(
    sums: Mapping[str, Sums],
    task: Task,
    about: Mapping[str, Any],
    *,
    rank: Rank | Mapping[str, Rank] = "energy",
    center: Mapping[str, Center] | None = None,
) -> Fit:
    """Subspaces and their controls from finished sums: no model is needed any more."""
    subspaces: dict[tuple[str, Head], Subspace] = {}
    rows: list[dict[str, Any]] = []
    spectrum: list[dict[str, Any]] = []
    for name, one in sums.items():
        contrast, moments = task.contrasts[name], one.moments
        centring = (center or {}).get(name, contrast.center)
        controls = run_controls(moments, name, center=centring)
        sizes = moments.sizes(name).tolist()
        cut: Rank = rank.get(name, "energy") if isinstance(rank, Mapping) else rank
        found = Subspace.from_deltas(
            moments.delta(name, centring), moments.heads, moments.d_head, contrast=name, controls=controls, about=about
        )
        found = {
            head: replace(whole, rank=_rank(cut, whole, size), cov_k=cov_k)
            for (head, whole), cov_k, size in zip(found.items(), one.cov_k.matrix(), sizes, strict=True)
        }
        for head, subspace in found.items():
            subspaces[name, head] = subspace
            c = controls[head]
            rows.append({
                "head": str(head), "contrast": name, "center": centring, "rank": subspace.rank,
                "detected": c.detected, "rank_99": c.energy_rank, "rank_null": c.null_rank,
                "rank_99_centred": c.centred_energy_rank, "interaction_rank": c.interaction_rank, "rank_cv": c.cv_rank,
                "mean_dominance": c.mean_dominance, "p_difference": c.p_difference, "p_interaction": c.p_interaction,
                "units": c.units, "verdict": c.verdict,
            })  # fmt: skip
            spectrum += _spectrum(subspace, c)
    some = next(iter(sums.values())).moments
    parted = {name: len(one.cut) for name, one in sums.items() if one.cut}  # batches that memory cut into parts
    return Fit(
        experiment=f"decompose/{task.name}",
        answer=with_notes(_answer(rows, [s.controls.reason for s in subspaces.values() if s.controls]), about),
        tables={"ranks": rows, "spectrum": spectrum},
        model=about["model"],
        seed=some.seed,
        provenance=provenance(
            **about,
            n=some.about["n"],
            replicates=some.replicates,
            rank=str(rank),
            **({"cut": parted} if parted else {}),
        ),
        subspaces=subspaces,
        sums=sums,
        heads=tuple(some.heads),
        space=about["space"],
        chat=task.chat,
    )


def _spectrum(subspace: Subspace, controls: Controls) -> list[dict[str, Any]]:
    """Singular values beside their null, a few further than were kept or detected."""
    shown = max(subspace.rank + 3, controls.detected + 3, _SHOWN_SPECTRUM)
    return [
        {
            "head": str(subspace.head), "contrast": subspace.contrast, "component": i + 1, "value": value,
            "null_median": median, "null_high": high, "kept": i < subspace.rank,
        }
        for i, (value, median, high) in enumerate(
            zip_longest(controls.spectrum[:shown], controls.null_median[:shown], controls.null_high[:shown])
        )
    ]  # fmt: skip


def checked_contrasts(task: Task, contrasts: Sequence[str] | None) -> list[str]:
    """The contrasts to fit, all by default; an unknown one is refused before the model runs."""
    if isinstance(contrasts, str):
        raise BadInput(f"contrasts are a list of names, as [{contrasts!r}], but got one name.")
    names = list(task.contrasts) if contrasts is None else list(contrasts)
    for i, name in enumerate(names):
        task.fit(name, 1)
        if name in names[:i]:
            raise BadInput(f"contrast {name!r} is named twice: name each once.")
    if not names:
        raise BadInput(f"no contrast was named: there is {', '.join(task.contrasts)}.")
    return names


def check_replicates(replicates: int) -> None:
    """A null needs some, and no one needs a million of them."""
    if type(replicates) is not int or not 1 <= replicates <= MOST_REPLICATES:
        many = f", and {MOST_REPLICATES:,} at most" if type(replicates) is int and replicates > 0 else ""
        raise BadInput(f"a null needs replicates, but got {replicates!r}: take 199 or more{many}.")


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


def _rank(cut: Rank, whole: Subspace, size: float) -> int:
    """How many directions to keep: one at least, also of a contrast that is nothing; the verdict says so."""
    if isinstance(cut, int):
        return cut
    assert whole.controls is not None
    return max(int(energy_rank(whole.S, size=size)) if cut == "energy" else whole.controls.detected, 1)


def _answer(rows: list[dict[str, Any]], reasons: list[str]) -> str:
    counts = {v: sum(row["verdict"] == v for row in rows) for v in VERDICTS}
    said = (
        f"Of {len(rows)} contrasts at heads, {counts['interaction']} depend on the query, {counts['mean only']} are "
        f"the mean only and {counts['not above null']} are not above their null."
    )
    if counts["untested"]:
        why = next(reason for reason in reasons if reason).removeprefix("untested: ")
        said += f" {counts['untested']} could not be tested ({why})."
    tested = [row for row in rows if row["verdict"] != "untested"]
    few = {row["contrast"]: row["units"] for row in tested if row["units"] < FEW_UNITS}
    for name, units in few.items():
        said += f" {name} rests on {units} different words or prompts, which is few."
    return said
