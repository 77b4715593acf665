"""What a rank is worth: the same number under the null, and how much of it is only the mean.

A contrast of averages has a rank whatever the head does, so each ΔC is tested component by component. The j-th singular
value is compared with the largest one of null replicates from which the components already found are projected out::

    p_j = (1 + #{r : σ_1((I − U_j U_jᵀ) ΔC_r (I − V_j V_jᵀ)) ≥ σ_j(ΔC)}) / (R + 1),     stop at the first p_j > α

Two hypotheses are tested this way: *the conditions do not differ* (sign flip or label permutation, on ΔC) and *they
differ, but not in a way that depends on the query* (``interaction``, on the query-centred ΔC). How many directions are
**detected** grows with the data; how many **predict units that were left out** does not, when words are what is scarce
(`cross_validated_rank`). Mean dominance is the share of ‖ΔC‖² that ``q̄ (μ⁺ − μ⁻)ᵀ`` explains, the part every query
sees alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from qkscope import BadInput, Head, Moments
from qkscope.kinds import checked_call
from qkscope.maths.bases import ROUNDING, checked_svd, energy_rank
from qkscope.maths.significance import Center, NullKind, Statistic, centred_delta, false_discovery, head_p_values

Verdict = Literal["interaction", "mean only", "not above null", "untested"]
FEW_UNITS = 10
LEVEL = 0.05  # of the tests
_UNITS_A_DIRECTION = 4  # few units span few directions: with most projected out, replicates have no room left
_FEWEST_FOLDS = 3  # with both signs
_ENOUGH = 0.99


class RankTest(NamedTuple):
    """Components of one ΔC tested in order against null replicates."""

    rank: int
    null_median: tuple[float, ...]
    null_high: tuple[float, ...]  # 95% quantile of the null's largest singular value, at the same stage
    statistics: tuple[Statistic, ...] = ()  # of ΔC and of each replicate, with nothing projected out; () of rounding


def rank_above(
    delta: Float[Tensor, "d d"], nulls: Tensor, alpha: float = LEVEL, max_rank: int | None = None, size: float = 0.0
) -> RankTest:
    """Number of components of ΔC above the null, tested in order with the found ones deflated.

    ``size`` is that of the numbers ΔC was computed from, where differences left much smaller ones: what is below their
    rounding is no evidence.
    """
    u, s, v = checked_svd(delta)
    limit = min(s.shape[0], max_rank or s.shape[0])
    largest_of_all = max(float(s[0]), size)
    medians, highs = [], []
    statistics: tuple[Statistic, ...] = ()
    turned = u.mT @ nulls.to(u) @ v  # in ΔC's own bases, deflating is leaving out rows and columns
    rank = limit
    for j in range(limit):
        rest = turned[:, j:, j:]
        # The largest singular value, from the eigenvalues of the square: four times as fast as an SVD.
        largest = torch.linalg.eigvalsh(rest.mT @ rest)[..., -1].clamp_min(0).sqrt()
        medians.append(float(largest.median()))
        highs.append(float(largest.quantile(0.95)))
        real = float(s[j]) > ROUNDING * largest_of_all
        if j == 0 and real:
            norms = rest.flatten(1).norm(dim=1)
            statistics = (float(s[0]), tuple(largest.tolist())), (float(s.norm()), tuple(norms.tolist()))
        reached = int((largest >= s[j] - 1e-12 * largest_of_all).sum())
        if not real or (1 + reached) / (len(nulls) + 1) > alpha:
            rank = j
            break
    return RankTest(rank, tuple(medians), tuple(highs), statistics)


@dataclass(frozen=True)
class Controls:
    """What stands beside a rank; ``p_*`` are of the whole matrix.

    ``spectrum``, ``null_median`` and ``null_high`` are all of the matrix that ``center`` gives, and so are the detected
    directions: ``null_rank`` where it is ``none``, else ``interaction_rank`` (`detected`). ``cv_rank`` is that matrix's
    rank by cross-validation over units. ``units`` is how many random units there were; ``reason`` says what hindered a
    test.
    """

    energy_rank: int
    null_rank: int
    centred_energy_rank: int
    interaction_rank: int
    cv_rank: int
    mean_dominance: float
    p_difference: float
    p_interaction: float
    verdict: Verdict
    center: Center
    spectrum: tuple[float, ...]
    null_median: tuple[float, ...]
    null_high: tuple[float, ...]
    positive_pairs: float
    negative_pairs: float
    units: int
    replicates: int
    null: str
    reason: str = ""

    @property
    def detected(self) -> int:
        """Directions of the matrix shown that are detected with this much data."""
        return self.null_rank if self.center == "none" else self.interaction_rank

    def lines(self) -> list[str]:
        """The controls in words, one per line."""
        few = ", which are few" if self.units < FEW_UNITS else ""
        most = max(self.units // _UNITS_A_DIRECTION, 1)
        ranks = self.null_rank, self.interaction_rank
        difference, interaction = (f"{rank} or more" if rank == most else f"{rank}" for rank in ranks)
        said = [
            f"99% rank {self.energy_rank}; {difference} detected against the {self.null.replace('_', ' ')} null"
            f" (p {self.p_difference:.3g}, {self.replicates} replicates)",
            f"query-centred: 99% rank {self.centred_energy_rank}; {interaction} detected against the"
            f" interaction null (p {self.p_interaction:.3g})",
            f"{self.cv_rank} predict units that were left out; {self.units} units{few}",
            f"mean dominance {self.mean_dominance:.3f}; pairs + {self.positive_pairs:g}, − {self.negative_pairs:g}",
        ]
        return [*said, *([self.reason] if self.reason else [])]


@checked_call
def run_controls(
    moments: Moments, contrast: str, heads: Sequence[Head | str] | None = None, *, center: Center = "none"
) -> dict[Head, Controls]:
    """Controls of one contrast for every head that carries null replicates (or those named).

    The verdict takes the p-value of the whole matrix (`head_p_values`) after Benjamini-Hochberg over the heads that are
    asked for together; where it is small, one direction at least is detected. As ΔC is: ``not above null`` unless the
    difference is there, then ``interaction`` if it depends on the query, else ``mean only``. Where ``center`` takes the
    mean part out, what depends on the query is tested by itself, as the noise of the mean part could hide it.
    ``untested`` is what nothing could have shown: too few units or replicates for so many heads.

    Parameters
    ----------
    moments : with replicates of ``interaction``, and of ``sign_flip`` or ``label_permutation``.
    contrast : its name.
    heads : all that carry replicates by default.
    center : of the matrix whose spectrum and directions are shown.
    """
    chosen = moments.heads if heads is None else [Head.parse(head) for head in heads]
    rows = [moments.heads.index(head) for head in chosen]
    centred: Center = "query" if center == "none" else center  # of the interaction's matrix
    null = _difference_null(moments, contrast)
    deltas = {c: moments.delta(contrast, c) for c in ("none", centred)}
    sizes, units = moments.sizes(contrast).tolist(), moments.unit_count(contrast)[0]
    dominance = mean_dominance(moments, contrast).tolist()
    differences, interactions, beyond_scale = [], [], []
    for head, row in zip(chosen, rows, strict=True):
        limit, size = max(units // _UNITS_A_DIRECTION, 1), sizes[row]
        fixed, replicates = moments.interaction_nulls(contrast, head, centred)
        interactions.append(rank_above(deltas[centred][row], replicates, max_rank=limit, size=size))
        # a scale that queries and keys share may lean on a difference of means: what it explains must not be needed
        beyond_scale.append(rank_above(deltas[centred][row] - fixed, replicates - fixed, max_rank=1, size=size))
        if null != "interaction":
            replicates = moments.null_deltas(null, contrast, head)
            differences.append(rank_above(deltas["none"][row], replicates, max_rank=limit, size=size))
    differences = differences or interactions
    floor = max(0.5 ** max(units - 1, 0), 1 / (moments.replicates * len(chosen) + 1))
    every = interactions, beyond_scale, differences
    depends, beyond, differs = (head_p_values([test.statistics for test in tests], floor) for tests in every)
    p_interaction = list(map(max, depends, beyond))
    p_difference = p_interaction if null == "interaction" else differs
    calls = zip(_calls(differences, p_difference, floor), _calls(interactions, p_interaction, floor), strict=True)
    few = f"{moments.replicates} replicates"
    if 0.5 ** max(units - 1, 0) >= floor:
        few = f"{units} independent units (different words, or prompts)"
    reason = f"untested: {few} are too few" + (f" for {len(chosen)} heads at once" if len(chosen) > 1 else "")
    # the differences of a prompt and its copy cancel, but not within a fold: there the mean query must go
    cv_ranks = cross_validated_rank(moments, contrast, centred if null == "interaction" else center, rows)
    controls = {}
    for i, (head, row, (differ, depend)) in enumerate(zip(chosen, rows, calls, strict=True)):
        verdict = _verdict(differ, depend, center != "none")
        spectra = {c: torch.linalg.svdvals(delta[row]) for c, delta in deltas.items()}
        energy, centred_energy = (int(energy_rank(spectra[c], size=sizes[row])) for c in ("none", centred))
        detected = max(differences[i].rank, 1) if differ else 0
        depending = max(interactions[i].rank, 1) if depend else 0
        shown = differences[i] if center == "none" else interactions[i]
        ranks = energy, detected, centred_energy, depending, cv_ranks[i]
        tests = dominance[row], p_difference[i], p_interaction[i], verdict, center
        spectrum = tuple(spectra[center].tolist()), shown.null_median, shown.null_high
        (plus, minus), said = moments.count(contrast)[row].tolist(), reason if verdict == "untested" else ""
        controls[head] = Controls(*ranks, *tests, *spectrum, plus, minus, units, moments.replicates, null, said)
    return controls


def _difference_null(moments: Moments, contrast: str) -> NullKind:
    """The null of a difference: the one that was carried besides the interaction's."""
    if "interaction" in moments.nulls:
        if len(moments.nulls) > 1:
            return "label_permutation" if "label_permutation" in moments.nulls else "sign_flip"
        # a prompt and its copy: each difference of keys stands there with both signs, so there is no mean part to test
        mean_part = (moments.delta(contrast, "query") - moments.delta(contrast)).abs().amax(dim=(1, 2))
        if bool((mean_part <= ROUNDING * moments.sizes(contrast)).all()):
            return "interaction"
    raise BadInput("controls need null replicates: make the moments with nulls=('sign_flip', 'interaction').")


