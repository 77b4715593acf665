"""What matched: one relative logit, split in several ways, each with its rest, in the one table of every split.

``by`` says which way: ``writers`` (of the key, of the query), ``singular`` (terms of the head's singular vectors), or
``features`` (a fit's subspaces, in the paper's order). The parts of each way and side sum to the logit.

The strongest writers' parts exchanged between the key and another token: does the attention follow them?

Parts change places in the residual stream, so that content moves and position stays. As many random writers of the same
layers stand beside it; where they move as much, or where all writers are exchanged, the swap shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.relative import singular_basis
from qkscope.analyses.trace.one import ATTENDED, PromptTrace
from qkscope.analyses.trace.verdicts import FEW
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import parse_writers
from qkscope.maths.attribution import Split, SplitSide, part_name, split_query, split_rows
from qkscope.maths.singular import singular_coordinates
from qkscope.maths.writers import different, draw_alike


class HasBasis(Protocol):
    """A feature of a head: a subspace."""

    @property
    def rank(self) -> int:
        """Its dimension."""

    def basis(self, side: Literal["query", "key"]) -> Tensor:
        """Orthonormal, as columns."""


SHOWN = 8  # parts of each split that are named; the others are its rest
REST = "rest"


def part_rows(
    one: PromptTrace, features: Mapping[str, HasBasis] | None = None, split: Split = "sequential"
) -> list[dict[str, Any]]:
    """The table ``parts`` of one head, query and key."""
    made = []
    for side, values in one.marginals().items():
        made += _rows(one, "writers", dict(zip(one.writers, values.tolist(), strict=True)), side)
    terms = singular_terms(one)
    if terms is not None:
        made += _rows(one, "singular", {f"vector {i}": value for i, value in enumerate(terms)}, "both")
    return made + feature_rows(one, features or {}, split)


def feature_rows(
    one: PromptTrace, features: Mapping[str, HasBasis], split: Split = "sequential"
) -> list[dict[str, Any]]:
    """Those rows of it that features give, smallest rank first."""
    ordered = sorted(features.items(), key=lambda item: item[1].rank)
    q = one.rows.q[0, 0]
    weighted = one.weighted_keys().to(q)
    bases = {part_name(name): feature.basis("query") for name, feature in ordered}
    queries = split_query(q, bases, split)  # what no feature explains is the rest
    values = {name: float(queries[name] @ weighted) * one.scale for name in bases}
    return _rows(one, "features", values, "query", shown=len(features)) if features else []


def singular_terms(one: PromptTrace) -> list[float] | None:
    """Terms of the relative logit along the head's singular vectors; None where its weights cannot be read."""
    layer = one.reader.scope.facts.layers[one.head.layer]
    if "query_frame" in layer.refusals:
        return None
    try:
        basis = singular_basis(one.reader.scope, [one.head])
    except BadInput:
        return None
    both = torch.stack([one.rows.q[0, 0], one.weighted_keys()])[None, :, None]
    rotary = one.run.calls[one.head.layer].rotary
    if rotary is not None and layer.offset is not None:  # both turned back by the query's place
        both = rotary.turn(
            both, one.run.row, torch.full_like(one.run.row, one.asked.query)[:, None], layer.offset, back=True
        )
    q, difference = both.double().cpu().unbind(1)
    alpha, gamma = singular_coordinates(basis.read.double(), q - basis.c_Q.double(), difference)
    return (one.scale * alpha * gamma).flatten().tolist()


def _rows(
    one: PromptTrace, by: str, values: Mapping[str, float], side: SplitSide, shown: int = SHOWN
) -> list[dict[str, Any]]:
    """The largest parts, and all others as one."""
    order = sorted(values, key=lambda name: -abs(values[name]))
    named = {name: torch.tensor([values[name]]) for name in order[:shown]}
    total = torch.tensor([one.total])
    named[REST] = total - sum(named.values())
    rows = split_rows(one.head, one.asked.query, [one.key], total, named, side)
    return [{**row, "by": by} for row in rows]


def other_token(one: PromptTrace) -> int | None:
    """The token to exchange with: of those in sight, the one that the head attends to most after the key."""
    free = [i for i in one.others if i not in (one.key, one.asked.query)]
    return max(free, key=lambda i: float(one.attention[i])) if free else None


def swap_row(one: PromptTrace, other: int, size: int = 2, draws: int = 20, seed: int = 0) -> dict[str, Any]:
    """A row of the table ``swaps``: attention on both tokens before and after, beside random writers."""
    chosen, layers = one.strongest("key", size), parse_writers(one.writers[:-1])
    gains = one.exchanged(other)

    def swapped(writers: list[int]) -> Float[Tensor, " t"]:
        """The attention row with these writers' parts exchanged."""
        return one.changed({place: gain[writers].sum(0) for place, gain in zip((one.key, other), gains, strict=True)})

    before, after = one.attention, swapped(chosen)
    seeds = [derived_seed(seed, "swap", draw) for draw in range(draws)]
    alike = different({"key": draw_alike(chosen, layers, own, FEW)} for own in seeds)
    beside = torch.stack([swapped(drawn["key"])[other] for drawn in alike])
    gained, random = float(after[other] - before[other]), float((beside - before[other]).max())
    total = float(before[one.key] + before[other])
    verdict = "supported" if gained > max(random, 0.25 * total) else "not here"
    if float(before[one.key]) < ATTENDED:
        verdict = "unattended"
    elif len(chosen) >= len(layers):
        verdict = "vacuous"
    elif len(alike) < FEW:
        verdict = "untested"
    return {
        "head": str(one.head), "writers": ", ".join(one.writers[i] for i in chosen), "key": one.key, "other": other,
        "other_token": one.asked.tokens[other],
        "key_before": float(before[one.key]), "key_after": float(after[one.key]),
        "other_before": float(before[other]), "other_after": float(after[other]), "random": float(beside.mean()),
        "random_high": float(beside.max()), "draws": draws, "sets": len(alike), "verdict": verdict,
    }  # fmt: skip
