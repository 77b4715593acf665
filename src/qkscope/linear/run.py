"""What one forward leaves at chosen places, and the two ways through it: writers pushed up,
directions pulled down.

``x(p) = Σ_c x_c(p)`` over writers c. With norms frozen everything between x and a logit is linear,
so a head asks with a direction g in the stream, and writer c says ``x_c · g``. `Run.streams`
carries the writers' parts up to a layer; `Run.answer` carries a direction down to every writer. A
block in between is a sum with norms in it (`qkscope.model.block_tree`), and both ways walk the same
tree. Between a layer's stream and its vectors the layer is asked in closed form where it has one,
and by its own code where not (`layer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.attention import soft
from qkscope.heads import BIAS, EMBEDDING, Head
from qkscope.linear.layer import AffineLayer, ClosedForm, Given, Kind, alike, stream_of
from qkscope.model.batching import Picker, index_on
from qkscope.model.block_tree import Entered, Heads, Node, Norm, Normed, Part, Sum, full_output
from qkscope.model.capture_types import Capture, Places
from qkscope.model.tap import Call
from qkscope.text import grouped

if TYPE_CHECKING:
    from qkscope.linear.reader import Reader

Side = Literal["query", "key"]
KINDS: dict[Side, Kind] = {"query": "q", "key": "k"}
_OF_ROWS = ("entered", "heads", "gave", "given", "neurons")
_KEPT = 4096  # tokens of layers whose graphs are kept ready to be asked again: of a long prompt, those of a few
_STACKED = 2**28  # bytes of tensors that are gathered from at once


class Parts(NamedTuple):
    """Vectors at p places, split among writers: ``values`` is Float [n, c, p, d]."""

    writers: list[str]
    values: Float[Tensor, "n c p d"]


def named(pieces: Sequence[Parts]) -> Float[Tensor, "n c p d"]:
    """What every writer but the biases left."""
    return torch.cat([piece.values for piece in pieces if piece.writers != [BIAS]], dim=1)


class Direction(NamedTuple):
    """What is asked of the stream that enters a layer, at some slots: ``Σ_p vectors·x(p) +
    constants``.
    """

    layer: int
    slots: Int[Tensor, " p"]
    vectors: Float[Tensor, "n p d_model"]
    constants: Float[Tensor, "n p"]


@dataclass
class Answer:
    """Each writer's value along a direction, and the direction on the outputs of heads and other
    parts.

    Attributes
    ----------
    values : by writer, Float [n, p].
    heads : by layer, the direction on the sum of its heads, behind W_O: Float [n, p, d_model].
    parts : by writer that is no head, the direction on what it puts out, Float [n, p, d_model].
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)


def fits(value: Tensor, count: int) -> bool:
    """Whether so many tensors may be held and gathered from together: a GPU waits for its orders, a
    CPU does not.
    """
    return value.device.type != "cpu" and count * value.nbytes <= _STACKED


