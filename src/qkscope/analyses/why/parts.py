"""The tables of an answer: a relative logit split in several ways, a swap of what was written, and the next token.

``by`` says which way it is split: ``writers`` (of the key, of the query), ``singular`` (terms of the head's singular
vectors), or ``features`` (a fit's subspaces, in the paper's order). The parts of each way and side sum to the logit.

Swaps: the strongest writers' parts exchanged between the key and another token, in the residual stream, so that content
moves and position stays. Does the attention follow them? Random writers of the same layers stand beside it.

The direct effect on the next token is linear once norms are frozen: ``W_U · gain · σ · W_O a(p,t) v(t)``; other layers
may add to it or undo it. What truly changes is measured: the head's logit on the key is −∞ and the model runs on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.relative import singular_basis
from qkscope.analyses.trace.prompt import PromptTrace, Question
from qkscope.analyses.trace.verdicts import verdict
from qkscope.capture.tokens import token_texts
from qkscope.change.rows import Rerun
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.direct import direct_effect, direct_effects
from qkscope.linear.run import Run
from qkscope.maths.attribution import Split, SplitSide, part_name, split_query, split_rows
from qkscope.maths.singular import singular_coordinates

SHOWN = 8  # parts of each split that are named; the others are its rest
REST = "rest"
TOKENS = 5


def part_rows(
    one: PromptTrace, features: Mapping[str, Any] | None = None, split: Split = "sequential"
) -> list[dict[str, Any]]:
    """The table ``parts`` of one head, query and key."""
    rows = []
    for side, values in one.marginals.items():
        rows += _rows(one, "writers", dict(zip(one.writers, values[0].tolist(), strict=True)), side)
    terms = singular_terms(one)
    if terms is not None:
        rows += _rows(one, "singular", {f"vector {i}": value for i, value in enumerate(terms)}, "both")
    return rows + feature_rows(one, features or {}, split)


def feature_rows(one: PromptTrace, features: Mapping[str, Any], split: Split = "sequential") -> list[dict[str, Any]]:
    """Those rows of it that features (subspaces by name) give, smallest rank first."""
    if not features:
        return []
    ordered = sorted(features.items(), key=lambda item: item[1].rank)
    bases = {part_name(name): feature.basis("query") for name, feature in ordered}
    queries = split_query(one.rows.q[0, 0], bases, split)  # what no feature explains is the rest
    values = {name: float(queries[name] @ _weighted_keys(one)) * one.scale for name in bases}
    return _rows(one, "features", values, "query", shown=len(features))


def _weighted_keys(one: PromptTrace) -> Float[Tensor, " d"]:
    """The key less the mean of those it is compared with."""
    return one.weights[0].to(one.rows.k) @ one.rows.k[0, 0]


def singular_terms(one: PromptTrace) -> list[float] | None:
    """Terms of the relative logit along the head's singular vectors; None where its weights cannot be read."""
    scope, run = one.run.reader.scope, one.run
    layer = scope.facts.layers[one.head.layer]
    if "query_frame" in layer.refusals:
        return None
    try:
        basis = singular_basis(scope, [one.head])
    except BadInput:
        return None
    both = torch.stack([one.rows.q[0, 0], _weighted_keys(one)])[None, :, None]
    rotary = run.calls[one.head.layer].rotary
    if rotary is not None and layer.offset is not None:  # both turned back by the query's place
        at = torch.full_like(run.row, one.asked.query)[:, None]
        both = rotary.turn(both, run.row, at, layer.offset, back=True)
    q, difference = both.double().cpu().unbind(1)
    alpha, gamma = singular_coordinates(basis.read.double(), q - basis.c_Q.double(), difference)
    return (one.scale * alpha * gamma).flatten().tolist()


def _rows(
    one: PromptTrace, by: str, values: Mapping[str, float], side: SplitSide, shown: int = SHOWN
) -> list[dict[str, Any]]:
    """The largest parts, and all others as one."""
    order = sorted(values, key=lambda name: -abs(values[name]))
    named = {name: torch.tensor([values[name]]) for name in order[:shown]}
    total = torch.tensor([one.total])
    named[REST] = total - sum(named.values())
    rows = split_rows(one.head, one.asked.query, [one.key], total, named, side)
    return [{**row, "by": by} for row in rows]


