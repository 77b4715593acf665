"""Bases: verified SVDs and QRs, projectors, and the angles between several bases.

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

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.checking import checked_call
from qkscope.errors import BadInput

_SWEEPS = 20  # 8 to 11 are needed, whatever the matrix
_DONE = 1e-14  # largest cosine between two columns
_MANY = 64  # matrices from which on a GPU is quicker with all at once than one after the other
# of float32 queries and keys, with room: what is smaller than that of what it came from is no rank
ROUNDING = 1e-5
_DEPENDENT = 1e-8  # relative size under which a direction of a joint basis is a copy of the others
Factors = tuple[Tensor, Tensor, Tensor]  # U, S, V


def jacobi_svd(matrix: Float[Tensor, "b n n"]) -> Factors:
    """``U, S, V`` with ``matrix = U diag(S) Vᵀ`` in float64, n even, by one-sided Jacobi.

    A column of U is 0 where its singular value is.

    >>> u, s, v = jacobi_svd(torch.tensor([[[0.0, 2.0], [3.0, 0.0]]]))
    >>> s
    tensor([[3., 2.]], dtype=torch.float64)
    """
    matrix = matrix.double()
    count, n, _ = matrix.shape
    eye = torch.eye(n, dtype=torch.float64, device=matrix.device)
    # a row is a column of M beside one of V
    columns = torch.cat([matrix.mT, eye.expand_as(matrix)], dim=-1)
    places = _round_places(n).to(matrix.device).expand(count, -1)
    turn = torch.zeros(count, n * n, dtype=torch.float64, device=matrix.device)
    for _ in range(_SWEEPS):
        for _ in range(n - 1):
            turn.scatter_(1, places, _round_entries(columns[..., :n]))
            columns = turn.view_as(matrix) @ columns
        sizes = columns[..., :n].norm(dim=-1)
        tiny = torch.finfo(torch.float64).tiny
        lengths = sizes[..., None].clamp_min(tiny)
        units = columns[..., :n] / lengths
        cosines = (units @ units.mT).tril(-1)
        if bool(cosines.abs().max() <= _DONE):
            break
    s, order = sizes.sort(dim=-1, descending=True)
    order = order[..., None].expand_as(units)
    u = units.gather(1, order).mT
    v = columns[..., n:].gather(1, order).mT
    return u, s, v


def _round_places(n: int) -> Int[Tensor, " e"]:
    """Places of a tournament round's cosines and sines in a flat n × n matrix.

    Column i meets i + n/2, then all but the first move on by one place.
    """
    half = n // 2
    upper = [0]
    if half > 1:
        upper += [*range(2, half), n - 1]
    lower = [1, *range(half, n - 1)]
    rows = torch.tensor([upper, upper, lower, lower])
    first = torch.arange(half)
    partner = half * torch.tensor([[0], [1], [0], [1]])
    return (rows * n + first + partner).flatten()


def _round_entries(columns: Float[Tensor, "b n n"]) -> Float[Tensor, "b e"]:
    """Cosines and sines that make the columns of each pair orthogonal."""
    half = columns.shape[-1] // 2
    products = columns @ columns.mT
    squares = products.diagonal(dim1=-2, dim2=-1)
    met = products.diagonal(half, dim1=-2, dim2=-1)
    first, second = squares.chunk(2, dim=-1)
    # 0 / 0: two columns that are 0 are not turned
    twice_angle = torch.atan(2 * met / (first - second)).nan_to_num_()
    angle = twice_angle / 2
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat([cos, sin, -sin, cos], dim=1)


def gram_qr(w: Float[Tensor, "b d m"]) -> tuple[Float[Tensor, "b m d"], Float[Tensor, "b d d"]]:
    """``Q, R`` with ``wᵀ = Q R`` in float64, d ≤ m, by Cholesky.

    Where w has no full rank, or nearly none, they are LAPACK's.

    >>> w = torch.randn(2, 3, 8, dtype=torch.float64)
    >>> q, r = gram_qr(w)
    >>> torch.allclose(q @ r, w.mT)
    True
    """
    w = w.double()
    eye = torch.eye(w.shape[1], dtype=torch.float64, device=w.device)
    q = w
    r = eye.expand(len(w), -1, -1)
    for _ in range(2):
        lower = torch.linalg.cholesky_ex(q @ q.mT).L
        inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
        q = inverse @ q
        r = lower.mT @ r
    q = q.mT
    off_identity = q.mT @ q - eye
    off_w = (q @ r).mT - w
    not_orthonormal = off_identity.abs().amax(dim=(1, 2))
    size = w.abs().amax(dim=(1, 2))
    missed = off_w.abs().amax(dim=(1, 2)) / size
    eps = torch.finfo(torch.float64).eps
    rounding = 64 * eps * max(w.shape[1:])
    is_good = (not_orthonormal <= rounding) & (missed <= rounding)
    for i in (~is_good).nonzero()[:, 0].tolist():
        q[i], r[i] = torch.linalg.qr(w[i].mT)
    return q, r


def checked_svd(matrix: Float[Tensor, "*n a b"]) -> Factors:
    """Thin SVD with ``matrix = U diag(S) Vᵀ``, in float64, verified.

    ``U, S, V`` are ``*n a m``, ``*n m``, ``*n b m``. Each matrix is rebuilt from its factors and
    the bases are tested for orthonormality; those that fail are done again with LAPACK's slower QR
    driver, and if that fails too, the error says so. Signs are fixed so that the largest entry of
    each column of U is positive.
    """
    matrix = matrix.to(torch.float64)
    if not bool(torch.isfinite(matrix).all()):
        raise BadInput(
            "a matrix with NaN or infinite entries has no singular vectors:"
            " check the sums behind it."
        )
    u, s, v = _fast_svd(matrix)
    for index in _failures(matrix, u, s, v):
        u[index], s[index], v[index] = _robust_svd(matrix[index])
    if _failures(matrix, u, s, v):
        raise ArithmeticError(
            "the singular vectors of a head could not be verified by multiplying them out again"
        )
    largest_place = u.abs().argmax(dim=-2, keepdim=True)
    largest = u.gather(-2, largest_place)
    signs = torch.where(largest < 0, -1.0, 1.0)
    return u * signs, s, v * signs


def _fast_svd(matrix: Float[Tensor, "*n a b"]) -> Factors:
    """Thin SVD by the quickest way, unchecked."""
    *batch, rows, columns = matrix.shape
    is_even_square = rows == columns and rows % 2 == 0
    if matrix.is_cuda and math.prod(batch) >= _MANY and is_even_square:
        u, s, v = jacobi_svd(matrix.flatten(0, -3))
        return u.unflatten(0, batch), s.unflatten(0, batch), v.unflatten(0, batch)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vh.mH


def energy_rank(
    s: Float[Tensor, "*n m"], energy: float = 0.99, *, size: float | Tensor = 0.0
) -> Tensor:
    """Smallest rank whose squared singular values hold this share of their sum; 0 where all are 0.

    ``size`` is that of the numbers the matrix is a difference of: what is below their rounding
    counts as 0.
    """
    rounding = ROUNDING * torch.as_tensor(size).to(s)
    above_rounding = s.where(s > rounding, 0.0).double()
    held = above_rounding.square().cumsum(dim=-1)
    total = held[..., -1:]
    too_few = (held < energy * total) & (total > 0)
    rank = too_few.sum(dim=-1) + (total[..., 0] > 0)
    # The last cumulative sum may miss `energy * total` by rounding when energy is 1, so the rank is
    # capped.
    return rank.clamp_max(s.shape[-1])


def _failures(matrix: Tensor, u: Tensor, s: Tensor, v: Tensor) -> list[tuple[int, ...]]:
    """Indices of the matrices whose factors do not multiply out, or are not orthonormal."""
    limits = torch.finfo(s.dtype)
    tolerance = 64 * limits.eps * max(matrix.shape[-2:])
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    size = s[..., :1, None].clamp_min(limits.tiny)
    rebuilt = (u * s[..., None, :]) @ v.mT
    residual = (rebuilt - matrix) / size
    u_deviation = u.mT @ u - eye
    v_deviation = v.mT @ v - eye
    deviations = (residual, u_deviation, v_deviation)
    largest = [deviation.abs().amax(dim=(-2, -1)) for deviation in deviations]
    # NaN is a failure too
    is_good = torch.stack(largest).amax(dim=0) <= tolerance
    return [tuple(index) for index in (~is_good).nonzero().tolist()]


def _robust_svd(matrix: Float[Tensor, "a b"]) -> Factors:
    """Thin SVD of one matrix by LAPACK's QR driver."""
    from scipy.linalg import svd

    u, s, vh = svd(matrix.cpu().numpy(), full_matrices=False, lapack_driver="gesvd")
    device = matrix.device
    return _on_device(u, device), _on_device(s, device), _on_device(vh.T, device)


