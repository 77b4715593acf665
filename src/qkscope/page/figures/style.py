"""One look for all figures, and the files a drawing gives: PNG for pages, PDF for papers.

Figures are made without pyplot's global state, so drawing never opens a window or leaks a figure.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from qkscope.page.report import report_html
from qkscope.runs.result import Result

logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells of every glyph it packs into a PDF
logging.getLogger("matplotlib").setLevel(logging.WARNING)

ORIGINAL, TARGET, REST, INK = "#3b6ea8", "#d9822b", "#b5bac3", "#22262e"
_STYLE: Any = {
    "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#666b75", "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "font.family": "sans-serif", "figure.facecolor": "white",
}  # fmt: skip


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """An empty figure in our style (inches)."""
    with matplotlib.rc_context(_STYLE):
        return Figure(figsize=(width, height), layout="constrained", **options)


def styled() -> Any:
    """Context in which axes take our style."""
    return matplotlib.rc_context(_STYLE)


def figure_files(figures: Mapping[str, Figure]) -> dict[str, bytes]:
    """``figures/NAME.png`` and ``.pdf`` of each; no dates inside, so a rerun gives the same bytes."""
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
