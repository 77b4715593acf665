"""What is swapped at which heads: fitted features, and subspaces of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from qkscope.errors import BadInput
from qkscope.findings.fit import Fit
from qkscope.findings.fitted_features import default_features
from qkscope.findings.swap_rows import check_swappable
from qkscope.findings.task_batches import check_same_model
from qkscope.heads import Head, parse_heads
from qkscope.model.scope import Scope
from qkscope.sums import swap_methods as methods
from qkscope.sums.bases import Projector
from qkscope.sums.subspace import Subspace
from qkscope.sums.swap_algebra import Condition, Method

#: A subspace of one's own: as a fit gives them, or a basis (d_head, r) whose span is swapped.
Basis: TypeAlias = Subspace | Tensor
#: Subspaces of one's own by name, each for all heads or by head.
GivenSubspaces: TypeAlias = Mapping[str, Basis | Mapping[str | Head, Basis]]


class Comparisons(NamedTuple):
    """Pairs of conditions that are compared on the same rows, and the projectors of all of them."""

    pairs: list[tuple[Condition, Condition]]
    projectors: dict[Condition, Projector]


class Features(NamedTuple):
    """What is swapped at which heads: fitted features, and subspaces of one's own."""

    heads: list[Head]
    subspaces: Mapping[tuple[str, Head], Subspace]
    fit: Fit
    names: list[str]  # of the features, in order
    joint: str  # what the swap of all together is called

    @classmethod
    def of(
        cls,
        scope: Scope,
        fit: Fit,
        heads: Any,
        features: Sequence[str] | None = None,
        subspaces: GivenSubspaces | None = None,
    ) -> Features:
        """Make the features that `swap` is asked for; refuse those that were not fitted.

        The model has not run by then.
        """
        given = dict(subspaces or {})
        fitted = default_features(fit.contrasts) if features is None else list(features)
        names = [*fitted, *given]
        if not names:
            raise BadInput(
                "there is nothing to swap:"
                " give a fit, as decompose gives, or subspaces of your own."
            )
        if len(set(names)) < len(names):
            contrasts = ", ".join(fit.contrasts)
            raise BadInput(f"features are different contrasts of {contrasts}, but got {names}.")
        if heads is None:
            heads = list(fit.heads) or _heads_of(given)
        chosen = parse_heads(heads)
        known = {(name, head): fit[name, head] for name in fitted for head in chosen}
        for name, each in given.items():
            for head in chosen:
                at = scope.check(head)
                known[name, head] = _subspace(name, each, at, scope.d_head)
        check_swappable(fit.space)
        check_same_model(fit.provenance.get("asked", {}), scope, "this fit")
        return cls(chosen, known, fit, names, methods.joint_name(names))

    @property
    def has_covariances(self) -> bool:
        """Whether the fit says how queries and keys vary at all these heads."""
        if not self.fit.sums:
            return False
        return set(self.heads) <= set(self.fit.heads)

    def conditions(
        self, draws: int, seed: int
    ) -> tuple[dict[Condition, Projector], list[float | None]]:
        """Projectors of every condition, and the condition number of the features at each head."""
        bases = {}
        for name in self.names:
            subspaces = [self.subspaces[name, head] for head in self.heads]
            bases[name] = [subspace.basis("key").double() for subspace in subspaces]
        covariances = {}
        if self.has_covariances:
            for name in self.names:
                covariances[name] = self.fit.covariances(self.heads, [name])
            covariances[self.joint] = self.fit.covariances(self.heads, self.names)
        return methods.conditions(bases, covariances, self._random(draws, seed))

    def methods(self, draws: int, seed: int) -> dict[str | Condition, Method]:
        """The features and the baselines by the number of dimensions."""
        by_size: dict[str | Condition, Method] = {}
        for name in self.names:
            directions = [self.subspaces[name, head].V.double() for head in self.heads]
            by_size[Condition(name)] = methods.leading(directions)
        if self.has_covariances:
            covariances = self.fit.covariances(self.heads, self.names)
            for kind, make in methods.BASELINES.items():
                by_size[kind] = make(*covariances)
        by_size["random"] = self._random(draws, seed)
        return by_size

    def comparisons(
        self,
        projectors: Mapping[Condition, Projector],
        by_size: Mapping[Any, Method],
        sizes: Sequence[int],
    ) -> Comparisons:
        """Which conditions are compared on the same rows.

        All features with each alone and with directions chosen otherwise, and each feature with the
        keys' principal components, also at every size.
        """
        alone = [Condition(name) for name in self.names]
        together = (Condition(self.joint), Condition(self.joint, "summed"))
        joint = [condition for condition in together if condition in projectors]
        pairs = []
        if len(alone) > 1:
            pairs += list(product(joint, alone))
        for condition in [*joint, *alone]:
            for kind in methods.SHOWN_METHODS:
                other = Condition(condition.feature, kind)
                if other in projectors and other != condition:
                    pairs.append((condition, other))
        compared = dict(projectors)
        if "key_pca" in by_size:
            for k, name in product(sizes, self.names):
                feature = Condition(f"{name}, {k}")
                key_pca = Condition(f"key_pca, {k}")
                compared[feature] = by_size[Condition(name)](k)
                compared[key_pca] = by_size["key_pca"](k)
                pairs.append((feature, key_pca))
        return Comparisons(list(dict.fromkeys(pairs)), compared)

    def _random(self, draws: int, seed: int) -> Method:
        """Random subspaces of each size, as many as there are draws."""
        d_head = next(iter(self.subspaces.values())).d_head
        return methods.random(self.heads, d_head, draws, seed)


def _heads_of(given: GivenSubspaces) -> list[str | Head]:
    """The heads that subspaces are given by, each once."""
    heads = dict[str | Head, None]()
    for each in given.values():
        if isinstance(each, Mapping):
            heads |= dict.fromkeys(each)
    return list(heads)


def _subspace(
    name: str, given: Basis | Mapping[str | Head, Basis], head: Head, d_head: int
) -> Subspace:
    """The user's subspace at one head; a basis serves both query and key side."""
    if isinstance(given, Mapping):
        by_head = {Head.parse(at): each for at, each in given.items()}
        if head not in by_head:
            given_at = ", ".join(map(str, by_head))
            raise BadInput(f"subspace {name!r} is not given at {head}: there is {given_at}.")
        given = by_head[head]
    subspace = _of_basis(name, given, head, d_head) if isinstance(given, Tensor) else given
    if subspace.d_head != d_head or subspace.head not in (None, head):
        size = f"has {subspace.d_head} dimensions at {subspace.head or head}"
        place = f"{head}, which has {d_head}"
        raise BadInput(f"subspace {name!r} {size}, but is swapped at {place}.")
    return subspace


def _are_independent(columns: Tensor) -> bool:
    """Whether these are the columns of a finite matrix, none a combination of the others."""
    if columns.ndim != 2 or not bool(columns.isfinite().all()):
        return False
    return int(torch.linalg.matrix_rank(columns)) == columns.shape[-1]


def _of_basis(name: str, given: Tensor, head: Head, d_head: int) -> Subspace:
    """The span of independent columns as a subspace with an orthonormal basis."""
    columns = given.detach().cpu().double()
    rank = given.shape[-1]
    if not _are_independent(columns):
        raise BadInput(
            f"subspace {name!r} should be a basis of shape ({d_head}, r) with independent columns."
        )
    basis = torch.linalg.qr(columns)[0]
    return Subspace(basis, basis.new_ones(rank), basis, rank, head, name)
