"""Rules that say which key a query should attend to, and how often a head keeps them.

A rule's *coverage* is how often it applies: the share of queries that have such a key in sight. Its *precision* is how
often, then, the most attended key (the first token aside) is one; *chance* is the same for a key drawn by lot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkscope.analyses.names.readings import copies, shifted

ITSELF, BEFORE, COPY, AFTER_COPY, SAME_BEFORE = "itself", "the token before", "a copy", "after a copy", "same before"


def _distance(back: int) -> Callable[[Tensor], Tensor]:
    def at(ids: Int[Tensor, "b t"]) -> Bool[Tensor, "b t s"]:
        places = torch.arange(ids.shape[1], device=ids.device)
        return (places[:, None] - places == back).expand(len(ids), -1, -1)

    return at


def _after_copy(ids: Int[Tensor, "b t"]) -> Bool[Tensor, "b t s"]:
    """Keys that stand right after a token equal to the asking one."""
    return (ids[:, :, None] == shifted(ids, 1)[:, None, :]).tril()


def _same_before(ids: Int[Tensor, "b t"]) -> Bool[Tensor, "b t s"]:
    before = shifted(ids, 1)
    return (before[:, :, None] == before[:, None, :]).tril(-1)


RULES: dict[str, Callable[[Int[Tensor, "b t"]], Bool[Tensor, "b t s"]]] = {
    ITSELF: _distance(0),
    BEFORE: _distance(1),
    "2 back": _distance(2),
    "3 back": _distance(3),
    "4 back": _distance(4),
    COPY: copies,
    AFTER_COPY: _after_copy,
    SAME_BEFORE: _same_before,
}
"""Rules by name, each as a table of queries and keys."""


def holds(ids: Int[Tensor, "b t"]) -> Bool[Tensor, "b t s r"]:
    """Which keys each rule names to each query."""
    return torch.stack([rule(ids) for rule in RULES.values()], dim=-1)
