"""Bases: SVDs that are checked, and what several bases are to each other: angles, joint bases,
oblique projectors.

The fast driver of the SVD has been silently wrong on real heads, so every result is multiplied out.
A head's ``Ω = W_Qᵀ W_K`` is d_model × d_model but of rank ≤ d_head, so it is never formed: with
``W_Qᵀ = Q_1 R_1`` and ``W_Kᵀ = Q_2 R_2``, the SVD of the small ``R_1 R_2ᵀ = A S Bᵀ`` gives ``U =
Q_1 A`` and ``V = Q_2 B`` (`thin_svd`).

A projector is kept as two thin factors, ``P = left rightᵀ``: ``xᵀ P y = (xᵀ left)(rightᵀ y)`` never
needs d × d. An orthogonal projector has ``left = right``; an oblique one takes ``right`` from the
dual basis of the whole set.

A GPU is quick at products of many matrices, and its solvers of one matrix at a time are not. So
there:

**SVD.** One-sided Jacobi (Hestenes): rotate pairs of columns until all are orthogonal, ``M V = U
diag(S)``. In a round every column is in one pair, so a round is one product of all matrices with
their rotations; after n − 1 rounds of a tournament each pair has met (a sweep). The angle that
makes columns x, y orthogonal is ``½ atan(2 x·y / (x·x − y·y))``.

**QR.** ``W Wᵀ = L Lᵀ`` and ``Q = L⁻¹ W``, twice: the second time takes out what rounding left of
the first.

Neither is believed unchecked: what they give is multiplied out, and LAPACK asked where it does not
fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.checking import checked_call
from qkscope.errors import BadInput

_SWEEPS = 20  # 8 to 11 are needed, whatever the matrix
_DONE = 1e-14  # largest cosine between two columns
_MANY = 64  # matrices from which on a GPU is quicker with all at once than one after the other
ROUNDING = 1e-5  # of float32 queries and keys, with room: what is smaller than that of what it came from is no rank
_DEPENDENT = 1e-8  # relative size under which a direction of a joint basis is a copy of the others


def jacobi_svd(matrix: Float[Tensor, "b n n"]) -> tuple[Tensor, Tensor, Tensor]:
    """``U, S, V`` with ``matrix = U diag(S) Vᵀ`` in float64, n even; a column of U is 0 where its
    value is.

    >>> u, s, v = jacobi_svd(torch.tensor([[[0.0, 2.0], [3.0, 0.0]]]))
    >>> s
    tensor([[3., 2.]], dtype=torch.float64)
    """
    matrix, (count, n, _) = matrix.double(), matrix.shape
    eye = torch.eye(n, dtype=torch.float64, device=matrix.device)
    columns = torch.cat(
        [matrix.mT, eye.expand_as(matrix)], dim=-1
    )  # a row is a column of M, and one of V
    # where the rotations of a round stand in n × n: i meets i + n/2, then all but the first move on
    # by one place
    half = n // 2
    upper = [0, *range(2, half), n - 1] if half > 1 else [0]
    lower = [1, *range(half, n - 1)]
    places = torch.tensor([upper, upper, lower, lower]) * n + torch.arange(half)
    where = (
        (places + half * torch.tensor([[0], [1], [0], [1]]))
        .flatten()
        .to(matrix.device)
        .expand(count, -1)
    )
    turn = torch.zeros(count, n * n, dtype=torch.float64, device=matrix.device)
    for _ in range(_SWEEPS):
        for _ in range(n - 1):
            products = columns[..., :n] @ columns[..., :n].mT
            squares = products.diagonal(dim1=-2, dim2=-1)
            met = products.diagonal(half, dim1=-2, dim2=-1)
            first, second = squares.chunk(2, dim=-1)
            angle = torch.atan(2 * met / (first - second)).nan_to_num_() / 2
            cos = angle.cos()
            sin = angle.sin()
            turn.scatter_(1, where, torch.cat([cos, sin, -sin, cos], dim=1))
            columns = turn.view_as(matrix) @ columns
        sizes = columns[..., :n].norm(dim=-1)
        units = columns[..., :n] / sizes[..., None].clamp_min(torch.finfo(torch.float64).tiny)
        if bool((units @ units.mT).tril(-1).abs().max() <= _DONE):
            break
    s, order = sizes.sort(dim=-1, descending=True)
    u = units.gather(1, order[..., None].expand_as(units)).mT
    v = columns[..., n:].gather(1, order[..., None].expand_as(columns[..., n:])).mT
    return u, s, v


def gram_qr(w: Float[Tensor, "b d m"]) -> tuple[Float[Tensor, "b m d"], Float[Tensor, "b d d"]]:
    """``Q, R`` with ``wᵀ = Q R`` in float64, d ≤ m; where w has no full rank, or nearly none,
    LAPACK's.

    >>> w = torch.randn(2, 3, 8, dtype=torch.float64)
    >>> q, r = gram_qr(w)
    >>> torch.allclose(q @ r, w.mT)
    True
    """
    w, eye = w.double(), torch.eye(w.shape[1], dtype=torch.float64, device=w.device)
    q = w
    r = eye.expand(len(w), -1, -1)
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


def checked_svd(matrix: Float[Tensor, "*n a b"]) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD ``U, S, V`` (``*n a m``, ``*n m``, ``*n b m``) with ``matrix = U diag(S) Vᵀ``, in
    float64, verified.

    Each matrix is rebuilt from its factors and the bases are tested for orthonormality; those that
    fail are done again with LAPACK's slower QR driver, and if that fails too, the error says so.
    Signs are fixed so that the largest entry of each column of U is positive.
    """
    matrix = matrix.to(torch.float64)
    if not bool(torch.isfinite(matrix).all()):
        raise BadInput(
            "a matrix with NaN or infinite entries has no singular vectors: check the sums behind it."
        )
    *batch, rows, columns = matrix.shape
    if matrix.is_cuda and math.prod(batch) >= _MANY and rows == columns and rows % 2 == 0:
        u, s, v = (x.unflatten(0, batch) for x in jacobi_svd(matrix.flatten(0, -3)))
    else:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        v = vh.mH
    for index in _failures(matrix, u, s, v):
        u[index], s[index], v[index] = _robust_svd(matrix[index])
    if _failures(matrix, u, s, v):
        raise ArithmeticError(
            "the singular vectors of a head could not be verified by multiplying them out again"
        )
    signs = torch.where(u.gather(-2, u.abs().argmax(dim=-2, keepdim=True)) < 0, -1.0, 1.0)
    return u * signs, s, v * signs


