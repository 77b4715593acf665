"""A table as lines of text, as wide as the place it is printed in: texts are shortened at a word, numbers never."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len

_GAP = "  "
_SHORTEST = 12  # what a text keeps before a column is left out for want of room


def fitted(headings: list[str], cells: list[list[str]], numeric: list[bool], width: int) -> list[str]:
    r"""Lines of at most ``width``: texts give way first, the widest before others, then the last columns.

    >>> print(*fitted(["claim", "ours"], [["two of them move more than one", "0.5"]], [False, True], 24), sep="\n")
    claim               ours
    ──────────────────  ────
    two of them move …   0.5
    """
    while True:
        widths = _widths(headings, cells)
        least = [
            max(cell_len(heading), wide if number else min(wide, _SHORTEST))
            for heading, wide, number in zip(headings, widths, numeric, strict=True)
        ]
        while _total(widths) > width and widths != least:
            widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=widths.__getitem__)
            widths[widest] -= 1
        if _total(widths) <= width or len(headings) == 1:
            return _lines(headings, cells, numeric, widths)
        headings, numeric, cells = headings[:-1], numeric[:-1], [row[:-1] for row in cells]


def entire(headings: list[str], cells: list[list[str]], numeric: list[bool], width: int | None) -> list[str]:
    """Every column in full: one below the other where they do not stand side by side, the first ones repeated."""
    widths = _widths(headings, cells)
    lines: list[str] = []
    for group in _groups(widths, numeric, width):
        lines += [] if not lines else [""]
        lines += _lines(
            [headings[i] for i in group],
            [[row[i] for i in group] for row in cells],
            [numeric[i] for i in group],
            [widths[i] for i in group],
        )
    return lines


def shorten(text: str, width: int) -> str:
    """The text, or as many of its words as fit, with an ellipsis.

    >>> shorten("the token before it", 12), shorten("L18H6,L17H5,L3H1", 12), shorten("unbelievable", 8)
    ('the token …', 'L18H6,L17H5…', 'unbelie…')
    """
    if cell_len(text) <= width:
        return text
    cut = text
    while cell_len(cut) > width - 1:
        cut = cut[:-1]
    words = re.match(r".*[\s,;/]", cut)
    if words and words[0].strip() and not re.match(r"[\s,;/]", text[len(cut) :]):  # else it ends with a word
        cut = words[0]
    return cut.rstrip(",;/") + "…"


def _widths(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(headings, *cells, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _groups(widths: list[int], numeric: list[bool], width: int | None) -> Iterator[list[int]]:
    """Columns side by side, as many as fit; those before the first number (two at most) stand in each group."""
    if width is None or _total(widths) <= width:
        yield list(range(len(widths)))
        return
    named = min(2, numeric.index(True) if True in numeric else 1, len(widths) - 1)
    names = list(range(named))
    group = names
    for i in range(named, len(widths)):
        if len(group) > named and _total([widths[j] for j in [*group, i]]) > width:
            yield group
            group = names
        group = [*group, i]
    yield group


def _lines(headings: list[str], cells: list[list[str]], numeric: list[bool], widths: list[int]) -> list[str]:
    short = [[shorten(text, wide) for text, wide in zip(row, widths, strict=True)] for row in cells]
    rows = [headings, ["─" * wide for wide in widths], *short]
    return [_GAP.join(_padded(*each) for each in zip(row, widths, numeric, strict=True)).rstrip() for row in rows]


def _padded(text: str, width: int, right: bool) -> str:
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks
