"""Fits, as `decompose` gives them: sums of each contrast, subspaces with controls, a folder.

A folder holds what was asked (in its manifest), the sums, and a copy of the task's file. Subspaces
are not stored, but made again from the sums by `load_fit`: they are cheap, and then they cannot
disagree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Scope, tasks
from qkscope.checking import checked_call, checked_class
from qkscope.findings.task_batches import check_same_model, made_from, units_hash, with_notes
from qkscope.heads import Head
from qkscope.model.spaces import Space
from qkscope.results.folder import MANIFEST, WORK, check_unchanged, file_name, read_run
from qkscope.results.result import Result, provenance, write_result
from qkscope.sums.bases import checked_svd
from qkscope.sums.controls import FEW_UNITS, FEWEST, Controls, Gain, run_controls
from qkscope.sums.moments import Covariance, Moments
from qkscope.sums.subspace import Subspace, rank_of
from qkscope.texts.task import Task

_SHOWN_SPECTRUM = 16  # singular values, at the least
_NAMED = 4  # heads in a sentence
_SHARE = "query and key share a feature"
_KINDS = {
    "interaction": (f"{_SHARE} that adds more to the logit than at heads at chance on the task"),
    "not specific": f"{_SHARE}, but it adds no more to the logit than at heads at chance",
    "no reference": f"{_SHARE}, but fewer than {FEWEST} heads are at chance, to hold it against",
    "mean only": (
        "the keys differ, but no dependence on the query is shown (a weak one can be missed)"
    ),
    "not above null": "nothing is above chance",
}
#: What a fit was asked for, as its manifest says it.
_JOB = (
    "model",
    "weights",
    "dtype",
    "tokenizer",
    "task",
    "asked",
    "task_seed",
    "heads",
    "n",
    "contrasts",
    "space",
    "batch_size",
    "replicates",
    "seed",
)


class ContrastSums(Moments):
    """Sums of one contrast's pass: its moments, and the baselines' covariances."""

    kind = "sums"

    def __init__(self, *args: Any, device: torch.device | str = "cpu", **options: Any) -> None:
        super().__init__(*args, device=device, **options)
        self.cov_q = Covariance(len(self.heads), self.d_head, device)
        self.cov_k = Covariance(len(self.heads), self.d_head, device)

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        return {**super().tensors(), "cov_q": self.cov_q.sums, "cov_k": self.cov_k.sums}


@checked_class
@dataclass(frozen=True)
class Fit(Result):
    """Subspaces of every contrast and head: ``fit["lexical", "L18H6"]``."""

    subspaces: Mapping[tuple[str, Head], Subspace] = field(default_factory=dict)
    sums: Mapping[str, ContrastSums] = field(default_factory=dict)
    heads: tuple[Head, ...] = ()
    space: Space = "post_rope"
    chat: bool = False
    kept_in: Path | None = None  # the folder of its sums, with a copy of the task's file

    def __getitem__(self, which: tuple[str, str | Head]) -> Subspace:
        contrast = which[0]
        head = Head.parse(which[1])
        if (contrast, head) not in self.subspaces:
            contrasts = ", ".join(self.contrasts)
            fitted = f"{contrasts} at {', '.join(map(str, self.heads))}"
            raise BadInput(f"nothing was fitted for {contrast!r} at {head}: there is {fitted}.")
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
        >>> from qkscope import Scope, decompose, tasks
        >>> scope, task = Scope.load("nano:mixed"), tasks.binding(5)
        >>> fit = decompose(scope, task, "L1H0", 32, replicates=19, progress=False)
        >>> delta = fit.delta("lexical", "L1H0")
        >>> bool(torch.allclose(torch.linalg.svdvals(delta), fit["lexical", "L1H0"].S))
        True
        """
        subspace = self[contrast, head]
        return (subspace.U * subspace.S) @ subspace.V.mT

    def covariances(
        self, heads: Sequence[Head], contrasts: Sequence[str] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Covariances of queries and of keys that some contrasts were fitted on, for each head.

        Parameters
        ----------
        heads : some of the fitted heads.
        contrasts : their names; all that were fitted by default, and where one of them was not.
        """
        if contrasts is None or not set(contrasts) <= set(self.sums):
            contrasts = list(self.sums)
        chosen = [self.sums[name] for name in contrasts]
        first, *others = chosen
        of_queries = first.cov_q.merge(*(sums.cov_q for sums in others))
        of_keys = first.cov_k.merge(*(sums.cov_k for sums in others))
        index = [self.heads.index(head) for head in heads]
        cov_q = of_queries.matrix()[index]
        cov_k = of_keys.matrix()[index]
        return cov_q.cpu(), cov_k.cpu()

    def write(self, folder: str | Path, *, files: Mapping[str, str | bytes] | None = None) -> Path:
        """Write the folder that `decompose` would have written, for `load_fit` and the later verbs.

        Parameters
        ----------
        folder : a new one, or one of the same job.
        files : further files by relative name.
        """
        if not self.sums:
            raise BadInput(
                "this fit holds no sums of a whole job: write what decompose or load_fit gave."
            )
        job = self.provenance["asked"]
        contents = dict[str, str | bytes](files or {})
        check_job(folder, job)
        if job["task"] not in tasks.BUILT_IN and "file" in job["asked"]:
            source = Path(job["asked"]["file"])
            if self.kept_in is not None and (self.kept_in / source.name).is_file():
                source = self.kept_in / source.name
            task_of(job, source.parent)  # refused where the file is gone, or is another by now
            contents[source.name] = source.read_bytes()
        for name, sums in self.sums.items():
            contents[sums_file(name)] = sums.to_bytes()
        return write_result(self, folder, contents)


@checked_call
def load_fit(folder: str | Path, scope: Scope | None = None) -> Any:
    """Read back a run's folder: the fit of one that `decompose` wrote, and of any the tables.

    Parameters
    ----------
    folder : that a verb or ``write`` of a result wrote.
    scope : the model that a fit was made with; the `Fit` is then the one that `decompose` returned.
        Refused for other weights or another tokenizer. Without it the tables, arrays and claims are
        read, as a plain `Result`.

    Examples
    --------
    >>> import tempfile
    >>> from qkscope import Scope, decompose, tasks
    >>> from qkscope.findings.fit import load_fit
    >>> scope, out = Scope.load("nano:mixed"), tempfile.mkdtemp()
    >>> fit = decompose(scope, tasks.binding(5), "L1H0", 32, replicates=19, out=out, progress=False)
    >>> load_fit(out, scope).table() == fit.table()
    True
    >>> sorted(load_fit(out).tables)
    ['ranks', 'spectrum']
    """
    folder = Path(folder)
    if scope is None:
        return Result.read(folder)
    job = read_job(folder)
    check_same_model(job, scope, str(folder))
    task = task_of(job, folder)
    sums = read_sums(folder, job, task, scope.device)
    written = Result.read(folder)
    about = made_from(scope, task, job["space"])
    rank = job.get("rank", "energy")
    fit = fit_of(sums, task, about, rank=rank, center=job.get("center"))
    kept: Any = {
        "answer": written.answer,
        "seconds": written.seconds,
        "provenance": written.provenance,
    }
    return replace(fit, **kept, kept_in=folder)


def fit_of(
    sums: Mapping[str, ContrastSums],
    task: Task,
    about: Mapping[str, Any],
    *,
    rank: Any = "energy",
    center: Any = None,
) -> Fit:
    """Make subspaces and their controls from finished sums: no model is needed any more."""
    subspaces: dict[tuple[str, Head], Subspace] = {}
    rows: list[dict[str, Any]] = []
    spectrum: list[dict[str, Any]] = []
    for name, moments in sums.items():
        centring = (center or {}).get(name, task.contrasts[name].center)
        cut = rank.get(name, "energy") if isinstance(rank, Mapping) else rank
        for subspace in _subspaces(name, moments, centring, cut, about):
            assert subspace.head is not None
            assert subspace.controls is not None
            subspaces[name, subspace.head] = subspace
            rows.append(_rank_row(subspace, subspace.controls))
            spectrum += _spectrum_rows(subspace, subspace.controls)
    first = next(iter(sums.values()))
    asked = {
        **about,
        "n": first.about["n"],
        "heads": [str(head) for head in first.heads],
        "contrasts": list(sums),
        "batch_size": first.about["batch_size"],
        "replicates": first.replicates,
        "seed": first.seed,
        "rank": rank,
    }
    if center:
        asked["center"] = dict(center)
    tables = {"ranks": rows, "spectrum": spectrum}
    answer = with_notes(_answer(rows), about)
    return Fit(
        f"decompose/{task.name}",
        tables,
        answer=answer,
        model=about["model"],
        seed=first.seed,
        provenance=provenance(**asked),
        subspaces=subspaces,
        sums=sums,
        heads=tuple(first.heads),
        space=about["space"],
        chat=task.chat,
    )


def _subspaces(
    name: str, moments: ContrastSums, centring: Any, cut: Any, about: Mapping[str, Any]
) -> Iterator[Subspace]:
    """The subspace of one contrast at each head, with its controls."""
    gains = {head: Gain(*gain) for head, gain in moments.about["gains"].items()}
    controls = run_controls(moments, name, center=centring, gains=gains)
    cov_k = moments.cov_k.matrix()
    sizes = moments.sizes(name)
    made_of = {**about, "group_size": moments.group_size}
    u, s, v = checked_svd(moments.delta(name, centring))
    for i, head in enumerate(moments.heads):
        of_head = controls[head]
        kept = rank_of(s[i], cut, of_head, float(sizes[i]))
        kept = max(kept, 1)  # one where nothing is, as the verdict says
        yield Subspace(
            U=u[i],
            S=s[i],
            V=v[i],
            rank=kept,
            head=head,
            contrast=name,
            controls=of_head,
            about=made_of,
            cov_k=cov_k[i],
        )


def _rank_row(subspace: Subspace, controls: Controls) -> dict[str, Any]:
    """The row of the table ``ranks``: what was kept and detected, and all numbers of controls."""
    row = {
        "head": str(subspace.head),
        "contrast": subspace.contrast,
        "rank": subspace.rank,
        "detected": controls.detected,
    }
    for column, value in vars(controls).items():
        if not isinstance(value, tuple):
            row[column] = value
    return row


def _spectrum_rows(subspace: Subspace, controls: Controls) -> list[dict[str, Any]]:
    """Singular values beside those of the null: a few more than were kept or detected."""
    shown = max(subspace.rank + 3, controls.detected + 3, _SHOWN_SPECTRUM)
    values = zip_longest(controls.spectrum, controls.null_median, controls.null_high)
    rows = []
    for i, (value, median, high) in enumerate(islice(values, shown)):
        row = {
            "head": str(subspace.head),
            "contrast": subspace.contrast,
            "component": i + 1,
            "value": value,
            "null_median": median,
            "null_high": high,
            "kept": i < subspace.rank,
        }
        rows.append(row)
    return rows


def _answer(rows: list[dict[str, Any]]) -> str:
    """Say how many contrasts got which verdict, where, and what could not be tested."""
    parts = []
    for verdict, words in _KINDS.items():
        having = [row for row in rows if row["verdict"] == verdict]
        if having:
            places = _places(having)
            parts.append(f"in {len(having)} {words} ({places})")
    answer = f"{len(rows)} contrasts."
    if parts:
        listed = "; ".join(parts)
        answer = f"Of {len(rows)} contrasts, {listed}."
    tested = [row for row in rows if row["verdict"] != "untested"]
    untested = len(rows) - len(tested)
    if untested:
        reason = next(row["reason"] for row in rows if row["reason"])
        why = reason.removeprefix("untested: ")
        answer += f" {untested} could not be tested ({why})."
    few = {}
    for row in tested:
        if row["units"] < FEW_UNITS:
            few[row["contrast"]] = row["units"]
    for name, n in few.items():
        answer += f" {name} rests on {n} different words or prompts, which is few."
    return answer


def _places(rows: Sequence[Mapping[str, Any]]) -> str:
    """List the heads of each contrast, the first few by name."""
    parts = []
    for name in dict.fromkeys(row["contrast"] for row in rows):
        heads = [row["head"] for row in rows if row["contrast"] == name]
        listed = ", ".join(heads[:_NAMED])
        if len(heads) > _NAMED:
            listed += f" and {len(heads) - _NAMED} more"
        parts.append(f"{name} at {listed}")
    return "; ".join(parts)


# ---------------------------------------------------------------------- its folder


def sums_file(contrast: str) -> str:
    """The name of a contrast's file; what a user calls a contrast may hold anything."""
    return f"{file_name(contrast)}.safetensors"


def check_job(out: str | Path | None, asked: Mapping[str, Any]) -> None:
    """Refuse a folder that holds a fit of anything else, by what is known before long work."""
    if out is None or not (Path(out) / MANIFEST).exists():
        return
    written = read_job(out)
    of_job = {name: asked[name] for name in asked if name in _JOB}
    job = json.loads(json.dumps(of_job))
    differs = [name for name in job if written[name] != job[name]]
    if differs:
        raise BadInput(
            f"{out} holds another fit ({', '.join(differs)} differ): name another folder."
        )


def read_job(folder: str | Path) -> dict[str, Any]:
    """Read what the fit in a folder was asked for."""
    folder = Path(folder)
    if (folder / WORK).is_dir() and not (folder / MANIFEST).is_file():
        raise BadInput(
            f"{folder} is not finished:"
            " run the same decompose command again, it goes on from there."
        )
    manifest = read_run(folder)
    if not manifest.get("asked", {}).keys() >= set(_JOB):
        raise BadInput(
            f"{folder} is not a folder that decompose wrote:"
            f" run qkscope decompose … --out {folder} first."
        )
    return dict(manifest["asked"])


def read_sums(
    folder: Path, job: Mapping[str, Any], task: Task, device: torch.device
) -> dict[str, ContrastSums]:
    """Read the sums of every contrast of a folder's fit."""
    sums = {}
    manifest = read_run(folder)
    for name in checked_contrasts(task, job["contrasts"]):
        path = folder / sums_file(name)
        if not path.is_file():
            raise BadInput(
                f"{path} is missing, the sums that {folder} is made of:"
                " run decompose again to make it."
            )
        check_unchanged(folder, path.name, manifest)
        sums[name] = ContrastSums.load(path, device=device)
        drawn = units_hash(task.fit(name, job["n"]))
        if sums[name].about.get("examples") != drawn:
            raise BadInput(
                f"{folder} was fitted on other prompts of {name} than are drawn now:"
                " fit in another folder."
            )
    return sums


def task_of(job: Mapping[str, Any], folder: str | Path) -> Task:
    """The task that a fit folder was made from, made again; of a file, the folder keeps a copy."""
    folder = Path(folder)
    asked = dict(job["asked"])
    seed = job["task_seed"]
    if job["task"] in tasks.BUILT_IN:
        return tasks.BUILT_IN[job["task"]](seed=seed, **asked)
    kept = folder / Path(asked["file"]).name
    task = tasks.from_jsonl(kept, seed=seed, chat=asked["chat"], center=asked["center"])
    if task.asked["hash"] != asked.get("hash"):
        raise BadInput(f"{kept} has changed since {folder} was made from it: run decompose again.")
    return replace(task, asked=asked)  # its sums know it by the name it was given


def checked_contrasts(task: Task, contrasts: Sequence[str] | None) -> list[str]:
    """The contrasts to fit, all by default; an unknown one is refused before the model runs."""
    names = list(task.contrasts) if contrasts is None else list(contrasts)
    if not names or len(set(names)) < len(names):
        known = ", ".join(task.contrasts)
        raise BadInput(
            f"no contrast, or one that is named twice: there is {known}, but got {names}."
        )
    for name in names:
        task.fit(name, 1)
    return names
