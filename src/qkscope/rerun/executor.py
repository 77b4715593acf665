"""One way to run a prompt again with changes: each tuple of changes takes the shortest road.

- Other words, and what one token's attention is: only the tokens behind the change run
  (`rerun_tokens`).
- What a head or an MLP puts out, and a key hidden from every query: whole prompts run, from the
  first layer that a change touches (`rerun_layers`).
- A longer prompt, a rule in a head's place, a model inside a ``with`` block: one whole prompt at a
  time (`reference`).

On every road attention and logits are those of the reference (`tests/rerun`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from qkscope import Scope
from qkscope.changes import Change, Hidden, Inserted, Pattern, Row, Words
from qkscope.rerun.reads import Read, Reruns
from qkscope.rerun.reference import PlainRun, run_plainly
from qkscope.rerun.rerun_layers import rerun_layers
from qkscope.rerun.rerun_tokens import Again, rerun_tokens

Road = Callable[..., Reruns]
"""Takes the unchanged prompt, changes, what is read, the last token, and whether logits are."""


def rerun(
    base: Again,
    changes: Sequence[Sequence[Change]],
    reads: Sequence[Read] = (),
    *,
    end: int | None = None,
    logits: bool = False,
) -> Reruns:
    """Run a prompt once more for each tuple of changes, which hold together.

    Parameters
    ----------
    base : the unchanged prompt.
    changes : what is different in each run.
    reads : rows of attention that are read.
    end : the last token that runs, and whose next token is read; the prompt's last, if not given.
    logits : whether next-token logits are wanted.

    Examples
    --------
    >>> from qkscope.heads import Head
    >>> scope = Scope.load("nano:mixed")
    >>> base = Again.of(scope, scope.encode(["hat: O jam: Z jam:"]).inputs["input_ids"][0])
    >>> rerun(base, [[Hidden(Head(1, 0), 6, 8)], [Words((4,), (9,))]], [(Head(1, 0), 8)]).attention.shape
    torch.Size([2, 1, 9])
    """
    last = len(base.ids) - 1 if end is None else end
    attention = dict[int, Tensor]()
    next_tokens = dict[int, Tensor]()
    roads = [_road(base.scope, own) for own in changes]
    for road in dict.fromkeys(roads):
        numbers = [number for number, other in enumerate(roads) if other is road]
        shown = road(base, [changes[number] for number in numbers], reads, last, logits)
        for step, number in enumerate(numbers):
            attention[number] = shown.attention[step]
            if shown.logits is not None:
                next_tokens[number] = shown.logits[step]
    return Reruns(_in_order(attention), _in_order(next_tokens) if logits else None)


def _in_order(rows: Mapping[int, Tensor]) -> Tensor:
    """Stack rows by their numbers."""
    return torch.stack([rows[number] for number in range(len(rows))])


def _road(scope: Scope, changes: Sequence[Change]) -> Road:
    """The shortest way to run a prompt with some changes."""
    if all(_is_behind(change) for change in changes):
        return rerun_tokens
    needs_whole_prompts = any(isinstance(change, Inserted | Pattern) for change in changes)
    if scope.is_changed or needs_whole_prompts:
        return _rerun_plainly
    return rerun_layers


def _is_behind(change: Change) -> bool:
    """Whether a change touches nothing but what stands behind it."""
    if isinstance(change, Hidden):
        return change.query is not None
    return isinstance(change, Words | Row)


def _rerun_plainly(
    base: Again,
    changes: Sequence[Sequence[Change]],
    reads: Sequence[Read],
    end: int,
    logits: bool,
) -> Reruns:
    """Run whole prompts, one at a time."""
    plain = list[PlainRun]()
    for own in changes:
        grows = any(isinstance(change, Inserted) for change in own)
        with nullcontext() if grows else base.standing():
            plain.append(run_plainly(base.scope, base.ids, own))
    width = len(plain[0].logits)
    attention = torch.zeros(len(plain), len(reads), width)
    for number, run in enumerate(plain):
        for read, (head, query) in enumerate(reads):
            of_layer = run.attention[head.layer]
            attention[number, read] = of_layer[head.index, query]
    if not logits:
        return Reruns(attention, None)
    return Reruns(attention, torch.stack([run.logits[end] for run in plain]))
