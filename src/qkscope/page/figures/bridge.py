"""The bridge: how much of a feature each singular vector carries, and what swapping singular vectors does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from qkscope.page.figures.captions import model_name
from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result

Row = dict[str, Any]
_LINES = {
    "contrast": ("contrast's own directions", TARGET, "-"), "singular": ("singular vectors, by share", ORIGINAL, "-"),
    "omega_svd": ("singular vectors, by σ", ORIGINAL, "--"), "key_pca": ("key PCA", "#5a9367", "-"),
    "rotated": ("rotated vectors, by share", INK, ":"), "random": ("random", REST, "-"),
}  # fmt: skip


def draw(result: Result) -> dict[str, str | bytes]:
    """A column per head: the lexical feature over the singular vectors, its overlaps, and swaps by size."""
    name = result.experiment.split("/")[1]
    rows = [dict(row) for row in result.tables["alignment"] if row["contrast"] == "lexical"]
    curve = [dict(row) for row in result.tables["curve"] if row["contrast"] == "lexical"]
    figure = new_figure(3.1 * len(rows) + 0.6, 7.4)
    with styled():
        axes = figure.subplots(3, len(rows), squeeze=False)
        for i, row in enumerate(rows):
            carried = result.arrays[f"carried/lexical/{row['head']}"].numpy()
            _carried(axes[0, i], carried, row)
            _overlaps(axes[1, i], row)
            _swaps(axes[2, i], [r for r in curve if r["head"] == row["head"]], row)
        axes[0, 0].set_ylabel("share of tr ΔC")
        axes[1, 0].set_ylabel("share of the subspace")
        axes[2, 0].set_ylabel("shift of attention")
        axes[1, 0].legend(frameon=False, fontsize=7, ncols=3, loc="upper left", columnspacing=1.0)
        handles, labels = axes[2, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        figure.suptitle(f"{model_name(result)}: the lexical feature against singular vectors", fontsize=10)
    return with_page(result, {name: figure})


def _carried(axis: Axes, carried: Any, row: Row) -> None:
    total = float(carried.sum()) or 1.0  # a feature that is nothing at this head has no shares
    axis.bar(np.arange(len(carried)), carried / total, 0.9, color=ORIGINAL)
    axis.axhline(0, color=INK, lw=0.5)
    carriers = f"{row['head']}, rank {row['rank']}: {row['vectors']:.0f} vectors carry 90%"
    controls = ", ".join(f"{label} {row[f'vectors_{kind}']:.0f}" for kind, label in
                         (("rotated", "rotated"), ("random", "random"), ("key_pca", "key PCA")))  # fmt: skip
    axis.set_title(f"{carriers}\n({controls})", fontsize=8.5)
    axis.set_xlabel("singular vector, largest σ first", fontsize=8)


def _overlaps(axis: Axes, row: Row) -> None:
    kinds = (("", "by share", ORIGINAL), ("_leading", "by σ", "#7f97b5"), ("_rotated", "rotated", INK),
             ("_key_pca", "key PCA", "#5a9367"), ("_random", "random axes", REST))  # fmt: skip
    for j, (suffix, label, colour) in enumerate(kinds):
        bars = axis.bar([side + 0.17 * (j - 2) for side in (0, 1)], [row[f"query{suffix}"], row[f"key{suffix}"]], 0.16,
                        color=colour, label=label)  # fmt: skip
        axis.bar_label(bars, fmt="%.2f", fontsize=6.5)
    axis.set_xticks([0, 1], ["query space", "key space"], fontsize=8)
    axis.set_ylim(0, 1.45)
    axis.set_yticks([0, 0.5, 1])
    axis.set_title(f"in the span of {row['rank']} vectors", fontsize=8.5)


def _swaps(axis: Axes, rows: Sequence[Row], row: Row) -> None:
    for method, (label, colour, style) in _LINES.items():
        line = sorted((r for r in rows if r["method"] == method), key=lambda r: r["k"])
        x = [r["k"] for r in line]
        axis.plot(x, [r["shift"] for r in line], style, marker="o", ms=3, lw=1.4, color=colour, label=label)
        axis.fill_between(x, [r["low"] for r in line], [r["high"] for r in line], color=colour, alpha=0.1, lw=0)
    axis.axvline(row["rank"], color=REST, lw=0.8, ls=":")
    axis.set_xlabel("dimensions swapped", fontsize=8)
