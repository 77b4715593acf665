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
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.maths.subspace import Subspace
from qkscope.maths.swap import SwapRows
from qkscope.runs.result import Result

_PROMPTS = 96
_WORDS = 8  # more colours cannot be told apart
_COMPONENTS = 3
_CLOUDS = 8  # more are not looked at
_POINTS = 1500  # of a side: so many can be turned
_PARTS = ("keys", "queries", "key_labels", "query_labels")


@dataclass(frozen=True)
class Colouring:
    """One way to colour points: the names of the labels, and each point's label; -1 is none of them."""

    names: tuple[str, ...]
    keys: tuple[int, ...]
    queries: tuple[int, ...]
    ordered: bool = False  # labels have an order, and so should their colours


@dataclass(frozen=True)
class Cloud:
    """Keys and queries of one head in one feature's subspace."""

    title: str
    keys: Float[Tensor, "n 3"]
    queries: Float[Tensor, "m 3"]
    colourings: Mapping[str, Colouring]


def make_clouds(
    swapped: SwapRows,
    examples: Sequence[Example],
    subspaces: Mapping[tuple[str, Head], Subspace],
    words: Sequence[str] = (),
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Arrays and table of the first heads' features.

    Parameters
    ----------
    swapped : rows of held-out prompts, with the right key of each.
    examples : the example of each row.
    subspaces : features by name and head.
    words : the vocabulary that keys are told apart by.
    """
    n, rows = min(len(swapped), _PROMPTS), swapped.rows
    mask = rows.present()[:n]
    kv = torch.arange(rows.q.shape[1]) if rows.kv_of_head is None else rows.kv_of_head
    colourings = _colourings(examples[:n], swapped.orig[:n].tolist(), mask, words)
    labels = {
        f"{side}_labels": torch.tensor([getattr(c, part) for c in colourings.values()], dtype=torch.int16).mT
        for side, part in (("key", "keys"), ("query", "queries"))
    }
    arrays: dict[str, Tensor] = {}
    table: list[dict[str, Any]] = []
    for (name, head), subspace in list(subspaces.items())[:_CLOUDS]:
        column = list(swapped.heads).index(head)
        q = subspace.project(rows.q[:n, column].double(), "query")
        k = subspace.project(rows.k[:n, kv[column]].double(), "key")
        per = mask.sum(dim=1)
        repeated = q.repeat_interleave(per, dim=0)
        joined = torch.cat([repeated, k[mask]])
        at = principal(joined)
        first = per.cumsum(0) - per
        title = f"{name} at {head}"
        points = {"keys": at[len(repeated) :].float(), "queries": at[first].float(), **labels}
        arrays |= {f"cloud/{title}/{part}": tensor.clone() for part, tensor in points.items()}
        table += [
            {"cloud": title, "colouring": by, "ordered": colouring.ordered, "index": i, "label": label}
            for by, colouring in colourings.items()
            for i, label in enumerate(colouring.names)
        ]
    return arrays, table


def clouds_of(result: Result) -> list[Cloud]:
    """The clouds that a result holds, in the order of its table; figures call theirs by a feature or a panel."""
    named = [
        {"cloud": row.get("feature", row.get("panel")), "colouring": "label", **row}
        for row in result.tables.get("clouds", result.tables.get("labels", ()))
    ]
    order = list(dict.fromkeys(row["cloud"] for row in named))
    stems = sorted({name.rpartition("/")[0] for name in result.arrays if name.endswith("/keys")})
    found = []
    for stem in stems:
        title = stem.removeprefix("cloud/")
        stored = [result.arrays.get(f"{stem}/{part}") for part in _PARTS]
        if any(part is None for part in stored) or stored[0].shape[-1] != _COMPONENTS:  # type: ignore[union-attr]
            continue
        keys, queries, *labels = (part[:_POINTS] for part in stored)  # type: ignore[index]
        of_key, of_query = (part.reshape(len(part), -1).mT.tolist() for part in labels)
        group = title if title in order else next(iter(order), None)  # its own labels, or the first there are
        own = [list(rows) for _, rows in groupby([r for r in named if r["cloud"] == group], lambda r: r["colouring"])]
        if not own:
            largest = max([*of_key[0], *of_query[0]], default=-1)
            own = [[{"colouring": "label", "label": i} for i in range(largest + 1)]]
        colourings = {
            rows[0]["colouring"]: Colouring(
                tuple(str(row["label"]) for row in rows), tuple(k), tuple(q), rows[0].get("ordered", title == "order")
            )
            for rows, k, q in zip(own, of_key, of_query, strict=False)
        }
        found.append(Cloud(title, keys, queries, colourings))
    return sorted(found, key=lambda cloud: order.index(cloud.title) if cloud.title in order else len(order))


def principal(x: Float[Tensor, "n d"]) -> Float[Tensor, "n c"]:
    """Coordinates on the first principal components; zeros where the points span fewer."""
    x = x - x.mean(dim=0)
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    found = (u * s)[:, :_COMPONENTS]
    return torch.nn.functional.pad(found, (0, _COMPONENTS - found.shape[1]))


def _colourings(
    examples: Sequence[Example], right: list[int], mask: Tensor, words: Sequence[str]
) -> dict[str, Colouring]:
    slots = [[i for i, there in enumerate(row) if there] for row in mask.tolist()]
    widest = max(len(row) for row in slots)
    place = Colouring(
        tuple(str(i + 1) for i in range(widest)), tuple(i for row in slots for i in row), tuple(right), ordered=True
    )
    said = [_words(example, words) for example in examples]
    common = [word for word, _ in Counter(word for row in said for word in row).most_common(_WORDS)]
    index = {word: i for i, word in enumerate(common)}
    word = Colouring(
        tuple(common),
        tuple(index.get(row[i], -1) for row, of in zip(said, slots, strict=True) for i in of),
        tuple(index.get(row[i], -1) for row, i in zip(said, right, strict=True)),
    )
    asked = Colouring(
        ("the right key", "another key"),
        tuple(int(i != r) for of, r in zip(slots, right, strict=True) for i in of),
        (0,) * len(right),
    )
    return {"place in the prompt": place, "word": word, "right or not": asked}


def _words(example: Example, vocabulary: Sequence[str]) -> list[str]:
    """What each key is called: the last word of the vocabulary before it, or its own text where there is none."""
    known, found, start = set(vocabulary), [], 0
    for key in example.keys:
        own = str(example.piece(key.span)).strip()
        before = re.findall(r"\w+", example.text[start : key.span[0]]) if example.text is not None else []
        found.append(next((word for word in reversed(before) if word in known), own))
        start = key.span[1]
    return found
