"""Relative logits of many heads at once, split among writers.

No part is carried through a head: each head asks with directions in the residual stream, ``g_t = w_t scale σ_t s W_Kᵀ
R_tᵀ q`` at its keys and ``W_Qᵀ R_pᵀ Σ_t w_t k_t`` at its query, and the value of writer c is ``Σ_t x_c(t) · g_t``. So
all heads of a model cost little more than its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from qkscope.capture.held import norm_scalar
from qkscope.capture.writers import BIAS, Parts, Reader, Recorded, Side
from qkscope.heads import Head

_SIDES: tuple[Side, Side] = ("query", "key")
_ROOM = {"cpu": 2**27, "gpu": 2**29}  # bytes of writers at once, and on a GPU of weights
_LAYERS = 4  # whose heads are answered together on a CPU; a GPU takes as long for a few as for many


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
    step = max(_ROOM["cpu" if found.row.device.type == "cpu" else "gpu"] // bytes_of_row, 1)
    if step >= len(found.row):
        yield from _marginals(reader, found, weights)
        return
    gathered: dict[Head, list[tuple[Tensor, Tensor]]] = {}
    for start in range(0, len(found.row), step):
        some = found.rows(slice(start, start + step))
        for head, query, key in _marginals(reader, some, weights[start : start + step]):
            gathered.setdefault(head, []).append((query, key))
    for head, parts in gathered.items():
        yield head, torch.cat([query for query, _ in parts]), torch.cat([key for _, key in parts])


def _marginals(reader: Reader, found: Recorded, weights: Tensor) -> Iterator[tuple[Head, Tensor, Tensor]]:
    """The same of a few rows, a few layers at a time: products of many heads at once are what is quick."""
    table, asking = _Table(found, len(reader.writers(max(reader.layers)))), _Asking(reader, found, weights)
    for layer, pieces in reader.streams(found, max(reader.layers)):
        own = [head for head in reader.heads if head.layer == layer]
        held = bool(own) and reader.holds(layer)
        if held or not table.goes_on(pieces) or asking.full(layer):
            yield from table.answer(asking)
        table.take(pieces)
        if held:
            for head in own:
                yield head, *_pushed(reader, found, head, weights[:, reader.columns[head]], pieces)
        elif own:
            asking.waiting.append(_Layer(layer, own, table.filled, len(table.biases)))
    yield from table.answer(asking)


def _pushed(
    reader: Reader, found: Recorded, head: Head, weights: Float[Tensor, "n k"], pieces: Sequence[Parts]
) -> tuple[Tensor, Tensor]:
    """The same of one head without directions to ask in: its parts themselves."""
    q, k = (reader.true(found, head, side) for side in _SIDES)
    q_parts, k_parts = (reader.read(found, head, side, pieces) for side in _SIDES)
    weights = weights * found.captured.scale[reader.columns[head]].to(weights)
    by_query = torch.einsum("ncd,nkd,nk->nc", q_parts[:, :, 0], k, weights)
    return by_query, torch.einsum("nd,nckd,nk->nc", q[:, 0], k_parts, weights)


class _Layer(NamedTuple):
    """A layer whose heads ask, and how many writers and constants there are before it."""

    layer: int
    heads: list[Head]
    writers: int
    biases: int


class _Asked(NamedTuple):
    """What heads ask of the writers: a direction at the query, one at every slot, and what biases give."""

    asking: Float[Tensor, "n h d"]
    meeting: Float[Tensor, "n h p*d"]
    at_query: Float[Tensor, "n h"]
    at_keys: Float[Tensor, "n h"]


class _Asking:
    """Layers whose heads wait to ask together."""

    def __init__(self, reader: Reader, found: Recorded, weights: Float[Tensor, "n h k"]) -> None:
        self.reader, self.found, self.weights, self.waiting = reader, found, weights, list[_Layer]()

    def full(self, layer: int) -> bool:
        """Whether those that wait must ask before this layer waits with them."""
        if not self.waiting:
            return False
        first = self.waiting[0].layer
        at_once = _LAYERS
        if self.found.row.device.type != "cpu":
            at_once = max(_ROOM["gpu"] // self.reader.weights(first).W_Q.nbytes, 1)
        return len(self.waiting) >= at_once or self._kind(first) != self._kind(layer)

    def _kind(self, layer: int) -> tuple[Any, ...]:
        """What layers have in common that ask together: their rotation, and whether their input is normalised."""
        rotary, call = self.found.rotary.get(layer), self.reader.calls[layer]
        turn = None if rotary is None else (rotary.function, id(rotary.cos), rotary.q.shape[-1])
        shape = self.reader.scope.facts.layers[layer]
        return turn, shape.offset, shape.d_head, bool(call.qk_norms), _norm_kind(call.input_norm)

    def ask(self) -> _Asked:
        """Directions in the residual stream, at the query and at keys."""
        reader, found, layers = self.reader, self.found, self.waiting
        heads = [head for layer in layers for head in layer.heads]
        at = reader.index([reader.columns[head] for head in heads])
        scale, weights = found.captured.scale[at].to(self.weights), self.weights[:, at]
        q, k = true_vectors(reader, found, heads)
        summed = torch.einsum("nhk,nhkd->nhd", weights, k) * scale[:, None]
        meeting = q[:, :, None] * (weights * scale[:, None])[..., None]
        sigma = self._scalars()[:, reader.index([i for i, layer in enumerate(layers) for _ in layer.heads])]
        sides: tuple[tuple[Tensor, Tensor, Side], ...] = (
            (summed[:, :, None], q[:, :, None], "query"),
            (meeting, k, "key"),
        )
        directions, constants = [], []
        for vectors, true, side in sides:
            vectors = reader.turn(found, layers[0].layer, vectors, side, back=True)
            W, c = self._folded(side)
            constant = torch.einsum("nhpd,hd->nh", vectors, c)
            if reader.calls[layers[0].layer].qk_norms:
                vectors = vectors * self._held_scalars(side, W, c, true)[..., None]
            constants.append(constant + torch.einsum("nhpd,hd->nh", vectors, W[..., -1]))
            vectors = vectors * sigma[:, :, found.at(side), None]
            directions.append(torch.einsum("nhpd,hde->nhpe", vectors, W[..., :-1]))
        asking, meeting = directions
        return _Asked(asking[:, :, 0], pad(meeting, (0, 0, 1, 0)).flatten(2), *constants)

    def _folded(self, side: Side) -> tuple[Float[Tensor, "h d_head d_model+1"], Float[Tensor, "h d_head"]]:
        """`Reader.matrix` of every head that asks."""
        every = [self.reader.weights(layer.layer) for layer in self.waiting]
        if side == "query":
            return torch.cat([own.W_Q for own in every]), torch.cat([own.c_Q for own in every])
        kv = [self.reader.kv_of_head[self.reader.columns[head]] for layer in self.waiting for head in layer.heads]
        read = {group: row for row, group in enumerate(dict.fromkeys(kv))}  # rows stand in order of first use
        at = self.reader.index([read[group] for group in kv])
        return torch.cat([own.W_K for own in every])[at], torch.cat([own.c_K for own in every])[at]

    def _scalars(self) -> Float[Tensor, "n l p"]:
        """What the norms of these layers multiply each place by, as `Reader.scalar` has it; they are of one kind."""
        entered = torch.stack([self.found.entered[layer.layer] for layer in self.waiting], dim=1)
        norm = self.reader.calls[self.waiting[0].layer].input_norm
        if norm is None:
            return torch.ones_like(entered[..., 0])
        return norm_scalar(norm, self.reader.taken_apart(norm, entered[:, 0]), entered)

    def _held_scalars(self, side: Side, W: Tensor, c: Tensor, true: Tensor) -> Float[Tensor, "n h p"]:
        """What QK-norm multiplies each head's vectors by, as `Reader.qk_scalar` has it."""
        reader, found, first, made = self.reader, self.found, 0, []
        at = found.at(side)
        for layer in self.waiting:
            own = slice(first, first + len(layer.heads))
            first = own.stop
            x = found.entered[layer.layer][:, at] * reader.scalar(found, layer.layer)[:, at, None]
            linear = torch.einsum("npe,hde->nhpd", x, W[own, :, :-1]) + W[own, None, :, -1]
            both = torch.cat([linear, c[own, None].expand_as(linear)], dim=1)
            part, offset = reader.turn(found, layer.layer, both, side).chunk(2, dim=1)
            made.append(((true[:, own] - offset) * part).sum(-1) / part.square().sum(-1).clamp_min(1e-30))
        return torch.cat(made, dim=1)


