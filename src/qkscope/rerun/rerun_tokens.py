"""A prompt run again with other tokens in it, or other rows of attention: what precedes the change
is computed once.

A change at one token leaves those before it as they were, and what is read at one token does not
depend on those after it. So of each prompt only the tokens from its change to its last reader run,
among keys and values of the unchanged prompt (`qkscope.model.prefix`); all changes of a batch run
together, wherever they stand, up to the last layer that is read. Tokens in between that do not run
are held: others read there what they read in the unchanged prompt. Where a changed prompt run in
this way is not the changed prompt (its mask depends on the words, it has a memory besides its keys),
whole prompts run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import Head, Scope
from qkscope.attention import AttentionRows, soft
from qkscope.linear.reader import Reader
from qkscope.linear.recording import last_alone
from qkscope.linear.run import Run
from qkscope.model.capture_types import Places
from qkscope.model.prefix import ChangedPrompts, TokensAlone, WholePrompts, prompt_of, runs_alone
from qkscope.model.tap import Call, Stop

_AT_ONCE = 128  # prompts that run together to their logits
# tokens that run together: on a CPU more are no faster, and less alike
_TOKENS = {"cpu": 2**8}
_MORE_TOKENS = 2**12

Shown = tuple[Mapping[int, Int[Tensor, " u"]], Callable[[int, Tensor, Tensor], None]]
"""By layer, tokens that are shown; told a layer, whether each runs [b, u], and all heads' attention
[b, h, u, t].
"""
Changed = tuple[int, int, Float[Tensor, " t"]]
"""A row of the batch, a head's number, and the logits that it gets instead."""
Row = tuple[Head, Float[Tensor, " t"]]
"""A head and the logits that its row of attention gets instead, at the last token that runs."""


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

    def runs_alone(self, end: int | None = None) -> bool:
        """Whether tokens up to a place may run without those before them; by default, to the last."""
        last = len(self.ids) - 1
        return runs_alone(self.scope, self.ids, self.calls, last if end is None else end)

    def at_once(self, tokens: int, end: int | None = None) -> int:
        """How many prompts run together with so many tokens each, the last of them at a place."""
        alone = self.runs_alone(end)
        return max(room_of(self.scope) // (tokens if alone else len(self.ids)), 1)

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
        step = min(self.at_once(tokens.shape[1], int(at.max())), _AT_ONCE)
        if len(tokens) > step and last is None:
            parts = (slice(start, start + step) for start in range(0, len(tokens), step))
            return torch.cat([self.run(tokens[part], at[part], rows=rows[part]) for part in parts])
        prompts = self._prompts(tokens.to(self.ids), at.to(self.ids))

        def visit(call: Call) -> None:
            changed = [
                (i, row[0].index, row[1])
                for i, row in enumerate(rows)
                if row and row[0].layer == call.layer
            ]
            if shown is not None and call.layer in shown[0]:
                self._show(call, prompts, shown, changed)
            if last is not None and call.layer >= last:
                raise Stop
            prompts.attend(call)
            if changed:
                self._change(call, prompts, changed)

        each = torch.arange(len(at), device=self.ids.device)
        nothing = prompts.at[:, :0]
        read = Places(each, prompts.ends, nothing, nothing.bool())
        logits = self.scope.watch(
            prompts.inputs,
            visit,
            logits_at=read if last is None else None,
            only=None if last is None else range(last + 1),
        )
        return nothing if logits is None else logits

    def _prompts(self, tokens: Int[Tensor, "b s"], at: Int[Tensor, "b s"]) -> ChangedPrompts:
        """Changed prompts as they run: these tokens alone, or whole prompts with them inside."""
        ends = at[:, -1]
        if all(self.runs_alone(end) for end in sorted(set(ends.tolist()), reverse=True)):
            return TokensAlone.of(self.scope, self.calls, tokens, at)
        whole = self.ids.repeat(len(tokens), 1).scatter(1, at, tokens)
        every = torch.arange(len(self.ids), device=at.device).expand_as(whole)
        return WholePrompts(prompt_of(self.scope, whole), every, ends)

    def _weights(
        self,
        call: Call,
        prompts: ChangedPrompts,
        which: Int[Tensor, "b u"],
        changed: Sequence[Changed],
    ) -> tuple[Call, Float[Tensor, "b h u k"]]:
        """A part of a call, and every head's attention there, with other logits at the last token."""
        part = prompts.part(call, which)
        logits = prompts.by_prompt(part.logits([*range(part.q.shape[1])]), which)
        columns = prompts.columns.to(logits.device)
        is_end = (which == prompts.ends[:, None].to(which)).to(logits.device)
        for i, head, others in changed:
            hidden = logits[i, head] == -torch.inf  # stays hidden
            new = others.to(logits)[columns].masked_fill(hidden, -torch.inf)
            logits[i, head] = torch.where(is_end[i, :, None], new, logits[i, head])
        sinks = None if part.sinks is None else part.sinks.float()[:, None].expand(logits.shape[:3])
        return part, soft(logits, sinks)

    def _show(
        self, call: Call, prompts: ChangedPrompts, shown: Shown, changed: Sequence[Changed]
    ) -> None:
        """Show the attention of some tokens, keys in the order of the prompt."""
        tokens, show = shown
        same = prompts.at[:, None] == tokens[call.layer][:, None].to(prompts.at)
        _, weights = self._weights(call, prompts, same.int().argmax(-1), changed)
        rows = weights.new_zeros(*weights.shape[:3], len(self.ids))
        rows.index_add_(-1, prompts.columns.to(rows.device), weights)
        show(call.layer, same.any(-1), rows)

    def _change(self, call: Call, prompts: ChangedPrompts, changed: Sequence[Changed]) -> None:
        """Put in what heads put out at the last token with other rows of attention."""
        part, weights = self._weights(call, prompts, prompts.ends[:, None], changed)
        group = part.q.shape[1] // part.v.shape[1]
        for i, head, _ in changed:
            value = weights[i, head, 0] @ prompts.values(part, i)[head // group].float()
            place = (i, prompts.ends[i])
            call.outputs[head] = partial(_put, place, value, call.outputs.get(head))

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
        prompts = self._prompts(ids[at], at)
        slots = torch.searchsorted(prompts.at.contiguous(), torch.tensor([look]).to(at))
        shown = torch.ones_like(slots, dtype=torch.bool)
        places = Places(at[:, 0] * 0, slots[:, 0], slots.flip(1), shown)
        run = reader.record(
            prompts.inputs, places, deep=[layer], last=layer, visits=[prompts.attend]
        )
        part = prompts.part(run.calls[layer], slots[:, :1])
        run.calls[layer] = replace(part, q=run.calls[layer].q)
        return run


def _put(
    place: tuple[int, Tensor], value: Tensor, before: Callable[[Tensor], Tensor] | None, out: Tensor
) -> Tensor:
    """Replace one vector in a head's output, and apply the other changes of it."""
    out[place] = value.to(out)
    return out if before is None else before(out)


def room_of(scope: Scope) -> int:
    """Number of tokens to run together."""
    return _TOKENS.get(scope.device.type, _MORE_TOKENS)
