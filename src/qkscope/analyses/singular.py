"""The singular basis of every head of a model, from its weights alone, kept in the user's cache by their hash."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import torch

from qkscope.capture.cache import cache_dir
from qkscope.capture.scope import Scope
from qkscope.capture.weights import head_weights
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_call
from qkscope.maths.singular import SingularBasis, basis_of_weights

log = logging.getLogger(__name__)

_AT_ONCE = 1 << 28  # numbers of W_Q and W_K decomposed together: 2 GiB in float64
_CACHED = 1 << 28  # numbers of a basis that is worth keeping: 1 GiB
_VERSION = 2


@checked_call
def singular_basis(
    scope: Scope, heads: str | Head | Sequence[str | Head] | None = None, *, cache: bool = True
) -> SingularBasis:
    """Singular vectors of ``Ω = W_Qᵀ W_K`` of some heads, all by default.

    Norm gains, biases (as a last coordinate, a constant 1) and QK-norm's gain are folded into W; where a norm centres,
    the part of W that reads the mean is taken out, as it reads nothing. Under RoPE it is the basis of the un-rotated
    Ω, over which a logit splits exactly in the query's frame (`qkscope.maths.singular`).

    Parameters
    ----------
    scope : the model.
    heads : heads by name; all of them need 4.3 GB for a model of 8 billion parameters.
    cache : whether to keep the result in the user's cache, under the hash of the weights.

    Examples
    --------
    >>> import qkscope as qk
    >>> qk.singular_basis(qk.Scope.load("nano:mixed"), ["L0H0", "L1H3"], cache=False)
    SingularBasis(L0H0, L1H3: 24 vectors each)
    """
    wanted = scope.parse(heads)
    about = {"weights": scope.weights_hash, "model": scope.name, "dtype": str(scope.model.dtype), "version": _VERSION}
    named = hashlib.sha256(",".join(map(str, wanted)).encode()).hexdigest()[:16]
    kept = {name: about[name] for name in ("weights", "dtype", "version")}
    place = cache_dir("singular", f"{scope.weights_hash}-{named}.safetensors")
    if cache and place.is_file():
        try:
            return SingularBasis.load(place, expect=kept)
        except BadInput as error:
            log.info("%s; made again", error)
    basis = _compute(scope, wanted, about)
    if cache and basis.U.numel() + basis.V.numel() <= _CACHED:
        try:
            basis.save(place)
        except BadInput as error:  # a cache that cannot be written is no reason to fail
            log.info("%s", error)
    return basis


def _compute(scope: Scope, heads: Sequence[Head], about: dict[str, object]) -> SingularBasis:
    weights = head_weights(scope, list(heads))
    step = max(_AT_ONCE // (2 * weights.W_Q[0].numel()), 1)
    parts = []
    for start in range(0, len(heads), step):
        own = slice(start, start + step)
        used, kv_of_head = weights.kv_of_head[own].unique(return_inverse=True)
        parts.append(
            basis_of_weights(
                heads[own],
                weights.W_Q[own],
                weights.W_K[used],
                weights.scale[own],
                weights.c_Q[own],
                [scope.facts.layers[head.layer].offset is not None for head in heads[own]],
                kv_of_head=kv_of_head,
            )
        )
    together = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("U", "S", "V", "read", "scale", "c_Q", "error")
    }
    return SingularBasis(tuple(heads), rotary=tuple(r for part in parts for r in part.rotary), about=about, **together)
