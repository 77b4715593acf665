"""Directions in the residual stream, followed back: to the writers at a token, and to the tokens that those read.

A logit is linear in what stands at the query, with everything else held, and linear in what stands at the keys: it asks
with a direction g in the stream. A writer's part is ``x_c·g``, and a head's part splits on over the tokens it read,

    ``W_O z(p)·g = Σ_s a(p,s) v(s)·G``,   ``G = W_Oᵀ g``,   ``v(s) = W_V σ_s x(s)``,

so that the same question stands again at s, one layer down, with the direction ``a(p,s) σ_s W_Vᵀ G``. Attention and the
scalars of norms are held at what they were. Nothing is carried forward writer by writer: a direction costs as much as
one token does on its way back through ``W_O``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.capture.held import centred
from qkscope.capture.pick import Places
from qkscope.capture.projection import project
from qkscope.capture.stream import Entered, Heads, Node, Normed, Part, Scaled, Sum
from qkscope.capture.tap import Call
from qkscope.capture.weights import pull_back, qk_norm_offsets, qk_norm_scales
from qkscope.capture.writers import BIAS, EMBEDDING, Reader, Recorded, Side, norm_scalar, part_name
from qkscope.heads import Head


@dataclass(frozen=True)
class Direction:
    """What is asked of the stream that enters a layer, at some slots: ``Σ_p vectors·x(p) + constants``."""

    layer: int
    slots: Int[Tensor, " p"]
    vectors: Float[Tensor, "n p d_model"]
    constants: Float[Tensor, "n p"]


@dataclass(frozen=True)
class Asked:
    """A relative logit ``Σ_t w_t scale q·k_t`` of n rows, and what it asks at the query and at the keys."""

    total: Float[Tensor, " n"]
    sides: dict[Side, Direction]


@dataclass
class Answer:
    """What each writer has to say in a direction, and how each head's output is asked.

    Attributes
    ----------
    values : by writer, Float [n, p].
    asks : by layer, the direction on each head's output, Float [n, p, h, e].
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    asks: dict[int, Tensor] = field(default_factory=dict)

    def add(self, writer: str, value: Tensor) -> None:
        """More of what a writer says."""
        self.values[writer] = self.values[writer] + value if writer in self.values else value


