"""Which trained heads each figure of the toy needs, and how much work each preset spends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qkscope.papers.lee2026.toy.retrieval import VARIANTS, Retrieval, Variant
from qkscope.papers.lee2026.toy.stack import Cell
from qkscope.papers.lee2026.toy.trained import GRIDS, TrainedHead, grid, train_heads
from qkscope.papers.registry import Settings
from qkscope.papers.trainer import Recipe


@dataclass(frozen=True)
class Work:
    """Counts of one preset."""

    lr: float
    recipe: Recipe
    contrast_pairs: int  # (query, +, −) triplets behind a ΔC
    replicates: int  # of the sign-flip null
    contexts: int  # for accuracy and ceilings
    swaps: int
    ranks: dict[int, tuple[int, ...]] = field(default_factory=lambda: dict(GRIDS))  # d_head: the grid's ranks


PRESETS = {
    # Enough training to see the point, not to finish: corners of the grids, a high learning rate, 800 steps.
    "smoke": Work(3e-3, Recipe(steps=800, validate_every=400), 8192, 99, 2048, 2048, {8: (2, 5), 16: (4, 10)}),
    "default": Work(1e-3, Recipe(), 40_960, 199, 10_240, 10_240),
    "paper": Work(1e-4, Recipe(), 40_960, 199, 20_480, 51_200),
}
_EXAMPLE = (3, 5)  # the paper's example head, d_head 16
_SWAPPED: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {
    "fig14": {16: ((4, 4), (4, 8), (6, 6), (6, 8), (8, 8))},
    "fig15": {8: ((2, 2), (2, 4), (3, 3), (3, 4), (4, 4))},
}
_SWAPPED_SMOKE = {"fig14": {16: ((4, 4), (4, 10))}, "fig15": {8: ((2, 2), (2, 5))}}


def grids_of(figure: str) -> list[tuple[Variant, int]]:
    """The grids (variant, d_head) a figure shows."""
    if figure == "fig2":
        return [("discrete", 16)]
    if figure == "fig11":
        return [("discrete", 8), ("continuous", 8), ("continuous", 16)]
    variant: Variant = "continuous" if figure == "fig5" else "discrete"
    return [(variant, d_head) for d_head in GRIDS]


def cells_of(figure: str, settings: Settings) -> list[Cell]:
    """The heads a figure needs."""
    seed, work = settings.seed, PRESETS[settings.preset]
    if figure in ("fig3", "fig4", "fig12"):
        return [Cell(Retrieval(_EXAMPLE, "continuous" if figure == "fig12" else "discrete"), 16, seed)]
    if figure in _SWAPPED:
        chosen = (_SWAPPED_SMOKE if settings.preset == "smoke" else _SWAPPED)[figure]
        return [Cell(Retrieval(r, v), d_head, seed) for v in VARIANTS for d_head, rs in chosen.items() for r in rs]
    return [cell for v, d_head in grids_of(figure) for cell in grid(v, d_head, work.ranks[d_head], seed)]


def prepare(figures: Sequence[str], settings: Settings) -> None:
    """Train everything the figures need in one go: a hundred heads side by side cost far less than one by one."""
    train(list(dict.fromkeys(cell for figure in figures for cell in cells_of(figure, settings))), settings)


def train(cells: Sequence[Cell], settings: Settings) -> list[TrainedHead]:
    """Heads of these cells, from the shared folder where they are there already."""
    work = PRESETS[settings.preset]
    return train_heads(cells, settings.shared / "heads", lr=work.lr, recipe=work.recipe, device=settings.device)


def heads_of(settings: Settings) -> list[TrainedHead]:
    """The trained heads of the figure that is asked for."""
    return train(cells_of(settings.figure, settings), settings)
