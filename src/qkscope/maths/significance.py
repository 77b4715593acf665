"""How sure a number is: intervals that know which rows go together, and p-values from few replicates each.

Rows of one prompt are not independent, so intervals resample prompts. A head's ΔC is held against its null by its
largest singular value, which one strong direction raises, and by its norm, which many weaker ones raise. Both are put
into units of the head's own null, ``z = (x − mean)/sd``, and so is each replicate among the others; the larger z is
what counts, of the head and of its replicates alike.

R replicates give no p-value below 1/(R + 1), and false-discovery control over a dozen heads asks for less. Where some
of a head's own replicates reach its z, they say how often. Where none does, the replicates of all heads together do: in
these units heads are alike, and their tail reaches further. No p-value is below a floor: with W units there are but
2^(W − 1) ways to flip their signs, and six words are six words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput

Statistic = tuple[float, Sequence[float]]  # what a head reached, and what each of its replicates did


def clustered_bootstrap(
    values: Float[Tensor, "n *cols"],
    prompts: Int[Tensor, " n"],
    *,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[Float[Tensor, "*cols"], Float[Tensor, "*cols"]]:
    """Percentile interval of the mean of each column, resampling whole prompts.

    All columns share the resamples, so the interval of a difference of columns is a paired one. Of one prompt there is
    nothing to resample: its interval is NaN, not a point.
    """
    if len(values) == 0 or len(values) != len(prompts):
        raise BadInput(
            f"an interval needs one prompt per value, but got {len(values)} values and {len(prompts)} prompts."
        )
    flat = values.reshape(len(values), -1).to(torch.float64)
    _, cluster = prompts.unique(return_inverse=True)
    clusters = int(cluster.max()) + 1
    sums = flat.new_zeros(clusters, flat.shape[1]).index_add(0, cluster, flat)
    sizes = flat.new_zeros(clusters).index_add(0, cluster, flat.new_ones(len(flat)))
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(clusters, (draws, clusters), generator=generator).to(flat.device)
    counts = flat.new_zeros(draws, clusters).scatter_add(1, picks, torch.ones_like(picks, dtype=flat.dtype))
    means = (counts @ sums) / (counts @ sizes)[:, None]
    tail = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=flat.dtype, device=flat.device)
    if clusters < 2:
        means = torch.full_like(means, torch.nan)
    low, high = means.quantile(tail, dim=0).reshape(2, *values.shape[1:])
    return low, high


def wilson(hits: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion of independent trials.

    >>> [round(x, 3) for x in wilson(8, 10)]
    [0.49, 0.943]
    """
    if not 0 <= hits <= n or n < 1:
        raise BadInput(f"{hits} hits in {n} trials is no proportion.")
    share, shrink = hits / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / shrink
    half = z * ((share * (1 - share) + z * z / (4 * n)) / n) ** 0.5 / shrink
    return max(middle - half, 0.0), min(middle + half, 1.0)


def p_value(null: Float[Tensor, "*r"], value: float) -> float:
    """``(1 + how many of the null reach the value) / (1 + how many there are)``.

    >>> p_value(torch.tensor([1.0, 2.0, 3.0]), 3.0)
    0.5
    """
    return float((1 + (null >= value).sum()) / (1 + null.numel()))


def head_p_values(heads: Sequence[Sequence[Statistic]], floor: float = 0.0) -> list[float]:
    """P-value of each head from its statistics; 1 where it has none."""
    scores = [_scores(statistics) for statistics in heads]
    pooled = torch.cat([null for _, null in scores]) if scores else torch.zeros(0)
    found = []
    for z, null in scores:
        known = null if not len(null) or bool((null >= z).any()) else pooled
        found.append(min(max((1 + int((known >= z).sum())) / (1 + len(known)), floor), 1.0))
    return found


def _scores(statistics: Sequence[Statistic]) -> tuple[float, Float[Tensor, " r"]]:
    """The larger z of a head, and that of each of its replicates."""
    observed, nulls = [], []
    for value, replicates in statistics:
        own = torch.tensor(list(replicates), dtype=torch.float64)
        spread = own.std(correction=0).clamp_min(1e-12 * abs(value) + 1e-300)
        observed.append(float((value - own.mean()) / spread))
        nulls.append(left_out(own))
    return (max(observed), torch.stack(nulls).amax(dim=0)) if observed else (0.0, torch.zeros(0))


def left_out(values: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
    """Each replicate in units of the others, as the observed value is in units of them all."""
    n = len(values)
    mean = (values.sum() - values) / max(n - 1, 1)
    square = (values.square().sum() - values.square()) / max(n - 1, 1)
    return (values - mean) / (square - mean.square()).clamp_min(1e-300).sqrt()


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg adjusted p-values: calling those ≤ α keeps the expected share of false calls ≤ α.

    >>> [round(q, 3) for q in false_discovery([0.01, 0.04, 0.03, 0.5])]
    [0.04, 0.053, 0.053, 0.5]
    """
    p = torch.tensor(list(p_values), dtype=torch.float64)
    order = p.argsort()
    scaled = p[order] * len(p) / torch.arange(1, len(p) + 1, dtype=torch.float64)
    adjusted = scaled.flip(0).cummin(dim=0).values.flip(0).clamp_max(1.0) if len(p) else scaled
    return torch.empty_like(p).index_copy(0, order, adjusted).tolist()
