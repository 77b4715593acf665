"""The theorems of franco2026 as formulas, and the exact objective they speak of.

Queries are ``Q x``, keys ``K x`` with features as columns and binary strengths, each present with
probability p; ``G_q = Q Qᵀ``, ``G_k = K Kᵀ``. The teacher's logits are ``α ⟨G_q⁻¹ q_1, t_q⟩ ⟨G_k⁻¹
k_1, t_k⟩``.

- Theorem 1: the one minimiser is ``Ω* = α G_q⁻¹ q_1 k_1ᵀ G_k⁻¹``, of rank 1, along the whitened
  features.
- Corollary 1: with G = cI they are the features.
- Theorem 2: with ``G = c(I + E)``, ‖E‖ ≤ ε: ``sin θ ≤ κ/(1 − κ)``, ``κ = (1 − ε)⁻² − 1``, as long
  as κ < 1/2. As Ω* has rank 1 no perturbation theory is needed: ``cos(f, G⁻¹f) ≥ 2√c/(1 + c)`` with
  c the condition number of G (Kantorovich), and for ‖E‖ ≤ ε that is ``sin θ ≤ ε``, which is
  attained.
- Theorem 3: with ``J = CE_1 + CE_2 + μ[(q_1·q_2)² + (k_1·k_2)²]`` the bracket is at most ``[CE′ −
  CE*]/μ`` at the minimum, for the CE′ of any orthogonal pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope_papers.franco2026.toy.alignment import gram, invert_gram

SILENT_FROM = 1 - math.sqrt(2 / 3)  # Theorem 2 says nothing from this ε on


def theorem1_minimiser(
    queries: Float[Tensor, "d n"], keys: Float[Tensor, "d n"], alpha: float
) -> Float[Tensor, "d d"]:
    """``Ω* = α G_q⁻¹ q kᵀ G_k⁻¹`` of the first pair (with pseudo-inverses where features do not
    span the space).
    """
    left = invert_gram(gram(queries)) @ queries[:, 0].double()
    right = invert_gram(gram(keys)) @ keys[:, 0].double()
    return alpha * torch.outer(left, right)


def theorem2_bound(epsilon: float) -> float:
    """Least |cos| of feature and singular vector; NaN where the theorem says nothing.

    >>> round(theorem2_bound(0.05), 3), round(theorem2_bound(0.1), 3)
    (0.993, 0.952)
    """
    if not 0 <= epsilon < SILENT_FROM:
        return math.nan
    kappa = (1 - epsilon) ** -2 - 1
    return math.sqrt(1 - (kappa / (1 - kappa)) ** 2)


def sharp_bound(g: Float[Tensor, "d d"]) -> float:
    """``2√c/(1 + c)`` with c the condition number of G: the least ``cos(f, G⁻¹f)`` of any f, at any
    anisotropy.
    """
    values = torch.linalg.eigvalsh(g.double())
    if float(values[0]) <= 0:
        return 0.0
    condition = float(values[-1] / values[0])
    return 2 * math.sqrt(condition) / (1 + condition)


@dataclass(frozen=True)
class TwoKeyPopulation:
    """Every query and every difference of two keys with binary strengths, and their probabilities:
    nothing is sampled.

    With two keys the softmax is a sigmoid of the gap ``t_qᵀ Ω (t_1 − t_2)``, and strengths of the
    difference are −1, 0 or 1, with probabilities p(1−p), 1 − 2p(1−p), p(1−p).
    """

    queries: Float[Tensor, "a n"]
    query_p: Float[Tensor, " a"]
    differences: Float[Tensor, "b n"]
    difference_p: Float[Tensor, " b"]

    @classmethod
    def of(cls, n: int, p: float) -> TwoKeyPopulation:
        """All 2ⁿ queries and 3ⁿ differences of n features."""
        queries = torch.tensor(list(product((0.0, 1.0), repeat=n)), dtype=torch.float64)
        differences = torch.tensor(list(product((-1.0, 0.0, 1.0), repeat=n)), dtype=torch.float64)
        moved = p * (1 - p)
        query_p = torch.where(queries > 0, p, 1 - p).prod(1)
        difference_p = torch.where(differences == 0, 1 - 2 * moved, moved).prod(1)
        return cls(queries, query_p, differences, difference_p)


@dataclass(frozen=True)
class Minimiser:
    """Where the objective ends: Ω, its value above the teacher's entropy, the gradient left, and
    Newton steps taken.
    """

    omega: Float[Tensor, "d d"]
    divergence: float
    gradient: float
    steps: int


def minimise(
    queries: Float[Tensor, "d n"],
    keys: Float[Tensor, "d n"],
    interactions: Tensor,
    p: float,
    start: Tensor,
) -> Minimiser:
    """Minimise the exact cross-entropy over Ω by damped Newton steps: convex, so what it finds is
    the minimum.

    Parameters
    ----------
    interactions : the teacher's gap is ``x_qᵀ interactions δ`` with strengths x_q of the query and
        δ of the key difference: ``α e_1 e_1ᵀ`` for "attend if both are present", ``Qᵀ Ω* K`` for
        the theorem's whitened teacher.
    """
    d = len(queries)
    cases = TwoKeyPopulation.of(queries.shape[1], p)
    t_q = cases.queries @ queries.double().mT
    t_k = cases.differences @ keys.double().mT
    weight = cases.query_p[:, None] * cases.difference_p
    target = (cases.queries @ interactions.double() @ cases.differences.mT).sigmoid()
    entropy = (weight * _bernoulli_loss(target, target.logit())).sum()
    omega = start.double()

    def loss(at: Tensor) -> Tensor:
        return (weight * _bernoulli_loss(target, t_q @ at @ t_k.mT)).sum()

    value = loss(omega)
    gradient = torch.ones(d, d, dtype=torch.float64)
    taken = 0
    while taken < 100 and float(gradient.abs().max()) >= 1e-13:
        taken += 1
        student = (t_q @ omega @ t_k.mT).sigmoid()
        gradient = t_q.mT @ (weight * (student - target)) @ t_k
        curvature = weight * student * (1 - student)
        # vec(t_q t_kᵀ) for every case would be large: sum over queries first
        inner = torch.einsum("ab,bk,bl->akl", curvature, t_k, t_k)
        hessian = torch.einsum("ai,aj,akl->ikjl", t_q, t_q, inner).reshape(d * d, d * d)
        ridge = 1e-12 * hessian.diagonal().amax()
        step = torch.linalg.lstsq(
            hessian + ridge * torch.eye(d * d, dtype=torch.float64), gradient.flatten()
        ).solution.view(d, d)
        size = 1.0
        while loss(omega - size * step) > value and size > 1e-8:
            size /= 2
        omega = omega - size * step
        value = loss(omega)
    return Minimiser(omega, float(value - entropy), float(gradient.abs().max()), taken)


def _bernoulli_loss(target: Tensor, gap: Tensor) -> Tensor:
    return torch.nn.functional.softplus(gap) - target * gap


@dataclass(frozen=True)
class Overlap:
    """The minimum of J at one μ: what is left of the overlap, the losses, and Theorem 3's bound."""

    mu: float
    query_overlap: float  # (q_1·q_2)²
    key_overlap: float  # (k_1·k_2)²
    loss: float  # CE_1 + CE_2 above the teacher's entropy
    orthogonal_loss: float  # the least that an orthogonal pair can reach
    bound: float  # [CE′ − CE*]/μ


