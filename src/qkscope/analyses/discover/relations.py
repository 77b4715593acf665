"""What a token that a head attends to is to the token it attends from: the one before, a copy of it, what followed it.

For each query the key with most attention is held against keys drawn by lot among those the query sees: a relation
counts when the head picks it more often than chance would. Queries weigh by their attention off the first token, so
that those in which the head rests say little. This names what a head does on a text; it does not say how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.analyses.discover.rows import QueryRows
from qkscope.capture.scope import Scope
from qkscope.maths.significance import clustered_bootstrap

_BLANK, _NO_TEXT = 0, -1
_LEAST = 0.2  # share of picks under which a relation does not describe a head


class _Pair(NamedTuple):
    """Places of queries and keys, and the words there, as numbers."""

    query: Int[Tensor, "*n"]
    key: Int[Tensor, "*n"]
    asked: Int[Tensor, "*n"]
    found: Int[Tensor, "*n"]
    before: Int[Tensor, "*n"]  # the word before the key
    marks: Bool[Tensor, "*n"]  # whether the key has neither letters nor digits


RELATIONS: dict[str, Callable[[_Pair], Tensor]] = {
    "itself": lambda p: p.key == p.query,
    "the token before": lambda p: p.key == p.query - 1,
    "two to five back": lambda p: (p.query - p.key >= 2) & (p.query - p.key <= 5),
    "the same token": lambda p: (p.key != p.query) & (p.found == p.asked) & (p.asked != _BLANK),
    "what followed it": lambda p: (p.key < p.query) & (p.before == p.asked) & (p.asked != _BLANK),
    "punctuation": lambda p: p.marks & (p.found != _BLANK),
    "a blank": lambda p: p.found == _BLANK,
}


def relation_rows(scope: Scope, looked: QueryRows) -> list[dict[str, Any]]:
    """How often each relation holds for the key a head picks and for one drawn by lot, with the interval of the lead.

    A head with ``rate`` .7 and ``chance`` .03 at "the same token" looks for earlier copies.
    """
    text = _Words.of(scope, looked.ids)
    row = torch.tensor([text.row[example] for example in looked.example.tolist()])
    rows: list[dict[str, Any]] = []
    for h, head in enumerate(looked.heads):
        there = looked.drawn_mask[:, h]
        weight = (looked.mass[:, h] * looked.valid[:, h] * there.any(dim=1)).double()
        if float(weight.sum()) == 0:
            continue
        weight = (weight / weight.mean())[:, None]
        picked = weight * _holds(text, row, looked.query, looked.top_place[:, h])
        lots = _holds(text, row[:, None], looked.query[:, None], looked.drawn_place[:, h]) * there[..., None]
        chance = weight * lots.sum(dim=1) / there.sum(dim=1, keepdim=True).clamp_min(1)
        low, high = clustered_bootstrap(picked - chance, looked.example, draws=500)
        rows += [
            {
                "head": str(head), "relation": name, "rate": float(picked[:, i].mean()),
                "chance": float(chance[:, i].mean()), "lead_low": float(low[i]), "lead_high": float(high[i]),
            }
            for i, name in enumerate(RELATIONS)
        ]  # fmt: skip
    return rows


def main_relation(rows: Sequence[Mapping[str, Any]], head: str) -> dict[str, Any]:
    """The relation with the largest lead over chance, if one describes the head; none is an answer too."""
    own = [row for row in rows if row["head"] == head and row["rate"] >= _LEAST and row["lead_low"] > 0]
    best = max(own, key=lambda row: row["rate"] - row["chance"], default=None)
    names = ("relation", "rate", "chance")
    found = (None,) * 3 if best is None else tuple(best[name] for name in names)
    return dict(zip(("relation", "relation_rate", "relation_chance"), found, strict=True))


class _Words(NamedTuple):
    """Words of every example as numbers, padded; case and the space before a token do not matter, blanks are 0."""

    row: dict[int, int]
    word: Int[Tensor, "e t"]
    marks: Bool[Tensor, "e t"]

    @classmethod
    def of(cls, scope: Scope, ids: Mapping[int, Sequence[int]]) -> _Words:
        number: dict[str, int] = {"": _BLANK}
        plain: dict[int, tuple[int, bool]] = {}
        word = torch.full((len(ids), max(map(len, ids.values()))), _NO_TEXT)
        marks = torch.zeros(word.shape, dtype=torch.bool)
        for row, own in enumerate(ids.values()):
            for token in set(own) - plain.keys():
                text = str(token) if scope.tokenizer is None else scope.tokenizer.decode([token]).strip().lower()
                plain[token] = number.setdefault(text, len(number)), not any(letter.isalnum() for letter in text)
            word[row, : len(own)] = torch.tensor([plain[token][0] for token in own])
            marks[row, : len(own)] = torch.tensor([plain[token][1] for token in own])
        return cls({example: row for row, example in enumerate(ids)}, word, marks)


def _holds(text: _Words, row: Tensor, query: Tensor, key: Tensor) -> Float[Tensor, "*n relations"]:
    before = torch.where(key > 0, text.word[row, (key - 1).clamp_min(0)], _NO_TEXT)
    pair = _Pair(query, key, text.word[row, query], text.word[row, key], before, text.marks[row, key])
    return torch.stack([holds(pair) for holds in RELATIONS.values()], dim=-1).double()
