"""The split of relative attention on every family: it sums to the model's own logits, and its coordinates are u·x̂."""

from __future__ import annotations

import pytest
import torch

from folded import normalised_input, qk_norm_scale
from qkscope import BadInput, Example, Scope
from qkscope.analyses.relative import relative_attention, relative_rows, singular_basis
from qkscope.capture.pick import Places
from qkscope.capture.tap import tap
from qkscope.examples import Key
from qkscope_papers.families import tiny_model
from tiny_llama import SOME, tiny_batch

NOT_SPLIT = {
    "mamba": "attention interface", "deepseek_v3": "normalised in parts", "hunyuan_v1_dense": "after the",
    "diffllama": "called several times", "llama4_text": "query_frame is not defined",
    "nanochat": "query_frame is not defined", "jetmoe": "no linear function",
    "gemma3n_text": "a layer before them",
    "mllama": "beside an image", "deberta-v2": "depends on the tokens", "t5": "encoder-decoder",
}  # fmt: skip
SPLIT = [family for family in SOME if family not in NOT_SPLIT]


def everywhere(model):
    """A padded batch, and its last query of each sequence with every token as a key."""
    inputs = tiny_batch(model)
    if "pixel_values" in inputs:
        length = (model.config.image_size // model.config.patch_size) ** 2 + 1
        mask = torch.ones(len(inputs["pixel_values"]), length, dtype=torch.bool)
    else:
        mask = inputs["attention_mask"].bool()
    row = torch.arange(len(mask))
    columns = torch.arange(mask.shape[1]).expand(len(mask), -1)
    last = (columns * mask).amax(-1)
    return inputs, Places(row, last, columns, mask)


def split(scope, inputs, places, attended, basis):
    """The relative attention of every head on one key of each row."""
    captured = scope.capture_inputs(inputs, places=places, heads=list(basis.heads), space="query_frame")
    return relative_rows(captured, attended[:, None], basis)


def model_logits(model, inputs, places):
    """What the attention call itself was given: scale · q·k before cap and mask, and which keys the query sees."""
    calls = []
    with torch.no_grad(), tap(model, calls.append):
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    logits, seen = [], []
    for call in calls:
        k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
        q = call.q[places.row, :, places.query]
        logits.append(call.scale * torch.einsum("bhd,bhtd->bht", q.double(), k[places.row].double()))
        mask = call.mask_rows(places.row, places.query).expand(-1, q.shape[1], -1)
        seen.append(mask.isfinite() & places.key_mask[:, None])
    return torch.cat(logits, dim=1), torch.cat(seen, dim=1), hidden


@pytest.mark.parametrize("family", SPLIT)
def test_terms_sum_to_the_relative_logit_of_the_models_own_call(family):
    model = tiny_model(family)
    scope = Scope.from_model(model, check=False)
    inputs, places = everywhere(model)
    basis = singular_basis(scope, cache=False)
    attended = places.query - 2
    found = split(scope, inputs, places, attended, basis)
    logits, seen, hidden = model_logits(model, inputs, places)
    at = attended[:, None, None].expand(-1, logits.shape[1], 1)
    others = seen.scatter(-1, at, False)
    expected = logits.gather(-1, at)[..., 0] - (logits * others).sum(-1) / others.sum(-1)
    size = float(logits.abs().max())
    assert not bool(found.relative.isnan().any())
    assert float((found.relative - expected).abs().max()) < 1e-4 * size
    assert float((found.terms.sum(-1) + found.constant - expected).abs().max()) < 1e-4 * size
    # the coordinates are what they are called: the singular vectors against the layer's own normalised input
    for layer in sorted({head.layer for head in basis.heads}):
        own = [i for i, head in enumerate(basis.heads) if head.layer == layer]
        x = normalised_input(scope, layer, hidden[layer])[places.row, places.query].double()
        s_q = qk_norm_scale(scope, layer, hidden[layer])[0][places.row, places.query].double()
        alpha = torch.einsum("bx,hxm->bhm", x, basis.U[own].double()) * s_q[..., None]
        # a component that the queries do not have (QK-norm takes their mean out) has no coordinate either
        size_of = basis.read[own].norm(dim=-2)
        alpha, turned = alpha * size_of, found.query[:, own] * size_of
        assert float((turned - alpha).abs().max()) < 2e-3 * float(turned.abs().max())


@pytest.mark.parametrize("family", ["gpt2", "opt", "biogpt"])
def test_without_rotation_keys_are_read_by_the_right_singular_vectors(family):
    """c_m = σ_m (u_mᵀ x_q)(v_mᵀ Δx), from the residual stream alone."""
    model = tiny_model(family)
    scope = Scope.from_model(model, check=False)
    inputs, places = everywhere(model)
    basis = singular_basis(scope, cache=False)
    attended = places.query - 2
    found = split(scope, inputs, places, attended, basis)
    _, seen, hidden = model_logits(model, inputs, places)
    for i, head in enumerate(basis.heads):
        x = normalised_input(scope, head.layer, hidden[head.layer]).double()
        rows = torch.arange(len(x))
        others = seen[:, i].scatter(-1, attended[:, None], False).double()
        mean = torch.einsum("bt,btx->bx", others / others.sum(-1, keepdim=True), x[places.row])
        change = x[places.row, attended] - mean
        u, v = basis.U[i].double(), basis.V[i].double()
        terms = float(basis.scale[i]) * basis.S[i] * (x[rows, places.query] @ u) * (change @ v)
        assert float((found.terms[:, i] - terms).abs().max()) < 1e-3 * float(terms.abs().max())


@pytest.mark.parametrize("family", NOT_SPLIT)
def test_families_without_one_matrix_or_frame_are_refused_with_the_reason(family):
    def refused():
        scope = Scope.from_model(tiny_model(family), check=False)
        inputs, places = everywhere(scope.model)
        return split(scope, inputs, places, places.query - 1, singular_basis(scope, cache=False))

    with pytest.raises(BadInput, match=NOT_SPLIT[family]):
        refused()


def test_a_key_outside_the_window_has_no_relative_attention():
    scope = Scope.from_model(tiny_model("mistral"), check=False)
    example = Example(ids=tuple(range(5, 17)), keys=(Key((0, 1), {"answer": 1}), Key((10, 11), {"answer": -1})))
    with pytest.raises(BadInput, match="L0H0 does not see token 0 from token 11"):
        relative_attention(scope, example, "L0H0")
    near = relative_attention(scope, example, "L0H0", key=10)
    assert near.tables["relative"][0]["others"] == 3  # a window of four keys


def test_one_prompt_can_be_asked_about_by_role_or_position():
    scope = Scope.from_model(tiny_model("llama"), check=False)
    example = Example(ids=tuple(range(5, 15)), keys=(Key((3, 4), {"answer": 1}),), roles={"A": (3, 4), "B": (7, 8)})
    by_answer = relative_attention(scope, example, "L1H1")
    by_role = relative_attention(scope, example, "L1H1", key="A")
    by_place = relative_attention(scope, example, "L1H1", key=3, query=9)
    for found in (by_answer, by_role, by_place):
        row = found.tables["relative"][0]
        assert (row["query"], row["key"]) == (9, 3)
        total = sum(term["term"] for term in found.tables["terms"])
        assert total == pytest.approx(row["relative"], rel=1e-6, abs=1e-9)
    assert relative_attention(scope, example, "L1H1", query="B", key="A").tables["relative"][0]["query"] == 7
    assert "singular vectors" in by_answer.answer or "not positive" in by_answer.answer
    for wrong, says in (({"key": "C"}, "no role 'C'"), ({"key": 40}, "no token 40"), ({"query": -1}, "no token -1")):
        with pytest.raises(BadInput, match=says):
            relative_attention(scope, example, "L1H1", **wrong)
    with pytest.raises(BadInput, match="longer prompt"):
        relative_attention(scope, Example(ids=(5,)), "L0H0")


def test_rotating_every_position_leaves_the_terms():
    """The query's frame knows offsets alone: 37 positions later the terms are the same."""
    scope = Scope.from_model(tiny_model("llama"), check=False)
    inputs, places = everywhere(scope.model)
    basis = singular_basis(scope, cache=False)
    positions = torch.cumsum(inputs["attention_mask"], -1).clamp_min(1) - 1
    here, there = (
        split(scope, {**inputs, "position_ids": positions + shift}, places, places.query - 2, basis).terms
        for shift in (0, 37)
    )
    assert float((here - there).abs().max()) < 1e-4 * float(here.abs().max())
