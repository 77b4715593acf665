"""Which figures there are: each id bound to the function that runs it and the one that draws it, imported when needed.

An experiment is ``run(settings) -> Result``; its drawing is ``draw(result) -> {file name: bytes}`` and lives in `page`,
which this room never imports by name. A paper may also ``prepare`` what several of its figures share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from qkscope.devices import check_device
from qkscope.errors import BadInput
from qkscope.result import Result, check_folder

log = logging.getLogger(__name__)

PRESETS = ("smoke", "default", "paper")
EMBEDDED, NANO = "smollm2-135m", "nano:mixed"


@dataclass(frozen=True)
class Settings:
    """What a figure is asked for; ``shared`` is the folder in which figures find each other's work."""

    preset: str
    shared: Path
    seed: int = 0
    device: str = "cpu"
    figure: str = ""
    model: str = EMBEDDED  # of figures that look into a language model


@dataclass(frozen=True)
class Experiment:
    """One figure: what it shows, and where it is run and drawn (``module:function``)."""

    title: str
    run: str
    draw: str
    prepare: str = ""  # makes what figures of this kind share, in one go
    model: str = EMBEDDED  # what it looks into where no model is named


_LEE = "qkscope.papers.lee2026"
_FRANCO = "qkscope.papers.franco2026"
_DRAW = "qkscope.page.figures"


def _toy(title: str, module: str) -> Experiment:
    return Experiment(title, f"{_LEE}.{module}:run", f"{_DRAW}.{module}:draw", f"{_LEE}.cells:prepare")


def _model(title: str, run: str, draw: str) -> Experiment:
    return Experiment(title, f"{_LEE}.{run}:run", f"{_DRAW}.{draw}:draw")


def _superposition(title: str, run: str, draw: str) -> Experiment:
    return Experiment(title, f"{_FRANCO}.{run}:run", f"{_DRAW}.{draw}:draw", f"{_FRANCO}.cells:prepare")


def _franco_model(title: str, run: str, model: str = NANO) -> Experiment:
    return Experiment(title, f"{_FRANCO}.{run}:run", f"{_DRAW}.{run}:draw", model=model)


PAPERS: dict[str, dict[str, Experiment]] = {
    "lee2026": {
        "fig2": _toy("Recovered ranks, discrete task, d_head 16", "ranks"),
        "fig3": _toy("The cube in query and key space", "geometry"),
        "fig4": _toy("Swapping latents, discrete (3,5)", "swaps"),
        "fig5": _toy("Interactions G, continuous task", "interactions"),
        "fig6": _model("Categories in filter heads, seen", "category_views", "category_views"),
        "fig7": _model("Swapping categories in filter heads", "filter_swaps", "model_swaps"),
        "fig8": _model("Order and lexical subspaces, seen", "binding_views", "binding_views"),
        "fig9": _model("Swapping order and lexical features", "binding_swaps", "model_swaps"),
        "fig10": _model("One prompt's attention logits, split", "logit_split", "logit_split"),
        "fig11": _toy("Recovered ranks, the other three grids", "ranks"),
        "fig12": _toy("The sphere in query and key space", "geometry"),
        "fig13": _toy("Interactions G, discrete task", "interactions"),
        "fig14": _toy("Swapping latents, d_head 16", "swaps"),
        "fig15": _toy("Swapping latents, d_head 8", "swaps"),
        "fig16": _model("Ranks against the number of entities", "entity_counts", "entity_counts"),
        "fig17": _model("Keys and queries, not projected", "binding_views", "binding_views"),
        "fig18": _model("Swapping order and lexical, other heads", "binding_swaps", "model_swaps"),
        "fig19": _model("Swapping categories, second model or form", "filter_swaps", "model_swaps"),
        "fig20": _model("Swapping order and lexical, second model or form", "binding_swaps", "model_swaps"),
    },
    "franco2026": {
        # the toy and the theory
        "fig1": _superposition("Angles among features: no head, one pair, twenty", "geometry", "feature_geometry"),
        "fig2": _superposition("Features and singular vectors: one pair, twenty", "alignments", "feature_alignment"),
        "fig3": _superposition("Alignment across training, pair by pair", "dynamics", "alignment_dynamics"),
        "fig4": _superposition("Alignment under controlled anisotropy", "anisotropy", "anisotropy"),
        "fig5": _superposition("Relative attention split, one pair present", "decomposition", "term_views"),
        "fig6": _superposition("A term against its pair's strength", "decomposition", "term_views"),
        "fig7a": _superposition("Sparsity over training, beside its nulls", "emergence", "toy_sparsity"),
        "fig11": _superposition("All features and all singular vectors", "alignments", "feature_alignment"),
        "fig12": _superposition("Alignment against p", "sweeps", "alignment_sweeps"),
        "fig13": _superposition("Alignment over training, by p", "dynamics", "alignment_sweeps"),
        "fig14": _superposition("Alignment against the loss weight λ", "sweeps", "alignment_sweeps"),
        "fig15": _superposition("Alignment against the number of features", "sweeps", "alignment_sweeps"),
        "fig16": _superposition("Alignment against the width of the head", "sweeps", "alignment_sweeps"),
        "fig17": _superposition("Alignment against the length of the context", "sweeps", "alignment_sweeps"),
        "fig18": _superposition("Alignment over seeds, both readings of the loss", "sweeps", "alignment_sweeps"),
        "fig19": _superposition("Isotropy of features", "geometry", "feature_geometry"),
        "fig21": _superposition("Alignment under RoPE", "rope", "rope_bands"),
        "fig22": _superposition("Features in RoPE's bands", "rope", "rope_bands"),
        "fig23": _superposition("More pairs than the head has dimensions", "capacity", "capacity"),
        "fig24": _superposition("Relative attention split, no pair present", "decomposition", "term_views"),
        "thm1": _superposition("Theorem 1: the minimiser", "theorems", "theorem_plots"),
        "thm2": _superposition("Theorem 2: the bound", "theorems", "theorem_plots"),
        "thm3": _superposition("Theorem 3: orthogonalisation", "theorems", "theorem_plots"),
        # language models
        "fig7b": _franco_model("Sparsity over the training of a language model", "model_sparsity"),
        "fig8": _franco_model("Relative attention split: four heads, before and after", "model_terms"),
        "fig9": _franco_model("How many singular vectors reconstruct it", "model_counts"),
        "fig20": _franco_model("Isotropy of a dictionary", "isotropy"),
        "fig25": _franco_model("Relative attention split: all heads of the circuit", "model_terms"),
        "bridge": _franco_model("Contrasts against singular vectors", "bridge", EMBEDDED),
    },
}


