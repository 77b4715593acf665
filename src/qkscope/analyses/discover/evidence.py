"""What speaks for a discovered feature: the logit it carries, what swapping it does, where it is strongest, and how the
subspace compares with its rivals at every size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.discover.rows import QueryRows
from qkscope.attention import AttentionRows
from qkscope.capture.scope import Scope
from qkscope.heads import Head
from qkscope.maths.baselines import cov_qk, key_pca
from qkscope.maths.bases import Projector, principal_cosines, random_bases
from qkscope.maths.components import Components, Feature
from qkscope.maths.discovery import SelfContrast
from qkscope.maths.significance import clustered_bootstrap
from qkscope.maths.singular import SingularBasis, omega_svd
from qkscope.maths.swap import SwapEffect, swap_attention, swap_table

_AROUND = 14  # tokens shown on either side of a marked one


def contributions(looked: QueryRows, h: int, found: Components) -> tuple[Float[Tensor, "n r"], Float[Tensor, " n"]]:
    """What each component adds to the logit of the most attended key over one drawn by lot, and the logit itself."""
    rows, keep = looked.own_swaps(h)
    q, k = rows.q[:, 0].double(), rows.k[:, 0].double()
    apart = k[:, 0] - k[:, 1]
    scale = float(looked.scale[h])
    parts = scale * found.coordinates(q, "query") * (apart @ found.query_pattern)
    whole = scale * (q * apart).sum(dim=-1)
    out = torch.zeros(len(looked.q), found.rank, dtype=torch.float64)
    total = torch.zeros(len(looked.q), dtype=torch.float64)
    out[keep], total[keep] = parts, whole
    return out, total


def logit_shares(parts: Float[Tensor, "n r"], whole: Float[Tensor, " n"]) -> Float[Tensor, " r"]:
    """``E[part · whole] / E[whole²]``: adds up over parts, and to 1 over all that a logit is made of."""
    return (parts * whole[:, None]).mean(dim=0) / whole.square().mean().clamp_min(1e-300)


def swap_of(
    looked: QueryRows, h: int, bases: Mapping[str, Projector], seed: int = 0
) -> tuple[dict[str, SwapEffect], Int[Tensor, " n"]]:
    """The head's own swap under several projectors, and the example of each row."""
    rows, keep = looked.own_swaps(h)
    orig, target = torch.zeros(len(keep), dtype=torch.long), torch.ones(len(keep), dtype=torch.long)
    effects = {name: swap_attention(rows, orig, target, p) for name, p in bases.items()}
    return effects, looked.example[keep]


def feature_row(
    looked: QueryRows,
    h: int,
    found: Components,
    feature: Feature,
    contrast: SelfContrast,
    shares: Float[Tensor, " r"],
    *,
    labelled: Mapping[str, Float[Tensor, "d r"]],
    singular: SingularBasis | None,
    draws: int,
    seed: int,
) -> dict[str, Any]:
    """One feature's evidence on held-out rows, beside baselines of the same size."""
    head, size = looked.heads[h], feature.size
    own = contrast.heads.index(head)
    cov_q, cov_k = (c[own].cpu() for c in contrast.covariances())
    basis = found.key_basis(feature).cpu()
    plain = {
        "key_pca": _one(key_pca(cov_k, size)),
        "cov_qk": _one(cov_qk(cov_q, cov_k, size)),
        "random": Projector.orthogonal(random_bases(looked.q.shape[-1], size, draws, seed)[:, None]),
    }
    effects, example = swap_of(looked, h, plain)
    rows, _ = looked.own_swaps(h)
    with_one = replace(rows, q=_appended(rows.q, 1.0), k=_appended(rows.k, 0.0))
    own_swap = Projector(*(factor[None].cpu() for factor in found.swap(feature)))
    orig = torch.zeros(len(example), dtype=torch.long)
    effects = {"feature": swap_attention(with_one, orig, orig + 1, own_swap), **effects}
    carried = torch.stack([effect.carried[:, 0] for effect in effects.values()], dim=1)
    low, high = clustered_bootstrap(carried, example, seed=seed)
    row: dict[str, Any] = {
        "head": str(head), "feature": 0, "size": size, "identifiable": feature.identifiable,
        "match": feature.match, "match_null": found.match_bound, "contrast": feature.contrast,
        "contrast_null": found.contrast_bound, "stability": feature.stability,
        "logit_share": float(shares[list(feature.index)].sum()),
        "shift": float(effects["feature"].shift.mean()),
        "carried": float(carried[:, 0].mean()), "carried_low": float(low[0]), "carried_high": float(high[0]),
        **{f"carried_{name}": float(carried[:, i].mean()) for i, name in enumerate(effects) if i},
    }  # fmt: skip
    nearest, cosine, chance = _nearest(basis, labelled)
    row |= {"nearest_contrast": nearest, "contrast_cos": cosine, "contrast_cos_chance": chance}
    if singular is not None:
        write = singular[head].write
        write = write / write.norm(dim=0).clamp_min(1e-12)
        cosines = (basis.mT @ write.to(basis)).norm(dim=0)
        row |= {"singular_vector": int(cosines.argmax()), "singular_cos": float(cosines.max())}
    return row


