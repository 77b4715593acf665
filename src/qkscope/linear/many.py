"""Relative logits of many heads at once, split among writers.

No part is carried through a head: each head asks with directions in the residual stream, one at its query and one at
every key, and the value of writer c is ``Σ_t x_c(t) · g_t``. So all heads of a model cost little more than its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.heads import BIAS, Head
from qkscope.linear.layer import Kind
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
    heads = run.reader.heads if heads is None else heads
    writers = len(run.reader.writers(max(head.layer for head in heads)))
    bytes_of_row = 4 * (writers + len(heads)) * run.columns.shape[1] * run.entered[0].shape[-1]
    step = max(_ROOM * run.reader.together // bytes_of_row, 1)
    starts = range(0, len(run.row), step)
    every = [_values(run.rows(slice(i, i + step)), heads, weights[i : i + step], writers) for i in starts]
    for parts in zip(*every, strict=True):
        yield parts[0][0], torch.cat([query for _, query, _ in parts]), torch.cat([key for _, _, key in parts])


def _values(run: Run, heads: Sequence[Head], weights: Tensor, writers: int) -> Iterator[Values]:
    """A few layers ask together, as long as writers' parts stay as they are: a norm of the whole stream changes all."""
    by_layer, columns = dict[int, list[Head]](), {head: i for i, head in enumerate(heads)}
    for head in heads:
        by_layer.setdefault(head.layer, []).append(head)
    parts = run.entered[0].new_empty(len(run.row), writers, *run.entered[0].shape[1:])
    asking: list[tuple[list[Head], int, Tensor | None]] = []  # heads, writers before them, the sum of biases there
    taken, filled, bias = list[Parts](), 0, None

    def answered() -> Iterator[Values]:
        every, first = [head for heads, *_ in asking for head in heads], 0
        own_weights = weights[:, run.reader.index([columns[head] for head in every])]
        sides = [
            (slots, directions, parts[:, :filled, slots].flatten(2) @ directions.flatten(2).mT, said)
            for slots, directions, said in _directions(run, every, own_weights)
        ]
        for heads, before, bias in asking:
            own, given = slice(first, first + len(heads)), []
            for slots, directions, values, said in sides:
                constants = said[:, own]
                if bias is not None:
                    constants = constants + torch.einsum("nhpd,npd->nh", directions[:, own], bias[:, slots])
                given.append(torch.cat([values[:, :before, own].mT, constants[..., None]], dim=-1))
            yield heads, given[0], given[1]
            first = own.stop

    for layer, pieces in run.streams(max(by_layer)):
        changed = bool(taken) and pieces[0] is not taken[0]
        if asking and (changed or len(asking) == run.reader.together):
            yield from answered()
            asking.clear()
        if changed:
            taken, filled, bias = [], 0, None
        for piece in pieces[len(taken) :]:
            if piece.writers == [BIAS]:
                bias = piece.values[:, 0] if bias is None else bias + piece.values[:, 0]
            else:
                parts[:, filled : filled + len(piece.writers)] = piece.values
                filled += len(piece.writers)
        taken = pieces
        if layer in by_layer:
            asking.append((by_layer[layer], filled, bias))
    yield from answered()


def _directions(
    run: Run, heads: Sequence[Head], weights: Float[Tensor, "n h k"]
) -> Iterator[tuple[slice, Float[Tensor, "n h p d"], Float[Tensor, "n h"]]]:
    """Slots of the query, then of the keys: what every head asks there, and what constants say to it."""
    at, to = run.at("query"), run.at("key")
    w = weights * torch.tensor([run.calls[head.layer].scale for head in heads]).to(weights)[:, None]
    q = run.vectors([(head.layer, head.index) for head in heads], "q", at)
    k = run.vectors([(head.layer, run.kv(head)) for head in heads], "k", to)
    asked: list[tuple[slice, Kind, Tensor]] = [(at, "q", w[:, :, None] @ k), (to, "k", q * w[..., None])]
    for slots, kind, along in asked:
        directions, said = run.pull(heads, kind, slots, along)
        yield slots, directions, said.sum(-1)
