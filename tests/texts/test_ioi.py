"""Facts about tasks with roles: roles by construction, copies that cancel, pools that never meet,
merges refused.
"""

import re

import pytest

from qkscope import BadInput, Example, Scope, tasks
from qkscope.texts.task import ANSWER
from qkscope.texts.word_pools import EVENTS, FIRST_NAMES, PEOPLE, PLACES, THINGS

ROLES = {
    "ioi": {"IO", "S1", "S1+1", "S2", "END"},
    "induction": {"PREV", "NEXT", "END"},
    "greater_than": {"XX", "YY", "END"},
    "pronoun": {"NAME", "NOUN", "END"},
}


@pytest.fixture(scope="module")
def scope(smollm2: Scope) -> Scope:
    return smollm2


def examples_of(task, n=24):
    yield from (example for unit in (*task.choose(n), *task.test(n)) for example in unit)
    yield from (
        example for contrast in task.contrasts for unit in task.fit(contrast, n) for example in unit
    )


def role(example, name):
    return example.piece(example.roles[name])


@pytest.mark.parametrize("form", ["both", "ABBA", "BABA"])
def test_names_stand_where_their_roles_say(form):
    orders = set()
    for example in examples_of(tasks.ioi(form), 40):
        io, s1, s2 = role(example, "IO"), role(example, "S1"), role(example, "S2")
        assert s1 == s2 != io
        assert example.text.count(s1) == 2
        assert example.text.count(io) == 1
        after = re.match(r"\W*(\w+)", example.text[example.roles["S1"][1] :])
        assert after is not None
        assert after[1] == role(example, "S1+1")
        assert example.roles["END"][1] == len(example.text)
        labelled = {example.piece(key.span): key.label(ANSWER) for key in example.keys}
        assert labelled == {io: 1, s1: -1}
        orders.add("ABBA" if example.roles["IO"] < example.roles["S1"] else "BABA")
    # the copies of "subject" have the other order by construction
    assert orders == {"ABBA", "BABA"}
    chosen = {unit[0].roles["IO"] < unit[0].roles["S1"] for unit in tasks.ioi(form).test(20)}
    assert chosen == {"both": {True, False}, "ABBA": {True}, "BABA": {False}}[form]


def test_a_copy_of_subject_is_the_same_text_up_to_there_and_induction_breaks_off_at_a_known_word():
    for first, copy in tasks.ioi().fit("subject", 40):
        shared = first.roles["S2"][0]
        assert first.text[:shared] == copy.text[:shared]
        assert role(first, "S2") == role(copy, "IO")
        for example in (first, copy):
            signs = {
                example.piece(key.span): key.label("subject")
                for key in example.keys
                if key.label("subject")
            }
            assert signs == {role(example, "IO"): 1, role(example, "S1"): -1}
    for first, copy in tasks.ioi().fit("name", 20):
        assert first.text.replace(role(first, "IO"), role(copy, "IO")) == copy.text
    for example in examples_of(tasks.induction(6)):
        words = example.text.removeprefix("Words: ").split()
        assert words[6:] == words[: len(words) - 6]
        assert words[-1] == role(example, "END") == role(example, "PREV")
        assert words[len(words) - 6] == role(example, "NEXT")
        (right,) = [example.piece(key.span) for key in example.keys if key.label(ANSWER) > 0]
        assert right == role(example, "NEXT")


@pytest.mark.parametrize("name", ROLES)
def test_every_prompt_has_its_roles_one_right_key_and_words_of_its_own_use(name):
    task = tasks.BUILT_IN[name]()
    for example in examples_of(task):
        assert set(example.roles) == ROLES[name]
        assert sorted({key.label(ANSWER) for key in example.keys}) == [-1, 1]
    fitted = [unit for contrast in task.contrasts for unit in task.fit(contrast, 60)]
    words = {
        "ioi": ("IO", "S1"),
        "induction": ("NEXT", "PREV"),
        "greater_than": ("YY",),
        "pronoun": ("NAME", "NOUN"),
    }
    seen = [
        {role(example, r) for unit in units for example in unit for r in words[name]}
        for units in (task.choose(60), fitted, task.test(60))
    ]
    assert len(set().union(*seen)) == sum(map(len, seen))


def test_words_are_single_tokens_prompts_encode_and_a_merged_role_is_refused(scope):
    for name in ROLES:
        examples = list(examples_of(tasks.BUILT_IN[name](), 12))
        assert scope.encode(examples).places.row.shape[0] == len(examples)
    for word in (*FIRST_NAMES, *THINGS, *PLACES, *EVENTS, *PEOPLE):
        assert len(scope.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1, word
    whole = Example(text="The cat sat", roles={"CAT": (4, 7)})
    assert scope.encode([whole]).inputs["input_ids"].shape[1] == 3
    with pytest.raises(BadInput, match=r"merges 'ca' \(HALF\) with its neighbour in the token"):
        scope.encode([Example(text="The cat sat", roles={"HALF": (4, 6)})])
