"""Figure 16: do ranks depend on the number of entities? Two numbers are varied apart.

*Different words* the lexical contrast is fitted on (three pairs in a prompt): if nothing but the word mattered, its
rank could not exceed their number less one. *Pairs in a prompt* (all the words): what the order contrast depends on.
The same curves for a head at chance say what a plateau is worth.
"""

from __future__ import annotations

from qkscope.page.figures import REST, new_figure
from qkscope.papers.lee2026.language import Session, session_of
from qkscope.papers.registry import Settings, figure
from qkscope.papers.tables import Files, Row, column, files_of, model_name, pick
from qkscope.runs.claims import Claim
from qkscope.runs.result import Result

_PAIRS = 3  # in a prompt, while the words are varied
_HEADS = 3


@figure("lee2026", "fig16", "Ranks against the number of entities")
def run(settings: Settings) -> Result:
    """Ranks of the first three found heads and of the control at every count."""
    session = session_of(settings)
    rows = session.once("entity counts", lambda: _rows(session))
    return settings.result(
        answer=_answer(rows),
        tables={"counts": rows},
        claims=_claims(rows),
        model=session.scope.name,
        about=session.about(form=session.form("binding"), pairs=_PAIRS),
    )


def _rows(session: Session) -> list[Row]:
    found, work = session.found("binding"), session.work
    heads = list(dict.fromkeys([*found.heads[:_HEADS], found.control]))
    jobs = [("words", pool, session.binding_task(_PAIRS, pool=pool), ["lexical"]) for pool in work.pools]
    jobs += [("pairs", count, session.binding_task(count), ["order", "lexical"]) for count in work.entities]
    rows: list[Row] = []
    for varied, count, task, contrasts in jobs:
        fit = session.decompose(task, heads, work.counts, contrasts=contrasts, replicates=work.count_replicates)
        for row in fit.table():
            centred = row["center"] == "query"
            rows.append({
                "varied": varied, "count": count, "head": row["head"], "contrast": row["contrast"],
                "is_control": row["head"] == str(found.control), "rank": row["rank"],
                # each rank beside the null of the same matrix: query-centred for order, plain for lexical
                "rank_above_null": row["interaction_rank"] if centred else row["rank_null"],
                "rank_uncentred": row["rank_99"], "mean_dominance": row["mean_dominance"], "n": work.counts,
            })  # fmt: skip
    return rows


def _mean(rows: list[Row], varied: str, contrast: str, which: int, control: bool = False, of: str = "rank") -> float:
    """Mean rank over heads at one of the counts (0: fewest, −1: most)."""
    counts = sorted({row["count"] for row in rows if row["varied"] == varied})
    own = column(pick(rows, varied=varied, contrast=contrast, count=counts[which], is_control=control), of)
    return sum(own) / max(len(own), 1)


def _answer(rows: list[Row]) -> str:
    words = sorted({row["count"] for row in rows if row["varied"] == "words"})
    pairs = sorted({row["count"] for row in rows if row["varied"] == "pairs"})
    return (
        f"Mean ranks by the 99% rule: lexical {_mean(rows, 'words', 'lexical', 0):.1f} with {words[0]} different words "
        f"and {_mean(rows, 'words', 'lexical', -1):.1f} with {words[-1]}; with {pairs[0]} and "
        f"{pairs[-1]} pairs in a prompt lexical {_mean(rows, 'pairs', 'lexical', 0):.1f} and "
        f"{_mean(rows, 'pairs', 'lexical', -1):.1f}, order {_mean(rows, 'pairs', 'order', 0):.1f} and "
        f"{_mean(rows, 'pairs', 'order', -1):.1f}."
    )


def _claims(rows: list[Row]) -> list[Claim]:
    claims = []
    for varied, contrast in (("words", "lexical"), ("pairs", "lexical"), ("pairs", "order")):
        most, before = (_mean(rows, varied, contrast, i) for i in (-1, -2))
        claims.append(Claim(f"the {contrast} rank has stopped growing with the number of {varied} (at the most; "
                            "control: at the next fewer)", "plateaus", most, before,
                            "ours <= control + 1"))  # fmt: skip
        claims.append(Claim(f"the {contrast} rank does not depend on the number of {varied} (at the most; control: at "
                            "the fewest)", "do not appear to depend", most, _mean(rows, varied, contrast, 0),
                            "abs(ours - control) <= 1"))  # fmt: skip
    claims.append(Claim("where the lexical rank ends tells binding heads from a head at chance (most words; "
                        "control: that head)", "implied", _mean(rows, "words", "lexical", -1),
                        _mean(rows, "words", "lexical", -1, control=True), "abs(ours - control) >= 2"))  # fmt: skip
    return claims


# ---------------------------------------------------------------------- the drawing

_PANELS = (("words", "lexical"), ("pairs", "lexical"), ("pairs", "order"))
_COLOURS = ("#3b6ea8", "#d9822b", "#5a9367", "#8b5fa8")


@run.drawing
def draw(result: Result) -> Files:
    """Solid: the 99% rule. Dotted: components detected. Grey: a head at chance."""
    rows = [dict(row) for row in result.tables["counts"]]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    control = {row["head"] for row in rows if row["is_control"]}
    figure = new_figure(11.5, 3.9)
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (varied, contrast) in zip(axes, _PANELS, strict=True):
        own = [row for row in rows if (row["varied"], row["contrast"]) == (varied, contrast)]
        for i, head in enumerate(heads):
            line = sorted((row for row in own if row["head"] == head), key=lambda row: row["count"])
            colour = REST if head in control else _COLOURS[i % len(_COLOURS)]
            counts = [row["count"] for row in line]
            name = f"{head} (at chance)" if head in control else head
            axis.plot(counts, [row["rank"] for row in line], "o-", ms=4, lw=1.5, color=colour, label=name)
            axis.plot(counts, [row["rank_above_null"] for row in line], "s:", ms=3, lw=1, color=colour, alpha=0.8)
        if varied == "words" and own:
            limit = sorted({row["count"] for row in own})
            axis.plot(limit, [count - 1 for count in limit], color="#999", lw=0.8, ls="--", label="words − 1")
            axis.set_ylim(0, max(max(row["rank"], row["rank_above_null"]) for row in rows) + 2)
        axis.set_xticks(sorted({row["count"] for row in own}))
        axis.set_xlabel("different words" if varied == "words" else "pairs in a prompt")
        axis.set_title(f"{contrast}, {'3 pairs in a prompt' if varied == 'words' else 'all the words'}")
    axes[0].set_ylabel("rank")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(f"{model_name(result)}: solid, the 99% rule; dotted, components detected", fontsize=10)
    return files_of(result, figure)
