"""Figures 9, 18 and 20: swap order, lexical and both features between the right box and another.

One table serves all found heads: figures 9 and 20 tell of the best, figure 18 of the others. Each
feature is estimated as the paper does (tables ``paper_…``) and as we do; what the paper says is
judged by the paper's. Beside the swaps stand their oblique versions, random subspaces, key PCA,
``Cov_q Cov_k`` and a sham; the curve over the number of dimensions; and, from the default preset
on, what the model answers when the swap is written into its heads.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from qkscope.findings.fit import Fit
from qkscope.results.claims import Claim, rule_verdict
from qkscope.results.result import Result
from qkscope.sums.bases import energy_rank
from qkscope.verbs.swap.swap import CURVE_SIZES, swap
from qkscope_papers.lee2026.language import (
    ESTIMATORS,
    SECOND,
    THRESHOLD,
    Estimator,
    FigureSession,
    HeadChoice,
    session_of,
)
from qkscope_papers.lee2026.swap_plots import draw_full, draw_multiples
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import (
    Estimate,
    Files,
    Row,
    column,
    mean,
    over_key_heads,
    over_runs,
    pick,
)

Conditions = dict[str, Row]  # rows of one head and estimator
_SMALL = 4  # dimensions at which the curve is compared
_WAS = (
    "was ours <= 0.25 and control >= 0.5 of the attention left on the right box: at a start of .47 that cannot be. Now "
    "the share of both boxes' attention that changes sides."
)
_LITTLE = ("small model", "The paper's models have 8B and 4B weights.")
_OTHER = (
    "other setting",
    "The paper's second model is Qwen3-4B; this one is small, asked with lists or sentences.",
)
_MEDIAN = "Was the median of the heads, without an interval."
_MOVES = 0.1  # of the attention, at least, where a random shift is asked beside it
_TOGETHER: dict[Estimator, str] = {"paper": "both_summed", "ours": "both"}


@figure("lee2026", "fig9", "Swapping order and lexical features")
@figure(
    "lee2026",
    "fig20",
    "Swapping order and lexical, second model or form",
    model=SECOND,
    second=True,
)
def run(settings: Settings, second: bool = False) -> Result:
    """Swaps at the best of the found heads."""
    session = session_of(settings)
    form = second and session.embedded  # any other model is the second model itself
    found = session.found("binding", form)
    tables = _swapped(session, form)
    answer = _answer(tables, found, session.form("binding", form))
    claims = _claims(session, found, tables, second)
    return settings.result(
        answer, tables, claims, model=session.scope.name, about=_about(session, found, form)
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
    claims = _other_claims(session, tables, shown)
    about = _about(session, found, False)
    return settings.result(
        _other_answer(tables, shown), tables, claims, model=session.scope.name, about=about
    )


def _about(session: FigureSession, found: HeadChoice, second: bool) -> dict[str, Any]:
    return session.about(
        form=session.form("binding", second), control=str(found.control), reached=found.reached
    )


def _swapped(session: FigureSession, second: bool) -> dict[str, list[Row]]:
    return session.once(("swaps", "binding", second), lambda: _tables(session, second))


def _tables(session: FigureSession, second: bool) -> dict[str, list[Row]]:
    found = session.found("binding", second)
    work = session.work
    units = session.binding_task(second=second).test(work.test)
    sizes = [k for k in CURVE_SIZES if k <= session.scope.d_head]
    options: Any = {"batch_size": work.batch_size, "seed": session.seed}
    tables: dict[str, list[Row]] = {}
    for estimator in ("ours", "paper"):
        fit = session.binding_fit(estimator, second)
        swaps = swap(
            session.scope, units, fit, found.heads, sizes=sizes, draws=work.draws, **options
        )
        ranks = [
            {
                **row,
                "is_control": row["head"] == str(found.control),
                "rank_norm": _norm_rank(fit, row),
            }
            for row in fit.table()
        ]
        made = {**swaps.tables, "ranks": ranks}
        tables |= {
            _named(name, estimator): [dict(row) for row in rows] for name, rows in made.items()
        }
    tables["heads"] = [found.row(head) for head in found.all]
    if work.downstream:
        chosen = units[: work.downstream]
        fit = session.fit("binding", second)
        groups = [found.heads] if len(found.heads) == 1 else [found.heads[:1], found.heads]
        patched = [
            swap(session.scope, chosen, fit, heads, downstream=True, **options) for heads in groups
        ]
        tables["downstream"] = [dict(row) for each in patched for row in each.tables["downstream"]]
    return tables


def _norm_rank(fit: Fit, row: Row) -> int:
    """The rank that holds 99% of the norm, as the authors' slides word it: not squared."""
    return int(energy_rank(fit[row["contrast"], row["head"]].S, 0.99**2))


