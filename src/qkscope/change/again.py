"""A prompt run again with other tokens in it, or other rows of attention: what precedes the change is computed once.

A change at one token leaves those before it as they were, and what is read at one token does not depend on those after
it. So of each prompt only the tokens from its change to its last reader run, their keys and values behind those of the
unchanged prompt; all changes of a batch run together, wherever they stand, up to the last layer that is read. Where a
model does not give its own queries again in this way (it has a memory besides its keys), whole prompts run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import Head, Scope
from qkscope.attention import AttentionRows, soft
from qkscope.capture.pick import Places
from qkscope.capture.tap import Call, Stop
from qkscope.linear.reader import Reader, last_alone
from qkscope.linear.run import Run

_AT_ONCE = 64  # rows of attention changed together
_AGREES = 1e-3  # of a query's length: how far tokens run alone may be from the same tokens in their prompt, or 4 ε
_TOKENS, _MORE_TOKENS = {"cpu": 2**8}, 2**15  # that run together: on a CPU more are no faster, and less alike
_ROOM, _MORE_ROOM = {"cpu": 2**23}, 2**28  # numbers of attention made at once: of a long prompt, of some tokens

See = Callable[[int, int, Float[Tensor, "b h s t"]], None]
"""Is given a layer, which of the tokens that run come first, and their attention to all tokens; of many, in parts."""


Changed = tuple[int, int, Float[Tensor, " t"]]
"""A row of the batch, a head's number, and the logits that it gets instead."""
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

    @torch.no_grad()
    def longer(self, last: int) -> Again:
        """The prompt with one more token at its end, for words that are put in: keys and values up to a layer."""
        ids, calls = torch.cat([self.ids, self.ids[-1:]]), dict[int, Call]()

        def keep(call: Call) -> None:
            calls[call.layer] = last_alone(call)
            if call.layer >= last:
                raise Stop

        self.scope.watch(prompt_of(self.scope, ids[None]), keep, only=range(last + 1))
        longer = Again(self.scope, prompt_of(self.scope, ids[None]), calls)
        longer._alone = self._runs_alone()
        return longer

    # ------------------------------------------------------------------ rows of attention changed

    def row(self, query: int, head: Head) -> AttentionRows:
        """A head's row of attention at a token."""
        return self.calls[head.layer].rows(head.index, torch.tensor([0]), torch.tensor([query]))

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
            tokens, starts = self.ids[query].expand(len(some), 1), torch.full((len(some),), query)
            logits.append(self.run(tokens, starts, see, rows=some))
        attention = torch.cat([torch.cat(kept[layer]) for layer in sorted(kept)], dim=1)
        return TokenRun(attention, torch.cat([each.cpu() for each in logits if each is not None]))

    # ------------------------------------------------------------------ other tokens

    @torch.no_grad()
    def run(
        self,
        tokens: Int[Tensor, "b s"],
        starts: Int[Tensor, " b"],
        see: See | None = None,
        last: int | None = None,
        rows: Sequence[Row | None] = (),
        check: Callable[[Call], None] | None = None,
    ) -> Float[Tensor, "b v"] | None:
        """Run as many tokens of each prompt, behind what precedes them in the unchanged one; show every layer.

        Parameters
        ----------
        tokens : what stands there instead; the same tokens may be among them.
        starts : where these tokens begin in each prompt.
        see : told each layer and its attention, of many tokens in parts.
        last : layer after which the model stops; without one it goes on to the logits of the next token.
        rows : of each prompt, a row of attention that is another at its last token.
        check : told each attention call, before it is computed.
        """
        alone = self._runs_alone()
        tokens, each, steps = tokens.to(self.ids), *(torch.arange(n, device=self.ids.device) for n in tokens.shape)
        at = starts.to(self.ids)[:, None] + steps
        inputs = {"input_ids": tokens, "position_ids": at + self.scope.facts.first_position}
        if not alone:
            inputs = prompt_of(self.scope, self.ids.repeat(len(tokens), 1).scatter(1, at, tokens))

        def visit(call: Call) -> None:
            if check is not None:
                check(call)
            if alone or see is not None or rows:
                self._attend(call, at, see, rows, alone)
            if last is not None and call.layer >= last:
                raise Stop

        if last is not None:
            return self.scope.watch(inputs, visit, only=range(last + 1))
        nothing, ends = at[:, :0], torch.full_like(each, len(steps) - 1) if alone else at[:, -1]
        return self.scope.watch(inputs, visit, logits_at=Places(each, ends, nothing, nothing.bool()))

    def _attend(
        self, call: Call, at: Tensor, see: See | None = None, rows: Sequence[Row | None] = (), alone: bool = True
    ) -> None:
        """Show the attention of some tokens, in parts, and put in what heads put out there, where that is another.

        Tokens that run alone stand behind the keys of the unchanged prompt; of whole prompts only changed rows are.
        """
        base, at, outputs = self.calls[call.layer] if alone else call, at.to(call.q.device), list[Tensor]()
        changed = [(i, row[0].index, row[1]) for i, row in enumerate(rows) if row and row[0].layer == call.layer]
        if not alone and see is None:
            at = at[:, -1:] if changed else at[:, :0]
        each, room = torch.arange(len(at), device=at.device)[:, None], _ROOM.get(call.q.device.type, _MORE_ROOM)
        step = max(room // (call.q[:, :, 0, 0].numel() * base.k.shape[2]), 1)
        for first in range(0, at.shape[1], step):
            queries, others = at[:, first : first + step], changed if first + step >= at.shape[1] else ()
            batch = (each * 0 if alone else each).expand_as(queries)
            mask = base.mask_rows(batch.flatten(), queries.flatten()).unflatten(0, queries.shape).transpose(1, 2)
            if alone:
                weights, output = attend(replace(call, q=call.q[:, :, first : first + step]), base, mask, at, others)
                outputs.append(output)
            else:
                part = replace(call, q=call.q[each, :, queries].transpose(1, 2), mask=mask, causal=False)
                weights = _softened(call, part.logits([*range(part.q.shape[1])]), others)
                for i, head, _ in others:
                    value = weights[i, head, -1] @ call.v[i, head // (len(call.q[0]) // len(call.v[0]))].float()
                    call.outputs[head] = partial(_put, (i, at[i, -1]), value, call.outputs.get(head))
            if see is not None:
                see(call.layer, first, weights)
        if alone:
            call.output = torch.cat(outputs, dim=1)

    def record(self, reader: Reader, ids: Int[Tensor, " t"], look: tuple[int, int], layer: int) -> Run:
        """Run a changed prompt up to a layer, and keep what writers left at a query and a key: its slots 0 and 1.

        Tokens of the run are counted from the first that ran; keys of those before it stand behind the others, as
        attention does not depend on their order.
        """
        query, key = look
        start = min(key, int((ids != self.ids.cpu()).int().argmax())) if self._runs_alone() else 0
        inputs = {name: value[:, start:] for name, value in prompt_of(self.scope, ids[None, : query + 1]).items()}
        if start:
            del inputs["attention_mask"]
        row = torch.zeros(1, dtype=torch.long, device=self.scope.device)
        keys = torch.tensor([[key - start, query - start]], device=row.device)
        places = Places(row, row + query - start, keys, torch.ones_like(keys, dtype=torch.bool))
        visits = [partial(self._attend, at=torch.arange(start, query + 1)[None])] if start else []
        run = reader.record(inputs, places, deep=[layer], last=layer, visits=visits)
        call, base = run.calls[layer], self.calls[layer]
        seen = base.mask_rows(row, row + query)[:, :, None]
        mask = torch.cat([seen[..., start : query + 1], seen[..., :start]], dim=-1)
        k, v = (torch.cat([a, b[:, :, :start]], dim=2) for a, b in ((call.k, base.k), (call.v, base.v)))
        run.calls[layer] = replace(call, k=k, v=v, mask=mask, causal=False)
        return run

    def _runs_alone(self) -> bool:
        """Whether tokens may run without those before them, tried once."""
        if self._alone is not None:
            return self._alone
        self._alone, worst, at = True, 0.0, len(self.ids) - 1  # the last token alone asks as it asked

        def check(call: Call) -> None:
            nonlocal worst
            mine, theirs = call.q[0, :, 0].float(), self.calls[call.layer].q[0, :, at].float()
            worst = max(worst, float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30)))

        try:
            self.run(self.ids[None, at:], torch.tensor([at]), None, max(self.calls), check=check)
        except (RuntimeError, IndexError, ValueError):  # its code wants more than one token
            worst = torch.inf
        self._alone = worst < max(_AGREES, 4 * torch.finfo(self.scope.model.dtype).eps)
        return self._alone


