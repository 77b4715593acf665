"""Features in superposition and one head that looks for pairs of them (section 3).

n features share d < n dimensions: feature i has strength ``x_i = b_i u_i`` (present with
probability p, then uniform), a token is ``t = W x``, and it is read back as ``x̂ = ReLU(Wᵀ t +
b)``. Beside it a head, ``Ω = W_Qᵀ W_K``, should attend where given pairs of features meet, ``ℓ* =
x_qᵀ M x_k``::

    L = λ_rec · mean (x − x̂)² + λ_att · CE(softmax ℓ*, softmax ℓ)        ℓ = t_qᵀ Ω t_k

Reading C of the paper's loss puts λ on the head, reading B on the reconstruction. Both the features
(columns of W) and the singular vectors of Ω are in plain sight, so whether they align is a matter
of measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.checking import AtLeast, Count, checked_class
from qkscope.errors import BadInput
from qkscope.seeds import derived_seed
from qkscope.sums.bases import thin_svd

Reading = Literal["C", "B"]
READINGS: tuple[Reading, ...] = ("C", "B")
Pair = tuple[int, int, float]  # query feature, key feature, target logit
FOUR_PAIRS: tuple[Pair, ...] = ((0, 4, 24.0), (1, 5, 21.0), (2, 6, 18.0), (3, 7, 15.0))
ROPE_BASE = 10_000.0


class Positional(NamedTuple):
    """A pair whose target logit is ``strength · x_q x_k cos(θ_band Δ)``."""

    query: int
    key: int
    strength: float
    band: int


@checked_class
@dataclass(frozen=True)
class Superposition:
    """One setting of the toy; the defaults are the paper's Table 1.

    Parameters
    ----------
    n, d, d_head : features, dimensions of a token, dimensions of the head.
    context : keys per query.
    p : probability that a feature is present in a token.
    weight : λ, on the head's loss (reading C) or on the reconstruction (reading B).
    pairs : the non-zero entries of M, as (query feature, key feature, target logit).
    scaled : whether logits carry 1/√d_head.
    rope : whether queries and keys are rotated by their positions; ``positional`` pairs need it.
    dictionary : W as rows, frozen: the head alone is trained, and nothing is reconstructed.
    head_std : size of the head's entries before training; the paper does not say. 0.18 is that of
        ``nn.Linear``.
    feature_std : size of W's entries before training; Xavier's of the matrix if None.
    """

    n: Count = 20
    d: Count = 10
    d_head: Count = 10
    context: Annotated[int, AtLeast(2)] = 4
    p: float = 0.52
    weight: float = 4.0
    pairs: tuple[Pair, ...] = FOUR_PAIRS
    reading: Reading = "C"
    scaled: bool = False
    rope: bool = False
    positional: tuple[Positional, ...] = ()
    dictionary: tuple[tuple[float, ...], ...] | None = None
    head_std: float = 0.18
    feature_std: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise BadInput(
                f"a feature is present with a probability p in (0, 1], but got {self.p}."
            )
        if self.d_head > self.d:
            raise BadInput(
                f"a head cannot be wider than a token: d_head is {self.d_head}, but d is {self.d}."
            )
        if not 0 <= self.weight < math.inf:
            raise BadInput(f"the weight of a loss is at least 0 and finite, but got {self.weight}.")
        for first, second, logit in (*self.pairs, *(pair[:3] for pair in self.positional)):
            if not (0 <= first < self.n and 0 <= second < self.n and math.isfinite(logit)):
                raise BadInput(
                    f"a pair names two of the features 0 to {self.n - 1} and a finite logit, but "
                    f"got ({first}, {second}) with {logit}."
                )
        if self.rope and self.d_head % 2:
            raise BadInput(
                f"rotating takes dimensions two by two, but d_head is {self.d_head}: make it even."
            )

    @classmethod
    def frozen(cls, dictionary: Float[Tensor, "d n"], **other: Any) -> Superposition:
        """A setting in which the features are given and the head alone is trained."""
        d, n = dictionary.shape
        return cls(n=n, d=d, dictionary=tuple(tuple(row) for row in dictionary.tolist()), **other)

    def target(self) -> Float[Tensor, "n n"]:
        """M."""
        matrix = torch.zeros(self.n, self.n)
        for i, j, logit in self.pairs:
            matrix[i, j] = logit
        return matrix

    @property
    def scale(self) -> float:
        """What a head's dot product is multiplied by."""
        return self.d_head**-0.5 if self.scaled else 1.0

    @property
    def loss_weights(self) -> tuple[float, float]:
        """λ of the reconstruction and of the head."""
        if self.dictionary is not None:
            return 0.0, 1.0
        return (1.0, self.weight) if self.reading == "C" else (self.weight, 1.0)

    def strengths(self, uniform: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
        """Strengths from one uniform draw each: ``relu(1 − u/p)`` is 0 with probability 1 − p, else
        uniform.
        """
        return (1 - uniform / self.p).relu()

    def to_json(self) -> dict[str, Any]:
        """As JSON would have it."""
        values = asdict(self)
        return {
            **values,
            "pairs": [list(pair) for pair in self.pairs],
            "positional": [list(pair) for pair in self.positional],
            "dictionary": None
            if self.dictionary is None
            else [list(row) for row in self.dictionary],
        }


class Basis(NamedTuple):
    """Singular vectors and values of Ω."""

    u: Float[Tensor, "d m"]
    s: Float[Tensor, " m"]
    v: Float[Tensor, "d m"]


@dataclass(frozen=True)
class Toy:
    """Weights of one model, and the setting it belongs to."""

    W: Float[Tensor, "d n"]
    b: Float[Tensor, " n"]
    W_Q: Float[Tensor, "h d"]
    W_K: Float[Tensor, "h d"]
    task: Superposition

    @classmethod
    def untrained(cls, task: Superposition, seed: int) -> Toy:
        """Gaussian features at Xavier's scale, no bias, and a head of Gaussian entries."""
        generator = torch.Generator().manual_seed(derived_seed(seed, 21))
        xavier = math.sqrt(2 / (task.n + task.d))
        feature_std = xavier if task.feature_std is None else task.feature_std
        W = torch.randn(task.d, task.n, generator=generator) * feature_std
        if task.dictionary is not None:
            W = torch.tensor(task.dictionary)
        # drawn at full width and cut, so that heads of several widths start from the same rows
        shape = (2, task.d, task.d)
        W_Q, W_K = (task.head_std * torch.randn(shape, generator=generator))[:, : task.d_head]
        return cls(W, torch.zeros(task.n), W_Q, W_K, task)

    @property
    def omega(self) -> Float[Tensor, "d d"]:
        """``Ω = W_Qᵀ W_K``, with the logits' scale."""
        return self.task.scale * self.W_Q.double().mT @ self.W_K.double()

    def basis(self) -> Basis:
        """Singular basis of Ω; under RoPE of the un-rotated one."""
        u, s, v = thin_svd(self.W_Q, self.W_K)
        return Basis(u, s * self.task.scale, v)

    def tokens(self, x: Float[Tensor, "*s n"]) -> Float[Tensor, "*s d"]:
        """``t = W x``."""
        return x @ self.W.mT.to(x)

    def reconstruct(self, x: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
        """``x̂ = ReLU(Wᵀ W x + b)``."""
        return (self.tokens(x) @ self.W.to(x) + self.b.to(x)).relu()

    def logits(
        self,
        x_q: Float[Tensor, "B n"],
        x_k: Float[Tensor, "B T n"],
        offsets: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T"]:
        """Logits of every key; ``offsets`` (query less key position) where the head rotates."""
        q = self.tokens(x_q) @ self.W_Q.mT.to(x_q)
        k = self.tokens(x_k) @ self.W_K.mT.to(x_k)
        if not self.task.rope:
            return self.task.scale * torch.einsum("bh,bth->bt", q, k)
        assert offsets is not None, "a head that rotates needs positions"
        return self.task.scale * rotated_logits(
            q, k, offsets, band_frequencies(self.task.d_head).to(q)
        )

    def target_logits(
        self,
        x_q: Float[Tensor, "B n"],
        x_k: Float[Tensor, "B T n"],
        offsets: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T"]:
        """``ℓ* = x_qᵀ M x_k``, and the terms of positional pairs."""
        logits = torch.einsum("bi,ij,btj->bt", x_q, self.task.target().to(x_q), x_k)
        for pair in self.task.positional:
            assert offsets is not None, "positional pairs need positions"
            turn = torch.cos(band_frequencies(self.task.d_head)[pair.band] * offsets).to(x_q)
            logits = logits + pair.strength * x_q[:, None, pair.query] * x_k[..., pair.key] * turn
        return logits


def band_frequencies(d_head: int) -> Float[Tensor, " bands"]:
    """RoPE's ``θ_j = 10000^(−2j/d_head)``, one per pair of dimensions."""
    return ROPE_BASE ** (-2 * torch.arange(d_head // 2, dtype=torch.float64) / d_head)


def rotated_logits(
    q: Float[Tensor, "*m B h"],
    k: Float[Tensor, "*m B T h"],
    offsets: Int[Tensor, "B T"],
    frequencies: Float[Tensor, " bands"],
) -> Float[Tensor, "*m B T"]:
    """``(R_m q)ᵀ (R_n k)`` by bands: each ``cos(θΔ) (q·k) + sin(θΔ) (q×k)``, ``Δ = m − n``."""
    angle = offsets[..., None] * frequencies  # B T bands
    q_0 = q[..., None, 0::2]
    q_1 = q[..., None, 1::2]
    k_0 = k[..., 0::2]
    k_1 = k[..., 1::2]
    along = q_0 * k_0 + q_1 * k_1
    across = q_0 * k_1 - q_1 * k_0
    return (angle.cos() * along + angle.sin() * across).sum(-1)


def isotropic_dictionary(d: int = 10, n: int = 20, wanted: int = 8) -> Float[Tensor, "d n"]:
    """``W Wᵀ = I`` exactly: ``wanted`` orthonormal features, the others in antipodal pairs in what
    is left (C.3).

    Antipodal pairs stand at equal angles in the remaining plane, where they are a tight frame.
    """
    W = torch.zeros(d, n, dtype=torch.float64)
    W[:wanted, :wanted] = torch.eye(wanted, dtype=torch.float64)
    half = (n - wanted) // 2
    angles = math.pi * torch.arange(half, dtype=torch.float64) / half
    plane = torch.stack([angles.cos(), angles.sin()]) / math.sqrt(half)
    W[wanted:, wanted::2], W[wanted:, wanted + 1 :: 2] = plane, -plane
    return W


def distort(dictionary: Float[Tensor, "d n"], epsilon: float, seed: int) -> Float[Tensor, "d n"]:
    """``(I + (√(1+ε) − 1) v vᵀ) W``, v a random unit: turns ``W Wᵀ = I`` into ``I + ε v vᵀ``."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 22))
    v = torch.randn(len(dictionary), generator=generator, dtype=torch.float64)
    v = v / v.norm()
    return dictionary.double() + (math.sqrt(1 + epsilon) - 1) * torch.outer(
        v, v @ dictionary.double()
    )


def linear_pairs(count: int, top: float) -> tuple[Pair, ...]:
    """Pairs (i, i + count) with target logits ``top − i``."""
    return tuple((i, i + count, top - i) for i in range(count))


def by_logit(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs in the order of the size of their target logits, the order of the singular vectors they
    should map to.

    A singular value has no sign: a pair that should be avoided, with a logit below 0, takes its
    place by size as well.
    """
    return sorted(pairs, key=lambda pair: -abs(pair[2]))
