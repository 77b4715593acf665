"""Subspaces of the same size that know nothing of the feature: what a swap must beat.

Random subspaces are a straw man: keys vary in few directions, so the top principal components of the keys move as much
attention as many a contrast. ``Cov_q Cov_k`` is the strongest: the directions in which queries and keys both vary.
Each is fitted on the examples that the feature was fitted on, never on the test set.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.maths.augmented import augmented
from qkscope.maths.svd import checked_svd


class Covariance:
    """Streaming covariance of vectors for many heads: the sums ``Σ [x; 1][x; 1]ᵀ`` in float64, merged by addition.

    Examples
    --------
    >>> covariance = Covariance(columns=2, d_head=4)
    >>> covariance.update(torch.randn(100, 2, 4))
    >>> covariance.matrix().shape
    torch.Size([2, 4, 4])
    """

    def __init__(self, columns: int, d_head: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(columns, d_head + 1, d_head + 1, dtype=torch.float64, device=device)

    def update(self, x: Float[Tensor, "n c d"], keep: Tensor | None = None) -> None:
        """Add n vectors per column; ``keep`` (n, bool) leaves padding out."""
        if x.ndim != 3 or x.shape[1] != self.sums.shape[0] or x.shape[2] != self.sums.shape[1] - 1:
            raise BadInput(f"vectors should have shape (n, {self.sums.shape[0]}, {self.sums.shape[1] - 1}), "
                           f"but have {tuple(x.shape)}.")  # fmt: skip
        self.add(augmented((x if keep is None else x[keep]).transpose(0, 1)))

    def add(self, rows: Float[Tensor, "c n a"]) -> None:
        """Add vectors that have their 1 already."""
        self.sums.baddbmm_(rows.mT, rows)

    def merge(self, *others: Covariance) -> Covariance:
        """A new one with the data of all."""
        merged = Covariance(self.sums.shape[0], self.sums.shape[1] - 1, self.sums.device)
        merged.sums = sum((other.sums.to(self.sums.device) for other in others), start=self.sums.clone())
        return merged

    def matrix(self) -> Float[Tensor, "c d d"]:
        """Covariance of every column."""
        count = self.sums[:, -1:, -1:]
        if bool((count < 2).any()):
            raise BadInput("a covariance needs at least two vectors: fit on more prompts.")
        mean = self.sums[:, :-1, -1:] / count
        return self.sums[:, :-1, :-1] / count - mean @ mean.mT


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
