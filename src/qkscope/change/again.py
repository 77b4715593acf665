"""A prompt run again with other tokens in it, or other rows of attention: what precedes the change is computed once.

A change at one token leaves those before it as they were, so only the tokens from there on run, their keys and values
behind those of the unchanged prompt; all changes of a batch run together, up to the last layer that is read. Where a
model does not give its own queries again in this way (it has a memory besides its keys), whole prompts run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.attention import AttentionRows, soft
from qkscope.capture.patch import Edit, Patch
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, Stop
from qkscope.heads import Head

_AT_ONCE = 64  # rows of attention changed together
_AGREES = 1e-3  # of a query's length: how far tokens run alone may be from the same tokens in their prompt

See = Callable[[int, int, Float[Tensor, "b h s t"]], None]
"""Is given a layer, the first token that runs, and the attention from there on to all tokens."""


Row = tuple[Head, Float[Tensor, " t"]]
"""A head and the logits that its row of attention gets instead, at the last token that runs."""


class TokenRun(NamedTuple):
    """A token run with other attention logits: every head's attention, and the next token's logits, of each change."""

    attention: Float[Tensor, "b h t"]
    logits: Float[Tensor, "b v"]


class Again:
    """A prompt that was run, ready to be run again with other tokens, or other rows of attention.

    Parameters
    ----------
    scope : the model.
    inputs : the prompt, alone.
    calls : by layer, its attention calls in that run.
    """

    def __init__(self, scope: Scope, inputs: Mapping[str, Tensor], calls: Mapping[int, Call]) -> None:
        self.scope, self.inputs, self.calls = scope, dict(inputs), calls
        self.ids: Int[Tensor, " t"] = self.inputs["input_ids"][0]
        self._alone: bool | None = None if scope.facts.takes_positions and not scope.is_changed else False

    @classmethod
    @torch.no_grad()
    def of(cls, scope: Scope, ids: Int[Tensor, " t"]) -> Again:
        """Run a prompt of these tokens and keep its attention calls."""
        inputs, calls = prompt_of(scope, ids[None]), dict[int, Call]()
        scope.watch(inputs, lambda call: calls.__setitem__(call.layer, call))
        return cls(scope, inputs, calls)

    # ------------------------------------------------------------------ rows of attention changed

    def row(self, query: int, head: Head) -> AttentionRows:
        """A head's row of attention at a token."""
        at = torch.tensor([query])
        return self.calls[head.layer].rows(head.index, torch.zeros_like(at), at)

    def without(self, query: int, head: Head, key: int) -> Row:
        """The same where it may not look at a key."""
        logits = self.row(query, head).logits()[0, 0].clone()
        logits[key] = -torch.inf
        return head, logits

    def hidden(self, query: int, edges: Sequence[tuple[Head, int]]) -> Float[Tensor, "n v"]:
        """Next-token logits where each of these heads, one at a time, may not look at a key from this token."""
        return self.run_rows(query, [self.without(query, head, key) for head, key in edges]).logits

    def run_rows(self, query: int, rows: Sequence[Row | None]) -> TokenRun:
        """A token run with one row of attention changed, each change on its own; None changes nothing.

        Parameters
        ----------
        query : the token that asks.
        rows : changes.
        """
        kept, logits = dict[int, list[Tensor]](), []
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            see: See = lambda layer, _, weights: kept.setdefault(layer, []).append(weights[:, :, -1].cpu())  # noqa: E731
            logits.append(self.run(self.ids[: query + 1].expand(len(some), -1), see, rows=some))
        attention = torch.cat([torch.cat(kept[layer]) for layer in sorted(kept)], dim=1)
        return TokenRun(attention, torch.cat([each.cpu() for each in logits if each is not None]))

    # ------------------------------------------------------------------ other tokens

    @torch.no_grad()
    def run(
        self, ids: Int[Tensor, "b t"], see: See | None = None, last: int | None = None, rows: Sequence[Row | None] = ()
    ) -> Float[Tensor, "b v"] | None:
        """Run prompts with other tokens in them, from their first change on, and show the attention of every layer.

        Parameters
        ----------
        ids : prompts of the same length, or of a part of it from its beginning.
        see : told each layer, the first token that runs, and the attention from there on.
        last : layer after which the model stops; without one it goes on to the logits of the next token.
        rows : of each prompt, a row of attention that is another at its last token.
        """
        ids, size = ids.to(self.ids), ids.shape[1]
        differ = (ids != self.ids[:size]).any(0).nonzero()
        start = int(differ[0]) if len(differ) else size - 1
        if self._alone is None:
            self._alone = self._agrees(size - 1)
        return self._run(ids, start, see, last, rows)

    def _run(
        self,
        ids: Tensor,
        start: int,
        see: See | None,
        last: int | None,
        rows: Sequence[Row | None] = (),
        check: Callable[[Call], None] | None = None,
    ) -> Tensor | None:
        size, begun = ids.shape[1], start if self._alone is not False else 0
        inputs = {name: value[:, begun:] for name, value in prompt_of(self.scope, ids).items()}
        if begun:
            del inputs["attention_mask"]
        at = torch.arange(start, size, device=ids.device)

        def visit(call: Call) -> None:
            if check is not None:
                check(call)
            changed = [
                (i, row[0].index, row[1][:size]) for i, row in enumerate(rows) if row and row[0].layer == call.layer
            ]
            if begun:
                base = self.calls[call.layer]
                mask = base.mask_rows(torch.zeros_like(at), at.to(base.q.device))[..., :size]
                weights, call.output = attend(call, base, mask.transpose(0, 1), start, changed)
            elif see is not None:
                weights = call.attention(list(range(call.q.shape[1])))[:, :, start:]
            if see is not None:
                see(call.layer, start, weights)
            if last is not None and call.layer >= last:
                raise Stop

        edits = [] if begun else [_edit(i, row, size, ids.device) for i, row in enumerate(rows) if row is not None]
        visits = (Patch(edits, self.scope).visit, visit)
        if last is not None:
            return self.scope.watch(inputs, *visits, only=range(last + 1))
        row = torch.arange(len(ids), device=ids.device)
        nothing = torch.zeros(len(ids), 0, dtype=torch.long, device=ids.device)
        places = Places(row, torch.full_like(row, size - begun - 1), nothing, nothing.bool())
        return self.scope.watch(inputs, *visits, logits_at=places)

    def _agrees(self, at: int) -> bool:
        """Whether the last token alone asks with the queries that it asked with."""
        worst = 0.0

        def check(call: Call) -> None:
            nonlocal worst
            mine, theirs = call.q[0, :, 0].float(), self.calls[call.layer].q[0, :, at].float()
            worst = max(worst, float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30)))

        try:
            self._run(self.ids[None, : at + 1], at, None, max(self.calls), check=check)
        except (RuntimeError, IndexError, ValueError):  # its code wants more than one token
            return False
        return worst < _AGREES


