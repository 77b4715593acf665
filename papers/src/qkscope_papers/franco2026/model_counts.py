"""Figures 9a and 9b: how many singular vectors reconstruct relative attention.

Per head, and over training. The paper shows GPT-2's heads in (a) and the training of Pythia-160M in
(b). Counts are of prompts on which the head attends (r > 0). Beside each the count at 99% of r, and
the count that random terms with the same sum and norm would need: a small count by itself says
little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from torch import Tensor

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.sums.intervals import wilson
from qkscope_papers.figures import INK, ORIGINAL, REST, TARGET, new_figure
from qkscope_papers.franco2026.model_sparsity import smoothed, steps_axis
from qkscope_papers.franco2026.model_sweep import GPT2, PYTHIA, Sweep, swept
from qkscope_papers.franco2026.prompts import KINDS
from qkscope_papers.registry import NANO, Settings, figure
from qkscope_papers.tables import Files, Row, column, distinct, files_of, model_name, pick, slanted

_MARKS = ("least", "quarter", "median", "three_quarters", "most")


@figure(
    "franco2026",
    "fig9a",
    "How many singular vectors reconstruct it, by head",
    prompts=KINDS,
    training=False,
)
@figure(
    "franco2026",
    "fig9b",
    "How many of them over training",
    model=NANO,
    prompts=KINDS,
    training=True,
)
def run(settings: Settings, training: bool) -> Result:
    """Distributions at the last checkpoint, means at all."""
    found = swept(settings)
    counts: list[Row] = []
    for i in range(len(found.edges)):
        counts += _distribution(found, i)
    rows = found.rows(found.found[-1])
    inside = pick(rows, circuit=True)
    few = sum(1 <= row["count"] <= 4 for row in inside)
    answer = (
        f"{_mean(inside, 'count'):.1f} singular vectors reach the relative logit on average over "
        f"{len(inside)} edges of the circuit ({_mean(inside, 'count_tol'):.1f} reach 99% of "
        f"it); random terms of the same sum and norm need {_mean(inside, 'count_null'):.1f} "
        f"({_mean(inside, 'count_tol_null'):.1f} for 99%). At {few} of {len(inside)} edges "
        "the count is between 1 and 4."
    )
    trained = found.result.tables.get("training", ()) if training else ()
    tables = {"counts": counts, "sparsity": rows, "training": [dict(row) for row in trained]}
    claims = _training_claims(found) if training else _head_claims(found)
    return settings.result(answer, tables, claims, model=settings.model, about=found.about())


def _distribution(found: Sweep, i: int) -> list[Row]:
    """Quartiles and ends of one head's counts, of the data and of the null."""
    edge = found.edges[i]
    rows = []
    for name in ("count", "count_tol", "count_null", "count_tol_null"):
        values = found.last[name][i]
        values = values[values.isfinite()]
        if not len(values):
            continue
        marks = values.quantile(values.new_tensor([0.0, 0.25, 0.5, 0.75, 1.0])).tolist()
        row = {
            "head": str(edge.head),
            "role": edge.duty.role,
            "from": edge.duty.query,
            "to": edge.duty.key,
            "circuit": edge.circuit,
            "what": name,
        }
        row |= zip(_MARKS, marks, strict=True)
        rows.append(row | {"mean": float(values.mean()), "n": len(values)})
    return rows


