"""One token's attention rows changed: by writers' parts in a head's query or key, and by hand; and the model run on.

A head's vector at a token is made of the stream there, ``x = Σ_c x_c``. Some writers' parts x_c are put at their mean
over the prompt's other tokens (ablate), or at what the same writers left in another run - the unchanged prompt, another
prompt (restore: path patching) - in this head alone. With norms frozen the vector changes by what these parts give to
it; with norms live the head's own code runs on the other stream.

Whatever is changed at one token leaves those before it as they were, so `Rerun` runs the token alone, its own keys and
values behind theirs, all changes in one batch. Where a model does not give its own queries again in this way (it has a
memory besides its keys), the whole prompt runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.attention import AttentionRows, soft
from qkscope.capture.patch import Edit, Patch
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.run import KINDS, Parts, Run, Side, named

_AGREES = 1e-3  # of a query's length: how far one token alone may be from the same token in its prompt
_AT_ONCE = 64  # changes run together
_SLOTS = 128  # tokens whose writers are held at once: a long prompt takes no more room

Norms = Literal["frozen", "live"]
Row = tuple[Head, Float[Tensor, " t"]]
"""A head and the logits that its row of attention gets instead."""


# ---------------------------------------------------------------------- writers' parts in one head


def mean_parts(run: Run, layer: int, tokens: Sequence[int]) -> Float[Tensor, "c d_model"]:
    """What each writer but the biases left in the stream that enters a layer, on average over some tokens of a prompt.

    Parameters
    ----------
    run : of one prompt, with every token as a key.
    layer : that reads it.
    tokens : their places.
    """
    starts = range(0, len(tokens), _SLOTS)
    some = (run.slots([1 + token for token in tokens[start : start + _SLOTS]]).stream(layer) for start in starts)
    sums = [[Parts(piece.writers, piece.values.sum(2, keepdim=True)) for piece in pieces] for pieces in some]
    return torch.stack([named(pieces)[0, :, 0] for pieces in sums]).sum(0) / len(tokens)


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
    instead : of each writer, what its part is replaced by: `mean_parts` of other tokens, or of one in another run.
    sets : names of writers that are replaced together.
    norms : frozen, or live.
    """
    names, slots, kind = run.reader.writers(head.layer)[:-1], [1 + token], KINDS[side]
    for writer in {writer for own in sets for writer in own} - {*names}:
        raise BadInput(f"{writer} does not write before {head}: name one of an earlier layer.")
    chosen = torch.tensor([[name in own for name in names] for own in sets]).to(instead)
    away = instead - mean_parts(run, head.layer, [token])
    if norms == "frozen":
        true = run.vectors([(head.layer, run.index(head, kind))], kind, slots)[0, :, 0]
        return true + chosen @ run.read(head, side, [Parts(names, away[None, :, None])], slots)[0, :-1, 0]
    x = run.hidden(head.layer, slots) + (chosen @ away)[:, None, None]
    return run.live(head, side, x, slots)[:, 0, 0]


