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
    pairs = by_logit([*task.pairs, *(pair[:3] for pair in task.positional)])
    width = len(basis.s)
    chance = random_best(task.d, width).mean
    query = cosines(toy.W.double()[:, [pair[0] for pair in pairs]], basis.u)
    key = cosines(toy.W.double()[:, [pair[1] for pair in pairs]], basis.v)
    matched = [
        int((query[i] * key[i]).argmax()) if joint else min(i, width - 1) for i in range(len(pairs))
    ]
    norms = toy.W.norm(dim=0)
    return [
        {
            "config": config,
            "seed": seed,
            "step": step,
            "pair": f"{pair[0]}-{pair[1]}",
            "side": side,
            "matched": float(found[i, matched[i]]),
            "best": float(found[i].amax()),
            "best_random": chance,
            "singular_value": float(basis.s[matched[i]]),
            "target_logit": pair[2],
            "feature_norm": float(norms[feature]),
            "control": control,
            "best_index": int(found[i].argmax()),
        }
        for i, pair in enumerate(pairs)
        for side, feature, found in (("query", pair[0], query), ("key", pair[1], key))
    ]


def before_and_after(toys: Mapping[str, Sequence[ToyRun]], *, joint: bool = False) -> list[Row]:
    """Rows of every toy after training, and, as the control, before."""
    rows = []
    for config, found in toys.items():
        for trained in found:
            for check, control in ((-1, False), (0, True)):
                rows += alignment_rows(
                    config,
                    trained.cell.seed,
                    trained.steps[check],
                    trained.at(check),
                    control=control,
                    joint=joint,
                )
    return rows


def divergence_and_error(toy: Toy, contexts: int, seed: int) -> tuple[float, float]:
    """On fresh contexts: KL of the head from its target, and the mean squared error of the
    reconstruction.
    """
    generator = torch.Generator().manual_seed(seed)
    task = toy.task
    uniform = torch.rand(
        contexts, 1 + task.context, task.n, generator=generator, dtype=torch.float64
    )
    x = task.strengths(uniform)
    offsets = None
    if task.rope:
        query = torch.randint(task.context, (contexts, 1), generator=generator)
        offsets = query - torch.arange(task.context)
    target = toy.target_logits(x[:, 0], x[:, 1:], offsets).log_softmax(-1)
    ours = toy.logits(x[:, 0], x[:, 1:], offsets).log_softmax(-1)
    return float((target.exp() * (target - ours)).sum(-1).mean()), float(
        (toy.reconstruct(x) - x).square().mean()
    )
