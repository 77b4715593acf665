"""Facts about a user's own file: it is a task, or one sentence that names the line."""

from __future__ import annotations

import json
import logging
import os
import re
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qkscope as qk
from qkscope import BadInput, tasks
from qkscope.capture.inputs import answer_ids
from qkscope.examples import Answers, Example
from qkscope.tasks.task import ANSWER, USES, Task
from qkscope.tasks.words import BOXES, OBJECTS

GOOD = {"prompt": "A cat, a dog. The cat", "keys": [
    {"text": "cat,", "labels": {"mine": 1}}, {"text": "dog", "labels": {"mine": -1}},
]}  # fmt: skip
EXAMPLE = Path(__file__).parents[1] / "examples" / "my_contrast.jsonl"


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


def signs(task: Task, use: str, contrast: str, n: int = 1000) -> list[list[list[int]]]:
    return [[[k.label(contrast) for k in e.keys] for e in unit] for unit in task.draw(use, contrast, n)]


# ---------------------------------------------------------------- what a file means


def test_keys_and_queries_stand_where_their_text_or_span_says(tmp_path):
    line = {
        "prompt": "A cat, a dog. The cat sat",
        "query": {"span": [18, 21]},
        "keys": [{"span": [2, 5], "labels": {"mine": 1}}, {"text": "dog", "labels": {"mine": -1}}],
        "use": "fit",
    }
    ((example,),) = tasks.from_jsonl(write(tmp_path, line)).fit("mine", 1)
    assert example.queries == ((18, 21),)
    assert [example.piece(key.span) for key in example.keys] == ["cat", "dog"]
    ((named,),) = tasks.from_jsonl(write(tmp_path, {**line, "query": "sat"})).fit("mine", 1)
    assert named.piece(named.queries[0]) == "sat"


def test_uses_are_kept_and_other_lines_are_dealt_out_evenly(tmp_path):
    path = write(tmp_path, *numbered(30), *numbered(4, 30, use="test"))
    task = tasks.from_jsonl(path)
    assert [len(task.choose(99)), len(task.fit("mine", 99)), len(task.test(99))] == [10, 10, 14]
    texts = [{unit[0].text for unit in units} for units in (task.choose(99), task.fit("mine", 99))]
    assert not texts[0] & texts[1]
    assert task.fit("mine", 99) == tasks.from_jsonl(path).fit("mine", 99)
    assert task.fit("mine", 99) != tasks.from_jsonl(path, seed=1).fit("mine", 99)


def test_lines_of_a_group_are_one_unit_wherever_they_stand(tmp_path):
    lines = [{**line, "group": i % 6} for i, line in enumerate(numbered(18))]
    task = tasks.from_jsonl(write(tmp_path, *lines))
    units = [unit for use in USES for unit in task.draw(use, "mine", 99)]
    assert sorted(len(unit) for unit in units) == [3] * 6
    # a group may be called what a line of its own would be called, and 1 and "1" are the same group
    lines = [{**line, "group": "line 1"} for line in numbered(2)]
    task = tasks.from_jsonl(write(tmp_path, lines[0], *numbered(2, 2), lines[1]))
    assert sorted(len(unit) for use in USES for unit in task.draw(use, "mine", 9)) == [1, 1, 2]


def test_lines_without_an_answer_are_judged_by_the_first_contrast_that_labels_them(tmp_path):
    keys = [{"text": "A"}, {"text": "B"}]

    def line(*labels):
        return {"prompt": "A and B", "use": "test",
                "keys": [{**k, "labels": own} for k, own in zip(keys, labels, strict=True)]}  # fmt: skip

    task = tasks.from_jsonl(write(
        tmp_path, line({"one": 1}, {"one": -1}), line({"two": -1}, {"two": 1}),
        line({"one": 1, "answer": -1}, {"one": -1, "answer": 1}),
    ))  # fmt: skip
    assert list(task.contrasts) == ["one", "two"]
    assert signs(task, "test", ANSWER) == [[[1, -1]], [[-1, 1]], [[-1, 1]]]


