"""Tokens added up before the matrices give what writers carried to each token give."""

from __future__ import annotations

import pytest
import torch

import qkscope as qk
from qkscope import Example, Head
from qkscope.analyses.trace.one import Asked, PromptTrace
from qkscope.capture.families import tiny_model
from qkscope.linear.reader import Reader


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt2", "olmo2"])
def test_folded_parts_are_those_carried_to_every_token(family):
    """Plain, norms after parts, QK-norm, learned positions, a norm of the query and key together."""
    scope = qk.Scope.from_model(tiny_model(family), name=family, check=False)
    reader = Reader(scope, [Head(1, 0), Head(1, 1)])
    asked = Asked.of(scope, Example(ids=tuple(range(3, 20))), None, False)
    found = reader.record(asked.inputs, asked.places)
    with torch.no_grad():
        for head in reader.heads:
            one = PromptTrace(reader, found, asked, head)
            carried = one._pushed
            for name, part in one.parts.items():
                torch.testing.assert_close(part, carried[name], atol=1e-5, rtol=1e-4)
            q = one._turned("query", carried["query"])
            by_hand = {"query": q @ carried["weighted"].sum(0), "key": carried["weighted"] @ q.sum(0)}
            for side, values in one.marginals().items():
                torch.testing.assert_close(values, by_hand[side] * one.scale, atol=1e-5, rtol=1e-3)
