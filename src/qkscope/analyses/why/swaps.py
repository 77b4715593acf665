"""The strongest writers' parts exchanged between the key and another token: does the attention follow them?

Parts change places before the rotation, so that content moves and position stays. As many random writers of the same
layers stand beside it; where they move as much, or where all writers are exchanged, the swap shows nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.one import ATTENDED, PromptTrace
from qkscope.analyses.trace.rows import addresses_of
from qkscope.draws import derived_seed
from qkscope.maths.writers import draw_alike


def other_token(one: PromptTrace) -> int | None:
    """The token to exchange with: of those in sight, the one that the head attends to most after the key."""
    free = [i for i in one.others if i not in (one.key, one.asked.query)]
    return max(free, key=lambda i: float(one.attention[i])) if free else None


def swap_row(one: PromptTrace, other: int, size: int = 2, draws: int = 20, seed: int = 0) -> dict[str, Any]:
    """A row of the table ``swaps``: attention on both tokens before and after, beside random writers."""
    chosen, layers = one.strongest("key", size), addresses_of(one.writers)
    here, there = one.key_parts([one.key, other])
    away = there - here
    before, after = one.attention, swapped(one, other, away[chosen].sum(0))
    alike = [draw_alike(chosen, layers, derived_seed(seed, "swap", draw)) for draw in range(draws)]
    beside = torch.stack([swapped(one, other, away[drawn].sum(0))[other] for drawn in alike])
    gained, random = float(after[other] - before[other]), float((beside - before[other]).max())
    total = float(before[one.key] + before[other])
    verdict = "supported" if gained > max(random, 0.25 * total) else "not here"
    if float(before[one.key]) < ATTENDED:
        verdict = "unattended"
    elif len(chosen) >= len(layers):
        verdict = "vacuous"
    return {
        "head": str(one.head), "writers": ", ".join(one.writers[i] for i in chosen), "key": one.key, "other": other,
        "other_token": one.asked.tokens[other],
        "key_before": float(before[one.key]), "key_after": float(after[one.key]),
        "other_before": float(before[other]), "other_after": float(after[other]), "random": float(beside.mean()),
        "random_high": float(beside.max()), "draws": draws, "verdict": verdict,
    }  # fmt: skip


def swapped(one: PromptTrace, other: int, moved: Float[Tensor, " d"]) -> Float[Tensor, " t"]:
    """The attention row with a vector added to the key and taken from the other token's."""
    return one.with_keys({one.key: moved, other: -moved})
