"""From a subspace to features: independent components that queries and attended keys share.

With ``C = Cov(q, δ) = U S Vᵀ`` cut at its rank, each side is read through the other, which leaves out what only one of
them carries: queries as what they say about the attended key, ``x = Vᵀ Cov(δ, q) Cov(q)⁻¹ q``, and keys as what they
say about the query, ``y = Uᵀ Cov(q, δ) Cov(δ)⁻¹ k``. Independent components of x and of y are found apart and matched
by their correlation over (query, attended key) pairs; a component without a partner above chance is no feature.

- Components that depend on each other are one feature of several dimensions.
- Components that are Gaussian, or that change with the half of the data, could be any rotation of themselves: their
  span is a fact, the directions in it are not, and they are reported as one block that is *not identifiable*.
- ``G_ij = m_iᵀ p_j``, how the query's component i meets the key's component j, is diagonal where a head matches like
  with like. Random weights mix all with all, however good their ranks look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from qkscope.draws import derived_seed, shuffled_rows
from qkscope.errors import BadInput
from qkscope.maths.bases import Projector, checked_svd, principal_cosines
from qkscope.maths.ica import connected, contrast, dependent_pairs, fast_ica, gaussian_contrast, whiten

_STABLE = 0.9  # |cos| between the two halves of the data under which a direction is not a finding
_MATCH = 0.1  # correlation under which a partner is none: with enough data everything correlates a little
_RIDGE = 1e-6  # of the mean variance: keeps directions of rounding errors out of an inverse
_ROWS = 6000  # rows that independent components are fitted on; more change nothing but the time


class HeadRows(NamedTuple):
    """Rows of one head: queries, the keys they attended to, mean keys, and the prompt of each row."""

    q: Float[Tensor, "n d"]
    attended: Float[Tensor, "n d"]
    mean: Float[Tensor, "n d"]
    prompts: Int[Tensor, " n"]  # the random unit of every null and of the halves

    def at(self, index: Tensor) -> HeadRows:
        """Some of the rows."""
        return HeadRows(*(column[index] for column in self))


@dataclass(frozen=True)
class Feature:
    """One feature: its components, and the evidence for them.

    Attributes
    ----------
    index : which components it is made of.
    match : smallest correlation between a component of it on the query side and its partner on the key side, on rows
        that neither was fitted on.
    contrast : smallest distance of its components from Gaussian.
    stability : |cos| of its span between the whole and the halves of the data, and other starts; the smallest. None of
        a feature that fills the span, which comes back by itself.
    identifiable : whether its directions are a finding, not only their span.
    """

    index: tuple[int, ...]
    match: float
    contrast: float
    stability: float | None
    identifiable: bool

    @property
    def size(self) -> int:
        """Dimensions."""
        return len(self.index)


@dataclass(frozen=True)
class Components:
    """Paired components of one head.

    ``query`` and ``key`` hold filters as columns: coordinates are ``(q − query_mean) @ query``, of unit variance.
    ``query_pattern`` and ``key_pattern`` are what one unit of a component adds to the vector.
    """

    query: Float[Tensor, "d r"]
    key: Float[Tensor, "d r"]
    query_mean: Float[Tensor, " d"]
    key_mean: Float[Tensor, " d"]
    query_pattern: Float[Tensor, "d r"]
    key_pattern: Float[Tensor, "d r"]
    match: Float[Tensor, " r"]
    match_bound: float
    contrast: Float[Tensor, " r"]
    contrast_bound: float
    dependence: Float[Tensor, "r r"]
    dependence_bound: float
    features: tuple[Feature, ...]
    rejected: tuple[int, ...]  # components of the query with no partner among the keys
    diagonal: float
    diagonal_bound: float

    def to_plain(self) -> dict[str, Any]:
        """Tensors and plain values, as a piece of a run is kept."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "features": [asdict(f) for f in self.features]}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Components:
        """Inverse of `to_plain`."""
        features = tuple(Feature(**{**f, "index": tuple(f["index"])}) for f in values["features"])
        return cls(**{**values, "features": features, "rejected": tuple(values["rejected"])})

    @property
    def rank(self) -> int:
        """Number of components."""
        return self.query.shape[1]

    @property
    def interactions(self) -> Float[Tensor, "r r"]:
        """G: how each component of the query meets each one of the key."""
        return self.query_pattern.mT @ self.key_pattern

    @property
    def matched(self) -> bool:
        """Whether like meets like more than in random weights; of one component alone that cannot be told."""
        return self.diagonal > self.diagonal_bound

    def coordinates(self, x: Float[Tensor, "*n d"], side: str) -> Float[Tensor, "*n r"]:
        """Components of queries or of keys."""
        if side == "query":
            return (x.to(self.query) - self.query_mean) @ self.query
        return (x.to(self.key) - self.key_mean) @ self.key

    def key_basis(self, feature: Feature) -> Float[Tensor, "d m"]:
        """Orthonormal basis of a feature in key space: where the keys that carry it lie."""
        return torch.linalg.qr(self.key_pattern[:, list(feature.index)])[0]

    def swap(self, feature: Feature) -> Projector:
        """The oblique projector that exchanges what queries read of a feature, for vectors ``[q; 1]`` and ``[k; 0]``.

        With filters f and patterns m of the query, ``[q; 1]ᵀ P [k; 0] = (fᵀ (q − q̄))(mᵀ k)``: the feature's own part of
        the logit. What the mean query reads there is no part of the feature, and can be far larger.
        """
        index = list(feature.index)
        filters, patterns = self.query[:, index], self.query_pattern[:, index]
        mean = -(self.query_mean @ filters)[None]
        return Projector(torch.cat([filters, mean]), torch.cat([patterns, torch.zeros_like(mean)]))


