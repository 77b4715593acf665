"""What chance would have given, and so how sure a number is: null replicates, p-values, intervals.

Each row of data is a query and the label-weighted sums of its keys, ``s± = Σ_j w_j [k_j; 1]`` over
the keys labelled ±. A null changes only those sums, so replicates stream beside the data and
nothing is stored. One set of signs serves two:

- ``sign_flip``: multiply a unit's sums by one random sign. H0: the conditions do not differ.
- ``interaction``: the same signs, on what is left of ``(q − q̄) s`` when the difference that every
  query sees alike, in the row's own scale, is taken out. H0: a difference that ignores the query
  (`interaction_deltas`).

The random unit is whatever ``prompts`` numbers: the **prompt**, or all prompts that share a word or
are copies. Signs per (query, key) pair would inflate the significance tenfold, and signs per prompt
where six words are used again and again nearly as much. Intervals resample the same units.

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
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

Center = Literal["none", "query"]  # what is taken out of ΔC: nothing, or what the mean query sees
Sums = Float[Tensor, "*n a 2 a"]  # augmented, of + and of −
Statistic = tuple[
    float, Sequence[float]
]  # what a head reached, and what each of its replicates did
_DRAWS_AT_ONCE = (
    200  # resamples of an interval: all at once would take as much room as prompts times draws
)
_ORDERS = 999  # random ones, beside which neighbours are compared


def centred_delta(
    sums: Sums, center: Center = "none", *, reference: Sums | None = None
) -> Float[Tensor, "*n d d"]:
    """ΔC from augmented sums; normalised by, and centred on, the means of ``reference`` (themselves
    by default).
    """
    reference = sums if reference is None else reference
    count = reference[..., -1:, :, -1:]
    conditional = sums / count
    delta = (
        conditional[..., 0, :] - conditional[..., 1, :]
    )  # the augmented difference, (d + 1) × (d + 1)
    if center == "none":
        return delta[..., :-1, :-1]
    mean_query = (reference / count)[..., :-1, :, -1:].mean(
        dim=-2
    )  # halfway between the conditions: d × 1
    return (delta[..., :-1, :] - mean_query * delta[..., -1:, :])[..., :-1]


def key_sums(
    labels: Int[Tensor, "b k"], keys: Float[Tensor, "b g k d"]
) -> Float[Tensor, "b g 2 d+1"]:
    """``Σ_j [k_j; 1]`` of every row over its + keys and over its − keys: they share its q, so they
    meet it summed.
    """
    weights = torch.stack([labels > 0, labels < 0], dim=-2).to(keys)
    return weights[:, None] @ pad(keys, (0, 1), value=1.0)


def mean_difference(sums: Float[Tensor, "b g 2 a"]) -> Float[Tensor, "b g d"]:
    """Mean + key of a row less its mean − key, 0 where it has none."""
    means = sums[..., :-1] / sums[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny)
    return means[..., 0, :] - means[..., 1, :]


def row_scale(sums: Float[Tensor, "b g 2 a"]) -> Float[Tensor, "b g 2 1"]:
    """Size of a row's difference ``|mean⁺ − mean⁻|`` (of its mean key, where it has one sign),
    times its weights.

    A prompt may scale its queries and keys together. In units of its own size no row's difference
    stands out, so what shared scale makes of a difference of means is told from an interaction.
    """
    return mean_difference(sums).norm(dim=-1)[..., None, None] * sums[..., -1:]


def interaction_deltas(
    observed: Float[Tensor, "a 2 a+1"], flipped: Float[Tensor, "r a 2 a+1"], units: float
) -> tuple[Float[Tensor, "d d"], Float[Tensor, "r d d"]]:
    """The centred ΔC under H0: a difference of means that ignores the query, in rows of whatever
    scale.

    First the part that is the same in all of them, then the replicates, that part included.

    The last column of the sums is ``Σ [q; 1] a±`` with ``a±`` a row's scale times its weight. A
    row's part ``(q − q̄) (s⁺ − a⁺ m⁺)ᵀ / Σw⁺``, less the same of −, with ``m± = Σ s± / Σ a±``, has
    mean 0 under H0, also where queries and keys share their scale: it may as well have the other
    sign. The rest of ΔC is left as it is.

    ``q̄`` and ``m±`` are estimated. A difference ``m⁺ − m⁻`` that is no larger than chance makes it
    nine times in ten is not taken out: it would be noise of the very rows, and leave the parts of
    large ones too small. For each of the two that is taken out, the parts grow as a sample's
    deviations do, by ``√(units / (units − 1))``.
    """
    d = observed.shape[-1] - 2
    scale = observed[-1, :, d + 1 :]

    def mean_difference(sums: Tensor) -> Tensor:
        means = torch.where(scale > 0, sums[..., -1, :, :d] / scale, torch.zeros_like(scale))
        return means[..., 0, :] - means[..., 1, :]

    sure = bool(
        mean_difference(observed).norm() > mean_difference(flipped).norm(dim=-1).quantile(0.9)
    )
    grown = (units / (units - 1)) ** (1.0 if sure else 0.5)
    fixed = centred_delta(observed[..., :-1], "query") - _interaction_part(observed, observed, sure)
    return fixed, fixed + grown * _interaction_part(flipped, observed, sure)


def _interaction_part(sums: Tensor, observed: Tensor, sure: bool) -> Float[Tensor, "*n d d"]:
    d = sums.shape[-1] - 2
    count = observed[-1, :, d, None]
    mean_query = (observed[:-1, :, d] / count[:, 0]).mean(dim=-1)
    queries = sums[..., :-1, :, :] - mean_query[:, None, None] * sums[..., -1:, :, :]
    total = observed[-1, :, :d]
    scale = observed[-1, :, d + 1 :]
    expected = torch.where(scale > 0, total / scale, torch.zeros_like(total))
    level = expected.mean(dim=0)
    expected = level + sure * (expected - level)
    left = (queries[..., :d] - queries[..., d + 1 :] * expected) / count
    return left[..., 0, :] - left[..., 1, :]


def clustered_bootstrap(
    values: Float[Tensor, "n *cols"],
    prompts: Tensor,
    *,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[Float[Tensor, "*cols"], Float[Tensor, "*cols"]]:
    """Percentile interval of the mean of each column, resampling whole prompts.

    All columns share the resamples, so the interval of a difference of columns is a paired one. Of
    one prompt there is nothing to resample: its interval is NaN, not a point.
    """
    flat = values.reshape(len(values), -1).to(torch.float64)
    _, cluster = prompts.unique(return_inverse=True)
    clusters = int(cluster.max()) + 1
    sums = flat.new_zeros(clusters, flat.shape[1]).index_add(0, cluster, flat)
    sizes = flat.new_zeros(clusters).index_add(0, cluster, flat.new_ones(len(flat)))
    generator = torch.Generator().manual_seed(seed)
    resampled = []
    for start in range(0, draws * (clusters > 1), _DRAWS_AT_ONCE):
        some = min(_DRAWS_AT_ONCE, draws - start)
        picks = torch.randint(clusters, (some, clusters), generator=generator).to(flat.device)
        counts = flat.new_zeros(some, clusters).scatter_add(
            1, picks, torch.ones_like(picks, dtype=flat.dtype)
        )
        resampled.append((counts @ sums) / (counts @ sizes)[:, None])
    means = torch.cat(resampled) if clusters > 1 else flat.new_full((2, flat.shape[1]), torch.nan)
    low, high = means.quantile(flat.new_tensor([(1 - level) / 2, (1 + level) / 2]), dim=0)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])


def lag_one(
    q: Float[Tensor, "b h d"], keys: Tensor, unit: Int[Tensor, " b"], seed: int = 0
) -> tuple[float, float]:
    """How far what units add to ΔC, ``Σ q kᵀ`` over a unit's rows, is like what the next unit adds,
    and its p-value.

    Parameters
    ----------
    q, keys : of each row; the keys' sum with the weights that it has in ΔC. Every head counts
        alike.
    unit : of each row; units stand in the order of their numbers.
    seed : of the random orders beside it.

    Examples
    --------
    >>> walk = torch.randn(200, 1, 4, generator=torch.Generator().manual_seed(0)).cumsum(0)
    >>> correlation, p = lag_one(torch.ones(200, 1, 1), walk, torch.arange(200))
    >>> correlation > 0.8, p
    (True, 0.001)
    """
    numbers, place = unit.unique(return_inverse=True)
    count = len(numbers)
    gram = torch.zeros(count, count, dtype=torch.float64)
    for head in range(q.shape[1]):
        rows = (q[:, head] @ q[:, head].T).double() * (keys[:, head] @ keys[:, head].T).double()
        units = torch.zeros(count, len(q), dtype=torch.float64).index_add_(0, place, rows)
        units = torch.zeros(count, count, dtype=torch.float64).index_add_(1, place, units)
        units = units - units.mean(0) - units.mean(1, keepdim=True) + units.mean()
        gram += units / units.trace().clamp_min(torch.finfo(torch.float64).tiny)
    generator = torch.Generator().manual_seed(seed)
    orders = torch.stack(
        [torch.arange(count), *(torch.randperm(count, generator=generator) for _ in range(_ORDERS))]
    )
    sums = gram[orders[:, :-1], orders[:, 1:]].sum(1)
    return float(sums[0] / gram.trace()), float((sums >= sums[0]).sum()) / len(orders)


def wilson(hits: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion of independent trials.

    >>> [round(x, 3) for x in wilson(8, 10)]
    [0.49, 0.943]
    """
    share = hits / n
    shrink = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / shrink
    half = z * ((share * (1 - share) + z * z / (4 * n)) / n) ** 0.5 / shrink
    return max(middle - half, 0.0), min(middle + half, 1.0)


