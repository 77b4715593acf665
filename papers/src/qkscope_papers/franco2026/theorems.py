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
    """Unit features: ``random``, ``isotropic`` (a tight frame), ``flat`` (fewer dimensions)."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "isotropic":
        turn = torch.linalg.qr(_normal(_D, _D, generator=generator))[0]
        return turn[:, :3] @ _opposed_axes(3)
    features = _normal(_D, _N, generator=generator)
    if kind == "flat":
        features[-1] = 0
    return features / features.norm(dim=0)


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _opposed_axes(d: int) -> Float[Tensor, "d n"]:
    """The axes of a space, each beside its opposite: an isotropic frame."""
    signs = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    return torch.kron(torch.eye(d, dtype=torch.float64), signs)


@figure("franco2026", "thm1", "Theorem 1: the minimiser")
@one_thread()
def run_minimiser(settings: Settings) -> Result:
    """The minimum of the exact objective against the formula."""
    draws = range(_DRAWS[settings.preset])
    rows: list[Row] = []
    moments: list[float] = []
    for draw in draws:
        for kind in ("random", "isotropic", "flat"):
            rows += _minimum_rows(kind, draw, settings.seed)
        keys = dictionary("random", derived_seed(settings.seed, 41, draw, 1))
        moments += [_moment_error(keys, p) for p in (0.1, 0.5)]
    claims = _minimiser_claims(rows, moments)
    return settings.result(_minimiser_answer(rows), {"minimiser": rows}, claims)


def _minimum_rows(kind: str, draw: int, seed: int) -> list[Row]:
    """One draw of both dictionaries, at every p and with both teachers."""
    q = dictionary(kind, derived_seed(seed, 41, draw, 0))
    k = dictionary(kind, derived_seed(seed, 41, draw, 1))
    if kind == "isotropic":
        q = _inside_span(q)
        k = _inside_span(k)
    rows = []
    for p in (0.1, 0.5, 1.0):
        for teacher in ("whitened", "indicator"):
            rows.append(_minimum_row(kind, draw, p, teacher, q, k))
    return rows


def _inside_span(features: Float[Tensor, "d n"]) -> Float[Tensor, "r n"]:
    """A tight frame of three dimensions, in coordinates of its own: there G = cI."""
    axes = torch.linalg.svd(features, full_matrices=False)[0]
    return axes[:, :3].mT @ features


def _decided(rows: list[Row], teacher: str) -> list[Row]:
    """The rows of a teacher where the theorem speaks, that is, with p < 1."""
    return [row for row in pick(rows, teacher=teacher) if row["p"] < 1]


def _full_rank(rows: list[Row]) -> list[Row]:
    """The theorem's own teacher, with features that span their space."""
    return [row for row in _decided(rows, "whitened") if row["features"] != "flat"]


