"""The singular basis of a head's QK matrix, from its thin factors.

``Ω = W_Qᵀ W_K`` is d_model × d_model but of rank ≤ d_head, so it is never formed: with ``W_Qᵀ = Q_1 R_1`` and
``W_Kᵀ = Q_2 R_2``, the SVD of the small ``R_1 R_2ᵀ = A S Bᵀ`` gives ``U = Q_1 A`` and ``V = Q_2 B``.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.kinds import checked_call
from qkscope.maths.svd import checked_svd


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
        raise BadInput(f"query and key weights should agree in all but the last size, but have shapes "
                       f"{tuple(w_q.shape)} and {tuple(w_k.shape)}.")  # fmt: skip
    if kv_of_head is not None and (w_q.shape[:-2], w_q.shape[-2]) != (kv_of_head.shape, w_k.shape[-2]):
        raise BadInput(f"kv_of_head names the key weights of each head, but it has shape {tuple(kv_of_head.shape)} and "
                       f"they have {tuple(w_q.shape)} and {tuple(w_k.shape)}.")  # fmt: skip
    if kv_of_head is not None and not bool(((kv_of_head >= 0) & (kv_of_head < len(w_k))).all()):
        raise BadInput(f"kv_of_head counts key weights from 0 to {len(w_k) - 1}, but holds {kv_of_head.tolist()}.")
    q_1, r_1 = torch.linalg.qr(w_q.to(torch.float64).mT)
    q_2, r_2 = torch.linalg.qr(w_k.to(torch.float64).mT)
    if kv_of_head is not None:
        q_2, r_2 = q_2[kv_of_head], r_2[kv_of_head]
    a, s, b = checked_svd(r_1 @ r_2.mT)
    return q_1 @ a, s, q_2 @ b
