"""Attention rows: some named keys of a query, and one number for all its other keys.

With ``ℓ = cap · tanh(scale · q·k / cap) + bias`` (no cap: the plain product), attention on a named
key is::

    a_i = exp(ℓ_i) / (Σ_named exp(ℓ_j) + exp(rest))

``rest`` is the log-sum-exp of everything that was not named - other keys, attention sinks - so the
row is the model's whole row, and editing named keys needs no second forward pass.
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
_ROWS_BY_HEADS = ("q", "bias", "rest", "top")
_KEY_FILL = {"k": 0.0, "bias": -torch.inf, "key_mask": False}  # of slots that have no key


def soft(
    logits: Float[Tensor, "*r k"], rest: Float[Tensor, "*r"] | None = None
) -> Float[Tensor, "*r k"]:
    """Attention on keys with these logits, normalised over the whole row.

    ``rest`` is the log-sum-exp of whatever else takes a share of the row.

    >>> soft(torch.zeros(2), torch.tensor(0.0).log1p())
    tensor([0.3333, 0.3333])
    """
    if rest is None:
        return logits.softmax(dim=-1)
    # one softmax keeps a digit that is lost on the way through a log-sum-exp
    whole_row = torch.cat([logits, rest[..., None].to(logits)], dim=-1)
    return whole_row.softmax(dim=-1)[..., :-1]


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
        """Join rows of the same heads that came in parts, on the CPU.

        Where a part has fewer keys, masked slots are added.

        Examples
        --------
        >>> two = AttentionRows(torch.ones(1, 2, 4), torch.ones(1, 2, 2, 4), scale=0.5)
        >>> three = AttentionRows(torch.ones(1, 2, 4), torch.ones(1, 2, 3, 4), scale=0.5)
        >>> AttentionRows.cat([two, three]).attention()[:, 0]
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
        """
        masked = [replace(part, key_mask=part.present()) for part in parts]
        width = max(part.k.shape[2] for part in parts)
        joined: dict[str, Any] = {}
        for name in _PER_ROW:
            joined[name] = None
            if getattr(masked[0], name) is not None:
                values = [part._padded(name, width) for part in masked]
                joined[name] = torch.cat(values).cpu()
        for name in _PER_HEAD:
            value = getattr(parts[0], name)
            joined[name] = value.cpu() if isinstance(value, Tensor) else value
        return cls(**joined)

    def _padded(self, name: str, width: int) -> Tensor:
        """One field of the rows, with slots added until there are ``width`` keys."""
        value: Tensor = getattr(self, name)
        if name not in _KEY_FILL:
            return value
        missing = width - self.k.shape[2]
        axes_behind = (0, 0) if name == "k" else ()
        return pad(value, (*axes_behind, 0, missing), value=_KEY_FILL[name])

    def of_head(self, column: int) -> AttentionRows:
        """The rows of one head, with the keys that it reads."""
        one_head = slice(column, column + 1)
        kv = column if self.kv_of_head is None else int(self.kv_of_head[column])
        fields: dict[str, Any] = {"k": self.k[:, kv : kv + 1], "kv_of_head": None}
        for name in _ROWS_BY_HEADS:
            value = getattr(self, name)
            if value is not None:
                fields[name] = value[:, one_head]
        if isinstance(self.scale, Tensor) and self.scale.ndim:
            fields["scale"] = self.scale[one_head]
        if self.softcap is not None:
            fields["softcap"] = self.softcap[one_head]
        return replace(self, **fields)

    def present(self) -> Bool[Tensor, "n k"]:
        """False where a slot is padding."""
        if self.key_mask is not None:
            return self.key_mask
        rows_by_keys = self.k.shape[::2]
        return torch.ones(rows_by_keys, dtype=torch.bool, device=self.k.device)

    def keys_of_heads(self, slots: Int[Tensor, " n"]) -> Float[Tensor, "n h d"]:
        """The key in one slot of each row, as each head reads it."""
        rows = torch.arange(len(slots), device=slots.device)
        picked = self.k[rows, :, slots]
        if self.kv_of_head is None:
            return picked
        return picked[:, self.kv_of_head]

    # ------------------------------------------------------------------ from products to attention

    def products(self) -> Float[Tensor, "n h k"]:
        """``scale · q·k`` of every named key, before cap and mask."""
        keys = self.k if self.kv_of_head is None else self.k[:, self.kv_of_head]
        products = torch.einsum("nhd,nhkd->nhk", self.q, keys)
        return products * self._per_head(self.scale)

    def logits(self, products: Float[Tensor, "n h k"] | None = None) -> Float[Tensor, "n h k"]:
        """Logits as the softmax sees them, capped and masked; by default from the rows' own q·k.

        Parameters
        ----------
        products : ``scale · q·k`` after an edit.
        """
        logits = self.products() if products is None else products
        if self.softcap is not None:
            cap = self._per_head(self.softcap)
            capped = cap * torch.tanh(logits / cap)
            logits = torch.where(cap.isinf(), logits, capped)
        if self.bias is not None:
            logits = logits + self.bias
        if self.key_mask is not None:
            padding = ~self.key_mask[:, None, :]
            logits = logits.masked_fill(padding, -torch.inf)
        return logits

    def attention(self, products: Float[Tensor, "n h k"] | None = None) -> Float[Tensor, "n h k"]:
        """Attention on the named keys, normalised over the whole row."""
        logits = self.logits(products)
        if self.rest is None:
            return soft(logits)
        # edited products may have more axes in front: one for each edit of the same rows
        return soft(logits, self.rest.expand(logits.shape[:-1]))

    def largest(self, products: Float[Tensor, "n h k"] | None = None) -> Int[Tensor, "n h"]:
        """Slot of the key with the most attention; −1 if that token is not named.

        Examples
        --------
        >>> keys, others = torch.eye(4)[None, None, :2], torch.tensor([[2.0]])
        >>> AttentionRows(torch.ones(1, 1, 4), keys, scale=1.0, top=others).largest()
        tensor([[-1]])
        """
        best, slot = self.logits(products).max(dim=-1)
        if self.top is None:
            return slot
        return slot.masked_fill(self.top > best, -1)

    def _per_head(self, value: float | Tensor) -> Tensor:
        """A number for all heads, or one for each, as a column beside (heads, keys)."""
        column = torch.as_tensor(value, dtype=self.q.dtype, device=self.q.device).reshape(-1)
        return column[:, None]
