"""Next-token logits at the queries: the LM head is a model's largest matrix, so it runs there alone where it can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from qkscope.capture.inputs import forward_arguments
from qkscope.capture.pick import Places
from qkscope.errors import BadInput

if TYPE_CHECKING:
    from qkscope.capture.scope import Scope


def logits_at(scope: Scope, inputs: dict[str, Tensor], places: Places) -> Tensor:
    """Run the whole model; refused where it gives no logits per token."""
    taken = forward_arguments(scope.model)
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in taken else {}
    columns, where = places.query.unique(return_inverse=True)
    if "logits_to_keep" in taken:
        output = scope.model(**inputs, **extra, logits_to_keep=columns).logits
        return output[places.row, where].float()
    output = scope.model(**inputs, **extra)
    if getattr(output, "logits", None) is None or output.logits.ndim != 3:
        raise BadInput(f"{scope.name} gives no logits per token: capture it with logits=False.")
    return output.logits[places.row, places.query].float()
