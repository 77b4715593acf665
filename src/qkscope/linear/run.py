"""What one forward leaves at chosen places, and the two ways through it: writers pushed up, directions pulled down.

``x(p) = Σ_c x_c(p)`` over writers c. With norms frozen everything between x and a logit is linear, so a head asks with
a direction g in the stream, and writer c says ``x_c · g``. `Run.streams` carries the writers' parts up to a layer;
`Run.answer` carries a direction down to every writer. A block in between is a sum with norms in it
(`qkscope.capture.blocks`), and both ways walk the same tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.capture.blocks import Entered, Heads, Node, Normed, Part, Scaled, Sum
from qkscope.capture.norms import Norm, full_output
from qkscope.capture.pick import Capture
from qkscope.capture.tap import Call
from qkscope.heads import BIAS, EMBEDDING, Head
from qkscope.linear.layer import Kind, Layer

if TYPE_CHECKING:
    from qkscope.linear.reader import Reader

Side = Literal["query", "key"]
KINDS: dict[Side, Kind] = {"query": "q", "key": "k"}
_OF_ROWS = ("entered", "heads", "gave", "given", "neurons")
_KEPT = 4096  # tokens of layers that are kept ready to be asked again
_AT_ONCE = 2**28  # bytes of W_O whose layers are done together on a GPU


@dataclass(frozen=True)
class Parts:
    """Vectors at p places, split among writers: ``values`` is Float [n, c, p, d]."""

    writers: list[str]
    values: Float[Tensor, "n c p d"]


def named(pieces: Sequence[Parts]) -> Float[Tensor, "n c p d"]:
    """What every writer but the biases left."""
    return torch.cat([piece.values for piece in pieces if piece.writers != [BIAS]], dim=1)


@dataclass(frozen=True)
class Direction:
    """What is asked of the stream that enters a layer, at some slots: ``Σ_p vectors·x(p) + constants``."""

    layer: int
    slots: Int[Tensor, " p"]
    vectors: Float[Tensor, "n p d_model"]
    constants: Float[Tensor, "n p"]


@dataclass
class Answer:
    """What each writer has to say in a direction, and what is asked of each head's output and each other part.

    Attributes
    ----------
    values : by writer, Float [n, p].
    asks : by layer, the direction on each head's output, Float [n, p, h, e].
    parts : by writer that is no head, the direction on what it puts out, Float [n, p, d_model].
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    asks: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, writer: str, value: Tensor) -> None:
        """More of what a writer says."""
        self.values[writer] = self.values[writer] + value if writer in self.values else value


