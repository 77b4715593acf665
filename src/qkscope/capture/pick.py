"""Queries and keys at chosen positions, with everything needed to rebuild the model's own attention row.

For a row (one query of one example), a head h with key head g, and the named keys i:
``ℓ_i = cap(scale_h · q_h·k_gi) + bias_hi``, ``rest_h = log Σ exp ℓ`` over every key not named (and the sink), so that
``softmax([ℓ_1 … ℓ_K, rest])`` is the model's attention on the named keys, and what is left for the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head


@dataclass(frozen=True)
class Places:
    """Where to look in a padded batch: one row per (example, query).

    `keys` holds columns of the batch; slots where `key_mask` is False are padding and may hold anything.
    """

    row: Int[Tensor, "b"]
    query: Int[Tensor, "b"]
    keys: Int[Tensor, "b k"]
    key_mask: Bool[Tensor, "b k"]

    @classmethod
    def everywhere(cls, row: Int[Tensor, "b"], query: Int[Tensor, "b"], mask: Int[Tensor, "n t"]) -> Places:
        """These queries, each with every token of its own sequence as a key: slot j is column j of the batch."""
        columns = torch.arange(mask.shape[1], device=mask.device).expand(len(row), -1)
        return cls(row, query, columns, mask.bool()[row])

    def to(self, device: torch.device | str) -> Places:
        """The same places on another device."""
        return Places(*(part.to(device) for part in (self.row, self.query, self.keys, self.key_mask)))


@dataclass(frozen=True, repr=False)
class Capture:
    """A batch of captured queries and keys; one row b per (example, query).

    Attributes
    ----------
    heads : tuple of Head
        The h axis.
    q : Float32 [b, h, d]
    k : Float32 [b, g, k, d]
        One entry per distinct (layer, key head), in order of first use by `heads`; 0 in padded slots.
    kv_of_head : Int [h]
        Which g a head reads.
    key_mask : Bool [b, k]
        False in padded key slots.
    scale : Float [h]
        Factor of the dot product, as the model's attention call passed it.
    softcap : Float [h] or None
        Soft-cap of the logits (inf in a head without one); None when no head has one.
    bias : Float [b, h, k]
        What is added to the logits of the named keys: 0, or -inf where the query cannot see the key (and in padded
        slots); with ALiBi, what the distance adds, 0 at the query's own token.
    rest : Float32 [b, h] or None
        Log-sum-exp of everything not named, the sink included; None when it was not asked for.
    top : Float32 [b, h] or None
        Largest logit of the tokens that are not named, with ``rest``.
    example : Int [b]
        Index of the row's example in the list that was given.
    query_positions, key_positions : Int [b], [b, k]
        Columns of the padded batch.
    labels : mapping of str to Int [b, k]
        Label of each key per contrast.
    logits : Float32 [b, v] or None
        Next-token logits at the query; None when they were not asked for.
    space : str
        `post_rope`, `pre_rope` or `query_frame`. In `pre_rope` ``scale · q·k`` is not the model's logit.

    Examples
    --------
    >>> from qkscope import Example, Scope
    >>> example = Example.mark("hat jam hat", keys=["jam"])
    >>> (batch,) = Scope.load("nano:mixed").capture([example], "L2H3")
    >>> batch.attention().shape
    torch.Size([1, 1, 1])
    """

    heads: tuple[Head, ...]
    q: Float[Tensor, "b h d"]
    k: Float[Tensor, "b g k d"]
    kv_of_head: Int[Tensor, "h"]
    key_mask: Bool[Tensor, "b k"]
    scale: Float[Tensor, "h"]
    softcap: Float[Tensor, "h"] | None
    bias: Float[Tensor, "b h k"]
    rest: Float[Tensor, "b h"] | None
    example: Int[Tensor, "b"]
    query_positions: Int[Tensor, "b"]
    key_positions: Int[Tensor, "b k"]
    labels: Mapping[str, Int[Tensor, "b k"]] = field(default_factory=dict)
    logits: Float[Tensor, "b v"] | None = None
    space: Space = "post_rope"
    top: Float[Tensor, "b h"] | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.example)

    def __repr__(self) -> str:
        (_, groups, keys, width), names = self.k.shape, ", ".join(map(str, self.heads[:3]))
        heads = names + (f", … {len(self.heads)} heads" if len(self.heads) > 3 else "")
        return f"Capture({len(self)} rows of {heads}; {keys} keys of {groups} key heads, width {width}, {self.space})"

    def rows(self) -> AttentionRows:
        """The model's own attention rows, to be looked at or edited (not in `pre_rope`)."""
        if self.space == "pre_rope":
            raise BadInput("pre_rope vectors do not give the model's logits: capture post_rope or query_frame.")
        return AttentionRows(
            self.q, self.k, self.scale, self.kv_of_head, self.softcap, self.bias, self.rest, self.key_mask, self.top
        )

    def attention_logits(self) -> Float[Tensor, "b h k"]:
        """``cap(scale · q·k) + bias`` of the named keys: what goes into the softmax (not in `pre_rope`)."""
        return self.rows().logits()

    def attention(self) -> Float[Tensor, "b h k"]:
        """The model's attention on the named keys: the softmax is over the whole row, so it sums to less than 1."""
        if self.rest is None:
            raise BadInput("attention needs the whole row: capture with rest=True.")
        return self.rows().attention()

    def to(self, device: torch.device | str) -> Capture:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        labels = {name: value.to(device) for name, value in self.labels.items()}
        return dataclasses.replace(self, **moved, labels=labels)

    def of_rows(self, rows: Int[Tensor, "n"]) -> Capture:
        """Some of the rows, in this order."""
        names = ("q", "k", "key_mask", "bias", "rest", "top", "example", "query_positions", "key_positions", "logits")
        taken: dict[str, Any] = {name: value[rows] for name in names if (value := getattr(self, name)) is not None}
        labels = {name: value[rows] for name, value in self.labels.items()}
        return dataclasses.replace(self, **taken, labels=labels)
