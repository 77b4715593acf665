"""A padded batch of a tiny model, on either side."""

from __future__ import annotations

import torch
from torch import Tensor

from qkscope.capture.families import tiny_model, two_prompts
from qkscope.capture.inputs import model_pad_id, pad_rows, short_ids
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope


def look(family: str, dtype: torch.dtype = torch.float32, **overrides: object) -> Scope:
    """A tiny model of a family, unchecked."""
    return Scope.from_model(tiny_model(family, **overrides).to(dtype), check=False)


def padded(scope: Scope, side: str | None) -> tuple[dict[str, Tensor], Places]:
    """Two prompts of 9 and 7 tokens, each asking from its last one; images, where there is no side to pad."""
    if side is None:
        return two_prompts(scope)
    rows = short_ids(scope.model, (9, 7))
    inputs = pad_rows(rows, model_pad_id(scope.model) or 0, side, scope.facts.takes_positions)
    mask = inputs["attention_mask"]
    last = mask.shape[1] - 1 - mask.flip(-1).argmax(-1)
    return inputs, Places.everywhere(torch.arange(len(mask)), last, mask)


def sides_of(scope: Scope) -> tuple[str | None, ...]:
    """Where a batch of this model can be padded."""
    return (None,) if scope.model.main_input_name == "pixel_values" else scope.facts.sides or (None,)
