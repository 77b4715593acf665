"""Swaps in language models, drawn: attention on the right and the target key after each, its shift
with an interval, and how the shift grows with the number of dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from qkscope.results.result import Result
from qkscope_papers.figures import (
    INK,
    ORIGINAL,
    REST,
    colours_of,
    legend_below,
    line_of,
    new_figure,
    paired_bars,
)
from qkscope_papers.tables import Files, Row, column, distinct, files_of, model_name, pick

Shown = Sequence[tuple[str, str]]  # conditions and their labels
_LINES = {
    "lexical": "lexical", "order": "order", "category": "category, pooled", "key_pca": "key PCA",
    "cov_qk": "Cov_q Cov_k", "random": "random",
}  # fmt: skip
_COLUMNS = 4


def _by_head(result: Result) -> dict[str, dict[str, Row]]:
    """Conditions of each head, those of the paper's estimators as ``paper: both``."""
    cells: dict[str, dict[str, Row]] = {}
    for table, prefix in (("swap", ""), ("paper_swap", "paper: ")):
        for row in result.tables.get(table, ()):
            cells.setdefault(row["head"], {})[prefix + row["condition"]] = dict(row)
    return cells


def draw_full(
    result: Result, conditions: Shown, heads: int | None = None, paper: Shown = ()
) -> Files:
    """The first heads with every condition, the curve of the first, and what the model then
    answers.

    ``paper``: the conditions that the paper's own figure has, which are drawn first and apart.
    """
    cells = _by_head(result)
    shown = list(cells)[:heads]
    widths = [0.42 * len(conditions) + 0.6] * len(shown) + [4.4]
    figure = new_figure(sum(widths) + 0.6, 5.6)
    grid = figure.add_gridspec(2, len(shown) + 1, width_ratios=widths, height_ratios=[3, 2])
    for i, head in enumerate(shown):
        top = figure.add_subplot(grid[0, i])
        low = figure.add_subplot(grid[1, i])
        _attention(top, cells[head], [*paper, *conditions], head)
        top.set_xticks([])
        _shifts(low, cells[head], [*paper, *conditions])
        if paper:
            _set_apart(top, low, len(paper))
        if i == 0:
            top.set_ylabel("attention")
            low.set_ylabel("shift")
            legend_below(figure, top, 2, loc="outside lower left")
    patched = result.tables.get("downstream", ())
    _curve(
        figure.add_subplot(grid[0, -1] if patched else grid[:, -1]),
        result.tables["curve"],
        shown[0],
    )
    if patched:
        _downstream(figure.add_subplot(grid[1, -1]), patched)
    figure.suptitle(
        f"{model_name(result)}: features swapped between the right key and another", fontsize=10
    )
    return files_of(result, figure)


