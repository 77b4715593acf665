"""What pooling a batch gives: one row per query, the keys each head attended to summed up beside it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.capture.spaces import Space
from qkscope.heads import Head


@dataclass(frozen=True)
class Pooled:
    """A batch of queries and what they attended to; one row b per (example, query), in the order of the places.

    Attributes
    ----------
    q, attended, mean, top : Float32 [b, h, d]
        Query, attended key, mean key, and the key with most attention.
    valid : Bool [b, h]
        False where a query sees nothing but the first token(s): the row then holds zeros.
    mass : Float32 [b, h]
        The model's attention on the kept keys together.
    top_column, top_weight : Int, Float32 [b, h]
        Where the key with most attention stands in the padded batch, and its share of the mass.
    top_logit, whole : Float32 [b, h]
        Its logit, and the log-sum-exp of the model's whole row, first token and sinks included.
    drawn : Float32 [b, g, s, d]
        Keys drawn by lot without replacement, once per key head.
    drawn_columns, drawn_mask : Int, Bool [b, g, s]
        Where they stand; a query that sees fewer has masked slots.
    drawn_logits : Float32 [b, h, s]
    kv_of_head, scale, softcap : as in `Capture`.
    """

    heads: tuple[Head, ...]
    q: Float[Tensor, "b h d"]
    attended: Float[Tensor, "b h d"]
    mean: Float[Tensor, "b h d"]
    top: Float[Tensor, "b h d"]
    valid: Bool[Tensor, "b h"]
    mass: Float[Tensor, "b h"]
    top_column: Int[Tensor, "b h"]
    top_weight: Float[Tensor, "b h"]
    top_logit: Float[Tensor, "b h"]
    whole: Float[Tensor, "b h"]
    drawn: Float[Tensor, "b g s d"]
    drawn_columns: Int[Tensor, "b g s"]
    drawn_mask: Bool[Tensor, "b g s"]
    drawn_logits: Float[Tensor, "b h s"]
    kv_of_head: Int[Tensor, "h"]
    scale: Float[Tensor, "h"]
    softcap: Float[Tensor, "h"]
    example: Int[Tensor, "b"]
    row: Int[Tensor, "b"]
    query_positions: Int[Tensor, "b"]
    space: Space = "post_rope"

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.example)

    def to(self, device: torch.device | str) -> Pooled:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **moved)
