"""A dictionary's codes are those of its definition, whatever file it came from, and its copies are what they say."""

import json

import pytest
import torch
from safetensors.torch import save_file

import qkscope as qk
from qkscope.errors import BadInput
from qkscope.maths.dictionaries import ENOUGH, NULLS, NUMBERS, FeatureTerms, null_code
from qkscope.maths.singular import random_rotations

D, F = 6, 15


def weights(seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"W_dec": (F, D), "W_enc": (D, F), "b_dec": (D,), "b_enc": (F,), **more}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stream(*shape):
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(9))


def folder(path, tensors, **settings):
    path.mkdir()
    save_file(tensors, path / "sae_weights.safetensors")
    (path / "cfg.json").write_text(json.dumps({"d_in": D, "d_sae": F, **settings}))
    return path


def dense(coded):
    """Codes of every feature, and what they and the bias make of the stream."""
    codes = torch.zeros(*coded.ids.shape[:-1], F + 1)
    codes.scatter_(-1, coded.ids % (F + 1), coded.values)  # empty slots go behind
    return codes[..., :F], coded.parts().sum(-2) + coded.bias


HOOK = {"metadata": {"hook_name": "blocks.17.hook_resid_post", "sae_lens_version": "6.54.12"}}


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("normalises", ["none", "constant_norm_rescale", "layer_norm"])
@pytest.mark.parametrize("kind", ["standard", "topk", "topk rescaled", "jumprelu", "gated"])
def test_codes_and_reconstruction_are_those_of_the_definition(tmp_path, kind, normalises, applied):
    more = {"jumprelu": {"threshold": (F,)}, "gated": {"b_gate": (F,), "b_mag": (F,), "r_mag": (F,)}}
    own = weights(**more.get(kind, {}))
    settings = {"architecture": kind.split()[0], "normalize_activations": normalises, "apply_b_dec_to_input": applied}
    settings |= {"k": 4, "rescale_acts_by_decoder_norm": "rescaled" in kind} if "topk" in kind else {}
    found = qk.Dictionary.load(folder(tmp_path / "sae", own, **settings, **HOOK))
    assert found.layer == 18
    x = stream(7)
    y, out = x, lambda z: z
    if normalises == "constant_norm_rescale":
        size = D**0.5 / x.norm(dim=-1, keepdim=True)
        y, out = x * size, lambda z: z / size
    if normalises == "layer_norm":
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        y, out = (x - mean) / (std + 1e-5), lambda z: z * std + mean
    inner = (y - own["b_dec"] * applied) @ own["W_enc"]
    pre, lengths = inner + own["b_enc"], own["W_dec"].norm(dim=-1)
    if kind == "standard":
        codes = pre.relu()
    elif kind == "jumprelu":
        codes = pre.relu() * (pre > own["threshold"])
    elif kind == "gated":
        codes = (inner + own["b_gate"] > 0) * (inner * own["r_mag"].exp() + own["b_mag"]).relu()
    else:
        pre = pre * lengths if "rescaled" in kind else pre
        top = pre.topk(4)
        codes = torch.zeros_like(pre).scatter(-1, top.indices, top.values.relu())
    made = out((codes / lengths if "rescaled" in kind else codes) @ own["W_dec"] + own["b_dec"])
    coded = found.code(x)
    ours, rebuilt = dense(coded)
    torch.testing.assert_close(rebuilt, made, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours > 0, codes > 0)
    assert torch.equal(coded.active, (codes > 0).sum(-1))


def test_folders_of_earlier_versions_and_plain_files_give_the_same_codes(tmp_path):
    own = weights()
    new = qk.Dictionary.load(folder(tmp_path / "new", own, architecture="topk", k=3, **HOOK))
    old = {"hook_point": "blocks.18.hook_resid_pre", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}}
    before = qk.Dictionary.load(folder(tmp_path / "old", own, **old))
    plain = tmp_path / "plain.safetensors"
    save_file(own, plain)
    named = tmp_path / "named.safetensors"
    save_file(own, named, {"hook_name": "model.layers.17", "k": "3"})
    every = [
        new, before, qk.Dictionary.load(plain, layer=18, k=3), qk.Dictionary.load(named),
        qk.Dictionary.load(tmp_path / "new" / "sae_weights.safetensors"),
    ]  # fmt: skip
    assert {one.layer for one in every} == {18}
    assert len({one.fingerprint for one in every}) == 1
    other = qk.Dictionary.load(plain, layer=18)
    assert (other.k, other.threshold) == (None, None)
    assert other.fingerprint != new.fingerprint


def test_where_a_dictionary_stands_and_that_a_centred_stream_is_centred_first(tmp_path):
    hooks = {"blocks.3.hook_resid_pre": 3, "blocks.3.hook_resid_post": 4, "transformer.h.3": 4, "layers.3.input": 3}
    for hook, layer in hooks.items():
        assert qk.Dictionary.load(folder(tmp_path / hook, weights(), hook_name=hook)).layer == layer
    own, x = weights(), stream(3)
    loaded = {"metadata": {**HOOK["metadata"], "model_from_pretrained_kwargs": {"center_writing_weights": True}}}
    found = qk.Dictionary.load(folder(tmp_path / "sae", own, **loaded))
    plain = qk.Dictionary.load(folder(tmp_path / "plain", own, **HOOK))
    mean = x.mean(-1, keepdim=True)
    torch.testing.assert_close(found.code(x).values, plain.code(x - mean).values)
    torch.testing.assert_close(dense(found.code(x))[1], dense(plain.code(x - mean))[1] + mean)


