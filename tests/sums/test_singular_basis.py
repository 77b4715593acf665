"""Singular bases, and relative attention split over them: exact on the model's own logits, and
dense products.
"""

import pytest
import torch

from folded import normalised_input
from qkscope import BadInput, Example, Scope
from qkscope.findings.published import rows_from
from qkscope.findings.singular_rows import relative_rows, singular_basis
from qkscope.heads import Head
from qkscope.linear.head_weights import head_weights
from qkscope.model.capture_types import Places
from qkscope.model.tap import tap
from qkscope.sums import swap_methods as methods
from qkscope.sums.bases import _failures, gram_qr, jacobi_svd, thin_svd
from qkscope.sums.singular import basis_of_weights, components, dual
from qkscope_papers.families import tiny_model
from tiny_llama import tiny_batch

SPLIT = [  # plain; QK-norm of two kinds; a cap, a window, a sink; parts rotated; no rotation; post-norm; ALiBi; images
    "llama", "qwen3", "cohere", "olmo2", "gemma2", "mistral", "gpt_oss", "gpt_neox", "gptj", "gpt2", "opt", "bert",
    "bloom", "falcon", "stablelm", "granite", "vit", "bart", "persimmon", "qwen3_next",
]  # fmt: skip


def scope_of(family, **overrides):
    return Scope.from_model(tiny_model(family, **overrides), check=False)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_singular_vectors_multiply_out_and_are_orthonormal(family):
    scope = scope_of(family)
    basis, weights = singular_basis(scope), head_weights(scope)
    assert basis.heads == tuple(scope.heads())
    for i, head in enumerate(basis.heads):
        w_q, w_k = (w.double() for w in weights[head])
        u, s, v = basis.U[i].double(), basis.S[i], basis.V[i].double()
        omega = w_q.T @ w_k
        assert float((u @ torch.diag(s) @ v.T - omega).norm() / omega.norm()) < 1e-6
        for side in (u, v):
            assert float((side.T @ side - torch.eye(len(s))).abs().max()) < 1e-5
        assert bool((s[:-1] >= s[1:]).all())
        # queries and keys of a component: W_Q u and W_K v, dual to each other
        m, p = w_q @ u, w_k @ v
        assert float((m.T @ p - torch.diag(s)).abs().max() / s[0]) < 1e-6
        one = basis[head]
        assert float((one.read - m).abs().max() / m.abs().max()) < 1e-6
        wide = s > 1e-3 * s[0]
        assert float((one.write[:, wide] * s[wide] - p[:, wide]).abs().max() / p.abs().max()) < 1e-4
    assert float(basis.error.max()) < 1e-10


