"""Token pairs that hold given pairs of interest and no other, and the terms of their relative
attention.

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
    x = task.strengths(
        torch.rand(contexts, 1 + task.context, task.n, generator=generator, dtype=torch.float64)
    )
    count = {"one": 1, "two": 2, "none": 0}[present]
    order = torch.rand(contexts, len(task.pairs), generator=generator).argsort(1)
    chosen = torch.zeros(contexts, len(task.pairs), dtype=torch.float64).scatter(
        1, order[:, :count], 1.0
    )
    if only is not None:
        chosen = torch.zeros_like(chosen)
        chosen[:, only] = 1.0
    strength = torch.rand(2, contexts, len(task.pairs), generator=generator, dtype=torch.float64)
    wanted = sorted({feature for pair in task.pairs for feature in pair[:2]})
    x[:, :2, wanted] = 0.0
    for i, (query, key, _) in enumerate(task.pairs):
        x[:, 0, query] += chosen[:, i] * strength[0, :, i]
        x[:, 1, key] += chosen[:, i] * strength[1, :, i]
    return TokenPairs(x[:, 0], x[:, 1:], chosen)


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
    difference = key_difference(toy.tokens(pairs.x_k), first)
    return Coordinates(toy.tokens(pairs.x_q) @ basis.u, basis.s, difference @ basis.v)