def test_a_line_that_cannot_be_scored_is_left_out_of_scoring_only(tmp_path):
    """+ in one line of a group, − in the other: good for a contrast, but neither line has a right and a wrong key."""
    one = {"prompt": "A cat", "group": 1, "use": "fit", "keys": [{"text": "cat", "labels": {"mine": 1}}]}
    two = {"prompt": "A dog", "group": 1, "use": "fit", "keys": [{"text": "dog", "labels": {"mine": -1}}]}
    task = tasks.from_jsonl(write(tmp_path, one, two))
    assert signs(task, "fit", "mine") == [[[1], [-1]]]
    assert task.contrasts["mine"].paired, "the group's signs are flipped together: within a line nothing can be dealt"
    with pytest.raises(BadInput, match="no example for test with a right and a wrong key"):
        task.test(1)
    assert not tasks.from_jsonl(write(tmp_path, GOOD)).contrasts["mine"].paired


def test_asking_for_more_than_there_is_takes_all_and_says_so_once(tmp_path, caplog):
    task = tasks.from_jsonl(write(tmp_path, *numbered(9)))
    with caplog.at_level(logging.WARNING):
        assert len(task.test(3)) == 3
        assert caplog.messages == []
        assert len(task.test(100)) == len(task.test(100)) == 3
    assert [re.sub(r"^\S+", "FILE", message) for message in caplog.messages] == [
        "FILE holds 3 examples to test, fewer than 100: taking all."
    ]


def test_byte_order_marks_line_ends_and_unicode_do_not_matter(tmp_path):
    prompt = "Café\u2028\u0085 😀 cat, dog. The cat"
    line = json.dumps({**GOOD, "prompt": prompt, "use": "fit"}, ensure_ascii=False)
    plain = tasks.from_jsonl(write(tmp_path, line))
    assert plain.fit("mine", 1)[0][0].text == prompt, "a line separator of Unicode does not end a line"
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"\r\n{line}\r\n\r\n".encode())
    other = tasks.from_jsonl(path)
    assert other.fit("mine", 1) == plain.fit("mine", 1)
    path.write_bytes(f"{line}\r{line}".encode())
    assert len(tasks.from_jsonl(path).fit("mine", 2)) == 2


def test_a_changed_file_has_another_hash(tmp_path):
    one = tasks.from_jsonl(write(tmp_path, *numbered(3))).asked["hash"]
    assert one == tasks.from_jsonl(write(tmp_path, *numbered(3))).asked["hash"]
    assert one != tasks.from_jsonl(write(tmp_path, *numbered(4))).asked["hash"]


def test_the_worked_example_is_a_task_with_examples_for_every_use():
    task = tasks.from_jsonl(EXAMPLE)
    for use in USES:
        for contrast in task.contrasts:
            assert len(task.draw(use, contrast if use == "fit" else ANSWER, 12)) == 12


# ---------------------------------------------------------------- copies


def texts(task: Task, use: str) -> set[str]:
    return {example.text for unit in task.draw(use, ANSWER, 1000) for example in unit}


def test_lines_are_dealt_out_by_what_they_say_not_by_what_the_file_is_called(tmp_path):
    one = tasks.from_jsonl(write(tmp_path, *numbered(30)))
    renamed = write(tmp_path, *reversed(numbered(30))).rename(tmp_path / "Mine.JSONL")
    other = tasks.from_jsonl(renamed)
    assert [texts(one, use) for use in USES] == [texts(other, use) for use in USES]


def test_copies_are_said_dealt_to_one_side_and_count_as_one(tmp_path, caplog):
    lines = [line for line in numbered(9) for _ in range(8)]
    with caplog.at_level(logging.WARNING):
        task = tasks.from_jsonl(write(tmp_path, *lines))
    says = "63 of the file's 72 examples repeat the prompt of another: copies count as one."
    assert task.notes == (says,)
    assert [message.split(": ", 1)[1] for message in caplog.messages] == [says]
    assert [len(texts(task, use)) for use in USES] == [3, 3, 3]
    assert not texts(task, "fit") & texts(task, "test")
    clusters = {}
    for unit in task.fit("mine", 99):
        clusters.setdefault(unit[0].cluster, []).append(unit[0].text)
    assert sorted(map(len, clusters.values())) == [8, 8, 8]
    assert all(len(set(own)) == 1 for own in clusters.values())
    assert tasks.from_jsonl(write(tmp_path, *numbered(9))).notes == ()


