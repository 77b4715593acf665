"""What a model's attention is, read off one live call per layer instead of its config.

A short forward through the tap shows which modules call the attention interface, in which order,
with how many heads of which width, and where its rotation sits in the vector. A model whose layers
do not pass through the interface (they keep their own attention code) shows no calls, and is
refused with that reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkscope.errors import BadInput
from qkscope.model import inputs as feed
from qkscope.model.capture_types import Facts, LayerFacts
from qkscope.model.inputs import PADDING_SIDES, PaddingSide
from qkscope.model.own_code import own_attention
from qkscope.model.spaces import LENGTH_DEPENDENT, Rotary, Space, rotary_settings
from qkscope.model.tap import Anatomy, Call, Stop, cleared, place_of, tap


@torch.no_grad()
def probe(model: Any) -> Facts:
    """Read a model's attention off a short forward, or refuse the model with the reason."""
    _check_kind(model)
    inputs = feed.short_inputs(model)
    calls = _calls(model, inputs)
    if not calls:
        why = "none of their modules is an attention that does, or their forward was replaced"
        if own_attention(model):
            why = "they hold attention code of their own, in which no softmax of one product q·k is seen"
        raise refusal(model, f"its layers never call transformers' attention interface ({why})")
    first = calls[0]
    modules = [call.module for call in calls]
    if len(set(modules)) < len(modules):
        raise refusal(model, "one attention module is called several times in a pass")
    instead = _without_attention(model, calls)
    given = inputs.get("input_ids", first.k[:, 0, :, 0]).shape[1]
    seen = first.k.shape[2]
    if given != seen:
        raise refusal(
            model, f"of {given} tokens its attention makes {seen}, so which is which is not known"
        )
    if first.biases:
        added = f"its attention call adds a learned {first.biases[0]} to its logits"
        raise refusal(model, f"{added}, so they are not scale q·k + mask")
    family = _family_refusals(model, inputs, calls)
    counting = _counting(model, inputs, calls, bool(instead))
    names = {part: name for name, part in model.named_modules()}
    places = [place_of(model, names[module]) for module in modules]
    numbers = [i if place is None else place[1] for i, place in enumerate(places)]
    layer_of = dict[int, int]()
    layers = dict[int, LayerFacts]()
    for call, number in zip(calls, numbers, strict=True):
        layer_of[id(call.module)] = number
        layers[number] = _layer(call, family)
    for number, kind in instead.items():
        layers[number] = LayerFacts(0, 0, 0, None, {}, kind)
    in_order = tuple(layers[number] for number in sorted(layers))
    return Facts(in_order, layer_of, *counting, Anatomy.of(model))


def _calls(model: Any, inputs: dict[str, Tensor], last: int | None = None) -> list[Call]:
    """Every attention call of one forward, or those up to one layer."""
    calls: list[Call] = []
    implementation = model.config._attn_implementation

    def visit(call: Call) -> None:
        # SDPA has no place for a soft-cap or a sink; some versions refuse them, others drop them
        # without a word
        for what, value in (("soft-cap", call.softcap), ("attention sink", call.sinks)):
            if value is not None and implementation != "eager":
                drops = f"{implementation} attention drops this model's {what}"
                raise BadInput(f"{drops}: load the model with attn='eager'.")
        calls.append(call)
        if call.layer == last:
            raise Stop

    try:
        with tap(model, visit, rotary=True):
            feed.forward(model.base_model, inputs)
    except BadInput:
        raise
    except (
        Exception
    ) as error:  # whatever a foreign modelling file raises, the user needs one sentence
        raise refusal(model, f"a short forward failed with {error!r}") from error
    return calls


def _family_refusals(model: Any, inputs: dict[str, Tensor], calls: list[Call]) -> dict[Space, str]:
    kind = model.config.model_type
    types = {settings["rope_type"] for settings in rotary_settings(model.config.get_text_config())}
    is_heard = any(call.rotary for call in calls)
    unseen = types and not is_heard and not _holds_no_position(model, inputs, calls)
    has_own_code = calls[0].weights is not None
    if unseen or (has_own_code and _turns_unheard(model, inputs, calls)):
        reason = f"{kind} rotates inside its own code, where the rotation cannot be read"
        return {"pre_rope": reason, "query_frame": reason}
    varying = sorted(types & set(LENGTH_DEPENDENT))
    if varying and is_heard:
        reason = f"{kind}'s {varying[0]} rotation depends on the length of the prompt"
        return {"query_frame": reason}
    return {}


