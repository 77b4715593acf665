"""Intervals that know that rows of one prompt are not independent: resample prompts, not rows."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput


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