def _minimiser_claims(rows: list[Row], moments: list[float]) -> list[Claim]:
    """Of Lemma 3, Theorem 1 and Corollary 1; ``moments`` are the errors of Lemma 3."""
    full = _full_rank(rows)
    tight = pick(full, features="isotropic")
    random = pick(full, features="random")
    flat = pick(_decided(rows, "whitened"), features="flat")
    plain = pick(_decided(rows, "indicator"), features="random")
    without_factor = abs(1 / (2 * 0.1 * 0.9) - 1)
    moment = Claim(
        "Lemma 3: the second moment of differences of keys is 2p(1 − p) G (largest relative "
        "error; control: without the factor, p = 0.1)",
        paper="Lemma 3, B.2.2: is invertible, as G is",
        ours=max(moments),
        control=without_factor,
        rule="ours <= 0.000001 and control > 0.1",
    )
    formula = Claim(
        "Theorem 1: the minimiser is α G⁻¹ q kᵀ G⁻¹ (largest relative error; control: with "
        "p = 1, where the theorem is silent)",
        paper="Theorem 1, B.2.3: uniquely minimized at",
        ours=max(column(full, "error")),
        control=min(column(pick(rows, p=1.0), "error")),
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
        control=min(column(random, "raw")),
        rule="ours >= 0.999 and control < ours",
    )
    singular = Claim(
        "with a singular G the pseudo-inverse takes its place (error inside the span of the "
        "features; control: of the whole matrix)",
        paper="B.2.1: can be replaced by pseudo-inverses",
        ours=max(column(flat, "span_error")),
        control=mean_of(flat, "error"),
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
    return [moment, formula, rank_one, aligned, singular, own_target]


def _minimiser_answer(rows: list[Row]) -> str:
    full = _full_rank(rows)
    plain = pick(_decided(rows, "indicator"), features="random")
    error = max(column(full, "error"))
    whitened = min(column(plain, "whitened"))
    raw = min(column(plain, "raw"))
    return (
        f"Newton's method ends at Theorem 1's formula to {error:.0e} in "
        f"{len(full)} cases; with the toy's own target, which no Ω can copy, singular "
        f"vectors meet the whitened features at |cos| {whitened:.3f} "
        f"or more, and the raw ones at {raw:.3f} or more."
    )


def _moment_error(keys: Float[Tensor, "d n"], p: float) -> float:
    """Of the exact second moment of differences of two keys, relative to Lemma 3's."""
    population = theory.TwoKeyPopulation.of(keys.shape[1], p)
    differences = population.differences @ keys.mT
    moment = (differences * population.difference_p[:, None]).mT @ differences
    said = 2 * p * (1 - p) * gram(keys)
    return float((moment - said).norm() / said.norm())


def _minimum_row(kind: str, draw: int, p: float, teacher: str, q: Tensor, k: Tensor) -> Row:
    """Where Newton's method ends on these features, beside the formula."""
    formula = theory.theorem1_minimiser(q, k, _ALPHA)
    interactions = q.mT @ formula @ k
    if teacher == "indicator":
        interactions = torch.zeros_like(interactions)
        interactions[0, 0] = _ALPHA
    generator = torch.Generator().manual_seed(derived_seed(draw, 42))
    start = _normal(len(q), len(q), generator=generator)
    found = theory.minimise(q, k, interactions, p, start=start)
    u, s, v = checked_svd(found.omega)
    # what of Ω the data can see: features only meet it inside their span
    seen = torch.linalg.pinv(q).mT @ q.mT @ found.omega @ k @ torch.linalg.pinv(k)
    norm = float(formula.norm())
    ends = torch.linalg.svdvals(start)
    return {
        "features": kind,
        "draw": draw,
        "p": p,
        "teacher": teacher,
        "error": _distance(found.omega, formula) / norm,
        "span_error": _distance(seen, formula) / norm,
        "second": float(s[1] / s[0]),
        "start_second": float(ends[1] / ends[0]),
        "raw": min(_first_cosine(q, u), _first_cosine(k, v)),
        "whitened": min(_first_whitened(q, u), _first_whitened(k, v)),
        "divergence": found.divergence,
        "gradient": found.gradient,
        "steps": found.steps,
        "isotropy_error": isotropy_error(gram(q)),
    }


def _distance(matrix: Tensor, other: Tensor) -> float:
    return float((matrix - other).norm())


def _first_cosine(features: Float[Tensor, "d n"], vectors: Float[Tensor, "d m"]) -> float:
    """``|cos|`` of the first feature and the first singular vector."""
    return float(cosines(features[:, :1], vectors[:, :1]))


def _first_whitened(features: Float[Tensor, "d n"], vectors: Float[Tensor, "d m"]) -> float:
    """``|cos|`` of the first feature, whitened, and the first singular vector."""
    first = whiten(gram(features), features[:, :1])
    return float(cosines(first, vectors[:, :1]))


@figure("franco2026", "thm2", "Theorem 2: the bound")
@one_thread()
def run_bound(settings: Settings) -> Result:
    """The bound against the worst feature that can be found."""
    draws = 50 * _DRAWS[settings.preset]
    rows = [_bound_row(epsilon, draws, settings.seed) for epsilon in _EPSILONS]
    last = pick(rows, silent=False)[-1]
    answer = (
        f"Theorem 2 holds, with a bound that is not vacuous for ε < {theory.SILENT_FROM:.3f} "
        f"only, where the worst feature has |cos| {last['worst']:.3f} and the bound "
        f"says {last['bound']:.3f} (ε = {last['epsilon']}). As Ω* has rank 1, "
        "sin θ ≤ ε holds for all ε < 1, and the worst feature attains it."
    )
    return settings.result(answer, {"bound": rows}, _bound_claims(rows))


def _bound_row(epsilon: float, draws: int, seed: int) -> Row:
    """The best and the worst that random features and the adversary find at one ε."""
    random = []
    worst = 1.0
    for draw in range(draws):
        generator = torch.Generator().manual_seed(derived_seed(seed, 43, draw))
        g = _random_gram(epsilon, generator)
        f = _normal(10, 1, generator=generator)
        found = float(cosines(f, whiten(g, f)))
        random.append(found)
        worst = min(worst, found, _adversary(g))
    bound = theory.theorem2_bound(epsilon)
    return {
        "epsilon": epsilon,
        "bound": bound,
        "sharp": math.sqrt(1 - epsilon**2),
        "random": mean(random),
        "random_least": min(random),
        "worst": worst,
        "silent": math.isnan(bound),
    }


def _random_gram(epsilon: float, generator: torch.Generator) -> Float[Tensor, "d d"]:
    """``I + E`` with random axes and eigenvalues, ``‖E‖ = ε`` on both sides."""
    turn = torch.linalg.qr(_normal(10, 10, generator=generator))[0]
    values = 2 * torch.rand(10, generator=generator, dtype=torch.float64) - 1
    values = values / values.abs().max() * epsilon
    values[0] = epsilon
    values[1] = -epsilon
    return (turn * (1 + values)) @ turn.mT


def _bound_claims(rows: list[Row]) -> list[Claim]:
    spoken = pick(rows, silent=False)
    gaps = [row["worst"] - row["bound"] for row in spoken]
    random_gaps = [row["random"] - row["bound"] for row in spoken]
    from_sharp = [abs(row["worst"] - row["sharp"]) for row in rows]
    bounded = Claim(
        "Theorem 2: no feature is further off than the bound (least |cos| found minus "
        "bound; control: the same at the largest ε it covers)",
        paper="Theorem 2, B.2.3: a lower bound",
        ours=min(gaps),
        control=gaps[-1],
        rule="ours >= 0",
    )
    loose = Claim(
        "the bound can be quite loose (largest gap to the worst feature; control: to a random one)",
        paper="Sec. 4 on Fig. 4 (a): can be quite loose in practice",
        ours=max(gaps),
        control=max(random_gaps),
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
        ours=max(from_sharp),
        control=max(gaps),
        rule="ours <= 0.000001",
    )
    return [bounded, loose, sharp]


def _adversary(g: Float[Tensor, "d d"]) -> float:
    """What Kantorovich's feature scores: the extreme eigenvectors, weighted by their roots."""
    values, vectors = torch.linalg.eigh(g)
    lowest = vectors[:, :1] * values[0].sqrt()
    highest = vectors[:, -1:] * values[-1].sqrt()
    f = lowest + highest
    return float(cosines(f, whiten(g, f)))


@figure("franco2026", "thm3", "Theorem 3: orthogonalisation")
@one_thread()
def run_overlap(settings: Settings) -> Result:
    """What is left of the overlap, as its penalty grows."""
    mus = (0.01, 0.1, 1.0, 10.0) if settings.preset == "smoke" else _MUS
    rows: list[Row] = []
    for tilt in _TILTS:
        for mu in (0.0, *mus):
            rows.append(_overlap_row(tilt, mu, settings.seed))
    tilted = _penalised(rows, _TILTS[-1])
    first = tilted[0]
    last = tilted[-1]
    answer = (
        f"With a teacher tilted by {_TILTS[-1]} rad the overlap of the keys, (k1·k2)², falls "
        f"from {first['key_overlap']:.3f} at μ = {first['mu']} to "
        f"{last['key_overlap']:.1e} at μ = {last['mu']}, under the bound "
        "throughout; that of the queries is at most "
        f"{max(column(tilted, 'query_overlap')):.0e} for every μ > 0, as two keys ask a "
        "query for one number, which it can give in any direction; with an orthogonal "
        "teacher both are 0 for every μ > 0."
    )
    return settings.result(answer, {"orthogonalisation": rows}, _overlap_claims(rows))


def _overlap_row(tilt: float, mu: float, seed: int) -> Row:
    found = theory.orthogonalise(mu, tilt=tilt, seed=derived_seed(seed, 44))
    return {
        "tilt": tilt,
        "mu": mu,
        "overlap": found.query_overlap + found.key_overlap,
        "query_overlap": found.query_overlap,
        "key_overlap": found.key_overlap,
        "loss": found.loss,
        "orthogonal_loss": found.orthogonal_loss,
        "bound": found.bound,
        "silent": not math.isfinite(found.bound) or found.bound >= 2,
    }


def _penalised(rows: list[Row], tilt: float) -> list[Row]:
    """The rows of one tilt in which overlap is penalised."""
    return [row for row in pick(rows, tilt=tilt) if row["mu"] > 0]


def _overlap_claims(rows: list[Row]) -> list[Claim]:
    """Of keys: a query has one gap to meet and d − 1 dimensions to meet it in, so that keys alone
    trade off, and with μ = 0 the query's overlap is whatever the search started from.
    """
    tilted = _penalised(rows, _TILTS[-1])
    straight = _penalised(rows, 0.0)
    slack = [row["bound"] - row["overlap"] for row in rows if row["mu"] > 0]
    falls = [a["key_overlap"] - b["key_overlap"] for a, b in pairwise(tilted)]
    (free,) = pick(rows, tilt=_TILTS[-1], mu=0.0)
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
        control=free["key_overlap"],
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
    return [below_bound, flat, orthogonal, monotone]