def _turns_unheard(model: Any, inputs: dict[str, Tensor], calls: list[Call]) -> bool:
    """Whether a model's own attention code rotates vectors where we cannot listen: equal inputs
    give different vectors.

    What such code adds to its logits besides q·k may know the distance, but not what stands there.
    """

    def alike(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        is_named = "hidden_states" in kwargs
        x = kwargs["hidden_states"] if is_named else args[0]
        same = x[:, :1].expand_as(x).contiguous()
        if is_named:
            return args, kwargs | {"hidden_states": same}
        return (same, *args[1:]), kwargs

    hooks = [call.module.register_forward_pre_hook(alike, with_kwargs=True) for call in calls]
    with cleared(hooks):
        others = _calls(model, inputs)
    apart = 0.0
    for call, other in zip(calls, others, strict=True):
        places = torch.arange(call.q.shape[2], device=call.q.device)
        before = call.mask_rows(torch.zeros_like(places), places)
        after = other.mask_rows(torch.zeros_like(places), places)
        if not torch.allclose(before, after, rtol=1e-3, atol=1e-3):
            why = "its attention adds to a logit what depends on the tokens, besides q·k"
            raise refusal(model, f"{why}, so they are not scale q·k + bias")
        if call.rotary is None:
            apart = max(apart, _apart(other.q[:, :, :1], other.q))
            apart = max(apart, _apart(other.k[:, :, :1], other.k))
    return apart > _close(calls[0].q)


def _holds_no_position(model: Any, inputs: dict[str, Tensor], calls: list[Call]) -> bool:
    """Whether a model has no positions at all, whatever its config says: other ones change nothing."""
    takes_positions = "position_ids" in feed.forward_arguments(model.base_model)
    if not takes_positions or "attention_mask" not in inputs:
        return False
    elsewhere = {"position_ids": 2 * feed.positions_of(inputs["attention_mask"]) + 3}
    return _same_vectors(calls, _calls(model, inputs | elsewhere))


def _layer(call: Call, family: dict[Space, str]) -> LayerFacts:
    refusals = dict(family)
    rotary = call.rotary
    offset = None if rotary is None else _offset(call, rotary)
    if rotary is not None and offset is None:
        reason = "the vectors are changed again (normalised, rescaled or regrouped) after they are rotated"
        refusals |= {"pre_rope": reason, "query_frame": reason}
    if rotary is not None and offset is not None and not _is_turned_back(call, rotary, offset):
        reason = "the rotary function is more than a rotation and cannot be turned back"
        refusals.setdefault("query_frame", reason)
    return LayerFacts(call.q.shape[1], call.k.shape[1], call.q.shape[-1], offset, refusals)


def _is_turned_back(call: Call, rotary: Rotary, offset: int) -> bool:
    """Whether the last query, turned back, is as it was before it was rotated."""
    device = call.q.device
    row = torch.tensor([0], device=device)
    last = torch.tensor([call.q.shape[2] - 1], device=device)
    q = call.q[:1, :, -1].float()
    k = call.k[:1, :, -1:].float()
    turned, _ = rotary.turn_back(q, k, row, last, offset)
    given = rotary.q[:1, :, -1].float()
    part = turned[..., offset : offset + given.shape[-1]]
    # the attention scaling stays in the vector, so compare directions; half precision rounds the
    # rotated vector
    alike = torch.nn.functional.cosine_similarity(part, given, dim=-1)
    return bool(alike.min() > 0.999)


def _offset(call: Call, rotary: Rotary) -> int | None:
    """Where the rotated part sits in the vectors the dot product sees: at the front, at the end, or
    not as it was.

    Heads are the rotated ones: each its own, or all the same one (latent attention).
    """
    width = rotary.q.shape[-1]
    pairs = ((call.q, rotary.q_rotated), (call.k, rotary.k_rotated))
    for offset in (0, call.q.shape[-1] - width):
        stands_there = [_stands_at(offset, seen, rotated) for seen, rotated in pairs]
        if all(stands_there):
            return offset
    return None


def _stands_at(offset: int, seen: Tensor, rotated: Tensor) -> bool:
    """Whether vectors hold the rotated ones from an offset on."""
    if rotated.shape[1] not in (1, seen.shape[1]):
        return False
    part = seen[..., offset : offset + rotated.shape[-1]]
    return torch.equal(part, rotated.to(part).expand_as(part))


def _counting(
    model: Any, inputs: dict[str, Tensor], calls: list[Call], hybrid: bool
) -> tuple[bool, int, tuple[PaddingSide, ...]]:
    """How a model counts positions: whether 0, 1, 2, ... may be passed, where it begins, and where
    it can be padded.

    Nothing is believed that was not seen: positions that are accepted but change nothing (Bart's
    decoder counts columns), or that the model counts from another number (RoBERTa from behind its
    padding id), leave it to the padded prompts themselves, compared with the same prompt alone in
    every layer, to say which side is right. So do layers without attention, which may read padding.
    """
    if "attention_mask" not in inputs:  # an image has no padding
        return False, 0, PADDING_SIDES
    counted = feed.positions_of(inputs["attention_mask"])

    def same_at(positions: Tensor) -> bool:
        return _same_vectors(calls, _calls(model, inputs | {"position_ids": positions}, last=0))

    takes = False
    first = 0
    pad = feed.model_pad_id(model) or 0
    if "position_ids" in feed.forward_arguments(model.base_model):
        takes = same_at(counted)
        if takes and not hybrid and not same_at(counted + counted % 2):
            return True, 0, PADDING_SIDES
        limit = feed.context_limit(model)
        has_room = limit is None or pad + 1 + counted.shape[1] < limit
        if not takes and has_room and same_at(counted + pad + 1):
            first = pad + 1
    rows = [feed.short_ids(model, (9, 6))[0], feed.short_ids(model, (6,))[0]]
    # in half precision rounding grows from layer to layer, so there the first two have to tell
    last = 1 if calls[0].q.dtype in (torch.float16, torch.bfloat16) else None
    harmless = []
    for side, columns in zip(PADDING_SIDES, (slice(3, None), slice(None, 6)), strict=True):
        padded = feed.pad_rows(rows, pad, side, takes)
        batch = {name: x.to(counted.device) for name, x in padded.items()}
        if _same_vectors(calls, _calls(model, batch, last=last), columns):
            harmless.append(side)
    return takes, first, tuple(harmless)


def _same_vectors(calls: list[Call], others: list[Call], columns: slice = slice(None)) -> bool:
    """Whether two forwards gave the same queries and keys, the second in its last row and some of
    its columns.
    """
    for call, other in zip(calls, others, strict=False):
        for ours, theirs in ((call.q, other.q), (call.k, other.k)):
            if not _apart(theirs[-1:, :, columns], ours) <= _close(ours):
                return False
    return True


def _apart(x: Tensor, y: Tensor) -> float:
    """The length of the difference, as a share."""
    length = y.float().norm().clamp_min(1e-12)
    return float((x - y).float().norm() / length)


def _close(x: Tensor) -> float:
    return 5e-2 if x.dtype in (torch.float16, torch.bfloat16) else 1e-3


# ---------------------------------------------------------------- why a model cannot be looked into


def refusal(model: Any, why: str) -> BadInput:
    """Make the error for a model that cannot be looked into."""
    return BadInput(f"{model.config.model_type} cannot be looked into: {why}.")


def _check_kind(model: Any) -> None:
    """Refuse what cannot be watched or fed: compiled code, two stacks of layers, or neither ids nor
    pixels.
    """
    if hasattr(model, "_orig_mod") or any(part._compiled_call_impl for part in model.modules()):
        raise BadInput(
            "compiled code cannot be looked into: give the model as it was before torch.compile."
        )
    if model.dtype == torch.float64:
        raise BadInput(
            "a model in float64 is not looked into: load it with dtype float32, bfloat16 or float16."
        )
    decodes = any(hasattr(part, "decoder") for part in (model, model.base_model))
    if getattr(model.config, "is_encoder_decoder", False) and decodes:
        kind = model.config.model_type
        raise BadInput(
            f"{kind} is an encoder-decoder model: qkscope looks into decoders and encoders only."
        )
    read = model.main_input_name
    if read not in ("input_ids", "pixel_values"):
        given = "qkscope can give a model only token ids or an image"
        raise refusal(model, f"{type(model).__name__} reads {read}, and {given}")


def _without_attention(model: Any, calls: list[Call]) -> dict[int, str]:
    """Layers that did not call, and the module that each has instead of attention.

    Refuses a model whose layers did not call for another reason: they need what was not given, or
    call several times.
    """
    blocks = _blocks_around(model, calls[0].module)
    expected = len(blocks)
    if not expected:
        text = model.config.get_text_config()
        expected = getattr(text, "num_hidden_layers", len(calls))
    called = {call.module for call in calls}
    silent = dict[int, nn.Module]()
    usual = set[type]()
    for i, block in enumerate(blocks):
        if called.isdisjoint(block.modules()):
            silent[i] = block
        else:
            usual |= {type(part) for part in block.children()}
    if len(calls) == expected and not silent:
        return {}
    if any(_has_cross_attention(block) for block in silent.values()):
        why = f"its cross-attention layers ({len(silent)} of {expected}) run only beside an image"
        raise refusal(model, f"{why}, and qkscope gives it text alone")
    instead = {i: _unusual_part(block, usual) for i, block in silent.items()}
    is_unclear = len(calls) != len(blocks) - len(silent) or None in instead.values()
    attentions = {type(part) for part in called}
    for block in silent.values():
        is_unclear |= any(type(part) in attentions for part in block.modules())
    if is_unclear:
        why = f"{len(calls)} attention calls come from {expected} layers"
        raise refusal(model, f"{why}, so which layer is which is not known")
    return {i: name for i, name in instead.items() if name is not None}


def _blocks_around(model: Any, attention: nn.Module) -> list[nn.Module]:
    """The list of layers in which an attention module stands; empty where it stands in none."""
    names = {part: name for name, part in model.named_modules()}
    place = place_of(model, names[attention])
    return [] if place is None else list(place[0])


def _has_cross_attention(block: nn.Module) -> bool:
    """Whether a block names one of its parts as cross-attention."""
    return any("cross" in name for name, _ in block.named_children())


def _unusual_part(block: nn.Module, usual: set[type]) -> str | None:
    """The class of a block's first part that blocks with attention do not have."""
    kinds = [type(part) for part in block.children()]
    return next((kind.__name__ for kind in kinds if kind not in usual), None)
