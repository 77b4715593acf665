"""Token pairs that hold given pairs of interest and no other, and the terms of their logit.

A context is drawn as in training; then, in the query and in the key that is asked about, every
feature of interest is taken out, and those of the wanted pairs are put in with a uniform strength.
Other keys stay as they come.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.sums.singular import key_difference
from qkscope_papers.franco2026.toy.superposition import Superposition, Toy

Present = Literal["one", "two", "none"]
PRESENT: tuple[Present, ...] = ("one", "two", "none")
_COUNTS: dict[Present, int] = {"one": 1, "two": 2, "none": 0}


class TokenPairs(NamedTuple):
    """Strengths of queries and of their keys (the one asked about first), and which pairs are in
    them.
    """

    x_q: Float[Tensor, "c n"]
    x_k: Float[Tensor, "c T n"]
    chosen: Float[Tensor, "c pairs"]  # 1 where a pair is present


def draw_token_pairs(
    task: Superposition, present: Present, contexts: int, seed: int, only: int | None = None
) -> TokenPairs:
    """Contexts with one, two or none of the pairs of interest present; ``only`` names which one."""
    generator = torch.Generator().manual_seed(seed)
    shape = (contexts, 1 + task.context, task.n)
    x = task.strengths(torch.rand(shape, generator=generator, dtype=torch.float64))
    chosen = _chosen(contexts, len(task.pairs), _COUNTS[present], generator)
    if only is not None:
        chosen = torch.zeros_like(chosen)
        chosen[:, only] = 1.0
    sides = (2, contexts, len(task.pairs))
    query_strength, key_strength = torch.rand(sides, generator=generator, dtype=torch.float64)
    wanted: set[int] = set()
    for query, key, _ in task.pairs:
        wanted |= {query, key}
    x[:, :2, sorted(wanted)] = 0.0
    for i, (query, key, _) in enumerate(task.pairs):
        x[:, 0, query] += chosen[:, i] * query_strength[:, i]
        x[:, 1, key] += chosen[:, i] * key_strength[:, i]
    return TokenPairs(x[:, 0], x[:, 1:], chosen)


def _chosen(
    contexts: int, pairs: int, count: int, generator: torch.Generator
) -> Float[Tensor, "c pairs"]:
    """1 at so many pairs of each context, drawn without replacement."""
    order = torch.rand(contexts, pairs, generator=generator).argsort(1)
    nobody = torch.zeros(contexts, pairs, dtype=torch.float64)
    return nobody.scatter(1, order[:, :count], 1.0)


class Coordinates(NamedTuple):
    """What the terms are made of: ``Uᵀ t_q``, σ, ``Vᵀ Δt``."""

    query: Float[Tensor, "c m"]
    s: Float[Tensor, " m"]
    difference: Float[Tensor, "c m"]

    @property
    def terms(self) -> Float[Tensor, "c m"]:
        """``c_k = σ_k (u_kᵀ t_q)(v_kᵀ Δt)``; they sum to the relative logit."""
        return self.query * self.s * self.difference


def coordinates(toy: Toy, pairs: TokenPairs) -> Coordinates:
    """Queries and key differences in the head's singular basis."""
    basis = toy.basis()
    first = torch.zeros(len(pairs.x_q), dtype=torch.int64)
    query = toy.tokens(pairs.x_q)
    difference = key_difference(toy.tokens(pairs.x_k), first)
    return Coordinates(query @ basis.u, basis.s, difference @ basis.v)
