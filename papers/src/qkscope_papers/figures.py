"""Figures of the docs and of papers: one look, one colour for each name.

Pages get PNG, papers PDF. Charts that a page draws are drawn by its scripts alone (``static/``); a
figure is what no page shows. Figures are made without pyplot's global state, so drawing never opens
a window or leaks a figure.

Colours come from the table in ``static/colours.js``, which draws the page's charts: hues for white
paper and for dark, chosen so that colour-blind readers tell them apart, and the names that have one
of their own. Others take what is left.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from qkscope.results.result import Result
from qkscope.show.page import asset, report_html

logging.getLogger("fontTools").setLevel(
    logging.WARNING
)  # it tells of every glyph it packs into a PDF
logging.getLogger("matplotlib").setLevel(logging.WARNING)


@cache
def palette() -> dict[str, Any]:
    """The table: ``hues`` (on white, on dark), ``named``, ``others`` and ``spare`` for other names,
    ``lines``.
    """
    table: dict[str, Any] = json.loads(asset("colours.js").split("/* table */")[1])
    return table


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """The colour of each name on white paper.

    >>> colours_of(["order", "lexical"])
    {'order': '#1FA1AD', 'lexical': '#A845B8'}
    """
    table = palette()
    spare = itertools.cycle(table["others"])
    return {name: table["hues"][table["named"].get(name) or next(spare)][0] for name in names}


def line_of(name: str) -> str:
    """How its line is drawn: baselines are broken."""
    return str(palette()["lines"].get(name, "solid"))


ORIGINAL = palette()["hues"]["blue"][0]
TARGET = palette()["hues"]["orange"][0]
REST = palette()["hues"]["pale"][0]
INK = palette()["hues"]["ink"][0]
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666b75",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.family": "sans-serif",
    "figure.facecolor": "white",
}


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """An empty figure in our style (inches)."""
    with matplotlib.rc_context(_STYLE):
        return Figure(figsize=(width, height), layout="constrained", **options)


def styled() -> Any:
    """Context in which axes take our style."""
    return matplotlib.rc_context(_STYLE)


def shades(count: int, most: float = 0.85) -> list[Any]:
    """Colours for ordered lines, dark to light."""
    return [matplotlib.colormaps["viridis"](i / max(count - 1, 1) * most) for i in range(count)]


def legend_below(figure: Figure, axis: Any, columns: int, **look: Any) -> None:
    """One legend under all panels: that of one of them."""
    usual: Any = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(*axis.get_legend_handles_labels(), **{**usual, **look})


def paired_bars(axis: Any, first: Sequence[float], then: Sequence[float], key: str = "") -> None:
    """Two bars at each place: of the ``key`` that is right, and of the target; with names where it
    has one.
    """
    for shift, values, colour, name in (
        (-0.2, first, ORIGINAL, key),
        (0.2, then, TARGET, "target"),
    ):
        places = [x + shift for x in range(len(values))]
        label = f"on the {name} key" if key else None
        axis.bar(places, values, 0.38, color=colour, label=label)


def figure_files(figures: Mapping[str, Figure]) -> dict[str, bytes]:
    """``figures/NAME.png`` and ``.pdf`` of each; no dates inside: a rerun gives the same bytes."""
    files = {}
    for name, figure in figures.items():
        for kind, options in (("png", {"dpi": 130}), ("pdf", {"metadata": {"CreationDate": None}})):
            buffer = io.BytesIO()
            with styled():
                figure.savefig(buffer, format=kind, **options)
            files[f"figures/{name}.{kind}"] = buffer.getvalue()
    return files


def with_page(result: Result, figures: Mapping[str, Figure]) -> dict[str, str | bytes]:
    """The figures' files, and the page that shows them beside what can be touched."""
    files = figure_files(figures)
    pictures = {name: files[f"figures/{name}.png"] for name in figures}
    return {**files, "report.html": report_html([result], pictures)}
