"""Many toys of superposition at once: n × n matrices per model, tokens never materialised.

A batch is one table of uniform numbers, the same for every model of a stack; strengths ``x = relu(1
− u/p)`` differ by p. With ``P = WᵀW`` and ``H = Wᵀ Ω W`` a model is two n × n matrices, ``x̂ =
relu(P x + b)`` and ``ℓ = x_qᵀ H x_k``, so

    ∂L/∂W = W (D_P + D_Pᵀ) + Ω W D_Hᵀ + Ωᵀ W D_H        ∂L/∂Ω = W D_H Wᵀ

with ``D_P = ∂L/∂P``, ``D_H = ∂L/∂H``: two products over the tokens for the autoencoder, and little
for the head. A narrower head is zero padding, which stays zero. Models go through the data a few at
a time, so that what they touch stays in the cache. Heads that rotate (RoPE) have no single H; they
are differentiated by autograd.

By hand, as ``torch.func`` takes 2.6 times as long on the same products for 20 toys (CPU seconds,
interleaved; ``qkscope bench --only superposition_gradients``, 2026-11-19, two CPU cores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.seeds import derived_seed
from qkscope_papers.franco2026.toy.superposition import (
    Superposition,
    Toy,
    band_frequencies,
    rotated_logits,
)
from qkscope_papers.trainer import Recipe, Schedule, Stack, TrainingTask

TOKENS = 1024  # keys of a batch, in contexts of one query each
_MODELS_AT_ONCE = 8  # on a CPU: 0.1 MB for each table of tokens


@dataclass(frozen=True)
class ToyCell:
    """One toy to train: its setting, the seed of its start and its data, and how long."""

    task: Superposition
    seed: int = 0
    steps: int = 20_000
    lr: float = 1e-3
    schedule: Schedule = "cosine"
    every: int = 200  # steps between the checkpoints that are kept

    @property
    def name(self) -> str:
        """What a person calls it."""
        t = self.task
        kind = ("frozen " if t.dictionary else "") + ("RoPE " if t.rope else "")
        return (
            f"{kind}n {t.n} d {t.d} d_head {t.d_head} context {t.context} p {t.p:.3g} λ "
            f"{t.weight:.3g} {t.reading} {len(t.pairs) + len(t.positional)} pairs seed "
            f"{self.seed}"
        )

    def untrained(self) -> Toy:
        """The toy before training."""
        return Toy.untrained(self.task, self.seed)

    def recipe(self) -> Recipe:
        """To the last step: losses creep, and nothing says when alignment is done."""
        return Recipe(self.steps, self.every, patience=self.steps + 1, schedule=self.schedule)

    def stack_key(self) -> tuple[Any, ...]:
        """Cells with the same key can share a stack."""
        t = self.task
        width = t.d_head if t.rope else 0
        return (
            t.n,
            t.d,
            t.context,
            t.rope,
            width,
            t.dictionary is not None,
            self.steps,
            self.every,
            self.schedule,
            self.seed,
        )


class TokenBatch(NamedTuple):
    """Uniform numbers of B queries and, after them, of their B·T keys; offsets of the keys from
    their query.
    """

    uniform: Float[Tensor, "N n"]
    offsets: Int[Tensor, "B T"] | None


class SuperpositionStack(TrainingTask):
    """Many toys of one shape on the same stream of tokens; they differ in p, λ, pairs, reading and
    width of head.

    Parameters
    ----------
    cells : toys to train, all with the same `ToyCell.stack_key`.
    tokens, validation : keys of a training batch and of the fixed validation set.
    """

    def __init__(
        self,
        cells: Sequence[ToyCell],
        *,
        tokens: int = TOKENS,
        validation: int = 4096,
        device: torch.device | str = "cpu",
    ) -> None:
        self.cells = list(cells)
        self.tokens = tokens
        self.validation = validation
        self.device = torch.device(device)
        self.names = [cell.name for cell in cells]
        first = cells[0].task
        self.n = first.n
        self.d = first.d
        self.context = first.context
        self.rope = first.rope
        self.frozen = first.dictionary is not None
        self.d_head = max(cell.task.d_head for cell in cells)
        self._held_out: TokenBatch | None = None
        self._constants()

    def _constants(self) -> None:
        """What differs between the models, as tensors."""
        tasks = [cell.task for cell in self.cells]

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=self.device)[:, None, None]

        self.inverse_p = column([-1 / task.p for task in tasks])
        self.scale = column([task.scale for task in tasks])
        self.w_rec = column([task.loss_weights[0] for task in tasks])
        self.w_att = column([task.loss_weights[1] for task in tasks])
        self.M = torch.stack([task.target() for task in tasks]).to(self.device)
        dictionaries = torch.stack([cell.untrained().W for cell in self.cells])
        self.dictionary = dictionaries.float().to(self.device)
        self.frequencies = band_frequencies(self.d_head).float().to(self.device)
        rows = [(i, *pair) for i, task in enumerate(tasks) for pair in task.positional]
        bands = band_frequencies(self.d_head).tolist()
        self.positional = [(i, q, k, strength, bands[band]) for i, q, k, strength, band in rows]
        self._buffers = {}

    # ------------------------------------------------------------------ TrainingTask's contract

    def start(self) -> Stack:
        """Starting weights; heads zero-padded to one width; a frozen dictionary is none of them."""
        toys = [cell.untrained() for cell in self.cells]

        def padded(weight: Tensor) -> Tensor:
            return torch.nn.functional.pad(weight, (0, 0, 0, self.d_head - len(weight)))

        head = {
            "W_Q": torch.stack([padded(toy.W_Q) for toy in toys]),
            "W_K": torch.stack([padded(toy.W_K) for toy in toys]),
        }
        if self.frozen:
            return Stack(head)
        features = torch.stack([toy.W for toy in toys])
        biases = torch.stack([toy.b for toy in toys])
        return Stack({"W": features, "b": biases, **head})

    def about(self) -> dict[str, Any]:
        """Cells and sizes."""
        return {
            "cells": [{"task": cell.task.to_json(), "seed": cell.seed} for cell in self.cells],
            "tokens": self.tokens,
            "validation": self.validation,
        }

    def select(self, keep: Int[Tensor, " k"]) -> SuperpositionStack:
        """Some of the toys, on the same tokens."""
        other = object.__new__(SuperpositionStack)
        other.__dict__.update(self.__dict__)
        other.cells = [self.cells[i] for i in keep.tolist()]
        other.names = [cell.name for cell in other.cells]
        other._held_out = self._validation_set()
        other._constants()
        return other

    def draw(self, generator: torch.Generator, tokens: int | None = None) -> TokenBatch:
        """Fresh contexts: uniform numbers for every feature of every token, and positions if heads
        rotate.
        """
        contexts = max((tokens or self.tokens) // self.context, 1)
        uniform = self._buffer("uniform", contexts * (1 + self.context), self.n)
        uniform.uniform_(generator=generator)
        if not self.rope:
            return TokenBatch(uniform, None)
        # keys stand at positions 0 … T−1, the query anywhere among them
        query = torch.randint(self.context, (contexts, 1), generator=generator, device=self.device)
        return TokenBatch(uniform, query - torch.arange(self.context, device=self.device))

    def loss(self, params: Mapping[str, Tensor], batch: TokenBatch) -> Float[Tensor, " m"]:
        """The loss as the paper has it, written for autograd: the gradients by hand are tested
        against it.
        """
        W = self.dictionary if self.frozen else params["W"]
        x = (1 + batch.uniform * self.inverse_p).relu()
        t = x @ W.mT
        contexts = self._contexts(batch)
        x_q = x[:, :contexts]
        x_k = x[:, contexts:].unflatten(1, (contexts, self.context))
        q = t[:, :contexts] @ params["W_Q"].mT
        k = (t[:, contexts:] @ params["W_K"].mT).unflatten(1, (contexts, self.context))
        target = ((x_q @ self.M)[:, :, None] * x_k).sum(-1)
        if batch.offsets is None:
            logits = (q[:, :, None] * k).sum(-1)
        else:
            logits = rotated_logits(q, k, batch.offsets, self.frequencies)
            target = target + self._positional_targets(x_q, x_k, batch.offsets)
        logits = self.scale * logits
        divergence = -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(-1)
        losses = self.w_att[:, 0, 0] * divergence
        if not self.frozen:
            error = (t @ W + params["b"][:, None]).relu() - x
            losses = losses + self.w_rec[:, 0, 0] * error.square().mean(dim=(1, 2))
        return losses

    def validation_loss(self, params: Mapping[str, Tensor]) -> Float[Tensor, " m"]:
        """Loss on tokens that do not change."""
        with torch.no_grad():
            return self.loss(params, self._validation_set())

    def gradients(self, params: Stack, batch: TokenBatch, out: Stack) -> Float[Tensor, " m"]:
        """Losses, and their gradients by hand (by autograd where heads rotate)."""
        if self.rope:
            return super().gradients(params, batch, out)
        weights = params.named()
        into = out.named()
        W = self.dictionary if self.frozen else weights["W"]
        omega = torch.bmm(weights["W_Q"].mT, weights["W_K"]).mul_(self.scale)
        omega_W = torch.bmm(omega, W)
        H = torch.bmm(W.mT, omega_W)
        P = torch.bmm(W.mT, W)
        d_H = torch.empty_like(H)
        d_P = torch.empty_like(P)
        losses = H.new_zeros(len(self.cells))
        at_once = len(self.cells) if self.device.type == "cuda" else _MODELS_AT_ONCE
        for start in range(0, len(self.cells), at_once):
            rows = slice(start, start + at_once)
            x = self._like("x", rows, batch.uniform)
            torch.mul(batch.uniform, self.inverse_p[rows], out=x)
            x.add_(1).clamp_min_(0)
            if not self.frozen:
                b = weights["b"][rows]
                d_b = into["b"][rows]
                losses[rows] += self._reconstruction(x, P[rows], b, rows, d_P[rows], d_b)
            losses[rows] += self._attention(x, H[rows], rows, self._contexts(batch), d_H[rows])
        W_d_H = torch.bmm(W, d_H)
        d_omega = torch.bmm(W_d_H, W.mT).mul_(self.scale)
        torch.bmm(weights["W_K"], d_omega.mT, out=into["W_Q"])
        torch.bmm(weights["W_Q"], d_omega, out=into["W_K"])
        if not self.frozen:
            torch.bmm(W, d_P + d_P.mT, out=into["W"])
            into["W"].add_(torch.bmm(omega_W, d_H.mT)).add_(torch.bmm(omega.mT, W_d_H))
        return losses

    # ------------------------------------------------------------------ inside

    def _reconstruction(
        self, x: Tensor, P: Tensor, b: Tensor, rows: slice, d_P: Tensor, d_b: Tensor
    ) -> Tensor:
        """λ · mean squared error; gradients go into d_P and d_b."""
        read = self._like("read", rows, x[0])
        torch.baddbmm(b[:, None], x, P, out=read).clamp_min_(0)
        error = self._like("error", rows, x[0])
        torch.sub(read, x, out=error)
        flat = error.flatten(1)
        losses = torch.linalg.vecdot(flat, flat).mul_(self.w_rec[rows, 0, 0] / flat.shape[1])
        through = self._like("through", rows, x[0])
        torch.ops.aten.threshold_backward.grad_input(error, read, 0, grad_input=through)
        factor = self.w_rec[rows] * (2 / flat.shape[1])
        torch.bmm(x.mT, through, out=d_P).mul_(factor)
        column_sums = torch.bmm(self._ones(x), through)[:, 0]
        d_b.copy_(column_sums).mul_(factor[:, 0])
        return losses

    def _attention(self, x: Tensor, H: Tensor, rows: slice, contexts: int, d_H: Tensor) -> Tensor:
        """λ · cross-entropy of both softmaxes; the gradient goes into d_H."""
        m = len(x)
        n = self.n
        T = self.context
        x_q = x[:, :contexts]
        x_k = x[:, contexts:].unflatten(1, (contexts, T))
        asked = torch.bmm(x_q, torch.cat([H, self.M[rows]], dim=2)).view(m * contexts, 2, n)
        both = torch.bmm(x_k.reshape(m * contexts, T, n), asked.mT).view(m, contexts, T, 2)
        log_p = both[..., 0].log_softmax(-1)
        target = both[..., 1].softmax(-1)
        losses = torch.linalg.vecdot(target.flatten(1), log_p.flatten(1))
        losses.mul_(self.w_att[rows, 0, 0] / -contexts)
        d_logits = log_p.exp_().sub_(target)
        pulled = (d_logits[..., None] * x_k).sum(2)
        torch.bmm(x_q.mT, pulled, out=d_H).mul_(self.w_att[rows] / contexts)
        return losses

    def _positional_targets(self, x_q: Tensor, x_k: Tensor, offsets: Tensor) -> Tensor:
        terms = torch.zeros_like(x_k[..., 0])
        for i, query, key, strength, frequency in self.positional:
            turn = torch.cos(frequency * offsets)
            terms[i] += strength * x_q[i, :, None, query] * x_k[i, :, :, key] * turn
        return terms

    def _contexts(self, batch: TokenBatch) -> int:
        return len(batch.uniform) // (1 + self.context)

    def _validation_set(self) -> TokenBatch:
        if self._held_out is None:
            seed = derived_seed(self.cells[0].seed, 23)
            generator = torch.Generator(device=self.device).manual_seed(seed)
            batch = self.draw(generator, self.validation)
            self._held_out = TokenBatch(batch.uniform.clone(), batch.offsets)
        return self._held_out

    def _ones(self, x: Tensor) -> Tensor:
        key = ("ones", (len(x), 1, x.shape[1]))
        if key not in self._buffers:
            self._buffers[key] = torch.ones(key[1], device=self.device)
        return self._buffers[key]

    def _like(self, name: str, rows: slice, table: Tensor) -> Tensor:
        return self._buffer(name, len(self.cells[rows]), *table.shape)

    def toys(self, params: Mapping[str, Tensor]) -> list[Toy]:
        """Trained weights as toys, without their padding."""
        found = []
        for i, cell in enumerate(self.cells):
            own = {name: value[i].detach().cpu().clone() for name, value in params.items()}
            start = cell.untrained()
            W = own.get("W", start.W)
            b = own.get("b", start.b)
            W_Q = own["W_Q"][: cell.task.d_head]
            W_K = own["W_K"][: cell.task.d_head]
            found.append(Toy(W, b, W_Q, W_K, cell.task))
        return found