def _softened(call: Call, logits: Float[Tensor, "b h s t"], changed: Sequence[Changed]) -> Float[Tensor, "b h s t"]:
    """Attention of logits, with other ones at the last token of some heads; hidden keys stay hidden."""
    for i, head, others in changed:
        logits[i, head, -1] = others.to(logits).masked_fill(logits[i, head, -1] == -torch.inf, -torch.inf)
    return soft(logits, None if call.sinks is None else call.sinks.float()[:, None].expand(logits.shape[:3]))


def _put(place: tuple[int, Tensor], value: Tensor, before: Callable[[Tensor], Tensor] | None, out: Tensor) -> Tensor:
    """Replace one vector in a head's output, and apply the other changes of it."""
    out[place] = value.to(out)
    return out if before is None else before(out)


def room_of(scope: Scope) -> int:
    """Number of tokens to run together."""
    return _TOKENS.get(scope.device.type, _MORE_TOKENS)


def prompt_of(scope: Scope, ids: Int[Tensor, "b t"]) -> dict[str, Tensor]:
    """Model inputs of prompts without padding."""
    inputs = {"input_ids": ids.to(scope.device), "attention_mask": torch.ones_like(ids).to(scope.device)}
    if scope.facts.takes_positions:
        inputs["position_ids"] = (
            torch.arange(ids.shape[1], device=scope.device) + scope.facts.first_position
        ).expand_as(ids)
    return inputs


