"""Figures 8 and 25: the terms of relative attention at the start and at the end of training, one prompt.

Figure 8 shows four heads, one of each kind, with the end's terms over rotated singular vectors below; figure 25 all
heads of the circuit. Terms are in the order of the singular values, so that the largest term may stand anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from qkscope.analyses.sparsity import group_difference
from qkscope.maths.relative import sparsity
from qkscope.page.figures import INK, ORIGINAL, REST, TARGET, new_figure
from qkscope.papers.franco2026.model_sweep import Sweep, swept
from qkscope.papers.registry import NANO, Settings, figure
from qkscope.papers.tables import Files, Row, files_of, model_name
from qkscope.runs.claims import Claim
from qkscope.runs.result import Result

FOUR = ("previous token", "induction", "S-inhibition", "name mover")


@figure("franco2026", "fig8", "Relative attention split: four heads, before and after", model=NANO, roles=FOUR)
@figure("franco2026", "fig25", "Relative attention split: all heads of the circuit", model=NANO)
def run(settings: Settings, roles: Sequence[str] | None = None) -> Result:
    """Terms of one prompt, and what they are on average."""
    found = swept(settings)
    chosen = [i for i, edge in enumerate(found.edges) if edge.circuit]
    if roles is not None:
        there = [found.edges[i].duty.role for i in chosen]
        chosen = [chosen[there.index(role)] for role in roles if role in there] or chosen[: len(roles)]
    rows = [_row(found, i) for i in chosen]
    arrays = {
        f"{when}/{name}": values[name][chosen]
        for when, values in (("start", found.first), ("end", found.last))
        for name in ("terms_first", "terms_mean", "terms_rotated", "sigma")
    }
    end = sum(row["sparsity_end"] for row in rows) / len(rows)
    start = sum(row["sparsity_start"] for row in rows) / len(rows)
    rotated = sum(row["rotated_end"] for row in rows) / len(rows)
    return settings.result(
        answer=(
            f"Mean sparsity of the terms of {len(rows)} edges goes from {start:.2f} to {end:.2f} over training "
            f"(rotated vectors at the end: {rotated:.2f})."
            if found.trained
            else f"Mean sparsity of the terms of {len(rows)} edges is {end:.2f} (rotated vectors: {rotated:.2f})."
        ),
        tables={"heads": rows},
        arrays=arrays,
        claims=_claims(found, chosen, rows),
        model=settings.model,
        about=found.about(),
    )


def _row(found: Sweep, i: int) -> Row:
    edge = found.edges[i]
    start, end = ({name: values[name][i] for name in values if name != "right"} for values in (found.first, found.last))
    terms = end["terms_first"]
    largest = int(terms.abs().argmax())
    return {
        "head": str(edge.head), "role": edge.duty.role, "from": edge.duty.query, "to": edge.duty.key,
        "relative": float(terms.sum()), "sparsity_first": float(sparsity(terms)),
        "sparsity_start": _mean(start["sparsity"]), "sparsity_end": _mean(end["sparsity"]),
        "rotated_start": _mean(start["rotated"]), "rotated_end": _mean(end["rotated"]),
        "largest_vector": largest, "largest_share": float(terms[largest] / terms.sum()),
        "vectors": len(terms), "sigma_correlation": _mean(end["sigma_correlation"]),
        "count": _mean(end["count"]), "count_tol": _mean(end["count_tol"]), "count_null": _mean(end["count_null"]),
        "count_tol_null": _mean(end["count_tol_null"]),
    }  # fmt: skip


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _claims(found: Sweep, chosen: list[int], rows: list[Row]) -> list[Claim]:
    correlation = sum(row["sigma_correlation"] for row in rows) / len(rows)
    # among m vectors whose terms know nothing of σ, Spearman's correlation has standard deviation 1/√(m − 1)
    chance = 2 / math.sqrt(rows[0]["vectors"] - 1)
    beyond = [row["largest_vector"] >= row["vectors"] / 4 for row in rows]
    end = group_difference(found.last, chosen)
    claims = [
        Claim(
            "Share of heads whose largest term is not among the largest quarter of singular values (control: .75, "
            "were the place of the largest term random)",
            "the largest terms can be those with the smallest singular values",
            sum(beyond) / len(beyond), 0.75, "ours > 0.5 * control",
        ),
        Claim(
            "Mean rank correlation of |term| and singular value (control: two standard deviations of chance)",
            "low rank is not the cause of sparsity",
            correlation, chance, "ours < 0.5",
        ),
        Claim(
            "Terms are sparser than over rotated vectors at the end: upper end of the interval of sparsity − rotated",
            "most of relative attention comes from a small set of singular vectors",
            end[2], 0.0, "ours < control",
        ),
    ]  # fmt: skip
    if found.trained:
        change = group_difference(found.last, chosen, found.first)
        claims.append(Claim("Sparsity less rotated falls from start to end: upper end of its interval",
                            "relative attention becomes significantly sparse", change[2], 0.0,
                            "ours < control"))  # fmt: skip
    return claims


# ---------------------------------------------------------------------- the drawing


@run.drawing
def draw(result: Result) -> Files:
    """One column per head: start, end, and the end over rotated singular vectors."""
    rows = [dict(row) for row in result.tables["heads"]]
    arrays = {key: value.numpy() for key, value in result.arrays.items()}
    trained = not np.array_equal(arrays["start/terms_first"], arrays["end/terms_first"])
    lines = [
        ("start", "start/terms_first", ORIGINAL),
        ("end", "end/terms_first", TARGET),
        ("end, rotated", "end/terms_rotated", REST),
    ][0 if trained else 1 :]
    columns = min(len(rows), 6 if len(rows) > 8 else 4)
    blocks = -(-len(rows) // columns)
    figure = new_figure(2.5 * columns + 0.4, 1.35 * len(lines) * blocks + 0.7)
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
    return files_of(result, figure)


def _bars(axis: Axes, terms: Any, colour: str) -> None:
    axis.bar(np.arange(len(terms)), terms, 0.9, color=colour)
    axis.axhline(0, color=INK, lw=0.5)
    axis.tick_params(labelsize=7.5)
    low, high = min(float(np.nanmin(terms)), 0.0), max(float(np.nanmax(terms)), 0.0)
    axis.set_ylim(low - 0.05 * (high - low), high + 0.5 * (high - low))  # room for the words
    total, spread = float(np.nansum(terms)), float(np.nanmean(np.square(terms)))
    sparsity = float(np.nanmean(np.abs(terms))) ** 2 / spread if spread else float("nan")
    words, place = f"sum {total:.1f}\nsparsity {sparsity:.2f}", axis.transAxes
    axis.text(0.98, 0.95, words, transform=place, ha="right", va="top", fontsize=7)


def _title(row: dict[str, Any]) -> str:
    return f"{row['head']} {row['role']}\n{row['from']} → {row['to']}"
