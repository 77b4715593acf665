"""What one forward leaves at chosen places, and the two ways through it: writers pushed up, directions pulled down.

``x(p) = Σ_c x_c(p)`` over writers c. With norms frozen everything between x and a logit is linear, so a head asks with
a direction g in the stream, and writer c says ``x_c · g``. `Run.streams` carries the writers' parts up to a layer;
`Run.answer` carries a direction down to every writer. A block in between is a sum with norms in it
(`qkscope.capture.blocks`), and both ways walk the same tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.capture.blocks import Entered, Heads, Node, Norm, Normed, Part, Scaled, Sum, full_output
from qkscope.heads import BIAS, EMBEDDING, Head
from qkscope.linear.layer import Kind
from qkscope.linear.recorded import KINDS, Parts, Recorded, Side, named

__all__ = ["BIAS", "EMBEDDING", "KINDS", "Answer", "Direction", "Parts", "Run", "Side", "named"]


@dataclass(frozen=True)
class Direction:
    """What is asked of the stream that enters a layer, at some slots: ``Σ_p vectors·x(p) + constants``."""

    layer: int
    slots: Int[Tensor, " p"]
    vectors: Float[Tensor, "n p d_model"]
    constants: Float[Tensor, "n p"]


@dataclass
class Answer:
    """What each writer has to say in a direction, and the direction on what the heads and each other part put out.

    Attributes
    ----------
    values : by writer, Float [n, p].
    heads : by layer, the direction on the sum of its heads, behind W_O: Float [n, p, d_model].
    parts : by writer that is no head, the direction on what it puts out, Float [n, p, d_model].
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)


def _add(values: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    values[key] = values[key] + value if key in values else value


@dataclass
class Run(Recorded):
    """A recorded batch, walked up and down its blocks."""

    _parts: dict[int, Float[Tensor, "n h p d"]] = field(default_factory=dict, init=False)

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
        """What each head of a layer put into the stream; on a GPU made for all layers at once."""
        if layer not in self._parts:
            z = self.heads[layer]
            layers = [one for one in self.heads if one >= layer and self.heads[one].shape == z.shape]
            layers = layers[: self.reader.together]
            every = torch.stack([self.heads[one] for one in layers])
            W = self.reader.stacked_outputs(tuple(layers)).to(z.device)
            made = torch.einsum("lnpha,lhda->lnhpd", every.unflatten(-1, (W.shape[1], -1)), W)
            self._parts |= zip(layers, made.unbind(), strict=True)
        return self._parts[layer]

    def _constant(self, bias: Float[Tensor, " d"]) -> list[Parts]:
        if not self.reader.speaks(bias):
            return []
        return [
            Parts([BIAS], bias.to(self.row.device, torch.float32).expand(*self.row.shape, 1, self.columns.shape[1], -1))
        ]

    # ------------------------------------------------------------------ directions, pulled down

    def enter(self, head: Head, kind: Kind, slots: Int[Tensor, " p"], along: Float[Tensor, "n p d"]) -> Direction:
        """A direction on a head's queries, keys or values as one on what enters its layer."""
        vectors, constants = self.pull([head], kind, slots.tolist(), along[:, None])
        return Direction(head.layer, slots, vectors[:, 0], constants[:, 0])

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
        q = self.vectors([(head.layer, head.index)], "q", [query])[:, 0, 0]
        k = self.vectors([(head.layer, self.kv(head))], "k", keys)[:, 0]
        P = torch.eye(q.shape[-1]).to(q) if projector is None else projector.to(q)
        met = torch.einsum("np,npd->nd", weights, k) @ P.T * call.scale
        asked = (q @ P)[:, None] * (weights * call.scale)[..., None]
        at_query = self.enter(head, "q", torch.tensor([query], device=keys.device), met[:, None])
        return (q * met).sum(-1), {"query": at_query, "key": self.enter(head, "k", keys, asked)}

    @torch.no_grad()
    def answer(self, asked: Direction) -> Answer:
        """What each writer before a layer says in a direction; they sum to all that is asked."""
        answer, g = Answer({BIAS: asked.constants}), asked.vectors
        for layer in reversed(range(asked.layer)):
            entered = self._back(answer, asked.slots, layer, self.reader.blocks[layer].tree, g)
            g = torch.zeros_like(g) if entered is None else entered
        _add(answer.values, EMBEDDING, (self.entered[0][:, asked.slots] * g).sum(-1))
        return answer

    def on_output(self, answer: Answer, head: Head) -> Float[Tensor, "n p e"]:
        """The direction that was asked, on a head's output before W_O."""
        g = answer.heads[head.layer]
        return g @ self.reader.output_weights(head.layer)[0][head.index].to(g)

    def _back(self, answer: Answer, slots: Tensor, layer: int, node: Node, g: Tensor) -> Tensor | None:
        """What a direction on a part of a block asks of what entered the block; what it asks of writers is noted."""
        match node:
            case Entered():
                return g
            case Heads():
                W, b = (value.to(g) for value in self.reader.output_weights(layer))
                asks = (g.flatten(0, 1) @ W).transpose(0, 1).unflatten(0, g.shape[:2])
                said = (self.heads[layer][:, slots].unflatten(-1, asks.shape[-2:]) * asks).sum(-1)
                for name, value in zip(self.reader.head_names(layer), said.unbind(-1), strict=True):
                    _add(answer.values, name, value)
                _add(answer.values, BIAS, g @ b)
                _add(answer.heads, layer, g)
            case Part(module):
                name = self.reader.part_name(layer, module)
                _add(answer.values, name, (self.gave[module][:, slots] * g).sum(-1))
                _add(answer.parts, name, g)
            case Scaled(_, gain, inner):
                return self._back(answer, slots, layer, inner, g * gain.to(g))
            case Sum(terms):
                every = [
                    self._back(answer, slots, layer, term, g if number == 1 else g * number) for number, term in terms
                ]
                entering = [one for one in every if one is not None]
                return sum(entering[1:], entering[0]) if entering else None
            case Normed(norm, inner):
                own, scale = self.scale(norm, slots)
                _add(answer.values, BIAS, g @ own.bias.to(g))
                return self._back(answer, slots, layer, inner, own.centred(g * scale))
        return None
