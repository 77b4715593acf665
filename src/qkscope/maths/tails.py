"""P-values of many heads from few replicates each.

A head's ΔC is held against its null by its largest singular value, which one strong direction raises, and by its norm,
which many weaker ones raise. Both are put into units of the head's own null, ``z = (x − mean)/sd``, and so is each
replicate among the others; the larger z is what counts, of the head and of its replicates alike.

R replicates give no p-value below 1/(R + 1), and false-discovery control over a dozen heads asks for less. Where some
of a head's own replicates reach its z, they say how often. Where none does, the replicates of all heads together do: in
these units heads are alike, and their tail reaches further. No p-value is below a floor: with W units there are but
2^(W − 1) ways to flip their signs, and six words are six words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Statistic = tuple[float, Sequence[float]]  # what a head reached, and what each of its replicates did


def head_p_values(heads: Sequence[Sequence[Statistic]], floor: float = 0.0) -> list[float]:
    """P-value of each head from its statistics; 1 where it has none."""
    scores = [_scores(statistics) for statistics in heads]
    pooled = torch.cat([null for _, null in scores]) if scores else torch.zeros(0)
    found = []
    for z, null in scores:
        reached = int((null >= z).sum())
        if reached or not len(null):
            p = (1 + reached) / (len(null) + 1)
        else:
            p = (1 + int((pooled >= z).sum())) / (len(pooled) + 1)
        found.append(min(max(p, floor), 1.0))
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
