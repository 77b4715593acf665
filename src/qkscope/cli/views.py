"""Tables for people: which rows and columns of a result are printed, and how they are fitted into a
line.

A view (``views.toml``) names the table that answers a verb's question, its columns, and what their
headings mean. A verb may have several: the first whose table is there is printed. Without any, a
result's claims are printed, or the first six columns in which the rows of its main table differ.
Texts give way to narrow lines, numbers never.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import Box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from qkscope.results.progress import plain_text
from qkscope.text import grouped

MOST_COLUMNS = 6
MOST_ROWS = 10
_SHORTEST = 12  # what a text keeps before a column is left out for want of room
_RULE = Box("\n".join(["    ", "    ", " ─  ", *["    "] * 5]) + "\n")  # below the headings alone

Row = Mapping[str, Any]
Rows = Sequence[Row]


def read_views(path: Path) -> dict[str, dict[str, Any]]:
    """Views of a file, by verb and by table in the order in which tables are looked for."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


VIEWS = read_views(Path(__file__).with_name("views.toml"))
VIEWS["demo"] = {"swap": VIEWS["swap"]["swap"]}


def shown(
    verb: str, tables: Mapping[str, Rows], main: str = ""
) -> tuple[Rows, dict[str, str], int, str] | None:
    """The rows and columns of the one table that a verb prints, how many rows there are, and what
    its headings mean.

    Parameters
    ----------
    verb : of the command, as ``swap``, or ``toy/retrieval`` where a verb has several.
    tables : all there are.
    main : the table to take where the verb has no view; the first one by default.
    """
    known = VIEWS.get(verb, VIEWS.get(verb.partition("/")[0], VIEWS["default"]))
    table = next((name for name in known if tables.get(name)), None)
    rows = (
        tables[table]
        if table
        else tables.get(main) or next((rows for rows in tables.values() if rows), [])
    )
    if not rows or not known or (table is None and tables.get("said")):  # lines say it all
        return None
    view: Any = known[table] if table else {"columns": ", ".join(f"{name}?" for name in rows[0])}
    pick, *about = view.get("pick", ["every"])
    picked = list(PICKS[pick](rows, *about))[:MOST_ROWS]
    named = (name.partition("=") for name in view["columns"].split(", "))
    sources = {heading.rstrip("±"): column or heading.rstrip("?") for heading, _, column in named}
    kept = {
        heading.rstrip("?"): source
        for heading, source in sources.items()
        if heading[-1] != "?" or len(picked) == 1 or len({_cell(source, row) for row in picked}) > 1
    }
    columns = dict(list((kept or sources).items())[:MOST_COLUMNS])
    hidden = {heading.rstrip("?") for heading in sources} - set(columns)
    notes = (
        part for part in view.get("note", "").split("; ") if part.partition(":")[0] not in hidden
    )
    return picked, columns, len(rows), "; ".join(notes)


def drawn(
    rows: Rows, columns: Mapping[str, str], width: int, *, whole: bool = False
) -> Iterator[Table]:
    """Tables that stand one below the other where the columns do not fit side by side, the first
    column repeated.

    Parameters
    ----------
    columns : headings, and where their cells come from.
    width : of a line, in characters.
    whole : whether texts are left in full, numbers have four digits, and columns that do not fit
        come below; otherwise these are left out.
    """
    cells = [
        [_cell(source, row, 4 if whole else None) for row in rows] for source in columns.values()
    ]
    numeric = [
        any(_is_number(row.get(source.rstrip("±"))) for row in rows) for source in columns.values()
    ]
    needed = list[int]()
    groups = [[0]]
    for i, heading in enumerate(columns):
        longest = max(map(cell_len, cells[i]))
        needed.append(
            max(cell_len(heading), longest if whole or numeric[i] else min(longest, _SHORTEST)) + 2
        )
        if i and len(groups[-1]) > 1 and sum(needed[j] for j in [*groups[-1], i]) > width + 2:
            groups.append([0])
        groups[-1] += [i] if i else []
    for group in groups if whole else groups[:1]:
        table = Table(box=_RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for i in group:
            table.add_column(
                Text(plain_text(list(columns)[i])),
                justify="right" if numeric[i] else "left",
                no_wrap=numeric[i],
            )
        for texts in zip(*(cells[i] for i in group), strict=True):
            table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in texts))
        yield table


