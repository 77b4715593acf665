"""The toy of superposition: its data, its loss, its training, and what figures measure of toys made
by hand.
"""

from dataclasses import replace

import pytest
import torch
from superposed import FROZEN, SMALL, TOYS

from qkscope.sums.singular import key_difference
from qkscope_papers.franco2026.anisotropy import anisotropy_row
from qkscope_papers.franco2026.cells import WORK
from qkscope_papers.franco2026.dictionary import split, true_among
from qkscope_papers.franco2026.emergence import sparsity_row
from qkscope_papers.franco2026.geometry import geometry_row
from qkscope_papers.franco2026.rope import band_rows
from qkscope_papers.franco2026.token_pairs import coordinates, draw_token_pairs
from qkscope_papers.franco2026.toy.alignment import whiten
from qkscope_papers.franco2026.toy.measure import alignment_rows, divergence_and_error
from qkscope_papers.franco2026.toy.stack import SuperpositionStack, ToyCell
from qkscope_papers.franco2026.toy.superposition import (
    Positional,
    Superposition,
    Toy,
    band_frequencies,
    distort,
    isotropic_dictionary,
    rotated_logits,
)
from qkscope_papers.franco2026.toy.trained import stacks, train_toys
from qkscope_papers.trainer import Trainer

ROPE = ToyCell(
    Superposition(**SMALL, context=5, rope=True, positional=(Positional(4, 5, 3.0, 1),)), steps=40, every=20
)  # fmt: skip


@pytest.mark.parametrize("cell", [*TOYS, *FROZEN, ROPE], ids=lambda cell: cell.name)
def test_the_loss_is_the_toys_own(cell):
    """Embedding, reading back and attending, token by token, gives what the stack computes."""
    task = SuperpositionStack([cell], tokens=64, validation=128)
    batch = task.draw(torch.Generator().manual_seed(1))
    toy, t = cell.untrained(), cell.task
    x = t.strengths(batch.uniform)
    contexts = len(x) // (1 + t.context)
    x_q, x_k = x[:contexts], x[contexts:].view(contexts, t.context, t.n)
    logits, target = (f(x_q, x_k, batch.offsets) for f in (toy.logits, toy.target_logits))
    head = torch.nn.functional.cross_entropy(logits, target.softmax(-1))
    error = (toy.reconstruct(x) - x).square().mean()
    w_rec, w_att = t.loss_weights
    plain = w_rec * error + w_att * head
    assert float(task.loss(task.start().named(), batch)[0]) == pytest.approx(float(plain), rel=1e-5)


def test_rotated_logits_are_those_of_rotated_vectors_and_token_pairs_hold_what_they_say():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 6, generator=generator), torch.randn(3, 4, 6, generator=generator)
    frequencies = band_frequencies(6).float()

    def rotate(x, position):
        angle = position[..., None] * frequencies
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(turned, dim=-1).flatten(-2)

    at, keys = torch.tensor([3, 0, 7]), torch.arange(4).expand(3, 4)
    plain = torch.einsum("bh,bth->bt", rotate(q, at), rotate(k, keys))
    torch.testing.assert_close(
        rotated_logits(q, k, at[:, None] - keys, frequencies), plain, rtol=1e-4, atol=1e-4
    )
    task = Superposition()
    for present, count in (("one", 1), ("two", 2), ("none", 0)):
        pairs = draw_token_pairs(task, present, 200, seed=1)
        assert bool((pairs.chosen.sum(1) == count).all())
        for i, (query, key, _) in enumerate(task.pairs):
            there = pairs.chosen[:, i] > 0
            assert bool(((pairs.x_q[:, query] > 0) == there).all())
            assert bool(((pairs.x_k[:, 0, key] > 0) == there).all())
        assert bool((pairs.x_q[:, 4:8] == 0).all()), (
            "key features of interest are taken out of the query too"
        )
        assert bool((pairs.x_k[:, 1:, 4:8] > 0).any()), "other keys stay as they come"
    only = draw_token_pairs(task, "one", 50, seed=1, only=2)
    assert bool((only.chosen[:, 2] == 1).all())


