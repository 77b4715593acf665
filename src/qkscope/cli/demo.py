"""The main job on the embedded model: find the heads that answer "which box?", take them apart, and test it causally.

Find, decompose, swap, and ask why of one prompt, with claims. Words for finding, fitting and testing are disjoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qkscope import tasks
from qkscope.analyses.attribute import attribute
from qkscope.analyses.decompose import decompose
from qkscope.analyses.find import find_heads
from qkscope.analyses.swap import SIZES, swap
from qkscope.analyses.why.why import Why, why
from qkscope.capture.scope import Scope
from qkscope.page.figures import draw_verbs
from qkscope.page.report import report_html
from qkscope.runs.claims import Claim
from qkscope.runs.progress import doing
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result

PROMPT = "hat: O\njam: Z\ncat: B\npen: K\njam:"
_HEADS = 3
Rows = Mapping[Any, Mapping[str, Any]]


def demo(model: str = "smollm2-135m", *, n: int = 96, seed: int = 0) -> tuple[Result, Why, dict[str, str | bytes]]:
    """Run the main job on ``n`` prompts for each step; returns the result, why of a prompt, and the files."""
    start = time.perf_counter()
    scope = Scope.load(model)
    task = tasks.binding(entities=9, form="list", seed=seed)
    with doing(f"scoring all {len(scope.heads())} heads"):
        ranking = find_heads(scope, task, n)
    best = ranking.top("row_accuracy")  # right in the whole row: a head may prefer a box and yet hardly look at any
    heads = [str(head) for head in ranking.above(0.30, by="row_accuracy")][:_HEADS] or [best[0]["head"]]
    control = min(ranking.top(), key=lambda row: abs(row["accuracy"] - row["chance"]))["head"]
    with doing(f"fitting order and lexical features of {', '.join(heads)}"):
        fit = decompose(scope, task, [*heads, control], n, contrasts=["order", "lexical"])
    sizes = [k for k in SIZES if k < scope.d_head]
    with doing("swapping them on held-out prompts"):
        swaps = swap(scope, task.test(n), fit, heads, sizes=sizes, clouds=True)
    parts = attribute(scope, PROMPT, heads[0], fit)
    asked = why(scope, PROMPT, heads[0], features=fit, seed=seed)
    swapped = {row["condition"]: row for row in swaps.table() if row["head"] == heads[0]}
    result = Result(
        experiment="demo",
        answer=_answer(heads[0], swapped),
        tables={
            "heads": best[:12],
            "ranks": fit.table(),
            "swap": swaps.table(),
            "curve": swaps.tables["curve"],
            "tokens": parts.tables["tokens"],
            "why": [{"line": asked.answer}, *asked.tables["said"]],
        },
        claims=_claims(
            next(row for row in best if row["head"] == heads[0]),
            swapped,
            {row["method"]: row for row in swaps.tables["curve"] if row["head"] == heads[0] and row["k"] == 2},
            {row["head"]: row for row in fit.table() if row["contrast"] == "lexical"},
            control,
        ),
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(model=scope.name, weights=scope.weights_hash, n=n, seed=seed),
    )
    page = report_html([replace(result, tables={}), ranking, fit, swaps, parts, asked], title="demo")
    return result, asked, {"report.html": page, **draw_verbs(ranking, swaps, parts)}


def _answer(head: str, rows: Rows) -> str:
    both, lexical, random = (rows[name] for name in ("both", "lexical", "random_both"))
    return (
        f"{head} finds the box by the word asked for: exchange its lexical feature ({lexical['rank']} dimensions) "
        f"between two boxes, and its attention on the right one falls from {both['orig_before']:.2f} to "
        f"{lexical['orig_after']:.2f} while the other gets {lexical['target_after']:.2f} (with order as well "
        f"{both['orig_after']:.2f} and {both['target_after']:.2f}); random subspaces of that size leave "
        f"{random['orig_after']:.2f}."
    )


def _claims(best: Mapping[str, Any], swapped: Rows, at_two: Rows, lexical: Rows, control: str) -> list[Claim]:
    """What the best head shows: its score, its swaps by condition, two dimensions by method, lexical ranks by head."""
    head, both, random, key_pca = best["head"], *(swapped[name] for name in ("both", "random_both", "key_pca_both"))
    return [
        Claim(f"{head} attends to the right box", "at least 30% of prompts", best["low"], best["chance"],
              "ours >= 0.3 and ours > 2 * control"),
        Claim("swapping both features moves the attention to the target; random subspaces do not", "the majority",
              both["target_after"], random["target_after"], "ours >= 0.3 and ours > 2 * control"),
        Claim("two dimensions of the lexical feature move more than two principal components of the keys", "",
              at_two["lexical"]["shift"], at_two["key_pca"]["shift"], "ours > control"),
        Claim("all its dimensions move more than as many principal components of the keys (control: key PCA)", "",
              both["shift"], key_pca["shift"], "ours > control"),
        Claim(f"the 99% rank tells {head} from {control}, a head at chance", "lexical rank 9-10",
              float(lexical[head]["rank_99"]), float(lexical[control]["rank_99"]), "ours != control"),
    ]  # fmt: skip
