"""Facts about subspaces: verified factors, ranks, angles, joint and oblique projectors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import orthonormal, randn
from qkscope.sums import bases
from qkscope.sums.bases import checked_svd, energy_rank, joint_basis, oblique_projectors
from qkscope.sums.subspace import Subspace

seeds = st.integers(0, 10**6)


@given(seeds, st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=10)
def test_svd_multiplies_out_and_its_signs_are_fixed(seed, a, b):
    matrix = randn(seed, 3, a, b)
    u, s, v = checked_svd(matrix)
    torch.testing.assert_close((u * s[:, None]) @ v.mT, matrix)
    assert (u.gather(1, u.abs().argmax(dim=1, keepdim=True)) > 0).all()
    flipped = checked_svd(-matrix)
    torch.testing.assert_close(flipped[0].abs(), u.abs())


def test_a_silently_wrong_svd_is_caught_and_done_again(monkeypatch):
    matrices = randn(0, 4, 6, 6)
    honest = torch.linalg.svd

    def wrong(matrix, **kwargs):
        u, s, vh = honest(matrix, **kwargs)
        u[2], s[2, 1] = u[2].roll(1, dims=0), s[2, 1] * 1.01
        return u, s, vh

    monkeypatch.setattr(torch.linalg, "svd", wrong)
    u, s, v = checked_svd(matrices)
    torch.testing.assert_close((u * s[:, None]) @ v.mT, matrices)
    monkeypatch.setattr(bases, "_robust_svd", lambda m: (torch.eye(6), torch.ones(6), torch.eye(6)))
    with pytest.raises(ArithmeticError, match="could not be verified"):
        checked_svd(matrices)


def test_an_energy_rank_is_the_smallest_and_a_subspace_recovers_planted_directions():
    s = torch.tensor(
        [[3.0, 1.0, 0.1, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1e-9, 0.0, 0.0]]
    )
    assert energy_rank(s).tolist() == [2, 4, 0, 1]
    assert energy_rank(s, 0.5).tolist() == [1, 2, 0, 1]
    assert energy_rank(s, 1.0).tolist()[1] == 4
    u, v = orthonormal(1, 8, 3), orthonormal(2, 8, 3)
    delta = u @ torch.diag(torch.tensor([5.0, 4.0, 3.0], dtype=torch.float64)) @ v.mT
    feature = Subspace.from_delta(delta + 1e-3 * randn(3, 8, 8), head="L3H1", contrast="order")
    assert feature.rank == 3
    for side, truth in (("query", u), ("key", v)):
        cosines = torch.linalg.svdvals(feature.basis(side).mT @ truth)
        assert cosines.min() > 0.999
    x = randn(4, 10, 8)
    torch.testing.assert_close(feature.project(x), x @ feature.basis() @ feature.basis().mT)
    torch.testing.assert_close(feature.coordinates(x) @ feature.basis().mT, feature.project(x))
    many = checked_svd(torch.stack([0 * delta + 1, delta]))
    torch.testing.assert_close(many[2][1, :, :3], Subspace.from_delta(delta, 3).basis())
    lines = feature.summary().splitlines()
    assert lines[0] == "order at L3H1: rank 3 of 8"
    assert sum(line.endswith("|") for line in lines) == 3


@given(seeds)
@settings(max_examples=10)
def test_shared_directions_count_once_and_oblique_projectors_annihilate_the_others(seed):
    whole = orthonormal(seed, 9, 5)
    joint = joint_basis([whole[:, :3], whole[:, 1:5]])
    assert joint.shape == (9, 5)
    torch.testing.assert_close(joint @ joint.mT, whole @ whole.mT)
    bases = [orthonormal(seed, 10, 3), orthonormal(seed + 1, 10, 2), orthonormal(seed + 2, 10, 1)]
    projectors, condition = oblique_projectors(bases)
    assert condition >= 1
    assert oblique_projectors([torch.eye(6)[:, :2], torch.eye(6)[:, 2:]])[1] == pytest.approx(1)
    for i, p in enumerate(projectors):
        torch.testing.assert_close(p.matrix() @ p.matrix(), p.matrix(), atol=1e-8, rtol=0)
        for j, basis in enumerate(bases):
            torch.testing.assert_close(
                p.matrix() @ basis, basis if i == j else 0 * basis, atol=1e-8, rtol=0
            )
    joint = joint_basis(bases)
    total = sum(p.matrix() for p in projectors)
    torch.testing.assert_close(total, joint @ joint.mT, atol=1e-8, rtol=0)
