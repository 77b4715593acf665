"""What speaks for a part of a head's query-key space: the logit it carries, what swapping it does, where it is
strongest.

On held-out rows, the logit of the most attended key over another, ``scale · qᵀ (k_0 − k_1)``, has the parts
``scale · (fᵀ (q − q̄)) (pᵀ (k_0 − k_1))`` of filters f and patterns p.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize, pad

from qkscope.analyses.discover.rows import QueryRows
from qkscope.capture.scope import Scope
from qkscope.maths.bases import Projector, principal_cosines
from qkscope.maths.components import Components, Feature
from qkscope.maths.significance import clustered_bootstrap
from qkscope.maths.singular import HeadBasis
from qkscope.maths.swap import Method, SwapEffect, SwapRows


@dataclass(frozen=True)
class Evidence:
    """Held-out rows of one head, each with two keys that change places."""

    rows: QueryRows
    h: int
    swaps: SwapRows
    row: Int[Tensor, " n"]  # where each swap stands among the rows

    @classmethod
    def of(cls, rows: QueryRows, h: int) -> Evidence:
        """The rows of one head that have two keys."""
        return cls(rows, h, *rows.swaps(h))

    @property
    def q(self) -> Float[Tensor, "n d"]:
        """Queries."""
        return self.swaps.rows.q[:, 0].double()

    @property
    def apart(self) -> Float[Tensor, "n d"]:
        """``scale · (k_0 − k_1)``."""
        k = self.swaps.rows.k[:, 0].double()
        return float(self.rows.scale[self.h]) * (k[:, 0] - k[:, 1])

    def parts(
        self, filters: Float[Tensor, "d r"], patterns: Float[Tensor, "d r"], mean: Float[Tensor, " d"]
    ) -> Float[Tensor, "n r"]:
        """The parts of the logit, for each filter of the query and its pattern in the keys."""
        return ((self.q - mean) @ filters) * (self.apart @ patterns)

    def shares(self, parts: Float[Tensor, "n r"]) -> Float[Tensor, " r"]:
        """``E[part · whole] / E[whole²]``: adds up over parts, and to 1 over all that a logit is made of."""
        whole = (self.q * self.apart).sum(dim=-1, keepdim=True)
        return (parts * whole).mean(dim=0) / whole.square().mean().clamp_min(1e-300)

    def swap(self, methods: Mapping[str, Method], size: int) -> dict[str, SwapEffect]:
        """What swapping so many directions does, by each method."""
        return {name: self.swaps.swap(method(size)) for name, method in methods.items()}

    def swap_feature(self, components: Components, feature: Feature) -> SwapEffect:
        """What swapping a feature does: its own part of the logit, the mean query left out."""
        rows = self.swaps.rows
        with_one = replace(rows, q=pad(rows.q, (0, 1), value=1.0), k=pad(rows.k, (0, 1)))
        return replace(self.swaps, rows=with_one).swap(Projector(*(f[None] for f in components.swap(feature))))

    def examples(
        self, scope: Scope, number: int, strength: Float[Tensor, " n"], count: int = 5, around: int = 14
    ) -> list[dict[str, Any]]:
        """The queries in which a feature carries the most logit, as text with the query and its key marked."""
        found: dict[int, dict[str, Any]] = {}
        for i in strength.argsort(descending=True).tolist():
            row, example = int(self.row[i]), int(self.swaps.cluster[i])
            if float(strength[i]) <= 0 or len(found) == count:
                break
            if example in found:
                continue
            places = int(self.rows.query[row]), int(self.rows.top_place[row, self.h])
            found[example] = {
                "head": str(self.rows.heads[self.h]), "feature": number, "logit": float(strength[i]),
                "attention": float(self.rows.top_weight[row, self.h]),
                **_snippet(scope, self.rows.ids[example], *places, around),
            }  # fmt: skip
        return list(found.values())


def feature_row(
    evidence: Evidence, components: Components, feature: Feature, baselines: Mapping[str, Method], seed: int
) -> dict[str, Any]:
    """One feature's evidence, beside baselines of the same size."""
    own = evidence.swap_feature(components, feature)
    effects = {"feature": own, **evidence.swap(baselines, feature.size)}
    carried = torch.stack([effect.carried[:, 0] for effect in effects.values()], dim=1)
    low, high = clustered_bootstrap(carried, evidence.swaps.cluster, seed=seed)
    return {
        "size": feature.size, "identifiable": feature.identifiable, "match": feature.match,
        "match_null": components.match_bound, "contrast": feature.contrast,
        "contrast_null": components.contrast_bound, "stability": feature.stability,
        "shift": float(own.shift.mean()),
        "carried": float(carried[:, 0].mean()), "carried_low": float(low[0]), "carried_high": float(high[0]),
        **{f"carried_{name}": float(carried[:, i].mean()) for i, name in enumerate(effects) if i},
    }  # fmt: skip


def nearest_contrast(basis: Float[Tensor, "d r"], labelled: Mapping[str, Float[Tensor, "d s"]]) -> dict[str, Any]:
    """The labelled contrast that holds most of a feature, the root of the share of it in its span, and that by chance.

    A contrast of r of d dimensions holds r/d of anything.
    """
    names = ("nearest_contrast", "contrast_cos", "contrast_cos_chance")
    if not labelled:
        return dict.fromkeys(names)
    cosines = {
        name: float(principal_cosines(basis, other.to(basis)).square().sum() / basis.shape[1]) ** 0.5
        for name, other in labelled.items()
    }
    best = max(cosines, key=cosines.__getitem__)
    chance = (labelled[best].shape[1] / basis.shape[0]) ** 0.5
    return dict(zip(names, (best, cosines[best], chance), strict=True))


def nearest_singular(basis: Float[Tensor, "d r"], weights: HeadBasis | None) -> dict[str, Any]:
    """The singular vector whose keys lie nearest to a feature; nothing where the weights cannot be read off."""
    if weights is None:
        return {}
    cosines = (basis.mT @ normalize(weights.write.to(basis), dim=0)).norm(dim=0)
    return {"singular_vector": int(cosines.argmax()), "singular_cos": float(cosines.max())}


def _snippet(scope: Scope, ids: list[int], query: int, key: int, around: int) -> dict[str, Any]:
    """Text around two tokens, with their places in it as character offsets."""
    pieces = [scope.tokenizer.decode([i]) if scope.tokenizer is not None else f" {i}" for i in ids]
    near = [i for i in range(len(ids)) if min(abs(i - query), abs(i - key)) <= around]
    text, spans, last = "", {}, -1
    for i in near:
        text += "" if i == last + 1 else " … "
        spans[i] = (len(text), len(text) + len(pieces[i]))
        text += pieces[i]
        last = i
    return {
        "query": pieces[query], "key": pieces[key], "text": text,
        "query_start": spans[query][0], "query_stop": spans[query][1],
        "key_start": spans[key][0], "key_stop": spans[key][1],
    }  # fmt: skip
