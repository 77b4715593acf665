"""A labelled key is one the query can look at: what a head cannot see, and the query itself, are
refused by line.
"""

import json
import logging
from pathlib import Path

import pytest

import qkscope as qk
from qkscope import BadInput, Example, tasks
from qkscope.examples import Key
from qkscope.findings.task_batches import unit_runner
from qkscope.heads import Head
from qkscope.model.inputs import FIRST_TOKEN
from qkscope.model.scope import Scope
from qkscope.texts.task import Contrast, Task
from qkscope.texts.word_pools import OBJECTS
from qkscope_papers.families import tiny_model


def file_of(path: Path, *lines: dict) -> Task:
    path = path / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tasks.from_jsonl(path)


def lines_of(
    use: str, words: list[str], after: str, query: str | None = None, start: str = "The "
) -> list[dict]:
    """``The WORD : A . B {after}``; + is A and − is B."""
    return [
        {"prompt": f"{start}{'' if start == '' else word + ' : '}A . B {word} {after}", "use": use,
         "keys": [{"text": "A", "labels": {"mine": 1}}, {"text": "B", "labels": {"mine": -1}}],
         **({"query": query} if query else {})}
        for word in words
    ]  # fmt: skip


def every_use(after: str, query: str | None = None, start: str = "The ") -> list[dict]:
    uses = zip(("choose", "fit", "test"), (OBJECTS[:6], OBJECTS[6:12], OBJECTS[12:18]), strict=True)
    return [line for use, words in uses for line in lines_of(use, list(words), after, query, start)]


def test_a_key_after_the_query_is_refused_by_line_and_one_outside_a_window_for_its_head_alone(
    tmp_path, scope
):
    """Line 3 asks from between its keys; once this was an "interaction" with p = 0.005."""
    lines = every_use("is in Box")
    task = file_of(tmp_path, *lines)
    fit = qk.decompose(scope, task, "L1H3", 6, replicates=19)
    for number in (2, 8, 14):  # one of each use
        lines[number]["query"] = "."
    task = file_of(tmp_path, *lines)
    says = (
        r"mine.jsonl, line {}, key 2 \('B'\) stands after the query, and this model looks back only"
    )
    with pytest.raises(BadInput, match=says.format(3)):
        qk.find_heads(scope, task, 6)
    with pytest.raises(BadInput, match=says.format(9)):
        qk.decompose(scope, task, "L1H3", 6)
    for downstream in (False, True):
        with pytest.raises(BadInput, match=says.format(15)):
            qk.swap(scope, task.test(6), fit, downstream=downstream)

    with pytest.raises(BadInput, match=r"in 'The hat', key 1 \('hat'\) is the query token"):
        scope.encode([Example(text="The hat", keys=(Key((4, 7), {"mine": 1}),))])
    gemma = Scope.from_model(tiny_model("gemma3"), check=False)
    sliding = [
        kind == "sliding_attention" for kind in gemma.model.config.get_text_config().layer_types
    ]
    near, far = sliding.index(True), sliding.index(False)
    unit_runner(gemma, looking(11, [1, 10]), [Head(far, 0)])([0, 1])
    with pytest.raises(
        BadInput, match=rf"key 1 \(\(11,\)\) is out of sight of L{near}H0, which looks only so far"
    ):
        unit_runner(gemma, looking(11, [1, 10]), [Head(near, 0)])([0, 1])

    marks = (Key((1, 2), {"answer": 1}), Key((10, 11), {"answer": -1}))
    units = [(Example(ids=tuple(range(10, 22)), keys=marks),)]
    task = Task("mine", {"mine": Contrast("mine", "")}, lambda use, contrast, n: units)
    assert len(qk.find_heads(gemma, task, 1).tables["heads"]) == len(
        gemma.heads()
    )  # a head that sees it decides


def test_a_key_that_is_the_first_token_is_said_once_and_in_the_result(tmp_path, scope, caplog):
    scope.encoder._warned.clear()
    with caplog.at_level(logging.WARNING):
        task = file_of(tmp_path, *every_use("is in Box", start=""))
        ranking = qk.find_heads(scope, task, 6)
        fit = qk.decompose(scope, task, "L1H3", 6, replicates=19)
    assert [message for message in caplog.messages if FIRST_TOKEN in message] == [
        f"{FIRST_TOKEN} Mark later words."
    ]
    for result in (ranking, fit, qk.swap(scope, task.test(6), fit)):
        assert FIRST_TOKEN in result.answer
        assert FIRST_TOKEN in result.provenance["asked"]["notes"]
    later = qk.find_heads(scope, file_of(tmp_path, *every_use("is in Box")), 6)
    assert FIRST_TOKEN not in later.answer
    assert tasks.filter(form="question").starts_with_key
    assert not tasks.filter(form="question", chat=True).starts_with_key
    assert not tasks.filter(form="list").starts_with_key


def looking(query: int, keys: list[int], length: int = 12) -> list[tuple[Example]]:
    marks = tuple(Key((i, i + 1), {"mine": sign}) for i, sign in zip(keys, (1, -1), strict=True))
    ids = [tuple(range(start, start + length)) for start in (10, 11)]
    return [(Example(ids=own, queries=((query, query + 1),), keys=marks),) for own in ids]
