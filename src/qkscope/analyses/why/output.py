"""What a head does for the next token: what it writes, straight to the logits, and what changes where it may not look.

The straight way is linear once the last norm is held: ``W_U · gain · σ · W_O a(p,t) v(t)``; other layers may add to it
or undo it. What truly changes is measured: the head's logit on the key is set to −∞ and the model runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkscope.analyses.trace.one import Asked, PromptTrace
from qkscope.capture.patch import Edit
from qkscope.capture.pick import Places
from qkscope.capture.projection import is_norm
from qkscope.capture.stream import Heads, Normed, Scaled, Sum
from qkscope.capture.tap import Call, cleared
from qkscope.capture.tokens import token_texts
from qkscope.capture.writers import Reader, norm_scalar
from qkscope.errors import BadInput
from qkscope.heads import Head

TOKENS = 5


@dataclass
class _Seen:
    heads: dict[int, Tensor]
    values: dict[int, Tensor]
    given: dict[nn.Module, Tensor]
    gave: dict[nn.Module, Tensor]
    last: Tensor | None = None
    stream: Tensor | None = None


class Output:
    """The next token after one token of a prompt, and what heads have to do with it.

    Parameters
    ----------
    reader : of the model's heads.
    asked : the prompt and the token that asks.
    """

    def __init__(self, reader: Reader, asked: Asked) -> None:
        self.reader, self.asked = reader, asked
        self.scope, self.query = reader.scope, asked.query
        self.seen = _Seen({}, {}, {}, {})
        self.logits = self._run()

    @torch.no_grad()
    def _run(self) -> Float[Tensor, " v"]:
        """One whole run, with notes of what heads put out, what values they read, and what the last norm met."""
        seen = self.seen
        inside = {module for block in self.reader.blocks for module in block.module.modules()}
        outside = [m for m in self.scope.model.modules() if is_norm(m) and m not in inside]
        after = [norm for block in self.reader.blocks for norm in block.norms]

        def heads(layer: int, _module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.heads[layer] = args[0].reshape(1, -1, args[0].shape[-1])[0, self.query].float()

        def norm(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if args[0].ndim == 3:  # inside an LM head it is given the asking token alone
                seen.given[module], seen.gave[module] = (self._asking(x) for x in (args[0], out))

        def block(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
            seen.stream = self._asking(out if isinstance(out, Tensor) else out[0])

        def unembedded(_module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.last = args[0].reshape(-1, args[0].shape[-1])[-1].float()

        def visit(call: Call) -> None:
            seen.values[call.layer] = call.v[0]

        hooks = [
            block.output.register_forward_pre_hook(partial(heads, layer))
            for layer, block in enumerate(self.reader.blocks)
            if block.output is not None
        ]
        hooks += [module.register_forward_hook(norm) for module in [*outside, *after]]
        hooks.append(self.reader.blocks[-1].module.register_forward_hook(block))
        head = self.scope.model.get_output_embeddings()
        if head is not None:
            hooks.append(head.register_forward_pre_hook(unembedded))
        with cleared(hooks):
            found = self.scope.watch(self.asked.inputs, visit, logits_at=self.asked.places)
        assert found is not None
        return found[0]

    def _asking(self, x: Float[Tensor, "1 t d"]) -> Float[Tensor, " d"]:
        """The row of the asking token, which may stand alone."""
        return x[0, self.query if x.shape[1] == len(self.asked.tokens) else -1].float()

    @cached_property
    def chances(self) -> Float[Tensor, " v"]:
        """Probabilities of the next token."""
        return self.logits.softmax(-1)

    def token(self, i: int) -> str:
        """What a token of the vocabulary reads as."""
        return token_texts(self.scope, [i])[0]

    # ------------------------------------------------------------------ the straight way

    @cached_property
    def _straight(self) -> Float[Tensor, "v d"] | None:
        """What a part of the residual stream adds to the logits, the last norm held; None where that is not seen."""
        head, last, stream = self.scope.model.get_output_embeddings(), self.seen.last, self.seen.stream
        if head is None or last is None or stream is None:
            return None
        # a norm that reads the residual stream and that the LM head reads: neither has to be there
        ends = [m for m, out in self.seen.gave.items() if _alike(out, last) and _alike(self.seen.given[m], stream)]
        if not ends:
            return None
        own = self.reader.taken_apart(ends[0], stream[None])
        gain = own.gain.to(stream) * norm_scalar(ends[0], own, stream[None])[0]
        W = head.weight.detach().float() * gain
        return W - W.mean(-1, keepdim=True) if own.centres else W

    def direct(self, head: Head, z: Float[Tensor, " e"] | None = None) -> Float[Tensor, " v"] | None:
        """What a head's output (or a part of it) adds to the logits by itself, less its mean over all tokens."""
        W, block = self._straight, self.reader.blocks[head.layer]
        W_O = self.reader.output_weights(head.layer)[0][head.index]
        own = self.seen.heads[head.layer].unflatten(0, (-1, W_O.shape[1]))[head.index]
        written = W_O.to(own) @ (own if z is None else z.to(own))
        tree = block.tree
        if W is None or not isinstance(tree, Sum):
            return None
        for number, node in tree.terms:
            if isinstance(node, Heads):
                return _centred(W @ (number * written))
            if isinstance(node, Scaled) and isinstance(node.inner, Heads):
                return _centred(W @ (number * written * node.gain.to(written)))
            if isinstance(node, Normed) and isinstance(node.inner, Heads) and node.norm in self.seen.given:
                given = self.seen.given[node.norm]
                norm = self.reader.taken_apart(node.norm, given[None])
                scale = norm.gain.to(given) * norm_scalar(node.norm, norm, given[None])[0]
                return _centred(W @ (number * written * scale))
        return None

    def from_key(self, one: PromptTrace) -> Float[Tensor, " v"] | None:
        """What the head adds by what it read at the key alone."""
        shape = self.scope.facts.layers[one.head.layer]
        v = self.seen.values[one.head.layer][one.head.kv(shape.n_heads // shape.n_kv_heads), one.key].float()
        return self.direct(one.head, v * one.attention[one.key].to(v))

    # ------------------------------------------------------------------ what truly changes

    def removed(self, edges: Sequence[tuple[Head, int]]) -> Float[Tensor, "n v"]:
        """Next-token logits where each of these heads, one at a time, may not look at its key."""
        count = len(edges)
        inputs = {k: v.expand(count, *v.shape[1:]).contiguous() for k, v in self.asked.inputs.items()}
        device = self.asked.inputs["attention_mask"].device
        edits = []
        for row, (head, key) in enumerate(edges):
            queries = torch.full((count,), -1, device=device)
            queries[row] = self.query
            positions = torch.full((count, 1), key, device=device)
            edits.append(Edit.logits(head, queries, positions, torch.full((count, 1), -torch.inf, device=device)))
        rows = torch.arange(count, device=device)
        places = Places.everywhere(rows, torch.full_like(rows, self.query), inputs["attention_mask"])
        last = self.scope.heads()[-1]
        found = self.scope.capture_inputs(inputs, places=places, heads=[last], rest=False, logits=True, edits=edits)
        assert found.logits is not None
        return found.logits

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
        """The heads whose outputs push the likeliest next token most, one way or the other."""
        best = int(self.logits.argmax())
        pushed = {head: self.direct(head) for head in self.scope.heads()}
        if any(value is None for value in pushed.values()):
            between = "more than one norm stands between its residual stream and its LM head"
            why = between if self._straight is None else "its blocks do not simply add what their heads write"
            raise BadInput(f"which heads of {self.scope.name} matter is not seen directly ({why}): name a head.")
        size = {head: abs(float(value[best])) for head, value in pushed.items() if value is not None}
        return sorted(size, key=lambda head: -size[head])[:count]


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= 1e-3 * other.norm())


def _centred(values: Float[Tensor, " v"]) -> Float[Tensor, " v"]:
    """A constant added to all logits changes no probability."""
    return values - values.mean()
