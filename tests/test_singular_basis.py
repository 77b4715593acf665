"""Facts about singular bases: they multiply out, their images are each other's duals, and they are kept by weights."""

from __future__ import annotations

import pytest
import torch

from qkscope import BadInput, Scope
from qkscope.analyses.relative import singular_basis
from qkscope.heads import Head
from qkscope.linear.weights import head_weights
from qkscope.maths import methods
from qkscope.maths.bases import thin_svd
from qkscope.maths.singular import SingularBasis, basis_of_weights, components, dual
from qkscope_papers.families import tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def scope_of(family, **overrides):
    return Scope.from_model(tiny_model(family, **overrides), check=False)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "opt", "gpt_neox", "gemma2"])
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


def test_components_resolve_the_identity_and_add_up_to_every_logit():
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


def test_a_basis_is_kept_by_the_hash_of_the_weights(cache):
    scope = scope_of("llama")
    first = singular_basis(scope, "L0H1,L1H0")
    (kept,) = (cache / "qkscope" / "singular").iterdir()
    again = singular_basis(scope, "L0H1,L1H0")
    assert torch.equal(first.U, again.U)
    assert torch.equal(first.read, again.read)
    assert again.rotary == (True, True)
    kept.write_bytes(b"half a file")
    assert torch.equal(singular_basis(scope, "L0H1,L1H0").S, first.S)
    with torch.no_grad():
        scope.model.model.layers[0].self_attn.q_proj.weight.mul_(2.0)
    changed = singular_basis(scope, "L0H1,L1H0")
    torch.testing.assert_close(changed.S[0], 2 * first.S[0])
    torch.testing.assert_close(changed.S[1], first.S[1])


def test_files_of_other_weights_are_refused(tmp_path):
    basis = singular_basis(scope_of("gpt2"), "L0H0")
    basis.save(tmp_path / "basis.safetensors")
    read = SingularBasis.load(tmp_path / "basis.safetensors", expect={"weights": basis.about["weights"]})
    assert read.rotary == (False,)
    assert torch.equal(read.V, basis.V)
    with pytest.raises(BadInput, match="another weights"):
        SingularBasis.load(tmp_path / "basis.safetensors", expect={"weights": "0"})


def test_heads_that_do_not_exist_are_refused():
    scope = scope_of("llama")
    with pytest.raises(BadInput, match="L9H0 does not exist"):
        singular_basis(scope, "L9H0")
    with pytest.raises(BadInput, match=r"L1H1 is not in this singular basis"):
        _ = singular_basis(scope, "L0H0")["L1H1"]


def test_weights_that_are_not_finite_are_refused():
    w = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(0))
    bad = w.clone()
    bad[0, 0, 0] = torch.nan
    with pytest.raises((BadInput, ValueError)):
        basis_of_weights([Head(0, 0)], bad, w, torch.ones(1), torch.zeros(1, 4), [False])


def test_a_head_with_dead_dimensions_still_splits_every_logit():
    """W_Q of rank 3 in 4 dimensions: queries never leave its range, and there the components add up."""
    generator = torch.Generator().manual_seed(1)
    w_q, w_k = (torch.randn(1, 4, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    w_q[0, 3] = w_q[0, 0] - w_q[0, 1]
    basis = basis_of_weights([Head(0, 0)], w_q, w_k, torch.ones(1), torch.zeros(1, 4), [False])["L0H0"]
    x, k = torch.randn(9, generator=generator, dtype=torch.float64), torch.randn(4, dtype=torch.float64,
                                                                                  generator=generator)  # fmt: skip
    q = w_q[0] @ x
    assert float(q @ components(basis.read, range(4)).matrix() @ k - q @ k) == pytest.approx(0, abs=1e-9)


def test_key_weights_that_heads_share_are_factored_once_with_the_same_result():
    generator = torch.Generator().manual_seed(0)
    w_q, w_k = (torch.randn(n, 4, 12, generator=generator, dtype=torch.float64) for n in (6, 2))
    kv_of_head = torch.tensor([0, 0, 1, 1, 0, 1])
    for shared, own in zip(thin_svd(w_q, w_k, kv_of_head), thin_svd(w_q, w_k[kv_of_head]), strict=True):
        torch.testing.assert_close(shared, own, rtol=0, atol=1e-12)