def _norm_kind(norm: nn.Module | None) -> Any:
    """What two norms have in common that differ in their gain and bias alone."""
    if norm is None:
        return None
    own = {name: value for name, value in vars(norm).items() if not name.startswith("_")}
    plain = all(isinstance(value, int | float | str | tuple | None) for value in own.values())
    if not plain or any(True for _ in norm.buffers()):
        return norm
    return type(norm), tuple(sorted(own.items()))


def true_vectors(reader: Reader, found: Recorded, heads: Sequence[Head]) -> tuple[Tensor, Tensor]:
    """Queries and named keys of some heads as the dot product sees them: `Reader.true` of all at once."""
    some, columns = slice(found.first, found.first + len(found.row)), [reader.columns[head] for head in heads]
    kv = [reader.kv_of_head[column] for column in columns]
    keys = found.captured.k[some, min(kv) : max(kv) + 1]
    keys = keys.gather(2, found.columns[:, None, 1:, None].expand(-1, keys.shape[1], -1, keys.shape[-1]))
    return found.captured.q[some][:, reader.index(columns)], keys[:, reader.index([one - min(kv) for one in kv])]


class _Table:
    """Writers of a few rows side by side, as a product with many directions wants them, and one slot more."""

    def __init__(self, found: Recorded, writers: int) -> None:
        rows, places = found.columns.shape
        self.values = found.entered[0].new_zeros(rows, writers, places, found.entered[0].shape[-1])
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

    def answer(self, asking: _Asking) -> Iterator[tuple[Head, Tensor, Tensor]]:
        """What the writers' parts are along the directions asked for; each head is told of those before it."""
        layers, index = asking.waiting, asking.reader.index
        if not layers:
            return
        asked = asking.ask()
        asking.waiting = []
        values = self.values[:, : max(layer.writers for layer in layers) + 1]
        by_query = values[:, :, 0] @ asked.asking.mT  # n c h
        if values.device.type == "cpu":
            by_key = torch.stack([one.flatten(1) @ own.mT for one, own in zip(values, asked.meeting, strict=True)])
        else:
            by_key = values.flatten(2) @ asked.meeting.mT
        every = [(layer, head) for layer in layers for head in layer.heads]
        ends = [asked.at_query, asked.at_keys]
        if self.biases and layers[-1].biases:
            told = torch.cat(self.biases[: layers[-1].biases], dim=1)  # n b p d
            before = torch.arange(told.shape[1], device=told.device)[:, None] < index([one.biases for one, _ in every])
            said = told[:, :, 0] @ asked.asking.mT, told.flatten(2) @ asked.meeting.mT
            ends = [end + (one * before).sum(1) for end, one in zip(ends, said, strict=True)]
        last, columns = index([layer.writers for layer, _ in every]), index(list(range(len(every))))
        for whole, end in zip((by_query, by_key), ends, strict=True):
            whole[:, last, columns] = end  # what no token decides stands behind a head's writers
        for i, (layer, head) in enumerate(every):
            yield head, by_query[:, : layer.writers + 1, i], by_key[:, : layer.writers + 1, i]
