"""Facts about contrasts that share prompts: each prompt runs once, and every contrast gets what it would get alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from qkscope import Head, tasks
from qkscope.analyses.decompose import decompose
from qkscope.analyses.prompts import joined, that_share
from qkscope.capture.scope import Scope
from qkscope.tasks.task import Task
from qkscope.tasks.words import OBJECTS

N = 12
SHARED = [  # prompts of n units: one, and a copy for each contrast that has them
    (tasks.binding(4, filler=2), ["lexical", "box"], 3),
    (tasks.binding(4, lexical="own_query"), ["lexical", "box"], 3),
    (tasks.ioi(), ["subject", "name"], 3),
    (tasks.induction(5), ["next", "word"], 2),
    (tasks.greater_than(), ["year", "half"], 2),
    (tasks.pronoun(), ["gender", "person"], 2),
]


def ran(monkeypatch) -> list[str]:
    """The prompts that go through a model from now on."""
    seen: list[str] = []

    def capture(self, encoded, *given, real=Scope.capture_inputs, **named):
        seen.extend(example.text for example in encoded.examples)
        return real(self, encoded, *given, **named)

    monkeypatch.setattr(Scope, "capture_inputs", capture)
    return seen


def a_file(folder: Path) -> Path:
    """Lines of contrast a, of b and of both, in groups of two, and one prompt that three groups ask."""
    words = OBJECTS[-2:]

    def line(number: int, member: int, contrasts: str) -> dict[str, object]:
        labels = [dict.fromkeys(contrasts, sign) for sign in (1, -1)]
        keys = [{"text": word, "labels": own} for word, own in zip(words, labels, strict=True)]
        said = OBJECTS[min(2 * number + member, 36)]  # the last three groups ask alike
        return {
            "prompt": f"{said}: O\n{words[0]}: A\n{words[1]}: B\n{said}:",
            "keys": keys,
            "group": number,
            "use": "fit",
        }

    lines = [line(i, m, ("a", "ab", "b")[i % 3]) for i in range(18) for m in (0, 1)]
    lines += [line(i, 0, "ab") for i in (18, 19, 20)]
    path = folder / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize(("task", "names", "each"), SHARED)
def test_contrasts_draw_the_same_prompts_and_copies_of_their_own(task: Task, names, each):
    units = {name: task.fit(name, N) for name in task.contrasts}
    assert names in that_share(units)
    joints = joined({name: units[name] for name in names})
    assert sum(len(joint.prompts) for joint in joints) == each * N
    for number, joint in enumerate(joints):
        assert {units[name][number][0].text for name in names} == {joint.prompts[0].text}
        assert len({example.text for example in joint.prompts}) == each
        for name in names:
            own, places = joint.members[name]
            found = tuple(joint.prompts[place] for place in places)
            assert [e.text for e in found] == [e.text for e in units[name][own]]
            for there, example in zip(found, units[name][own], strict=True):
                assert [key.label(name) for key in there.keys] == [key.label(name) for key in example.keys]


def test_order_and_categories_have_prompts_of_their_own():
    for task, shared in (
        (tasks.binding(3), [["order"], ["lexical", "box"]]),
        (pooled := tasks.filter(5), [[name] for name in pooled.contrasts]),
    ):
        assert that_share({name: task.fit(name, N) for name in task.contrasts}) == shared


def test_a_prompt_runs_once_for_all_contrasts(scope, monkeypatch, tmp_path):
    seen = ran(monkeypatch)
    decompose(scope, tasks.binding(4), "L0H1", N, replicates=3, progress=False)
    assert len(seen) == N + 3 * N
    seen.clear()
    decompose(scope, tasks.binding(4), "L0H1", N, contrasts=["box", "lexical"], replicates=3, progress=False)
    assert set(Counter(seen).values()) == {1}
    seen.clear()
    monkeypatch.setattr("qkscope.analyses.decompose.neighbour_notes", lambda *_: [])  # a pass of its own, of a file
    decompose(scope, tasks.from_jsonl(a_file(tmp_path)), "L0H1", 99, replicates=3, progress=False)
    often = Counter(seen)
    assert sorted(often.values()) == [1] * 36 + [3], "copies within a contrast stay as many as they are"


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_contrast_has_the_sums_that_it_has_alone(scope, tmp_path, batch_size):
    """Nulls, folds, units and covariances included; the model's own rounding apart, as batches are others."""
    for task in (tasks.binding(4), tasks.from_jsonl(a_file(tmp_path))):
        heads = [Head(1, 3), Head(0, 1)]
        options = {"batch_size": batch_size, "replicates": 19, "progress": False}
        both = decompose(scope, task, heads, 24, **options)
        for name in task.contrasts:
            alone = decompose(scope, task, heads, 24, contrasts=[name], **options)
            mine, theirs = both.sums[name].tensors(), alone.sums[name].tensors()
            for what, wanted in theirs.items():
                torch.testing.assert_close(mine[what], wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()), msg=what)
            for found, row in zip([r for r in both.table() if r["contrast"] == name], alone.table(), strict=True):
                assert (found["verdict"], found["units"]) == (row["verdict"], row["units"])
