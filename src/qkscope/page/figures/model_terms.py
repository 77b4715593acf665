"""Figures 8 and 25: terms of relative attention in the order of the singular values, at the start and at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from qkscope.page.figures.captions import model_name
from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result


def draw(result: Result) -> dict[str, str | bytes]:
    """One column per head: start, end, and the end over rotated singular vectors."""
    name = result.experiment.split("/")[1]
    rows = [dict(row) for row in result.tables["heads"]]
    arrays = {key: value.numpy() for key, value in result.arrays.items()}
    trained = not np.array_equal(arrays["start/terms_first"], arrays["end/terms_first"])
    lines = [
        ("start", "start/terms_first", ORIGINAL), ("end", "end/terms_first", TARGET),
        ("end, rotated", "end/terms_rotated", REST),
    ][0 if trained else 1 :]  # fmt: skip
    columns = min(len(rows), 6 if len(rows) > 8 else 4)
    blocks = -(-len(rows) // columns)
    figure = new_figure(2.5 * columns + 0.4, 1.35 * len(lines) * blocks + 0.7)
    with styled():
        axes = figure.subplots(len(lines) * blocks, columns, squeeze=False, sharex=True)
        for i in range(blocks * columns):
            block, column = divmod(i, columns)
            for j, (label, key, colour) in enumerate(lines):
                axis = axes[block * len(lines) + j, column]
                if i >= len(rows):
                    axis.set_axis_off()
                    continue
                _bars(axis, arrays[key][i], colour)
                if column == 0:
                    axis.set_ylabel(label if trained else label.replace("end, ", "").replace("end", "terms"))
                if j == 0:
                    axis.set_title(_title(rows[i]), fontsize=8.5)
        for axis in axes[-1]:
            axis.set_xlabel("singular vector, largest σ first", fontsize=8)
        when = "one prompt, at the start and at the end of training" if trained else "one prompt"
        figure.suptitle(f"{model_name(result)}: terms of the relative logit; {when}", fontsize=10)
    return with_page(result, {name: figure})


def _bars(axis: Axes, terms: Any, colour: str) -> None:
    axis.bar(np.arange(len(terms)), terms, 0.9, color=colour)
    axis.axhline(0, color=INK, lw=0.5)
    axis.tick_params(labelsize=7.5)
    low, high = min(float(np.nanmin(terms)), 0.0), max(float(np.nanmax(terms)), 0.0)
    axis.set_ylim(low - 0.05 * (high - low), high + 0.5 * (high - low))  # room for the words
    total, spread = float(np.nansum(terms)), float(np.nanmean(np.square(terms)))
    sparsity = float(np.nanmean(np.abs(terms))) ** 2 / spread if spread else float("nan")
    axis.text(0.98, 0.95, f"sum {total:.1f}\nsparsity {sparsity:.2f}", transform=axis.transAxes, ha="right", va="top",
              fontsize=7)  # fmt: skip


def _title(row: dict[str, Any]) -> str:
    return f"{row['head']} {row['role']}\n{row['from']} → {row['to']}"
