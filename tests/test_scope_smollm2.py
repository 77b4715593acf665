"""The embedded real model: its shape, a head known to bind, and padding that does not show."""

from __future__ import annotations

import pytest
import torch

from qkscope import tasks
from qkscope.capture.scope import Scope
from qkscope.examples import Example


@pytest.fixture(scope="module")
def scope() -> Scope:
    return Scope.load("smollm2-135m", device="cpu")


def test_shape_fingerprint_and_self_check(scope: Scope) -> None:
    assert (scope.n_layers, scope.n_heads, scope.n_kv_heads, scope.group_size, scope.d_head) == (30, 9, 3, 3, 64)
    assert len(scope.heads()) == 270
    assert scope.weights_hash.startswith("b179c952")
    assert scope.self_check().attention_error < 1e-5


def test_l18h6_attends_to_the_box_of_the_queried_word(scope: Scope) -> None:
    right = []
    prompts = [unit[0] for unit in tasks.binding(form="list").test(12)]
    for batch in scope.capture(prompts, ["L18H6", "L0H0"], batch_size=12):
        right.append(batch.attention().argmax(-1) == batch.labels["answer"].argmax(-1)[:, None])
    accuracy = torch.cat(right).float().mean(0)
    assert accuracy[0] > 0.6  # chance is 0.11
    assert accuracy[1] < 0.4


def test_padding_and_batching_do_not_show(scope: Scope) -> None:
    made = [Example.mark(text, keys=["B", "C"]) for text in ("One cup: B, two: C", "A cat: B. A cup: C. A cat:")]
    heads = ["L0H0", "L10H4", "L18H6"]
    single = {int(b.example): b for b in scope.capture(made, heads, batch_size=1)}
    for side in ("left", "right"):
        (batch,) = scope.capture(made, heads, batch_size=2, padding_side=side)
        for row, example in enumerate(batch.example.tolist()):
            torch.testing.assert_close(batch.attention()[row], single[example].attention()[0], atol=1e-5, rtol=0)
            scale = single[example].q.abs().max()
            assert (batch.q[row] - single[example].q[0]).abs().max() / scale < 1e-5
