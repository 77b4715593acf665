"""Which figures there are. A figure is registered where it is defined, by a decorator on the
function that runs it::

    @figure("lee2026", "fig2", "Recovered ranks", cells=whole_grids(("discrete", 16)),
    prepare=train_together) def run(settings: Settings, cells: Cells) -> Result: ...

    @run.drawing
    def draw(result: Result) -> Files: ...

What the decorator is given beyond its own parameters goes to the function, so that one function can
serve several figures and none has to ask for its name. A file is imported when one of its figures
is asked for.
"""

from __future__ import annotations

import ast
import logging
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from qkscope.checking import Count, checked_call
from qkscope.errors import BadInput, check_device
from qkscope.results.claims import NEEDS_DEFAULT, Claim
from qkscope.results.folder import MANIFEST, check_folder, kept_if_stopped, read_run_file
from qkscope.results.progress import doing
from qkscope.results.result import Result, provenance
from qkscope_papers.tables import Row

log = logging.getLogger(__name__)

PRESETS = ("smoke", "default", "paper")
PAPERS = {
    "lee2026": "qkscope_papers.lee2026",
    "franco2026": "qkscope_papers.franco2026",
    "known": "qkscope_bench.known",
}
"""Whose figures there are, and the package in which each has its files."""
_TOO_SMALL = "The preset smoke shows that the figure runs; it is too small to decide."
EMBEDDED = "smollm2-135m"
NANO = "nano:mixed"