def _edit(number: int, row: Row, size: int, device: torch.device) -> Edit:
    """A row of attention of one prompt of a batch, as an edit."""
    at, keys = torch.tensor([size - 1], device=device), torch.arange(size, device=device)
    edit = Edit.logits(row[0], at, keys[None], row[1][None, :size].to(device))
    return replace(edit, row=torch.full_like(edit.row, number))


def prompt_of(scope: Scope, ids: Int[Tensor, "b t"]) -> dict[str, Tensor]:
    """What a model is given of prompts without padding."""
    inputs = {"input_ids": ids.to(scope.device), "attention_mask": torch.ones_like(ids).to(scope.device)}
    if scope.facts.takes_positions:
        inputs["position_ids"] = (
            torch.arange(ids.shape[1], device=scope.device) + scope.facts.first_position
        ).expand_as(ids)
    return inputs


def attend(
    call: Call,
    base: Call,
    mask: Float[Tensor, "m s t"],
    start: int,
    changed: Sequence[tuple[int, int, Float[Tensor, " t"]]] = (),
) -> tuple[Float[Tensor, "b h s t"], Float[Tensor, "b s h e"]]:
    """Attention and output of every head from some last tokens, behind the keys and values of those before them.

    Those are the same in every row, so that they are not copied; ``changed`` has other logits at the last token, by row
    and head.
    """
    q = call.q.float().unflatten(1, (call.k.shape[1], -1))
    before = torch.einsum("bgmsd,gtd->bgmst", q, base.k[0, :, :start].float())
    own = torch.einsum("bgmsd,bgtd->bgmst", q, call.k.float())
    logits = call.cap(call.scale * torch.cat([before, own], dim=-1)).flatten(1, 2) + mask
    for i, head, others in changed:
        logits[i, head, -1] = others.to(logits)
    sinks = None if call.sinks is None else call.sinks.float()[:, None].expand(logits.shape[:3])
    weights = soft(logits, sinks)
    each = weights.unflatten(1, (call.v.shape[1], -1))
    out = torch.einsum("bgmst,gte->bgmse", each[..., :start], base.v[0, :, :start].float())
    out = out + torch.einsum("bgmst,bgte->bgmse", each[..., start:], call.v.float())
    return weights, out.flatten(1, 2).transpose(1, 2)
