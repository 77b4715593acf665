"""Which trained toys each figure needs, and how much work each preset spends on them.

Configurations have names (``default``, ``p=0.141``, ``m=7``), so that a row of a table says which one it is about.
Where the paper leaves a choice open, the choice stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qkscope.papers.franco2026.toy.stack import Cell
from qkscope.papers.franco2026.toy.superposition import (
    FOUR_PAIRS,
    Positional,
    Superposition,
    distort,
    isotropic_dictionary,
    linear_pairs,
)
from qkscope.papers.franco2026.toy.trained import TrainedToy, train_toys
from qkscope.papers.registry import Settings


@dataclass(frozen=True)
class Work:
    """Counts of one preset: steps by kind of toy, seeds, and how much is measured."""

    steps: int  # the default configuration and the sweeps
    frozen: int  # a head on given features
    rope: int
    crowded: int  # more pairs than the head has dimensions
    many: int  # 20 pairs among 100 features
    lr: float
    every: int  # steps between checkpoints
    dense: int  # the same for the run of figure 3, whose pairs are learned within a few hundred steps
    seeds: int
    directions: int  # random directions of anisotropy
    contexts: int  # behind a sparsity
    rotations: int
    points: int  # of a curve over training


PRESETS = {
    # Enough training to see the point, not to finish: short, at a high learning rate.
    "smoke": Work(2000, 1000, 400, 800, 200, 5e-3, 100, 20, 1, 1, 128, 5, 6),
    "default": Work(20_000, 5000, 20_000, 40_000, 80_000, 1e-3, 200, 40, 5, 5, 512, 20, 14),
    "paper": Work(40_000, 5000, 40_000, 80_000, 80_000, 1e-3, 400, 40, 5, 20, 1024, 50, 20),
}

NO_HEAD, ONE_PAIR, MANY_PAIRS, DEFAULT = "no head", "one pair", "20 pairs", "default"
ONE: tuple[tuple[int, int, float], ...] = ((0, 1, 1.0),)
MANY = {"n": 100, "d": 50, "d_head": 50, "pairs": linear_pairs(20, 20.0)}
ROPE = Superposition(
    context=40, rope=True, pairs=((0, 3, 24.0), (1, 4, 21.0), (2, 5, 18.0)), positional=(Positional(6, 7, 15.0, 1),)
)
PROBABILITIES = tuple(50 ** (-k / 6) for k in range(7))
WEIGHTS = tuple(4 * 10 ** (k / 3) for k in range(-3, 4))  # two orders of magnitude around 4
FEATURES = (10, 15, 20, 25, 30)
WIDTHS = (10, 8, 6, 4)
CONTEXTS = (2, 4, 8, 16, 32, 64)
EPSILONS = (0.0, 0.05, 0.1, 0.15, 1.0, 5.0, 10.0, 25.0, 40.0, 55.0)
_DENSE = ("fig3", "fig5", "fig6", "fig7a", "fig24")  # they share one run, the run of figure 3


def settings_of(figure: str, preset: str) -> dict[str, Superposition]:
    """The configurations of a figure by name."""
    smoke = preset == "smoke"
    if figure in ("fig1", "fig19"):
        found = {NO_HEAD: Superposition(weight=0.0), "no head, p=0.27": Superposition(weight=0.0, p=0.27),
                 ONE_PAIR: Superposition(pairs=ONE)}  # fmt: skip
        return found if figure == "fig19" else {**found, MANY_PAIRS: Superposition(**MANY)}  # type: ignore[arg-type]
    if figure in ("fig2", "fig11"):
        return {ONE_PAIR: Superposition(pairs=ONE), MANY_PAIRS: Superposition(**MANY)}  # type: ignore[arg-type]
    if figure in ("fig12", "fig13"):
        return {f"p={p:.3g}": Superposition(p=p) for p in (PROBABILITIES[::2] if smoke else PROBABILITIES)}
    if figure == "fig14":
        return {f"λ={w:.3g}": Superposition(weight=w) for w in (WEIGHTS[::3] if smoke else WEIGHTS)}
    if figure == "fig15":
        return {f"n={n}": Superposition(n=n) for n in (FEATURES[::2] if smoke else FEATURES)}
    if figure == "fig16":
        return {f"d_head={h}": Superposition(d_head=h) for h in WIDTHS}
    if figure == "fig17":
        return {f"context={c}": Superposition(context=c) for c in (CONTEXTS[::2] if smoke else CONTEXTS)}
    if figure == "fig18":
        return {DEFAULT: Superposition(), "reading B": Superposition(reading="B")}
    if figure in ("fig21", "fig22"):
        return {"RoPE": ROPE}
    if figure == "fig23":
        small, large = (range(5, 11), range(10, 21))
        if smoke:
            small, large = range(5, 11, 5), range(0)
        found = {f"d_head=5 m={m}": Superposition(d_head=5, pairs=linear_pairs(m, 1.0 + m)) for m in small}
        wide = {f"d_head=10 m={m}": Superposition(n=40, d=20, d_head=10, pairs=linear_pairs(m, 1.0 + m))
                for m in large if preset == "paper" or m % 5 == 0}  # fmt: skip
        return {**found, **wide}
    return {DEFAULT: Superposition()}


def cells_of(figure: str, settings: Settings) -> dict[str, list[Cell]]:
    """The toys a figure needs: for every configuration one per seed."""
    work = PRESETS[settings.preset]
    if figure.startswith("thm"):
        return {}
    if figure == "fig4":
        return {f"ε={e:g}": [anisotropic_cell(e, settings.seed + k, work) for k in range(work.directions)]
                for e in (EPSILONS[::3] if settings.preset == "smoke" else EPSILONS)}  # fmt: skip
    return {name: [_cell(figure, task, settings.seed + k, work) for k in range(_seeds(figure, task, work))]
            for name, task in settings_of(figure, settings.preset).items()}  # fmt: skip


def _seeds(figure: str, task: Superposition, work: Work) -> int:
    if task.n == MANY["n"] or figure == "fig23":
        return 1  # the large ones once, as the paper
    return work.seeds


def _cell(figure: str, task: Superposition, seed: int, work: Work) -> Cell:
    steps = work.steps
    if task.rope:
        steps = work.rope
    elif task.n == MANY["n"]:
        steps = work.many
    elif figure == "fig23":
        steps = work.crowded
    return Cell(task, seed, steps, work.lr, every=work.dense if figure in _DENSE else work.every)


def anisotropic_cell(epsilon: float, seed: int, work: Work) -> Cell:
    """A head on the dictionary of C.3, distorted along one random direction."""
    features = distort(isotropic_dictionary(), epsilon, seed)
    # a small start: the unused directions of a head keep what they started from, and a maximum over all sees them
    task = Superposition.frozen(features.float(), pairs=FOUR_PAIRS, scaled=True, head_std=0.02)
    return Cell(task, seed, work.frozen, work.lr,
                "constant", work.every)  # fmt: skip


def prepare(figures: Sequence[str], settings: Settings) -> None:
    """Train everything the figures need in one go: toys side by side cost far less than one by one."""
    wanted = [cell for figure in figures for cells in cells_of(figure, settings).values() for cell in cells]
    if wanted:
        _train(list(dict.fromkeys(wanted)), settings)


def toys_of(settings: Settings) -> dict[str, list[TrainedToy]]:
    """The trained toys of the figure that is asked for, by configuration."""
    named = cells_of(settings.figure, settings)
    found = iter(_train([cell for cells in named.values() for cell in cells], settings))
    return {name: [next(found) for _ in cells] for name, cells in named.items()}


def _train(cells: Sequence[Cell], settings: Settings) -> list[TrainedToy]:
    return train_toys(cells, settings.shared / "superposition", device=settings.device)
