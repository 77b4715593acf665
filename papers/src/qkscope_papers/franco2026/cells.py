"""Which trained toys the figures need, with how much work at each preset.

All are trained in one go. Configurations have names (``default``, ``p=0.141``, ``m=7``), so that a
row of a table says which one it is about. Where the paper leaves a choice open, the choice stands
here or with the figure that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qkscope_papers.fleet import toy_figures
from qkscope_papers.franco2026.toy.stack import ToyCell
from qkscope_papers.franco2026.toy.superposition import READINGS, Superposition, linear_pairs
from qkscope_papers.franco2026.toy.trained import ToyRun, train_toys
from qkscope_papers.registry import Figure, Settings
from qkscope_papers.trainer import Schedule


@dataclass(frozen=True)
class ToyWork:
    """Counts of one preset: steps by kind of toy, seeds, and how much is measured."""

    steps: int  # the default configuration and the sweeps
    frozen: int  # a head on given features
    rope: int
    crowded: int  # more pairs than the head has dimensions
    many: int  # 20 pairs among 100 features
    lr: float
    every: int  # steps between checkpoints
    watched: int  # steps of figure 3, as many as the paper's
    dense: int  # steps between its checkpoints: pairs are learned within a few hundred
    watched_seeds: int
    seeds: int
    directions: int  # random directions of anisotropy
    contexts: int  # behind a sparsity
    rotations: int
    points: int  # of a curve over training


WORK = {
    # Enough training to see the point, not to finish: short, at a high learning rate.
    "smoke": ToyWork(2000, 1000, 400, 800, 200, 5e-3, 100, 2000, 20, 1, 1, 1, 128, 5, 6),
    "default": ToyWork(
        20_000, 5000, 20_000, 40_000, 80_000, 1e-3, 200, 10_000, 40, 20, 5, 5, 512, 20, 14
    ),
    "paper": ToyWork(
        40_000, 5000, 40_000, 80_000, 80_000, 1e-3, 400, 10_000, 40, 20, 5, 20, 1024, 50, 20
    ),
}

Tasks = Callable[[str], dict[str, Superposition]]
"""Configurations by name, which depend on the preset."""
Cells = Callable[[Settings], dict[str, list[ToyCell]]]
"""The toys that a figure needs: for every configuration one per seed."""

BEYOND = "ours < min(0, 2 * control)"  # control: the same before training
WAS_LESS = "Was ours < 0 (it held), which an untrained head passes as well."
ONE_PAIR = "one pair"
MANY_PAIRS = "20 pairs"
ONE = Superposition(pairs=((0, 1, 1.0),))
MANY = Superposition(n=100, d=50, d_head=50, pairs=linear_pairs(20, 20.0))


def toys_of(tasks: Tasks, *, crowded: bool = False) -> Cells:
    """Toys of these configurations; ``crowded`` ones train longer and, as the large ones of the
    paper, once each.
    """

    def cells(settings: Settings) -> dict[str, list[ToyCell]]:
        work = WORK[settings.preset]
        found = {}
        for name, task in tasks(settings.preset).items():
            once = crowded or task.n == MANY.n
            seeds = range(settings.seed, settings.seed + (1 if once else work.seeds))
            steps = _steps(task, work, crowded)
            found[name] = [ToyCell(task, seed, steps, work.lr, every=work.every) for seed in seeds]
        return found

    return cells


def _steps(task: Superposition, work: ToyWork, crowded: bool) -> int:
    """How long a toy of this kind trains."""
    if task.rope:
        return work.rope
    if task.n == MANY.n:
        return work.many
    return work.crowded if crowded else work.steps


def toys_over(
    field: str, values: Sequence[float], smoke: int = 1, name: str | None = None
) -> Cells:
    """The default toy with one setting varied; at preset smoke only some of the values."""

    def tasks(preset: str) -> dict[str, Superposition]:
        varied = {}
        for value in values[::smoke] if preset == "smoke" else values:
            setting: dict[str, Any] = {field: value}
            varied[f"{name or field}={value:.3g}"] = Superposition(**setting)
        return varied

    return toys_of(tasks)


OVER_P = toys_over("p", [50 ** (-k / 6) for k in range(7)], smoke=2)
"""Rarer and rarer features: figures 12 and 13."""
DEFAULT_RUN = toys_of(lambda preset: {"default": Superposition()})
"""The run that figures 5, 6, 7a and 24 share: trained until it is stable."""


DRAFTED = "as drafted"
_DRAFT: dict[str, Any] = {"head_std": 0.135, "feature_std": 0.10}


def watched(settings: Settings) -> dict[str, list[ToyCell]]:
    """Figure 3: as many steps as the paper takes, closely spaced checkpoints.

    Both readings of the loss, each from our start by half a cosine, and from the start of a
    co-author's draft by a quarter of one (`DRAFTED`).
    """
    configurations = dict[str, list[ToyCell]]()
    for reading in READINGS:
        ours = Superposition(reading=reading)
        drafted = Superposition(reading=reading, **_DRAFT)
        name = f"reading {reading}"
        configurations[name] = _watched_cells(settings, ours, "cosine")
        configurations[f"{name}, {DRAFTED}"] = _watched_cells(settings, drafted, "quarter cosine")
    return configurations


def _watched_cells(settings: Settings, task: Superposition, schedule: Schedule) -> list[ToyCell]:
    """One toy for every seed."""
    work = WORK[settings.preset]
    seeds = range(settings.seed, settings.seed + work.watched_seeds)
    return [
        ToyCell(task, seed, work.watched, work.lr, schedule, every=work.dense) for seed in seeds
    ]


def train(cells: Cells, settings: Settings) -> dict[str, list[ToyRun]]:
    """The trained toys of a figure, by configuration."""
    named = cells(settings)
    every = [cell for own in named.values() for cell in own]
    found = iter(_train(every, settings))
    return {name: [next(found) for _ in own] for name, own in named.items()}


def _train_together(figures: Sequence[Figure], settings: Settings) -> None:
    """Train all that the figures need in one go: side by side toys cost far less."""
    every: dict[ToyCell, None] = {}
    for figure in figures:
        for cells in figure.asked["cells"](settings).values():
            every |= dict.fromkeys(cells)
    _train(list(every), settings)


def _train(cells: Sequence[ToyCell], settings: Settings) -> list[ToyRun]:
    return train_toys(cells, settings.shared / "superposition", device=settings.device)


toy_figure = toy_figures("franco2026", _train_together)
