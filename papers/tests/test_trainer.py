"""Facts about the trainer: many models train as each would alone; a killed run goes on as if
nothing had happened.
"""

import logging
import os
import signal

import pytest
import torch
from superposed import FROZEN, TOYS

from qkscope.errors import Terminated
from qkscope.results.folder import read_tensors
from qkscope_papers.franco2026.toy.stack import SuperpositionStack
from qkscope_papers.lee2026.toy.retrieval import Retrieval
from qkscope_papers.lee2026.toy.stack import HeadCell, RetrievalStack
from qkscope_papers.lee2026.toy.trained import train_heads
from qkscope_papers.trainer import Recipe, Stack, Trainer, TrainingTask

CELLS = [
    HeadCell(Retrieval((2, 3)), 8),
    HeadCell(Retrieval((4, 2), noise=0.1), 16, seed=1),
    HeadCell(Retrieval((1, 1), payload_scale=1.0), 4),
]
CONTINUOUS = [
    HeadCell(Retrieval(cell.task.ranks, "continuous"), cell.d_head, cell.seed) for cell in CELLS
]
SHORT = Recipe(steps=60, validate_every=20)


def stacked(cells):
    if isinstance(cells[0], HeadCell):
        return RetrievalStack(cells, batch=64, validation=(2, 64))
    return SuperpositionStack(cells, tokens=64, validation=128)


class Quadratic(TrainingTask):
    """m models with one vector each, pulled towards targets of their own by noisy batches."""

    device = torch.device("cpu")

    def __init__(self, targets):
        self.targets, self.names = targets, [f"model {i}" for i in range(len(targets))]

    def start(self):
        return Stack(
            {"w": torch.zeros_like(self.targets), "scale": torch.ones(len(self.targets), 1)}
        )

    def draw(self, generator):
        return 1 + 0.1 * torch.randn(self.targets.shape[1], generator=generator)

    def loss(self, params, batch):
        return ((params["w"] * params["scale"] - self.targets) * batch).square().sum(dim=1)

    def validation_loss(self, params):
        return self.loss(params, torch.ones(self.targets.shape[1]))

    def select(self, keep):
        return Quadratic(self.targets[keep])

    def about(self):
        return {"targets": self.targets.tolist()}


@pytest.mark.parametrize(
    "cells", [CELLS, CONTINUOUS, TOYS, FROZEN], ids=["discrete", "continuous", "toys", "frozen"]
)
def test_gradients_by_hand_are_those_of_autograd(cells):
    task = stacked(cells)
    params = task.start()
    params.flat.mul_(3)  # away from the flat start
    batch = task.draw(torch.Generator().manual_seed(0))
    by_hand, by_autograd = (params.like(torch.zeros_like(params.flat)) for _ in range(2))
    losses = task.gradients(params, batch, by_hand)
    torch.testing.assert_close(losses, TrainingTask.gradients(task, params, batch, by_autograd))
    torch.testing.assert_close(by_hand.flat, by_autograd.flat, rtol=1e-4, atol=1e-5)
    assert float(by_autograd.flat.abs().max()) > 1e-3


@pytest.mark.parametrize(("cells", "names"), [(CELLS, ["W_Q", "W_K", "W_V"]), (TOYS, ["W", "W_Q"])])
def test_many_models_train_as_each_would_alone(cells, names):
    rates = [1e-3 * (i + 1) for i in range(len(cells))]
    together = Trainer(stacked(cells), rates, SHORT, seed=5).run()
    for i, (cell, rate) in enumerate(zip(cells, rates, strict=True)):
        alone = Trainer(stacked([cell]), rate, SHORT, seed=5).run()
        for name in names:
            rows = len(alone.params[name][0])
            torch.testing.assert_close(
                together.params[name][i][:rows], alone.params[name][0], rtol=1e-3, atol=1e-5
            )
            assert float(together.params[name][i][rows:].abs().sum()) == 0.0, (
                "padding stays padding"
            )
        assert (
            float((alone.params[names[0]][0] - getattr(cell.untrained(), names[0])).abs().max())
            > 1e-2
        )


