"""Null replicates of ΔC, and p-values.

Each row of data is a query and the label-weighted sums of its keys, ``s± = Σ_j w_j [k_j; 1]`` over
the keys labelled ±. A null changes only those sums, so replicates stream beside the data and
nothing is stored. One set of signs serves two:

- ``sign_flip``: multiply a unit's sums by one random sign. H0: the conditions do not differ.
- ``interaction``: the same signs, on what is left of ``(q − q̄) s`` when the difference that every
  query sees alike, in the row's own scale, is taken out. H0: a difference that ignores the query
  (`interaction_deltas`).

The random unit is whatever ``prompts`` numbers: the **prompt**, or all prompts that share a word or
are copies. Signs per (query, key) pair would inflate the significance tenfold, and signs per prompt
where six words are used again and again nearly as much.

A head's ΔC is held against its null by its largest singular value, which one strong direction
raises, and by its norm, which many weaker ones raise. Both are put into units of the head's own
null, ``z = (x − mean)/sd``, and so is each replicate among the others; the larger z is what counts,
of the head and of its replicates alike.

R replicates give no p-value below 1/(R + 1), and false-discovery control over a dozen heads asks
for less. Where some of a head's own replicates reach its z, they say how often. Where none does,
the replicates of all heads together do: in these units heads are alike, and their tail reaches
further. No p-value is below a floor: with W units there are but 2^(W − 1) ways to flip their signs,
and six words are six words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.heads import Center

Sums = Float[Tensor, "*n a 2 a"]  # Σ w [q; 1] [k; 1]ᵀ over + and over −; a = d + 1
_TINY = 1e-300  # keeps a division by a spread of 0 finite, in float64


class Statistic(NamedTuple):
    """A number of a head's ΔC, and the same number of each null replicate."""

    observed: float
    null: Sequence[float]


def centred_delta(
    sums: Sums, center: Center = "none", *, reference: Sums | None = None
) -> Float[Tensor, "*n d d"]:
    """ΔC from augmented sums, as it is or with the mean query's part taken out.

    It is normalised by, and centred on, the means of ``reference`` (themselves by default).
    """
    if reference is None:
        reference = sums
    count = reference[..., -1:, :, -1:]
    # the augmented difference, (d + 1) × (d + 1): its last row is that of the mean keys
    delta = _difference(sums / count)
    if center == "none":
        return delta[..., :-1, :-1]
    # halfway between the mean queries of the two conditions: d × 1
    mean_queries = (reference / count)[..., :-1, :, -1:]
    mean_query = mean_queries.mean(dim=-2)
    mean_keys = delta[..., -1:, :]
    centred = delta[..., :-1, :] - mean_query * mean_keys
    return centred[..., :-1]


def _difference(signed: Float[Tensor, "*n 2 x"]) -> Float[Tensor, "*n x"]:
    """Difference of what belongs to + and what belongs to −."""
    plus, minus = signed.unbind(dim=-2)
    return plus - minus


def key_sums(
    labels: Int[Tensor, "b k"], keys: Float[Tensor, "b g k d"]
) -> Float[Tensor, "b g 2 d+1"]:
    """``Σ_j [k_j; 1]`` of every row, over its + keys and over its − keys.

    All keys of a row share its query, so ``Σ_j q k_jᵀ = q (Σ_j k_j)ᵀ``.
    """
    signs = torch.stack([labels > 0, labels < 0], dim=-2)
    weights = signs.to(keys)[:, None]
    augmented = pad(keys, (0, 1), value=1.0)
    return weights @ augmented


def mean_difference(sums: Float[Tensor, "b g 2 a"]) -> Float[Tensor, "b g d"]:
    """Mean + key of a row less its mean − key; a mean over no keys counts as 0."""
    tiny = torch.finfo(sums.dtype).tiny
    counts = sums[..., -1:].clamp_min(tiny)
    return _difference(sums[..., :-1] / counts)


def row_scale(sums: Float[Tensor, "b g 2 a"]) -> Float[Tensor, "b g 2 1"]:
    """Size of a row's difference ``|mean⁺ − mean⁻|``, times its weights.

    Where a row has one sign, it is the size of its mean key. A prompt may scale its queries and
    keys together. In units of its own size no row's difference stands out, so what shared scale
    makes of a difference of means is told from an interaction.
    """
    size = mean_difference(sums).norm(dim=-1)
    weights = sums[..., -1:]
    return size[..., None, None] * weights


