"""Patched runs: put other keys, queries or logits into chosen heads and let the model run on.

An edit touches one query head. With grouped-query attention its keys are shared, so in an edited
layer each query head gets keys of its own; only the edited heads' outputs are computed again,
``softmax([cap(scale · q̃·k̃) + mask, sink]) v``, and every other head keeps the output the model
computed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput
from qkscope.checking import checked_class
from qkscope.heads import Head
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
    row: Int[Tensor, " n"]
    query: Int[Tensor, " n"]
    key: Int[Tensor, " n"]
    value: Float[Tensor, " n *d"]

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
        no_query = torch.zeros_like(row)
        place = positions[row, slot]
        return cls(Head.parse(head), "keys", row, no_query, place, values[row, slot])

    @classmethod
    def queries(
        cls, head: Head | str, positions: Int[Tensor, " b"], values: Float[Tensor, "b d"]
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
        no_key = torch.zeros_like(row)
        return cls(Head.parse(head), "queries", row, positions[row], no_key, values[row])

    @classmethod
    def logits(
        cls,
        head: Head | str,
        queries: Int[Tensor, " b"],
        positions: Int[Tensor, "b k"],
        values: Float[Tensor, "b k"],
    ) -> Edit:
        """Set attention logits, as the softmax sees them, of one query of each sequence.

        Hidden keys stay hidden.

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
        named = (positions >= 0) & (queries[:, None] >= 0)
        row, slot = named.nonzero(as_tuple=True)
        place = positions[row, slot]
        return cls(Head.parse(head), "logits", row, queries[row], place, values[row, slot])

    @classmethod
    def outputs(
        cls, head: Head | str, rows: Bool[Tensor, " b"], value: Float[Tensor, " e"]
    ) -> Edit:
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
        layers = set[int]()
        for layer, edits in self.by_layer.items():
            if any(edit.kind == "keys" for edit in edits):
                layers.add(layer)
        return frozenset(layers)

    def visit(self, call: Call) -> None:
        """Apply this layer's edits to one attention call."""
        edits = self.by_layer.get(call.layer, [])
        _copy_what_is_edited(call, {edit.kind for edit in edits})
        # logits go last: an edited one is counted from what q and k give by then
        for edit in sorted(edits, key=lambda edit: edit.kind == "logits"):
            if edit.kind != "outputs":
                call.redo.add(edit.head.index)
            if isinstance(edit, Hook):
                _apply_hook(edit, call)
            elif edit.kind == "outputs":
                _set_output(edit, call)
            elif edit.kind == "keys":
                _set_keys(edit, call)
            elif edit.kind == "queries":
                _set_queries(edit, call)
            else:
                _set_logits(edit, call)


def _copy_what_is_edited(call: Call, kinds: Collection[str]) -> None:
    """Give a call keys (one for each query head) and queries that can be written into.

    The model, or its cache, still holds the originals.
    """
    if "keys" in kinds:
        group = call.q.shape[1] // call.k.shape[1]
        call.k = call.k.repeat_interleave(group, dim=1)  # a copy, even of one
    if "queries" in kinds:
        call.q = call.q.clone()


def _past(call: Call) -> int:
    """How many tokens precede the queries: with a cache only the newest ones are computed."""
    return call.k.shape[2] - call.q.shape[2]


def _apply_hook(hook: Hook, call: Call) -> None:
    """Edit the keys or queries of a hook's head, at all tokens."""
    if hook.kind == "keys":
        vectors = call.k[:, hook.head.index]
    elif _past(call) and hook.tokens:  # the queries that are named have passed
        return
    else:
        vectors = call.q[:, hook.head.index]
    vectors.copy_(hook.edited(vectors))


def _set_output(edit: Edit, call: Call) -> None:
    """Have a head put out one vector in some sequences, and what it did before in the others."""
    if not len(edit.row):
        return
    device = call.q.device
    edited = torch.zeros(len(call.q), dtype=torch.bool, device=device)
    edited[edit.row.to(device)] = True
    vector = edit.value[:1, None].to(device)
    before = call.outputs.get(edit.head.index)

    def output(z: Float[Tensor, "b s e"]) -> Float[Tensor, "b s e"]:
        others = z if before is None else before(z)
        return torch.where(edited[:, None, None], vector.to(z), others)

    call.outputs[edit.head.index] = output


def _set_keys(edit: Edit, call: Call) -> None:
    device = call.k.device
    call.k[edit.row.to(device), edit.head.index, edit.key.to(device)] = edit.value.to(call.k)


def _set_queries(edit: Edit, call: Call) -> None:
    device = call.q.device
    query = edit.query.to(device) - _past(call)
    here = query >= 0
    row = edit.row.to(device)
    call.q[row[here], edit.head.index, query[here]] = edit.value.to(call.q)[here]


def _set_logits(edit: Edit, call: Call) -> None:
    """Write the difference to the computed logits into the head's mask; hidden keys stay hidden."""
    device = call.q.device
    index = edit.head.index
    query = edit.query.to(device) - _past(call)
    here = query >= 0
    query = query[here]
    row = edit.row.to(device)[here]
    key = edit.key.to(device)[here]
    group = call.q.shape[1] // call.k.shape[1]
    products = call.q[row, index, query].float() * call.k[row, index // group, key].float()
    computed = call.cap(call.scale * products.sum(-1))
    mask = call.own_mask(index)
    hidden = mask[row, query, key] == -torch.inf
    difference = edit.value.to(device)[here].float() - computed
    mask[row, query, key] = difference.masked_fill(hidden, -torch.inf)
