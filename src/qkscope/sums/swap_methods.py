"""The methods: every way there is to choose k directions of a head, as a projector for all heads at
once.

A method is a function of the size, ``k -> Projector``: one number for all heads, or one for each.
Most have an order, and k of them are the first k:

- ``feature``: a contrast's own directions ``V`` (`leading`), or any basis; cut at its rank, it is
  what the contrast found
- ``key_pca``: principal components of the keys
- ``cov_qk``: key-side directions of ``Cov_q Cov_k``, where queries and keys both vary
- ``moving``: eigenvectors of the symmetric part of ``ΔC``; one projector acts on both sides, so
  these move the most logit
- ``omega_svd``: components of the logit, ``P = Σ n_j m_jᵀ``, by singular value: what the weights
  alone would swap
- ``trained``: found by gradient descent towards the true rows, where they are known: distributed
  alignment search

Of several features together there are two ways: a joint basis, in which shared directions count
once, and ``summed``, as the authors' scripts do it: their projectors are added, so that what
features share is exchanged twice.

`random` subspaces are made anew for each size. Of several features, `joint` spans all of them, and
`oblique` swaps each along the others. Baselines are fitted on what the features were fitted on,
never on the test set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from qkscope import BadInput, Head
from qkscope.seeds import derived_seed
from qkscope.sums.bases import (
    Projector,
    checked_svd,
    joint_basis,
    oblique_projectors,
    random_bases,
)
from qkscope.sums.singular import SingularBasis, components
from qkscope.sums.swap_algebra import Condition, Method, SwapRows, key_changes

Bases = Sequence[Float[Tensor, "d r"]] | Float[Tensor, "h d r"]  # of each head
# of training a subspace; what its attention is at the least
_STEPS = 150
_RATE = 0.02
_LEAST = 1e-6


def leading(bases: Bases | Projector) -> Method:
    """The first k columns of what stands in order: an orthonormal basis of each head, or a
    projector.

    >>> leading(torch.eye(4)[None])(2).matrix().diagonal(dim1=-2, dim2=-1)
    tensor([[1., 1., 0., 0.]])
    """
    return (bases if isinstance(bases, Projector) else _orthogonal(bases)).cut


def _orthogonal(bases: Bases) -> Projector:
    return Projector.stack([Projector.orthogonal(basis) for basis in bases])


def key_pca(cov_k: Float[Tensor, "h d d"]) -> Method:
    """Principal components of the keys, largest first."""
    return leading(checked_svd(cov_k)[2])


def cov_qk(cov_q: Float[Tensor, "h d d"], cov_k: Float[Tensor, "h d d"]) -> Method:
    """Key-side directions of ``Cov_q Cov_k``: where both queries and keys vary."""
    return leading(checked_svd(cov_q @ cov_k)[2])


def random(heads: Sequence[Head], d_head: int, draws: int, seed: int) -> Method:
    """``draws`` random subspaces of every head, each head's from a stream of its own."""
    seeds = [derived_seed(seed, "random", head.layer, head.index) for head in heads]

    def of_size(k: int | Sequence[int]) -> Projector:
        ranks = [k] * len(heads) if isinstance(k, int) else k
        each = [
            random_bases(d_head, rank, draws, stream)
            for rank, stream in zip(ranks, seeds, strict=True)
        ]
        return Projector.orthogonal(
            torch.stack([pad(b, (0, max(ranks) - b.shape[-1])) for b in each], dim=1)
        )

    return of_size


def omega_svd(basis: SingularBasis, heads: Sequence[Head]) -> Method:
    """Components of the logit, those with the largest singular values first."""
    each = [components(basis[head].read, basis[head].S.argsort(descending=True)) for head in heads]
    return leading(Projector.stack(each))


def trained(rows: SwapRows, feature: str, ranks: Sequence[int], seed: int = 0) -> Projector:
    """A subspace of each head, of its rank, whose swap gives the true rows of these prompts: by
    Adam, on cross-entropy.

    The distance itself has no slope where a row is far off; held-out words were nearer with
    cross-entropy.

    Parameters
    ----------
    rows : of prompts that are not tested on, with the truth of the feature.
    feature : its name.
    ranks : of each head.
    seed : of the subspaces to start from.
    """
    truth = rows.truth[feature, "distance"]
    d = rows.rows.d_head
    seeds = [derived_seed(seed, "trained", head.layer, head.index) for head in rows.heads]
    columns = torch.stack([random_bases(d, max(ranks), 1, stream)[0] for stream in seeds]).to(
        rows.rows.q
    )
    kept = (torch.arange(max(ranks)) < torch.tensor(ranks)[:, None])[:, None].to(columns)
    optimizer = torch.optim.Adam([columns.requires_grad_()], _RATE)
    before = rows.rows.products()
    tested = truth.isfinite().flatten(1).all(1)
    true = torch.cat([truth, 1 - truth.sum(-1, keepdim=True)], dim=-1).clamp_min(0.0)[tested]
    for _ in range(_STEPS):
        basis = torch.linalg.qr(columns)[0] * kept
        (change,) = key_changes(rows.rows, rows.orig, rows.target, Projector.orthogonal(basis))
        after = rows.rows.attention(before + change)[tested]
        edited = torch.cat([after, 1 - after.sum(-1, keepdim=True)], dim=-1)
        optimizer.zero_grad()
        (-true * edited.clamp_min(_LEAST).log()).sum(-1).mean(
            0
        ).sum().backward()  # heads do not meet
        optimizer.step()
    return Projector.orthogonal((torch.linalg.qr(columns)[0] * kept).detach().double())


