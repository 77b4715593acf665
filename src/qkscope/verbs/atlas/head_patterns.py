"""Patterns: how every head attends in passages of plain text, and how alike two rows are.

The measure is the overlap of rows over their union, ``Σ min(a, b) / Σ max(a, b)`` (IoU), a mean
over queries from the fifth token on. The first four see too little for a rule to say much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.heads import Head
from qkscope.model.tap import Call, Stop
from qkscope.rerun.rerun_tokens import prompt_of, room_of
from qkscope.texts.holdout import Passage

#: The first query that counts.
BEGUN = 4
_LEAST = 1e-4  # what a rule gives any key at least, where a logarithm is taken


@dataclass(frozen=True)
class Patterns:
    """Attention of some heads in passages; the last token of a short one is repeated.

    Parameters
    ----------
    passages : as they were cut.
    ids : their tokens.
    attention : from each token to each token, by passage and head.
    """

    passages: Sequence[Passage]
    ids: Int[Tensor, "p t"]
    attention: Float[Tensor, "p h t t"]

    @classmethod
    def of(cls, scope: Scope, heads: Sequence[Head], passages: Sequence[Passage]) -> Patterns:
        """Run passages, as many together as there is room for."""
        ids = passage_ids(passages)
        length = ids.shape[1]
        patterns = torch.zeros(len(ids), len(heads), length, length)
        layers = {head.layer for head in heads}
        for some in torch.arange(len(ids)).split(max(room_of(scope) // length, 1)):

            def visit(call: Call, some: Tensor = some) -> None:
                of_layer = [h for h, head in enumerate(heads) if head.layer == call.layer]
                weights = call.attention([heads[h].index for h in of_layer])
                patterns[some[:, None], torch.tensor(of_layer)] = weights.float().cpu()
                if call.layer == max(layers):
                    raise Stop

            scope.watch(prompt_of(scope, ids[some]), visit, only=layers)
        if bool((patterns.triu(1) > 0).any()):
            raise BadInput(
                f"{scope.name} looks at tokens that follow as well, and the rules of an atlas are of "
                "heads that look back: take a decoder."
            )
        return cls(passages, ids, patterns)

    def of_heads(self, numbers: Sequence[int]) -> Patterns:
        """The patterns of some of the heads."""
        return Patterns(self.passages, self.ids, self.attention[:, list(numbers)])

    def some(self, start: int, step: int) -> Patterns:
        """Every so many passages, from a number on."""
        which = slice(start, None, step)
        return Patterns(self.passages[which], self.ids[which], self.attention[which].contiguous())

    @cached_property
    def counted(self) -> Bool[Tensor, "p t"]:
        """Queries that count: from the fifth token to the passage's end."""
        lengths = torch.tensor([len(passage.ids) for passage in self.passages])
        places = torch.arange(self.ids.shape[1])
        return (places >= BEGUN) & (places < lengths[:, None])

    @cached_property
    def groups(self) -> Int[Tensor, " r"]:
        """The group of documents that each counted query is of."""
        groups = torch.tensor([passage.group for passage in self.passages])
        return groups[self.counted.nonzero()[:, 0]]

    def of_head(self, h: int) -> Float[Tensor, "r t"]:
        """All counted rows of a head."""
        return self.attention[:, h][self.counted]

    def rows(self, pattern: Float[Tensor, "p t t"]) -> Float[Tensor, "r t"]:
        """The counted rows of any pattern of these passages."""
        return pattern[self.counted]

    def mean(self, h: int) -> Float[Tensor, "t t"]:
        """A head's mean pattern, each row over the passages that reach so far."""
        lengths = torch.tensor([len(passage.ids) for passage in self.passages])
        there = (torch.arange(self.ids.shape[1]) < lengths[:, None]).float()
        total = torch.einsum("pqk,pq->qk", self.attention[:, h], there)
        return total / there.sum(0)[:, None].clamp(min=1)


def passage_ids(passages: Sequence[Passage]) -> Int[Tensor, "p t"]:
    """The ids of passages, the last token of a short one repeated: what follows is not seen."""
    length = max(len(passage.ids) for passage in passages)
    rows = [[*x.ids, *x.ids[-1:] * (length - len(x.ids))] for x in passages]
    return torch.tensor(rows)


def row_overlap(rows: Float[Tensor, "r t"], others: Float[Tensor, "r t"]) -> Float[Tensor, " r"]:
    """IoU of rows that sum to 1.

    >>> row_overlap(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]))
    tensor([0.3333])
    """
    common = torch.minimum(rows, others).sum(-1)
    return common / (rows.sum(-1) + others.sum(-1) - common)


def log_loss(says: Float[Tensor, "r t"], rows: Float[Tensor, "r t"]) -> Float[Tensor, " r"]:
    """Cross-entropy of rows under what a rule says, in nats; no key has less than 1e-4 there."""
    return -(rows * (says + _LEAST).log()).sum(-1)
