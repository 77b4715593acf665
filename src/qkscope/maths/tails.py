"""P-values of many heads from few replicates each.

R replicates give no p-value below 1/(R + 1), and false-discovery control over a dozen heads asks for less. Where some
of a head's own replicates reach its value, they say how often. Where none does, the value is put into units of its own
null, ``z = (σ − mean)/sd``, and so is each replicate among the others of its head; in these units heads are alike, and
the replicates of all heads together have a tail that reaches further. No p-value is below a floor: with W units there
are but 2^(W − 1) ways to flip their signs, and six words are six words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def head_p_values(tests: Sequence[tuple[float, Sequence[float], float]], floor: float = 0.0) -> list[float]:
    """P-value of each head from (p by its own replicates, what its replicates reached, what it reached itself)."""
    nulls = [torch.tensor(list(own), dtype=torch.float64) for _, own, _ in tests]
    pooled = torch.cat([left_out(own) for own in nulls]) if nulls else torch.zeros(0)
    found = []
    for (own_p, _, value), own in zip(tests, nulls, strict=True):
        p = own_p
        if len(own) > 1 and p <= 1 / (len(own) + 1):
            z = (value - own.mean()) / own.std(correction=0).clamp_min(1e-300)
            p = (1 + int((pooled >= z).sum())) / (len(pooled) + 1)
        found.append(min(max(p, floor), 1.0))
    return found


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
