"""Figure 16: do ranks depend on the number of entities? Two numbers are varied apart.

*Different words* the lexical contrast is fitted on (three pairs in a prompt): if nothing but the
word mattered, its rank could not exceed their number less one. *Pairs in a prompt* (all the words):
what the order contrast depends on. So few words or pairs cap a rank whatever the head does, and
only counts with room are compared. The same curves for a head at chance say what a plateau is
worth. Ranks are of the paper's estimators and of ours.
"""

from __future__ import annotations

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope_papers.figures import REST, legend_below, new_figure
from qkscope_papers.lee2026.language import ESTIMATORS, FigureSession, session_of
from qkscope_papers.registry import Settings, figure
from qkscope_papers.tables import (
    Estimate,
    Files,
    Row,
    column,
    distinct,
    files_of,
    mean,
    model_name,
    over_key_heads,
    pick,
)

_PAIRS = 3  # in a prompt, while the words are varied
_MOST_WORDS = 24  # of the paper's estimator: a few must be left for the copies
_ONE_OF_FIVE = "was a change of 1 at most, which is much of a rank of 1 to 5."
_PANELS = (("words", "lexical"), ("pairs", "lexical"), ("pairs", "order"))


@figure("lee2026", "fig16", "Ranks against the number of entities")
def run(settings: Settings) -> Result:
    """Ranks of the found heads and of the control at every count."""
    session = session_of(settings)
    rows = session.once("entity counts", lambda: _rows(session))
    about = session.about(form=session.form("binding"), pairs=_PAIRS)
    return settings.result(
        _answer(rows),
        {"counts": rows},
        _claims(rows, session.scope.group_size),
        model=session.scope.name,
        about=about,
    )


def _rows(session: FigureSession) -> list[Row]:
    found = session.found("binding")
    work = session.work
    jobs = []
    for lexical in ("same_query", "own_query"):
        contrasts = (
            ["lexical"] if lexical == "own_query" else ["order", "lexical"]
        )  # order is the same in both
        pools = [n for n in work.pools if lexical == "same_query" or n <= _MOST_WORDS]
        jobs += [
            ("words", n, session.binding_task(_PAIRS, pool=n, lexical=lexical), ["lexical"])
            for n in pools
        ]
        jobs += [
            ("pairs", n, session.binding_task(n, lexical=lexical), contrasts) for n in work.entities
        ]
    rows: list[Row] = []
    for varied, count, task, contrasts in jobs:
        fit = session.decompose(
            task, found.all, work.counts, contrasts=contrasts, replicates=1
        )  # ranks alone
        for row in fit.table():
            about = {
                "varied": varied, "count": count, "head": row["head"], "contrast": row["contrast"],
                "is_control": row["head"] == str(found.control), "mean_dominance": row["mean_dominance"],
                "n": work.counts,
            }  # fmt: skip
            ranks = {"paper" if task.asked["lexical"] == "own_query" else "ours": row["rank_99"]}
            if row["contrast"] == "order":
                ranks = {"paper": row["rank_99"], "ours": row["rank_99_centred"]}
            rows += [
                {**about, "estimator": estimator, "rank": rank} for estimator, rank in ranks.items()
            ]
    return rows


def _counts(rows: list[Row]) -> list[int]:
    return sorted(set(column(rows, "count")))


def _change(rows: list[Row], start: int, group_size: int) -> Estimate:
    """Change of the rank from one count to the most, over key heads, as a share of the mean rank."""
    most = _counts(rows)[-1]
    before = {row["head"]: row["rank"] for row in pick(rows, count=start)}
    after = {row["head"]: row["rank"] for row in pick(rows, count=most)}
    change = over_key_heads({head: after[head] - before[head] for head in after}, group_size)
    final = mean(after.values())
    return Estimate(*(value / final for value in change))


def _roomy(rows: list[Row], varied: str, contrast: str) -> int | None:
    """The fewest words or pairs that leave the final rank room (half as much again), none where
    only the most do.
    """
    final = mean(column(pick(rows, count=_counts(rows)[-1]), "rank"))
    capped = (varied, contrast) in (("words", "lexical"), ("pairs", "order"))
    return next((n for n in _counts(rows)[:-1] if not capped or n - 1 >= 1.5 * final), None)


def _settled(rows: list[Row]) -> int:
    """The fewest words or pairs from which on the mean rank changes by 1 at most."""
    ranks = {count: mean(column(pick(rows, count=count), "rank")) for count in _counts(rows)}
    moves = [n for n in ranks if abs(ranks[n] - ranks[max(ranks)]) > 1]
    return min(n for n in ranks if n > max(moves, default=0))


