"""The features of one head that a verb is given: of a `Fit`, or subspaces by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkscope import BadInput, Scope
from qkscope.findings.fit import Fit
from qkscope.findings.task_batches import check_same_model
from qkscope.heads import Head
from qkscope.model.spaces import Space
from qkscope.sums.subspace import Subspace


def default_features(contrasts: Sequence[str]) -> list[str]:
    """``order`` and ``lexical`` where both are there, else every contrast but the pooled one."""
    if {"order", "lexical"} <= set(contrasts):
        return ["order", "lexical"]
    return [name for name in contrasts if name != "category"] or list(contrasts)


def features_of(features: Any, head: Head, scope: Scope) -> tuple[dict[str, Subspace], Space]:
    """The features of this head, of a `Fit` or by name, and the space they were fitted in.

    Those of other heads, of another model or of several spaces are refused.
    """
    if isinstance(features, Fit):
        features = {name: features[name, head] for name in default_features(features.contrasts)}
    for name, subspace in features.items():
        if subspace.head not in (None, head):
            raise BadInput(
                f"feature {name!r} belongs to {subspace.head}, not to {head}:"
                " name features of one head."
            )
        check_same_model(subspace.about, scope, f"feature {name!r}")
    spaces = set[Any]()
    for subspace in features.values():
        spaces.add(subspace.about.get("space", "post_rope"))
    if len(spaces) != 1:
        listed = ", ".join(sorted(spaces))
        raise BadInput(
            f"no feature was given, or of different spaces ({listed}): name those of one."
        )
    return dict(features), spaces.pop()
