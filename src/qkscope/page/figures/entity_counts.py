"""Figure 16: ranks against the number of different words, and of pairs in a prompt."""

from __future__ import annotations

from qkscope.page.figures.captions import model_name
from qkscope.page.figures.style import REST, new_figure, styled, with_page
from qkscope.result import Result

_PANELS = (("words", "lexical"), ("pairs", "lexical"), ("pairs", "order"))
_COLOURS = ("#3b6ea8", "#d9822b", "#5a9367", "#8b5fa8")


def draw(result: Result) -> dict[str, str | bytes]:
    """Solid: the 99% rule. Dotted: components detected. Grey: a head at chance."""
    rows = [dict(row) for row in result.tables["counts"]]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    control = {row["head"] for row in rows if row["is_control"]}
    figure = new_figure(11.5, 3.9)
    with styled():
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
    return with_page(result, {result.experiment.split("/")[1]: figure})
