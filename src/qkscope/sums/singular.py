"""A head's singular basis, seen from inside the head, and relative attention as a sum of its terms.

``Ω = W_Qᵀ W_K = Σ σ_j u_j v_jᵀ`` lives in the residual stream; queries and keys live in the head,
where only images of the singular vectors are seen: ``m_j = W_Q u_j`` and ``p_j = W_K v_j``. They
are no orthogonal bases, but each other's duals: ``m_iᵀ p_j = u_iᵀ Ω v_j = σ_i δ_ij``. So with
``M = [m_1 m_2 …]``::

    q = Σ_j α_j m_j,   α = M⁺ q   (which is u_jᵀ x̂, times QK-norm's scalar),
    qᵀ k = Σ_j α_j (m_jᵀ k)

queries of component j point along ``m_j``, keys of it along ``n_j = p_j / σ_j``, the columns of
``M⁺ᵀ``. The split holds for any k, also one turned by RoPE into the query's frame, and needs no
token but the two vectors themselves.

Relative attention says why this key rather than the others, and how few terms say so.
For an attended key i: ``r = ℓ_i − mean_{j≠i} ℓ_j = qᵀ Δk`` with ``Δk = k_i − mean_{j≠i} k_j``,
positive whenever the attention on i beats its share. With ``Ω = Σ_m σ_m u_m v_mᵀ`` the terms are
``c_m = σ_m (u_mᵀ x_q)(v_mᵀ Δx)`` and sum to r. Under RoPE no single Ω holds, but in the query's
frame the same split stays exact: ``σ_m v_mᵀ Δx`` becomes ``(W_Q u_m)ᵀ Δk``.

Sparsity is ``(mean |c|)² / mean c²``: 1 when all terms are equal in size, 1/n when one carries it
all. The reconstruction count is the size of the smallest set of terms whose sum reaches r. Neither
is flat under a meaningless basis: a spectrum alone makes terms unequal, and random terms of the
same sum need few as well. So beside each stand `null_count` and a rotated basis at the same
weights: its terms (`rotated_terms`), or their sparsity with rotations of its own for every prompt
(`turned_terms`, `shared_sparsity`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from qkscope import BadInput
from qkscope.checking import checked_class
from qkscope.heads import Head
from qkscope.sums.bases import Projector, heads_at_once, thin_svd

_NULL = 1e-7  # relative size under which a direction of W_Q is not there
_PROBES = 8


class HeadBasis(NamedTuple):
    """Singular vectors of one head: ``Ω = U diag(S) Vᵀ``, and ``read = W_Q U``.

    Biases are in the last row of U and V.
    """

    U: Float[Tensor, "d m"]
    S: Float[Tensor, " m"]
    V: Float[Tensor, "d m"]
    read: Float[Tensor, "d_head m"]
    rotary: bool

    @property
    def write(self) -> Float[Tensor, "d_head m"]:
        """``n_j``: directions of keys, dual to ``read`` (``W_K v_j / σ_j`` where σ_j is not 0)."""
        return dual(self.read)


@checked_class
@dataclass(frozen=True)
class SingularBasis:
    """Singular vectors of some heads, of weights with this hash.

    Parameters
    ----------
    heads : whose vectors they are, in this order.
    U, S, V : the thin SVD of each head's Ω, in float32, a constant 1 appended to the residual
        stream (biases).
    read : ``W_Q U``, float64: queries of each component, in head space before the rotation.
    scale : what the attention call multiplies ``q·k`` by.
    c_Q : QK-norm's own bias, a part of q that no token decides; zero in nearly every family.
    error : relative error of each head's reconstruction on random probes.
    rotary : whether RoPE turns queries and keys in each head.
    about : the model, and the hash of its weights.

    Examples
    --------
    >>> import qkscope as qk
    >>> basis = qk.sums.singular_basis(qk.Scope.load("nano:mixed"), "L1H3")
    >>> basis
    SingularBasis(L1H3: 24 vectors each)
    >>> basis["L1H3"].read.shape
    torch.Size([24, 24])
    """

    heads: tuple[Head, ...]
    U: Float[Tensor, "h d m"]
    S: Float[Tensor, "h m"]
    V: Float[Tensor, "h d m"]
    read: Float[Tensor, "h d_head m"]
    scale: Float[Tensor, " h"]
    c_Q: Float[Tensor, "h d_head"]
    error: Float[Tensor, " h"]
    rotary: tuple[bool, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.heads[:4]))
        if len(self.heads) > 4:
            names += f", … {len(self.heads)} heads"
        return f"SingularBasis({names}: {self.S.shape[-1]} vectors each)"

    def index(self, heads: Sequence[Head]) -> list[int]:
        """Places of some heads in this basis.

        Parameters
        ----------
        heads : some of its heads.
        """
        for head in heads:
            if head not in self.heads:
                raise BadInput(
                    f"{head} is not in this singular basis:"
                    f" make it with singular_basis(scope, ['{head}'])."
                )
        return [self.heads.index(head) for head in heads]

    def __getitem__(self, head: str | Head) -> HeadBasis:
        (i,) = self.index([Head.parse(head)])
        return HeadBasis(
            U=self.U[i], S=self.S[i], V=self.V[i], read=self.read[i], rotary=self.rotary[i]
        )

    def table(self) -> list[dict[str, Any]]:
        """One row per head: its spectrum in four numbers, and how well the factors multiply out."""
        energy = self.S.double().square()
        share = energy / energy.sum(-1, keepdim=True)
        logarithm = share.clamp_min(1e-300).log()
        entropy = -(share * logarithm).sum(-1)
        table = []
        for i, head in enumerate(self.heads):
            spectrum = self.S[i]
            row = {
                "head": str(head),
                "top": float(spectrum[0]),
                "median": float(spectrum.median()),
                "last": float(spectrum[-1]),
                "effective_rank": float(torch.exp(entropy[i])),
                "rotary": self.rotary[i],
                "error": float(self.error[i]),
            }
            table.append(row)
        return table


def basis_of_weights(
    heads: Sequence[Head],
    weights: Sequence[Tensor],
    rotary: Sequence[bool],
    kv_of_head: Any = None,
    about: Any = None,
) -> SingularBasis:
    """Thin SVD of each head, multiplied out on random probes before it is believed.

    Parameters
    ----------
    heads : whose weights they are.
    weights : W_Q (h d_head d), W_K (g d_head d), the scale of each call (h), and QK-norm's own bias
        (h d_head).
    rotary : whether RoPE turns queries and keys in each head.
    kv_of_head : which of W_K each head reads, Int [h]; its own by default.
    about : the model, and the hash of its weights.
    """
    w_q, w_k, scale, c_q = weights
    if kv_of_head is None:
        kv_of_head = torch.arange(len(heads), device=w_q.device)
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(w_k.shape[-1], _PROBES, generator=generator, dtype=torch.float64)
    parts = []
    numbers = torch.arange(len(heads), device=w_q.device)
    for batch in numbers.split(heads_at_once(w_q)):
        used, kv = kv_of_head[batch].unique(return_inverse=True)
        u, s, v = thin_svd(w_q[batch], w_k[used], kv)
        q = w_q[batch].to(u)
        keys = w_k[used].to(u)
        error = _probe_error((u, s, v), q, keys, kv, probes.to(u))
        results = [u.float(), s, v.float(), q @ u, error]
        parts.append([x.cpu() for x in results])
    U, S, V, read, error = map(torch.cat, zip(*parts, strict=True))
    if bool((error > 1e-6).any()):
        worst = heads[int(error.argmax())]
        largest = float(error.max())
        problem = f"{worst} do not multiply out to its weights (error {largest:.1e})"
        raise BadInput(
            f"the singular vectors of {problem}: look for numbers that are not finite among them."
        )
    return SingularBasis(
        heads=tuple(heads),
        U=U,
        S=S,
        V=V,
        read=read,
        scale=scale.cpu(),
        c_Q=c_q.cpu(),
        error=error,
        rotary=tuple(rotary),
        about=about or {},
    )


def _probe_error(
    factors: tuple[Tensor, Tensor, Tensor],
    q: Float[Tensor, "h d_head d"],
    k: Float[Tensor, "g d_head d"],
    kv: Int[Tensor, " h"],
    probes: Float[Tensor, "d p"],
) -> Float[Tensor, " h"]:
    """Relative error of ``U diag(S) Vᵀ x`` as ``W_Qᵀ W_K x``, over some random x."""
    u, s, v = factors
    true = q.mT @ (k @ probes)[kv]
    rebuilt = u @ (s[..., None] * (v.mT @ probes))
    error = (rebuilt - true).flatten(1).norm(dim=-1)
    size = true.flatten(1).norm(dim=-1)
    tiny = torch.finfo(torch.float64).tiny
    return error / size.clamp_min(tiny)


def dual(read: Float[Tensor, "*h d m"]) -> Float[Tensor, "*h d m"]:
    """``M⁺ᵀ``: its columns give the coordinates, ``α_j = n_jᵀ q``."""
    return torch.linalg.pinv(read.to(torch.float64), rtol=_NULL).mT


def singular_coordinates(
    read: Float[Tensor, "*h d m"], q: Float[Tensor, "*b d"], difference: Float[Tensor, "*b d"]
) -> tuple[Float[Tensor, "*b m"], Float[Tensor, "*b m"]]:
    """``α = M⁺ q`` and ``γ = Mᵀ Δk``, whose products are the terms; q is without QK-norm's bias."""
    query_row = q.double()[..., None, :]
    key_row = difference.double()[..., None, :]
    alpha = (query_row @ dual(read)).squeeze(-2)
    gamma = (key_row @ read.double()).squeeze(-2)
    return alpha, gamma


