"""Independent components of whitened coordinates, and how far from Gaussian and from independent they are.

FastICA with symmetric decorrelation: rows ``W`` orthonormal, ``W ← (W Wᵀ)^(-1/2) (E[g(Wx) xᵀ] − E[g'(Wx)] W)``. It has
spurious fixed points, so many starts run side by side, half of them first with ``g = u³`` (whose contrast has none for
sources of one sign of kurtosis), and the start with the largest contrast ``Σ (E log cosh s − E log cosh N)²`` is kept.

Dependence is distance covariance at a few frequencies: ``|E e^{i(tx+sy)} − E e^{itx} E e^{isy}|²`` is what distance
covariance integrates over all t and s. With few frequencies every pair of components costs one matrix product.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.draws import derived_seed, shuffled_rows

_GAUSS_LOG_COSH = 0.37456720749  # E log cosh of a standard normal
_FREQUENCIES = (0.5, 1.0, 1.5, 2.0, 3.0)


def whiten(x: Float[Tensor, "n r"]) -> tuple[Float[Tensor, "n r"], Float[Tensor, "r r"]]:
    """Centred, unit covariance, rotated as little as possible (ZCA); and the matrix that does it to centred ones."""
    x = x - x.mean(dim=0)
    values, vectors = torch.linalg.eigh(x.mT @ x / len(x))
    floor = values[-1].clamp_min(torch.finfo(x.dtype).tiny) * 1e-12
    half = vectors * values.clamp_min(floor).rsqrt()
    return x @ half @ vectors.mT, half @ vectors.mT


def fast_ica(
    x: Float[Tensor, "n r"], *, starts: int = 8, seed: int = 0, steps: int = 200, tolerance: float = 1e-6
) -> Float[Tensor, "r r"]:
    """Orthonormal rows ``W`` such that the columns of ``x Wᵀ`` are as non-Gaussian as can be; ``x`` is whitened."""
    r = x.shape[1]
    generator = torch.Generator().manual_seed(seed)
    w = torch.linalg.qr(torch.randn(starts, r, r, generator=generator, dtype=torch.float64))[0].to(x)
    cubic = (torch.arange(starts) % 2 == 0).to(x.device)
    for step in range(steps):
        s = w @ x.mT  # starts r n
        t = s.tanh()
        g, slope = t, 1 - t.square().mean(-1, keepdim=True)
        if step < steps // 4 and bool(cubic.any()):
            g = torch.where(cubic[:, None, None], s**3, t)
            slope = torch.where(cubic[:, None, None], torch.full_like(slope, 3.0), slope)
        u, _, vh = torch.linalg.svd(g @ x / len(x) - slope * w, full_matrices=False)
        new = u @ vh
        moved = 1 - (new * w).sum(-1).abs().amin()
        w = new
        if float(moved) < tolerance and step > steps // 4:
            break
    best = contrast(x @ w.mT).sum(-1).argmax()
    return w[best]


def contrast(s: Float[Tensor, "*b n r"]) -> Float[Tensor, "*b r"]:
    """How far each column of unit variance is from Gaussian; 0 if it is."""
    log_cosh = s.abs() + torch.nn.functional.softplus(-2 * s.abs()) - 0.6931471805599453
    return (log_cosh.mean(dim=-2) - _GAUSS_LOG_COSH).square()


def gaussian_contrast(n: int, r: int, *, draws: int = 8, seed: int = 0) -> float:
    """The largest contrast that a component of pure Gaussian data of this size was seen to have."""
    found = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(derived_seed(seed, "gaussian", draw))
        x, _ = whiten(torch.randn(n, r, generator=generator, dtype=torch.float64))
        w = fast_ica(x, starts=1, seed=derived_seed(seed, "gaussian start", draw), steps=40)
        found.append(contrast(x @ w.mT).max())
    return float(torch.stack(found).max())


def waves(s: Float[Tensor, "n r"]) -> Float[Tensor, "n r f"]:
    """``cos(ts)`` and ``sin(ts)`` at a few frequencies, centred."""
    angles = s[..., None] * torch.tensor(_FREQUENCIES, dtype=s.dtype, device=s.device)
    both = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return both - both.mean(dim=0)


def dependence(a: Float[Tensor, "n r f"], b: Float[Tensor, "n r f"]) -> Float[Tensor, "r r"]:
    """``‖Cov(φ_i, φ_j)‖ / √(‖Cov(φ_i, φ_i)‖ ‖Cov(φ_j, φ_j)‖)`` of the waves φ: 0 if independent, 1 if copies.

    Waves are not scaled one by one: a wave that hardly moves, as the cosine of a sign does, says nothing.
    """
    n, r, f = a.shape
    crossed = (a.reshape(n, -1).mT @ b.reshape(n, -1) / n).view(r, f, r, f).square().sum(dim=(1, 3)).sqrt()
    own = [torch.einsum("nrf,nrg->rfg", x, x).div(n).flatten(1).norm(dim=1) for x in (a, b)]
    return crossed / (own[0][:, None] * own[1]).sqrt().clamp_min(1e-300)


def in_threes(s: Float[Tensor, "n r"]) -> Float[Tensor, "r r"]:
    """Largest ``|E[b_i b_j b_k]|`` over a third component k, of values squeezed to ``b = tanh s``.

    Corners of a tetrahedron are three signs of which any two are independent and all three are not: pairs miss that.
    """
    b = s.tanh()
    b = (b - b.mean(dim=0)) / b.std(dim=0, correction=0).clamp_min(1e-12)
    n, r = b.shape
    products = (b[:, :, None] * b[:, None]).view(n, -1)
    thirds = (products.mT @ b / n).view(r, r, r).abs()
    index = torch.arange(r, device=b.device)
    thirds[index, index] = 0.0
    thirds[index, :, index] = 0.0
    thirds[:, index, index] = 0.0
    return thirds.amax(dim=-1)


def dependent_pairs(
    s: Float[Tensor, "n r"], prompts: Int[Tensor, " n"], *, least: float = 0.1, draws: int = 99, seed: int = 0
) -> tuple[Float[Tensor, "r r"], float]:
    """Dependence of every pair of components, alone or through a third, and the bound under which it is chance.

    The bound is the 95% quantile of the largest dependence among all pairs when each component keeps its values but
    takes them from other prompts, and at least ``least``: with enough data everything real depends on everything.
    """
    r = s.shape[1]
    off = ~torch.eye(r, dtype=torch.bool, device=s.device)
    a = waves(s)
    observed = torch.maximum(dependence(a, a), in_threes(s))
    if r < 2:
        return observed, least
    largest = []
    for draw in range(draws):
        moved = torch.stack([s[shuffled_rows(prompts, seed, draw, column), column] for column in range(r)], dim=1)
        b = waves(moved)
        largest.append(torch.maximum(dependence(b, b), in_threes(moved))[off].max())
    return observed, max(float(torch.stack(largest).quantile(0.95)), least)


def connected(edges: Bool[Tensor, "r r"]) -> list[list[int]]:
    """Groups of indices joined by edges, each in order, the group of the smallest index first."""
    from scipy.sparse.csgraph import connected_components

    count, group = connected_components(edges.cpu().numpy(), directed=False)
    return [(group == i).nonzero()[0].tolist() for i in range(count)]
