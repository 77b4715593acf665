"""The bridge: are the subspaces that contrasts find spanned by singular vectors of the weights?

Heads are found on the binding task, features fitted in the query's frame; `qkscope.analyses.bridge` asks which
singular vectors carry them and how much of their swaps the singular vectors alone reproduce. Neither paper asks this.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkscope import tasks
from qkscope.analyses.bridge import SIZES, bridge
from qkscope.analyses.decompose import decompose
from qkscope.analyses.find import find_heads
from qkscope.analyses.singular import singular_basis
from qkscope.capture.scope import Scope
from qkscope.papers.franco2026.model_sweep import Row
from qkscope.papers.registry import Settings
from qkscope.result import Claim, Result


@dataclass(frozen=True)
class Work:
    """Counts of one preset."""

    choose: int
    fit: int
    test: int
    heads: int
    draws: int


WORK = {"smoke": Work(32, 32, 32, 2, 4), "default": Work(128, 256, 192, 4, 20), "paper": Work(256, 1000, 1000, 9, 50)}
_CONTRASTS = ("lexical", "order")


def run(settings: Settings) -> Result:
    """Alignment and swaps at the best binding heads."""
    work = WORK[settings.preset]
    scope = Scope.load(settings.model, device=settings.device)
    # a nano answers lists by looking at the colons, and the other forms by looking at the boxes
    task = tasks.binding(9, "sentence" if settings.model.startswith("nano:") else "list", settings.seed)
    ranking = find_heads(scope, task, work.choose)
    heads = [row["head"] for row in ranking.top("row_accuracy")[: work.heads]]
    fit = decompose(scope, task, heads, work.fit, contrasts=list(_CONTRASTS), space="query_frame", seed=settings.seed)
    found = bridge(
        scope, fit, singular_basis(scope, heads), task.test(work.test), draws=work.draws, seed=settings.seed,
        sizes=[k for k in SIZES if k <= scope.d_head],
    )  # fmt: skip
    lexical = [dict(row) for row in found.tables["alignment"] if row["contrast"] == "lexical"]
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=found.answer,
        tables={**found.tables, "heads": ranking.top("row_accuracy")[: work.heads]},
        arrays=found.arrays,
        claims=_claims(lexical),
        preset=settings.preset,
        model=settings.model,
        seed=settings.seed,
        provenance=found.provenance,
    )


def _claims(rows: list[Row]) -> list[Claim]:
    """Of the lexical feature, means over heads."""

    def mean(name: str) -> float:
        return sum(row[name] for row in rows) / len(rows)

    said = "not asked in either paper"
    return [
        Claim("Singular vectors that carry 90% of the lexical feature (control: rotated vectors)", said,
              mean("vectors"), mean("vectors_rotated"), "ours < 0.5 * control"),
        Claim("The same against principal axes of the keys, which know the prompts and no weights", said,
              mean("vectors"), mean("vectors_key_pca"), "ours < control"),
        Claim("Share of its key subspace in the span of as many singular vectors as its rank (control: random axes, "
              "chosen alike)", said, mean("key"), mean("key_random"), "ours > 1.5 * control"),
        Claim("The same against as many principal axes of the keys, chosen alike", said, mean("key"),
              mean("key_key_pca"), "ours > control"),
        Claim("Share of its query subspace (control: random axes, chosen alike)", said, mean("query"),
              mean("query_random"), "ours > 1.5 * control"),
        Claim("Shift of attention when these vectors are swapped (control: rotated vectors, chosen alike)", said,
              mean("shift_singular"), mean("shift_rotated"), "ours > 1.5 * control"),
        Claim("The same against as many principal components of the keys", said,
              mean("shift_singular"), mean("shift_key_pca"), "ours > control"),
        Claim("The same against the contrast's own directions: they are the whole of the feature", said,
              mean("shift_singular"), mean("shift_contrast"), "ours > 0.9 * control"),
    ]  # fmt: skip
