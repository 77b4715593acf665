"""One forward pass at chosen places, walked both ways: writers pushed up, directions pulled down.

The stream is a sum over writers, ``x(p) = Σ_c x_c(p)``. With norms frozen everything between x and
a logit is linear, so a head's logit reads the stream along some direction g, and writer c
contributes ``x_c · g``. `Run.streams` carries the writers' parts up to a layer; `Run.answer`
carries a direction down to every writer. A block in between is a sum with norms in it
(`qkscope.model.block_tree`), and both ways walk the same tree. Between a layer's stream and its
vectors stands the layer itself: in closed form where it has one (``closed_form``), else by its own
code (``layer``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.attention import soft
from qkscope.heads import BIAS, EMBEDDING, Head, Side
from qkscope.linear.closed_form import ClosedForm, batch_key
from qkscope.linear.layer import AffineLayer, BlockArguments, Projection
from qkscope.model.batching import Picker, index_on
from qkscope.model.block_tree import Entered, Heads, Node, Norm, Normed, Part, Sum, full_output
from qkscope.model.capture_types import Capture, Places
from qkscope.model.tap import Call
from qkscope.text import grouped

if TYPE_CHECKING:
    from qkscope.linear.reader import Reader

KINDS: dict[Side, Projection] = {"query": "q", "key": "k"}

_PER_PLACE = ("entered", "heads", "part_outputs", "module_inputs", "neurons")
_MAX_TOKENS = 4096  # tokens, over all layers, whose graphs are kept
_MAX_STACKED = 2**28  # bytes of tensors that are gathered from at once


class Parts(NamedTuple):
    """Vectors at p places, split among writers: ``values`` is Float [n, c, p, d]."""

    writers: list[str]
    values: Float[Tensor, "n c p d"]


def named(pieces: Sequence[Parts]) -> Float[Tensor, "n c p d"]:
    """Parts of every writer but the biases."""
    return torch.cat([piece.values for piece in pieces if piece.writers != [BIAS]], dim=1)


class Direction(NamedTuple):
    """A linear function of the stream that enters a layer: ``Σ_p vectors·x(p) + constants``."""

    layer: int
    slots: Int[Tensor, " p"]
    vectors: Float[Tensor, "n p d_model"]
    constants: Float[Tensor, "n p"]


@dataclass
class Answer:
    """Value of a `Direction` by writer, and the direction on the outputs of heads and other parts.

    Attributes
    ----------
    values : by writer, Float [n, p].
    heads : by layer, the direction on the sum of its heads, behind W_O: Float [n, p, d_model].
    parts : by writer that is no head, the direction on what it puts out, Float [n, p, d_model].
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)


def stackable(value: Tensor, count: int) -> bool:
    """Whether so many tensors may be stacked: it saves a GPU launches, and a CPU nothing."""
    return value.device.type != "cpu" and count * value.nbytes <= _MAX_STACKED


