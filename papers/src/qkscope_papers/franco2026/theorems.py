"""Theorems 1, 2 and 3 as numerical experiments, each with the region in which it says nothing.

Theorem 1 is solved, not sampled: with binary strengths, few features and two keys the population is
a finite list, the objective is convex, and Newton's method finds its minimum to rounding. The
theorem's teacher is a linear function of the tokens, so the student can copy it; the toy's own
target, ``α x_q x_k``, is not, and stands beside.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.seeds import derived_seed
from qkscope.sums.bases import checked_svd
from qkscope_papers.fleet import one_thread
from qkscope_papers.franco2026 import theory
from qkscope_papers.franco2026.toy.alignment import cosines, gram, isotropy_error, whiten
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import Row, column, mean, mean_of, pick

_DRAWS = {"smoke": 2, "default": 6, "paper": 12}
_D = 4
_N = 6
_ALPHA = 4.0
_EPSILONS = (0.01, 0.02, 0.05, 0.08, 0.1, 0.13, 0.16, 0.18, 0.2, 0.3, 0.5, 0.7, 0.9)
_MUS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_TILTS = (0.0, 0.25, 0.5)


def dictionary(kind: str, seed: int) -> Float[Tensor, "d n"]:
    """Unit features: ``random``, ``isotropic`` (a tight frame) or ``flat`` (they leave one
    dimension out).
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "isotropic":  # orthonormal axes and their opposites, turned; the last ones double up
        turn = torch.linalg.qr(torch.randn(_D, _D, generator=generator, dtype=torch.float64))[0]
        frame = torch.tensor(
            [[1.0, -1, 0, 0, 0, 0], [0, 0, 1, -1, 0, 0], [0, 0, 0, 0, 1, -1]], dtype=torch.float64
        )
        return turn[:, :3] @ frame
    features = torch.randn(_D, _N, generator=generator, dtype=torch.float64)
    if kind == "flat":
        features[-1] = 0
    return features / features.norm(dim=0)


