"""Factors of many matrices at once, in products: what a GPU is quick at, and its solvers of one matrix at a time not.

**SVD.** One-sided Jacobi (Hestenes): rotate pairs of columns until all are orthogonal, ``M V = U diag(S)``. In a round
every column is in one pair, so a round is one product of all matrices with their rotations; after n − 1 rounds of a
tournament each pair has met (a sweep). The angle that makes columns x, y orthogonal is ``½ atan(2 x·y / (x·x − y·y))``.

**QR.** ``W Wᵀ = L Lᵀ`` and ``Q = L⁻¹ W``, twice: the second time takes out what rounding left of the first.

Neither is believed unchecked: `qkscope.maths.bases` multiplies out what it gets, and asks LAPACK where it does not fit.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SWEEPS = 20  # 8 to 11 are needed, whatever the matrix
_DONE = 1e-14  # largest cosine between two columns


def jacobi_svd(
    matrix: Float[Tensor, "b n n"],
) -> tuple[Float[Tensor, "b n n"], Float[Tensor, "b n"], Float[Tensor, "b n n"]]:
    """``U, S, V`` with ``matrix = U diag(S) Vᵀ`` in float64, n even; a column of U is 0 where its value is.

    >>> u, s, v = jacobi_svd(torch.tensor([[[0.0, 2.0], [3.0, 0.0]]]))
    >>> s
    tensor([[3., 2.]], dtype=torch.float64)
    """
    count, n, _ = matrix.shape
    matrix = matrix.to(torch.float64)
    eye = torch.eye(n, dtype=torch.float64, device=matrix.device)
    columns = torch.cat([matrix.mT, eye.expand_as(matrix)], dim=-1)  # a row is a column of M, and one of V
    where = _places(n, matrix.device).expand(count, -1)
    turn = torch.zeros(count, n * n, dtype=torch.float64, device=matrix.device)
    for _ in range(_SWEEPS):
        for _ in range(n - 1):
            products = columns[..., :n] @ columns[..., :n].mT
            squares, met = products.diagonal(dim1=-2, dim2=-1), products.diagonal(n // 2, dim1=-2, dim2=-1)
            first, second = squares.chunk(2, dim=-1)
            angle = torch.atan(2 * met / (first - second)).nan_to_num_() / 2
            cos, sin = angle.cos(), angle.sin()
            turn.scatter_(1, where, torch.cat([cos, sin, -sin, cos], dim=1))
            columns = turn.view_as(matrix) @ columns
        sizes = columns[..., :n].norm(dim=-1)
        units = columns[..., :n] / sizes[..., None].clamp_min(torch.finfo(torch.float64).tiny)
        if bool((units @ units.mT).tril(-1).abs().max() <= _DONE):
            break
    s, order = sizes.sort(dim=-1, descending=True)
    u, v = (x.gather(1, order[..., None].expand_as(x)).mT for x in (units, columns[..., n:]))
    return u, s, v


def _places(n: int, device: torch.device) -> Int[Tensor, " 2n"]:
    """Where the rotations of a round stand in n × n: i meets i + n/2, then all but the first move on by one place."""
    half = n // 2
    upper = [0, *range(2, half), n - 1] if half > 1 else [0]
    lower = [1, *range(half, n - 1)]
    rows = torch.tensor([upper, upper, lower, lower])
    here = torch.arange(half)
    columns = torch.stack([here, here + half, here, here + half])
    return (rows * n + columns).flatten().to(device)


def gram_qr(w: Float[Tensor, "b d m"]) -> tuple[Float[Tensor, "b m d"], Float[Tensor, "b d d"]]:
    """``Q, R`` with ``wᵀ = Q R`` in float64, d ≤ m; where w has no full rank, or nearly none, LAPACK's.

    >>> w = torch.randn(2, 3, 8, dtype=torch.float64)
    >>> q, r = gram_qr(w)
    >>> torch.allclose(q @ r, w.mT)
    True
    """
    w = w.to(torch.float64)
    eye = torch.eye(w.shape[1], dtype=torch.float64, device=w.device)
    q, r = w, eye.expand(len(w), -1, -1)
    for _ in range(2):
        lower = torch.linalg.cholesky_ex(q @ q.mT).L
        q = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False) @ q
        r = lower.mT @ r
    q = q.mT
    wrong = (q.mT @ q - eye).abs().amax(dim=(1, 2))
    missed = ((q @ r).mT - w).abs().amax(dim=(1, 2)) / w.abs().amax(dim=(1, 2))
    rounding = 64 * torch.finfo(torch.float64).eps * max(w.shape[1:])
    for i in (~((wrong <= rounding) & (missed <= rounding))).nonzero()[:, 0].tolist():
        q[i], r[i] = torch.linalg.qr(w[i].mT)
    return q, r
