"""Controls of a rank: the same number under the null, and how much of it is only the mean.

A contrast of averages has a rank whatever the head does, so each ΔC is tested component by
component. The j-th singular value is compared with the largest one of null replicates from which
the components already found are projected out::

    p_j = (1 + #{r : σ_1((I − U_j U_jᵀ) ΔC_r (I − V_j V_jᵀ)) ≥ σ_j(ΔC)}) / (R + 1)

and the rank ends before the first ``p_j > α``.

Two hypotheses are tested this way: *the conditions do not differ* (sign flip or label permutation,
on ΔC) and *they differ, but not in a way that depends on the query* (``interaction``, on the
query-centred ΔC). How many directions are **detected** grows with the data; how many **predict
units that were left out** does not, when words are what is scarce
(`qkscope.sums.cross_validation`).

Mean dominance is the share of ‖ΔC‖² that goes when ``q̄ (μ⁺ − μ⁻)ᵀ``, the part every query sees
alike, is taken out: 1 if ΔC is nothing but the mean, below 0 where the two work against each other.

Queries and keys share features at nearly every head, also at heads that do nothing with them. So a
head that is above its null is held against a **reference**: the heads that are at chance on the
task. Its **gain** is what the query-centred ΔC gives to the logit of the + key over the − key,
``|scale · tr ΔC|``. No direction is fitted to it, so no word needs to be left out. The verdict is
``interaction`` where at most 5% of the reference reach it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput
from qkscope.checking import checked_call
from qkscope.heads import Center, Head
from qkscope.sums.bases import ROUNDING, checked_svd, energy_rank
from qkscope.sums.cross_validation import PLANTS, POWER, CvRank, cross_validated_rank, plant
from qkscope.sums.moments import Moments
from qkscope.sums.nulls import Statistic, false_discovery, head_p_values, p_value

ContrastVerdict = Literal[
    "interaction", "not specific", "no reference", "mean only", "not above null", "untested"
]
FEW_UNITS = 10
LEVEL = 0.05  # of the tests
FEWEST = round(1 / LEVEL) - 1  # heads of a reference: above fewer nothing is at the level
# few units span few directions: with most of them projected out, replicates have no room left
_UNITS_A_DIRECTION = 4


class Gain(NamedTuple):
    """Gain: what a head's query-centred ΔC adds to the + key's logit.

    ``scale`` is the head's factor of q·k; ``at_chance`` whether it is at chance on the task.
    """

    logit: float
    scale: float
    at_chance: bool


_NO_GAIN = Gain(math.nan, math.inf, at_chance=False)


class RankTest(NamedTuple):
    """Components of one ΔC tested in order against null replicates.

    For each component tested, median and 95% quantile of the null's largest singular value with the
    components before it projected out. ``statistics`` are of ΔC and of each replicate with nothing
    projected out; there are none where ΔC is only rounding.
    """

    rank: int
    null_median: tuple[float, ...]
    null_high: tuple[float, ...]
    statistics: tuple[Statistic, ...] = ()


def rank_above(
    delta: Float[Tensor, "d d"],
    nulls: Tensor,
    alpha: float = LEVEL,
    max_rank: int | None = None,
    size: float = 0.0,
) -> RankTest:
    """Number of components of ΔC above the null, tested in order with the found ones deflated.

    ``size`` is that of the numbers ΔC was computed from, where differences left much smaller ones:
    what is below their rounding is no evidence.
    """
    u, s, v = checked_svd(delta)
    limit = min(s.shape[0], max_rank or s.shape[0])
    largest_of_all = max(float(s[0]), size)
    # in ΔC's own bases, deflating is leaving out rows and columns
    turned = u.mT @ nulls.to(u) @ v
    medians = []
    highs = []
    statistics: tuple[Statistic, ...] = ()
    rank = limit
    for j in range(limit):
        rest = turned[:, j:, j:]
        # The largest singular value, from the eigenvalues of the square: four times as fast as an
        # SVD.
        squares = torch.linalg.eigvalsh(rest.mT @ rest)
        largest = squares[..., -1].clamp_min(0).sqrt()
        medians.append(float(largest.median()))
        highs.append(float(largest.quantile(0.95)))
        beyond_rounding = float(s[j]) > ROUNDING * largest_of_all
        if j == 0 and beyond_rounding:
            norms = rest.flatten(1).norm(dim=1)
            by_value = Statistic(float(s[0]), tuple(largest.tolist()))
            by_norm = Statistic(float(s.norm()), tuple(norms.tolist()))
            statistics = (by_value, by_norm)
        reaching = float(s[j]) - 1e-12 * largest_of_all
        p = p_value(largest, reaching)
        if not beyond_rounding or p > alpha:
            rank = j
            break
    return RankTest(rank, tuple(medians), tuple(highs), statistics)


@dataclass(frozen=True)
class Controls:
    """Controls beside the rank of one ΔC; ``p_*`` are of the whole matrix.

    ``spectrum``, ``null_median`` and ``null_high`` are all of the matrix that ``center`` gives, and
    so are the detected directions: ``rank_null`` where it is ``none``, else ``interaction_rank``
    (`detected`). ``rank_cv`` is that matrix's rank by cross-validation over units. ``units`` is how
    many random units there were; ``reason`` says what hindered a test. ``percentile`` is the share
    of the ``reference`` heads at chance whose gain is smaller than ``gain``; NaN where there are
    none.
    """

    rank_99: int
    rank_null: int
    rank_99_centred: int
    interaction_rank: int
    rank_cv: CvRank
    mean_dominance: float
    p_difference: float
    p_interaction: float
    verdict: ContrastVerdict
    center: Center
    spectrum: tuple[float, ...]
    null_median: tuple[float, ...]
    null_high: tuple[float, ...]
    units: int
    replicates: int
    null: str
    reason: str
    gain: float
    percentile: float
    reference: int

    @property
    def detected(self) -> int:
        """Directions of the matrix shown that are detected with this much data."""
        return self.rank_null if self.center == "none" else self.interaction_rank

    def lines(self) -> list[str]:
        """Lines that say the controls in words."""
        difference = (
            f"99% rank {self.rank_99}; {self.rank_null} detected against the {self.null} null"
            f" (p {self.p_difference:.3g}, {self.replicates} replicates)"
        )
        interaction = (
            f"query-centred: 99% rank {self.rank_99_centred}; {self.interaction_rank} detected"
            f" against the interaction null (p {self.p_interaction:.3g})"
        )
        few = ", which are few" if self.units < FEW_UNITS else ""
        predicts = f"predict units left out: {self.rank_cv}; {self.units} units{few}"
        lines = [difference, interaction, f"{predicts}; means {self.mean_dominance:.3f} of it"]
        if self.reference:
            heads = f"{self.percentile:.0%} of {self.reference} heads at chance"
            lines.append(f"gives {self.gain:.2g} logits, more than {heads}")
        if self.reason:
            lines.append(self.reason)
        return lines


class _Deltas(NamedTuple):
    """ΔC of all heads, raw and query-centred, and the sizes of the averages it is a difference of.

    ``one_null``: the two are equal, so that one null serves both tests.
    """

    whole: Float[Tensor, "h d d"]
    centred: Float[Tensor, "h d d"]
    sizes: Float[Tensor, " h"]
    one_null: bool

    @classmethod
    def of(cls, moments: Moments, contrast: str) -> _Deltas:
        """Compute the matrices of one contrast."""
        whole = moments.delta(contrast, "none")
        centred = moments.delta(contrast, "query")
        sizes = moments.sizes(contrast)
        apart = (centred - whole).abs().amax(dim=(1, 2))
        are_equal = apart <= ROUNDING * sizes
        return cls(whole, centred, sizes, one_null=bool(are_equal.all()))


class _Tests(NamedTuple):
    """Rank tests of all heads: of the difference, of the interaction, and of what is left of it.

    The last are of the query-centred ΔC less what a scale that queries and keys share makes of a
    difference of means: that explains part of an interaction, and must not be needed.
    """

    difference: list[RankTest]
    interaction: list[RankTest]
    beyond_scale: list[RankTest]


@checked_call
def run_controls(
    moments: Moments,
    contrast: str,
    *,
    center: Center = "none",
    gains: Mapping[str, Gain] | None = None,
) -> dict[Head, Controls]:
    """Controls of one contrast for every head.

    The verdict takes the p-value of the whole matrix (`head_p_values`) after Benjamini-Hochberg
    over the heads that are asked for together; where it is small, one direction at least is
    detected. As ΔC is: ``not above null`` unless the difference is there, then ``interaction`` if
    it depends on the query, else ``mean only``. Where ``center`` takes the mean part out, what
    depends on the query is tested by itself, as the noise of the mean part could hide it.
    ``untested`` is what nothing could have shown: too few units or replicates for so many heads. An
    interaction whose gain more than 5% of the heads at chance reach is ``not specific``; with fewer
    than 19 of them, ``no reference``.

    Of a prompt and its copy each difference of keys stands there with both signs, so that ΔC has no
    mean part, and one null serves both tests.

    Parameters
    ----------
    moments : with replicates.
    contrast : its name.
    center : of the matrix whose spectrum and directions are shown.
    gains : of all heads of the model, by name.
    """
    if not moments.replicates:
        raise BadInput("controls need null replicates: make the moments with replicates=199.")
    deltas = _Deltas.of(moments, contrast)
    units, _ = moments.unit_count(contrast)
    tests = _run_tests(moments, contrast, deltas, units)
    coarsest = 0.5 ** max(units - 1, 0)
    compared = moments.replicates * len(moments.heads)
    floor = max(coarsest, 1 / (compared + 1))
    p_interaction = _p_interaction(tests, floor)
    p_difference = p_interaction
    if not deltas.one_null:
        p_difference = head_p_values([test.statistics for test in tests.difference], floor)
    differs = _calls(tests.difference, p_difference, floor)
    depends = _calls(tests.interaction, p_interaction, floor)
    reason = _too_few(moments, units, units_are_the_floor=coarsest >= floor)
    gains = gains or {}
    cv_ranks = _cv_ranks(moments, contrast, deltas, center, gains)
    null = "interaction" if deltas.one_null else "sign flip"
    controls = {}
    for i, head in enumerate(moments.heads):
        gain = gains.get(str(head), _NO_GAIN).logit
        reference = _reference(gains, head)
        beside = _beside_reference(gain, reference)
        verdict = _verdict(differs[i], depends[i], center != "none", beside)
        spectrum = torch.linalg.svdvals(deltas.whole[i])
        centred_spectrum = torch.linalg.svdvals(deltas.centred[i])
        size = float(deltas.sizes[i])
        difference = tests.difference[i]
        interaction = tests.interaction[i]
        shown = interaction
        shown_spectrum = centred_spectrum
        if center == "none":
            shown = difference
            shown_spectrum = spectrum
        weaker = (reference < gain).double()
        controls[head] = Controls(
            rank_99=int(energy_rank(spectrum, size=size)),
            rank_null=_detected(difference, differs[i]),
            rank_99_centred=int(energy_rank(centred_spectrum, size=size)),
            interaction_rank=_detected(interaction, depends[i]),
            rank_cv=cv_ranks[i],
            mean_dominance=_mean_dominance(spectrum, centred_spectrum),
            p_difference=p_difference[i],
            p_interaction=p_interaction[i],
            verdict=verdict,
            center=center,
            spectrum=tuple(shown_spectrum.tolist()),
            null_median=shown.null_median,
            null_high=shown.null_high,
            units=units,
            replicates=moments.replicates,
            null=null,
            reason=reason if verdict == "untested" else "",
            gain=gain,
            percentile=float(weaker.mean()),
            reference=len(reference),
        )
    return controls


def _run_tests(moments: Moments, contrast: str, deltas: _Deltas, units: int) -> _Tests:
    """Test ΔC of every head, component by component."""
    limit = max(units // _UNITS_A_DIRECTION, 1)
    tests = _Tests([], [], [])
    for i, head in enumerate(moments.heads):
        size = float(deltas.sizes[i])
        centred = deltas.centred[i]
        fixed, nulls = moments.interaction_nulls(contrast, head)
        interaction = rank_above(centred, nulls, max_rank=limit, size=size)
        tests.interaction.append(interaction)
        beyond_scale = rank_above(centred - fixed, nulls - fixed, max_rank=1, size=size)
        tests.beyond_scale.append(beyond_scale)
        difference = interaction
        if not deltas.one_null:
            nulls = moments.flipped_nulls(contrast, head)
            difference = rank_above(deltas.whole[i], nulls, max_rank=limit, size=size)
        tests.difference.append(difference)
    return tests


def _p_interaction(tests: _Tests, floor: float) -> list[float]:
    """P-value of each head's interaction: the larger with and without what scale explains."""
    depends = head_p_values([test.statistics for test in tests.interaction], floor)
    beyond = head_p_values([test.statistics for test in tests.beyond_scale], floor)
    return [max(pair) for pair in zip(depends, beyond, strict=True)]