def test_checkpoints_are_kept_from_the_start_and_toys_are_shared(tmp_path):
    cells = [*TOYS[:2], *FROZEN, ROPE, ToyCell(TOYS[0].task, seed=1, steps=40, every=20)]
    assert len(stacks(cells)) == 4, "shapes, frozen or not, RoPE and seeds train apart"
    found = train_toys(cells, tmp_path, workers=2)
    for cell, trained in zip(cells, found, strict=True):
        assert trained.steps == [0, 20, 40]
        start = cell.untrained()
        for name in ("W", "W_Q", "W_K"):
            torch.testing.assert_close(getattr(trained.at(0), name), getattr(start, name).float())
        assert float((trained.toy.W_Q - trained.at(1).W_Q).abs().max()) > 1e-4
        moved = float((trained.toy.W - trained.at(0).W).abs().max())
        assert (moved == 0) == (cell.task.dictionary is not None), (
            "a frozen dictionary stays as it is"
        )
    assert len(list(tmp_path.iterdir())) == len(cells), "one file per toy, and no checkpoint left"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = train_toys(cells[::-1], tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    torch.testing.assert_close(again[-1].toy.W, found[0].toy.W)
    assert not torch.allclose(found[0].toy.W, found[4].toy.W), (
        "another seed is another start and other tokens"
    )


def test_a_small_toy_learns_to_attend_and_aligns():
    """Two pairs among six features: after training the top singular vectors point along them,
    before they do not.
    """
    cell = ToyCell(Superposition(**{**SMALL, "p": 0.4}), steps=2000, every=500, lr=5e-3)
    task = SuperpositionStack([cell], tokens=256, validation=256)
    trainer = Trainer(task, cell.lr, cell.recipe(), keep_history=True)
    trained = trainer.run()
    toys = [
        task.toys({name: value[check] for name, value in trained.history.items()})[0]
        for check in (0, -1)
    ]

    def matched(toy):
        u, _, v = toy.basis()
        unit = toy.W.double() / toy.W.double().norm(dim=0)
        return [min(float((unit[:, q] @ u[:, i]).abs()), float((unit[:, k] @ v[:, i]).abs()))
                for i, (q, k, _) in enumerate(toy.task.pairs)]  # fmt: skip

    assert min(matched(toys[1])) > 0.95
    assert max(matched(toys[0])) < 0.9
    s = toys[1].basis().s
    assert float(s[2] / s[1]) < 0.1


def aligned_toy(**options):
    """Features of interest on axes of their own, the others in a plane, and Ω = Σ M f_q f_kᵀ."""
    W = isotropic_dictionary().float()
    task = Superposition(**options)
    omega = sum(logit * torch.outer(W[:, q], W[:, k]) for q, k, logit in task.pairs)
    u, s, vh = torch.linalg.svd(omega)
    return Toy(W, torch.zeros(20), (u * s.sqrt()).mT, s.sqrt()[:, None] * vh, task)


def test_an_aligned_toy_reads_as_aligned_and_its_terms_are_the_pairs():
    rows = alignment_rows("by hand", 0, 0, aligned_toy())
    assert len(rows) == 8
    for row in rows:
        assert row["matched"] == pytest.approx(1.0, abs=1e-6)
        assert row["singular_value"] == pytest.approx(row["target_logit"], rel=1e-5)
        assert row["feature_norm"] == pytest.approx(1.0)
    kl, _ = divergence_and_error(aligned_toy(), 64, 0)
    assert kl == pytest.approx(0.0, abs=1e-6), "its logits are the targets"
    untrained = alignment_rows("by hand", 0, 0, Toy.untrained(Superposition(), 0), control=True)
    assert max(row["matched"] for row in untrained) < 0.95
    assert all(row["control"] for row in untrained)
    toy, pairs = aligned_toy(), draw_token_pairs(Superposition(), "two", 100, seed=2)
    terms = coordinates(toy, pairs).terms
    logits = toy.logits(pairs.x_q, pairs.x_k)
    relative = key_difference(logits[..., None], torch.zeros(100, dtype=torch.int64))[:, 0]
    torch.testing.assert_close(terms.sum(1), relative)
    for i, (query, key, logit) in enumerate(toy.task.pairs):
        difference = pairs.x_k[:, 0, key] - pairs.x_k[:, 1:, key].mean(1)
        torch.testing.assert_close(
            terms[:, i], logit * pairs.x_q[:, query] * difference, rtol=1e-5, atol=1e-5
        )


def test_an_aligned_toy_is_sparse_in_its_pairs_and_its_dictionary_has_the_true_ones():
    toy = aligned_toy()
    rows = {
        name: sparsity_row(toy, draw_token_pairs(toy.task, name, 200, seed=3), WORK["smoke"], 0)
        for name in ("one", "two")
    }
    assert rows["one"]["sparsity"] == pytest.approx(0.1, abs=1e-3)
    assert rows["one"]["count_tol"] == 1
    assert rows["one"]["sparsity"] < rows["two"]["sparsity"] < rows["two"]["rotated_low"]
    assert rows["one"]["difference_high"] < 0
    assert rows["two"]["low"] <= rows["two"]["sparsity"] <= rows["two"]["high"]
    generator = torch.Generator().manual_seed(0)
    x = toy.task.strengths(torch.rand(32, 5, 20, generator=generator, dtype=torch.float64))
    true, turned = (split(toy, x, kind, 0, attended=None) for kind in ("true", "rotated"))
    assert true_among(true.size, toy) == 4
    pairs = [pair[:2] for pair in toy.task.pairs]
    others = true.size.clone()
    for query, key in pairs:
        others[query, key] = 0
    assert others.max() < 1e-5, (
        "features of interest are read back as they are, and no other pair is answered to"
    )
    assert true_among(turned.size, toy) < 4
    torch.testing.assert_close(
        true.numbers[:, 0], turned.numbers[:, 0]
    )  # the logit is the same, however it is split


def test_geometry_counts_antipodal_pairs_and_bands_are_where_the_head_puts_a_feature():
    eye = torch.eye(10)
    plain = Toy(torch.cat([eye, -eye], dim=1), torch.zeros(20), eye, eye, Superposition(weight=0.0))
    row = geometry_row("by hand", 0, 0, plain, False)
    assert (row["antipodal"], row["isotropy_error"]) == (10, pytest.approx(0.0, abs=1e-12))
    row = geometry_row("by hand", 0, 0, aligned_toy(), False)
    assert row["interest_overlap"] == pytest.approx(0.0, abs=1e-6)
    assert row["antipodal"] == 6
    assert row["rest_isotropy_error"] == pytest.approx(0.0, abs=1e-5)
    toy = aligned_toy(rope=True, positional=(Positional(8, 9, 1.0, 1),))
    weight = torch.zeros(10, 10)
    weight[2, 0], weight[3, 8], weight[9, 8] = 2.0, 3.0, 4.0
    rows = band_rows(replace(toy, W_Q=weight, W=torch.eye(10, 20)), 0, 0, False)
    first = next(row for row in rows if row["pair"] == "0-4" and row["side"] == "query")
    assert (first["band_1"], first["slow"]) == (1.0, 0.0)
    last = next(row for row in rows if row["positional"] and row["side"] == "query")
    assert (last["band_1"], last["band_4"]) == (pytest.approx(0.6), pytest.approx(0.8))


def test_anti_whitening_recovers_features_from_a_whitened_head():
    """Theorem 1's head: its singular vectors are G⁻¹f, so G u is f, however strong the anisotropy."""
    W = distort(isotropic_dictionary(), 10.0, seed=0)
    task = Superposition.frozen(W, pairs=((0, 4, 8.0),), scaled=True)
    left, right = whiten(W @ W.mT, W[:, [0, 4]]).float().unbind(1)
    head = [torch.zeros(10, 10) for _ in range(2)]
    head[0][0], head[1][0] = left, right
    row = anisotropy_row(10.0, 0, 0, Toy(W.float(), torch.zeros(20), *head, task), False)
    assert row["anti_whitened_top"] == pytest.approx(1.0, abs=1e-5)
    assert row["whitened"] == pytest.approx(1.0, abs=1e-5)
    assert row["raw_top"] < 0.99
    assert row["error_undistorted"] == pytest.approx(10.0, abs=1e-4)
    assert row["raw_top"] >= row["sharp"] - 1e-6
