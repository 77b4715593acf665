"""A model that cannot be looked into is refused with the true cause, in one sentence."""

import types

import pytest
from transformers import AutoConfig, T5EncoderModel, WhisperForAudioClassification

from qkscope import Scope
from qkscope.errors import BadInput
from qkscope_papers.families import tiny_config, tiny_model

TRUE_CAUSES = {
    "t5": "encoder-decoder",
    "deberta-v2": "adds to a logit what depends on the tokens, besides q·k",
    "mllama": r"cross-attention layers \(1 of 4\) run only beside an image",
}


@pytest.mark.parametrize("family", TRUE_CAUSES)
def test_families_are_refused_for_their_true_cause(family: str) -> None:
    with pytest.raises(BadInput, match=TRUE_CAUSES[family]):
        Scope.from_model(tiny_model(family))


def test_sound_a_learned_position_bias_and_a_replaced_forward_are_refused_as_what_they_are() -> (
    None
):
    config = tiny_config("whisper", pad_token_id=1, decoder_start_token_id=1)
    with pytest.raises(BadInput, match="WhisperForAudioClassification reads input_features"):
        Scope.from_model(WhisperForAudioClassification(config))
    with pytest.raises(BadInput, match="adds a learned position_bias to its logits"):
        Scope.from_model(
            T5EncoderModel(
                AutoConfig.for_model("t5", vocab_size=100, d_model=64, d_kv=16, num_layers=2)
            )
        )
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(own_code, layer.self_attn)
    with pytest.raises(
        BadInput, match=r"never call transformers' attention interface .*their forward was replaced"
    ):
        Scope.from_model(model)


def own_code(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
    """A forward as analysis scripts put it in: its own softmax, no interface."""
    return self.o_proj(self.v_proj(hidden_states).repeat(1, 1, 2)), None
