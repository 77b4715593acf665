"""One token's attention rows changed, and the model run on from there.

Whatever is changed at one token leaves those before it as they were, so the token is run alone, its own keys and values
behind theirs, all changes in one batch. Where a model does not give its own queries again in this way (it has a memory
besides its keys), the whole prompt runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.attention import AttentionRows, soft
from qkscope.capture.patch import Edit, Patch
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call
from qkscope.heads import Head

_AGREES = 1e-3  # of a query's length: how far one token alone may be from the same token in its prompt
_AT_ONCE = 64  # changes run together

Row = tuple[Head, Float[Tensor, " t"]]
"""A head and the logits that its row of attention gets instead."""


class Changed(NamedTuple):
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
        self._alone: bool | None = None

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
    def run(self, query: int, rows: Sequence[Row | None]) -> Changed:
        """The token run with one row of attention changed, each change on its own; None changes nothing.

        Parameters
        ----------
        query : the token that asks.
        rows : changes.
        """
        parts = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
        # changes of a `with` block are of whole prompts
        alone = self._alone is not False and self.scope.facts.takes_positions and not self.scope.is_changed
        made = []
        for part in parts:
            found = self._run(query, part) if alone else None
            alone = self._alone = found is not None
            made.append(self._run_whole(query, part) if found is None else found)
        return Changed(torch.cat([one.attention for one in made]), torch.cat([one.logits for one in made]))

    def _run(self, query: int, rows: Sequence[Row | None]) -> Changed | None:
        """The token alone after the others' keys and values, and once unchanged beside it.

        None where that does not ask with the queries it asked with.
        """
        size, kept, worst = len(rows) + 1, dict[int, Tensor](), 0.0
        columns = slice(query, query + 1)
        inputs = {
            name: value[:, columns].expand(size, -1) for name, value in self.inputs.items() if name != "attention_mask"
        }

        def visit(call: Call) -> None:
            nonlocal worst
            base = self.calls[call.layer]
            mine, theirs = call.q[-1, :, 0].float(), base.q[0, :, query].float()
            worst = max(worst, float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30)))
            at = torch.tensor([query], device=call.q.device)
            mask = base.mask_rows(torch.zeros_like(at), at)[0, :, : query + 1]
            kept[call.layer], call.output = _attend(call, base, mask, rows)

        at = Places(*(torch.arange(size), torch.zeros(size, dtype=torch.long)), *[torch.zeros(size, 0).long()] * 2)
        at = replace(at, key_mask=at.key_mask.bool()).to(self.scope.device)
        try:
            logits = self.scope.watch(inputs, visit, logits_at=at)
        except (RuntimeError, IndexError, ValueError):  # its code wants more than one token
            return None
        assert logits is not None
        attention = torch.cat([kept[layer] for layer in sorted(kept)], dim=1)
        return Changed(attention[:-1].cpu(), logits[:-1].cpu()) if worst < _AGREES else None

    def _run_whole(self, query: int, rows: Sequence[Row | None]) -> Changed:
        """The same with the whole prompt, as many times as there are changes."""
        at = torch.tensor([query], device=self.scope.device)
        places = Places.everywhere(torch.zeros_like(at), at, self.inputs["attention_mask"])
        attention, logits = [], []
        for change in rows:
            kept: dict[int, Tensor] = {}

            def keep(call: Call, kept: dict[int, Tensor] = kept) -> None:
                kept[call.layer] = call.attention(list(range(call.q.shape[1])))[:, :, query, : query + 1].cpu()

            edits = []
            if change is not None:
                some = torch.arange(query + 1, device=at.device)[None]
                edits = [Edit.logits(change[0], at, some, change[1][None, : query + 1].to(at.device))]
            logits.append(self.scope.watch(dict(self.inputs), Patch(edits, self.scope).visit, keep, logits_at=places))
            attention.append(torch.cat([kept[layer] for layer in sorted(kept)], dim=1))
        return Changed(torch.cat(attention), torch.cat([one for one in logits if one is not None]).cpu())


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
