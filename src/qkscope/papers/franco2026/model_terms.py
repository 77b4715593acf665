"""Figures 8 and 25: the terms of relative attention at the start and at the end of training, one prompt.

Figure 8 shows four heads, one of each kind, with the end's terms over rotated singular vectors below; figure 25 all
heads of the circuit. Terms are in the order of the singular values, so that the largest term may stand anywhere.
"""

from __future__ import annotations

import math

from torch import Tensor

from qkscope.analyses.sparsity import group_difference
from qkscope.maths.sparsity import sparsity
from qkscope.papers.franco2026.model_sweep import Row, Swept, swept
from qkscope.papers.registry import Settings
from qkscope.result import Claim, Result

FOUR = ("previous token", "induction", "S-inhibition", "name mover")


def run(settings: Settings) -> Result:
    """Terms of one prompt, and what they are on average."""
    found = swept(settings)
    chosen = [i for i, edge in enumerate(found.edges) if edge.circuit]
    if settings.figure == "fig8":
        roles = [found.edges[i].job.role for i in chosen]
        chosen = [chosen[roles.index(role)] for role in FOUR if role in roles] or chosen[:4]
    rows = [_row(found, i) for i in chosen]
    arrays = {
        f"{when}/{name}": values[name][chosen]
        for when, values in (("start", found.first), ("end", found.last))
        for name in ("terms_first", "terms_mean", "terms_rotated", "sigma")
    }
    end = sum(row["sparsity_end"] for row in rows) / len(rows)
    start = sum(row["sparsity_start"] for row in rows) / len(rows)
    rotated = sum(row["rotated_end"] for row in rows) / len(rows)
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=(
            f"Mean sparsity of the terms of {len(rows)} edges goes from {start:.2f} to {end:.2f} over training "
            f"(rotated vectors at the end: {rotated:.2f})."
            if found.trained
            else f"Mean sparsity of the terms of {len(rows)} edges is {end:.2f} (rotated vectors: {rotated:.2f})."
        ),
        tables={"heads": rows},
        arrays=arrays,
        claims=_claims(found, chosen, rows),
        preset=settings.preset,
        model=settings.model,
        seed=settings.seed,
        provenance=found.about(settings),
    )


def _row(found: Swept, i: int) -> Row:
    edge = found.edges[i]
    start, end = ({name: values[name][i] for name in values if name != "right"} for values in (found.first, found.last))
    terms = end["terms_first"]
    largest = int(terms.abs().argmax())
    return {
        "head": str(edge.head), "role": edge.job.role, "from": edge.job.query, "to": edge.job.key,
        "relative": float(terms.sum()), "sparsity_first": float(sparsity(terms)),
        "sparsity_start": _mean(start["sparsity"]), "sparsity_end": _mean(end["sparsity"]),
        "rotated_start": _mean(start["rotated"]), "rotated_end": _mean(end["rotated"]),
        "largest_vector": largest, "largest_share": float(terms[largest] / terms.sum()),
        "vectors": len(terms), "sigma_correlation": _mean(end["sigma_correlation"]),
        "count": _mean(end["count"]), "count_tol": _mean(end["count_tol"]), "count_null": _mean(end["count_null"]),
        "count_tol_null": _mean(end["count_tol_null"]),
    }  # fmt: skip


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _claims(found: Swept, chosen: list[int], rows: list[Row]) -> list[Claim]:
    correlation = sum(row["sigma_correlation"] for row in rows) / len(rows)
    # among m vectors whose terms know nothing of σ, Spearman's correlation has standard deviation 1/√(m − 1)
    chance = 2 / math.sqrt(rows[0]["vectors"] - 1)
    beyond = [row["largest_vector"] >= row["vectors"] / 4 for row in rows]
    end = group_difference(found.last, chosen)
    claims = [
        Claim(
            "Share of heads whose largest term is not among the largest quarter of singular values (control: .75, "
            "were the place of the largest term random)",
            "the largest terms can be those with the smallest singular values",
            sum(beyond) / len(beyond), 0.75, "ours > 0.5 * control",
        ),
        Claim(
            "Mean rank correlation of |term| and singular value (control: two standard deviations of chance)",
            "low rank is not the cause of sparsity",
            correlation, chance, "ours < 0.5",
        ),
        Claim(
            "Terms are sparser than over rotated vectors at the end: upper end of the interval of sparsity − rotated",
            "most of relative attention comes from a small set of singular vectors",
            end[2], 0.0, "ours < control",
        ),
    ]  # fmt: skip
    if found.trained:
        change = group_difference(found.last, chosen, found.first)
        claims.append(
            Claim(
                "Sparsity less rotated falls from start to end: upper end of its interval",
                "relative attention becomes significantly sparse",
                change[2],
                0.0,
                "ours < control",
            )
        )
    return claims
