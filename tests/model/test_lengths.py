"""What begins at a length that a config names is seen by the check, and right or refused there."""

import pytest
import torch

from qkscope import BadInput, Example, Scope
from qkscope.model.tiny_copy import named_lengths, small_config
from qkscope_papers.families import tiny_model


def test_a_length_that_is_long_is_made_short_in_a_small_copy() -> None:
    model = tiny_model("llama4_text", floor_scale=8192)
    assert named_lengths(model.config)["floor_scale"] == 8192
    assert small_config(model.config).floor_scale == 16
    scope = Scope.from_model(model)
    assert scope.facts.sides == ("right",)  # its temperature counts columns, from 8,192 of them on
    with pytest.raises(BadInput, match="padding on the left would move"):
        scope.encode([Example(ids=(5, 6, 7)), Example(ids=(8, 9))], padding_side="left")


def test_what_fails_beyond_a_length_is_refused_with_the_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("deepseek_v32", index_topk=2048)
    Scope.from_model(model)
    monkeypatch.setattr(
        "qkscope.model.tap._Name.__eq__", str.__eq__
    )  # so the mask is dropped, as it was
    with pytest.raises(BadInput, match=r"beyond its index_topk.* \(seen in a small copy of it\)"):
        Scope.from_model(tiny_model("deepseek_v32", index_topk=2048))


def test_a_model_that_was_checked_before_keeps_what_was_found(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_model("llama4_text", floor_scale=8192).save_pretrained(tmp_path / "model")
    assert Scope.load(tmp_path / "model").facts.sides == ("right",)
    monkeypatch.setattr("qkscope.model.selfcheck.check_model", None)  # it is not made again
    assert Scope.load(tmp_path / "model").facts.sides == ("right",)


@pytest.mark.parametrize("factor", [200.0, -200.0])  # its own key has all the attention, or none
def test_a_head_that_gives_all_its_attention_to_one_key_can_be_patched(factor: float) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        attention = model.model.layers[0].self_attn
        attention.q_proj.weight[:16] = factor * attention.k_proj.weight[:16]
    Scope.from_model(model)
