"""Chat templates that break out, messages as long as a prompt, edits that cannot be."""

from __future__ import annotations

import os

import pytest
import torch

import qkscope as qk
from qkscope.capture.patch import Edit
from qkscope.errors import BadInput


@pytest.fixture
def scope() -> qk.Scope:
    return qk.Scope.load("nano:mixed", check=False)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content }}{{ ''.__class__.__mro__ }}", "fails with SecurityError"),
        ("{{ messages[0].content }}{{ range(10 ** 9) }}", "fails with OverflowError"),
        ("{{ messages[0].content }}{{ raise_exception('no') }}", "fails with TemplateError"),
        (None, "ask without chat"),
    ],
)
def test_a_hostile_chat_template_ends_in_a_sentence(scope, template, said):
    scope.tokenizer.chat_template = template
    with pytest.raises(BadInput, match=said):
        scope.encode(["hat jam"], chat=True)


def test_a_message_does_not_quote_a_whole_prompt():
    text = "hat jam " * 200_000
    for word in ("pen", "jam"):
        with pytest.raises(BadInput) as caught:
            qk.Example.mark(text, keys=[word])
        assert len(str(caught.value)) < 600


def test_a_refused_pickle_is_not_answered_with_how_to_run_it(tmp_path, scope):
    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    scope.model.config.save_pretrained(tmp_path)
    torch.save({"model.embed_tokens.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInput) as caught:
        qk.Scope.load(tmp_path)
    assert "weights_only" not in str(caught.value)
    assert "is a pickle that holds more than tensors" in str(caught.value)


@pytest.mark.parametrize("values", [None, 3, "text", [[1.0]], {}, torch.zeros(1)])
def test_edits_of_wrong_kinds_are_refused_in_words(values):
    with pytest.raises(BadInput):
        Edit.keys("L1H0", torch.tensor([[1]]), values)
    with pytest.raises(BadInput):
        Edit.keys("L1H0", values, torch.zeros(1, 1, 24))


def test_double_precision_and_two_watchers_are_refused_in_words(scope):
    with pytest.raises(BadInput, match="write float32, bfloat16, float16 or auto"):
        qk.Scope.load("nano:mixed", dtype="float64")
    with pytest.raises(BadInput, match="a model in float64 is not looked into"):
        qk.Scope.from_model(qk.Scope.load("nano:mixed", check=False).model.double())
    encoded = scope.encode(["hat jam"])
    with scope.patched([]), pytest.raises(BadInput, match="watched already"):
        scope.watch(encoded.inputs)