def orthogonalise(mu: float, *, tilt: float, starts: int = 16, seed: int = 0) -> Overlap:
    """Theorem 3: Ω = 4 q_1 k_1ᵀ + 2 u_2 v_2ᵀ (d = 4) is fixed, q_2 and k_2 are unit vectors that
    may move.

    Two contexts, with queries q_1 and q_2, hold the keys k_1 and k_2. The teacher's pair leans over
    to the first by ``tilt`` (radians): ``q_2° = sin(tilt) q_1 + cos(tilt) u_2``. With tilt 0 the
    optimum is orthogonal for any μ > 0.
    """
    (q, k), inside = _best_pair(mu, tilt, starts, seed, orthogonal=False)
    _, other = _best_pair(mu, tilt, starts, seed, orthogonal=True)
    overlaps = float(q[0] ** 2), float(k[0] ** 2)
    return Overlap(mu, *overlaps, inside, other, (other - inside) / mu if mu > 0 else math.inf)


def _best_pair(
    mu: float, tilt: float, starts: int, seed: int, *, orthogonal: bool
) -> tuple[tuple[Tensor, Tensor], float]:
    """The best of many starts: unit vectors (axis 0 is q_1 or k_1), and their cross-entropy above
    the entropy.
    """
    axes = ((4.0, 2.0, 0, 0), (math.sin(tilt), math.cos(tilt), 0, 0), (1.0, 0, 0, 0))
    strength, lean, first = torch.tensor(axes, dtype=torch.float64)

    def gaps(q: Tensor, k: Tensor) -> Tensor:
        return torch.stack([(strength * x * (first - k)).sum(-1) for x in (first, q)], dim=-1)

    target = gaps(lean, lean).sigmoid()
    entropy = _bernoulli_loss(target, target.logit()).sum()
    generator = torch.Generator().manual_seed(seed)
    leaf = torch.randn(2, starts, 4, generator=generator, dtype=torch.float64).requires_grad_()
    free = 1 - first * orthogonal

    def unit() -> Tensor:
        return torch.nn.functional.normalize(leaf * free, dim=-1)

    def objective() -> tuple[Tensor, Tensor]:
        q, k = unit()
        loss = _bernoulli_loss(target, gaps(q, k)).sum(-1) - entropy
        return loss, loss + mu * (q[..., 0].square() + k[..., 0].square())

    ends: Any = {"max_iter": 300, "tolerance_grad": 1e-10, "tolerance_change": 1e-14}
    optimiser = torch.optim.LBFGS(
        [leaf], lr=1.0, history_size=20, line_search_fn="strong_wolfe", **ends
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        total = objective()[1].sum()
        total.backward()
        return total

    optimiser.step(closure)
    with torch.no_grad():
        loss, total = objective()
        best = int(total.argmin())
        q, k = unit()
        return (q[best], k[best]), float(loss[best])
