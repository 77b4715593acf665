"""Bench row of discovery: what pooling every head costs, sums and null replicates included."""

from __future__ import annotations

import torch

from qkscope.analyses.discover.discover import key_heads
from qkscope.analyses.discover.texts import corpus, text_examples
from qkscope.bench.harness import Row, compare, hardware, overhead, row, wait
from qkscope.capture.pool import pool
from qkscope.capture.scope import Scope
from qkscope.maths.discovery import SelfContrast

_BATCHES, _REPLICATES = 2, 41


@row
def discover_overhead() -> Row:
    """All heads over passages of our corpus, eight queries each, in the query's frame, against the bare body."""
    scope = Scope.load("smollm2-135m")
    size = 16 if scope.device.type == "cpu" else 256  # a GPU that waits for its orders measures nothing but them
    examples = text_examples(scope, corpus()[: size * _BATCHES])
    batches = [scope.encode(examples[i : i + size]) for i in range(0, len(examples), size)]
    heads = scope.heads()
    contrast = SelfContrast(
        heads, scope.d_head, kv_of_head=key_heads(scope, heads), replicates=_REPLICATES, device=scope.device
    )

    @torch.no_grad()
    def plain() -> None:
        for batch in batches:
            scope.model.base_model(**batch.inputs, use_cache=False)
        wait(scope.device)

    def ours() -> None:
        for batch in batches:
            pooled = pool(scope, batch, space="query_frame")
            drawn = {"drawn": pooled.drawn, "drawn_mask": pooled.drawn_mask}
            whose = {"prompts": pooled.example, "valid": pooled.valid}
            contrast.update(pooled.q, pooled.attended, pooled.mean, **whose, **drawn)
        wait(scope.device)

    plain_s, ours_s = compare(plain, ours, repeats=5)
    tokens = sum(len(example) for example in examples)
    queries = sum(len(example.queries) for example in examples)
    note = f"{len(heads)} heads, {tokens} tokens, {queries} queries, {_REPLICATES} replicates each"
    return overhead(plain_s, ours_s, f"{note}; {hardware(scope.device)}")
