"""A prompt in a batch is the prompt alone: padded on either side, beside a longer one, or at shifted positions.

The same batch on both sides of a comparison hides a model that counts positions its own way. So rows of padded batches,
as `Scope.encode` makes them, stand against each prompt alone, as bare ids, run eagerly and counted by the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qkscope.capture.inputs import short_ids
from qkscope.capture.logits import logits_at
from qkscope.capture.pick import Capture, Picker, Places
from qkscope.capture.spaces import SPACES, Space
from qkscope.capture.tap import Call, tap
from qkscope.errors import BadInput
from qkscope.examples import Example, Key

if TYPE_CHECKING:
    from qkscope.capture.encode import Encoding
    from qkscope.capture.scope import Scope

_SHIFT = 3

Views = dict[tuple[int, Space], Capture]
"""One pass, by the width of the heads and the space."""


class Alone(NamedTuple):
    """One prompt on its own: what we see of the pass, the attention the model reports of it, and its logits."""

    views: Views
    reported: tuple[Tensor, ...]
    logits: Tensor | None


@torch.no_grad()
def check_batches(scope: Scope) -> float:
    """The largest error of attention in padded batches; refuses a model whose prompts change in a batch."""
    kind = scope.model.config.model_type
    prompts = [
        Example(
            ids=tuple(row.tolist()),
            queries=((2, 3), (len(row) - 1, len(row))),
            keys=tuple(Key((i, i + 1)) for i in range(3)),
        )
        for row in short_ids(scope.model, (9, 5))
    ]
    singles = [scope.encode([prompt]) for prompt in prompts]
    alone = [_alone(scope, encoded) for encoded in singles]
    worst = 0.0
    for side in scope.facts.sides:
        encoded = scope.encode(prompts, padding_side=side)
        views = _views(scope, encoded, SPACES)
        logits = _logits(scope, encoded.inputs, encoded.places)
        for i, single in enumerate(alone):
            error = _attention_error(scope, views, single, i)
            worst = max(worst, error)
            what = _difference(scope, views, single.views, i)
            if what is None and not error <= _attention_tolerance(scope, single.views):
                what = f"attention (off by {error:.2g})"
            if what is None and logits is not None and single.logits is not None:
                what = _logits_difference(scope, logits[encoded.example == i], single.logits)
            if what is not None:
                raise BadInput(
                    f"{kind} cannot be looked into: padded on the {side} beside a longer prompt, its {what} are not"
                    " those of the same prompt alone, so it counts positions or hides padding in a way of its own."
                )
    if scope.facts.takes_positions and any(layer.offset is not None for layer in scope.facts.layers):
        inputs = singles[0].inputs | {"position_ids": singles[0].inputs["position_ids"] + _SHIFT}
        shifted = _views(scope, replace(singles[0], inputs=inputs), ("query_frame",))
        what = _difference(scope, shifted, alone[0].views, 0)
        if what is not None:
            raise BadInput(
                f"{kind} cannot be looked into: with every position {_SHIFT} further on, its {what} change, although"
                " only offsets should count there."
            )
    return worst


def eager_attention(
    scope: Scope, inputs: dict[str, Tensor], visit: Callable[[Call], None] | None, rotary: bool = False
) -> tuple[Tensor, ...]:
    """Attention weights as the model reports them when run eagerly; a visitor may watch the same pass."""
    model: Any = scope.model
    before = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    names = {key: getattr(config, "_attn_implementation_internal", None) for key, config in before.items()}
    try:
        for config in before.values():
            config._attn_implementation_internal = "eager"
        with tap(model, visit, scope.facts.layer_of, rotary) if visit is not None else nullcontext():
            attentions = model.base_model(**inputs, output_attentions=True).attentions
    finally:
        for key, config in before.items():
            config._attn_implementation_internal = names[key]
    if attentions is None or len(attentions) != scope.n_layers or any(layer is None for layer in attentions):
        raise BadInput(f"{model.config.model_type} does not report its attention, so the tap cannot be checked on it.")
    return tuple(layer.to(scope.device) for layer in attentions)


def _alone(scope: Scope, encoded: Encoding) -> Alone:
    """One prompt as bare ids: nobody but the model counts its positions."""
    bare = {"input_ids": encoded.inputs["input_ids"]}
    pickers = _pickers(scope, encoded.places, SPACES)
    reported = eager_attention(scope, bare, lambda call: _show(pickers, call), rotary=True)
    views = {key: picker.finish(encoded.example, {}) for key, picker in pickers.items()}
    return Alone(views, reported, _logits(scope, bare, encoded.places))


def _views(scope: Scope, encoded: Encoding, spaces: tuple[Space, ...]) -> Views:
    pickers = _pickers(scope, encoded.places, spaces)
    with tap(scope.model, lambda call: _show(pickers, call), scope.facts.layer_of, rotary=True):
        scope._body(encoded.inputs)
    return {key: picker.finish(encoded.example, {}) for key, picker in pickers.items()}


def _logits(scope: Scope, inputs: dict[str, Tensor], places: Places) -> Tensor | None:
    """The model's output at the queries, None where it gives none for each token."""
    try:
        return logits_at(scope, inputs, places)
    except BadInput:
        return None


