"""Relative logits of many heads at once, split among writers.

No part is carried through a head: each head asks with directions in the residual stream, ``g_t = w_t scale σ_t s W_Kᵀ
R_tᵀ q`` at its keys and ``W_Qᵀ R_pᵀ Σ_t w_t k_t`` at its query, and the value of writer c is ``Σ_t x_c(t) · g_t``. So
all heads of a model cost little more than its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from qkscope.capture.writers import BIAS, Parts, Reader, Recorded, Side
from qkscope.heads import Head

_SIDES: tuple[Side, Side] = ("query", "key")
_ROOM, _LAYERS = 2**27, 4  # bytes of writers at once, and layers whose heads are answered together


@torch.no_grad()
def marginals(
    reader: Reader, found: Recorded, weights: Float[Tensor, "n h k"]
) -> Iterator[tuple[Head, Float[Tensor, "n c"], Float[Tensor, "n c"]]]:
    """Relative logits ``Σ_t w_t scale q·k_t`` of every head read, split among query writers and key writers.

    Heads come layer by layer.

    Parameters
    ----------
    reader : of the heads.
    found : from its `record`.
    weights : of each head's keys, 0 in padded slots.
    """
    bytes_of_row = 4 * len(reader.writers(max(reader.layers))) * found.columns.shape[1] * found.entered[0].shape[-1]
    step = max(int(_ROOM // bytes_of_row), 1)
    gathered: dict[Head, list[tuple[Tensor, Tensor]]] = {}
    for start in range(0, len(found.row), step):
        some = found.rows(slice(start, start + step))
        for head, query, key in _marginals(reader, some, weights[start : start + step]):
            gathered.setdefault(head, []).append((query, key))
    for head, parts in gathered.items():
        yield head, torch.cat([query for query, _ in parts]), torch.cat([key for _, key in parts])


def _marginals(reader: Reader, found: Recorded, weights: Tensor) -> Iterator[tuple[Head, Tensor, Tensor]]:
    """The same of a few rows, a few layers at a time: products of many heads at once are what is quick."""
    table = _Table(found, len(reader.writers(max(reader.layers))))
    waiting: list[_Asked] = []
    for layer, pieces in reader.streams(found, max(reader.layers)):
        own = [head for head in reader.heads if head.layer == layer]
        if waiting and (len(waiting) == _LAYERS or not table.goes_on(pieces)):
            yield from table.answer(waiting)
            waiting = []
        table.take(pieces)
        if own and reader.holds(layer):
            yield from table.answer(waiting)
            waiting = []
            for head in own:
                yield head, *_pushed(reader, found, head, weights[:, reader.heads.index(head)], pieces)
        elif own:
            asked = _ask(reader, found, own, weights[:, [reader.heads.index(head) for head in own]])
            waiting.append(replace(asked, writers=table.filled, biases=len(table.biases)))
    yield from table.answer(waiting)


def _pushed(
    reader: Reader, found: Recorded, head: Head, weights: Float[Tensor, "n k"], pieces: Sequence[Parts]
) -> tuple[Tensor, Tensor]:
    """The same of one head without directions to ask in: its parts themselves."""
    assert found.captured is not None
    q, k = (reader.true(found, head, side) for side in _SIDES)
    q_parts, k_parts = (reader.read(found, head, side, pieces) for side in _SIDES)
    weights = weights * found.captured.scale[reader.heads.index(head)].to(weights)
    by_query = torch.einsum("ncd,nkd,nk->nc", q_parts[:, :, 0], k, weights)
    return by_query, torch.einsum("nd,nckd,nk->nc", q[:, 0], k_parts, weights)


def _ask(reader: Reader, found: Recorded, heads: list[Head], weights: Tensor) -> _Asked:
    """Directions in the residual stream that heads of one layer ask in, at the query and at keys."""
    assert found.captured is not None
    layer, sigma = heads[0].layer, reader.scalar(found, heads[0].layer)
    scale = found.captured.scale[[reader.heads.index(head) for head in heads]].to(weights)
    q = torch.cat([reader.true(found, head, "query") for head in heads], dim=1)  # n h d
    k = torch.stack([reader.true(found, head, "key") for head in heads], dim=1)  # n h k d
    summed = torch.einsum("nhk,nhkd->nhd", weights, k) * scale[:, None]
    meeting = q[:, :, None] * (weights * scale[:, None])[..., None]
    sides: tuple[tuple[Tensor, Side], ...] = ((summed[:, :, None], "query"), (meeting, "key"))
    directions, constants = [], []
    for vectors, side in sides:
        vectors = reader.turn(found, layer, vectors, side, back=True)
        W, c = (torch.stack(pair) for pair in zip(*(reader.matrix(head, side) for head in heads), strict=True))
        constant = torch.einsum("nhpd,hd->nh", vectors, c)
        if reader.calls[layer].qk_norms:
            vectors = vectors * torch.stack([_held_scalar(reader, found, h, side) for h in heads], dim=1)[..., None]
        constants.append(constant + torch.einsum("nhpd,hd->nh", vectors, W[..., -1]))
        directions.append((vectors @ W[..., :-1]) * sigma[:, None, found.at(side), None])
    asking, meeting = directions
    return _Asked(heads, asking[:, :, 0], pad(meeting, (0, 0, 1, 0)).flatten(2), constants[0], constants[1])


def _held_scalar(reader: Reader, found: Recorded, head: Head, side: Side) -> Float[Tensor, "n p"]:
    W, c = reader.matrix(head, side)
    at = found.at(side)
    x = found.entered[head.layer][:, at] * reader.scalar(found, head.layer)[:, at, None]
    return reader.qk_scalar(found, head, side, x @ W[:, :-1].T + W[:, -1], c)


@dataclass(frozen=True)
class _Asked:
    """What heads of a layer ask of the writers: a direction at the query, one at every slot, and what biases give."""

    heads: list[Head]
    asking: Float[Tensor, "n h d"]
    meeting: Float[Tensor, "n h p*d"]
    at_query: Float[Tensor, "n h"]
    at_keys: Float[Tensor, "n h"]
    writers: int = 0  # how many there are before this layer
    biases: int = 0


class _Table:
    """Writers of a few rows side by side, as a product with many directions wants them."""

    def __init__(self, found: Recorded, writers: int) -> None:
        rows, places = found.columns.shape
        self.values = found.entered[0].new_empty(rows, writers, places, found.entered[0].shape[-1])
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

    def answer(self, waiting: Sequence[_Asked]) -> Iterator[tuple[Head, Tensor, Tensor]]:
        """What the writers' parts are along the directions asked for; each head is told of those before it."""
        if not waiting:
            return
        asking, meeting = (torch.cat([getattr(a, name) for a in waiting], dim=1) for name in ("asking", "meeting"))
        values = self.values[:, : max(asked.writers for asked in waiting)]
        by_query = values[:, :, 0] @ asking.mT  # n c h
        by_key = torch.stack([one.flatten(1) @ own.mT for one, own in zip(values, meeting, strict=True)])
        constants = [(bias[:, 0, 0, None] @ asking.mT, bias.flatten(2) @ meeting.mT) for bias in self.biases]
        first = 0
        for asked in waiting:
            own = slice(first, first + len(asked.heads))
            first = own.stop
            ends = [asked.at_query, asked.at_keys]
            for pair in constants[: asked.biases]:
                ends = [whole + one[:, 0, own] for whole, one in zip(ends, pair, strict=True)]
            for i, head in enumerate(asked.heads):
                parts = (every[:, : asked.writers, own.start + i] for every in (by_query, by_key))
                query, key = (torch.cat([p, e[:, i, None]], dim=1) for p, e in zip(parts, ends, strict=True))
                yield head, query, key
