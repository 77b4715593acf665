"""Facts about the toy of superposition: its data, its loss, its trainer, and what it refuses."""

import pytest
import torch

from qkscope import BadInput
from qkscope_papers.franco2026.toy.stack import SuperpositionStack, ToyCell
from qkscope_papers.franco2026.toy.superposition import (
    FOUR_PAIRS,
    Positional,
    Superposition,
    band_frequencies,
    distort,
    isotropic_dictionary,
    linear_pairs,
    rotated_logits,
)
from qkscope_papers.franco2026.toy.trained import stacks, train_toys
from qkscope_papers.trainer import Recipe, Trainer

SMALL = {"n": 6, "d": 4, "d_head": 4, "pairs": ((0, 2, 6.0), (1, 3, 4.0))}
CELLS = [
    ToyCell(Superposition(**SMALL), steps=40, every=20),
    ToyCell(Superposition(**{**SMALL, "d_head": 2, "p": 0.2}), steps=40, every=20),
    ToyCell(Superposition(**{**SMALL, "reading": "B", "weight": 2.0, "scaled": True}), steps=40, every=20),
    ToyCell(Superposition(**{**SMALL, "weight": 0.0, "p": 1.0}), steps=40, every=20),
    ToyCell(Superposition(**{**SMALL, "pairs": ((0, 0, -3.0), (5, 1, 2.0))}), steps=40, every=20, lr=1e-2),
]
FROZEN = ToyCell(Superposition.frozen(distort(isotropic_dictionary(), 5.0, 0), scaled=True), steps=40, every=20)
ROPE = ToyCell(
    Superposition(**SMALL, context=5, rope=True, positional=(Positional(4, 5, 3.0, 1),)), steps=40, every=20
)  # fmt: skip


def stacked(cells, tokens=64):
    return SuperpositionStack(cells, tokens=tokens, validation=128)


