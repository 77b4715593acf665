"""Chat templates that never end or break out, texts that never end, messages as long as a prompt."""

from __future__ import annotations

import os
import time

import pytest
import torch

import qkscope as qk
from qkscope.capture.patch import Edit
from qkscope.errors import BadInput
from qkscope.tasks.texts import read_documents


@pytest.fixture
def scope() -> qk.Scope:
    return qk.Scope.load("nano:mixed", check=False)


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NESTED, "takes more than"),
        ("{{ messages[0].content }}{{ ''.__class__.__mro__ }}", "fails with SecurityError"),
        ("{{ messages[0].content }}{{ 'a' * 999999999999999 }}", "fails with MemoryError"),
        ("{{ messages[0].content }}{{ range(10 ** 9) }}", "fails with OverflowError"),
        ("{{ messages[0].content }}{{ raise_exception('no') }}", "fails with TemplateError"),
        ("{{ messages[0].content }}{{ 'a' * 2000000 }}", r"makes 2,000,\d+ characters of"),
    ],
)
def test_a_hostile_chat_template_ends_in_a_sentence(scope, monkeypatch, template, said):
    monkeypatch.setattr("qkscope.capture.encode._SECONDS", 1)
    scope.tokenizer.chat_template = template
    started = time.monotonic()
    with pytest.raises(BadInput, match=f"{said}.*no --chat, chat=False"):
        scope.encode(["hat jam"], chat=True)
    assert time.monotonic() - started < 5


def test_a_prompt_without_template_is_asked_without_chat(scope):
    scope.tokenizer.chat_template = None
    with pytest.raises(BadInput, match="ask without chat"):
        scope.encode(["hat jam"], chat=True)


@pytest.mark.parametrize("kind", ["fifo", "zero", "link"])
def test_texts_that_never_end_are_refused(tmp_path, kind):
    path = tmp_path / "text.txt"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path = type(path)("/dev/zero")
    for read in (lambda: read_documents([path]), lambda: qk.tasks.from_jsonl(path)):
        with pytest.raises(BadInput, match="is not a plain file: name"):
            read()


def test_a_text_too_large_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)  # a hole: it takes no room
    with pytest.raises(BadInput, match="more than the 1,073,741,824 that are read"):
        read_documents([path])


def test_line_ends_are_read_as_ever(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"one\r\ntwo\rthree\n")
    assert read_documents([path])[0].text == "one\ntwo\nthree"


@pytest.mark.parametrize("verb", ["discover", "atlas"])
def test_a_hundred_million_passages_are_refused(scope, verb):
    asked = {"discover": lambda: qk.discover(scope, None, "L1H0", 10**8), "atlas": lambda: qk.atlas(scope, None, 10**8)}
    with pytest.raises(BadInput, match="1000000"):
        asked[verb]()


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
