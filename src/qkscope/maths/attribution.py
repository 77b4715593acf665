"""Splitting an attention logit among features (Lee et al., Eq. 13-15).

Logits are linear in the query, so parts of the query that add up to it give parts of the logit that add up to it:
``q_1 = P_1 q``, ``q_2 = P_2 (q − q_1)``, …, ``q_⊥`` the rest; ``ℓ^(j) = scale · K q_j``. Where subspaces overlap, what
they share goes to the one taken first, so the order-free splits stand beside: the average over all orders, and the
oblique one, which reads each feature only along directions that no other feature reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.bases import oblique_projectors, principal_cosines

RESIDUAL = "residual"
Split = Literal["sequential", "average", "oblique"]
SplitSide = Literal["query", "key", "both"]
_MOST_FOR_ALL_ORDERS = 6  # 720 orders; beyond that the oblique split is the order-free one


def part_name(feature: str) -> str:
    """What the part of a feature is called: its name, quoted where tables of parts have that word for something else.

    >>> part_name("lexical"), part_name("residual")
    ('lexical', "'residual'")
    """
    return f"'{feature}'" if feature in (RESIDUAL, "position", "token", "attention", "logit") else feature


@dataclass(frozen=True)
class Attribution:
    """Parts of the logits of one head: ``parts[name]`` per key; they sum to ``logits``."""

    logits: Float[Tensor, "*n k"]
    parts: dict[str, Float[Tensor, "*n k"]]
    split: Split
    overlap: dict[tuple[str, str], float]  # largest cosine between two features' query subspaces


def split_query(
    q: Float[Tensor, "*n d"], bases: Mapping[str, Float[Tensor, "d r"]], split: Split = "sequential"
) -> dict[str, Float[Tensor, "*n d"]]:
    """Parts of the query, one per feature in the order given, and the residual; they sum to ``q``."""
    if split == "sequential":
        parts = _split_in_order(q, bases, list(bases))
    elif split == "average":
        if len(bases) > _MOST_FOR_ALL_ORDERS:
            raise BadInput(
                f"{len(bases)} features have too many orders to average over (at most {_MOST_FOR_ALL_ORDERS}): "
                "take the oblique split."
            )
        orders = [_split_in_order(q, bases, list(order)) for order in permutations(bases)]
        parts = {name: torch.stack([one[name] for one in orders]).mean(dim=0) for name in bases}
    else:
        projectors = oblique_projectors(list(bases.values()))[0] if bases else []
        parts = {name: (q @ p.right.to(q)) @ p.left.to(q).mT for name, p in zip(bases, projectors, strict=True)}
    parts[RESIDUAL] = q - sum(parts[name] for name in bases)
    return parts


def _split_in_order(q: Tensor, bases: Mapping[str, Tensor], order: list[str]) -> dict[str, Tensor]:
    parts, left = {}, q
    for name in order:
        basis = bases[name].to(q)
        parts[name] = (left @ basis) @ basis.mT
        left = left - parts[name]
    return parts


def attribute_logits(
    q: Float[Tensor, "*n d"],
    k: Float[Tensor, "*n k d"],
    scale: float,
    bases: Mapping[str, Float[Tensor, "d r"]],
    split: Split = "sequential",
) -> Attribution:
    """Logits ``scale · K q`` (before soft-cap and mask) and their split among query-side bases.

    Examples
    --------
    >>> q, k = torch.randn(4), torch.randn(3, 4)
    >>> found = attribute_logits(q, k, 0.5, {"order": torch.eye(4)[:, :1], "lexical": torch.eye(4)[:, 1:3]})
    >>> list(found.parts)
    ['order', 'lexical', 'residual']
    """
    queries = split_query(q, bases, split)
    parts = {name: scale * (k @ part[..., None])[..., 0] for name, part in queries.items()}
    overlap = {(a, b): float(principal_cosines(bases[a], bases[b])[0]) for a, b in combinations(bases, 2)}
    return Attribution(scale * (k @ q[..., None])[..., 0], parts, split, overlap)


def split_rows(
    head: Head,
    query: int,
    keys: Sequence[int],
    total: Float[Tensor, " k"],
    parts: Mapping[str, Float[Tensor, " k"]],
    side: SplitSide,
) -> list[dict[str, Any]]:
    """The one table of every split of a logit: a row for each key and part.

    Parameters
    ----------
    head : whose logits they are.
    query, keys : positions of the tokens.
    total : what was split, for each key: its logit, or its relative logit.
    parts : by name; they sum to ``total``.
    side : which vector was split.

    Examples
    --------
    >>> parts = {"order": torch.tensor([1.5]), "residual": torch.tensor([0.5])}
    >>> for row in split_rows(Head(0, 1), 7, [3], torch.tensor([2.0]), parts, "query"):
    ...     print(*row.values())
    L0H1 7 3 order query 1.5 0.75
    L0H1 7 3 residual query 0.5 0.25
    """
    whole, columns = total.tolist(), {name: part.tolist() for name, part in parts.items()}
    return [
        {"head": str(head), "query": query, "key": key, "part": name, "side": side, "value": values[i],
         "share": values[i] / whole[i] if whole[i] else float("nan")}
        for i, key in enumerate(keys)
        for name, values in columns.items()
    ]  # fmt: skip