def _calls(tests: Sequence[RankTest], p_values: Sequence[float], floor: float) -> list[bool | None]:
    """Whether each head's test is significant among all; None where no data could be."""
    calls: list[bool | None] = [q <= LEVEL for q in false_discovery(p_values)]
    for i, test in enumerate(tests):
        # what is only rounding needs no test to be nothing
        if calls[i] or not test.statistics:
            continue
        # as far above its null as can be
        best = list(p_values)
        best[i] = floor
        if false_discovery(best)[i] > LEVEL:
            calls[i] = None
    return calls


def _too_few(moments: Moments, units: int, units_are_the_floor: bool) -> str:
    """Name what there is too little of for a test: units or replicates."""
    few = f"{moments.replicates} replicates"
    if units_are_the_floor:
        few = f"{units} independent units (different words, or prompts)"
    count = len(moments.heads)
    at_once = f" for {count} heads at once" if count > 1 else ""
    return f"untested: {few} are too few{at_once}"


def _cv_ranks(
    moments: Moments, contrast: str, deltas: _Deltas, center: Center, gains: Mapping[str, Gain]
) -> list[CvRank]:
    """Cross-validated rank of each head; a 0 is tested by planted features of 1 logit."""
    # the differences of a prompt and its copy cancel, but not within a fold: there the mean query
    # must go
    predicting: Center = "query" if deltas.one_null else center
    folds = moments.state["folds"][contrast]
    ranks = cross_validated_rank(folds, predicting, deltas.sizes)
    if not gains:
        return ranks
    for i, head in enumerate(moments.heads):
        if ranks[i] != 0:
            continue
        scale = gains.get(str(head), _NO_GAIN).scale
        planted = plant(folds[:, i], predicting, 1 / scale)
        sizes = deltas.sizes[i].cpu().expand(PLANTS)
        planted_ranks = cross_validated_rank(planted, predicting, sizes)
        detected = sum(rank != 0 for rank in planted_ranks)
        if detected < POWER * PLANTS:
            ranks[i] = "untested"
    return ranks