def test_components_add_up_to_every_logit_also_of_a_head_with_dead_dimensions():
    every = singular_basis(scope_of("llama"), "L1H2")
    basis = every["L1H2"]
    d, m = basis.read.shape
    assert float((components(basis.read, range(m)).matrix() - torch.eye(d)).abs().max()) < 1e-9
    parts = sum(components(basis.read, [j]).matrix() for j in range(m))
    assert float((parts - torch.eye(d)).abs().max()) < 1e-9
    half = components(basis.read, range(m // 2)).matrix()
    assert float((half @ half - half).abs().max()) < 1e-9
    largest = methods.omega_svd(every, [Head(1, 2)])
    assert torch.equal(largest(3).left[0], dual(basis.read)[:, :3])
    with pytest.raises(BadInput, match="does not fit"):
        largest(m + 1)
    # W_Q of rank 3 in 4 dimensions: queries never leave its range, and there the components add up
    generator = torch.Generator().manual_seed(1)
    w_q, w_k = (torch.randn(1, 4, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    w_q[0, 3] = w_q[0, 0] - w_q[0, 1]
    basis = basis_of_weights([Head(0, 0)], (w_q, w_k, torch.ones(1), torch.zeros(1, 4)), [False])[
        "L0H0"
    ]
    x, k = torch.randn(9, generator=generator, dtype=torch.float64), torch.randn(4, dtype=torch.float64,
                                                                                  generator=generator)  # fmt: skip
    q = w_q[0] @ x
    assert float(q @ components(basis.read, range(4)).matrix() @ k - q @ k) == pytest.approx(
        0, abs=1e-9
    )


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
    captured = scope.capture_inputs(
        inputs, places=places, heads=list(basis.heads), space="query_frame"
    )
    return relative_rows(captured, attended[:, None], basis)


def model_logits(model, inputs, places):
    """What the attention call itself was given: scale · q·k before cap and mask, and which keys the
    query sees.
    """
    calls = []
    with torch.no_grad(), tap(model, calls.append):
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    logits, seen = [], []
    for call in calls:
        k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
        q = call.q[places.row, :, places.query]
        logits.append(
            call.scale * torch.einsum("bhd,bhtd->bht", q.double(), k[places.row].double())
        )
        mask = call.mask_rows(places.row, places.query).expand(-1, q.shape[1], -1)
        seen.append(mask.isfinite() & places.key_mask[:, None])
    return torch.cat(logits, dim=1), torch.cat(seen, dim=1), hidden


@pytest.mark.parametrize("family", SPLIT)
def test_terms_sum_to_the_relative_logit_of_the_models_own_call(family):
    model = tiny_model(family)
    scope = Scope.from_model(model, check=False)
    inputs, places = everywhere(model)
    basis = singular_basis(scope)
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
    # the coordinates are what they are called: the singular vectors against the layer's own
    # normalised input
    for layer in sorted({head.layer for head in basis.heads}):
        own = [i for i, head in enumerate(basis.heads) if head.layer == layer]
        x = normalised_input(scope, layer, hidden[layer])[places.row, places.query].double()
        # a component that the queries do not have (QK-norm takes their mean out) has no coordinate
        # either
        size_of = basis.read[own].norm(dim=-2)
        alpha, turned = (
            torch.einsum("bx,hxm->bhm", x, basis.U[own].double()) * size_of,
            found.query[:, own] * size_of,
        )
        if family in (
            "qwen3",
            "cohere",
            "olmo2",
            "persimmon",
            "stablelm",
            "qwen3_next",
        ):  # QK-norm's scalar
            alpha = (
                alpha
                * (alpha * turned).sum(-1, keepdim=True)
                / alpha.square().sum(-1, keepdim=True)
            )
        assert float((turned - alpha).abs().max()) < 2e-3 * float(turned.abs().max())


def test_a_key_outside_the_window_has_no_relative_attention():
    scope = Scope.from_model(tiny_model("mistral"), check=False)
    inputs = scope.encode([Example(ids=tuple(range(5, 17)))]).inputs
    captured = scope.capture_inputs(
        inputs, places=rows_from(inputs, 11), heads=["L0H0"], space="query_frame"
    )
    out, near = (
        relative_rows(captured, torch.tensor([[i]]), singular_basis(scope, "L0H0")).relative
        for i in (0, 10)
    )
    logits = (captured.k[0, 0] @ captured.q[0, 0] * captured.scale[0])[8:]  # a window of four keys
    assert bool(out.isnan())
    assert float(near) == pytest.approx(float(logits[2] - logits[[0, 1, 3]].mean()), rel=1e-4)


def matrices(kind, n):
    made = torch.randn(3, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    if kind == "graded":  # singular values over ten orders of magnitude
        return made * torch.logspace(0, -10, n, dtype=torch.float64)
    if kind == "dependent":
        made[1, :, 0] = made[1, :, 1]
    return made


@pytest.mark.parametrize("n", [2, 4, 24])
@pytest.mark.parametrize("kind", ["random", "graded", "dependent"])
def test_jacobi_finds_what_lapack_finds(kind, n):
    matrix = matrices(kind, n)
    u, s, v = jacobi_svd(matrix)
    assert torch.allclose(s, torch.linalg.svdvals(matrix), rtol=1e-9, atol=1e-13)
    assert torch.allclose((u * s[:, None]) @ v.mT, matrix, atol=1e-13)
    full = [0, 2] if kind == "dependent" else [0, 1, 2]
    assert _failures(matrix[full], u[full], s[full], v[full]) == []


def test_the_gram_way_gives_a_qr_of_any_weights_and_with_jacobi_the_thin_svd():
    w = torch.randn(4, 8, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w[1, 3] = w[1, 4]
    w[2] *= torch.logspace(0, -12, 8, dtype=torch.float64)[:, None]
    w[3] = 0
    q, r = gram_qr(w)
    assert torch.allclose(q @ r, w.mT, atol=1e-13)
    assert torch.allclose(q.mT @ q, torch.eye(8, dtype=torch.float64).expand(4, -1, -1), atol=1e-13)
    assert bool((r.tril(-1).abs() < 1e-13).all())
    generator = torch.Generator().manual_seed(1)
    w_q, w_k = (torch.randn(3, 8, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    (q, r), (q_k, r_k) = gram_qr(w_q), gram_qr(w_k)
    a, s, b = jacobi_svd(r @ r_k.mT)
    u, values, v = thin_svd(w_q, w_k)
    signs = (
        ((q @ a) * u).sum(1, keepdim=True).sign()
    )  # of a pair of singular vectors no sign is the right one
    assert torch.allclose(s, values)
    assert torch.allclose(q @ a * signs, u)
    assert torch.allclose(q_k @ b * signs, v)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_spectra_relative_attention_and_counts_of_gpt2_and_pythia_are_those_of_dense_products(
    family,
):
    """Written apart: the gain folded in, centred; queries and keys have biases, which read a
    constant 1.
    """
    scope = scope_of(family)
    block = scope.model.transformer.h[1] if family == "gpt2" else scope.model.gpt_neox.layers[1]
    norm = block.ln_1 if family == "gpt2" else block.input_layernorm
    if family == "gpt2":  # all queries, all keys, all values
        W, b = (
            x.unflatten(0, (3, scope.n_heads, -1))
            for x in (block.attn.c_attn.weight.T, block.attn.c_attn.bias)
        )
    else:  # head by head its query, key and value
        both = block.attention.query_key_value.weight, block.attention.query_key_value.bias
        W, b = (x.unflatten(0, (scope.n_heads, 3, -1)).transpose(0, 1) for x in both)
    norm.weight.uniform_(0.5, 2)
    norm.bias.uniform_(-1, 1)
    folded = (W * norm.weight).double()
    centred = folded - folded.mean(-1, keepdim=True)
    full = torch.cat([centred, (W @ norm.bias + b)[..., None].double()], dim=-1)
    basis = singular_basis(scope, [Head(1, i) for i in range(scope.n_heads)])
    dense = torch.linalg.svdvals(full[0].mT @ full[1])[:, : basis.S.shape[1]]
    torch.testing.assert_close(basis.S.double(), dense, rtol=1e-5, atol=1e-5)
    ids, key = torch.arange(5, 14), 3
    inputs, others = (
        scope.encode([Example(ids=tuple(ids.tolist()))]).inputs,
        [i for i in range(len(ids)) if i != key],
    )
    x = scope.model(ids[None], output_hidden_states=True).hidden_states[1][0].double()
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    x = torch.cat([x, torch.ones(len(ids), 1)], dim=-1)
    U, k = torch.linalg.svd(full[0].mT @ full[1])[0][..., : basis.S.shape[1]], x @ full[1].mT
    if (
        family == "gpt_neox"
    ):  # the first quarter of each key is turned, by how far it stands from the query
        angle = (torch.arange(len(ids)) - len(ids) + 1.0)[:, None] * torch.tensor(
            [1.0, 10_000**-0.5]
        )
        a, b, rest = k.split([2, 2, k.shape[-1] - 4], dim=-1)
        k = torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], dim=-1
        )
    away = k[:, key] - k[:, others].mean(1)
    terms = (x[-1] @ U) * torch.einsum("hdm,hd->hm", full[0] @ U, away) / k.shape[-1] ** 0.5
    captured = scope.capture_inputs(inputs, places=rows_from(inputs, len(ids) - 1), heads=list(basis.heads),
                                    space="query_frame")  # fmt: skip
    found = relative_rows(captured, torch.tensor([[key]]), basis)
    torch.testing.assert_close(found.terms[0], terms, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.relative[0], terms.sum(-1), rtol=1e-4, atol=1e-5)
    for name, share in (("count", 1.0), ("count_tol", 0.99)):
        for own, count in zip(terms, found.values(1, 0, [0])[name][0].tolist(), strict=True):
            reached = own.sort(descending=True).values.cumsum(0) >= share * own.sum() - 1e-9
            assert count == int(reached.int().argmax()) + 1 if own.sum() > 0 else count != count