def _named(table: str, estimator: Estimator) -> str:
    return table if estimator == "ours" else f"paper_{table}"


def _of(tables: dict[str, list[Row]], head: str, estimator: Estimator) -> Conditions:
    return {
        row["condition"]: row for row in tables[_named("swap", estimator)] if row["head"] == head
    }


def _more(
    tables: dict[str, list[Row]], head: str, estimator: Estimator, one: str, other: str
) -> Estimate:
    """How much more one condition shifts than another."""
    rows = pick(tables[_named("paired", estimator)], head=head, one=one, other=other)
    return (
        Estimate(*(rows[0][name] for name in ("difference", "low", "high")))
        if rows
        else over_runs([])
    )


def _over_alone(
    tables: dict[str, list[Row]], head: str, estimator: Estimator
) -> tuple[Estimate, float]:
    """Both over the larger of the two alone, and what random subspaces of their ranks gain so."""
    at = _of(tables, head, estimator)
    larger = max(("order", "lexical"), key=lambda name: float(at[name]["shift"]))
    random = float(at["random_both"]["shift"] - at[f"random_{larger}"]["shift"])
    return _more(tables, head, estimator, _TOGETHER[estimator], larger), random


def _shift(row: Row) -> Estimate:
    return Estimate(row["shift"], row["shift_low"], row["shift_high"])


def _gain(row: Row) -> Estimate:
    return Estimate(row["gain"], row["gain_low"], row["gain_high"])


def _pair(row: Row) -> str:
    return f"{row['orig_after']:.2f}/{row['target_after']:.2f}"


def _answer(tables: dict[str, list[Row]], found: HeadChoice, form: str) -> str:
    head = str(found.heads[0])
    theirs, at = (_of(tables, head, estimator) for estimator in ESTIMATORS)
    both = at["both"]
    looked = (
        f"{len(found.heads)} of them were swapped"
        if found.reached
        else "the best three were swapped all the same"
    )
    text = (
        f"{found.reached} heads attend to the right box most of all tokens in {THRESHOLD:.0%} of prompts; {looked}. "
        f"At {head} ({form} form) swapping both takes attention on the right and the target box from "
        f"{both['orig_before']:.2f}/{both['target_before']:.2f} to {_pair(theirs['both_summed'])} as the paper "
        f"estimates them (order alone {_pair(theirs['order'])}, lexical alone {_pair(theirs['lexical'])}) and to "
        f"{_pair(both)} as we do (order {_pair(at['order'])}, lexical {_pair(at['lexical'])}); of our size, random "
        f"{_pair(at['random_both'])}, key PCA {_pair(at['key_pca_both'])}, Cov_q Cov_k {_pair(at['cov_qk_both'])}."
    )
    for row in pick(tables.get("downstream", []), condition="both")[-1:]:
        text += (
            f" Written into {row['heads'].count(',') + 1} heads, the model's answer goes from "
            f"{row['accuracy_before']:.0%} right to {row['accuracy_after']:.0%}, and to the target from "
            f"{row['target_before']:.0%} to {row['target_after']:.0%}."
        )
    return text


def _claims(
    session: FigureSession, found: HeadChoice, tables: dict[str, list[Row]], second: bool
) -> list[Claim]:
    head = str(found.heads[0])
    passing = found.share_that_pass()
    said = (
        "implied by §5.2, Fig. 20" if second else "§5.2, Fig. 9"
    )  # of Qwen the paper shows the figure alone
    setting = _OTHER if second else _LITTLE
    ours = _swap_claims(tables, head, "ours", "")
    theirs = [
        replace(claim, **_unlike(setting, other.holds))
        for claim, other in zip(_swap_claims(tables, head, "paper", said), ours, strict=True)
    ]
    claims = [
        Claim("as large a share of heads as in the paper attends most of all to the right box in 30% of prompts "
              "(interval: heads of which it is certain, or possible, corrected for their number; control: 9 of the "
              "paper's 1,024)", f"{said}: 9 heads, with at least 30% accuracy", passing.mean, 9 / 1024,
              "ours >= control", **passing.ends, reason=setting[0], why=setting[1],
              changed="was one head, which is enough of no number."),
        *theirs,
        _negligible(_of(tables, head, "paper"), said, session.scope.d_head, setting[0]),
        *ours,
        *_control_claims(tables, head),
        *_rank_claims(tables, said, session.scope.d_head, session.scope.group_size),
    ]  # fmt: skip
    for row in pick(tables.get("downstream", []), condition="both")[-1:]:
        other = pick(tables["downstream"], condition="random_both", heads=row["heads"])[0]
        claims.append(Claim("written into all found heads, the swap moves the answer (fall of the logit difference; "
                            "control: random)", "", row["fell"], other["fell"], "ours > 2 * abs(control)", row["low"],
                            row["high"]))  # fmt: skip
    return claims


