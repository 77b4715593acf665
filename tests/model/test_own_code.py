"""Families with attention code of their own: in every form they come in, what is captured is what
their softmax saw.
"""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from id_prompts import ids, marked
from qkscope.errors import BadInput
from qkscope.examples import Example, Key
from qkscope.linear.head_weights import head_weights
from qkscope.model.capture_types import Places
from qkscope.model.scope import Scope
from qkscope_papers.families import tiny_model, trace_error

ALIBI = {"alibi": True}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
EAGER = {"attn_implementation": "eager"}
FORMS = [
    ("falcon", ALIBI | EAGER), ("falcon", NEW | EAGER | {"num_ln_in_parallel_attn": 1}),
    ("falcon", NEW | ALIBI | {"bias": True}),
    ("falcon", ALIBI | {"multi_query": False, "bias": True, "parallel_attn": False}),
    ("mpt", {"attn_config": {"clip_qkv": 1.0}}), ("bloom", {"num_attention_heads": 6, "hidden_size": 96}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}),
]  # fmt: skip
EXAMPLES = marked((12, 7, 9), (1, 4, -1))


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_every_form_passes_the_self_check(family: str, form: dict) -> None:
    check = Scope.from_model(tiny_model(family, seed=1, **form), check=False).self_check()
    assert check.attention_error < 1e-5


@pytest.mark.parametrize("family", ["gpt_neo", "gptj", "bloom", "falcon"])
def test_half_precision_is_served_and_hides_what_it_hides(family: str) -> None:
    scope = Scope.from_model(tiny_model(family).to(torch.float16))
    encoded = scope.encode(EXAMPLES)
    places = encoded.everywhere()
    early = Places(places.row, places.query - 3, places.keys, places.key_mask)
    bias = scope.capture_inputs(encoded, places=early).bias
    later = (places.keys > early.query[:, None])[:, None].expand_as(bias)
    assert bool(
        (bias[later] == -torch.inf).all()
    )  # float16 hides with a number that is far from infinite
    assert trace_error(scope) < 5e-2


@pytest.mark.parametrize(
    ("family", "form"), [("bloom", {}), ("mpt", {}), ("falcon", ALIBI), ("falcon", ALIBI | EAGER)]
)
def test_alibi_is_a_bias_that_falls_with_the_distance_and_not_with_the_padding(
    family: str, form: dict
) -> None:
    scope = Scope.from_model(tiny_model(family, **form), check=False)
    tokens = ids(8)
    places = [Key((p, p + 1)) for p in range(8)]
    (alone,) = scope.capture([Example(ids=tokens, keys=places)])
    assert bool((alone.bias[0].diff(dim=-1) > 0).all())
    assert bool((alone.bias[0, :, -1] == 0).all())
    slope = alone.bias[0, :, :1] / -7
    torch.testing.assert_close(
        alone.bias[0], slope * torch.arange(7, -1, -1) * -1, atol=1e-5, rtol=1e-5
    )
    for side in ("left", "right"):
        made = [Example(ids=tokens, keys=places), Example(ids=ids(13, 1), keys=places)]
        beside = next(iter(scope.capture(made, padding_side=side))).of_rows(torch.tensor([0]))
        torch.testing.assert_close(beside.bias, alone.bias, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(beside.attention(), alone.attention(), atol=1e-5, rtol=0)


def test_a_rotation_out_of_sight_and_tokens_of_its_own_are_said() -> None:
    settings = {
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = AutoConfig.for_model(
        "roformer", intermediate_size=96, max_position_embeddings=64, **settings
    )
    scope = Scope.from_model(AutoModelForMaskedLM.from_config(config))
    with pytest.raises(BadInput, match="no weights to read: roformer rotates inside its own code"):
        head_weights(scope)
    with pytest.raises(
        BadInput, match="pre_rope is not defined here: roformer rotates inside its own code"
    ):
        scope.capture(EXAMPLES, space="pre_rope").__next__()
    assert trace_error(scope) < 1e-5
    settings = {
        "vocab_size": 100,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "dim_head": 16,
        "dim_ff": 96,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("cpmant", num_hidden_layers=2, **settings)
    )
    with pytest.raises(BadInput, match="of 6 tokens its attention makes 38"):
        Scope.from_model(model)


def capped(self, query, key, value, attention_mask=None):
    logits = 40 * torch.tanh(query @ key.transpose(-1, -2) / 40) + attention_mask
    weights = nn.functional.softmax(logits, dim=-1)
    return weights @ value, weights


def sharpened(self, query, key, value, attention_mask=None):
    weights = nn.functional.softmax(query @ key.transpose(-1, -2) + attention_mask, dim=-1)
    return weights.square() @ value, weights


def summed(self, query, key, value, attention_mask=None):
    weights = nn.functional.softmax(
        torch.einsum("bhsd,bhtd->bhst", query, key) + attention_mask, dim=-1
    )
    return weights @ value, weights


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (capped, "not one number times q·k plus a bias"),
        (sharpened, "writing a key that is already there changes the output"),
        (summed, "attention code of their own, in which no softmax of one product q·k is seen"),
    ],
)
def test_code_that_is_something_else_is_refused(
    code, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPTNeoSelfAttention, "_attn", code)
    with pytest.raises(BadInput, match=reason):
        Scope.from_model(tiny_model("gpt_neo", attention_types=[[["global"], 2]]))