def _calls(tests: Sequence[RankTest], p_values: Sequence[float], floor: float) -> list[bool | None]:
    """Whether each head's test is significant among all of them; None where no data could have made it so."""
    calls: list[bool | None] = [q <= LEVEL for q in false_discovery(p_values)]
    for i, test in enumerate(tests):
        # as far above its null as can be; what is only rounding needs no test to be nothing
        best = [floor if j == i else p for j, p in enumerate(p_values)]
        if not calls[i] and test.statistics and false_discovery(best)[i] > LEVEL:
            calls[i] = None
    return calls


def _verdict(differs: bool | None, depends: bool | None, centred: bool) -> Verdict:
    """What the tests say; None is of a test that could not have shown anything."""
    if centred and depends is not False:
        return "interaction" if depends else "untested"
    if not differs:
        return "untested" if differs is None else "not above null"
    return "interaction" if depends else "untested" if depends is None else "mean only"


def mean_dominance(moments: Moments, contrast: str) -> Float[Tensor, " h"]:
    """Share of ‖ΔC‖² that goes when ``q̄ (μ⁺ − μ⁻)ᵀ`` is taken out: 1 if ΔC is nothing but the mean.

    Not clipped: below 0 the mean part and the interaction work against each other.
    """
    whole, centred = (moments.delta(contrast, center).square().sum(dim=(1, 2)) for center in ("none", "query"))
    return torch.where(whole > 0, 1 - centred / whole, torch.zeros_like(whole))


