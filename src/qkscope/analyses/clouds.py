"""Keys and queries as points one can turn: three principal components of a feature's subspace, with what to colour by.

Prompts are those of the causal test, which nothing was fitted on. Queries are projected on the feature's query basis,
keys on its key basis; as many queries as keys go into the components, so that these are not the keys' alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.maths.attention import AttentionRows
from qkscope.maths.subspace import Subspace

_PROMPTS = 96
_WORDS = 8  # more colours cannot be told apart
_COMPONENTS = 3


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


@dataclass(frozen=True)
class Seen:
    """Rows of some heads on held-out prompts, the right key of each, and the example it is a row of."""

    attention: AttentionRows
    right: Int[Tensor, " n"]
    examples: Sequence[Example]


def make_clouds(
    seen: Seen, heads: Sequence[Head], subspaces: Mapping[tuple[str, Head], Subspace], words: Sequence[str] = ()
) -> list[Cloud]:
    """One cloud for each head and feature; ``words`` is the vocabulary that keys are told apart by, if there is one."""
    n, rows = min(len(seen.right), _PROMPTS), seen.attention
    mask = torch.ones(rows.k.shape[::2], dtype=torch.bool) if rows.key_mask is None else rows.key_mask
    mask = mask[:n]
    kv = torch.arange(rows.q.shape[1]) if rows.kv_of_head is None else rows.kv_of_head
    colourings = _colourings(seen.examples[:n], seen.right[:n].tolist(), mask, words)
    clouds = []
    for (name, head), subspace in subspaces.items():
        column = heads.index(head)
        q = subspace.project(rows.q[:n, column].double(), "query")
        k = subspace.project(rows.k[:n, kv[column]].double(), "key")
        per = mask.sum(dim=1)
        repeated = q.repeat_interleave(per, dim=0)
        joined = torch.cat([repeated, k[mask]])
        at = principal(joined)
        first = per.cumsum(0) - per
        clouds.append(Cloud(f"{name} at {head}", at[len(repeated) :].float(), at[first].float(), colourings))
    return clouds


def principal(x: Float[Tensor, "n d"], count: int = _COMPONENTS) -> Float[Tensor, "n c"]:
    """Coordinates on the first principal components; zeros where the points span fewer."""
    x = x - x.mean(dim=0)
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    found = (u * s)[:, :count]
    return torch.nn.functional.pad(found, (0, count - found.shape[1]))


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
