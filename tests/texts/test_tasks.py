"""Facts about tasks: pools never meet, copies differ where they should, the same seed gives the
same text anywhere.
"""

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from qkscope import BadInput, tasks
from qkscope.texts.task import ANSWER, Task, Unit
from qkscope.texts.word_pools import CATEGORIES, OBJECTS

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


@pytest.mark.parametrize(("form", "lexical", "entities"), [
    ("list", "same_query", 2), ("sentence", "own_query", 3), ("question", "same_query", 9), ("list", "own_query", 20),
])  # fmt: skip
def test_words_for_choosing_fitting_and_testing_never_meet(form, lexical, entities):
    """Counterfactual words included: they are read off the copies like all others."""
    task = tasks.binding(entities, form, seed=3, lexical=lexical)
    seen = {
        use: {
            word
            for unit in units
            for example in unit
            for word, _ in pairs_of(example.text, form)[0]
        }
        for use, units in uses_of(task).items()
    }
    assert set().union(*seen.values()) <= set(OBJECTS)
    assert len(set().union(*seen.values())) == sum(map(len, seen.values()))


@pytest.mark.parametrize("form", FORMS)
def test_the_right_box_is_the_one_of_the_word_asked_for(form):
    task = tasks.binding(5, form)
    for unit in [
        *task.choose(20),
        *task.test(20),
        *task.fit("order", 20),
        *task.fit("lexical", 20),
    ]:
        for example in unit:
            pairs, asked = pairs_of(example.text, form)
            assert [example.piece(key.span) for key in example.keys] == [box for _, box in pairs]
            assert labels_of(example, ANSWER) == [1 if word == asked else -1 for word, _ in pairs]
            assert (
                len(set(pairs))
                == len({word for word, _ in pairs})
                == len({box for _, box in pairs})
                == 5
            )


@pytest.mark.parametrize("form", FORMS)
def test_order_shuffles_one_set_of_words_and_boxes_and_asks_for_one_word(form):
    prompts = [
        pairs_of(example.text, form) for (example,) in tasks.binding(6, form).fit("order", 200)
    ]
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
            assert (
                first.text.count(word)
                == copy.text.count(word_there)
                == (3 if form == "question" else 2)
            )
            assert first.text.replace(word, word_there) == copy.text
        else:
            assert word == word_there
            assert box_there not in dict(pairs).values()
        for example in (first, copy):
            assert labels_of(example, contrast) == [1 if i == place else 0 for i in range(7)]


@pytest.mark.parametrize(("form", "categories"), [("list", 5), ("bullets", 13), ("question", 5)])
def test_filter_items_never_meet_between_uses_and_are_labelled_by_the_category_asked_for(
    form, categories
):
    task = tasks.filter(categories, form, seed=1)
    seen: dict[str, set[str]] = {}
    home = {word: name for name, words in CATEGORIES.items() for word in words}
    for use, units in uses_of(task, 6).items():
        for (example,) in units:
            items = [example.piece(key.span) for key in example.keys]
            asked = {
                home[item]
                for item, label in zip(items, labels_of(example, ANSWER), strict=True)
                if label > 0
            }
            assert len(asked) == 1
            assert f" {asked.pop()}" in "".join(
                example.text.splitlines()[-2 if form == "question" else -1 :]
            )
            assert Counter(labels_of(example, ANSWER)) == {1: 5, -1: 5 * (categories - 1)}
            assert len(set(items)) == len(items)
            seen.setdefault(use, set()).update(items)
    assert len(set().union(*seen.values())) == sum(map(len, seen.values()))
    right = [next(k for k in e.keys if k.label(ANSWER) > 0) for (e,) in task.test(categories)]
    asked = {
        home[e.piece(key.span)] for (e,), key in zip(task.test(categories), right, strict=True)
    }
    assert len(asked) == categories  # every category is asked for equally often


@pytest.mark.parametrize("name", tasks.BUILT_IN)
def test_what_a_task_was_asked_for_makes_it_again(name):
    """Fit folders keep only that, as JSON; and more examples begin with the same ones."""
    first = tasks.BUILT_IN[name](seed=3)
    again = tasks.BUILT_IN[name](seed=first.seed, **json.loads(json.dumps(dict(first.asked))))
    assert first.name == again.name == name
    for contrast in first.contrasts:
        assert again.fit(contrast, 5) == first.fit(contrast, 9)[:5]
    assert (again.choose(5), again.test(5)) == (first.choose(5), first.test(5))
    assert first.test(5) != first.choose(5)
    assert first.test(5) != tasks.BUILT_IN[name](seed=4).test(5)


def test_another_process_makes_the_same_examples():
    """The text of every draw on record: a hash that Python salts, or another order of a set, would
    change it.
    """
    printed = "[t.binding(5, filler=2).fit('box', 9), t.filter(13, 'bullets').test(9)]"
    code = f"from qkscope import tasks as t\nprint({printed})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(
        [tasks.binding(5, filler=2).fit("box", 9), tasks.filter(13, "bullets").test(9)]
    )


def lists(**words):
    return {
        "categories": 2,
        "items": 1,
        "words": {name: list(letters) for name, letters in words.items()},
    }


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tasks.filter(["fruits", "gods"]), "no word list for 'gods'"),
        (lambda: tasks.filter(**lists(a="uvw", b="wxy")), "'w' is one of the a and of the b"),
        (lambda: tasks.binding(5, boxes=list("ABCDE")), "need 6 boxes, but got 5"),
        (lambda: tasks.binding(5, words=["hat"] * 90), "6 words are needed for each"),
    ],
)
def test_words_that_do_not_suffice_are_named(make, says):
    with pytest.raises(BadInput, match=says):
        make()