def swap_row(one: PromptTrace, draws: int, seed: int, size: int = 2) -> dict[str, Any]:
    """A row of the table ``swaps``: attention on the key and on the next most attended token, before and after."""
    key, other, chosen = one.key, one.most_attended(one.free), {"key": one.strongest("key", size)}
    gains = one.exchanged(other)

    def swapped(writers: Mapping[Any, list[int]]) -> Float[Tensor, " t"]:
        """The attention row with these writers' parts exchanged."""
        both = gains[writers["key"]].sum(0)
        return one.changed({key: both[0], other: both[1]})

    before, after = one.attention, swapped(chosen)
    beside = one.beside(
        chosen, lambda drawn: swapped(drawn)[other], draws, lambda _, draw: derived_seed(seed, "swap", draw)
    )
    total = float(before[key] + before[other])  # so much can follow; what did not is left
    left, left_beside = total - float(after[other] - before[other]), total - (beside - before[other])
    vacuous = len(chosen["key"]) >= len(one.writers) - 1
    return {
        "head": str(one.head), "writers": ", ".join(one.writers[i] for i in chosen["key"]), "key": key, "other": other,
        "other_token": one.asked.tokens[other], "key_before": float(before[key]), "key_after": float(after[key]),
        "other_before": float(before[other]), "other_after": float(after[other]), "random": float(beside.mean()),
        "random_high": float(beside.max()), "draws": draws, "sets": len(beside),
        "verdict": verdict(total, left, left_beside, attention=float(before[key]), vacuous=vacuous),
    }  # fmt: skip


class Output:
    """The next token after one token of a prompt, and what heads have to do with it.

    Parameters
    ----------
    run : of the prompt, with logits.
    asked : the prompt and the token that asks.
    """

    def __init__(self, run: Run, asked: Question) -> None:
        assert run.logits is not None
        self.run, self.asked, self.scope = run, asked, run.reader.scope
        self.logits = run.logits[0].detach()
        self.chances = self.logits.softmax(-1)

    def token(self, i: int) -> str:
        """What a token of the vocabulary reads as."""
        return token_texts(self.scope, [i])[0]

    def from_key(self, one: PromptTrace) -> Float[Tensor, " v"] | None:
        """What a head adds to the logits by itself by what it read at the key, less its mean over all tokens."""
        layer = one.head.layer
        v = self.run.calls[layer].v[0, self.run.kv(one.head, "v"), one.key].float() * one.attention[one.key]
        W = self.run.reader.output_weights(layer)[0][one.head.index].to(v)
        pushed = direct_effect(self.run, layer, (W @ v)[None].to(self.run.row.device))
        return None if pushed is None else pushed[0] - pushed[0].mean()  # a constant changes no probability

    def removed(self, edges: Sequence[tuple[Head, int]]) -> Float[Tensor, "n v"]:
        """Next-token logits where each of these heads, one at a time, may not look at its key."""
        return Rerun(self.scope, self.asked.inputs, self.run.calls).hidden(self.asked.query, edges)

    def rows(self, one: PromptTrace) -> list[dict[str, Any]]:
        """The table ``output``: the likeliest next tokens and those that the head pushes most."""
        control = [one.most_attended(one.free)] if one.free else []
        after = self.removed([(one.head, key) for key in (one.key, *control)]).softmax(-1)
        pushed = self.from_key(one)
        shown = self.chances.topk(TOKENS).indices.tolist()
        if pushed is not None:
            shown += pushed.topk(3).indices.tolist()
        return [
            {"head": str(one.head), "key": one.key, "token": self.token(i), "id": i, "before": float(self.chances[i]),
             "without_key": float(after[0, i]), "without_other": float(after[1, i]) if control else None,
             "direct": None if pushed is None else float(pushed[i])}
            for i in dict.fromkeys(shown)
        ]  # fmt: skip

    def strongest_heads(self, count: int) -> dict[Head, float]:
        """The heads whose outputs push the likeliest next token's logit most, one way or the other, and how much."""
        pushed = direct_effects(self.run, int(self.logits.argmax()))
        if pushed is None:
            between = "what stands between its residual stream and its logits is not linear"
            raise BadInput(f"which heads of {self.scope.name} matter is not seen directly ({between}): name a head.")
        own = {head: float(pushed[str(head)][0, 0]) for head in self.run.reader.heads}
        return {head: own[head] for head in sorted(own, key=lambda head: -abs(own[head]))[:count]}
