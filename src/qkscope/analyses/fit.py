"""What `decompose` gives: subspaces of every contrast and head with their controls, made from finished sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from qkscope.analyses.about import with_notes
from qkscope.analyses.sums import Sums
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_class
from qkscope.maths.controls import FEW_UNITS, VERDICTS, Controls, run_controls
from qkscope.maths.subspace import Rank, Subspace
from qkscope.maths.sums import Center
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.tasks.task import Task

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
    words: tuple[str, ...] = ()  # the vocabulary that its task draws from, where there is one

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
        cut: Rank = rank.get(name, "energy") if isinstance(rank, Mapping) else rank
        found = Subspace.from_deltas(  # one direction is kept also of a contrast that is nothing; the verdict says so
            moments.delta(name, centring),
            moments.heads,
            cut,
            least=1,
            contrast=name,
            controls=controls,
            about=about,
            sizes=moments.sizes(name),
            cov_k=one.cov_k.matrix(),
        )
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
        words=tuple(task.asked.get("words", ())),
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
