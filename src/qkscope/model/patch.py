"""Patched runs: put other keys, queries or logits into chosen heads and let the model run on.

An edit touches one query head. With grouped-query attention its keys are shared, so in an edited
layer each query head gets keys of its own; only the edited heads' outputs are computed again,
``softmax([cap(scale · q̃·k̃) + mask, sink]) v``, and every other head keeps the output the model
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput, Head
from qkscope.checking import checked_class
from qkscope.hooks import Hook
from qkscope.model.capture_types import Shape
from qkscope.model.tap import Call
from qkscope.text import grouped


@checked_class
@dataclass(frozen=True, repr=False)
class Edit:
    """Replacement values for one head; build it with `keys`, `queries`, `logits` or `outputs`.

    Positions are columns of the padded batch (`Capture.key_positions`), vectors are in `post_rope`;
    a position of -1 leaves its slot alone.

    Examples
    --------
    >>> Edit.keys("L1H0", torch.tensor([[2, -1]]), torch.zeros(1, 2, 4))
    Edit(keys of L1H0 at 1 places)
    """

    head: Head
    kind: Literal["keys", "queries", "logits", "outputs"]
    row: Int[Tensor, "n"]
    query: Int[Tensor, "n"]
    key: Int[Tensor, "n"]
    value: Float[Tensor, "n *d"]

    def __repr__(self) -> str:
        return f"Edit({self.kind} of {self.head} at {len(self.row)} places)"

    @classmethod
    def keys(
        cls, head: Head | str, positions: Int[Tensor, "b k"], values: Float[Tensor, "b k d"]
    ) -> Edit:
        """Give one head other keys at some positions of each sequence.

        Parameters
        ----------
        head : Head or str
            The query head that reads them; the others of its group keep theirs.
        positions : Int [b, k]
            Columns of the batch.
        values : Float [b, k, d]
            The keys to put there, as the dot product sees them.
        """
        row, slot = (positions >= 0).nonzero(as_tuple=True)
        return cls(
            Head.parse(head),
            "keys",
            row,
            torch.zeros_like(row),
            positions[row, slot],
            values[row, slot],
        )

    @classmethod
    def queries(
        cls, head: Head | str, positions: Int[Tensor, "b"], values: Float[Tensor, "b d"]
    ) -> Edit:
        """Give one head another query at one position of each sequence.

        Parameters
        ----------
        head : Head or str
            The head.
        positions : Int [b]
            A column of the batch for each sequence.
        values : Float [b, d]
            The queries to put there, as the dot product sees them.
        """
        (row,) = (positions >= 0).nonzero(as_tuple=True)
        return cls(
            Head.parse(head), "queries", row, positions[row], torch.zeros_like(row), values[row]
        )

    @classmethod
    def logits(
        cls,
        head: Head | str,
        queries: Int[Tensor, "b"],
        positions: Int[Tensor, "b k"],
        values: Float[Tensor, "b k"],
    ) -> Edit:
        """Set attention logits, as the softmax sees them, of one query of each sequence; hidden
        keys stay hidden.

        Parameters
        ----------
        head : Head or str
            The head.
        queries : Int [b]
            The column of the query in each sequence.
        positions : Int [b, k]
            Columns of the keys.
        values : Float [b, k]
            The logits to put there; ``-inf`` hides a key.
        """
        row, slot = ((positions >= 0) & (queries[:, None] >= 0)).nonzero(as_tuple=True)
        return cls(
            Head.parse(head), "logits", row, queries[row], positions[row, slot], values[row, slot]
        )

    @classmethod
    def outputs(cls, head: Head | str, rows: Bool[Tensor, "b"], value: Float[Tensor, "e"]) -> Edit:
        """Set a head's output to one vector at every token of some sequences, for all later layers.

        Parameters
        ----------
        head : Head or str
            The head.
        rows : Bool [b]
            The sequences.
        value : Float [e]
            What it puts out, before W_O.
        """
        (row,) = rows.nonzero(as_tuple=True)
        zero = torch.zeros_like(row)
        return cls(Head.parse(head), "outputs", row, zero, zero, value.expand(len(row), -1))


class Patch:
    """A visitor of the tap that applies edits, and hooks to what the model computes."""

    def __init__(self, edits: Sequence[Edit | Hook], shape: Shape) -> None:
        self.by_layer = grouped(edits, lambda edit: edit.head.layer)
        for edit in edits:
            shape.check(edit.head)
            if isinstance(edit, Hook) and edit.space != "post_rope":
                raise BadInput(
                    f"a patched run writes post_rope {edit.kind}, but {edit!r} is of {edit.space}."
                )

    @property
    def own_keys(self) -> frozenset[int]:
        """Layers whose query heads get keys of their own."""
        return frozenset(
            layer
            for layer, edits in self.by_layer.items()
            if any(edit.kind == "keys" for edit in edits)
        )

    def visit(self, call: Call) -> None:
        """Apply this layer's edits to one attention call."""
        edits = self.by_layer.get(call.layer, ())
        kinds = {edit.kind for edit in edits}
        if "keys" in kinds:  # a copy either way: the model (or its cache) still holds the original
            call.k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
        if "queries" in kinds:
            call.q = call.q.clone()
        past = (
            call.k.shape[2] - call.q.shape[2]
        )  # with a cache only the newest queries are computed
        for edit in sorted(
            edits, key=lambda edit: edit.kind == "logits"
        ):  # which are what q and k do not give
            if edit.kind != "outputs":
                call.redo.add(edit.head.index)
            if isinstance(edit, Edit):
                _apply(edit, call, past)
            elif edit.kind == "keys" or not (
                past and edit.tokens
            ):  # queries that are named have passed
                vectors = (call.k if edit.kind == "keys" else call.q)[:, edit.head.index]
                vectors.copy_(edit.edited(vectors))


def _apply(edit: Edit, call: Call, past: int) -> None:
    batch = len(call.q)
    index = edit.head.index
    row = edit.row.to(call.q.device)
    query = edit.query.to(call.q.device)
    key = edit.key.to(call.q.device)
    value = edit.value.to(call.q.device)
    if edit.kind == "outputs" and len(row):
        rows = torch.zeros(batch, dtype=torch.bool, device=row.device).index_fill(0, row, True)
        before = call.outputs.get(index, lambda z: z)  # of other sequences
        call.outputs[index] = lambda z: torch.where(
            rows[:, None, None], value[:1, None].to(z), before(z)
        )
    elif edit.kind == "keys":
        call.k[row, index, key] = value.to(call.k.dtype)
    elif edit.kind != "outputs":
        row, query, key, value = (x[query >= past] for x in (row, query - past, key, value))
        if edit.kind == "queries":
            call.q[row, index, query] = value.to(call.q.dtype)
        else:
            k = call.k[row, index // (call.q.shape[1] // call.k.shape[1]), key].float()
            computed = call.cap(call.scale * (call.q[row, index, query].float() * k).sum(-1))
            mask = call.own_mask(index)
            hidden = mask[row, query, key] == -torch.inf
            mask[row, query, key] = (value.float() - computed).masked_fill(hidden, -torch.inf)
