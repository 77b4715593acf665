"""Subspaces of the same size that know nothing of the feature: what a swap must beat.

Random subspaces are a straw man: keys vary in few directions, so the top principal components of the keys move as much
attention as many a contrast. ``Cov_q Cov_k`` is the strongest: the directions in which queries and keys both vary.
Each is fitted on the examples that the feature was fitted on, never on the test set.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.maths.svd import checked_svd


def key_pca(cov_k: Float[Tensor, "*h d d"], rank: int) -> Float[Tensor, "*h d r"]:
    """Top principal components of the keys."""
    return checked_svd(cov_k)[2][..., : _checked_rank(rank, cov_k)]


def cov_qk(cov_q: Float[Tensor, "*h d d"], cov_k: Float[Tensor, "*h d d"], rank: int) -> Float[Tensor, "*h d r"]:
    """Top key-side directions of ``Cov_q Cov_k``: self-contrast as it would be if softmax were linear."""
    return checked_svd(cov_q @ cov_k)[2][..., : _checked_rank(rank, cov_k)]


def _checked_rank(rank: int, matrix: Tensor) -> int:
    if not 1 <= rank <= matrix.shape[-1]:
        raise BadInput(f"rank {rank} does not fit into the {matrix.shape[-1]} dimensions of the head.")
    return rank