@figure("franco2026", "thm1", "Theorem 1: the minimiser")
@one_thread()
def run_minimiser(settings: Settings) -> Result:
    """The minimum of the exact objective against the formula."""
    rows = []
    for draw in range(_DRAWS[settings.preset]):
        for kind in ("random", "isotropic", "flat"):
            q = dictionary(kind, derived_seed(settings.seed, 41, draw, 0))
            k = dictionary(kind, derived_seed(settings.seed, 41, draw, 1))
            # a tight frame of three dimensions is solved inside them: there G = cI
            if kind == "isotropic":
                q = torch.linalg.svd(q, full_matrices=False)[0][:, :3].mT @ q
                k = torch.linalg.svd(k, full_matrices=False)[0][:, :3].mT @ k
            for p in (0.1, 0.5, 1.0):
                for teacher in ("whitened", "indicator"):
                    rows.append(_minimum_row(kind, draw, p, teacher, q, k))
    ours = [r for r in rows if r["teacher"] == "whitened" and r["p"] < 1]
    full = [r for r in ours if r["features"] != "flat"]
    plain = [
        r for r in rows if r["teacher"] == "indicator" and r["p"] < 1 and r["features"] == "random"
    ]
    tight = pick(full, features="isotropic")
    moments = [
        _moment_error(dictionary("random", derived_seed(settings.seed, 41, draw, 1)), p)
        for draw in range(_DRAWS[settings.preset])
        for p in (0.1, 0.5)
    ]
    moment = Claim(
        "Lemma 3: the second moment of differences of keys is 2p(1 − p) G (largest relative "
        "error; control: without the factor, p = 0.1)",
        paper="Lemma 3, B.2.2: is invertible, as G is",
        ours=max(moments),
        control=abs(1 / (2 * 0.1 * 0.9) - 1),
        rule="ours <= 0.000001 and control > 0.1",
    )
    formula = Claim(
        "Theorem 1: the minimiser is α G⁻¹ q kᵀ G⁻¹ (largest relative error; control: with "
        "p = 1, where the theorem is silent)",
        paper="Theorem 1, B.2.3: uniquely minimized at",
        ours=max(column(full, "error")),
        control=min(r["error"] for r in rows if r["p"] == 1),
        rule="ours <= 0.001 and control > 0.1",
    )
    rank_one = Claim(
        "... it has rank 1 (second over first singular value; control: the start of the search)",
        paper="Theorem 1, B.2.3: is rank-1",
        ours=max(column(full, "second")),
        control=mean_of(full, "start_second"),
        rule="ours <= 0.001",
    )
    aligned = Claim(
        "Corollary 1: with isotropic features its singular vectors are the features (least "
        "|cos|; control: random features)",
        paper="Corollary 1: exactly aligned",
        ours=min(column(tight, "raw")),
        control=min(r["raw"] for r in full if r["features"] == "random"),
        rule="ours >= 0.999 and control < ours",
    )
    singular = Claim(
        "with a singular G the pseudo-inverse takes its place (error inside the span of the "
        "features; control: of the whole matrix)",
        paper="B.2.1: can be replaced by pseudo-inverses",
        ours=max(r["span_error"] for r in ours if r["features"] == "flat"),
        control=mean(r["error"] for r in ours if r["features"] == "flat"),
        rule="ours <= 0.001",
    )
    own_target = Claim(
        "the toy's own target, attend if both are present, has the same singular vectors "
        "(least |cos| with the whitened features; control: with the features themselves)",
        paper=(
            "Sec. 4, Theorem 1 (informal): target logits that depend on whether both features "
            "are present"
        ),
        ours=min(column(plain, "whitened")),
        control=min(column(plain, "raw")),
        rule="ours >= 0.99",
        why=(
            "The proof needs a teacher that is linear in the tokens (B.2.1); with the target of "
            "Sec. 4 the exact minimum of a convex objective, solved to rounding, lies "
            "elsewhere."
        ),
    )
    claims = [moment, formula, rank_one, aligned, singular, own_target]
    answer = (
        f"Newton's method ends at Theorem 1's formula to {max(column(full, 'error')):.0e} in "
        f"{len(full)} cases; with the toy's own target, which no Ω can copy, singular "
        f"vectors meet the whitened features at |cos| {min(column(plain, 'whitened')):.3f} "
        f"or more, and the raw ones at {min(column(plain, 'raw')):.3f} or more."
    )
    return settings.result(answer, {"minimiser": rows}, claims)


def _moment_error(keys: Float[Tensor, "d n"], p: float) -> float:
    """Of the exact second moment of differences of two keys, relative to Lemma 3's."""
    population = theory.TwoKeyPopulation.of(keys.shape[1], p)
    differences = population.differences @ keys.mT
    moment = (differences * population.difference_p[:, None]).mT @ differences
    said = 2 * p * (1 - p) * gram(keys)
    return float((moment - said).norm() / said.norm())


def _minimum_row(kind: str, draw: int, p: float, teacher: str, q: Tensor, k: Tensor) -> Row:
    formula = theory.theorem1_minimiser(q, k, _ALPHA)
    interactions = q.mT @ formula @ k
    if teacher == "indicator":
        interactions = torch.zeros_like(interactions)
        interactions[0, 0] = _ALPHA
    generator = torch.Generator().manual_seed(derived_seed(draw, 42))
    start = torch.randn(len(q), len(q), generator=generator, dtype=torch.float64)
    found = theory.minimise(q, k, interactions, p, start=start)
    u, s, v = checked_svd(found.omega)
    # what of Ω the data can see: features only meet it inside their span
    inside = [torch.linalg.pinv(x) for x in (q, k)]
    seen = inside[0].mT @ q.mT @ found.omega @ k @ inside[1]
    norm = float(formula.norm())
    ends = torch.linalg.svdvals(start)
    cosine = [float(cosines(x[:, :1], y[:, :1])) for x, y in ((q, u), (k, v))]
    white = [float(cosines(whiten(gram(x), x[:, :1]), y[:, :1])) for x, y in ((q, u), (k, v))]
    return {
        "features": kind,
        "draw": draw,
        "p": p,
        "teacher": teacher,
        "error": float((found.omega - formula).norm()) / norm,
        "span_error": float((seen - formula).norm()) / norm,
        "second": float(s[1] / s[0]),
        "start_second": float(ends[1] / ends[0]),
        "raw": min(cosine),
        "whitened": min(white),
        "divergence": found.divergence,
        "gradient": found.gradient,
        "steps": found.steps,
        "isotropy_error": isotropy_error(gram(q)),
    }


