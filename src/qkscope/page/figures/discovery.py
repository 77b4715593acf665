"""Discovered features as pictures: how much attention each method moves at every size, and the map of an atlas."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from qkscope.page.cards import add_section, atlas_table, feature_cards
from qkscope.page.figures.style import new_figure, styled, with_page
from qkscope.result import Result

# Okabe and Ito's palette: told apart by colour-blind readers too
_LOOK = {
    "ceiling": ("#000000", ":"), "self_contrast": ("#D55E00", "-"), "lexical": ("#0072B2", "-"),
    "order": ("#56B4E9", "-"), "cov_qk": ("#009E73", "--"), "key_pca": ("#CC79A7", "--"),
    "omega_svd": ("#E69F00", "--"), "random": ("#999999", "-"),
}  # fmt: skip


def draw_discovery(result: Result) -> dict[str, str | bytes]:
    """The curve of every head, and the page with one card per feature."""
    with styled():
        figures = {"curve": _curve(result)} if result.tables.get("curve") else {}
    files = with_page(result, figures)
    page = files["report.html"]
    assert isinstance(page, str)
    return {**files, "report.html": add_section(page, feature_cards(result))}


def draw_atlas(result: Result) -> dict[str, str | bytes]:
    """The map of all heads, and the page with the table that sorts."""
    with styled():
        figures = {"atlas": _map(result)}
    files = with_page(result, figures)
    page = files["report.html"]
    assert isinstance(page, str)
    return {**files, "report.html": add_section(page, *atlas_table(result))}


def _curve(result: Result) -> Figure:
    rows = result.tables["curve"]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    figure = new_figure(max(3.2 * len(heads), 4.8), 5.4)
    axes = figure.subplots(2, len(heads), sharex=True, sharey="row", squeeze=False)
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if not name.endswith(("_all", "_moving"))]
    names = [name for name in names if name not in ("self_contrast_svd", "self_contrast_uncentred", "box")]
    for column, head in enumerate(heads):
        for axis, kind, low, high in zip(axes[:, column], ("shift", "carried"), ("low", "carried_low"),
                                         ("high", "carried_high"), strict=True):  # fmt: skip
            for name in names:
                own = [row for row in rows if row["head"] == head and row["method"] == name]
                colour, line = _LOOK.get(name, ("#666666", "-."))
                places = range(len(own))
                axis.plot(places, [row[kind] for row in own], line, color=colour, marker="o", markersize=3, label=name)
                if name == "self_contrast":
                    axis.fill_between(places, [r[low] for r in own], [r[high] for r in own], color=colour, alpha=0.15)
            axis.set_xticks(range(len(own)), [row["k"] for row in own])
        axes[0, column].set(title=head)
        axes[1, column].set(xlabel="dimensions swapped")
    axes[0, 0].set_ylabel("attention moved (shift)")
    axes[1, 0].set_ylabel("logit carried")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, [label.replace("_", " ") for label in labels], loc="outside lower center",
                  ncols=min(len(labels), 6), frameon=False)  # fmt: skip
    return figure


def _map(result: Result) -> Figure:
    rows = result.tables["atlas"]
    layers, heads = (1 + max(row[name] for row in rows) for name in ("layer", "index"))
    figure = new_figure(8, 4.4)
    panels = (("directions", "directions above the null", None), ("logit_share", "share of the logit they carry", 1.0))
    for axis, (column, title, top) in zip(figure.subplots(2, 1, sharex=True), panels, strict=True):
        grid = np.full((heads, layers), np.nan)
        for row in rows:
            grid[row["index"], row["layer"]] = row[column]
        image = axis.imshow(grid, cmap="viridis", vmin=0, vmax=top, aspect="auto", origin="lower")
        figure.colorbar(image, ax=axis)
        axis.set(ylabel="head", title=title)
    axis.set_xlabel("layer")
    return figure
