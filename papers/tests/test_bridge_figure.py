"""Facts about the figure of the bridge, on the embedded model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qkscope import BadInput, Scope, decompose, tasks
from qkscope.analyses.relative import singular_basis
from qkscope_papers.franco2026.bridge import bridge


@pytest.fixture(scope="module")
def fitted():
    scope = Scope.load("smollm2-135m")
    task = tasks.binding(5)
    fit = decompose(scope, task, "L18H6,L18H7", n=24, contrasts=["lexical"], space="query_frame", batch_size=16)
    return scope, task, fit, singular_basis(scope, "L18H6,L18H7")


def test_the_bridge_of_the_embedded_model(fitted):
    scope, task, fit, basis = fitted
    tables, arrays = bridge(scope, fit, basis, task.test(16), sizes=(1, 8), draws=3, batch_size=16)
    row = tables["alignment"][0]
    assert row["vectors"] < row["vectors_rotated"] / 1.5  # few singular vectors, many rotated ones
    assert row["key"] > row["key_random"]
    # keys know the prompts: their axes are the control that random ones are not
    assert row["vectors_key_pca"] < row["vectors_random"] / 1.5
    assert row["key_key_pca"] > row["key_random"]
    torch.testing.assert_close(fit["lexical", "L18H6"].cov_k, fit.sums["lexical"].cov_k.matrix()[0])
    methods = {(r["method"], r["k"]): r["shift"] for r in tables["curve"] if r["head"] == "L18H6"}
    assert methods["singular", 8] > methods["random", 8]
    assert methods["singular", 8] > methods["singular", 1]
    assert float(arrays["carried/lexical/L18H6"].sum()) == pytest.approx(row["total"])


def test_a_rotated_fit_is_told_to_take_the_querys_frame(fitted):
    scope, task, fit, basis = fitted
    with pytest.raises(BadInput, match="space='query_frame'"):
        bridge(scope, replace(fit, space="post_rope"), basis, task.test(4))
