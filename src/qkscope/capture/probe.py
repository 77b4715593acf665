"""What a model's attention is, read off one live call per layer instead of its config.

A short forward through the tap shows which modules call the attention interface, in which order, with how many heads
of which width, and where its rotation sits in the vector. A model whose layers do not pass through the interface
(they keep their own attention code) shows no calls, and is refused with that reason.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkscope.capture.spaces import LENGTH_DEPENDENT, Rotary, Space, rotary_types
from qkscope.capture.tap import Call, Stop, tap
from qkscope.errors import BadInput


@dataclass(frozen=True)
class Layer:
    """One layer's attention. `offset` is where its rotated dimensions begin, None where nothing rotates."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    offset: int | None
    refusals: dict[Space, str]
    softcap: bool
    sinks: bool


@dataclass(frozen=True)
class Facts:
    """What the probe found: the layers, which module is which layer, and whether positions may be passed."""

    layers: tuple[Layer, ...]
    layer_of: dict[int, int]
    takes_positions: bool


def text_config(model: Any) -> Any:
    """The config of the part that reads text (the config itself for a plain model)."""
    return model.config.get_text_config()


def short_inputs(model: Any, lengths: tuple[int, ...] = (6,)) -> dict[str, Tensor]:
    """Inputs for a check: ids that are no special tokens, padded on the left, or an image for an image encoder."""
    device = input_device(model)
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        sizes = model.config.image_size
        height, width = (sizes, sizes) if isinstance(sizes, int) else sizes
        pixels = torch.randn((len(lengths), model.config.num_channels, height, width), generator=generator)
        return {"pixel_values": pixels.to(device, model.dtype)}
    vocabulary = text_config(model).vocab_size
    width = max(lengths)
    ids = torch.randint(min(10, vocabulary // 2), vocabulary, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    # some families count positions from ids that are not the padding id, so padded places must hold that id
    pad = getattr(text_config(model), "pad_token_id", None)
    ids = ids.masked_fill(~mask, pad if isinstance(pad, int) and 0 <= pad < vocabulary else 0)
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


def input_device(model: Any) -> torch.device:
    """Where inputs go: the device of the embedding, which for a model split over devices is not the model's."""
    try:
        return model.get_input_embeddings().weight.device
    except (AttributeError, NotImplementedError):
        return next(model.parameters()).device


def positions_of(mask: Tensor) -> Tensor:
    """Position ids that count real tokens from 0, whatever the padding side."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def forward_arguments(module: Any) -> set[str]:
    """Names of the arguments a module's forward takes."""
    return set(inspect.signature(module.forward).parameters)


@torch.no_grad()
def probe(model: Any) -> Facts:
    """Read a model's attention off a short forward, or refuse the model with the reason."""
    kind = model.config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise BadInput(f"{kind} is an encoder-decoder model: qkscope looks into decoders and encoders only.")
    if model.training:
        model.eval()
    calls: list[Call] = []
    inputs = short_inputs(model)

    def visit(call: Call) -> None:
        _check_honoured(implementation, call)
        calls.append(call)

    implementation = model.config._attn_implementation
    try:
        with tap(model, visit, rotary=True):
            model.base_model(**inputs)
    except BadInput:
        raise
    except Exception as error:  # whatever a foreign modelling file raises, the user needs one sentence
        raise BadInput(f"{kind} cannot be looked into: a short forward failed with {error!r}.") from error
    expected = getattr(text_config(model), "num_hidden_layers", None)
    if not calls:
        raise BadInput(
            f"{kind} cannot be looked into: its layers never call transformers' attention interface"
            " (they hold their own attention code, or none)."
        )
    modules = [id(call.module) for call in calls]
    if len(set(modules)) < len(modules):
        raise BadInput(f"{kind} cannot be looked into: one attention module is called several times in a pass.")
    if len(calls) != expected:
        raise BadInput(
            f"{kind} cannot be looked into: only {len(calls)} of its {expected} layers call transformers' attention"
            " interface."
        )
    family = _family_refusals(model, calls)
    return Facts(
        layers=tuple(_layer(call, family) for call in calls),
        layer_of={module: layer for layer, module in enumerate(modules)},
        takes_positions=_takes_positions(model, inputs),
    )


def _check_honoured(implementation: str, call: Call) -> None:
    """SDPA has no place for a soft-cap or a sink; some versions refuse them, others drop them without a word."""
    for what, value in (("soft-cap", call.softcap), ("attention sink", call.sinks)):
        if value is not None and implementation != "eager":
            raise BadInput(f"{implementation} attention drops this model's {what}: load the model with attn='eager'.")


def _family_refusals(model: Any, calls: list[Call]) -> dict[Space, str]:
    kind, types = model.config.model_type, rotary_types(text_config(model))
    if types and not any(call.rotary for call in calls):
        reason = f"{kind} rotates inside its own code, where the rotation cannot be read"
        return {"pre_rope": reason, "query_frame": reason}
    varying = sorted(types & set(LENGTH_DEPENDENT))
    if varying:
        return {"query_frame": f"{kind}'s {varying[0]} rotation depends on the length of the prompt"}
    return {}


def _layer(call: Call, family: dict[Space, str]) -> Layer:
    refusals = dict(family)
    offset = None
    if call.rotary is not None:
        offset = _offset(call, call.rotary)
        if offset is None:
            reason = "the vectors are changed again (normalised or rescaled) after they are rotated"
            refusals |= {"pre_rope": reason, "query_frame": reason}
        elif not _turns_back(call, call.rotary, offset):
            refusals["query_frame"] = "the rotary function is more than a rotation, so it cannot be turned back"
    return Layer(
        n_heads=call.q.shape[1],
        n_kv_heads=call.k.shape[1],
        d_head=call.q.shape[-1],
        offset=offset,
        refusals=refusals,
        softcap=call.softcap is not None,
        sinks=call.sinks is not None,
    )


def _offset(call: Call, rotary: Rotary) -> int | None:
    """Where the rotated part sits in the vectors the dot product sees: at the front, at the end, or not as it was."""
    width = rotary.q_rotated.shape[-1]
    for offset in (0, call.q.shape[-1] - width):
        q, k = (x[..., offset : offset + width] for x in (call.q, call.k))
        if torch.equal(q, rotary.q_rotated.expand_as(q)) and torch.equal(k, rotary.k_rotated.expand_as(k)):
            return offset
    return None


def _turns_back(call: Call, rotary: Rotary, offset: int) -> bool:
    last = call.q.shape[2] - 1
    row, column = (torch.tensor([value], device=call.q.device) for value in (0, last))
    q, k = call.q[:1, :, last].float(), call.k[:1, :, last:].float()
    turned, _ = rotary.turn_back(q, k, row, column, offset)
    given = rotary.q[:1, :, last].float()
    turned = turned[..., offset : offset + given.shape[-1]]
    # the attention scaling stays in the vector, so compare directions; half precision rounds the rotated vector
    return bool(torch.nn.functional.cosine_similarity(turned, given, dim=-1).min() > 0.999)


def _takes_positions(model: Any, inputs: dict[str, Tensor]) -> bool:
    """Whether position ids may be passed: the argument exists, and 0, 1, 2, ... is what the model counts itself.

    RoBERTa, for one, counts from 2. The first layer's queries show it, so the passes end there.
    """
    body = model.base_model
    if "position_ids" not in forward_arguments(body) or "attention_mask" not in inputs:
        return False
    seen: list[Tensor] = []

    def first(call: Call) -> None:
        seen.append(call.q)
        raise Stop

    for extra in ({}, {"position_ids": positions_of(inputs["attention_mask"])}):
        with tap(model, first):
            body(**inputs, **extra)
    return torch.allclose(seen[0], seen[1], rtol=1e-3, atol=1e-3)
