"""The plain executor: one whole prompt with its changes, nothing shared, nothing skipped.

It is slow and obvious. Every fast path of this room is tested equal to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope import Scope
from qkscope.changes import Change, Hidden, Inserted, Output, Pattern, Row, Words
from qkscope.heads import Writer
from qkscope.model.block_tree import read_blocks
from qkscope.model.capture_types import Places
from qkscope.model.prefix import prompt_of
from qkscope.model.tap import Call, cleared


@dataclass(frozen=True)
class PlainRun:
    """What one run shows.

    Attributes
    ----------
    attention : by layer, the patterns of all heads.
    logits : of the next token, after each token.
    """

    attention: dict[int, Float[Tensor, "h t t"]]
    logits: Float[Tensor, "t v"]


@torch.no_grad()
def run_plainly(scope: Scope, ids: Int[Tensor, " t"], changes: Sequence[Change] = ()) -> PlainRun:
    """Run a prompt as a whole, with changes.

    Parameters
    ----------
    scope : the model.
    ids : tokens of the prompt.
    changes : all of them hold together.

    Examples
    --------
    >>> from qkscope.heads import Head
    >>> scope = Scope.load("nano:mixed")
    >>> ids = scope.encode(["hat: O jam: Z jam:"]).inputs["input_ids"][0]
    >>> run_plainly(scope, ids, [Hidden(Head(1, 0), key=6)]).attention[1][0, -1, 6]
    tensor(0.)
    """
    for change in changes:
        if isinstance(change, Words | Inserted):
            ids = change.applied(ids)
    attention = dict[int, Tensor]()

    def visit(call: Call) -> None:
        for change in changes:
            if isinstance(change, Row | Hidden) and change.head.layer == call.layer:
                change_mask(call, change)
            if isinstance(change, Output) and change.value is not None:
                _put_head_output(call, change)
        every_head = [*range(call.q.shape[1])]
        attention[call.layer] = call.attention(every_head)[0]

    every = torch.arange(len(ids), device=scope.device)
    nothing = every[:, None][:, :0]
    read = Places(torch.zeros_like(every), every, nothing, nothing.bool())
    with ExitStack() as blocks:
        for change in changes:
            if isinstance(change, Output):
                blocks.enter_context(_output_set(scope, change))
            if isinstance(change, Pattern):
                blocks.enter_context(scope.replace_head(change.head, change.rule))
        logits = scope.watch(prompt_of(scope, ids[None]), visit, logits_at=read)
    assert logits is not None
    return PlainRun(attention, logits)


def change_mask(call: Call, change: Row | Hidden, prompt: int = 0) -> None:
    """Hide a key of one prompt in a head's mask, or add what its row lacks of the new one."""
    head = change.head.index
    if isinstance(change, Hidden):
        queries = slice(None) if change.query is None else change.query
        call.own_mask(head)[prompt, queries, change.key] = -torch.inf
        return
    logits = call.logits([head])[prompt, 0, change.query]
    is_hidden = logits == -torch.inf
    lacking = (change.logits.to(logits) - logits).masked_fill(is_hidden, 0)
    call.own_mask(head)[prompt, change.query] += lacking


def _put_head_output(call: Call, change: Output) -> None:
    """Let the head of a change put out its value."""
    head = change.writer.head
    if head is not None and head.layer == call.layer:
        value = change.value
        assert value is not None
        call.outputs[head.index] = lambda out: value.to(out).expand_as(out)


def _output_set(scope: Scope, change: Output) -> AbstractContextManager[None]:
    """A writer's mean, or an MLP's value, in force for a ``with`` block."""
    value = change.value
    if value is None:
        return scope.ablate(str(change.writer))
    if change.writer.head is not None:  # put in where it is called
        return nullcontext()
    part = module_of(scope, change.writer)

    def put(_module: nn.Module, _args: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return value.to(out[0]).view_as(out[0]), *out[1:]
        return value.to(out).view_as(out)

    return cleared([part.register_forward_hook(put)])


def module_of(scope: Scope, writer: Writer) -> nn.Module:
    """The module that writes besides the heads of its layer."""
    block = read_blocks(scope.model, scope.facts.layer_of)[writer.layer]
    return block.parts[writer.index[0] if writer.index else 0]
