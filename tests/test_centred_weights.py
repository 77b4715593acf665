"""Where a norm centres its output, what a weight reads along the mean reads nothing: no answer may depend on it."""

from __future__ import annotations

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from qkscope import BadInput, Scope, relative_attention, singular_basis
from qkscope.analyses.relative import relative_rows
from qkscope.examples import Example
from qkscope.linear.weights import head_weights
from qkscope_papers.families import tiny_model

TOKENS = [7, 19, 33, 51, 64, 12, 88, 40]


@torch.no_grad()
def add_along_the_mean(weight: torch.Tensor, gain: torch.Tensor) -> None:
    """Give every row of W (outputs by inputs) a part that reads the mean of the input before the norm's gain."""
    part = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(1)).to(weight)
    weight += 5 * part[:, None] / gain  # gain ⊙ x̂ is what W reads


@torch.no_grad()
def changed_gpt2():
    model = tiny_model("gpt2")
    for block in model.transformer.h:
        assert isinstance(block.attn.c_attn, Conv1D)
        add_along_the_mean(block.attn.c_attn.weight.T[:128], block.ln_1.weight)
        # the norm's bias enters too; its part is constant, and is taken back from the projection's bias
        added = block.attn.c_attn.weight.T - tiny_model("gpt2").transformer.h[block.attn.layer_idx].attn.c_attn.weight.T
        block.attn.c_attn.bias -= added @ block.ln_1.bias
    return model


@torch.no_grad()
def changed_bert():
    """Post-norm: the stream that enters a layer is the output of the norm before it."""
    model, before = tiny_model("bert"), None
    for layer in model.bert.encoder.layer:
        norm = model.bert.embeddings.LayerNorm if before is None else before.output.LayerNorm
        for part in (layer.attention.self.query, layer.attention.self.key):
            old = part.weight.clone()
            add_along_the_mean(part.weight, norm.weight)
            part.bias -= (part.weight - old) @ norm.bias
        before = layer
    return model


@pytest.mark.parametrize(("family", "change"), [("gpt2", changed_gpt2), ("bert", changed_bert)])
def test_a_part_that_reads_the_mean_changes_neither_logits_nor_basis(family, change) -> None:
    plain, other = tiny_model(family), change()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, plain(ids).logits, atol=1e-3, rtol=1e-3)
    scopes = [Scope.from_model(model, check=False) for model in (plain, other)]
    ours, theirs = (singular_basis(scope, cache=False) for scope in scopes)
    torch.testing.assert_close(theirs.S, ours.S, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(theirs.U.abs(), ours.U.abs(), rtol=0, atol=5e-3)
    torch.testing.assert_close(theirs.V.abs(), ours.V.abs(), rtol=0, atol=5e-3)
    first, second = (head_weights(scope) for scope in scopes)
    torch.testing.assert_close(second.W_Q, first.W_Q, rtol=0, atol=1e-3)
    torch.testing.assert_close(second.W_K, first.W_K, rtol=0, atol=1e-3)


def test_terms_of_relative_attention_do_not_depend_on_it_and_still_sum() -> None:
    found = []
    for model in (tiny_model("gpt2"), changed_gpt2()):
        scope = Scope.from_model(model, check=False)
        basis = singular_basis(scope, cache=False)
        encoded = scope.encode([Example(ids=tuple(TOKENS))])
        places, heads = encoded.everywhere(), list(basis.heads)
        captured = scope.capture_inputs(encoded.inputs, places=places, heads=heads, space="query_frame")
        rows = relative_rows(captured, torch.tensor([[2]]), basis)
        torch.testing.assert_close(rows.terms.sum(-1) + rows.constant, rows.relative, rtol=1e-4, atol=1e-4)
        found.append(rows)
    scale = float(found[0].terms.abs().max())
    assert float((found[0].terms - found[1].terms).abs().max()) < 2e-3 * scale
    assert float((found[0].relative - found[1].relative).abs().max()) < 1e-3 * scale


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "stablelm", "phi", "starcoder2", "mbart", "vit"])
def test_no_row_reads_the_mean_where_the_norm_centres(family) -> None:
    weights = head_weights(tiny_model(family))
    for w in (weights.W_Q, weights.W_K):
        assert float(w[..., :-1].sum(-1).abs().max() / w[..., :-1].abs().sum(-1).max()) < 1e-5


def test_a_norm_that_does_not_centre_keeps_it() -> None:
    weights = head_weights(tiny_model("llama"))
    assert float(weights.W_Q[..., :-1].sum(-1).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3n_text", "read those of a layer before them"),
        ("deepseek_v3", "normalised in parts"),
        ("hunyuan_v1_dense", "after the rotation"),
    ],
)
def test_a_family_without_one_matrix_per_head_is_answered_with_a_sentence(family, reason) -> None:
    scope = Scope.from_model(tiny_model(family), check=False)
    with pytest.raises(BadInput, match=reason):
        singular_basis(scope, cache=False)
    with pytest.raises(BadInput):
        relative_attention(scope, Example(ids=tuple(TOKENS)), scope.heads()[-1])


def test_layers_with_keys_of_their_own_keep_their_basis() -> None:
    scope = Scope.from_model(tiny_model("gemma3n_text"), check=False)
    assert len(singular_basis(scope, "L0H0,L1H3", cache=False).heads) == 2


@pytest.mark.parametrize("family", ["bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small", "whisper"])
def test_decoders_of_the_bart_kind_have_a_basis_with_their_cache_on(family) -> None:
    model = tiny_model(family)
    assert model.config.use_cache
    basis = singular_basis(Scope.from_model(model, check=False), cache=False)
    assert float(basis.error.max()) < 1e-10