@pytest.mark.parametrize(
    ("tensors", "settings", "said"),
    [
        ({}, {"architecture": "transcoder", **HOOK}, "is a transcoder dictionary, which is not served"),
        ({}, {"hook_name": "blocks.3.hook_mlp_out"}, "stands at blocks.3.hook_mlp_out, and trace splits"),
        ({}, {}, "describes (`--dictionary-layer 18` in the shell, layer=18 in Python)"),
        ({}, {"normalize_activations": "expected_average_only_in", **HOOK}, "does not say by how much"),
        ({}, {"architecture": "jumprelu", **HOOK}, "has no threshold, from which codes are made; it holds"),
        ({"b_enc": torch.full((F,), torch.nan)}, HOOK, "encoder_bias of sae holds values that are not finite"),
        ({"W_enc": torch.zeros(F, D)}, HOOK, "encoder of sae has shape (15, 6), and 15 features of width 6"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path, tensors, settings, said):
    path = folder(tmp_path / "sae", weights() | tensors, **settings)
    with pytest.raises(BadInput) as error:
        qk.Dictionary.load(path)
    assert said in str(error.value)


def test_files_that_are_no_dictionaries_are_refused(tmp_path):
    torch.save(weights(), tmp_path / "sae.pt")
    (tmp_path / "text.safetensors").write_text("no tensors")
    (tmp_path / "empty").mkdir()
    for name, said in (("sae.pt", "pickles run what they hold"), ("text.safetensors", "damaged or no safetensors file"),
                       ("empty", "holds no cfg.json"), ("nowhere", "there is no dictionary")):  # fmt: skip
        with pytest.raises(BadInput, match=said):
            qk.Dictionary.load(tmp_path / name, layer=1)


def plain(**more):
    own = weights()
    return qk.Dictionary(own["W_dec"], own["W_enc"], 1, own["b_dec"], own["b_enc"], **more)


def test_a_rotated_dictionary_is_one_with_every_direction_turned():
    own, x = plain(), stream(2, 5)
    turn = random_rotations(D, 1, 3)[0].float()
    bias = own.decoder_bias
    turned = qk.Dictionary(own.decoder @ turn.T, turn @ own.encoder, 1, bias, own.encoder_bias)
    for one, other in zip(dense(null_code("rotated", own, x, own.code(x), 3)), dense(turned.code(x)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_copies_are_as_sparse_and_no_token_keeps_its_own():
    own, x = plain(k=3), stream(2, 6)
    there = torch.ones(2, 6, dtype=torch.bool)
    there[1, 4:] = False
    coded = own.code(x)
    for kind in NULLS:
        copy = null_code(kind, own, x, coded, 5, there)
        assert not torch.equal(copy.ids, coded.ids)
        again = null_code(kind, own, x, coded, 5, there)
        assert torch.equal(copy.values, again.values)
        if kind != "rotated":  # whose codes are its own
            assert torch.equal(copy.active.sort(1).values, coded.active.sort(1).values)
    random = null_code("random", own, x, coded, 5)
    assert torch.equal(random.active, coded.active)
    left = x - random.bias - random.parts().sum(-2)
    unit = random.parts() / random.parts().norm(dim=-1, keepdim=True).clamp_min(1e-9)
    assert (unit @ left[..., None]).abs().max() < 1e-4  # nothing more can be fitted along its directions
    other = null_code("tokens", own, x, coded, 5, there)
    moved = (other.values - coded.values).abs().sum(-1) > 0
    assert moved[0].all()
    assert moved[1].tolist() == [True] * 4 + [False] * 2
    named = null_code("features", own, x, coded, 5)
    assert torch.equal(named.values, coded.values)


def terms(pairs, error=0.0):
    """A query of two features and an error, a key of as many."""
    values = torch.zeros(3, 3, dtype=torch.float64)
    values[:2, :2] = torch.tensor(pairs)
    values[2, 2] = error
    return FeatureTerms(torch.tensor([4, 7]), torch.tensor([1, 2]), ("error",), values)


def number(found, name):
    return float(found.numbers()[NUMBERS.index(name)])


def test_numbers_by_hand():
    one = terms([[6.0, 1.0], [-1.0, 0.0]], error=2.0)
    assert [number(one, name) for name in ("logit", "pairs", "gross")] == [8.0, 6.0, 10.0]
    assert number(one, "held_1") == 0.6
    assert number(one, "held_5") == 0.8
    assert number(one, "needed") == torch.inf  # 6 + 1 would do, but with the third pair it is 6 of 8 again
    assert one.largest(2)[0] == (4, 1, 6.0)
    assert one.marginals()["query"] == {4: 7.0, 7: -1.0, "error": 2.0}
    assert ENOUGH == 0.8
    assert number(terms([[6.0, 0.5], [0.5, 0.0]]), "needed") == 1
    assert number(terms([[5.0, 4.0], [-3.0, 4.0]]), "needed") == 4
    assert number(terms([[4.0, 3.0], [2.0, 1.0]]), "needed") == 3
