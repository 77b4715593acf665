"""What `decompose` gives: subspaces of every contrast and head with their controls, made from finished sums; and
`load`, which reads it back from its folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, overload

from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.fit_folder import (
    ContrastSums,
    check_job,
    read_job,
    read_sums,
    sums_file,
    task_file,
    task_of,
)
from qkscope.analyses.prompts import check_same_model, made_from, with_notes
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_call, checked_class
from qkscope.maths.controls import FEW_UNITS, VERDICTS, Controls, Verdict, run_controls
from qkscope.maths.subspace import Rank, Subspace
from qkscope.maths.sums import Center
from qkscope.runs.result import Result, provenance, write_result
from qkscope.tasks.task import Task

_SHOWN_SPECTRUM = 16  # singular values, at the least
_NAMED = 4  # heads in a sentence


@checked_class
@dataclass(frozen=True)
class Fit(Result):
    """Subspaces of every contrast and head: ``fit["lexical", "L18H6"]``."""

    subspaces: Mapping[tuple[str, Head], Subspace] = field(default_factory=dict)
    sums: Mapping[str, ContrastSums] = field(default_factory=dict)
    heads: tuple[Head, ...] = ()
    space: Space = "post_rope"
    chat: bool = False
    words: tuple[str, ...] = ()  # the vocabulary that its task draws from, where there is one
    kept_in: Path | None = None  # the folder that it was read from or written to, with a copy of the task's file

    def __getitem__(self, which: tuple[str, str | Head]) -> Subspace:
        if not isinstance(which, tuple) or len(which) != 2 or not isinstance(which[0], str):
            raise BadInput(f"a fit is asked for a contrast and a head, as fit['lexical', 'L18H6'], but got {which!r}.")
        contrast, head = which[0], Head.parse(which[1])
        if (contrast, head) not in self.subspaces:
            there = f"{', '.join(self.contrasts)} at {', '.join(map(str, self.heads))}"
            raise BadInput(f"nothing was fitted for {contrast!r} at {head}: there is {there}.")
        return self.subspaces[contrast, head]

    def __iter__(self) -> Iterator[tuple[str, Head]]:
        return iter(self.subspaces)

    @property
    def contrasts(self) -> list[str]:
        """Names of the fitted contrasts."""
        return list(dict.fromkeys(contrast for contrast, _ in self.subspaces))

    def delta(self, contrast: str, head: str | Head) -> Float[Tensor, "d d"]:
        """ΔC as it was fitted, centring included: its SVD is ``fit[contrast, head]``.

        Parameters
        ----------
        contrast : its name.
        head : one of the fitted heads.

        Examples
        --------
        >>> import torch
        >>> from qkscope import Scope, decompose, tasks
        >>> fit = decompose(Scope.load("nano:mixed"), tasks.binding(5), "L1H0", 32, replicates=19, progress=False)
        >>> delta, found = fit.delta("lexical", "L1H0"), fit["lexical", "L1H0"]
        >>> bool(torch.allclose(torch.linalg.svdvals(delta), found.S))
        True
        """
        found = self[contrast, head]
        return (found.U * found.S) @ found.V.mT

    def covariances(self, heads: Sequence[Head], contrasts: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
        """Covariances of the queries and of the keys that some contrasts were fitted on, for each head.

        Parameters
        ----------
        heads : some of the fitted heads.
        contrasts : their names; all that were fitted by default, and where one of them was not.
        """
        chosen = list(self.sums) if contrasts is None or not set(contrasts) <= set(self.sums) else list(contrasts)
        first, *others = (self.sums[name] for name in chosen)
        index = [self.heads.index(head) for head in heads]
        cov_q = first.cov_q.merge(*(s.cov_q for s in others)).matrix()
        cov_k = first.cov_k.merge(*(s.cov_k for s in others)).matrix()
        return cov_q[index].cpu(), cov_k[index].cpu()

    def write(self, folder: str | Path, *, files: Mapping[str, str | bytes] | None = None) -> Path:
        """Write the folder that `decompose` would have written, for `load` and the later verbs.

        Parameters
        ----------
        folder : a new one, or one of the same job.
        files : further files by relative name.
        """
        if not self.subspaces or not self.sums:
            raise BadInput("this fit holds no sums of a whole job: write what decompose or load gave.")
        asked, own = self.provenance["asked"], dict[str, str | bytes](files or {})
        check_job(folder, asked)
        if (source := task_file(asked, self.kept_in)) is not None:
            task_of(asked, source.parent)  # refused where the file is gone, or is another by now
            own[source.name] = source.read_bytes()
        own |= {sums_file(name): sums.to_bytes() for name, sums in self.sums.items()}
        return write_result(self, folder, own)


@overload
def load(folder: str | Path, scope: None = None) -> Result: ...


@overload
def load(folder: str | Path, scope: Scope) -> Fit: ...


@checked_call
def load(folder: str | Path, scope: Scope | None = None) -> Result:
    """Read back a run's folder: the fit of one that `decompose` wrote, and of any the tables.

    Parameters
    ----------
    folder : that a verb or ``write`` of a result wrote.
    scope : the model that a fit was made with; the `Fit` is then the one that `decompose` returned. Refused for other
        weights or another tokenizer. Without it the tables, arrays and claims are read, as a plain `Result`.

    Examples
    --------
    >>> import tempfile
    >>> from qkscope import Scope, decompose, load, tasks
    >>> scope, out = Scope.load("nano:mixed"), tempfile.mkdtemp()
    >>> fit = decompose(scope, tasks.binding(5), "L1H0", 32, replicates=19, out=out, progress=False)
    >>> load(out, scope).table() == fit.table()
    True
    >>> sorted(load(out).tables)
    ['ranks', 'spectrum']
    """
    return Result.read(folder) if scope is None else _load_fit(Path(folder), scope)


def _load_fit(folder: Path, scope: Scope) -> Fit:
    """The fit of a finished folder, as `decompose` returned it."""
    job = read_job(folder)
    check_same_model(job, scope, str(folder))
    task = task_of(job, folder)
    sums = read_sums(folder, job, task, device=scope.device)
    written = Result.read(folder)
    asked: Any = written.provenance.get("asked", {})
    cut = {"rank": asked.get("rank", "energy"), "center": asked.get("center")}
    fit = fit_of(sums, task, made_from(scope, task, job["space"]), **cut)
    kept: Any = {"answer": written.answer, "seconds": written.seconds, "provenance": written.provenance}
    return replace(fit, **kept, kept_in=folder)


def fit_of(
    sums: Mapping[str, ContrastSums],
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
            about={**about, "group_size": moments.group_size},
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
    parted = {name: one.cut for name, one in sums.items() if one.cut}  # batches that memory cut into parts
    return Fit(
        experiment=f"decompose/{task.name}",
        answer=with_notes(_answer(rows, [s.controls.reason for s in subspaces.values() if s.controls]), about),
        tables={"ranks": rows, "spectrum": spectrum},
        model=about["model"],
        seed=some.seed,
        provenance=provenance(
            **about,
            n=some.about["n"],
            heads=[str(head) for head in some.heads],
            contrasts=list(sums),
            batch_size=some.about["batch_size"],
            replicates=some.replicates,
            seed=some.seed,
            rank=rank,
            **({"center": dict(center)} if center else {}),
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
    kinds: dict[Verdict, str] = {
        "interaction": "what tells the keys apart depends on what is asked",
        "mean only": "the keys differ, and that it depends on what is asked is not shown (which a weak one would not)",
        "not above null": "nothing is above chance",
    }
    found = [f"in {counts[v]} {words} ({_named(rows, v)})" for v, words in kinds.items() if counts[v]]
    said = f"Of {len(rows)} contrasts at heads, {'; '.join(found)}." if found else f"{len(rows)} contrasts at heads."
    if counts["untested"]:
        why = next(reason for reason in reasons if reason).removeprefix("untested: ")
        said += f" {counts['untested']} could not be tested ({why})."
    tested = [row for row in rows if row["verdict"] != "untested"]
    few = {row["contrast"]: row["units"] for row in tested if row["units"] < FEW_UNITS}
    for name, units in few.items():
        said += f" {name} rests on {units} different words or prompts, which is few."
    return said


def _named(rows: list[dict[str, Any]], verdict: str) -> str:
    """The contrasts with a verdict, and a few of their heads."""
    heads: dict[str, list[str]] = {}
    for row in rows:
        if row["verdict"] == verdict:
            heads.setdefault(row["contrast"], []).append(row["head"])
    return "; ".join(
        f"{name} at {', '.join(own[:_NAMED])}" + (f" and {len(own) - _NAMED} more" if len(own) > _NAMED else "")
        for name, own in heads.items()
    )