def test_one_step_is_torchs_adamw():
    targets = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    rates = [1e-2, 3e-2, 1e-1]
    trainer = Trainer(
        Quadratic(targets), rates, Recipe(steps=50, weight_decay=0.1, schedule="cosine"), seed=7
    )
    for _ in range(20):
        trainer.train_step()
    for i, rate in enumerate(rates):
        generator = torch.Generator().manual_seed(7)
        w, scale = torch.zeros(5, requires_grad=True), torch.ones(1, requires_grad=True)
        optimiser = torch.optim.AdamW([w, scale], lr=rate, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=50)
        for _ in range(20):
            batch = 1 + 0.1 * torch.randn(5, generator=generator)
            optimiser.zero_grad()
            ((w * scale - targets[i]) * batch).square().sum().backward()
            optimiser.step()
            schedule.step()
        torch.testing.assert_close(trainer.params["w"][i], w.detach(), rtol=1e-4, atol=1e-6)


def test_models_stop_one_by_one_and_one_that_diverges_is_named(caplog):
    targets = torch.tensor([[0.0, 0.0], [3.0, -3.0]])
    recipe = Recipe(steps=3000, validate_every=20, patience=3, weight_decay=0.0)
    both = Trainer(Quadratic(targets), 1e-2, recipe)
    found = both.run()
    assert found.reasons == ["converged", "converged"]
    assert found.stopped_at[0] < found.stopped_at[1] < 3000
    assert len(both.models) == 1, "the first has left the stack"
    alone = Trainer(Quadratic(targets[1:]), 1e-2, recipe).run()
    assert alone.stopped_at[0] == found.stopped_at[1]
    torch.testing.assert_close(alone.params["w"][0], found.params["w"][1])
    assert bool(found.curves[-1, 0].isnan())
    masked = Trainer(Quadratic(targets), 1e-2, recipe, compact_below=0.0).run()
    torch.testing.assert_close(masked.params["w"], found.params["w"])
    with caplog.at_level(logging.WARNING):
        found = Trainer(stacked(CELLS), [1e-3, 50.0, 1e-3], SHORT, seed=5).run()
    assert found.diverged == [CELLS[1].name]
    assert f"{CELLS[1].name} diverged" in caplog.text
    assert found.reasons[0] == found.reasons[2] == "out of steps"
    alone = Trainer(stacked(CELLS[:1]), 1e-3, SHORT, seed=5).run()
    torch.testing.assert_close(
        found.params["W_Q"][0][:8], alone.params["W_Q"][0], rtol=1e-3, atol=1e-5
    )


def test_a_run_that_dies_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    """From the last state that it wrote, and bit by bit to what an unbroken run gives, curves and
    history too.
    """
    recipe = Recipe(steps=200, validate_every=20, patience=40, min_delta=0.02)

    def train(path):
        Trainer(
            stacked(CELLS[::2]),
            3e-3,
            recipe,
            checkpoint=path,
            checkpoint_seconds=0,
            keep_history=True,
        ).run()
        return read_tensors(path, "training")[0]

    left = iter(range(77))

    def step(trainer, real=Trainer.train_step):
        next(left)  # one more than there are is an error
        return real(trainer)

    whole = train(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        with pytest.raises(StopIteration):
            train(tmp_path / "broken")
    assert 0 < read_tensors(tmp_path / "broken", "training")[1]["step"] < 77
    again = train(tmp_path / "broken")
    assert whole.keys() == again.keys()
    for name in whole:
        assert torch.equal(whole[name].nan_to_num(), again[name].nan_to_num()), name


def test_a_scheduler_stops_toys_and_they_go_on_bit_for_bit(tmp_path, monkeypatch):
    twins, recipe = (
        [HeadCell(Retrieval((2, 2)), 8, seed) for seed in (0, 1)],
        Recipe(steps=60, validate_every=5),
    )
    whole = train_heads(twins, tmp_path / "whole", recipe=recipe)

    def terminate(number, frame):
        raise Terminated

    def step(trainer, real=Trainer.train_step, sent=[]):  # noqa: B006
        if not sent and trainer.step == 5:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler sends it: to the process
        return real(trainer)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        monkeypatch.setattr(Trainer, "train_step", step)
        with pytest.raises(Terminated):
            train_heads(twins, tmp_path / "stopped", recipe=recipe)
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGTERM, before)
    kept = [
        read_tensors(path, "training")[1]["step"]
        for path in (tmp_path / "stopped").glob("training-*")
    ]
    assert 0 < max(kept) < recipe.steps, "well before the half minute between states"
    for one, other in zip(
        whole, train_heads(twins, tmp_path / "stopped", recipe=recipe), strict=True
    ):
        torch.testing.assert_close(one.head.W_Q, other.head.W_Q, rtol=0, atol=0)
        assert one.loss == other.loss