def paired_components(
    rows: HeadRows, rank: int, *, held: HeadRows | None = None, seed: int = 0, starts: int = 8, draws: int = 99
) -> Components:
    """Components of the first ``rank`` directions in which queries and attended keys go together.

    Parameters
    ----------
    rows : what the components are fitted on.
    rank : how many directions to take apart.
    held : rows that nothing is fitted on, for the match; filters find a partner in any noise they are fitted to. A
        third of the prompts is set aside where none are given.
    seed : of every draw.
    starts : of each search for independent components; the best counts.
    draws : of each null.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> signs = torch.randint(2, (600, 2)) * 2.0 - 1
    >>> rows = HeadRows(signs, 3 * signs, torch.zeros(600, 2), prompts=torch.arange(600))
    >>> [feature.size for feature in paired_components(rows, 2, draws=19).features]
    [1, 1]
    """
    if rank < 1:
        raise BadInput("no direction stands above its null, so there are no features to take apart.")
    n = len(rows.q)
    if n < 10 * rank:
        raise BadInput(f"{rank} components need {10 * rank} queries or more, but there are {n}: give more text.")
    if held is None:
        aside = _by_lot(rows.prompts, 3, seed, 3) == 0
        rows, held = rows.at(~aside), rows.at(aside)
    q, k, m = (x.double() for x in rows[:3])
    prompts = rows.prompts
    filters = _filters(q, k - m, rank)
    q_mean, k_mean = q.mean(dim=0), k.mean(dim=0)
    (x, x_map), (y, y_map) = (whiten((z - z.mean(dim=0)) @ f) for z, f in zip((q, k), filters, strict=True))
    w_q, w_k = (
        fast_ica(_some(side), starts=starts, seed=derived_seed(seed, "starts", name))
        for name, side in (("query", x), ("key", y))
    )
    s = x @ w_q.mT

    found = _correlations(s, y @ w_k.mT)
    partner = assign(found.abs())
    sign = torch.where(found.gather(1, partner[:, None]) < 0, -1.0, 1.0).to(found)
    w_k = sign * w_k[partner]
    t = y @ w_k.mT
    query, key = filters[0] @ x_map @ w_q.mT, filters[1] @ y_map @ w_k.mT
    s_held, t_held = (held.q.double() - q_mean) @ query, (held.attended.double() - k_mean) @ key
    match = _correlations(s_held, t_held).diagonal()
    match_bound = _match_bound(s_held, t_held, held.prompts, seed, draws)

    away, away_bound = contrast(s), gaussian_contrast(len(_some(s)), rank, seed=seed)
    shared = (s + t) / (s + t).std(dim=0, correction=0)
    dependences, dependence_bound = dependent_pairs(shared, prompts, draws=draws, seed=seed)
    partnered = match > match_bound
    groups = _Groups(match, away, away > away_bound, [w_q, *_found_again(x, w_q, prompts, seed, starts)])
    query_pattern = (q - q_mean).mT @ s / len(s)
    key_pattern = (k - k_mean).mT @ t / len(t)
    share, bound = diagonal_share(query_pattern.mT @ key_pattern, seed=seed)
    return Components(
        query=query,
        key=key,
        query_mean=q_mean,
        key_mean=k_mean,
        query_pattern=query_pattern,
        key_pattern=key_pattern,
        match=match,
        match_bound=match_bound,
        contrast=away,
        contrast_bound=away_bound,
        dependence=dependences,
        dependence_bound=dependence_bound,
        features=groups.features(partnered, dependences > dependence_bound),
        rejected=tuple((~partnered).nonzero()[:, 0].tolist()),
        diagonal=share,
        diagonal_bound=bound,
    )


