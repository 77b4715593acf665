"""What is read of changed prompts: rows of attention and next-token logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.changes import Change, Inserted, Words
from qkscope.heads import Head

Read = tuple[Head, int]
"""A head and a query: a row of attention that is read."""


@dataclass(frozen=True)
class Reruns:
    """What changed prompts show.

    Attributes
    ----------
    attention : by prompt, the rows that were asked for; where a row's query did not run, the row of
        the unchanged prompt.
    logits : of the next token, where they were asked for.
    likelihood : by place that ran, the log-probability of the token behind it, where it was asked
        for; 0 at places that did not run.
    """

    attention: Float[Tensor, "b n t"]
    logits: Float[Tensor, "b v"] | None
    likelihood: Float[Tensor, "b t"] | None = None


@dataclass(frozen=True)
class LayerReads:
    """The rows of one layer that are read: their numbers among all, their heads and queries."""

    numbers: list[int]
    heads: list[int]
    queries: Int[Tensor, " u"]


def layer_reads(reads: Sequence[Read]) -> dict[int, LayerReads]:
    """Group rows that are read by their layer."""
    layers = dict[int, LayerReads]()
    for layer in sorted({head.layer for head, _ in reads}):
        numbers = [number for number, (head, _) in enumerate(reads) if head.layer == layer]
        heads = [reads[number][0].index for number in numbers]
        queries = torch.tensor([reads[number][1] for number in numbers])
        layers[layer] = LayerReads(numbers, heads, queries)
    return layers


def with_words(ids: Int[Tensor, " t"], changes: Sequence[Change]) -> Int[Tensor, " t"]:
    """Put the words of some changes into a prompt."""
    for change in changes:
        if isinstance(change, Words | Inserted):
            ids = change.applied(ids)
    return ids
