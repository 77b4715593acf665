"""Facts about the bridge: shares add up to the contrast, planted features are found, and meaningless bases are not."""

import pytest
import torch

from qkscope.heads import Head
from qkscope.maths.attribution import alignment, carried
from qkscope.maths.singular import basis_of_weights
from qkscope.maths.subspace import Subspace

HEAD = Head(0, 0)


def random_basis(d_head=12, d_model=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w_q, w_k = (torch.randn(1, d_head, d_model, generator=generator, dtype=torch.float64) for _ in range(2))
    w_q = w_q * torch.linspace(0.3, 2.0, d_head)[:, None].double()  # no isotropic head: images are not orthogonal
    basis = basis_of_weights([HEAD], (w_q, w_k, torch.ones(1), torch.zeros(1, d_head)), [False])
    return basis, w_q[0], w_k[0]


def planted(basis, vectors, seed=1):
    """ΔC of a feature that lives on some singular vectors: queries along W_Q u_j, keys along W_K v_j."""
    one = basis[HEAD]
    strengths = torch.linspace(1.0, 2.0, len(vectors), dtype=torch.float64)
    delta = sum(s * torch.outer(one.read[:, j], one.write[:, j]) for s, j in zip(strengths, vectors, strict=True))
    return Subspace.from_delta(delta, len(vectors), head=HEAD, contrast="planted")


def test_shares_add_up_and_a_planted_feature_is_carried_by_its_vectors():
    basis, w_q, w_k = random_basis()
    generator = torch.Generator().manual_seed(2)
    x, y, z = (torch.randn(500, 40, generator=generator, dtype=torch.float64) for _ in range(3))
    q, plus, minus = x @ w_q.T, (0.4 * x + y) @ w_k.T, z @ w_k.T
    delta = (q.T @ plus - q.T @ minus) / len(q)
    one = basis[HEAD]
    shares = carried(delta, one.read, one.write)
    assert float(shares.sum()) == pytest.approx(float((q * (plus - minus)).sum(-1).mean()), rel=1e-9)
    # each share is the mean of that vector's own terms: σ (uᵀ x)(vᵀ Δx)
    u, s, vh = torch.linalg.svd(w_q.T @ w_k, full_matrices=False)
    terms = s[:12] * ((x @ u[:, :12]) * ((0.4 * x + y - z) @ vh[:12].T)).mean(0)
    torch.testing.assert_close(shares, terms, rtol=1e-6, atol=1e-9)
    basis, _, _ = random_basis()
    found = alignment(basis, planted(basis, [2, 5, 9]))
    assert sorted(row["vector"] for row in found.table()[:3]) == [2, 5, 9]
    assert found.numbers["vectors"] <= 3
    assert found.numbers["query"] == pytest.approx(1.0, abs=1e-9)
    assert found.numbers["key"] == pytest.approx(1.0, abs=1e-9)
    for control in ("rotated", "random"):
        assert found.numbers[f"vectors_{control}"] > 4
        assert found.numbers[f"key_{control}"] < 0.8
        assert found.numbers[f"p_key_{control}"] == pytest.approx(1 / 101)
    # on single vectors: turned among themselves, the leading ones spread it
    assert found.numbers["sparsity"] < found.numbers["sparsity_block"]
    assert found.numbers["p_block"] < 0.05
    assert "3 of 12" in str(found) or "2 of 12" in str(found)


def test_a_feature_that_knows_nothing_of_the_weights_looks_like_its_controls():
    basis, _, _ = random_basis()
    generator = torch.Generator().manual_seed(5)
    p_values = []
    for _ in range(8):
        a, b = (torch.randn(12, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        found = alignment(basis, Subspace.from_delta(a @ b.T, 3, head=HEAD))
        p_values.append(found.numbers["p_key_random"])
    assert sum(p < 0.05 for p in p_values) <= 2
    assert max(p_values) > 0.2