def _pickers(scope: Scope, places: Places, spaces: tuple[Space, ...]) -> dict[tuple[int, Space], Picker]:
    pickers = {}
    for width in sorted({layer.d_head for layer in scope.facts.layers}):
        for space in spaces:
            layers = [layer.d_head == width and space not in layer.refusals for layer in scope.facts.layers]
            heads = [head for head in scope.heads() if layers[head.layer]]
            if heads:
                pickers[width, space] = Picker(scope.facts, heads, places, space, stop=False)
    return pickers


def _show(pickers: dict[tuple[int, Space], Picker], call: Call) -> None:
    for picker in pickers.values():
        picker.visit(call)


def _is_half(scope: Scope) -> bool:
    return scope.model.dtype in (torch.float16, torch.bfloat16)


def _layers(scope: Scope) -> range:
    """Where to compare: in half precision rounding grows from layer to layer, so there the first two have to tell."""
    return range(min(2, scope.n_layers) if _is_half(scope) else scope.n_layers)


def _difference(scope: Scope, views: Views, single: Views, example: int) -> str | None:
    """The first space in which queries or keys of a prompt differ from those of the prompt alone."""
    for (width, space), batch in views.items():
        own, rows = single[width, space], batch.example == example
        for layer in _layers(scope):
            slots = [slot for slot, head in enumerate(batch.heads) if head.layer == layer]
            groups = batch.kv_of_head[slots].unique()
            for what, ours, theirs in (
                ("queries", batch.q[rows][:, slots], own.q[:, slots]),
                ("keys", batch.k[rows][:, groups], own.k[:, groups]),
            ):
                if not slots:
                    continue
                off = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))
                if not off <= (5e-2 if _is_half(scope) else 1e-3):
                    return f"{space} {what} in layer {layer} (off by {off:.2g} of the largest)"
    return None


def _logits_difference(scope: Scope, ours: Tensor, theirs: Tensor) -> str | None:
    """In half precision only what is far off counts: the last layer has gathered the rounding of all."""
    off = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))
    return None if off <= (0.5 if _is_half(scope) else 1e-3) else f"logits (off by {off:.2g} of the largest)"


def _attention_error(scope: Scope, views: Views, single: Alone, example: int) -> float:
    errors = []
    for (width, space), batch in views.items():
        if space != "post_rope":
            continue
        own, rows = single.views[width, space], batch.example == example
        ours, alone = batch.attention()[rows], own.attention()
        for slot, head in enumerate(batch.heads):
            if head.layer in _layers(scope):
                theirs = single.reported[head.layer][0, head.index, own.query_positions].float()
                theirs = theirs.gather(-1, own.key_positions)
                # in half precision the model rounds its logits and we do not: there it is our own rows
                errors.append((ours[:, slot] - (alone[:, slot] if _is_half(scope) else theirs)).abs().max())
    return float(torch.stack(errors).max()) if errors else 0.0


def _attention_tolerance(scope: Scope, single: Views) -> float:
    logits = torch.cat([own.attention_logits().flatten() for (_, space), own in single.items() if space == "post_rope"])
    largest = float(logits[logits.isfinite()].abs().max())
    return (1e-2 if _is_half(scope) else 1e-3) + largest * torch.finfo(scope.model.dtype).eps
