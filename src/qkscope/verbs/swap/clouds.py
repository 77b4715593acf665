"""Keys and queries as points one can turn: three principal components of a feature's subspace, with
what to colour by.

Prompts are those of the causal test, which nothing was fitted on. Queries are projected on the
feature's query basis, keys on its key basis; as many queries as keys go into the components, so
that these are not the keys' alone.

A point is a row ``cloud, side, x, y, z`` and its labels, a column for each way to colour it: a
text, or a number where labels have an order; None where it has none of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import Example, Head, Subspace
from qkscope.results.result import Rows
from qkscope.sums.swap_algebra import SwapRows

_PROMPTS = 48
_WORDS = 8  # more colours cannot be told apart
_COMPONENTS = 3
_CLOUDS = 4  # more are not looked at


def make_clouds(
    swaps: SwapRows,
    examples: Sequence[Example],
    subspaces: Mapping[tuple[str, Head], Subspace],
    words: Sequence[str],
) -> Rows:
    """Points of the first heads' features.

    Parameters
    ----------
    swaps : rows of held-out prompts, with the right key of each.
    examples : the example of each row.
    subspaces : features by name and head.
    words : the vocabulary that keys are told apart by.
    """
    n = min(len(swaps.orig), _PROMPTS)
    rows = swaps.rows
    right = swaps.orig.tolist()
    mask = rows.present()[:n]
    per = mask.sum(dim=1)  # keys of each query
    kv = torch.arange(rows.q.shape[1]) if rows.kv_of_head is None else rows.kv_of_head
    named = [_words(example, words) for example in examples[:n]]
    common = [
        word for word, _ in Counter(word for own in named for word in own).most_common(_WORDS)
    ]

    def label(i: int, slot: int) -> dict[str, Any]:
        word = named[i][slot]
        said = "the right key" if slot == right[i] else "another key"
        return {
            "place in the prompt": slot + 1,
            "word": word if word in common else None,
            "right or not": said,
        }

    labels = {
        "key": [label(*at) for at in mask.nonzero().tolist()],
        "query": [label(i, right[i]) for i in range(n)],
    }
    table: Rows = []
    for (name, head), subspace in list(subspaces.items())[:_CLOUDS]:
        column = list(swaps.heads).index(head)
        q = subspace.project(rows.q[:n, column].double(), "query").repeat_interleave(per, dim=0)
        k = subspace.project(rows.k[:n, kv[column]].double(), "key")[mask]
        queries, keys = principal(torch.cat([q, k])).split([len(q), len(k)])
        for side, points in (("key", keys), ("query", queries[per.cumsum(0) - per])):
            table += point_rows(f"{name} at {head}", side, points, labels[side])
    return table


def point_rows(
    cloud: str, side: str, points: Float[Tensor, "n 3"], labels: Iterable[Mapping[str, Any]]
) -> Rows:
    """Points of one side of a cloud as rows, each with its labels."""
    places = zip(points.double().round(decimals=4).tolist(), labels, strict=False)
    return [
        {"cloud": cloud, "side": side, **dict(zip("xyz", at, strict=True)), **own}
        for at, own in places
    ]


def principal(x: Float[Tensor, "n d"]) -> Float[Tensor, "n c"]:
    """Coordinates on the first principal components; zeros where the points span fewer."""
    u, s, _ = torch.linalg.svd(x - x.mean(dim=0), full_matrices=False)
    shown = (u * s)[:, :_COMPONENTS]
    return torch.nn.functional.pad(shown, (0, _COMPONENTS - shown.shape[1]))


def _words(example: Example, vocabulary: Sequence[str]) -> list[str]:
    """The word that names each key: the last of the vocabulary before it, or its own text where
    there is none.
    """
    words = list[str]()
    start = 0
    for key in example.keys:
        before = re.findall(r"\w+", (example.text or "")[start : key.span[0]])
        own = str(example.piece(key.span)).strip()
        words.append(next((word for word in reversed(before) if word in vocabulary), own))
        start = key.span[1]
    return words
