"""A prompt run again with other tokens in it, or other rows of attention: what precedes the change is computed once.

A change at one token leaves those before it as they were, and what is read at one token does not depend on those after
it. So of each prompt only the tokens from its change to its last reader run, among keys and values of the unchanged
prompt; all changes of a batch run together, wherever they stand, up to the last layer that is read. Tokens in between
that do not run are held: others read there what they read in the unchanged prompt. Where a model does not give its own
queries again in this way (it has a memory besides its keys), whole prompts run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qkscope import Head, Scope
from qkscope.attention import AttentionRows, soft
from qkscope.capture.pick import Places
from qkscope.capture.tap import Call, Stop
from qkscope.linear.reader import Reader, last_alone
from qkscope.linear.run import Run

_AT_ONCE = 64  # rows of attention changed together
_AGREES = 1e-3  # of a query's length: how far tokens run alone may be from the same tokens in their prompt, or 4 ε
_TOKENS, _MORE_TOKENS = {"cpu": 2**8}, 2**15  # that run together: on a CPU more are no faster, and less alike
_KEYS = 16  # keys that take as much room as a token that runs
_ROOM, _MORE_ROOM = {"cpu": 2**23}, 2**28  # numbers of attention made at once: of a long prompt, of some tokens

See = Callable[[int, int, Tensor, Tensor], None]
"""Is given a layer, the number of the first token shown, whether each runs [b, u], and attention [b, h, u, t]."""


Around = Int[Tensor, " r"] | None
"""Tokens that do not run in every prompt; None where whole prompts run."""
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
    def of(cls, scope: Scope, ids: Int[Tensor, " t"], last: int | None = None) -> Again:
        """Run a prompt of these tokens and keep its attention calls; up to a layer, if one is named."""
        inputs, calls = prompt_of(scope, ids[None]), dict[int, Call]()

        def keep(call: Call) -> None:
            calls[call.layer] = call if last is None else last_alone(call)
            if call.layer == last:
                raise Stop

        scope.watch(inputs, keep)
        return cls(scope, inputs, calls)

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
        kept, logits, reads = dict[int, list[Tensor]](), [], dict.fromkeys(self.calls, torch.tensor([query]))
        see: See = lambda layer, _, __, weights: kept.setdefault(layer, []).append(weights[:, :, -1].cpu())  # noqa: E731
        step = min(self.at_once(1), _AT_ONCE)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            at = torch.full((len(some), 1), query)
            logits.append(self.run(self.ids[at.to(self.ids.device)], at, reads, see, rows=some))
        attention = torch.cat([torch.cat(kept[layer]) for layer in sorted(kept)], dim=1)
        return TokenRun(attention, torch.cat([each.cpu() for each in logits if each is not None]))

    # ------------------------------------------------------------------ other tokens

    def at_once(self, tokens: int) -> int:
        """How many prompts run together with so many tokens each; keys of the others are copied for each."""
        return max(room_of(self.scope) // max(tokens, len(self.ids) // _KEYS), 1)

    @torch.no_grad()
    def run(
        self,
        tokens: Int[Tensor, "b s"],
        at: Int[Tensor, "b s"],
        reads: Mapping[int, Int[Tensor, " u"]] | None = None,
        see: See | None = None,
        last: int | None = None,
        rows: Sequence[Row | None] = (),
        check: Callable[[Call], None] | None = None,
    ) -> Float[Tensor, "b v"] | None:
        """Run as many tokens of each prompt, among keys and values of the unchanged one.

        Parameters
        ----------
        tokens : what stands there instead; the same tokens may be among them.
        at : their places in each prompt, in order.
        reads, see : by layer, tokens whose attention is shown, in parts, and to whom.
        last : layer after which the model stops; without one it goes on to the logits of the next token.
        rows : of each prompt, a row of attention that is another at its last token.
        check : told each attention call, before it is computed.
        """
        tokens, at, each = tokens.to(self.ids), at.to(self.ids), torch.arange(len(at), device=self.ids.device)
        around = self._around(at)
        inputs = {"input_ids": tokens, "position_ids": at + self.scope.facts.first_position}
        if around is None:
            inputs = prompt_of(self.scope, self.ids.repeat(len(tokens), 1).scatter(1, at, tokens))

        def visit(call: Call) -> None:
            if check is not None:
                check(call)
            changed = [(i, row[0].index, row[1]) for i, row in enumerate(rows) if row and row[0].layer == call.layer]
            if see is not None and reads and call.layer in reads:
                self._show(call, at, around, reads[call.layer], see, changed)
            if last is not None and call.layer >= last:
                raise Stop
            if around is not None:
                self._attend(call, at, around)
            if changed:
                self._change(call, at, around, changed)

        if last is not None:
            return self.scope.watch(inputs, visit, only=range(last + 1))
        nothing, ends = at[:, :0], at[:, -1] if around is None else torch.full_like(each, at.shape[1] - 1)
        return self.scope.watch(inputs, visit, logits_at=Places(each, ends, nothing, nothing.bool()))

    def _around(self, at: Int[Tensor, "b s"]) -> Around:
        """Tokens whose keys are read as they were: those before the last that do not run in every prompt."""
        if not self.runs_alone():
            return None
        often = torch.bincount(at.flatten(), minlength=len(self.ids))[: int(at.max())]
        return (often < len(at)).nonzero()[:, 0]

    def _part(self, call: Call, at: Int[Tensor, "b s"], around: Around, which: Int[Tensor, "b u"]) -> Call:
        """The same call with the queries of some tokens that run, over all keys: theirs, then those around them."""
        at, which, each = at.to(call.q.device), which.to(call.q.device), torch.arange(len(at), device=call.q.device)
        base, queries = call if around is None else self.calls[call.layer], at.gather(1, which)
        rows = (each if around is None else each * 0)[:, None].expand_as(queries)
        mask = base.mask_rows(rows.flatten(), queries.flatten()).unflatten(0, queries.shape).transpose(1, 2)
        q, k, v = call.q[each[:, None], :, queries if around is None else which].transpose(1, 2), call.k, call.v
        if around is not None:
            here, around = at[:, None, None].expand(*mask.shape[:3], -1), around.to(at)
            mask = torch.cat([mask.gather(-1, here), mask.scatter(-1, here, -torch.inf)[..., around]], dim=-1)
            old = ((x[:, :, around].expand(len(at), -1, -1, -1)) for x in (base.k, base.v))
            k, v = (torch.cat([new, next(old)], dim=2) for new in (k, v))
        return replace(call, q=q, k=k, v=v, mask=mask, causal=False)

    def _weights(
        self, call: Call, at: Int[Tensor, "b s"], around: Around, which: Tensor, changed: Sequence[Changed]
    ) -> tuple[Call, Float[Tensor, "b h u k"], Int[Tensor, "b k"]]:
        """A part of a call, every head's attention there, other logits at the last token, and the tokens it is to."""
        part = self._part(call, at, around, which)
        columns = torch.arange(part.k.shape[2], device=at.device).expand(len(at), -1)
        if around is not None:
            columns = torch.cat([at, around.expand(len(at), -1)], dim=1)
        columns, logits = columns.to(part.q.device), part.logits([*range(part.q.shape[1])])
        for i, head, others in changed:  # hidden keys stay hidden
            new = others.to(logits)[columns[i]].masked_fill(logits[i, head] == -torch.inf, -torch.inf)
            logits[i, head] = torch.where((which[i, :, None] == at.shape[1] - 1).to(new.device), new, logits[i, head])
        sinks = None if part.sinks is None else part.sinks.float()[:, None].expand(logits.shape[:3])
        return part, soft(logits, sinks), columns

    def _show(
        self, call: Call, at: Tensor, around: Around, tokens: Int[Tensor, " u"], see: See, changed: Sequence[Changed]
    ) -> None:
        """Show the attention of some tokens, in parts, by the order of the prompt."""
        step = _step(call, len(self.ids))
        for first in range(0, len(tokens), step):
            same = at[:, None] == tokens[first : first + step, None].to(at)
            _, weights, columns = self._weights(call, at, around, same.int().argmax(-1), changed)
            rows = weights.new_zeros(*weights.shape[:3], len(self.ids))
            rows.scatter_add_(-1, columns[:, None, None].expand_as(weights), weights)
            see(call.layer, first, same.any(-1), rows)

    def _attend(self, call: Call, at: Int[Tensor, "b s"], around: Around) -> None:
        """Put in what heads put out at tokens that run alone, in parts."""
        some = torch.arange(at.shape[1]).expand_as(at).split(_step(call, len(self.ids)), dim=1)
        call.output = torch.cat([_output(self._part(call, at, around, which)) for which in some], dim=1)

    def _change(self, call: Call, at: Int[Tensor, "b s"], around: Around, changed: Sequence[Changed]) -> None:
        """Put in what heads put out at the last token with other rows of attention."""
        last = torch.full_like(at[:, :1], at.shape[1] - 1)
        part, weights, _ = self._weights(call, at, around, last, changed)
        for i, head, _ in changed:
            value = weights[i, head, 0] @ part.v[i, head // (part.q.shape[1] // part.v.shape[1])].float()
            place = i, at[i, -1] if around is None else last[i, 0]
            call.outputs[head] = partial(_put, place, value, call.outputs.get(head))

    def record(
        self, reader: Reader, ids: Int[Tensor, " t"], look: tuple[int, int], layer: int, at: Int[Tensor, " s"]
    ) -> Run:
        """Run a changed prompt up to a layer, and keep what writers left at a query and a key: its slots 0 and 1.

        Tokens of the run are counted among those that ran, ``at``; keys of all others stand behind them, as attention
        does not depend on their order.
        """
        query, key = look
        at, inputs = at.to(self.ids)[None], prompt_of(self.scope, ids[None, : query + 1])
        around, visits = self._around(at), list[Callable[[Call], None]]()
        if around is None:
            at = torch.arange(query + 1).to(self.ids)[None]
        else:
            inputs = {name: value[:, at[0]] for name, value in inputs.items() if name != "attention_mask"}
            visits.append(partial(self._attend, at=at, around=around))
        row = torch.zeros(1, dtype=torch.long, device=self.scope.device)
        keys = torch.searchsorted(at[0], torch.tensor([key, query]).to(at))[None].to(row)
        places = Places(row, keys[:, 1], keys, torch.ones_like(keys, dtype=torch.bool))
        run = reader.record(inputs, places, deep=[layer], last=layer, visits=visits)
        call = run.calls[layer]
        run.calls[layer] = replace(self._part(call, at, around, keys[:, 1:]), q=call.q)
        return run

    def runs_alone(self) -> bool:
        """Whether tokens may run without those before them, tried once."""
        if self._alone is not None:
            return self._alone
        self._alone, worst, at = True, 0.0, len(self.ids) - 1  # the last token alone asks as it asked

        def check(call: Call) -> None:
            nonlocal worst
            mine, theirs = call.q[0, :, 0].float(), self.calls[call.layer].q[0, :, at].float()
            worst = max(worst, float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30)))

        try:
            self.run(self.ids[None, at:], torch.tensor([[at]]), last=max(self.calls), check=check)
        except (RuntimeError, IndexError, ValueError):  # its code wants more than one token
            worst = torch.inf
        self._alone = worst < max(_AGREES, 4 * torch.finfo(self.scope.model.dtype).eps)
        return self._alone


