"""Figures 2 and 11: one square per cell, the recovered ranks written in it, its colour how far off they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from qkscope.page.figures.style import INK, new_figure, styled, with_page
from qkscope.result import Result

Row = dict[str, Any]
_KINDS = (("rank", "trained, 99% rule"), ("null", "trained, above the null"), ("untrained", "untrained, 99% rule"))
_WORST = 8


def draw(result: Result) -> dict[str, str | bytes]:
    """A panel per grid and kind of rank, and one for accuracy against its ceiling."""
    rows = [dict(row) for row in result.tables["ranks"]]
    grids = list(dict.fromkeys((row["variant"], row["d_head"]) for row in rows))
    figure = new_figure(13.2, 3.5 * len(grids) + 0.3)
    with styled():
        axes = figure.subplots(len(grids), 4, squeeze=False)
        for line, (variant, d_head) in zip(axes, grids, strict=True):
            cells = [row for row in rows if (row["variant"], row["d_head"]) == (variant, d_head)]
            for axis, (kind, title) in zip(line, _KINDS, strict=False):
                _rank_panel(axis, cells, kind, f"{variant}, d_head {d_head}: {title}")
            _accuracy_panel(line[3], cells, f"{variant}, d_head {d_head}: accuracy / ceiling")
        figure.supxlabel(
            "Written: recovered ranks r1, r2. Colour: how far off they are, |Δr1| + |Δr2| (green and bold: exact). "
            "Framed: boundary cells, r1 + r2 = d_head.\n"
            "Accuracy above, ceiling below it: the best one head can do, min(Bayes, ideal dot product).",
            fontsize=8.5,
        )
    return with_page(result, {result.experiment.split("/")[1]: figure})


def _rank_panel(axis: Axes, cells: Sequence[Row], kind: str, title: str) -> None:
    palette = matplotlib.colormaps["RdYlGn_r"]
    for row, x, y in _places(axis, cells, title):
        off = abs(row[f"{kind}1"] - row["r1"]) + abs(row[f"{kind}2"] - row["r2"])
        axis.add_patch(
            Rectangle((x - 0.5, y - 0.5), 1, 1, color=palette(0.06 + 0.84 * min(off, _WORST) / _WORST), lw=0)
        )
        axis.text(x, y, f"{row[f'{kind}1']}, {row[f'{kind}2']}", ha="center", va="center", fontsize=8.5,
                  weight="bold" if off == 0 else "normal")  # fmt: skip


def _accuracy_panel(axis: Axes, cells: Sequence[Row], title: str) -> None:
    palette = matplotlib.colormaps["Blues"]
    for row, x, y in _places(axis, cells, title):
        ceiling = min(row["ceiling"], row["dot_ceiling"])
        gap = max(ceiling - row["accuracy"], 0)
        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=palette(0.05 + 0.6 * min(gap / 0.2, 1)), lw=0))
        axis.text(
            x, y, f"{row['accuracy']:.3f}\n{ceiling:.3f}", ha="center", va="center", fontsize=7.2, linespacing=1.3
        )


def _places(axis: Axes, cells: Sequence[Row], title: str) -> list[tuple[Row, int, int]]:
    """Axes with ranks as ticks, the boundary line, and where each cell stands."""
    xs, ys = sorted({row["r1"] for row in cells}), sorted({row["r2"] for row in cells})
    axis.set(
        title=title, xlabel="r1", ylabel="r2", xticks=range(len(xs)), yticks=range(len(ys)),
        xticklabels=[str(r) for r in xs], yticklabels=[str(r) for r in ys],
        xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5), aspect="equal",
    )  # fmt: skip
    axis.tick_params(length=0)
    boundary = [(xs.index(r["r1"]), ys.index(r["r2"])) for r in cells if r["where"] == "boundary"]
    for x, y in boundary:
        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, lw=1.6, edgecolor=INK, zorder=3))
    return [(row, xs.index(row["r1"]), ys.index(row["r2"])) for row in cells]