@figure("franco2026", "thm2", "Theorem 2: the bound")
@one_thread()
def run_bound(settings: Settings) -> Result:
    """The bound against the worst feature that can be found."""
    rows = []
    for epsilon in _EPSILONS:
        random = []
        worst = 1.0
        for draw in range(50 * _DRAWS[settings.preset]):
            generator = torch.Generator().manual_seed(derived_seed(settings.seed, 43, draw))
            turn = torch.linalg.qr(torch.randn(10, 10, generator=generator, dtype=torch.float64))[0]
            values = 2 * torch.rand(10, generator=generator, dtype=torch.float64) - 1
            values = values / values.abs().max() * epsilon
            values[0], values[1] = epsilon, -epsilon
            g = (turn * (1 + values)) @ turn.mT
            f = torch.randn(10, 1, generator=generator, dtype=torch.float64)
            random.append(float(cosines(f, whiten(g, f))))
            worst = min(worst, float(cosines(f, whiten(g, f))), _adversary(g))
        bound = theory.theorem2_bound(epsilon)
        rows.append(
            {
                "epsilon": epsilon,
                "bound": bound,
                "sharp": math.sqrt(1 - epsilon**2),
                "random": mean(random),
                "random_least": min(random),
                "worst": worst,
                "silent": math.isnan(bound),
            }
        )
    spoken = pick(rows, silent=False)
    bounded = Claim(
        "Theorem 2: no feature is further off than the bound (least |cos| found minus "
        "bound; control: the same at the largest ε it covers)",
        paper="Theorem 2, B.2.3: a lower bound",
        ours=min(r["worst"] - r["bound"] for r in spoken),
        control=spoken[-1]["worst"] - spoken[-1]["bound"],
        rule="ours >= 0",
    )
    loose = Claim(
        "the bound can be quite loose (largest gap to the worst feature; control: to a random one)",
        paper="Sec. 4 on Fig. 4 (a): can be quite loose in practice",
        ours=max(r["worst"] - r["bound"] for r in spoken),
        control=max(r["random"] - r["bound"] for r in spoken),
        rule="ours >= 0.1",
        changed=(
            "It asked whether the bound is tight (ours <= 0.01), and its failure agreed with "
            "the paper."
        ),
    )
    sharp = Claim(
        "a sharper one, sin θ ≤ ε, holds for all ε < 1 and is attained (largest difference "
        "to the worst feature; control: the paper's bound where it speaks)",
        paper="",
        ours=max(abs(r["worst"] - r["sharp"]) for r in rows),
        control=max(r["worst"] - r["bound"] for r in spoken),
        rule="ours <= 0.000001",
    )
    claims = [bounded, loose, sharp]
    answer = (
        f"Theorem 2 holds, with a bound that is not vacuous for ε < {theory.SILENT_FROM:.3f} "
        f"only, where the worst feature has |cos| {spoken[-1]['worst']:.3f} and the bound "
        f"says {spoken[-1]['bound']:.3f} (ε = {spoken[-1]['epsilon']}). As Ω* has rank 1, "
        "sin θ ≤ ε holds for all ε < 1, and the worst feature attains it."
    )
    return settings.result(answer, {"bound": rows}, claims)


def _adversary(g: Float[Tensor, "d d"]) -> float:
    """The feature that Kantorovich's inequality names: along the extreme eigenvectors, weighted by
    their roots.
    """
    values, vectors = torch.linalg.eigh(g)
    f = vectors[:, :1] * values[0].sqrt() + vectors[:, -1:] * values[-1].sqrt()
    return float(cosines(f, whiten(g, f)))