def energy_rank(
    s: Float[Tensor, "*n m"], energy: float = 0.99, *, size: float | Tensor = 0.0
) -> Tensor:
    """Smallest rank whose squared singular values hold this share of their sum (0 where all are 0).

    ``size`` is that of the numbers the matrix is a difference of: what is below their rounding
    counts as 0.
    """
    held = s.where(s > ROUNDING * torch.as_tensor(size).to(s), 0.0).double().square().cumsum(dim=-1)
    total = held[..., -1:]
    # The last cumulative sum may miss `energy * total` by rounding when energy is 1, so the rank is
    # capped.
    rank = ((held < energy * total) & (total > 0)).sum(dim=-1) + (total[..., 0] > 0)
    return rank.clamp_max(s.shape[-1])


def _failures(matrix: Tensor, u: Tensor, s: Tensor, v: Tensor) -> list[tuple[int, ...]]:
    """Indices of the matrices whose factors do not multiply out, or whose bases are not
    orthonormal.
    """
    tolerance = 64 * torch.finfo(s.dtype).eps * max(matrix.shape[-2:])
    residual = ((u * s[..., None, :]) @ v.mT - matrix) / s[..., :1, None].clamp_min(
        torch.finfo(s.dtype).tiny
    )
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    worst = torch.stack(
        [x.abs().amax(dim=(-2, -1)) for x in (residual, u.mT @ u - eye, v.mT @ v - eye)]
    ).amax(dim=0)
    return [tuple(index) for index in (~(worst <= tolerance)).nonzero().tolist()]


def _robust_svd(matrix: Float[Tensor, "a b"]) -> tuple[Tensor, Tensor, Tensor]:
    from scipy.linalg import svd

    u, s, vh = svd(matrix.cpu().numpy(), full_matrices=False, lapack_driver="gesvd")
    return tuple(torch.from_numpy(x.copy()).to(matrix.device) for x in (u, s, vh.T))  # type: ignore[return-value]


@checked_call
def thin_svd(
    w_q: Float[Tensor, "*h d_head d_model"],
    w_k: Float[Tensor, "*g d_head d_model_k"],
    kv_of_head: Int[Tensor, " h"] | None = None,
) -> tuple[Float[Tensor, "*h d_model m"], Float[Tensor, "*h m"], Float[Tensor, "*h d_model_k m"]]:
    """Singular vectors and values of ``W_Qᵀ W_K`` for a batch of heads; m ≤ d_head.

    Parameters
    ----------
    w_q, w_k : the query and key weights of each head, biases appended as a last column where there
        are any.
    kv_of_head : which key weights each head reads, where several share them: those are factored
        once.

    Examples
    --------
    >>> u, s, v = thin_svd(torch.randn(3, 4, 20), torch.randn(3, 4, 20))
    >>> u.shape, s.shape
    (torch.Size([3, 20, 4]), torch.Size([3, 4]))
    """
    (q_1, r_1), (q_2, r_2) = _qr(w_q), _qr(w_k)
    if kv_of_head is not None:
        q_2 = q_2[kv_of_head]
        r_2 = r_2[kv_of_head]
    a, s, b = checked_svd(r_1 @ r_2.mT)
    return q_1 @ a, s, q_2 @ b


