"""A toy in numbers: the rows of ``tables.alignment``, and how well it attends and reconstructs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qkscope_papers.franco2026.toy.alignment import cosines, random_best
from qkscope_papers.franco2026.toy.superposition import Toy, by_logit
from qkscope_papers.franco2026.toy.trained import ToyRun
from qkscope_papers.tables import Row


def alignment_rows(
    config: str, seed: int, step: int, toy: Toy, *, control: bool = False, joint: bool = False
) -> list[Row]:
    """Cosines of every feature of interest with the singular vector it should map to, and with the
    best one.

    Pairs map to singular vectors in the order of their target logits; those beyond the head's width
    to its last one. ``joint`` instead takes for each pair the vector on which both its features
    agree best (for heads that rotate, where singular values do not follow the targets).
    """
    basis = toy.basis()
    task = toy.task
    W = toy.W.double()
    pairs = by_logit([*task.pairs, *(pair[:3] for pair in task.positional)])
    width = len(basis.s)
    chance = random_best(task.d, width).mean
    query_cosines = cosines(W[:, [query for query, _, _ in pairs]], basis.u)
    key_cosines = cosines(W[:, [key for _, key, _ in pairs]], basis.v)
    norms = toy.W.norm(dim=0)
    rows = []
    for i, (query, key, logit) in enumerate(pairs):
        matched = min(i, width - 1)
        if joint:
            matched = int((query_cosines[i] * key_cosines[i]).argmax())
        sides = (("query", query, query_cosines[i]), ("key", key, key_cosines[i]))
        for side, feature, found in sides:
            rows.append(
                {
                    "config": config,
                    "seed": seed,
                    "step": step,
                    "pair": f"{query}-{key}",
                    "side": side,
                    "matched": float(found[matched]),
                    "best": float(found.amax()),
                    "best_random": chance,
                    "singular_value": float(basis.s[matched]),
                    "target_logit": logit,
                    "feature_norm": float(norms[feature]),
                    "control": control,
                    "best_index": int(found.argmax()),
                }
            )
    return rows


def before_and_after(toys: Mapping[str, Sequence[ToyRun]], *, joint: bool = False) -> list[Row]:
    """Rows of every toy after training, and, as the control, before."""
    rows = []
    for config, found in toys.items():
        for trained in found:
            seed = trained.cell.seed
            for check, control in ((-1, False), (0, True)):
                toy = trained.at(check)
                step = trained.steps[check]
                rows += alignment_rows(config, seed, step, toy, control=control, joint=joint)
    return rows


def divergence_and_error(toy: Toy, contexts: int, seed: int) -> tuple[float, float]:
    """On fresh contexts: KL of the head from its target, and the mean squared error of the
    reconstruction.
    """
    generator = torch.Generator().manual_seed(seed)
    task = toy.task
    shape = (contexts, 1 + task.context, task.n)
    x = task.strengths(torch.rand(shape, generator=generator, dtype=torch.float64))
    offsets = None
    if task.rope:
        query = torch.randint(task.context, (contexts, 1), generator=generator)
        offsets = query - torch.arange(task.context)
    target = toy.target_logits(x[:, 0], x[:, 1:], offsets).log_softmax(-1)
    ours = toy.logits(x[:, 0], x[:, 1:], offsets).log_softmax(-1)
    divergence = (target.exp() * (target - ours)).sum(-1).mean()
    error = (toy.reconstruct(x) - x).square().mean()
    return float(divergence), float(error)
