"""Discovered features as pictures: how much attention each method moves at every size, and the map of an atlas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from qkscope.page.figures.style import new_figure, styled, with_page
from qkscope.runs.result import Result

# Okabe and Ito's palette: told apart by colour-blind readers too
_LOOK = {
    "ceiling": ("#000000", ":"), "self_contrast": ("#D55E00", "-"), "lexical": ("#0072B2", "-"),
    "order": ("#56B4E9", "-"), "cov_qk": ("#009E73", "--"), "key_pca": ("#CC79A7", "--"),
    "omega_svd": ("#E69F00", "--"), "random": ("#999999", "-"),
}  # fmt: skip
_OTHERS = ("#AA4466", "#999933", "#8866CC", "#44AA99")  # for the contrasts of other tasks, by turns


def draw_discovery(result: Result) -> dict[str, str | bytes]:
    """The curve of every head, and the page with one card per feature."""
    with styled():
        figures = {"curve": _curve(result)} if result.tables.get("curve") else {}
    return with_page(result, figures)


def draw_atlas(result: Result) -> dict[str, str | bytes]:
    """The map of all heads, and the page with the table that sorts."""
    with styled():
        figures = {"atlas": _map(result)}
    return with_page(result, figures)


def _curve(result: Result) -> Figure:
    rows = result.tables["curve"]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    sizes = sorted({row["k"] for row in rows})
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if not name.endswith(("_all", "_moving"))]
    names = [name for name in names if name not in ("self_contrast_svd", "self_contrast_uncentred", "box")]
    labels = [name.replace("_", " ") for name in names]
    others = [name for name in names if name not in _LOOK]
    look = _LOOK | {name: (_OTHERS[i % len(_OTHERS)], "-") for i, name in enumerate(others)}
    width = max(3.2 * len(heads), 4.8)
    columns = max(1, min(len(labels), int(width / (0.6 + 0.065 * max(map(len, labels))))))  # inches of an entry
    figure = new_figure(width, 5 + 0.2 * -(-len(labels) // columns))
    axes = figure.subplots(2, len(heads), sharex=True, sharey="row", squeeze=False)
    for column, head in enumerate(heads):
        for axis, kind, low, high in zip(axes[:, column], ("shift", "carried"), ("low", "carried_low"),
                                         ("high", "carried_high"), strict=True):  # fmt: skip
            for name, label in zip(names, labels, strict=True):
                own = [row for row in rows if row["head"] == head and row["method"] == name]
                colour, line = look[name]
                places = [sizes.index(row["k"]) for row in own]
                axis.plot(places, _column(own, kind), line, color=colour, marker="o", markersize=3, label=label)
                if name == "self_contrast":
                    axis.fill_between(places, _column(own, low), _column(own, high), color=colour, alpha=0.15)
            axis.set_xticks(range(len(sizes)), sizes)
        axes[0, column].set(title=head)
        axes[1, column].set(xlabel="dimensions swapped")
    axes[0, 0].set_ylabel("attention moved (shift)")
    axes[1, 0].set_ylabel("logit carried")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Numbers to draw: a gap where there is none."""
    return [np.nan if row[name] is None else row[name] for row in rows]


def _map(result: Result) -> Figure:
    rows = result.tables["atlas"]
    layers, heads = (1 + max(row[name] for row in rows) for name in ("layer", "index"))
    figure = new_figure(8, 4.4)
    panels = (
        ("directions", "directions above the shuffled null", None),
        ("logit_share", "share of the logit they carry", 1.0),
    )
    for axis, (column, title, top) in zip(figure.subplots(2, 1, sharex=True), panels, strict=True):
        grid = np.full((heads, layers), np.nan)
        for row in rows:
            (grid[row["index"], row["layer"]],) = _column([row], column)
        image = axis.imshow(grid, cmap="viridis", vmin=0, vmax=top, aspect="auto", origin="lower")
        figure.colorbar(image, ax=axis)
        axis.set(ylabel="head", title=title)
    axis.set_xlabel("layer")
    return figure
