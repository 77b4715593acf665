"""Tiny models of families: a verdict that is true of each, and a reason where one is refused or
limited.
"""

import pytest
import torch

from qkscope.errors import BadInput
from qkscope_papers.families import FAMILIES, tiny_model
from qkscope_papers.models import CLOSE, check_family, list_families, says_families

# One of each kind of attention code, residual stream and position; all 193: `qkscope models`.
WHOLE = [
    "llama", "qwen3", "mixtral", "gemma2", "olmo2", "gpt_neox", "gpt2", "gpt_oss", "bert", "vit", "bloom", "falcon",
]  # fmt: skip
LIMITED = [
    "mamba", "t5", "qwen3_next", "jamba", "jetmoe", "bert (decoder)", "opt (projected)", "gemma4_text", "deepseek_v32",
    "llama4_text", "llama (dynamic rope)", "doge",
]  # fmt: skip


@pytest.fixture(scope="module")
def table():
    threads = torch.get_num_threads()
    rows = {row["family"]: row for row in list_families([*WHOLE, *LIMITED])}
    assert torch.get_num_threads() == threads
    return rows


def test_no_family_is_silently_wrong_beyond_the_lengths_that_its_config_names(table):
    assert {row["verdict"] for row in table.values()} == {"right", "refused"}
    for row in table.values():
        assert row["length"] is None or row["length"] >= 37 or row["family"] == "vit"
        assert (
            row["max_error"] < CLOSE
            if row["supported"]
            else row["max_error"] is None and row["reason"]
        )
        assert row["trace_error"] < CLOSE if row["trace_error"] is not None else row["reason"]
        assert "no why of a head" not in row["reason"] or not row["trace_error"], (
            "why runs where a trace does"
        )


@pytest.mark.parametrize("family", WHOLE)
def test_these_families_are_supported_without_limits(table, family):
    assert table[family]["verdict"] == "right"
    limits = [
        part
        for part in table[family]["reason"].split("; ")
        if not part.startswith("no why without a head")
    ]
    assert limits in ([], [""])


@pytest.mark.parametrize(
    ("family", "supported", "says"),
    [
        ("mamba", False, "attention interface"),
        ("jetmoe", True, "no one matrix adds up its heads' outputs"),
        *((name, True, "no heads in layers 0, 2: these have a ") for name in LIMITED[2:4]),
    ],
)
def test_what_is_refused_or_left_out_is_said(table, family, supported, says):
    assert table[family]["supported"] == supported
    assert says in table[family]["reason"]


def test_what_is_wrong_is_counted_and_every_causal_type_is_known(table, monkeypatch):
    rows = list(table.values())
    assert " 0 are wrong" in says_families(rows)
    assert f"{len(rows)} are wrong" in says_families([{**row, "verdict": "wrong"} for row in rows])
    monkeypatch.setitem(FAMILIES["llama"], "hidden_act", "nonsense")
    row = check_family("llama")
    assert row["verdict"] == "not built"
    assert "nonsense" in row["reason"]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert {FAMILIES[name].get("type", name) for name in FAMILIES} >= set(
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    for call in (tiny_model, lambda name: list_families([name])):
        with pytest.raises(BadInput, match="llama"):
            call("lama")
