"""What a rank is worth: the same number under the null, and how much of it is only the mean.

A contrast of averages has a rank whatever the head does, so each ΔC is tested component by
component. The j-th singular value is compared with the largest one of null replicates from which
the components already found are projected out::

    p_j = (1 + #{r : σ_1((I − U_j U_jᵀ) ΔC_r (I − V_j V_jᵀ)) ≥ σ_j(ΔC)}) / (R + 1),     stop at the
    first p_j > α

Two hypotheses are tested this way: *the conditions do not differ* (sign flip or label permutation,
on ΔC) and *they differ, but not in a way that depends on the query* (``interaction``, on the
query-centred ΔC). How many directions are **detected** grows with the data; how many **predict
units that were left out** does not, when words are what is scarce (`cross_validated_rank`). Mean
dominance is the share of ‖ΔC‖² that goes when ``q̄ (μ⁺ − μ⁻)ᵀ``, the part every query sees alike,
is taken out: 1 if ΔC is nothing but the mean, below 0 where the two work against each other.

Queries and keys share features at nearly every head, also at heads that do nothing with them. So a
head that is above its null is held against a **reference**: the heads that are at chance on the
task. Its **gain** is what the query-centred ΔC gives to the logit of the + key over the − key,
``|scale · tr ΔC|``. No direction is fitted to it, so no word needs to be left out. ``interaction``
is said where at most 5% of the reference reach it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from qkscope import BadInput, Head, Moments
from qkscope.checking import checked_call
from qkscope.sums.bases import ROUNDING, checked_svd, energy_rank
from qkscope.sums.nulls import (
    Center,
    Statistic,
    centred_delta,
    false_discovery,
    head_p_values,
    p_value,
)

Verdict = Literal[
    "interaction", "not specific", "no reference", "mean only", "not above null", "untested"
]
CvRank = int | Literal["untested"]
FEW_UNITS = 10
LEVEL = 0.05  # of the tests
_UNITS_A_DIRECTION = (
    4  # few units span few directions: with most projected out, replicates have no room left
)
_FEWEST_FOLDS = 3  # with both signs
_ENOUGH = 0.99
FEWEST = round(1 / LEVEL) - 1  # heads of a reference: above fewer nothing is at the level
# planted features, and the share of them that must be found
_PLANTS = 20
_POWER = 0.8


class Gain(NamedTuple):
    """What a head's query-centred ΔC gives to the + key's logit, its factor of q·k, and whether it
    is at chance.
    """

    logit: float
    scale: float
    at_chance: bool


class RankTest(NamedTuple):
    """Components of one ΔC tested in order against null replicates."""

    rank: int
    null_median: tuple[float, ...]
    null_high: tuple[
        float, ...
    ]  # 95% quantile of the null's largest singular value, at the same stage
    statistics: tuple[
        Statistic, ...
    ] = ()  # of ΔC and of each replicate, with nothing projected out; () of rounding


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
    medians = []
    highs = []
    statistics: tuple[Statistic, ...] = ()
    turned = u.mT @ nulls.to(u) @ v  # in ΔC's own bases, deflating is leaving out rows and columns
    rank = limit
    for j in range(limit):
        rest = turned[:, j:, j:]
        # The largest singular value, from the eigenvalues of the square: four times as fast as an
        # SVD.
        largest = torch.linalg.eigvalsh(rest.mT @ rest)[..., -1].clamp_min(0).sqrt()
        medians.append(float(largest.median()))
        highs.append(float(largest.quantile(0.95)))
        real = float(s[j]) > ROUNDING * largest_of_all
        if j == 0 and real:
            norms = rest.flatten(1).norm(dim=1)
            statistics = (
                Statistic(float(s[0]), tuple(largest.tolist())),
                Statistic(float(s.norm()), tuple(norms.tolist())),
            )
        reached = int((largest >= s[j] - 1e-12 * largest_of_all).sum())
        if not real or (1 + reached) / (len(nulls) + 1) > alpha:
            rank = j
            break
    return RankTest(rank, tuple(medians), tuple(highs), statistics)


@dataclass(frozen=True)
class Controls:
    """What stands beside a rank; ``p_*`` are of the whole matrix.

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
    verdict: Verdict
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
        """The controls in words, one per line."""
        few = ", which are few" if self.units < FEW_UNITS else ""
        said = [
            f"99% rank {self.rank_99}; {self.rank_null} detected against the {self.null} null"
            f" (p {self.p_difference:.3g}, {self.replicates} replicates)",
            f"query-centred: 99% rank {self.rank_99_centred}; {self.interaction_rank} detected against the"
            f" interaction null (p {self.p_interaction:.3g})",
            f"predict units left out: {self.rank_cv}; {self.units} units{few}; means {self.mean_dominance:.3f} of it",
        ]
        chance = f"gives {self.gain:.2g} logits, more than {self.percentile:.0%} of {self.reference} heads at chance"
        return [
            *said,
            *([chance] if self.reference else []),
            *([self.reason] if self.reason else []),
        ]


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
    whole = moments.delta(contrast, "none")
    centred = moments.delta(contrast, "query")
    sizes = moments.sizes(contrast)
    units = moments.unit_count(contrast)[0]
    one_null = bool(((centred - whole).abs().amax(dim=(1, 2)) <= ROUNDING * sizes).all())
    limit = max(units // _UNITS_A_DIRECTION, 1)
    differences = []
    interactions = []
    beyond_scale = []
    for i, (head, size) in enumerate(zip(moments.heads, sizes.tolist(), strict=True)):
        fixed, replicates = moments.interaction_nulls(contrast, head)
        interactions.append(rank_above(centred[i], replicates, max_rank=limit, size=size))
        # a scale that queries and keys share may lean on a difference of means: what it explains
        # must not be needed
        beyond_scale.append(
            rank_above(centred[i] - fixed, replicates - fixed, max_rank=1, size=size)
        )
        if not one_null:
            replicates = moments.flipped_nulls(contrast, head)
            differences.append(rank_above(whole[i], replicates, max_rank=limit, size=size))
    differences = differences or interactions
    floor = max(0.5 ** max(units - 1, 0), 1 / (moments.replicates * len(sizes) + 1))
    every = interactions, beyond_scale, differences
    depends, beyond, differs = (
        head_p_values([test.statistics for test in tests], floor) for tests in every
    )
    p_interaction = list(map(max, depends, beyond))
    p_difference = p_interaction if one_null else differs
    calls = zip(
        _calls(differences, p_difference, floor),
        _calls(interactions, p_interaction, floor),
        strict=True,
    )
    few = f"{moments.replicates} replicates"
    if 0.5 ** max(units - 1, 0) >= floor:
        few = f"{units} independent units (different words, or prompts)"
    reason = f"untested: {few} are too few" + (
        f" for {len(sizes)} heads at once" if len(sizes) > 1 else ""
    )
    # the differences of a prompt and its copy cancel, but not within a fold: there the mean query
    # must go
    predicting: Center = "query" if one_null else center
    folds = moments.state["folds"][contrast]
    known = gains or {}
    cv_ranks = cross_validated_rank(folds, predicting, sizes)
    controls = {}
    for i, (head, (differ, depend)) in enumerate(zip(moments.heads, calls, strict=True)):
        gain, scale, _ = known.get(str(head), Gain(math.nan, math.inf, False))
        if known and cv_ranks[i] == 0:
            planted = plant(folds[:, i], predicting, 1 / scale)
            found = cross_validated_rank(planted, predicting, sizes[i].cpu().expand(_PLANTS))
            cv_ranks[i] = 0 if sum(rank != 0 for rank in found) >= _POWER * _PLANTS else "untested"
        others = torch.tensor(
            [other.logit for name, other in known.items() if other.at_chance and name != str(head)]
        )
        specific = len(others) >= FEWEST and p_value(others, gain) <= LEVEL
        beside: Verdict = (
            "interaction"
            if specific
            else "not specific"
            if len(others) >= FEWEST
            else "no reference"
        )
        verdict = _verdict(differ, depend, center != "none", beside)
        spectra = [torch.linalg.svdvals(delta[i]) for delta in (whole, centred)]
        energy, centred_energy = (
            int(energy_rank(spectrum, size=float(sizes[i]))) for spectrum in spectra
        )
        detected = max(differences[i].rank, 1) if differ else 0
        depending = max(interactions[i].rank, 1) if depend else 0
        shown, spectrum = (
            (differences[i], spectra[0]) if center == "none" else (interactions[i], spectra[1])
        )
        left, all_of_it = (float(spectrum.square().sum()) for spectrum in reversed(spectra))
        tests = (
            1 - left / all_of_it if all_of_it else 0.0,
            p_difference[i],
            p_interaction[i],
            verdict,
            center,
        )
        null = "interaction" if one_null else "sign flip"
        said = reason if verdict == "untested" else ""
        controls[head] = Controls(
            energy, detected, centred_energy, depending, cv_ranks[i], *tests,
            tuple(spectrum.tolist()), shown.null_median, shown.null_high, units, moments.replicates, null,
            said, gain, float((others < gain).double().mean()), len(others),
        )  # fmt: skip
    return controls


def _calls(tests: Sequence[RankTest], p_values: Sequence[float], floor: float) -> list[bool | None]:
    """Whether each head's test is significant among all of them; None where no data could have made
    it so.
    """
    calls: list[bool | None] = [q <= LEVEL for q in false_discovery(p_values)]
    for i, test in enumerate(tests):
        # as far above its null as can be; what is only rounding needs no test to be nothing
        best = [floor if j == i else p for j, p in enumerate(p_values)]
        if not calls[i] and test.statistics and false_discovery(best)[i] > LEVEL:
            calls[i] = None
    return calls


def _verdict(differs: bool | None, depends: bool | None, centred: bool, beside: Verdict) -> Verdict:
    """What the tests say, and the reference of an interaction; None is of a test that could not
    have shown anything.
    """
    if centred and depends is not False:
        return beside if depends else "untested"
    if not differs:
        return "untested" if differs is None else "not above null"
    return beside if depends else "untested" if depends is None else "mean only"


def cross_validated_rank(
    folds: Float[Tensor, "f h a 2 a"], center: Center, sizes: Float[Tensor, " h"]
) -> list[CvRank]:
    """How many directions predict units that took no part in finding them, of the heads of these
    sums.

    The sums are kept in folds of units (of words, where words are the unit). Each fold is left out
    in turn: the others give singular vectors, and the fold says how well the first r of them, with
    their singular values, rebuild its own ΔC; the fewest that rebuild 99% of what any number of
    them can are the rank (the paper's 99%, of data that took no part). Noise that one fold has is
    not in another, so what only this sample of units shows does not help: pure noise has rank 0.
    ``untested`` where fewer than three folds hold both signs.
    """
    whole = folds.sum(dim=0)
    gains = []
    for fold in folds:
        count = fold[:, -1, :, -1]
        rest = whole - fold
        if not bool((count > 0).all()) or not bool((rest[:, -1, :, -1] > 0).all()):
            continue
        # the mean query and key of the other folds, with the weights of the fold that was left out
        left_out = rest / rest[:, -1:, :, -1:] * count[:, None, :, None]
        u, s, v = checked_svd(centred_delta(rest, center))
        s = s.where(s > ROUNDING * sizes[:, None], 0.0)
        held = (u.mT @ centred_delta(fold, center, reference=left_out) @ v).diagonal(
            dim1=-2, dim2=-1
        )
        gain = (
            2 * held - s
        ) * s  # how much less of the fold's ‖ΔC‖² is left when the j-th component is taken out
        share = count.sum(dim=1) / whole[:, -1, :, -1].sum(dim=1)
        gains.append(gain.cumsum(dim=1) * share[:, None])
    if len(gains) < _FEWEST_FOLDS:
        return ["untested"] * len(sizes)
    rebuilt = pad(
        torch.stack(gains).sum(dim=0), (1, 0)
    )  # heads, components from 0 on; each fold by its share
    return (
        (rebuilt >= _ENOUGH * rebuilt.amax(dim=1, keepdim=True)).int().argmax(dim=1).tolist()
    )  # the first


def plant(
    folds: Float[Tensor, "f a 2 a"], center: Center, size: float
) -> Float[Tensor, "f p a 2 a"]:
    """Sums of one head in which a feature of known size has taken the place of ΔC, twenty times,
    with the head's noise.

    It is as large as ``size`` in all, in as many random directions as the head's own ΔC has (99%).
    Noise is what the ΔC of a fold differs by from that of all, under a random sign. Where
    `cross_validated_rank` finds fewer than 80% of such features, a rank of 0 says nothing.
    """
    folds = folds[(folds[:, -1, :, -1] > 0).all(dim=1)].cpu()
    own = centred_delta(folds, center)
    count = folds[:, -1, 0, -1]
    mean = centred_delta(folds.sum(dim=0), center)
    rank = max(int(energy_rank(torch.linalg.svdvals(mean))), 1)
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(
        torch.randn(_PLANTS, len(mean), rank, generator=generator, dtype=mean.dtype)
    )[0]
    signs = torch.randint(2, (len(folds), _PLANTS, 1, 1), generator=generator) * 2 - 1
    noise = signs * (own - mean)[:, None] * (len(folds) / (len(folds) - 1)) ** 0.5
    planted = folds[:, None].repeat(1, _PLANTS, 1, 1, 1)
    planted[..., :-1, 0, :-1] += (basis @ basis.mT * size / rank + noise - own[:, None]) * count[
        :, None, None, None
    ]
    return planted
