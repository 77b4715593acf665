"""Kinds: whether this word decides a look, a word of its kind, or any word."""

import pytest

from qkscope.rerun.alternatives import Alternatives, is_form, lexicon_of, near_tokens
from qkscope.rerun.rerun_tokens import Again


def again_of(scope, prompt):
    return Again.of(scope, scope.encode([prompt]).inputs["input_ids"][0])


@pytest.mark.parametrize(
    ("word", "kin"),
    [(" Italy", {" France", " Spain"}), (" rabbit", {" mouse", " goat"}), (" Lisa", {" Mary"})],
)
def test_words_near_in_the_embedding_are_of_one_kind(smollm2, word, kin):
    lexicon = lexicon_of(smollm2)
    near = [lexicon.text(i) for i in near_tokens(smollm2, lexicon.by_text[word], 20)]
    assert kin <= set(near)
    assert len(near) == 20
    cores = [text.strip().lower() for text in near]
    assert not any(is_form(core, word.strip().lower()) for core in cores), "its own forms aside"


def test_near_likely_and_random_words_fit_their_place(smollm2):
    others = Alternatives(again_of(smollm2, "The keys to the cabinet near the Gwendolyn"))
    words = {word.text: word for word in others.words}
    near, long = words[" near"], words[" Gwendolyn"]
    present = {word.core for word in others.words}
    for source in (others.near, others.likely, others.random):
        found = source(near, 20)
        assert len(set(found)) == len(found) == 20
        texts = [others.lexicon.text(ids[0]) for ids in found]
        assert all(text.startswith(" ") and text.strip() not in present for text in texts)
    assert len(long) > 1
    assert others.near(long, 20) == [], "the embedding has no row for a word of pieces"
    assert {len(ids) for ids in others.likely(long, 20)} == {len(long)}