def test_strengths_are_zero_or_uniform():
    task = Superposition(p=0.3)
    x = task.strengths(torch.rand(200_000, generator=torch.Generator().manual_seed(0)))
    present = x[x > 0]
    assert len(present) / len(x) == pytest.approx(0.3, abs=0.01)
    assert float(present.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(present.var()) == pytest.approx(1 / 12, abs=0.005)


@pytest.mark.parametrize("cell", [*CELLS, FROZEN, ROPE], ids=lambda cell: cell.name)
def test_the_loss_is_the_toys_own(cell):
    """Embedding, reading back and attending, token by token, gives what the stack computes."""
    task = stacked([cell])
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


def test_logits_and_targets_are_bilinear_in_the_strengths():
    toy = CELLS[0].untrained()
    x_q, x_k = torch.rand(3, 6, dtype=torch.float64), torch.rand(3, 4, 6, dtype=torch.float64)
    W = toy.W.double()
    plain = torch.einsum("bi,ij,btj->bt", x_q, W.mT @ toy.omega @ W, x_k)
    torch.testing.assert_close(toy.logits(x_q, x_k), plain)
    x_q, x_k = torch.zeros(1, 6), torch.zeros(1, 2, 6)
    x_q[0, 0], x_k[0, 1, 2] = 0.5, 0.5
    torch.testing.assert_close(toy.target_logits(x_q, x_k), torch.tensor([[0.0, 1.5]]))


def test_rotated_logits_are_those_of_rotated_vectors():
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
    torch.testing.assert_close(rotated_logits(q, k, at[:, None] - keys, frequencies), plain, rtol=1e-4, atol=1e-4)


def test_checkpoints_are_kept_from_the_start_and_toys_are_shared(tmp_path):
    cells = [*CELLS[:2], FROZEN, ROPE, ToyCell(CELLS[0].task, seed=1, steps=40, every=20)]
    assert len(stacks(cells)) == 4, "shapes, frozen or not, RoPE and seeds train apart"
    found = train_toys(cells, tmp_path, workers=2)
    for cell, trained in zip(cells, found, strict=True):
        assert trained.steps == [0, 20, 40]
        start = cell.untrained()
        for name in ("W", "W_Q", "W_K"):
            torch.testing.assert_close(getattr(trained.at(0), name), getattr(start, name).float())
        assert float((trained.toy.W_Q - trained.at(1).W_Q).abs().max()) > 1e-4
        moved = float((trained.toy.W - trained.at(0).W).abs().max())
        assert (moved == 0) == (cell.task.dictionary is not None), "a frozen dictionary stays as it is"
    assert len(list(tmp_path.iterdir())) == len(cells), "one file per toy, and no checkpoint left"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = train_toys(cells[::-1], tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    torch.testing.assert_close(again[-1].toy.W, found[0].toy.W)
    assert not torch.allclose(found[0].toy.W, found[4].toy.W), "another seed is another start and other tokens"


def test_history_survives_an_interruption(tmp_path):
    """Stop in the middle, go on from the checkpoint, and find the same weights at every check."""
    recipe = Recipe(steps=40, validate_every=10, patience=50)
    whole = Trainer(stacked(CELLS[:2]), 1e-3, recipe, keep_history=True).run()
    options = {"checkpoint": tmp_path / "c", "checkpoint_seconds": 0, "keep_history": True}
    first = Trainer(stacked(CELLS[:2]), 1e-3, recipe, **options)
    first.begin()
    for _ in range(2):
        for _ in range(10):
            first.train_step()
        first.check(10)
    second = Trainer(stacked(CELLS[:2]), 1e-3, recipe, **options)
    assert second.step == 20
    broken = second.run()
    assert whole.history["W"].shape == (5, 2, 4, 6)
    for name, value in whole.history.items():
        assert torch.equal(value, broken.history[name])


def test_a_small_toy_learns_to_attend_and_aligns():
    """Two pairs among six features: after training the top singular vectors point along them, before they do not."""
    cell = ToyCell(Superposition(**{**SMALL, "p": 0.4}), steps=2000, every=500, lr=5e-3)
    task = SuperpositionStack([cell], tokens=256, validation=256)
    trainer = Trainer(task, cell.lr, cell.recipe(), keep_history=True)
    trained = trainer.run()
    toys = [task.toys({name: value[check] for name, value in trained.history.items()})[0] for check in (0, -1)]

    def matched(toy):
        u, _, v = toy.basis()
        unit = toy.W.double() / toy.W.double().norm(dim=0)
        return [min(float((unit[:, q] @ u[:, i]).abs()), float((unit[:, k] @ v[:, i]).abs()))
                for i, (q, k, _) in enumerate(toy.task.pairs)]  # fmt: skip

    assert min(matched(toys[1])) > 0.95
    assert max(matched(toys[0])) < 0.9
    s = toys[1].basis().s
    assert float(s[2] / s[1]) < 0.1


def test_targets_can_be_any_matrix():
    M = torch.zeros(6, 6)
    M[1, 4], M[0, 0] = 3.0, -5.0
    task = Superposition.with_target(M, n=6, d=4, d_head=2)
    assert task.pairs == ((0, 0, -5.0), (1, 4, 3.0))
    torch.testing.assert_close(task.target(), M)
    assert linear_pairs(3, 4.0) == ((0, 3, 4.0), (1, 4, 3.0), (2, 5, 2.0))
    assert Superposition().pairs == FOUR_PAIRS


BAD = [
    (lambda: Superposition(d_head=11), "cannot be wider than a token: d_head is 11, but d is 10"),
    (lambda: Superposition(pairs=((0, 4, 24.0), (0, 4, 3.0))), r"\(0, 4\) is given twice"),
    (lambda: Superposition(positional=(Positional(0, 1, 1.0, 1),)), "set rope"),
    (lambda: Superposition(rope=True, d_head=9), "make it even"),
    (lambda: Superposition(rope=True, positional=(Positional(0, 1, 1.0, 5),)), "bands 0 to 4"),
    (lambda: Superposition(dictionary=((0.0,) * 20,) * 9), "10 rows of 20, but got 9 rows of"),
]


@pytest.mark.parametrize(("call", "says"), BAD, ids=[says for _, says in BAD])
def test_bad_settings_get_a_sentence(call, says):
    with pytest.raises(BadInput, match=says):
        call()
