"""Heads of payload retrieval, trained by the hundred on shared features, without making K and V.

A batch is latents, payloads and unit noise, the same for every head; only the maps differ. With
rows ``f_k = [z | onehot y | ε]`` and ``f_q = [z* | ε_q]``, and per head ``T_k = [Aᵀ; A_yᵀ; σI]``,
``T_q = [Bᵀ; σI]``::

    scores = (f_q T_q W_Qᵀ)(W_K T_kᵀ) f_kᵀ / √d_head
    logits = (softmax(scores) f_k)(T_k W_Vᵀ W_Oᵀ)

Narrower heads and smaller ranks are zero padding: rows of W_Q and W_K that are both zero have zero
gradients, so a padded head trains exactly as it would alone. Gradients are written out by hand into
buffers that are kept: at these sizes, fresh memory for every intermediate costs more than the
arithmetic. ``torch.func`` takes 1.7 times as long on the same products for 25 heads (CPU seconds,
interleaved; ``qkscope bench --only retrieval_gradients``, 2026-11-19, two CPU cores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.seeds import derived_seed
from qkscope_papers.lee2026.toy.retrieval import (
    VARIANTS,
    WEIGHTS,
    Encoders,
    Retrieval,
    RetrievalHead,
)
from qkscope_papers.trainer import Stack, TrainingTask

# latents are drawn in this many columns, so that a head sees the same data whoever trains beside it
_DRAWN_AT_ONCE = 12


@dataclass(frozen=True)
class HeadCell:
    """One head to train: the task, its width, and the seed of its encoders and starting weights."""

    task: Retrieval
    d_head: int
    seed: int = 0

    @property
    def name(self) -> str:
        """What a person calls it."""
        ranks = ",".join(str(r) for r in self.task.ranks)
        return f"{self.task.variant} ({ranks}) d_head {self.d_head} seed {self.seed}"

    @property
    def slug(self) -> str:
        """A file name."""
        return (
            f"{self.task.variant}-{'-'.join(map(str, self.task.ranks))}-h{self.d_head}-s{self.seed}"
        )

    def untrained(self) -> RetrievalHead:
        """The head before training."""
        return RetrievalHead.untrained(self.task.encoders(self.seed), self.d_head, self.seed)


class ContextBatch(NamedTuple):
    """Shared features of n contexts."""

    f_q: Float[Tensor, "n Fq"]
    f_k: Float[Tensor, "n T F"]
    target: Int[Tensor, " n"]


class RetrievalStack(TrainingTask):
    """Many heads of one variant on the same stream of contexts.

    Parameters
    ----------
    cells : heads to train; they share variant, d, T, P and the number of latent variables, and
        differ in all else.
    batch, validation : sizes of a training batch, and of the fixed validation set as (batches,
        contexts).
    """

    def __init__(
        self,
        cells: Sequence[HeadCell],
        *,
        batch: int = 256,
        validation: tuple[int, int] = (20, 512),
        device: torch.device | str = "cpu",
    ) -> None:
        self.cells = list(cells)
        self.batch = batch
        self.validation = validation
        self.device = torch.device(device)
        self.names = [cell.name for cell in cells]
        first = cells[0].task
        self.variant = first.variant
        self.d = first.d
        self.keys = first.keys
        self.payloads = first.payloads
        self.widths = [max(c.task.ranks[k] for c in cells) for k in range(len(first.ranks))]
        self.d_head = max(c.d_head for c in cells)
        heads = [cell.untrained() for cell in cells]
        self._heads = heads
        self.T_q = torch.stack([self._query_map(h.encoders) for h in heads]).to(self.device)
        self.T_k = torch.stack([self._key_map(h.encoders) for h in heads]).to(self.device)
        self.scale = torch.tensor([h.scale for h in heads], device=self.device)[:, None, None]
        self._buffers = {}
        self._held_out: list[ContextBatch] | None = None

    def _place(self, latents: Float[Tensor, "d R"], ranks: Sequence[int]) -> Float[Tensor, "W d"]:
        """Columns of each variable, padded to the group's widths, as rows."""
        parts = []
        for part, width in zip(latents.split(list(ranks), dim=1), self.widths, strict=True):
            parts.append(torch.nn.functional.pad(part, (0, width - part.shape[1])))
        return torch.cat(parts, dim=1).mT

    def _query_map(self, encoders: Encoders) -> Float[Tensor, "Fq d"]:
        noise = encoders.task.noise * torch.eye(self.d)
        return torch.cat([self._place(encoders.B, encoders.task.ranks), noise])

    def _key_map(self, encoders: Encoders) -> Float[Tensor, "F d"]:
        noise = encoders.task.noise * torch.eye(self.d)
        return torch.cat([self._place(encoders.A, encoders.task.ranks), encoders.A_y.mT, noise])

    # ------------------------------------------------------------------ TrainingTask's contract

    def start(self) -> Stack:
        """Starting weights, zero-padded to one width."""
        h = self.d_head
        sizes = {
            "W_Q": (h, self.d),
            "W_K": (h, self.d),
            "W_V": (h, self.d),
            "W_O": (self.payloads, h),
        }

        def padded(weight: Tensor, rows: int, columns: int) -> Tensor:
            right = columns - weight.shape[1]
            below = rows - weight.shape[0]
            return torch.nn.functional.pad(weight, (0, right, 0, below))

        weights = {}
        for name in WEIGHTS:
            each = [padded(getattr(head, name), *sizes[name]) for head in self._heads]
            weights[name] = torch.stack(each)
        return Stack(weights)

    def about(self) -> dict[str, Any]:
        """Cells, data sizes and encoders."""
        cells = []
        for cell in self.cells:
            task = {**asdict(cell.task), "ranks": list(cell.task.ranks)}
            cells.append({"task": task, "d_head": cell.d_head, "seed": cell.seed})
        return {
            "cells": cells,
            "encoders": [head.encoders.fingerprint() for head in self._heads],
            "batch": self.batch,
            "validation": list(self.validation),
        }

    def select(self, keep: Int[Tensor, " k"]) -> RetrievalStack:
        """Some of the heads, on the same features."""
        other = object.__new__(RetrievalStack)
        other.__dict__.update(self.__dict__)
        chosen = keep.tolist()
        other.cells = [self.cells[i] for i in chosen]
        other._heads = [self._heads[i] for i in chosen]
        other.names = [cell.name for cell in other.cells]
        where = keep.to(self.device)
        other.T_q = self.T_q[where]
        other.T_k = self.T_k[where]
        other.scale = self.scale[where]
        other._buffers = {}
        other._held_out = self._validation_set()
        return other

    def draw(self, generator: torch.Generator, n: int | None = None) -> ContextBatch:
        """Features of fresh contexts."""
        n = n or self.batch
        at_once = -(-max(self.widths) // _DRAWN_AT_ONCE) * _DRAWN_AT_ONCE
        z = self._buffer("z", n, self.keys, len(self.widths), at_once)
        if self.variant == "continuous":
            z.normal_(generator=generator)
        else:
            z.random_(2, generator=generator).mul_(2).sub_(1)
        latents = torch.cat([z[:, :, k, :width] for k, width in enumerate(self.widths)], dim=-1)
        drawn: Any = {"generator": generator, "device": self.device}
        payload = torch.randint(self.payloads, (n, self.keys), **drawn)
        asked = torch.randint(self.keys, (n, 1), **drawn)
        noise_k = self._buffer("noise_k", n, self.keys, self.d).normal_(generator=generator)
        noise_q = self._buffer("noise_q", n, self.d).normal_(generator=generator)
        total = sum(self.widths)
        f_k = self._buffer("f_k", n, self.keys, total + self.payloads + self.d)
        f_k[..., :total] = latents
        f_k[..., total : total + self.payloads] = 0.0
        f_k.scatter_(2, payload[..., None] + total, 1.0)
        f_k[..., total + self.payloads :] = noise_k
        picked = latents.gather(1, asked[..., None].expand(n, 1, total))[:, 0]
        target = payload.gather(1, asked)[:, 0]
        return ContextBatch(torch.cat([picked, noise_q], dim=1), f_k, target)

    def loss(self, params: Mapping[str, Tensor], batch: ContextBatch) -> Float[Tensor, " m"]:
        """Cross-entropy of the asked payload, written for autograd: the gradients by hand are
        tested against it.
        """
        queries = torch.einsum("nf,mfd,mhd->mnh", batch.f_q, self.T_q, params["W_Q"])
        products = torch.einsum("mnh,mhd,mfd,ntf->mnt", queries, params["W_K"], self.T_k, batch.f_k)
        mixed = torch.einsum("mnt,ntf->mnf", (self.scale * products).softmax(dim=-1), batch.f_k)
        logits = torch.einsum("mnf,mfd,mhd,mph->mnp", mixed, self.T_k, params["W_V"], params["W_O"])
        contexts = torch.arange(len(batch.target))
        of_target = logits.log_softmax(dim=-1)[:, contexts, batch.target]
        return -of_target.mean(dim=1)

    def validation_loss(self, params: Mapping[str, Tensor]) -> Float[Tensor, " m"]:
        """Mean loss over the fixed validation set."""
        total = torch.zeros(len(self.cells), device=self.device)
        batches = self._validation_set()
        for batch in batches:
            log_p = self._forward(params, batch)["log_p"]
            total += log_p.gather(1, self._rows(batch)).mean(dim=(1, 2))
        return -total / len(batches)

    def gradients(self, params: Stack, batch: ContextBatch, out: Stack) -> Float[Tensor, " m"]:
        """Losses, and their gradients by hand."""
        weights = params.named()
        into = out.named()
        m = len(self.cells)
        n = len(batch.target)
        d = self.d_head
        at = self._forward(weights, batch)
        rows = self._rows(batch)
        losses = -at["log_p"].gather(1, rows).mean(dim=(1, 2))

        d_logits = torch.exp(at["log_p"], out=self._buffer("d_logits", m, self.payloads, n))
        d_logits.scatter_add_(1, rows, self._buffer("minus_one", m, 1, n).fill_(-1.0)).mul_(1 / n)
        mixed = at["mixed"].transpose(0, 1)  # m n F
        d_out = torch.bmm(d_logits, mixed)  # m P F: of the map from features to logits
        d_mixed = self._buffer("d_mixed", n, m, mixed.shape[2])
        torch.bmm(d_logits.mT, at["out_map"], out=d_mixed.transpose(0, 1))
        d_attention = self._buffer("d_attention", n, m, self.keys)
        torch.bmm(d_mixed, batch.f_k.mT, out=d_attention)
        attention = at["attention"]
        weighted = self._buffer("products", n, m, self.keys)
        torch.mul(d_attention, attention, out=weighted)
        d_attention.sub_(weighted.sum(dim=-1, keepdim=True)).mul_(attention)
        d_scored = self._buffer("d_scored", n, m, mixed.shape[2])
        torch.bmm(d_attention, batch.f_k, out=d_scored)
        d_scored = d_scored.transpose(0, 1)

        d_queries = self._buffer("d_queries", n, m, d)
        torch.bmm(d_scored, at["key_map"].mT, out=d_queries.transpose(0, 1))
        d_key_map = torch.bmm(at["queries"].mT, d_scored)
        d_query_maps = batch.f_q.mT @ d_queries.flatten(1)
        d_query_map = d_query_maps.unflatten(1, (m, d)).transpose(0, 1)  # m Fq h
        torch.bmm(d_query_map.mT, self.T_q, out=into["W_Q"])
        torch.bmm(d_key_map.mul_(self.scale), self.T_k, out=into["W_K"])
        torch.bmm(d_out, at["value_map"].mT, out=into["W_O"])
        torch.bmm(weights["W_O"].mT @ d_out, self.T_k, out=into["W_V"])
        return losses

    # ------------------------------------------------------------------ inside

    def _forward(self, weights: Mapping[str, Tensor], batch: ContextBatch) -> dict[str, Tensor]:
        """Log-probabilities of the payloads (m P n), and what the gradients need."""
        m = len(self.cells)
        n = len(batch.target)
        d = self.d_head
        query_map = torch.bmm(self.T_q, weights["W_Q"].mT)  # m Fq h
        key_map = torch.bmm(weights["W_K"], self.T_k.mT).mul_(self.scale)  # m h F
        value_map = torch.bmm(weights["W_V"], self.T_k.mT)  # m h F
        out_map = torch.bmm(weights["W_O"], value_map)  # m P F
        features = key_map.shape[2]
        queries = self._buffer("queries", n, m * d)
        torch.mm(batch.f_q, query_map.transpose(0, 1).flatten(1), out=queries)
        queries = queries.unflatten(1, (m, d)).transpose(0, 1)  # m n h
        scored = self._buffer("scored", n, m, features)
        torch.bmm(queries, key_map, out=scored.transpose(0, 1))
        products = self._buffer("products", n, m, self.keys)
        attention = self._buffer("attention", n, m, self.keys)
        mixed = self._buffer("mixed", n, m, features)
        logits = self._buffer("logits", m, self.payloads, n)
        log_p = self._buffer("log_p", m, self.payloads, n)
        torch.bmm(scored, batch.f_k.mT, out=products)
        torch.softmax(products, dim=-1, out=attention)
        torch.bmm(attention, batch.f_k, out=mixed)
        torch.bmm(out_map, mixed.permute(1, 2, 0), out=logits)
        torch.log_softmax(logits, dim=1, out=log_p)
        return {
            "queries": queries,
            "key_map": key_map,
            "value_map": value_map,
            "out_map": out_map,
            "attention": attention,
            "mixed": mixed,
            "log_p": log_p,
        }

    def _rows(self, batch: ContextBatch) -> Int[Tensor, "m 1 n"]:
        return batch.target.expand(len(self.cells), 1, -1)

    def _validation_set(self) -> list[ContextBatch]:
        if self._held_out is None:
            seed = derived_seed(self.cells[0].seed, 6, VARIANTS.index(self.variant))
            generator = torch.Generator(device=self.device).manual_seed(seed)
            count, n = self.validation
            drawn = []
            for _ in range(count):
                parts = [part.clone() for part in self.draw(generator, n)]
                drawn.append(ContextBatch(*parts))
            # A GPU takes them all at once; on a CPU small batches stay in the cache.
            if self.device.type == "cuda":
                parts = [torch.cat(each) for each in zip(*drawn, strict=True)]
                drawn = [ContextBatch(*parts)]
            self._held_out = drawn
        return self._held_out

    def heads(self, params: Mapping[str, Tensor]) -> list[RetrievalHead]:
        """Trained weights as heads, without their padding."""
        found = []
        for i, cell in enumerate(self.cells):
            h = cell.d_head
            own = {name: params[name][i].detach().cpu() for name in WEIGHTS}
            head = RetrievalHead(
                own["W_Q"][:h].clone(),
                own["W_K"][:h].clone(),
                own["W_V"][:h].clone(),
                own["W_O"][:, :h].clone(),
                self._heads[i].encoders,
            )
            found.append(head)
        return found
