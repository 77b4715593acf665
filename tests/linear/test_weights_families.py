"""Folded weights: s · W x̂ + c, rotated by the model's own cos and sin, is the q and k the
attention was given.

Where a norm centres its output, what a weight reads along the mean reads nothing: no answer may
depend on it.
"""

import math

import pytest
import torch

from folded import normalised_input
from qkscope.errors import BadInput
from qkscope.linear.head_weights import head_weights
from qkscope.model.scope import Scope
from qkscope.model.tap import tap
from qkscope_papers.families import tiny_model
from tiny_llama import tiny_batch

REFUSED = {
    "gemma3n_text": "a layer before them",
    "jetmoe": "no linear function",
    "deepseek_v3": "normalised in parts",
    "hunyuan_v1_dense": "after the rotation",
    "diffllama": "called several times",
    "mamba": "attention interface",
}
SUPPORTED = [  # of those that differ in attention or norms; all others: `qkscope models`
    "llama", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo", "olmo2", "gpt_neox", "gpt2", "opt", "gpt_oss",
    "stablelm", "cohere", "granite", "phi", "glm", "persimmon", "gpt_bigcode", "ctrl", "apertus", "nanochat",
    "falcon_h1", "bert", "modernbert", "vit", "falcon", "bloom", "gptj", "gpt_neo", "codegen", "mpt", "openai-gpt",
    "mpnet", "qwen3_next", "lfm2", "jamba", "bart", "xglm",
]  # fmt: skip
VARIANTS = [
    ("cohere", {"use_qk_norm": False}), ("stablelm", {"qk_layernorm": False}), ("phi", {"qk_layernorm": False}),
    ("stablelm", {"use_parallel_residual": True}), ("opt", {"do_layer_norm_before": False}),
    ("opt", {"enable_bias": False}), ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", {"attention_bias": False, "use_parallel_residual": False}), ("llama", {"attention_bias": True}),
    ("qwen3", {"attention_bias": True}), ("vit", {"qkv_bias": False}), ("mpt", {"attn_config": {"softmax_scale": 0.5}}),
    ("falcon", {"alibi": True, "bias": True, "parallel_attn": False}), ("falcon", {"multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("codegen", {"num_attention_heads": 8, "rotary_dim": 4}),
    ("bloom", {"num_attention_heads": 6, "hidden_size": 96}),  # slopes of ALiBi that are no powers of one number
]  # fmt: skip


def capture(model):
    """Every layer's attention call on a padded batch, and the hidden state that entered each layer."""
    calls = []
    layers = Scope.from_model(model, check=False).facts.layer_of
    with torch.no_grad(), tap(model, calls.append, layers=layers, rotary=True):
        hidden = model(**tiny_batch(model), output_hidden_states=True).hidden_states
    return calls, hidden


def rebuild(model, weights, call, hidden):
    """q and k as the attention is given them, from the weights alone but for QK-norm's scalar,
    which is fitted.
    """
    x_hat = normalised_input(model, call.layer, hidden)
    queries = [row for row, head in enumerate(weights.heads) if head.layer == call.layer]
    keys = weights.kv_of_head[queries].unique()
    made = [
        torch.einsum("btx,hdx->bhtd", x_hat, W) for W in (weights.W_Q[queries], weights.W_K[keys])
    ]
    offsets = [
        c[None, :, None].expand_as(x)
        for c, x in zip((weights.c_Q[queries], weights.c_K[keys]), made, strict=True)
    ]
    turned = zip(
        rotate(call.rotary, *made), rotate(call.rotary, *offsets), (call.q, call.k), strict=True
    )
    fitted = []
    for x, c, true in turned:
        s = ((true - c) * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
        normed = any("norm" in name for name, _ in call.module.named_modules())
        fitted.append((s if normed else 1) * x + c)
    return *fitted, weights.scale[queries]


def rotate(rotary, q, k):
    if rotary is None:
        return q, k
    width = rotary.q.shape[-1]
    length = (
        rotary.cos.square() + rotary.sin.square()
    ).sqrt()  # YaRN scales what it turns: W holds that
    tables = rotary.cos / length, rotary.sin / length
    turned = [rotary.function(x[..., :width], x[..., :width], *tables)[0] for x in (q, k)]
    return tuple(
        torch.cat([part, x[..., width:]], dim=-1) for part, x in zip(turned, (q, k), strict=True)
    )


def logits(q, k, scale):
    return scale.view(-1, 1, 1) * (
        q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
    )


def relative_error(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("family", "overrides"), [*((family, {}) for family in SUPPORTED), *VARIANTS]
)
def test_weights_reproduce_the_captured_queries_keys_and_logits(family, overrides):
    model = tiny_model(family, seed=len(overrides), **overrides)
    weights = head_weights(model)
    calls, hidden = capture(model)
    assert weights.W_Q.shape[-1] == model.config.get_text_config().hidden_size + 1
    for call in calls:
        q, k, scale = rebuild(model, weights, call, hidden[call.layer])
        assert relative_error(q, call.q) < 1e-4
        assert relative_error(k, call.k) < 1e-4
        assert (
            relative_error(logits(q, k, scale), logits(call.q, call.k, torch.tensor(call.scale)))
            < 1e-4
        )


def test_weights_reproduce_vectors_whose_rotation_is_out_of_sight():
    model = tiny_model(
        "llama4_text"
    )  # rotates by complex numbers, in a function of its own; not at the first token
    weights, (calls, hidden) = head_weights(model), capture(model)
    for call in calls:
        for ours, theirs in zip(
            rebuild(model, weights, call, hidden[call.layer])[:2], (call.q, call.k), strict=True
        ):
            assert relative_error(ours[0, :, 0], theirs[0, :, 0]) < 1e-4


def test_a_scaling_of_rotated_vectors_is_in_the_weights():
    """YaRN: q and k of one token at position 0 are W x̂, as the dot product sees them."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    scaled, plain = (
        head_weights(tiny_model("llama", **more)) for more in ({"rope_parameters": yarn}, {})
    )
    torch.testing.assert_close(scaled.W_Q, (0.1 * math.log(4.0) + 1) * plain.W_Q)


@pytest.mark.parametrize(
    ("family", "overrides", "heads", "reason"),
    [
        *((family, {}, None, reason) for family, reason in REFUSED.items()),
        ("olmo", {"clip_qkv": 0.5}, None, "no linear function"),
        (
            "mpt",
            {"attn_config": {"clip_qkv": 30.0}},
            None,
            "no linear function",
        ),  # never in a short prompt
        ("llama", {}, "L9H0", "has layers L0 to L1"),
    ],
)
def test_layers_without_one_matrix_per_head_are_refused_with_the_reason(
    family, overrides, heads, reason
):
    with pytest.raises(BadInput, match=reason):
        head_weights(tiny_model(family, **overrides), heads)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_no_weight_reads_along_the_mean_that_a_norm_takes_out(family):
    """Along **1**, or 1/gain where the stream is the norm's output (post-norm): no token has a part
    there, yet singular vectors would turn to it."""
    model, normals = tiny_model(family), torch.ones(2, 64)
    if family == "bert":
        norms = model.bert.embeddings.LayerNorm, model.bert.encoder.layer[0].output.LayerNorm
        normals = torch.stack([1 / norm.weight.detach() for norm in norms])
        assert normals.std() > 0.01
    weights = head_weights(model)
    for W in (weights.W_Q, weights.W_K):
        for head, own in zip(weights.heads, W, strict=True):
            assert (own[:, :-1] @ normals[head.layer]).abs().max() < 1e-5
