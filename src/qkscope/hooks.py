"""Hook: a subspace as an edit of queries or keys while a model runs, in whatever tool runs it.

``remove`` takes the part in the subspace away, ``x − P x``; ``swap`` exchanges it between two
tokens, ``k̃_a = k_a + P (k_b − k_a)`` and ``k̃_b = k_b + P (k_a − k_b)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput
from qkscope.heads import Head

Does = Literal["swap", "remove"]


@dataclass(frozen=True, repr=False)
class Hook:
    """An edit of the queries or keys of a layer, as `Subspace.as_hook` gives it: call it on them.

    Parameters
    ----------
    does : ``swap`` or ``remove``.
    head : the query head whose subspace it is.
    kind : whether ``keys`` or ``queries`` are edited.
    space : ``post_rope`` or ``pre_rope``: where in the layer it belongs.
    basis : orthonormal directions, as columns.
    tokens : the two that are swapped, or those from which the part is removed (none: all); for each
        a column of the batch, or one for each sequence.
    group_size : query heads that share a key head.

    Examples
    --------
    >>> first = torch.eye(4)[:, :1]
    >>> hook = Hook("remove", Head(1, 3), "keys", "post_rope", first, (2,), group_size=2)
    >>> hook.name
    'blocks.1.attn.hook_rot_k'
    >>> hook(torch.ones(1, 2, 3, 4))[0, 1]
    tensor([[1., 1., 1., 1.],
            [1., 1., 1., 1.],
            [0., 1., 1., 1.]])
    """

    does: Does
    head: Head
    kind: Literal["keys", "queries"]
    space: str
    basis: Float[Tensor, "d r"]
    tokens: tuple[int | Int[Tensor, " b"], ...] = ()
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.space not in ("post_rope", "pre_rope"):
            raise BadInput(
                f"{self.space} keys differ for every query, so no hook can edit them: "
                "fit in post_rope."
            )
        if self.does == "swap" and len(self.tokens) != 2:
            raise BadInput(
                f"a swap exchanges two tokens, but got {len(self.tokens)}: "
                "give as_hook('swap', a, b)."
            )

    def __repr__(self) -> str:
        rank = self.basis.shape[1]
        edited = f"{self.space} {self.kind}"
        return f"Hook({self.does} at {self.head}, {edited}, rank {rank})"

    @property
    def name(self) -> str:
        """Name of the hook point in TransformerLens, for a model with rotary positions."""
        side = self.kind[0]
        point = f"hook_rot_{side}" if self.space == "post_rope" else f"hook_{side}"
        return f"{self._layer_name}.{point}"

    @property
    def _layer_name(self) -> str:
        return f"blocks.{self.head.layer}.attn"

    def __call__(self, x: Float[Tensor, "b *hs d"], hook: Any = None) -> Float[Tensor, "b *hs d"]:
        """Edit the queries or keys of one head among those of all heads of the layer, in a copy.

        With grouped-query attention the edited key head serves its whole group, so all query heads
        of it see the edit.

        Parameters
        ----------
        x : [batch, heads, tokens, d_head], with key heads unrepeated, as in transformers; where
            ``hook`` is given, [batch, tokens, heads, d_head], as in TransformerLens.
        hook : TransformerLens' hook point, which it gives to every hook.
        """
        self._check_point(getattr(hook, "name", None))
        tokens_first = hook is not None and getattr(hook, "pos_dim", None) != 2
        head_axis = 2 if tokens_first else 1
        edited = x.clone()
        vectors = edited.select(head_axis, self._column())
        vectors.copy_(self.edited(vectors))
        return edited

    def _check_point(self, point: str | None) -> None:
        """Refuse a hook point of another layer or side."""
        if not point:
            return
        side = self.kind[0]
        # without rotation the last keys are at hook_k, which is called ``k.hook_out`` in a bridge
        fitting = {self.name}
        for name in (f"hook_{side}", f"{side}.hook_out", f"hook_{side}_normed"):
            fitting.add(f"{self._layer_name}.{name}")
        if point not in fitting:
            raise BadInput(
                f"{self!r} belongs at {self.name}, but was called at {point}: "
                "give hook.name to fwd_hooks."
            )

    def _column(self) -> int:
        """Index of the edited head among the query heads, or key heads, of its layer."""
        if self.kind == "queries":
            return self.head.index
        if self.group_size is None:
            advice = "give group_size to as_hook (scope.group_size, or 1 where keys are repeated)"
            raise BadInput(
                f"{self!r} does not know how many query heads share a key head: {advice}."
            )
        return self.head.kv(self.group_size or 1)

    def edited(self, vectors: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Queries or keys of the one head, edited.

        Parameters
        ----------
        vectors : at all tokens of the batch.
        """
        device = vectors.device
        basis = self.basis.to(device, torch.float32)
        inside = (vectors.float() @ basis) @ basis.mT
        if self.tokens:
            change = self._change_at_tokens(inside)
        else:
            change = -inside
        return (vectors.float() + change).to(vectors.dtype)

    def _change_at_tokens(self, inside: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """What is added at the named tokens, given the part of each token in the subspace."""
        batch = len(inside)
        device = inside.device
        rows = torch.arange(batch, device=device)
        places = [torch.as_tensor(token, device=device).expand(batch) for token in self.tokens]
        change = torch.zeros_like(inside)
        for place, other in zip(places, reversed(places), strict=True):
            replacement = inside[rows, other] if self.does == "swap" else 0
            change[rows, place] = replacement - inside[rows, place]
        return change
