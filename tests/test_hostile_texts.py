"""Chat templates that never end or break out, messages as long as a prompt, edits that cannot be."""

import pytest

import qkscope as qk
from qkscope.errors import BadInput


@pytest.fixture
def scope() -> qk.Scope:
    return qk.Scope.load("nano:mixed", check=False)


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NESTED, "takes more than"),
        ("{{ messages[0].content }}{{ ''.__class__.__mro__ }}", "fails with SecurityError"),
        ("{{ messages[0].content }}{{ 'a' * 10 ** 10 }}", "is more than a template needs"),
        ("{{ messages[0].content }}{{ range(10 ** 9) }}", "fails with OverflowError"),
        ("{{ messages[0].content }}{{ raise_exception('no') }}", "fails with TemplateError"),
        ("{{ messages[0].content }}{{ ('a' * 1000000) ~ ('a' * 1000000) }}", r"makes 2,000,\d+ characters of"),
        (None, "ask without chat"),
    ],
)
def test_a_hostile_chat_template_ends_in_a_sentence(scope, monkeypatch, template, said):
    monkeypatch.setattr("qkscope.capture.encode._SECONDS", 1)
    scope.tokenizer.chat_template = template
    with pytest.raises(BadInput, match=said):
        scope.encode(["hat jam"], chat=True)


def test_a_message_does_not_quote_a_whole_prompt():
    text = "hat jam " * 200_000
    for word in ("pen", "jam"):
        with pytest.raises(BadInput) as caught:
            qk.Example.mark(text, keys=[word])
        assert len(str(caught.value)) < 600


def test_double_precision_and_two_watchers_are_refused_in_words(scope):
    with pytest.raises(BadInput, match="write float32, bfloat16, float16 or auto"):
        qk.Scope.load("nano:mixed", dtype="float64")
    with pytest.raises(BadInput, match="a model in float64 is not looked into"):
        qk.Scope.from_model(qk.Scope.load("nano:mixed", check=False).model.double())
    encoded = scope.encode(["hat jam"])
    with scope.patched([]), pytest.raises(BadInput, match="watched already"):
        scope.watch(encoded.inputs)