_LARGER = "ours > max(control, 0)"
_WAS_LARGER = "was ours > 0, which two random subspaces pass: together they are larger than one."
_NEGLIGIBLE = "ours < max(0.05, 0.1 * control)"
_WAS_TENTH = (
    "was a tenth of what both move alone, which fails beside a small shift, and of the worst head."
)
_WAS_LENIENT = "was ours > 0, which a hundredth of the attention passed."


def _swap_claims(
    tables: dict[str, list[Row]], head: str, estimator: Estimator, said: str
) -> list[Claim]:
    """What the paper says of its swaps, with the paper's estimators; the same with ours is a claim
    of ours.
    """
    at = _of(tables, head, estimator)
    whose = "the paper's" if estimator == "paper" else "our"
    both = at[_TOGETHER[estimator]]
    random = at["random_both"]
    moved = _shift(both)
    alone, random_gain = _over_alone(tables, head, estimator)
    order_rank = at["order"]["rank"]
    faint = f"At {head} order has rank {order_rank}, where the paper's usually has 2 or 3."
    paper = {
        "both": "intervening on both subspaces shifts the majority of the attention",
        "alone": "each individual subspace can shift some of the attention",
        "larger": "intervening on both yields a larger shift",
    }
    paper = {what: f"{said}: {says}" if said else "" for what, says in paper.items()}
    was: dict[str, Any] = {"changed": _WAS} if said else {}
    return [
        Claim(f"swapping both moves the majority of the attention (shift, {whose} estimators; control: random)",
              paper["both"], moved.mean, random["shift"], "ours > 0.5", **moved.ends, **was),
        *(Claim(f"{name} alone moves some attention (shift over random, {whose} estimator)", paper["alone"],
                at[name]["gain"], None, "ours > 0.05", **_gain(at[name]).ends,
                reason="small model", why=faint, changed=_WAS_LENIENT)
          for name in ("order", "lexical")),
        Claim(f"both move more than either alone, by more than random subspaces gain (difference of shifts, {whose} "
              "estimators; control: random)", paper["larger"], alone.mean, random_gain, _LARGER, **alone.ends,
              changed=_WAS_LARGER),
    ]  # fmt: skip


def _unlike(setting: tuple[str, str], ours: bool | None) -> dict[str, Any]:
    """Why the paper's estimators may fail where ours hold, tie or fail; where ours hold, it is not
    the model.
    """
    found = {True: "are enough", None: "leave it open", False: "do not do it either"}[ours]
    reason = "other setting" if ours else setting[0]
    return {"reason": reason, "why": f"{setting[1]} At the same head our estimators {found}."}


def _negligible(at: Conditions, said: str, d_head: int, reason: str) -> Claim:
    random = at["random_both"]
    both = at["both_summed"]
    return Claim("random subspaces have a negligible effect (shift; control: swapping both)",
                 f"{said}: intervening on random subspaces of the same ranks has negligible effects",
                 random["shift"], both["shift"], _NEGLIGIBLE, **_shift(random).ends, reason=reason,
                 changed=_WAS_TENTH, why=_why_not_negligible(random["rank"] / d_head))  # fmt: skip


def _why_not_negligible(share: float) -> str:
    return (
        f"The random dimensions are {share:.0%} of this head; the paper's 12 of 128 are 9%. The paper gives no "
        "number for negligible: a tenth of what both move, or .05 of the attention, is ours."
    )


def _negligible_over(cells: list[Conditions], said: str, d_head: int, group_size: int) -> Claim:
    """The mean over heads at which both move a tenth of the attention; over all where none does."""
    moved = [cell for cell in cells if cell["both_summed"]["shift"] > _MOVES] or cells
    random = over_key_heads(
        {cell["random_both"]["head"]: cell["random_both"]["shift"] for cell in moved}, group_size
    )
    both = mean(cell["both_summed"]["shift"] for cell in moved)
    share = mean(cell["random_both"]["rank"] for cell in moved) / d_head
    return Claim(f"random subspaces have a negligible effect (shift, mean over the {len(moved)} heads at which both "
                 "move most; control: swapping both)",
                 f"{said}: intervening on random subspaces of the same ranks has negligible effects", random.mean,
                 both, _NEGLIGIBLE, **random.ends, reason="small model", why=_why_not_negligible(share),
                 changed=_WAS_TENTH)  # fmt: skip