def cell(value: Any, digits: int | None = None) -> str:
    """A value as text, on one line.

    >>> [cell(value) for value in (0.12345, 12.345, 1234.5, 4.3e-05, 0.0, float("nan"), None, True, 7)]
    ['0.123', '12.3', '1234', '4e-05', '0.000', '', '', 'yes', '7']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return plain_text(str(value)).replace("\n", "\\n").replace("\t", "\\t")
    if digits is not None:
        return f"{value:.{digits}g}"
    size = abs(value)
    if size and size < 5e-4:
        return f"{value:.0e}"
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def _cell(source: str, row: Row, digits: int | None = None) -> str:
    name = source.removesuffix("±").removesuffix("!r")
    if source.endswith("±"):
        ends = (f"{name}_low", f"{name}_high") if f"{name}_low" in row else ("low", "high")
        values: list[Any] = [row.get(column) for column in (name, *ends)]
        if all(map(_is_number, values)):  # two decimals, more only of large ones, and never -0.00
            return "{} [{}, {}]".format(
                *(f"{round(x, 2) + 0.0:.2f}" if abs(x) < 100 else f"{x:.0f}" for x in values)
            )
    return repr(row[name]) if source.endswith("!r") else cell(row.get(name), digits)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


# ---------------------------------------------------------------------- which rows


def _by(rows: Rows, column: str, largest: bool = True) -> Rows:
    """Rows sorted by a column."""
    return sorted(rows, key=lambda row: row[column] or 0.0, reverse=largest)


def _where(rows: Rows, column: str, value: Any) -> Rows:
    """Rows with this value in a column, or all rows if there are none."""
    return [row for row in rows if row[column] == value] or rows


def _swapped(rows: Rows) -> Rows:
    """Of every head its features beside random subspaces and rivals; of many heads, the joint
    feature alone.
    """
    joint = [row["feature"] for row in rows if row["kind"] == "feature"][-1]
    places = list(dict.fromkeys((row["head"], row["feature"]) for row in rows))
    told = [
        row for row in rows if row["kind"] not in ("oblique", "summed", "cov_qk", "sham")
    ]  # a new rival is told
    told.sort(
        key=lambda row: places.index((row["head"], row["feature"]))
    )  # each beside its controls
    of_joint = [row for row in told if row["feature"] == joint]
    fewer = [row for row in told if row["feature"] == joint or row["kind"] == "feature"]
    least = [row for row in of_joint if row["kind"] in ("feature", "random")]
    return next((rows for rows in (told, fewer, of_joint) if len(rows) <= MOST_ROWS), least)


def _spread(rows: Rows) -> Rows:
    """The circuit's rows from the first to the last step, evenly."""
    circuit = [row for row in rows if row["circuit"]] or list(rows)
    places = {round(i * (len(circuit) - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)}
    return [circuit[place] for place in sorted(places)]


def _for_and_against(rows: Rows) -> Rows:
    """The first three heads for the next token, then the first two against it."""
    groups = [
        [row for row in rows if row["direction"] == way][:most]
        for way, most in (("for", 3), ("against", 2))
    ]
    return [row for group in groups for row in group] or rows[:3]


def _first_writers(rows: Rows) -> Rows:
    """The first writers of each head and side, as many of each as there is room for; keys first."""
    groups = grouped(rows, lambda row: (row["head"], row["side"]))
    most = max(MOST_ROWS // max(len(groups), 1), 1)
    return [
        row for group in sorted(groups, key=lambda group: group[1]) for row in groups[group][:most]
    ]


PICKS: dict[str, Callable[..., Rows]] = {
    "every": list, "by": _by, "where": _where, "last": lambda rows, column: _where(rows, column, rows[-1][column]),
    "swapped": _swapped, "spread": _spread, "for_and_against": _for_and_against, "first_writers": _first_writers,
}  # fmt: skip
