"""Splitting a logit: among features (Lee et al., Eq. 13-15), and a feature's among the singular
vectors of its head.

Logits are linear in the query, so parts of the query that add up to it give parts of the logit that
add up to it: ``q_1 = P_1 q``, ``q_2 = P_2 (q − q_1)``, …, ``q_⊥`` the rest; ``ℓ^(j) = scale · K
q_j``. Where subspaces overlap, what they share goes to the one taken first, so the order-free
splits stand beside: the average over all orders, and the oblique one, which reads each feature only
along directions that no other feature reaches.

The bridge between the two methods (`alignment`) asks which singular vectors of the weights carry a
feature found by contrast. ``ΔC = U S Vᵀ`` (cut at its rank) lives in head space, where singular
vector j shows as a direction of queries, ``m_j = W_Q u_j``, and a dual direction of keys, ``n_j =
W_K v_j / σ_j`` (`qkscope.sums.singular`). Each is the image to compare a side with: U with
``m_j``, V with ``n_j``. What the contrast adds to the logits splits exactly:

    ``E[qᵀk⁺] − E[qᵀk⁻] = tr ΔC = Σ_j n_jᵀ ΔC m_j``,

so ``n_jᵀ ΔC m_j`` is what vector j carries of the feature. A split over any basis concentrates
somewhere, and the best r of d directions always fit a little: two controls go through the same
choice. ``rotated`` turns the singular vectors at random within the head's own input space (``u' = U
R``; images ``M R``, duals ``M⁺ᵀ R``); ``random`` takes random orthonormal axes of the head space. A
third tells a block from its vectors: ``block`` turns only the leading singular vectors among
themselves, as many as carry the feature in the order of their singular values. If a feature sits on
single vectors it is less sparse there; if only their span matters, it is not. All three keep every
logit. The strongest control is ``key_pca``: the principal axes of the keys, which know the prompts
and neither labels nor weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from qkscope import BadInput, Head, Subspace
from qkscope.checking import Count, checked_call
from qkscope.results.result import Rows
from qkscope.seeds import derived_seed
from qkscope.sums.bases import checked_svd, oblique_projectors, principal_cosines
from qkscope.sums.nulls import p_value
from qkscope.sums.singular import SingularBasis, random_rotations, reconstruction_count, sparsity

RESIDUAL = "residual"
Split = Literal["sequential", "average", "oblique"]
SplitSide = Literal["query", "key", "both"]
Bases = Mapping[str, Float[Tensor, "d r"]]  # of each feature, by name
CARRIED = 0.9  # the share of tr ΔC that "carries the feature"


def part_name(feature: str) -> str:
    """What the part of a feature is called: its name, quoted where tables of parts have that word
    for something else.

    >>> part_name("lexical"), part_name("residual")
    ('lexical', "'residual'")
    """
    return (
        f"'{feature}'"
        if feature in (RESIDUAL, "position", "token", "attention", "logit")
        else feature
    )


class Attribution(NamedTuple):
    """Parts of the logits of one head: ``parts[name]`` per key; they sum to ``logits``."""

    logits: Float[Tensor, "*n k"]
    parts: dict[str, Float[Tensor, "*n k"]]
    overlap: dict[tuple[str, str], float]  # largest cosine between two features' query subspaces


def split_query(
    q: Float[Tensor, "*n d"], bases: Bases, split: Split = "sequential"
) -> dict[str, Tensor]:
    """Parts of the query (``*n d``), one per feature in the order given, and the residual; they sum
    to ``q``.
    """
    if split == "oblique":
        projectors = oblique_projectors(list(bases.values()))[0] if bases else []
        parts = {
            name: (q @ p.right.to(q)) @ p.left.to(q).mT
            for name, p in zip(bases, projectors, strict=True)
        }
    else:
        orders = []
        for order in permutations(bases) if split == "average" else [tuple(bases)]:
            split_off = {}
            left = q
            for name in order:
                basis = bases[name].to(q)
                split_off[name] = (left @ basis) @ basis.mT
                left = left - split_off[name]
            orders.append(split_off)
        parts = {
            name: torch.stack([split_off[name] for split_off in orders]).mean(dim=0)
            for name in bases
        }
    return {**parts, RESIDUAL: q - sum(parts.values())}


def attribute_logits(
    q: Float[Tensor, "*n d"],
    k: Float[Tensor, "*n k d"],
    scale: float,
    bases: Bases,
    split: Split = "sequential",
) -> Attribution:
    """Logits ``scale · K q`` (before soft-cap and mask) and their split among query-side bases.

    >>> q, k = torch.randn(4), torch.randn(3, 4)
    >>> list(attribute_logits(q, k, 0.5, {"order": torch.eye(4)[:, :1], "lexical": torch.eye(4)[:, 1:3]}).parts)
    ['order', 'lexical', 'residual']
    """
    parts = {
        name: scale * (k @ part[..., None])[..., 0]
        for name, part in split_query(q, bases, split).items()
    }
    overlap = {
        (a, b): float(principal_cosines(bases[a], bases[b])[0]) for a, b in combinations(bases, 2)
    }
    return Attribution(scale * (k @ q[..., None])[..., 0], parts, overlap)


def split_rows(
    head: Head,
    query: int,
    keys: Sequence[int],
    total: Tensor,
    parts: Mapping[str, Tensor],
    side: SplitSide,
) -> Rows:
    """The one table of every split of a logit: a row for each key and part.

    Parameters
    ----------
    head : whose logits they are.
    query, keys : positions of the tokens.
    total : what was split, for each key: its logit, or its relative logit.
    parts : by name; they sum to ``total``.
    side : which vector was split.

    Examples
    --------
    >>> parts = {"order": torch.tensor([1.5]), "residual": torch.tensor([0.5])}
    >>> for row in split_rows(Head(0, 1), 7, [3], torch.tensor([2.0]), parts, "query"):
    ...     print(*row.values())
    L0H1 7 3 order query 1.5 0.75
    L0H1 7 3 residual query 0.5 0.25
    """
    whole = total.tolist()
    columns = {name: part.tolist() for name, part in parts.items()}
    return [
        {"head": str(head), "query": query, "key": key, "part": name, "side": side, "value": values[i],
         "share": values[i] / whole[i] if whole[i] else float("nan")}
        for i, key in enumerate(keys)
        for name, values in columns.items()
    ]  # fmt: skip


def carried(delta: Float[Tensor, "d d"], read: Tensor, write: Tensor) -> Float[Tensor, "*n m"]:
    """``n_jᵀ ΔC m_j``: what each direction (``*n d m``) adds to the contrast's logit difference;
    summed, ``tr ΔC``.

    >>> carried(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2), torch.eye(2))
    tensor([3., 1.])
    """
    return (write * (delta @ read)).sum(-2)


def overlap(basis: Float[Tensor, "d r"], images: Float[Tensor, "*n d k"]) -> Float[Tensor, "*n"]:
    """Share of a subspace that lies in the span of some images: mean squared cosine of the
    principal angles, over r.
    """
    return (torch.linalg.qr(images)[0].mT @ basis).square().sum((-2, -1)) / basis.shape[-1]


@dataclass(frozen=True)
class Alignment:
    """How a feature sits on the singular vectors of its head, beside the same numbers of bases that
    mean nothing.

    Parameters
    ----------
    head, contrast, rank, space : of the feature.
    carried : what each singular vector adds to what the feature adds to the logits, ``total = tr
        ΔC``.
    sigma : the singular values.
    query, key : |cos| of each vector's image with the feature, in query and in key space.
    numbers : of the vectors and of the controls, as in `row`.
    caveat : what the reader must know of the space.
    """

    head: Head
    contrast: str
    rank: int
    space: str
    carried: Float[Tensor, " m"]
    sigma: Float[Tensor, " m"]
    query: Float[Tensor, " m"]
    key: Float[Tensor, " m"]
    numbers: Mapping[str, float] = field(default_factory=dict)
    caveat: str = ""

    @property
    def total(self) -> float:
        """``tr ΔC``: what the feature adds to the logits."""
        return float(self.carried.sum())

    def table(self) -> list[dict[str, Any]]:
        """One row per singular vector, those that carry most first."""
        shares = self.carried / self.total if self.total else self.carried
        return [
            {"vector": j, "sigma": float(self.sigma[j]), "carried": float(self.carried[j]), "share": float(shares[j]),
             "query": float(self.query[j]), "key": float(self.key[j])}
            for j in self.carried.argsort(descending=True).tolist()
        ]  # fmt: skip

    def row(self) -> dict[str, Any]:
        """The numbers of this head and contrast with their controls."""
        return {"head": str(self.head), "contrast": self.contrast, "rank": self.rank, "space": self.space,
                "total": self.total, **self.numbers}  # fmt: skip

    def __repr__(self) -> str:
        """For people: how many vectors, how close, against what; and the first few vectors."""
        n = self.numbers
        controls = {"rotated": "rotated", "random": "random", "key_pca": "key PCA"}

        def against(name: str, form: str) -> str:
            there = {
                said: n[f"{name}_{kind}"]
                for kind, said in controls.items()
                if f"{name}_{kind}" in n
            }
            return ", ".join(f"{said} {value:{form}}" for said, value in there.items())

        lines = [
            f"{self.contrast or 'the feature'} at {self.head}, rank {self.rank}: {n['vectors']:.0f} of "
            f"{len(self.sigma)} singular vectors carry {CARRIED:.0%} of it ({against('vectors', '.1f')}).",
            f"The best {self.rank} span {n['query']:.0%} of it in query space ({against('query', '.0%')}) and "
            f"{n['key']:.0%} in key space ({against('key', '.0%')}).",
            f"In the order of σ the leading {n['block']:.0f} carry it, with sparsity {n['sparsity']:.2f}; turned among "
            f"themselves with {n['sparsity_block']:.2f} (p = {n['p_block']:.2f} that turned ones are as sparse).",
            *([self.caveat] if self.caveat else []),
            " vector    sigma    share  |cos| query  |cos| key",
        ]
        form = "{vector:7d} {sigma:8.3f} {share:8.1%} {query:12.2f} {key:10.2f}"
        return "\n".join([*lines, *(form.format(**row) for row in self.table()[:6])])


@checked_call
def alignment(
    basis: SingularBasis, subspace: Subspace, *, draws: Count = 100, seed: int = 0
) -> Alignment:
    """Which singular vectors carry a feature, how close they come to it, and what meaningless bases
    would show.

    Parameters
    ----------
    basis : from `singular_basis`, with the feature's head in it.
    subspace : from `decompose`. Fit it in ``query_frame`` (or a model without RoPE) for an exact
        statement; in ``post_rope`` both sides are turned by their positions, which hides alignment,
        and the answer says so. One made by hand, without the covariance of its keys, has no control
        by key PCA.
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
    assert subspace.head is not None, "this subspace does not say which head it belongs to"
    weights = subspace.about.get("weights")
    here = basis.about.get("weights")
    if weights is not None and here is not None and weights != here:
        raise BadInput(
            "the feature and the singular basis come from different weights: load the same model for both."
        )
    vectors = basis[subspace.head]
    r = subspace.rank
    m = vectors.read
    n = vectors.write
    sigma = vectors.S.double()
    u = subspace.basis("query").double().cpu()
    v = subspace.basis("key").double().cpu()
    delta = u @ torch.diag(subspace.S[:r].double().cpu()) @ v.mT
    shares = carried(delta, m, n)
    leading = sigma.argsort(descending=True)
    # the block: as many leading vectors as carry the feature, turned among themselves
    reached = shares[leading].cumsum(0) >= CARRIED * shares.sum()
    block = leading[: int(reached.long().argmax()) + 1 if bool(reached.any()) else len(sigma)]
    within = torch.eye(len(sigma), dtype=torch.float64).repeat(draws, 1, 1)
    within[:, block[:, None], block] = random_rotations(
        len(block), draws, derived_seed(seed, "block")
    )
    rotations = random_rotations(m.shape[1], draws, seed)
    axes = random_rotations(m.shape[0], draws, derived_seed(seed, "axes"))
    bases = {"": (m, n), "_rotated": (m @ rotations, n @ rotations), "_random": (axes, axes)}
    bases["_block"] = m @ within, n @ within
    if subspace.cov_k is not None:
        components = checked_svd(subspace.cov_k.double().cpu())[2]
        bases["_key_pca"] = components, components
    numbers: dict[str, float] = {}
    for name, (read, write) in bases.items():
        parts = carried(delta, read, write)
        best = parts.argsort(-1, descending=True)[..., :r]
        query = overlap(u, torch.take_along_dim(read, best[..., None, :], -1))
        key = overlap(v, torch.take_along_dim(write, best[..., None, :], -1))
        count = reconstruction_count(parts, CARRIED)
        sparse = sparsity(parts)
        measures = {"vectors": count, "sparsity": sparse, "query": query, "key": key}
        numbers |= {
            f"{measure}{name}": float(values.nanmean()) for measure, values in measures.items()
        }
        if (
            name == "_block"
        ):  # how often the block's vectors, turned among themselves, are as sparse
            numbers |= {
                "block": float(len(block)),
                "p_block": p_value(-sparse, -numbers["sparsity"]),
            }
        elif name in ("_rotated", "_random"):  # how often a meaningless basis does as well
            numbers[f"p_query{name}"] = p_value(query, numbers["query"])
            numbers[f"p_key{name}"] = p_value(key, numbers["key"])
    numbers["query_leading"] = float(overlap(u, m[:, leading[:r]]))
    numbers["key_leading"] = float(overlap(v, n[:, leading[:r]]))
    space = str(subspace.about.get("space", "post_rope"))
    caveat = "Positions turn this fit's queries and keys (post_rope), not singular vectors: fit in query_frame for all."
    query = (normalize(m, dim=0).mT @ u).norm(dim=-1)
    key = (normalize(n, dim=0).mT @ v).norm(dim=-1)
    said = caveat if vectors.rotary and space == "post_rope" else ""
    return Alignment(
        subspace.head, subspace.contrast, r, space, shares, sigma, query, key, numbers, said
    )
