"""Cross-validated rank: how many directions of ΔC predict units that took no part in finding them.

The sums are kept in folds of units (of words, where words are the unit). Each fold f is left out in
turn: the others give singular vectors ``U, S, V``, and the fold says how well the first r of them
rebuild its own ΔC. Component j takes out of the fold's ‖ΔC‖² as much as::

    g_j = (2 u_jᵀ ΔC_f v_j − s_j) s_j

The rank is the fewest components whose gains, summed over folds, reach 99% of what any number of
them can (the paper's 99%, of data that took no part). Noise that one fold has is not in another, so
what only this sample of units shows does not help: pure noise has rank 0. Whether a rank of 0 says
anything is asked of planted features of known size (`plant`).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from qkscope.heads import Center
from qkscope.sums.bases import ROUNDING, checked_svd, energy_rank
from qkscope.sums.nulls import centred_delta

CvRank = int | Literal["untested"]
PLANTS = 20  # planted features
POWER = 0.8  # share of them that must be found
_FEWEST_FOLDS = 3  # with both signs
_ENOUGH = 0.99
_Folds = Float[Tensor, "f h a 2 a"]


def cross_validated_rank(folds: _Folds, center: Center, sizes: Float[Tensor, " h"]) -> list[CvRank]:
    """Cross-validated rank of ΔC of each head; ``untested`` with fewer than three whole folds.

    A fold is whole where it holds both signs, and so do the others together.

    Parameters
    ----------
    folds : sums of each fold of units.
    center : of the ΔC in question.
    sizes : of the averages that ΔC is a difference of; below their rounding there is no direction.
    """
    whole = folds.sum(dim=0)
    gains = []
    for fold in folds:
        rest = whole - fold
        if _has_both_signs(fold) and _has_both_signs(rest):
            in_fold = _weights(fold).sum(dim=1)
            share = in_fold / _weights(whole).sum(dim=1)
            gain = _gains(fold, rest, center, sizes)
            gains.append(gain * share[:, None])
    if len(gains) < _FEWEST_FOLDS:
        return ["untested"] * len(sizes)
    # heads by number of components, from 0 on
    rebuilt = pad(torch.stack(gains).sum(dim=0), (1, 0))
    best = rebuilt.amax(dim=1, keepdim=True)
    is_enough = rebuilt >= _ENOUGH * best
    first = is_enough.int().argmax(dim=1)
    return first.tolist()


def _weights(sums: Float[Tensor, "*n a 2 a"]) -> Float[Tensor, "*n 2"]:
    """Total weight of the + pairs and of the − pairs."""
    return sums[..., -1, :, -1]


def _has_both_signs(sums: Float[Tensor, "h a 2 a"]) -> bool:
    return bool((_weights(sums) > 0).all())


def _gains(
    fold: Float[Tensor, "h a 2 a"],
    rest: Float[Tensor, "h a 2 a"],
    center: Center,
    sizes: Float[Tensor, " h"],
) -> Float[Tensor, "h m"]:
    """Share of the fold's ‖ΔC‖² that the first 1, 2, … components of the rest explain."""
    # the mean query and key of the other folds, with the weights of the fold that was left out
    rest_weights = rest[:, -1:, :, -1:]
    conditional = rest / rest_weights
    fold_weights = _weights(fold)[:, None, :, None]
    u, s, v = checked_svd(centred_delta(rest, center))
    rounding = ROUNDING * sizes[:, None]
    s = s.where(s > rounding, 0.0)
    delta = centred_delta(fold, center, reference=conditional * fold_weights)
    turned = u.mT @ delta @ v
    held = turned.diagonal(dim1=-2, dim2=-1)
    gain = (2 * held - s) * s
    return gain.cumsum(dim=1)


def plant(
    folds: Float[Tensor, "f a 2 a"], center: Center, size: float
) -> Float[Tensor, "f p a 2 a"]:
    """Sums of one head in which a feature of known size has taken the place of ΔC, twenty times.

    The head's noise stays. The feature is as large as ``size`` in all, in as many random directions
    as the head's own ΔC has (99%). Noise is what the ΔC of a fold differs by from that of all,
    under a random sign. Where `cross_validated_rank` finds fewer than 80% of such features, a rank
    of 0 says nothing.
    """
    has_both = (_weights(folds) > 0).all(dim=1)
    folds = folds[has_both].cpu()
    deltas = centred_delta(folds, center)
    mean = centred_delta(folds.sum(dim=0), center)
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.linalg.svdvals(mean)
    rank = max(int(energy_rank(spectrum)), 1)
    drawn = torch.randn(PLANTS, len(mean), rank, generator=generator, dtype=mean.dtype)
    basis, _ = torch.linalg.qr(drawn)
    feature = basis @ basis.mT * size / rank
    # 0 or 1, for each fold and feature
    coins = torch.randint(2, (len(folds), PLANTS, 1, 1), generator=generator)
    signs = coins * 2 - 1
    # a fold is a part of the mean, so it differs less from it than from the truth
    correction = (len(folds) / (len(folds) - 1)) ** 0.5
    noise = signs * (deltas - mean)[:, None] * correction
    weight = _weights(folds)[:, 0, None, None, None]
    planted = folds[:, None].repeat(1, PLANTS, 1, 1, 1)
    change = feature + noise - deltas[:, None]
    planted[..., :-1, 0, :-1] += change * weight
    return planted
