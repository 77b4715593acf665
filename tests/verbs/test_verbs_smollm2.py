"""Verbs on the embedded real model; counts are small, so bounds are the promised ones (binding:
test_readme.py).
"""

from pathlib import Path

import pytest

from qkscope import tasks
from qkscope.verbs.decompose import decompose
from qkscope.verbs.find_heads import find_heads
from qkscope.verbs.swap.swap import swap

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_contrast.jsonl"


def test_filter_heads_are_found(smollm2):
    """L22H4 and L21H8 among the top three by the share of attention on the asked category."""
    top = find_heads(smollm2, tasks.filter(5), 16).top("ratio")[:3]
    assert {"L22H4", "L21H8"} <= {row["head"] for row in top}
    assert top[0]["chance"] == pytest.approx(0.2)


def test_the_worked_example_finds_the_gender_of_a_pronoun_in_one_direction(smollm2):
    """Measured: .18 / .01 to .01 / .14, random leaves .18; a head of the first layer moves nothing."""
    task = tasks.from_jsonl(EXAMPLE, center="query")
    assert "L15H6" in {row["head"] for row in find_heads(smollm2, task, 16).top()[:5]}
    fit = decompose(smollm2, task, ["L15H6", "L0H0"], 32)
    assert fit["gender", "L15H6"].rank == 1
    found = {
        row["head"]: row for row in fit.table()
    }  # both are far above their null, and one of them at chance
    assert max(row["p_interaction"] for row in found.values()) < 0.05
    assert {head: row["verdict"] for head, row in found.items()} == {
        "L15H6": "interaction",
        "L0H0": "not specific",
    }
    assert found["L15H6"]["gain"] == pytest.approx(
        abs(float(fit.delta("gender", "L15H6").trace())) / 8, rel=1e-4
    )
    rows = {(r["head"], r["condition"]): r for r in swap(smollm2, task.test(16), fit).table()}
    moved = rows["L15H6", "gender"]
    assert moved["orig_after"] < 0.05 < 0.1 < moved["target_after"]
    assert rows["L15H6", "random_gender"]["orig_after"] > 0.12
    assert abs(rows["L0H0", "gender"]["shift"]) < 0.05
