"""Facts about contrasts that share prompts: each prompt runs once, and every contrast gets what it would get alone."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from qkscope import Head, tasks
from qkscope.analyses.decompose import decompose
from qkscope.analyses.prompts import joined
from qkscope.tasks.task import Task
from qkscope.tasks.words import OBJECTS

N = 12
SHARED = [  # contrasts that share prompts, and the prompts that run together: one, and the copies of each contrast
    (tasks.binding(4, filler=2), ["lexical", "box"], [3, 1]),
    (tasks.binding(4, lexical="own_query"), ["lexical", "box"], [3, 1]),
    (tasks.ioi(), ["subject", "name"], [3]),
    (tasks.induction(5), ["next", "word"], [2]),
    (tasks.filter(3), [], [1] * 4),
]


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
def test_contrasts_share_prompts_and_have_copies_of_their_own(task: Task, names, each):
    """What shares none stands alone: order of binding, every category of a filter list."""
    units = {name: task.fit(name, N) for name in task.contrasts}
    joints = joined(units)
    assert sorted(len(joint.prompts) for joint in joints) == sorted(each * N)
    seen = Counter()
    for joint in joints:
        shared = {frozenset(owners) for owners in joint.owners}
        assert set().union(*shared) in [set(names), *({name} for name in task.contrasts if name not in names)]
        for example, owners in zip(joint.prompts, joint.owners, strict=True):
            for name, (number, member) in owners.items():
                seen[name, number, member] += 1
                own = units[name][number][member]
                assert example.text == own.text
                assert [key.label(name) for key in example.keys] == [key.label(name) for key in own.keys]
    wanted = {(name, i, m) for name, drawn in units.items() for i, unit in enumerate(drawn) for m in range(len(unit))}
    assert seen == dict.fromkeys(wanted, 1)


def test_a_contrast_has_the_sums_that_it_has_alone(scope, tmp_path):
    """Nulls, folds, units and covariances included; the model's own rounding apart, as batches are others."""
    for task in (tasks.binding(4), tasks.from_jsonl(a_file(tmp_path))):
        heads = [Head(1, 3), Head(0, 1)]
        options = {"batch_size": 5, "replicates": 19, "progress": False}
        both = decompose(scope, task, heads, 24, **options)
        for name in task.contrasts:
            alone = decompose(scope, task, heads, 24, contrasts=[name], **options)
            mine, theirs = both.sums[name].tensors(), alone.sums[name].tensors()
            for what, wanted in theirs.items():
                torch.testing.assert_close(mine[what], wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()), msg=what)
            for found, row in zip([r for r in both.table() if r["contrast"] == name], alone.table(), strict=True):
                assert (found["verdict"], found["units"]) == (row["verdict"], row["units"])
