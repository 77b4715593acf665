"""A model is trusted after five facts hold on short prompts.

Every layer is called (the probe refuses otherwise); the output under the tap is the output without it;
``softmax([cap(scale · q·k) + bias, rest])`` is the attention the model itself reports when run eagerly; a prompt padded
in a batch is the prompt alone, on either side and in every space, and stays so in the query's frame when its positions
are shifted; and writing another key into a head changes what comes out, while writing the same key does not.

The same batch on both sides of a comparison hides a model that counts positions its own way. So rows of padded batches,
as `Scope.encode` makes them, stand against each prompt alone, as bare ids, run eagerly and counted by the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qkscope.capture.gather import Picker
from qkscope.capture.inputs import PaddingSide, forward, short_ids, short_inputs
from qkscope.capture.patch import Edit
from qkscope.capture.pick import Capture, Places
from qkscope.capture.refused import refusal
from qkscope.capture.spaces import SPACES, Space, rows_rotate_alone
from qkscope.capture.tap import Call, evaluated, tap
from qkscope.errors import BadInput
from qkscope.examples import Example, Key

if TYPE_CHECKING:
    from qkscope.capture.encode import Encoding
    from qkscope.capture.scope import Scope

_SHIFT = 3
_OWN: Space = "post_rope"  # in which q·k is the model's own logit


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
    sides : tuple of str
        Where prompts can be padded, as `Facts.sides`.
    length : int
        Tokens of the longest prompt that was checked.
    frame : str
        Why the query's frame is not defined at this length; empty where it is.
    """

    output_error: float
    attention_error: float
    padding_error: float
    write_effect: float
    sides: tuple[PaddingSide, ...]
    length: int
    frame: str = ""


@torch.no_grad()
def check_at(scope: Scope, length: int, strict: bool = True) -> Check:
    """Check the tap on prompts of so many tokens, or refuse the model with the fact that failed.

    One side on which prompts cannot be padded is left out of the outcome. Where the check is not strict, so are both,
    and the query's frame.
    """
    with evaluated(list(scope.model.modules())):
        return _check(scope, length, strict)


def _check(scope: Scope, length: int, strict: bool) -> Check:
    kind = scope.model.config.model_type
    inputs = short_inputs(scope.model, (length, length - 3), positions=scope.facts.takes_positions)
    places, by_length = _places(inputs, scope), scope.facts.anatomy.by_length
    with rows_rotate_alone(by_length):  # as under the tap
        plain = _output(scope, inputs)
    if not bool(plain.isfinite().all()):
        raise BadInput(f"{kind} gives NaN or infinite logits: load it with dtype='float32', or check its weights.")
    allowed = (1e-2 if _is_half(scope) else 1e-4) * max(1.0, float(plain.abs().max()))
    with tap(scope.model, layers=scope.facts.layer_of):
        tapped = _output(scope, inputs)
    output_error = float((tapped - plain).abs().max())
    if output_error > allowed:
        raise refusal(scope.model, f"its output changes by {output_error:.2g} under the tap")

    # rounding in half precision grows from layer to layer, so there both sides come from one and the same pass
    views = _Views(scope, places, (_OWN,))
    if not _is_half(scope):
        scope.watch(inputs, views.visit)
    reported = _eager_attention(scope, inputs, views.visit if _is_half(scope) else None)
    captures = views.finish(places.row)
    attention_error = _largest([own.attention() - _reported(own, reported) for own in captures.values()])
    if not attention_error <= _attention_tolerance(scope, captures):
        why = "softmax(scale q·k + mask) of what its attention call is given is not the attention that it reports"
        raise refusal(scope.model, f"{why} (off by {attention_error:.2g})")
    effect = _write_effect(scope, inputs, places, plain, allowed)
    if "input_ids" not in inputs:
        return Check(output_error, attention_error, 0.0, effect, scope.facts.sides, length)
    padding_error, wrong, frame = _check_batches(scope, length)
    sides = tuple(side for side in scope.facts.sides if side not in wrong)
    reasons = [*([] if sides else wrong.values()), *([frame] if frame else [])]
    if strict and reasons:
        raise refusal(scope.model, reasons[0])
    return Check(output_error, attention_error, padding_error, effect, sides, length, frame)


