"""Attention rows, as capture gives them and as an edit needs them: the named keys, and one number
for all the others.

``a_i = exp(ℓ_i) / (Σ_named exp(ℓ_j) + exp(rest))`` with ``ℓ = cap · tanh(scale · q·k / cap) +
bias`` (no cap: the plain product). ``rest`` is the log-sum-exp of everything that was not named -
other keys, attention sinks - so the row is the model's whole row, and editing named keys needs no
second forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

_PER_ROW = ("q", "k", "bias", "rest", "key_mask", "top")
_PER_HEAD = ("scale", "kv_of_head", "softcap")
_OF_HEADS = ("q", "bias", "rest", "top")  # rows by heads
_PADDED = {
    "k": (0.0, (0, 0)),
    "bias": (-torch.inf, ()),
    "key_mask": (False, ()),
}  # with what, and the axes behind


def soft(
    logits: Float[Tensor, "*r k"], rest: Float[Tensor, "*r"] | None = None
) -> Float[Tensor, "*r k"]:
    """Attention on keys with these logits; ``rest`` is the log-sum-exp of whatever else takes a
    share of the row.

    >>> soft(torch.zeros(2), torch.tensor(0.0).log1p())
    tensor([0.3333, 0.3333])
    """
    if rest is None:
        return logits.softmax(dim=-1)
    # one softmax keeps a digit that is lost on the way through a log-sum-exp
    return torch.cat([logits, rest[..., None].to(logits)], dim=-1).softmax(dim=-1)[..., :-1]


@dataclass(frozen=True)
class AttentionRows:
    """Queries and named keys of n rows for h heads.

    Parameters
    ----------
    q : queries.
    k : named keys, once per key head.
    kv_of_head : which key head each head reads; 0, 1, … by default.
    scale : factor on q·k, as the model's attention call passes it.
    softcap : soft-cap of each head; infinite where there is none.
    bias : what is added to a logit after the cap (0, or −inf where the key is masked; with ALiBi,
        of the distance).
    rest : log-sum-exp of all the logits that are not named; −inf where the named keys are the whole
        row.
    key_mask : False where a slot is padding.
    top : largest logit of the tokens that are not named; where it is not known, the named keys are
        all there is.

    Examples
    --------
    >>> rows = AttentionRows(torch.ones(1, 2, 4), torch.ones(1, 2, 3, 4), scale=0.5)
    >>> rows.attention()[0, 0]
    tensor([0.3333, 0.3333, 0.3333])
    """

    q: Float[Tensor, "n h d"]
    k: Float[Tensor, "n g k d"]
    scale: float | Float[Tensor, " h"]
    kv_of_head: Int[Tensor, " h"] | None = None
    softcap: Float[Tensor, " h"] | None = None
    bias: Float[Tensor, "n h k"] | None = None
    rest: Float[Tensor, "n h"] | None = None
    key_mask: Bool[Tensor, "n k"] | None = None
    top: Float[Tensor, "n h"] | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.q)

    @property
    def d_head(self) -> int:
        """Width of the heads."""
        return self.k.shape[-1]

    # ------------------------------------------------------------------ parts of them

    @classmethod
    def cat(cls, parts: Sequence[AttentionRows]) -> AttentionRows:
        """Rows of the same heads that came in parts, on the CPU; where a part has fewer keys,
        masked slots are added.

        Examples
        --------
        >>> two, three = (AttentionRows(torch.ones(1, 2, 4), torch.ones(1, 2, keys, 4), scale=0.5) for keys in (2, 3))
        >>> AttentionRows.cat([two, three]).attention()[:, 0]
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
        """
        width = max(part.k.shape[2] for part in parts)
        masked = [replace(part, key_mask=part.present()) for part in parts]
        joined: dict[str, Any] = {}
        for name in _PER_ROW:
            values = [(getattr(part, name), width - part.k.shape[2]) for part in masked]
            if name in _PADDED:
                fill, behind = _PADDED[name]
                values = [
                    (x if x is None else pad(x, (*behind, 0, more), value=fill), more)
                    for x, more in values
                ]
            joined[name] = None if values[0][0] is None else torch.cat([x for x, _ in values]).cpu()
        for name in _PER_HEAD:
            value = getattr(parts[0], name)
            joined[name] = value.cpu() if isinstance(value, Tensor) else value
        return cls(**joined)

    def of_head(self, column: int) -> AttentionRows:
        """The rows of one head, with the keys that it reads."""
        one = slice(column, column + 1)
        kv = column if self.kv_of_head is None else int(self.kv_of_head[column])
        rows = {
            name: value[:, one] for name in _OF_HEADS if (value := getattr(self, name)) is not None
        }
        scale = (
            self.scale[one] if isinstance(self.scale, Tensor) and self.scale.ndim else self.scale
        )
        cap = None if self.softcap is None else self.softcap[one]
        return replace(
            self, k=self.k[:, kv : kv + 1], kv_of_head=None, scale=scale, softcap=cap, **rows
        )

    def present(self) -> Bool[Tensor, "n k"]:
        """False where a slot is padding."""
        if self.key_mask is not None:
            return self.key_mask
        return torch.ones(self.k.shape[::2], dtype=torch.bool, device=self.k.device)

    def keys_of_heads(self, slots: Int[Tensor, " n"]) -> Float[Tensor, "n h d"]:
        """The key in one slot of each row, as each head reads it."""
        picked = self.k[torch.arange(len(slots), device=slots.device), :, slots]
        return picked if self.kv_of_head is None else picked[:, self.kv_of_head]

    # ------------------------------------------------------------------ from products to attention

    def products(self) -> Float[Tensor, "n h k"]:
        """``scale · q·k`` of every named key, before cap and mask."""
        keys = self.k if self.kv_of_head is None else self.k[:, self.kv_of_head]
        return torch.einsum("nhd,nhkd->nhk", self.q, keys) * self._per_head(self.scale)

    def logits(self, products: Float[Tensor, "n h k"] | None = None) -> Float[Tensor, "n h k"]:
        """Logits as the softmax sees them: capped, and masked; of edited ``products``, or of the
        row's own.
        """
        products = self.products() if products is None else products
        if self.softcap is not None:
            cap = self._per_head(self.softcap)
            products = torch.where(cap.isinf(), products, cap * torch.tanh(products / cap))
        if self.bias is not None:
            products = products + self.bias
        if self.key_mask is not None:
            products = products.masked_fill(~self.key_mask[:, None, :], -torch.inf)
        return products

    def attention(self, products: Float[Tensor, "n h k"] | None = None) -> Float[Tensor, "n h k"]:
        """Attention on the named keys, normalised over the whole row."""
        logits = self.logits(products)
        return soft(
            logits, None if self.rest is None else self.rest.expand(logits.shape[:-1])
        )  # edited several times

    def largest(self, products: Float[Tensor, "n h k"] | None = None) -> Int[Tensor, "n h"]:
        """Slot of the key with the most attention; −1 if that token is not named.

        Examples
        --------
        >>> keys, others = torch.eye(4)[None, None, :2], torch.tensor([[2.0]])
        >>> AttentionRows(torch.ones(1, 1, 4), keys, scale=1.0, top=others).largest()
        tensor([[-1]])
        """
        best, slot = self.logits(products).max(dim=-1)
        return slot if self.top is None else slot.masked_fill(self.top > best, -1)

    def _per_head(self, value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=self.q.dtype, device=self.q.device).reshape(-1)[:, None]
