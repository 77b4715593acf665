"""The lemmas and theorems of franco2026, as facts about numbers."""

import math
from itertools import product

import pytest
import torch

from qkscope import BadInput
from qkscope_papers.franco2026.theory import (
    SILENT_FROM,
    TwoKeyPopulation,
    minimise,
    orthogonalise,
    sharp_bound,
    theorem1_minimiser,
    theorem2_bound,
)
from qkscope_papers.franco2026.toy.alignment import cosines, gram, whiten


def features(d=3, n=5, seed=0):
    drawn = torch.randn(d, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn / drawn.norm(dim=0)


def test_lemma_1_softmax_is_equal_iff_logits_differ_by_a_constant():
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close((logits + 3.7).softmax(0), logits.softmax(0))
    moved = logits.clone()
    moved[0] += 1e-3
    assert float((moved.softmax(0) - logits.softmax(0)).abs().max()) > 1e-5
    difference = logits.softmax(0).log() - logits
    torch.testing.assert_close(difference, difference[0].expand(6))


def test_lemma_2_cross_entropy_is_entropy_and_divergence():
    generator = torch.Generator().manual_seed(0)
    target, ours = torch.randn(2, 6, generator=generator, dtype=torch.float64).softmax(1)
    cross = -(target * ours.log()).sum()
    entropy = -(target * target.log()).sum()
    divergence = (target * (target / ours).log()).sum()
    torch.testing.assert_close(cross, entropy + divergence)
    assert float(divergence) > 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_lemma_3_second_moments_are_sums_over_all_cases(p):
    """Every subset of features, with its probability: nothing is sampled."""
    W = features()
    x = torch.tensor(list(product((0.0, 1.0), repeat=5)), dtype=torch.float64)
    weight = torch.where(x > 0, p, 1 - p).prod(1)
    t = x @ W.mT
    total = W.sum(1)
    of_queries = p * (1 - p) * gram(W) + p * p * torch.outer(total, total)
    of_differences = 2 * p * (1 - p) * gram(W)
    torch.testing.assert_close((weight[:, None] * t).mT @ t, of_queries)
    pairs = t[:, None] - t[None]
    both = weight[:, None] * weight[None]
    moment = torch.einsum("ab,abi,abj->ij", both, pairs, pairs)
    torch.testing.assert_close(moment, of_differences)
    cases = TwoKeyPopulation.of(5, p)
    drawn = cases.queries @ W.mT
    torch.testing.assert_close((cases.query_p[:, None] * drawn).mT @ drawn, of_queries)
    d = cases.differences @ W.mT
    torch.testing.assert_close((cases.difference_p[:, None] * d).mT @ d, of_differences)
    assert float(cases.difference_p.sum()) == pytest.approx(1.0)
    assert float(cases.query_p.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(("p", "seed"), [(0.1, 0), (0.5, 1), (0.52, 2)])
def test_theorem_1_names_the_one_minimiser(p, seed):
    """From two different starts, Newton's method ends at the formula."""
    q, k = features(seed=seed), features(seed=seed + 10)
    formula = theorem1_minimiser(q, k, 4.0)
    for start in (None, torch.randn(3, 3, generator=torch.Generator().manual_seed(1))):
        found = minimise(q, k, q.mT @ formula @ k, p, start=start)
        torch.testing.assert_close(found.omega, formula, rtol=1e-6, atol=1e-8)
        assert found.divergence == pytest.approx(0.0, abs=1e-12)
    u, s, v = torch.linalg.svd(found.omega)
    assert float(s[1] / s[0]) < 1e-8
    assert float(cosines(whiten(gram(q), q[:, :1]), u[:, :1])) == pytest.approx(1.0, abs=1e-9)
    assert float(cosines(whiten(gram(k), k[:, :1]), v.mT[:, :1])) == pytest.approx(1.0, abs=1e-9)
    assert float(cosines(q[:, :1], u[:, :1])) < 0.999, "not the features themselves"


def test_theorem_1_is_silent_at_p_1():
    q, k = features(), features(seed=3)
    formula = theorem1_minimiser(q, k, 4.0)
    start = torch.ones(3, 3)
    found = minimise(q, k, q.mT @ formula @ k, 1.0, start=start)
    torch.testing.assert_close(found.omega, start.double()), "keys never differ, so nothing moves Ω"


def test_corollary_1_isotropic_features_align_exactly():
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    q = torch.cat([turn, -turn], dim=1)
    torch.testing.assert_close(gram(q), 2 * torch.eye(3, dtype=torch.float64))
    omega = theorem1_minimiser(q, q.flip(0), 4.0, query=1, key=2)
    torch.testing.assert_close(omega, torch.outer(q[:, 1], q.flip(0)[:, 2]) * 4.0 / 4)


def test_with_a_singular_gram_the_pseudo_inverse_still_solves_the_span():
    q = features(4, 5)
    q[3] = 0
    formula = theorem1_minimiser(q, q, 4.0)
    found = minimise(q, q, q.mT @ formula @ q, 0.4)
    torch.testing.assert_close(q.mT @ found.omega @ q, q.mT @ formula @ q, rtol=1e-5, atol=1e-7)


def test_theorem_2_bounds_the_angle_and_a_sharper_bound_is_attained():
    generator = torch.Generator().manual_seed(0)
    for epsilon in (0.02, 0.1, 0.18, 0.5, 0.9):
        turn = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
        e = epsilon * (2 * torch.rand(6, generator=generator, dtype=torch.float64) - 1)
        e[0], e[1] = epsilon, -epsilon
        g = (turn * (1 + e)) @ turn.mT
        f = torch.randn(6, 5000, generator=generator, dtype=torch.float64)
        angles = (whiten(g, f) * f).sum(0) / (whiten(g, f).norm(dim=0) * f.norm(dim=0))
        assert sharp_bound(g) == pytest.approx(math.sqrt(1 - epsilon**2))
        assert float(angles.min()) >= sharp_bound(g)
        worst = turn[:, :1] * (1 + epsilon) ** 0.5 + turn[:, 1:2] * (1 - epsilon) ** 0.5
        assert float(cosines(worst, whiten(g, worst))) == pytest.approx(sharp_bound(g), abs=1e-9)
        if epsilon < SILENT_FROM:
            assert theorem2_bound(epsilon) < sharp_bound(g)
        else:
            assert math.isnan(theorem2_bound(epsilon))
    assert theorem2_bound(0.0) == 1.0
    assert pytest.approx(0.1835, abs=1e-4) == SILENT_FROM


def test_theorem_3_a_tilted_teacher_trades_overlap_for_penalty():
    found = [orthogonalise(mu, tilt=0.5, starts=8) for mu in (0.1, 1.0, 10.0)]
    overlaps = [f.query_overlap + f.key_overlap for f in found]
    assert overlaps[0] > 0.1 > overlaps[1] > overlaps[2] > 0
    for result, overlap in zip(found, overlaps, strict=True):
        assert overlap <= result.bound + 1e-9
        assert result.loss < result.orthogonal_loss
    assert max(f.query_overlap for f in found) < 1e-6, "two keys ask a query for one number: it gives way at any μ"
    free = orthogonalise(0.0, tilt=0.5, starts=8)
    assert free.key_overlap == pytest.approx(math.sin(0.5) ** 2, abs=1e-4), "without a penalty: the teacher's lean"
    straight = orthogonalise(0.1, tilt=0.0, starts=8)
    assert straight.query_overlap + straight.key_overlap < 1e-6, "with an orthogonal teacher any μ > 0 does"


def test_bad_input_gets_a_sentence():
    for p in (0.0, -1.0, 1.5):
        with pytest.raises(BadInput, match=r"probability p in \(0, 1\]"):
            TwoKeyPopulation.of(3, p)
    with pytest.raises(BadInput, match="too many to list"):
        TwoKeyPopulation.of(12, 0.5)
    with pytest.raises(BadInput, match="at least 0"):
        orthogonalise(-1.0, tilt=0.1)
