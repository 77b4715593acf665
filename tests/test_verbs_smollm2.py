"""The verbs on the embedded real model: the binding head is found, taken apart and swapped, as A9 of the methods says.

Counts are small, so the bounds are the ones the project promises, not what was measured; each says how far off it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qkscope import tasks
from qkscope.analyses.attribute import attribute
from qkscope.analyses.decompose import decompose
from qkscope.analyses.downstream import swap_downstream
from qkscope.analyses.find import find_heads
from qkscope.analyses.fit import Fit
from qkscope.analyses.swap import swap
from qkscope.capture.scope import Scope

BINDING = "L18H6"
EXAMPLE = Path(__file__).parents[1] / "examples" / "my_contrast.jsonl"


@pytest.fixture(scope="module")
def scope() -> Scope:
    return Scope.load("smollm2-135m", device="cpu")


@pytest.fixture(scope="module")
def task():
    return tasks.binding(9)


@pytest.fixture(scope="module")
def fit(scope: Scope, task) -> Fit:
    return decompose(scope, task, [BINDING, "L17H5"], 48, contrasts=["order", "lexical"], replicates=39)


def test_the_binding_head_is_found(scope, task):
    """Measured .92 at n = 128: with 64 prompts .8 is three and a half standard errors away."""
    ranking = find_heads(scope, task, 64)
    best = ranking.top("row_accuracy")[0]
    assert best["head"] == BINDING
    assert best["accuracy"] >= best["row_accuracy"] > 0.8
    assert best["chance"] == pytest.approx(1 / 9)
    assert {"L18H6", "L17H5", "L17H3"} <= {str(head) for head in ranking.above(0.30, by="row_accuracy")}
    # its neighbour is as accurate among the boxes, but looks elsewhere most of the time
    beside = next(row for row in ranking.top() if row["head"] == "L18H7")
    assert beside["accuracy"] > 0.8
    assert beside["row_accuracy"] < 0.6


def test_both_features_depend_on_the_query_and_have_few_dimensions(fit):
    """Measured at n = 192: lexical 11, order 2; the paper has 9-10 and 2-3 on a larger model."""
    order, lexical = fit["order", BINDING], fit["lexical", BINDING]
    assert 2 <= order.rank <= 5
    assert 6 <= lexical.rank <= 14
    assert order.controls.verdict == lexical.controls.verdict == "interaction"


def test_swapping_both_moves_the_attention_and_random_subspaces_do_not(scope, task, fit):
    """Promised: from .7 / .05 to .25 / .30. Measured at n = 192: .77 / .01 to .08 / .58, and random leaves .53.

    With fewer prompts the rank reads higher, and random subspaces of 14 dimensions leave .48-.51: hence .4 here.
    """
    rows = {r["condition"]: r for r in swap(scope, task.test(32), fit, heads=BINDING).table()}
    both = rows["both"]
    assert both["orig_before"] >= 0.7
    assert both["target_before"] <= 0.05
    assert both["orig_after"] <= 0.25
    assert both["target_after"] >= 0.30
    assert rows["random_both"]["orig_after"] >= 0.4
    assert both["gain_low"] > 0
    assert rows["lexical"]["shift"] > rows["order"]["shift"]
    sham = rows["sham_both"]
    assert sham["orig_after"] == pytest.approx(sham["orig_before"], abs=0.1)
    assert sham["flip"] < 0.1


def test_a_swap_in_two_heads_lowers_the_answer_logit_more_than_a_random_one(scope, task, fit):
    rows = {r["condition"]: r for r in swap_downstream(scope, task.test(8), fit).tables["downstream"]}
    assert rows["both"]["fell"] > rows["random_both"]["fell"]
    assert rows["both"]["low"] > 0
    assert rows["both"]["accuracy_after"] <= rows["both"]["accuracy_before"]


def test_a_prompt_is_explained_by_its_features(scope, fit):
    rows = attribute(scope, "hat: O\njam: Z\ncat: B\njam:", BINDING, fit).tables["tokens"]
    assert sum(row["attention"] for row in rows) == pytest.approx(1, abs=1e-4)
    for row in rows:
        assert row["order"] + row["lexical"] + row["residual"] == pytest.approx(row["logit"], abs=1e-3)
    boxes = {row["token"].strip(): row for row in rows if row["token"].strip() in ("O", "Z", "B")}
    assert max(boxes, key=lambda box: boxes[box]["attention"]) == "Z"
    assert max(boxes, key=lambda box: boxes[box]["lexical"]) == "Z", "because of the word, not of the place"


def test_filter_heads_are_found(scope):
    """Methods A9: L22H4 and L21H8 among the top three by the share of attention on the asked category."""
    top = find_heads(scope, tasks.filter(5), 16).top("ratio")[:3]
    assert {"L22H4", "L21H8"} <= {row["head"] for row in top}
    assert top[0]["chance"] == pytest.approx(0.2)


def test_the_worked_example_finds_the_gender_of_a_pronoun_in_one_direction(scope):
    """Measured: .18 / .01 to .01 / .14, random leaves .18; a head of the first layer moves nothing."""
    task = tasks.from_jsonl(EXAMPLE, center="query")
    assert "L15H6" in {row["head"] for row in find_heads(scope, task, 16).top()[:5]}
    fit = decompose(scope, task, ["L15H6", "L0H0"], 32)
    assert fit["gender", "L15H6"].rank == 1
    rows = {(r["head"], r["condition"]): r for r in swap(scope, task.test(16), fit).table()}
    moved = rows["L15H6", "gender"]
    assert moved["orig_after"] < 0.05 < 0.1 < moved["target_after"]
    assert rows["L15H6", "random_gender"]["orig_after"] > 0.12
    assert abs(rows["L0H0", "gender"]["shift"]) < 0.05
