"""Do singular vectors point along features? Cosines, chance, and the part of anisotropy.

For a feature f and singular vectors ``u_1 … u_m``: the *matched* cosine is ``|cos(f, u_j)|`` with
the j it should map to, the *best* one is the maximum over j. A maximum over many is large by
itself, so random directions take it too. Where features are not isotropic, ``G = W Wᵀ ≠ cI``,
theory expects u along ``G⁻¹ f`` (whitened), so that ``G u`` (anti-whitened) meets f; ``E = G/c −
I`` says how far from isotropic they are.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

log = logging.getLogger(__name__)
_SINGULAR = 1e-10  # relative size under which an eigenvalue of G is 0


def cosines(features: Float[Tensor, "d k"], basis: Float[Tensor, "d m"]) -> Float[Tensor, "k m"]:
    """``|cos(f_i, u_j)|`` of every feature and vector; NaN where either is 0.

    >>> cosines(torch.eye(3)[:, :2], torch.eye(3))
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    return (_unit(features).mT @ _unit(basis.to(features))).abs().clamp_max(1.0)


class RandomBest(NamedTuple):
    """What a random direction scores: the mean best cosine, and the one that 5% exceed."""

    mean: float
    top: float


def random_best(d: int, vectors: int, draws: int = 4000, seed: int = 0) -> RandomBest:
    """Best ``|cos|`` of random directions in d dimensions with any ``vectors`` orthonormal ones.

    By symmetry the vectors may be axes: it is the largest of the first coordinates of a random unit
    vector.

    >>> 0.5 < random_best(10, 10).mean < 0.7 and random_best(10, 1).mean < 0.3
    True
    """
    generator = torch.Generator().manual_seed(seed)
    direction = _unit(torch.randn(d, draws, generator=generator, dtype=torch.float64))
    best = direction[:vectors].abs().amax(0)
    return RandomBest(float(best.mean()), float(best.quantile(0.95)))


def gram(features: Float[Tensor, "d n"]) -> Float[Tensor, "d d"]:
    """``G = W Wᵀ`` in float64."""
    return features.double() @ features.double().mT


def invert_gram(g: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Invert G; where features do not span the space, take the pseudo-inverse, and say so."""
    values, vectors = torch.linalg.eigh(g.double())
    kept = values > _SINGULAR * values.amax().clamp_min(torch.finfo(torch.float64).tiny)
    inverse = torch.where(kept, 1 / values.where(kept, 1.0), 0.0)
    if not kept.all():
        _say_singular(int(kept.sum()), len(g))
    return (vectors * inverse) @ vectors.mT


@cache
def _say_singular(rank: int, d: int) -> None:
    log.warning(
        "features span %d of %d dimensions: the pseudo-inverse of G stands in for its inverse.",
        rank,
        d,
    )


def whiten(g: Float[Tensor, "d d"], vectors: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """``G⁻¹ f``: where Theorem 1 expects the singular vectors."""
    return invert_gram(g) @ vectors.double()


def anti_whiten(g: Float[Tensor, "d d"], vectors: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """``G u``: singular vectors taken back to features."""
    return g.double() @ vectors.double()


def isotropy_error(g: Float[Tensor, "d d"], c: float | None = None) -> float:
    """``‖G/c − I‖`` (largest singular value); ``c = tr G / d`` by default, with which it cannot
    exceed d − 1.

    >>> isotropy_error(torch.diag(torch.tensor([56.0] + [1.0] * 9)), c=1.0)
    55.0
    """
    scale = float(g.trace()) / len(g) if c is None else c
    eye = torch.eye(len(g), dtype=torch.float64, device=g.device)
    return float(torch.linalg.matrix_norm(g.double() / scale - eye, ord=2))


def _unit(vectors: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    return vectors / vectors.norm(dim=-2, keepdim=True)