def components(read: Float[Tensor, "d m"], chosen: Sequence[int] | Tensor) -> Projector:
    """Oblique projector on keys that keeps chosen components of a logit: ``P = Σ_j n_j m_jᵀ``."""
    index = torch.as_tensor(chosen)
    duals = dual(read)[:, index]
    images = read.double()[:, index]
    return Projector(duals, images)


# ---------------------------------------------------------------------- relative attention


def key_difference(
    keys: Float[Tensor, "*b n d"],
    attended: Int[Tensor, "*b"],
    mask: Bool[Tensor, "*b n"] | None = None,
) -> Float[Tensor, "*b d"]:
    """``Δk``: the attended key minus the mean of the others.

    Parameters
    ----------
    keys : the keys of each query's row (or tokens, or logits with d = 1).
    attended : which key of the row is asked about.
    mask : which keys the query sees; all by default.

    Examples
    --------
    >>> key_difference(torch.tensor([[5.0], [1.0], [3.0]]), torch.tensor(0))
    tensor([3.])
    """
    *shape, width = keys.shape
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=keys.device)
    index = attended[..., None].to(torch.int64)
    others = mask.scatter(-1, index, False)
    if not bool(others.any(-1).all()):
        raise BadInput(
            "relative attention needs another key beside the attended one: give a longer prompt."
        )
    weight = (others / others.sum(-1, keepdim=True)).to(keys)
    other_keys = keys.masked_fill(~others[..., None], 0.0)
    mean = (weight[..., None] * other_keys).sum(-2)
    columns = index[..., None].expand(*index.shape, width)
    attended_key = keys.gather(-2, columns).squeeze(-2)
    return attended_key - mean