def heads_at_once(w_q: Float[Tensor, "h d_head d_model"]) -> int:
    """How many heads `thin_svd` is best given together: a GPU takes as long for a few as for all,
    so what fits it.
    """
    fits = (
        torch.cuda.mem_get_info(w_q.device)[0] // 128 if w_q.is_cuda else 0
    )  # it makes some ten copies in float64
    return max(max(1 << 27, fits) // w_q[0].numel(), 1)


def _qr(w: Float[Tensor, "*h d m"]) -> tuple[Tensor, Tensor]:
    if w.is_cuda and w.ndim == 3 and w.shape[1] <= w.shape[2]:
        return gram_qr(w)
    return torch.linalg.qr(w.double().mT)


class Projector(NamedTuple):
    """``P = left rightᵀ``; columns of zeros (where heads differ in rank) do nothing."""

    left: Float[Tensor, "*n d r"]
    right: Float[Tensor, "*n d r"]

    @property
    def rank(self) -> Tensor:
        """Number of directions that are not zero columns."""
        return (self.left.abs().amax(dim=-2) > 0).sum(dim=-1)

    def matrix(self) -> Float[Tensor, "*n d d"]:
        """``P`` itself, for small d."""
        return self.left @ self.right.mT

    def cut(self, k: int | Sequence[int]) -> Projector:
        """Keep the first k columns; with k per head, zeros fill up the shorter ones."""
        width = k if isinstance(k, int) else max(k)
        if not 1 <= width <= self.left.shape[-1]:
            raise BadInput(
                f"rank {width} does not fit into the {self.left.shape[-1]} dimensions of the head."
            )
        left, right = (factor[..., :width] for factor in self)
        if isinstance(k, int):
            return Projector(left, right)
        keep = (torch.arange(width) < torch.tensor(k)[:, None])[:, None].to(left.device)
        return Projector(left.where(keep, 0.0), right.where(keep, 0.0))

    @classmethod
    def orthogonal(cls, basis: Float[Tensor, "*n d r"]) -> Projector:
        """Projector onto an orthonormal basis."""
        return cls(basis, basis)

    @classmethod
    def stack(cls, projectors: Sequence[Projector]) -> Projector:
        """One per head, padded with zero columns to a common rank."""
        width = max(p.left.shape[-1] for p in projectors)
        sides = zip(*projectors, strict=True)
        return cls(
            *(torch.stack([pad(x, (0, width - x.shape[-1])) for x in factors]) for factors in sides)
        )


def principal_cosines(
    a: Float[Tensor, "*n d r"], b: Float[Tensor, "*n d s"]
) -> Float[Tensor, "*n m"]:
    """Cosines of the principal angles between the spans of two orthonormal bases, largest first."""
    return torch.linalg.svdvals(a.mT @ b.to(a)).clamp_max(1.0)


def joint_basis(bases: Sequence[Float[Tensor, "d r"]]) -> Float[Tensor, "d r_joint"]:
    """Orthonormal basis of the sum of several subspaces; shared directions count once."""
    u, s, _ = torch.linalg.svd(
        torch.cat(list(bases), dim=-1).to(torch.float64), full_matrices=False
    )
    return u[:, s > _DEPENDENT * s[0]]


def oblique_projectors(bases: Sequence[Float[Tensor, "d r"]]) -> tuple[list[Projector], float]:
    """For each subspace the projector onto it along all the others, and the condition number of the
    set.

    They act on their own subspace as the identity and annihilate the others, so they sum to a
    projector onto the joint span. They need independent subspaces; the condition number says how
    close to dependent these are (1: orthogonal).
    """
    whole = torch.cat(list(bases), dim=-1).to(torch.float64)
    s = torch.linalg.svdvals(whole)
    if whole.shape[1] > whole.shape[0] or s[-1] <= _DEPENDENT * s[0]:
        span = f"{whole.shape[1]} directions span {int((s > _DEPENDENT * s[0]).sum())} dimensions"
        raise BadInput(
            f"oblique projectors need independent subspaces, but {span}: lower a rank or join them."
        )
    widths = [basis.shape[-1] for basis in bases]
    sides = (side.split(widths, dim=-1) for side in (whole, torch.linalg.pinv(whole).mT))
    return [Projector(left, right) for left, right in zip(*sides, strict=True)], float(s[0] / s[-1])


def random_bases(d: int, rank: int, draws: int, seed: int) -> Float[Tensor, "draws d r"]:
    """Orthonormal bases of uniformly random subspaces."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(draws, d, rank, generator=generator, dtype=torch.float64))[0]
