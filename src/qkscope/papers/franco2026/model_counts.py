"""Figure 9: how many singular vectors reconstruct relative attention - per head, and over training.

Counts are of prompts on which the head attends (r > 0). Beside each the count at 99% of r, and the count that random
terms with the same sum and norm would need: a small count by itself says little.
"""

from __future__ import annotations

from qkscope.papers.franco2026.model_sweep import Row, Swept, swept
from qkscope.papers.registry import Settings
from qkscope.result import Claim, Result


def run(settings: Settings) -> Result:
    """Distributions at the last checkpoint, means at all."""
    found = swept(settings)
    counts = [row for i in range(len(found.edges)) for row in _distribution(found, i)]
    rows = found.rows(found.found[-1])
    inside = [row for row in rows if row["circuit"]]
    count, null = _mean(inside, "count"), _mean(inside, "count_null")
    few = sum(1 <= row["count"] <= 4 for row in inside)
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=(
            f"{count:.1f} singular vectors reach the relative logit on average over {len(inside)} edges of the "
            f"circuit ({_mean(inside, 'count_tol'):.1f} reach 99% of it); random terms of the same sum and norm need "
            f"{null:.1f} ({_mean(inside, 'count_tol_null'):.1f} for 99%). At {few} of {len(inside)} edges the count is "
            "between 1 and 4."
        ),
        tables={
            "counts": counts,
            "sparsity": rows,
            "training": [dict(row) for row in found.result.tables.get("training", ())],
        },
        claims=_claims(found, inside),
        preset=settings.preset,
        model=settings.model,
        seed=settings.seed,
        provenance=found.about(settings),
    )


def _distribution(found: Swept, i: int) -> list[Row]:
    """Quartiles and ends of one head's counts, of the data and of the null."""
    edge = found.edges[i]
    out = []
    for name in ("count", "count_tol", "count_null", "count_tol_null"):
        values = found.last[name][i]
        values = values[values.isfinite()]
        if len(values):
            marks = values.quantile(values.new_tensor([0.0, 0.25, 0.5, 0.75, 1.0])).tolist()
            out.append({
                "head": str(edge.head), "role": edge.job.role, "from": edge.job.query, "to": edge.job.key,
                "circuit": edge.circuit, "what": name,
                **dict(zip(("least", "quarter", "median", "three_quarters", "most"), marks, strict=True)),
                "mean": float(values.mean()), "n": len(values),
            })  # fmt: skip
    return out


def _mean(rows: list[Row], name: str) -> float:
    values = [row[name] for row in rows if row[name] == row[name]]
    return sum(values) / len(values) if values else float("nan")


def _claims(found: Swept, inside: list[Row]) -> list[Claim]:
    claims = [
        Claim(
            "Mean number of singular vectors that reach the relative logit, at the end (control: random terms of the "
            "same sum and norm)",
            "typically 1-4 singular vectors are needed",
            _mean(inside, "count"), _mean(inside, "count_null"), "1 <= ours <= 4",
        ),
        Claim(
            "The same at a tolerance of 99% is less than random terms need at it",
            "features of interest occupy low-dimensional subspaces",
            _mean(inside, "count_tol"), _mean(inside, "count_tol_null"), "ours < control",
        ),
    ]  # fmt: skip
    if found.trained:
        rows = found.training()
        claims.append(
            Claim(
                "Count less that of random terms, at the end (control: at the start)",
                "the count declines during training",
                rows[-1]["count_tol"] - rows[-1]["count_tol_null"],
                rows[0]["count_tol"] - rows[0]["count_tol_null"],
                "ours < control",
            )
        )
    return claims
