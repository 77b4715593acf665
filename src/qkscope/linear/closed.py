"""Layers in closed form: vectors of many heads, and of many layers, in a few products.

Where a layer's vectors are ``R (s (σ W x + a) + c)`` - a norm's scalar σ, one matrix, a rotation R, and the scalar s of
a QK-norm - a direction y on them is the direction ``σ s Wᵀ Rᵀ y`` on the stream. W is read once off the layer's own
code (`weights.form_of`); σ, s and R are those of the run. Every time the form is checked against the vectors that the
model's attention was given: a layer that differs is asked by its own code (`layer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.heads import Head
from qkscope.linear.layer import AGREES, Kind

if TYPE_CHECKING:
    from qkscope.linear.recorded import Recorded


def alike(run: Recorded, layer: int) -> tuple[Any, ...] | None:
    """What layers must share to be done together; None for a layer without a closed form."""
    form, call = run.reader.form(layer), run.calls[layer]
    if form is None:
        return None
    rotary, shapes = call.rotary, (call.q.shape, call.k.shape, call.v.shape)
    turn = rotary and (rotary.function, id(rotary.cos), rotary.q.shape[-1])
    return shapes, call.q.device, form.centres, form.qk_normed, turn, run.reader.scope.facts.layers[layer].offset


class Closed:
    """Heads of layers that are `alike`, at some slots of a run.

    Parameters
    ----------
    run : whose vectors.
    heads : query heads.
    kind : whether their queries, keys or values are meant; several heads may share keys and values.
    slots : of the run.
    """

    def __init__(self, run: Recorded, heads: Sequence[Head], kind: Kind, slots: Any) -> None:
        named = [(head.layer, run.index(head, kind)) for head in heads]
        own = list(dict.fromkeys(named))
        reader, place = run.reader, {at: i for i, at in enumerate(own)}
        layers = {layer: i for i, layer in enumerate(dict.fromkeys(layer for layer, _ in own))}
        self.index = None if named == own else reader.index([place[at] for at in named])
        first = own[0][0]
        call, form, offset = run.calls[first], reader.form(first), reader.scope.facts.layers[first].offset
        assert form is not None
        self.W, self.a, self.c, eps = reader.matrices(kind, tuple(own))
        turns = kind != "v" and call.rotary is not None and offset is not None
        self._rotary = run.rotation(first) if turns else None
        self._at: Any = run.row, run.columns[:, slots], offset or 0
        x = torch.stack([run.hidden(layer, slots) for layer in layers])
        of_layer = reader.index([layers[layer] for layer, _ in own])
        made = torch.einsum("gnpe,gde->ngpd", x[of_layer], self.W)
        self.factor: Tensor | None = None  # σ s
        if eps is not None:
            centred = x - x.mean(-1, keepdim=True) if form.centres else x
            sigma = (centred.square().mean(-1) + eps[:, None, None]).rsqrt()
            self.factor = sigma[of_layer].transpose(0, 1)[..., None]
            made = made * self.factor
        made = made + self.a[:, None]
        true = run.vectors(own, kind, slots)
        before = self._turned(true, back=True) - self.c[:, None]
        self.s: Tensor | None = None
        if form.qk_normed and kind != "v":
            self.s = (before * made).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True).clamp_min(1e-30)
            self.factor = self.s if self.factor is None else self.factor * self.s
            made = made * self.s
        close = max(AGREES, 4 * torch.finfo(call.q.dtype).eps)
        fine = (made - before).abs().amax((0, 2, 3)) <= close * true.abs().amax((0, 2, 3))
        self.wrong = {layer for (layer, _), agrees in zip(own, fine.tolist(), strict=True) if not agrees}

    def _turned(self, x: Float[Tensor, "n h p d"], back: bool = False) -> Float[Tensor, "n h p d"]:
        row, columns, offset = self._at
        return x if self._rotary is None else self._rotary.turn(x, row, columns, offset, back)

    def pull(self, along: Float[Tensor, "n h p d"]) -> tuple[Float[Tensor, "n h p d_model"], Float[Tensor, "n h p"]]:
        """Directions on the heads' vectors as directions on the stream, and what the constants say in them."""
        y = self._turned(along, back=True)
        W, a, c = (x if self.index is None else x[self.index] for x in (self.W, self.a, self.c))
        factor, s = (x if x is None or self.index is None else x[:, self.index] for x in (self.factor, self.s))
        said = torch.einsum("nhpd,hd->nhp", y if s is None else y * s, a) + torch.einsum("nhpd,hd->nhp", y, c)
        return torch.einsum("nhpd,hde->nhpe", y if factor is None else y * factor, W), said

    def push(self, parts: Float[Tensor, "n c p d_model"]) -> Float[Tensor, "n c p d"]:
        """Parts of the stream as parts of one head's vectors; the constants go to the last one."""
        made = parts @ self.W[0].T
        made = made if self.factor is None else made * self.factor[:, :1]
        made[:, -1] += (self.a[0] if self.s is None else self.a[0] * self.s[:, 0]) + self.c[0]
        return self._turned(made)
