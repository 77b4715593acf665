"""Tiny models: the same weights for the same seed, no trace in the global RNG, attention that is not uniform."""

import pytest
import torch

from qkscope.errors import BadInput
from qkscope_papers.families import FAMILIES, tiny_model
from qkscope_papers.models import CLOSE, check_family, list_families, says_families
from tiny_llama import SOME, tiny_batch

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


@pytest.mark.parametrize("family", [name for name in SOME if name not in NO_ROWS])
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


TRIED = [
    "llama", "gemma2", "gpt_oss", "smollm3", "vit", "roberta", "falcon", "mamba", "t5", "qwen3_next", "jetmoe",
    "bert (decoder)", "modernbert-decoder", "opt (projected)", "bart (deeper decoder)", "gemma4_text", "minimax",
    "deepseek_v32", "ministral3", "llama4_text", "llama (dynamic rope)", "phi3 (longrope)", "doge", "deepseek_v4",
]  # fmt: skip


@pytest.fixture(scope="module")
def table():
    return {row["family"]: row for row in list_families(TRIED)}


def test_no_family_is_silently_wrong_beyond_the_lengths_that_its_config_names(table):
    assert {row["verdict"] for row in table.values()} == {"right", "refused"}
    for row in table.values():
        assert row["length"] is None or row["length"] >= 37 or row["family"] == "vit"
        assert row["max_error"] < CLOSE if row["supported"] else row["max_error"] is None and row["reason"]
        assert row["trace_error"] < CLOSE if row["trace_error"] is not None else row["reason"]


def test_every_type_of_causal_model_is_in_the_table():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert {FAMILIES[name].get("type", name) for name in FAMILIES} >= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_why_runs_of_a_head_on_every_family_that_is_traced(table):
    assert not [row["family"] for row in table.values() if "no why of a head" in row["reason"] and row["trace_error"]]


def test_the_sentence_counts_what_is_wrong(table):
    rows = [{**row, "verdict": "wrong"} for row in table.values()]
    assert f"{len(rows)} are wrong" in says_families(rows)
    assert " 0 are wrong" in says_families(list(table.values()))


def test_families_that_cannot_be_traced_say_why(table):
    assert "no one matrix adds up its heads' outputs" in table["jetmoe"]["reason"]
    assert table["gemma4_text"]["trace_error"] is not None


@pytest.mark.parametrize("family", MUST_PASS)
def test_these_families_are_supported_without_limits(family):
    row = check_family(family)
    assert row["verdict"] == "right"
    assert [part for part in row["reason"].split("; ") if not part.startswith("no why without a head")] in ([], [""])


def test_a_family_without_attention_is_refused_with_that_reason(table):
    assert not table["mamba"]["supported"]
    assert "attention interface" in table["mamba"]["reason"]


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba", "granitemoehybrid"])
def test_hybrids_are_served_and_the_layers_without_attention_are_named(family):
    row = check_family(family)
    assert row["verdict"] == "right"
    assert "no heads in layers 0, 2: these have a " in row["reason"]


def test_a_family_that_fails_gets_a_row_and_not_a_traceback(monkeypatch):
    monkeypatch.setitem(FAMILIES["llama"], "hidden_act", "nonsense")
    row = check_family("llama")
    assert row["verdict"] == "not built"
    assert "nonsense" in row["reason"]


def test_the_check_leaves_threads_as_they_were():
    before = torch.get_num_threads()
    list_families(["llama"])
    assert torch.get_num_threads() == before
