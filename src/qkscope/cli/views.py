"""Tables for people: which rows and columns of a result are printed, and how they fit into a line.

The definition of a table (`qkscope.results.tables`) names the columns that are printed, and what
their headings mean. Of a verb's tables the first that has rows is printed. Where none is to be, a
result's claims are printed, or the first six columns in which the rows of its main table differ.
Texts are cut in narrow lines, numbers never.

A column is written ``heading=column``, or as one word where both are the same. After a heading
``?`` leaves the column out where all rows agree; ``±`` adds the interval; after a column ``!r``
quotes a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.box import Box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from qkscope.results.progress import plain_text
from qkscope.results.tables import TableDefinition, every_table, headings_of
from qkscope.text import grouped

if TYPE_CHECKING:
    from qkscope.results.result import Record, Records

MOST_COLUMNS = 6
MOST_ROWS = 10
_SHORTEST = 12  # characters that a text keeps, before a column is left out for want of room
_BETWEEN = 2  # characters between two columns
_BLANK = "    \n"
_RULE = Box(2 * _BLANK + " ─  \n" + 5 * _BLANK)  # a line below the headings alone
_NO_RIVALS = (
    "oblique",
    "summed",
    "cov_qk",
    "sham",
)  # kinds of a swap that a short table leaves out


class View(NamedTuple):
    """What is printed of a result: rows of one table, its columns, and a note on them."""

    rows: Records
    columns: dict[str, str]
    """By heading, where its cells come from."""
    total: int
    """Rows of the whole table."""
    note: str


_CLAIMS = TableDefinition(
    "claims",
    {},
    "claim, source, ours±, control, verdict, reason",
    "source: the paper states or implies it, or it is ours; tie: the 95% interval leaves it open.",
)
MORE_TABLES: dict[str, dict[str, TableDefinition]] = {}
"""Tables of verbs that come from elsewhere."""


@cache
def _printed_tables() -> dict[str, list[TableDefinition]]:
    """By verb, or by one job of it, the tables that are tried for printing."""
    printed: dict[str, list[TableDefinition]] = {"made": []}
    for verb, tables in (every_table() | MORE_TABLES).items():
        for definition in tables.values():
            if definition.shown:
                printed.setdefault(definition.of or verb, []).append(definition)
    printed["demo"] = [every_table()["swap"]["swap"]]
    return printed


# ---------------------------------------------------------------------- what is printed


def shown(verb: str, tables: Mapping[str, Records], main: str = "") -> View | None:
    """Choose the one table that a verb prints, its rows and columns; None where lines say it all.

    Parameters
    ----------
    verb : of the command, as ``swap``, or ``toy/retrieval`` where a verb has several.
    tables : of the result.
    main : the table to take where the verb has no view; the first one by default.
    """
    group = verb.partition("/")[0]
    printed = _printed_tables()
    known = printed.get(verb, printed.get(group, [_CLAIMS]))
    for definition in known:
        if tables.get(definition.name):
            return _view(tables[definition.name], definition)
    rows = tables.get(main) or _first_rows(tables)
    if not rows or not known or tables.get("said"):
        return None
    differing = ", ".join(f"{name}?" for name in rows[0])
    return _view(rows, TableDefinition(main, {}, differing))


def _first_rows(tables: Mapping[str, Records]) -> Records:
    """The first table that has rows."""
    return next((rows for rows in tables.values() if rows), [])


def _view(rows: Records, definition: TableDefinition) -> View:
    """Take what is printed of the rows of a table."""
    pick, *about = definition.pick
    picked = list(PICKS[pick](rows, *about))[:MOST_ROWS]
    headings = headings_of(definition.shown)
    kept = _differing(headings, picked) or headings
    columns = dict(list(kept.items())[:MOST_COLUMNS])
    hidden = {heading.rstrip("?") for heading in headings} - set(columns)
    notes = []
    for part in definition.note.split("; "):
        if part.partition(":")[0] not in hidden:
            notes.append(part)
    return View(picked, columns, len(rows), "; ".join(notes))


def _differing(headings: Mapping[str, str], rows: Records) -> dict[str, str]:
    """The columns without those marked ``?`` whose cells are the same in all of several rows."""
    kept = dict[str, str]()
    for heading, source in headings.items():
        if heading.endswith("?") and len(rows) > 1:
            cells = {_cell(source, row) for row in rows}
            if len(cells) == 1:
                continue
        kept[heading.rstrip("?")] = source
    return kept


# ---------------------------------------------------------------------- how it is drawn


def drawn(
    rows: Records, columns: Mapping[str, str], width: int, *, whole: bool = False
) -> Iterator[Table]:
    """Draw the columns that fit side by side.

    Parameters
    ----------
    rows : of one table.
    columns : headings, and where their cells come from.
    width : of a line, in characters.
    whole : whether texts are left in full, numbers have four digits, and columns that do not fit
        come in further tables below, with the first column repeated; otherwise they are left out.
    """
    digits = 4 if whole else None
    drawings = [_column(heading, source, rows, digits) for heading, source in columns.items()]
    groups = _side_by_side([column.width(whole) for column in drawings], width)
    for group in groups if whole else groups[:1]:
        yield _table([drawings[number] for number in group])


class _Column(NamedTuple):
    """A column as it is drawn."""

    heading: str
    cells: list[str]
    numeric: bool

    def width(self, whole: bool) -> int:
        """Characters that it needs; a text can be cut, unless it is left whole."""
        longest = max(map(cell_len, self.cells))
        if not whole and not self.numeric:
            longest = min(longest, _SHORTEST)
        return max(cell_len(self.heading), longest) + _BETWEEN


def _column(heading: str, source: str, rows: Records, digits: int | None) -> _Column:
    """The cells of a column, and whether there are numbers among them."""
    cells = [_cell(source, row, digits) for row in rows]
    name = source.rstrip("±")
    numeric = any(_is_number(row.get(name)) for row in rows)
    return _Column(heading, cells, numeric)


def _side_by_side(widths: Sequence[int], width: int) -> list[list[int]]:
    """Divide columns into groups that fit into a line, the first column in each of them."""
    groups = [[0]]
    for number in range(1, len(widths)):
        group = groups[-1]
        needed = sum(widths[other] for other in [*group, number])
        if len(group) > 1 and needed > width + _BETWEEN:
            group = [0]
            groups.append(group)
        group.append(number)
    return groups


def _table(columns: Sequence[_Column]) -> Table:
    """Draw columns: numbers on the right and never cut, texts on the left."""
    table = Table(box=_RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        side: Any = "right" if column.numeric else "left"
        table.add_column(Text(plain_text(column.heading)), justify=side, no_wrap=column.numeric)
    for texts in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in texts))
    return table


# ---------------------------------------------------------------------- one cell


def cell(value: Any, digits: int | None = None) -> str:
    """A value as text, on one line.

    >>> [cell(value) for value in (0.12345, 12.345, 1234.5, 4.3e-05, 0.0)]
    ['0.123', '12.3', '1234', '4e-05', '0.000']
    >>> [cell(value) for value in (float("nan"), None, True, 7)]
    ['', '', 'yes', '7']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value, digits)
    return plain_text(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def _number(value: float, digits: int | None) -> str:
    """A float with three digits before and after the point together, or with so many digits."""
    if digits is not None:
        return f"{value:.{digits}g}"
    size = abs(value)
    if size and size < 5e-4:
        return f"{value:.0e}"
    if size < 1:
        return f"{value:.3f}"
    if size < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if size < 100 else f"{value:.0f}"


def _cell(source: str, row: Record, digits: int | None = None) -> str:
    """The cell of a row, with its interval or in quotes where the source says so."""
    name = source.removesuffix("±").removesuffix("!r")
    if source.endswith("±"):
        of = f"{name}_" if f"{name}_low" in row else ""
        values = [row.get(name), row.get(f"{of}low"), row.get(f"{of}high")]
        if all(map(_is_number, values)):
            value, low, high = map(_short_number, values)
            return f"{value} [{low}, {high}]"
    if source.endswith("!r"):
        return repr(row[name])
    return cell(row.get(name), digits)


def _short_number(value: Any) -> str:
    """A number of an interval: two decimals, none of large ones, and never -0.00."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{round(value, 2) + 0.0:.2f}"


def _is_number(value: Any) -> bool:
    """Whether a value is a number; truth values and NaN are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not math.isnan(value)


# ---------------------------------------------------------------------- which rows


def _every(rows: Records) -> Records:
    """All rows."""
    return rows


def _by(rows: Records, column: str, largest: bool = True) -> Records:
    """Rows sorted by a column."""
    return sorted(rows, key=lambda row: row[column] or 0.0, reverse=largest)


def _where(rows: Records, column: str, value: Any) -> Records:
    """Rows with this value in a column, or all rows if there are none."""
    return [row for row in rows if row[column] == value] or rows


def _last(rows: Records, column: str) -> Records:
    """Rows with the value that the last row has in a column."""
    return _where(rows, column, rows[-1][column])


def _swapped(rows: Records) -> Records:
    """The features of every head beside random subspaces and rivals, as far as there is room.

    With more rows: the features alone beside the controls of the joint one; the joint feature with
    all its controls; the joint feature beside random subspaces.
    """
    features = [row for row in rows if row["kind"] == "feature"]
    joint = features[-1]["feature"]
    most: list[Record] = []
    for same in grouped(rows, lambda row: (row["head"], row["feature"])).values():
        most += [row for row in same if row["kind"] not in _NO_RIVALS]
    fewer = [row for row in most if row["feature"] == joint or row["kind"] == "feature"]
    of_joint = [row for row in most if row["feature"] == joint]
    for chosen in (most, fewer, of_joint):
        if len(chosen) <= MOST_ROWS:
            return chosen
    return [row for row in of_joint if row["kind"] in ("feature", "random")]


def _spread(rows: Records) -> Records:
    """The circuit's rows from the first to the last step, evenly."""
    circuit = [row for row in rows if row["circuit"]] or list(rows)
    step = (len(circuit) - 1) / (MOST_ROWS - 1)
    places = {round(number * step) for number in range(MOST_ROWS)}
    return [circuit[place] for place in sorted(places)]


def _for_and_against(rows: Records) -> Records:
    """The first three heads for the next token, then the first two against it."""
    helping = [row for row in rows if row["direction"] == "for"]
    opposing = [row for row in rows if row["direction"] == "against"]
    return [*helping[:3], *opposing[:2]] or rows[:3]


def _first_writers(rows: Records) -> Records:
    """The first writers of each head and side, as many of each as there is room for; keys first."""
    groups = grouped(rows, lambda row: (row["head"], row["side"]))
    most = max(MOST_ROWS // max(len(groups), 1), 1)
    chosen: list[Record] = []
    for group in sorted(groups, key=lambda group: group[1]):
        chosen += groups[group][:most]
    return chosen


PICKS: dict[str, Callable[..., Records]] = {
    "every": _every,
    "by": _by,
    "where": _where,
    "last": _last,
    "swapped": _swapped,
    "spread": _spread,
    "for_and_against": _for_and_against,
    "first_writers": _first_writers,
}
