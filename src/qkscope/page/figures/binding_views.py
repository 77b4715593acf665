"""Figures 8 and 17: boxes and questions as points, coloured by order and by word."""

from __future__ import annotations

from typing import Any

import matplotlib

from qkscope.page.figures.captions import model_name, name_axes
from qkscope.page.figures.style import new_figure, styled, with_page
from qkscope.result import Result

_FEATURES = ("order", "lexical")


def draw(result: Result) -> dict[str, str | bytes]:
    """One line per feature: three components, the plane of the last two, and UMAP where it was installed."""
    name = result.experiment.split("/")[1]
    arrays = {key: value.numpy() for key, value in result.arrays.items()}
    mapped = "lexical/umap_keys" in arrays
    columns = 3 if mapped else 2
    figure = new_figure(4.3 * columns + 0.4, 8.0)
    with styled():
        for line, feature in enumerate(_FEATURES):
            labels = [row["label"] for row in result.tables["labels"] if row["feature"] == feature]
            space = feature if name == "fig8" else "whole head"
            row = next(dict(r) for r in result.tables["views"] if (r["feature"], r["space"]) == (feature, space))
            solid: Any = figure.add_subplot(2, columns, line * columns + 1, projection="3d")
            plane = figure.add_subplot(2, columns, line * columns + 2)
            _scatter(solid, arrays, feature, labels, slice(0, 3))
            _scatter(plane, arrays, feature, labels, slice(1, 3))
            name_axes(solid)
            where = (
                f"{feature} subspace ({row['dimensions']} dimensions)" if name == "fig8" else f"{space}, by {feature}"
            )
            solid.set_title(
                f"{row['head']}, {where}\nkeys • and queries ▴ apart on PC 1: AUC {row['apart_on_pc1']:.2f}"
            )
            plane.set(xlabel="PC 2", ylabel="PC 3", xticks=[], yticks=[])
            plane.set_title(
                f"PCs 2, 3: cosine {row['cosine_pc23']:.2f} (random {row['cosine_pc23_shuffled_high']:.2f}); whole "
                f"space {row['cosine']:.2f} ({row['cosine_shuffled_high']:.2f})\n"
                f"keys nearest to their own label {row['clusters_3_pcs']:.0%} in 3 PCs, {row['clusters']:.0%} in all"
            )
            legend = plane.legend(frameon=False, fontsize=7.5, ncols=1, loc="center left", bbox_to_anchor=(1, 0.5),
                                  title="place" if feature == "order" else "word", markerscale=1.8)  # fmt: skip
            for handle in legend.legend_handles:
                handle.set_alpha(1)  # type: ignore[union-attr]
            if f"{feature}/umap_keys" in arrays:
                flat = figure.add_subplot(2, columns, line * columns + 3)
                shown = {f"{feature}/{side}": arrays[f"{feature}/umap_{side}"] for side in ("keys", "queries")}
                _scatter(flat, {**arrays, **shown}, feature, labels, slice(0, 2))
                flat.set(xlabel="UMAP 1", ylabel="UMAP 2", xticks=[], yticks=[])
                flat.set_title("UMAP")
        figure.suptitle(f"{model_name(result)}: held-out prompts", fontsize=10)
    return with_page(result, {name: figure})


def _scatter(axis: Any, arrays: dict[str, Any], feature: str, labels: list[str], components: slice) -> None:
    colours = matplotlib.colormaps["viridis" if feature == "order" else "tab10"]
    for i, label in enumerate(labels):
        colour = colours(i / max(len(labels) - 1, 1)) if feature == "order" else colours(i)
        for side, marker, size, alpha in (("keys", "o", 10, 0.45), ("queries", "^", 26, 0.9)):
            of = arrays[f"{feature}/{'key' if side == 'keys' else 'query'}_labels"]
            points = arrays[f"{feature}/{side}"][of == i][:, components]
            axis.scatter(*points.T, marker=marker, s=size, alpha=alpha, color=colour, linewidths=0,
                         label=label if side == "keys" else None)  # fmt: skip