def _mean(rows: list[Row], name: str) -> float:
    """Of the values that are known."""
    values = [value for value in column(rows, name) if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan


def _share_below(found: Sweep, values: Tensor, chosen: list[int]) -> tuple[int, int]:
    """At how many edges the mean is told from 0 from below, corrected for their number; of how
    many.
    """
    level = 1 - 0.05 / max(len(chosen), 1)
    highs = [found.mean(values, [i], level).high for i in chosen]
    return sum(high < 0 for high in highs), len(highs)


def _head_claims(found: Sweep) -> list[Claim]:
    """Figure 9a: the paper gives no number for "small"; the yardstick is what random terms would
    need.
    """
    reason, why = found.unlike(GPT2)
    excess = found.last["count"] - found.last["count_null"]
    below, edges = _share_below(found, excess, found.inside)
    below_outside, edges_outside = _share_below(found, excess, found.outside)
    low, high = wilson(below, edges)
    counts = found.mean(found.last["count"], found.inside)
    few = Claim(
        "In most cases the number of singular vectors is small (share of the circuit's "
        "edges at which fewer are needed than random terms of the same sum and norm need, "
        "told apart and corrected for their number; control: heads outside)",
        paper="Sec. 5, Fig. 9(a): in most cases small",
        ours=below / edges,
        control=below_outside / max(edges_outside, 1),
        rule="ours > 0.5",
        low=low,
        high=high,
        reason=reason,
        why=why,
        changed="It was a mean of 1 to 4, which the paper says of Pythia.",
    )
    up_to_four = Claim(
        "... between 1 and 4 on average (mean over the circuit; control: random terms)",
        paper="",
        **counts.measured,
        control=found.mean(found.last["count_null"], found.inside).mean,
        rule="1 <= ours <= 4",
        reason=reason,
        why=why,
    )
    return [few, up_to_four]


def _training_claims(found: Sweep) -> list[Claim]:
    """Figure 9b."""
    reason, why = found.unlike(PYTHIA)
    last = found.last
    inside = found.inside
    other = "counter-finding" if reason == "counter-finding" else "other setting"
    counts = found.mean(last["count"], inside)
    close = found.mean(last["count_tol"] - last["count_tol_null"], inside)
    at_end = Claim(
        "Singular vectors that reach the relative logit, at the end (mean over the circuit; "
        "control: random terms of the same sum and norm)",
        paper="Sec. 5, Fig. 9(b): typically only 1-4 singular vectors",
        **counts.measured,
        control=found.mean(last["count_null"], inside).mean,
        rule="1 <= ours <= 4",
        reason=other,
        why=(
            f"{why} Size alone does not explain it: models of Pythia's size need more, too "
            "(Fig. 9a)."
        ),
    )
    to_tolerance = Claim(
        "... to 99%, fewer than random terms need (difference; control: theirs)",
        paper="",
        **close.measured,
        control=found.mean(last["count_tol_null"], inside).mean,
        rule="ours < 0",
        reason=reason,
        why=why,
    )
    if not found.trained:
        return [at_end, to_tolerance]
    # the same prompts at both ends: those on which the head attends at both
    change = last["count"] - found.first["count"]
    fall = found.mean(change, inside)
    falls = Claim(
        "The number falls over training (change, of prompts with r > 0 at both ends; "
        "control: at heads outside)",
        paper="Sec. 5, Fig. 9(b): declines during training",
        **fall.measured,
        control=found.mean(change, found.outside).mean,
        rule="ours < 0",
        reason=other,
        why=(
            f"{why} At our start, before any training, fewer are enough, as there is next "
            "to no relative logit to reach; the paper does not say at which step its curve "
            "starts."
        ),
        changed="It was the count less that of random terms, which the paper does not speak of.",
    )
    return [at_end, to_tolerance, falls]


# ---------------------------------------------------------------------- the drawing


@run.drawing
def draw(result: Result) -> Files:
    """Left the distribution at every head, right the mean over training where there is one."""
    rows = [dict(row) for row in result.tables["counts"]]
    training = [dict(row) for row in result.tables.get("training", ())]
    edges = distinct(rows, "head", "from", "to", "circuit")
    width = max(0.3 * len(edges) + 1.2, 4.5)
    figure = new_figure(width + (4.2 if training else 0), 4.2)
    if training:
        left, right = figure.subplots(1, 2, width_ratios=[width, 4.0])
        _training(right, training)
    else:
        left = figure.subplots()
    _boxes(left, rows, edges)
    left.set_title(f"{model_name(result)}: vectors that reach the relative logit")
    return files_of(result, figure)


def _boxes(axis: Axes, rows: Sequence[Row], edges: Sequence[tuple[str, str, str, bool]]) -> None:
    """Ends, quartiles and median of every edge's count, and both means at a tolerance."""
    dot: Any = {"color": "white", "mec": INK, "ms": 3.6}
    cross: Any = {"color": INK, "ms": 4.5}
    labels = []
    for i, (head, query, key, circuit) in enumerate(edges):
        own = {row["what"]: row for row in pick(rows, head=head, **{"from": query, "to": key})}
        row = own["count"]
        colour = TARGET if circuit else ORIGINAL
        box: Any = {"color": colour, "lw": 7, "solid_capstyle": "butt", "alpha": 0.6}
        axis.plot([i, i], [row["least"], row["most"]], color=colour, lw=0.8)
        axis.plot([i, i], [row["quarter"], row["three_quarters"]], **box)
        axis.plot(i, row["median"], "_", color=INK, ms=9, mew=1.6)
        axis.plot(i, own["count_tol"]["mean"], "o", **dot)
        axis.plot(i, own["count_tol_null"]["mean"], "x", **cross)
        labels.append(f"{head} {query}→{key}")
    slanted(axis, labels, 60, 7)
    axis.axhspan(1, 4, color=REST, alpha=0.25, lw=0)
    axis.set(ylim=(0, None), ylabel="singular vectors")
    handles = [
        *axis.plot([], [], color=TARGET, lw=6, alpha=0.6, label="circuit"),
        *axis.plot([], [], color=ORIGINAL, lw=6, alpha=0.6, label="heads outside"),
        *axis.plot([], [], "o", label="mean at 99% of r", **dot),
        *axis.plot([], [], "x", label="random terms at 99%, mean", **cross),
    ]
    axis.legend(handles=handles, frameon=False, fontsize=7.5, ncols=2, loc="upper right")


def _training(axis: Axes, rows: Sequence[Row]) -> None:
    """The mean count over the circuit at every checkpoint."""
    inside = pick(rows, circuit=True)
    x = steps_axis(axis, column(inside, "step"))
    lines = (
        ("count", "reach r", TARGET, "-"),
        ("count_tol", "reach 99% of r", TARGET, "--"),
        ("count_tol_null", "random terms at 99%", INK, ":"),
    )
    for name, label, colour, style in lines:
        axis.plot(x, smoothed(column(inside, name)), style, color=colour, lw=1.5, label=label)
    axis.set_ylim(0, None)
    axis.axhspan(1, 4, color=REST, alpha=0.25, lw=0)
    axis.set_title("mean over the circuit, prompts with r > 0")
    axis.legend(frameon=False, fontsize=8)
