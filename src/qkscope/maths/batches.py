"""A batch of rows, checked before it is added to sums: shapes, names, labels and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkscope.errors import BadInput

if TYPE_CHECKING:
    from qkscope.maths.moments import Moments


def check_batch(
    moments: Moments,
    q: Tensor,
    k: Tensor,
    labels: Mapping[str, Tensor],
    weights: Tensor | None,
    prompts: Tensor | None,
    h: int,
    g: int,
    layer: int | None,
) -> None:
    """Refuse a batch that does not fit these sums: h heads and g key heads, of one layer or of all."""
    if h == 0:
        raise BadInput(f"no head of layer {layer} is accumulated here: the layers are "
                       f"{sorted({head.layer for head in moments.heads})}.")  # fmt: skip
    b, slots = q.shape[0], k.shape[2] if k.ndim == 4 else -1
    _check_shape("queries", q, (b, h, moments.d_head), "rows, heads, d_head")
    _check_shape("keys", k, (b, g, slots, moments.d_head), "rows, key heads, keys, d_head")
    for contrast, label in labels.items():
        if contrast not in moments.contrasts:
            raise BadInput(f"there is no contrast {contrast!r} here: there is {', '.join(moments.contrasts)}.")
        _check_shape(f"labels of {contrast!r}", label, (b, slots), "rows, keys")
        if bool((label.abs() > 1).any()):
            raise BadInput(f"labels of {contrast!r} are 1, -1 or 0: put what a pair weighs into weights.")
    if weights is not None:
        _check_shape("weights", weights, (b, slots), "rows, keys")
        if bool((weights < 0).any()) or not bool(torch.isfinite(weights).all()):
            raise BadInput("pair weights must be finite and not negative: put the sign into the labels.")
    if prompts is not None:
        _check_shape("prompts", prompts, (b,), "rows")
    elif moments.nulls:
        raise BadInput("null replicates need to know which prompt each row belongs to: pass prompts=.")


def _check_shape(what: str, tensor: Tensor, want: tuple[int, ...], axes: str) -> None:
    if tuple(tensor.shape) != want:
        raise BadInput(f"{what} should have shape {want} ({axes}), but have {tuple(tensor.shape)}.")