def _control_claims(tables: dict[str, list[Row]], head: str) -> list[Claim]:
    at = _of(tables, head, "ours")
    both = at["both"]
    sham: Row = at.get("sham_both") or dict.fromkeys(("left", "left_low", "left_high"))
    more = _more(tables, head, "ours", "both_summed", "both")
    summed = Estimate(-more.mean, -more.high, -more.low)
    small = _more(tables, head, "ours", f"lexical, {_SMALL}", f"key_pca, {_SMALL}")
    claims = [
        Claim("a sham swap of two other boxes leaves the right one alone (attention that leaves it; control: swapping "
              "both)", "", sham["left"], both["left"], "abs(ours) < 0.1 * control", sham["left_low"],
              sham["left_high"]),
        Claim("adding projectors, as the authors' scripts do, moves less than one joint basis (difference of shifts)",
              "", summed.mean, None, "ours > 0", **summed.ends),
        Claim(f"{_SMALL} lexical dimensions move more than {_SMALL} of key PCA (difference of shifts)", "", small.mean,
              None, "ours > 0", **small.ends),
    ]  # fmt: skip
    for kind, name in (("key_pca", "key PCA"), ("cov_qk", "Cov_q Cov_k")):
        more = _more(tables, head, "ours", "both", f"{kind}_both")
        claims.append(Claim(f"both move more than {name} of the same size (difference of shifts)", "", more.mean, None,
                            "ours > 0", **more.ends))  # fmt: skip
    return claims


def _rank_claims(
    tables: dict[str, list[Row]], said: str, d_head: int, group_size: int
) -> list[Claim]:
    def of(estimator: Estimator, contrast: str, control: bool = False) -> Estimate:
        own = pick(tables[_named("ranks", estimator)], contrast=contrast, is_control=control)
        return over_key_heads({row["head"]: row["rank"] for row in own}, group_size)

    order = pick(tables["paper_ranks"], contrast="order", is_control=False)
    dominance = median(column(order, "mean_dominance"))
    words = tables["paper_ranks"][-1]["units"]
    lexical = of("paper", "lexical")
    narrow = f"heads are {d_head} wide instead of 128, and " if d_head < 128 else ""
    there = of("paper", "lexical", True).mean
    uncentred = of("paper", "order")
    centred = of("ours", "order")
    untold: dict[str, Any] = {"why": "A rank belongs to the contrast as much as to the head."}
    if lexical.mean < 9:
        untold = {
            "reason": "small model",
            "why": "The rank of 9 or 10 that should tell them apart is not there.",
        }
    return [
        Claim("order has rank 2 or 3 (99% rule, uncentred as in the paper; mean over key heads; control: a head at "
              "chance)", f"{said}: usually rank 2 or 3", uncentred.mean, of("paper", "order", True).mean,
              "2 <= ours <= 3", **uncentred.ends, reason="small model", why="With one word asked for, queries of these "
              f"heads hardly vary with its place: ΔC is their mean times a difference of means (mean dominance "
              f"{dominance:.3f}).",
              changed=f"was the query-centred rank, which is ours and not the paper's. {_MEDIAN}"),
        Claim("lexical has rank 9 or 10 (99% rule, the paper's estimator; mean over key heads; control: a head at "
              "chance)", f"{said}: usually rank 9 or 10", lexical.mean, there, "9 <= ours <= 10",
              **lexical.ends, reason="small model", why="The paper's models have 8B and 4B weights; here "
              f"{narrow}{words} words are asked for.",
              changed=f"was the rank of the same-query contrast at the best head. {_MEDIAN}"),
        *(_wording_claim(tables, contrast, group_size) for contrast in ("order", "lexical")),
        Claim("query-centred, order has rank 2 or 3 (mean over key heads; control: a head at chance)", "",
              centred.mean, of("ours", "order", True).mean, "2 <= ours <= 3", **centred.ends, changed=_MEDIAN),
        Claim("the lexical rank tells a binding head from one that does not bind (the paper's estimator; control: its "
              "rank there)", "implied by §5.2", lexical.mean, there, "abs(ours - control) >= 2", **lexical.ends,
              **untold, changed=_MEDIAN),
    ]  # fmt: skip