def _step(call: Call, keys: int) -> int:
    """Tokens whose attention to so many is made at once."""
    return max(_ROOM.get(call.q.device.type, _MORE_ROOM) // (call.q[:, :, 0, 0].numel() * keys), 1)


def _output(call: Call) -> Float[Tensor, "b s h e"]:
    """What heads put out, by torch's own kernel where it knows all that the call asks for."""
    if call.softcap is None and call.sinks is None and call.k.shape[1] == call.v.shape[1]:
        mask = None if call.mask is None else call.mask.to(call.q)
        out = scaled_dot_product_attention(call.q, call.k, call.v, mask, scale=call.scale, enable_gqa=True)
        return out.transpose(1, 2)
    return call.attend([*range(call.q.shape[1])])


def _put(place: tuple[int, Tensor], value: Tensor, before: Callable[[Tensor], Tensor] | None, out: Tensor) -> Tensor:
    """What a head put out, with another vector at one place, and what else was to be changed of it."""
    out[place] = value.to(out)
    return out if before is None else before(out)


def room_of(scope: Scope) -> int:
    """How many tokens run together."""
    return _TOKENS.get(scope.device.type, _MORE_TOKENS)


def prompt_of(scope: Scope, ids: Int[Tensor, "b t"]) -> dict[str, Tensor]:
    """What a model is given of prompts without padding."""
    inputs = {"input_ids": ids.to(scope.device), "attention_mask": torch.ones_like(ids).to(scope.device)}
    if scope.facts.takes_positions:
        inputs["position_ids"] = (
            torch.arange(ids.shape[1], device=scope.device) + scope.facts.first_position
        ).expand_as(ids)
    return inputs
