"""Figure 10: the logits of one prompt's tokens, split among order, lexical and the rest; and the same over prompts."""

from __future__ import annotations

from matplotlib.axes import Axes

from qkscope.page.figures.captions import model_name
from qkscope.page.figures.style import INK, ORIGINAL, TARGET, new_figure, styled, with_page
from qkscope.result import Result

_PARTS = (("order", ORIGINAL), ("lexical", TARGET), ("residual", "#5a9367"))


def draw(result: Result) -> dict[str, str | bytes]:
    """Bars per token above, attention below; shares over held-out prompts at the right."""
    rows = [dict(row) for row in result.tables["tokens"]]
    # the first token is a sink whose logit dwarfs the others; the page's table has it
    rows = rows[1:] if len(rows) > 2 else rows
    figure = new_figure(max(9.0, 0.19 * len(rows) + 3.6), 4.9)
    with styled():
        axes = figure.subplots(2, 2, width_ratios=[max(6.0, 0.19 * len(rows)), 2.6], height_ratios=[3, 1])
        parts, attention = axes[0][0], axes[1][0]
        places = range(len(rows))
        for i, (name, colour) in enumerate(_PARTS):
            parts.bar([x + (i - 1) * 0.27 for x in places], [row[name] for row in rows], 0.26, color=colour, label=name)
        parts.plot(places, [row["logit"] for row in rows], "_", color=INK, ms=7, label="logit")
        parts.axhline(0, color=INK, lw=0.6)
        parts.set_ylabel("logit")
        parts.set_xticks([])
        parts.legend(frameon=False, ncols=4, fontsize=8, loc="best")
        head = result.tables["prompt"][0]["head"]
        parts.set_title(f"{model_name(result)} {head}: logits of one held-out prompt, as its last token sees them")
        attention.bar(places, [row["attention"] for row in rows], 0.7, color="#8a919e")
        attention.set_ylabel("attention")
        attention.set_xticks(list(places), [_shown(row["token"]) for row in rows], rotation=90, fontsize=6.5)
        for axis in (parts, attention):
            axis.set_xlim(-0.8, len(rows) - 0.2)
        _shares(axes[0][1], result)
        axes[1][1].set_axis_off()
    return with_page(result, {result.experiment.split("/")[1]: figure})


def _shown(token: str) -> str:
    return token.replace("\n", "⏎").strip() or "·"


def _shares(axis: Axes, result: Result) -> None:
    rows = [dict(row) for row in result.tables["shares"]]
    bottom = [0.0] * len(rows)
    for name, colour in _PARTS:
        values = [row[name] for row in rows]
        axis.bar(range(len(rows)), values, 0.7, bottom=bottom, color=colour)
        for x, (value, base) in enumerate(zip(values, bottom, strict=True)):
            if abs(value) >= 0.06:
                axis.text(x, base + value / 2, f"{value:.0%}", ha="center", va="center", fontsize=7, color="white")
        bottom = [base + value for base, value in zip(bottom, values, strict=True)]
    axis.set_xticks(range(len(rows)), [row["split"].replace(" ", "\n") for row in rows], fontsize=7.5)
    axis.set_title(f"share of the boxes' logits,\n{rows[0]['n']} prompts")
    axis.set_yticks([])