def _is_half(scope: Scope) -> bool:
    return scope.model.dtype in (torch.float16, torch.bfloat16)


def _places(inputs: dict[str, Tensor], scope: Scope) -> Places:
    """Every real token as a query; the first, a middle and the last one as keys, the others left to `rest`."""
    main = next(iter(inputs.values()))
    mask = inputs.get("attention_mask")
    if mask is None:  # an image: patches and class token, as many as the attention sees
        lengths: list[int] = []
        scope.watch(inputs, lambda call: lengths.append(call.k.shape[2]))
        mask = torch.ones((len(main), lengths[0]), dtype=torch.long, device=main.device)
    row, query = mask.nonzero(as_tuple=True)
    last = mask.shape[1] - 1
    keys = torch.tensor([last - 5, last - 2, last], device=mask.device).expand(len(row), 3)
    return Places(row, query, keys, torch.ones_like(keys, dtype=torch.bool))


def _output(scope: Scope, inputs: dict[str, Tensor]) -> Tensor:
    """Logits (or the body's output, for a model without a head) at real tokens."""
    output = forward(scope.model, inputs)
    values = output.logits if getattr(output, "logits", None) is not None else output[0]
    mask = inputs.get("attention_mask")
    return values.float() if mask is None or values.ndim < 3 else values[mask.bool()].float()


class _Views:
    """Visitors of one pass: a picker of all heads for each width of heads and each space."""

    def __init__(self, scope: Scope, places: Places, spaces: tuple[Space, ...]) -> None:
        self.pickers: dict[tuple[int, Space], Picker] = {}
        layers = scope.facts.layers
        for width in sorted({layer.d_head for layer in layers}):
            for space in spaces:
                there = {i for i, layer in enumerate(layers) if layer.d_head == width and space not in layer.refusals}
                heads = [head for head in scope.heads() if head.layer in there]
                if heads:
                    self.pickers[width, space] = Picker(scope.facts, heads, places, space, stop=False)

    def visit(self, call: Call) -> None:
        for picker in self.pickers.values():
            picker.visit(call)

    def finish(self, example: Tensor) -> _Captures:
        return {key: picker.finish(example, {}) for key, picker in self.pickers.items()}


_Captures = dict[tuple[int, Space], Capture]


