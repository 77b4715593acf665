"""Facts about relative attention, its terms, and the nulls beside their sparsity."""

import math

import pytest
import torch
from torch.nn.functional import one_hot

from qkscope import BadInput
from qkscope.sums.bases import thin_svd
from qkscope.sums.singular import (
    cancellation,
    key_difference,
    null_count,
    random_rotations,
    reconstruction_count,
    rotated_terms,
    shared_sparsity,
    singular_coordinates,
    sparsity,
    turned_terms,
)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W_Q, W_K = drawn(4, 9), drawn(4, 9, seed=1)
QUERIES, KEYS = drawn(50, 9, seed=2), drawn(50, 6, 9, seed=3)
ATTENDED = torch.randint(6, (50,), generator=torch.Generator().manual_seed(4))


def test_terms_sum_to_the_relative_logit_and_masked_keys_do_not_count():
    logits = torch.einsum("bd,de,bte->bt", QUERIES, W_Q.mT @ W_K, KEYS)
    u, s, v = thin_svd(W_Q, W_K)
    terms = (QUERIES @ u) * s * (key_difference(KEYS, ATTENDED) @ v)
    attended = logits[torch.arange(50), ATTENDED]
    torch.testing.assert_close(terms.sum(-1), attended - (logits.sum(1) - attended) / 5)
    alpha, gamma = singular_coordinates(
        W_Q @ u, QUERIES @ W_Q.mT, key_difference(KEYS @ W_K.mT, ATTENDED)
    )
    torch.testing.assert_close(alpha * gamma, terms)
    mask = torch.ones(50, 6, dtype=torch.bool)
    mask[:, 5] = False
    attended, changed = ATTENDED.clamp_max(4), KEYS.clone()
    changed[:, 5] = torch.nan
    torch.testing.assert_close(
        key_difference(changed, attended, mask), key_difference(KEYS[:, :5], attended)
    )
    with pytest.raises(BadInput, match="longer prompt"):
        key_difference(KEYS[:, :1], torch.zeros(50, dtype=torch.int64))


def test_sparsity_and_counts_of_terms_are_what_they_say_and_null_counts_of_random_ones():
    assert float(sparsity(torch.tensor([0.0, 0.0, -4.0, 0.0]))) == pytest.approx(0.25)
    assert float(sparsity(torch.tensor([3.0, -3.0, 3.0, 3.0]))) == pytest.approx(1.0)
    terms = drawn(100, 10)
    torch.testing.assert_close(sparsity(-7 * terms), sparsity(terms))
    assert 0.1 <= float(sparsity(terms).min()) < float(sparsity(terms).max()) <= 1
    assert math.isnan(float(sparsity(torch.zeros(4))))
    # against trying all subsets
    for terms in drawn(40, 6):
        count, total = float(reconstruction_count(terms)), float(terms.sum())
        subsets = [[i for i in range(6) if code >> i & 1] for code in range(1, 64)]
        least = min(len(s) for s in subsets if float(terms[s].sum()) >= total - 1e-12)
        assert math.isnan(count) if total <= 0 else count == least
    assert float(reconstruction_count(torch.tensor([9.9, 0.1, 0.0, 0.0]), 0.99)) == 1
    assert float(reconstruction_count(torch.tensor([9.9, 0.1, 0.0, 0.0]))) == 2
    assert float(reconstruction_count(torch.tensor([0.1] * 10))) == 10
    single = torch.zeros(1, 64, dtype=torch.float64)
    single[0, 3] = 5.0
    assert float(reconstruction_count(single)) == 1
    assert float(null_count(single, draws=200)) > 2, (
        "few random terms reach the sum as well, but more than one"
    )
    even = torch.ones(1, 8, dtype=torch.float64)
    assert float(null_count(even)) == 8
    assert float(cancellation(even)) == 1.0
    assert float(cancellation(torch.tensor([[2.0, -1.0]]))) == pytest.approx(1 / 3)


def test_a_rotated_basis_loses_sparsity_and_drawn_directions_are_what_rotations_give():
    """Queries and keys that hold one feature each, along the singular vectors."""
    turns = random_rotations(5, 8, seed=1)
    torch.testing.assert_close(turns @ turns.mT, torch.eye(5, dtype=torch.float64).expand(8, 5, 5))
    which = one_hot(
        torch.randint(10, (200,), generator=torch.Generator().manual_seed(0)), 10
    ).double()
    query, difference = which + 0.01 * drawn(200, 10), which + 0.01 * drawn(200, 10, seed=1)
    s = torch.ones(10, dtype=torch.float64)
    assert float(sparsity(query * s * difference).mean()) < 0.11
    assert float(sparsity(rotated_terms(query, s, difference)).mean()) > 0.3
    # mean sparsity over many rotation matrices equals that over uniform directions, of both nulls
    alpha, beta = drawn(2, 1, 1, 12)
    s = torch.linspace(3.0, 0.1, 12, dtype=torch.float64)
    by_matrix = sparsity(rotated_terms(alpha, s, beta, 2000)).mean()
    by_prompt = sparsity(turned_terms(alpha.expand(200, 1, 12), s[None], 20, range(200))).mean()
    assert float(by_prompt) == pytest.approx(float(by_matrix), abs=0.008)
    one, other = (
        torch.einsum("abm,rmn->rabn", x, random_rotations(12, 2000, 0)) for x in (alpha, beta)
    )
    ours = shared_sparsity(alpha.expand(200, 1, 12), beta.expand(200, 1, 12), 20, range(200)).mean()
    assert float(ours) == pytest.approx(float(sparsity(one * other).mean()), abs=0.008)
