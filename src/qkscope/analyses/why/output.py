"""What a head does for the next token: what it writes, straight to the logits, and what changes where it may not look.

The direct effect is linear once norms are frozen: ``W_U · gain · σ · W_O a(p,t) v(t)``; other layers may add to it or
undo it. What truly changes is measured: the head's logit on the key is set to −∞ and the model runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.one import Asked, PromptTrace
from qkscope.capture.tokens import token_texts
from qkscope.change.rows import Rerun
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.direct import direct_effect, direct_effects
from qkscope.linear.run import Run

TOKENS = 5


class Output:
    """The next token after one token of a prompt, and what heads have to do with it.

    Parameters
    ----------
    run : of the prompt, with logits.
    asked : the prompt and the token that asks.
    """

    def __init__(self, run: Run, asked: Asked) -> None:
        assert run.logits is not None
        self.run, self.asked, self.scope, self.query = run, asked, run.reader.scope, asked.query
        self.logits = run.logits[0].detach()

    @cached_property
    def chances(self) -> Float[Tensor, " v"]:
        """Probabilities of the next token."""
        return self.logits.softmax(-1)

    def token(self, i: int) -> str:
        """What a token of the vocabulary reads as."""
        return token_texts(self.scope, [i])[0]

    # ------------------------------------------------------------------ direct effects

    def direct(self, head: Head, z: Float[Tensor, " e"] | None = None) -> Float[Tensor, " v"] | None:
        """What a head's output (or a part of it) adds to the logits by itself, less its mean over all tokens."""
        W = self.run.reader.output_weights(head.layer)[0][head.index]
        own = self.run.heads[head.layer][0, 0].unflatten(0, (-1, W.shape[1]))[head.index]
        found = direct_effect(self.run, head.layer, (W.to(own) @ (own if z is None else z.to(own)))[None])
        return None if found is None else found[0] - found[0].mean()  # a constant changes no probability

    def from_key(self, one: PromptTrace) -> Float[Tensor, " v"] | None:
        """What the head adds by what it read at the key alone."""
        v = self.run.calls[one.head.layer].v[0, self.run.kv(one.head, "v"), one.key].float()
        return self.direct(one.head, v * one.attention[one.key].to(v))

    # ------------------------------------------------------------------ what truly changes

    def removed(self, edges: Sequence[tuple[Head, int]]) -> Float[Tensor, "n v"]:
        """Next-token logits where each of these heads, one at a time, may not look at its key."""
        return Rerun(self.scope, self.asked.inputs, self.run.calls).hidden(self.query, edges)

    def rows(self, one: PromptTrace) -> list[dict[str, Any]]:
        """The table ``output``: the likeliest next tokens and those that the head pushes most."""
        others = [i for i in one.others if i not in (one.key, self.query)]
        control = max(others, key=lambda i: float(one.attention[i])) if others else None
        edges = [(one.head, one.key), *([(one.head, control)] if control is not None else [])]
        after = self.removed(edges).softmax(-1)
        pushed = self.from_key(one)
        shown = self.chances.topk(TOKENS).indices.tolist()
        if pushed is not None:
            shown += pushed.topk(3).indices.tolist()
        return [
            {"head": str(one.head), "key": one.key, "token": self.token(i), "id": i, "before": float(self.chances[i]),
             "without_key": float(after[0, i]), "without_other": float(after[1, i]) if len(after) > 1 else None,
             "direct": None if pushed is None else float(pushed[i])}
            for i in dict.fromkeys(shown)
        ]  # fmt: skip

    def strongest_heads(self, count: int = 6) -> list[Head]:
        """The heads whose outputs push the likeliest next token most, one way or the other: one direction for all."""
        pushed = direct_effects(self.run, int(self.logits.argmax()))
        if pushed is None:
            between = "what stands between its residual stream and its logits is not linear"
            raise BadInput(f"which heads of {self.scope.name} matter is not seen directly ({between}): name a head.")
        size = {head: abs(float(pushed[str(head)][0, 0])) for head in self.run.reader.heads}
        return sorted(size, key=lambda head: -size[head])[:count]
