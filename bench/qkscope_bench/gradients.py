"""Bench rows on the toys' gradients: written by hand, against ``torch.func`` on the same products.

``torch.func`` is given the losses in the form that the gradients by hand go through: features and
tokens are multiplied as the stacks multiply them, so that what differs is who derives, and that
memory is fresh. (On ``loss`` of the stacks, which is written to be read, it is slower still.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope_bench.harness import Row, compare, row
from qkscope_papers.fleet import one_thread
from qkscope_papers.franco2026.toy.stack import SuperpositionStack, TokenBatch, ToyCell
from qkscope_papers.franco2026.toy.superposition import Superposition
from qkscope_papers.lee2026.toy.stack import ContextBatch, RetrievalStack
from qkscope_papers.lee2026.toy.trained import grid
from qkscope_papers.trainer import TrainingTask

_ROUNDS = 15
_CALLS = 10  # of each side in a round
_SAME = 1e-5  # of the largest gradient

Loss = Callable[[Mapping[str, Tensor]], Tensor]


@row
@one_thread()
def retrieval_gradients() -> Row:
    """Gradients of 25 retrieval heads of one grid (discrete, d_head 16) on one batch."""
    task = RetrievalStack(grid("discrete", 16))
    batch = task.draw(torch.Generator().manual_seed(0))
    return _against_func(task, batch, lambda weights: retrieval_loss(task, weights, batch).sum())


@row
@one_thread()
def superposition_gradients() -> Row:
    """Gradients of 20 superposition toys (p and λ differ) on one batch."""
    cells = []
    for p in (1.0, 0.52, 0.27, 0.14):
        cells += [ToyCell(Superposition(p=p, weight=w)) for w in (1.0, 2.0, 4.0, 8.0, 16.0)]
    task = SuperpositionStack(cells)
    batch = task.draw(torch.Generator().manual_seed(0))
    return _against_func(task, batch, lambda weights: toy_loss(task, weights, batch).sum())


def _against_func(task: TrainingTask, batch: Any, loss: Loss) -> Row:
    """CPU seconds of one call of either side, and how far their gradients are apart."""
    params = task.start()
    by_hand = params.like(torch.zeros_like(params.flat))
    by_func = params.like(torch.zeros_like(params.flat))
    derive = torch.func.grad_and_value(loss)

    def hand() -> None:
        for _ in range(_CALLS):
            task.gradients(params, batch, by_hand)

    def func() -> None:
        for _ in range(_CALLS):
            gradients, _ = derive(params.named())
            for name, into in by_func.named().items():
                into.copy_(gradients[name])

    seconds = compare(func, hand, _ROUNDS, clock=time.process_time)
    error = float((by_hand.flat - by_func.flat).abs().max() / by_func.flat.abs().max())
    assert error < _SAME, "both sides must derive the same loss"
    per_call = type(seconds)(seconds.plain / _CALLS, seconds.ours / _CALLS)
    return per_call.faster(
        f"CPU seconds of a batch's gradients: by hand, against torch.func on the same products; "
        f"apart by {error:.0e} of the largest"
    )


def retrieval_loss(
    task: RetrievalStack, weights: Mapping[str, Tensor], batch: ContextBatch
) -> Float[Tensor, " m"]:
    """`RetrievalStack.loss` through maps of the shared features; K and V are never made."""
    query_map = task.T_q @ weights["W_Q"].mT  # m Fq h
    key_map = (weights["W_K"] @ task.T_k.mT) * task.scale  # m h F
    out_map = weights["W_O"] @ (weights["W_V"] @ task.T_k.mT)  # m P F
    queries = batch.f_q @ query_map
    scored = torch.bmm(queries, key_map).transpose(0, 1)  # n m F
    attention = torch.bmm(scored, batch.f_k.mT).softmax(-1)  # n m T
    mixed = torch.bmm(attention, batch.f_k)
    logits = torch.bmm(out_map, mixed.permute(1, 2, 0))  # m P n
    log_p = logits.log_softmax(1)
    asked = batch.target.expand(len(log_p), 1, -1)
    return -log_p.gather(1, asked).mean((1, 2))


def toy_loss(
    task: SuperpositionStack, weights: Mapping[str, Tensor], batch: TokenBatch
) -> Float[Tensor, " m"]:
    """`SuperpositionStack.loss` through n × n matrices; tokens are never made."""
    W = weights["W"]
    omega = (weights["W_Q"].mT @ weights["W_K"]) * task.scale
    H = W.mT @ omega @ W
    x = (1 + batch.uniform * task.inverse_p).relu()
    contexts = len(batch.uniform) // (1 + task.context)
    x_q = x[:, :contexts]
    x_k = x[:, contexts:].unflatten(1, (contexts, task.context))
    asked = torch.bmm(x_q, torch.cat([H, task.M], dim=2)).unflatten(2, (2, task.n))
    both = torch.einsum("mctn,mcan->mcta", x_k, asked)
    log_p = both[..., 0].log_softmax(-1)
    target = both[..., 1].softmax(-1)
    attention = -(target * log_p).sum(-1).mean(-1)
    read = torch.baddbmm(weights["b"][:, None], x, W.mT @ W).relu()
    error = (read - x).square().mean((1, 2))
    return task.w_att[:, 0, 0] * attention + task.w_rec[:, 0, 0] * error
