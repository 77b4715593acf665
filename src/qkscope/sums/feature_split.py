"""Splits of a logit among features, and of a feature among the singular vectors of its head.

Logits are linear in the query, so parts of the query that add up to it give parts of the logit that
add up to it (Lee et al., Eq. 13-15)::

    q_1 = P_1 q,   q_2 = P_2 (q − q_1),   …,   q_⊥ the rest;     ℓ^(j) = scale · K q_j

Where subspaces overlap, what they share goes to the one taken first, so the order-free
splits stand beside: the average over all orders, and the oblique one, which reads each feature only
along directions that no other feature reaches.

The bridge between the two methods (`alignment`) asks which singular vectors of the weights carry a
feature found by contrast. ``ΔC = U S Vᵀ`` (cut at its rank) lives in head space, where singular
vector j shows as a direction of queries, ``m_j = W_Q u_j``, and a dual direction of keys, ``n_j =
W_K v_j / σ_j`` (`qkscope.sums.singular`). Each is the image to compare a side with: U with
``m_j``, V with ``n_j``. What the contrast adds to the logits splits exactly::

    E[qᵀk⁺] − E[qᵀk⁻] = tr ΔC = Σ_j n_jᵀ ΔC m_j

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

from qkscope import BadInput
from qkscope.checking import Count, checked_call
from qkscope.heads import Head
from qkscope.results.result import Rows
from qkscope.seeds import derived_seed
from qkscope.sums.bases import checked_svd, oblique_projectors, principal_cosines
from qkscope.sums.nulls import p_value
from qkscope.sums.singular import SingularBasis, random_rotations, reconstruction_count, sparsity
from qkscope.sums.subspace import Subspace

RESIDUAL = "residual"
Split = Literal["sequential", "average", "oblique"]
SplitSide = Literal["query", "key", "both"]
FeatureBases = Mapping[str, Float[Tensor, "d r"]]  # of each feature, by name
CARRIED = 0.9  # the share of tr ΔC that "carries the feature"


# words that tables of parts have for something else
_RESERVED = (RESIDUAL, "position", "token", "attention", "logit")
_CONTROLS = {"rotated": "rotated", "random": "random", "key_pca": "key PCA"}
_SHOWN_VECTORS = 6


def part_name(feature: str) -> str:
    """Name of the part of a feature: quoted where tables of parts have that word for another thing.

    >>> part_name("lexical"), part_name("residual")
    ('lexical', "'residual'")
    """
    if feature in _RESERVED:
        return f"'{feature}'"
    return feature


class Attribution(NamedTuple):
    """Parts of the logits of one head: ``parts[name]`` per key; they sum to ``logits``."""

    logits: Float[Tensor, "*n k"]
    parts: dict[str, Float[Tensor, "*n k"]]
    overlap: dict[tuple[str, str], float]  # largest cosine between two features' query subspaces


def split_query(
    q: Float[Tensor, "*n d"], bases: FeatureBases, split: Split = "sequential"
) -> dict[str, Tensor]:
    """Parts of the query (``*n d``), one per feature and the residual; they sum to ``q``."""
    if split == "oblique":
        parts = _split_obliquely(q, bases)
    elif split == "average":
        splits = [_split_in_order(q, bases, order) for order in permutations(bases)]
        parts = {}
        for name in bases:
            of_orders = [split_off[name] for split_off in splits]
            parts[name] = torch.stack(of_orders).mean(dim=0)
    else:
        parts = _split_in_order(q, bases, tuple(bases))
    return {**parts, RESIDUAL: q - sum(parts.values())}


def _split_in_order(
    q: Float[Tensor, "*n d"], bases: FeatureBases, order: Sequence[str]
) -> dict[str, Tensor]:
    """Parts of the query, each feature's taken from what those before it left."""
    parts = {}
    left = q
    for name in order:
        basis = bases[name].to(q)
        parts[name] = (left @ basis) @ basis.mT
        left = left - parts[name]
    return parts


def _split_obliquely(q: Float[Tensor, "*n d"], bases: FeatureBases) -> dict[str, Tensor]:
    """Parts of the query, each feature's read along directions that no other feature reaches."""
    if not bases:
        return {}
    projectors, _ = oblique_projectors(list(bases.values()))
    parts = {}
    for name, projector in zip(bases, projectors, strict=True):
        coordinates = q @ projector.right.to(q)
        parts[name] = coordinates @ projector.left.to(q).mT
    return parts


