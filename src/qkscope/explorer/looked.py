"""One prompt, run once: every token can ask, and every head answers from what was kept.

Kept are all queries, keys and values, and what writers left at every token. Whatever is changed at one token is then a
run of that token alone: those before it stand as they were, so their keys and values are put before its own. Where a
model does not give its own attention again in this way (it has a memory besides its keys), the whole prompt runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.one import Asked, token_texts
from qkscope.attention import soft
from qkscope.capture.encode import Encoding
from qkscope.capture.patch import Edit
from qkscope.capture.pick import Capture, Places
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.run import Run

_AGREES = 1e-3  # of a query's length: how far one token alone may be from the same token in its prompt


class Changed(NamedTuple):
    """A token run with other attention logits: every head's attention, and the next token's logits, of each change."""

    attention: Float[Tensor, "b h t"]
    logits: Float[Tensor, "b v"]


Row = tuple[Head, Float[Tensor, " t"]]
"""A head and the logits that its row of attention gets instead."""


@dataclass
class Looked:
    """A prompt and what one run of it left; make one with `look`."""

    scope: Scope
    reader: Reader | None
    encoding: Encoding
    tokens: list[str]
    calls: Mapping[int, Call]
    found: Run | None

    @classmethod
    @torch.no_grad()
    def look(cls, scope: Scope, reader: Reader | None, prompt: str, longest: int) -> Looked:
        """Run a prompt.

        Parameters
        ----------
        scope : the model.
        reader : of every head; None where writers cannot be told apart.
        prompt : text.
        longest : tokens at most.
        """
        encoding = scope.encode([prompt])
        ids = encoding.inputs["input_ids"][0].tolist()
        if len(ids) > longest:
            raise BadInput(f"the prompt has {len(ids)} tokens: at most {longest} are looked at here.")
        if len(ids) < 2:
            raise BadInput("the prompt has one token, and a head chooses among several: type a longer one.")
        calls: dict[int, Call] = {}

        def keep(call: Call) -> None:
            calls[call.layer] = call

        found = None
        if reader is None:
            scope.watch(encoding.inputs, keep)
        else:
            found = reader.record(encoding.inputs, encoding.everywhere(), keep, deep=True)
        return cls(scope, reader, encoding, token_texts(scope, ids), calls, found)

    def asked(self, query: int) -> Asked:
        """The prompt, and the token that asks."""
        if not 0 < query < len(self.tokens):
            raise BadInput(f"token {query} cannot ask: choose from 1 to {len(self.tokens) - 1}, which see others.")
        return Asked(self.encoding, self.tokens, query)

    # ------------------------------------------------------------------ what heads saw

    @cached_property
    def _keys(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Every layer's keys one after the other, which of them each head reads, scales and caps."""
        kv: list[int] = []
        start, calls = 0, [self.calls[layer] for layer in sorted(self.calls)]
        for call in calls:
            heads, groups = call.q.shape[1], call.k.shape[1]
            kv += [start + i // (heads // groups) for i in range(heads)]
            start += groups
        per_head = [(call.scale, call.softcap or torch.inf) for call in calls for _ in range(call.q.shape[1])]
        scale, cap = (torch.tensor(values) for values in zip(*per_head, strict=True))
        keys = torch.cat([call.k[0].float().cpu() for call in calls])
        return keys, torch.tensor(kv), scale, cap if bool(cap.isfinite().any()) else None

    def captured(self, query: int) -> Capture:
        """Every head's query and keys, as one token asks."""
        keys, kv, scale, cap = self._keys
        calls = [self.calls[layer] for layer in sorted(self.calls)]
        at = torch.tensor([query])
        q = torch.cat([call.q[0, :, query].float().cpu() for call in calls])
        bias = [self._mask(call, query)[0, :, 0].expand(call.q.shape[1], -1).cpu() for call in calls]
        rests = [torch.full((call.q.shape[1],), -torch.inf) if call.sinks is None else call.sinks for call in calls]
        return Capture(
            heads=tuple(self.scope.heads()),
            q=q[None],
            k=keys[None],
            kv_of_head=kv,
            key_mask=torch.ones(1, keys.shape[1], dtype=torch.bool),
            scale=scale,
            softcap=cap,
            bias=torch.cat(bias)[None],
            rest=torch.cat([rest.float().cpu() for rest in rests])[None],
            example=torch.zeros(1, dtype=torch.long),
            query_positions=at,
            key_positions=torch.arange(keys.shape[1])[None],
        )

    @staticmethod
    def _mask(call: Call, query: int) -> Float[Tensor, "1 m 1 t"]:
        at = torch.tensor([query], device=call.q.device)
        return call.mask_rows(torch.zeros_like(at), at)[:, :, None]

    # ------------------------------------------------------------------ runs of one token

    @torch.no_grad()
    def run(self, query: int, rows: Sequence[Row | None]) -> Changed:
        """The token run with one row of attention changed, each change on its own; None changes nothing.

        Parameters
        ----------
        query : the token that asks.
        rows : changes.
        """
        if self._alone(query):
            return self._run(query, rows)
        return self._run_whole(query, rows)

    def _alone(self, query: int) -> bool:
        """Whether the token alone, after the others' keys and values, asks with the queries it asked with."""
        if not self.scope.facts.takes_positions:
            return False
        if not hasattr(self, "_checked"):
            worst = 0.0

            def compare(call: Call) -> None:
                nonlocal worst
                mine, theirs = call.q[0, :, 0].float(), self.calls[call.layer].q[0, :, query].float()
                worst = max(worst, float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30)))

            self._run(query, [None], compare)
            self._checked = worst < _AGREES
        return self._checked

    def _run(self, query: int, rows: Sequence[Row | None], *visits: object) -> Changed:
        size, kept = len(rows), dict[int, Tensor]()
        columns = slice(query, query + 1)
        inputs = {
            name: value[:, columns].expand(size, -1)
            for name, value in self.encoding.inputs.items()
            if name != "attention_mask"
        }

        def visit(call: Call) -> None:
            base = self.calls[call.layer]
            for compare in visits:
                compare(call)  # type: ignore[operator]
            kept[call.layer], call.output = _attend(call, base, self._mask(base, query)[0, :, 0, : query + 1], rows)

        at = Places(*(torch.arange(size), torch.zeros(size, dtype=torch.long)), *[torch.zeros(size, 0).long()] * 2)
        at = replace(at, key_mask=at.key_mask.bool()).to(self.scope.device)
        logits = self.scope.watch(inputs, visit, logits_at=at)
        assert logits is not None
        return Changed(torch.cat([kept[layer] for layer in sorted(kept)], dim=1).cpu(), logits.cpu())

    def _run_whole(self, query: int, rows: Sequence[Row | None]) -> Changed:
        """The same with the whole prompt, as many times as there are changes."""
        inputs = self.encoding.inputs
        row, at = torch.zeros(1, dtype=torch.long), torch.tensor([query])
        places = Places.everywhere(row, at, inputs["attention_mask"].cpu()).to(self.scope.device)
        made = []
        for change in rows:
            edits = []
            if change is not None:
                some = torch.arange(query + 1)[None].to(at.device)
                edits = [Edit.logits(change[0], at, some, change[1][None, : query + 1])]
            made.append(self.scope.capture_inputs(inputs, places=places, logits=True, edits=edits).to("cpu"))
        attention = torch.cat([one.attention()[..., : query + 1] for one in made])
        return Changed(attention, torch.cat([one.logits for one in made if one.logits is not None]))


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