def _reference(gains: Mapping[str, Gain], head: Head) -> Float[Tensor, " n"]:
    """Gains of the other heads that are at chance."""
    logits = []
    for name, gain in gains.items():
        if gain.at_chance and name != str(head):
            logits.append(gain.logit)
    return torch.tensor(logits)


def _beside_reference(gain: float, reference: Float[Tensor, " n"]) -> ContrastVerdict:
    """Verdict on an interaction beside the heads at chance."""
    if len(reference) < FEWEST:
        return "no reference"
    if p_value(reference, gain) <= LEVEL:
        return "interaction"
    return "not specific"


def _verdict(
    differs: bool | None, depends: bool | None, centred: bool, beside: ContrastVerdict
) -> ContrastVerdict:
    """Verdict of the two tests; None is a test that could not have shown anything.

    ``beside`` is what an interaction is called beside its reference.
    """
    if centred and depends is not False:
        return beside if depends else "untested"
    if differs is None:
        return "untested"
    if not differs:
        return "not above null"
    if depends is None:
        return "untested"
    return beside if depends else "mean only"


def _detected(test: RankTest, significant: bool | None) -> int:
    """Directions above the null: one at least where the whole matrix is significant, else none."""
    if not significant:
        return 0
    return max(test.rank, 1)


def _mean_dominance(spectrum: Float[Tensor, " m"], centred: Float[Tensor, " m"]) -> float:
    """Share of ‖ΔC‖² in the part that every query sees alike."""
    energy = float(spectrum.square().sum())
    left = float(centred.square().sum())
    if not energy:
        return 0.0
    return 1 - left / energy
