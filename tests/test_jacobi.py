"""SVDs and QRs of many matrices at once, against LAPACK's."""

from __future__ import annotations

import pytest
import torch

from qkscope.maths.bases import _failures, gram_qr, jacobi_svd, thin_svd


def _matrices(kind: str, n: int) -> torch.Tensor:
    made = torch.randn(3, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    if kind == "graded":  # singular values over ten orders of magnitude
        return made * torch.logspace(0, -10, n, dtype=torch.float64)
    if kind == "dependent":
        made[1, :, 0] = made[1, :, 1]
    return made


@pytest.mark.parametrize("n", [2, 4, 24])
@pytest.mark.parametrize("kind", ["random", "graded", "dependent"])
def test_jacobi_finds_what_lapack_finds(kind: str, n: int) -> None:
    matrix = _matrices(kind, n)
    u, s, v = jacobi_svd(matrix)
    assert torch.allclose(s, torch.linalg.svdvals(matrix), rtol=1e-9, atol=1e-13)
    assert torch.allclose((u * s[:, None]) @ v.mT, matrix, atol=1e-13)
    full = [0, 2] if kind == "dependent" else [0, 1, 2]
    assert _failures(matrix[full], u[full], s[full], v[full]) == []


def test_a_matrix_of_zeros_is_seen_to_have_failed_and_spoils_no_other() -> None:
    matrix = _matrices("random", 6)
    matrix[1] = 0
    assert _failures(matrix, *jacobi_svd(matrix)) == [(1,)]


def test_the_gram_way_gives_a_qr_also_of_weights_that_it_is_not_made_for() -> None:
    w = torch.randn(4, 8, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w[1, 3] = w[1, 4]
    w[2] *= torch.logspace(0, -12, 8, dtype=torch.float64)[:, None]
    w[3] = 0
    q, r = gram_qr(w)
    assert torch.allclose(q @ r, w.mT, atol=1e-13)
    assert torch.allclose(q.mT @ q, torch.eye(8, dtype=torch.float64).expand(4, -1, -1), atol=1e-13)
    assert bool((r.tril(-1).abs() < 1e-13).all())


def test_both_together_are_the_thin_svd() -> None:
    generator = torch.Generator().manual_seed(1)
    w_q, w_k = (torch.randn(3, 8, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    (q, r), (q_k, r_k) = gram_qr(w_q), gram_qr(w_k)
    a, s, b = jacobi_svd(r @ r_k.mT)
    u, values, v = thin_svd(w_q, w_k)
    signs = ((q @ a) * u).sum(1, keepdim=True).sign()  # of a pair of singular vectors no sign is the right one
    assert torch.allclose(s, values)
    assert torch.allclose(q @ a * signs, u)
    assert torch.allclose(q_k @ b * signs, v)
