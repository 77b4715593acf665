"""What ``qkscope toy retrieval`` draws: how well each head does, and what is in the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from qkscope.results.result import Result
from qkscope_papers.figures import (
    INK,
    ORIGINAL,
    REST,
    TARGET,
    legend_below,
    new_figure,
    styled,
    with_page,
)
from qkscope_papers.lee2026.toy.retrieval import RetrievalHead
from qkscope_papers.lee2026.toy.trained import HeadRun
from qkscope_papers.tables import Files, Row, slanted

_PAIRS = 8192  # behind a ΔC
_FEWEST_SLANTED = 6  # heads from which their names need room


def draw_heads(result: Result, trained: Sequence[HeadRun]) -> Files:
    """Accuracies beside ceilings; G of the first head, and singular values of its contrasts."""
    first = trained[0]
    rows = [dict(row) for row in result.tables["heads"]]
    variables = len(first.cell.task.ranks)
    with styled():
        drawing = new_figure(10.4, 3.6)
        axes = drawing.subplots(1, 3, width_ratios=[max(2.4, 0.12 * len(rows)), 2.6, 3.0])
        _accuracies(axes[0], rows)
        _interactions(axes[1], first)
        _spectra(axes[2], first, variables)
        legend_below(drawing, axes[2], 2 * variables)
        return with_page(result, {"retrieval": drawing})


def _accuracies(axis: Axes, rows: list[Row]) -> None:
    places = range(len(rows))
    axis.bar(places, [row["accuracy"] for row in rows], 0.7, color=ORIGINAL)
    ceilings = [min(row["ceiling"], row["dot_ceiling"]) for row in rows]
    axis.hlines(ceilings, [x - 0.4 for x in places], [x + 0.4 for x in places], color=INK, lw=1.4)
    axis.set(
        ylim=(0, 1.05), ylabel="accuracy", title="each head; the line:\nthe best one head can do"
    )
    names = [f"{row['variant']} ({row['r1']}, {row['r2']})" for row in rows]
    if len(rows) >= _FEWEST_SLANTED:
        slanted(axis, names, 60, 6)
    else:
        axis.set_xticks(places, [name.replace(" ", "\n", 1) for name in names], fontsize=8)


def _interactions(axis: Axes, found: HeadRun) -> None:
    """G: which coordinate of the query's latents meets which of the key's."""
    strength = found.head.interactions().abs()
    axis.imshow(strength / strength.max(), cmap="magma_r", vmin=0, vmax=1)
    edge = found.cell.task.ranks[0] - 0.5
    axis.axvline(edge, color=INK, lw=0.7)
    axis.axhline(edge, color=INK, lw=0.7)
    axis.set(
        xlabel="coordinates of the key's z1, z2", ylabel="… of the query's", xticks=[], yticks=[]
    )
    axis.set_title("|G|: a diagonal where each\nlatent meets itself alone")


def _spectra(axis: Axes, found: HeadRun, variables: int) -> None:
    """Singular values of ΔC for each latent, trained and untrained; broken: its true rank."""
    untrained = found.cell.untrained()
    for variable, colour in zip(range(variables), (ORIGINAL, TARGET), strict=False):
        rank = found.cell.task.ranks[variable]
        for head, style in ((found.head, "o-"), (untrained, "o:")):
            name = "trained" if head is found.head else "untrained"
            values = _singular_values(head, variable)
            look: Any = {"ms": 3, "lw": 1.3, "color": colour if head is found.head else REST}
            places = range(1, len(values) + 1)
            axis.plot(places, values, style, label=f"z{variable + 1}, {name}", **look)
        axis.axvline(rank + 0.5, color=colour, lw=0.9, ls="--")
    axis.set(yscale="log", ylim=(1e-3, 1.4), xlabel="direction", ylabel="singular value / largest")
    axis.set_title("ΔC of each latent;\nbroken line: its true rank")


def _singular_values(head: RetrievalHead, variable: int) -> Tensor:
    q, difference = head.contrast(variable, _PAIRS, seed=0)
    values = torch.linalg.svdvals(q.double().mT @ difference.double())
    return values / values[0]
