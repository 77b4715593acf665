"""A prompt run again with other tokens in it, or other rows of attention: what precedes the change
is computed once.

A change at one token leaves those before it as they were, and what is read at one token does not
depend on those after it. So of each prompt only the tokens from its change to its last reader run,
among keys and values of the unchanged prompt; all changes of a batch run together, wherever they
stand, up to the last layer that is read. Tokens in between that do not run are held: others read
there what they read in the unchanged prompt. Where a model does not give its own queries again in
this way (it has a memory besides its keys), whole prompts run.
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
from qkscope.linear.reader import Reader
from qkscope.linear.recording import last_alone
from qkscope.linear.run import Run
from qkscope.model.capture_types import Places
from qkscope.model.tap import Call, Stop

_AT_ONCE = 128  # prompts that run together to their logits
_AGREES = 1e-3  # of a query's length: how far tokens run alone may be from the same tokens in their prompt, or 4 ε
# that run together: on a CPU more are no faster, and less alike
_TOKENS = {"cpu": 2**8}
_MORE_TOKENS = 2**12
# numbers of attention made at once: of a long prompt, of some tokens
_ROOM = {"cpu": 2**23}
_MORE_ROOM = 2**28

Shown = tuple[Mapping[int, Int[Tensor, " u"]], Callable[[int, Tensor, Tensor], None]]
"""By layer, tokens that are shown; told a layer, whether each runs [b, u], and all heads' attention
[b, h, u, t].
"""
Changed = tuple[int, int, Float[Tensor, " t"]]
"""A row of the batch, a head's number, and the logits that it gets instead."""
Row = tuple[Head, Float[Tensor, " t"]]
"""A head and the logits that its row of attention gets instead, at the last token that runs."""


class _TokenSet(NamedTuple):
    """Tokens that run: what the model is given, their places, the tokens around them, and the last
    one of each row.
    """

    inputs: dict[str, Tensor]
    at: Int[Tensor, "b s"]
    around: Int[Tensor, " r"]
    ends: Int[Tensor, " b"]