def list_experiments() -> list[dict[str, str]]:
    """Every paper and figure, one row each."""
    return [
        {"paper": paper, "figure": figure, "shows": experiment.title}
        for paper, figures in PAPERS.items()
        for figure, experiment in figures.items()
    ]


def reproduce(
    paper: str,
    figures: Sequence[str],
    *,
    preset: str = "default",
    out: str | Path = "runs",
    seed: int = 0,
    device: str = "cpu",
    model: str | None = None,
) -> dict[str, Result]:
    """Run figures of a paper and write one folder ``out/paper/figure`` each; what they share is made once.

    Parameters
    ----------
    figures : ids as `list_experiments` has them, or ``["all"]``.
    preset : ``smoke`` (half a minute), ``default`` (minutes) or ``paper`` (the paper's own counts).
    model : what figures of language models look into: a hub id, a folder, ``nano:NAME``; by default the embedded
        model, or a nano where training is shown.
    """
    chosen = _checked(paper, figures, preset)
    check_device(device)
    out = Path(out)
    folders = {figure: check_folder(out / paper / figure) for figure in chosen}
    settings = Settings(preset, out, seed, device, model=model or EMBEDDED)
    for prepare in dict.fromkeys(experiment.prepare for experiment in chosen.values() if experiment.prepare):
        _resolve(prepare)([figure for figure, e in chosen.items() if e.prepare == prepare], settings)
    results = {}
    for figure, experiment in chosen.items():
        log.info("%s/%s: %s ...", paper, figure, experiment.title)
        start = time.perf_counter()
        result: Result = _resolve(experiment.run)(replace(settings, figure=figure, model=model or experiment.model))
        result = replace(result, seconds=time.perf_counter() - start)
        files: Mapping[str, str | bytes] = _resolve(experiment.draw)(result)
        result.write(folders[figure], files=files)
        results[figure] = result
    return results


def _checked(paper: str, figures: Sequence[str], preset: str) -> dict[str, Experiment]:
    if paper not in PAPERS:
        raise BadInput(f"there is no paper {paper!r} here: there is {', '.join(PAPERS)}.")
    known = PAPERS[paper]
    if preset not in PRESETS:
        raise BadInput(f"there is no preset {preset!r}: take {', '.join(PRESETS)}.")
    if isinstance(figures, str):
        raise BadInput(f"figures are a list of ids, as [{figures!r}], but got one id.")
    if not figures:
        raise BadInput(f"no figure was named: take some of {', '.join(known)}, or all.")
    if list(figures) == ["all"]:
        return known
    for figure in figures:
        if figure not in known:
            raise BadInput(f"{paper} has no figure {figure!r} here: there is {', '.join(known)}, or all.")
    return {figure: known[figure] for figure in dict.fromkeys(figures)}


def _resolve(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
