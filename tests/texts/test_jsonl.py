"""Facts about a user's own file: it is a task, or a sentence names the line; neighbours that are
alike are said.
"""

import json
import random
from itertools import permutations
from pathlib import Path

import pytest
import torch

import qkscope as qk
from qkscope import BadInput, tasks
from qkscope.examples import Answers, Example
from qkscope.model.inputs import answer_ids
from qkscope.sums.intervals import lag_one
from qkscope.texts.task import ANSWER, USES, Task
from qkscope.texts.word_pools import BOXES, OBJECTS

GOOD = {"prompt": "A cat, a dog. The cat", "keys": [
    {"text": "cat,", "labels": {"mine": 1}}, {"text": "dog", "labels": {"mine": -1}},
]}  # fmt: skip


def write(path: Path, *lines) -> Path:
    path = path / "mine.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
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
    path = write(tmp_path, *numbered(4, 30, use="test"), *reversed(numbered(30))).rename(
        tmp_path / "Mine.JSONL"
    )
    renamed = tasks.from_jsonl(path)
    assert [texts(task, use) for use in USES] == [texts(renamed, use) for use in USES]
    assert texts(task, "fit") != texts(tasks.from_jsonl(path, seed=1), "fit")
    assert task.asked["hash"] != renamed.asked["hash"]  # another file


def test_lines_of_a_group_are_one_unit_and_what_is_tested_must_be_new(tmp_path):
    lines = [{**line, "group": i % 6} for i, line in enumerate(numbered(18))]
    task = tasks.from_jsonl(write(tmp_path, *lines))
    assert sorted(len(unit) for use in USES for unit in task.draw(use, "mine", 99)) == [3] * 6
    a, b, c, d = numbered(4)
    lines = [
        {**a, "group": 1, "use": "fit"},
        {**b, "group": 1},
        {**b, "group": "2"},
        {**c, "group": 2},
        d,
    ]
    units = tasks.from_jsonl(write(tmp_path, *lines)).fit("mine", 9)
    assert list(map(len, units)) == [
        2,
        2,
    ]  # what does not say its use goes where its group or its copy is
    assert len({example.cluster for unit in units for example in unit}) == 1
    lines = [*numbered(5, use="fit"), *numbered(1, 9, use="test"), *numbered(1, 2, use="test")]
    with pytest.raises(
        BadInput, match="line 7 is for test, but its prompt is that of line 3, which is for fit"
    ):
        tasks.from_jsonl(write(tmp_path, *lines))
    a, b = numbered(2)  # also through a group that stands between two uses
    path = write(
        tmp_path, {**a, "use": "fit"}, {**b, "use": "test"}, {**a, "group": 1}, {**b, "group": 1}
    )
    with pytest.raises(BadInput, match="what is tested must be new"):
        tasks.from_jsonl(path)


