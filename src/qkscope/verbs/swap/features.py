"""What is swapped at which heads: fitted features, and subspaces of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


Own = Mapping[str, Basis | Mapping[str | Head, Basis]]


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
        subspaces: Own | None = None,
    ) -> Features:
        """Make the features that `swap` is asked for; refuse those that were not fitted, before the
        model runs.
        """
        own = dict(subspaces or {})
        names = default_features(fit.contrasts) if features is None else list(features)
        every = [*names, *own]
        if not every:
            raise BadInput(
                "there is nothing to swap: give a fit, as decompose gives, or subspaces of your own."
            )
        if len(set(every)) < len(every):
            raise BadInput(
                f"features are different contrasts of {', '.join(fit.contrasts)}, but got {every}."
            )
        if heads is None:
            named = [head for each in own.values() if isinstance(each, Mapping) for head in each]
            heads = list(fit.heads) or list(dict.fromkeys(named))
        chosen = parse_heads(heads)
        known = {(name, head): fit[name, head] for name in names for head in chosen}
        for name, given in own.items():
            known |= {
                (name, head): _subspace(name, given, scope.check(head), scope.d_head)
                for head in chosen
            }
        check_swappable(fit.space)
        check_same_model(fit.provenance.get("asked", {}), scope, "this fit")
        return cls(chosen, known, fit, every, methods.joint_name(every))

    @property
    def has_covariances(self) -> bool:
        """Whether the fit says how queries and keys vary at all these heads."""
        return bool(self.fit.sums) and set(self.heads) <= set(self.fit.heads)

    def conditions(
        self, draws: int, seed: int
    ) -> tuple[dict[Condition, Projector], list[float | None]]:
        """Projectors of every condition, and the condition number of the features at each head."""
        bases = {
            name: [self.subspaces[name, head].basis("key").double() for head in self.heads]
            for name in self.names
        }
        groups = (
            {name: [name] for name in self.names} | {self.joint: self.names}
            if self.has_covariances
            else {}
        )
        known = {name: self.fit.covariances(self.heads, group) for name, group in groups.items()}
        return methods.conditions(bases, known, self._random(draws, seed))

    def methods(self, draws: int, seed: int) -> dict[str | Condition, Method]:
        """The features and the baselines by the number of dimensions."""
        by_size: dict[str | Condition, Method] = {
            Condition(name): methods.leading(
                [self.subspaces[name, head].V.double() for head in self.heads]
            )
            for name in self.names
        }
        if self.has_covariances:
            known = self.fit.covariances(self.heads, self.names)
            by_size |= {kind: make(*known) for kind, make in methods.BASELINES.items()}
        return {**by_size, "random": self._random(draws, seed)}

    def comparisons(
        self,
        projectors: Mapping[Condition, Projector],
        by_size: Mapping[Any, Method],
        sizes: Sequence[int],
    ) -> tuple[list[tuple[Condition, Condition]], dict[Condition, Projector]]:
        """Pairs of conditions compared on the same rows: all features with each alone and with
        directions chosen otherwise, and each feature with the keys' principal components, also at
        every size.
        """
        alone = [Condition(name) for name in self.names]
        every = dict(projectors)
        joint = [
            what
            for what in (Condition(self.joint), Condition(self.joint, "summed"))
            if what in projectors
        ]
        pairs = [(what, other) for what in joint for other in alone if len(alone) > 1]
        others = [
            (what, Condition(what.feature, kind))
            for what in [*joint, *alone]
            for kind in methods.SHOWN
        ]
        pairs += [(what, other) for what, other in others if other in projectors and other != what]
        for k in sizes if "key_pca" in by_size else ():
            for name in self.names:
                pair = Condition(f"{name}, {k}"), Condition(f"key_pca, {k}")
                every |= {pair[0]: by_size[Condition(name)](k), pair[1]: by_size["key_pca"](k)}
                pairs.append(pair)
        return list(dict.fromkeys(pairs)), every

    def _random(self, draws: int, seed: int) -> Method:
        return methods.random(self.heads, next(iter(self.subspaces.values())).d_head, draws, seed)


def _subspace(
    name: str, given: Basis | Mapping[str | Head, Basis], head: Head, d_head: int
) -> Subspace:
    """The user's subspace at one head; a basis serves both query and key side."""
    if isinstance(given, Mapping):
        by_head = {Head.parse(at): each for at, each in given.items()}
        if head not in by_head:
            raise BadInput(
                f"subspace {name!r} is not given at {head}: there is {', '.join(map(str, by_head))}."
            )
        given = by_head[head]
    if isinstance(given, Tensor):
        basis = given.detach().cpu().double()
        rank = given.shape[-1]
        if (
            basis.ndim != 2
            or not bool(basis.isfinite().all())
            or int(torch.linalg.matrix_rank(basis)) < rank
        ):
            raise BadInput(
                f"subspace {name!r} should be a basis of shape ({d_head}, r) with independent columns."
            )
        basis = torch.linalg.qr(basis)[0]
        given = Subspace(basis, basis.new_ones(rank), basis, rank, head, name)
    if given.d_head != d_head or given.head not in (None, head):
        own = f"has {given.d_head} dimensions at {given.head or head}"
        raise BadInput(f"subspace {name!r} {own}, but is swapped at {head}, which has {d_head}.")
    return given
