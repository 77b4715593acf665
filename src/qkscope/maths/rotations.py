"""Sparsity under random rotations of the basis, with rotations of its own for every prompt.

A random rotation sends a vector to a uniform direction, and a pair of vectors to a uniform pair at the same angle, so
no matrix has to be drawn. Sparsity does not see the length of a vector, so the directions are all there is. Rotations
shared by all prompts would leave their luck in every mean, where no interval over prompts could show it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.maths.sparsity import sparsity


def rotated_sparsity(
    query: Float[Tensor, "b h m"], s: Float[Tensor, "h m"], draws: int, prompts: Sequence[int], seed: int = 0
) -> Float[Tensor, "b h"]:
    """Mean sparsity of ``s · (R_1 α) · (R_2 β)``, independent rotations: what the spectrum alone would show.

    Parameters
    ----------
    query : the coordinates; only their shape counts, and NaN stays NaN.
    prompts : numbers of the prompts, which address their draws.
    """
    one, other = _normal(query, draws, prompts, seed)
    return torch.where(query.isnan().any(-1), torch.nan, sparsity(one * s.to(one) * other).mean(0))


def shared_sparsity(
    q: Float[Tensor, "b h d"], difference: Float[Tensor, "b h d"], draws: int, prompts: Sequence[int], seed: int = 0
) -> Float[Tensor, "b h"]:
    """Mean sparsity of the products of coordinates after one rotation of both vectors: every logit stays."""
    one, other = (torch.nn.functional.normalize(x, dim=-1) for x in _normal(q, draws, prompts, seed))
    across = torch.nn.functional.normalize(other - (other * one).sum(-1, keepdim=True) * one, dim=-1)
    cosine = torch.nn.functional.cosine_similarity(q, difference, dim=-1)[..., None]
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
