"""The verbs as pictures: which heads, where the attention goes when features are swapped, and one prompt split."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.analyses.attribute import Explanation
from qkscope.analyses.find import Ranking
from qkscope.analyses.swap import Swaps
from qkscope.heads import Head
from qkscope.page.figures.style import figure_files, new_figure, styled

# Okabe and Ito's palette: told apart by colour-blind readers too
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#E69F00", "#009E73", "#999999"
_PARTS = (_BLUE, _ORANGE, "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")


def draw_verbs(layers: int, heads: int, ranking: Ranking, swaps: Swaps, parts: Explanation) -> dict[str, bytes]:
    """PNG and PDF files of the three pictures, by name."""
    with styled():
        return figure_files({
            "heads": head_map(layers, heads, ranking),
            "swap": swap_bars(swaps),
            "explain": logit_bars(parts),
        })  # fmt: skip


def head_map(layers: int, heads: int, ranking: Ranking) -> Figure:
    """Accuracy of every head over layers."""
    grid = np.full((heads, layers), np.nan)
    for row in ranking.tables["heads"]:
        head = Head.parse(row["head"])
        grid[head.index, head.layer] = row["accuracy"]
    figure = new_figure(7.5, 2.6)
    axis = figure.subplots()
    image = axis.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto", origin="lower")
    figure.colorbar(image, ax=axis, label="attends to the right key")
    for row in ranking.top()[:5]:
        head = Head.parse(row["head"])
        axis.annotate(
            str(head), (head.layer, head.index), (8, -3), textcoords="offset points", color="white", fontsize=7
        )
    axis.set(xlabel="layer", ylabel="head", title=f"Every head of {ranking.model}")
    return figure


def swap_bars(swaps: Swaps) -> Figure:
    """Attention on the right key and on the target after each swap, one panel per head."""
    table = swaps.table()
    heads = list(dict.fromkeys(row["head"] for row in table))
    figure = new_figure(3.4 * len(heads), 4.6)
    axes = np.atleast_1d(figure.subplots(1, len(heads), sharey=True))
    for axis, head in zip(axes, heads, strict=True):
        _bars(axis, [row for row in table if row["head"] == head], head)
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1.06), ncols=2, frameon=False)
    return figure


def _bars(axis: Axes, rows: list[dict[str, Any]], head: str) -> None:
    start = dict(rows[0], condition="before", orig_after=rows[0]["orig_before"], target_after=rows[0]["target_before"])
    shown = [start, *rows]
    places = np.arange(len(shown))[::-1]
    axis.barh(places + 0.2, [row["orig_after"] for row in shown], 0.4, color=_BLUE, label="right key")
    axis.barh(places - 0.2, [row["target_after"] for row in shown], 0.4, color=_ORANGE, label="target")
    axis.set_yticks(places, [f"{row['condition'].replace('_', ' ')}" for row in shown])
    axis.set(xlabel="attention after the swap", xlim=(0, 1), title=head)


def logit_bars(parts: Explanation) -> Figure:
    """The logit of every token, stacked from its features and the residual."""
    rows = parts.tables["tokens"]
    names = [name for name in rows[0] if name not in ("position", "token", "attention", "logit")]
    figure = new_figure(max(6.0, 0.34 * len(rows)), 4.2)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    places = np.arange(len(rows))
    top.bar(places, [row["attention"] for row in rows], color=_GREY)
    top.set(ylabel="attention", ylim=(0, 1), title=parts.answer.split(":")[0])
    up, down = np.zeros(len(rows)), np.zeros(len(rows))
    for name, colour in zip(names, (*_PARTS[: len(names) - 1], _GREEN), strict=True):
        values = np.array([row[name] for row in rows])
        bottom.bar(places, values, bottom=np.where(values > 0, up, down), color=colour, label=name)
        up, down = up + values.clip(min=0), down + values.clip(max=0)
    bottom.plot(places, [row["logit"] for row in rows], "k_", markersize=9, label="logit")
    bottom.axhline(0, color="black", linewidth=0.6)
    bottom.set_xticks(places, [repr(row["token"])[1:-1] for row in rows], rotation=60, ha="right", fontsize=7)
    bottom.set_ylabel("logit")
    bottom.legend(ncols=len(names) + 1, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.32))
    return figure
