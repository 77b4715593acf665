"""What one forward leaves at chosen places, and heads' vectors there: as they were, split, and as directions.

A layer is asked in closed form where it has one (`closed`), and by its own code where not (`layer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.capture.gather import Picker
from qkscope.capture.pick import Capture, Places
from qkscope.capture.spaces import Rotary
from qkscope.capture.tap import Call
from qkscope.heads import BIAS, Head
from qkscope.linear.closed import Closed, alike
from qkscope.linear.layer import Kind, Layer, stream_of

if TYPE_CHECKING:
    from qkscope.linear.reader import Reader

Side = Literal["query", "key"]
KINDS: dict[Side, Kind] = {"query": "q", "key": "k"}
_OF_ROWS = ("entered", "heads", "gave", "given", "neurons")
_KEPT = 4096  # tokens of layers that are kept ready to be asked again
_ROWS = 128  # of attention, made at once
_CLOSED = 4  # groups of layers in closed form that are kept


@dataclass(frozen=True)
class Parts:
    """Vectors at p places, split among writers: ``values`` is Float [n, c, p, d]."""

    writers: list[str]
    values: Float[Tensor, "n c p d"]


def named(pieces: Sequence[Parts]) -> Float[Tensor, "n c p d"]:
    """What every writer but the biases left."""
    return torch.cat([piece.values for piece in pieces if piece.writers != [BIAS]], dim=1)


def _named(slots: Any) -> tuple[Any, ...]:
    """Slots as a key of a dictionary."""
    if isinstance(slots, slice):
        return slots.start, slots.stop, None
    return tuple(slots.tolist() if isinstance(slots, Tensor) else slots)


@dataclass
class Recorded:
    """One batch at p places in each of n rows: slot 0 is the query, the others are keys.

    Attributes
    ----------
    reader : whose heads are read.
    row, columns : which row of the batch, and which of its columns.
    inputs : of the model.
    entered : by layer, what entered the block: Float [n, p, d_model].
    heads : by layer, the heads' outputs before W_O, head after head: Float [n, p, h·e].
    gave, given : by module, what a part put out, and what a norm was given: Float [n, p, d_model].
    neurons : by part, what its last matrix was given, where neurons are asked for: Float [n, p, f].
    called : by layer, what its block was called with.
    calls : by layer, its attention call.
    left, logits : what left the last block, and next-token logits at the queries, a function of it; where asked for.
    """

    reader: Reader
    row: Int[Tensor, " n"]
    columns: Int[Tensor, "n p"]
    inputs: dict[str, Tensor]
    entered: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    gave: dict[nn.Module, Tensor] = field(default_factory=dict)
    given: dict[nn.Module, Tensor] = field(default_factory=dict)
    neurons: dict[nn.Module, Tensor] = field(default_factory=dict)
    called: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    left: Float[Tensor, "b t d_model"] | None = None
    logits: Float[Tensor, "n v"] | None = None
    # of these rows alone
    _layers: dict[Any, Layer] = field(default_factory=dict, init=False)
    _closed: dict[Any, Closed] = field(default_factory=dict, init=False)
    _vectors: dict[Any, Tensor] = field(default_factory=dict, init=False)
    _rotations: dict[int, Rotary] = field(default_factory=dict, init=False)

    @cached_property
    def captured(self) -> Capture:
        """Queries and every token's keys of the heads read, with the whole attention row."""
        reader, mask = self.reader, self.inputs.get("attention_mask")
        k = self.calls[reader.layers[0]].k
        seen = torch.ones(len(k), k.shape[2], device=self.row.device) if mask is None else mask
        everywhere = Places.everywhere(self.row, self.columns[:, 0], seen)
        picker = Picker(reader.scope.facts, reader.heads, everywhere, "post_rope", stop=False)
        for layer in reader.layers:
            picker.visit(self.calls[layer])
        return picker.finish(self.row, {})

    @property
    def ids(self) -> Int[Tensor, " t"]:
        """The tokens of the first row's sequence."""
        return self.inputs["input_ids"][int(self.row[0])]

    def picked(self, values: Sequence[Tensor], slots: Any = slice(None)) -> Float[Tensor, "l n p *d"]:
        """Tensors of several layers, alike, at some slots of these rows, in float32 and on one device.

        A GPU copies all tokens of many layers sooner than it is told to pick from each.
        """
        device = values[0].device
        row, columns = self.row[:, None].to(device), self.columns[:, slots].to(device)
        if not self.reader.waits:
            return torch.stack([value[row, columns] for value in values]).to(self.row.device, torch.float32)
        return torch.stack(list(values))[:, row, columns].to(self.row.device, torch.float32)

    def in_full(self, late: bool) -> None:
        """What was noted in the model's precision and on its layers' devices, in float32 and on one; picked if late."""
        for name in _OF_ROWS:
            kept = getattr(self, name)
            alike: dict[Any, list[Any]] = {}
            for key, value in kept.items():
                alike.setdefault((value.device, value.dtype, value.shape), []).append(key)
            for keys in alike.values():  # all layers at once
                if late:
                    kept |= zip(keys, self.picked([kept[key] for key in keys]).unbind(), strict=True)
                elif kept[keys[0]].device != self.row.device or kept[keys[0]].dtype != torch.float32:
                    every = torch.stack([kept[key] for key in keys]).to(self.row.device, torch.float32)
                    kept |= zip(keys, every.unbind(), strict=True)

    def at(self, side: Side) -> slice:
        """The slots of a side."""
        return slice(0, 1) if side == "query" else slice(1, None)

    def slots(self, some: Sequence[int] | slice) -> Self:
        """Some of the places, in the order named."""
        kept: Any = {name: {key: value[:, some] for key, value in getattr(self, name).items()} for name in _OF_ROWS}
        return replace(self, columns=self.columns[:, some], **kept)

    def rows(self, some: slice) -> Self:
        """Some of the rows."""
        kept: Any = {name: {key: value[some] for key, value in getattr(self, name).items()} for name in _OF_ROWS}
        return replace(self, row=self.row[some], columns=self.columns[some], **kept)

    # ------------------------------------------------------------------ one layer

    def layer(self, layer: int, slots: Sequence[int] | slice = slice(None)) -> Layer:
        """A layer's own code at some slots."""
        key = layer, _named(slots)
        if key not in self._layers:
            while self._layers and sum(one.columns.numel() for one in self._layers.values()) > _KEPT:
                del self._layers[
                    next(iter(self._layers))
                ]  # of a long prompt, the graphs of a few are all there is room for
            block = self.reader.blocks[layer].module
            true, given = self.calls[layer], self.called[layer]
            self._layers[key] = Layer(self.reader.scope, layer, block, given, true, self.row, self.columns[:, slots])
        return self._layers[key]

    def vectors(self, own: Sequence[tuple[int, int]], kind: Kind, slots: Any) -> Float[Tensor, "n h p d"]:
        """Queries, keys or values as the attention was given them, of heads by layer and number, at some slots."""
        layers = {layer: i for i, layer in enumerate(dict.fromkeys(layer for layer, _ in own))}
        key = tuple(layers), kind, _named(slots)
        if key not in self._vectors:
            if len(self._vectors) > _CLOSED:
                del self._vectors[next(iter(self._vectors))]
            every = self.picked([getattr(self.calls[layer], kind).transpose(1, 2) for layer in layers], slots)
            self._vectors[key] = every.permute(1, 0, 3, 2, 4).flatten(1, 2)
        found, heads = self._vectors[key], getattr(self.calls[own[0][0]], kind).shape[1]
        index = [layers[layer] * heads + i for layer, i in own]
        return found if index == list(range(found.shape[1])) else found[:, self.reader.index(index)]

    def true(self, head: Head, side: Side) -> Float[Tensor, "n p d"]:
        """A head's own queries or keys at the places of that side, as the dot product saw them."""
        kind = KINDS[side]
        return self.vectors([(head.layer, self.index(head, kind))], kind, self.at(side))[:, 0]

    def kv(self, head: Head, of: Literal["k", "v"] = "k") -> int:
        """Which key head, or which head of values, a head reads."""
        call = self.calls[head.layer]
        return head.index // (call.q.shape[1] // getattr(call, of).shape[1])

    def index(self, head: Head, kind: Kind) -> int:
        """The place of a head's queries, keys or values among its layer's."""
        return head.index if kind == "q" else self.kv(head, kind)

    def hidden(self, layer: int, slots: Any) -> Float[Tensor, "n p d_model"]:
        """What entered a layer, at some slots."""
        if layer in self.entered:
            return self.entered[layer][:, slots]
        whole = stream_of(*self.called[layer])
        row, columns = self.row[:, None].to(whole.device), self.columns[:, slots].to(whole.device)
        return whole[row, columns].to(self.row.device, torch.float32)

    def rotation(self, layer: int) -> Rotary:
        """How a layer rotates, without attention scaling; layers share their tables."""
        rotary = self.calls[layer].rotary
        assert rotary is not None
        if id(rotary.cos) not in self._rotations:
            self._rotations[id(rotary.cos)] = rotary.unit()
        return self._rotations[id(rotary.cos)]

    def closed(self, heads: Sequence[Head], kind: Kind, slots: Any) -> Closed | None:
        """Heads of layers that are `alike`, in closed form; None where it does not give their true vectors."""
        key = tuple(heads), kind, _named(slots)
        if key not in self._closed:
            made = Closed(self, heads, kind, slots)
            if made.wrong:
                self.reader.reject(made.wrong)
                return None
            if len(self._closed) > _CLOSED:
                del self._closed[next(iter(self._closed))]
            self._closed[key] = made
        return self._closed[key]

    def pull(
        self, heads: Sequence[Head], kind: Kind, slots: Any, along: Float[Tensor, "n h p d"]
    ) -> tuple[Float[Tensor, "n h p d_model"], Float[Tensor, "n h p"]]:
        """Directions on heads' vectors as directions on what enters their layers, and what constants say in them.

        Layers in closed form are done together, the others one by one.
        """
        forms = {layer: alike(self, layer) or layer for layer in dict.fromkeys(head.layer for head in heads)}
        groups: dict[Any, list[int]] = {}
        for i, head in enumerate(heads):
            groups.setdefault(forms[head.layer], []).append(i)
        pulled: list[tuple[Tensor, Tensor]] = []
        for form, some in groups.items():
            own, mine = [heads[i] for i in some], along if len(groups) == 1 else along[:, some]
            if isinstance(form, int):
                index = [self.index(head, kind) for head in own]
                made = self.layer(form, slots).pull(kind, index, mine.transpose(0, 1))
                pulled.append((made[0].transpose(0, 1).to(along), made[1].transpose(0, 1).to(along)))
            elif (closed := self.closed(own, kind, slots)) is not None:
                pulled.append(closed.pull(mine))
            else:  # their own code is asked from now on
                return self.pull(heads, kind, slots, along)
        if len(pulled) == 1:
            return pulled[0]
        back = torch.tensor([i for some in groups.values() for i in some]).argsort().to(along.device)
        vectors, said = (torch.cat(parts, dim=1)[:, back] for parts in zip(*pulled, strict=True))
        return vectors, said

    def read(
        self, head: Head, side: Side, pieces: Sequence[Parts], slots: Sequence[int] | slice | None = None
    ) -> Float[Tensor, "n c p d"]:
        """A head's queries or keys at the places of that side, split among writers, as the dot product sees them.

        Parameters
        ----------
        head : of a layer that was kept.
        side : query or key.
        pieces : what entered its layer, from `streams`, biases between.
        slots : other slots to read as this side; then the pieces are of these slots alone.
        """
        at, kind = self.at(side) if slots is None else slots, KINDS[side]
        every = [
            (piece.writers == [BIAS], piece.values if slots is not None else piece.values[:, :, at]) for piece in pieces
        ]
        constant = torch.zeros_like(every[0][1][:, :1])
        for is_bias, values in every:
            constant = constant + values if is_bias else constant
        parts = torch.cat([*(values for is_bias, values in every if not is_bias), constant], dim=1)
        if alike(self, head.layer) is not None and (closed := self.closed([head], kind, at)) is not None:
            return closed.push(parts)
        layer, index = self.layer(head.layer, at), self.index(head, kind)
        whole = torch.einsum("ncpe,npde->ncpd", parts, layer.jacobian(kind, index).to(parts))
        whole[:, -1] += layer.constants[kind][:, :, index].to(whole)
        return whole

    def live(
        self, head: Head, side: Side, x: Float[Tensor, "x n p d_model"], slots: Any = None
    ) -> Float[Tensor, "x n p d"]:
        """What a head makes of other streams at the places of a side, its norms running."""
        at, kind = self.at(side) if slots is None else slots, KINDS[side]
        return self.layer(head.layer, at).live(x, kind, self.index(head, kind))

    # ------------------------------------------------------------------ what a head read

    def seen(self, head: Head, query: int) -> list[int]:
        """Tokens of the first row that a head may look at from a token."""
        row = self.row[:1]
        bias = self.calls[head.layer].rows(head.index, row, torch.full_like(row, query)).bias
        assert bias is not None
        return bias[0, 0].isfinite().nonzero()[:, 0].tolist()

    @torch.no_grad()
    def attention(self, head: Head, slots: Int[Tensor, " p"]) -> Float[Tensor, "n p t"]:
        """A head's attention at some slots, over every token of the batch."""
        columns = self.columns[:, slots]
        row = self.row[:, None].expand_as(columns).flatten()
        every = [  # a row has a copy of all keys
            self.calls[head.layer].rows(head.index, *some).attention()[:, 0]
            for some in zip(row.split(_ROWS), columns.flatten().split(_ROWS), strict=True)
        ]
        return torch.cat(every).unflatten(0, columns.shape).to(self.row.device)

    @torch.no_grad()
    def brought(self, head: Head, along: Float[Tensor, "n p e"]) -> Float[Tensor, "n p t"]:
        """Every token's value along directions on a head's output; times the attention it is what the head brought."""
        values = self.calls[head.layer].v[:, self.kv(head, "v")]
        return along @ values[self.row.to(values.device)].to(along).mT
