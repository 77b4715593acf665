"""One prompt, run once: every token can ask, and every head answers from what was kept.

Kept are all queries, keys and values, and what writers left at every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.one import Asked, token_texts
from qkscope.capture.encode import Encoding
from qkscope.capture.pick import Capture
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call
from qkscope.change.rows import Rerun
from qkscope.errors import BadInput
from qkscope.linear.reader import Reader
from qkscope.linear.run import Run


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

    @cached_property
    def again(self) -> Rerun:
        """The prompt, ready to be run again with rows of attention changed."""
        return Rerun(self.scope, self.encoding.inputs, self.calls)
