"""What a model's attention is, read off one live call per layer instead of its config.

A short forward through the tap shows which modules call the attention interface, in which order,
with how many heads of which width, and where its rotation sits in the vector. A model whose layers
do not pass through the interface (they keep their own attention code) shows no calls, and is
refused with that reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    layer_of = dict(zip(map(id, modules), numbers, strict=True))
    layers = {layer_of[id(call.module)]: _layer(call, family) for call in calls}
    layers |= {number: LayerFacts(0, 0, 0, None, {}, kind) for number, kind in instead.items()}
    return Facts(
        tuple(layers[number] for number in sorted(layers)), layer_of, *counting, Anatomy.of(model)
    )


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
    unseen = (
        types
        and not any(call.rotary for call in calls)
        and not _holds_no_position(model, inputs, calls)
    )
    if unseen or (calls[0].weights is not None and _turns_unheard(model, inputs, calls)):
        reason = f"{kind} rotates inside its own code, where the rotation cannot be read"
        return {"pre_rope": reason, "query_frame": reason}
    varying = sorted(types & set(LENGTH_DEPENDENT))
    if varying and any(call.rotary for call in calls):
        return {
            "query_frame": f"{kind}'s {varying[0]} rotation depends on the length of the prompt"
        }
    return {}


def _turns_unheard(model: Any, inputs: dict[str, Tensor], calls: list[Call]) -> bool:
    """Whether a model's own attention code rotates vectors where we cannot listen: equal inputs
    give different vectors.

    What such code adds to its logits besides q·k may know the distance, but not what stands there.
    """

    def alike(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        same = x[:, :1].expand_as(x).contiguous()
        return (
            (args, kwargs | {"hidden_states": same})
            if "hidden_states" in kwargs
            else ((same, *args[1:]), kwargs)
        )

    with cleared(
        [call.module.register_forward_pre_hook(alike, with_kwargs=True) for call in calls]
    ):
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
            apart = max(apart, *(_apart(x[:, :, :1], x) for x in (other.q, other.k)))
    return apart > _close(calls[0].q)


def _holds_no_position(model: Any, inputs: dict[str, Tensor], calls: list[Call]) -> bool:
    """Whether a model has no positions at all, whatever its config says: other ones change nothing."""
    if (
        "position_ids" not in feed.forward_arguments(model.base_model)
        or "attention_mask" not in inputs
    ):
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
    elif rotary is not None and offset is not None:
        row, last = (
            torch.tensor([value], device=call.q.device) for value in (0, call.q.shape[2] - 1)
        )
        turned, _ = rotary.turn_back(
            call.q[:1, :, -1].float(), call.k[:1, :, -1:].float(), row, last, offset
        )
        given = rotary.q[:1, :, -1].float()
        # the attention scaling stays in the vector, so compare directions; half precision rounds
        # the rotated vector
        alike = torch.nn.functional.cosine_similarity(
            turned[..., offset : offset + given.shape[-1]], given, dim=-1
        )
        if not bool(alike.min() > 0.999):
            refusals.setdefault(
                "query_frame",
                "the rotary function is more than a rotation and cannot be turned back",
            )
    return LayerFacts(call.q.shape[1], call.k.shape[1], call.q.shape[-1], offset, refusals)


def _offset(call: Call, rotary: Rotary) -> int | None:
    """Where the rotated part sits in the vectors the dot product sees: at the front, at the end, or
    not as it was.

    Heads are the rotated ones: each its own, or all the same one (latent attention).
    """
    width = rotary.q.shape[-1]
    pairs = ((call.q, rotary.q_rotated), (call.k, rotary.k_rotated))
    if any(rotated.shape[1] not in (1, seen.shape[1]) for seen, rotated in pairs):
        return None
    for offset in (0, call.q.shape[-1] - width):
        parts = ((seen[..., offset : offset + width], rotated) for seen, rotated in pairs)
        if all(torch.equal(part, rotated.to(part).expand_as(part)) for part, rotated in parts):
            return offset
    return None


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
        if (
            not takes
            and (limit is None or pad + 1 + counted.shape[1] < limit)
            and same_at(counted + pad + 1)
        ):
            first = pad + 1
    rows = [feed.short_ids(model, (9, 6))[0], feed.short_ids(model, (6,))[0]]
    # in half precision rounding grows from layer to layer, so there the first two have to tell
    last = 1 if calls[0].q.dtype in (torch.float16, torch.bfloat16) else None
    harmless = []
    for side, columns in zip(PADDING_SIDES, (slice(3, None), slice(None, 6)), strict=True):
        batch = {
            name: x.to(counted.device) for name, x in feed.pad_rows(rows, pad, side, takes).items()
        }
        if _same_vectors(calls, _calls(model, batch, last=last), columns):
            harmless.append(side)
    return takes, first, tuple(harmless)


def _same_vectors(calls: list[Call], others: list[Call], columns: slice = slice(None)) -> bool:
    """Whether two forwards gave the same queries and keys, the second in its last row and some of
    its columns.
    """
    pairs = [pair for a, b in zip(calls, others, strict=False) for pair in ((a.q, b.q), (a.k, b.k))]
    return all(_apart(theirs[-1:, :, columns], ours) <= _close(ours) for ours, theirs in pairs)


def _apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).float().norm() / y.float().norm().clamp_min(1e-12))


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
    if (read := model.main_input_name) not in ("input_ids", "pixel_values"):
        given = "qkscope can give a model only token ids or an image"
        raise refusal(model, f"{type(model).__name__} reads {read}, and {given}")


def _without_attention(model: Any, calls: list[Call]) -> dict[int, str]:
    """Layers that did not call, and the module that each has instead of attention.

    Refuses a model whose layers did not call for another reason: they need what was not given, or
    call several times.
    """
    place = place_of(
        model, next(name for name, part in model.named_modules() if part is calls[0].module)
    )
    blocks = [] if place is None else list(place[0])
    expected = len(blocks) or getattr(
        model.config.get_text_config(), "num_hidden_layers", len(calls)
    )
    called = {call.module for call in calls}
    seeing = [block for block in blocks if not called.isdisjoint(block.modules())]
    silent = {i: block for i, block in enumerate(blocks) if block not in seeing}
    if len(calls) == expected and not silent:
        return {}
    if any("cross" in name for block in silent.values() for name, _ in block.named_children()):
        why = f"its cross-attention layers ({len(silent)} of {expected}) run only beside an image"
        raise refusal(model, f"{why}, and qkscope gives it text alone")
    usual = {type(part) for block in seeing for part in block.children()}
    attentions = {type(part) for part in called}
    others = {i: [type(part) for part in block.children()] for i, block in silent.items()}
    instead = {
        i: [kind.__name__ for kind in kinds if kind not in usual] for i, kinds in others.items()
    }
    alike = any(type(part) in attentions for block in silent.values() for part in block.modules())
    if len(calls) != len(seeing) or alike or not all(instead.values()):
        why = f"{len(calls)} attention calls come from {expected} layers"
        raise refusal(model, f"{why}, so which layer is which is not known")
    return {i: kinds[0] for i, kinds in instead.items()}
