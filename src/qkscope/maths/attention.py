"""Attention rows as far as an edit needs them: the named keys, and one number for all the others.

``a_i = exp(ℓ_i) / (Σ_named exp(ℓ_j) + exp(rest))`` with ``ℓ = cap · tanh(scale · q·k / cap) + bias`` (no cap: the plain
product). ``rest`` is the log-sum-exp of everything that was not named - other keys, attention sinks - so the row is the
model's whole row, and editing named keys needs no second forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.errors import BadInput


@dataclass(frozen=True)
class AttentionRows:
    """Queries and named keys of n rows for h heads.

    Parameters
    ----------
    q : queries; with a keys axis, the query as each key sees it (for swaps of content under RoPE).
    k : named keys, once per key head.
    kv_of_head : which key head each head reads; 0, 1, … by default.
    scale : factor on q·k, as the model's attention call passes it.
    softcap : soft-cap of each head; infinite where there is none.
    bias : what is added to a logit after the cap (0, or −inf where the key is masked).
    rest : log-sum-exp of all the logits that are not named; −inf where the named keys are the whole row.
    key_mask : False where a slot is padding.
    """

    q: Float[Tensor, "n h d"] | Float[Tensor, "n h k d"]
    k: Float[Tensor, "n g k d"]
    scale: float | Float[Tensor, " h"]
    kv_of_head: Int[Tensor, " h"] | None = None
    softcap: Float[Tensor, " h"] | None = None
    bias: Float[Tensor, "n h k"] | None = None
    rest: Float[Tensor, "n h"] | None = None
    key_mask: Bool[Tensor, "n k"] | None = None

    def __post_init__(self) -> None:
        if self.q.ndim not in (3, 4) or self.k.ndim != 4 or self.q.shape[-1] != self.k.shape[-1]:
            raise BadInput("queries should have shape (rows, heads, d_head) and keys (rows, key heads, keys, d_head), "
                           f"but have {tuple(self.q.shape)} and {tuple(self.k.shape)}.")  # fmt: skip
        if self.kv_of_head is None and self.q.shape[1] != self.k.shape[1]:
            raise BadInput(f"{self.q.shape[1]} heads cannot read {self.k.shape[1]} key heads without kv_of_head.")

    @property
    def d_head(self) -> int:
        """Width of the heads."""
        return self.k.shape[-1]

    def keys_of_heads(self, slots: Int[Tensor, " n"]) -> Float[Tensor, "n h d"]:
        """The key in one slot of each row, as each head reads it."""
        picked = self.k[torch.arange(len(slots), device=slots.device), :, slots]
        return picked if self.kv_of_head is None else picked[:, self.kv_of_head]

    def queries_at(self, slots: Int[Tensor, " n"]) -> Float[Tensor, "n h d"]:
        """The query as the key in one slot of each row sees it."""
        return self.q if self.q.ndim == 3 else self.q[torch.arange(len(slots), device=slots.device), :, slots]

    def products(self) -> Float[Tensor, "n h k"]:
        """``scale · q·k`` of every named key, before cap and mask."""
        keys = self.k if self.kv_of_head is None else self.k[:, self.kv_of_head]
        pattern = "nhd,nhkd->nhk" if self.q.ndim == 3 else "nhkd,nhkd->nhk"
        return torch.einsum(pattern, self.q, keys) * self._per_head(self.scale)

    def logits(self, products: Float[Tensor, "n h k"]) -> Float[Tensor, "n h k"]:
        """Logits as the softmax sees them: capped, and masked."""
        if self.softcap is not None:
            cap = self._per_head(self.softcap)
            capped = cap * torch.tanh(products / cap)
            products = torch.where(cap.isinf(), products, capped)
        if self.bias is not None:
            products = products + self.bias
        if self.key_mask is not None:
            products = products.masked_fill(~self.key_mask[:, None, :], -torch.inf)
        return products

    def attention(self, products: Float[Tensor, "n h k"]) -> Float[Tensor, "n h k"]:
        """Attention on the named keys, normalised over the whole row."""
        logits = self.logits(products)
        total = logits.logsumexp(dim=-1)
        if self.rest is not None:
            total = torch.logaddexp(total, self.rest)
        return (logits - total[..., None]).exp()

    def _per_head(self, value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=self.q.dtype, device=self.q.device).reshape(-1)[:, None]
