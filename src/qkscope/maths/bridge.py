"""The bridge between the two methods: which singular vectors of the weights carry a feature found by contrast.

A contrast's ``ΔC = U S Vᵀ`` (cut at its rank) lives in head space, where singular vector j shows as a direction of
queries, ``m_j = W_Q u_j``, and a dual direction of keys, ``n_j = W_K v_j / σ_j`` (`qkscope.maths.singular`). Each is
the image to compare a side with: U with ``m_j``, V with ``n_j``. What the contrast adds to the logits splits exactly:

    ``E[qᵀk⁺] − E[qᵀk⁻] = tr ΔC = Σ_j n_jᵀ ΔC m_j``,

so ``n_jᵀ ΔC m_j`` is what vector j carries of the feature. A split over any basis concentrates somewhere, and the best
r of d directions always fit a little: two controls go through the same choice. ``rotated`` turns the singular vectors
at random within the head's own input space (``u' = U R``; images ``M R``, duals ``M⁺ᵀ R``); ``random`` takes random
orthonormal axes of the head space. A third tells a block from its vectors: ``block`` turns only the leading singular
vectors among themselves, as many as carry the feature in the order of their singular values. If a feature sits on
single vectors it is less sparse there; if only their span matters, it is not. All three keep every logit. The strongest
control is ``key_pca``: the principal axes of the keys, which know the prompts and neither labels nor weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import Count, checked_call, checked_class
from qkscope.maths.bases import checked_svd, principal_angles
from qkscope.maths.relative import random_rotations, reconstruction_count, sparsity
from qkscope.maths.significance import p_value
from qkscope.maths.singular import SingularBasis, dual
from qkscope.maths.subspace import Subspace

CARRIED = 0.9  # the share of tr ΔC that "carries the feature"


def carried(
    delta: Float[Tensor, "d d"], read: Float[Tensor, "*n d m"], write: Float[Tensor, "*n d m"]
) -> Float[Tensor, "*n m"]:
    """``n_jᵀ ΔC m_j``: what each direction adds to the contrast's logit difference; they sum to ``tr ΔC``.

    Examples
    --------
    >>> carried(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2), torch.eye(2))
    tensor([3., 1.])
    """
    return (write * (delta @ read)).sum(-2)


def overlap(basis: Float[Tensor, "d r"], images: Float[Tensor, "*n d k"]) -> Float[Tensor, "*n"]:
    """Share of a subspace that lies in the span of some images: mean squared cosine of the principal angles, over r."""
    span = torch.linalg.qr(images)[0]
    return (span.mT @ basis).square().sum((-2, -1)) / basis.shape[-1]


@checked_class
@dataclass(frozen=True)
class Alignment:
    """How a feature sits on the singular vectors of its head, beside the same numbers of bases that mean nothing.

    Parameters
    ----------
    head, contrast, rank, space : of the feature.
    total : ``tr ΔC``, what the feature adds to the logits.
    carried : what each singular vector adds to it; they sum to ``total``.
    sigma : the singular values.
    query, key : |cos| of each vector's image with the feature, in query and in key space.
    angles_query, angles_key : principal angles between the feature and the vectors that carry most, in degrees.
    numbers : the same of the controls, as in `row`.
    caveat : what the reader must know of the space.
    """

    head: Head
    contrast: str
    rank: int
    space: str
    total: float
    carried: Float[Tensor, " m"]
    sigma: Float[Tensor, " m"]
    query: Float[Tensor, " m"]
    key: Float[Tensor, " m"]
    angles_query: Float[Tensor, " r"]
    angles_key: Float[Tensor, " r"]
    numbers: Mapping[str, float] = field(default_factory=dict)
    caveat: str = ""

    def __repr__(self) -> str:
        carry = f"{self.numbers['vectors']:.0f} of {len(self.sigma)} singular vectors carry {CARRIED:.0%}"
        return f"Alignment({self.contrast or 'the feature'} at {self.head}, rank {self.rank}: {carry})"

    def best(self, count: Count | None = None) -> list[int]:
        """The vectors that carry most, largest first.

        Parameters
        ----------
        count : how many; the feature's rank by default.
        """
        return self.carried.argsort(descending=True)[: self.rank if count is None else count].tolist()

    def table(self) -> list[dict[str, Any]]:
        """One row per singular vector, those that carry most first."""
        shares = self.carried / self.total if self.total else self.carried
        return [
            {"vector": j, "sigma": float(self.sigma[j]), "carried": float(self.carried[j]), "share": float(shares[j]),
             "query": float(self.query[j]), "key": float(self.key[j])}
            for j in self.best(len(self.carried))
        ]  # fmt: skip

    def row(self) -> dict[str, Any]:
        """The numbers of this head and contrast with their controls."""
        return {"head": str(self.head), "contrast": self.contrast, "rank": self.rank, "space": self.space,
                "total": self.total, **self.numbers}  # fmt: skip

    def summary(self, rows: Count = 6) -> str:
        """For people: how many vectors, how close, against what; and the first few vectors.

        Parameters
        ----------
        rows : how many vectors.
        """
        n = self.numbers
        lines = [
            f"{self.contrast or 'the feature'} at {self.head}, rank {self.rank}: {n['vectors']:.0f} of "
            f"{len(self.sigma)} singular vectors carry {CARRIED:.0%} of it (rotated vectors {n['vectors_rotated']:.1f},"
            f" random axes {n['vectors_random']:.1f}{self._keys('vectors', '.0f')}).",
            f"The best {self.rank} span {n['query']:.0%} of it in query space (rotated {n['query_rotated']:.0%}, random"
            f" {n['query_random']:.0%}{self._keys('query', '.0%')}) and {n['key']:.0%} in key space (rotated "
            f"{n['key_rotated']:.0%}, random {n['key_random']:.0%}{self._keys('key', '.0%')}).",
        ]
        lines.append(
            f"In the order of σ the leading {n['block']:.0f} carry it, with sparsity {n['sparsity']:.2f}; turned among "
            f"themselves with {n['sparsity_block']:.2f} (p = {n['p_block']:.2f} that turned ones are as sparse)."
        )
        lines += [self.caveat] if self.caveat else []
        lines.append(" vector    sigma    share  |cos| query  |cos| key")
        for row in self.table()[:rows]:
            numbers = f"{row['sigma']:8.3f} {row['share']:8.1%} {row['query']:12.2f} {row['key']:10.2f}"
            lines.append(f"{row['vector']:7d} {numbers}")
        return "\n".join(lines)

    def _keys(self, name: str, form: str) -> str:
        """The control by key PCA in words, where the feature knows its keys."""
        value = self.numbers.get(f"{name}_key_pca")
        return "" if value is None else f", key PCA {value:{form}}"

    def __str__(self) -> str:
        return self.summary()


@checked_call
def alignment(basis: SingularBasis, subspace: Subspace, *, draws: Count = 100, seed: int = 0) -> Alignment:
    """Which singular vectors carry a feature, how close they come to it, and what meaningless bases would show.

    Parameters
    ----------
    basis : from `singular_basis`, with the feature's head in it.
    subspace : from `decompose`. Fit it in ``query_frame`` (or a model without RoPE) for an exact statement; in
        ``post_rope`` both sides are turned by their positions, which hides alignment, and the answer says so. One
        made by hand, without the covariance of its keys, has no control by key PCA.
    draws, seed : of the controls.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope = qk.Scope.load("nano:mixed")
    >>> feature = qk.Subspace.from_delta(torch.eye(24), rank=3, head="L1H3", about={"space": "query_frame"})
    >>> found = qk.alignment(qk.singular_basis(scope, "L1H3"), feature, draws=10)
    >>> round(float(found.carried.sum()), 3) == round(found.total, 3)
    True
    """
    if subspace.head is None:
        raise BadInput("this subspace does not say which head it belongs to: make it with decompose.")
    weights, here = subspace.about.get("weights"), basis.about.get("weights")
    if weights is not None and here is not None and weights != here:
        raise BadInput("the feature and the singular basis come from different weights: load the same model for both.")
    own = basis[subspace.head]
    if own.read.shape[0] != subspace.d_head:
        raise BadInput(f"the feature has width {subspace.d_head}, the head {own.read.shape[0]}: take the same model.")
    r = subspace.rank
    u, v = subspace.basis("query").double().cpu(), subspace.basis("key").double().cpu()
    delta = u @ torch.diag(subspace.S[:r].double().cpu()) @ v.mT
    m, n = own.read, own.write
    shares = carried(delta, m, n)
    rotations = random_rotations(m.shape[1], draws, seed)
    axes = random_rotations(m.shape[0], draws, derived_seed(seed, "axes"))
    numbers: dict[str, float] = {}
    block, within = _block(shares, own.S.double(), draws, derived_seed(seed, "block"))
    bases = [
        ("", m, n),
        ("_rotated", m @ rotations, n @ rotations),
        ("_random", axes, axes),
        ("_block", m @ within, n @ within),
    ]
    if subspace.cov_k is not None:
        components = checked_svd(subspace.cov_k.double().cpu())[2]
        bases.append(("_key_pca", components, components))
    for name, read, write in bases:
        parts = carried(delta, read, write)
        best = parts.argsort(-1, descending=True)[..., :r]
        numbers |= {
            f"vectors{name}": _mean(reconstruction_count(parts, CARRIED)),
            f"sparsity{name}": _mean(sparsity(parts)),
            f"query{name}": _mean(query := overlap(u, _columns(read, best))),
            f"key{name}": _mean(key := overlap(v, _columns(write, best))),
        }
        if name == "_block":  # how often the block's vectors, turned among themselves, are as sparse
            numbers |= {"block": float(block), "p_block": p_value(-sparsity(parts), -numbers["sparsity"])}
        elif name in ("_rotated", "_random"):  # how often a meaningless basis does as well
            numbers |= {
                f"p_query{name}": p_value(query, numbers["query"]),
                f"p_key{name}": p_value(key, numbers["key"]),
            }
    leading = own.S.argsort(descending=True)[:r]
    numbers |= {"query_leading": _mean(overlap(u, m[:, leading])), "key_leading": _mean(overlap(v, n[:, leading]))}
    chosen = shares.argsort(descending=True)[:r]
    space = str(subspace.about.get("space", "post_rope"))
    caveat = ""
    if own.rotary and space == "post_rope":
        caveat = (
            "Queries and keys of this fit are turned by their positions (post_rope), the singular vectors are not: fit"
            " in query_frame to see all of the alignment."
        )
    return Alignment(
        head=subspace.head,
        contrast=subspace.contrast,
        rank=r,
        space=space,
        total=float(shares.sum()),
        carried=shares,
        sigma=own.S.double(),
        query=(normalize(m, dim=0).mT @ u).norm(dim=-1),
        key=(normalize(n, dim=0).mT @ v).norm(dim=-1),
        angles_query=principal_angles(u, torch.linalg.qr(m[:, chosen])[0]).rad2deg(),
        angles_key=principal_angles(v, torch.linalg.qr(n[:, chosen])[0]).rad2deg(),
        numbers=numbers,
        caveat=caveat,
    )


def rotated_images(
    read: Float[Tensor, "d m"], draws: int, seed: int
) -> tuple[Float[Tensor, "draws d m"], Float[Tensor, "draws d m"]]:
    """Images and duals of singular vectors that were turned at random within the head's input space."""
    rotations = random_rotations(read.shape[1], draws, seed)
    return read.double() @ rotations, dual(read) @ rotations


def _block(
    shares: Float[Tensor, " m"], s: Float[Tensor, " m"], draws: int, seed: int
) -> tuple[int, Float[Tensor, "draws m m"]]:
    """How many leading vectors carry the feature, and rotations of these among themselves."""
    order = s.argsort(descending=True)
    reached = shares[order].cumsum(0) >= CARRIED * shares.sum()
    size = int(reached.long().argmax()) + 1 if bool(reached.any()) else len(s)
    whole = torch.eye(len(s), dtype=torch.float64).repeat(draws, 1, 1)
    leading = order[:size]
    whole[:, leading[:, None], leading] = random_rotations(size, draws, seed)
    return size, whole


def _columns(x: Float[Tensor, "*n d m"], index: Int[Tensor, "*n k"]) -> Float[Tensor, "*n d k"]:
    return x.gather(-1, index[..., None, :].expand(*x.shape[:-1], index.shape[-1]))


def _mean(values: Tensor) -> float:
    return float(values.nanmean())