def draw_multiples(result: Result, conditions: Shown) -> Files:
    """One small panel per head."""
    cells = _by_head(result)
    columns = min(_COLUMNS, len(cells))
    lines = -(-len(cells) // columns)
    figure = new_figure(2.8 * columns + 0.5, 2.7 * lines + 0.9)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, (head, cell) in zip(axes, cells.items(), strict=False):
        _attention(axis, cell, conditions, head)
    for axis in axes[len(cells) :]:
        axis.set_axis_off()
    for axis in axes[::columns]:
        axis.set_ylabel("attention")
    legend_below(figure, axes[0], 2)
    return files_of(result, figure)


def _set_apart(top: Axes, low: Axes, count: int) -> None:
    """A line behind the start and the paper's bars, and a heading on either side."""
    edge = count + 0.5
    for axis in (top, low):
        axis.axvline(edge, color=INK, lw=1.0)
        axis.axvspan(axis.get_xlim()[0], edge, color="#f3f0e6", zorder=-5)
    look: Any = {"transform": low.get_xaxis_transform(), "fontsize": 8, "va": "top"}
    low.text(edge - 0.1, 0.99, "the paper's bars", ha="right", **look)
    low.text(edge + 0.1, 0.99, "ours, and controls", ha="left", **look)


def _ticks(axis: Axes, labels: Sequence[str]) -> None:
    axis.set_xticks(
        range(len(labels)),
        list(labels),
        rotation=50,
        ha="right",
        rotation_mode="anchor",
        fontsize=8,
    )
    axis.set_xlim(-0.6, len(labels) - 0.4)


def _attention(axis: Axes, cell: dict[str, Row], conditions: Shown, title: str) -> None:
    """Attention on the right and on the target key: before, and after each swap."""
    shown = [(label, cell[name]) for name, label in conditions if name in cell]
    start = shown[0][1]
    orig = [start["orig_before"], *(row["orig_after"] for _, row in shown)]
    target = [start["target_before"], *(row["target_after"] for _, row in shown)]
    paired_bars(axis, orig, target, "right")
    axis.axhline(start["orig_before"], color=ORIGINAL, lw=0.7, ls=":")
    axis.set_title(title)
    _ticks(axis, ["start", *(label for label, _ in shown)])


def _shifts(axis: Axes, cell: dict[str, Row], conditions: Shown) -> None:
    """Shift of a_target / (a_right + a_target), with its interval; the first place is the unchanged
    start.
    """
    shown = [
        (f"{label} ({cell[name]['rank']})", cell[name])
        for name, label in conditions
        if name in cell
    ]
    values = [row["shift"] for _, row in shown]
    errors = [
        [max(row["shift"] - row["shift_low"], 0) for _, row in shown],
        [max(row["shift_high"] - row["shift"], 0) for _, row in shown],
    ]
    places = list(range(1, len(shown) + 1))
    colours = [REST if row["kind"] in ("random", "sham") else "#7f97b5" for _, row in shown]
    axis.bar(places, values, 0.6, color=colours)
    axis.errorbar(places, values, errors, fmt="none", ecolor=INK, elinewidth=0.9, capsize=2)
    axis.axhline(0, color=INK, lw=0.6)
    _ticks(axis, ["start", *(label for label, _ in shown)])


def _curve(axis: Axes, rows: Sequence[Any], head: str) -> None:
    own = pick(rows, head=head)
    colours = colours_of(list(_LINES))
    for method, label in _LINES.items():
        line = sorted((row for row in own if row["method"] == method), key=lambda row: row["k"])
        if not line:
            continue
        sizes = [row["k"] for row in line]
        colour = colours[method]
        style: Any = {"marker": "o", "ms": 3.5, "lw": 1.4, "color": colour, "ls": line_of(method)}
        axis.plot(sizes, [row["shift"] for row in line], label=label, **style)
        axis.fill_between(
            sizes, column(line, "low"), column(line, "high"), color=colour, alpha=0.15, lw=0
        )
    axis.set(xlabel="dimensions swapped", ylabel="shift")
    axis.set_xticks(sorted({row["k"] for row in own}))
    axis.set_title(f"{head}: by size")
    axis.legend(frameon=False, fontsize=8, loc="best")


def _downstream(axis: Axes, rows: Sequence[Any]) -> None:
    """How often the model then answers with the right and with the target key."""
    groups = distinct(rows, "heads")
    own = pick(rows, heads=groups[-1])
    names = {"both": "both", "random_both": "random", "key_pca_both": "key PCA"}
    labels = ["start", *(names.get(row["condition"], str(row["condition"])) for row in own)]
    right = [own[0]["accuracy_before"], *(row["accuracy_after"] for row in own)]
    target = [own[0]["target_before"], *(row["target_after"] for row in own)]
    paired_bars(axis, right, target)
    count = groups[-1].count(",") + 1
    axis.set_title(
        f"the model's answer, {count} head{'s' if count > 1 else ''} patched, n={own[0]['n']}"
    )
    axis.set_ylabel("share of prompts")
    axis.set_xticks(range(len(labels)), labels, fontsize=8)
