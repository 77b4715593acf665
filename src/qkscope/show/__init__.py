"""Results as people see them: one offline page, and the live page.

In come results, or run folders read back; out go pages that need no network, and PNG and PDF files.
A page is made of tables and arrays alone, so that it is the same whenever it is made.

Reading order: `Block` (one thing to look at), `drawing` (tables are known by their columns) and
``names.toml`` (what their values are called), `blocks` (what a table is drawn as, and what is said
beside it), `reasons` (the same of words, carriers and the atlas), `page` (blocks, claims, tables
and what made them as one page), ``static/`` (a script per kind of block, on `base.js` and
`colours.js`; of the live page `ask.js`, `state.js` and `live.js`; `page.css`; templates), `session`
(the same blocks of a prompt that somebody types), and `server`, which serves them.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from pathlib import Path
from typing import Any

from qkscope.results.result import Records, Tables

_NAMES = Path(__file__).with_name("names.toml")
PAGE_NAMES: dict[str, dict[str, Any]] = tomllib.loads(_NAMES.read_text("utf-8"))
"""What a page calls values of tables, and the scripts that draw kinds of blocks."""


@dataclass(frozen=True)
class Block:
    """One thing to look at: ``rows`` are what the reader can copy, ``options`` what the chart needs
    besides.
    """

    kind: str
    title: str
    words: str
    rows: Records
    options: Mapping[str, Any] = field(default_factory=dict)
    table: str = ""  # whose rows these are
    leads: bool = False  # told before the pictures

    def to_json(self) -> dict[str, Any]:
        """What a page's script draws."""
        return {name: getattr(self, name) for name in ("kind", "title", "words", "rows", "options")}


Draw = Callable[[Block, Tables], Iterator[Block]]
DrawTable = Callable[[str, Records, Tables], Iterator[Block]]
TABLE_DRAWINGS: list[tuple[set[str], DrawTable]] = []
"""What a table is drawn as: the columns it is known by, and what makes its blocks."""


def drawing(
    kind: str, *columns: str, usual: str = "", leads: bool = False
) -> Callable[[Draw], Draw]:
    """Register what draws tables with these columns.

    Of its docstring the first line is the title of the block, the rest are its words. A table of
    another than its usual name has its name in the title.
    """

    def register(draw: Draw) -> Draw:
        title, _, words = cleandoc(draw.__doc__ or "").partition("\n")
        words = " ".join(words.split())
        block = Block(kind, title.removesuffix("."), words, [], leads=leads)

        def blocks(name: str, rows: Records, tables: Tables) -> Iterator[Block]:
            full = block.title
            if usual and name != usual:
                full += f" ({name.replace('_', ' ')})"
            return draw(replace(block, title=full, rows=rows, table=name), tables)

        TABLE_DRAWINGS.append(({*columns}, blocks))
        return draw

    return register


def counted(count: int, what: str) -> str:
    """A number and its noun.

    >>> counted(1, "head"), counted(3, "head")
    ('1 head', '3 heads')
    """
    plural = "" if count == 1 else "s"
    return f"{count} {what}{plural}"


def number(value: Any, how: str = "") -> str:
    """A value as text, to four digits or as ``how`` says; a dash where there is none.

    >>> number(0.12345), number(-0.5, ".2f"), number(1.5e-7)
    ('0.1235', '−0.50', '1.50e-7')
    >>> number(float("nan")), number(None), number(True)
    ('–', '–', 'yes')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if how or isinstance(value, int):
        return format(value, how).replace("-", "−")
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    if 0 < size < 1e-3 or size >= 1e6:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}".replace("-", "−")