@dataclass
class Run:
    """One batch at p places in each of n rows: slot 0 is the query, the others are keys.

    Attributes
    ----------
    reader : whose heads are read.
    row, columns : which row of the batch, and which of its columns.
    inputs : of the model.
    captured : queries and every token's keys of the heads read (with the whole attention row); not of a deep run.
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
    captured: Capture = None  # type: ignore[assignment]  # until the forward is over
    entered: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    gave: dict[nn.Module, Tensor] = field(default_factory=dict)
    given: dict[nn.Module, Tensor] = field(default_factory=dict)
    neurons: dict[nn.Module, Tensor] = field(default_factory=dict)
    called: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    left: Float[Tensor, "b t d_model"] | None = None
    logits: Float[Tensor, "n v"] | None = None
    first: int = 0  # which row of `captured` is the first of these
    # of these rows alone
    _layers: dict[Any, Layer] = field(default_factory=dict, init=False)
    _parts: dict[int, Float[Tensor, "n h p d"]] = field(default_factory=dict, init=False)

    @property
    def ids(self) -> Int[Tensor, " t"]:
        """The tokens of the first row's sequence."""
        return self.inputs["input_ids"][int(self.row[0])]

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

    def slots(self, some: Sequence[int] | slice) -> Run:
        """Some of the places, in the order named."""
        kept: Any = {name: {key: value[:, some] for key, value in getattr(self, name).items()} for name in _OF_ROWS}
        return replace(self, columns=self.columns[:, some], **kept)

    def rows(self, some: slice) -> Run:
        """Some of the rows; what was captured of their attention stays whole."""
        kept: Any = {name: {key: value[some] for key, value in getattr(self, name).items()} for name in _OF_ROWS}
        return replace(self, row=self.row[some], columns=self.columns[some], first=self.first + some.start, **kept)

    # ------------------------------------------------------------------ one layer

    def layer(self, layer: int, slots: Sequence[int] | slice = slice(None)) -> Layer:
        """A layer's own code at some slots."""
        key = layer, (slots.start, slots.stop) if isinstance(slots, slice) else tuple(slots)
        if key not in self._layers:
            while self._layers and sum(one.columns.numel() for one in self._layers.values()) > _KEPT:
                del self._layers[
                    next(iter(self._layers))
                ]  # of a long prompt, the graphs of a few are all there is room for
            block = self.reader.blocks[layer].module
            true, given = self.calls[layer], self.called[layer]
            self._layers[key] = Layer(self.reader.scope, layer, block, given, true, self.row, self.columns[:, slots])
        return self._layers[key]

    def true(self, head: Head, side: Side) -> Float[Tensor, "n p d"]:
        """A head's own queries or keys at the places of that side, as the dot product saw them."""
        call = self.calls[head.layer]
        vectors = call.q[:, head.index] if side == "query" else call.k[:, self.kv(head)]
        return vectors[self.row[:, None], self.columns[:, self.at(side)]].to(self.row.device, torch.float32)

    def kv(self, head: Head, of: Literal["k", "v"] = "k") -> int:
        """Which key head, or which head of values, a head reads."""
        call = self.calls[head.layer]
        return head.index // (call.q.shape[1] // getattr(call, of).shape[1])

    def index(self, head: Head, kind: Kind) -> int:
        """The place of a head's queries, keys or values among its layer's."""
        return head.index if kind == "q" else self.kv(head, kind)

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
        layer, index = self.layer(head.layer, at), self.index(head, kind)
        J, c = layer.jacobian(kind, index), layer.constants[kind][:, :, index]
        if slots is None:
            pieces = [Parts(piece.writers, piece.values[:, :, at]) for piece in pieces]
        parts, biases = named(pieces), [piece.values for piece in pieces if piece.writers == [BIAS]]
        constant = torch.cat(biases, dim=1).sum(1, keepdim=True) if biases else torch.zeros_like(parts[:, :1])
        whole = torch.einsum("ncpe,npde->ncpd", torch.cat([parts, constant], dim=1), J.to(parts))
        whole[:, -1] += c.to(whole)
        return whole

    def live(
        self, head: Head, side: Side, x: Float[Tensor, "x n p d_model"], slots: slice | None = None
    ) -> Float[Tensor, "x n p d"]:
        """What a head makes of other streams at the places of a side, its norms running."""
        at, kind = self.at(side) if slots is None else slots, KINDS[side]
        return self.layer(head.layer, at).live(x, kind, self.index(head, kind))

    # ------------------------------------------------------------------ writers, pushed up

    def streams(self, last: int) -> Iterator[tuple[int, list[Parts]]]:
        """What entered each layer up to the last one wanted, split among its writers, biases between."""
        pieces = [Parts([EMBEDDING], self.entered[0][:, None])]
        for layer in range(last + 1):
            if layer:
                pieces = self._through(layer - 1, self.reader.blocks[layer - 1].tree, pieces)
            yield layer, pieces

    def stream(self, layer: int) -> list[Parts]:
        """The same for one layer."""
        *_, (_, pieces) = self.streams(layer)
        return pieces

    def _through(self, layer: int, node: Node, entered: list[Parts]) -> list[Parts]:
        match node:
            case Entered():
                return entered
            case Heads():
                names = self.reader.head_names(layer)
                return [Parts(names, self._head_parts(layer)), *self._constant(self.reader.output_weights(layer)[1])]
            case Part(module):
                return [Parts([self.reader.part_name(layer, module)], self.gave[module][:, None])]
            case Scaled(_, gain, inner):
                return [Parts(p.writers, p.values * gain.to(p.values)) for p in self._through(layer, inner, entered)]
            case Sum(terms):
                out = []
                for number, term in terms:
                    pieces = self._through(layer, term, entered)
                    out += pieces if number == 1 else [Parts(p.writers, p.values * number) for p in pieces]
                return out
            case Normed(norm, inner):
                own, scale = self.scale(norm)
                pieces = self._through(layer, inner, entered)
                turned = [Parts(p.writers, own.centred(p.values) * scale[:, None]) for p in pieces]
                return [*turned, *self._constant(own.bias)]

    def scale(self, norm: nn.Module, slots: Any = slice(None)) -> tuple[Norm, Float[Tensor, "n p d"]]:
        """What a norm in the stream multiplied each place by, its gain included."""
        given = self.given[norm][:, slots]
        own = self.reader.taken_apart(norm, given)
        return own, own.scalar(given, full_output(norm, given)) * own.gain.to(given)

    def _head_parts(self, layer: int) -> Float[Tensor, "n h p d"]:
        """What each head of a layer put into the stream; on a GPU made for many layers at once."""
        here, z = self.row.device, self.heads[layer]
        W = self.reader.output_weights(layer)[0].to(here)
        if here.type == "cpu":
            return torch.einsum("npha,hda->nhpd", z.unflatten(-1, (len(W), -1)), W)
        if layer not in self._parts:
            alike = [one for one in self.heads if one >= layer and self.heads[one].shape == z.shape]
            layers = alike[: max(_AT_ONCE // W.nbytes, 1)]
            every = torch.stack([self.heads[one] for one in layers]).unflatten(-1, (len(W), -1))
            W = torch.stack([self.reader.output_weights(one)[0].to(here) for one in layers])
            self._parts |= zip(layers, torch.einsum("lnpha,lhda->lnhpd", every, W).unbind(), strict=True)
        return self._parts[layer]

    def _constant(self, bias: Float[Tensor, " d"]) -> list[Parts]:
        if not self.reader.speaks(bias):
            return []
        return [
            Parts([BIAS], bias.to(self.row.device, torch.float32).expand(*self.row.shape, 1, self.columns.shape[1], -1))
        ]

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
        rows = self.calls[head.layer].rows(head.index, row, columns.flatten())
        return rows.attention()[:, 0].unflatten(0, columns.shape).to(self.row.device)

    @torch.no_grad()
    def brought(self, head: Head, along: Float[Tensor, "n p e"]) -> Float[Tensor, "n p t"]:
        """Every token's value along directions on a head's output; times the attention it is what the head brought."""
        values = self.calls[head.layer].v[:, self.kv(head, "v")]
        return along @ values[self.row.to(values.device)].to(along).mT

    # ------------------------------------------------------------------ directions, pulled down

    def enter(self, head: Head, kind: Kind, slots: Int[Tensor, " p"], along: Float[Tensor, "n p d"]) -> Direction:
        """A direction on a head's queries, keys or values as one on what enters its layer."""
        layer = self.layer(head.layer, slots.tolist())
        vectors, constants = layer.pull(kind, [self.index(head, kind)], along[None])
        return Direction(head.layer, slots, vectors[0].to(along), constants[0].to(along))

    def ask(
        self,
        head: Head,
        query: int,
        keys: Int[Tensor, " p"],
        weights: Float[Tensor, "n p"],
        projector: Float[Tensor, "d d"] | None = None,
    ) -> tuple[Float[Tensor, " n"], dict[Side, Direction]]:
        """A relative logit ``Σ_t w_t scale q·k_t``, before any soft-cap, and the directions it asks in.

        Parameters
        ----------
        head : whose.
        query : slot of the query.
        keys : slots of the keys.
        weights : of the keys.
        projector : stands between q and k, where only a feature's part of the logit is asked for.
        """
        call = self.calls[head.layer]
        at = self.row.to(call.q.device), self.columns.to(call.q.device)
        q = call.q[at[0], head.index, at[1][:, query]].to(weights)
        k = call.k[at[0][:, None], self.kv(head), at[1][:, keys.to(call.k.device)]].to(weights)
        P = torch.eye(q.shape[-1]).to(q) if projector is None else projector.to(q)
        met = torch.einsum("np,npd->nd", weights, k) @ P.T * call.scale
        asked = (q @ P)[:, None] * (weights * call.scale)[..., None]
        at_query = self.enter(head, "q", torch.tensor([query], device=keys.device), met[:, None])
        return (q * met).sum(-1), {"query": at_query, "key": self.enter(head, "k", keys, asked)}

    @torch.no_grad()
    def answer(self, asked: Direction) -> Answer:
        """What each writer before a layer says in a direction; they sum to all that is asked."""
        answer = Answer()
        answer.add(BIAS, asked.constants)
        g = asked.vectors
        for layer in reversed(range(asked.layer)):
            g = self._back(answer, asked.slots, layer, self.reader.blocks[layer].tree, g)
        answer.add(EMBEDDING, (self.entered[0][:, asked.slots] * g).sum(-1))
        return answer

    def _back(self, answer: Answer, slots: Tensor, layer: int, node: Node, g: Tensor) -> Tensor:
        """What a direction on a part of a block asks of what entered the block; what it asks of writers is noted."""
        match node:
            case Entered():
                return g
            case Heads():
                W, b = (value.to(g) for value in self.reader.output_weights(layer))
                asks = (g.flatten(0, 1) @ W).transpose(0, 1).unflatten(0, g.shape[:2])
                said = (self.heads[layer][:, slots].unflatten(-1, asks.shape[-2:]) * asks).sum(-1)
                for name, value in zip(self.reader.head_names(layer), said.unbind(-1), strict=True):
                    answer.add(name, value)
                answer.add(BIAS, g @ b)
                answer.asks[layer] = answer.asks[layer] + asks if layer in answer.asks else asks
            case Part(module):
                name = self.reader.part_name(layer, module)
                answer.add(name, (self.gave[module][:, slots] * g).sum(-1))
                answer.parts[name] = answer.parts[name] + g if name in answer.parts else g
            case Scaled(_, gain, inner):
                return self._back(answer, slots, layer, inner, g * gain.to(g))
            case Sum(terms):
                every = [self._back(answer, slots, layer, term, g * number) for number, term in terms]
                return torch.stack(every).sum(0)
            case Normed(norm, inner):
                own, scale = self.scale(norm, slots)
                answer.add(BIAS, g @ own.bias.to(g))
                return self._back(answer, slots, layer, inner, own.centred(g * scale))
        return torch.zeros_like(g)
