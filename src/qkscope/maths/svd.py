"""SVDs that are checked: the fast driver has been silently wrong on real heads, so every result is multiplied out.

A head's ``Ω = W_Qᵀ W_K`` is d_model × d_model but of rank ≤ d_head, so it is never formed: with ``W_Qᵀ = Q_1 R_1`` and
``W_Kᵀ = Q_2 R_2``, the SVD of the small ``R_1 R_2ᵀ = A S Bᵀ`` gives ``U = Q_1 A`` and ``V = Q_2 B`` (`thin_svd`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.kinds import checked_call

ROUNDING = 1e-5  # of float32 queries and keys, with room: what is smaller than that of what it came from is no rank


def checked_svd(
    matrix: Float[Tensor, "*n a b"],
) -> tuple[Float[Tensor, "*n a m"], Float[Tensor, "*n m"], Float[Tensor, "*n b m"]]:
    """Thin SVD ``U, S, V`` with ``matrix = U diag(S) Vᵀ``, in float64, verified, with signs that do not wander.

    Each matrix is rebuilt from its factors and the bases are tested for orthonormality; those that fail are done again
    with LAPACK's slower QR driver, and if that fails too, the error says so. Signs are fixed so that the largest entry
    of each column of U is positive.
    """
    matrix = matrix.to(torch.float64)
    if not bool(torch.isfinite(matrix).all()):
        raise BadInput("a matrix with NaN or infinite entries has no singular vectors: check the sums behind it.")
    if not matrix.numel():
        raise BadInput(f"a matrix of shape {tuple(matrix.shape)} is empty and has no singular vectors.")
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    v = vh.mH
    for index in _failures(matrix, u, s, v):
        u[index], s[index], v[index] = _robust_svd(matrix[index])
    if _failures(matrix, u, s, v):
        raise ArithmeticError("the singular vectors of a head could not be verified by multiplying them out again")
    signs = u.gather(-2, u.abs().argmax(dim=-2, keepdim=True)).sign()
    signs = torch.where(signs == 0, torch.ones_like(signs), signs)
    return u * signs, s, v * signs


def energy_rank(s: Float[Tensor, "*n m"], energy: float = 0.99, *, size: float | Tensor = 0.0) -> Tensor:
    """Smallest rank whose squared singular values hold this share of their sum (0 where all are 0).

    ``size`` is that of the numbers the matrix is a difference of: what is below their rounding counts as 0.
    """
    if not 0 < energy <= 1:
        raise BadInput(f"energy is a share between 0 and 1, but got {energy}.")
    s = torch.where(s > ROUNDING * torch.as_tensor(size, dtype=s.dtype, device=s.device), s, torch.zeros_like(s))
    held = s.to(torch.float64).square().cumsum(dim=-1)
    total = held[..., -1:]
    # The last cumulative sum may miss `energy * total` by rounding when energy is 1, so the rank is capped.
    rank = ((held < energy * total) & (total > 0)).sum(dim=-1) + (total[..., 0] > 0)
    return rank.clamp_max(s.shape[-1])


def _failures(matrix: Tensor, u: Tensor, s: Tensor, v: Tensor) -> list[tuple[int, ...]]:
    """Indices of the matrices whose factors do not multiply out, or whose bases are not orthonormal."""
    tolerance = 64 * torch.finfo(s.dtype).eps * max(matrix.shape[-2:])
    scale = s[..., :1, None].clamp_min(torch.finfo(s.dtype).tiny)
    residual = ((u * s[..., None, :]) @ v.mT - matrix) / scale
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    worst = torch.stack([x.abs().amax(dim=(-2, -1)) for x in (residual, u.mT @ u - eye, v.mT @ v - eye)]).amax(dim=0)
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
    w_q, w_k : the query and key weights of each head, biases appended as a last column where there are any.
    kv_of_head : which key weights each head reads, where several share them: those are factored once.

    Examples
    --------
    >>> u, s, v = thin_svd(torch.randn(3, 4, 20), torch.randn(3, 4, 20))
    >>> u.shape, s.shape
    (torch.Size([3, 20, 4]), torch.Size([3, 4]))
    """
    if kv_of_head is None and w_q.shape[:-1] != w_k.shape[:-1]:
        raise BadInput(
            "query and key weights should agree in all but the last size, but have shapes "
            f"{tuple(w_q.shape)} and {tuple(w_k.shape)}."
        )
    if kv_of_head is not None and (w_q.shape[:-2], w_q.shape[-2]) != (kv_of_head.shape, w_k.shape[-2]):
        raise BadInput(
            f"kv_of_head names the key weights of each head, but it has shape {tuple(kv_of_head.shape)} and "
            f"they have {tuple(w_q.shape)} and {tuple(w_k.shape)}."
        )
    if kv_of_head is not None and not bool(((kv_of_head >= 0) & (kv_of_head < len(w_k))).all()):
        raise BadInput(f"kv_of_head counts key weights from 0 to {len(w_k) - 1}, but holds {kv_of_head.tolist()}.")
    q_1, r_1 = torch.linalg.qr(w_q.to(torch.float64).mT)
    q_2, r_2 = torch.linalg.qr(w_k.to(torch.float64).mT)
    if kv_of_head is not None:
        q_2, r_2 = q_2[kv_of_head], r_2[kv_of_head]
    a, s, b = checked_svd(r_1 @ r_2.mT)
    return q_1 @ a, s, q_2 @ b