def _wording_claim(tables: dict[str, list[Row]], contrast: str, group_size: int) -> Claim:
    """The paper's rank by 99% of the squared norm beside that by 99% of the norm, as slides have it."""
    own = pick(tables["paper_ranks"], contrast=contrast, is_control=False)
    by_norm = over_key_heads({row["head"]: row["rank_norm"] for row in own}, group_size)
    squared = over_key_heads({row["head"]: row["rank"] for row in own}, group_size)
    return Claim(f"{contrast}: 99% of the norm, as the slides say, or of its square is the same rank within one (not "
                 "squared, mean over key heads, the paper's estimator; control: squared)", "", by_norm.mean,
                 squared.mean, "abs(ours - control) <= 1", **by_norm.ends)  # fmt: skip


def _other_answer(tables: dict[str, list[Row]], heads: list[str]) -> str:
    parts = []
    for head in heads:
        theirs, at = (_of(tables, head, estimator) for estimator in ESTIMATORS)
        start = f"{at['both']['orig_before']:.2f}/{at['both']['target_before']:.2f}"
        parts.append(
            f"{head} {start} to {_pair(theirs['both_summed'])} as in the paper, {_pair(at['both'])} as we do (random "
            f"{_pair(at['random_both'])})"
        )
    return "Swapping both at the other heads: " + "; ".join(parts) + "."


def _above_0(found: Estimate) -> bool | None:
    return rule_verdict("ours > 0", found.mean, None, found.low, found.high)


def _other_claims(
    session: FigureSession, tables: dict[str, list[Row]], heads: list[str]
) -> list[Claim]:
    """Of the head that is closest to failing; its interval pays for its having been chosen."""
    count = len(heads)
    cells = [_of(tables, head, "paper") for head in heads]
    weakest = min((cell["both_summed"] for cell in cells), key=lambda row: float(row["gain_low"]))
    more = _gain(weakest).among(count)
    ours_more = _gain(_of(tables, weakest["head"], "ours")["both"]).among(count)
    gains = {head: _over_alone(tables, head, "paper") for head in heads}
    closest = min(heads, key=lambda head: gains[head][0].mean - gains[head][1])
    random_gain = gains[closest][1]
    alone, ours_alone = (
        _over_alone(tables, closest, estimator)[0].among(count) for estimator in ESTIMATORS
    )
    first = _unlike(_LITTLE, _above_0(ours_more))
    second = _unlike(_LITTLE, _above_0(ours_alone))
    pca = min(heads, key=lambda head: _more(tables, head, "ours", "both", "key_pca_both").mean)
    over_pca = _more(tables, pca, "ours", "both", "key_pca_both").among(count)
    return [
        Claim("at every head both move more than random (shift over random, weakest head, the paper's estimators)",
              "§F.2, Fig. 18: causal intervention results on additional heads", more.mean, None, "ours > 0",
              **more.ends, **first),
        Claim("at every head both move more than either alone, by more than random subspaces gain (difference of "
              "shifts, closest head, the paper's estimators; control: random)",
              "§5.2, Fig. 18: intervening on both yields a larger shift", alone.mean, random_gain, _LARGER,
              **alone.ends, **second, changed=_WAS_LARGER),
        _negligible_over(cells, "§5.2, Fig. 18", session.scope.d_head, session.scope.group_size),
        Claim("at every head both move more than key PCA of the same size (difference of shifts, closest head, our "
              "estimators)", "", over_pca.mean, None, "ours > 0", **over_pca.ends),
    ]  # fmt: skip


# ---------------------------------------------------------------------- the drawing

_PAPER_BARS = (
    ("paper: order", "order, as in the paper"), ("paper: lexical", "lexical, as in the paper"),
    ("paper: both_summed", "both, as in the paper"), ("paper: random_both", "random, as in the paper"),
)  # fmt: skip
_SHOWN = (
    ("order", "order"), ("order_oblique", "order, oblique"),
    ("lexical", "lexical"), ("lexical_oblique", "lexical, oblique"), ("both", "both"), ("both_summed", "both, summed"),
    ("random_order", "random, as order"), ("random_lexical", "random, as lexical"),
    ("random_both", "random, as both"), ("key_pca_both", "key PCA, as both"),
    ("cov_qk_both", "Cov_q Cov_k, as both"), ("sham_both", "sham"),
)  # fmt: skip
_SHORT = tuple(
    (name, label.removesuffix(", as both"))
    for name, label in (*_PAPER_BARS[2:3], *_SHOWN)
    if "oblique" not in name and name not in ("random_order", "random_lexical")
)


@run.drawing
def draw(result: Result) -> Files:
    """The best head in full, the paper's four bars first and apart, with the curve."""
    return draw_full(result, _SHOWN, heads=1, paper=_PAPER_BARS)


@run_others.drawing
def draw_others(result: Result) -> Files:
    """Small multiples of the other heads."""
    return draw_multiples(result, _SHORT)