def test_copies_are_said_dealt_to_one_side_and_count_as_one(tmp_path, scope):
    task = tasks.from_jsonl(write(tmp_path, *(line for line in numbered(9) for _ in range(8))))
    assert task.notes == (
        "63 of the file's 72 examples repeat the prompt of another: copies count as one.",
    )
    assert [len(texts(task, use)) for use in USES] == [3, 3, 3]
    assert len(set().union(*(texts(task, use) for use in USES))) == 9
    assert len({unit[0].cluster for unit in task.fit("mine", 99)}) == 3
    lines = [
        {"prompt": f"{a} : A . {b} : B . The {a} :", "keys": [
            {"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]}
        for a, b in permutations(OBJECTS[:4], 2) for _ in range(2)
    ]  # fmt: skip
    twice, once = (
        tasks.from_jsonl(write(tmp_path, *lines)),
        tasks.from_jsonl(write(tmp_path, *lines[::2])),
    )
    ranking = qk.find_heads(scope, twice, 8)
    assert ranking.answer.endswith(
        "12 of the file's 24 examples repeat the prompt of another: copies count as one."
    )
    assert ranking.provenance["asked"]["notes"] == list(twice.notes)
    for row, other in zip(
        ranking.tables["heads"], qk.find_heads(scope, once, 4).tables["heads"], strict=True
    ):
        assert (row["low"], row["high"]) == (other["low"], other["high"]), (
            "eight lines, but four prompts"
        )


def test_named_answers_are_read_downstream_and_said(tmp_path, scope):
    """Answers that are the keys give what key tokens give, turned round the opposite; a result says
    which it read.
    """

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
        assert row["logit_difference_before"] == pytest.approx(
            -other["logit_difference_before"], abs=1e-5
        )
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
        answer_ids(
            scope.encoder, Example(text="The hat is in Box", answers=Answers((right,), (wrong,)))
        )


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
        (
            bad(query={"span": [0, 99]}),
            "line 2: the mark 0:99 lies outside the prompt of length 21",
        ),
        (bad(keys=[{"text": "dog"}]), "line 2: no key is labelled"),
        (
            bad(keys=[GOOD["keys"][0]]),
            "line 2 has + but no − keys of 'mine': label both in every line",
        ),
        (
            bad(answers={"right": " is", "wrong": [" is"]}),
            "line 2: ' is' is named as a right and as a wrong answer",
        ),
    ],
)
def test_a_bad_line_is_named_in_one_sentence(tmp_path, line, says):
    with pytest.raises(BadInput) as caught:
        tasks.from_jsonl(write(tmp_path, GOOD, line))
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")


WORDS = [
    "soap",
    "suit",
    "sword",
    "trophy",
    "tent",
    "guitar",
    "seed",
    "bottle",
    "gift",
    "button",
    "blanket",
    "towel",
]


def topics(path, ordered: bool, group: bool = False):
    """Prompts about a few topics; a topic's prompts stand together, or anywhere."""
    draw, lines = random.Random(0), []
    for topic in range(16):
        first, second = draw.sample(WORDS, 2)
        for _ in range(6):
            extra = draw.choice([word for word in WORDS if word not in (first, second)])
            keys = [
                {"text": first, "labels": {"mine": 1}},
                {"text": second, "labels": {"mine": -1}},
            ]
            line = {"prompt": f"{extra} {first} {second} {extra}", "keys": keys, "use": "fit"}
            lines.append(line | ({"group": topic} if group else {}))
    if not ordered:
        draw.shuffle(lines)
    path.write_text("\n".join(map(json.dumps, lines)))
    return qk.tasks.from_jsonl(path)


@pytest.mark.parametrize(("ordered", "group"), [(True, False), (False, False), (True, True)])
def test_a_file_in_order_is_noticed_and_group_is_the_way_out(nano, tmp_path, ordered, group):
    task = topics(tmp_path / "mine.jsonl", ordered, group)
    fit = qk.decompose(
        nano, task, "L1H0,L1H1", 96, replicates=19, out=tmp_path / "fit", progress=False
    )
    said = "are alike in mine" in fit.answer
    assert said == (ordered and not group)
    if said:
        assert "p = 0.001" in fit.answer
        assert 'the same "group"' in fit.answer
    assert qk.sums.load_fit(tmp_path / "fit", nano).answer == fit.answer
    again = qk.decompose(
        nano, task, "L1H0,L1H1", 96, replicates=19, out=tmp_path / "fit", progress=False
    )
    assert again.answer == fit.answer, "which no prompt was run for"


def autoregressive(rho: float, seed: int) -> float:
    noise = torch.randn(
        64, 3, 1, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    for i in range(1, 64):
        noise[i] = rho * noise[i - 1] + (1 - rho**2) ** 0.5 * noise[i]
    return lag_one(1 + noise[:, 0], noise[:, 1] - noise[:, 2], torch.arange(64), seed + 1000)[1]


def test_dependence_is_found_and_rows_of_a_unit_count_together():
    assert all(autoregressive(0.4, seed) <= 0.01 for seed in range(10))
    alarms = sum(autoregressive(0.0, seed) <= 0.05 for seed in range(100))
    assert alarms <= 12  # 5 expected, at the 5% level
    draw = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(40, 2, 4, generator=draw) for _ in range(2))
    unit = torch.arange(20).repeat_interleave(2)
    outer = torch.einsum("bhd,bhe->bhde", q, keys).unflatten(0, (20, 2)).sum(1)
    outer = outer - outer.mean(0)
    norms = outer.flatten(2).square().sum((0, 2))
    by_head = (outer[:-1] * outer[1:]).flatten(2).sum((0, 2)) / norms
    assert lag_one(q, keys, unit)[0] == pytest.approx(float(by_head.mean()), abs=1e-6)
