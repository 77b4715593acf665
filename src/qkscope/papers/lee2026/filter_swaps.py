"""Figures 7 and 19: swap the category of an item that was asked for with that of one that was not.

The paper's span of five top directions stands beside the pooled query-centred contrast, random subspaces, the keys'
principal components, ``Cov_q Cov_k``, all of the same size, and a sham: two items of the *same* category. Its row makes
no claim: both items are drawn alike from the right ones, so what one loses the other gains, 0 in the mean in any head.
"""

from __future__ import annotations

from typing import Any

from qkscope.analyses.swap import swap
from qkscope.papers.lee2026.language import SECOND, Session, session_of
from qkscope.papers.lee2026.swap_plots import draw_full
from qkscope.papers.registry import Settings, figure
from qkscope.papers.tables import Files, Row
from qkscope.runs.claims import Claim
from qkscope.runs.result import Result
from qkscope.tasks.filter import POOLED

_SIZES = (1, 2, 4, 8, 12)
JOINT = "all"


@figure("lee2026", "fig7", "Swapping categories in filter heads")
@figure("lee2026", "fig19", "Swapping categories, second model or form", model=SECOND, second=True)
def run(settings: Settings, second: bool = False) -> Result:
    """Swaps at the three filter heads."""
    session = session_of(settings)
    second = second and session.embedded  # any other model is the second model itself
    tables = session.once(("swaps", "filter", second), lambda: _tables(session, second))
    heads, form = session.found("filter", second).heads, session.form("filter", second)
    return settings.result(
        _answer(tables["swap"], form),
        tables,
        _claims(tables["swap"], [str(head) for head in heads]),
        model=session.scope.name,
        about=session.about(form=form),
    )


def _tables(session: Session, second: bool) -> dict[str, list[Row]]:
    found, fit, work = session.found("filter", second), session.fit("filter", second), session.work
    units = session.filter_task(second=second).test(work.test)
    options: Any = {"draws": work.draws, "batch_size": work.batch_size, "seed": session.seed}
    sizes = [k for k in _SIZES if k <= session.scope.d_head]
    span = swap(session.scope, units, fit, found.heads, **options)
    pooled = swap(session.scope, units, fit, found.heads, features=[POOLED], sizes=sizes, **options)
    return {
        "swap": [*span.table(), *pooled.table()],
        "curve": [dict(row) for row in pooled.tables["curve"]],
        "heads": [found.row(head) for head in found.heads],
    }


def _of(rows: list[Row], head: str) -> dict[str, Row]:
    return {row["condition"]: row for row in rows if row["head"] == head}


def _answer(rows: list[Row], form: str) -> str:
    at = _of(rows, rows[0]["head"])
    span, random, pca, pooled = at[JOINT], at[f"random_{JOINT}"], at[f"key_pca_{JOINT}"], at[POOLED]
    return (
        f"At {span['head']} ({form} form) swapping the {span['rank']} category directions takes attention from "
        f"{span['orig_before']:.3f}/{span['target_before']:.3f} (asked item / item of another category) to "
        f"{span['orig_after']:.3f}/{span['target_after']:.3f}; random subspaces {random['orig_after']:.3f}/"
        f"{random['target_after']:.3f}, key PCA {pca['orig_after']:.3f}/{pca['target_after']:.3f}; the pooled contrast "
        f"({pooled['rank']} dimensions) {pooled['orig_after']:.3f}/{pooled['target_after']:.3f}."
    )


def _claims(rows: list[Row], heads: list[str]) -> list[Claim]:
    cells = [_of(rows, head) for head in heads]

    def worst(one: str, other: str) -> dict[str, Row]:
        return min(cells, key=lambda cell: cell[one]["shift"] - cell[other]["shift"])

    random, pca, both = (
        worst(JOINT, f"random_{JOINT}"),
        worst(JOINT, f"key_pca_{JOINT}"),
        worst(JOINT, f"cov_qk_{JOINT}"),
    )
    left = min(cells, key=lambda cell: cell[JOINT]["orig_after"] / max(cell[JOINT]["orig_before"], 1e-9))
    pooled = worst(POOLED, JOINT)
    return [
        Claim("swapping the category span moves attention (shift, weakest head against its random baseline)",
              "much more effective than random", random[JOINT]["shift"], random[f"random_{JOINT}"]["shift"],
              "ours > 2 * control"),
        Claim("every head's shift is above its random baseline's (smallest lower bound of the paired difference)",
              "implied", min(cell[JOINT]["gain_low"] for cell in cells), None, "ours > 0"),
        Claim("it does not move all the attention (what is left on the asked item, most moved head; control: before)",
              "not all", left[JOINT]["orig_after"], left[JOINT]["orig_before"], "ours > 0.1 * control"),
        Claim("it moves more than key PCA of the same size (shift, weakest head)", "not in the paper",
              pca[JOINT]["shift"], pca[f"key_pca_{JOINT}"]["shift"], "ours > control + 0.02"),
        Claim("it moves more than Cov_q Cov_k of the same size (shift, weakest head)", "not in the paper",
              both[JOINT]["shift"], both[f"cov_qk_{JOINT}"]["shift"], "ours > control + 0.02"),
        Claim("the pooled centred contrast, one dimension less, moves as much (shift, weakest head; control: the span)",
              "not in the paper", pooled[POOLED]["shift"], pooled[JOINT]["shift"], "ours >= control - 0.02"),
    ]  # fmt: skip


# ---------------------------------------------------------------------- the drawing

_SHOWN = (
    ("all", "5 categories"), ("category", "pooled, centred"), ("random_all", "random"), ("key_pca_all", "key PCA"),
    ("cov_qk_all", "Cov_q Cov_k"), ("sham_all", "sham"),
)  # fmt: skip


@run.drawing
def draw(result: Result) -> Files:
    """All three heads in full, and the curve of the first."""
    return draw_full(result, _SHOWN)
