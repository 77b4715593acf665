"""What folded weights are multiplied with: ``q = s_q W_Q x̂ + c_Q``, the input x̂ and the scalars s of one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkscope.capture.blocks import full_output, take_apart
from qkscope.capture.scope import Scope
from qkscope.heads import Head
from qkscope.linear.layer import Layer
from qkscope.linear.weights import head_weights, recorded


def _layer(model: Any, layer: int) -> Layer:
    scope = model if isinstance(model, Scope) else Scope.from_model(model, check=False)
    called, row = recorded(scope, layer)[layer], torch.zeros(1, 1, dtype=torch.long)
    return Layer(scope, layer, called.block, called.given, called.call, row[0], row)


@torch.no_grad()
def normalised_input(model: Any, layer: int, hidden: Tensor) -> Tensor:
    """x̂: the stream that enters a layer, normalised without gain and bias (post-norm: as it is), and a constant 1."""
    read, unit = _layer(model, layer), hidden.float()
    norms = [norm for norm in read.norms.ran if norm not in set(read.true.module.modules())]
    if norms:
        own = take_apart(norms[0], unit)
        unit = own.scalar(unit, full_output(norms[0], unit)) * own.centred(unit)
    return torch.cat([unit, torch.ones_like(unit[..., :1])], dim=-1)


@torch.no_grad()
def qk_norm_scale(model: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """s_q and s_k: what QK-norm leaves for each token and head; all 1 without QK-norm."""
    read = _layer(model, layer)
    weights = head_weights(read.scope, [Head(layer, i) for i in range(read.true.q.shape[1])])
    live, x = read.pushed(hidden.flatten(0, -2)[:, None, None]), normalised_input(read.scope, layer, hidden)
    found = []
    for kind, W, c in (("q", weights.W_Q, weights.c_Q), ("k", weights.W_K, weights.c_K)):
        part = torch.einsum("...x,hdx->...hd", x, W)
        s = ((live[kind][:, 0, 0].view_as(part) - c) * part).sum(-1) / part.square().sum(-1)
        found.append(s)
    return found[0], found[1]
