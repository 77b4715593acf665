"""Two groups of few units: how often would labels dealt out again set them as far apart?

The test is exact: with up to `MOST` ways to deal the labels all are tried, else so many random ones and the labels as
they are. It asks about units (heads, say), where an interval over prompts speaks for these very units only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import torch

MOST = 20_000


def relabelled(inside: Sequence[float], outside: Sequence[float], seed: int = 0) -> float:
    """Share of relabellings whose first group has a mean as low, against the second's, as ``inside`` has; one-sided.

    Values that are not finite are left out; NaN where a group is then empty.

    Examples
    --------
    >>> relabelled([-3.0, -2.0], [0.0, 1.0])  # 1 of the 6 ways to pick two of four
    0.16666666666666666
    """
    first, second = ([value for value in group if math.isfinite(value)] for group in (inside, outside))
    if not first or not second:
        return math.nan
    values = torch.tensor([*first, *second], dtype=torch.float64)
    n, k = len(values), len(first)
    if math.comb(n, k) <= MOST:
        picks = torch.tensor(list(combinations(range(n), k)))
    else:
        generator = torch.Generator().manual_seed(seed)
        dealt = torch.rand(MOST - 1, n, generator=generator).argsort(1)[:, :k]
        picks = torch.cat([torch.arange(k)[None], dealt])
    # with the sum of all fixed, a lower mean of the first group is a lower difference of both
    means = values[picks].mean(1)
    own = values[:k].mean()
    return float((means <= own + 1e-12 * values.abs().max()).double().mean())