def attribute_logits(
    q: Float[Tensor, "*n d"],
    k: Float[Tensor, "*n k d"],
    scale: float,
    bases: FeatureBases,
    split: Split = "sequential",
) -> Attribution:
    """Logits ``scale · K q`` (before soft-cap and mask) and their split among query-side bases.

    >>> q, k = torch.randn(4), torch.randn(3, 4)
    >>> bases = {"order": torch.eye(4)[:, :1], "lexical": torch.eye(4)[:, 1:3]}
    >>> list(attribute_logits(q, k, 0.5, bases).parts)
    ['order', 'lexical', 'residual']
    """
    parts = {}
    for name, part in split_query(q, bases, split).items():
        parts[name] = _logits(part, k, scale)
    overlap = {}
    for a, b in combinations(bases, 2):
        cosines = principal_cosines(bases[a], bases[b])
        overlap[a, b] = float(cosines[0])
    return Attribution(_logits(q, k, scale), parts, overlap)


def _logits(
    q: Float[Tensor, "*n d"], k: Float[Tensor, "*n k d"], scale: float
) -> Float[Tensor, "*n k"]:
    """``scale · K q``."""
    return scale * (k @ q[..., None])[..., 0]


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
    rows = []
    for i, key in enumerate(keys):
        for name, values in columns.items():
            share = float("nan")
            if whole[i]:
                share = values[i] / whole[i]
            row = {
                "head": str(head),
                "query": query,
                "key": key,
                "part": name,
                "side": side,
                "value": values[i],
                "share": share,
            }
            rows.append(row)
    return rows


def carried(delta: Float[Tensor, "d d"], read: Tensor, write: Tensor) -> Float[Tensor, "*n m"]:
    """``n_jᵀ ΔC m_j``: what each direction (``*n d m``) adds to the contrast's logit difference.

    Summed over all directions, it is ``tr ΔC``.

    >>> carried(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2), torch.eye(2))
    tensor([3., 1.])
    """
    return (write * (delta @ read)).sum(-2)


def overlap(basis: Float[Tensor, "d r"], images: Float[Tensor, "*n d k"]) -> Float[Tensor, "*n"]:
    """Share of a subspace in the span of some images: mean squared cosine of principal angles."""
    span, _ = torch.linalg.qr(images)
    cosines = span.mT @ basis
    squares = cosines.square().sum((-2, -1))
    return squares / basis.shape[-1]


