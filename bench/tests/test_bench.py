"""Bench rows of tracing give ratios and leave no hook behind; the bridge; on a nano."""

import math
from dataclasses import replace

import pytest
import torch

import qkscope as qk
from qkscope.findings.task_batches import batches_of
from qkscope.heads import Head
from qkscope_bench import models
from qkscope_bench.shapes import asking, naming
from qkscope_papers.franco2026.bridge import bridge


@pytest.fixture(scope="module")
def scope(nano) -> qk.Scope:
    return nano


@pytest.fixture(autouse=True)
def _no_hook_is_left(scope):
    def hooks():
        return sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in scope.model.modules()
        )

    before = hooks()
    yield
    assert hooks() == before


def test_rows_of_tracing_reasons_and_names_have_a_ratio_also_without_a_gpu(scope):
    units = qk.tasks.binding(4).test(8)
    batches = [scope.encode([units[i][0] for i in part]) for part in batches_of(units, 4)]
    rows = [
        models.trace_seconds(scope, read, batches, 1).overhead("")
        for read in ([Head(1, 0)], scope.heads()[4:])
    ]
    rows += [asking("tiny", 24), naming("tiny", 2, 48)]
    assert all(math.isfinite(row["ratio"]) and row["ratio"] > 0 for row in rows)
    assert "of 23 replaced" in rows[2]["note"]
    assert "12 heads" in rows[3]["note"]


def test_the_plain_side_ends_where_queries_and_keys_exist(scope):
    """A ratio that compares with more of the forward than is needed would flatter us."""
    ran: list[str] = []
    layers = scope.model.base_model.layers
    watched = [
        layer.self_attn.o_proj.register_forward_hook(lambda *_, i=i: ran.append(f"L{i}"))
        for i, layer in enumerate(layers)
    ]
    batch = scope.encode([unit[0] for unit in qk.tasks.binding(4).test(2)])
    models.forward_to(scope, [batch], layers[1].self_attn)()
    for hook in watched:
        hook.remove()
    assert ran == ["L0"]


def test_the_bridge_from_a_feature_to_singular_vectors(scope):
    task = qk.tasks.binding(5, form="sentence")
    fit = qk.decompose(
        scope, task, "L1H0,L2H0", n=64, contrasts=["lexical"], space="query_frame", batch_size=16
    )
    basis = qk.sums.singular_basis(scope, "L1H0,L2H0")
    tables, arrays = bridge(scope, fit, basis, task.test(32), sizes=(1, 8), draws=3, batch_size=16)
    row = tables["alignment"][0]
    assert row["vectors"] < row["vectors_rotated"] / 1.5  # few singular vectors, many rotated ones
    assert row["key"] > row["key_random"]
    # keys know the prompts: their axes are the control that random ones are not
    assert row["vectors_key_pca"] < row["vectors_random"] / 1.5
    assert row["key_key_pca"] > row["key_random"]
    torch.testing.assert_close(fit["lexical", "L1H0"].cov_k, fit.sums["lexical"].cov_k.matrix()[0])
    shift = {(r["method"], r["k"]): r["shift"] for r in tables["curve"] if r["head"] == "L1H0"}
    assert shift["singular", 8] > shift["random", 8]
    assert shift["singular", 8] > shift["singular", 1]
    assert float(arrays["carried/lexical/L1H0"].sum()) == pytest.approx(row["total"])
    with pytest.raises(qk.BadInput, match="space='query_frame'"):
        bridge(scope, replace(fit, space="post_rope"), basis, task.test(4))
