"""A relative logit split in several ways: the table ``parts``.

``by`` says which way: ``writers`` (of the key, of the query), ``singular`` (terms of the head's
singular vectors), or ``features`` (a fit's subspaces, in the paper's order). The parts of each way
and side sum to the logit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput
from qkscope.findings.prompt_trace import PromptTrace
from qkscope.findings.singular_rows import singular_basis
from qkscope.sums.feature_split import Split, SplitSide, part_name, split_query, split_rows
from qkscope.sums.singular import singular_coordinates

SHOWN = 8  # parts of each split that are named; the others are its rest
REST = "rest"


def part_rows(
    one: PromptTrace, features: Mapping[str, Any] | None = None, split: Split = "sequential"
) -> list[dict[str, Any]]:
    """The table ``parts`` of one head, query and key."""
    rows = []
    for side, values in one.marginals.items():
        by_writer = dict(zip(one.writers, values[0].tolist(), strict=True))
        rows += _rows(one, "writers", by_writer, side)
    terms = singular_terms(one)
    if terms is not None:
        by_vector = {f"vector {i}": value for i, value in enumerate(terms)}
        rows += _rows(one, "singular", by_vector, "both")
    if features:
        by_feature = _feature_terms(one, features, split)
        rows += _rows(one, "features", by_feature, "query", shown=len(features))
    return rows


def _feature_terms(one: PromptTrace, features: Mapping[str, Any], split: Split) -> dict[str, float]:
    """What each subspace of the query gives, smallest rank first; no feature explains the rest."""
    smallest_first = sorted(features.items(), key=lambda item: item[1].rank)
    bases = {part_name(name): feature.basis("query") for name, feature in smallest_first}
    queries = split_query(one.rows.q[0, 0], bases, split)
    keys = _weighted_keys(one)
    return {name: float(queries[name] @ keys) * one.scale for name in bases}


def _weighted_keys(one: PromptTrace) -> Float[Tensor, " d"]:
    """The key less the mean of those it is compared with."""
    return one.weights[0].to(one.rows.k) @ one.rows.k[0, 0]


def singular_terms(one: PromptTrace) -> list[float] | None:
    """Terms of the relative logit along the head's singular vectors.

    None where the head's weights cannot be read.
    """
    scope = one.run.reader.scope
    run = one.run
    layer = scope.facts.layers[one.head.layer]
    if "query_frame" in layer.refusals:
        return None
    try:
        basis = singular_basis(scope, [one.head])
    except BadInput:
        return None
    both = torch.stack([one.rows.q[0, 0], _weighted_keys(one)])[None, :, None]
    rotary = run.calls[one.head.layer].rotary
    if rotary is not None and layer.offset is not None:  # both turned back by the query's place
        at = torch.full_like(run.row, one.asked.query)[:, None]
        both = rotary.at(run.row, at).turn(both, layer.offset, back=True)
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
    return [
        {**row, "by": by}
        for row in split_rows(one.head, one.asked.query, [one.key], total, named, side)
    ]
