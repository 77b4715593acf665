"""Marked pieces of text are found on the ids the model sees: any padding, with or without a chat
template.
"""

import pytest

from qkscope.errors import BadInput
from qkscope.examples import Example, Key, find_span
from qkscope.model.scope import Scope
from qkscope_papers.families import tiny_model

PROMPT = "The hat is in Box O. The jam is in Box Z. The hat is in Box"


def pieces(scope: Scope, examples: list[Example], **options: object) -> list[tuple[str, list[str]]]:
    """Decoded tokens at the query and at the keys of each row."""
    encoded = scope.encode(examples, **options)
    at = encoded.places

    def text(row: int, column: int) -> str:
        return scope.tokenizer.decode([int(encoded.inputs["input_ids"][row, column])])

    found = []
    for r in range(len(at.row)):
        row = int(at.row[r])
        keys = [int(key) for key, real in zip(at.keys[r], at.key_mask[r], strict=True) if real]
        found.append((text(row, int(at.query[r])), [text(row, key) for key in keys]))
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chat", [False, True])
def test_marks_land_on_their_tokens(smollm2: Scope, side: str, chat: bool) -> None:
    long = Example.mark(PROMPT, keys=["O", "Z"], queries=["jam"])
    short = Example.mark("A cat: B", keys=["B"], queries=["cat"])
    found = pieces(smollm2, [long, short], padding_side=side, chat=chat)
    assert [(q.strip(), [k.strip() for k in keys]) for q, keys in found] == [
        ("jam", ["O", "Z"]),
        ("cat", ["B"]),
    ]


def test_the_query_is_the_last_token_and_a_word_its_last_one(smollm2: Scope) -> None:
    ((query, _),) = pieces(smollm2, [Example.mark(PROMPT, keys=["O"])])
    assert query == " Box"
    encoded = smollm2.encode([Example.mark(PROMPT, keys=["O"])], chat=True)
    ids = encoded.inputs["input_ids"][0]
    assert encoded.places.query.tolist() == [len(ids) - 1]
    assert smollm2.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    text = "We met Xylophonius there."
    tokens = smollm2.tokenizer.tokenize(text)
    assert len([t for t in tokens if t.strip("Ġ") in "Xylophonius"]) > 1
    ((_, (last,)),) = pieces(smollm2, [Example.mark(text, keys=["Xylophonius"])])
    assert "Xylophonius".endswith(last)
    assert last != "Xylophonius"
    text = "é☕ jam:\n\nhat"
    found = pieces(smollm2, [Example.mark(text, keys=["jam", "hat", "\n\n"])])
    assert [key.strip(" ") for key in found[0][1]] == [
        "jam",
        "hat",
        "\n",
    ]  # two tokens here, the last one counts
    cup = smollm2.encode([Example.mark("a ☕ b", keys=["☕"])])  # three tokens share this character
    assert (
        smollm2.tokenizer.decode(cup.inputs["input_ids"][0, : int(cup.places.keys) + 1]) == "a ☕"
    )


def test_a_template_trims_or_rewrites_and_only_whole_words_match(smollm2: Scope) -> None:
    before = smollm2.tokenizer.chat_template
    try:
        smollm2.tokenizer.chat_template = "U: {{ messages[0]['content'] | trim }} A:"
        own = Scope.from_model(smollm2.model, smollm2.tokenizer, check=False)
        ((query, (key,)),) = pieces(
            own, [Example.mark("  the hat is", keys=["hat"], queries=["is"])], chat=True
        )
        assert (query.strip(), key.strip()) == ("is", "hat")
        smollm2.tokenizer.chat_template = (
            "U: {{ messages[0]['content'] | replace('hat', 'cap') }} A:"
        )
        own = Scope.from_model(smollm2.model, smollm2.tokenizer, check=False)
        with pytest.raises(BadInput, match="changes the prompt"):
            own.encode([Example.mark("the hat", keys=["hat"])], chat=True)
        smollm2.tokenizer.chat_template = None
        with pytest.raises(BadInput, match="no chat template"):
            Scope.from_model(smollm2.model, smollm2.tokenizer, check=False).encode(
                [PROMPT], chat=True
            )
    finally:
        smollm2.tokenizer.chat_template = before
    assert find_span("category cat, cats", "cat") == (9, 12)
    assert find_span("Box (O).", "(O)") == (4, 7)
    scope = Scope.from_model(tiny_model("llama"), check=False)
    at = scope.encode([Example(ids=[5, 6, 7, 8, 9], queries=[(3, 5)], keys=[Key((0, 2))])]).places
    assert (at.query.tolist(), at.keys.tolist()) == ([4], [[1]])
