"""Many heads of many layers in one product: vectors as ``R (s (σ W x + a) + c)``.

W is one matrix with the norm's gain in it, σ the norm's scalar at a token, a the constants behind
W, s the scalar of a QK-norm (else 1), c its bias (else 0), R the rotation. So a direction y on the
vectors is ``σ s Wᵀ Rᵀ y`` on the stream, and the constants give ``(s a + c)·Rᵀ y``.

W, a and c are read once from the layer's own code (``head_weights``); σ, s and R are those of the
run. In every run the form is compared with the vectors that the model's attention was given: where
they differ the layer is asked by its own code instead (``layer``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.heads import Head
from qkscope.linear.head_weights import Form
from qkscope.linear.layer import Projection, tolerance
from qkscope.model.spaces import Rotary

if TYPE_CHECKING:
    from qkscope.linear.run import Run


class Matrices(NamedTuple):
    """W, a and c of h heads, and what each layer's norm adds under its root, if it has a norm."""

    W: Float[Tensor, "h d e"]
    a: Float[Tensor, "h d"]
    c: Float[Tensor, "h d"]
    eps: Float[Tensor, " l"] | None


def batch_key(run: Run, layer: int) -> Hashable | None:
    """What layers must share to be computed together; None for one without a closed form."""
    form = run.reader.form(layer)
    if form is None:
        return None
    call = run.calls[layer]
    rotary = call.rotary
    turn = rotary and (rotary.function, id(rotary.cos), rotary.q.shape[-1])
    shapes = (call.q.shape, call.k.shape, call.v.shape)
    offset = run.reader.scope.facts.layers[layer].offset
    return shapes, call.q.device, form.centres, form.qk_normed, turn, offset


class ClosedForm:
    """Heads of layers that share a `batch_key`, at some slots of a run.

    Parameters
    ----------
    run : with the true vectors.
    heads : query heads.
    kind : queries, keys or values; several heads may share keys and values.
    slots : of the run.

    Attributes
    ----------
    wrong : layers whose true vectors are not those of the form.
    """

    def __init__(self, run: Run, heads: Sequence[Head], kind: Projection, slots: Any) -> None:
        reader = run.reader
        wanted = [(head.layer, run.index(head, kind)) for head in heads]
        # heads of one group share keys and values; matrices are stacked layer by layer
        distinct = sorted(dict.fromkeys(wanted), key=lambda place: place[0])
        self._index = None  # which of the distinct vectors each head reads
        if wanted != distinct:
            self._index = reader.index([distinct.index(place) for place in wanted])
        first = heads[0].layer
        form = reader.form(first)
        assert form is not None
        self._matrices = reader.matrices(kind, tuple(distinct))
        self._offset = reader.scope.facts.layers[first].offset
        self._rotary = self._rotary_of(run, first, kind, slots)

        layers = list(dict.fromkeys(layer for layer, _ in distinct))
        layer_of_head = reader.index([layers.index(layer) for layer, _ in distinct])
        x = run.hidden(layers, slots)
        W, a, c, eps = self._matrices
        sigma = _norm_scalars(x, eps, form)[layer_of_head].transpose(0, 1)
        Wx = torch.einsum("gnpe,gde->ngpd", x[layer_of_head], W)
        projected = Wx * sigma + a[:, None]

        true = run.vectors(distinct, kind, slots)
        unrotated = self._turned(true, back=True) - c[:, None]
        self._s = torch.ones_like(sigma)
        if form.qk_normed and kind != "v":
            self._s = _best_scalar(unrotated, projected)
        self._factor = sigma * self._s

        error = _largest(projected * self._s - unrotated)
        allowed = tolerance(run.calls[first].q) * _largest(true)
        self.wrong: set[int] = set()
        for (layer, _), agrees in zip(distinct, (error <= allowed).tolist(), strict=True):
            if not agrees:
                self.wrong.add(layer)

    def _rotary_of(self, run: Run, layer: int, kind: Projection, slots: Any) -> Rotary | None:
        """The rotation of queries or keys at the slots; values are not rotated."""
        rotary = run.calls[layer].rotary
        if kind == "v" or self._offset is None or rotary is None:
            return None
        return rotary.unit.at(run.row, run.columns[:, slots])

    def _turned(self, x: Float[Tensor, "n h p d"], back: bool = False) -> Float[Tensor, "n h p d"]:
        """Vectors after the rotation R, or taken back before it."""
        if self._rotary is None:
            return x
        return self._rotary.turn(x, self._offset or 0, back)

    def pull(
        self, along: Float[Tensor, "n h p d"]
    ) -> tuple[Float[Tensor, "n h p d_model"], Float[Tensor, "n h p"]]:
        """Pull directions on the heads' vectors back to the stream.

        Returns
        -------
        directions on the stream, and each direction's product with the constants
        """
        W, a, c, _ = self._matrices
        s = self._s
        factor = self._factor
        if self._index is not None:
            W = W[self._index]
            a = a[self._index]
            c = c[self._index]
            s = s[:, self._index]
            factor = factor[:, self._index]
        y = self._turned(along, back=True)
        with_a = torch.einsum("nhpd,hd->nhp", y * s, a)
        with_c = torch.einsum("nhpd,hd->nhp", y, c)
        on_stream = torch.einsum("nhpd,hde->nhpe", y * factor, W)
        return on_stream, with_a + with_c

    def push(self, parts: Float[Tensor, "n c p d_model"]) -> Float[Tensor, "n c p d"]:
        """Parts of the stream as parts of one head's vectors; constants go to the last part."""
        W, a, c, _ = self._matrices
        vectors = parts @ W[0].T * self._factor[:, :1]
        constant = a[0] * self._s[:, 0] + c[0]
        vectors[:, -1] += constant
        return self._turned(vectors)


def _largest(vectors: Float[Tensor, "n h p d"]) -> Float[Tensor, " h"]:
    """The largest number of each head's vectors."""
    return vectors.abs().amax((0, 2, 3))


def _norm_scalars(
    x: Float[Tensor, "l n p d_model"], eps: Float[Tensor, " l"] | None, form: Form
) -> Float[Tensor, "l n p 1"]:
    """σ of each layer's norm at each place; 1 where no norm stands before W."""
    if eps is None:
        return torch.ones_like(x[..., :1])
    centred = x - x.mean(-1, keepdim=True) if form.centres else x
    variance = centred.square().mean(-1, keepdim=True)
    return (variance + eps[:, None, None, None]).rsqrt()


def _best_scalar(
    target: Float[Tensor, "n h p d"], vectors: Float[Tensor, "n h p d"]
) -> Float[Tensor, "n h p 1"]:
    """The scalar of each token and head that brings a vector closest to its target."""
    products = (target * vectors).sum(-1, keepdim=True)
    return products / vectors.square().sum(-1, keepdim=True).clamp_min(1e-30)
