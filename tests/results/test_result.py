"""Facts about results: claims are decided by rule, folders are whole or absent, the shell speaks in
sentences.
"""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkscope import BadInput
from qkscope.heads import Head
from qkscope.results.claims import Claim, rule_holds
from qkscope.results.result import Result


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_heads_parse_what_they_print(layer, index):
    assert Head.parse(str(Head(layer, index))) == Head(layer, index)


@given(st.text(max_size=20))
def test_any_text_is_a_head_or_a_sentence(text):
    try:
        head = Head.parse(text)
    except BadInput as error:
        head = error
    assert str(head).endswith("like L18H6.") or Head.parse(str(head)) == head


def test_rules_decide_and_numbers_of_numpy_and_torch_are_written_as_numbers():
    values = {"ours": 0.42, "control": 0.13}
    for rule, holds in (
        ("ours > 2 * control", True),
        ("ours > 4 * control", False),
        ("0.4 < ours <= 0.42 and control < 0.2", True),
        ("ours < 0 or abs(ours - control) > 0.2", True),
        ("min(ours, control) == control", True),
        ("-ours < 0", True),
    ):
        assert rule_holds(rule, values) is holds
    row = {
        "a": np.float32(0.5),
        "b": np.int64(3),
        "c": torch.tensor(0.25),
        "d": np.array([0.5, np.nan]),
    }
    found = Result("demo", {"rows": [row]}).to_json()["tables"]["rows"][0]
    assert found == {"a": 0.5, "b": 3, "c": 0.25, "d": [0.5, None]}


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf"), -float("inf")])
def test_a_missing_value_never_satisfies_a_rule(missing):
    assert not Claim("c", "p", missing, 1.0, "ours < 5").holds
    assert not Claim("c", "p", missing, 1.0, "ours != 5").holds
    assert Claim("c", "p", 1.0, missing, "ours < 5").holds


def test_an_interval_leaves_ties_open_and_a_claim_says_whose_it_is_and_why_it_fails():
    for low, high, holds in ((0.01, 0.2, True), (-0.1, 0.2, None), (None, None, True)):
        assert Claim("c", "", 0.1, None, "ours > 0", low=low, high=high).holds is holds
    assert Claim("c", "", -0.1, None, "ours > 0", low=-0.2, high=-0.01).holds is False
    assert (
        Claim("c", "", 2.0, None, "abs(ours) <= 1", low=-3.0, high=7.0).holds is None
    )  # true in the middle alone
    says = {"": "ours", "implied by Fig. 2": "implied", "Fig. 9: negligible": "stated"}
    assert {paper: Claim("c", paper, 1.0, None, "ours > 0").source for paper in says} == says
    failing = Claim(
        "c",
        "Fig. 9: some",
        -1.0,
        None,
        "ours > 0",
        reason="small model",
        why="It has 135M weights.",
    )
    row = failing.to_json()
    assert (row["holds"], row["reason"], row["why"]) == (
        False,
        "small model",
        "It has 135M weights.",
    )
    assert Claim.from_json(row) == failing
    held = Claim(
        "c", "Fig. 9: some", 1.0, None, "ours > 0", reason="small model", why="It has 135M weights."
    ).to_json()
    assert (held["holds"], held["reason"], held["why"]) == (True, "", "")
    assert Claim("c", "", None, None, "ours > 0").to_json()["reason"] == "not run here"


_ENDS = (
    st.floats(allow_nan=True, allow_infinity=True)
    | st.none()
    | st.sampled_from([0.0, -0.0, 1e-300])
)


@given(
    _ENDS,
    _ENDS,
    _ENDS,
    _ENDS,
    st.sampled_from(["ours > 0", "ours >= 0", "ours > control", "abs(ours) < 1"]),
)
def test_a_claim_reads_back_as_it_was_written(ours, control, low, high, rule):
    """An end of exactly 0 is one; what JSON has no place for decides nothing before it is written
    either.
    """
    claim = Claim("c", "", ours, control, rule, low=low, high=high)
    row = json.loads(json.dumps(Result("demo", {}, claims=[claim]).to_json()))["claims"][0]
    assert Claim.from_json(row).holds is claim.holds is row["holds"]
    with pytest.raises(BadInput, match="its rule says"):
        Claim.from_json({**row, "holds": not row["holds"]})


@pytest.mark.parametrize(
    "rule", ["__import__('os')", "ours", "theirs > 1", "ours >", "ours.real > 0", "[1][0] > 0"]
)
def test_rules_are_not_programs(rule):
    with pytest.raises(BadInput):
        rule_holds(rule, {"ours": 1.0, "control": 1.0})


def some_result(**kwargs):
    claim, row = (
        Claim("c", "p", 2.0, 1.0, "ours > control"),
        {"head": "L0H0", "value": float("nan"), "n": 3},
    )
    return Result("test/one", {"t": [row]}, [claim], {"x": torch.arange(3)}, **kwargs)


def test_results_are_json_with_null_for_nan_and_read_back(tmp_path):
    folder = some_result().write(tmp_path / "run", files={"figures/a.png": b"png"})
    stored = json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)
    assert (stored["schema"], stored["tables"]["t"][0]["value"], stored["claims"][0]["holds"]) == (
        1,
        None,
        True,
    )
    assert {p.name for p in folder.rglob("*") if p.is_file()} == {
        "results.json", "manifest.json", "arrays.safetensors", "a.png",
    }  # fmt: skip
    again = Result.read(folder)
    assert (again.to_json(), again.arrays["x"].tolist()) == (stored, [0, 1, 2])


def test_the_demo_answers_in_its_first_line_and_writes_a_page(tmp_path, qkscope):
    """The whole main job, on few prompts: what it finds is in the numbers already, if not in every
    interval.
    """
    code, printed, complaint = qkscope("demo", "--n", 12, "--out", tmp_path / "demo")
    assert (code, complaint) == (0, "")
    assert printed.startswith("L18H6 finds the box by the word asked for")
    stored = json.loads((tmp_path / "demo" / "results.json").read_text())
    swap = {(row["head"], row["condition"]): row for row in stored["tables"]["swap"]}
    assert swap["L18H6", "both"]["orig_after"] < 0.3 < swap["L18H6", "random_both"]["orig_after"]
    assert {"order", "lexical", "both", "order_oblique", "lexical_oblique", "random_order", "random_lexical",
            "random_both"} <= {condition for _, condition in swap}  # fmt: skip
    assert len(stored["claims"]) == 5
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "random_both" in page
    for kind in (
        "map",
        "spectra",
        "swaps",
        "curve",
        "tokens",
        "said",
        "parts",
        "tests",
        "output",
        "graph",
    ):
        assert f'class="block {kind}"' in page
    assert stored["answer"].split(":")[0] in page
    said = printed.splitlines()
    assert len(said) <= 40
    assert any(re.match(r"Why +L18H6 at ':' \(token 17\) looks at ' Z'", line) for line in said)
    assert said[-1].startswith("Next: qkscope why ")
