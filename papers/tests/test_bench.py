"""Bench rows of tracing and of reasons: registered under their names, and timed on a model of ours."""

from __future__ import annotations

import math

import pytest

import qkscope as qk
from qkscope.analyses.because import Look
from qkscope.analyses.prompts import batches_of
from qkscope.heads import Head
from qkscope_papers.bench import harness, models


@pytest.mark.parametrize("heads", ["L1H0", "all"])
def test_tracing_gives_a_finite_ratio(heads: str) -> None:
    scope = qk.Scope.load("nano:mixed", device="cpu")
    read = [head for head in scope.parse(heads) if head.layer > 0]
    units = qk.tasks.binding(4).test(8)
    batches = [scope.encode([units[i][0] for i in part]) for part in batches_of(units, 4)]
    hooks = _hooks(scope)
    seconds = models.trace_seconds(scope, read, batches, repeats=2)
    row = seconds.overhead("")
    assert math.isfinite(row["ratio"])
    assert row["ratio"] == seconds.ours / seconds.plain > 0
    assert _hooks(scope) == hooks == 0


def test_the_plain_side_ends_where_queries_and_keys_exist() -> None:
    """A ratio that compares with more of the forward than is needed would flatter us."""
    scope = qk.Scope.load("nano:mixed", device="cpu")
    units = qk.tasks.binding(4).test(2)
    ran: list[str] = []
    layers = scope.model.base_model.layers
    watched = [
        layer.self_attn.o_proj.register_forward_hook(lambda *_, i=i: ran.append(f"L{i}"))
        for i, layer in enumerate(layers)
    ]
    batch = scope.encode([unit[0] for unit in units])
    models.forward_to(scope, [batch], layers[1].self_attn)()
    for hook in watched:
        hook.remove()
    assert ran == ["L0"]


def test_reasons_give_a_finite_ratio() -> None:
    scope = qk.Scope.load("nano:mixed", device="cpu")
    ids = scope.encode(["hat: O jam: Z jam:"]).inputs["input_ids"][0]
    seconds = models.because_seconds(scope, ids, [Look(Head(2, 3), 8, 7)], 8, 2)
    assert math.isfinite(seconds.faster("")["ratio"])
    assert seconds.ours > 0 < seconds.plain
    assert _hooks(scope) == 0


def test_tracing_and_reasons_have_rows() -> None:
    assert {"trace_one", "trace_all", "because", "atlas_overhead"} <= set(harness._ROWS)
    assert Head(18, 6) in qk.Scope.load("smollm2-135m", device="cpu").heads()


def _hooks(scope: qk.Scope) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in scope.model.modules())
