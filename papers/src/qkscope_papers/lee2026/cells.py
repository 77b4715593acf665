"""Which trained heads the figures of the toy need, with how much work at each preset.

All are trained in one go. Grids can be asked for in two scales (`SCALES`): ``as-released``, those
of the authors' code (maps A, B / √r and A_y / √d, noise 0.01), which reproduce the paper's
accuracies, and ``as-written``, standard Gaussian maps and noise as the paper's text has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qkscope.seeds import derived_seed
from qkscope_papers.fleet import toy_figures
from qkscope_papers.lee2026.toy.retrieval import AS_WRITTEN, VARIANTS, Retrieval, Variant
from qkscope_papers.lee2026.toy.stack import HeadCell
from qkscope_papers.lee2026.toy.trained import GRIDS, HeadRun, grid, train_heads
from qkscope_papers.registry import Figure, Settings
from qkscope_papers.trainer import Recipe

SCALES = ("as-released", "as-written")
WAS_IMPLIED = "was counted as implied by the paper, whose argument does not need it."


@dataclass(frozen=True)
class HeadWork:
    """Counts of one preset."""

    lr: float
    recipe: Recipe
    contrast_pairs: int  # (query, +, −) triplets behind a ΔC
    replicates: int  # of the sign-flip null
    contexts: int  # for accuracy and ceilings
    swaps: int
    # heads of each cell; in grids they share out pairs and contexts among them, swaps everywhere
    seeds: int = 1
    ranks: dict[int, tuple[int, ...]] = field(
        default_factory=lambda: dict(GRIDS)
    )  # d_head: the grid's ranks


WORK = {
    # Enough training to see the point, not to finish: corners of the grids, a high learning rate,
    # 800 steps.
    "smoke": HeadWork(
        3e-3,
        Recipe(steps=800, validate_every=400),
        8192,
        99,
        2048,
        2048,
        ranks={8: (2, 5), 16: (4, 10)},
    ),
    "default": HeadWork(1e-3, Recipe(), 40_960, 199, 10_240, 10_240, 3),
    "paper": HeadWork(
        1e-4, Recipe(), 40_960, 199, 20_480, 51_200, 5, {8: GRIDS[8], 16: tuple(range(4, 13))}
    ),
}
Cells = Callable[[Settings], list[HeadCell]]
"""The heads that a figure needs, which depend on preset and seed."""


def whole_grids(*grids: tuple[Variant, int]) -> Cells:
    """Every cell of grids (variant, d_head), in the scales that are asked for."""

    def cells(settings: Settings) -> list[HeadCell]:
        scales: dict[str, Any] = AS_WRITTEN if settings.prompts == SCALES[1] else {}
        ranks = WORK[settings.preset].ranks
        most = None if scales or settings.preset == "paper" else 1
        return [
            c
            for s in _seeds(settings)[:most]
            for v, d_head in grids
            for c in grid(v, d_head, ranks[d_head], s, **scales)
        ]

    return cells


def _seeds(settings: Settings) -> list[int]:
    more = range(1, WORK[settings.preset].seeds)
    return [settings.seed, *(derived_seed(settings.seed, "head", again) for again in more)]


def example_head(variant: Variant) -> Cells:
    """The paper's example, ranks (3, 5) at d_head 16."""
    return lambda settings: [
        HeadCell(Retrieval((3, 5), variant), 16, seed) for seed in _seeds(settings)
    ]


def some_cells(
    d_head: int, ranks: Sequence[tuple[int, int]], smoke: Sequence[tuple[int, int]]
) -> Cells:
    """Heads of one width and these ranks, in both variants; fewer at preset smoke."""
    return lambda settings: [
        HeadCell(Retrieval(r, variant), d_head, seed)
        for seed in _seeds(settings)
        for variant in VARIANTS
        for r in (smoke if settings.preset == "smoke" else ranks)
    ]


def train(cells: Cells, settings: Settings) -> list[HeadRun]:
    """The heads of a figure, from the shared folder where they are there already."""
    return _train(cells(settings), settings)


def _train_together(figures: Sequence[Figure], settings: Settings) -> None:
    """Train everything the figures need in one go: a hundred heads side by side cost far less than
    one by one.
    """
    _train(
        list(dict.fromkeys(cell for figure in figures for cell in figure.asked["cells"](settings))),
        settings,
    )


def _train(cells: Sequence[HeadCell], settings: Settings) -> list[HeadRun]:
    work = WORK[settings.preset]
    return train_heads(
        cells, settings.shared / "heads", lr=work.lr, recipe=work.recipe, device=settings.device
    )


toy_figure = toy_figures("lee2026", _train_together)
