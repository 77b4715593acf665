"""Facts about a user's own file: it is a task, or one sentence that names the line."""

import json
from itertools import permutations
from pathlib import Path

import pytest

import qkscope as qk
from qkscope import BadInput, tasks
from qkscope.capture.inputs import answer_ids
from qkscope.examples import Answers, Example
from qkscope.tasks.task import ANSWER, USES, Task
from qkscope.tasks.words import BOXES, OBJECTS

GOOD = {"prompt": "A cat, a dog. The cat", "keys": [
    {"text": "cat,", "labels": {"mine": 1}}, {"text": "dog", "labels": {"mine": -1}},
]}  # fmt: skip


def write(path: Path, *lines) -> Path:
    path = path / "mine.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def numbered(count: int, start: int = 0, **fields) -> list[dict]:
    return [
        {"prompt": f"cat A, dog B. Number {i}: the cat is in", "keys": [
            {"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}], **fields}
        for i in range(start, start + count)
    ]  # fmt: skip


def texts(task: Task, use: str) -> set[str]:
    return {example.text for unit in task.draw(use, ANSWER, 1000) for example in unit}


def test_keys_queries_and_answers_are_what_a_line_says(tmp_path):
    line = {
        "prompt": "A cat, a dog. The cat sat",
        "query": {"span": [18, 21]},
        "keys": [{"span": [2, 5], "labels": {"mine": 1}}, {"text": "dog", "labels": {"mine": -1}}],
        "use": "fit",
        "answers": {"right": " is", "wrong": [" are", " were"]},
    }
    ((example,),) = tasks.from_jsonl(write(tmp_path, line)).fit("mine", 1)
    assert example.queries == ((18, 21),)
    assert [example.piece(key.span) for key in example.keys] == ["cat", "dog"]
    assert example.answers == Answers((" is",), (" are", " were"))
    assert example.where.endswith("mine.jsonl, line 1")
    ((named,),) = tasks.from_jsonl(write(tmp_path, {**line, "query": "sat"})).fit("mine", 1)
    assert named.piece(named.queries[0]) == "sat"


def test_uses_are_kept_and_other_lines_are_dealt_out_evenly_by_what_they_say(tmp_path):
    task = tasks.from_jsonl(write(tmp_path, *numbered(30), *numbered(4, 30, use="test")))
    assert [len(task.choose(99)), len(task.fit("mine", 99)), len(task.test(99))] == [10, 10, 14]
    assert len(set().union(*(texts(task, use) for use in USES))) == 34
    path = write(tmp_path, *numbered(4, 30, use="test"), *reversed(numbered(30))).rename(tmp_path / "Mine.JSONL")
    renamed = tasks.from_jsonl(path)
    assert [texts(task, use) for use in USES] == [texts(renamed, use) for use in USES]
    assert texts(task, "fit") != texts(tasks.from_jsonl(path, seed=1), "fit")
    assert task.asked["hash"] != renamed.asked["hash"]  # another file


def test_lines_of_a_group_are_one_unit_and_groups_that_share_a_prompt_one_cluster(tmp_path):
    lines = [{**line, "group": i % 6} for i, line in enumerate(numbered(18))]
    task = tasks.from_jsonl(write(tmp_path, *lines))
    assert sorted(len(unit) for use in USES for unit in task.draw(use, "mine", 99)) == [3] * 6
    a, b, c, d = numbered(4)
    lines = [{**a, "group": 1, "use": "fit"}, {**b, "group": 1}, {**b, "group": "2"}, {**c, "group": 2}, d]
    units = tasks.from_jsonl(write(tmp_path, *lines)).fit("mine", 9)
    assert list(map(len, units)) == [2, 2]  # what does not say its use goes where its group or its copy is
    assert len({example.cluster for unit in units for example in unit}) == 1


def test_copies_are_said_dealt_to_one_side_and_count_as_one(tmp_path, scope):
    task = tasks.from_jsonl(write(tmp_path, *(line for line in numbered(9) for _ in range(8))))
    assert task.notes == ("63 of the file's 72 examples repeat the prompt of another: copies count as one.",)
    assert [len(texts(task, use)) for use in USES] == [3, 3, 3]
    assert len(set().union(*(texts(task, use) for use in USES))) == 9
    assert len({unit[0].cluster for unit in task.fit("mine", 99)}) == 3
    lines = [
        {"prompt": f"{a} : A . {b} : B . The {a} :", "keys": [
            {"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]}
        for a, b in permutations(OBJECTS[:4], 2) for _ in range(2)
    ]  # fmt: skip
    twice, once = tasks.from_jsonl(write(tmp_path, *lines)), tasks.from_jsonl(write(tmp_path, *lines[::2]))
    ranking = qk.find_heads(scope, twice, 8)
    assert ranking.answer.endswith("12 of the file's 24 examples repeat the prompt of another: copies count as one.")
    assert ranking.provenance["asked"]["notes"] == list(twice.notes)
    for row, other in zip(ranking.tables["heads"], qk.find_heads(scope, once, 4).tables["heads"], strict=True):
        assert (row["low"], row["high"]) == (other["low"], other["high"]), "eight lines, but four prompts"


def test_what_is_tested_must_be_new(tmp_path):
    lines = [*numbered(5, use="fit"), *numbered(1, 9, use="test"), *numbered(1, 2, use="test")]
    with pytest.raises(BadInput, match="line 7 is for test, but its prompt is that of line 3, which is for fit"):
        tasks.from_jsonl(write(tmp_path, *lines))
    a, b = numbered(2)  # also through a group that stands between two uses
    path = write(tmp_path, {**a, "use": "fit"}, {**b, "use": "test"}, {**a, "group": 1}, {**b, "group": 1})
    with pytest.raises(BadInput, match="what is tested must be new"):
        tasks.from_jsonl(path)


def test_named_answers_are_read_downstream_and_said(tmp_path, scope):
    """Answers that are the keys give what key tokens give, turned round the opposite; a result says which it read."""

    def swapped(order: int):
        lines = [
            {"prompt": f"{a} : {x} . {b} : {y} . The {a} :",
             "keys": [{"text": x, "labels": {"mine": 1}}, {"text": y, "labels": {"mine": -1}}],
             **({"answers": {"right": f" {(x, y)[::order][0]}", "wrong": [f" {(x, y)[::order][1]}"]}} if order else {})}
            for (a, b), (x, y) in zip(permutations(OBJECTS[:5], 2), permutations(BOXES[:5], 2), strict=True)
        ]  # fmt: skip
        task = tasks.from_jsonl(write(tmp_path, *lines))
        fit = qk.decompose(scope, task, "L1H3", 9, replicates=19)
        return qk.swap(scope, task.test(9), fit, downstream=True)

    named, turned, keys = swapped(1), swapped(-1), swapped(0)
    assert named.tables["downstream"] == keys.tables["downstream"]
    for row, other in zip(turned.tables["downstream"], keys.tables["downstream"], strict=True):
        assert row["logit_difference_before"] == pytest.approx(-other["logit_difference_before"], abs=1e-5)
        assert row["accuracy_before"] == pytest.approx(1 - other["accuracy_before"])
    assert "read among the answers that are named (' " in named.answer
    assert "read among the key tokens themselves ('" in keys.answer
    assert keys.provenance["asked"]["read"].startswith("the key tokens themselves")


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (" A", " qqq", "the answer ' qqq' has no token of its own"),
        ("A", " B", "the answer 'A' has no token of its own"),
        (" A hat", " A box", "begin with the same token"),
    ],
)
def test_answers_that_cannot_be_read_are_refused(scope, right, wrong, says):
    with pytest.raises(BadInput, match=says):
        answer_ids(scope.encoder, Example(text="The hat is in Box", answers=Answers((right,), (wrong,))))


def bad(**fields):
    return json.dumps({**GOOD, **fields})


def key(**fields):
    return bad(keys=[GOOD["keys"][0], {"text": "dog", "labels": {"mine": -1}, **fields}])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "line 2: Invalid JSON"),
        (key(text="cow"), "line 2: 'cow' does not stand in the text"),
        (key(text="cat,"), "line 2: a piece of the prompt is named twice as a key"),
        (bad(query="cat"), "line 2: 'cat' stands 2 times in the text"),
        (bad(query={"span": [0, 99]}), "line 2: the mark 0:99 lies outside the prompt of length 21"),
        (bad(keys=[{"text": "dog"}]), "line 2: no key is labelled"),
        (bad(keys=[GOOD["keys"][0]]), "line 2 has + but no − keys of 'mine': label both in every line"),
        (bad(answers={"right": " is", "wrong": [" is"]}), "line 2: ' is' is named as a right and as a wrong answer"),
    ],
)
def test_a_bad_line_is_named_in_one_sentence(tmp_path, line, says):
    with pytest.raises(BadInput) as caught:
        tasks.from_jsonl(write(tmp_path, GOOD, line))
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")
