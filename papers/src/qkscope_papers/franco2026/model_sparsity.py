"""Figure 7b: sparsity of relative attention over the training of a language model.

At the heads of the IOI circuit. Beside it the rotated bases of the same checkpoint, heads outside
the circuit, and how often the model answers right. The paper speaks of the sparsity itself and of
the rotated one; the difference of both is ours. Intervals are over templates, of these heads alone;
whether heads of the circuit differ from others is asked with heads as units, by dealing out "in the
circuit" among them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from qkscope.findings.published import Edge
from qkscope.heads import Head
from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope_papers.figures import INK, ORIGINAL, REST, TARGET, new_figure
from qkscope_papers.franco2026.model_sweep import PYTHIA, Sweep, swept
from qkscope_papers.franco2026.prompts import KINDS
from qkscope_papers.registry import NANO, Settings, figure
from qkscope_papers.tables import Files, Row, column, files_of, model_name, pick, slanted

Values = dict[str, Tensor]
_END = "at the end"
# ways to deal labels out that are all tried; of more, so many random ones beside the labels
MOST = 20_000


@figure(
    "franco2026",
    "fig7b",
    "Sparsity over the training of a language model",
    model=NANO,
    prompts=KINDS,
)
def run(settings: Settings) -> Result:
    """Sparsity at every checkpoint, with its nulls."""
    found = swept(settings)
    periods = _periods(found)
    units: list[Row] = []
    for when, (before, after) in periods.items():
        units += [{"when": when, **row} for row in head_changes(after, found.edges, before)]
    kept = found.result.tables
    tables = {name: kept[name] for name in ("training", "sparsity") if name in kept}
    tables["heads"] = units
    claims = _claims(found, periods, units)
    about = found.about()
    return settings.result(found.result.answer, tables, claims, model=settings.model, about=about)


def head_changes(
    arrays: Mapping[str, Tensor],
    edges: Sequence[Edge],
    baseline: Mapping[str, Tensor] | None = None,
) -> list[dict[str, Any]]:
    """``sparsity − rotated`` of every head, its mean over prompts and edges; less that of a
    ``baseline``.

    With heads as the units a statement is about heads like these, not about these.
    """
    gap = _gap(arrays).nanmean(1)
    if baseline is not None:
        gap = gap - _gap(baseline).nanmean(1)
    own: dict[tuple[Head, bool], list[int]] = {}
    for i, edge in enumerate(edges):
        own.setdefault((edge.head, edge.circuit), []).append(i)
    rows = []
    for (head, circuit), index in own.items():
        rows.append(
            {
                "head": str(head),
                "circuit": circuit,
                "edges": len(index),
                "value": float(gap[index].nanmean()),
            }
        )
    return rows


def _periods(found: Sweep) -> dict[str, tuple[Values | None, Values]]:
    """What is compared with what: the steps in which the task is learned, all of training, and the
    end by itself.
    """
    periods: dict[str, tuple[Values | None, Values]] = {}
    learned = found.learned()
    if learned is not None:
        first, last = learned
        when = f"while the task is learned (steps {first.step} to {last.step})"
        periods[when] = (found.values[first.label], found.values[last.label])
    if found.trained:
        periods["over training"] = (found.first, found.last)
    periods[_END] = (None, found.last)
    return periods


def _claims(
    found: Sweep, periods: dict[str, tuple[Values | None, Values]], units: list[Row]
) -> list[Claim]:
    claims = _training_claims(found) if found.trained else []
    claims.append(_end_claim(found))
    for when, (before, after) in periods.items():
        if before is not None:
            claims.append(_change_claim(found, when, _gap(after) - _gap(before)))
        claims.append(_by_heads(when, units, found))
    return claims


def _training_claims(found: Sweep) -> list[Claim]:
    """Of the sparsity itself and of the rotated one, which the paper speaks of."""
    reason, why = found.unlike(PYTHIA)
    change = found.last["sparsity"] - found.first["sparsity"]
    plain = found.mean(change, found.inside)
    turned = found.mean(found.last["rotated"] - found.first["rotated"], found.inside)
    falls = Claim(
        "Sparsity falls over training (change of its mean over the circuit; control: at "
        "heads outside)",
        paper="Sec. 5, Fig. 7(b): attention sparsity emerges in Pythia",
        **plain.measured,
        control=found.mean(change, found.outside).mean,
        rule="ours < control",
        reason=reason,
        why=why,
        changed="It was sparsity less that of rotated vectors, which is ours, resampled by prompt.",
    )
    half_gone = Claim(
        "Under rotated vectors at least half of the fall is gone (change of the rotated "
        "sparsity; control: of the sparsity itself)",
        paper="Sec. 5, Fig. 7(b): the decline disappears when the SVD basis is rotated",
        **turned.measured,
        control=plain.mean,
        rule="ours > 0.5 * control and control < 0",
        reason=reason,
        why=f"{why} Its spectrum sharpens in training, which makes rotated terms unequal too.",
    )
    return [falls, half_gone]


def _end_claim(found: Sweep) -> Claim:
    """What the paper claims of any architecture: another one is no other setting."""
    reason, why = found.unlike(PYTHIA)
    end = found.mean(_gap(found.last), found.inside)
    rotated = found.mean(found.last["rotated"], found.inside).mean
    return Claim(
        "At the end terms are sparser than over rotated singular vectors (sparsity − "
        "rotated; control: at heads outside the circuit)",
        paper="implied by Sec. 5: sparsity is not attributable to a few large singular values",
        **end.measured,
        control=found.mean(_gap(found.last), found.outside).mean,
        rule="ours < 0",
        reason="counter-finding" if reason == "other setting" else reason,
        why=(
            f"{why} A few singular values are so large that rotated terms are unequal, too "
            f"({rotated:.2f}; all equal, 1)."
        ),
    )


def _change_claim(found: Sweep, when: str, change: Tensor) -> Claim:
    fall = found.mean(change, found.inside)
    return Claim(
        f"Sparsity − rotated falls {when} (control: at heads outside the circuit)",
        paper="",
        **fall.measured,
        control=found.mean(change, found.outside).mean,
        rule="ours < 0",
    )


def _gap(values: Mapping[str, Tensor]) -> Tensor:
    return values["sparsity"] - values["rotated"]


def _by_heads(when: str, units: list[Row], found: Sweep) -> Claim:
    own = column(pick(units, when=when, circuit=True), "value")
    other = column(pick(units, when=when, circuit=False), "value")
    reason, _ = found.unlike(PYTHIA)
    few = len(own) + len(other) < 20
    return Claim(
        f"More so than at other heads, {when}: share of relabellings of the heads "
        f"({len(own)} inside, {len(other)} outside) with as low a mean of sparsity − rotated "
        "inside (one-sided p; control: the level)",
        paper="",
        ours=relabelled(own, other),
        control=0.05,
        rule="ours < control",
        reason=reason,
        why="So few heads leave a difference of this size open." if few else "",
    )


def relabelled(inside: Sequence[float], outside: Sequence[float], seed: int = 0) -> float:
    """Share of relabellings whose first group has a mean as low, against the second's, as
    ``inside`` has; one-sided.

    Values that are not finite are left out; NaN where a group is then empty.

    Examples
    --------
    >>> relabelled([-3.0, -2.0], [0.0, 1.0])  # 1 of the 6 ways to pick two of four
    0.16666666666666666
    """
    first = [value for value in inside if math.isfinite(value)]
    second = [value for value in outside if math.isfinite(value)]
    if not first or not second:
        return math.nan
    values = torch.tensor([*first, *second], dtype=torch.float64)
    n = len(values)
    k = len(first)
    if math.comb(n, k) <= MOST:
        picks = torch.tensor(list(combinations(range(n), k)))
    else:
        generator = torch.Generator().manual_seed(seed)
        dealt = torch.rand(MOST - 1, n, generator=generator).argsort(1)[:, :k]
        picks = torch.cat([torch.arange(k)[None], dealt])
    # with the sum of all fixed, a lower mean of the first group is a lower difference of both
    means = values[picks].mean(1)
    own = values[:k].mean()
    return float((means <= own + 1e-12 * values.abs().max()).double().mean())


# ---------------------------------------------------------------------- the drawing

_WINDOW = 8  # of the running mean, where there are many checkpoints (the paper's)
_GREEN = "#5a9367"


@run.drawing
def draw(result: Result) -> Files:
    """Three panels: sparsity with its nulls; the difference with intervals; the answer. Or one,
    without training.
    """
    rows = [dict(row) for row in result.tables.get("training", ())]
    return files_of(result, _over_training(result, rows) if rows else _by_head(result))


def steps_axis(axis: Axes, steps: Sequence[Any]) -> Sequence[float]:
    """Places of the checkpoints: by number where they have one, on a scale that shows early ones
    too.
    """
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
    """Three panels over training: sparsity, its difference to rotated, the model's answer."""
    figure = new_figure(11.2, 3.7)
    left, middle, right = figure.subplots(1, 3)
    inside = pick(rows, circuit=True)
    outside = pick(rows, circuit=False)
    _draw_sparsity(left, inside, outside)
    _draw_difference(middle, inside, outside)
    _draw_behaviour(right, inside, outside)
    title = f"{model_name(result)}: relative attention over its singular vectors"
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_sparsity(axis: Axes, inside: Sequence[Row], outside: Sequence[Row]) -> None:
    x = steps_axis(axis, column(inside, "step"))
    lines: list[tuple[Sequence[Row], str, str, str, str]] = [
        (inside, "sparsity", "circuit", TARGET, "-"),
        (inside, "rotated", "rotated U and V", REST, "-"),
        (inside, "rotated_shared", "rotated head space", REST, ":"),
        (outside, "sparsity", "heads outside", ORIGINAL, "-"),
        (outside, "rotated", "their rotated", ORIGINAL, ":"),
    ]
    for own, name, label, colour, style in lines:
        if own:
            axis.plot(x, smoothed(column(own, name)), style, color=colour, lw=1.6, label=label)
    axis.set(ylim=(0, None), title="sparsity of the terms (1: all equal)")
    axis.legend(frameon=False, fontsize=7.5, loc="lower left")


