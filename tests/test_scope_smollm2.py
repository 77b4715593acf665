"""The embedded real model: its shape, its speed to load, and a head known to bind."""

from __future__ import annotations

import random
import time

import pytest
import torch

from qkscope.capture.scope import Scope
from qkscope.examples import Draft, Example

WORDS = [
    "egg", "fan", "tea", "plate", "gift", "wire", "watch", "boat", "game", "rose", "shell", "seed", "suit", "glass",
    "tie", "hat", "jam", "cat", "book", "pen", "cup",
]  # fmt: skip


@pytest.fixture(scope="module")
def scope() -> Scope:
    return Scope.load("smollm2-135m", device="cpu")


def list_prompt(seed: int) -> Example:
    """``hat: O\\njam: Z\\n ... jam:``; the box of the queried word is labelled +1."""
    rng = random.Random(seed)
    words, boxes, asked = rng.sample(WORDS, 9), rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 9), rng.randrange(9)
    draft = Draft()
    for i, (word, box) in enumerate(zip(words, boxes, strict=True)):
        draft.write(f"{word}: ").key(box, lexical=1 if i == asked else -1).write("\n")
    return draft.write(f"{words[asked]}:").example(seed)


def test_shape_and_fingerprint(scope: Scope) -> None:
    assert (scope.n_layers, scope.n_heads, scope.n_kv_heads, scope.group_size, scope.d_head) == (30, 9, 3, 3, 64)
    assert len(scope.heads()) == 270
    assert scope.weights_hash.startswith("b179c952")
    assert scope.tokenizer_hash == Scope.load("smollm2-135m", device="cpu", check=False).tokenizer_hash


def test_the_self_check_holds(scope: Scope) -> None:
    check = scope.self_check()
    assert check.output_error == 0
    assert check.attention_error < 1e-5
    assert check.write_effect > 0.1


def test_the_second_load_takes_under_three_seconds(scope: Scope) -> None:
    start = time.process_time()  # the fixture has loaded it; other work on the machine does not count
    Scope.load("smollm2-135m", device="cpu")
    assert time.process_time() - start < 3


def test_l18h6_attends_to_the_box_of_the_queried_word(scope: Scope) -> None:
    right = []
    for batch in scope.capture([list_prompt(seed) for seed in range(24)], ["L18H6", "L0H0"], batch_size=12):
        right.append(batch.attention().argmax(-1) == batch.labels["lexical"].argmax(-1)[:, None])
    accuracy = torch.cat(right).float().mean(0)
    assert accuracy[0] > 0.6  # chance is 0.11
    assert accuracy[1] < 0.4


def test_query_frame_forgets_a_shift_of_a_thousand(scope: Scope) -> None:
    encoded = scope.encode([list_prompt(seed) for seed in range(4)])
    heads = ["L18H6", "L2H0"]
    near = scope.capture_inputs(encoded, heads=heads, space="query_frame")
    post = scope.capture_inputs(encoded, heads=heads)
    torch.testing.assert_close(near.attention_logits(), post.attention_logits(), atol=1e-4, rtol=1e-5)
    encoded.inputs["position_ids"] = encoded.inputs["position_ids"] + 1000
    far = scope.capture_inputs(encoded, heads=heads, space="query_frame")
    products = [torch.einsum("bhd,bgke->hgde", x.q, x.k) for x in (near, far)]
    assert (products[1] - products[0]).norm() / products[0].norm() < 1e-4
    assert (far.attention() - near.attention()).abs().max() < 1e-4


def test_padding_and_batching_do_not_show(scope: Scope) -> None:
    made = [list_prompt(0), Example.mark("A cat: B. A cup: C. A cat:", keys=["B", "C"])]
    heads = ["L0H0", "L10H4", "L18H6"]
    single = {int(b.example): b for b in scope.capture(made, heads, batch_size=1)}
    for side in ("left", "right"):
        (batch,) = scope.capture(made, heads, batch_size=2, padding_side=side)
        for row, example in enumerate(batch.example.tolist()):
            own = batch.key_mask[row]
            torch.testing.assert_close(
                batch.attention()[row][:, own], single[example].attention()[0], atol=1e-5, rtol=0
            )
            scale = single[example].q.abs().max()
            assert (batch.q[row] - single[example].q[0]).abs().max() / scale < 1e-5