def p_value(null: Float[Tensor, "*r"], value: float) -> float:
    """``(1 + how many of the null reach the value) / (1 + how many there are)``.

    >>> p_value(torch.tensor([1.0, 2.0, 3.0]), 3.0)
    0.5
    """
    return (1 + int((null >= value).sum())) / (
        1 + null.numel()
    )  # not in float32, where 1/20 is above .05


def head_p_values(heads: Sequence[Sequence[Statistic]], floor: float = 0.0) -> list[float]:
    """P-value of each head from its statistics; 1 where it has none."""
    scores = [_scores(statistics) for statistics in heads]
    pooled = torch.cat([null for _, null in scores]) if scores else torch.zeros(0)
    p_values = []
    for z, null in scores:
        known = null if not len(null) or bool((null >= z).any()) else pooled
        p_values.append(min(max((1 + int((known >= z).sum())) / (1 + len(known)), floor), 1.0))
    return p_values


def _scores(statistics: Sequence[Statistic]) -> tuple[float, Float[Tensor, " r"]]:
    """The larger z of a head, and that of each of its replicates, which is in units of the others."""
    if not statistics:
        return 0.0, torch.zeros(0)
    observed, values = zip(*statistics, strict=True)
    value = torch.tensor(observed, dtype=torch.float64)
    null = torch.tensor(values, dtype=torch.float64)
    spread = null.std(dim=1, correction=0).maximum(1e-12 * value.abs() + 1e-300)
    others = max(null.shape[1] - 1, 1)
    mean = (null.sum(dim=1, keepdim=True) - null) / others
    square = (null.square().sum(dim=1, keepdim=True) - null.square()) / others
    left_out = (null - mean) / (square - mean.square()).clamp_min(1e-300).sqrt()
    return float(((value - null.mean(dim=1)) / spread).max()), left_out.amax(dim=0)


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg adjusted p-values: calling those ≤ α keeps the expected share of false
    calls ≤ α.

    >>> [round(q, 3) for q in false_discovery([0.01, 0.04, 0.03, 0.5])]
    [0.04, 0.053, 0.053, 0.5]
    """
    from scipy.stats import false_discovery_control  # takes a while to import

    return false_discovery_control(p_values).tolist() if p_values else []