def _draw_difference(axis: Axes, inside: Sequence[Row], outside: Sequence[Row]) -> None:
    x = steps_axis(axis, column(inside, "step"))
    for own, label, colour in ((inside, "circuit", TARGET), (outside, "heads outside", ORIGINAL)):
        if own:
            look: Any = {"ms": 3, "color": colour, "lw": 1.4, "label": label}
            band: Any = {"color": colour, "alpha": 0.2, "lw": 0}
            axis.plot(x, column(own, "difference"), "o-", **look)
            axis.fill_between(x, column(own, "low"), column(own, "high"), **band)
    axis.axhline(0, color=INK, lw=0.6)
    axis.set_title("sparsity − rotated, 95% interval")
    axis.legend(frameon=False, fontsize=8)


def _draw_behaviour(axis: Axes, inside: Sequence[Row], outside: Sequence[Row]) -> None:
    """How often the model answers right, where it was asked, and what its heads attend to."""
    x = steps_axis(axis, column(inside, "step"))
    accuracy = column(inside, "accuracy")
    if None not in accuracy:
        axis.plot(x, accuracy, "o-", ms=3, color=_GREEN, label="answers right")
        axis.axhline(0.5, color=_GREEN, lw=0.7, ls=":")
    circuit: Any = {"ms": 3, "color": TARGET, "label": "attention, circuit"}
    others: Any = {"ms": 3, "color": ORIGINAL, "label": "attention, outside"}
    axis.plot(x, column(inside, "attention"), "o-", **circuit)
    if outside:
        axis.plot(x, column(outside, "attention"), "o-", **others)
    axis.set(ylim=(0, 1.03), title="what the model does")
    axis.legend(frameon=False, fontsize=8)


