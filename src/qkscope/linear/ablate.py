"""Whole heads taken out of the running model: their outputs replaced before ``W_O``, and MLPs live or held.

Taking a head out changes every later layer. With MLPs held at what they put out before, their answers to the head stay,
which is no state that the model knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkscope.capture.tap import cleared
from qkscope.heads import Head
from qkscope.linear.reader import Reader


@contextmanager
def taken_out(
    reader: Reader,
    heads: Mapping[Head, Bool[Tensor, " b"]],
    instead: Mapping[int, Float[Tensor, "h e"]],
    held: Mapping[nn.Module, Any] | None = None,
) -> Iterator[None]:
    """For the duration of a ``with`` block, heads put out something else in some rows of the batch.

    Parameters
    ----------
    reader : knows the blocks.
    heads : which, and in which rows.
    instead : by layer, what each head puts out instead, at every token.
    held : what other parts put out, as `parts_held` noted it; live where none is given.
    """
    hooks = []

    def replace(layer: int, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        z = args[0].clone()
        width = z.shape[-1] // len(instead[layer])
        for head in (head for head in heads if head.layer == layer):
            part = slice(head.index * width, (head.index + 1) * width)
            z[heads[head].to(z.device), ..., part] = instead[layer][head.index].to(z)
        return (z, *args[1:])

    for layer in {head.layer for head in heads}:
        output = reader.blocks[layer].output
        assert output is not None
        hooks.append(output.register_forward_pre_hook(partial(replace, layer)))
    for module, value in (held or {}).items():
        hooks.append(module.register_forward_hook(lambda _module, _args, _out, value=value: value))
    with cleared(hooks):
        yield


@contextmanager
def parts_held(reader: Reader) -> Iterator[dict[nn.Module, Any]]:
    """Note what everything but heads puts out, whole, during a run."""
    noted: dict[nn.Module, Any] = {}
    hooks = [
        module.register_forward_hook(lambda module, _args, out: noted.__setitem__(module, out))
        for block in reader.blocks
        for module in block.parts
    ]
    with cleared(hooks):
        yield noted


@contextmanager
def outputs_summed(reader: Reader, shown: Bool[Tensor, "b t"]) -> Iterator[dict[int, Float[Tensor, "h e"]]]:
    """Sums of every head's output over the tokens shown, by layer, during a run."""
    sums: dict[int, Tensor] = {}
    hooks = []

    def note(layer: int, _module: nn.Module, args: tuple[Any, ...]) -> None:
        z, heads = args[0].reshape(*shown.shape, -1), reader.scope.facts.layers[layer].n_heads
        sums[layer] = z[shown.to(z.device)].double().sum(0).unflatten(0, (heads, -1)).cpu()

    for layer, block in enumerate(reader.blocks):
        if block.output is not None:
            hooks.append(block.output.register_forward_pre_hook(partial(note, layer)))
    with cleared(hooks):
        yield sums
