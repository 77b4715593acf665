"""Facts about relative attention, its terms, and the nulls beside their sparsity."""

import math

import pytest
import torch

from qkscope import BadInput
from qkscope.maths.bases import thin_svd
from qkscope.maths.relative import (
    cancellation,
    key_difference,
    null_count,
    random_rotations,
    reconstruction_count,
    rotated_terms,
    shared_terms,
    sparsity,
)
from qkscope.maths.singular import singular_coordinates


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W_Q, W_K = drawn(4, 9), drawn(4, 9, seed=1)
QUERIES, KEYS = drawn(50, 9, seed=2), drawn(50, 6, 9, seed=3)
ATTENDED = torch.randint(6, (50,), generator=torch.Generator().manual_seed(4))


def split():
    u, s, v = thin_svd(W_Q, W_K)
    return QUERIES @ u, s, key_difference(KEYS, ATTENDED) @ v


def test_terms_sum_to_the_relative_logit():
    logits = torch.einsum("bd,de,bte->bt", QUERIES, W_Q.mT @ W_K, KEYS)
    query, s, difference = split()
    rows = torch.arange(50)
    others = (logits.sum(1) - logits[rows, ATTENDED]) / 5
    torch.testing.assert_close((query * s * difference).sum(-1), logits[rows, ATTENDED] - others)


def test_relative_attention_is_positive_wherever_attention_beats_its_share():
    logits = 2 * drawn(500, 6, seed=5)
    share = logits.softmax(1)
    for key in range(6):
        relative = key_difference(logits[..., None], torch.full((500,), key))[:, 0]
        assert bool((relative[share[:, key] > 1 / 6] > 0).all())
        assert bool((relative < 0).any())


def test_masked_keys_do_not_count():
    mask = torch.ones(50, 6, dtype=torch.bool)
    mask[:, 5] = False
    attended = ATTENDED.clamp_max(4)
    changed = KEYS.clone()
    changed[:, 5] = torch.nan
    torch.testing.assert_close(key_difference(changed, attended, mask), key_difference(KEYS[:, :5], attended))


def test_in_the_head_space_the_same_terms_come_from_w_q():
    u, _, _ = thin_svd(W_Q, W_K)
    query, s, difference = split()
    alpha, gamma = singular_coordinates(W_Q @ u, QUERIES @ W_Q.mT, key_difference(KEYS @ W_K.mT, ATTENDED))
    torch.testing.assert_close(alpha * gamma, query * s * difference)


def test_sparsity_runs_from_one_over_n_to_one_and_ignores_scale():
    assert float(sparsity(torch.tensor([0.0, 0.0, -4.0, 0.0]))) == pytest.approx(0.25)
    assert float(sparsity(torch.tensor([3.0, -3.0, 3.0, 3.0]))) == pytest.approx(1.0)
    terms = drawn(100, 10)
    torch.testing.assert_close(sparsity(-7 * terms), sparsity(terms))
    assert float(sparsity(terms).min()) >= 0.1
    assert float(sparsity(terms).max()) <= 1
    assert math.isnan(float(sparsity(torch.zeros(4))))


def test_reconstruction_counts_the_smallest_set():
    """Against trying all subsets."""
    for terms in drawn(40, 6):
        count = float(reconstruction_count(terms))
        total = float(terms.sum())
        if total <= 0:
            assert math.isnan(count)
            continue
        subsets = [[i for i in range(6) if code >> i & 1] for code in range(1, 64)]
        assert count == min(len(s) for s in subsets if float(terms[s].sum()) >= total - 1e-12)
    assert float(reconstruction_count(torch.tensor([9.9, 0.1, 0.0, 0.0]), 0.99)) == 1
    assert float(reconstruction_count(torch.tensor([9.9, 0.1, 0.0, 0.0]))) == 2
    assert float(reconstruction_count(torch.tensor([0.1] * 10))) == 10


def test_rotations_are_orthogonal_and_keep_spectrum_or_logits():
    turns = random_rotations(5, 8, seed=1)
    torch.testing.assert_close(turns @ turns.mT, torch.eye(5, dtype=torch.float64).expand(8, 5, 5))
    query, s, difference = split()
    head_q, head_k = query * s.sqrt(), difference * s.sqrt()
    total = (query * s * difference).sum(-1)
    torch.testing.assert_close(shared_terms(head_q, head_k, 7).sum(-1), total.expand(7, -1))
    turned = rotated_terms(query, s, difference, 7)
    assert turned.shape == (7, 50, 4)
    assert float((turned.sum(-1) - total).abs().max()) > 0.1, "independent rotations change the logit"


def test_a_rotated_basis_loses_the_sparsity_of_an_aligned_one():
    """Queries and keys that hold one feature each, along the singular vectors."""
    which = torch.randint(10, (200,), generator=torch.Generator().manual_seed(0))
    query = torch.nn.functional.one_hot(which, 10).double() + 0.01 * drawn(200, 10)
    difference = torch.nn.functional.one_hot(which, 10).double() + 0.01 * drawn(200, 10, seed=1)
    s = torch.ones(10, dtype=torch.float64)
    aligned = sparsity(query * s * difference).mean()
    rotated = sparsity(rotated_terms(query, s, difference)).mean()
    assert float(aligned) < 0.11
    assert float(rotated) > 0.3


def test_null_counts_are_those_of_random_terms_with_the_same_sum_and_norm():
    one = torch.zeros(1, 64, dtype=torch.float64)
    one[0, 3] = 5.0
    assert float(reconstruction_count(one)) == 1
    assert float(null_count(one, draws=200)) > 2, "few random terms reach the sum as well, but more than one"
    even = torch.ones(1, 8, dtype=torch.float64)
    assert float(null_count(even)) == 8
    assert float(cancellation(even)) == 1.0
    assert float(cancellation(torch.tensor([[2.0, -1.0]]))) == pytest.approx(1 / 3)


def test_bad_input_gets_a_sentence():
    with pytest.raises(BadInput, match="longer context"):
        key_difference(KEYS[:, :1], torch.zeros(50, dtype=torch.int64))
