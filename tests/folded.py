"""What folded weights are multiplied with: ``q = s_q W_Q x̂ + c_Q``, the input x̂ and the scalars s of one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkscope.capture.projection import LayerCall, norm_unit, record_calls
from qkscope.capture.scope import Scope
from qkscope.capture.weights import qk_norm_scales


def _call(model: Any, layer: int) -> LayerCall:
    return record_calls(model.model if isinstance(model, Scope) else model, last=layer)[layer]


def normalised_input(model: Any, layer: int, hidden: Tensor) -> Tensor:
    """x̂: the stream that enters a layer, normalised without gain and bias (post-norm: as it is), and a constant 1."""
    norm = _call(model, layer).input_norm
    unit = hidden.float() if norm is None else norm_unit(norm, hidden)
    return torch.cat([unit, torch.ones_like(unit[..., :1])], dim=-1)


@torch.no_grad()
def qk_norm_scale(model: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """s_q and s_k: what QK-norm leaves for each token and head; all 1 without QK-norm."""
    call = _call(model, layer)
    z = hidden if call.input_norm is None else call.input_scale * call.input_norm(hidden)
    s_q, s_k = qk_norm_scales(call, z.flatten(0, -2))
    return s_q.unflatten(0, hidden.shape[:-1]), s_k.unflatten(0, hidden.shape[:-1])