@dataclass(frozen=True)
class Alignment:
    """How a feature sits on the singular vectors of its head, beside bases that mean nothing.

    Parameters
    ----------
    head, contrast, rank, space : of the feature.
    carried : what each singular vector adds to what the feature adds to the logits; they sum to
        ``total = tr ΔC``.
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
        columns = {
            "sigma": self.sigma,
            "carried": self.carried,
            "share": shares,
            "query": self.query,
            "key": self.key,
        }
        table = []
        for j in self.carried.argsort(descending=True).tolist():
            row = {"vector": j}
            for name, values in columns.items():
                row[name] = float(values[j])
            table.append(row)
        return table

    def row(self) -> dict[str, Any]:
        """The numbers of this head and contrast with their controls."""
        return {
            "head": str(self.head),
            "contrast": self.contrast,
            "rank": self.rank,
            "space": self.space,
            "total": self.total,
            **self.numbers,
        }

    def _controls(self, measure: str, form: str) -> str:
        """One measure of every control that was run, in words."""
        shown = []
        for kind, name in _CONTROLS.items():
            value = self.numbers.get(f"{measure}_{kind}")
            if value is not None:
                shown.append(f"{name} {value:{form}}")
        return ", ".join(shown)

    def _carriers_line(self) -> str:
        """How many vectors carry the feature, beside the controls."""
        feature = self.contrast or "the feature"
        place = f"{feature} at {self.head}, rank {self.rank}"
        count = f"{self.numbers['vectors']:.0f}"
        some = f"{count} of {len(self.sigma)} singular vectors"
        controls = self._controls("vectors", ".1f")
        return f"{place}: {some} carry {CARRIED:.0%} of it ({controls})."

    def _span_line(self) -> str:
        """How much of the feature the best vectors span on either side, beside the controls."""
        query_controls = self._controls("query", ".0%")
        key_controls = self._controls("key", ".0%")
        query = f"{self.numbers['query']:.0%} of it in query space ({query_controls})"
        key = f"{self.numbers['key']:.0%} in key space ({key_controls})"
        return f"The best {self.rank} span {query} and {key}."

    def _block_line(self) -> str:
        """How sparse the leading vectors are, beside the same ones turned among themselves."""
        n = self.numbers
        leading = f"In the order of σ the leading {n['block']:.0f} carry it"
        sparse = f"with sparsity {n['sparsity']:.2f}"
        turned = f"turned among themselves with {n['sparsity_block']:.2f}"
        p = f"p = {n['p_block']:.2f} that turned ones are as sparse"
        return f"{leading}, {sparse}; {turned} ({p})."

    def __repr__(self) -> str:
        """Describe in words how many vectors carry the feature, and list the first few."""
        lines = [self._carriers_line(), self._span_line(), self._block_line()]
        if self.caveat:
            lines.append(self.caveat)
        lines.append(" vector    sigma    share  |cos| query  |cos| key")
        form = "{vector:7d} {sigma:8.3f} {share:8.1%} {query:12.2f} {key:10.2f}"
        lines += [form.format(**row) for row in self.table()[:_SHOWN_VECTORS]]
        return "\n".join(lines)


class _Feature(NamedTuple):
    """ΔC cut at its rank, and its bases in query and key space, in float64."""

    delta: Float[Tensor, "d d"]
    query: Float[Tensor, "d r"]
    key: Float[Tensor, "d r"]

    @classmethod
    def of(cls, subspace: Subspace) -> _Feature:
        """The feature of a subspace."""
        u = subspace.basis("query").double().cpu()
        v = subspace.basis("key").double().cpu()
        s = subspace.S[: subspace.rank].double().cpu()
        return cls(u @ torch.diag(s) @ v.mT, u, v)


class _Images(NamedTuple):
    """Directions of queries, and their duals of keys: of one basis, or of many."""

    read: Float[Tensor, "*n d m"]
    write: Float[Tensor, "*n d m"]

    def turned(self, rotations: Float[Tensor, "r m m"]) -> _Images:
        """The images of the vectors turned among themselves, by each rotation."""
        return _Images(self.read @ rotations, self.write @ rotations)


class _Measures(NamedTuple):
    """Measures that are compared between bases: of one basis, or of many."""

    vectors: Float[Tensor, "*n"]
    sparsity: Float[Tensor, "*n"]
    query: Float[Tensor, "*n"]
    key: Float[Tensor, "*n"]


@checked_call
def alignment(
    basis: SingularBasis, subspace: Subspace, *, draws: Count = 100, seed: int = 0
) -> Alignment:
    """Which singular vectors carry a feature, how close they come, and what controls would show.

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
    >>> about = {"space": "query_frame"}
    >>> feature = qk.sums.Subspace.from_delta(torch.eye(24), rank=3, head="L1H3", about=about)
    >>> found = qk.sums.alignment(qk.sums.singular_basis(scope, "L1H3"), feature, draws=10)
    >>> round(float(found.carried.sum()), 3) == round(found.total, 3)
    True
    """
    assert subspace.head is not None, "this subspace does not say which head it belongs to"
    _check_same_weights(subspace, basis)
    vectors = basis[subspace.head]
    images = _Images(vectors.read, vectors.write)
    sigma = vectors.S.double()
    feature = _Feature.of(subspace)
    shares = carried(feature.delta, *images)
    leading = sigma.argsort(descending=True)
    block = _leading_block(shares, leading)
    controls = _control_bases(images, block, draws, seed)
    numbers = _numbers(feature, images, controls, len(block), subspace.cov_k)
    first = leading[: subspace.rank]
    leading_read = images.read[:, first]
    leading_write = images.write[:, first]
    numbers["query_leading"] = float(overlap(feature.query, leading_read))
    numbers["key_leading"] = float(overlap(feature.key, leading_write))
    space = str(subspace.about.get("space", "post_rope"))
    caveat = ""
    if vectors.rotary and space == "post_rope":
        caveat = (
            "Positions turn this fit's queries and keys (post_rope), not singular vectors:"
            " fit in query_frame for all."
        )
    return Alignment(
        subspace.head,
        subspace.contrast,
        subspace.rank,
        space,
        shares,
        sigma,
        query=_cosines(images.read, feature.query),
        key=_cosines(images.write, feature.key),
        numbers=numbers,
        caveat=caveat,
    )


def _check_same_weights(subspace: Subspace, basis: SingularBasis) -> None:
    """Refuse a feature and singular vectors of different weights, where both say which."""
    fitted = subspace.about.get("weights")
    factored = basis.about.get("weights")
    if fitted is not None and factored is not None and fitted != factored:
        raise BadInput(
            "the feature and the singular basis come from different weights:"
            " load the same model for both."
        )


def _cosines(images: Float[Tensor, "d m"], basis: Float[Tensor, "d r"]) -> Float[Tensor, " m"]:
    """|cos| of each image with a subspace."""
    unit = normalize(images, dim=0)
    return (unit.mT @ basis).norm(dim=-1)


def _leading_block(shares: Float[Tensor, " m"], leading: Tensor) -> Tensor:
    """The fewest leading vectors that carry the feature; all of them where they never do."""
    reached = shares[leading].cumsum(0) >= CARRIED * shares.sum()
    if not bool(reached.any()):
        return leading
    size = int(reached.long().argmax()) + 1
    return leading[:size]


def _control_bases(images: _Images, block: Tensor, draws: int, seed: int) -> dict[str, _Images]:
    """Bases that mean nothing, by name, each drawn many times.

    ``rotated``: the singular vectors turned at random; ``random``: axes of the head space;
    ``block``: only the block's vectors turned, among themselves.
    """
    d, m = images.read.shape
    rotations = random_rotations(m, draws, seed)
    axes = random_rotations(d, draws, derived_seed(seed, "axes"))
    within = torch.eye(m, dtype=torch.float64).repeat(draws, 1, 1)
    turned = random_rotations(len(block), draws, derived_seed(seed, "block"))
    within[:, block[:, None], block] = turned
    return {
        "rotated": images.turned(rotations),
        "random": _Images(axes, axes),
        "block": images.turned(within),
    }


def _numbers(
    feature: _Feature,
    images: _Images,
    controls: Mapping[str, _Images],
    block_size: int,
    cov_k: Float[Tensor, "d d"] | None,
) -> dict[str, float]:
    """Measures of the singular vectors and of the controls, and how often controls do as well."""
    observed = _means(_measure(feature, images))
    numbers = dict(observed)
    for name, bases in controls.items():
        measures = _measure(feature, bases)
        for measure, mean in _means(measures).items():
            numbers[f"{measure}_{name}"] = mean
        if name == "block":
            numbers["block"] = float(block_size)
            # how often the block's vectors, turned among themselves, are as sparse: sparser is less
            numbers["p_block"] = p_value(-measures.sparsity, -observed["sparsity"])
        else:
            numbers[f"p_query_{name}"] = p_value(measures.query, observed["query"])
            numbers[f"p_key_{name}"] = p_value(measures.key, observed["key"])
    if cov_k is not None:
        _, _, axes = checked_svd(cov_k.double().cpu())
        of_axes = _measure(feature, _Images(axes, axes))
        for measure, mean in _means(of_axes).items():
            numbers[f"{measure}_key_pca"] = mean
    return numbers


def _measure(feature: _Feature, images: _Images) -> _Measures:
    """How few directions carry a feature, and how close the best of them come to it."""
    parts = carried(feature.delta, *images)
    rank = feature.query.shape[-1]
    best = parts.argsort(-1, descending=True)[..., None, :rank]
    best_read = torch.take_along_dim(images.read, best, -1)
    best_write = torch.take_along_dim(images.write, best, -1)
    return _Measures(
        vectors=reconstruction_count(parts, CARRIED),
        sparsity=sparsity(parts),
        query=overlap(feature.query, best_read),
        key=overlap(feature.key, best_write),
    )


def _means(measures: _Measures) -> dict[str, float]:
    """Mean of each measure over draws, those without a value left out."""
    means = {}
    for name, values in measures._asdict().items():
        means[name] = float(values.nanmean())
    return means