@figure("franco2026", "thm3", "Theorem 3: orthogonalisation")
@one_thread()
def run_overlap(settings: Settings) -> Result:
    """What is left of the overlap, as its penalty grows."""
    rows: list[Row] = []
    mus = (0.01, 0.1, 1.0, 10.0) if settings.preset == "smoke" else _MUS
    for tilt in _TILTS:
        for mu in (0.0, *mus):
            found = theory.orthogonalise(mu, tilt=tilt, seed=derived_seed(settings.seed, 44))
            overlap = found.query_overlap + found.key_overlap
            rows.append(
                {
                    "tilt": tilt,
                    "mu": mu,
                    "overlap": overlap,
                    "query_overlap": found.query_overlap,
                    "key_overlap": found.key_overlap,
                    "loss": found.loss,
                    "orthogonal_loss": found.orthogonal_loss,
                    "bound": found.bound,
                    "silent": not math.isfinite(found.bound) or found.bound >= 2,
                }
            )
    tilted = [r for r in pick(rows, tilt=_TILTS[-1]) if r["mu"] > 0]
    straight = [r for r in pick(rows, tilt=0.0) if r["mu"] > 0]
    slack = [r["bound"] - r["overlap"] for r in rows if r["mu"] > 0]
    # a query has one gap to meet and d − 1 dimensions to meet it in: keys alone trade off, and with
    # μ = 0 the query's overlap is whatever the search started from
    falls = [a["key_overlap"] - b["key_overlap"] for a, b in pairwise(tilted)]
    free = pick(rows, tilt=_TILTS[-1], mu=0.0)[0]["key_overlap"]
    below_bound = Claim(
        "Theorem 3: the overlap of queries and keys at the minimum is at most [CE′ − CE*]/μ "
        "(least slack; control: largest)",
        paper="Theorem 3, B.3.2: the finite-μ bound",
        ours=min(slack),
        control=max(slack),
        rule="ours >= -0.000001",
        changed=(
            "A claim of its own said that queries trade off with μ as keys do; it failed as "
            "their overlap is 9e-10, which is what the theorem asks for."
        ),
    )
    flat = Claim(
        "with the paper's orthogonal teacher the optimum is orthogonal for every μ > 0: a "
        "sweep is flat (largest overlap; control: tilted teacher at the smallest μ)",
        paper="Theorem 3, B.3.2: the optimizer must satisfy",
        ours=max(column(straight, "overlap")),
        control=tilted[0]["overlap"],
        rule="ours < 0.000001",
    )
    orthogonal = Claim(
        "keys become orthogonal as μ grows ((k1·k2)² at the largest μ, tilted teacher; "
        "control: μ = 0)",
        paper="implied by Theorem 3",
        ours=tilted[-1]["key_overlap"],
        control=free,
        rule="ours < 0.01 * control",
    )
    monotone = Claim(
        "... and never less so (least fall of (k1·k2)² between one μ and the next; control: "
        "the first fall)",
        paper="",
        ours=min(falls),
        control=falls[0],
        rule="ours >= -0.000001",
    )
    claims = [below_bound, flat, orthogonal, monotone]
    answer = (
        f"With a teacher tilted by {_TILTS[-1]} rad the overlap of the keys, (k1·k2)², falls "
        f"from {tilted[0]['key_overlap']:.3f} at μ = {tilted[0]['mu']} to "
        f"{tilted[-1]['key_overlap']:.1e} at μ = {tilted[-1]['mu']}, under the bound "
        "throughout; that of the queries is at most "
        f"{max(column(tilted, 'query_overlap')):.0e} for every μ > 0, as two keys ask a "
        "query for one number, which it can give in any direction; with an orthogonal "
        "teacher both are 0 for every μ > 0."
    )
    return settings.result(answer, {"orthogonalisation": rows}, claims)
