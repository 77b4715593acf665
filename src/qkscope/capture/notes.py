"""What one forward leaves at chosen places: what entered layers, what heads and other parts put out, what norms met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.capture.held import HeldLayer
from qkscope.capture.pick import Capture
from qkscope.capture.projection import LayerCall
from qkscope.capture.spaces import Rotary
from qkscope.capture.stream import Block
from qkscope.capture.tap import cleared
from qkscope.heads import Head

Side = Literal["query", "key"]
_OF_ROWS = ("entered", "heads", "gave", "given")


@cache
def head_names(layer: int, count: int) -> tuple[str, ...]:
    """Names of the heads of a layer."""
    return tuple(str(Head(layer, i)) for i in range(count))


class Pushed(NamedTuple):
    """What parts give that were pushed through a layer, by head and by key head; kept for the next head that asks."""

    pieces: Any  # those that were asked for
    query: dict[int, Float[Tensor, "n c p d"]]
    key: dict[int, Float[Tensor, "n c p d"]]


@dataclass
class Recorded:
    """What one batch left at p places in each of n rows: slot 0 is the query, the others are keys.

    Attributes
    ----------
    row, columns : which row of the batch, and which of its columns.
    captured : queries and every token's keys of the heads read (with the whole attention row).
    entered : by layer, what entered the block: Float [n, p, d_model].
    heads : by layer, the heads' outputs before W_O, head after head: Float [n, p, h·e].
    gave, given : by module, what a part put out, and what a norm was given: Float [n, p, d_model].
    rotary : by layer read, its rotation.
    calls : by layer that is read by pushing parts through it, what it was called with.
    """

    row: Int[Tensor, " n"]
    columns: Int[Tensor, "n p"]
    captured: Capture = None  # type: ignore[assignment]  # until the forward is over
    entered: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    gave: dict[nn.Module, Tensor] = field(default_factory=dict)
    given: dict[nn.Module, Tensor] = field(default_factory=dict)
    rotary: dict[int, Rotary] = field(default_factory=dict)
    calls: dict[int, LayerCall] = field(default_factory=dict)
    first: int = 0  # which row of `captured` is the first of these
    # of these rows alone
    layers: dict[int, HeldLayer] = field(default_factory=dict, init=False)
    pushed: dict[int, Pushed] = field(default_factory=dict, init=False)
    parts: dict[int, Float[Tensor, "n h p d"]] = field(default_factory=dict, init=False)  # what heads wrote, by layer

    def in_full(self) -> None:
        """What was noted in the model's precision and on its layers' devices, in float32 and on one."""
        for name in _OF_ROWS:
            kept = getattr(self, name)
            alike: dict[Any, list[Any]] = {}
            for key, value in kept.items():
                alike.setdefault((value.device, value.dtype, value.shape), []).append(key)
            for keys in alike.values():  # all layers at once
                if kept[keys[0]].device != self.row.device or kept[keys[0]].dtype != torch.float32:
                    every = torch.stack([kept[key] for key in keys]).to(self.row.device, torch.float32)
                    kept |= zip(keys, every.unbind(), strict=True)

    def at(self, side: Side) -> slice:
        """The slots of a side."""
        return slice(0, 1) if side == "query" else slice(1, None)

    def layer(self, layer: int) -> HeldLayer:
        """A layer whose arguments were kept, its norms held."""
        if layer not in self.layers:
            self.layers[layer] = HeldLayer(self.calls[layer], self.row)
        return self.layers[layer]

    def slots(self, some: Sequence[int]) -> Recorded:
        """Some of the places, in the order named."""
        kept: Any = {name: {key: value[:, some] for key, value in getattr(self, name).items()} for name in _OF_ROWS}
        return replace(self, columns=self.columns[:, some], **kept)

    def rows(self, some: slice) -> Recorded:
        """Some of the rows; what was captured of their attention stays whole."""
        kept: Any = {name: {key: value[some] for key, value in getattr(self, name).items()} for name in _OF_ROWS}
        return replace(self, row=self.row[some], columns=self.columns[some], first=self.first + some.start, **kept)


@contextmanager
def hooked(
    blocks: Sequence[Block],
    layers: Sequence[int],
    held: Mapping[int, LayerCall],
    found: Recorded,
    pick: Callable[[Tensor], Tensor],
) -> Iterator[None]:
    """Notes what writers leave, for the duration of a ``with`` block; no hook stays behind.

    Parameters
    ----------
    blocks : up to the last one that runs, which writes nothing that is read.
    layers : what enters them is kept.
    held : layers whose arguments are kept, and how they were called before.
    found : where it goes.
    pick : takes the places of a tensor.
    """
    hooks: list[Any] = []

    def entering(layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.entered[layer] = pick(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def giving(kept: dict[Any, Tensor], key: Any, _module: nn.Module, args: tuple[Any, ...]) -> None:
        kept[key] = pick(args[0])

    def putting_out(module: nn.Module, _args: Any, out: Any) -> None:
        found.gave[module] = pick(out[0] if isinstance(out, tuple) else out)

    def called(layer: int, call: LayerCall, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.calls[layer] = replace(call, args=args, kwargs=kwargs)

    with cleared(hooks):
        for layer, call in held.items():
            hooks.append(call.attention.register_forward_pre_hook(partial(called, layer, call), with_kwargs=True))
        for layer, block in enumerate(blocks):
            if layer in (0, *layers):
                hooks.append(block.module.register_forward_pre_hook(partial(entering, layer), with_kwargs=True))
            if layer + 1 < len(blocks):
                if block.output is not None:
                    hooks.append(block.output.register_forward_pre_hook(partial(giving, found.heads, layer)))
                hooks += [norm.register_forward_pre_hook(partial(giving, found.given, norm)) for norm in block.norms]
                hooks += [module.register_forward_hook(putting_out) for module in block.parts]
        yield
