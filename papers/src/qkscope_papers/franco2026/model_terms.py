"""Figures 8 and 25: the terms of relative attention at one prompt, untrained and trained.

Figure 8 shows four heads, one of each kind, with the end's terms over rotated singular vectors
below; figure 25 all heads of the circuit. Terms are in the order of the singular values, so that
the largest term may stand anywhere: its place is 0 at the largest of them and 1 at the smallest.
What the spectrum alone makes of either stands beside: terms over rotated vectors follow the
singular values too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.sums.singular import sparsity
from qkscope_papers.figures import INK, ORIGINAL, REST, TARGET, new_figure
from qkscope_papers.franco2026.model_sweep import PYTHIA, Sweep, swept
from qkscope_papers.franco2026.prompts import KINDS
from qkscope_papers.registry import NANO, Settings, figure
from qkscope_papers.tables import Files, Row, column, files_of, model_name

FOUR = ("previous token", "induction", "S-inhibition", "name mover")
_FOLLOWS = ("sigma_correlation", "sigma_rotated", "largest", "largest_rotated")


@figure(
    "franco2026",
    "fig8",
    "Relative attention split: four heads",
    model=NANO,
    prompts=KINDS,
    roles=FOUR,
)
@figure(
    "franco2026",
    "fig25",
    "Relative attention split: all heads of the circuit",
    model=NANO,
    prompts=KINDS,
)
def run(settings: Settings, roles: Sequence[str] | None = None) -> Result:
    """Terms of one prompt, and what they are on average."""
    found = swept(settings)
    chosen = found.inside if roles is None else _first_of_roles(found, roles)
    rows = [_row(found, i) for i in chosen]
    arrays: dict[str, Tensor] = {}
    for when, values in (("start", found.first), ("end", found.last)):
        for name in ("terms_first", "terms_mean", "terms_rotated", "sigma"):
            arrays[f"{when}/{name}"] = values[name][chosen]
    end = sum(column(rows, "sparsity_end")) / len(rows)
    start = sum(column(rows, "sparsity_start")) / len(rows)
    rotated = sum(column(rows, "rotated_end")) / len(rows)
    if found.trained:
        answer = (
            f"Mean sparsity of the terms of {len(rows)} edges goes from {start:.2f} to "
            f"{end:.2f} over training (rotated vectors at the end: {rotated:.2f})."
        )
    else:
        answer = (
            f"Mean sparsity of the terms of {len(rows)} edges is {end:.2f} (rotated vectors: "
            f"{rotated:.2f})."
        )
    claims = _all_claims(found) if roles is None else _four_claims(found, chosen)
    return settings.result(answer, {"heads": rows}, claims, arrays, settings.model, found.about())


def _first_of_roles(found: Sweep, roles: Sequence[str]) -> list[int]:
    """The first edge of each role; where none has one, as many of the circuit."""
    there = [found.edges[i].duty.role for i in found.inside]
    chosen = [found.inside[there.index(role)] for role in roles if role in there]
    return chosen or found.inside[: len(roles)]


def _row(found: Sweep, i: int) -> Row:
    """One edge: its terms on the first prompt, and what they are on average."""
    edge = found.edges[i]
    start = {name: values[i] for name, values in found.first.items() if name != "right"}
    end = {name: values[i] for name, values in found.last.items() if name != "right"}
    terms = end["terms_first"]
    largest = int(terms.abs().argmax())
    follows = {name: _mean(end[name]) for name in _FOLLOWS}
    return {
        "head": str(edge.head),
        "role": edge.duty.role,
        "from": edge.duty.query,
        "to": edge.duty.key,
        "relative": float(terms.sum()),
        "sparsity_first": float(sparsity(terms)),
        "sparsity_start": _mean(start["sparsity"]),
        "sparsity_end": _mean(end["sparsity"]),
        "rotated_start": _mean(start["rotated"]),
        "rotated_end": _mean(end["rotated"]),
        "largest_vector": largest,
        "largest_share": float(terms[largest] / terms.sum()),
        "vectors": len(terms),
        **follows,
        "count": _mean(end["count"]),
        "count_tol": _mean(end["count_tol"]),
        "count_null": _mean(end["count_null"]),
        "count_tol_null": _mean(end["count_tol_null"]),
    }


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _four_claims(found: Sweep, chosen: list[int]) -> list[Claim]:
    """Figure 8: what is said of each of its four heads, and of one of them."""
    claims = list[Claim]()
    small_value = _small_value_claim(found, chosen)
    if not math.isnan(small_value.ours or 0.0):  # one prompt leaves none to measure on
        claims.append(small_value)
    if found.trained:
        claims.append(_falls_claim(found, chosen))
    return claims


def _small_value_claim(found: Sweep, chosen: list[int]) -> Claim:
    """The head is chosen on half of the prompts and measured on the other half, so that the choice
    lends it nothing.
    """
    reason, why = found.unlike(PYTHIA)
    places = found.last["largest"]
    half = torch.arange(places.shape[1]) % 2 == 0
    choose = places.where(half, torch.nan)
    test = places.where(~half, torch.nan)
    down = max(chosen, key=lambda i: float(choose[i].nanmean().nan_to_num(-1.0)))
    place = found.mean(test, [down])
    return Claim(
        "The largest term can be one with a small singular value (its place, 0 largest to 1 "
        f"smallest, at the head furthest down, {found.edges[down].head}; control: rotated "
        "vectors)",
        paper=(
            "Sec. 5, Fig. 8 (middle): the largest terms can be those with the smallest "
            "singular values"
        ),
        **place.measured,
        control=found.mean(found.last["largest_rotated"], [down]).mean,
        rule="ours > 0.5 and ours > control",
        reason=reason,
        why=why,
        changed=(
            "It was the share of heads whose largest term is beyond the first quarter, and held "
            "at .5 where chance gives .75."
        ),
    )


def _falls_claim(found: Sweep, chosen: list[int]) -> Claim:
    reason, why = found.unlike(PYTHIA)
    change = found.last["sparsity"] - found.first["sparsity"]
    rotated = found.last["rotated"] - found.first["rotated"]
    level = 1 - 0.05 / len(chosen)
    falls = {i: found.mean(change, [i], level) for i in chosen}
    least = max(falls, key=lambda i: falls[i].mean)
    return Claim(
        "In each case sparsity falls from start to end (change at the head where it falls "
        f"least, {found.edges[least].head}; control: over rotated vectors)",
        paper="Sec. 5, Fig. 8: in each case decomposition becomes significantly sparse",
        **falls[least].measured,
        control=found.mean(rotated, [least]).mean,
        rule="ours < control",
        reason=reason,
        why=why,
        changed="It was the mean over heads of sparsity − rotated, which Fig. 7b asks.",
    )


def _all_claims(found: Sweep) -> list[Claim]:
    """Figure 25: head by head."""
    reason, why = found.unlike(PYTHIA)
    last = found.last
    less = found.mean(last["sigma_correlation"] - last["sigma_rotated"], found.inside)
    follows = Claim(
        "Terms follow the singular values less than the spectrum alone would make them "
        "(rank correlation of |term| and σ, less that over rotated vectors; control: the "
        "latter)",
        paper="implied by Sec. 5: low-rank properties are not the cause of sparsity",
        **less.measured,
        control=found.mean(last["sigma_rotated"], found.inside).mean,
        rule="ours < 0",
        reason=reason,
        why=why,
        changed="It was a correlation below .5, where 2 sd of chance are .42.",
    )
    # with eight edges a share of heads that get sparser cannot be told from that outside, which is
    # near 1: figure 7b asks it of the mean
    return [follows]


# ---------------------------------------------------------------------- the drawing


_TRAINED_LINES = (
    ("start", "start/terms_first", ORIGINAL),
    ("end", "end/terms_first", TARGET),
    ("end, rotated", "end/terms_rotated", REST),
)
_LINES = (
    ("terms", "end/terms_first", TARGET),
    ("rotated", "end/terms_rotated", REST),
)


@run.drawing
def draw(result: Result) -> Files:
    """One column per head: start, end, and the end over rotated singular vectors."""
    rows = [dict(row) for row in result.tables["heads"]]
    arrays = {key: value.numpy() for key, value in result.arrays.items()}
    trained = not np.array_equal(arrays["start/terms_first"], arrays["end/terms_first"])
    lines = _TRAINED_LINES if trained else _LINES
    columns = min(len(rows), 6 if len(rows) > 8 else 4)
    blocks = -(-len(rows) // columns)
    figure = new_figure(2.5 * columns + 0.4, 1.35 * len(lines) * blocks + 0.7)
    axes = figure.subplots(len(lines) * blocks, columns, squeeze=False, sharex=True)
    for axis in axes.ravel():
        axis.set_axis_off()
    for i, row in enumerate(rows):
        block, place = divmod(i, columns)
        own = axes[block * len(lines) : (block + 1) * len(lines), place]
        for axis, (label, key, colour) in zip(own, lines, strict=True):
            axis.set_axis_on()
            _bars(axis, arrays[key][i], colour)
            if place == 0:
                axis.set_ylabel(label)
        title = "{head} {role}\n{from} → {to}".format(**row)
        own[0].set_title(title, fontsize=8.5)
    for axis in axes[-1]:
        axis.set_xlabel("singular vector, largest σ first", fontsize=8)
    when = "one prompt, at the start and at the end of training" if trained else "one prompt"
    figure.suptitle(f"{model_name(result)}: terms of the relative logit; {when}", fontsize=10)
    return files_of(result, figure)


def _bars(axis: Axes, terms: Any, colour: str) -> None:
    """The terms of one head, with their sum and sparsity in words."""
    axis.bar(np.arange(len(terms)), terms, 0.9, color=colour)
    axis.axhline(0, color=INK, lw=0.5)
    axis.tick_params(labelsize=7.5)
    low = min(float(np.nanmin(terms)), 0.0)
    high = max(float(np.nanmax(terms)), 0.0)
    axis.set_ylim(low - 0.05 * (high - low), high + 0.5 * (high - low))  # room for the words
    total = float(np.nansum(terms))
    spread = float(np.nanmean(np.square(terms)))
    size = float(np.nanmean(np.abs(terms)))
    sparsity = size**2 / spread if spread else math.nan
    words = f"sum {total:.1f}\nsparsity {sparsity:.2f}"
    place = axis.transAxes
    axis.text(0.98, 0.95, words, transform=place, ha="right", va="top", fontsize=7)
