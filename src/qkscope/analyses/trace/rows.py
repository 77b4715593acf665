"""A batch of prompts as rows of one head: query and named keys split among writers, and their attention rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.prompts import cluster_of
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import check_visible
from qkscope.capture.pick import Capture
from qkscope.capture.writers import BIAS, EMBEDDING, Parts, Reader, Recorded, Side
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.writers import Address, EdgeRows, WriterSplit, relative_weights
from qkscope.tasks.task import ANSWER, ASKED, Unit

SIDES: tuple[Side, Side] = ("query", "key")
ATTENDED = 0.05
"""A key with less attention than this is said to be unattended before anything is traced to it."""


@dataclass(frozen=True)
class HeadRows:
    """One head on one batch.

    Attributes
    ----------
    reader, found, head : who reads what.
    signs : +1 right keys, −1 other keys, 0 none.
    parts : by side, split among writers, before the rotation.
    """

    reader: Reader
    found: Recorded
    head: Head
    signs: Int[Tensor, "n k"]
    parts: dict[Side, Float[Tensor, "n c p d"]]
    pieces: list[Parts]
    projector: Float[Tensor, "d d"] | None = None

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        assert self.found.captured is not None
        return float(self.found.captured.scale[self.reader.heads.index(self.head)])

    def turned(self, parts: Float[Tensor, "n c p d"], side: Side) -> Float[Tensor, "n c p d"]:
        """Vectors of a side with the rotation of their places put on."""
        return self.reader.turn(self.found, self.head.layer, parts, side)

    def split(self) -> WriterSplit:
        """The relative logit, ready to be split."""
        q, k = (self.turned(self.parts[side], side) for side in SIDES)
        return WriterSplit(q[:, :, 0], k, relative_weights(self.signs), self.scale, self.projector)

    def total(self) -> Float[Tensor, " n"]:
        """The relative logit itself, from the model's own vectors."""
        q, k = (self.reader.true(self.found, self.head, side) for side in SIDES)
        q = q if self.projector is None else q @ self.projector.to(q)
        return torch.einsum("nd,nkd,nk->n", q[:, 0], k, relative_weights(self.signs)) * self.scale

    def edges(self, instead: dict[Side, Float[Tensor, "*n c p d"]]) -> EdgeRows:
        """Rows in which parts can be replaced by these, given before the rotation."""
        assert self.found.captured is not None
        away = {side: self.turned(self.parts[side] - instead[side], side) for side in SIDES}
        plain = edge_rows(self.found.captured, self.head, self.found.columns[:, 1:], self.signs)
        return replace(plain, dq=away["query"][:, :, 0], dk=away["key"], projector=self.projector)

    def first(self) -> Int[Tensor, " n"]:
        """The column of each prompt's first token."""
        assert self.found.captured is not None
        return self.found.captured.key_mask.int().argmax(1)  # padding stands before it, or behind the prompt

    @torch.no_grad()
    def live(self, x: Float[Tensor, "x n p d_model"], side: Side) -> Float[Tensor, "x n p d"]:
        """What the head makes of other streams at the places of a side, its norms recomputed, rotation put on."""
        made = self.reader.vectors(self.head, side, x, self.found)
        return torch.stack([self.turned(one[:, None], side)[:, 0] for one in made])

    def stream(self, side: Side) -> Float[Tensor, "n c p d_model"]:
        """What each writer but the biases left at the places of a side, in the residual stream."""
        at = self.found.at(side)
        return torch.cat([piece.values[:, :, at] for piece in self.pieces if piece.writers != [BIAS]], dim=1)


def edge_rows(captured: Capture, head: Head, named: Int[Tensor, "n k"], signs: Int[Tensor, "n k"]) -> EdgeRows:
    """A head's attention rows over all tokens, with some of them named; no part of them can be replaced yet."""
    rows = captured.rows().of_head(captured.heads.index(head))
    assert rows.kv_of_head is not None
    rows = replace(rows, k=rows.k[:, rows.kv_of_head], kv_of_head=None)
    first = rows.present().int().argmax(1)  # padding stands before it, or behind the prompt
    nothing = rows.q[:, :0]
    return EdgeRows(rows, named, signs, first, nothing, nothing[:, :, None].expand(-1, -1, named.shape[1], -1))


def addresses_of(names: Sequence[str]) -> list[Address]:
    """Kind and layer of each writer but the last (the biases); the embedding is of a kind of its own, at -1.

    >>> addresses_of(["embedding", "L0H0", "M0", "L12H3", "bias"])
    [('embedding', -1), ('L', 0), ('M', 0), ('L', 12)]
    """
    return [
        (EMBEDDING, -1) if name == EMBEDDING else (name[0], int(name[1:].split("H")[0].split(".")[0]))
        for name in names[:-1]
    ]


def is_head(writer: str) -> bool:
    """Whether a writer is a head."""
    return writer.startswith("L")


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


def task_rows(
    reader: Reader, units: Sequence[Unit], indices: Sequence[int], chat: bool, projectors: dict[Head, Tensor]
) -> tuple[Encoding, list[HeadRows]]:
    """The prompts of some units through the model, as rows of every head."""
    encoded = reader.scope.encode([example for i in indices for example in units[i]], chat=chat)
    signs = answer_signs(encoded)
    found = reader.record(encoded.inputs, encoded.places)
    assert found.captured is not None
    named = found.captured.bias.gather(-1, found.columns[:, None, 1:].expand(-1, len(reader.heads), -1))
    check_visible(encoded, reader.heads, named)
    made = []
    for layer, pieces in reader.streams(found, max(reader.layers)):
        for head in (head for head in reader.heads if head.layer == layer):
            parts = {side: reader.read(found, head, side, pieces) for side in SIDES}
            made.append(HeadRows(reader, found, head, signs, parts, pieces, projectors.get(head)))
    return encoded, made
