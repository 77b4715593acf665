"""One prompt: any query token, any key token, some heads; who wrote them, and what cutting them does there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qkscope.analyses.trace.edges import says_cancels
from qkscope.analyses.trace.one import Asked, PromptTrace
from qkscope.analyses.trace.rows import ATTENDED, SIDES
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.writers import Reader, Recorded
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.maths.writers import cancelling
from qkscope.runs.provenance import provenance


def record_prompt(reader: Reader, asked: Asked) -> Recorded:
    """One run of the prompt, every token up to the query a key."""
    mask = asked.inputs["attention_mask"]
    row, query = torch.zeros(1, dtype=torch.long, device=mask.device), torch.tensor([asked.query], device=mask.device)
    return reader.record(asked.inputs, Places.everywhere(row, query, mask))


def trace_prompt(
    scope: Scope,
    prompt: str | Example,
    heads: Sequence[Head],
    *,
    query: int | None = None,
    key: int | None = None,
    versus: int | None = None,
    depth: int = 2,
    projectors: Mapping[Head, Tensor] | None = None,
    chat: bool = False,
    draws: int = 20,
    seed: int = 0,
) -> dict[str, Any]:
    """Fields of a `Trace` of one prompt."""
    asked, reader = Asked.of(scope, prompt, query, chat), Reader(scope, heads)
    found = record_prompt(reader, asked)
    names = ("writers", "pairs", "cuts", "graph", "prompt", "tokens", "check")
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    said = []
    for head in heads:
        one = PromptTrace(reader, found, asked, head, key, versus, (projectors or {}).get(head))
        cuts = one.cut_rows(draws, seed)
        tables["writers"] += one.writer_rows()
        tables["pairs"] += one.pair_rows()
        tables["cuts"] += cuts
        tables["tokens"] += one.token_rows()
        if one.against:
            drawn = one.graph(depth)
            tables["graph"] += drawn.rows
            tables["prompt"] += drawn.prompt
        tables["check"].append({
            "head": str(head), "sum_error": one.error, "logit": one.total,
            "cancels": max(cancelling(own, one.total) for own in one.marginals().values()),
            "query": asked.query, "key": one.key, "attention": float(one.attention[one.key]),
            "first": float(one.attention[0]), "n": 1,
        })  # fmt: skip
        said.append(_said(one, cuts))
    return {
        "experiment": "trace/prompt",
        "answer": " ".join(said),
        "tables": tables,
        "model": scope.name,
        "seed": seed,
        "provenance": provenance(
            model=scope.name, weights=scope.weights_hash, tokenizer=scope.tokenizer_hash, prompt=_shown(prompt),
            heads=[str(head) for head in heads], tokens=asked.tokens, query=asked.query,
        ),
    }  # fmt: skip


def _shown(prompt: str | Example) -> str:
    return prompt if isinstance(prompt, str) else prompt.show(2000)


def _said(one: PromptTrace, cuts: Sequence[dict[str, Any]]) -> str:
    tokens, key, attention = one.asked.tokens, one.key, float(one.attention[one.key])
    asking = tokens[one.asked.query]
    where = f"{one.head} at {asking!r} gives {attention:.0%} of its attention to {tokens[key]!r} (token {key})"
    if attention < ATTENDED:
        return f"{where}: it does not attend there, so what follows explains a logit and no attention."
    marginals, total = one.marginals(), one.total
    named = {
        side: " and ".join(
            f"{one.writers[i]} ({float(marginals[side][i]) / total:.0%})" for i in one.strongest(side, 2)
        )
        for side in SIDES
    }
    cut = next(row for row in cuts if row["side"] == "key" and row["k"] == min(2, max(r["k"] for r in cuts)))
    cancel = says_cancels(one.writer_rows())
    return (
        f"{where}. Its key is written by {named['key']}, its query by {named['query']}.{cancel} With {cut['writers']}"
        f" cut from the key, the attention there is {cut['after']:.0%} (others of their layers: {cut['random']:.0%}):"
        f" {cut['verdict']}."
    )
