"""Bench rows on the toys: many heads trained at once, against the plain loop that trains one.

The plain loop is what one would write first, and not badly: an ``nn.Module``, fresh batches drawn
as tensors, autograd, ``torch.optim.AdamW``. Both sides draw new data in every step and run on one
core; seconds are CPU seconds, so that a busy machine slows neither.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkscope_bench.harness import Row, Seconds, compare, row
from qkscope_papers.fleet import one_thread
from qkscope_papers.franco2026.toy.stack import TOKENS, SuperpositionStack, ToyCell
from qkscope_papers.franco2026.toy.superposition import Superposition, Toy
from qkscope_papers.lee2026.toy.retrieval import Retrieval
from qkscope_papers.lee2026.toy.stack import RetrievalStack
from qkscope_papers.lee2026.toy.trained import grid
from qkscope_papers.trainer import Trainer

_STEPS = 20
_ROUNDS = 7
_BATCH = 256


class PlainHead(nn.Module):
    """One attention head with a readout, as the paper's section 2.2 has it."""

    def __init__(self, task: Retrieval, d_head: int) -> None:
        super().__init__()
        self.query = nn.Linear(task.d, d_head, bias=False)
        self.key = nn.Linear(task.d, d_head, bias=False)
        self.value = nn.Linear(task.d, d_head, bias=False)
        self.out = nn.Linear(d_head, task.payloads, bias=False)
        self.scale = 1 / math.sqrt(d_head)

    def forward(self, x_q: Tensor, x_k: Tensor) -> Tensor:
        """Logits of the payload."""
        scores = (self.key(x_k) @ self.query(x_q)[..., None])[..., 0] * self.scale
        mixed = scores.softmax(dim=-1)[:, None] @ self.value(x_k)
        return self.out(mixed[:, 0])


def plain_loop(task: Retrieval, d_head: int, seed: int = 0) -> Callable[[int], None]:
    """A function that trains one head for some steps."""
    encoders = task.encoders(seed)
    model = PlainHead(task, d_head)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(_BATCH)

    def steps(count: int) -> None:
        for _ in range(count):
            z = task.draw_latents((_BATCH, task.keys), generator)
            payload = torch.randint(task.payloads, (_BATCH, task.keys), generator=generator)
            asked = torch.randint(task.keys, (_BATCH,), generator=generator)
            x_k = z @ encoders.A.mT + encoders.A_y.mT[payload]
            x_k = x_k + task.noise * torch.randn(x_k.shape, generator=generator)
            x_q = z[rows, asked] @ encoders.B.mT
            x_q = x_q + task.noise * torch.randn(x_q.shape, generator=generator)
            optimiser.zero_grad()
            loss = criterion(model(x_q, x_k), payload[rows, asked])
            loss.backward()
            optimiser.step()

    return steps


def _model_steps(plain: Callable[[int], None], trainer: Trainer, models: int) -> Seconds:
    """Median CPU seconds of one model-step: of the plain loop, and of the trainer, whose steps
    serve many models.
    """

    def ours() -> None:
        for _ in range(_STEPS):
            trainer.train_step()

    plain_s, ours_s = compare(lambda: plain(_STEPS), ours, _ROUNDS, clock=time.process_time)
    return Seconds(plain_s / _STEPS, ours_s / (_STEPS * models))


@row
@one_thread()
def toy_trainer() -> Row:
    """25 heads of one grid (discrete, d_head 16) at once; CPU seconds of one model-step on either
    side.
    """
    cells = grid("discrete", 16)
    trainer = Trainer(RetrievalStack(cells), 1e-4)
    seconds = _model_steps(plain_loop(cells[12].task, 16), trainer, len(cells))
    return seconds.faster(
        "CPU seconds per model-step: 25 retrieval heads at once, against one nn.Module"
    )


class PlainToy(nn.Module):
    """An autoencoder and a head on its tokens, as the second paper's section 3 has them."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.W = nn.Parameter(toy.W.clone())
        self.b = nn.Parameter(toy.b.clone())
        self.W_Q = nn.Parameter(toy.W_Q.clone())
        self.W_K = nn.Parameter(toy.W_K.clone())
        self.task = toy.task
        self.M = toy.task.target()

    def forward(self, x_q: Tensor, x_k: Tensor) -> Tensor:
        """The loss of a batch of contexts."""
        x = torch.cat([x_q, x_k.flatten(0, 1)])
        error = (torch.relu(x @ self.W.mT @ self.W + self.b) - x).square().mean()
        q = x_q @ self.W.mT @ self.W_Q.mT
        k = x_k @ self.W.mT @ self.W_K.mT
        logits = (k @ q[:, :, None])[..., 0]
        target = (x_k @ (x_q @ self.M)[:, :, None])[..., 0].softmax(dim=-1)
        w_rec, w_att = self.task.loss_weights
        return w_rec * error + w_att * nn.functional.cross_entropy(logits, target)


def plain_toy_loop(cell: ToyCell, seed: int) -> tuple[PlainToy, Callable[[int], None]]:
    """One toy, and a function that trains it for some steps on the tokens of this seed."""
    task = cell.task
    model = PlainToy(cell.untrained())
    optimiser = torch.optim.AdamW(model.parameters(), lr=cell.lr, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    contexts = TOKENS // task.context

    def steps(count: int) -> None:
        for _ in range(count):
            tokens = contexts * (1 + task.context)
            x = task.strengths(torch.rand(tokens, task.n, generator=generator))
            optimiser.zero_grad()
            loss = model(x[:contexts], x[contexts:].view(contexts, task.context, task.n))
            loss.backward()
            optimiser.step()

    return model, steps


@row
@one_thread()
def superposition_trainer() -> Row:
    """20 toys (p and λ differ) at once, each as the plain loop trains it; CPU seconds of one
    model-step.
    """
    cells = []
    for p in (1.0, 0.52, 0.27, 0.14):
        cells += [ToyCell(Superposition(p=p, weight=w)) for w in (1.0, 2.0, 4.0, 8.0, 16.0)]
    trainer = Trainer(SuperpositionStack(cells), 1e-3, seed=5)
    model, plain = plain_toy_loop(cells[7], seed=5)
    seconds = _model_steps(plain, trainer, len(cells))
    errors = []
    for name in ("W", "W_Q"):
        apart = trainer.params[name][7] - getattr(model, name).detach()
        errors.append(float(apart.abs().max()))
    error = max(errors)
    assert error < 1e-3, "both sides must train the same toy"
    return seconds.faster(
        "CPU seconds per model-step: 20 superposition toys at once, against one nn.Module; "
        f"same weights to {error:.0e}"
    )
