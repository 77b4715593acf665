"""Relative attention over the weights' singular basis: ``r = ℓ_i − mean_{j≠i} ℓ_j = Σ_m c_m``.

Queries and keys are taken in the query's frame, where the split is exact under RoPE too
(`qkscope.sums.singular`); the mean runs over the other keys that the query sees, so a sliding
window counts its own keys alone. A sink has a logit but no key, and takes no part. Where a family
caps its logits, r is the logit before the cap: ``scale · qᵀ Δk``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import Scope
from qkscope.checking import checked_call
from qkscope.heads import Head
from qkscope.linear.head_weights import head_weights
from qkscope.model.capture_types import Capture
from qkscope.seeds import derived_seed
from qkscope.sums import singular as measure
from qkscope.sums.singular import SingularBasis, basis_of_weights, singular_coordinates

TOLERANCE = 0.99


@checked_call
def singular_basis(
    scope: Scope, heads: str | Head | Sequence[str | Head] | None = None
) -> SingularBasis:
    """Singular vectors of ``Ω = W_Qᵀ W_K`` of some heads, all by default.

    Norm gains, biases (as a last coordinate, a constant 1) and QK-norm's gain are folded into W;
    where a norm centres, the part of W that reads the mean is taken out, as it reads nothing. Under
    RoPE it is the basis of the un-rotated Ω, over which a logit splits exactly in the query's frame
    (`qkscope.sums.singular`).

    Parameters
    ----------
    scope : the model.
    heads : heads by name; all of them need 4.3 GB for a model of 8 billion parameters.

    Examples
    --------
    >>> import qkscope as qk
    >>> qk.sums.singular_basis(qk.Scope.load("nano:mixed"), ["L0H0", "L1H3"])
    SingularBasis(L0H0, L1H3: 24 vectors each)
    """
    wanted = scope.parse(heads)
    weights = head_weights(scope, wanted)
    dtype = str(scope.model.dtype)
    about = {"weights": scope.weights_hash, "model": scope.name, "dtype": dtype}
    rotary = [scope.facts.layers[head.layer].offset is not None for head in wanted]
    tensors = weights.W_Q, weights.W_K, weights.scale, weights.c_Q
    return basis_of_weights(wanted, tensors, rotary, weights.kv_of_head, about)


class RelativeRows(NamedTuple):
    """Terms of relative attention, for each row (an example's query) and head.

    They are NaN where a query does not see the key.
    ``terms = query · s · key``, with ``query = α`` (QK-norm's scalar included), ``key = γ / σ``
    times the call's scale. ``constant`` is the part of QK-norm's own bias: ``terms.sum(-1) +
    constant = relative``.
    """

    terms: Float[Tensor, "b h m"]
    constant: Float[Tensor, "b h"]
    relative: Float[Tensor, "b h"]
    attention: Float[Tensor, "b h"]
    query: Float[Tensor, "b h m"]
    s: Float[Tensor, "h m"]
    key: Float[Tensor, "b h m"]
    q: Float[Tensor, "b h d"]
    difference: Float[Tensor, "b h d"]

    def values(
        self, draws: int, seed: int, prompts: Sequence[int]
    ) -> dict[str, Float[Tensor, "b h"]]:
        """Measures of how few terms carry each row, beside those of rotated bases and random terms.

        ``rotated`` turns the two sides' singular vectors independently, ``rotated_shared`` the head
        space as a whole; ``prompts`` are the numbers that address their draws.
        """
        terms = self.terms
        # draws by rows by heads by components
        turned = measure.turned_terms(self.query * self.key, self.s, draws, prompts, seed)
        rotated = measure.sparsity(turned)
        shared_seed = derived_seed(seed, "shared")
        rotated_shared = measure.shared_sparsity(
            self.q, self.difference, draws, prompts, shared_seed
        )
        sigma_rotated = self._sigma_correlation(turned)
        largest_rotated = measure.largest_place(turned)
        return {
            "sparsity": measure.sparsity(terms),
            "rotated": rotated.mean(0),
            "rotated_shared": rotated_shared,
            "relative": self.relative,
            "attention": self.attention,
            "count": measure.reconstruction_count(terms),
            "count_tol": measure.reconstruction_count(terms, TOLERANCE),
            "count_null": measure.null_count(terms, draws=draws, seed=seed),
            "count_tol_null": measure.null_count(terms, TOLERANCE, draws, seed),
            "cancellation": measure.cancellation(terms),
            "sigma_correlation": self._sigma_correlation(terms),
            "sigma_rotated": sigma_rotated.mean(0),
            "largest": measure.largest_place(terms),
            "largest_rotated": largest_rotated.mean(0),
        }

    def _sigma_correlation(self, terms: Float[Tensor, "*r b h m"]) -> Float[Tensor, "*r b h"]:
        """Rank correlation of the terms' sizes with the singular values."""
        return measure.rank_correlation(terms.abs(), self.s.expand_as(terms))


def relative_rows(
    captured: Capture,
    attended: Tensor,
    basis: SingularBasis,
    rows: Any = slice(None),
    heads: Any = None,
) -> RelativeRows:
    """Split the relative attention of captured rows over the singular basis.

    Parameters
    ----------
    captured : in the query's frame, with every key of their sequence (`Places.everywhere`).
    attended : slot of the key asked about, for each row and head; (b, 1) where it is one for all
        heads.
    basis : the singular basis of its heads.
    rows, heads : which of them, by number; all by default.
    """
    columns = list(range(len(captured.heads)) if heads is None else heads)
    index = basis.index([captured.heads[column] for column in columns])
    key_heads = captured.kv_of_head[columns]
    k = captured.k[rows][:, key_heads].double().cpu()
    q = captured.q[rows][:, columns].double().cpu()
    scale = captured.scale[columns].double().cpu()[:, None]
    slot = attended.expand(-1, len(columns)).cpu().long()
    seen = captured.bias[rows][:, columns].isfinite().cpu()
    is_seen = _at_slot(seen, slot)
    valid = is_seen & (seen.sum(-1) > 1)
    # what cannot be compared is compared with anything, and unknown
    is_valid = valid[..., None]
    compared = torch.where(is_valid, seen, torch.ones_like(seen))
    difference = measure.key_difference(k, slot, compared)
    difference = difference.masked_fill(~is_valid, torch.nan)
    constant = basis.c_Q[index].double()
    s = basis.S[index].double()
    alpha, gamma = singular_coordinates(basis.read[index], q - constant, difference)
    limits = torch.finfo(torch.float64)
    floor = limits.eps * s.amax(-1, keepdim=True)
    unscaled = gamma / s.clamp_min(limits.tiny)
    key_coordinates = torch.where(s > floor, unscaled, 0.0)
    pattern = captured.attention()[rows][:, columns].cpu()
    attention = _at_slot(pattern, slot).double()
    # r, and the part of it that no token decides, of each row and head
    relative = (q * difference).sum(-1)
    constant_part = (constant * difference).sum(-1)
    return RelativeRows(
        terms=scale * alpha * gamma,
        constant=scale[:, 0] * constant_part,
        relative=scale[:, 0] * relative,
        attention=attention.masked_fill(~valid, torch.nan),
        query=alpha,
        s=s,
        key=scale * key_coordinates,
        q=q,
        difference=scale * difference,
    )


def _at_slot(values: Float[Tensor, "b h t"], slot: Int[Tensor, "b h"]) -> Float[Tensor, "b h"]:
    """Values at the key asked about, of each row."""
    return values.gather(-1, slot[..., None])[..., 0]
