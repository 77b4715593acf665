"""A dictionary's codes are those of its definition, whatever file it came from, and its copies are
what they say.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

import qkscope as qk
from qkscope.errors import BadInput
from qkscope.sums.feature_terms import NUMBERS, FeatureTerms
from qkscope.sums.singular import random_rotations
from qkscope.verbs.trace.null_dictionaries import NULLS, null_code

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
    more = {
        "jumprelu": {"threshold": (F,)},
        "gated": {"b_gate": (F,), "b_mag": (F,), "r_mag": (F,)},
    }
    own = weights(**more.get(kind, {}))
    settings = {
        "architecture": kind.split()[0],
        "normalize_activations": normalises,
        "apply_b_dec_to_input": applied,
    }
    settings |= (
        {"k": 4, "rescale_acts_by_decoder_norm": "rescaled" in kind} if "topk" in kind else {}
    )
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


def test_folders_of_earlier_versions_give_the_same_codes_and_say_where_they_stand(tmp_path):
    own = weights()
    new = qk.Dictionary.load(folder(tmp_path / "new", own, architecture="topk", k=3, **HOOK))
    old = {
        "hook_point": "blocks.18.hook_resid_pre",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 3},
    }
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
    hooks = {
        "blocks.3.hook_resid_pre": 3,
        "blocks.3.hook_resid_post": 4,
        "transformer.h.3": 4,
        "layers.3.input": 3,
    }
    for hook, layer in hooks.items():
        assert qk.Dictionary.load(folder(tmp_path / hook, weights(), hook_name=hook)).layer == layer
    own, x = weights(), stream(3)
    loaded = {
        "metadata": {
            **HOOK["metadata"],
            "model_from_pretrained_kwargs": {"center_writing_weights": True},
        }
    }
    found = qk.Dictionary.load(folder(tmp_path / "sae", own, **loaded))
    plain = qk.Dictionary.load(folder(tmp_path / "plain", own, **HOOK))
    mean = x.mean(-1, keepdim=True)
    torch.testing.assert_close(found.code(x).values, plain.code(x - mean).values)
    torch.testing.assert_close(dense(found.code(x))[1], dense(plain.code(x - mean))[1] + mean)


@pytest.mark.parametrize("told", [True, False], ids=["config.json", "the folder's name alone"])
@pytest.mark.parametrize("place", ["resid_post", "mlp_out_all", "transcoder_all", "transcoder"])
def test_folders_of_gemma_scope_2_are_read_as_their_loader_reads_them(tmp_path, place, told):
    """Names, hooks and the skip's side as in SAELens 6.54.12's loader of Gemma 3, whose classes
    gave the same codes.
    """
    own = {
        name.lower(): value
        for name, value in weights(threshold=(F,), affine_skip_connection=(D, D)).items()
    }
    skip = (
        own["affine_skip_connection"]
        if place == "transcoder"
        else own.pop("affine_skip_connection") * 0
    )
    path = tmp_path / place / "layer_12_width_16k_l0_medium"
    path.mkdir(parents=True)
    save_file(own, path / "params.safetensors")
    ends = {"resid_post": "output", "mlp_out_all": "post_feedforward_layernorm.output"}
    hooks = [f"model.layers.12.{ends.get(place, 'pre_feedforward_layernorm.output')}"]
    hooks += (
        ["model.layers.12.post_feedforward_layernorm.output"] if "transcoder" in place else hooks
    )
    settings = {
        "architecture": "jump_relu",
        "width": F,
        "model_name": "gemma-3-270m-pt",
        "l0": 60,
        "type": "sae",
    }
    settings |= {"hf_hook_point_in": hooks[0], "hf_hook_point_out": hooks[1]}
    if told:
        (path / "config.json").write_text(json.dumps(settings))
    found = qk.Dictionary.load(tmp_path, f"{place}/{path.name}")
    splits = {"resid_post": ("stream", 13), "mlp_out_all": ("mlp", 12)}
    assert (found.splits, found.layer) == splits.get(place, ("transcoder", 12))
    x = stream(7)
    pre = x @ own["w_enc"] + own["b_enc"]
    codes = pre.relu() * (pre > own["threshold"])
    coded = found.code(x)
    ours, rebuilt = dense(coded)
    assert torch.equal(ours > 0, codes > 0)
    made = codes @ own["w_dec"] + own["b_dec"] + x @ skip
    torch.testing.assert_close(rebuilt + coded.skip, made, rtol=1e-5, atol=1e-5)


def test_a_name_on_the_hub_is_looked_for_there_and_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"
    )  # nobody answers there
    asked = "google/gemma-scope-2-270m-pt", "resid_post/layer_12_width_16k_l0_medium"
    for parts in (asked, ("/".join(asked),)):
        with pytest.raises(
            BadInput, match="l0_medium here or in the local cache, and the hub cannot be reached"
        ):
            qk.Dictionary.load(*parts)
    home = tmp_path / "models--google--gemma-scope-2-270m-pt"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abcd")
    place = home / "snapshots" / "0123abcd" / asked[1]
    place.mkdir(parents=True)
    save_file(
        {name.lower(): value for name, value in weights(threshold=(F,)).items()},
        place / "params.safetensors",
    )
    assert qk.Dictionary.load(*asked).layer == 13
    with pytest.raises(BadInput, match="resid_post/layer_3_x here or in the local cache"):
        qk.Dictionary.load(asked[0], "resid_post/layer_3_x")


@pytest.mark.parametrize(
    ("tensors", "settings", "said"),
    [
        (
            {},
            {"architecture": "crosscoder", **HOOK},
            "is a crosscoder dictionary, which is not served",
        ),
        (
            {},
            {"architecture": "transcoder", **HOOK},
            "reads ['blocks.17.hook_resid_post'] and writes None",
        ),
        (
            {},
            {"hook_name": "blocks.3.attn.hook_z"},
            "stands at ['blocks.3.attn.hook_z'], and trace splits",
        ),
        ({"W_dec": torch.zeros(F, 2, D)}, HOOK, "holds features of several layers"),
        ({}, {}, "describes (`--dictionary-layer 18` in the shell, layer=18 in Python)"),
        (
            {},
            {"normalize_activations": "expected_average_only_in", **HOOK},
            "does not say by how much",
        ),
        (
            {},
            {"architecture": "jumprelu", **HOOK},
            "has no threshold, from which codes are made; it holds",
        ),
        (
            {"b_enc": torch.full((F,), torch.nan)},
            HOOK,
            "encoder_bias of sae holds values that are not finite",
        ),
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
                       ("empty", "holds no dictionary: name a folder with cfg.json and sae_weights.safetensors"),
                       ("nowhere", "there is no dictionary")):  # fmt: skip
        with pytest.raises(BadInput, match=said):
            qk.Dictionary.load(tmp_path / name, layer=1)


def plain(**more):
    own = weights()
    return qk.Dictionary(own["W_dec"], own["W_enc"], 1, own["b_dec"], own["b_enc"], **more)


def test_a_rotated_dictionary_is_turned_and_copies_are_as_sparse_with_no_token_its_own():
    own, x = plain(), stream(2, 5)
    turn = random_rotations(D, 1, 3)[0].float()
    bias = own.decoder_bias
    turned = qk.Dictionary(own.decoder @ turn.T, turn @ own.encoder, 1, bias, own.encoder_bias)
    for one, other in zip(
        dense(null_code("rotated", own, x, own.code(x), 3)), dense(turned.code(x)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
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
    assert (
        unit @ left[..., None]
    ).abs().max() < 1e-4  # nothing more can be fitted along its directions
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
    assert number(one, "held_10") == 0.8
    assert one.largest(2)[0] == (4, 1, 6.0)
    assert one.marginals()["query"] == {4: 7.0, 7: -1.0, "error": 2.0}
    assert one.first(3) == [[4, 1], [4, 2], [-1, -1]]  # the others give nothing, or take away
