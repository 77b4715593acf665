"""A model is trusted after five facts hold on short prompts.

Every layer is called (the probe refuses otherwise); the output under the tap is the output without it;
``softmax([cap(scale · q·k) + bias, rest])`` is the attention the model itself reports when run eagerly; a prompt padded
in a batch is the prompt alone, on either side and in every space, and stays so in the query's frame when its positions
are shifted; and writing another key into a head changes what comes out, while writing the same key does not.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkscope.capture.batchcheck import check_batches, eager_attention
from qkscope.capture.inputs import positions_of, short_inputs
from qkscope.capture.patch import Edit
from qkscope.capture.pick import Picker, Places
from qkscope.capture.tap import tap
from qkscope.errors import BadInput
from qkscope.heads import Head

if TYPE_CHECKING:
    from qkscope.capture.scope import Scope


@dataclass(frozen=True)
class Check:
    """Outcome of a self-check: largest differences found.

    Attributes
    ----------
    output_error : float
        Output under the tap against output without it.
    attention_error : float
        Attention rebuilt from captured q, k and rest against the model's own eager attention, all heads.
    padding_error : float
        Attention in padded batches against the attention the model reports for each prompt alone.
    write_effect : float
        How far the output moves when a key of the first head is replaced; must not be 0.
    """

    output_error: float
    attention_error: float
    padding_error: float
    write_effect: float

    def as_dict(self) -> dict[str, float]:
        """For the cache."""
        return asdict(self)


@torch.no_grad()
def check_model(scope: Scope) -> Check:
    """Check the tap on a model, or refuse the model with the fact that failed."""
    kind = scope.model.config.model_type
    inputs = short_inputs(scope.model, lengths=(9, 6))
    if scope.facts.takes_positions:
        inputs["position_ids"] = positions_of(inputs["attention_mask"])
    places = _places(inputs, scope)
    half = scope.model.dtype in (torch.float16, torch.bfloat16)
    tolerance = 1e-2 if half else 1e-4

    plain = _output(scope, inputs)
    if not bool(plain.isfinite().all()):
        raise BadInput(f"{kind} gives NaN or infinite logits: load it with dtype='float32', or check its weights.")
    with tap(scope.model, lambda call: None, scope.facts.layer_of):
        tapped = _output(scope, inputs)
    output_error = float((tapped - plain).abs().max())
    if output_error > tolerance * max(1.0, float(plain.abs().max())):
        raise BadInput(f"{kind} cannot be looked into: its output changes by {output_error:.2g} under the tap.")

    errors, largest = [], 0.0
    for width in sorted({layer.d_head for layer in scope.facts.layers}):
        heads = [head for head in scope.heads() if scope.facts.layers[head.layer].d_head == width]
        picker = Picker(scope.facts, heads, places, stop=False)
        # rounding in half precision grows from layer to layer, so there both sides come from one and the same pass
        with tap(scope.model, picker.visit, scope.facts.layer_of) if not half else nullcontext():
            scope.model.base_model(**inputs)
        reference = eager_attention(scope, inputs, picker.visit if half else None)
        captured = picker.finish(places.row, {})
        ours = captured.attention()
        logits = captured.attention_logits()
        largest = max(largest, float(logits[logits.isfinite()].abs().max()))
        for slot, head in enumerate(captured.heads):
            weights = reference[head.layer][places.row, head.index, places.query].float()
            wanted = weights.gather(-1, places.keys)
            errors.append((ours[:, slot] - wanted).abs().max())
    attention_error = float(torch.stack(errors).max())
    # the model rounds its logits to its own precision, we do not
    if not attention_error <= max(tolerance, 1e-3) + largest * torch.finfo(scope.model.dtype).eps:
        raise BadInput(
            f"{kind} cannot be looked into: its attention is not softmax(scale q·k + mask) of the vectors its attention"
            f" call is given (off by {attention_error:.2g})."
        )

    padding_error = check_batches(scope) if "input_ids" in inputs else 0.0
    write_effect = _write_effect(scope, inputs, places, plain, None if half else tolerance)
    return Check(output_error, attention_error, padding_error, write_effect)


def _places(inputs: dict[str, Tensor], scope: Scope) -> Places:
    """Every real token as a query; the first, a middle and the last one as keys, the others left to `rest`."""
    main = next(iter(inputs.values()))
    mask = inputs.get("attention_mask")
    if mask is None:  # an image: patches and class token, as many as the attention sees
        lengths: list[int] = []
        with tap(scope.model, lambda call: lengths.append(call.k.shape[2]), scope.facts.layer_of):
            scope.model.base_model(**inputs)
        mask = torch.ones((len(main), lengths[0]), dtype=torch.long, device=main.device)
    row, query = mask.nonzero(as_tuple=True)
    last = mask.shape[1] - 1
    keys = torch.tensor([last - 5, last - 2, last], device=mask.device).expand(len(row), 3)
    return Places(row, query, keys, torch.ones_like(keys, dtype=torch.bool))


def _output(scope: Scope, inputs: dict[str, Tensor]) -> Tensor:
    """Logits (or the body's output, for a model without a head) at real tokens."""
    output = scope.model(**inputs)
    values = output.logits if getattr(output, "logits", None) is not None else output[0]
    mask = inputs.get("attention_mask")
    return values.float() if mask is None or values.ndim < 3 else values[mask.bool()].float()


def _write_effect(
    scope: Scope, inputs: dict[str, Tensor], places: Places, plain: Tensor, tolerance: float | None
) -> float:
    head = Head(0, 0)
    last = places.keys[:1, -1:].expand(len(next(iter(inputs.values()))), 1)  # the last token: real in every row
    rows = torch.arange(len(last), device=last.device)
    there = Places(rows, last[:, 0], last, torch.ones_like(last, dtype=torch.bool))
    captured = scope.capture_inputs(inputs, places=there, heads=[head])
    same = captured.k[:, 0]
    with scope.patched([Edit.keys(head, last, same)]):
        kept = _output(scope, inputs)
    # along the query, so that the logit surely moves; 50 times its length, so that it moves far
    query = captured.q
    away = same - 50 * query / query.norm(dim=-1, keepdim=True).clamp_min(1e-6) * same.norm(dim=-1, keepdim=True)
    with scope.patched([Edit.keys(head, last, away)]):
        moved = _output(scope, inputs)
    kind = scope.model.config.model_type
    # half precision rounds a recomputed head differently, and a router may then choose another expert
    if tolerance is not None and float((kept - plain).abs().max()) > tolerance * max(1.0, float(plain.abs().max())):
        raise BadInput(f"{kind} cannot be patched: writing a key that is already there changes the output.")
    effect = float((moved - plain).abs().max())
    if effect == 0.0:
        raise BadInput(f"{kind} cannot be patched: writing another key has no effect.")
    return effect