def attend(
    call: Call,
    base: Call,
    mask: Float[Tensor, "b m s t"],
    at: Int[Tensor, "b k"],
    changed: Sequence[Changed] = (),
) -> tuple[Float[Tensor, "b h s t"], Float[Tensor, "b s h e"]]:
    """Attention and output of every head at some tokens, behind the keys and values of those before them.

    Those are the same in every row, so that they are not copied; ``at`` is where keys and values of the call stand, and
    ``changed`` has other logits at the last token, by row and head.
    """
    q = call.q.float().unflatten(1, (call.k.shape[1], -1))
    logits = torch.einsum("bgmsd,gtd->bgmst", q, base.k[0].float())
    own = torch.einsum("bgmsd,bgtd->bgmst", q, call.k.float())
    at = at.to(own.device)[:, None, None, None]
    logits = call.cap(call.scale * logits.scatter(-1, at.expand_as(own), own)).flatten(1, 2) + mask.to(own)
    weights = _softened(call, logits, changed)
    each = weights.unflatten(1, (call.v.shape[1], -1))
    at = at.expand(*each.shape[:-1], -1)
    out = torch.einsum("bgmst,gte->bgmse", each.scatter(-1, at, 0.0), base.v[0].float())
    out = out + torch.einsum("bgmst,bgte->bgmse", each.gather(-1, at), call.v.float())
    return weights, out.flatten(1, 2).transpose(1, 2)