def _add(values: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    values[key] = values[key] + value if key in values else value


@dataclass
class Run:
    """One batch at p places in each of n rows: slot 0 is the query, the others are keys.

    Attributes
    ----------
    reader : whose heads are read.
    row, columns : row of the model's inputs that each row is from, and its columns.
    inputs : of the model.
    entered : by layer, the stream that entered the block: Float [n, p, d_model].
    heads : by layer, the heads' outputs before W_O, head after head: Float [n, p, h·e].
    part_outputs : by module, what a part put out: Float [n, p, d_model].
    module_inputs : by module, what a norm or a part was given: Float [n, p, d_model].
    neurons : by part, the input of its last matrix, where neurons are wanted: Float [n, p, f].
    block_arguments, calls : by layer, what its block was called with, and its attention call.
    final_stream : what left the last block, where logits are wanted.
    logits : next-token logits at the queries, a function of it.
    """

    reader: Reader
    row: Int[Tensor, " n"]
    columns: Int[Tensor, "n p"]
    inputs: dict[str, Tensor]
    entered: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    part_outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    module_inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    neurons: dict[nn.Module, Tensor] = field(default_factory=dict)
    block_arguments: dict[int, BlockArguments] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    final_stream: Float[Tensor, "b t d_model"] | None = None
    logits: Float[Tensor, "n v"] | None = None
    _layers: dict[Any, AffineLayer] = field(default_factory=dict, init=False)
    _vectors: dict[Any, Tensor] = field(default_factory=dict, init=False)

    @cached_property
    def captured(self) -> Capture:
        """Queries and every token's keys of the heads read, with the whole attention row."""
        reader = self.reader
        mask = self.inputs.get("attention_mask")
        if mask is None:
            k = self.calls[reader.layers[0]].k
            mask = torch.ones(len(k), k.shape[2], device=self.row.device)
        everywhere = Places.everywhere(self.row, self.columns[:, 0], mask)
        picker = Picker(reader.scope.facts, reader.heads, everywhere, "post_rope", stop=False)
        for layer in reader.layers:
            picker.visit(self.calls[layer])
        return picker.finish(self.row, {})

    # ------------------------------------------------------------------ places

    def at(self, side: Side) -> slice:
        """The slots of a side."""
        return slice(0, 1) if side == "query" else slice(1, None)

    def slots(self, some: Sequence[int] | slice, rows: slice = slice(None)) -> Self:
        """Some of the places, in the order named, of some rows."""
        picked: dict[str, Any] = {}
        for name in _PER_PLACE:
            tensors = getattr(self, name)
            picked[name] = {key: x[rows, some] for key, x in tensors.items()}
        picked["columns"] = self.columns[rows, some]
        return replace(self, row=self.row[rows], **picked)

    def pick(
        self, value: Float[Tensor, "b t *d"], slots: Any = slice(None)
    ) -> Float[Tensor, "n p *d"]:
        """A tensor of all tokens at some slots of these rows, in float32."""
        row = self.row[:, None].to(value.device)
        columns = self.columns[:, slots].to(value.device)
        return value[row, columns].to(self.row.device, torch.float32)

    def pick_all(
        self, values: Sequence[Tensor], slots: Any = slice(None)
    ) -> Float[Tensor, "l n p *d"]:
        """Pick the slots from several tensors of one shape, on a GPU in one gather."""
        if len(values) == 1 or not stackable(values[0], len(values)):
            return torch.stack([self.pick(value, slots) for value in values])
        stacked = torch.stack(list(values)).movedim(0, 2)
        return self.pick(stacked, slots).movedim(2, 0)

    # ------------------------------------------------------------------ one layer

    def layer(self, layer: int, slots: Sequence[int] | slice) -> AffineLayer:
        """A layer's own code at some slots; the last few are kept."""
        key = layer, str(slots)
        if key not in self._layers:
            self._drop_layers()
            self._layers[key] = AffineLayer(
                self.reader.scope,
                layer,
                self.reader.blocks[layer].module,
                self.block_arguments[layer],
                self.calls[layer],
                self.row,
                self.columns[:, slots],
            )
        return self._layers[key]

    def _drop_layers(self) -> None:
        """Drop the oldest layers whose graphs are kept, while they hold too many tokens."""
        while sum(other.columns.numel() for other in self._layers.values()) > _MAX_TOKENS:
            oldest = next(iter(self._layers))
            del self._layers[oldest]

    def index(self, head: Head, kind: Projection) -> int:
        """Number of a head's vectors in its layer: several heads may read the same keys."""
        call = self.calls[head.layer]
        group = call.q.shape[1] // getattr(call, kind).shape[1]
        return head.index // group

    def vectors(
        self, heads: Sequence[tuple[int, int]], kind: Projection, slots: Any
    ) -> Float[Tensor, "n h p d"]:
        """Vectors as the attention was given them.

        Parameters
        ----------
        heads : layer and number in it (`index`) of each.
        kind : queries, keys or values.
        slots : of this run.
        """
        if not isinstance(slots, slice):
            return self._pick_vectors(heads, kind, slots)
        key = (kind, str(slots), *heads)  # those of one side are needed twice
        if key not in self._vectors:
            self._vectors[key] = self._pick_vectors(heads, kind, slots)
        return self._vectors[key]

    def _pick_vectors(
        self, heads: Sequence[tuple[int, int]], kind: Projection, slots: Any
    ) -> Float[Tensor, "n h p d"]:
        layers = list(dict.fromkeys(layer for layer, _ in heads))
        of_layers = [getattr(self.calls[layer], kind).transpose(1, 2) for layer in layers]
        picked = self.pick_all(of_layers, slots)
        number_of = {layer: number for number, layer in enumerate(layers)}
        layer_index = index_on(picked.device, tuple(number_of[layer] for layer, _ in heads))
        head_index = index_on(picked.device, tuple(number for _, number in heads))
        return picked[layer_index, :, :, head_index].transpose(0, 1)

    def true(self, head: Head, side: Side) -> Float[Tensor, "n p d"]:
        """A head's own queries or keys at the places of that side, as the dot product saw them."""
        return self._vector(head, KINDS[side], self.at(side))

    def _vector(self, head: Head, kind: Projection, slots: Any) -> Float[Tensor, "n p d"]:
        place = (head.layer, self.index(head, kind))
        return self.vectors([place], kind, slots)[:, 0]

    def hidden(self, layers: Sequence[int], slots: Any) -> Float[Tensor, "l n p d_model"]:
        """The stream that entered some layers, at some slots."""
        return self.pick_all([self.block_arguments[layer].stream for layer in layers], slots)

    def closed(self, heads: Sequence[Head], kind: Projection, slots: Any) -> ClosedForm | None:
        """Heads of layers that share a `batch_key`, in closed form; None if it is not exact.

        A layer for which it does not give the true vectors has no closed form from then on.
        """
        form = ClosedForm(self, heads, kind, slots)
        self.reader.reject(form.wrong)
        return None if form.wrong else form

    def pull(
        self, heads: Sequence[Head], kind: Projection, slots: Any, along: Float[Tensor, "n h p d"]
    ) -> tuple[Float[Tensor, "n h p d_model"], Float[Tensor, "n h p"]]:
        """Pull directions on heads' vectors back to what enters their layers.

        Layers in closed form are done together, the others one by one.

        Returns
        -------
        directions on the streams, and each direction's product with the constants
        """
        layers = dict.fromkeys(head.layer for head in heads)
        keys = {layer: batch_key(self, layer) or layer for layer in layers}
        groups = grouped(range(len(heads)), lambda i: keys[heads[i].layer])
        if len(groups) == 1:
            return self._pull_alike(heads, kind, slots, along)
        directions = []
        constants = []
        order: list[int] = []
        for members in groups.values():
            group = [heads[i] for i in members]
            pulled = self._pull_alike(group, kind, slots, along[:, members])
            directions.append(pulled[0])
            constants.append(pulled[1])
            order += members
        back = torch.tensor(order).argsort().to(along.device)
        joined = torch.cat(directions, dim=1)
        joined_constants = torch.cat(constants, dim=1)
        return joined[:, back], joined_constants[:, back]

    def _pull_alike(
        self, heads: Sequence[Head], kind: Projection, slots: Any, along: Float[Tensor, "n h p d"]
    ) -> tuple[Float[Tensor, "n h p d_model"], Float[Tensor, "n h p"]]:
        """The same for heads of one layer, or of layers that share a `batch_key`."""
        layer = heads[0].layer
        if self.reader.form(layer) is not None:
            form = self.closed(heads, kind, slots)
            if form is not None:
                return form.pull(along)
            return self.pull(heads, kind, slots, along)  # by the layers' own code from now on
        index = [self.index(head, kind) for head in heads]
        own_code = self.layer(layer, slots)
        directions, constants = own_code.pull(kind, index, along.transpose(0, 1))
        return directions.transpose(0, 1).to(along), constants.transpose(0, 1).to(along)

    def read(
        self, head: Head, side: Side, pieces: Sequence[Parts], slots: Any = None
    ) -> Float[Tensor, "n c p d"]:
        """A head's queries or keys, split among writers, as the dot product sees them.

        Parameters
        ----------
        head : of a layer that was kept.
        side : query or key; the places are those of that side.
        pieces : what entered its layer, from `streams`, biases between.
        slots : other slots to read as this side; then the pieces are of these slots alone.
        """
        kind = KINDS[side]
        parts = _biases_last(pieces)
        if slots is None:
            slots = self.at(side)
            parts = parts[:, :, slots]
        if self.reader.form(head.layer) is not None:
            form = self.closed([head], kind, slots)
            if form is not None:
                return form.push(parts)
        layer = self.layer(head.layer, slots)
        index = self.index(head, kind)
        jacobian = layer.jacobian(kind, index).to(parts)
        vectors = torch.einsum("ncpe,npde->ncpd", parts, jacobian)
        constants = layer.constants[kind][:, :, index]
        vectors[:, -1] += constants.to(vectors)
        return vectors

    def live(
        self, head: Head, side: Side, x: Float[Tensor, "x n p e"], slots: Any = None
    ) -> Float[Tensor, "x n p d"]:
        """A head's vectors for other streams at the places of a side, its norms live."""
        at = self.at(side) if slots is None else slots
        kind = KINDS[side]
        vectors = self.layer(head.layer, at).pushed(x)[kind]
        return vectors[..., self.index(head, kind), :].to(x)

    # ------------------------------------------------------------------ writers, pushed up

    def streams(self, last: int) -> Iterator[tuple[int, list[Parts]]]:
        """Each layer's stream up to the last one wanted, split among writers, biases between."""
        pieces = [Parts([EMBEDDING], self.entered[0][:, None])]
        written = self._written(last)
        yield 0, pieces
        for layer in range(1, last + 1):
            tree = self.reader.blocks[layer - 1].tree
            pieces = self._through(layer - 1, tree, pieces, written.get(layer - 1))
            yield layer, pieces

    def stream(self, layer: int) -> list[Parts]:
        """One layer's stream, split among writers, biases between."""
        *_, (_, pieces) = self.streams(layer)
        return pieces

    def _through(
        self, layer: int, node: Node, entered: list[Parts], written: Tensor | None
    ) -> list[Parts]:
        """Push what entered a block, and what its heads wrote, through a node of its tree."""
        match node:
            case Entered():
                return entered
            case Heads():
                assert written is not None
                bias = self.reader.output_weights(layer)[1]
                return [Parts(self.reader.head_names(layer), written), *self._constant(bias)]
            case Part(module):
                name = self.reader.part_name(layer, module)
                output = self.part_outputs[module]
                return [Parts([name], output[:, None])]
            case Sum(terms):
                pieces = []
                for factor, term in terms:
                    for piece in self._through(layer, term, entered, written):
                        if factor != 1:  # else it stays the same object, as `values_of` relies on
                            piece = Parts(piece.writers, piece.values * factor)
                        pieces.append(piece)
                return pieces
            case Normed(module, inner):
                norm, scale = self.scale(module)
                pieces = []
                for piece in self._through(layer, inner, entered, written):
                    normed = norm.centred(piece.values) * scale[:, None]
                    pieces.append(Parts(piece.writers, normed))
                return [*pieces, *self._constant(norm.bias)]

    def _written(self, last: int) -> dict[int, Float[Tensor, "n h p d"]]:
        """By layer before the last, what each head wrote, behind W_O.

        Layers of one shape are done in one product.
        """
        written: dict[int, Tensor] = {}
        before = [layer for layer in self.heads if layer < last]
        for layers in grouped(before, self._shape_of_heads).values():
            W = self.reader.stacked_outputs(tuple(layers))
            outputs = torch.stack([self.heads[layer] for layer in layers])
            z = outputs.unflatten(-1, (W.shape[1], -1))
            parts = torch.einsum("lnphe,lhde->lhnpd", z, W.to(z))
            for layer, of_layer in zip(layers, parts.transpose(1, 2), strict=True):
                written[layer] = of_layer
        return written

    def _shape_of_heads(self, layer: int) -> tuple[torch.Size, torch.Size]:
        """Shapes of a layer's head outputs and of its W_O."""
        return self.heads[layer].shape, self.reader.output_weights(layer)[0].shape

    def scale(
        self, module: nn.Module, slots: Any = slice(None)
    ) -> tuple[Norm, Float[Tensor, "n p d"]]:
        """A norm in the stream, and what it multiplied each place by, its gain included."""
        x = self.module_inputs[module][:, slots]
        norm = self.reader.norm(module, x)
        scalar = norm.scalar(x, full_output(module, x))
        return norm, scalar * norm.gain.to(x)

    def _constant(self, bias: Float[Tensor, " d"]) -> list[Parts]:
        """A bias at every place, as the part of `BIAS`; nothing if it is 0."""
        if not self.reader.is_nonzero(bias):
            return []
        shape = *self.row.shape, 1, self.columns.shape[1], -1
        everywhere = bias.to(self.entered[0]).expand(shape)
        return [Parts([BIAS], everywhere)]

    # ------------------------------------------------------------------ directions, pulled down

    def enter(
        self, head: Head, kind: Projection, slots: Int[Tensor, " p"], along: Float[Tensor, "n p d"]
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
        """A relative logit ``Σ_t w_t scale q·k_t`` before any soft-cap, and what it reads.

        Parameters
        ----------
        head : whose.
        query : slot of the query.
        keys : slots of the keys.
        weights : of the keys.
        projector : stands between q and k, where only a feature's part of the logit is wanted.

        Returns
        -------
        the logit, and its direction on the stream at the query and at the keys
        """
        scale = self.calls[head.layer].scale
        q = self._vector(head, "q", [query])[:, 0]
        k = self._vector(head, "k", keys)
        if projector is None:
            projector = torch.eye(q.shape[-1])
        P = projector.to(q)
        weighted_key = torch.einsum("np,npd->nd", weights, k)
        on_query = weighted_key @ P.T * scale
        scaled = weights * scale
        on_keys = (q @ P)[:, None] * scaled[..., None]
        query_slot = torch.tensor([query], device=keys.device)
        of_query = self.enter(head, "q", query_slot, on_query[:, None])
        of_keys = self.enter(head, "k", keys, on_keys)
        return (q * on_query).sum(-1), {"query": of_query, "key": of_keys}

    def answer(self, asked: Direction) -> Answer:
        """Each writer's value along a direction; with the biases they sum to the whole."""
        answer = Answer({BIAS: asked.constants})
        g = asked.vectors
        for layer in reversed(range(asked.layer)):
            tree = self.reader.blocks[layer].tree
            on_input = self._back(answer, asked.slots, layer, tree, g)
            g = torch.zeros_like(g) if on_input is None else on_input
        embedding = self.entered[0][:, asked.slots]
        _add(answer.values, EMBEDDING, (embedding * g).sum(-1))
        return answer

    def _back(
        self,
        answer: Answer,
        slots: Tensor,
        layer: int,
        node: Node,
        g: Float[Tensor, "n p d_model"],
    ) -> Float[Tensor, "n p d_model"] | None:
        """Pull a direction on a node back to the block's input, noting the values of writers."""
        match node:
            case Entered():
                return g
            case Heads():
                self._note_heads(answer, slots, layer, g)
            case Part(module):
                name = self.reader.part_name(layer, module)
                _add(answer.parts, name, g)
                if module in self.part_outputs:
                    output = self.part_outputs[module][:, slots]
                    _add(answer.values, name, (output * g).sum(-1))
            case Sum(terms):
                on_inputs = []
                for factor, term in terms:
                    on_term = g if factor == 1 else g * factor
                    on_inputs.append(self._back(answer, slots, layer, term, on_term))
                return _total(on_inputs)
            case Normed(module, inner):
                norm, scale = self.scale(module, slots)
                _add(answer.values, BIAS, g @ norm.bias.to(g))
                return self._back(answer, slots, layer, inner, norm.centred(g * scale))
        return None

    def _note_heads(
        self, answer: Answer, slots: Tensor, layer: int, g: Float[Tensor, "n p d_model"]
    ) -> None:
        """Note a direction on the sum of a layer's heads, and each head's value along it."""
        _add(answer.heads, layer, g)
        W, bias = self.reader.output_weights(layer)
        _add(answer.values, BIAS, g @ bias.to(g))
        if layer not in self.heads:  # a run to the logits may have noted no writer of late layers
            return
        by_head = g.flatten(0, 1) @ W.to(g)
        on_outputs = by_head.transpose(0, 1).unflatten(0, g.shape[:2])
        outputs = self.heads[layer][:, slots]
        outputs = outputs.unflatten(-1, on_outputs.shape[-2:])
        values = (outputs * on_outputs).sum(-1).unbind(-1)
        for name, value in zip(self.reader.head_names(layer), values, strict=True):
            _add(answer.values, name, value)

    # ------------------------------------------------------------------ what a head read

    def seen(self, head: Head, query: int) -> list[int]:
        """Tokens of the first row that a head may look at from a token."""
        row = self.row[:1]
        queries = torch.full_like(row, query)
        rows = self.calls[head.layer].rows(head.index, row, queries)
        assert rows.bias is not None
        visible = rows.bias[0, 0].isfinite()
        return visible.nonzero()[:, 0].tolist()

    def attention(self, head: Head, slots: Int[Tensor, " p"]) -> Float[Tensor, "n p t"]:
        """A head's attention at some slots, over every token of the batch."""
        call = self.calls[head.layer]
        columns = self.columns[:, slots].to(call.q.device)
        row = self.row[:, None].to(columns)
        mask = call.mask_rows(row.expand_as(columns).flatten(), columns.flatten())
        mask = mask.unflatten(0, columns.shape)
        q = call.q[row, head.index, columns].float()
        k = call.k[row[:, 0], self.index(head, "k")].float()
        logits = call.cap(call.scale * q @ k.mT)
        shared = mask.shape[2] == 1
        logits = logits + mask[:, :, 0 if shared else head.index]
        sinks = None
        if call.sinks is not None:
            sinks = call.sinks.detach()[head.index].float().expand(columns.shape)
        return soft(logits, sinks).to(self.row.device)

    def on_output(self, answer: Answer, head: Head) -> Float[Tensor, "n p e"]:
        """The direction that was pulled down, on a head's output before W_O."""
        g = answer.heads[head.layer]
        W, _ = self.reader.output_weights(head.layer)
        return g @ W[head.index].to(g)

    def brought(self, head: Head, along: Float[Tensor, "n p e"]) -> Float[Tensor, "n p t"]:
        """Every token's value along directions on a head's output.

        Times the attention, it is what the head brought from each token.
        """
        values = self.calls[head.layer].v[:, self.index(head, "v")]
        of_rows = values[self.row.to(values.device)].to(along)
        return along @ of_rows.mT


def _biases_last(pieces: Sequence[Parts]) -> Float[Tensor, "n c p d"]:
    """Writers' parts, and the sum of all biases as the last one."""
    biases = torch.zeros_like(pieces[0].values[:, :1])
    for piece in pieces:
        if piece.writers == [BIAS]:
            biases = biases + piece.values
    return torch.cat([named(pieces), biases], dim=1)


def _total(values: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are tensors; None if none is."""
    total: Tensor | None = None
    for value in values:
        if value is not None:
            total = value if total is None else total + value
    return total
