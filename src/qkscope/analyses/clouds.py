"""Keys and queries as points one can turn: three principal components of a feature's subspace, with what to colour by.

Prompts are those of the causal test, which nothing was fitted on. Queries are projected on the feature's query basis,
keys on its key basis; as many queries as keys go into the components, so that these are not the keys' alone.

A result holds them as arrays ``cloud/NAME/keys``, ``queries`` (n, 3) and ``key_labels``, ``query_labels`` (n, number of
colourings; -1 is none of the labels), and as rows ``cloud, colouring, ordered, index, label`` of the table ``clouds``.
Figures of points store the same under names of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.maths.subspace import Subspace
from qkscope.maths.swap import SwapRows
from qkscope.runs.result import Result, Rows

_PROMPTS = 96
_WORDS = 8  # more colours cannot be told apart
_COMPONENTS = 3
_CLOUDS = 8  # more are not looked at
_POINTS = 1500  # of a side: so many can be turned
_PARTS = ("keys", "queries", "key_labels", "query_labels")


@dataclass(frozen=True)
class Colouring:
    """One way to colour points: the names of the labels, and each point's label; -1 is none of them."""

    names: list[str]
    keys: list[int]
    queries: list[int]
    ordered: bool = False  # labels have an order, and so should their colours


@dataclass(frozen=True)
class Cloud:
    """Keys and queries of one head in one feature's subspace."""

    title: str
    keys: Float[Tensor, "n 3"]
    queries: Float[Tensor, "m 3"]
    colourings: Mapping[str, Colouring]


def make_clouds(
    swaps: SwapRows, examples: Sequence[Example], subspaces: Mapping[tuple[str, Head], Subspace], words: Sequence[str]
) -> tuple[dict[str, Tensor], Rows]:
    """Arrays and table of the first heads' features.

    Parameters
    ----------
    swaps : rows of held-out prompts, with the right key of each.
    examples : the example of each row.
    subspaces : features by name and head.
    words : the vocabulary that keys are told apart by.
    """
    n, rows = min(len(swaps), _PROMPTS), swaps.rows
    mask = rows.present()[:n]
    per = mask.sum(dim=1)  # keys of each query
    kv = torch.arange(rows.q.shape[1]) if rows.kv_of_head is None else rows.kv_of_head
    colourings = _colourings(examples[:n], swaps.orig[:n], mask, words)
    labels = {
        f"{side}_labels": torch.tensor([getattr(c, part) for c in colourings.values()], dtype=torch.int16).mT
        for side, part in (("key", "keys"), ("query", "queries"))
    }
    arrays: dict[str, Tensor] = {}
    table: Rows = []
    for (name, head), subspace in list(subspaces.items())[:_CLOUDS]:
        column, title = list(swaps.heads).index(head), f"{name} at {head}"
        q = subspace.project(rows.q[:n, column].double(), "query").repeat_interleave(per, dim=0)
        k = subspace.project(rows.k[:n, kv[column]].double(), "key")[mask]
        queries, keys = principal(torch.cat([q, k])).float().split([len(q), len(k)])
        points = {"keys": keys, "queries": queries[per.cumsum(0) - per], **labels}
        arrays |= {f"cloud/{title}/{part}": tensor.clone() for part, tensor in points.items()}
        table += [
            {"cloud": title, "colouring": by, "ordered": colouring.ordered, "index": i, "label": label}
            for by, colouring in colourings.items()
            for i, label in enumerate(colouring.names)
        ]
    return arrays, table


def clouds_of(result: Result) -> list[Cloud]:
    """The clouds that a result holds, in the order of its table; figures call theirs by a feature or a panel."""
    ways: dict[str, dict[str, list[Any]]] = {}  # rows of the table, by cloud and colouring
    for row in result.tables.get("clouds", result.tables.get("labels", ())):
        title = row.get("cloud", row.get("feature", row.get("panel")))
        ways.setdefault(title, {}).setdefault(row.get("colouring", "label"), []).append(row)
    order, clouds = list(ways), list[Cloud]()
    for stem in sorted({name.rpartition("/")[0] for name in result.arrays if name.endswith("/keys")}):
        title = stem.removeprefix("cloud/")
        stored = [result.arrays[name][:_POINTS] for part in _PARTS if (name := f"{stem}/{part}") in result.arrays]
        if len(stored) < len(_PARTS) or stored[0].shape[-1] != _COMPONENTS or not ways:
            continue
        by_key, by_query = (part.reshape(len(part), -1).mT.tolist() for part in stored[2:])
        own = ways.get(title, ways[order[0]])  # its own labels, or the first there are
        colourings = {}
        for (by, rows), of_keys, of_queries in zip(own.items(), by_key, by_query, strict=False):
            names, ordered = [str(row["label"]) for row in rows], rows[0].get("ordered", title == "order")
            colourings[by] = Colouring(names, of_keys, of_queries, ordered)
        clouds.append(Cloud(title, stored[0], stored[1], colourings))
    return sorted(clouds, key=lambda cloud: order.index(cloud.title) if cloud.title in order else len(order))


def principal(x: Float[Tensor, "n d"]) -> Float[Tensor, "n c"]:
    """Coordinates on the first principal components; zeros where the points span fewer."""
    u, s, _ = torch.linalg.svd(x - x.mean(dim=0), full_matrices=False)
    shown = (u * s)[:, :_COMPONENTS]
    return torch.nn.functional.pad(shown, (0, _COMPONENTS - shown.shape[1]))


def _colourings(
    examples: Sequence[Example], right: Int[Tensor, " n"], mask: Bool[Tensor, "n k"], vocabulary: Sequence[str]
) -> dict[str, Colouring]:
    row, slot = mask.nonzero().unbind(1)
    words = [_words(example, vocabulary) for example in examples]
    common = [word for word, _ in Counter(word for own in words for word in own).most_common(_WORDS)]
    numbers = [[common.index(word) if word in common else -1 for word in own] for own in words]
    of_keys = [numbers[r][i] for r, i in zip(row.tolist(), slot.tolist(), strict=True)]
    of_queries = [own[i] for own, i in zip(numbers, right.tolist(), strict=True)]
    places, sides = [str(i + 1) for i in range(int(slot.max()) + 1)], ["the right key", "another key"]
    return {
        "place in the prompt": Colouring(places, slot.tolist(), right.tolist(), ordered=True),
        "word": Colouring(common, of_keys, of_queries),
        "right or not": Colouring(sides, (slot != right[row]).int().tolist(), [0] * len(right)),
    }


def _words(example: Example, vocabulary: Sequence[str]) -> list[str]:
    """What each key is called: the last word of the vocabulary before it, or its own text where there is none."""
    words, start = list[str](), 0
    for key in example.keys:
        before = re.findall(r"\w+", (example.text or "")[start : key.span[0]])
        own = str(example.piece(key.span)).strip()
        words.append(next((word for word in reversed(before) if word in vocabulary), own))
        start = key.span[1]
    return words
