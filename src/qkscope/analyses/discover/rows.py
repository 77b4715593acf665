"""What some heads attended to, one row per query, as it is left of a pass over examples.

Each head gets rows to be swapped of its own choice: the key with most attention changes places with another one that
the query sees. ``rest`` is then all of the model's row but these two, ``log(exp(whole) − exp(ℓ_0) − exp(ℓ_1))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.capture.pool import Pooling
from qkscope.heads import Head
from qkscope.maths.components import HeadRows
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
