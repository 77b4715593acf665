"""Queries and keys as sums of readable causes, and the share of a head's logit that each pair of causes has.

A vector before rotation is regressed on what a person can read off the text (features ``x_f`` of factor f: the token
itself, the one before it, …), with a ridge:

    y = ȳ + Σ_f B_fᵀ (x_f − x̄_f) + rest                                    (mean, factors, rest: they sum to y)

for queries and for keys, so that a logit ``scale · q·k`` is the sum of a block for each pair of parts. A block's share
is what it adds to the logit of the keys that get attention, above the logit of the keys in sight:

    Σ (E_attention − E_uniform)[block] / Σ (E_attention − E_uniform)[logit]

Blocks sum to 1, as nothing is left out. Sums stream: batches, pieces and machines add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.maths.moments import Accumulator, check_shape

MEAN, REST = "mean", "rest"
_PIECES = 4  # of the queries, each with the keys before its end: five eighths of the work
RIDGE = 0.002  # of the number of tokens, for features of variance 1; chosen on the choosing documents


class FactorSums(Accumulator):
    """Sums of features against vectors, from which every factor's part is fitted.

    Parameters
    ----------
    names, widths : the factors, and how many features each has.
    columns : vectors at each token: query heads and key heads, of all layers.
    d_head : their width.
    about : what the sums are of; sums of other things are not merged.
    device : where the sums are kept.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, mixing = torch.randn(500, 3, generator=generator), torch.randn(3, 4, generator=generator)
    >>> sums = FactorSums(["token", "before"], [2, 1], columns=1, d_head=4)
    >>> sums.see(x)
    >>> sums.add([0], x, (1 + x @ mixing)[:, None])
    >>> fit = sums.fit(ridge=0)
    >>> torch.allclose(fit.coefficients[:, 0], mixing, atol=1e-4), fit.names
    (True, ('mean', 'token', 'before', 'rest'))
    """

    kind = "factors"

    def __init__(
        self,
        names: Sequence[str],
        widths: Sequence[int],
        columns: int,
        d_head: int,
        about: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.names, self.widths, self.about = tuple(names), tuple(widths), dict(about or {})
        size = sum(widths) + 1
        self.gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size, columns, d_head, dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, sharing memory."""
        return {"gram": self.gram, "cross": self.cross}

    def manifest(self) -> dict[str, Any]:
        """Everything but the numbers, as JSON would have it."""
        _, columns, d_head = self.cross.shape
        return {
            "names": list(self.names), "widths": list(self.widths), "columns": columns, "d_head": d_head,
            "about": self.about,
        }  # fmt: skip

    def see(self, x: Float[Tensor, "n p"]) -> None:
        """Add the features of n tokens; their vectors are added layer by layer (`add`)."""
        check_shape("features", x, (len(x), len(self.gram) - 1), "tokens, features")
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        self.gram += (x.T @ x).to(self.gram)

    def add(self, slots: Sequence[int], x: Float[Tensor, "n p"], y: Float[Tensor, "n c d"]) -> None:
        """Add the vectors of some columns at the tokens whose features are ``x``."""
        check_shape("vectors", y, (len(x), len(slots), self.cross.shape[2]), "tokens, columns, d_head")
        flat = y.flatten(1)
        product = torch.cat([x.T @ flat, flat.sum(0, keepdim=True)]).unflatten(1, y.shape[1:]).to(self.cross)
        first = slots[0]
        if list(slots) == list(range(first, first + len(slots))):
            self.cross[:, first : first + len(slots)] += product
        else:
            self.cross[:, torch.tensor(slots, device=self.cross.device)] += product

    def fit(self, ridge: float = RIDGE) -> FactorFit:
        """Every factor's coefficients, all factors together; ``ridge`` is a share of the number of tokens."""
        count = self.gram[-1, -1]
        if float(count) <= len(self.gram):
            raise BadInput(
                f"{int(count)} tokens are too few to fit {len(self.gram) - 1} readings of them: give more text."
            )
        x_mean, y_mean = self.gram[-1, :-1] / count, self.cross[-1] / count
        gram = self.gram[:-1, :-1] - count * torch.outer(x_mean, x_mean)
        cross = (self.cross[:-1] - count * x_mean[:, None, None] * y_mean).flatten(1)
        # a reading that never changes has no coefficient; the floor keeps the factorisation possible
        floor = ridge * count + 1e-9 * gram.diagonal().amax().clamp_min(1e-9)
        lower = torch.linalg.cholesky(gram + floor * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
        found = torch.cholesky_solve(cross, lower).unflatten(1, y_mean.shape)
        covariance = (gram / count).float()
        return FactorFit(self.names, self.widths, x_mean.float(), y_mean.float(), found.float(), covariance)


@dataclass(frozen=True)
class FactorFit:
    """Coefficients of every factor for every column (a query head or a key head).

    Attributes
    ----------
    factors, widths : the factors, and how many features each has.
    x_mean, y_mean : means of features and of vectors, over the tokens fitted on.
    coefficients : Float [p, columns, d].
    x_covariance : of the features, over the tokens fitted on.
    """

    factors: tuple[str, ...]
    widths: tuple[int, ...]
    x_mean: Float[Tensor, " p"]
    y_mean: Float[Tensor, "c d"]
    coefficients: Float[Tensor, "p c d"]
    x_covariance: Float[Tensor, "p p"]

    @property
    def names(self) -> tuple[str, ...]:
        """The parts, in order: the mean, every factor, and what is left."""
        return (MEAN, *self.factors, REST)

    def where(self, factor: str) -> slice:
        """A factor's features."""
        i = self.factors.index(factor)
        start = sum(self.widths[:i])
        return slice(start, start + self.widths[i])

    def of(self, slots: Sequence[int]) -> FactorFit:
        """The fit of some columns alone."""
        slot = torch.tensor(list(slots), device=self.coefficients.device)
        return replace(self, y_mean=self.y_mean[slot], coefficients=self.coefficients[:, slot])

    def factor_parts(self, x: Float[Tensor, "*n p"]) -> Iterator[Float[Tensor, "*n c d"]]:
        """What the factors give to all columns' vectors, one factor after the other."""
        for factor in self.factors:
            own = self.where(factor)
            part = (x[..., own] - self.x_mean[own].to(x)) @ self.coefficients[own].flatten(1).to(x)
            yield part.unflatten(-1, self.y_mean.shape)


def block_sums(
    q_parts: Float[Tensor, "b h f t d"],
    k_parts: Float[Tensor, "b g f s d"],
    weights: Float[Tensor, "b h t s"],
    causal: bool = False,
) -> Float[Tensor, "b h f f"]:
    """``Σ_ts weights · q_i·k_j`` for each query's part i and key's part j; h/g query heads share a key head.

    If ``causal``, later keys than the query have no weight, and most of them are not looked at.
    """
    (b, h, f, t, d), groups = q_parts.shape, k_parts.shape[1]
    grouped = weights.reshape(b, groups, h // groups, t, -1)
    pooled = weights.new_empty(b, h, f, t, d)
    step = max(1, -(-t // _PIECES)) if causal else t
    for first in range(0, t, step):
        last = min(first + step, t)
        seen = last if causal else weights.shape[-1]
        own = grouped[:, :, :, first:last, :seen].reshape(b, groups, -1, seen)
        for j in range(f):
            pooled[:, :, j, first:last] = (own @ k_parts[:, :, j, :seen]).reshape(b, h, last - first, d)
    return q_parts.flatten(3) @ pooled.flatten(3).mT


def shares(
    blocks: Float[Tensor, "u *x"], logit: Float[Tensor, " u"], *, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[Float[Tensor, "*x"], Float[Tensor, "*x"], Float[Tensor, "*x"]]:
    """Shares of a logit from the sums of u documents, and their intervals with documents resampled.

    Parameters
    ----------
    blocks : sums of each block in each document.
    logit : the same of the whole logit.
    draws, level, seed : of the bootstrap; all blocks share its draws.

    Examples
    --------
    >>> share, low, high = shares(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.tensor([4.0, 4.0]))
    >>> share.tolist(), [round(x, 2) for x in low.tolist()]
    ([0.375, 0.625], [0.25, 0.5])
    """
    flat, logit = blocks.flatten(1).double(), logit.double()
    units = len(flat)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(units, (draws, units), generator=generator).to(flat.device)
    counts = flat.new_zeros(draws, units).scatter_add(1, picks, torch.ones_like(picks, dtype=flat.dtype))
    drawn = (counts @ flat) / (counts @ logit)[:, None]
    tail = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=flat.dtype, device=flat.device)
    bounds = drawn.nan_to_num().quantile(tail, dim=0)
    if units < 2:  # of one document there is nothing to resample
        bounds = torch.full_like(bounds, torch.nan)
    share, low, high = (x.reshape(blocks.shape[1:]) for x in (flat.sum(0) / logit.sum(), *bounds))
    return share, low, high


def frequent_axes(
    vectors: Float[Tensor, "n d"], counts: Int[Tensor, " n"] | Float[Tensor, " n"], most: int
) -> Float[Tensor, "n k"]:
    """Vectors in the axes along which frequent ones differ most, scaled so that a feature's mean variance is 1.

    Each vector is first brought to the same length about their mean: rare tokens are longer, and no more telling.
    """
    centred = vectors.double() - vectors.double().mean(0)
    unit = centred / centred.norm(dim=1, keepdim=True).clamp_min(1e-12)
    weight = (counts.double() / counts.sum())[:, None]
    unit = unit - (weight * unit).sum(0)
    values, axes = torch.linalg.eigh((weight * unit).T @ unit)
    kept = axes[:, -min(most, axes.shape[1]) :].flip(1)
    scale = values[-kept.shape[1] :].mean().clamp_min(1e-12).sqrt()
    return (unit @ kept / scale).float()