def _on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy of a numpy array as a tensor on a device."""
    return torch.from_numpy(array.copy()).to(device)


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
    q_1, r_1 = _qr(w_q)
    q_2, r_2 = _qr(w_k)
    if kv_of_head is not None:
        q_2 = q_2[kv_of_head]
        r_2 = r_2[kv_of_head]
    a, s, b = checked_svd(r_1 @ r_2.mT)
    return q_1 @ a, s, q_2 @ b


def heads_at_once(w_q: Float[Tensor, "h d_head d_model"]) -> int:
    """Number of heads that `thin_svd` is best given together.

    A GPU takes as long for a few as for all, so what fits it.
    """
    numbers = 1 << 27
    if w_q.is_cuda:
        free_bytes, _ = torch.cuda.mem_get_info(w_q.device)
        numbers = max(numbers, free_bytes // 128)  # it makes some ten copies in float64
    return max(numbers // w_q[0].numel(), 1)


def _qr(w: Float[Tensor, "*h d m"]) -> tuple[Tensor, Tensor]:
    """``Q, R`` with ``wᵀ = Q R``, in float64."""
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
        is_there = self.left.abs().amax(dim=-2) > 0
        return is_there.sum(dim=-1)

    def matrix(self) -> Float[Tensor, "*n d d"]:
        """The projector ``P`` as a d × d matrix, for small d."""
        return self.left @ self.right.mT

    def cut(self, k: int | Sequence[int]) -> Projector:
        """Keep the first k columns; with k per head, zeros fill up the shorter ones."""
        width = k if isinstance(k, int) else max(k)
        if not 1 <= width <= self.left.shape[-1]:
            raise BadInput(
                f"rank {width} does not fit into the {self.left.shape[-1]} dimensions of the head."
            )
        left = self.left[..., :width]
        right = self.right[..., :width]
        if isinstance(k, int):
            return Projector(left, right)
        kept = torch.arange(width) < torch.tensor(k)[:, None]
        kept = kept[:, None].to(left.device)
        return Projector(left.where(kept, 0.0), right.where(kept, 0.0))

    @classmethod
    def orthogonal(cls, basis: Float[Tensor, "*n d r"]) -> Projector:
        """Projector onto an orthonormal basis."""
        return cls(basis, basis)

    @classmethod
    def stack(cls, projectors: Sequence[Projector]) -> Projector:
        """Stack one projector per head, padded with zero columns to a common rank."""
        width = max(projector.left.shape[-1] for projector in projectors)
        lefts = []
        rights = []
        for left, right in projectors:
            missing = width - left.shape[-1]
            lefts.append(pad(left, (0, missing)))
            rights.append(pad(right, (0, missing)))
        return cls(torch.stack(lefts), torch.stack(rights))


def principal_cosines(
    a: Float[Tensor, "*n d r"], b: Float[Tensor, "*n d s"]
) -> Float[Tensor, "*n m"]:
    """Cosines of the principal angles between the spans of two orthonormal bases, largest first."""
    return torch.linalg.svdvals(a.mT @ b.to(a)).clamp_max(1.0)


def joint_basis(bases: Sequence[Float[Tensor, "d r"]]) -> Float[Tensor, "d r_joint"]:
    """Orthonormal basis of the sum of several subspaces; shared directions count once."""
    side_by_side = torch.cat(list(bases), dim=-1).to(torch.float64)
    u, s, _ = torch.linalg.svd(side_by_side, full_matrices=False)
    return u[:, s > _DEPENDENT * s[0]]


def oblique_projectors(bases: Sequence[Float[Tensor, "d r"]]) -> tuple[list[Projector], float]:
    """For each subspace the projector onto it along all the others, and their condition number.

    They act on their own subspace as the identity and annihilate the others, so they sum to a
    projector onto the joint span. They need independent subspaces; the condition number says how
    close to dependent these are (1: orthogonal).
    """
    side_by_side = torch.cat(list(bases), dim=-1).to(torch.float64)
    d, directions = side_by_side.shape
    s = torch.linalg.svdvals(side_by_side)
    if directions > d or s[-1] <= _DEPENDENT * s[0]:
        dimensions = int((s > _DEPENDENT * s[0]).sum())
        span = f"{directions} directions span {dimensions} dimensions"
        raise BadInput(
            f"oblique projectors need independent subspaces, but {span}: lower a rank or join them."
        )
    widths = [basis.shape[-1] for basis in bases]
    lefts = side_by_side.split(widths, dim=-1)
    rights = torch.linalg.pinv(side_by_side).mT.split(widths, dim=-1)
    projectors = [Projector(left, right) for left, right in zip(lefts, rights, strict=True)]
    return projectors, float(s[0] / s[-1])


def random_bases(d: int, rank: int, draws: int, seed: int) -> Float[Tensor, "draws d r"]:
    """Orthonormal bases of uniformly random subspaces."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(draws, d, rank, generator=generator, dtype=torch.float64)
    basis, _ = torch.linalg.qr(gaussian)
    return basis
