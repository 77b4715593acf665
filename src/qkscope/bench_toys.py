"""Bench rows on the toys: model-steps of many heads trained at once, against the plain loop that trains one.

The plain loop is what one would write first, and not badly: an ``nn.Module``, fresh batches drawn as tensors, autograd,
``torch.optim.AdamW``. Both sides draw new data in every step and run on one core; seconds are CPU seconds, so that a
busy machine slows neither.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkscope.bench import Row, faster, row
from qkscope.toys.retrieval import Retrieval
from qkscope.toys.retrieval_heads import grid
from qkscope.toys.retrieval_training import StackedRetrieval
from qkscope.toys.trainer import Trainer

_STEPS, _ROUNDS, _BATCH = 20, 7, 256


class PlainHead(nn.Module):
    """One attention head with a readout, as the paper's section 2.2 has it."""

    def __init__(self, task: Retrieval, d_head: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(task.d, d_head, bias=False) for _ in range(3))
        self.out = nn.Linear(d_head, task.payloads, bias=False)
        self.scale = 1 / math.sqrt(d_head)

    def forward(self, x_q: Tensor, x_k: Tensor) -> Tensor:
        """Logits of the payload."""
        scores = (self.key(x_k) @ self.query(x_q)[..., None])[..., 0] * self.scale
        return self.out((scores.softmax(dim=-1)[:, None] @ self.value(x_k))[:, 0])


def plain_loop(task: Retrieval, d_head: int, seed: int = 0) -> Callable[[int], None]:
    """A function that trains one head for some steps."""
    encoders, model = task.encoders(seed), PlainHead(task, d_head)
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


@row
def toy_trainer() -> Row:
    """25 heads of one grid (discrete, d_head 16) at once; CPU seconds of one model-step on either side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cells = grid("discrete", 16)
        trainer = Trainer(StackedRetrieval(cells), 1e-4)
        plain = plain_loop(cells[12].task, 16)

        def ours(count: int) -> None:
            for _ in range(count):
                trainer.train_step()

        seconds: dict[str, list[float]] = {"plain": [], "ours": []}
        for turn in range(_ROUNDS + 1):
            for name, call, models in (("plain", plain, 1), ("ours", ours, len(cells))):
                start = time.process_time()
                call(_STEPS)
                if turn:  # the first round warms up
                    seconds[name].append((time.process_time() - start) / (_STEPS * models))
    finally:
        torch.set_num_threads(before)
    plain_s, ours_s = (statistics.median(seconds[name]) for name in ("plain", "ours"))
    return faster(plain_s, ours_s, "CPU seconds per model-step: 25 retrieval heads at once, against one nn.Module")
