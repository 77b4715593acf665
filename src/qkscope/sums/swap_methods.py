"""Methods of choosing the k directions of a head to swap, as a projector for all heads at once.

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

from qkscope import BadInput
from qkscope.heads import Head
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

HeadBases = Sequence[Float[Tensor, "d r"]] | Float[Tensor, "h d r"]  # of each head
# of training a subspace by gradient descent
_STEPS = 150
_RATE = 0.02
_LEAST = 1e-6  # attention under a logarithm


def leading(bases: HeadBases | Projector) -> Method:
    """The first k columns of an orthonormal basis of each head, or of a projector.

    >>> leading(torch.eye(4)[None])(2).matrix().diagonal(dim1=-2, dim2=-1)
    tensor([[1., 1., 0., 0.]])
    """
    projector = bases if isinstance(bases, Projector) else _orthogonal(bases)
    return projector.cut


def _orthogonal(bases: HeadBases) -> Projector:
    """Projector onto an orthonormal basis of each head."""
    return Projector.stack([Projector.orthogonal(basis) for basis in bases])


def key_pca(cov_k: Float[Tensor, "h d d"]) -> Method:
    """Principal components of the keys, largest first."""
    _, _, axes = checked_svd(cov_k)
    return leading(axes)


def cov_qk(cov_q: Float[Tensor, "h d d"], cov_k: Float[Tensor, "h d d"]) -> Method:
    """Key-side directions of ``Cov_q Cov_k``: where both queries and keys vary."""
    _, _, directions = checked_svd(cov_q @ cov_k)
    return leading(directions)


def random(heads: Sequence[Head], d_head: int, draws: int, seed: int) -> Method:
    """``draws`` random subspaces of every head, each head's from a stream of its own."""
    seeds = [derived_seed(seed, "random", head.layer, head.index) for head in heads]

    def of_size(k: int | Sequence[int]) -> Projector:
        ranks = [k] * len(heads) if isinstance(k, int) else k
        bases = []
        for rank, stream in zip(ranks, seeds, strict=True):
            basis = random_bases(d_head, rank, draws, stream)
            missing = max(ranks) - rank
            bases.append(pad(basis, (0, missing)))
        return Projector.orthogonal(torch.stack(bases, dim=1))

    return of_size


def omega_svd(basis: SingularBasis, heads: Sequence[Head]) -> Method:
    """Components of the logit, those with the largest singular values first."""
    projectors = []
    for head in heads:
        vectors = basis[head]
        by_size = vectors.S.argsort(descending=True)
        projectors.append(components(vectors.read, by_size))
    return leading(Projector.stack(projectors))


def trained(rows: SwapRows, feature: str, ranks: Sequence[int], seed: int = 0) -> Projector:
    """A subspace of each head, of its rank, whose swap gives the true rows of these prompts.

    It is found by Adam, on cross-entropy. The distance itself has no slope where a row is far off;
    held-out words were nearer with cross-entropy.

    Parameters
    ----------
    rows : of prompts that are not tested on, with the truth of the feature.
    feature : its name.
    ranks : of each head.
    seed : of the subspaces to start from.
    """
    truth = rows.truth[feature, "distance"]
    tested = truth.isfinite().flatten(1).all(1)
    true = _with_rest(truth).clamp_min(0.0)[tested]
    attention_rows = rows.rows
    before = attention_rows.products()
    starts = []
    for head in rows.heads:
        stream = derived_seed(seed, "trained", head.layer, head.index)
        starts.append(random_bases(attention_rows.d_head, max(ranks), 1, stream)[0])
    columns = torch.stack(starts).to(attention_rows.q).requires_grad_()
    # which columns each head keeps
    within_rank = torch.arange(max(ranks)) < torch.tensor(ranks)[:, None]
    kept = within_rank[:, None].to(columns)

    def basis() -> Float[Tensor, "h d r"]:
        """An orthonormal basis of each head, zero beyond its rank."""
        q, _ = torch.linalg.qr(columns)
        return q * kept

    optimizer = torch.optim.Adam([columns], _RATE)
    for _ in range(_STEPS):
        projector = Projector.orthogonal(basis())
        (change,) = key_changes(attention_rows, rows.orig, rows.target, projector)
        edited = _with_rest(attention_rows.attention(before + change)[tested])
        cross_entropy = (-true * edited.clamp_min(_LEAST).log()).sum(-1)
        loss = cross_entropy.mean(0).sum()  # heads do not meet
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Projector.orthogonal(basis().detach().double())


