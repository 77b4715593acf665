"""How well payload retrieval can be done at all: accuracy beside its ceiling, by Monte Carlo.

Two ceilings. The **Bayes** ceiling is what any decoder can reach. Discrete contexts may hold the
asked code twice, with different payloads, and then even the best guess is a guess: the most
frequent payload among the equal codes. (Exact as the noise goes to 0, an upper bound otherwise.)
Continuous codes never coincide; there the posterior over keys is Gaussian, ``p(i | x) ∝ p(x_q |
x_i, match)``, with the payloads' part of x_i known to the decoder.

The **dot-product** ceiling is what one attention head of unlimited width can reach with ``G = cI``,
the best c. A head scores ``z_q·z_i``, not a distance: with Gaussian latents a longer vector beats
the right one, so the ceiling is far below Bayes at small ranks. It is what the paper's "accuracy
drops to around 85%" is to be read against.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.seeds import derived_seed
from qkscope_papers.lee2026.toy.retrieval import Encoders, Retrieval

_GAINS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)


def bayes_ceiling(encoders: Encoders, n: int = 20_480, seed: int = 0) -> float:
    """Accuracy of the best decoder there is."""
    if encoders.task.variant == "discrete":
        z, payload, asked = _draw(encoders.task, n, seed)
        equal = (z == z[torch.arange(n), asked][:, None]).all(dim=-1)
        return _accuracy(equal.float(), payload, asked)
    return _gaussian_ceiling(encoders, n, seed)


def dot_product_ceiling(task: Retrieval, n: int = 20_480, seed: int = 0) -> float:
    """Accuracy of an ideal head that scores ``c z_q·z_i`` over all latents, with the best c."""
    z, payload, asked = _draw(task, n, seed)
    products = (z @ z[torch.arange(n), asked][..., None])[..., 0]
    return max(_accuracy((gain * products).softmax(dim=-1), payload, asked) for gain in _GAINS)


def _draw(task: Retrieval, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(derived_seed(seed, 8))
    z = task.draw_latents((n, task.keys), generator)
    payload = torch.randint(task.payloads, (n, task.keys), generator=generator)
    return z, payload, torch.randint(task.keys, (n,), generator=generator)


def _accuracy(
    weights: Float[Tensor, "n T"], payload: Int[Tensor, "n T"], asked: Int[Tensor, " n"]
) -> float:
    """Expected accuracy when the payload with most weight is answered, ties broken by chance."""
    votes = torch.zeros(len(asked), int(payload.max()) + 1).scatter_add(1, payload, weights)
    best = votes >= votes.amax(dim=1, keepdim=True) * (1 - 1e-6)
    hit = best.gather(1, payload.gather(1, asked[:, None]))[:, 0]
    return float((hit / best.sum(dim=1)).mean())


def _gaussian_ceiling(encoders: Encoders, n: int, seed: int) -> float:
    task = encoders.task
    a = encoders.A.double()
    b = encoders.B.double()
    floor = max(task.noise, 1e-4) ** 2 * torch.eye(
        task.d, dtype=torch.float64
    )  # noise 0 has no density
    cov_k = a @ a.mT + floor
    cov_q = b @ b.mT + floor
    cross = b @ a.mT
    # x_q given x_i under a match: mean gain·x_i, covariance rest. Without a match: mean 0,
    # covariance cov_q.
    gain = torch.linalg.solve(cov_k, cross.mT).mT
    rest = torch.linalg.cholesky(cov_q - gain @ cross.mT)
    n = min(n, 4096)  # at small noise it is 1 to four digits, and its whitening is the slow part
    right = 0.0
    size = 2048
    for part, start in enumerate(range(0, n, size)):
        x_q, x_k, asked, payload, _ = encoders.contexts(
            min(size, n - start), derived_seed(seed, 9, part)
        )
        clean = (x_k - encoders.A_y.mT[payload]).double()
        missed = x_q.double()[:, None] - clean @ gain.mT
        white = torch.linalg.solve_triangular(
            rest, missed.flatten(0, 1).mT, upper=False
        ).mT.unflatten(0, missed.shape[:2])
        # p(x_q) is the same for all keys, so only the match's density ranks them.
        posterior = (-0.5 * white.square().sum(dim=-1)).softmax(dim=-1)
        right += _accuracy(posterior.float(), payload, asked) * len(asked)
    return right / n
