"""Folded weights: s · W x̂ + c, rotated by the model's own cos and sin, is the q and k the attention was given."""

import gc
import math

import pytest
import torch

from folded import normalised_input, qk_norm_scale
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tap import tap
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.weights import head_weights
from qkscope_papers.families import tiny_model
from tiny_llama import SOME, tiny_batch

NOT_EVERY_LAYER = ["mamba", "mllama", "t5", "deberta-v2"]  # the probe refuses them
NOT_OF_THE_FORM = {
    "gemma3n_text": "a layer before them",
    "jetmoe": "no linear function",
    "deepseek_v3": "normalised in parts",
    "hunyuan_v1_dense": "after the rotation",
    "diffllama": "called several times",
}
ROTATION_OUT_OF_SIGHT = ["llama4_text"]  # rotates by complex numbers, in a function of its own
OTHERS = [*NOT_EVERY_LAYER, *NOT_OF_THE_FORM, *ROTATION_OUT_OF_SIGHT]
SUPPORTED = [family for family in SOME if family not in OTHERS]
VARIANTS = [
    ("cohere", {"use_qk_norm": False}),
    ("stablelm", {"qk_layernorm": False}),
    ("stablelm", {"use_parallel_residual": True}),
    ("phi", {"qk_layernorm": False}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"enable_bias": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", {"attention_bias": False, "use_parallel_residual": False}),
    ("llama", {"attention_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("vit", {"qkv_bias": False}),
    ("falcon", {"alibi": True, "bias": True, "parallel_attn": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"multi_query": False}),
    ("codegen", {"num_attention_heads": 8, "rotary_dim": 4}),
    ("mpt", {"attn_config": {"softmax_scale": 0.5}}),
    ("bloom", {"num_attention_heads": 6, "hidden_size": 96}),  # slopes of ALiBi that are no powers of one number
]


def capture(model):
    """Every layer's attention call on a padded batch, and the hidden state that entered each layer."""
    calls = []
    layers = Scope.from_model(model, check=False).facts.layer_of
    with torch.no_grad(), tap(model, calls.append, layers=layers, rotary=True):
        hidden = model(**tiny_batch(model), output_hidden_states=True).hidden_states
    return calls, hidden


def rebuild(model, weights, layer, hidden):
    """q and k before the rotation, from the weights alone: [b, h, t, d_head] and [b, g, t, d_head]."""
    x_hat = normalised_input(model, layer, hidden)
    s_q, s_k = qk_norm_scale(model, layer, hidden)
    queries = [row for row, head in enumerate(weights.heads) if head.layer == layer]
    keys = weights.kv_of_head[queries].unique()
    q = torch.einsum("btx,hdx->bhtd", x_hat, weights.W_Q[queries]) * s_q.transpose(1, 2)[..., None]
    k = torch.einsum("btx,gdx->bgtd", x_hat, weights.W_K[keys]) * s_k.transpose(1, 2)[..., None]
    return q + weights.c_Q[queries][:, None], k + weights.c_K[keys][:, None], weights.scale[queries]


def rotate(rotary, q, k):
    if rotary is None:
        return q, k
    width = rotary.q.shape[-1]
    length = (rotary.cos.square() + rotary.sin.square()).sqrt()  # YaRN scales what it turns: W holds that
    turned = rotary.function(q[..., :width], k[..., :width], rotary.cos / length, rotary.sin / length)
    return tuple(torch.cat([part, x[..., width:]], dim=-1) for part, x in zip(turned, (q, k), strict=True))


def logits(q, k, scale):
    return scale.view(-1, 1, 1) * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2))


def relative_error(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def check_reproduces(model):
    weights = head_weights(model)
    calls, hidden = capture(model)
    assert weights.W_Q.shape[-1] == model.config.get_text_config().hidden_size + 1
    for call in calls:
        q, k, scale = rebuild(model, weights, call.layer, hidden[call.layer])
        q, k = rotate(call.rotary, q, k)
        assert relative_error(q, call.q) < 1e-4
        assert relative_error(k, call.k) < 1e-4
        assert relative_error(logits(q, k, scale), logits(call.q, call.k, torch.tensor(call.scale))) < 1e-4


@pytest.mark.parametrize("family", SUPPORTED)
def test_weights_reproduce_the_captured_queries_keys_and_logits(family):
    check_reproduces(tiny_model(family))


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_weights_reproduce_every_variant_of_a_family(family, overrides):
    check_reproduces(tiny_model(family, seed=1, **overrides))


@pytest.mark.parametrize("family", ROTATION_OUT_OF_SIGHT)
def test_weights_reproduce_what_no_rotation_changes(family):
    model = tiny_model(family)
    weights = head_weights(model)
    calls, hidden = capture(model)
    for call in calls:
        q, k, scale = rebuild(model, weights, call.layer, hidden[call.layer])
        assert relative_error(q.norm(dim=-1), call.q.norm(dim=-1)) < 1e-4
        own, theirs = logits(q, k, scale), logits(call.q, call.k, torch.tensor(call.scale))
        # a token's rotation cancels against itself
        assert relative_error(own.diagonal(dim1=-2, dim2=-1), theirs.diagonal(dim1=-2, dim2=-1)) < 1e-4


def test_what_is_added_between_the_norm_and_the_projections_goes_into_the_constant():
    model = tiny_model("llama")
    plain, attention = head_weights(model, "L0H1"), model.model.layers[0].self_attn
    hook = attention.register_forward_pre_hook(
        lambda _module, args, kwargs: (args, kwargs | {"hidden_states": kwargs["hidden_states"] + 1}), with_kwargs=True
    )
    moved = head_weights(model, "L0H1")
    hook.remove()
    torch.testing.assert_close(moved.W_Q[..., :-1], plain.W_Q[..., :-1])
    torch.testing.assert_close(moved.W_Q[0, :, -1], attention.q_proj.weight[16:32].sum(-1).detach())


def test_norms_are_folded_in_where_a_layer_has_several_residual_streams():
    model = tiny_model("gemma3n_text")
    layer, W = model.model.layers[1], head_weights(model, "L1H0").W_Q[0, :, :-1]
    own = (
        layer.self_attn.q_norm.weight[:, None] * layer.self_attn.q_proj.weight[: len(W)] * layer.input_layernorm.weight
    )
    torch.testing.assert_close(W, own.detach())


def test_a_scaling_of_rotated_vectors_is_in_the_weights():
    """YaRN: q and k of one token at position 0 are W x̂, as the dot product sees them."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    scaled, plain = (head_weights(tiny_model("llama", **more)) for more in ({"rope_parameters": yarn}, {}))
    torch.testing.assert_close(scaled.W_Q, (0.1 * math.log(4.0) + 1) * plain.W_Q)


def test_a_family_without_attention_is_refused():
    with pytest.raises(BadInput, match="attention interface"):
        head_weights(tiny_model("mamba"))


@pytest.mark.parametrize("clip", [1.0, 30.0])  # often, and never in a short prompt
def test_clipped_vectors_have_no_weights_however_seldom_they_are_clipped(clip):
    with pytest.raises(BadInput, match="no linear function"):
        head_weights(tiny_model("mpt", attn_config={"clip_qkv": clip}))


@pytest.mark.parametrize("family", NOT_OF_THE_FORM)
def test_layers_without_one_matrix_per_head_are_refused_with_the_reason(family):
    with pytest.raises(BadInput, match=NOT_OF_THE_FORM[family]):
        head_weights(tiny_model(family))


def test_clipped_projections_are_refused():
    with pytest.raises(BadInput, match="no linear function"):
        head_weights(tiny_model("olmo", clip_qkv=0.5))


def test_weights_reproduce_the_real_model():
    scope = Scope.load("smollm2-135m")
    heads = ["L17H5", "L18H6", "L18H7", "L21H8"]
    weights = head_weights(scope, heads)
    inputs = scope.encode(["hat: O\njam: Z\ncat: B\njam:", "The jam is in Box"]).inputs
    with torch.no_grad():
        hidden = scope.model(**inputs, output_hidden_states=True).hidden_states
    row, column = inputs["attention_mask"].nonzero(as_tuple=True)
    places = Places(row, column, column[:, None], torch.ones_like(column[:, None], dtype=torch.bool))
    captured = scope.capture_inputs(inputs, places=places, heads=heads, space="pre_rope")
    assert torch.equal(captured.kv_of_head, weights.kv_of_head)
    torch.testing.assert_close(captured.scale, weights.scale)
    for i, head in enumerate(weights.heads):
        x_hat = normalised_input(scope, head.layer, hidden[head.layer])[row, column]
        W_Q, W_K = weights[head]
        assert relative_error(x_hat @ W_Q.T, captured.q[:, i]) < 1e-4
        assert relative_error(x_hat @ W_K.T, captured.k[:, captured.kv_of_head[i], 0]) < 1e-4


def test_without_qk_norm_the_scalar_is_one_and_with_it_depends_on_the_token():
    hidden = torch.randn((2, 5, 64), generator=torch.Generator().manual_seed(0))
    plain = qk_norm_scale(tiny_model("llama"), 1, hidden)
    normed = qk_norm_scale(tiny_model("qwen3"), 1, hidden)
    assert [s.shape for s in normed] == [(2, 5, 4), (2, 5, 2)]
    assert all((s - 1).abs().max() < 1e-5 for s in plain)
    assert all(s.std(dim=1).min() > 0.01 for s in normed)


@pytest.mark.parametrize("family", ["llama", "gpt2", "starcoder2"])
def test_half_precision_weights_are_read_without_rounding_again(family):
    half = tiny_model(family).to(torch.bfloat16)
    exact = head_weights(tiny_model(family).to(torch.bfloat16).float())
    read = head_weights(half)
    assert read.W_Q.dtype == torch.float32
    torch.testing.assert_close(read.W_Q[..., :-1], exact.W_Q[..., :-1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(read.W_K[..., :-1], exact.W_K[..., :-1], rtol=1e-6, atol=1e-6)


def test_some_heads_are_the_same_as_all_heads_in_the_order_asked_for():
    model = tiny_model("qwen3")
    everything, some = head_weights(model), head_weights(model, "L1H3,L0H0,L1H2")
    assert some.heads == (Head(1, 3), Head(0, 0), Head(1, 2))
    assert some.W_K.shape[0] == 2  # L1H2 and L1H3 read the same key head
    for head in some.heads:
        for ours, theirs in zip(some[head], everything[head], strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("heads", "sentence"), [("L9H0", "has layers L0 to L1"), ("L0H4", "L0H4 does not exist")])
def test_a_head_that_does_not_exist_is_refused(heads, sentence):
    with pytest.raises(BadInput, match=sentence):
        head_weights(tiny_model("llama"), heads)


def test_reading_leaves_no_trace_on_the_model():
    model = tiny_model("gemma3")
    inputs = tiny_batch(model)
    with torch.no_grad():
        before = model(**inputs).logits
    implementation = model.config._attn_implementation
    head_weights(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before)
    assert model.config._attn_implementation == implementation
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(weight.grad is None for weight in model.parameters())


def test_reading_frees_its_tensors_without_waiting_for_the_garbage_collector():
    model = tiny_model("qwen3")
    head_weights(model)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(thing) is torch.Tensor for thing in gc.get_objects())
        head_weights(model)
        head_weights(model, "L0H1")
        qk_norm_scale(model, 0, torch.ones(1, 2, 64))
        assert sum(type(thing) is torch.Tensor for thing in gc.get_objects()) == before
    finally:
        gc.enable()
