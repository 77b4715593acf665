"""Figures 7 and 19: swap the category of an item that was asked for with that of one that was not.

The paper's span of five top directions stands beside the pooled query-centred contrast, random
subspaces, the keys' principal components, ``Cov_q Cov_k``, all of the same size, and a sham: two
items of the *same* category. Its row makes no claim: both items are drawn alike from the right
ones, so what one loses the other gains, 0 in the mean in any head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.texts.list_tasks import POOLED
from qkscope.verbs.swap.swap import swap
from qkscope_papers.lee2026.language import SECOND, FigureSession, session_of
from qkscope_papers.lee2026.swap_plots import draw_full
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import Estimate, Files, Row, pick

_SIZES = (1, 2, 4, 8, 12)
JOINT = "all"


@figure("lee2026", "fig7", "Swapping categories in filter heads")
@figure("lee2026", "fig19", "Swapping categories, second model or form", model=SECOND, second=True)
def run(settings: Settings, second: bool = False) -> Result:
    """Swaps at the three filter heads."""
    session = session_of(settings)
    again = second and session.embedded  # any other model is the second model itself
    tables = session.once(("swaps", "filter", again), lambda: _tables(session, again))
    heads = session.found("filter", again).heads
    form = session.form("filter", again)
    answer = _answer(tables["swap"], form)
    no_head = session.no_such_head(session.found("filter", again))
    claims = [
        replace(claim, lenient=no_head)
        for claim in _claims(tables, [str(head) for head in heads], second)
    ]
    return settings.result(
        answer, tables, claims, model=session.scope.name, about=session.about(form=form)
    )


def _tables(session: FigureSession, second: bool) -> dict[str, list[Row]]:
    found = session.found("filter", second)
    fit = session.fit("filter", second)
    work = session.work
    units = session.filter_task(second=second).test(work.test)
    options: Any = {"draws": work.draws, "batch_size": work.batch_size, "seed": session.seed}
    sizes = [k for k in _SIZES if k <= session.scope.d_head]
    span = swap(session.scope, units, fit, found.heads, **options)
    pooled = swap(session.scope, units, fit, found.heads, features=[POOLED], sizes=sizes, **options)
    return {
        "swap": [*span.table(), *pooled.table()],
        "paired": [dict(row) for row in span.tables["paired"]],
        "curve": [dict(row) for row in pooled.tables["curve"]],
        "heads": [found.row(head) for head in found.heads],
    }


def _of(rows: list[Row], head: str) -> dict[str, Row]:
    return {row["condition"]: row for row in rows if row["head"] == head}


def _answer(rows: list[Row], form: str) -> str:
    at = _of(rows, rows[0]["head"])
    span = at[JOINT]
    random = at[f"random_{JOINT}"]
    pca = at[f"key_pca_{JOINT}"]
    pooled = at[POOLED]
    return (
        f"At {span['head']} ({form} form) swapping the {span['rank']} category directions takes attention from "
        f"{span['orig_before']:.3f}/{span['target_before']:.3f} (asked item / item of another category) to "
        f"{span['orig_after']:.3f}/{span['target_after']:.3f}; random subspaces {random['orig_after']:.3f}/"
        f"{random['target_after']:.3f}, key PCA {pca['orig_after']:.3f}/{pca['target_after']:.3f}; the pooled contrast "
        f"({pooled['rank']} dimensions) {pooled['orig_after']:.3f}/{pooled['target_after']:.3f}."
    )


def _claims(tables: dict[str, list[Row]], heads: list[str], second: bool) -> list[Claim]:
    """Of the head that is closest to failing; its interval pays for its having been chosen among
    three.
    """
    cells = [_of(tables["swap"], head) for head in heads]
    count = len(heads)
    said = "implied by §5.1, Fig. 19" if second else "§5.1, Fig. 7"
    setting: dict[str, Any] = {"reason": "other setting" if second else "small model", "why":
                               "The paper's second model is Qwen3-4B; here it is a small model, asked with lists."
                               if second else "The paper's model has 8B weights."}  # fmt: skip
    weak = min(cells, key=lambda cell: cell[JOINT]["shift"] - 2 * cell[f"random_{JOINT}"]["shift"])
    moved = Estimate(*(weak[JOINT][name] for name in ("shift", "shift_low", "shift_high"))).among(
        count
    )
    empty = min(
        (cell[JOINT] for cell in cells),
        key=lambda row: row["orig_after"] / max(row["orig_before"], 1e-9),
    )
    kept = Estimate(
        *(empty["orig_before"] - empty[name] for name in ("left", "left_high", "left_low"))
    )
    left = kept.among(count)
    pooled = min(cells, key=lambda cell: cell[POOLED]["shift"] - cell[JOINT]["shift"])
    half = sum(
        (pooled[name]["shift_high"] - pooled[name]["shift_low"]) / 2 for name in (POOLED, JOINT)
    )
    less = pooled[POOLED]["shift"] - pooled[JOINT]["shift"]
    claims = [
        Claim("swapping the category span moves attention (shift, weakest head; control: random of the same size)",
              f"{said}: much more effective than a random 5-dimensional baseline", moved.mean,
              weak[f"random_{JOINT}"]["shift"], "ours > 2 * control", **moved.ends, **setting),
        Claim("it does not move all the attention (left on the asked item, most moved head; control: before)",
              f"{said}: it does not shift all the attention", left.mean, empty["orig_before"], "ours > 0.1 * control",
              **left.ends, **setting),
    ]  # fmt: skip
    for kind, name in (("key_pca", "key PCA"), ("cov_qk", "Cov_q Cov_k")):
        own = pick(tables["paired"], one=JOINT, other=f"{kind}_{JOINT}")
        row = min(own, key=lambda row: row["difference"])
        more = Estimate(row["difference"], row["low"], row["high"]).among(count)
        claims.append(Claim(f"it moves more than {name} of the same size (difference of shifts, weakest head)", "",
                            more.mean, None, "ours > 0", **more.ends))  # fmt: skip
    claims.append(Claim("the pooled centred contrast, one dimension less, moves as much (difference of shifts to the "
                        "span, weakest head)", "", less, None, "ours >= -0.02", less - half, less + half))  # fmt: skip
    return claims


# ---------------------------------------------------------------------- the drawing

_SHOWN = (
    ("all", "5 categories"), ("category", "pooled, centred"), ("random_all", "random"), ("key_pca_all", "key PCA"),
    ("cov_qk_all", "Cov_q Cov_k"), ("sham_all", "sham"),
)  # fmt: skip


@run.drawing
def draw(result: Result) -> Files:
    """All three heads in full, and the curve of the first."""
    return draw_full(result, _SHOWN)
