"""Vectors with a constant 1 appended, and the sums of their products: averages and centring are blocks and shears.

``M = Σ w [q; 1][k; 1]ᵀ`` holds ``Σ w q kᵀ``, ``Σ w q``, ``Σ w k`` and ``Σ w``; divided by ``Σ w``, the averages; and
``[I, −q̄] M [I, −k̄]ᵀ`` is the sum of products of centred vectors.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput

Center = Literal["none", "query", "both"]


def centred_delta(
    sums: Float[Tensor, "*n a 2 a"], center: Center = "none", *, reference: Float[Tensor, "*n a 2 a"] | None = None
) -> Float[Tensor, "*n d d"]:
    """ΔC from augmented sums; normalised by, and centred on, the means of ``reference`` (themselves by default)."""
    if center not in get_args(Center):
        raise BadInput(f"center is one of {', '.join(get_args(Center))}, but got {center!r}.")
    reference = sums if reference is None else reference
    count = reference[..., -1:, :, -1:]
    conditional = sums / count
    delta = conditional[..., 0, :] - conditional[..., 1, :]  # the augmented difference, (d + 1) × (d + 1)
    if center == "none":
        return delta[..., :-1, :-1]
    means = reference / count
    mean_query = means[..., :-1, :, -1:].mean(dim=-2)  # d × 1, halfway between the conditions
    mean_key = means[..., -1:, :, :-1].mean(dim=-2)  # 1 × d
    delta = delta[..., :-1, :] - mean_query * delta[..., -1:, :]
    return delta[..., :-1] - delta[..., -1:] * mean_key if center == "both" else delta[..., :-1]


def interaction_deltas(
    observed: Float[Tensor, "a 2 a+1"], flipped: Float[Tensor, "r a 2 a+1"], center: Center, units: float
) -> tuple[Float[Tensor, "d d"], Float[Tensor, "r d d"]]:
    """The centred ΔC under H0: a difference of means that ignores the query, in rows of whatever scale.

    First the part that is the same in all of them, then the replicates, that part included.

    The last column of the sums is ``Σ [q; 1] a±`` with ``a±`` a row's scale times its weight. A row's part
    ``(q − q̄) (s⁺ − a⁺ m⁺)ᵀ / Σw⁺``, less the same of −, with ``m± = Σ s± / Σ a±``, has mean 0 under H0, also where
    queries and keys share their scale: it may as well have the other sign. The rest of ΔC is left as it is.

    ``q̄`` and ``m±`` are estimated. A difference ``m⁺ − m⁻`` that is no larger than chance makes it nine times in ten is
    not taken out: it would be noise of the very rows, and leave the parts of large ones too small. For each of the
    two that is taken out, the parts grow as a sample's deviations do, by ``√(units / (units − 1))``.
    """
    d = observed.shape[-1] - 2
    scale = observed[-1, :, d + 1 :]

    def mean_difference(sums: Tensor) -> Tensor:
        means = torch.where(scale > 0, sums[..., -1, :, :d] / scale, torch.zeros_like(scale))
        return means[..., 0, :] - means[..., 1, :]

    chance = mean_difference(flipped).norm(dim=-1).quantile(0.9)
    sure = bool(mean_difference(observed).norm() > chance)
    grown = (units / (units - 1)) ** (1.0 if sure else 0.5)
    fixed = centred_delta(observed[..., :-1], center) - _interaction_part(observed, observed, center, sure)
    return fixed, fixed + grown * _interaction_part(flipped, observed, center, sure)


def _interaction_part(
    sums: Float[Tensor, "*n a 2 a+1"], observed: Float[Tensor, "a 2 a+1"], center: Center, sure: bool
) -> Float[Tensor, "*n d d"]:
    d = sums.shape[-1] - 2
    count = observed[-1, :, d, None]
    mean_query = (observed[:-1, :, d] / count[:, 0]).mean(dim=-1)
    queries = sums[..., :-1, :, :] - mean_query[:, None, None] * sums[..., -1:, :, :]
    keys, total = queries[..., :d], observed[-1, :, :d]
    if center == "both":
        mean_key = (total / count).mean(dim=0)
        keys, total = keys - queries[..., d : d + 1] * mean_key, total - count * mean_key
    scale = observed[-1, :, d + 1 :]
    expected = torch.where(scale > 0, total / scale, torch.zeros_like(total))
    level = expected.mean(dim=0)
    expected = level + sure * (expected - level)
    left = (keys - queries[..., d + 1 :] * expected) / count
    return left[..., 0, :] - left[..., 1, :]
