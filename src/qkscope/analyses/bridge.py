"""How much of a feature's swap the singular vectors alone reproduce, on held-out prompts.

For each number k of dimensions: the first k directions of the contrast; the k singular vectors that carry most of it
(`singular`, chosen on the prompts the contrast was fitted on); the k with the largest singular values (`omega_svd`,
from the weights alone); the best k of rotated singular vectors, by the same choice (`rotated`); key PCA; and random
subspaces. Singular vectors are swapped as components of the logit, ``P = Σ n_j m_jᵀ``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qkscope.analyses.fit import Fit
from qkscope.analyses.swap import capture_rows, draw_pairs
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.maths import methods
from qkscope.maths.bridge import Alignment, alignment
from qkscope.maths.singular import SingularBasis
from qkscope.maths.swap import Condition, SwapRows
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.tasks.task import Unit

SIZES = (1, 2, 4, 8, 12, 16)


def bridge(
    scope: Scope,
    fit: Fit,
    basis: SingularBasis,
    units: Sequence[Unit],
    *,
    contrasts: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    draws: int = 20,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool | None = None,
) -> Result:
    """Angles of every fitted feature with the singular vectors of its head, and swaps of both.

    Parameters
    ----------
    fit : fitted in ``query_frame``, where one basis serves all positions (or in a model without RoPE).
    units : from ``task.test(n)``: words that nothing was fitted on.
    sizes : numbers of dimensions swapped.
    draws : random subspaces and rotations per size.
    """
    start = time.perf_counter()
    names = list(fit.contrasts) if contrasts is None else list(contrasts)
    rotary = [basis[head].rotary for head in fit.heads]
    if fit.space != "query_frame" and any(rotary):
        raise BadInput(f"the bridge needs queries and keys in the query's frame, but this fit is in {fit.space}: fit "
                       "with space='query_frame'.")  # fmt: skip
    rows = capture_rows(scope, units, fit, fit.heads, draw_pairs(units, batch_size, seed), progress)
    found = [alignment(basis, fit[name, head], seed=seed) for name in names for head in fit.heads]
    curve = [
        row
        for name in names
        for row in _curve(rows, fit, basis, name, [k for k in sizes if k <= scope.d_head], draws, seed)
    ]
    table = [_with_swaps(one, curve) for one in found]
    return Result(
        experiment="bridge",
        answer=answer_of(table),
        tables={"alignment": table, "curve": curve, "vectors": [
            {"head": str(one.head), "contrast": one.contrast, **row} for one in found for row in one.table()[:8]
        ]},
        arrays={f"carried/{one.contrast}/{one.head}": one.carried for one in found},
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**{**fit.provenance.get("asked", {}), "test_units": len(units), "draws": draws}),
    )  # fmt: skip


def _curve(
    rows: SwapRows, fit: Fit, basis: SingularBasis, name: str, sizes: Sequence[int], draws: int, seed: int
) -> list[dict[str, Any]]:
    heads = list(fit.heads)
    features = [fit[name, head] for head in heads]
    deltas = torch.stack([_delta(feature) for feature in features])
    cov_k = [feature.cov_k for feature in features if feature.cov_k is not None]  # a fit has it
    known: dict[str | Condition, methods.Method] = {
        "contrast": methods.leading([feature.V.double().cpu() for feature in features]),
        "singular": methods.singular(basis, heads, deltas),
        "omega_svd": methods.omega_svd(basis, heads),
        "rotated": methods.rotated(basis, heads, deltas, draws, seed),
        "key_pca": methods.key_pca(torch.stack(cov_k).cpu()),
        "random": methods.random(len(heads), features[0].d_head, draws, seed),
    }
    against = {"singular": "rotated", "contrast": "rotated", "omega_svd": "random"}
    return [{"contrast": name, **row} for row in rows.curve(known, sizes, against=against, seed=seed)]


def _delta(feature: Any) -> Tensor:
    u, v = feature.basis("query").double().cpu(), feature.basis("key").double().cpu()
    return u @ torch.diag(feature.S[: feature.rank].double().cpu()) @ v.mT


def _with_swaps(one: Alignment, curve: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The feature's row, with the swaps of as many dimensions as its rank (the next size of the curve)."""
    own = [row for row in curve if (row["head"], row["contrast"]) == (str(one.head), one.contrast)]
    k = min((row["k"] for row in own if row["k"] >= one.rank), default=max(row["k"] for row in own))
    at = {row["method"]: row for row in own if row["k"] == k}
    whole = at["contrast"]["shift"]
    return {
        **one.row(), "k": k, **{f"shift_{method}": row["shift"] for method, row in at.items()},
        "gain_singular": at["singular"]["gain"], "gain_singular_low": at["singular"]["gain_low"],
        "gain_singular_high": at["singular"]["gain_high"],
        "reproduced": at["singular"]["shift"] / whole if whole > 0 else None,
        "reproduced_rotated": at["rotated"]["shift"] / whole if whole > 0 else None,
    }  # fmt: skip


def answer_of(table: Sequence[dict[str, Any]]) -> str:
    """The answer at the head and contrast whose own swap moves most, whatever it is."""
    row = max(table, key=lambda row: row["shift_contrast"])
    return (
        f"{row['contrast']} at {row['head']} (rank {row['rank']}): {row['vectors']:.0f} singular vectors carry 90% of "
        f"it where rotated ones need {row['vectors_rotated']:.0f} and principal axes of the keys "
        f"{row['vectors_key_pca']:.0f}; the best {row['rank']} span {row['key']:.0%} of its keys (key PCA "
        f"{row['key_key_pca']:.0%}, random axes {row['key_random']:.0%}), and swapping {row['k']} of them shifts "
        f"attention by {row['shift_singular']:.2f} where the contrast's own {row['k']} directions shift "
        f"{row['shift_contrast']:.2f}, rotated vectors {row['shift_rotated']:.2f}, key PCA "
        f"{row['shift_key_pca']:.2f} and random {row['shift_random']:.2f}."
    )