def beside_truth(
    conditions: Mapping[Condition, Projector],
    rows: SwapRows,
    singular: SingularBasis | None,
    seed: int = 0,
) -> dict[Condition, Projector]:
    """What else is held against the truth: of each feature's size a trained subspace and the
    components of Ω, and without one the whole key and nothing at all.

    Parameters
    ----------
    conditions : features as they are swapped.
    rows : what to train on; of features that have no truth here there is nothing.
    singular : the singular vectors of the heads, where they can be had.
    seed : as in `trained`.
    """
    eye = torch.eye(rows.rows.d_head, dtype=torch.float64).repeat(len(rows.heads), 1, 1)
    swaps = {}
    for what, projector in conditions.items():
        truth = rows.truth.get((what.feature, "distance"))
        if what.kind == "feature" and truth is not None:
            ranks = projector.rank.tolist()
            if bool(truth.isfinite().any()):
                swaps[Condition(what.feature, "trained")] = trained(rows, what.feature, ranks, seed)
            if singular is not None:
                swaps[Condition(what.feature, "omega_svd")] = omega_svd(singular, rows.heads)(ranks)
            swaps[Condition(what.feature, "whole")] = Projector.orthogonal(eye)
            swaps[Condition(what.feature, "nothing")] = Projector.orthogonal(0 * eye[..., :1])
    return swaps


#: What stands beside every swap of a fit, at the same size: made of the covariances of its queries and keys.
BASELINES: dict[str, Callable[[Tensor, Tensor], Method]] = {
    "key_pca": lambda _, cov_k: key_pca(cov_k),
    "cov_qk": cov_qk,
}
SHOWN = (
    "feature",
    "random",
    *BASELINES,
)  # kinds that are compared in every table, downstream too, and printed


def oblique(features: Sequence[Bases]) -> tuple[list[Projector], list[float | None]]:
    """For each feature the projectors onto it along the others, and the condition number of the set
    at each head.

    Where the features of a head depend on each other there are none: the projector is zero, and the
    number None.
    """
    sets = []
    numbers = list[float | None]()
    for bases in zip(*features, strict=True):
        try:
            projectors, number = oblique_projectors(bases)
        except BadInput:
            projectors = [Projector.orthogonal(torch.zeros_like(basis)) for basis in bases]
            number = None
        sets.append(projectors)
        numbers.append(number)
    return [Projector.stack(list(each)) for each in zip(*sets, strict=True)], numbers


def joint_name(features: Sequence[str]) -> str:
    """Name of all features together: ``both`` or ``all``, unless a feature has that name."""
    if len(features) == 1:
        return features[0]
    name = "both" if len(features) == 2 else "all"
    while name in features:
        name += " together"
    return name


def conditions(
    features: Mapping[str, Bases], covariances: Mapping[str, tuple[Tensor, Tensor]], random: Method
) -> tuple[dict[Condition, Projector], list[float | None]]:
    """Every feature, all together (also ``summed``), each obliquely, baselines of the same sizes;
    and at each head the condition number of the set.

    Parameters
    ----------
    features : key-side bases of every head by name.
    covariances : ``Cov_q`` and ``Cov_k`` of each head (h d d), by feature and for all together
        (`joint_name`); features without have no key PCA and no ``Cov_q Cov_k`` beside them.
    random : random subspaces.
    """
    name = joint_name(list(features))
    separate = list(features.values())
    every = {**features, name: [joint_basis(bases) for bases in zip(*separate, strict=True)]}
    swaps = {Condition(feature): _orthogonal(list(bases)) for feature, bases in every.items()}
    numbers: list[float | None] = [None] * len(every[name])
    if len(features) > 1:
        joined = [
            torch.cat([basis.double() for basis in bases], dim=-1)
            for bases in zip(*separate, strict=True)
        ]
        swaps[Condition(name, "summed")] = _orthogonal(
            joined
        )  # the sum: no projector, unless they are orthogonal
        projectors, numbers = oblique(separate)
        swaps |= {
            Condition(feature, "oblique"): p
            for feature, p in zip(features, projectors, strict=True)
        }
    for feature, bases in every.items():
        sizes = [basis.shape[1] for basis in bases]
        swaps[Condition(feature, "random")] = random(sizes)
        if feature in covariances:
            for kind, make in BASELINES.items():
                swaps[Condition(feature, kind)] = make(*covariances[feature])(sizes)
    return swaps, numbers
