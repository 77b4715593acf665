"""Facts about cosines of features and singular vectors, their baseline, whitening and isotropy."""

import logging
import math

import pytest
import torch

from qkscope import BadInput
from qkscope_papers.franco2026.toy import alignment
from qkscope_papers.franco2026.toy.alignment import (
    anti_whiten,
    cosines,
    gram,
    invert_gram,
    isotropy_error,
    random_best,
    whiten,
)
from qkscope_papers.franco2026.toy.measure import alignment_rows
from qkscope_papers.franco2026.toy.superposition import Superposition, Toy, distort, isotropic_dictionary


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cosines_know_neither_sign_nor_length():
    basis = torch.linalg.qr(drawn(6, 4))[0]
    features = basis * torch.tensor([-3.0, 0.1, 7.0, -1.0])
    torch.testing.assert_close(cosines(features, basis), torch.eye(4, dtype=torch.float64))
    assert bool(cosines(torch.zeros(6, 1, dtype=torch.float64), basis).isnan().all())


def test_surplus_features_are_matched_to_the_last_vector():
    """Five pairs along three axes, Ω = diag(3, 2, 1, 0, 0): the last three share the third vector."""
    task = Superposition(n=10, d=5, d_head=3, pairs=tuple((i, i + 5, 9.0 - i) for i in range(5)))
    head = torch.diag(torch.tensor([3.0, 2.0, 1.0]).sqrt()) @ torch.eye(5)[:3]
    W = torch.eye(5)[:, [0, 1, 2, 2, 2] * 2]
    rows = alignment_rows("by hand", 0, 0, Toy(W, torch.zeros(10), head, head, task))
    assert [row["singular_value"] for row in rows[::2]] == pytest.approx([3, 2, 1, 1, 1])
    assert all(row["matched"] == pytest.approx(1.0) for row in rows)


def test_chance_is_what_random_features_score_under_any_basis():
    basis = torch.linalg.qr(drawn(10, 10, seed=1))[0]
    for vectors in (1, 4, 10):
        scored = cosines(drawn(10, 20_000, seed=2), basis[:, :vectors]).amax(-1)
        chance = random_best(10, vectors)
        assert chance.mean == pytest.approx(float(scored.mean()), abs=0.01)
        assert float((scored > chance.top).double().mean()) == pytest.approx(0.05, abs=0.01)
    assert random_best(10, 10).mean > 0.6, "the best of ten is large by itself"
    one = math.gamma(5) / (math.sqrt(math.pi) * math.gamma(5.5))  # E|x_1| on the unit sphere of ten dimensions
    assert random_best(10, 1).mean == pytest.approx(one, abs=0.01)


def test_anti_whitening_undoes_whitening():
    features = drawn(5, 9)
    g = gram(features)
    torch.testing.assert_close(anti_whiten(g, whiten(g, features)), features, rtol=1e-9, atol=1e-9)
    assert not invert_gram(g).singular


def test_a_singular_gram_gets_its_pseudo_inverse_and_says_so(caplog):
    features = drawn(5, 9)
    features[4] = 0
    g = gram(features)
    alignment._say_singular.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = invert_gram(g)
    assert (found.rank, found.singular) == (4, True)
    assert "span 4 of 5 dimensions: the pseudo-inverse" in caplog.text
    torch.testing.assert_close(found.matrix, torch.linalg.pinv(g), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(anti_whiten(g, whiten(g, features)), features, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 10.0, 55.0])
def test_controlled_anisotropy_is_what_it_says_on_both_scales(epsilon):
    W = isotropic_dictionary()
    torch.testing.assert_close(gram(W), torch.eye(10, dtype=torch.float64), rtol=0, atol=1e-12)
    g = gram(distort(W, epsilon, seed=3))
    assert isotropy_error(g, c=1.0) == pytest.approx(epsilon, abs=1e-9)
    c = 1 + epsilon / 10
    assert isotropy_error(g) == pytest.approx(max((1 + epsilon) / c - 1, 1 - 1 / c), abs=1e-9)
    assert isotropy_error(g) < 9, "with c = tr G / d it cannot exceed d − 1"


def test_bad_input_gets_a_sentence():
    with pytest.raises(BadInput, match="no angle with"):
        cosines(torch.eye(3), torch.eye(4))
    with pytest.raises(BadInput, match="1 to 10 orthonormal vectors"):
        random_best(10, 11)
    with pytest.raises(BadInput, match="square"):
        invert_gram(torch.ones(2, 3))
    with pytest.raises(BadInput, match="length 0"):
        isotropy_error(torch.zeros(3, 3))
    with pytest.raises(BadInput, match="inside out"):
        distort(isotropic_dictionary(), -1.0, 0)
    with pytest.raises(BadInput, match="in pairs in a plane"):
        isotropic_dictionary(d=12)