def _add(values: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    values[key] = values[key] + value if key in values else value


@dataclass
class Run:
    """One batch at p places in each of n rows: slot 0 is the query, the others are keys.

    Attributes
    ----------
    reader : whose heads are read.
    row, columns, inputs : which row of the model's inputs, and which of its columns.
    entered : by layer, what entered the block: Float [n, p, d_model].
    heads : by layer, the heads' outputs before W_O, head after head: Float [n, p, h·e].
    gave, given : by module, what a part put out, and what a norm was given: Float [n, p, d_model].
    neurons : by part, what its last matrix was given, where neurons are asked for: Float [n, p, f].
    called, calls : by layer, what its block was called with, and its attention call.
    left, logits : what left the last block, and next-token logits at the queries, a function of it;
        where asked for.
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
    called: dict[int, Given] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    left: Float[Tensor, "b t d_model"] | None = None
    logits: Float[Tensor, "n v"] | None = None
    _layers: dict[Any, AffineLayer] = field(default_factory=dict, init=False)
    _vectors: dict[Any, Tensor] = field(default_factory=dict, init=False)

    @cached_property
    def captured(self) -> Capture:
        """Queries and every token's keys of the heads read, with the whole attention row."""
        reader = self.reader
        mask = self.inputs.get("attention_mask")
        k = self.calls[reader.layers[0]].k
        seen = torch.ones(len(k), k.shape[2], device=self.row.device) if mask is None else mask
        everywhere = Places.everywhere(self.row, self.columns[:, 0], seen)
        picker = Picker(reader.scope.facts, reader.heads, everywhere, "post_rope", stop=False)
        for layer in reader.layers:
            picker.visit(self.calls[layer])
        return picker.finish(self.row, {})

    def at(self, side: Side) -> slice:
        """The slots of a side."""
        return slice(0, 1) if side == "query" else slice(1, None)

    def slots(self, some: Sequence[int] | slice, rows: slice = slice(None)) -> Self:
        """Some of the places, in the order named, of some rows."""
        kept: Any = {
            name: {key: x[rows, some] for key, x in getattr(self, name).items()}
            for name in _OF_ROWS
        }
        return replace(self, row=self.row[rows], columns=self.columns[rows, some], **kept)

    def pick(
        self, value: Float[Tensor, "b t *d"], slots: Any = slice(None)
    ) -> Float[Tensor, "n p *d"]:
        """What stands at some slots of these rows, in float32."""
        row = self.row[:, None].to(value.device)
        columns = self.columns[:, slots].to(value.device)
        return value[row, columns].to(self.row.device, torch.float32)

    def pick_all(
        self, values: Sequence[Tensor], slots: Any = slice(None)
    ) -> Float[Tensor, "l n p *d"]:
        """Pick the slots from several tensors of one shape; small ones on a GPU are stacked and
        gathered at once.
        """
        if len(values) == 1 or not fits(values[0], len(values)):
            return torch.stack([self.pick(value, slots) for value in values])
        return self.pick(torch.stack(list(values)).movedim(0, 2), slots).movedim(2, 0)

    # ------------------------------------------------------------------ one layer

    def layer(self, layer: int, slots: Sequence[int] | slice) -> AffineLayer:
        """A layer's own code at some slots."""
        key = layer, str(slots)
        if key not in self._layers:
            while (
                self._layers
                and sum(other.columns.numel() for other in self._layers.values()) > _KEPT
            ):
                del self._layers[next(iter(self._layers))]
            block = self.reader.blocks[layer].module
            columns = self.columns[:, slots]
            given = self.called[layer]
            true = self.calls[layer]
            self._layers[key] = AffineLayer(
                self.reader.scope, layer, block, given, true, self.row, columns
            )
        return self._layers[key]

    def index(self, head: Head, kind: Kind) -> int:
        """The place of a head's queries, keys or values among its layer's: several heads may read
        the same keys.
        """
        call = self.calls[head.layer]
        return head.index // (call.q.shape[1] // getattr(call, kind).shape[1])

    def vectors(
        self, own: Sequence[tuple[int, int]], kind: Kind, slots: Any
    ) -> Float[Tensor, "n h p d"]:
        """Queries, keys or values as the attention was given them, of heads by layer and number, at
        some slots.
        """
        asked = (
            kind,
            str(slots) if isinstance(slots, slice) else None,
            *own,
        )  # those of one side are asked for twice
        if asked[1] is None or asked not in self._vectors:
            layers = list(dict.fromkeys(layer for layer, _ in own))
            every = self.pick_all(
                [getattr(self.calls[layer], kind).transpose(1, 2) for layer in layers], slots
            )
            of_layer, heads = zip(
                *((layers.index(layer), index) for layer, index in own), strict=True
            )
            at = (index_on(every.device, numbers) for numbers in (of_layer, heads))
            self._vectors[asked] = every[next(at), :, :, next(at)].transpose(0, 1)
        return self._vectors[asked]

    def true(self, head: Head, side: Side) -> Float[Tensor, "n p d"]:
        """A head's own queries or keys at the places of that side, as the dot product saw them."""
        kind = KINDS[side]
        return self.vectors([(head.layer, self.index(head, kind))], kind, self.at(side))[:, 0]

    def hidden(self, layers: Sequence[int], slots: Any) -> Float[Tensor, "l n p d_model"]:
        """What entered some layers, at some slots."""
        return self.pick_all([stream_of(*self.called[layer]) for layer in layers], slots)

    def closed(self, heads: Sequence[Head], kind: Kind, slots: Any) -> ClosedForm | None:
        """Heads of layers that are `alike`, in closed form; None where it does not give their true
        vectors.
        """
        made = ClosedForm(self, heads, kind, slots)
        self.reader.reject(made.wrong)
        return None if made.wrong else made

    def pull(
        self, heads: Sequence[Head], kind: Kind, slots: Any, along: Float[Tensor, "n h p d"]
    ) -> tuple[Float[Tensor, "n h p d_model"], Float[Tensor, "n h p"]]:
        """Directions on heads' vectors as directions on what enters their layers, and what
        constants say in them.

        Layers in closed form are done together, the others one by one.
        """
        by_layer = {
            layer: alike(self, layer) or layer
            for layer in dict.fromkeys(head.layer for head in heads)
        }
        groups = grouped(range(len(heads)), lambda i: by_layer[heads[i].layer])
        if len(groups) > 1:
            every = [
                self.pull([heads[i] for i in some], kind, slots, along[:, some])
                for some in groups.values()
            ]
            back = (
                torch.tensor([i for some in groups.values() for i in some])
                .argsort()
                .to(along.device)
            )
            vectors, said = (torch.cat(parts, dim=1)[:, back] for parts in zip(*every, strict=True))
        elif isinstance(layer := next(iter(groups)), int):
            index = [self.index(head, kind) for head in heads]
            pulled = self.layer(layer, slots).pull(kind, index, along.transpose(0, 1))
            vectors, said = (value.transpose(0, 1).to(along) for value in pulled)
        elif (
            closed := self.closed(heads, kind, slots)
        ) is None:  # their own code is asked from now on
            return self.pull(heads, kind, slots, along)
        else:
            return closed.pull(along)
        return vectors, said

    def read(
        self, head: Head, side: Side, pieces: Sequence[Parts], slots: Any = None
    ) -> Float[Tensor, "n c p d"]:
        """A head's queries or keys at the places of that side, split among writers, as the dot
        product sees them.

        Parameters
        ----------
        head : of a layer that was kept.
        side : query or key.
        pieces : what entered its layer, from `streams`, biases between.
        slots : other slots to read as this side; then the pieces are of these slots alone.
        """
        at = self.at(side) if slots is None else slots
        kind = KINDS[side]
        constants = [piece.values for piece in pieces if piece.writers == [BIAS]]
        parts = torch.cat(
            [named(pieces), sum(constants, torch.zeros_like(pieces[0].values[:, :1]))], dim=1
        )
        parts = parts[:, :, at] if slots is None else parts
        if (
            alike(self, head.layer) is not None
            and (closed := self.closed([head], kind, at)) is not None
        ):
            return closed.push(parts)
        layer = self.layer(head.layer, at)
        index = self.index(head, kind)
        whole = torch.einsum("ncpe,npde->ncpd", parts, layer.jacobian(kind, index).to(parts))
        whole[:, -1] += layer.constants[kind][:, :, index].to(whole)
        return whole

    def live(
        self, head: Head, side: Side, x: Float[Tensor, "x n p e"], slots: Any = None
    ) -> Float[Tensor, "x n p d"]:
        """What a head makes of other streams at the places of a side, its norms running."""
        at = self.at(side) if slots is None else slots
        kind = KINDS[side]
        return self.layer(head.layer, at).pushed(x)[kind][..., self.index(head, kind), :].to(x)

    # ------------------------------------------------------------------ writers, pushed up

    def streams(self, last: int) -> Iterator[tuple[int, list[Parts]]]:
        """What entered each layer up to the last one wanted, split among its writers, biases
        between.
        """
        pieces = [Parts([EMBEDDING], self.entered[0][:, None])]
        written = self._written(last)
        for layer in range(last + 1):
            if layer:
                tree = self.reader.blocks[layer - 1].tree
                wrote = written.get(layer - 1)
                pieces = self._through(layer - 1, tree, pieces, wrote)
            yield layer, pieces

    def stream(self, layer: int) -> list[Parts]:
        """The same for one layer."""
        *_, (_, pieces) = self.streams(layer)
        return pieces

    def _through(
        self, layer: int, node: Node, entered: list[Parts], wrote: Tensor | None
    ) -> list[Parts]:
        """What comes out of a part of a block, of what entered the block and what its heads wrote."""
        match node:
            case Entered():
                return entered
            case Heads():
                assert wrote is not None
                bias = self.reader.output_weights(layer)[1]
                return [Parts(self.reader.head_names(layer), wrote), *self._constant(bias)]
            case Part(module):
                return [Parts([self.reader.part_name(layer, module)], self.gave[module][:, None])]
            case Sum(terms):
                every = [
                    (number, p)
                    for number, term in terms
                    for p in self._through(layer, term, entered, wrote)
                ]
                return [
                    p if number == 1 else Parts(p.writers, p.values * number) for number, p in every
                ]
            case Normed(norm, inner):
                own, scale = self.scale(norm)
                pieces = self._through(layer, inner, entered, wrote)
                turned = [Parts(p.writers, own.centred(p.values) * scale[:, None]) for p in pieces]
                return [*turned, *self._constant(own.bias)]

    def _written(self, last: int) -> dict[int, Float[Tensor, "n h p d"]]:
        """By layer before the last, what each head wrote, behind W_O; layers of one shape in one
        product.
        """
        before = (layer for layer in self.heads if layer < last)
        weights = self.reader.output_weights
        groups = grouped(before, lambda layer: (self.heads[layer].shape, weights(layer)[0].shape))
        written: dict[int, Tensor] = {}
        for (_, (heads, *_)), layers in groups.items():
            z = torch.stack([self.heads[layer] for layer in layers]).unflatten(-1, (heads, -1))
            parts = torch.einsum(
                "lnphe,lhde->lhnpd", z, self.reader.stacked_outputs(tuple(layers)).to(z)
            )
            written |= zip(layers, parts.transpose(1, 2), strict=True)
        return written

    def scale(
        self, norm: nn.Module, slots: Any = slice(None)
    ) -> tuple[Norm, Float[Tensor, "n p d"]]:
        """What a norm in the stream multiplied each place by, its gain included."""
        given = self.given[norm][:, slots]
        own = self.reader.taken_apart(norm, given)
        return own, own.scalar(given, full_output(norm, given)) * own.gain.to(given)

    def _constant(self, bias: Float[Tensor, " d"]) -> list[Parts]:
        shape = *self.row.shape, 1, self.columns.shape[1], -1
        return (
            [Parts([BIAS], bias.to(self.entered[0]).expand(shape))]
            if self.reader.speaks(bias)
            else []
        )

    # ------------------------------------------------------------------ directions, pulled down

    def enter(
        self, head: Head, kind: Kind, slots: Int[Tensor, " p"], along: Float[Tensor, "n p d"]
    ) -> Direction:
        """A direction on a head's queries, keys or values as one on what enters its layer."""
        vectors, constants = self.pull([head], kind, slots.tolist(), along[:, None])
        return Direction(head.layer, slots, vectors[:, 0], constants[:, 0])

    def ask(
        self,
        head: Head,
        query: int,
        keys: Tensor,
        weights: Float[Tensor, "n p"],
        projector: Tensor | None = None,
    ) -> tuple[Float[Tensor, " n"], dict[Side, Direction]]:
        """A relative logit ``Σ_t w_t scale q·k_t``, before any soft-cap, and the directions it asks
        in.

        Parameters
        ----------
        head : whose.
        query : slot of the query.
        keys : slots of the keys.
        weights : of the keys.
        projector : stands between q and k, where only a feature's part of the logit is asked for.
        """
        scale = self.calls[head.layer].scale
        q = self.vectors([(head.layer, head.index)], "q", [query])[:, 0, 0]
        k = self.vectors([(head.layer, self.index(head, "k"))], "k", keys)[:, 0]
        P = torch.eye(q.shape[-1]).to(q) if projector is None else projector.to(q)
        met = torch.einsum("np,npd->nd", weights, k) @ P.T * scale
        asked = (q @ P)[:, None] * (weights * scale)[..., None]
        at_query = self.enter(head, "q", torch.tensor([query], device=keys.device), met[:, None])
        return (q * met).sum(-1), {"query": at_query, "key": self.enter(head, "k", keys, asked)}

    def answer(self, asked: Direction) -> Answer:
        """What each writer before a layer says in a direction; they sum to all that is asked."""
        answer = Answer({BIAS: asked.constants})
        g = asked.vectors
        for layer in reversed(range(asked.layer)):
            entered = self._back(answer, asked.slots, layer, self.reader.blocks[layer].tree, g)
            g = torch.zeros_like(g) if entered is None else entered
        _add(answer.values, EMBEDDING, (self.entered[0][:, asked.slots] * g).sum(-1))
        return answer

    def _back(
        self, answer: Answer, slots: Tensor, layer: int, node: Node, g: Tensor
    ) -> Tensor | None:
        """Pull a direction on part of a block back to the block's input, noting what falls on
        writers.
        """
        match node:
            case Entered():
                return g
            case Heads():
                _add(answer.heads, layer, g)
                W, b = (value.to(g) for value in self.reader.output_weights(layer))
                _add(answer.values, BIAS, g @ b)
                if (
                    layer in self.heads
                ):  # a run that goes on to the logits may have noted no writer of late layers
                    asks = (g.flatten(0, 1) @ W).transpose(0, 1).unflatten(0, g.shape[:2])
                    said = (self.heads[layer][:, slots].unflatten(-1, asks.shape[-2:]) * asks).sum(
                        -1
                    )
                    for name, value in zip(
                        self.reader.head_names(layer), said.unbind(-1), strict=True
                    ):
                        _add(answer.values, name, value)
            case Part(module):
                name = self.reader.part_name(layer, module)
                _add(answer.parts, name, g)
                if module in self.gave:
                    _add(answer.values, name, (self.gave[module][:, slots] * g).sum(-1))
            case Sum(terms):
                every = [
                    self._back(answer, slots, layer, term, g if n == 1 else g * n)
                    for n, term in terms
                ]
                entering = [value for value in every if value is not None]
                return sum(entering[1:], entering[0]) if entering else None
            case Normed(norm, inner):
                own, scale = self.scale(norm, slots)
                _add(answer.values, BIAS, g @ own.bias.to(g))
                return self._back(answer, slots, layer, inner, own.centred(g * scale))
        return None

    # ------------------------------------------------------------------ what a head read

    def seen(self, head: Head, query: int) -> list[int]:
        """Tokens of the first row that a head may look at from a token."""
        row = self.row[:1]
        bias = self.calls[head.layer].rows(head.index, row, torch.full_like(row, query)).bias
        assert bias is not None
        return bias[0, 0].isfinite().nonzero()[:, 0].tolist()

    def attention(self, head: Head, slots: Int[Tensor, " p"]) -> Float[Tensor, "n p t"]:
        """A head's attention at some slots, over every token of the batch."""
        call = self.calls[head.layer]
        columns = self.columns[:, slots].to(self.calls[head.layer].q.device)
        row = self.row[:, None].to(columns)
        mask = call.mask_rows(row.expand_as(columns).flatten(), columns.flatten()).unflatten(
            0, columns.shape
        )
        q = call.q[row, head.index, columns].float()
        k = call.k[row[:, 0], self.index(head, "k")].float()
        logits = (
            call.cap(call.scale * q @ k.mT) + mask[:, :, head.index if mask.shape[2] > 1 else 0]
        )
        sinks = (
            None
            if call.sinks is None
            else call.sinks.detach()[head.index].float().expand(columns.shape)
        )
        return soft(logits, sinks).to(self.row.device)

    def on_output(self, answer: Answer, head: Head) -> Float[Tensor, "n p e"]:
        """The direction that was asked, on a head's output before W_O."""
        g = answer.heads[head.layer]
        return g @ self.reader.output_weights(head.layer)[0][head.index].to(g)

    def brought(self, head: Head, along: Float[Tensor, "n p e"]) -> Float[Tensor, "n p t"]:
        """Every token's value along directions on a head's output; times the attention it is what
        the head brought.
        """
        values = self.calls[head.layer].v[:, self.index(head, "v")]
        return along @ values[self.row.to(values.device)].to(along).mT