def test_groups_that_share_a_prompt_are_one_cluster(tmp_path):
    a, b, c, d = numbered(4, use="fit")
    lines = [{**a, "group": 1}, {**b, "group": 1}, {**b, "group": 2}, {**c, "group": 2}, d]
    clusters = [
        {example.cluster for example in unit} for unit in tasks.from_jsonl(write(tmp_path, *lines)).fit("mine", 9)
    ]
    assert clusters[0] == clusters[1]
    assert clusters[0] != clusters[2]


def test_a_line_without_a_use_goes_where_its_copy_is(tmp_path):
    for use in USES:
        task = tasks.from_jsonl(write(tmp_path, *numbered(1, use=use), *numbered(31)))
        assert numbered(1)[0]["prompt"] in texts(task, use)
        assert sum(numbered(1)[0]["prompt"] in texts(task, other) for other in USES) == 1


@pytest.mark.parametrize(("one", "other"), [("fit", "test"), ("choose", "fit"), ("test", "choose")])
def test_what_is_tested_must_be_new(tmp_path, one, other):
    lines = [*numbered(5, use=one), *numbered(1, 9, use=other), *numbered(1, 2, use=other)]
    with pytest.raises(BadInput, match=rf"line 7 is for {other}, but its prompt is that of line 3, which is for {one}"):
        tasks.from_jsonl(write(tmp_path, *lines))


def test_a_line_cannot_stand_between_two_uses(tmp_path):
    a, b = numbered(2)
    lines = [{**a, "use": "fit"}, {**b, "use": "test"}, {**a, "group": 1}, {**b, "group": 1}]
    with pytest.raises(BadInput, match="what is tested must be new"):
        tasks.from_jsonl(write(tmp_path, *lines))


# ---------------------------------------------------------------- answers


def test_a_line_names_its_answers(tmp_path):
    lines = numbered(3, answers={"right": " is", "wrong": [" are", " were"]}, use="test")
    ((example,), *_) = tasks.from_jsonl(write(tmp_path, *lines)).test(3)
    assert example.answers == Answers((" is",), (" are", " were"))
    assert example.where.endswith("mine.jsonl, line 1")


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
        return qk.swap_downstream(scope, task.test(9), fit)

    named, turned, keys = swapped(1), swapped(-1), swapped(0)
    assert named.tables == keys.tables
    for row, other in zip(turned.tables["downstream"], keys.tables["downstream"], strict=True):
        assert row["logit_difference_before"] == pytest.approx(-other["logit_difference_before"], abs=1e-5)
        assert row["accuracy_before"] == pytest.approx(1 - other["accuracy_before"])
    assert "read among the answers that are named (' " in named.answer
    assert "read among the key tokens themselves ('" in keys.answer
    assert keys.provenance["asked"]["read"].startswith("the key tokens themselves")


def test_answers_that_cannot_be_read_are_refused(scope):
    def example(right, wrong):
        answers = Answers((right,), (wrong,))
        return Example(text="The hat is in Box", answers=answers)

    assert answer_ids(scope, [example(" A", " B")]) == [
        (scope.tokenizer.convert_tokens_to_ids(["A"]), scope.tokenizer.convert_tokens_to_ids(["B"]))
    ]
    with pytest.raises(BadInput, match="the answer ' qqq' has no token of its own"):
        answer_ids(scope, [example(" A", " qqq")])
    with pytest.raises(BadInput, match="the answer 'A' has no token of its own"):
        answer_ids(scope, [example("A", " B")])
    with pytest.raises(BadInput, match="begin with the same token"):
        answer_ids(scope, [example(" A hat", " A box")])
    assert answer_ids(scope, [Example(text="The hat")]) == [None]


