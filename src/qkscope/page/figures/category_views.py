"""Figure 6: keys and queries in the categorical subspace, and thirteen categories of keys."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np

from qkscope.page.figures.captions import model_name, name_axes
from qkscope.page.figures.style import new_figure, styled, with_page
from qkscope.result import Result

_COLOURS = ("#c0392b", "#2f7d4f", "#2d6cb5", "#d98e04", "#7d4fa3")


def draw(result: Result) -> dict[str, str | bytes]:
    """(a) three components and the plane of the last two, for the best head; (b) keys of thirteen categories."""
    figure = new_figure(13.4, 4.7)
    names = {panel: [row["label"] for row in result.tables["labels"] if row["panel"] == panel] for panel in "ab"}
    view = dict(result.tables["views"][0])
    arrays = {name: value.numpy() for name, value in result.arrays.items()}
    with styled():
        solid: Any = figure.add_subplot(1, 3, 1, projection="3d")
        plane = figure.add_subplot(1, 3, 2)
        fine = figure.add_subplot(1, 3, 3)
        for i, name in enumerate(names["a"]):
            colour = _COLOURS[i % len(_COLOURS)]
            for side, marker, size, alpha in (("keys", "o", 9, 0.35), ("queries", "^", 26, 0.9)):
                label = "key_labels" if side == "keys" else "query_labels"
                points = arrays[f"best/{side}"][arrays[f"best/{label}"] == i]
                look: dict[str, Any] = {"marker": marker, "s": size, "alpha": alpha, "color": colour, "linewidths": 0}
                solid.scatter(*points.T, **look)
                plane.scatter(points[:, 1], points[:, 2], label=name if side == "keys" else None, **look)
        name_axes(solid)
        solid.set_title(f"{view['head']}: keys • and queries ▴\napart on PC 1: AUC {view['apart_on_pc1']:.2f}")
        plane.set(xlabel="PC 2", ylabel="PC 3", xticks=[], yticks=[])
        plane.set_title(
            f"PCs 2 and 3: cosine of centroids {view['cosine_pc23']:.2f}\n"
            f"(95% of random pairings below {view['cosine_pc23_shuffled_high']:.2f})"
        )
        legend = plane.legend(frameon=False, fontsize=8, markerscale=1.6, loc="best")
        for handle in legend.legend_handles:
            handle.set_alpha(1)  # type: ignore[union-attr]
        _fine(fine, arrays, names["b"])
        clusters = {row["space"]: row["accuracy"] for row in result.tables["clusters"]}
        fine.set_title(
            f"13 categories, keys: nearest centroid {clusters['category directions']:.0%}\n"
            f"(key PCA {clusters['key PCA']:.0%}, shuffled words {clusters['category directions, shuffled words']:.0%})"
        )
        figure.suptitle(
            f"{model_name(result)}: items of lists in the categorical subspace, held-out words", fontsize=10
        )
    return with_page(result, {result.experiment.split("/")[1]: figure})


def _fine(axis: Any, arrays: dict[str, Any], names: list[str]) -> None:
    """Keys on the two of their first three components that tell categories apart best; the third is mostly position."""
    colours = matplotlib.colormaps["tab20"]
    points, labels = arrays["fine/keys"], arrays["fine/key_labels"]
    means = np.stack([points[labels == i].mean(axis=0) for i in np.unique(labels)])
    x, y = sorted(np.argsort(means.var(axis=0) / points.var(axis=0))[-2:])
    for i, name in enumerate(names):
        own = points[labels == i]
        axis.scatter(own[:, x], own[:, y], s=9, alpha=0.6, color=colours(i), linewidths=0, label=name)
    axis.set(xlabel=f"PC {x + 1}", ylabel=f"PC {y + 1}", xticks=[], yticks=[])
    axis.legend(frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(1, 0.5), markerscale=1.6)