def _eager_attention(
    scope: Scope, inputs: dict[str, Tensor], visit: Callable[[Call], None] | None, rotary: bool = False
) -> dict[int, Tensor]:
    """Attention weights as the model reports them when run eagerly; a visitor may watch the same pass.

    Where its own code was watched, they are what its own softmax gave.
    """
    model: Any = scope.model
    own: dict[int, Tensor] = {}

    def take(call: Call) -> None:
        if call.weights is not None:
            own[call.layer] = call.weights()

    if scope.facts.anatomy.own:
        scope.watch(inputs, take, *([visit] if visit is not None else []), rotary=rotary)
        return {layer: weights.to(scope.device) for layer, weights in own.items()}
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    before = [getattr(config, "_attn_implementation_internal", None) for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "eager"
        alone = rows_rotate_alone(scope.facts.anatomy.by_length)
        watched = tap(model, visit, layers=scope.facts.layer_of, rotary=rotary) if visit is not None else alone
        with watched:
            attentions = forward(model.base_model, inputs | {"output_attentions": True}).attentions
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
    reported = [layer for layer in attentions or () if layer is not None]
    layers = sorted(set(scope.facts.layer_of.values()))
    if len(reported) == scope.n_layers:  # some report what their linear layers did, too
        reported = [reported[layer] for layer in layers]
    if len(reported) != len(layers):
        raise BadInput(f"{model.config.model_type} does not report its attention, so the tap cannot be checked on it.")
    return {layer: weights.to(scope.device) for layer, weights in zip(layers, reported, strict=True)}


def _reported(own: Capture, attentions: dict[int, Tensor]) -> Tensor:
    """What the model reports of the attention of captured rows; `example` is the row of the batch."""
    rows = [attentions[head.layer][own.example, head.index, own.query_positions] for head in own.heads]
    return torch.stack([row.float().gather(-1, own.key_positions) for row in rows], dim=1)


def _attention_tolerance(scope: Scope, captures: _Captures) -> float:
    """The model rounds its logits to its own precision, we do not."""
    logits = torch.cat([own.attention_logits().flatten() for (_, space), own in captures.items() if space == _OWN])
    largest = float(logits[logits.isfinite()].abs().max())
    return (1e-2 if _is_half(scope) else 1e-3) + largest * torch.finfo(scope.model.dtype).eps


class _Single(NamedTuple):
    """One prompt as bare ids, whose positions nobody but the model counts: what we see of it, and what it reports."""

    captures: _Captures
    attentions: dict[int, Tensor]
    logits: Tensor | None

    @classmethod
    def of(cls, scope: Scope, encoded: Encoding) -> _Single:
        bare = {"input_ids": encoded.inputs["input_ids"]}
        views = _Views(scope, encoded.places, SPACES)
        attentions = _eager_attention(scope, bare, views.visit, rotary=True)
        return cls(views.finish(encoded.example), attentions, _logits(scope, bare, encoded.places))


def _logits(scope: Scope, inputs: dict[str, Tensor], places: Places) -> Tensor | None:
    """The model's output at the queries, None where it gives none for each token."""
    try:
        return scope.watch(inputs, logits_at=places)
    except BadInput:
        return None


def _check_batches(scope: Scope, length: int) -> tuple[float, dict[PaddingSide, str], str]:
    """The largest error of attention in padded batches; what is wrong on which side; what in the query's frame."""
    start = () if scope.encoder.first is None else (scope.encoder.first,)  # or it would be said to be missing
    prompts = []
    for ids in map(Tensor.tolist, short_ids(scope.model, (length, length - 4))):
        every = tuple((i, i + 1) for i in range(len(ids)))
        prompts.append(Example(ids=(*start, *ids[len(start) :]), queries=every, keys=tuple(map(Key, every))))
    singles = [scope.encode([prompt]) for prompt in prompts]
    alone = [_Single.of(scope, encoded) for encoded in singles]
    worst, frame = 0.0, ""
    wrong: dict[PaddingSide, str] = {}
    for side in scope.facts.sides:
        encoded = scope.encode(prompts, padding_side=side)
        captures = _captures(scope, encoded, SPACES)
        logits = _logits(scope, encoded.inputs, encoded.places)
        for i, single in enumerate(alone):
            error = _padding_error(scope, captures, single, i)
            what = _difference(scope, captures, single.captures, i)
            if what is None and not error <= _attention_tolerance(scope, single.captures):
                what = f"attention (off by {error:.2g})"
            if what is None and logits is not None and single.logits is not None:
                what = _logits_difference(scope, logits[encoded.example == i], single.logits)
            if what is not None:
                why = f"padded on the {side} beside a longer prompt, its {what} are not those of the same prompt alone"
                wrong[side] = f"{why}, so it counts positions or hides padding in a way of its own"
                break
            worst = max(worst, error)
    if scope.facts.takes_positions and any(layer.offset is not None for layer in scope.facts.layers):
        inputs = singles[0].inputs | {"position_ids": singles[0].inputs["position_ids"] + _SHIFT}
        shifted = _captures(scope, replace(singles[0], inputs=inputs), ("query_frame",))
        what = _difference(scope, shifted, alone[0].captures, 0)
        if what is not None:
            why = f"with every position {_SHIFT} further on, its {what} change"
            frame = f"{why}, although only offsets should count there"
    return worst, wrong, frame


def _captures(scope: Scope, encoded: Encoding, spaces: tuple[Space, ...]) -> _Captures:
    views = _Views(scope, encoded.places, spaces)
    scope.watch(encoded.inputs, views.visit, rotary=True)
    return views.finish(encoded.example)


def _slots(scope: Scope, own: Capture) -> dict[int, list[int]]:
    """Heads by layer: in half precision rounding grows from layer to layer, so there the first two have to tell."""
    layers = sorted({head.layer for head in scope.heads()})[: 2 if _is_half(scope) else None]
    slots = {layer: [slot for slot, head in enumerate(own.heads) if head.layer == layer] for layer in layers}
    return {layer: own for layer, own in slots.items() if own}


def _difference(scope: Scope, captures: _Captures, alone: _Captures, example: int) -> str | None:
    """The first space in which queries or keys of a prompt differ from those of the prompt alone."""
    for (width, space), batch in captures.items():
        own, rows = alone[width, space], batch.example == example
        for layer, slots in _slots(scope, own).items():
            groups = batch.kv_of_head[slots].unique()
            for what, ours, theirs in (
                ("queries", batch.q[rows][:, slots], own.q[:, slots]),
                ("keys", batch.k[rows][:, groups, : own.k.shape[2]], own.k[:, groups]),
            ):
                off = _apart(ours, theirs)
                if not off <= (5e-2 if _is_half(scope) else 1e-3):
                    return f"{space} {what} in layer {layer} (off by {off:.2g} of the largest)"
    return None


def _logits_difference(scope: Scope, ours: Tensor, theirs: Tensor) -> str | None:
    """In half precision only what is far off counts: the last layer has gathered the rounding of all."""
    off = _apart(ours, theirs)
    return None if off <= (0.5 if _is_half(scope) else 1e-3) else f"logits (off by {off:.2g} of the largest)"


def _largest(errors: list[Tensor]) -> float:
    """Not Python's `max`, which may pass over NaN."""
    return float(torch.cat([error.abs().flatten() for error in errors]).max())


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))