def sparsity(terms: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """``(mean |c|)² / mean c²``; NaN where all terms are 0.

    Examples
    --------
    >>> sparsity(torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 3.0, 0.0]]))
    tensor([1.0000, 0.2500])
    """
    mean_size = terms.abs().mean(-1)
    mean_square = terms.square().mean(-1)
    return mean_size.square() / mean_square


def reconstruction_count(
    terms: Float[Tensor, "*b m"], tolerance: float = 1.0
) -> Float[Tensor, "*b"]:
    """How many of the largest terms it takes to reach ``tolerance · r``; NaN where ``r = Σ c ≤ 0``.

    Examples
    --------
    >>> reconstruction_count(torch.tensor([[5.0, 3.0, -2.0], [1.0, -4.0, 1.0]]))
    tensor([2., nan])
    """
    total = terms.sum(-1, keepdim=True)
    reached = terms.sort(dim=-1, descending=True).values.cumsum(-1)
    # the sum in another order may miss the total by rounding: without slack an exact fit would need
    # all terms
    rounding = 8 * torch.finfo(terms.dtype).eps
    slack = rounding * terms.abs().sum(-1, keepdim=True)
    aim = tolerance * total - slack
    count = (reached < aim).sum(-1) + 1
    is_positive = total.squeeze(-1) > 0
    return torch.where(is_positive, count.to(terms), torch.nan)


def cancellation(terms: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """``r / Σ |c|``: 1 when all terms point the same way, near 0 when they cancel."""
    return terms.sum(-1) / terms.abs().sum(-1)


def rank_correlation(a: Float[Tensor, "*b m"], b: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """Spearman's correlation of terms and singular values; NaN where a term is."""
    first = _centred_ranks(a)
    second = _centred_ranks(b)
    sizes = first.norm(dim=-1) * second.norm(dim=-1)
    correlation = (first * second).sum(-1) / sizes
    return torch.where(a.isnan().any(-1), torch.nan, correlation)


def _centred_ranks(values: Float[Tensor, "*b m"]) -> Float[Tensor, "*b m"]:
    """Ranks of the values less their mean."""
    ranks = values.argsort(-1).argsort(-1).double()
    return ranks - ranks.mean(-1, keepdim=True)


def largest_place(terms: Float[Tensor, "*b m"]) -> Float[Tensor, "*b"]:
    """Where the largest |term| stands: 0 at the largest singular value, 1 at the smallest.

    NaN where a term is.

    Examples
    --------
    >>> largest_place(torch.tensor([1.0, -4.0, 2.0]))
    tensor(0.5000)
    """
    last = max(terms.shape[-1] - 1, 1)
    place = terms.abs().argmax(-1).to(terms) / last
    return torch.where(terms.isnan().any(-1), torch.nan, place)


def null_count(
    terms: Float[Tensor, "*b m"], tolerance: float = 1.0, draws: int = 20, seed: int = 0
) -> Tensor:
    """Mean reconstruction count of random terms with the same sum and the same norm."""
    generator = torch.Generator().manual_seed(seed)
    shape = (draws, *terms.shape)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(terms)
    noise = noise - noise.mean(-1, keepdim=True)
    mean = terms.mean(-1, keepdim=True)
    spread = (terms - mean).norm(dim=-1, keepdim=True)
    tiny = torch.finfo(terms.dtype).tiny
    size = noise.norm(dim=-1, keepdim=True).clamp_min(tiny)
    random = mean + noise / size * spread
    return reconstruction_count(random, tolerance).mean(0)


def rotated_terms(
    query: Float[Tensor, "*b m"],
    s: Tensor,
    difference: Float[Tensor, "*b m"],
    draws: int = 20,
    seed: int = 0,
) -> Float[Tensor, "draws *b m"]:
    """Terms over ``U R_1`` and ``V R_2``, independent random rotations.

    Spectrum and rank stay, the directions do not. They rotate within the head's own subspaces, the
    strictest form: only which direction meets which is lost.
    """
    rank = s.shape[-1]
    rotations = random_rotations(rank, 2 * draws, seed).to(query)
    of_query, of_key = rotations.chunk(2)
    q = torch.einsum("...m,rmn->r...n", query, of_query)
    k = torch.einsum("...m,rmn->r...n", difference, of_key)
    return q * s * k


def random_rotations(d: int, draws: int, seed: int) -> Float[Tensor, "draws d d"]:
    """Haar-random orthogonal matrices."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(draws, d, d, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    return q * signs[..., None, :]


def turned_terms(
    query: Float[Tensor, "b h m"],
    s: Float[Tensor, "h m"],
    draws: int,
    prompts: Sequence[int],
    seed: int = 0,
) -> Float[Tensor, "draws b h m"]:
    """Terms ``s · (R_1 α) · (R_2 β)`` up to their size: what the spectrum alone would show.

    A random rotation sends a vector to a uniform direction, and what is asked of terms does not see
    its length: no matrix has to be drawn. Rotations shared by all prompts would leave their luck in
    every mean, where no interval over prompts could show it.

    Parameters
    ----------
    query : the coordinates; only their shape counts, and NaN stays NaN.
    prompts : numbers of the prompts, which address their draws.
    """
    first, second = _gaussian_pairs(query, draws, prompts, seed)
    terms = first * s.to(first) * second
    is_unknown = query.isnan().any(-1, keepdim=True)
    return torch.where(is_unknown, torch.nan, terms)


def shared_sparsity(
    q: Float[Tensor, "b h d"],
    difference: Float[Tensor, "b h d"],
    draws: int,
    prompts: Sequence[int],
    seed: int = 0,
) -> Float[Tensor, "b h"]:
    """Mean sparsity of the products of coordinates after one rotation of both vectors.

    Every logit stays: a pair of vectors goes to a uniform pair at the same angle.
    """
    pairs = _gaussian_pairs(q, draws, prompts, seed)
    first, second = normalize(pairs, dim=-1)
    along = (second * first).sum(-1, keepdim=True) * first
    across = normalize(second - along, dim=-1)
    cosine = cosine_similarity(q, difference, dim=-1)[..., None]
    sine = (1 - cosine.square()).clamp_min(0).sqrt()
    turned = cosine * first + sine * across
    return sparsity(first * turned).mean(0)


def _gaussian_pairs(
    like: Float[Tensor, "b h m"], draws: int, prompts: Sequence[int], seed: int
) -> Float[Tensor, "2 r b h m"]:
    """Gaussian vectors, addressed by seed and prompt: batches do not change them."""
    drawn = []
    for prompt in prompts:
        name = f"{seed}/{prompt}"
        digest = hashlib.sha256(name.encode()).digest()
        address = int.from_bytes(digest[:8], "big") >> 1
        generator = torch.Generator().manual_seed(address)
        shape = (2, draws, *like.shape[1:])
        drawn.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return torch.stack(drawn, dim=2)