class Trail:
    """One forward of a batch, in which directions can be followed back.

    Parameters
    ----------
    reader : whose heads are asked about.
    inputs : of the model.
    places : slot 0 is each row's query, the others are its keys, as in `Recorded`.
    layers : whose attention is kept; every one up to the deepest that is read, if not given.
    """

    def __init__(
        self, reader: Reader, inputs: dict[str, Tensor], places: Places, layers: set[int] | None = None
    ) -> None:
        self.reader, self.calls = reader, dict[int, Call]()
        every = range(max(reader.layers) + 1)
        kept = set(every) if layers is None else layers | set(reader.layers)

        def keep(call: Call) -> None:
            if call.layer in kept:
                self.calls[call.layer] = call

        self.found = reader.record(inputs, places, keep, layers=every)

    def kv(self, head: Head, of: Literal["k", "v"] = "k") -> int:
        """Which key head, or which head of values, a head reads."""
        call = self.calls[head.layer]
        return head.index // (call.q.shape[1] // getattr(call, of).shape[1])

    # ------------------------------------------------------------------ what a head does

    @torch.no_grad()
    def attention(self, head: Head, slots: Int[Tensor, " p"]) -> Float[Tensor, "n p t"]:
        """A head's attention at some slots, over every token of the batch."""
        call, columns = self.calls[head.layer], self.found.columns[:, slots]
        row = self.found.row[:, None].expand_as(columns).flatten()
        q = call.q[row, head.index, columns.flatten()].float()
        k = call.k[:, self.kv(head)].float()[row]
        mask = call.mask_rows(row, columns.flatten())
        logits = call.cap(call.scale * torch.einsum("rd,rtd->rt", q, k))
        logits = logits + mask[:, head.index if mask.shape[1] > 1 else 0]
        if call.sinks is not None:
            logits = torch.cat([logits, call.sinks[head.index].float().expand(len(row), 1)], dim=1)
        weights = torch.softmax(logits, dim=-1)[:, : k.shape[1]].nan_to_num()
        return weights.unflatten(0, columns.shape)

    @torch.no_grad()
    def read(self, head: Head, along: Float[Tensor, "n p e"]) -> Float[Tensor, "n p t"]:
        """Every token's value along directions on a head's output; times the attention it is what the head brought."""
        return along @ self.calls[head.layer].v[:, self.kv(head, "v")].float()[self.found.row].mT

    # ------------------------------------------------------------------ directions

    def ask(
        self,
        head: Head,
        query: int,
        keys: Int[Tensor, " p"],
        weights: Float[Tensor, "n p"],
        projector: Float[Tensor, "d d"] | None = None,
    ) -> Asked:
        """A relative logit, before any soft-cap, and the directions it asks in.

        Parameters
        ----------
        head : whose.
        query : slot of the query.
        keys : slots of the keys.
        weights : of the keys.
        projector : stands between q and k, where only a feature's part of the logit is asked for.
        """
        call, found = self.calls[head.layer], self.found
        at = torch.tensor([query], device=keys.device)
        q = call.q[found.row, head.index, found.columns[:, query]].float()
        k = call.k[found.row[:, None], self.kv(head), found.columns[:, keys]].float()
        P = torch.eye(q.shape[-1]).to(q) if projector is None else projector.to(q)
        met = torch.einsum("np,npd->nd", weights, k) @ P.T * call.scale
        asked = (q @ P)[:, None] * (weights * call.scale)[..., None]
        at_query = self._enter(head.layer, "q", head.index, at, met[:, None])
        at_keys = self._enter(head.layer, "k", self.kv(head), keys, asked)
        return Asked((q * met).sum(-1), {"query": at_query, "key": at_keys})

    def follow(self, head: Head, slots: Int[Tensor, " p"], along: Float[Tensor, "n p e"]) -> Direction:
        """What a direction on values of a head, at the tokens it read, asks of the stream there."""
        return self._enter(head.layer, "v", self.kv(head, "v"), slots, along)

    def _enter(
        self, layer: int, vectors: Literal["q", "k", "v"], index: int, slots: Int[Tensor, " p"], along: Tensor
    ) -> Direction:
        """A direction on queries, keys or values as one on what enters their layer."""
        reader, found, call = self.reader, self.found, self.reader.calls[layer]
        sigma = reader.scalar(found, layer)[:, slots, None]
        if vectors != "v" and reader.holds(layer):
            g, constants = found.layer(layer).pull(vectors, index, found.columns[:, slots], along)
            if call.input_norm is not None:
                norm, g = reader.taken_apart(call.input_norm, found.entered[layer]), g * call.input_scale
                constants = constants + g @ norm.bias.to(g)
                g = centred(g * norm.gain.to(g), norm) * sigma
            return Direction(layer, slots, g, constants)
        rotary, offset = self.calls[layer].rotary, reader.scope.facts.layers[layer].offset
        if vectors != "v" and rotary is not None and offset is not None:
            along = rotary.turn(along[:, None], found.row, found.columns[:, slots], offset, back=True)[:, 0]
        constants = torch.zeros_like(along[..., 0])
        if call.qk_norms:
            if vectors != "v":
                constants = along @ qk_norm_offsets(call)["qk".index(vectors)][index]
            along = along * self._scalar(layer, vectors, index, slots)[..., None]
        pulled = pull_back(call, vectors, index, along.flatten(0, 1)).unflatten(0, along.shape[:2])
        return Direction(layer, slots, pulled[..., :-1] * sigma, constants + pulled[..., -1])

    @torch.no_grad()
    def _scalar(
        self, layer: int, vectors: Literal["q", "k", "v"], index: int, slots: Int[Tensor, " p"]
    ) -> Float[Tensor, "n p"]:
        """What norms inside the attention multiply a head's vectors by."""
        call, x = self.reader.calls[layer], self.found.entered[layer][:, slots]
        z = x.flatten(0, 1).to(call.hidden.dtype)
        z = z if call.input_norm is None else call.input_scale * call.input_norm(z)
        if vectors != "v":
            scale = qk_norm_scales(call, z)["qk".index(vectors)][:, index]
        else:  # most families leave values as they are: then it is 1
            whole, linear = project(call, z).v[:, index].float(), project(call, z, "linear").v[:, index].float()
            scale = (whole * linear).sum(-1) / linear.square().sum(-1).clamp_min(1e-30)
        return scale.unflatten(0, x.shape[:2])

    # ------------------------------------------------------------------ writers

    def writers(self, asked: Direction) -> Answer:
        """What each writer before the layer says in a direction; they sum to all that is asked."""
        return answer_of(self.reader, self.found, asked)


@torch.no_grad()
def answer_of(reader: Reader, found: Recorded, asked: Direction) -> Answer:
    """What each writer before a layer says in a direction; they sum to all that is asked.

    Parameters
    ----------
    reader : of the heads.
    found : from its `record`.
    asked : where, and in which direction.
    """
    answer, slots = Answer(), asked.slots

    def back(layer: int, node: Node, g: Tensor) -> Tensor:
        """What a direction on a part of a block asks of what entered the block; what it asks of writers is noted."""
        match node:
            case Entered():
                return g
            case Heads():
                W, b = reader.output_weights(layer)
                asks = (g.flatten(0, 1) @ W).transpose(0, 1).unflatten(0, g.shape[:2])
                said = (found.heads[layer][:, slots].unflatten(-1, asks.shape[-2:]) * asks).sum(-1)
                for i, value in enumerate(said.unbind(-1)):
                    answer.add(str(Head(layer, i)), value)
                answer.add(BIAS, g @ b)
                answer.asks[layer] = answer.asks[layer] + asks if layer in answer.asks else asks
            case Part(module):
                name = part_name(reader.blocks[layer], layer, module)
                answer.add(name, (found.gave[module][:, slots] * g).sum(-1))
            case Scaled(_, gain, inner):
                return back(layer, inner, g * gain.to(g))
            case Sum(terms):
                return torch.stack([back(layer, term, g * number) for number, term in terms]).sum(0)
            case Normed(norm, inner):
                given = found.given[norm][:, slots]
                own = reader.taken_apart(norm, given)
                answer.add(BIAS, g @ own.bias)
                return back(layer, inner, centred(g * norm_scalar(norm, own, given)[..., None] * own.gain, own))
        return torch.zeros_like(g)

    answer.add(BIAS, asked.constants)
    g = asked.vectors
    for layer in reversed(range(asked.layer)):
        g = back(layer, reader.blocks[layer].tree, g)
    answer.add(EMBEDDING, (found.entered[0][:, slots] * g).sum(-1))
    return answer