def _padding_error(scope: Scope, captures: _Captures, single: _Single, example: int) -> float:
    errors = []
    for (width, space), batch in captures.items():
        own = single.captures[width, space]
        slots = [slot for slots in _slots(scope, own).values() for slot in slots]
        if space == _OWN and slots:
            # in half precision the model rounds its logits and we do not: there it is our own rows
            theirs = own.attention() if _is_half(scope) else _reported(own, single.attentions)
            ours = batch.attention()[batch.example == example, :, : theirs.shape[-1]]
            errors.append((ours - theirs)[:, slots])
    return _largest(errors)


def _write_effect(scope: Scope, inputs: dict[str, Tensor], places: Places, plain: Tensor, allowed: float) -> float:
    head = scope.heads()[0]
    count = len(next(iter(inputs.values())))
    rows, query = torch.arange(count, device=places.row.device), places.keys[:1, -1].expand(count)  # real in every row
    seen = torch.ones((count, int(query[0]) + 1), device=rows.device)
    captured = scope.capture_inputs(inputs, places=Places.everywhere(rows, query, seen), heads=[head])
    # the key that has least attention is raised: one that has all of it, or none, may not move the other way
    shown = captured.attention()[:, 0].masked_fill(captured.bias[:, 0] == -torch.inf, torch.inf)
    least = shown.argmin(-1, keepdim=True)
    same = captured.k[rows[:, None], 0, least]
    with scope.patched([Edit.keys(head, least, same)]):
        kept = _output(scope, inputs)
    # along the query, so that the logit surely moves; 50 times its length, so that it moves far
    direction = torch.nn.functional.normalize(captured.q, dim=-1)
    with scope.patched([Edit.keys(head, least, 50 * direction * same.norm(dim=-1, keepdim=True))]):
        moved = _output(scope, inputs)
    kind = scope.model.config.model_type
    # half precision rounds a recomputed head differently, and a router may then choose another expert
    if not _is_half(scope) and float((kept - plain).abs().max()) > allowed:
        raise BadInput(f"{kind} cannot be patched: writing a key that is already there changes the output.")
    effect = float((moved - plain).abs().max())
    if effect == 0.0:
        raise BadInput(f"{kind} cannot be patched: writing another key has no effect.")
    return effect