def attention_with(
    run: Run, head: Head, query: int, *, q: Tensor | None = None, keys: Mapping[int, Tensor] | None = None
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
    count = max(len(vectors) for vectors in (q, *(keys or {}).values()) if vectors is not None)
    row = run.row[:1].expand(count)
    rows = run.calls[head.layer].rows(head.index, row, torch.full_like(row, query))
    k = rows.k.clone()
    for token, own in (keys or {}).items():
        k[:, 0, token] = own.to(k)
    return replace(rows, k=k, q=rows.q if q is None else q[:, None].to(k)).attention()[:, 0]


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
    head, token = Head.parse(head), key if side == "key" else query
    instead = mean_parts(source, head.layer, [token if at is None else at])
    vectors = vectors_with(run, head, side, token, instead, sets, norms)
    if side == "key":
        return attention_with(run, head, query, keys={token: vectors})
    return attention_with(run, head, query, q=vectors)


# ---------------------------------------------------------------------- the model run on


class TokenRun(NamedTuple):
    """A token run with other attention logits: every head's attention, and the next token's logits, of each change."""

    attention: Float[Tensor, "b h t"]
    logits: Float[Tensor, "b v"]


class Rerun:
    """A prompt that was run, ready to be run again from one token on.

    Parameters
    ----------
    scope : the model.
    inputs : the prompt, alone.
    calls : by layer, its attention calls in that run.
    """

    def __init__(self, scope: Scope, inputs: Mapping[str, Tensor], calls: Mapping[int, Call]) -> None:
        self.scope, self.inputs, self.calls = scope, inputs, calls
        self._alone = True

    def hidden(self, query: int, edges: Sequence[tuple[Head, int]]) -> Float[Tensor, "n v"]:
        """Next-token logits where each of these heads, one at a time, may not look at a key from this token."""
        return self.run(query, [self.without(query, head, key) for head, key in edges]).logits

    def row(self, query: int, head: Head) -> AttentionRows:
        """A head's row of attention at this token."""
        at = torch.tensor([query])
        return self.calls[head.layer].rows(head.index, torch.zeros_like(at), at)

    def without(self, query: int, head: Head, key: int) -> Row:
        """The same where it may not look at a key."""
        logits = self.row(query, head).logits()[0, 0].clone()
        logits[key] = -torch.inf
        return head, logits

    @torch.no_grad()
    def run(self, query: int, rows: Sequence[Row | None]) -> TokenRun:
        """The token run with one row of attention changed, each change on its own; None changes nothing.

        Parameters
        ----------
        query : the token that asks.
        rows : changes.
        """
        # changes of a `with` block are of whole prompts
        self._alone = self._alone and self.scope.facts.takes_positions and not self.scope.is_changed
        every = []
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            made = self._run(query, some) if self._alone else None
            self._alone = made is not None
            every += [made] if made is not None else [self._run_whole(query, row) for row in some]
        return TokenRun(*(torch.cat(parts) for parts in zip(*every, strict=True)))

    def _run(self, query: int, rows: Sequence[Row | None]) -> TokenRun | None:
        """The token alone after the others' keys and values, and once unchanged beside it.

        None where that does not ask with the queries it asked with.
        """
        size, kept, worst = len(rows) + 1, dict[int, Tensor](), 0.0
        own = {name: value for name, value in self.inputs.items() if name != "attention_mask"}
        inputs = {name: value[:, query : query + 1].expand(size, -1) for name, value in own.items()}

        def visit(call: Call) -> None:
            nonlocal worst
            base = self.calls[call.layer]
            mine, theirs = call.q[-1, :, 0].float(), base.q[0, :, query].float()
            worst = max(worst, float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30)))
            at = torch.tensor([query], device=call.q.device)
            mask = base.mask_rows(torch.zeros_like(at), at)[0, :, : query + 1]
            kept[call.layer], call.output = _attend(call, base, mask, rows)

        row = torch.arange(size, device=self.scope.device)
        none = torch.zeros(size, 0, dtype=torch.long, device=row.device)
        at = Places(row, torch.zeros_like(row), none, none.bool())
        try:
            logits = self.scope.watch(inputs, visit, logits_at=at)
        except (RuntimeError, IndexError, ValueError):  # its code wants more than one token
            return None
        assert logits is not None
        attention = torch.cat([kept[layer] for layer in sorted(kept)], dim=1)
        return TokenRun(attention[:-1].cpu(), logits[:-1].cpu()) if worst < _AGREES else None

    def _run_whole(self, query: int, row: Row | None) -> TokenRun:
        """The same with the whole prompt, of one change."""
        at, kept = torch.tensor([query], device=self.scope.device), dict[int, Tensor]()
        places = Places.everywhere(torch.zeros_like(at), at, self.inputs["attention_mask"])
        edits = []
        if row is not None:
            logits = row[1][None, : query + 1].to(at.device)
            edits = [Edit.logits(row[0], at, torch.arange(query + 1, device=at.device)[None], logits)]

        def keep(call: Call) -> None:
            kept[call.layer] = call.attention(list(range(call.q.shape[1])))[:, :, query, : query + 1].cpu()

        after = self.scope.watch(dict(self.inputs), Patch(edits, self.scope).visit, keep, logits_at=places)
        assert after is not None
        return TokenRun(torch.cat([kept[layer] for layer in sorted(kept)], dim=1), after.cpu())


def _attend(
    call: Call, base: Call, mask: Float[Tensor, "m t"], rows: Sequence[Row | None]
) -> tuple[Float[Tensor, "b h t"], Float[Tensor, "b 1 h e"]]:
    """Attention and output of every head in a call of one token, after the keys and values of those before it.

    Those are the same in every row, so that they are not copied.
    """
    query = mask.shape[-1] - 1
    q = call.q[:, :, 0].float().unflatten(1, (call.k.shape[1], -1))
    before = torch.einsum("bgmd,gtd->bgmt", q, base.k[0, :, :query].float())
    own = torch.einsum("bgmd,bgd->bgm", q, call.k[:, :, 0].float())[..., None]
    logits = call.cap(call.scale * torch.cat([before, own], dim=-1)).flatten(1, 2) + mask
    for i, row in enumerate(rows):
        if row is not None and row[0].layer == call.layer:
            logits[i, row[0].index] = row[1][: query + 1].to(logits)
    sinks = None if call.sinks is None else call.sinks.float().expand(len(logits), -1)
    weights = soft(logits, sinks)
    each = weights.unflatten(1, (call.v.shape[1], -1))
    out = torch.einsum("bgmt,gte->bgme", each[..., :query], base.v[0, :, :query].float())
    out = out + each[..., query:] * call.v[:, :, 0, None].float()
    return weights, out.flatten(1, 2)[:, None]
