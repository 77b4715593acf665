"""What a nano model learns, and when: first-question accuracy of every task over training, with chance beside it."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from qkscope.page.figures.style import INK, REST, new_figure, styled, with_page
from qkscope.runs.result import Result

_PANELS = {
    "indirect objects": ("ioi",),
    "induction": ("induction",),
    "box binding, nine boxes": ("binding/list", "binding/sentence", "binding/question"),
    "list filtering, five of 25 items": ("filter/list", "filter/bullets", "filter/question"),
}
_COLOURS = ("#3b6ea8", "#d9822b", "#5a9a5a")


def draw(result: Result) -> dict[str, str | bytes]:
    """A panel per task; a line per form with its 95% interval, chance dashed, and the loss faint on the right."""
    rows = [dict(row) for row in result.tables["accuracy"]]
    since = result.tables["parts"][0]["all_forms_from"]
    figure = new_figure(11.5, 5.6)
    with styled():
        axes = figure.subplots(2, 2, sharex=True, sharey=True)
        for axis, (title, names) in zip(axes.flat, _PANELS.items(), strict=True):
            _panel(axis, title, {name: [row for row in rows if row["task"] == name] for name in names}, since)
        for axis in axes[1]:
            axis.set_xlabel("training step")
        for axis in axes[:, 0]:
            axis.set_ylabel("accuracy")
        figure.supxlabel(
            f"Solid: the likeliest of all tokens is right (first question of {rows[0]['n']} test prompts; band: 95% "
            "interval). Dotted: a right candidate is likelier than the others. Grey, dashed: chance among candidates."
            + ("\nFrom the vertical line on, all forms of binding are trained." if since >= 0 else ""),
            fontsize=8.5,
        )
    return with_page(result, {"accuracy": figure})


def _panel(axis: Axes, title: str, lines: dict[str, list[dict[str, Any]]], since: int) -> None:
    for colour, (name, rows) in zip(_COLOURS, lines.items(), strict=False):
        steps = [row["step"] for row in rows]
        axis.fill_between(steps, [row["low"] for row in rows], [row["high"] for row in rows], color=colour, alpha=0.18,
                          lw=0)  # fmt: skip
        axis.plot(steps, [row["accuracy"] for row in rows], color=colour, lw=1.4, label=name)
        axis.plot(steps, [row["choice"] for row in rows], color=colour, lw=0.9, ls=":")
        axis.axhline(rows[0]["chance"], color=REST, lw=1, ls="--", zorder=0)
    if since >= 0:
        axis.axvline(since, color=INK, lw=0.8, zorder=0)
    axis.set(title=title, ylim=(-0.02, 1.04))
    if len(lines) > 1:
        axis.legend(frameon=False, loc="lower right", fontsize=8)
