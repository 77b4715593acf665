"""One prompt, run once: every token can ask, and every head answers from what was kept.

Kept are all queries, keys and values, and what writers left at every token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.one import Asked, token_texts
from qkscope.capture.encode import Encoding
from qkscope.capture.scope import Scope
from qkscope.change.rows import Rerun
from qkscope.errors import BadInput
from qkscope.linear.reader import Reader
from qkscope.linear.run import Run


@dataclass
class Looked:
    """A prompt, what one run of it left, and the same ready to be run again; make one with `look`."""

    encoding: Encoding
    tokens: list[str]
    run: Run
    again: Rerun

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
        ids, places = encoding.inputs["input_ids"][0].tolist(), encoding.everywhere()
        if len(ids) > longest:
            raise BadInput(f"the prompt has {len(ids)} tokens: at most {longest} are looked at here.")
        if len(ids) < 2:
            raise BadInput("the prompt has one token, and a head chooses among several: type a longer one.")
        if reader is None:
            run = Run(None, places.row, places.keys, encoding.inputs)  # type: ignore[arg-type]
            scope.watch(encoding.inputs, lambda call: run.calls.__setitem__(call.layer, call))
        else:
            run = reader.record(encoding.inputs, places, deep=True)
        return cls(encoding, token_texts(scope, ids), run, Rerun(scope, encoding.inputs, run.calls))

    def asked(self, query: int) -> Asked:
        """The prompt, and the token that asks."""
        if not 0 < query < len(self.tokens):
            raise BadInput(f"token {query} cannot ask: choose from 1 to {len(self.tokens) - 1}, which see others.")
        return Asked(self.encoding, self.tokens, query)

    def attention(self, query: int) -> Float[Tensor, "h t"]:
        """Of every head, as one token asks."""
        rows = [self.again.row(query, head) for head in self.again.scope.heads()]
        return torch.cat([row.attention()[0].cpu() for row in rows])[:, : query + 1]