def interaction_deltas(
    observed: Float[Tensor, "a 2 a+1"], flipped: Float[Tensor, "r a 2 a+1"], units: float
) -> tuple[Float[Tensor, "d d"], Float[Tensor, "r d d"]]:
    """The centred ΔC under H0: a difference of means that ignores the query, in rows of any scale.

    First the part that is the same in all replicates, then the replicates, that part included.

    The last column of the sums is ``Σ [q; 1] a±`` with ``a±`` a row's scale times its weight. A
    row's part ``(q − q̄) (s⁺ − a⁺ m⁺)ᵀ / Σw⁺``, less the same of −, with ``m± = Σ s± / Σ a±``, has
    mean 0 under H0, also where queries and keys share their scale: it may as well have the other
    sign. The rest of ΔC is left as it is.

    ``q̄`` and ``m±`` are estimated. A difference ``m⁺ − m⁻`` that is no larger than chance makes it
    nine times in ten is not taken out: it would be noise of the very rows, and leave the parts of
    large ones too small. For each of the two that is taken out, the parts grow as a sample's
    deviations do, by ``√(units / (units − 1))``.
    """
    difference = _scaled_difference(observed, observed).norm()
    by_chance = _scaled_difference(flipped, observed).norm(dim=-1)
    means_differ = bool(difference > by_chance.quantile(0.9))
    estimated = 2 if means_differ else 1
    growth = (units / (units - 1)) ** (estimated / 2)
    delta = centred_delta(observed[..., :-1], "query")
    fixed = delta - _interaction_part(observed, observed, means_differ)
    return fixed, fixed + growth * _interaction_part(flipped, observed, means_differ)


def _scaled_difference(
    sums: Float[Tensor, "*n a 2 a+1"], observed: Float[Tensor, "a 2 a+1"]
) -> Float[Tensor, "*n d"]:
    """``m⁺ − m⁻``: difference of the mean keys, in units of the rows' scales."""
    scale = observed[-1, :, -1:]
    totals = sums[..., -1, :, :-2]
    means = torch.where(scale > 0, totals / scale, torch.zeros_like(scale))
    return _difference(means)


def _interaction_part(
    sums: Float[Tensor, "*n a 2 a+1"], observed: Float[Tensor, "a 2 a+1"], means_differ: bool
) -> Float[Tensor, "*n d d"]:
    """Part of ΔC that rows with these signs add beyond the observed means ``q̄`` and ``m±``.

    Where the means do not differ, both conditions have the mean of the two.
    """
    d = sums.shape[-1] - 2
    total, count, scale = observed[-1].split([d, 1, 1], dim=-1)
    query_total = observed[:-1, :, d]
    mean_query = (query_total / count[:, 0]).mean(dim=-1)
    mean_key = torch.where(scale > 0, total / scale, torch.zeros_like(total))
    if not means_differ:
        mean_key = mean_key.mean(dim=0)
    # Σ (q − q̄) [s; w; a]ᵀ
    of_queries = sums[..., :-1, :, :]
    of_rows = sums[..., -1:, :, :]
    centred = of_queries - mean_query[:, None, None] * of_rows
    keys, _, scales = centred.split([d, 1, 1], dim=-1)
    return _difference((keys - scales * mean_key) / count)


def p_value(null: Float[Tensor, "*r"], value: float) -> float:
    """``(1 + how many of the null reach the value) / (1 + how many there are)``.

    >>> p_value(torch.tensor([1.0, 2.0, 3.0]), 3.0)
    0.5
    """
    reached = int((null >= value).sum())
    # Python's division: in float32, 1/20 is above .05
    return (1 + reached) / (1 + null.numel())


def head_p_values(heads: Sequence[Sequence[Statistic]], floor: float = 0.0) -> list[float]:
    """P-value of each head from its statistics; 1 where it has none."""
    scores = [_largest_z(statistics) for statistics in heads]
    if not scores:
        return []
    pooled = torch.cat([null for _, null in scores])
    p_values = []
    for z, null in scores:
        has_statistics = len(null) > 0
        is_beyond_its_null = has_statistics and not bool((null >= z).any())
        p = p_value(pooled if is_beyond_its_null else null, z)
        p_values.append(min(max(p, floor), 1.0))
    return p_values


def _largest_z(statistics: Sequence[Statistic]) -> tuple[float, Float[Tensor, " r"]]:
    """The larger z of a head, and that of each of its replicates among the other replicates."""
    if not statistics:
        return 0.0, torch.zeros(0)
    observed = torch.tensor([value for value, _ in statistics], dtype=torch.float64)
    null = torch.tensor([replicates for _, replicates in statistics], dtype=torch.float64)
    rounding = 1e-12 * observed.abs() + _TINY
    spread = null.std(dim=1, correction=0).maximum(rounding)
    z = (observed - null.mean(dim=1)) / spread
    # mean and spread of the other replicates, for each replicate
    others = max(null.shape[1] - 1, 1)
    mean = _sum_of_others(null) / others
    mean_square = _sum_of_others(null.square()) / others
    variance = mean_square - mean.square()
    spread_of_others = variance.clamp_min(_TINY).sqrt()
    z_null = (null - mean) / spread_of_others
    return float(z.max()), z_null.amax(dim=0)


def _sum_of_others(values: Float[Tensor, "s r"]) -> Float[Tensor, "s r"]:
    """For each value of a row, the sum of all the others."""
    return values.sum(dim=1, keepdim=True) - values


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg adjusted p-values: calls at ≤ α have an expected share ≤ α of false ones.

    >>> [round(q, 3) for q in false_discovery([0.01, 0.04, 0.03, 0.5])]
    [0.04, 0.053, 0.053, 0.5]
    """
    from scipy.stats import false_discovery_control  # takes a while to import

    if not p_values:
        return []
    return false_discovery_control(p_values).tolist()
