"""The theorems of franco2026 as facts about numbers."""

import math
from itertools import product

import pytest
import torch

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


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def features(d=3, n=5, seed=0):
    return torch.nn.functional.normalize(drawn(d, n, seed=seed), dim=0)


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_lemma_3_second_moments_are_sums_over_all_cases(p):
    """Every subset of features, with its probability: nothing is sampled."""
    W = features()
    x = torch.tensor(list(product((0.0, 1.0), repeat=5)), dtype=torch.float64)
    weight = torch.where(x > 0, p, 1 - p).prod(1)
    t = x @ W.mT
    of_queries = p * (1 - p) * gram(W) + p * p * torch.outer(W.sum(1), W.sum(1))
    of_differences = 2 * p * (1 - p) * gram(W)
    torch.testing.assert_close((weight[:, None] * t).mT @ t, of_queries)
    pairs = t[:, None] - t[None]
    moment = torch.einsum("ab,abi,abj->ij", weight[:, None] * weight[None], pairs, pairs)
    torch.testing.assert_close(moment, of_differences)
    cases = TwoKeyPopulation.of(5, p)
    for x, weight, expected in ((cases.queries, cases.query_p, of_queries),
                                (cases.differences, cases.difference_p, of_differences)):  # fmt: skip
        t = x @ W.mT
        torch.testing.assert_close((weight[:, None] * t).mT @ t, expected)
        assert float(weight.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(("p", "seed"), [(0.1, 0), (0.52, 2)])
def test_theorem_1_names_the_one_minimiser(p, seed):
    """From two different starts, Newton's method ends at the formula."""
    q, k = features(seed=seed), features(seed=seed + 10)
    formula = theorem1_minimiser(q, k, 4.0)
    for start in (torch.zeros(3, 3), drawn(3, 3, seed=1).float()):
        found = minimise(q, k, q.mT @ formula @ k, p, start=start)
        torch.testing.assert_close(found.omega, formula, rtol=1e-6, atol=1e-8)
        assert found.divergence == pytest.approx(0.0, abs=1e-12)
    u, s, v = torch.linalg.svd(found.omega)
    assert float(s[1] / s[0]) < 1e-8
    assert float(cosines(whiten(gram(q), q[:, :1]), u[:, :1])) == pytest.approx(1.0, abs=1e-9)
    assert float(cosines(whiten(gram(k), k[:, :1]), v.mT[:, :1])) == pytest.approx(1.0, abs=1e-9)
    assert float(cosines(q[:, :1], u[:, :1])) < 0.999, "not the features themselves"


@pytest.mark.parametrize("epsilon", [0.02, 0.18, 0.5, 0.9])
def test_theorem_2_bounds_the_angle_and_a_sharper_bound_is_attained(epsilon):
    generator = torch.Generator().manual_seed(0)
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
    assert pytest.approx(0.1835, abs=1e-4) == SILENT_FROM
    assert (
        math.isnan(theorem2_bound(epsilon))
        if epsilon > SILENT_FROM
        else theorem2_bound(epsilon) < sharp_bound(g)
    )


def test_theorem_3_a_tilted_teacher_trades_overlap_for_penalty():
    found = [orthogonalise(mu, tilt=0.5, starts=4) for mu in (0.1, 1.0, 10.0)]
    overlaps = [f.query_overlap + f.key_overlap for f in found]
    assert overlaps[0] > 0.1 > overlaps[1] > overlaps[2] > 0
    for result, overlap in zip(found, overlaps, strict=True):
        assert overlap <= result.bound + 1e-9
        assert result.loss < result.orthogonal_loss
    assert max(f.query_overlap for f in found) < 1e-6, (
        "two keys ask a query for one number: it gives way at any μ"
    )
    free = orthogonalise(0.0, tilt=0.5, starts=4)
    assert free.key_overlap == pytest.approx(math.sin(0.5) ** 2, abs=1e-4), (
        "without a penalty: the teacher's lean"
    )
    straight = orthogonalise(0.1, tilt=0.0, starts=4)
    assert straight.query_overlap + straight.key_overlap < 1e-6, (
        "with an orthogonal teacher any μ > 0 does"
    )