def test_signs_in_different_lines_of_a_group_work_the_whole_way(tmp_path, scope):
    """+ in one line, − in the other; what is right among each line's keys is said by ``answer``."""
    lines = []
    for i, (a, b) in enumerate(list(permutations(OBJECTS[:6], 2))):
        x, y = BOXES[i % 7], BOXES[i % 7 + 1]
        for asked, sign in ((a, 1), (b, -1)):
            right, wrong = (x, y) if sign > 0 else (y, x)
            lines.append({
                "prompt": f"{a} : {x} . {b} : {y} . The {asked} :", "group": i,
                "keys": [{"text": right, "labels": {"mine": sign, "answer": 1}},
                         {"text": wrong, "labels": {"answer": -1}}],
            })  # fmt: skip
    task = tasks.from_jsonl(write(tmp_path, *lines))
    assert task.contrasts["mine"].paired
    assert sorted(signs(task, "fit", "mine")[0]) == [[-1, 0], [1, 0]]
    assert qk.find_heads(scope, task, 10).tables["heads"][0]["n"] == 20
    fit = qk.decompose(scope, task, "L1H3", 10, replicates=19)
    assert fit.sums["mine"].count("mine").tolist() == [[10.0, 10.0]]
    assert {row["n"] for row in qk.swap(scope, task.test(10), fit).table()} == {20}


def test_copies_are_said_in_every_result(tmp_path, scope):
    lines = [
        {"prompt": f"{a} : A . {b} : B . The {a} :", "keys": [
            {"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}]}
        for a, b in permutations(OBJECTS[:4], 2) for _ in range(2)
    ]  # fmt: skip
    task = tasks.from_jsonl(write(tmp_path, *lines))
    says = "12 of the file's 24 examples repeat the prompt of another: copies count as one."
    ranking = qk.find_heads(scope, task, 8)
    fit = qk.decompose(scope, task, "L1H3", 8, replicates=19)
    swaps = qk.swap(scope, task.test(8), fit)
    for result in (ranking, fit, swaps):
        assert result.answer.endswith(says)
        assert result.provenance["asked"]["notes"] == [says]
    once = tasks.from_jsonl(write(tmp_path, *lines[::2]))
    for row, other in zip(ranking.tables["heads"], qk.find_heads(scope, once, 4).tables["heads"], strict=True):
        assert (row["low"], row["high"]) == (other["low"], other["high"]), "eight lines, but four prompts"


# ---------------------------------------------------------------- what is refused


def bad(**fields):
    return json.dumps({**GOOD, **fields})


def key(**fields):
    return bad(keys=[GOOD["keys"][0], {"text": "dog", "labels": {"mine": -1}, **fields}])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "line 2: Invalid JSON"),
        ("[1]", "line 2: Input should be an object"),
        (bad(promt="a"), "line 2, promt: Extra inputs are not permitted"),
        ('{"keys": []}', "line 2, prompt: Field required"),
        (bad(prompt=""), "line 2, prompt: "),
        (bad(prompt="A cat, a dog \ud800"), "line 2"),
        (bad(keys=[]), "line 2, keys: "),
        (key(lables={}), "line 2, keys, 2, lables: Extra inputs are not permitted"),
        (key(text="cow"), "line 2: 'cow' does not stand in the text"),
        (key(text=""), "line 2, keys, 2, text: "),
        (key(span=[0, 1]), "line 2: a key or query names either its text or its span"),
        (key(text="cat,"), "line 2: 'cat,' is named twice as a key"),
        (bad(query="cat"), "line 2: 'cat' stands 2 times in the text"),
        (bad(query={"span": [0, 99]}), "line 2: the mark 0:99 lies outside the prompt of length 21"),
        (key(labels={"mine": 2}), "line 2, keys, 2, labels, mine: Input should be -1, 0 or 1, but got 2"),
        (bad(keys=[{"text": "dog"}]), "line 2: no key is labelled"),
        (bad(keys=[{"text": "dog", "labels": {"mine": -1}}]), "line 2 has − but no + keys of 'mine'"),
        (bad(keys=[GOOD["keys"][0]]), "line 2 has + but no − keys of 'mine': label both in every line"),
        (bad(answers={"right": " is"}), "line 2, answers, wrong: Field required"),
        (bad(answers={"right": " is", "wrong": [" is"]}), "line 2: ' is' is named as a right and as a wrong answer"),
        (bad(use="train"), "line 2, use: Input should be 'choose', 'fit' or 'test', but got 'train'"),
    ],
)
def test_a_bad_line_is_named_in_one_sentence(tmp_path, line, says):
    with pytest.raises(BadInput) as caught:
        tasks.from_jsonl(write(tmp_path, GOOD, line))
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")


