"""Writers' parts in one head's query or key: ablated, or restored from another run; the attention row made again.

A head's vector at a token is made of the stream there, ``x = Σ_c x_c``. Some writers' parts x_c are put at their mean
over the prompt's other tokens (ablate), or at what the same writers left in another run - the unchanged prompt, another
prompt (restore: path patching) - in this head alone. With norms frozen the vector changes by what these parts give to
it; with norms live the head's own code runs on the other stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.attention import soft
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.run import KINDS, Parts, Run, Side, named

Norms = Literal["frozen", "live"]
_SLOTS = 128  # tokens whose writers are held at once


def parts_at(run: Run, layer: int, token: int) -> Float[Tensor, "c d_model"]:
    """What each writer but the biases left in the stream that enters a layer, at one token of a prompt.

    Parameters
    ----------
    run : of one prompt, with every token as a key.
    layer : that reads it.
    token : its place.
    """
    return named(run.slots([1 + token]).stream(layer))[0, :, 0]


def mean_parts(run: Run, layer: int, tokens: Sequence[int]) -> Float[Tensor, "c d_model"]:
    """The same on average over some tokens, a few at a time: a long prompt takes no more room."""
    sums = []
    for start in range(0, len(tokens), _SLOTS):
        pieces = run.slots([1 + token for token in tokens[start : start + _SLOTS]]).stream(layer)
        summed = [Parts(piece.writers, piece.values.sum(2, keepdim=True)) for piece in pieces]
        sums.append(named(summed)[0, :, 0])
    return torch.stack(sums).sum(0) / len(tokens)


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
    """A head's query or key at a token, with the parts of some writers replaced: once for each set of them.

    Parameters
    ----------
    run : of one prompt, with every token as a key.
    head : whose vector.
    side, token : which vector, and where.
    instead : of each writer, what its part is replaced by: `mean_parts`, or `parts_at` of another run.
    sets : names of writers that are replaced together.
    norms : frozen, or live.
    """
    names, slots = run.reader.writers(head.layer)[:-1], [1 + token]
    for writer in {writer for own in sets for writer in own} - {*names}:
        raise BadInput(f"{writer} does not write before {head}: name one of an earlier layer.")
    chosen = torch.tensor([[name in own for name in names] for own in sets]).to(instead)
    away = instead - parts_at(run, head.layer, token)
    kind = KINDS[side]
    true = run.vectors([(head.layer, run.index(head, kind))], kind, slots)[0, :, 0]
    if norms == "frozen":
        read = run.read(head, side, [Parts([*names], away[None, :, None])], slots)[0, :-1, 0]
        return true + chosen @ read
    x = run.hidden(head.layer, slots) + (chosen @ away)[:, None, None]
    return run.live(head, side, x, slots)[:, 0, 0]


def attention_with(
    run: Run, head: Head, query: int, *, q: Tensor | None = None, keys: dict[int, Tensor] | None = None
) -> Float[Tensor, "x t"]:
    """A head's attention row with another query, or other keys at some tokens: a row for each of x.

    Parameters
    ----------
    run : of one prompt.
    head : the head.
    query : the token that asks.
    q : queries to put there, Float [x, d].
    keys : by token, keys to put there, Float [x, d].
    """
    rows = run.calls[head.layer].rows(head.index, run.row[:1], torch.full_like(run.row[:1], query))
    count = max(len(one) for one in (q, *(keys or {}).values()) if one is not None)
    asked = rows.q[0].expand(count, -1) if q is None else q
    every = rows.k[0, 0].repeat(count, 1, 1)
    for token, own in (keys or {}).items():
        every[:, token] = own.to(every)
    logits = rows.logits(torch.einsum("xd,xtd->xt", asked.to(every), every)[None] * rows.scale)[0]
    return soft(logits, None if rows.rest is None else rows.rest[0].expand(count))


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
    """A head's attention in a changed run, with what some writers left in another run put back into it alone.

    Parameters
    ----------
    run : of the changed prompt, from `Probe.run`.
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
    >>> from qkscope.analyses.trace.prompt import Probe
    >>> scope = Scope.load("nano:mixed")
    >>> runs = [Probe(scope, f"hat: O {word}: Z jam:").run for word in ("cat", "jam")]
    >>> restore(*runs, "L1H0", query=8, key=6, sets=[["embedding", "L0H1"], ["M0"]]).shape
    torch.Size([2, 9])
    """
    one, token = Head.parse(head), key if side == "key" else query
    instead = parts_at(source, one.layer, token if at is None else at)
    made = vectors_with(run, one, side, token, instead, sets, norms)
    if side == "key":
        return attention_with(run, one, query, keys={token: made})
    return attention_with(run, one, query, q=made)