def _filters(
    q: Float[Tensor, "n d"], delta: Float[Tensor, "n d"], rank: int
) -> tuple[Float[Tensor, "d r"], Float[Tensor, "d r"]]:
    """Read each side through the other (see the head of this file)."""
    a, b = q - q.mean(dim=0), delta - delta.mean(dim=0)
    n = len(q)
    c = a.mT @ b / n
    u, _, v = checked_svd(c)
    return _solve(a.mT @ a / n, c @ v[:, :rank]), _solve(b.mT @ b / n, c.mT @ u[:, :rank])


def _solve(cov: Float[Tensor, "d d"], target: Float[Tensor, "d r"]) -> Float[Tensor, "d r"]:
    ridge = _RIDGE * cov.diagonal().mean() * torch.eye(len(cov), dtype=cov.dtype, device=cov.device)
    return torch.linalg.solve(cov + ridge, target)


def _some(rows: Float[Tensor, "n r"]) -> Float[Tensor, "m r"]:
    """As many rows as independent components are fitted on."""
    if len(rows) <= _ROWS:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, _ROWS, device=rows.device).long()]


def _correlations(s: Float[Tensor, "n r"], t: Float[Tensor, "n r"]) -> Float[Tensor, "r r"]:
    a, b = ((z - z.mean(dim=0)) / z.std(dim=0, correction=0).clamp_min(1e-12) for z in (s, t))
    return a.mT @ b / len(s)


def assign(weights: Float[Tensor, "r r"]) -> Int[Tensor, " r"]:
    """Partner of each row, one to one, with the largest sum of weights."""
    from scipy.optimize import linear_sum_assignment

    return torch.from_numpy(linear_sum_assignment(-weights.cpu().numpy())[1]).to(weights.device)


def _by_lot(prompts: Int[Tensor, " n"], parts: int, *address: int) -> Int[Tensor, " n"]:
    """Which of so many equal parts the prompt of each row falls into."""
    _, prompt = prompts.unique(return_inverse=True)
    return shuffled_rows(torch.arange(int(prompt.max()) + 1, device=prompts.device), *address)[prompt] % parts


