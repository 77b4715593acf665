"""What a nano model learns, drawn: accuracy on every task over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from qkscope.results.result import Result
from qkscope_papers.figures import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope_papers.tables import Files, pick

_TASKS = {
    "indirect objects": ("ioi",),
    "induction": ("induction",),
    "box binding, nine boxes": ("binding/list", "binding/sentence", "binding/question"),
    "list filtering, five of 25 items": ("filter/list", "filter/bullets", "filter/question"),
}


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Numbers to draw: a gap where there is none."""
    return [math.nan if row[name] is None else row[name] for row in rows]


def draw_accuracy(result: Result) -> Files:
    """A panel per task; a line per form with its 95% interval over training, and chance dashed."""
    rows = result.tables["accuracy"]
    since = result.tables["parts"][0]["all_forms_from"]
    figure = new_figure(11.5, 5.6)
    with styled():
        axes = figure.subplots(2, 2, sharex=True, sharey=True)
        for axis, (title, names) in zip(axes.flat, _TASKS.items(), strict=True):
            _panel(axis, title, {name: pick(rows, task=name) for name in names}, since)
        for axis in axes[1]:
            axis.set_xlabel("training step")
        for axis in axes[:, 0]:
            axis.set_ylabel("accuracy")
        figure.supxlabel(
            f"Solid: the likeliest of all tokens is right (first question of {rows[0]['n']} test "
            "prompts; band: 95% interval). Dotted: a right candidate is likelier than the "
            "others. Grey, dashed: chance among candidates."
            + (
                "\nFrom the vertical line on, all forms of binding are trained."
                if since >= 0
                else ""
            ),
            fontsize=8.5,
        )
    return with_page(result, {"accuracy": figure})


def _panel(
    axis: Axes, title: str, lines: Mapping[str, Sequence[Mapping[str, Any]]], since: int
) -> None:
    for colour, (name, rows) in zip((ORIGINAL, TARGET, "#5a9a5a"), lines.items(), strict=False):
        steps = column(rows, "step")
        axis.fill_between(
            steps, column(rows, "low"), column(rows, "high"), color=colour, alpha=0.18, lw=0
        )
        axis.plot(steps, column(rows, "accuracy"), color=colour, lw=1.4, label=name)
        axis.plot(steps, column(rows, "choice"), color=colour, lw=0.9, ls=":")
        axis.axhline(rows[0]["chance"], color=REST, lw=1, ls="--", zorder=0)
    if since >= 0:
        axis.axvline(since, color=INK, lw=0.8, zorder=0)
    axis.set(title=title, ylim=(-0.02, 1.04))
    if len(lines) > 1:
        axis.legend(frameon=False, loc="lower right", fontsize=8)