class Again:
    """A prompt that was run, ready to be run again with other tokens, or other rows of attention.

    Parameters
    ----------
    scope : the model.
    inputs : the prompt, alone.
    calls : by layer, its attention calls in that run.
    """

    def __init__(
        self, scope: Scope, inputs: Mapping[str, Tensor], calls: Mapping[int, Call]
    ) -> None:
        self.scope = scope
        self.inputs = dict(inputs)
        self.calls = calls
        self.ids: Int[Tensor, " t"] = self.inputs["input_ids"][0]
        self._alone: bool | None = (
            None if scope.facts.takes_positions and not scope.is_changed else False
        )

    @classmethod
    @torch.no_grad()
    def of(cls, scope: Scope, ids: Int[Tensor, " t"], last: int | None = None) -> Again:
        """Run a prompt of these tokens and keep its attention calls; up to a layer, if one is
        named.
        """
        inputs = prompt_of(scope, ids[None])
        calls = dict[int, Call]()

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

    def hidden(self, query: int, edges: Sequence[tuple[Head, int]]) -> Float[Tensor, "n v"]:
        """Next-token logits where each of these heads, one at a time, may not look at a key from
        this token.
        """
        rows = [(head, self.row(query, head).logits()[0, 0].clone()) for head, _ in edges]
        for (_, logits), (_, key) in zip(rows, edges, strict=True):
            logits[key] = -torch.inf
        at = torch.full((len(rows), 1), query).to(self.ids)
        return self.run(self.ids[at], at, rows=rows).cpu()

    # ------------------------------------------------------------------ other tokens

    def at_once(self, tokens: int) -> int:
        """How many prompts run together with so many tokens each."""
        return max(room_of(self.scope) // (tokens if self.runs_alone() else len(self.ids)), 1)

    @torch.no_grad()
    def run(
        self,
        tokens: Int[Tensor, "b s"],
        at: Int[Tensor, "b s"],
        shown: Shown | None = None,
        last: int | None = None,
        rows: Sequence[Row | None] = (),
    ) -> Float[Tensor, "b v"]:
        """Run as many tokens of each prompt, among keys and values of the unchanged one; the next
        token's logits.

        Parameters
        ----------
        tokens : what stands there instead; the same tokens may be among them.
        at : their places in each prompt, in order.
        shown : tokens whose attention is shown.
        last : layer after which the model stops, without logits.
        rows : of each prompt, a row of attention that is another at its last token.
        """
        step = min(self.at_once(tokens.shape[1]), _AT_ONCE)
        if len(tokens) > step and last is None:
            every = (slice(start, start + step) for start in range(0, len(tokens), step))
            return torch.cat([self.run(tokens[some], at[some], rows=rows[some]) for some in every])
        place = self._token_set(tokens.to(self.ids), at.to(self.ids))

        def visit(call: Call) -> None:
            changed = [
                (i, row[0].index, row[1])
                for i, row in enumerate(rows)
                if row and row[0].layer == call.layer
            ]
            if shown is not None and call.layer in shown[0]:
                self._show(call, place, shown, changed)
            if last is not None and call.layer >= last:
                raise Stop
            if self._alone:
                self._attend(call, place)
            if changed:
                self._change(call, place, changed)

        each = torch.arange(len(at), device=place.at.device)
        nothing = place.at[:, :0]
        ends = None if last is not None else Places(each, place.ends, nothing, nothing.bool())
        logits = self.scope.watch(
            place.inputs, visit, logits_at=ends, only=None if last is None else range(last + 1)
        )
        return nothing if logits is None else logits

    def _token_set(self, tokens: Int[Tensor, "b s"], at: Int[Tensor, "b s"]) -> _TokenSet:
        """Some tokens as they run: alone, or whole prompts with these tokens in them."""
        if not self.runs_alone():
            whole = self.ids.repeat(len(tokens), 1).scatter(1, at, tokens)
            every = torch.arange(len(self.ids), device=at.device).expand_as(whole)
            return _TokenSet(prompt_of(self.scope, whole), every, at[0, :0], at[:, -1])
        often = torch.bincount(at.flatten(), minlength=len(self.ids))[: int(at.max())]
        around = (often < len(at)).nonzero()[:, 0]
        ends = torch.full_like(at[:, 0], at.shape[1] - 1)
        return _TokenSet(
            {"input_ids": tokens, "position_ids": at + self.scope.facts.first_position},
            at,
            around,
            ends,
        )

    def _part(self, call: Call, place: _TokenSet, which: Int[Tensor, "b u"]) -> Call:
        """The same call with the queries of some tokens that run, as one row, over their keys and
        those around them.

        Keys around are the same for all, so that they are not copied; of tokens that run each sees
        those of its prompt.
        """
        at = place.at.to(call.q.device)
        around = place.around.to(call.q.device)
        which = which.to(call.q.device)
        base, (each, steps) = (
            self.calls[call.layer],
            (torch.arange(n, device=at.device) for n in at.shape),
        )
        rows = each.repeat_interleave(which.shape[1])
        mask = base.mask_rows(rows * 0, at.gather(1, which).flatten()).transpose(0, 1)
        here, there = (
            x.expand(len(mask), -1, -1) for x in (at[rows], rows[:, None] * len(steps) + steps)
        )
        mine = mask.new_full((*mask.shape[:2], at.numel()), -torch.inf).scatter(
            -1, there, mask.gather(-1, here)
        )
        mask = torch.cat([mine, mask.scatter(-1, here, -torch.inf)[..., around]], dim=-1)
        q = call.q[each[:, None], :, which].flatten(0, 1).transpose(0, 1)
        own = ((call.k, base.k), (call.v, base.v))
        k, v = (
            torch.cat([new.transpose(0, 1).flatten(1, 2), old[0, :, around]], dim=1)
            for new, old in own
        )
        return replace(call, q=q[None], k=k[None], v=v[None], mask=mask[None], causal=False)

    def _weights(
        self, call: Call, place: _TokenSet, which: Int[Tensor, "b u"], changed: Sequence[Changed]
    ) -> tuple[Call, Float[Tensor, "b h u k"], Int[Tensor, " k"]]:
        """A part of a call, every head's attention there, other logits at the last token, and the
        tokens it is to.
        """
        part = self._part(call, place, which)
        columns = torch.cat([place.at.flatten(), place.around]).to(call.q.device)
        logits = part.logits([*range(part.q.shape[1])])[0].unflatten(1, which.shape).transpose(0, 1)
        for i, head, others in changed:  # hidden keys stay hidden
            new = others.to(logits)[columns].masked_fill(logits[i, head] == -torch.inf, -torch.inf)
            logits[i, head] = torch.where(
                (which[i, :, None] == place.ends[i]).to(new.device), new, logits[i, head]
            )
        sinks = None if part.sinks is None else part.sinks.float()[:, None].expand(logits.shape[:3])
        return part, soft(logits, sinks), columns

    def _show(self, call: Call, place: _TokenSet, shown: Shown, changed: Sequence[Changed]) -> None:
        """Show the attention of some tokens, by the order of the prompt."""
        same = place.at[:, None] == shown[0][call.layer][:, None].to(place.at)
        _, weights, columns = self._weights(call, place, same.int().argmax(-1), changed)
        rows = weights.new_zeros(*weights.shape[:3], len(self.ids))
        shown[1](call.layer, same.any(-1), rows.index_add_(-1, columns, weights))

    def _attend(self, call: Call, place: _TokenSet) -> None:
        """Put in what heads put out at tokens that run alone, in parts."""
        numbers = call.q[:, :, 0, 0].numel() * (place.at.numel() + len(place.around))
        step = max(_ROOM.get(call.q.device.type, _MORE_ROOM) // numbers, 1)
        some = torch.arange(place.at.shape[1]).expand_as(place.at).split(step, dim=1)
        call.output = torch.cat(
            [_output(self._part(call, place, x))[0].unflatten(0, x.shape) for x in some], dim=1
        )

    def _change(self, call: Call, place: _TokenSet, changed: Sequence[Changed]) -> None:
        """Put in what heads put out at the last token with other rows of attention."""
        part, weights, _ = self._weights(call, place, place.ends[:, None], changed)
        for i, head, _ in changed:
            value = (
                weights[i, head, 0]
                @ part.v[0, head // (part.q.shape[1] // part.v.shape[1])].float()
            )
            call.outputs[head] = partial(_put, (i, place.ends[i]), value, call.outputs.get(head))

    def record(
        self,
        reader: Reader,
        ids: Int[Tensor, " t"],
        look: tuple[int, int],
        layer: int,
        at: Int[Tensor, " s"],
    ) -> Run:
        """Run a changed prompt up to a layer, and keep what writers left at a query and a key: its
        slots 0 and 1.

        Tokens of the run are counted among those that ran, ``at``; keys of all others stand behind
        them, as attention does not depend on their order.
        """
        ids = ids.to(self.ids)
        at = at.to(self.ids)[None]
        place = self._token_set(ids[at], at)
        keys = torch.searchsorted(place.at.contiguous(), torch.tensor([look]).to(at))
        places = Places(
            at[:, 0] * 0, keys[:, 0], keys.flip(1), torch.ones_like(keys, dtype=torch.bool)
        )
        visits = [partial(self._attend, place=place)] if self._alone else []
        run = reader.record(place.inputs, places, deep=[layer], last=layer, visits=visits)
        run.calls[layer] = replace(
            self._part(run.calls[layer], place, keys[:, :1]), q=run.calls[layer].q
        )
        return run

    def runs_alone(self) -> bool:
        """Whether tokens may run without those before them, tried once."""
        if self._alone is not None:
            return self._alone
        self._alone = True
        worst = 0.0
        at = torch.tensor([[len(self.ids) - 1]]).to(self.ids)
        place = self._token_set(self.ids[at], at)  # the last token alone asks as it asked

        def check(call: Call) -> None:
            nonlocal worst
            mine = call.q[0, :, 0].float()
            theirs = self.calls[call.layer].q[0, :, -1].float()
            worst = max(worst, float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30)))
            self._attend(call, place)

        try:
            self.scope.watch(place.inputs, check, only=self.calls)
        except (RuntimeError, IndexError, ValueError):  # its code wants more than one token
            worst = torch.inf
        self._alone = worst < max(_AGREES, 4 * torch.finfo(self.scope.model.dtype).eps)
        return self._alone


def _output(call: Call) -> Float[Tensor, "b s h e"]:
    """What heads put out, by torch's own kernel where it knows all that the call asks for."""
    if call.softcap is None and call.sinks is None and call.k.shape[1] == call.v.shape[1]:
        given = call.q, call.k, call.v, call.mask.to(call.q)  # type: ignore[union-attr]
        return scaled_dot_product_attention(*given, scale=call.scale, enable_gqa=True).transpose(
            1, 2
        )
    return call.attend([*range(call.q.shape[1])])


def _put(
    place: tuple[int, Tensor], value: Tensor, before: Callable[[Tensor], Tensor] | None, out: Tensor
) -> Tensor:
    """Replace one vector in a head's output, and apply the other changes of it."""
    out[place] = value.to(out)
    return out if before is None else before(out)


def room_of(scope: Scope) -> int:
    """Number of tokens to run together."""
    return _TOKENS.get(scope.device.type, _MORE_TOKENS)


def prompt_of(scope: Scope, ids: Int[Tensor, "b t"]) -> dict[str, Tensor]:
    """Model inputs of prompts without padding."""
    inputs = {
        "input_ids": ids.to(scope.device),
        "attention_mask": torch.ones_like(ids).to(scope.device),
    }
    if scope.facts.takes_positions:
        inputs["position_ids"] = (
            torch.arange(ids.shape[1], device=scope.device) + scope.facts.first_position
        ).expand_as(ids)
    return inputs