def _match_bound(s: Tensor, t: Tensor, prompts: Tensor, seed: int, draws: int) -> float:
    """Upper 5% point of the largest correlation of any two components when keys go to other prompts' queries.

    Keys go whole, and once more with their direction alone, each row keeping its own length (`qkscope.maths.discovery`
    says why); the larger bound counts. At least ``_MATCH``: what only queries carry still tilts attention through
    random weights, and a tilt is no match.
    """
    largest = []
    for draw in range(draws):
        moved = t[shuffled_rows(prompts, seed, 1, draw)]
        turned = normalize(moved, dim=-1) * t.norm(dim=1, keepdim=True)
        largest.append(torch.stack([_correlations(s, x).abs().max() for x in (moved, turned)]))
    ordered = torch.stack(largest).sort(dim=0, descending=True).values
    return max(float(ordered[max((draws + 1) // 20, 1) - 1].max()), _MATCH)  # exceeded by chance in 1 of 20


def _found_again(
    x: Float[Tensor, "n r"], w: Float[Tensor, "r r"], prompts: Int[Tensor, " n"], seed: int, starts: int
) -> list[Float[Tensor, "r r"]]:
    """Rows of W found again on either half of the prompts, and from other starts, each in the order of ``w``."""
    half = _by_lot(prompts, 2, seed, 2).bool()
    again = []
    for part, which in ((half, "one half"), (~half, "the other half"), (torch.ones_like(half), "again")):
        rows = _some(x[part])
        white, back = whiten(rows - rows.mean(dim=0))
        found = normalize(fast_ica(white, starts=starts, seed=derived_seed(seed, "starts", which)) @ back.mT, dim=1)
        again.append(found[assign((w @ found.mT).abs())])
    return again


class _Groups(NamedTuple):
    """What decides which components are one feature, and whether its directions are a finding."""

    match: Float[Tensor, " r"]
    away: Float[Tensor, " r"]
    not_gaussian: Bool[Tensor, " r"]
    found: list[Float[Tensor, "r r"]]  # rows of W, as found first and again

    def features(self, partnered: Bool[Tensor, " r"], edges: Bool[Tensor, "r r"]) -> tuple[Feature, ...]:
        """Components with a partner, in groups; what is Gaussian or does not come back is one block."""
        kept = partnered.nonzero()[:, 0]
        groups = [kept[group].tolist() for group in connected(edges[kept][:, kept])] if len(kept) else []
        clear = [group for group in groups if self._is_clear(group)]
        features = [self._feature(group, True) for group in clear]
        loose = sorted(j for group in groups if group not in clear for j in group)
        # a single Gaussian direction is what the others leave over: it can only be itself
        if loose:
            features.append(self._feature(loose, len(loose) == 1 and not bool(self.not_gaussian[loose[0]])))
        return tuple(sorted(features, key=lambda feature: (not feature.identifiable, -feature.match)))

    def _is_clear(self, group: list[int]) -> bool:
        told_apart = len(group) == 1 or len(group) < len(self.match)  # of all together, the span is all there is
        return told_apart and bool(self.not_gaussian[group].all()) and self._stability(group) >= _STABLE

    def _stability(self, group: list[int]) -> float:
        first, *again = (torch.linalg.qr(rows[group].mT)[0] for rows in self.found)
        return min(float(principal_cosines(first, other).min()) for other in again)

    def _feature(self, group: list[int], identifiable: bool) -> Feature:
        whole = len(group) == len(self.match)  # what fills the span comes back by itself
        stability = None if whole else self._stability(group)
        return Feature(
            tuple(group), float(self.match[group].min()), float(self.away[group].min()), stability, identifiable
        )


def diagonal_share(g: Float[Tensor, "r r"], *, draws: int = 199, seed: int = 0) -> tuple[float, float]:
    """Share of ‖G‖² on the diagonal, and the 95% quantile of what the best pairing finds when entries are shuffled."""
    energy = g.square()
    total = float(energy.sum())
    if total == 0:
        return 0.0, 1.0
    generator = torch.Generator().manual_seed(seed)
    shares = []
    for _ in range(draws):
        mixed = energy.flatten()[torch.randperm(energy.numel(), generator=generator).to(g.device)].view_as(energy)
        shares.append(float(mixed.gather(1, assign(mixed)[:, None]).sum()) / total)
    return float(energy.diagonal().sum()) / total, float(torch.tensor(shares).quantile(0.95))
