"""Figure 7b: sparsity over training beside its nulls and heads outside the circuit; of one checkpoint, by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from qkscope.page.figures.captions import model_name
from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result

Row = dict[str, Any]
_WINDOW = 8  # of the running mean, where there are many checkpoints (the paper's)
_GREEN = "#5a9367"


def draw(result: Result) -> dict[str, str | bytes]:
    """Three panels: sparsity with its nulls; the difference with intervals; the answer. Or one, without training."""
    name = result.experiment.split("/")[1]
    rows = [dict(row) for row in result.tables.get("training", ())]
    return with_page(result, {name: _over_training(result, rows) if rows else _by_head(result)})


def steps_axis(axis: Axes, steps: Sequence[Any]) -> Sequence[float]:
    """Places of the checkpoints: by number where they have one, on a scale that shows early ones too."""
    if all(isinstance(step, int) for step in steps):
        axis.set_xscale("symlog", linthresh=max(min((s for s in steps if s > 0), default=1), 1))
        # ticks of every checkpoint would run into each other: the ends, and what lies well apart
        shown = [steps[0]]
        for step in steps[1:]:
            if step > 1.9 * max(shown[-1], 1):
                shown.append(step)
        axis.set_xticks(shown, [f"{step:,}" for step in shown], fontsize=8)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("training step")
        return list(steps)
    axis.set_xticks(range(len(steps)), [str(step) for step in steps], fontsize=8)
    return list(range(len(steps)))


def smoothed(values: Sequence[float]) -> list[float]:
    """A running mean over eight checkpoints where there are many."""
    if len(values) < 3 * _WINDOW:
        return list(values)
    half = _WINDOW // 2
    windows = [values[max(i - half, 0) : i + half] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _over_training(result: Result, rows: Sequence[Row]) -> Figure:
    inside, outside = ([row for row in rows if row["circuit"] is wanted] for wanted in (True, False))
    figure = new_figure(11.2, 3.7)
    with styled():
        left, middle, right = figure.subplots(1, 3)
        x = steps_axis(left, [row["step"] for row in inside])
        lines: list[tuple[Sequence[Row], str, str, str, str]] = [
            (inside, "sparsity", "circuit", TARGET, "-"), (inside, "rotated", "rotated U and V", REST, "-"),
            (inside, "rotated_shared", "rotated head space", REST, ":"),
            (outside, "sparsity", "heads outside", ORIGINAL, "-"),
            (outside, "rotated", "their rotated", ORIGINAL, ":"),
        ]  # fmt: skip
        for own, column, label, colour, style in lines:
            if own:
                left.plot(x, smoothed([row[column] for row in own]), style, color=colour, lw=1.6, label=label)
        left.set_ylim(0, None)
        left.set_title("sparsity of the terms (1: all equal)")
        left.legend(frameon=False, fontsize=7.5, loc="lower left")
        steps_axis(middle, [row["step"] for row in inside])
        for own, label, colour in ((inside, "circuit", TARGET), (outside, "heads outside", ORIGINAL)):
            if own:
                middle.plot(x, [row["difference"] for row in own], "o-", ms=3, color=colour, lw=1.4, label=label)
                middle.fill_between(x, [row["low"] for row in own], [row["high"] for row in own], color=colour,
                                    alpha=0.2, lw=0)  # fmt: skip
        middle.axhline(0, color=INK, lw=0.6)
        middle.set_title("sparsity − rotated, 95% interval")
        middle.legend(frameon=False, fontsize=8)
        steps_axis(right, [row["step"] for row in inside])
        if all(row["accuracy"] is not None for row in inside):
            right.plot(x, [row["accuracy"] for row in inside], "o-", ms=3, color=_GREEN, label="answers right")
            right.axhline(0.5, color=_GREEN, lw=0.7, ls=":")
        right.plot(x, [row["attention"] for row in inside], "o-", ms=3, color=TARGET, label="attention, circuit")
        if outside:
            right.plot(x, [row["attention"] for row in outside], "o-", ms=3, color=ORIGINAL, label="attention, outside")
        right.set_ylim(0, 1.03)
        right.set_title("what the model does")
        right.legend(frameon=False, fontsize=8)
        figure.suptitle(f"{model_name(result)}: relative attention over its singular vectors", fontsize=10)
    return figure


def _by_head(result: Result) -> Figure:
    rows = [dict(row) for row in result.tables["sparsity"]]
    figure = new_figure(max(0.34 * len(rows) + 1.5, 5.0), 4.0)
    with styled():
        axis = figure.subplots()
        places = list(range(len(rows)))
        axis.bar(places, [row["sparsity"] for row in rows], 0.62,
                 color=[TARGET if row["circuit"] else ORIGINAL for row in rows])  # fmt: skip
        axis.plot(places, [row["rotated"] for row in rows], "_", ms=11, mew=2, color=INK, label="rotated U and V")
        axis.plot(places, [row["rotated_shared"] for row in rows], "_", ms=11, mew=1.5, color=REST,
                  label="rotated head space")  # fmt: skip
        axis.set_xticks(places, [f"{row['head']} {row['from']}→{row['to']}" for row in rows], rotation=55, ha="right",
                        rotation_mode="anchor", fontsize=7.5)  # fmt: skip
        axis.set_ylabel("sparsity of the terms")
        axis.legend(frameon=False, loc="upper right", fontsize=8, ncols=2)
        axis.set_ylim(0, 1.25 * max(row["rotated_shared"] for row in rows))
        axis.set_title(f"{model_name(result)}: circuit (orange) and heads outside it (blue)")
    return figure
