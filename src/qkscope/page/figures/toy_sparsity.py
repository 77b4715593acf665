"""Figure 7a: sparsity and reconstruction count over training, each beside its null."""

from __future__ import annotations

from typing import Any

from qkscope.page.figures.style import ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result

_COLOURS = {"one": ORIGINAL, "two": TARGET, "none": REST}
_NAMES = {"one": "one pair present", "two": "two pairs", "none": "none"}


def draw(result: Result) -> dict[str, str | bytes]:
    """Mean over seeds; bands from the lowest to the highest end of the seeds' intervals; dashed the rotated basis."""
    rows = list(result.tables["sparsity"])
    figure = new_figure(10.2, 4.0)
    with styled():
        left, right = figure.subplots(1, 2)
        for present, colour in _COLOURS.items():
            own = [r for r in rows if r["present"] == present]
            steps = sorted({r["step"] for r in own})
            at = [[r for r in own if r["step"] == step] for step in steps]
            left.plot(steps, [_mean(x, "sparsity") for x in at], "-o", ms=3, color=colour, label=_NAMES[present])
            left.fill_between(steps, [min(r["low"] for r in x) for x in at], [max(r["high"] for r in x) for x in at],
                              color=colour, alpha=0.25, lw=0)  # fmt: skip
            left.plot(steps, [_mean(x, "rotated") for x in at], "--", color=colour, lw=1)
            right.plot(steps, [_mean(x, "count_tol") for x in at], "-o", ms=3, color=colour, label=_NAMES[present])
            right.plot(steps, [_mean(x, "null_count") for x in at], "--", color=colour, lw=1)
        left.axhline(0.1, color="#666b75", lw=0.8, ls=":")
        left.set(
            xlabel="step",
            ylabel="sparsity (mean |c|)² / mean c²",
            ylim=(0, None),
            title="dashed: U and V rotated; dotted: one term",
        )
        right.set(
            xlabel="step",
            ylabel="terms to reach 99% of r",
            ylim=(0.9, None),
            title="dashed: random terms of the same sum and norm",
        )
        left.legend(frameon=False, fontsize=8)
    return with_page(result, {result.experiment.split("/")[1]: figure})


def _mean(rows: list[Any], name: str) -> float:
    values = [row[name] for row in rows if row[name] == row[name]]
    return sum(values) / len(values) if values else float("nan")