@dataclass(frozen=True)
class Settings:
    """What a figure is asked for; ``shared`` is the folder in which figures find each other's work."""

    preset: str
    shared: Path
    seed: int = 0
    device: str = "cpu"
    paper: str = ""
    figure: str = ""
    model: str = EMBEDDED  # of figures that look into a language model
    prompts: str = ""  # of figures that have more than one kind; their first one by default
    n: int | None = None  # prompts of each kind, of figures of language models of the first paper

    def result(
        self,
        answer: str,
        tables: Mapping[str, Sequence[Mapping[str, Any]]],
        claims: Sequence[Claim],
        arrays: Mapping[str, Any] | None = None,
        model: str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Result:
        """What a run found, under the figure's name; ``about`` is for its provenance.

        No claim stands twice. Where it fails at the preset smoke, it needs the default.
        """
        said = [claim.claim for claim in claims]
        assert len(set(said)) == len(said), f"{self.paper}/{self.figure} makes a claim twice"
        name = f"{self.paper}/{self.figure}"
        claims = [marked(name, claim) for claim in claims]
        if self.preset == "smoke":
            claims = [replace(claim, reason=NEEDS_DEFAULT, why=_TOO_SMALL) for claim in claims]
        made = provenance(**{**(about or {}), "figure": self.figure, "preset": self.preset})
        return Result(
            name,
            tables,
            claims,
            arrays or {},
            self.preset,
            model,
            self.seed,
            answer=answer,
            provenance=made,
        )


@cache
def _marks() -> list[dict[str, Any]]:
    with Path(__file__).with_name("marks.toml").open("rb") as file:
        return list(tomllib.load(file)["mark"])


def marked(figure: str, claim: Claim) -> Claim:
    """A claim as a second reader of ``marks.toml`` sees it: ``ours`` rather than the paper's,
    exact, or lenient.
    """
    for mark in _marks():
        if figure in mark["figures"] and mark["claim"] in claim.claim:
            seen: dict[str, Any] = {
                name: mark[name] for name in ("exact", "lenient") if name in mark
            }
            if "ours" in mark and claim.source != "ours":
                was = f"was {claim.source} ({claim.paper}): {mark['ours']}"
                seen |= {"paper": "", "changed": f"{claim.changed} {was}".strip()}
            claim = replace(claim, **seen)
    return claim


Draw = Callable[[Result], dict[str, str | bytes]]


class Experiment:
    """A function that runs figures, and the one that draws what it found."""

    def __init__(self, run: Callable[..., Result]) -> None:
        self.run = run
        self.draw: Draw | None = None

    def __call__(self, settings: Settings, **asked: Any) -> Result:
        """Run it."""
        return self.run(settings, **asked)

    def drawing(self, draw: Draw) -> Draw:
        """Decorator: this draws it."""
        self.draw = draw
        return draw


@dataclass(frozen=True)
class Figure:
    """One figure: what it shows, what runs and draws it, and what its run is asked for beside the
    settings.
    """

    title: str
    experiment: Experiment
    asked: Mapping[str, Any]
    prepare: (
        Callable[[Sequence[Figure], Settings], None] | None
    )  # makes what figures share, in one go
    model: str  # what it looks into where no model is named
    prompts: tuple[str, ...] = ()  # kinds of prompts it can be asked for, the default first

    def run(self, settings: Settings) -> Result:
        """Its numbers."""
        return self.experiment(settings, **self.asked)

    def draw(self, result: Result) -> dict[str, str | bytes]:
        """Its page, and its picture where something draws one: the page shows claims and tables by
        itself.
        """
        from qkscope_papers.figures import styled, with_page

        with styled():
            return self.experiment.draw(result) if self.experiment.draw else with_page(result, {})


_FIGURES: dict[str, dict[str, Figure]] = {paper: {} for paper in PAPERS}


def figure(
    paper: str,
    name: str,
    title: str,
    *,
    prepare: Callable[[Sequence[Figure], Settings], None] | None = None,
    model: str = EMBEDDED,
    prompts: tuple[str, ...] = (),
    **asked: Any,
) -> Callable[[Callable[..., Result] | Experiment], Experiment]:
    """Decorator: this function runs the figure, with ``asked`` beside the settings."""

    def register(run: Callable[..., Result] | Experiment) -> Experiment:
        experiment = run if isinstance(run, Experiment) else Experiment(run)
        _FIGURES[paper][name] = Figure(title, experiment, asked, prepare, model, prompts)
        return experiment

    return register


class Entry(NamedTuple):
    """Where a figure is registered, and what it shows."""

    module: str
    title: str


@cache
def figures_of(paper: str) -> dict[str, Entry]:
    """The figures of a paper by name, in their order.

    They are read off the decorators in the paper's files: to import all of these only to tell a
    name would load transformers with them.
    """
    if paper not in PAPERS:
        raise BadInput(f"there is no paper {paper!r} here: there is {', '.join(PAPERS)}.")
    found = {}
    home = find_spec(PAPERS[paper])
    assert home is not None
    assert home.submodule_search_locations is not None
    for path in Path(home.submodule_search_locations[0]).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("figure"):
                    *_, name, title = (
                        part.value for part in call.args if isinstance(part, ast.Constant)
                    )
                    found[str(name)] = Entry(f"{PAPERS[paper]}.{path.stem}", str(title))
    return {name: found[name] for name in sorted(found, key=_place)}


def figure_of(paper: str, name: str) -> Figure:
    """One figure, ready to run; its file is imported now."""
    import_module(figures_of(paper)[name].module)
    return _FIGURES[paper][name]


def _place(name: str) -> tuple[bool, str, int, str]:
    """``fig9`` before ``fig10``, what is no figure of the paper after all that are."""
    kind, number, part = re.fullmatch(r"(\D+)(\d*)(\D*)", name).groups()  # type: ignore[union-attr]
    return kind != "fig", kind, int(number or 0), part


def list_experiments() -> list[Row]:
    """Every paper and figure, one row each."""
    return [
        {"paper": paper, "figure": name, "shows": entry.title}
        for paper in PAPERS
        for name, entry in figures_of(paper).items()
    ]


@checked_call
def reproduce(
    paper: str,
    figures: Sequence[str],
    *,
    preset: str = "default",
    out: str | Path = "runs",
    seed: int = 0,
    device: str = "cpu",
    model: str | None = None,
    prompts: str | None = None,
    n: Count | None = None,
    again: bool = False,
    show: Callable[[Result], object] = lambda result: None,
) -> dict[str, Result]:
    """Run figures of a paper and write one folder ``out/paper/figure`` each; what they share is
    made once.

    A figure that is finished there (same preset, model, seed, device and versions) is read instead
    of run.

    Parameters
    ----------
    paper : ``lee2026``, ``franco2026``, or ``known`` (compiled programs, whose answers are known).
    figures : ids as `list_experiments` has them, or ``["all"]``.
    preset : ``smoke`` (half a minute), ``default`` (minutes) or ``paper`` (the paper's own counts).
    out : the folder below which figures are written, and find each other's work.
    seed : of all draws.
    device : ``cpu``, ``cuda``, ``cuda:1``.
    model : what figures of language models look into: a hub id, a folder, ``nano:NAME``; by default
        the embedded model, or a nano where training is shown.
    prompts : of figures that have more than one kind: ``ioi`` (many prompts), ``single`` (the
        paper's one prompt) or ``text`` (natural text); of the first paper's grids ``as-released``
        (the scales of the authors' code) or ``as-written`` (those of the paper's text).
    n : prompts of each kind, in place of the preset's, for the first paper's figures of language
        models; answers after a swap are left out then.
    again : run what is finished too.
    show : told each figure's result as soon as there is one, before it is written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = reproduce("franco2026", ["thm2"], preset="smoke", out=folder)
    >>> [claim.holds for claim in found["thm2"].claims]
    [True, True, True]
    """
    names = _checked(paper, figures, preset)
    check_device(device)
    out = Path(out)
    folders = {name: check_folder(out / paper / name, f"{paper}/{name}") for name in names}
    chosen = {name: figure_of(paper, name) for name in names}
    for name, found in chosen.items():
        if prompts is not None and prompts not in found.prompts:
            kinds = ", ".join(found.prompts)
            has = f"has prompts of the kinds {kinds}" if kinds else "has one kind of prompts"
            raise BadInput(f"{paper} {name} has no prompts {prompts!r}: it {has}.")
    kind: dict[str, Any] = {} if prompts is None else {"prompts": prompts}
    kind |= {} if n is None else {"n": n}
    asked = {
        name: {
            "preset": preset,
            "model": _known(model or found.model),
            "seed": seed,
            "device": device,
            **kind,
        }
        for name, found in chosen.items()
    }
    stands = {} if again else {name: _finished(folders[name], asked[name]) for name in chosen}
    results = {name: result for name, result in stands.items() if result is not None}
    if results:
        log.info(
            "Finished in %s already, and not run again (again does): %s.",
            out / paper,
            ", ".join(results),
        )
    for result in results.values():
        show(result)
    missing = {name: found for name, found in chosen.items() if name not in results}
    settings = Settings(
        preset, out, seed, device, paper, model=model or EMBEDDED, prompts=prompts or "", n=n
    )
    with kept_if_stopped(out, lambda: bool(results)):
        for prepare in dict.fromkeys(found.prepare for found in missing.values() if found.prepare):
            prepare([found for found in missing.values() if found.prepare is prepare], settings)
        for name, found in missing.items():
            start = time.perf_counter()
            with doing(f"{paper}/{name}: {found.title}"):
                own = replace(settings, figure=name, model=model or found.model)
                result = found.run(own)
            made_by = {**result.provenance, "figure": asked[name]}
            result = replace(result, seconds=time.perf_counter() - start, provenance=made_by)
            show(result)
            result.write(folders[name], files=found.draw(result))
            results[name] = result
    return {name: results[name] for name in names}


def _known(model: str) -> str:
    """A model by name; one in a folder also by its weights, which may have been trained on since."""
    from qkscope.model.files import local_hash

    digest = local_hash(model)
    return model if digest is None else f"{model} {digest}"


def _finished(folder: Path, asked: Mapping[str, Any]) -> Result | None:
    """The figure that stands in a folder, if this very one was asked for there, with the same
    versions as here.
    """
    try:
        manifest = read_run_file(folder / MANIFEST)
        same = (
            manifest.get("figure") == asked and manifest.get("versions") == provenance()["versions"]
        )
        return Result.read(folder) if same else None
    except BadInput:  # none there, or half-written
        return None


def _checked(paper: str, figures: Sequence[str], preset: str) -> list[str]:
    known = figures_of(paper)
    if preset not in PRESETS:
        raise BadInput(f"there is no preset {preset!r}: take {', '.join(PRESETS)}.")
    if not figures:
        raise BadInput(f"no figure was named: take some of {', '.join(known)}, or all.")
    chosen = list(known) if list(figures) == ["all"] else list(dict.fromkeys(figures))
    for name in chosen:
        if name not in known:
            raise BadInput(
                f"{paper} has no figure {name!r} here: there is {', '.join(known)}, or all."
            )
    return chosen
