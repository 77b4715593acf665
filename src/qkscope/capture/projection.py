"""Ask a layer for its queries and keys directly, whatever its projections look like.

From the normalised input z to the rotation a layer is affine, up to QK-norm's scalars: ``q = s(z) (A z + a) + c``.
One forward of a single token shows how the model calls each attention module; `project` makes that call again with
any z, without rotation (cos = 1, sin = 0), and stops where the attention function would start. So fused, interleaved
or transposed projections and pre-scaled queries need no table: the layer's own code runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from qkscope.capture.inputs import forward, forward_arguments, short_inputs
from qkscope.capture.tap import Call, Stop, cleared, tap
from qkscope.errors import BadInput

QKNorm = Literal["whole", "linear", "bias"]
FAR = 16  # times an input of usual length, so that vectors that are clipped somewhere show that they are


class Projected(NamedTuple):
    """Queries, keys and values of n inputs, keys once per KV head, and the scale the attention call passes."""

    q: Float[Tensor, "n h d_head"]
    k: Float[Tensor, "n g d_head"]
    scale: float
    v: Float[Tensor, "n g d_value"]


class Norm(NamedTuple):
    """A norm taken apart: ``N(x) = gain ⊙ unit(x) + bias``, in float32, whatever convention it stores them in.

    It `centres` where it subtracts the mean (LayerNorm).
    """

    gain: Float[Tensor, "*b d"]
    bias: Float[Tensor, "*b d"]
    centres: bool


@dataclass(frozen=True)
class LayerCall:
    """How a model calls the attention of one layer.

    Attributes
    ----------
    family : str
        The model's type, for messages.
    attention : nn.Module
        The module that calls the attention function.
    args, kwargs
        The module's arguments in the recorded forward.
    input_norm : nn.Module or None
        The norm whose output enters the attention; None where the residual stream enters as it is (post-norm models).
    stream_norm : nn.Module or None
        Where the residual stream enters as it is: the norm before the layer that made it, if one did.
    qk_norms : dict
        Norms that run inside the attention module before its attention function, taken apart.
    input_scale : float
        What the input norm's output is multiplied by on its way into the attention: 1 in nearly every family.
    """

    family: str
    attention: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    input_norm: nn.Module | None
    stream_norm: nn.Module | None
    qk_norms: dict[nn.Module, Norm]
    input_scale: float = 1.0

    @property
    def hidden(self) -> Float[Tensor, "1 t d_model"]:
        """The recorded input: its width, dtype and device are the layer's."""
        return self.kwargs["hidden_states"] if "hidden_states" in self.kwargs else self.args[0]

    def given(self, z: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another input; some are given it once for each of q, k and v."""
        args = tuple(z if value is self.hidden else value for value in self.args)
        return args, {name: z if value is self.hidden else value for name, value in self.kwargs.items()}

    def attend(self, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: Sequence[Any] = ()) -> Call:
        """Call the module up to where its attention function would start; the hooks are taken off."""
        found: list[Call] = []
        stop = Stop()

        def take(call: Call) -> None:
            found.append(call)
            raise stop

        with cleared(hooks, stop), tap(self.attention, take):
            self.attention(*args, **kwargs)
        return found[0]


def record_calls(model: PreTrainedModel, last: int | None = None) -> dict[int, LayerCall]:
    """Run one token and note, in order of execution, how the attention module of each layer is called.

    Parameters
    ----------
    model : PreTrainedModel
        Any model that calls transformers' attention interface.
    last : int, optional
        The deepest layer wanted: the forward stops there.

    Raises
    ------
    BadInput
        If the model does not call transformers' attention interface once per layer, or feeds it something other than
        a normalised residual stream.
    """
    names = {module: name for name, module in model.named_modules()}
    inputs: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    made_by: dict[int, list[nn.Module]] = {}
    alive: list[Tensor] = []  # an id means something only while its tensor lives
    normed: dict[nn.Module, Tensor] = {}
    qk_norms: dict[nn.Module, list[nn.Module]] = {}
    number: dict[nn.Module, int] = {}
    stop = Stop()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = {"past_key_values": None} if "past_key_values" in kwargs else {}  # each call again would add to it
        inputs[module] = (args, kwargs | cache)

    def after(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            made_by.setdefault(id(output), []).append(module)
            alive.append(output)
            if is_norm(module):
                normed[module] = output

    def visit(call: Call) -> None:
        if call.module in qk_norms:
            raise BadInput(f"{names[call.module]} calls its attention function more than once.")
        qk_norms[call.module] = [part for part in call.module.modules() if is_norm(part) and part in inputs]
        number[call.module] = layer_number(model, names[call.module], call.layer)
        if number[call.module] == last:
            raise stop

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in names]
    hooks += [module.register_forward_hook(after) for module in names]
    with torch.no_grad(), cleared(hooks, stop), tap(model, visit):
        forward(model.base_model, _one_token(model))
    if not qk_norms:
        raise BadInput(f"{model.config.model_type} does not call transformers' attention interface.")

    calls = {}
    for attention, norms in qk_norms.items():
        layer = number[attention]
        parts = {norm: take_apart(norm, inputs[norm][0][0]) for norm in norms}
        call = LayerCall(model.config.model_type, attention, *inputs[attention], None, None, parts)
        block = block_of(names[attention], model)
        inside = set(block.modules())
        made = made_by.get(id(call.hidden), [])
        makers = [module for module in made if module in inside]
        before_it = next((module for module in made if is_norm(module)), None) if not makers else None
        block_args, block_kwargs = inputs[block]
        if makers or any(call.hidden is value for value in (*block_args, *block_kwargs.values())):
            calls[layer] = replace(call, input_norm=makers[0] if makers else None, stream_norm=before_it)
            continue
        times = [(norm, _times(out, call.hidden)) for norm, out in normed.items() if norm in inside]
        found = [(norm, number) for norm, number in times if number is not None]
        if not found:
            raise BadInput(
                f"{call.family} has no weights to read: what enters {names[attention]} is neither a norm's output nor"
                " the residual stream, but something made of them."
            )
        calls[layer] = replace(call, input_norm=found[0][0], input_scale=found[0][1])
    return calls


def _times(one: Tensor, other: Tensor) -> float | None:
    """The number by which one tensor has to be multiplied to give another; None where there is none."""
    if one.shape != other.shape or one.device != other.device:
        return None
    close = 2 * torch.finfo(other.dtype).eps
    one, other = one.double(), other.double()
    number = (one * other).sum() / one.square().sum().clamp_min(1e-30)
    return float(number) if (number * one - other).norm() <= close * other.norm() else None


def project(
    call: LayerCall, z: Float[Tensor, "n d_model"], qk_norm: QKNorm = "whole", rotated: bool = False
) -> Projected:
    """Push inputs through one layer's own projections.

    Parameters
    ----------
    call : LayerCall
        From `record_calls`.
    z : Float[Tensor, "n d_model"]
        What the attention module is given: the hidden state after the input norm.
    qk_norm : {"whole", "linear", "bias"}
        What is left of each QK-norm ``gain ⊙ C x / σ(x) + bias``: all of it; ``gain ⊙ C x``, which is linear (C centres
        where the norm is a LayerNorm); or the bias alone.
    rotated : bool
        Keep the rotation of the recorded position, without any scaling it carries; otherwise none.
    """
    args, kwargs = call.given(z[:, None])
    if "position_embeddings" in kwargs:
        kwargs["position_embeddings"] = _rotation(kwargs["position_embeddings"], rotated)
    elif isinstance(kwargs.get("position_ids"), Tensor) and not rotated:  # the module turns: not at all at position 0
        kwargs["position_ids"] = torch.zeros_like(kwargs["position_ids"])
    for name in ("attention_mask", "alibi"):
        if isinstance(value := kwargs.get(name), Tensor):
            kwargs[name] = value.repeat(len(z), *[1] * (value.ndim - 1))

    def part_of(norm: nn.Module, given: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        x, own = given[0], call.qk_norms[norm]
        if qk_norm == "bias":
            return own.bias.to(x.dtype).expand_as(x)
        centred = x.float() - x.float().mean(-1, keepdim=True) if own.centres else x.float()
        return (own.gain * centred).to(x.dtype)

    hooks = [norm.register_forward_hook(part_of) for norm in call.qk_norms] if qk_norm != "whole" else []
    made = call.attend(args, kwargs, hooks)
    if len(made.k) != len(z):
        raise BadInput(
            f"{call.family} has no weights to read in every layer: some have no keys of their own but read those of a"
            " layer before them; ask for heads of the others."
        )
    return Projected(made.q[:, :, 0], made.k[:, :, 0], made.scale, made.v[:, :, 0])


def norm_unit(norm: nn.Module, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Normalise without gain and bias, in float32: ``N(x; w=1, b=0) − N(x; w=0, b=0)``.

    The difference is ``x / rms`` (or ``(x − mean) / std``) both where the gain is ``w`` and where it is ``1 + w``.
    """
    if not _gain_names(norm):
        return _norm_at(norm, x, gain=None)
    return _norm_at(norm, x, gain=1.0) - _norm_at(norm, x, gain=0.0)


def take_apart(norm: nn.Module, like: Tensor) -> Norm:
    """Gain, bias and centring of a norm, found by asking it; ``like`` is what it normalises."""
    names = _gain_names(norm)
    shape = dict(norm.named_parameters())[names[0]].shape if names else like.shape[-1:]
    signs = (1 - 2 * (torch.arange(shape[-1], device=like.device) % 2)).float()
    signs = signs.expand(shape)  # alternating ±1: no entry of its normalised form vanishes
    gain = _norm_at(norm, signs, gain=None) / norm_unit(norm, signs)
    bias = [value.detach().float() for name, value in norm.named_parameters() if name not in names]
    centres = bool(norm_unit(norm, torch.ones_like(gain)).abs().max() < 0.5)  # nothing is left of a constant vector
    return Norm(gain, bias[0] if bias else torch.zeros_like(gain), centres)


def _norm_at(norm: nn.Module, x: Tensor, gain: float | None) -> Tensor:
    """The norm with zero bias and its gain parameter filled with a number (None: as it is), in float32."""
    parameters = {}
    for name, parameter in norm.named_parameters():
        value = parameter.detach().float()
        if name not in _gain_names(norm):
            value = torch.zeros_like(value)
        elif gain is not None:
            value = torch.full_like(value, gain)
        parameters[name] = value
    return functional_call(norm, parameters, (x.float(),))


def _gain_names(norm: nn.Module) -> list[str]:
    return [name for name, _ in norm.named_parameters() if "bias" not in name]


def _one_token(model: PreTrainedModel) -> dict[str, Any]:
    inputs: dict[str, Any] = short_inputs(model, lengths=(1,))
    if "position_ids" in forward_arguments(model.base_model) and "input_ids" in inputs:
        inputs["position_ids"] = torch.full_like(inputs["input_ids"], 7)  # any position that has a rotation to see
    return inputs


def _rotation(embeddings: Any, rotated: bool) -> Any:
    """The model's cos and sin (or one complex tensor) brought to unit length, or no rotation at all."""
    if embeddings is None:
        return None
    if isinstance(embeddings, Tensor):
        return embeddings / embeddings.abs() if rotated else torch.ones_like(embeddings)
    cos, sin = embeddings
    length = (cos.square() + sin.square()).sqrt()
    return (cos / length, sin / length) if rotated else (torch.ones_like(cos), torch.zeros_like(sin))


def place_of(model: Any, name: str) -> tuple[nn.ModuleList, int] | None:
    """The outermost list of layers a module stands in, and the number of its layer there."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        found = model.get_submodule(".".join(parts[:end]))
        if isinstance(found, nn.ModuleList):
            return found, int(parts[end])
    return None


def layer_number(model: Any, name: str, otherwise: int) -> int:
    """The number of the layer a module stands in; layers without attention count."""
    place = place_of(model, name)
    return otherwise if place is None else place[1]


def block_of(name: str, model: PreTrainedModel) -> nn.Module:
    """The transformer block a module belongs to: the innermost ancestor that stands in a list of modules."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if isinstance(model.get_submodule(".".join(parts[: end - 1])), nn.ModuleList):
            return model.get_submodule(".".join(parts[:end]))
    raise BadInput(f"{name} is not part of a list of layers.")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its name."""
    return "norm" in type(module).__name__.lower() and not any(module.children())
