"""What a rank is worth: the same number under the null, and how much of it is only the mean.

A contrast of averages has a rank whatever the head does, so each ΔC is tested component by component. The j-th singular
value is compared with the largest one of null replicates from which the components already found are projected out::

    p_j = (1 + #{r : σ_1((I − U_j U_jᵀ) ΔC_r (I − V_j V_jᵀ)) ≥ σ_j(ΔC)}) / (R + 1),     stop at the first p_j > α

Two hypotheses are tested this way: *the conditions do not differ* (sign flip or label permutation, on ΔC) and *they
differ, but not in a way that depends on the query* (query shuffle, on the query-centred ΔC). Mean dominance is the
share of ‖ΔC‖² that ``q̄ (μ⁺ − μ⁻)ᵀ`` explains, the part every query sees alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.moments import Moments
from qkscope.maths.replicates import NullKind
from qkscope.maths.svd import checked_svd, energy_rank

Verdict = Literal["interaction", "mean only", "not above null"]

ROUNDING = 1e-5  # of float32 queries and keys, with room


@dataclass(frozen=True)
class RankTest:
    """Components of one ΔC tested in order against null replicates."""

    rank: int
    p_values: tuple[float, ...]  # one per component tested: the last one failed, unless all dimensions passed
    null_median: tuple[float, ...]
    null_high: tuple[float, ...]  # 95% quantile of the null's largest singular value, at the same stage


def rank_above(
    delta: Float[Tensor, "d d"],
    nulls: Float[Tensor, "r d d"],
    alpha: float = 0.05,
    max_rank: int | None = None,
    size: float = 0.0,
) -> RankTest:
    """Number of components of ΔC above the null, tested in order with the found ones deflated.

    ``size`` is that of the numbers ΔC was computed from, where centring left much smaller ones: what is below their
    rounding is no evidence.
    """
    u, s, v = checked_svd(delta)
    limit = min(s.shape[0], max_rank or s.shape[0])
    p_values, medians, highs = [], [], []
    turned = u.mT @ nulls.to(u) @ v  # in ΔC's own bases, deflating is leaving out rows and columns
    for j in range(limit):
        rest = turned[:, j:, j:]
        # The largest singular value, from the eigenvalues of the square: four times as fast as an SVD.
        largest = torch.linalg.eigvalsh(rest.mT @ rest)[..., -1].clamp_min(0).sqrt()
        reached = largest >= s[j] - 1e-12 * max(float(s[0]), size)
        p_values.append((1 + int(reached.sum())) / (len(nulls) + 1))
        medians.append(float(largest.median()))
        highs.append(float(largest.quantile(0.95)))
        if p_values[-1] > alpha:
            return RankTest(j, tuple(p_values), tuple(medians), tuple(highs))
    return RankTest(limit, tuple(p_values), tuple(medians), tuple(highs))


@dataclass(frozen=True)
class Controls:
    """What stands beside a rank; ``q_*`` are first-component p-values after false-discovery control over heads."""

    energy_rank: int
    null_rank: int
    centred_energy_rank: int
    interaction_rank: int
    mean_dominance: float
    p_difference: float
    p_interaction: float
    q_difference: float
    q_interaction: float
    verdict: Verdict
    spectrum: tuple[float, ...]
    null_median: tuple[float, ...]
    null_high: tuple[float, ...]
    positive_pairs: float
    negative_pairs: float
    replicates: int
    null: str

    def lines(self) -> list[str]:
        """The controls in words, one per line."""
        return [
            f"99% rank {self.energy_rank}; above the {self.null.replace('_', ' ')} null {self.null_rank}"
            f" (p {self.p_difference:.3g}, {self.replicates} replicates)",
            f"query-centred: 99% rank {self.centred_energy_rank}; above the query shuffle {self.interaction_rank}"
            f" (p {self.p_interaction:.3g})",
            f"mean dominance {self.mean_dominance:.3f}; pairs + {self.positive_pairs:g}, − {self.negative_pairs:g}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Controls:
        """Inverse of `to_json`."""
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**plain)


def run_controls(
    moments: Moments,
    contrast: str,
    heads: Sequence[Head | str] | None = None,
    *,
    alpha: float = 0.05,
    max_rank: int | None = None,
) -> dict[Head, Controls]:
    """Controls of one contrast for every head that carries null replicates (or those named).

    The verdict takes the first component's p-value after Benjamini-Hochberg over the heads asked for together:
    ``not above null`` unless the difference is there, then ``interaction`` if it depends on the query, else
    ``mean only``.
    """
    chosen = moments.null_heads if heads is None else [Head.parse(head) for head in heads]
    difference = _difference_null(moments)
    if not chosen or "query_shuffle" not in moments.nulls:
        raise BadInput(
            "controls need query_shuffle replicates: make the moments with nulls=('sign_flip', 'query_shuffle')."
        )
    found = {head: _controls_of(moments, contrast, head, difference, alpha, max_rank) for head in chosen}
    q_difference = false_discovery([c.p_difference for c in found.values()])
    q_interaction = false_discovery([c.p_interaction for c in found.values()])
    return {
        head: replace(c, q_difference=q_d, q_interaction=q_i, verdict=_verdict(q_d, q_i, alpha))
        for (head, c), q_d, q_i in zip(found.items(), q_difference, q_interaction, strict=True)
    }


def _difference_null(moments: Moments) -> NullKind:
    kinds: tuple[NullKind, ...] = ("label_permutation", "sign_flip")
    for kind in kinds:
        if kind in moments.nulls:
            return kind
    raise BadInput("controls need sign_flip or label_permutation replicates: ask for them when the moments are made.")


def _controls_of(
    moments: Moments, contrast: str, head: Head, difference: NullKind, alpha: float, max_rank: int | None
) -> Controls:
    row = moments.heads.index(head)
    delta, centred = (moments.delta(contrast, center)[row] for center in ("none", "query"))
    spectrum = torch.linalg.svdvals(delta)
    positive, negative = moments.count(contrast)[row].tolist()
    # Few pairs span few directions: with most of them projected out, replicates have no room left, and anything passes.
    limit = min(max_rank or moments.d_head, max(int(min(positive, negative)) // 4, 1))
    above = rank_above(delta, moments.null_deltas(difference, contrast, head), alpha, limit)
    shuffled = moments.null_deltas("query_shuffle", contrast, head, "query")
    interaction = rank_above(centred, shuffled, alpha, limit, size=float(spectrum[0]))
    p_d, p_i = above.p_values[0], interaction.p_values[0]
    return Controls(
        energy_rank=int(energy_rank(spectrum)),
        null_rank=above.rank,
        centred_energy_rank=_centred_rank(torch.linalg.svdvals(centred), spectrum),
        interaction_rank=interaction.rank,
        mean_dominance=float(mean_dominance(moments, contrast)[row]),
        p_difference=p_d,
        p_interaction=p_i,
        q_difference=p_d,
        q_interaction=p_i,
        verdict=_verdict(p_d, p_i, alpha),
        spectrum=tuple(spectrum.tolist()),
        null_median=above.null_median,
        null_high=above.null_high,
        positive_pairs=positive,
        negative_pairs=negative,
        replicates=moments.replicates,
        null=difference,
    )


def _centred_rank(centred: Float[Tensor, " d"], spectrum: Float[Tensor, " d"]) -> int:
    """The 99% rank; 0 where centring has left but the rounding errors of float32 queries and keys."""
    return int(energy_rank(centred)) if float(centred[0]) > ROUNDING * float(spectrum[0]) else 0


def _verdict(p_difference: float, p_interaction: float, alpha: float) -> Verdict:
    if p_difference > alpha:
        return "not above null"
    return "interaction" if p_interaction <= alpha else "mean only"


def mean_dominance(moments: Moments, contrast: str) -> Float[Tensor, " h"]:
    """Share of ‖ΔC‖² that goes when ``q̄ (μ⁺ − μ⁻)ᵀ`` is taken out: 1 if ΔC is nothing but the mean.

    Not clipped: below 0 the mean part and the interaction work against each other.
    """
    whole, centred = (moments.delta(contrast, center).square().sum(dim=(1, 2)) for center in ("none", "query"))
    return torch.where(whole > 0, 1 - centred / whole, torch.zeros_like(whole))


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
