"""Relative attention, split over a basis: why this key rather than the others, and how few terms say so.

For an attended key i: ``r = ℓ_i − mean_{j≠i} ℓ_j = qᵀ Δk`` with ``Δk = k_i − mean_{j≠i} k_j``, positive whenever the
attention on i beats its share. With ``Ω = Σ_m σ_m u_m v_mᵀ`` the terms are ``c_m = σ_m (u_mᵀ x_q)(v_mᵀ Δx)`` and sum to
r. Under RoPE no single Ω holds, but in the query's frame the same split stays exact: ``σ_m v_mᵀ Δx`` becomes
``(W_Q u_m)ᵀ Δk`` (`qkscope.maths.singular`).

Sparsity is ``(mean |c|)² / mean c²``: 1 when all terms are equal in size, 1/n when one carries it all. The
reconstruction count is the size of the smallest set of terms whose sum reaches r. Neither is flat under a meaningless
basis: a spectrum alone makes terms unequal, and random terms of the same sum need few as well. So beside each stand
`null_count` and a rotated basis at the same weights: its terms (`rotated_terms`), or their sparsity with rotations of
its own for every prompt (`turned_terms`, `shared_sparsity`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from qkscope.errors import BadInput


def key_difference(
    keys: Float[Tensor, "*b n d"], attended: Int[Tensor, "*b"], mask: Bool[Tensor, "*b n"] | None = None
) -> Float[Tensor, "*b d"]:
    """``Δk``: the attended key minus the mean of the others.

    Parameters
    ----------
    keys : the keys of each query's row (or tokens, or logits with d = 1).
    attended : which key of the row is asked about.
    mask : which keys the query sees; all by default.

    Examples
    --------
    >>> key_difference(torch.tensor([[5.0], [1.0], [3.0]]), torch.tensor(0))
    tensor([3.])
    """
    seen = torch.ones(keys.shape[:-1], dtype=torch.bool, device=keys.device) if mask is None else mask
    index = attended[..., None].to(torch.int64)
    others = seen.scatter(-1, index, False)
    if not bool(others.any(-1).all()):
        raise BadInput("relative attention needs another key beside the attended one: give a longer prompt.")
    weight = (others / others.sum(-1, keepdim=True)).to(keys)
    mean = (weight[..., None] * keys.masked_fill(~others[..., None], 0.0)).sum(-2)
    return keys.gather(-2, index[..., None].expand(*index.shape, keys.shape[-1])).squeeze(-2) - mean


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
    total = terms.sum(-1, keepdim=True)
    reached = terms.sort(dim=-1, descending=True).values.cumsum(-1)
    # the sum in another order may miss the total by rounding: without slack an exact fit would need all terms
    slack = 8 * torch.finfo(terms.dtype).eps * terms.abs().sum(-1, keepdim=True)
    count = (reached < tolerance * total - slack).sum(-1) + 1
    return torch.where(total.squeeze(-1) > 0, count.to(terms), torch.nan)


def cancellation(terms: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """``r / Σ |c|``: 1 when all terms point the same way, near 0 when they cancel."""
    return terms.sum(-1) / terms.abs().sum(-1)


def rank_correlation(a: Float[Tensor, "*b m"], b: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """Spearman's: whether the largest terms sit at the largest singular values; NaN where a term is."""
    ranks = [x.argsort(-1).argsort(-1).double() for x in (a, b)]
    one, other = (r - r.mean(-1, keepdim=True) for r in ranks)
    found = (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1))
    return torch.where(a.isnan().any(-1), torch.nan, found)


def largest_place(terms: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """Where the largest |term| stands: 0 at the largest singular value, 1 at the smallest; NaN where a term is.

    Examples
    --------
    >>> largest_place(torch.tensor([1.0, -4.0, 2.0]))
    tensor(0.5000)
    """
    place = terms.abs().argmax(-1).to(terms) / max(terms.shape[-1] - 1, 1)
    return torch.where(terms.isnan().any(-1), torch.nan, place)


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
    rotations = random_rotations(s.shape[-1], 2 * draws, seed).to(query).chunk(2)
    q, k = (torch.einsum("...m,rmn->r...n", x, r) for x, r in zip((query, difference), rotations, strict=True))
    return q * s * k


def random_rotations(d: int, draws: int, seed: int) -> Float[Tensor, "draws d d"]:
    """Haar-random orthogonal matrices."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(draws, d, d, generator=generator, dtype=torch.float64))
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def turned_terms(
    query: Float[Tensor, "b h m"], s: Float[Tensor, "h m"], draws: int, prompts: Sequence[int], seed: int = 0
) -> Float[Tensor, "draws b h m"]:
    """Terms ``s · (R_1 α) · (R_2 β)`` up to their size, independent rotations: what the spectrum alone would show.

    A random rotation sends a vector to a uniform direction, and what is asked of terms does not see its length: no
    matrix has to be drawn. Rotations shared by all prompts would leave their luck in every mean, where no interval over
    prompts could show it.

    Parameters
    ----------
    query : the coordinates; only their shape counts, and NaN stays NaN.
    prompts : numbers of the prompts, which address their draws.
    """
    one, other = _normal(query, draws, prompts, seed)
    return torch.where(query.isnan().any(-1, keepdim=True), torch.nan, one * s.to(one) * other)


def shared_sparsity(
    q: Float[Tensor, "b h d"], difference: Float[Tensor, "b h d"], draws: int, prompts: Sequence[int], seed: int = 0
) -> Float[Tensor, "b h"]:
    """Mean sparsity of the products of coordinates after one rotation of both vectors: every logit stays.

    A pair of vectors goes to a uniform pair at the same angle.
    """
    one, other = (normalize(x, dim=-1) for x in _normal(q, draws, prompts, seed))
    across = normalize(other - (other * one).sum(-1, keepdim=True) * one, dim=-1)
    cosine = cosine_similarity(q, difference, dim=-1)[..., None]
    turned = cosine * one + (1 - cosine.square()).clamp_min(0).sqrt() * across
    return sparsity(one * turned).mean(0)


def _normal(like: Float[Tensor, "b h m"], draws: int, prompts: Sequence[int], seed: int) -> Float[Tensor, "2 r b h m"]:
    """Gaussian vectors, addressed by seed and prompt: batches do not change them."""
    drawn = []
    for prompt in prompts:
        address = int.from_bytes(hashlib.sha256(f"{seed}/{prompt}".encode()).digest()[:8], "big") >> 1
        generator = torch.Generator().manual_seed(address)
        drawn.append(torch.randn(2, draws, *like.shape[1:], generator=generator, dtype=torch.float64))
    return torch.stack(drawn, dim=2)