def _by_head(result: Result) -> Figure:
    """A bar for each head, with its nulls."""
    rows = [dict(row) for row in result.tables["sparsity"]]
    figure = new_figure(max(0.34 * len(rows) + 1.5, 5.0), 4.0)
    axis = figure.subplots()
    places = list(range(len(rows)))
    colours = [TARGET if row["circuit"] else ORIGINAL for row in rows]
    rotated: Any = {"ms": 11, "mew": 2, "color": INK, "label": "rotated U and V"}
    in_head: Any = {"ms": 11, "mew": 1.5, "color": REST, "label": "rotated head space"}
    shared = column(rows, "rotated_shared")
    axis.bar(places, column(rows, "sparsity"), 0.62, color=colours)
    axis.plot(places, column(rows, "rotated"), "_", **rotated)
    axis.plot(places, shared, "_", **in_head)
    labels = [f"{row['head']} {row['from']}→{row['to']}" for row in rows]
    slanted(axis, labels, 55, 7.5)
    axis.set_ylabel("sparsity of the terms")
    axis.legend(frameon=False, loc="upper right", fontsize=8, ncols=2)
    axis.set_ylim(0, 1.25 * max(shared))
    axis.set_title(f"{model_name(result)}: circuit (orange) and heads outside it (blue)")
    return figure
