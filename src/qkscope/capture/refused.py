"""Why a model cannot be looked into, read off what it is and off its live calls: the true cause, in one sentence."""

from __future__ import annotations

from typing import Any

import torch

from qkscope.capture.inputs import text_config
from qkscope.capture.layers import place_of
from qkscope.capture.tap import Call
from qkscope.errors import BadInput


def refusal(model: Any, why: str) -> BadInput:
    """What is raised about a model that cannot be looked into."""
    return BadInput(f"{model.config.model_type} cannot be looked into: {why}.")


def check_kind(model: Any) -> None:
    """Refuse what cannot be watched or fed: compiled code, two stacks of layers, or neither ids nor pixels."""
    if hasattr(model, "_orig_mod") or any(part._compiled_call_impl for part in model.modules()):
        raise BadInput("compiled code cannot be looked into: give the model as it was before torch.compile.")
    if model.dtype == torch.float64:
        raise BadInput("a model in float64 is not looked into: load it with dtype float32, bfloat16 or float16.")
    read = model.main_input_name
    has_decoder = any(hasattr(part, "decoder") for part in (model, model.base_model))
    if getattr(model.config, "is_encoder_decoder", False) and has_decoder:
        kind = model.config.model_type
        raise BadInput(f"{kind} is an encoder-decoder model: qkscope looks into decoders and encoders only.")
    if read not in ("input_ids", "pixel_values"):
        given = "qkscope can give a model only token ids or an image"
        raise refusal(model, f"{type(model).__name__} reads {read}, and {given}")


def replaced(model: Any) -> str | None:
    """Say so where the forward of an attention (or of what holds one) is not of its class's own file."""
    for part in model.modules():
        if not any("Attention" in type(inner).__name__ for inner in part.modules()):
            continue
        forward = vars(part).get("forward", type(part).forward)  # wrappers, as accelerate's, keep the name of the file
        if forward.__module__ not in {kind.__module__ for kind in type(part).__mro__}:
            return (
                f"the forward of {type(part).__name__} was replaced by {forward.__qualname__}, which bypasses"
                " transformers' attention interface: load the model without that patch"
            )
    return None


def without_attention(model: Any, calls: list[Call]) -> dict[int, str]:
    """Layers that did not call, and the module that each has instead of attention.

    Refuses a model whose layers did not call for another reason: they need what was not given, or call several times.
    """
    names = {id(module): name for name, module in model.named_modules()}
    place = place_of(model, names.get(id(calls[0].module), ""))
    blocks = [] if place is None else list(place[0])
    expected = len(blocks) or getattr(text_config(model), "num_hidden_layers", len(calls))
    called = {id(call.module) for call in calls}
    seeing = [block for block in blocks if any(id(part) in called for part in block.modules())]
    silent = {i: block for i, block in enumerate(blocks) if block not in seeing}
    if len(calls) == expected and not silent:
        return {}
    if any("cross" in name for block in silent.values() for name, _ in block.named_children()):
        why = f"its cross-attention layers ({len(silent)} of {expected}) run only beside an image"
        raise refusal(model, f"{why}, and qkscope gives it text alone")
    if len(calls) > expected:
        why = f"{len(calls)} attention calls come from {expected} layers"
        raise refusal(model, f"{why}, so which layer is which is not known")
    usual = {type(part) for block in seeing for part in block.children()}
    instead = {
        i: [type(part).__name__ for part in block.children() if type(part) not in usual] for i, block in silent.items()
    }
    attentions = {type(call.module) for call in calls}
    alike = any(type(part) in attentions for block in silent.values() for part in block.modules())
    if len(calls) != len(seeing) or alike or not all(instead.values()):
        raise refusal(model, f"only {len(calls)} of its {expected} layers call transformers' attention interface")
    return {i: kinds[0] for i, kinds in instead.items()}


def check_honoured(implementation: str, call: Call) -> None:
    """SDPA has no place for a soft-cap or a sink; some versions refuse them, others drop them without a word."""
    for what, value in (("soft-cap", call.softcap), ("attention sink", call.sinks)):
        if value is not None and implementation != "eager":
            raise BadInput(f"{implementation} attention drops this model's {what}: load the model with attn='eager'.")
