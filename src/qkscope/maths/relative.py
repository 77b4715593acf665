"""Relative attention, split over a singular basis: why this key rather than the others.

For an attended key i: ``r = ℓ_i − mean_{j≠i} ℓ_j = qᵀ Δk`` with ``Δk = k_i − mean_{j≠i} k_j``, positive whenever the
attention on i beats its share. With ``Ω = Σ_m σ_m u_m v_mᵀ`` the terms are ``c_m = σ_m (u_mᵀ x_q)(v_mᵀ Δx)`` and sum to
r. Under RoPE no single Ω holds, but in the query's frame the same split stays exact: ``σ_m v_mᵀ Δx`` becomes
``(W_Q u_m)ᵀ Δk``.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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
    if bool((index < 0).any()) or bool((index >= keys.shape[-2]).any()) or not bool(seen.gather(-1, index).all()):
        raise BadInput("an attended key must be one of the keys its query sees.")
    others = seen.scatter(-1, index, False)
    if not bool(others.any(-1).all()):
        raise BadInput("relative attention needs another key beside the attended one: give a longer context.")
    weight = (others / others.sum(-1, keepdim=True)).to(keys)
    mean = (weight[..., None] * keys.masked_fill(~others[..., None], 0.0)).sum(-2)
    return keys.gather(-2, index[..., None].expand(*index.shape, keys.shape[-1])).squeeze(-2) - mean


def relative_logit(
    logits: Float[Tensor, "*b n"], attended: Int[Tensor, "*b"], mask: Bool[Tensor, "*b n"] | None = None
) -> Float[Tensor, "*b"]:
    """``r``: the attended key's logit minus the mean of the others'."""
    return key_difference(logits[..., None], attended, mask).squeeze(-1)


def relative_terms(
    query: Float[Tensor, "*b m"], s: Float[Tensor, "*b m"], difference: Float[Tensor, "*b m"]
) -> Float[Tensor, "*b m"]:
    """``c_m = σ_m (u_mᵀ x_q)(v_mᵀ Δx)`` from the coordinates ``Uᵀ x_q`` and ``Vᵀ Δx``.

    Under RoPE take ``key_coordinates`` for the latter.
    """
    return query * s * difference


def key_coordinates(
    w_q: Float[Tensor, "*h d_head d"],
    u: Float[Tensor, "*h d m"],
    s: Float[Tensor, "*h m"],
    difference: Float[Tensor, "*b d_head"],
) -> Float[Tensor, "*b m"]:
    """``(W_Q u_m)ᵀ Δk / σ_m``: equal to ``v_mᵀ Δx`` without RoPE, and exact with it when Δk is in the query's frame."""
    projected = (difference[..., None, :] @ (w_q @ u).to(difference)).squeeze(-2)
    sigma = s.to(difference)
    floor = torch.finfo(sigma.dtype).eps * sigma.amax(-1, keepdim=True)
    return torch.where(sigma > floor, projected / sigma.clamp_min(torch.finfo(sigma.dtype).tiny), 0.0)
