"""Facts about contrasts that share prompts: each prompt runs once, and every contrast gets what it would get alone."""

import json
from pathlib import Path

import torch

from qkscope import Head, tasks
from qkscope.analyses.decompose import decompose
from qkscope.tasks.words import OBJECTS


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
