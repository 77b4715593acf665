"""Relative logits of many heads at once, split among writers.

No part is carried through a head: each head asks with directions in the residual stream, one at its query and one at
every key, and the value of writer c is ``Σ_t x_c(t) · g_t``. So all heads of a model cost little more than its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from qkscope.heads import BIAS, Head
from qkscope.linear.run import Parts, Run

_ROOM = {"cpu": 2**27, "gpu": 2**29}  # bytes of writers at once
_LAYERS = {"cpu": 4, "gpu": 64}  # that ask together: one product with many directions is quicker than many products


def values_of(
    run: Run, weights: Float[Tensor, "n h k"]
) -> Iterator[tuple[Head, Float[Tensor, "n c"], Float[Tensor, "n c"]]]:
    """Relative logits ``Σ_t w_t scale q·k_t`` of every head read, split among query writers and key writers.

    Heads come layer by layer.

    Parameters
    ----------
    run : from `Reader.record`.
    weights : of each head's keys, 0 in padded slots.
    """
    reader, place = run.reader, "cpu" if run.row.device.type == "cpu" else "gpu"
    writers = len(reader.writers(max(reader.layers)))
    bytes_of_row = 4 * writers * run.columns.shape[1] * run.entered[0].shape[-1]
    step = max(_ROOM[place] // bytes_of_row, 1)
    if step >= len(run.row):
        yield from _values(run, weights, writers, _LAYERS[place])
        return
    gathered: dict[Head, list[tuple[Tensor, Tensor]]] = {}
    for start in range(0, len(run.row), step):
        some = run.rows(slice(start, start + step))
        for head, query, key in _values(some, weights[start : start + step], writers, _LAYERS[place]):
            gathered.setdefault(head, []).append((query, key))
    for head, parts in gathered.items():
        yield head, torch.cat([query for query, _ in parts]), torch.cat([key for _, key in parts])


class _Asked(NamedTuple):
    """Directions of some heads of one layer at the query and at every slot, what constants say, and who is asked."""

    heads: list[Head]
    query: Float[Tensor, "n h d"]
    key: Float[Tensor, "n h p*d"]
    at_query: Float[Tensor, "n h"]
    at_key: Float[Tensor, "n h"]
    writers: int
    biases: int


def _values(run: Run, weights: Tensor, writers: int, together: int) -> Iterator[tuple[Head, Tensor, Tensor]]:
    table, asked = _Table(run, writers), list[_Asked]()
    for layer, pieces in run.streams(max(run.reader.layers)):
        heads = [head for head in run.reader.heads if head.layer == layer]
        if not table.goes_on(pieces) or len(asked) == together:
            yield from table.answer(asked)
            asked = []
        table.take(pieces)
        if heads:
            asked.append(_ask(run, heads, weights, table.filled, len(table.biases)))
    yield from table.answer(asked)


def _ask(run: Run, heads: list[Head], weights: Tensor, writers: int, biases: int) -> _Asked:
    at_query, at_keys = (run.layer(heads[0].layer, run.at(side)) for side in ("query", "key"))
    own, kv = [head.index for head in heads], [run.kv(head) for head in heads]
    columns, scale = run.reader.index([run.reader.columns[head] for head in heads]), run.calls[heads[0].layer].scale
    w = (weights[:, columns] * scale).transpose(0, 1)  # h n k
    q = at_query.vectors["q"][:, :, own].permute(2, 0, 1, 3).to(w)
    k = at_keys.vectors["k"][:, :, kv].permute(2, 0, 1, 3).to(w)
    met = torch.einsum("hnk,hnkd->hnd", w, k)[:, :, None]
    query, by_query = at_query.pull("q", own, met)
    key, by_key = at_keys.pull("k", kv, q * w[..., None])
    asking, meeting = (value.to(w).transpose(0, 1) for value in (query[:, :, 0], pad(key, (0, 0, 1, 0)).flatten(2)))
    return _Asked(heads, asking, meeting, by_query.sum(-1).T.to(w), by_key.sum(-1).T.to(w), writers, biases)


class _Table:
    """Writers of a few rows side by side, as a product with many directions wants them, and one slot more."""

    def __init__(self, run: Run, writers: int) -> None:
        rows, places = run.columns.shape
        self.values = run.entered[0].new_zeros(rows, writers, places, run.entered[0].shape[-1])
        self.taken: list[Parts] = []
        self.biases: list[Tensor] = []
        self.filled = 0

    def goes_on(self, pieces: Sequence[Parts]) -> bool:
        """Whether what is here stays as it is: a norm of the whole stream changes all of it."""
        return all(mine is theirs for mine, theirs in zip(self.taken, pieces, strict=False))

    def take(self, pieces: Sequence[Parts]) -> None:
        """Add the pieces that are new."""
        if not self.goes_on(pieces):
            self.taken, self.biases, self.filled = [], [], 0
        for piece in pieces[len(self.taken) :]:
            self.taken.append(piece)
            if piece.writers == [BIAS]:
                self.biases.append(piece.values)
                continue
            end = self.filled + len(piece.writers)
            self.values[:, self.filled : end] = piece.values
            self.filled = end

    def answer(self, asked: Sequence[_Asked]) -> Iterator[tuple[Head, Tensor, Tensor]]:
        """What the writers' parts are along the directions asked for; each head is told of those before it."""
        if not asked:
            return
        parts = self.values[:, : max(one.writers for one in asked)]
        query, key = torch.cat([one.query for one in asked], dim=1), torch.cat([one.key for one in asked], dim=1)
        constant = torch.cat(self.biases, dim=1) if self.biases else parts[:, :0]
        values, biases = (
            (every[:, :, 0] @ query.mT, every.flatten(2) @ key.mT)  # n c h
            for every in (parts, constant)
        )
        first = 0
        for one in asked:
            for i, head in enumerate(one.heads, first):
                said = (c[:, i - first] + b[:, : one.biases, i].sum(1) for c, b in zip(one[3:5], biases, strict=True))
                query, key = (
                    torch.cat([own[:, : one.writers, i], end[:, None]], dim=1)
                    for own, end in zip(values, said, strict=True)
                )
                yield head, query, key
            first += len(one.heads)
