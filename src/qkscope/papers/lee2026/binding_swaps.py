"""Figures 9, 18 and 20: swap order, lexical and both features between the right box and another.

One table serves all found heads: figures 9 and 20 tell of the best, figure 18 of the others. Beside the swaps stand
their oblique versions, random subspaces, key PCA, ``Cov_q Cov_k`` and a sham; the curve over the number of dimensions;
and, from the default preset on, what the model answers when the swap is written into its heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkscope.analyses.downstream import swap_downstream
from qkscope.analyses.swap import SIZES, swap
from qkscope.heads import Head
from qkscope.papers.lee2026.language import SECOND, THRESHOLD, ChosenHeads, Session, session_of
from qkscope.papers.lee2026.swap_plots import draw_full, draw_multiples
from qkscope.papers.registry import Settings, figure
from qkscope.papers.tables import Files, Row
from qkscope.runs.claims import Claim
from qkscope.runs.result import Result

Conditions = dict[str, Row]  # rows of one head
_SMALL = 4  # dimensions at which the curve is compared


@figure("lee2026", "fig9", "Swapping order and lexical features")
@figure("lee2026", "fig20", "Swapping order and lexical, second model or form", model=SECOND, second=True)
def run(settings: Settings, second: bool = False) -> Result:
    """Swaps at the best of the found heads."""
    session = session_of(settings)
    second = second and session.embedded  # any other model is the second model itself
    found, tables = session.found("binding", second), _swapped(session, second)
    return settings.result(
        _answer(tables, found, session.form("binding", second)),
        tables,
        _claims(session, found, tables, second),
        model=session.scope.name,
        about=_about(session, found, second),
    )


@figure("lee2026", "fig18", "Swapping order and lexical, other heads")
def run_others(settings: Settings) -> Result:
    """The same at the other found heads."""
    session = session_of(settings)
    found = session.found("binding")
    shown = [str(head) for head in found.heads[1:] or found.heads]
    tables = {
        name: [row for row in rows if row.get("head") in shown]
        for name, rows in _swapped(session, False).items()
        if name != "downstream"
    }
    return settings.result(
        _other_answer(tables["swap"], shown),
        tables,
        _other_claims(tables["swap"], shown),
        model=session.scope.name,
        about=_about(session, found, False),
    )


def _about(session: Session, found: ChosenHeads, second: bool) -> dict[str, Any]:
    return session.about(form=session.form("binding", second), control=str(found.control), reached=found.reached)


def _swapped(session: Session, second: bool) -> dict[str, list[Row]]:
    return session.once(("swaps", "binding", second), lambda: _tables(session, second))


def _tables(session: Session, second: bool) -> dict[str, list[Row]]:
    found, fit, work = session.found("binding", second), session.fit("binding", second), session.work
    units = session.binding_task(second=second).test(work.test)
    sizes = [k for k in SIZES if k <= session.scope.d_head]
    options: Any = {"batch_size": work.batch_size, "seed": session.seed}
    swaps = swap(session.scope, units, fit, found.heads, sizes=sizes, draws=work.draws, **options)
    tables = {
        "swap": swaps.table(),
        "curve": [dict(row) for row in swaps.tables["curve"]],
        "ranks": [{**row, "is_control": row["head"] == str(found.control)} for row in fit.table()],
        "heads": [found.row(head) for head in found.all],
    }
    if work.downstream:
        chosen = units[: work.downstream]
        groups = [found.heads] if len(found.heads) == 1 else [found.heads[:1], found.heads]
        patched = [swap_downstream(session.scope, chosen, fit, heads, **options) for heads in groups]
        tables["downstream"] = [dict(row) for each in patched for row in each.tables["downstream"]]
    return tables


def _of(rows: list[Row], head: str) -> Conditions:
    return {row["condition"]: row for row in rows if row["head"] == head}


def _left(row: Row) -> float:
    """Attention that leaves the right box."""
    return float(row["orig_before"] - row["orig_after"])


def _pair(row: Row) -> str:
    return f"{row['orig_after']:.2f}/{row['target_after']:.2f}"


def _answer(tables: dict[str, list[Row]], found: ChosenHeads, form: str) -> str:
    rows = tables["swap"]
    at = _of(rows, rows[0]["head"])
    both = at["both"]
    looked = f"{len(found.heads)} of them were swapped" if found.reached else "the best three were swapped all the same"
    text = (
        f"{found.reached} heads attend to the right box most of all tokens in {THRESHOLD:.0%} of prompts; {looked}. "
        f"At {both['head']} ({form} form) swapping both takes attention on the right and the target box from "
        f"{both['orig_before']:.2f}/{both['target_before']:.2f} to {_pair(both)}; order alone {_pair(at['order'])}, "
        f"lexical alone {_pair(at['lexical'])}; of the same size, random {_pair(at['random_both'])}, key PCA "
        f"{_pair(at['key_pca_both'])}, Cov_q Cov_k {_pair(at['cov_qk_both'])}."
    )
    for row in [row for row in tables.get("downstream", []) if row["condition"] == "both"][-1:]:
        text += (
            f" Written into {row['heads'].count(',') + 1} heads, the model's answer goes from "
            f"{row['accuracy_before']:.0%} right to {row['accuracy_after']:.0%}, and to the target from "
            f"{row['target_before']:.0%} to {row['target_after']:.0%}."
        )
    return text


def _claims(session: Session, found: ChosenHeads, tables: dict[str, list[Row]], second: bool) -> list[Claim]:
    head = str(found.heads[0])
    at, score = _of(tables["swap"], head), found.row(found.heads[0])
    both, random = at["both"], at["random_both"]
    alone = max(at["order"]["shift"], at["lexical"]["shift"])
    curve = {(row["method"], row["k"]): row["shift"] for row in tables["curve"] if row["head"] == head}
    ranks = {
        (row["contrast"], row["is_control"]): row["rank"]
        for row in tables["ranks"]
        if row["head"] == head or row["is_control"]
    }
    # the shift of a sham is 0 by construction: it compares two keys that are not touched
    sham = abs(_left(at["sham_both"])) if "sham_both" in at else None
    claims = [
        Claim("a head attends most of all to the right box in 30% of prompts (best head, lower bound; control: chance)",
              "9 heads", score["row_low"], score["chance"], f"ours >= {THRESHOLD} and ours > control"),
        Claim("swapping both moves most of the attention to the target (control: random of the same size)",
              "the majority", both["target_after"], random["target_after"], "ours >= 0.3 and ours > 2 * control"),
        Claim("swapping both takes it off the right box, random does not (attention left there)",
              "the majority", both["orig_after"], random["orig_after"], "ours <= 0.25 and control >= 0.5"),
        Claim("random subspaces have a negligible effect (shift; control: swapping both)",
              "negligible", random["shift"], both["shift"], "ours < 0.1 * control"),
        Claim("order alone moves some attention (lower bound of its shift over random)", "some",
              at["order"]["gain_low"], None, "ours > 0"),
        Claim("lexical alone moves some attention (lower bound of its shift over random)", "some",
              at["lexical"]["gain_low"], None, "ours > 0"),
        Claim("both move more than either alone (shift; control: the larger of the two)", "a larger shift",
              both["shift"], alone, "ours > control"),
        Claim("a sham swap of two other boxes leaves the right one alone (attention that leaves it; control: swapping "
              "both)", "not in the paper", sham, _left(both), "ours < 0.05 * control"),
        Claim("both move more than key PCA of the same size (shift)", "not in the paper", both["shift"],
              at["key_pca_both"]["shift"], "ours > control + 0.02"),
        Claim("both move more than Cov_q Cov_k of the same size (shift)", "not in the paper", both["shift"],
              at["cov_qk_both"]["shift"], "ours > control + 0.02"),
        Claim(f"{_SMALL} lexical dimensions move more than {_SMALL} of key PCA (shift)", "not in the paper",
              curve.get(("lexical", _SMALL)), curve.get(("key_pca", _SMALL)), "ours > control + 0.02"),
        Claim("order has rank 2 or 3 (99% rule, query-centred; control: a head at chance)", "2 or 3",
              ranks["order", False], ranks["order", True], "2 <= ours <= 3"),
        Claim("lexical has rank 9 or 10 (99% rule; control: a head at chance)", "9 or 10",
              ranks["lexical", False], ranks["lexical", True], "9 <= ours <= 10"),
        Claim("the lexical rank tells a binding head from one that does not bind (control: its rank there)", "implied",
              ranks["lexical", False], ranks["lexical", True], "abs(ours - control) >= 2"),
    ]  # fmt: skip
    for row in [row for row in tables.get("downstream", []) if row["condition"] == "both"][-1:]:
        other = next(r for r in tables["downstream"] if r["condition"] == "random_both" and r["heads"] == row["heads"])
        claims.append(Claim("written into all found heads, the swap moves the answer (fall of the logit difference, "
                            "lower bound; control: random)", "not in the paper", row["low"], other["fell"],
                            "ours > 2 * abs(control)"))  # fmt: skip
    if session.embedded and not second:
        claims.append(Claim("L18H6 attends most of all to the right box (lower bound; control: chance)",
                            "our reference", found.row(Head(18, 6))["row_low"], score["chance"],
                            "ours >= 0.8"))  # fmt: skip
    return claims


def _other_answer(rows: list[Row], heads: list[str]) -> str:
    parts = []
    for head in heads:
        at = _of(rows, head)
        start = f"{at['both']['orig_before']:.2f}/{at['both']['target_before']:.2f}"
        parts.append(f"{head} {start} to {_pair(at['both'])} (random {_pair(at['random_both'])})")
    return "Swapping both at the other heads: " + "; ".join(parts) + "."


def _other_claims(rows: list[Row], heads: list[str]) -> list[Claim]:
    cells = [_of(rows, head) for head in heads]

    def worst(gap: Callable[[Conditions], float]) -> Conditions:
        return min(cells, key=gap)

    near = worst(lambda c: c["both"]["shift"] - c["random_both"]["shift"])
    alone = worst(lambda c: c["both"]["shift"] - max(c["order"]["shift"], c["lexical"]["shift"]))
    pca = worst(lambda c: c["both"]["shift"] - c["key_pca_both"]["shift"])
    return [
        Claim("at every head both move more than random (smallest lower bound of the paired difference)", "yes",
              min(cell["both"]["gain_low"] for cell in cells), None, "ours > 0"),
        Claim("random has a negligible effect (shift, closest head; control: swapping both)", "negligible",
              near["random_both"]["shift"], near["both"]["shift"], "ours < 0.1 * control"),
        Claim("both move more than either alone (shift, closest head)", "a larger shift", alone["both"]["shift"],
              max(alone["order"]["shift"], alone["lexical"]["shift"]), "ours > control"),
        Claim("both move more than key PCA of the same size (shift, closest head)", "not in the paper",
              pca["both"]["shift"], pca["key_pca_both"]["shift"], "ours > control + 0.02"),
    ]  # fmt: skip


# ---------------------------------------------------------------------- the drawing

_SHOWN = (
    ("order", "order"), ("order_oblique", "order, oblique"), ("lexical", "lexical"),
    ("lexical_oblique", "lexical, oblique"), ("both", "both"), ("random_order", "random, as order"),
    ("random_lexical", "random, as lexical"), ("random_both", "random, as both"), ("key_pca_both", "key PCA, as both"),
    ("cov_qk_both", "Cov_q Cov_k, as both"), ("sham_both", "sham"),
)  # fmt: skip
_SHORT = tuple(
    (name, label.removesuffix(", as both"))
    for name, label in _SHOWN
    if name in ("order", "lexical", "both", "random_both", "key_pca_both", "cov_qk_both", "sham_both")
)


@run.drawing
def draw(result: Result) -> Files:
    """The best head in full, with the curve."""
    return draw_full(result, _SHOWN, heads=1)


@run_others.drawing
def draw_others(result: Result) -> Files:
    """Small multiples of the other heads."""
    return draw_multiples(result, _SHORT)
