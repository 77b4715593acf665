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
from qkscope.attention import AttentionRows
from qkscope.heads import Head, Side
from qkscope.linear.run import KINDS, Parts, Run, named

_SLOTS = 128  # tokens whose writers are held at once: a long prompt takes no more room

Norms = Literal["frozen", "live"]


def mean_parts(run: Run, layer: int, tokens: Sequence[int]) -> Float[Tensor, "c d_model"]:
    """What each writer but the biases left in the stream that enters a layer, on average over some
    tokens of a prompt.

    Parameters
    ----------
    run : of one prompt, with these tokens among its keys.
    layer : that reads it.
    tokens : their places.
    """
    starts = range(0, len(tokens), _SLOTS)
    every = _slots(run, tokens)
    some = (run.slots(every[start : start + _SLOTS]).stream(layer) for start in starts)
    sums = [
        [Parts(piece.writers, piece.values.sum(2, keepdim=True)) for piece in pieces]
        for pieces in some
    ]
    return torch.stack([named(pieces)[0, :, 0] for pieces in sums]).sum(0) / len(tokens)


def _slots(run: Run, tokens: Sequence[int]) -> list[int]:
    """The slots of the first row's keys that stand at some tokens."""
    slots = {column: slot for slot, column in enumerate(run.columns[0].tolist()) if slot}
    return [slots[token] for token in tokens]


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
    """A head's query or key at a token, with the parts of some writers replaced: once for each set
    of them.

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
    kind = KINDS[side]
    for writer in {writer for own in sets for writer in own} - {*names}:
        raise BadInput(f"{writer} does not write before {head}: name one of an earlier layer.")
    numbers = {name: i for i, name in enumerate(names)}
    chosen = torch.zeros(len(sets), len(names))
    for row, own in enumerate(sets):
        chosen[row, [numbers[name] for name in own]] = 1
    chosen = chosen.to(instead)
    away = instead - mean_parts(run, head.layer, [token])
    if norms == "frozen":
        true = run.vectors([(head.layer, run.index(head, kind))], kind, slots)[0, :, 0]
        return (
            true
            + chosen @ run.read(head, side, [Parts(names, away[None, :, None])], slots)[0, :-1, 0]
        )
    return run.live(
        head, side, run.hidden([head.layer], slots)[0] + (chosen @ away)[:, None, None], slots
    )[:, 0, 0]


def rows_with(
    run: Run,
    head: Head,
    query: int,
    *,
    q: Tensor | None = None,
    keys: Mapping[int, Tensor] | None = None,
) -> AttentionRows:
    """A head's row with another query, or other keys at some tokens: one for each of x.

    Parameters
    ----------
    run : of one prompt.
    head : the head.
    query : the query token.
    q : queries to put there, Float [x, d].
    keys : by token, keys to put there, Float [x, d].
    """
    count = max(len(vectors) for vectors in (q, *(keys or {}).values()) if vectors is not None)
    row = run.row[:1].expand(count)
    rows = run.calls[head.layer].rows(head.index, row, torch.full_like(row, query))
    k = rows.k.clone()
    for token, own in (keys or {}).items():
        k[:, 0, token] = own.to(k)
    return replace(rows, k=k, q=rows.q if q is None else q[:, None].to(k))


def attention_with(
    run: Run,
    head: Head,
    query: int,
    *,
    q: Tensor | None = None,
    keys: Mapping[int, Tensor] | None = None,
) -> Float[Tensor, "x t"]:
    """A head's attention row with another query, or other keys at some tokens; parameters as in
    `rows_with`.
    """
    return rows_with(run, head, query, q=q, keys=keys).attention()[:, 0]


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
    """A head's attention in a changed run, with what some writers left in another run put back into
    it alone.

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
    >>> runs = [PromptRun(scope, f"hat: O {word}: Z jam:").run for word in ("cat", "jam")]
    >>> restore(*runs, "L1H0", query=8, key=6, sets=[["embedding", "L0H1"], ["M0"]]).shape
    torch.Size([2, 9])
    """
    head = Head.parse(head)
    token = key if side == "key" else query
    instead = mean_parts(source, head.layer, [token if at is None else at])
    vectors = vectors_with(run, head, side, token, instead, sets, norms)
    if side == "key":
        return attention_with(run, head, query, keys={token: vectors})
    return attention_with(run, head, query, q=vectors)
