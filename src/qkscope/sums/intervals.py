"""Intervals of means that resample whole units, and a test of whether neighbours are alike.

A unit is a prompt, or all prompts that share a word or are copies: what one draw of the data
brings. The bootstrap draws as many units as there are, with replacement, and takes the mean of
their rows::

    x̄* = Σ_u n_u s_u / Σ_u n_u w_u

with ``s_u`` the sum of unit u's rows, ``w_u`` how many they are, ``n_u`` how often u is drawn.

Units that follow each other in one text may not be independent; then such an interval is too
narrow. `lag_one` says how alike neighbours are.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_DRAWS_AT_ONCE = 200  # all draws at once would take as much room as units times draws
_RANDOM_ORDERS = 999  # beside which neighbours are compared


def clustered_bootstrap(
    values: Float[Tensor, " n *cols"],
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
    columns = values.shape[1:]
    _, cluster = prompts.unique(return_inverse=True)
    clusters = int(cluster.max()) + 1
    if clusters == 1:
        unknown = flat.new_full(columns, torch.nan)
        return unknown, unknown.clone()
    sums = _sum_by(cluster, flat, clusters)
    sizes = _sum_by(cluster, flat.new_ones(len(flat)), clusters)
    generator = torch.Generator().manual_seed(seed)
    resampled = []
    for start in range(0, draws, _DRAWS_AT_ONCE):
        count = min(_DRAWS_AT_ONCE, draws - start)
        picks = torch.randint(clusters, (count, clusters), generator=generator)
        picks = picks.to(flat.device)
        ones = torch.ones_like(picks, dtype=flat.dtype)
        times_drawn = flat.new_zeros(count, clusters).scatter_add(1, picks, ones)
        rows_drawn = times_drawn @ sizes
        resampled.append((times_drawn @ sums) / rows_drawn[:, None])
    tail = (1 - level) / 2
    ends = flat.new_tensor([tail, (1 + level) / 2])
    low, high = torch.cat(resampled).quantile(ends, dim=0)
    return low.reshape(columns), high.reshape(columns)


def _sum_by(
    group: Int[Tensor, " n"], values: Float[Tensor, "*shape"], groups: int, dim: int = 0
) -> Tensor:
    """Sums of values along one axis, by the group that each belongs to."""
    shape = list(values.shape)
    shape[dim] = groups
    return values.new_zeros(shape).index_add(dim, group, values)


def wilson(hits: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion of independent trials.

    >>> [round(x, 3) for x in wilson(8, 10)]
    [0.49, 0.943]
    """
    share = hits / n
    shrink = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / shrink
    spread = share * (1 - share)
    variance = (spread + z * z / (4 * n)) / n
    half = z * variance**0.5 / shrink
    low = max(middle - half, 0.0)
    high = min(middle + half, 1.0)
    return low, high


def lag_one(
    q: Float[Tensor, "b h d"], keys: Float[Tensor, "b h d"], unit: Int[Tensor, " b"], seed: int = 0
) -> tuple[float, float]:
    """Correlation of what neighbouring units add to ΔC, and its p-value among random orders.

    A unit adds ``Σ q kᵀ`` over its rows.

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
        head_queries = q[:, head]
        gram += _unit_gram(head_queries, keys[:, head], place, count)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(count)]
    for _ in range(_RANDOM_ORDERS):
        orders.append(torch.randperm(count, generator=generator))
    order = torch.stack(orders)
    unit_before = order[:, :-1]
    unit_after = order[:, 1:]
    neighbours = gram[unit_before, unit_after].sum(1)
    observed = neighbours[0]
    reached = float((neighbours >= observed).sum())
    return float(observed / gram.trace()), reached / len(orders)


def _unit_gram(
    q: Float[Tensor, "b d"], keys: Float[Tensor, "b d"], place: Int[Tensor, " b"], count: int
) -> Float[Tensor, "u u"]:
    """Products of the units' centred ``Σ q kᵀ`` at one head, scaled to trace 1."""
    # ⟨q_i k_iᵀ, q_j k_jᵀ⟩ = (q_i · q_j)(k_i · k_j)
    query_products = (q @ q.T).double()
    key_products = (keys @ keys.T).double()
    by_row = _sum_by(place, query_products * key_products, count)
    gram = _sum_by(place, by_row, count, dim=1)
    row_means = gram.mean(1, keepdim=True)
    centred = gram - gram.mean(0) - row_means + gram.mean()
    tiny = torch.finfo(torch.float64).tiny
    return centred / centred.trace().clamp_min(tiny)