def _with_rest(attention: Float[Tensor, "n h k"]) -> Float[Tensor, "n h k+1"]:
    """Attention rows with what is left for all other tokens as one more key."""
    rest = 1 - attention.sum(-1, keepdim=True)
    return torch.cat([attention, rest], dim=-1)


def beside_truth(
    conditions: Mapping[Condition, Projector],
    rows: SwapRows,
    singular: SingularBasis | None,
    seed: int = 0,
) -> dict[Condition, Projector]:
    """Other swaps that are held against the truth of each feature.

    Of its size: a trained subspace, and the components of Ω. Of none: the whole key, and nothing at
    all.

    Parameters
    ----------
    conditions : features as they are swapped.
    rows : what to train on; of features that have no truth here there is nothing.
    singular : the singular vectors of the heads, where they can be had.
    seed : as in `trained`.
    """
    eye = torch.eye(rows.rows.d_head, dtype=torch.float64)
    whole_key = eye.repeat(len(rows.heads), 1, 1)
    no_direction = 0 * whole_key[..., :1]
    swaps = {}
    for condition, projector in conditions.items():
        feature = condition.feature
        truth = rows.truth.get((feature, "distance"))
        if condition.kind != "feature" or truth is None:
            continue
        ranks = projector.rank.tolist()
        if bool(truth.isfinite().any()):
            swaps[Condition(feature, "trained")] = trained(rows, feature, ranks, seed)
        if singular is not None:
            swaps[Condition(feature, "omega_svd")] = omega_svd(singular, rows.heads)(ranks)
        swaps[Condition(feature, "whole")] = Projector.orthogonal(whole_key)
        swaps[Condition(feature, "nothing")] = Projector.orthogonal(no_direction)
    return swaps


#: What stands beside every swap of a fit, at the same size: made of the covariances of its queries
#: and keys.
BASELINES: dict[str, Callable[[Tensor, Tensor], Method]] = {
    "key_pca": lambda _, cov_k: key_pca(cov_k),
    "cov_qk": cov_qk,
}
#: Kinds that are compared in every table, downstream too, and printed.
SHOWN_METHODS = ("feature", "random", *BASELINES)


def oblique(features: Sequence[HeadBases]) -> tuple[list[Projector], list[float | None]]:
    """For each feature the projectors onto it along the others, and each head's condition number.

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
    by_feature = [Projector.stack(projectors) for projectors in zip(*sets, strict=True)]
    return by_feature, numbers


def _side_by_side(bases: Sequence[Float[Tensor, "d r"]]) -> Float[Tensor, "d s"]:
    """Join the directions of several bases, in float64."""
    return torch.cat([basis.double() for basis in bases], dim=-1)


def joint_name(features: Sequence[str]) -> str:
    """Name of all features together: ``both`` or ``all``, unless a feature has that name."""
    if len(features) == 1:
        return features[0]
    name = "both" if len(features) == 2 else "all"
    while name in features:
        name += " together"
    return name


def conditions(
    features: Mapping[str, HeadBases],
    covariances: Mapping[str, tuple[Tensor, Tensor]],
    random: Method,
) -> tuple[dict[Condition, Projector], list[float | None]]:
    """Every feature, all together, each obliquely, and baselines of the same sizes.

    All together are swapped as a joint basis and ``summed``. Beside the conditions stands the
    condition number of the set of features at each head.

    Parameters
    ----------
    features : key-side bases of every head by name.
    covariances : ``Cov_q`` and ``Cov_k`` of each head (h d d), by feature and for all together
        (`joint_name`); features without have no key PCA and no ``Cov_q Cov_k`` beside them.
    random : random subspaces.
    """
    together = joint_name(list(features))
    separate = list(features.values())
    by_head = list(zip(*separate, strict=True))
    swapped = {**features, together: [joint_basis(bases) for bases in by_head]}
    swaps = {}
    for feature, bases in swapped.items():
        swaps[Condition(feature)] = _orthogonal(list(bases))
    numbers: list[float | None] = [None] * len(by_head)
    if len(features) > 1:
        # the sum of their projectors: no projector itself, unless the features are orthogonal
        side_by_side = [_side_by_side(bases) for bases in by_head]
        swaps[Condition(together, "summed")] = _orthogonal(side_by_side)
        projectors, numbers = oblique(separate)
        for feature, projector in zip(features, projectors, strict=True):
            swaps[Condition(feature, "oblique")] = projector
    for feature, bases in swapped.items():
        sizes = [basis.shape[1] for basis in bases]
        swaps[Condition(feature, "random")] = random(sizes)
        if feature in covariances:
            for kind, baseline in BASELINES.items():
                method = baseline(*covariances[feature])
                swaps[Condition(feature, kind)] = method(sizes)
    return swaps, numbers
