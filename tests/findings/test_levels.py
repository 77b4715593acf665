"""Levels of a cause: planted kinds are named, and no word both chooses a source and tests it."""

from dataclasses import replace

import pytest
import torch

import qkscope as qk
from planted_kinds import FLAGS, KEY, QUERY, planted_kind
from qkscope.findings.because import Because
from qkscope.findings.levels import OF_A_SOURCE, RANDOM_WORDS, WordLevels, chosen_source
from qkscope.findings.registry import FEWEST_WORDS, KEEPS, KIND_GAIN
from qkscope.rerun.rerun_tokens import Again


def because_of(planted):
    return Because(Again.of(planted.scope, planted.ids), [planted.look])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("what", "kind"),
    [("this word", "this word"), ("kind", "kind"), ("nothing", "no single word")],
)
def test_a_planted_head_is_given_its_level(what, kind, seed):
    reason = because_of(planted_kind(what, seed)).reasons()[0]
    assert reason.kind == kind
    assert [finding.kind for finding in reason.findings if finding.is_reason] == (
        ["kind"] if what == "kind" else []
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("what", ["same word", "same kind"])
def test_a_planted_relation_is_told_from_the_other(what, seed):
    reason = because_of(planted_kind(what, seed)).reasons()[0]
    assert reason.kind == what
    first = reason.shown[0]
    assert first.positions == (KEY, QUERY)
    assert first.measured > 0.5 > max(first.alone, first.control)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("what", ["either", "both"])
def test_words_that_decide_together_are_found(what, seed):
    reason = because_of(planted_kind(what, seed)).reasons()[0]
    assert reason.kind == what
    assert {*FLAGS} <= {*reason.shown[0].positions}


@pytest.fixture(scope="module")
def compared():
    """The key's word of a planted head, with words of every source in its place."""
    because = because_of(planted_kind("kind", 0))
    levels = WordLevels(because, {}, [0])
    word = next(word for word in because.seen if KEY in word)
    return levels, word


def test_words_of_a_source_are_in_one_half_and_run_once(compared):
    levels, word = compared
    own = levels.replacements[word]
    assert len(set(own.ids)) == len(own.ids)
    for source in ("near", "likely"):
        chosen = own.of(source)
        assert int(chosen.sum()) == OF_A_SOURCE
        assert int((chosen & own.is_tested).sum()) == 2 * int((chosen & ~own.is_tested).sum())
    assert not bool((own.of("random") & (own.of("near") | own.of("likely"))).any())
    fit = own.fit(levels.because.looks[0].query)
    assert not bool((fit & own.of("random")).any())
    rows = list(levels.rows(0))
    assert {row["source"] for row in rows} <= {"near", "likely", "fit", "random"}
    near = [row for row in rows if row["source"] == "near" and row["position"] == KEY]
    assert len(near) == OF_A_SOURCE


def with_left(compared, left):
    """The level of the word, if its replacements left so much."""
    levels, word = compared
    own = levels.replacements[word]
    levels.replacements[word] = replace(own, left=left[:, None])
    try:
        return levels._level(0, levels.because.looks[0], word), own
    finally:
        levels.replacements[word] = own


def test_a_kind_is_tested_on_words_that_did_not_choose_it(compared):
    own = compared[0].replacements[compared[1]]
    random = own.of("random")
    only_chosen, _ = with_left(compared, (~own.is_tested & ~random).float())
    assert (only_chosen.kind, only_chosen.is_shown, only_chosen.measured) == ("kind", False, 0.0)
    only_tested, _ = with_left(compared, (own.is_tested & ~random).float())
    assert (only_tested.is_shown, only_tested.measured) == (True, 1.0)
    assert only_tested.examples == (), "examples are of those that chose"
    tested = {change.tokens for change in only_tested.changes}
    others = {ids for ids, is_tested in zip(own.ids, own.is_tested, strict=True) if not is_tested}
    assert len(tested) >= FEWEST_WORDS
    assert not tested & others
    assert not tested & {change.tokens for change in only_tested.controls}


def test_the_levels_follow_their_order(compared):
    own = compared[0].replacements[compared[1]]
    random = own.of("random")
    every, _ = with_left(compared, torch.ones(len(own.ids)))
    assert every.kind == "any word"
    none, _ = with_left(compared, torch.zeros(len(own.ids)))
    assert (none.kind, none.measured, none.control) == ("this word", 0.0, 0.0)
    half = torch.zeros(len(own.ids))
    half[random.nonzero()[: RANDOM_WORDS // 2, 0]] = KEEPS
    level, _ = with_left(compared, half)
    assert level.kind == "any word", "half of the random words keep half of the look"
    some = torch.zeros(len(own.ids))
    some[random.nonzero()[: RANDOM_WORDS // 3, 0]] = 1.0
    level, _ = with_left(compared, some)
    assert not level.is_shown, "neither a kind nor this word alone"


def test_the_source_that_keeps_most_is_chosen(compared):
    levels, word = compared
    own = levels.replacements[word]
    query = levels.because.looks[0].query
    for source in ("near", "likely"):
        only = own.of(source) & ~own.of("near" if source == "likely" else "likely")
        left = (only & ~own.is_tested).float()
        assert chosen_source(replace(own, left=left[:, None]), 0, query) in (source, "fit")


def test_the_likelihood_of_a_change_is_that_of_the_plain_model(compared):
    levels, word = compared
    own = levels.replacements[word]
    ids = levels.because.ids.clone()
    ids[word.start] = own.ids[3][0]
    with torch.no_grad():
        logits = levels.because.again.scope.model(ids[None]).logits[0].log_softmax(-1)
    behind = [float(logits[i, ids[i + 1]]) for i in range(word.start, len(ids) - 1)]
    assert float(own.behind[3, -1]) == pytest.approx(sum(behind), abs=1e-3)
    assert float(own.chance[3]) == pytest.approx(
        float(logits[word.start - 1, own.ids[3][0]]), abs=1e-4
    )


def test_the_headline_names_a_kind_and_no_word_that_its_kind_could_replace(smollm2):
    answer = qk.why(smollm2, "The keys to the cabinet near the old door", "L26H0")
    kinds = {row["text"]: row for row in answer.tables["relation"] if row["kind"] == "kind"}
    near = kinds[" near"]
    assert near["verdict"] == "shown"
    assert near["together"] - near["control"] >= KIND_GAIN
    left = {row["word"]: row["left"] for row in answer.tables["words"] if row["position"] == 5}
    assert min(left[" with"], left[" under"]) > KEEPS > max(left[" are"], left[" is"])
    assert {row["source"] for row in answer.tables["words"]} == {"near", "likely", "fit", "random"}
    assert "because a word like '" in answer.answer
    assert "stands at token 5 (' near'): " in answer.answer
    for row in kinds.values():
        if row["verdict"] == "shown":
            assert f"because of {row['text']!r}" not in answer.answer
            assert f"because {row['text']!r}" not in answer.answer
    causes = {row["text"] for row in answer.tables["because"] if row["cause"] == "yes"}
    assert " near" in causes, "random words in its place break the look"
