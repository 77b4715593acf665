"""Writers' parts in one head's query or key: ablated, or restored from another run; the attention
row made again.

A head's vector at a token is made of the stream there, ``x = Σ_c x_c``. Some writers' parts x_c are
put at their mean over the prompt's other tokens (ablate), or at what the same writers left in
another run - the unchanged prompt, another prompt (restore: path patching) - in this head alone.
With norms frozen the vector changes by what these parts give to it; with norms live the head's own
code runs on the other stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput
from qkscope.heads import BIAS, Head, Side
from qkscope.linear.run import KINDS, Parts, Run

_SLOTS = 128  # tokens whose writers are held at once: a long prompt takes no more room

Norms = Literal["frozen", "live"]


def mean_parts(run: Run, layer: int, tokens: Sequence[int]) -> Float[Tensor, "c d_model"]:
    """Each writer's mean part, over some tokens of a prompt, in the stream that enters a layer.

    The biases, which are the same everywhere, are left out.

    Parameters
    ----------
    run : of one prompt, with these tokens among its keys.
    layer : that reads it.
    tokens : their places.
    """
    slots = _slots(run, tokens)
    sums = []
    for start in range(0, len(tokens), _SLOTS):
        some = run.slots(slots[start : start + _SLOTS])
        sums.append(_sum_over_places(some.stream(layer)))
    return torch.stack(sums).sum(0) / len(tokens)


def _sum_over_places(pieces: Sequence[Parts]) -> Float[Tensor, "c d_model"]:
    """One prompt's parts of every writer but the biases, added up over the places."""
    sums = [piece.values[0].sum(1) for piece in pieces if piece.writers != [BIAS]]
    return torch.cat(sums)


def _slots(run: Run, tokens: Sequence[int]) -> list[int]:
    """The slots of the first row's keys that stand at some tokens."""
    columns = run.columns[0].tolist()
    slot_of = {columns[slot]: slot for slot in range(1, len(columns))}  # slot 0 is the query
    return [slot_of[token] for token in tokens]


@torch.no_grad()
def vectors_with(
    run: Run,
    head: Head,
    side: Side,
    token: int,
    instead: Float[Tensor, "c d_model"],
    sets: Sequence[Sequence[str]],
    norms: Norms = "live",
) -> Float[Tensor, "x d"]:
    """A head's query or key at a token with the parts of some writers replaced, set by set.

    Parameters
    ----------
    run : of one prompt, with the token among its keys.
    head : whose vector.
    side, token : which vector, and where.
    instead : of each writer, what its part is replaced by: `mean_parts` of other tokens, or of one
        in another run.
    sets : names of writers that are replaced together.
    norms : frozen, or live.
    """
    names = run.reader.writers(head.layer)[:-1]
    slots = _slots(run, [token])
    chosen = _membership(sets, names, head).to(instead)
    change = instead - mean_parts(run, head.layer, [token])
    if norms == "frozen":
        kind = KINDS[side]
        place = (head.layer, run.index(head, kind))
        true = run.vectors([place], kind, slots)[0, :, 0]
        parts = Parts(names, change[None, :, None])
        read = run.read(head, side, [parts], slots)[0, :-1, 0]  # without the biases
        return true + chosen @ read
    stream = run.hidden([head.layer], slots)[0]
    streams = stream + (chosen @ change)[:, None, None]
    return run.live(head, side, streams, slots)[:, 0, 0]


def _membership(
    sets: Sequence[Sequence[str]], names: Sequence[str], head: Head
) -> Float[Tensor, "x c"]:
    """1 for each writer that is in a set, a row for each set; one that is no writer is refused."""
    numbers = {name: i for i, name in enumerate(names)}
    chosen = torch.zeros(len(sets), len(names))
    for row, members in enumerate(sets):
        for name in members:
            if name not in numbers:
                raise BadInput(
                    f"{name} does not write before {head}: name one of an earlier layer."
                )
            chosen[row, numbers[name]] = 1
    return chosen


def attention_with(
    run: Run,
    head: Head,
    query: int,
    *,
    q: Tensor | None = None,
    keys: Mapping[int, Tensor] | None = None,
) -> Float[Tensor, "x t"]:
    """A head's attention row with another query, or other keys at some tokens: a row for each of x.

    Parameters
    ----------
    run : of one prompt.
    head : the head.
    query : the query token.
    q : queries to put there, Float [x, d].
    keys : by token, keys to put there, Float [x, d].
    """
    keys = keys or {}
    given = list(keys.values())
    if q is not None:
        given.append(q)
    count = max(len(vectors) for vectors in given)
    row = run.row[:1].expand(count)
    queries = torch.full_like(row, query)
    rows = run.calls[head.layer].rows(head.index, row, queries)
    k = rows.k.clone()
    for token, vectors in keys.items():
        k[:, 0, token] = vectors.to(k)
    changed = replace(rows, k=k)
    if q is not None:
        changed = replace(changed, q=q[:, None].to(k))
    return changed.attention()[:, 0]


def restore(
    run: Run,
    source: Run,
    head: str | Head,
    query: int,
    key: int,
    sets: Sequence[Sequence[str]],
    *,
    side: Side = "key",
    at: int | None = None,
    norms: Norms = "live",
) -> Float[Tensor, "x t"]:
    """A head's attention in a changed run, after restoring writers' parts in this head alone.

    Parameters
    ----------
    run : of the changed prompt, from `PromptRun.run`.
    source : of the unchanged prompt, or of another one.
    head : the head.
    query, key : tokens of the changed prompt.
    sets : names of writers that are put back together; one row each.
    side : whether they are put into the key or into the query.
    at : the token of the source that they are taken from; the same place, if not given.
    norms : frozen, or live.

    Examples
    --------
    >>> from qkscope import Scope
    >>> from qkscope.findings.prompt_trace import PromptRun
    >>> scope = Scope.load("nano:mixed")
    >>> changed = PromptRun(scope, "hat: O cat: Z jam:").run
    >>> source = PromptRun(scope, "hat: O jam: Z jam:").run
    >>> sets = [["embedding", "L0H1"], ["M0"]]
    >>> restore(changed, source, "L1H0", query=8, key=6, sets=sets).shape
    torch.Size([2, 9])
    """
    head = Head.parse(head)
    token = key if side == "key" else query
    taken_at = token if at is None else at
    instead = mean_parts(source, head.layer, [taken_at])
    vectors = vectors_with(run, head, side, token, instead, sets, norms)
    if side == "key":
        return attention_with(run, head, query, keys={token: vectors})
    return attention_with(run, head, query, q=vectors)
