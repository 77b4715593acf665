"""Relative logits of many heads at once, split among writers.

No part is carried through a head: each head asks with directions in the residual stream, one at its query and one at
every key, and the value of writer c is ``Σ_t x_c(t) · g_t``. So all heads of a model cost little more than its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.heads import BIAS, Head
from qkscope.linear.run import Parts, Run

_ROOM = 2**25  # bytes of writers and of directions at once, for each layer that asks with others

Values = tuple[list[Head], Float[Tensor, "n h c"], Float[Tensor, "n h c"]]


def values_of(run: Run, weights: Float[Tensor, "n h k"], heads: Sequence[Head] | None = None) -> Iterator[Values]:
    """Relative logits ``Σ_t w_t scale q·k_t`` of some heads, split among query writers and key writers.

    Layer by layer: its heads, and what each writer gives to each of them on either side.

    Parameters
    ----------
    run : from `Reader.record`.
    weights : of each head's keys, 0 in padded slots.
    heads : which; by default all that the run was recorded for.
    """
    reader, heads = run.reader, run.reader.heads if heads is None else heads
    writers = len(reader.writers(max(head.layer for head in heads)))
    bytes_of_row = 4 * (writers + len(heads)) * run.columns.shape[1] * run.entered[0].shape[-1]
    step = max(_ROOM * reader.together // bytes_of_row, 1)
    if step >= len(run.row):
        yield from _values(run, heads, weights, writers)
        return
    starts = range(0, len(run.row), step)
    every = [_values(run.rows(slice(i, i + step)), heads, weights[i : i + step], writers) for i in starts]
    for parts in zip(*every, strict=True):
        yield parts[0][0], torch.cat([query for _, query, _ in parts]), torch.cat([key for _, _, key in parts])


class _Layer(NamedTuple):
    """A layer that asks: its heads, and how many writers and biases stand before it."""

    heads: list[Head]
    writers: int
    biases: int


def _values(run: Run, heads: Sequence[Head], weights: Tensor, writers: int) -> Iterator[Values]:
    table, asking, by_layer = _Table(run, writers), list[_Layer](), dict[int, list[Head]]()
    for head in heads:
        by_layer.setdefault(head.layer, []).append(head)
    columns = {head: i for i, head in enumerate(heads)}
    for layer, pieces in run.streams(max(by_layer)):
        if not table.goes_on(pieces) or len(asking) == run.reader.together:
            yield from table.answer(asking, weights, columns)
            asking = []
        table.take(pieces)
        if layer in by_layer:
            asking.append(_Layer(by_layer[layer], table.filled, len(table.biases)))
    yield from table.answer(asking, weights, columns)


class _Table:
    """Writers of a few rows side by side, as a product with many directions wants them, and one slot more."""

    def __init__(self, run: Run, writers: int) -> None:
        rows, places = run.columns.shape
        self.run, self.values = run, run.entered[0].new_zeros(rows, writers, places, run.entered[0].shape[-1])
        self.taken: list[Parts] = []
        self.biases: list[Tensor] = []
        self.filled = self.written = 0

    def goes_on(self, pieces: Sequence[Parts]) -> bool:
        """Whether what is here stays as it is: a norm of the whole stream changes all of it."""
        return all(mine is theirs for mine, theirs in zip(self.taken, pieces, strict=False))

    def take(self, pieces: Sequence[Parts]) -> None:
        """Add the pieces that are new."""
        if not self.goes_on(pieces):
            self.taken, self.biases, self.filled, self.written = [], [], 0, 0
        for piece in pieces[len(self.taken) :]:
            self.taken.append(piece)
            if piece.writers == [BIAS]:
                self.biases.append(piece.values)
            else:
                self.filled += len(piece.writers)

    def _written(self) -> Float[Tensor, "n c p d"]:
        """All that was taken, those that came last written behind the others; the slot behind them is free."""
        named = [piece for piece in self.taken if piece.writers != [BIAS]]
        new, count = [], self.filled
        while count > self.written:
            piece = named.pop()
            count -= len(piece.writers)
            new.append(piece.values)
        if new:
            self.values[:, self.written : self.filled] = torch.cat(new[::-1], dim=1)
        self.written = self.filled
        return self.values[:, : self.filled + 1]

    def answer(
        self, asking: Sequence[_Layer], weights: Float[Tensor, "n h k"], columns: Mapping[Head, int]
    ) -> Iterator[Values]:
        """What the writers' parts are along the directions asked for; each head is told of those before it."""
        if not asking:
            return
        heads, index = [head for layer in asking for head in layer.heads], self.run.reader.index
        parts, constant = self._written(), torch.cat(self.biases, dim=1) if self.biases else None
        before, biases = ([getattr(layer, of) for layer in asking for _ in layer.heads] for of in ("writers", "biases"))
        told = []
        for slots, (directions, said) in _directions(
            self.run, heads, weights[:, index([columns[head] for head in heads])]
        ):
            values = parts[:, :, slots].flatten(2) @ directions.flatten(2).mT  # n c h
            if constant is not None:
                own = constant[:, :, slots].flatten(2) @ directions.flatten(2).mT
                shown = index(list(range(constant.shape[1])))[:, None] < index(biases)
                said = said + (own * shown).sum(1)
            # constants are the writer behind all others, where those of a head's own layer would stand
            values.scatter_(1, index(before).expand(len(values), 1, -1), said[:, None])
            told.append(values.mT)
        first = 0
        for layer in asking:
            heads_here, end = slice(first, first + len(layer.heads)), layer.writers + 1
            yield layer.heads, told[0][:, heads_here, :end], told[1][:, heads_here, :end]
            first += len(layer.heads)


def _directions(
    run: Run, heads: list[Head], weights: Float[Tensor, "n h k"]
) -> Iterator[tuple[slice, tuple[Float[Tensor, "n h p d"], Float[Tensor, "n h"]]]]:
    """Slots of the query, then of the keys: what every head asks there, and what constants say to it."""
    at, to = run.at("query"), run.at("key")
    scale = torch.tensor([run.calls[head.layer].scale for head in heads]).to(weights)
    w = weights * scale[:, None]
    q = run.vectors([(head.layer, head.index) for head in heads], "q", at)
    k = run.vectors([(head.layer, run.kv(head)) for head in heads], "k", to)
    for slots, kind, along in ((at, "q", w[:, :, None] @ k), (to, "k", q * w[..., None])):
        directions, said = run.pull(heads, kind, slots, along)  # type: ignore[arg-type]
        yield slots, (directions, said.sum(-1))
