"""The transformers model inside what other tools hold: a TransformerBridge of TransformerLens, a model of nnsight.

Neither package is imported: an object is known by the package that its class comes from. Both change the model that
they hold. A bridge replaces its parts by components with hooks, whose attention no longer asks transformers' interface;
nnsight gives its modules other forwards, in which a patched modelling file is not seen. So a fresh instance of the same
class is made from the config, without memory of its own, and given their tensors: one set of weights, and the other
tool's object is left as it is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from qkscope.errors import BadInput

_INNER = "_original_component."  # in a bridge, a part that was replaced stands inside its replacement


def unwrapped(model: Any, tokenizer: Any | None = None) -> tuple[Any, Any | None]:
    """The transformers model that an object holds, and its tokenizer where none was given.

    Parameters
    ----------
    model : of transformers, which passes through, or an object that wraps one.
    tokenizer : as the user gave it.
    """
    packages = {kind.__module__.split(".")[0] for kind in type(model).__mro__}
    if "transformer_lens" in packages:
        inside = _of_bridge(model)
    elif "nnsight" in packages:
        inside = _of_nnsight(model)
    else:
        return model, tokenizer
    kind = type(model).__name__
    if not isinstance(inside, PreTrainedModel):
        raise BadInput(
            f"this {kind} wraps no model of transformers, so it cannot be looked into: load one with transformers,"
            " or wrap one (TransformerBridge.boot_transformers, nnsight.TransformersModel)."
        )
    held = getattr(model, "tokenizer", None)
    return _plain(inside, kind), held if tokenizer is None else tokenizer


def _of_bridge(bridge: Any) -> Any:
    if getattr(bridge, "_weights_processed", False):
        raise BadInput(
            f"the weights of this {type(bridge).__name__} were processed (layer norms folded, matrices centred), so"
            " they are not the model's: boot it again, and use it without enable_compatibility_mode(), or with"
            " no_processing=True."
        )
    return getattr(bridge, "original_model", None)


def _of_nnsight(model: Any) -> Any:
    if not getattr(model, "dispatched", True):
        model.dispatch()  # as its first trace would: until then its weights are not loaded
    return model._module


def _plain(model: Any, kind: str) -> Any:
    """A model of the same class on the same tensors, of parts that nobody changed."""
    tensors = {
        name.replace(_INNER, ""): tensor
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }
    if len({tensor.device for tensor in tensors.values()}) > 1:
        raise BadInput(f"the weights of this {kind} are spread over devices: load it on one.")
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    for path, module in plain.named_modules():
        for own in (module._parameters, module._buffers):
            own.update({name: _same(tensors, f"{path}.{name}", x) for name, x in own.items() if x is not None})
    return plain.eval()


def _same(tensors: dict[str, Tensor], name: str, empty: Tensor) -> Tensor:
    name = name.lstrip(".")
    found = tensors.get(name)
    if found is None or found.shape != empty.shape:
        raise BadInput(
            f"the model that was wrapped has no {name} of shape {tuple(empty.shape)}, as its class has, so it cannot be"
            " looked into: give the model of transformers itself."
        )
    return found