def _appended(vectors: Float[Tensor, "*n d"], value: float) -> Float[Tensor, "*n d+1"]:
    return torch.nn.functional.pad(vectors, (0, 1), value=value)


def _nearest(basis: Tensor, labelled: Mapping[str, Tensor]) -> tuple[str | None, float | None, float | None]:
    """The labelled contrast that holds most of a feature, the root of the share of it in its span, and that by chance.

    A contrast of r of d dimensions holds r/d of anything.
    """
    if not labelled:
        return None, None, None
    cosines = {
        name: float(principal_cosines(basis, other.to(basis)).square().sum() / basis.shape[1]) ** 0.5
        for name, other in labelled.items()
    }
    best = max(cosines, key=cosines.__getitem__)
    return best, cosines[best], (labelled[best].shape[1] / basis.shape[0]) ** 0.5


def example_rows(
    scope: Scope,
    looked: QueryRows,
    h: int,
    number: int,
    strength: Float[Tensor, " n"],
    count: int = 5,
    around: int = _AROUND,
) -> list[dict[str, Any]]:
    """The queries in which a feature carries the most logit, as text with the query and its key marked."""
    rows: list[dict[str, Any]] = []
    used: set[int] = set()
    for row in strength.argsort(descending=True).tolist():
        example = int(looked.example[row])
        if float(strength[row]) <= 0 or len(rows) == count:
            break
        if example in used:
            continue
        used.add(example)
        ids = looked.ids[example]
        query, key = int(looked.query[row]), int(looked.top_place[row, h])
        rows.append({
            "head": str(looked.heads[h]), "feature": number, "logit": float(strength[row]),
            "attention": float(looked.top_weight[row, h]), **_snippet(scope, ids, query, key, around),
        })  # fmt: skip
    return rows


def _snippet(scope: Scope, ids: list[int], query: int, key: int, around: int) -> dict[str, Any]:
    """Text around two tokens, with their places in it as character offsets."""
    pieces = [scope.tokenizer.decode([i]) if scope.tokenizer is not None else f" {i}" for i in ids]
    near = [i for i in range(len(ids)) if min(abs(i - query), abs(i - key)) <= around]
    text, spans, last = "", {}, -1
    for i in near:
        if i != last + 1:
            text += " … "
        spans[i] = (len(text), len(text) + len(pieces[i]))
        text += pieces[i]
        last = i
    return {
        "query": pieces[query], "key": pieces[key], "text": text,
        "query_start": spans[query][0], "query_stop": spans[query][1],
        "key_start": spans[key][0], "key_stop": spans[key][1],
    }  # fmt: skip


def _one(basis: Float[Tensor, "d r"]) -> Projector:
    return Projector.orthogonal(basis[None])


def curve_rows(
    rows: AttentionRows,
    orig: Int[Tensor, " n"],
    target: Int[Tensor, " n"],
    unit: Int[Tensor, " n"],
    heads: Sequence[Head],
    methods: Mapping[str, Projector],
    k: int,
    seed: int,
) -> list[dict[str, Any]]:
    """One size of the curve, with intervals; ``gain`` is a method's over the self-contrast, paired by prompt."""
    effects = {name: swap_attention(rows, orig, target, p) for name, p in methods.items()}
    against = {name: "self_contrast" for name in methods if name != "self_contrast"}
    measures = ("gain", "carried", "carried_gain")
    kept = [f"{name}{end}" for name in measures for end in ("", "_low", "_high")]
    return [
        {
            "head": row["head"], "method": row["condition"], "k": k,
            **{name: row[name] for name in ("orig_before", "target_before", "orig_after", "target_after", "shift")},
            "low": row["shift_low"], "high": row["shift_high"], **{name: row[name] for name in kept},
            "n": row["n"],
        }
        for row in swap_table(effects, list(heads), unit, against=against, seed=seed)
    ]  # fmt: skip


def singular_projector(singular: SingularBasis, heads: Sequence[Head], k: int) -> Projector:
    """What the weights alone would swap at each head."""
    return Projector.stack([omega_svd(singular[head].read, singular[head].S, k) for head in heads])