def _answer(rows: list[Row]) -> str:
    parts = []
    for varied, contrast in _PANELS:
        told = []
        for estimator in ESTIMATORS:
            own = pick(
                rows, varied=varied, contrast=contrast, estimator=estimator, is_control=False
            )
            ends = [
                mean(column(pick(own, count=count), "rank"))
                for count in (_counts(own)[0], _counts(own)[-1])
            ]
            told.append(
                f"{ends[0]:.1f} to {ends[1]:.1f} ({estimator}, {_counts(own)[0]} to {_counts(own)[-1]})"
            )
        parts.append(f"{contrast} over {varied} {', '.join(told)}")
    return f"Mean ranks by the 99% rule, from the fewest to the most: {'; '.join(parts)}."


def _claims(rows: list[Row], group_size: int) -> list[Claim]:
    claims = []
    for varied, contrast in _PANELS:
        own = pick(rows, varied=varied, contrast=contrast, estimator="paper", is_control=False)
        counts = _counts(own)
        near = min(counts[:-1], key=lambda n: abs(n - 2 * counts[-1] / 3))
        late = _change(own, near, group_size)
        start = _roomy(own, varied, contrast)
        settled = _settled(own)
        all_along = over_key_heads({}, 1) if start is None else _change(own, start, group_size)
        enough = (
            f"From {settled} {varied} on it changes by 1 at most; Fig. 16 says after enough entities, and does not say "
            "how many."
        )
        claims += [
            Claim(f"the {contrast} rank has stopped growing with the number of {varied} (change from two thirds of the "
                  "most to the most as a share of the rank, mean over key heads, the paper's estimator)",
                  "§F.2, Fig. 16: the effective ranks plateau after enough entities", late.mean, None,
                  "ours <= 0.1",
                  **late.ends, reason="small model", why="The paper's models have 8B and 4B weights.",
                  changed=_ONE_OF_FIVE),
            Claim(f"the {contrast} rank does not depend on the number of {varied} (change from the fewest that leave "
                  "it room to the most as a share of the rank, mean over key heads, the paper's estimator)",
                  "§5.2: the ranks do not appear to depend on the number of entities", all_along.mean, None,
                  "abs(ours) <= 0.1", **all_along.ends, reason="other setting", why=enough,
                  changed=_ONE_OF_FIVE),
        ]  # fmt: skip
    return claims


# ---------------------------------------------------------------------- the drawing

_COLOURS = (
    "#3b6ea8",
    "#d9822b",
    "#5a9367",
    "#8b5fa8",
    "#b5485d",
    "#4f9da6",
    "#8a6d3b",
    "#6b7a8f",
    "#a0a83c",
)


@run.drawing
def draw(result: Result) -> Files:
    """Solid: as the paper estimates it. Dotted: as we do. Grey: a head at chance."""
    rows = [dict(row) for row in result.tables["counts"]]
    heads = distinct(rows, "head")
    control = {row["head"] for row in rows if row["is_control"]}
    figure = new_figure(11.5, 3.9)
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (varied, contrast) in zip(axes, _PANELS, strict=True):
        own = pick(rows, varied=varied, contrast=contrast)
        for i, head in enumerate(heads):
            colour = REST if head in control else _COLOURS[i % len(_COLOURS)]
            name = f"{head} (at chance)" if head in control else head
            for estimator, style, width in (("paper", "o-", 1.5), ("ours", "s:", 1.0)):
                line = sorted(
                    pick(own, head=head, estimator=estimator), key=lambda row: row["count"]
                )
                label = name if estimator == "paper" else None
                axis.plot(
                    column(line, "count"),
                    column(line, "rank"),
                    style,
                    ms=3,
                    lw=width,
                    color=colour,
                    label=label,
                )
        if varied == "words" and own:
            limit = sorted({row["count"] for row in own})
            axis.plot(
                limit,
                [count - 1 for count in limit],
                color="#999",
                lw=0.8,
                ls="--",
                label="words − 1",
            )
            axis.set_ylim(0, max(column(rows, "rank")) + 2)
        axis.set_xticks(sorted({row["count"] for row in own}))
        axis.set_xlabel("different words" if varied == "words" else "pairs in a prompt")
        axis.set_title(
            f"{contrast}, {'3 pairs in a prompt' if varied == 'words' else 'all the words'}"
        )
    axes[0].set_ylabel("rank")
    legend_below(figure, axes[0], 6)
    figure.suptitle(
        f"{model_name(result)}: ranks by the 99% rule; solid, the paper's estimators; dotted, ours",
        fontsize=10,
    )
    return files_of(result, figure)
