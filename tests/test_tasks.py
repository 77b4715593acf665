"""Facts about tasks: pools never meet, copies differ where they should, the same seed gives the same text anywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope import BadInput, tasks
from qkscope.tasks.filter import POOLED
from qkscope.tasks.task import ANSWER, Contrast, Task, Unit
from qkscope.tasks.words import BOXES, CATEGORIES, FIVE, OBJECTS

FORMS = ("list", "sentence", "question")
# the word before each box, and the word asked for
PAIRS = {
    "list": r"(\w+): (\w)\n",
    "sentence": r"[Tt]he (\w+) is in Box (\w)\.",
    "question": r"The (\w+) is in Box (\w)\.",
}
ASKED = {
    "list": r"(\w+):$",
    "sentence": r"The (\w+) is in Box$",
    "question": r"Which box is the (\w+) in\? The \1 is in Box$",
}


def pairs_of(text: str, form: str) -> tuple[list[tuple[str, str]], str]:
    found = re.search(ASKED[form], text)
    assert found is not None, text
    return re.findall(PAIRS[form], text[: found.start()]), found[1]


def labels_of(example, contrast):
    return [key.label(contrast) for key in example.keys]


def uses_of(task: Task, n: int = 24) -> dict[str, list[Unit]]:
    fitted = [unit for contrast in task.contrasts for unit in task.fit(contrast, n)]
    return {"choose": task.choose(n), "fit": fitted, "test": task.test(n)}


# ---------------------------------------------------------------- binding


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lexical", ["same_query", "own_query"])
@pytest.mark.parametrize("entities", [2, 3, 9, 20])
def test_words_for_choosing_fitting_and_testing_never_meet(form, lexical, entities):
    """Counterfactual words included: they are read off the copies like all others."""
    task = tasks.binding(entities, form, seed=3, lexical=lexical)
    seen = {
        use: {word for unit in units for example in unit for word, _ in pairs_of(example.text, form)[0]}
        for use, units in uses_of(task).items()
    }
    assert not seen["choose"] & seen["fit"]
    assert not seen["choose"] & seen["test"]
    assert not seen["fit"] & seen["test"]
    assert set().union(*seen.values()) <= set(OBJECTS)


@pytest.mark.parametrize("form", FORMS)
def test_the_right_box_is_the_one_of_the_word_asked_for(form):
    task = tasks.binding(5, form)
    for unit in [*task.choose(20), *task.test(20), *task.fit("order", 20), *task.fit("lexical", 20)]:
        for example in unit:
            pairs, asked = pairs_of(example.text, form)
            assert [example.piece(key.span) for key in example.keys] == [box for _, box in pairs]
            assert labels_of(example, ANSWER) == [1 if word == asked else -1 for word, _ in pairs]
            assert len(set(pairs)) == len({word for word, _ in pairs}) == len({box for _, box in pairs}) == 5


@pytest.mark.parametrize("form", FORMS)
def test_order_shuffles_one_set_of_words_and_boxes_and_asks_for_one_word(form):
    prompts = [pairs_of(example.text, form) for (example,) in tasks.binding(6, form).fit("order", 200)]
    assert len({frozenset(word for word, _ in pairs) for pairs, _ in prompts}) == 1
    assert len({frozenset(box for _, box in pairs) for pairs, _ in prompts}) == 1
    (asked,) = {asked for _, asked in prompts}
    places = Counter([word for word, _ in pairs].index(asked) for pairs, _ in prompts)
    boxes = Counter(dict(pairs)[asked] for pairs, _ in prompts)
    assert len(places) == len(boxes) == 6
    for (example,) in tasks.binding(6, form).fit("order", 20):
        assert labels_of(example, "order") == labels_of(example, ANSWER)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("contrast", ["lexical", "box"])
def test_a_copy_differs_in_the_asked_pair_alone(form, contrast):
    for first, copy in tasks.binding(7, form, filler=3).fit(contrast, 40):
        (pairs, asked), (other, asked_there) = pairs_of(first.text, form), pairs_of(copy.text, form)
        (place,) = [i for i, (a, b) in enumerate(zip(pairs, other, strict=True)) if a != b]
        (word, box), (word_there, box_there) = pairs[place], other[place]
        assert (word, word_there) == (asked, asked_there)
        if contrast == "lexical":
            assert box == box_there
            assert word_there not in dict(pairs)
            assert first.text.count(word) == copy.text.count(word_there) == (3 if form == "question" else 2)
            assert first.text.replace(word, word_there) == copy.text
        else:
            assert word == word_there
            assert box_there not in dict(pairs).values()
        for example in (first, copy):
            assert labels_of(example, contrast) == [1 if i == place else 0 for i in range(7)]


def test_own_query_labels_the_copy_negative_and_same_query_leaves_that_to_the_pairing():
    own, same = tasks.binding(4, lexical="own_query"), tasks.binding(4)
    assert not own.contrasts["lexical"].across
    assert same.contrasts["lexical"].across
    for (first, copy), (first_same, copy_same) in zip(own.fit("lexical", 8), same.fit("lexical", 8), strict=True):
        assert labels_of(copy, "lexical") == [-label for label in labels_of(first, "lexical")]
        assert labels_of(copy_same, "lexical") == labels_of(first_same, "lexical")
        assert labels_of(copy, ANSWER) == labels_of(first, ANSWER)


@pytest.mark.parametrize("pool", [None, 7])
def test_with_their_own_query_copies_take_words_that_prompts_never_use(pool):
    units = tasks.binding(4, lexical="own_query", pool=pool).fit("lexical", 200)
    prompts = {word for first, _ in units for word, _ in pairs_of(first.text, "list")[0]}
    copies = {pairs_of(copy.text, "list")[1] for _, copy in units}
    assert len(prompts) == (pool or len(OBJECTS) // 6)
    assert not prompts & copies


def test_prompts_as_the_paper_writes_them():
    (listed,) = tasks.filter(form="find").test(1)[0]
    assert re.search(r"^\w+(, [\w ]+){24}\. Find the (fruits|animals|vehicles|drinks|countries)\.$", listed.text)
    (boxes,) = tasks.binding(3, "question", chat=True).test(1)[0]
    assert re.search(r"\. Which box is the \w+ in\?\nAnswer: Box$", boxes.text)


def test_filler_moves_tokens_but_not_pairs():
    plain, filled = (tasks.binding(4, "sentence", filler=n).fit("order", 30) for n in (0, 6))
    starts = {example.keys[0].span[0] for (example,) in filled}
    assert len(starts) > 3
    assert {len(pairs_of(example.text, "sentence")[0]) for (example,) in filled} == {4}
    assert max(len(example.text) for (example,) in plain) < max(len(example.text) for (example,) in filled)


def test_a_pool_limits_the_words_that_lexical_is_fitted_on():
    task = tasks.binding(3, pool=5)
    assert (
        len({word for unit in task.fit("lexical", 100) for e in unit for word, _ in pairs_of(e.text, "list")[0]}) == 5
    )
    wide = {word for (example,) in task.test(100) for word, _ in pairs_of(example.text, "list")[0]}
    assert len(wide) > 25


def test_more_examples_begin_with_the_same_ones_and_seeds_differ():
    task = tasks.binding(4)
    for contrast in task.contrasts:
        assert task.fit(contrast, 30)[:10] == task.fit(contrast, 10)
    assert task.test(10) != tasks.binding(4, seed=1).test(10)
    assert task.test(10) != task.choose(10)


def test_a_box_named_twice_in_the_list_never_stands_twice_in_a_prompt():
    task = tasks.binding(3, boxes=["A", "A", "B", "B", "C", "D"])
    for (example,) in task.test(50):
        assert len({example.piece(key.span) for key in example.keys}) == 3


# ---------------------------------------------------------------- filter


@pytest.mark.parametrize("form", ["list", "bullets", "question"])
@pytest.mark.parametrize("categories", [5, 13])
def test_filter_items_never_meet_between_uses_and_are_labelled_by_the_category_asked_for(form, categories):
    task = tasks.filter(categories, form, seed=1)
    seen: dict[str, set[str]] = {}
    home = {word: name for name, words in CATEGORIES.items() for word in words}
    for use, units in uses_of(task, 13).items():
        for (example,) in units:
            items = [example.piece(key.span) for key in example.keys]
            asked = {home[item] for item, label in zip(items, labels_of(example, ANSWER), strict=True) if label > 0}
            assert len(asked) == 1
            assert (
                f" {asked.pop()}"
                in example.text.rsplit("\n", 2 if form == "question" else 1)[-2 if form == "question" else -1]
            )
            assert Counter(labels_of(example, ANSWER)) == {1: 5, -1: 5 * (categories - 1)}
            assert len(set(items)) == len(items)
            seen.setdefault(use, set()).update(items)
    assert not seen["choose"] & seen["fit"]
    assert not seen["choose"] & seen["test"]
    assert not seen["fit"] & seen["test"]


def test_every_category_is_asked_for_equally_often():
    task = tasks.filter(5)
    for units in (task.choose(50), task.test(50), task.fit(POOLED, 50)):
        asked = Counter(re.search(r"The (\w+) in the list", unit[0].text)[1] for unit in units)
        assert asked == dict.fromkeys(FIVE, 10)
    for name in FIVE:
        assert {re.search(r"The (\w+) in the list", unit[0].text)[1] for unit in task.fit(name, 9)} == {name}


def test_words_of_several_words_are_keys_as_a_whole():
    words = {"colours": [f"dark red {i}" for i in range(6)], "sizes": [f"very big {i}" for i in range(6)]}
    (example,) = tasks.filter(2, words=words, items=2).test(1)[0]
    assert {example.piece(key.span)[:-2] for key in example.keys} == {"dark red", "very big"}


# ---------------------------------------------------------------- both


def test_two_processes_make_the_same_examples():
    code = (
        "import hashlib, qkscope.tasks as t\n"
        "made = [t.binding(5, filler=2), t.filter(13, 'bullets')]\n"
        "text = repr([[m.choose(9), m.test(9), [m.fit(c, 9) for c in m.contrasts]] for m in made])\n"
        "import sys; sys.stdout.write(hashlib.sha256(text.encode()).hexdigest())"
    )
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                       env={**os.environ, "PYTHONHASHSEED": seed}).stdout
        for seed in ("0", "1", "random")
    }  # fmt: skip
    assert len(found) == 1


@settings(max_examples=60, deadline=None)
@given(
    entities=st.one_of(st.integers(-3, 40), st.sampled_from([None, 2.5, "9", True])),
    form=st.sampled_from(["list", "sentence", "question", "bullets", "", None]),
    lexical=st.sampled_from(["same_query", "own_query", "other", None]),
    words=st.sampled_from([OBJECTS, OBJECTS[:30], "hat", [], ["hat", 3] * 40, [" hat"] * 40, ["hat"] * 90, None]),
    boxes=st.sampled_from([BOXES, "AB", ["A", "B"], ["A"] * 30, ["", *BOXES], None]),
    pool=st.sampled_from([None, 0, -1, 3, 10, 33, 34, 2.0]),
    filler=st.sampled_from([0, 1, 5, -1, 1.5, "1"]),
)
def test_any_parameters_of_binding_make_a_task_or_a_sentence(entities, form, lexical, words, boxes, pool, filler):
    try:
        task = tasks.binding(entities, form, lexical=lexical, words=words, boxes=boxes, pool=pool, filler=filler)
    except BadInput as error:
        task = error
    if isinstance(task, BadInput):
        assert str(task).endswith(".")
        assert "\n" not in str(task)
        return
    for units in uses_of(task, 2).values():
        assert len(units) >= 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"categories": 1}, "2 categories"),
        ({"categories": 99}, "word lists for 13 categories"),
        ({"categories": -1}, "-1 were asked for"),
        ({"categories": ["fruits", "gods"]}, "no word list for 'gods'"),
        ({"categories": ["fruits", "fruits"]}, "2 categories"),
        ({"items": 9}, "give 27 or more"),
        ({"categories": 2, "words": {"a": ["x"] * 30, "answer": ["y"] * 30}, "items": 1}, "cannot be called"),
        (
            {"categories": 2, "words": {"a": list("uvw"), "b": list("wxy")}, "items": 1},
            "'w' is one of the a and of the b",
        ),
        ({"categories": 2, "words": {"a": list("uvw"), " ": list("xyz")}, "items": 1}, "cannot be called ' '"),
    ],
)
def test_bad_parameters_of_filter_are_one_sentence(arguments, says):
    with pytest.raises(BadInput, match=re.escape(says)):
        tasks.filter(**arguments)


def test_a_category_may_be_called_like_a_parameter():
    """Labels are keyword arguments of Draft.key, so a name of one of its own parameters once collided."""
    words = {"piece": list("uvwabc"), "self": list("xyzdef")}
    assert len(tasks.filter(2, words=words, items=1).test(2)) == 2


def test_a_contrast_may_be_called_anything_that_can_be_shown():
    def draw(use, contrast, n):
        return []

    for name in ("both", "random_order", "order_oblique", "residual", "token"):
        assert list(Task("mine", {name: Contrast(name, "")}, draw).contrasts) == [name]
    for name in ("", " ", "a\nb"):
        with pytest.raises(BadInput, match="a contrast cannot be called"):
            Task("mine", {name: Contrast(name, "")}, draw)
    with pytest.raises(BadInput, match="no contrast 'lexicl': it has order, lexical, box"):
        tasks.binding(2).fit("lexicl", 1)


@pytest.mark.parametrize("name", tasks.BUILT_IN)
def test_what_a_task_was_asked_for_makes_it_again(name):
    """Fit folders keep only that, as JSON."""
    first = tasks.BUILT_IN[name](seed=3)
    again = tasks.BUILT_IN[name](seed=first.seed, **json.loads(json.dumps(dict(first.asked))))
    assert first.name == again.name == name
    assert [again.fit(contrast, 5) for contrast in again.contrasts] == [
        first.fit(contrast, 5) for contrast in first.contrasts
    ]
    assert (again.choose(5), again.test(5)) == (first.choose(5), first.test(5))
