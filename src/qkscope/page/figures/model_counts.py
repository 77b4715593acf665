"""Figure 9: how many singular vectors reconstruct relative attention, per head and over training, beside the null."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from qkscope.page.figures.captions import model_name
from qkscope.page.figures.model_sparsity import smoothed, steps_axis
from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result

Row = dict[str, Any]


def draw(result: Result) -> dict[str, str | bytes]:
    """Left the distribution at every head, right the mean over training where there is one."""
    name = result.experiment.split("/")[1]
    rows = [dict(row) for row in result.tables["counts"]]
    training = [dict(row) for row in result.tables.get("training", ())]
    heads = list(dict.fromkeys((row["head"], f"{row['from']}→{row['to']}", row["circuit"]) for row in rows))
    width = max(0.3 * len(heads) + 1.2, 4.5)
    figure = new_figure(width + (4.2 if training else 0), 4.2)
    with styled():
        if training:
            left, right = figure.subplots(1, 2, width_ratios=[width, 4.0])
            _training(right, training)
        else:
            left = figure.subplots()
        _boxes(left, rows, heads)
        left.set_title(f"{model_name(result)}: vectors that reach the relative logit")
    return with_page(result, {name: figure})


def _boxes(axis: Axes, rows: Sequence[Row], heads: Sequence[tuple[str, str, bool]]) -> None:
    for i, (head, way, circuit) in enumerate(heads):
        own = {row["what"]: row for row in rows if (row["head"], f"{row['from']}→{row['to']}") == (head, way)}
        colour = TARGET if circuit else ORIGINAL
        row = own["count"]
        axis.plot([i, i], [row["least"], row["most"]], color=colour, lw=0.8)
        axis.plot([i, i], [row["quarter"], row["three_quarters"]], color=colour, lw=7, solid_capstyle="butt", alpha=0.6)
        axis.plot(i, row["median"], "_", color=INK, ms=9, mew=1.6)
        axis.plot(i, own["count_tol"]["mean"], "o", color="white", mec=INK, ms=3.6)
        axis.plot(i, own["count_tol_null"]["mean"], "x", color=INK, ms=4.5)
    axis.set_xticks(range(len(heads)), [f"{head} {way}" for head, way, _ in heads], rotation=60, ha="right",
                    rotation_mode="anchor", fontsize=7)  # fmt: skip
    axis.axhspan(1, 4, color=REST, alpha=0.25, lw=0)
    axis.set_ylim(0, None)
    axis.set_ylabel("singular vectors")
    handles = [
        axis.plot([], [], color=TARGET, lw=6, alpha=0.6, label="circuit")[0],
        axis.plot([], [], color=ORIGINAL, lw=6, alpha=0.6, label="heads outside")[0],
        axis.plot([], [], "o", color="white", mec=INK, ms=3.6, label="mean at 99% of r")[0],
        axis.plot([], [], "x", color=INK, ms=4.5, label="random terms at 99%, mean")[0],
    ]
    axis.legend(handles=handles, frameon=False, fontsize=7.5, ncols=2, loc="upper right")


def _training(axis: Axes, rows: Sequence[Row]) -> None:
    inside = [row for row in rows if row["circuit"]]
    x = steps_axis(axis, [row["step"] for row in inside])
    lines = (("count", "reach r", TARGET, "-"), ("count_tol", "reach 99% of r", TARGET, "--"),
             ("count_tol_null", "random terms at 99%", INK, ":"))  # fmt: skip
    for column, label, colour, style in lines:
        axis.plot(x, smoothed([row[column] for row in inside]), style, color=colour, lw=1.5, label=label)
    axis.set_ylim(0, None)
    axis.axhspan(1, 4, color=REST, alpha=0.25, lw=0)
    axis.set_title("mean over the circuit, prompts with r > 0")
    axis.legend(frameon=False, fontsize=8)
