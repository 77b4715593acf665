"""Tiny models: the same weights for the same seed, no trace in the global RNG, attention that is not uniform."""

import pytest
import torch

from qkscope.capture.families import FAMILIES, check_family, list_families, tiny_model
from qkscope.errors import BadInput
from tiny_llama import tiny_batch

MUST_PASS = [
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "gemma2", "gemma3", "olmo2", "gpt_neox", "gpt2", "opt",
    "gpt_oss", "starcoder2", "stablelm", "cohere", "granite", "smollm3", "bert", "roberta", "xlm-roberta", "vit",
    "qwen2_vl", "bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small", "whisper",
    "gpt_neo", "gptj", "codegen", "bloom", "mpt", "falcon", "xglm",
    "openai-gpt", "mpnet",
]  # fmt: skip
NO_ROWS = ["mamba", "t5", "mllama", "jamba", "qwen3_next", "lfm2", "granitemoehybrid"]  # no attention in every layer


def test_same_seed_same_weights_and_the_global_rng_is_untouched():
    before = torch.get_rng_state()
    first, again, other = tiny_model("qwen3"), tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(first.parameters(), again.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in pairs)


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "gpt2", "cohere", "gpt_oss", "bert"])
def test_no_parameter_is_left_at_a_constant(family):
    assert all(weight.std() > 0.1 for weight in tiny_model(family).parameters())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NO_ROWS])
def test_tiny_models_run_and_their_attention_is_far_from_uniform(family):
    model = tiny_model(family)
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
    inputs = tiny_batch(model)
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    assert output.logits.isfinite().all()
    rows = output.attentions[-1][0, :, -1]  # the first, unpadded sequence: [head, key]
    assert (rows - 1 / rows.shape[-1]).abs().sum(-1).mean() > 0.3


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(BadInput, match="llama"):
        tiny_model("lama")


@pytest.fixture(scope="module")
def table():
    return {row["family"]: row for row in list_families()}


def test_the_table_has_one_row_per_family_with_an_error_or_a_reason(table):
    assert list(table) == list(FAMILIES)
    for row in table.values():
        assert set(row) == {"family", "supported", "reason", "max_error", "trace_error"}
        assert row["max_error"] < 1e-5 if row["supported"] else row["max_error"] is None and row["reason"]
        assert row["trace_error"] < 1e-5 if row["trace_error"] is not None else row["reason"]


def test_only_these_supported_families_cannot_be_traced_and_they_say_why(table):
    refused = {
        family: row["reason"] for family, row in table.items() if row["supported"] and row["trace_error"] is None
    }
    assert set(refused) == {"jetmoe", "gemma3n_text", "qwen3_next"}
    assert "no one matrix adds up its heads' outputs" in refused["jetmoe"]
    assert "4 residual streams" in refused["gemma3n_text"]


@pytest.mark.parametrize("family", MUST_PASS)
def test_these_families_are_supported_without_limits(table, family):
    assert table[family]["supported"]
    assert table[family]["reason"] == ""


def test_a_family_without_attention_is_refused_with_that_reason(table):
    assert not table["mamba"]["supported"]
    assert "attention interface" in table["mamba"]["reason"]


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba", "granitemoehybrid"])
def test_hybrids_are_served_and_the_layers_without_attention_are_named(table, family):
    assert table[family]["supported"]
    assert "no heads in layers 0, 2: these have a " in table[family]["reason"]


def test_a_family_that_fails_gets_a_row_and_not_a_traceback(monkeypatch):
    monkeypatch.setitem(FAMILIES["llama"], "hidden_act", "nonsense")
    row = check_family("llama")
    assert not row["supported"]
    assert "nonsense" in row["reason"]


def test_the_check_leaves_threads_as_they_were():
    before = torch.get_num_threads()
    list_families(["llama"])
    assert torch.get_num_threads() == before
