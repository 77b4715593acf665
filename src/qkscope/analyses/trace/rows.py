"""A batch of prompts as rows of one head: query and named keys split among writers, and their attention rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.prompts import cluster_of
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import check_visible
from qkscope.capture.pick import Capture
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.run import Parts, Run, Side, named
from qkscope.maths.writers import EdgeRows, WriterSplit, relative_weights
from qkscope.tasks.task import ANSWER, ASKED, Unit

SIDES: tuple[Side, Side] = ("query", "key")
ATTENDED = 0.05
"""A key with less attention than this is said to be unattended before anything is traced to it."""


@dataclass(frozen=True)
class HeadRows:
    """One head on one batch.

    Attributes
    ----------
    run, head : who reads what.
    signs : +1 right keys, −1 other keys, 0 none.
    pieces : what entered the head's layer, split among writers.
    projector : put between query and key, to look inside a feature; none by default.
    """

    run: Run
    head: Head
    signs: Int[Tensor, "n k"]
    pieces: list[Parts]
    projector: Float[Tensor, "d d"] | None = None

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        return float(self.run.calls[self.head.layer].scale)

    @cached_property
    def parts(self) -> dict[Side, Float[Tensor, "n c p d"]]:
        """By side, queries and named keys split among writers, as the dot product sees them."""
        return {side: self.run.read(self.head, side, self.pieces) for side in SIDES}

    def split(self) -> WriterSplit:
        """The relative logit, ready to be split."""
        q, k = (self.parts[side] for side in SIDES)
        return WriterSplit(q[:, :, 0], k, relative_weights(self.signs), self.scale, self.projector)

    def total(self) -> Float[Tensor, " n"]:
        """The relative logit itself, from the model's own vectors."""
        return true_logit(self.run, self.head, relative_weights(self.signs), self.projector)

    def live(self, x: Float[Tensor, "x n p d_model"], side: Side) -> Float[Tensor, "x n"]:
        """The relative logit with other streams at the places of a side, norms running; the other side is held."""
        made: dict[Side, Tensor] = {side: self.run.live(self.head, side, x)}
        return true_logit(self.run, self.head, relative_weights(self.signs), self.projector, made)

    def edges(self, instead: dict[Side, Float[Tensor, "*n c p d_model"]]) -> EdgeRows:
        """Rows in which what writers left in the stream can be replaced by this, norms frozen; biases stay."""
        away = {}
        for side in SIDES:
            given = [Parts(["instead"], instead[side].expand_as(self.stream(side)))]
            away[side] = self.parts[side] - self.run.read(self.head, side, given, self.run.at(side))
            away[side][:, -1] = 0
        plain = edge_rows(self.run.captured, self.head, self.run.columns[:, 1:], self.signs)
        return replace(plain, dq=away["query"][:, :, 0], dk=away["key"], projector=self.projector)

    def first(self) -> Int[Tensor, " n"]:
        """The column of each prompt's first token."""
        return self.run.captured.key_mask.int().argmax(1)  # padding stands before it, or behind the prompt

    def stream(self, side: Side) -> Float[Tensor, "n c p d_model"]:
        """What each writer but the biases left at the places of a side, in the residual stream."""
        return named(self.pieces)[:, :, self.run.at(side)]

    def entered(self, side: Side) -> Float[Tensor, "n p d_model"]:
        """The whole of it: what entered the head's layer."""
        return self.run.entered[self.head.layer][:, self.run.at(side)]


def true_logit(
    run: Run,
    head: Head,
    weights: Float[Tensor, "n k"],
    projector: Float[Tensor, "d d"] | None = None,
    made: Mapping[Side, Float[Tensor, "*x n p d"]] | None = None,
) -> Float[Tensor, "*x n"]:
    """A head's relative logits, from the model's own vectors, or with those of a side made otherwise."""
    q, k = (own if (own := (made or {}).get(side)) is not None else run.true(head, side) for side in SIDES)
    q = q if projector is None else q @ projector.to(q)
    return torch.einsum("...nd,...nkd,nk->...n", q[..., 0, :], k, weights) * float(run.calls[head.layer].scale)


def sum_errors(total: Float[Tensor, " n"], *sides: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    """How far the parts of each side are from summing to the logit, at most, as a share of the largest of them."""
    missed = torch.stack([(values.sum(1) - total).abs() for values in sides]).amax(0)
    return missed / torch.stack([values.abs().amax(1) for values in sides]).amax(0).clamp_min(1e-30)


def edge_rows(captured: Capture, head: Head, named: Int[Tensor, "n k"], signs: Int[Tensor, "n k"]) -> EdgeRows:
    """A head's attention rows over all tokens, with some of them named; no part of them can be replaced yet."""
    rows = captured.rows().of_head(captured.heads.index(head))
    first = rows.present().int().argmax(1)  # padding stands before it, or behind the prompt
    nothing = rows.q[:, :0]
    return EdgeRows(rows, named, signs, first, nothing, nothing[:, :, None].expand(-1, -1, named.shape[1], -1))


def words_of(units: Sequence[Unit]) -> list[str]:
    """What prompts share that ask alike: the word each unit asks for, or its cluster where none is marked."""
    asked = [unit[0].roles.get(ASKED) for unit in units]
    if any(span is None for span in asked):
        return [f"prompt {cluster_of(unit, i)}" for i, unit in enumerate(units)]
    return [unit[0].piece(span) for unit, span in zip(units, asked, strict=True) if span is not None]


def answer_signs(encoded: Encoding) -> Int[Tensor, "n k"]:
    """+1 for right keys, −1 for others, 0 in slots that are none."""
    if ANSWER not in encoded.labels:
        raise BadInput("a task is traced by its keys labelled answer, and this one has none: label the right ones.")
    return encoded.labels[ANSWER].long().masked_fill(~encoded.places.key_mask, 0)


def task_batch(
    reader: Reader, units: Sequence[Unit], indices: Sequence[int], chat: bool, layers: Sequence[int] = ()
) -> tuple[list[int], Int[Tensor, "n k"], Run]:
    """The prompts of some units through the model, and whose they are; what entered ``layers`` is kept, too."""
    encoded = reader.scope.encode([example for i in indices for example in units[i]], chat=chat)
    signs = answer_signs(encoded)
    run = reader.record(encoded.inputs, encoded.places, layers=layers)
    named = run.captured.bias.gather(-1, run.columns[:, None, 1:].expand(-1, len(reader.heads), -1))
    check_visible(encoded, reader.heads, named)
    return units_of(encoded, units, indices), signs, run


def units_of(encoded: Encoding, units: Sequence[Unit], indices: Sequence[int]) -> list[int]:
    """The number of each row's unit."""
    of_example = [i for i in indices for _ in units[i]]
    return [of_example[int(e)] for e in encoded.example]


def task_rows(
    reader: Reader, units: Sequence[Unit], indices: Sequence[int], chat: bool, projectors: Mapping[Head, Tensor]
) -> tuple[list[int], list[HeadRows]]:
    """The same as rows of every head, split among writers."""
    numbers, signs, run = task_batch(reader, units, indices, chat)
    return numbers, [
        HeadRows(run, head, signs, pieces, projectors.get(head))
        for layer, pieces in run.streams(max(reader.layers))
        for head in reader.heads
        if head.layer == layer
    ]
