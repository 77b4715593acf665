"""How few terms carry a relative logit, and what a basis that means nothing would show.

Sparsity is ``(mean |c|)² / mean c²``: 1 when all terms are equal in size, 1/n when one carries it all. The
reconstruction count is the size of the smallest set of terms whose sum reaches r. Neither is flat under a meaningless
basis: a spectrum alone makes terms unequal, and random terms of the same sum need few as well. So beside each stand a
rotated basis at the same weights (`rotated_terms`, `shared_terms`) and `null_count`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput


def sparsity(terms: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """``(mean |c|)² / mean c²``; NaN where all terms are 0.

    Examples
    --------
    >>> sparsity(torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 3.0, 0.0]]))
    tensor([1.0000, 0.2500])
    """
    return terms.abs().mean(-1).square() / terms.square().mean(-1)


def reconstruction_count(terms: Float[Tensor, "*b m"], tolerance: float = 1.0) -> Float[Tensor, "*b"]:
    """How many of the largest terms it takes to reach ``tolerance · r``; NaN where ``r = Σ c ≤ 0``.

    Examples
    --------
    >>> reconstruction_count(torch.tensor([[5.0, 3.0, -2.0], [1.0, -4.0, 1.0]]))
    tensor([2., nan])
    """
    if not 0 < tolerance <= 1:
        raise BadInput(f"tolerance is a share of the relative logit in (0, 1], but got {tolerance}.")
    total = terms.sum(-1, keepdim=True)
    reached = terms.sort(dim=-1, descending=True).values.cumsum(-1)
    # the sum in another order may miss the total by rounding: without slack an exact fit would need all terms
    slack = 8 * torch.finfo(terms.dtype).eps * terms.abs().sum(-1, keepdim=True)
    count = (reached < tolerance * total - slack).sum(-1) + 1
    return torch.where(total.squeeze(-1) > 0, count.to(terms), torch.nan)


def cancellation(terms: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """``r / Σ |c|``: 1 when all terms point the same way, near 0 when they cancel."""
    return terms.sum(-1) / terms.abs().sum(-1)


def null_count(
    terms: Float[Tensor, "*b m"], tolerance: float = 1.0, draws: int = 20, seed: int = 0
) -> Float[Tensor, "*b"]:
    """Mean reconstruction count of random terms with the same sum and the same norm."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((draws, *terms.shape), generator=generator, dtype=torch.float64).to(terms)
    noise = noise - noise.mean(-1, keepdim=True)
    mean = terms.mean(-1, keepdim=True)
    spread = (terms - mean).norm(dim=-1, keepdim=True)
    random = mean + noise / noise.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(terms.dtype).tiny) * spread
    return reconstruction_count(random, tolerance).mean(0)


def rotated_terms(
    query: Float[Tensor, "*b m"],
    s: Float[Tensor, "*b m"],
    difference: Float[Tensor, "*b m"],
    draws: int = 20,
    seed: int = 0,
) -> Float[Tensor, "draws *b m"]:
    """Terms over ``U R_1`` and ``V R_2``, independent random rotations: spectrum and rank stay, the directions do not.

    They rotate within the head's own subspaces, the strictest form: only which direction meets which is lost.
    """
    r_1, r_2 = random_rotations(s.shape[-1], 2 * draws, seed).to(query).chunk(2)
    return _turned(query, r_1) * s * _turned(difference, r_2)


def shared_terms(
    query: Float[Tensor, "*b d"], difference: Float[Tensor, "*b d"], draws: int = 20, seed: int = 0
) -> Float[Tensor, "draws *b d"]:
    """Terms of ``qᵀ Δk`` along the axes of a randomly rotated head space: every logit stays as it is."""
    rotation = random_rotations(query.shape[-1], draws, seed).to(query)
    return _turned(query, rotation) * _turned(difference, rotation)


def random_rotations(d: int, draws: int, seed: int) -> Float[Tensor, "draws d d"]:
    """Haar-random orthogonal matrices."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(draws, d, d, generator=generator, dtype=torch.float64))
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def _turned(x: Float[Tensor, "*b m"], rotation: Float[Tensor, "draws m m"]) -> Float[Tensor, "draws *b m"]:
    return torch.einsum("...m,rmn->r...n", x, rotation)
