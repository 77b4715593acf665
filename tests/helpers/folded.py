"""What folded weights are multiplied with: the input x̂ of one layer, ``q = s_q W_Q x̂ + c_Q``."""

from typing import Any

import torch
from torch import Tensor

from qkscope.linear.head_weights import recorded
from qkscope.linear.layer import AffineLayer
from qkscope.model.block_tree import full_output, take_apart
from qkscope.model.scope import Scope


@torch.no_grad()
def normalised_input(model: Any, layer: int, hidden: Tensor) -> Tensor:
    """x̂: the stream that enters a layer, normalised without gain and bias (post-norm: as it is),
    and a constant 1.
    """
    scope = model if isinstance(model, Scope) else Scope.from_model(model, check=False)
    called, row, unit = (
        recorded(scope, layer)[layer],
        torch.zeros(1, 1, dtype=torch.long),
        hidden.float(),
    )
    ran = AffineLayer(
        scope, layer, called.block, called.arguments, called.call, row[0], row
    ).norms.ran
    norms = [norm for norm in ran if norm not in set(called.call.module.modules())]
    if norms:
        own = take_apart(norms[0], unit)
        unit = own.scalar(unit, full_output(norms[0], unit)) * own.centred(unit)
    return torch.cat([unit, torch.ones_like(unit[..., :1])], dim=-1)
