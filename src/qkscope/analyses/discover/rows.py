"""What some heads attended to, one row per query, as it is left of a pass over examples; and what the attended token is
to the asking one: the one before, a copy of it, what followed it.

Each head gets rows to be swapped of its own choice: the key with most attention changes places with another one that
the query sees. ``rest`` is then all of the model's row but these two, ``log(exp(whole) − exp(ℓ_0) − exp(ℓ_1))``.

For each query the key with most attention is held against keys drawn by lot among those the query sees: a relation
counts when the head picks it more often than chance would. Queries weigh by their attention off the first token, so
that those in which the head rests say little. This names what a head does on a text; it does not say how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.capture.pool import Pooling
from qkscope.capture.scope import Scope
from qkscope.heads import Head
from qkscope.maths.components import HeadRows
from qkscope.maths.significance import clustered_bootstrap
from qkscope.maths.swap import SwapRows

RESTING = 0.02  # share of attention off the first token under which a head says nothing about what it looks for
_SAME = (
    "q", "attended", "mean", "top", "valid", "mass", "top_weight", "top_logit", "whole", "drawn_logits", "example",
    "scale", "softcap",
)  # fmt: skip


@dataclass(frozen=True)
class QueryRows:
    """What some heads attended to, one row per query; vectors as in `Pooling`, places as token numbers of the example.

    ``drawn`` are keys drawn by lot, as each head reads them; ``ids`` are the tokens of every example.
    """

    heads: tuple[Head, ...]
    q: Float[Tensor, "n h d"]
    attended: Float[Tensor, "n h d"]
    mean: Float[Tensor, "n h d"]
    top: Float[Tensor, "n h d"]
    valid: Bool[Tensor, "n h"]
    mass: Float[Tensor, "n h"]
    top_weight: Float[Tensor, "n h"]
    top_logit: Float[Tensor, "n h"]
    whole: Float[Tensor, "n h"]
    top_place: Int[Tensor, "n h"]
    drawn: Float[Tensor, "n h s d"]
    drawn_logits: Float[Tensor, "n h s"]
    drawn_place: Int[Tensor, "n h s"]
    drawn_mask: Bool[Tensor, "n h s"]
    example: Int[Tensor, " n"]
    query: Int[Tensor, " n"]
    scale: Float[Tensor, " h"]
    softcap: Float[Tensor, " h"]
    ids: Mapping[int, list[int]]

    @staticmethod
    def part(pooled: Pooling, mask: Bool[Tensor, "b t"]) -> dict[str, Tensor]:
        """The columns of one batch, on the CPU; ``mask`` says where its padding is."""
        first = mask.long().argmax(dim=1)[pooled.row]
        kv = pooled.kv_of_head
        columns = {name: getattr(pooled, name) for name in _SAME} | {
            "top_place": pooled.top_column - first[:, None],
            "drawn": pooled.drawn[:, kv],
            "drawn_mask": pooled.drawn_mask[:, kv],
            "drawn_place": pooled.drawn_columns[:, kv] - first[:, None, None],
            "query": pooled.query_positions - first,
        }
        return {name: column.cpu() for name, column in columns.items()}

    @classmethod
    def of(cls, heads: tuple[Head, ...], parts: list[dict[str, Any]], ids: Mapping[int, list[int]]) -> QueryRows:
        """The rows of all batches."""
        same = {name: parts[0][name] for name in ("scale", "softcap")}
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name not in same}
        return cls(heads, ids=ids, **same, **columns)

    def rests(self, h: int) -> bool:
        """Whether a head attends to next to nothing but the first token."""
        return float(self.mass[:, h].mean()) < RESTING

    def of_head(self, h: int) -> HeadRows:
        """Queries and what they attended to at one head, where they see anything."""
        keep = self.valid[:, h]
        return HeadRows(self.q[keep, h], self.attended[keep, h], self.mean[keep, h], self.example[keep])

    def swaps(self, h: int) -> tuple[SwapRows, Int[Tensor, " m"]]:
        """Rows of one head for a swap of its own choice: slot 0 is the key with most attention, slot 1 the one
        with the largest logit of a few drawn by lot (an utterly different key tells little of what was matched).

        Rows without another key to take are left out; the second value says which rows these are.
        """
        other = self.drawn_mask[:, h] & (self.drawn_place[:, h] != self.top_place[:, h, None])
        keep = (other.any(dim=1) & self.valid[:, h]).nonzero()[:, 0]
        slot = self.drawn_logits[keep, h].masked_fill(~other[keep], -torch.inf).argmax(dim=1)
        whole, logits = self.whole[keep, h], (self.top_logit[keep, h], self.drawn_logits[keep, h, slot])
        held = (logits[0] - whole).exp() + (logits[1] - whole).exp()
        softcap = self.softcap[h : h + 1]
        rows = AttentionRows(
            q=self.q[keep, h, None],
            k=torch.stack([self.top[keep, h], self.drawn[keep, h, slot]], dim=1)[:, None],
            scale=self.scale[h : h + 1],
            softcap=softcap if bool(softcap.isfinite()) else None,
            rest=(whole + torch.log1p(-held.clamp(max=1 - 1e-7)))[:, None],
        )
        orig = torch.zeros(len(keep), dtype=torch.long)
        return SwapRows(rows, orig, orig + 1, self.example[keep], [self.heads[h]]), keep


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


_SAID = {
    "two to five back": "a token two to five back", "the same token": "an earlier copy of the asking token",
    "what followed it": "what followed an earlier copy of the asking token",
}  # fmt: skip


def relation_words(row: Mapping[str, Any]) -> str:
    """What a head looks at, beside chance; nothing where no relation describes it.

    >>> relation_words({"relation": "the same token", "relation_rate": 0.52, "relation_chance": 0.04})
    'an earlier copy of the asking token (52%, chance 4%)'
    """
    if row.get("relation") is None:
        return ""
    what = _SAID.get(row["relation"], row["relation"])
    return f"{what} ({row['relation_rate']:.0%}, chance {row['relation_chance']:.0%})"


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