def cross_validated_rank(moments: Moments, contrast: str, center: Center, rows: Sequence[int]) -> list[int]:
    """How many directions predict units that took no part in finding them, of the heads in these rows of the sums.

    The sums are kept in folds of units (of words, where words are the unit). Each fold is left out in turn: the others
    give singular vectors, and the fold says how well the first r of them, with their singular values, rebuild its own
    ΔC; the fewest that rebuild 99% of what any number of them can are the rank (the paper's 99%, of data that took no
    part). Noise that one fold has is not in another, so what only this sample of units shows does not help: pure noise
    has rank 0.
    """
    folds = moments.state["folds"][contrast][:, list(rows)]
    whole, sizes = folds.sum(dim=0), moments.sizes(contrast)[list(rows)]
    gains = []
    for fold in folds:
        count, rest = fold[:, -1, :, -1], whole - fold
        if not bool((count > 0).all()) or not bool((rest[:, -1, :, -1] > 0).all()):
            continue
        # the mean query and key of the other folds, with the weights of the fold that was left out
        left_out = rest / rest[:, -1:, :, -1:] * count[:, None, :, None]
        u, s, v = checked_svd(centred_delta(rest, center))
        s = s.where(s > ROUNDING * sizes[:, None], 0.0)
        held = (u.mT @ centred_delta(fold, center, reference=left_out) @ v).diagonal(dim1=-2, dim2=-1)
        gain = (2 * held - s) * s  # how much less of the fold's ‖ΔC‖² is left when the j-th component is taken out
        share = count.sum(dim=1) / whole[:, -1, :, -1].sum(dim=1)
        gains.append(gain.cumsum(dim=1) * share[:, None])
    if len(gains) < _FEWEST_FOLDS:
        return [0] * len(rows)
    rebuilt = pad(torch.stack(gains).sum(dim=0), (1, 0))  # heads, components from 0 on; each fold by its share
    return (rebuilt >= _ENOUGH * rebuilt.amax(dim=1, keepdim=True)).int().argmax(dim=1).tolist()  # the first
