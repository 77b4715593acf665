"""Splitting an attention logit among features (Lee et al., Eq. 13-15).

Logits are linear in the query, so parts of the query that add up to it give parts of the logit that add up to it:
``q_1 = P_1 q``, ``q_2 = P_2 (q − q_1)``, …, ``q_⊥`` the rest; ``ℓ^(j) = scale · K q_j``. Where subspaces overlap, what
they share goes to the one taken first, so the order-free splits stand beside: the average over all orders, and the
oblique one, which reads each feature only along directions that no other feature reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.maths.bases import oblique_projectors, principal_cosines

RESIDUAL = "residual"
Split = Literal["sequential", "average", "oblique"]
_MOST_FOR_ALL_ORDERS = 6  # 720 orders; beyond that the oblique split is the order-free one


@dataclass(frozen=True)
class Attribution:
    """Parts of the logits of one head: ``parts[name]`` per key; they sum to ``logits``."""

    logits: Float[Tensor, "*n k"]
    parts: dict[str, Float[Tensor, "*n k"]]
    split: Split
    overlap: dict[tuple[str, str], float]  # largest cosine between two features' query subspaces

    def table(self, tokens: list[str] | None = None) -> list[dict[str, Any]]:
        """One row per key of a single example: the logit and its parts."""
        if self.logits.ndim != 1:
            raise BadInput(
                f"a table is of one example, but the logits have shape {tuple(self.logits.shape)}: index one."
            )
        names = tokens if tokens is not None else [str(i) for i in range(len(self.logits))]
        if len(names) != len(self.logits):
            raise BadInput(f"{len(names)} tokens were named for {len(self.logits)} logits.")
        return [
            {"token": token, "logit": float(self.logits[i])}
            | {name: float(part[i]) for name, part in self.parts.items()}
            for i, token in enumerate(names)
        ]


def split_query(
    q: Float[Tensor, "*n d"], bases: Mapping[str, Float[Tensor, "d r"]], split: Split = "sequential"
) -> dict[str, Float[Tensor, "*n d"]]:
    """Parts of the query, one per feature in the order given, and the residual; they sum to ``q``."""
    _check_features(q, bases)
    if split == "sequential":
        parts = _split_in_order(q, bases, list(bases))
    elif split == "average":
        if len(bases) > _MOST_FOR_ALL_ORDERS:
            raise BadInput(f"{len(bases)} features have too many orders to average over (at most "
                           f"{_MOST_FOR_ALL_ORDERS}): take the oblique split.")  # fmt: skip
        orders = [_split_in_order(q, bases, list(order)) for order in permutations(bases)]
        parts = {name: torch.stack([one[name] for one in orders]).mean(dim=0) for name in bases}
    elif split == "oblique":
        projectors, _ = oblique_projectors(list(bases.values()))
        parts = {name: (q @ p.right.to(q)) @ p.left.to(q).mT for name, p in zip(bases, projectors, strict=True)}
    else:
        raise BadInput(f"split is sequential, average or oblique, but got {split!r}.")
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


def _check_features(q: Tensor, bases: Mapping[str, Tensor]) -> None:
    if not bases:
        raise BadInput("no feature was given: name at least one to split the logits among.")
    if RESIDUAL in bases:
        raise BadInput(f"a feature cannot be called {RESIDUAL!r}: that is the name of what is left over.")
    for name, basis in bases.items():
        if basis.ndim != 2 or basis.shape[0] != q.shape[-1]:
            raise BadInput(
                f"feature {name!r} should have a basis of shape ({q.shape[-1]}, rank), but has {tuple(basis.shape)}."
            )