def test_the_lines_of_a_group_agree_on_their_use(tmp_path):
    with pytest.raises(BadInput, match=r"line 2 has another use than its group 'a'"):
        tasks.from_jsonl(write(tmp_path, {**GOOD, "group": "a", "use": "fit"}, {**GOOD, "group": "a"}))


def test_files_that_cannot_be_read_are_one_sentence(tmp_path):
    path = tmp_path / "mine.jsonl"
    with pytest.raises(BadInput, match=r"mine.jsonl cannot be read \(No such file"):
        tasks.from_jsonl(path)
    path.write_bytes(b"")
    with pytest.raises(BadInput, match="holds no examples"):
        tasks.from_jsonl(path)
    path.write_bytes(b"\n\xff\n")
    with pytest.raises(BadInput, match="line 2 is not UTF-8"):
        tasks.from_jsonl(path)
    with pytest.raises(BadInput, match=r"cannot be read \(Is a directory\)"):
        tasks.from_jsonl(tmp_path)


def test_devices_pipes_and_huge_files_are_not_read(tmp_path):
    endless, pipe, huge = (tmp_path / f"{name}.jsonl" for name in ("endless", "pipe", "huge"))
    endless.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    for path in (endless, pipe):
        with pytest.raises(BadInput, match="is not a plain file"):
            tasks.from_jsonl(path)
    with pytest.raises(BadInput, match=r"has 1,099,511,627,776 bytes, more than the 1,073,741,824 that are read"):
        tasks.from_jsonl(huge)


def test_a_use_without_examples_says_what_to_add(tmp_path):
    task = tasks.from_jsonl(write(tmp_path, {**GOOD, "use": "fit"}))
    for draw in (task.choose, task.test):
        with pytest.raises(BadInput, match="with a right and a wrong key: add lines, or set their use"):
            draw(3)


# ---------------------------------------------------------------- anything at all

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
marks = st.fixed_dictionaries({}, optional={
    "text": st.sampled_from(["cat", "dog", ".", " ", "The", "x"]) | values,
    "span": st.lists(st.integers(-2, 30), min_size=2, max_size=2) | values,
    "labels": st.dictionaries(
        st.sampled_from(["mine", "answer", "other", "both", "../up", ""]), st.sampled_from([-1, 0, 1]), max_size=3
    ) | values,
})  # fmt: skip
objects = st.fixed_dictionaries({}, optional={
    "prompt": st.just(GOOD["prompt"]) | values, "query": marks | values, "group": st.integers(0, 2) | values,
    "keys": st.lists(marks, max_size=4) | values, "use": st.sampled_from([*USES, None]) | values,
    "more": values,
})  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.lists(objects | st.just(GOOD), max_size=5).map(
    lambda lines: "\n".join(map(json.dumps, lines)).encode("utf-8")))  # fmt: skip
def test_any_bytes_are_a_task_or_a_sentence(tmp_path, content):
    path = tmp_path / "any.jsonl"
    path.write_bytes(content)
    try:
        found = tasks.from_jsonl(path)
    except BadInput as error:
        found = error
    if isinstance(found, BadInput):
        assert str(found).endswith(".")
        return
    for contrast in found.contrasts:
        for use in USES:
            try:
                units = found.draw(use, contrast, 3)
            except BadInput:
                continue
            assert all(len(unit) > 0 for unit in units)
