"""Output tables: the columns of each verb's tables, their types, and what is printed of them.

``tables.toml`` beside this file is the one place that says it. Schemas, the tables of a terminal,
the headings of a page and the reference in the docs are read from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qkscope.errors import BadInput

DEFINITIONS = Path(__file__).with_name("tables.toml")
NUMBER = "number"
"""The type of a column that names none; like every number it may be missing (NaN, or null)."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Parameters
    ----------
    name : as in a row.
    types : of its values, as JSON calls them.
    words : what it means; empty where its name says it.
    """

    name: str
    types: tuple[str, ...]
    words: str = ""

    def fits(self, value: Any) -> bool:
        """Whether a value of a row is of one of the types.

        >>> Column("share", ("number",)).fits(0.5), Column("share", ("number",)).fits("half")
        (True, False)
        """
        found = json_type(value)
        return found in self.types or (found == "null" and NUMBER in self.types)


@dataclass(frozen=True)
class TableDefinition:
    """One table of a verb.

    Parameters
    ----------
    name : of the table.
    columns : all that a row may have, by name.
    shown : those that a terminal prints, ``heading=column`` with commas between; empty if none.
    note : what the printed headings mean.
    pick : which rows are printed: a function of `qkscope.cli.views`, and its arguments.
    of : the job of the verb (``why/circuit``) that prints it; any, where empty.
    """

    name: str
    columns: Mapping[str, Column]
    shown: str = ""
    note: str = ""
    pick: tuple[Any, ...] = ("every",)
    of: str = ""

    @property
    def words(self) -> dict[str, str]:
        """What its columns mean, of those whose names do not say it."""
        return {name: column.words for name, column in self.columns.items() if column.words}


def tables_of(verb: str) -> dict[str, TableDefinition]:
    """The tables of a verb, in the order in which they are tried for printing.

    >>> [*tables_of("heads")["heads"].columns][:3]
    ['head', 'accuracy', 'low']
    """
    known = every_table()
    if verb not in known:
        raise BadInput(f"there is no schema of {verb!r}: take one of {', '.join(known)}.")
    return known[verb]


def unknown_columns(verb: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """What no definition has: tables, columns, and values of other types.

    >>> unknown_columns("heads", {"heads": [{"head": "L1H0", "n": "four", "luck": 1}]})
    ["heads.n: 'four'", 'heads.luck']
    """
    known = tables_of(verb)
    unknown = dict[str, None]()
    for name, rows in tables.items():
        if name not in known:
            unknown[name] = None
            continue
        for row in rows:
            unknown |= dict.fromkeys(_unknown_of_row(known[name], row))
    return [*unknown]


def _unknown_of_row(table: TableDefinition, row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        column = table.columns.get(name)
        if column is None:
            yield f"{table.name}.{name}"
        elif not column.fits(value):
            yield f"{table.name}.{name}: {value!r}"


def json_type(value: Any) -> str:
    """What JSON calls the type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return NUMBER
    if isinstance(value, str):
        return "string"
    if isinstance(value, Mapping):
        return "object"
    return "array" if isinstance(value, list | tuple) else "null"


# ---------------------------------------------------------------------- how it is read


@cache
def every_table() -> dict[str, dict[str, TableDefinition]]:
    """All tables by verb; the demo has those of the verbs that it runs, and some of its own."""
    written = tomllib.loads(DEFINITIONS.read_text(encoding="utf-8"))
    words = written.pop("words")
    known = dict[str, dict[str, TableDefinition]]()
    for verb, tables in written.items():
        known[verb] = {}
        for other in tables.pop("runs", []):
            known[verb] = known[other] | known[verb]
        for name, fields in tables.items():
            known[verb][name] = _read_table(name, fields, words)
    return known


def read_tables(path: Path) -> dict[str, dict[str, TableDefinition]]:
    """Read the tables of another file of this form, by verb."""
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    known = {}
    for verb, tables in written.items():
        known[verb] = {name: _read_table(name, fields, {}) for name, fields in tables.items()}
    return known


def _read_table(name: str, fields: Mapping[str, Any], words: Mapping[str, str]) -> TableDefinition:
    """Read one table; what its own note says of a column goes before what all tables share."""
    shown = fields.get("shown", "")
    note = fields.get("note", "")
    meanings = {**words, **_meanings(shown, note)}
    columns = dict[str, Column]()
    for written in fields.get("columns", "").split(","):
        column, _, types = written.partition(":")
        column = column.strip()
        if column:
            meaning = meanings.get(column, "")
            columns[column] = Column(column, _types(types.strip()), meaning)
    pick = tuple(fields.get("pick", ["every"]))
    return TableDefinition(name, columns, shown, note, pick, fields.get("of", ""))


def _types(written: str) -> tuple[str, ...]:
    """Types of a column as JSON calls them: ``string?`` is a string or null.

    >>> _types("string?"), _types("")
    (('string', 'null'), ('number',))
    """
    types = tuple(written.removesuffix("?").split("|")) if written else (NUMBER,)
    return (*types, "null") if written.endswith("?") else types


def headings_of(shown: str) -> dict[str, str]:
    """Where the cells of each printed heading come from; marks (``?``, ``±``, ``!r``) stay.

    >>> headings_of("head?, right before=before±")
    {'head?': 'head', 'right before': 'before±'}
    """
    headings = dict[str, str]()
    for written in shown.split(", "):
        heading, _, source = written.partition("=")
        headings[heading.rstrip("±")] = source or heading.rstrip("?")
    return headings


def _meanings(shown: str, note: str) -> dict[str, str]:
    """What columns mean, by the parts of a note that begin with their headings."""
    columns = dict[str, str]()
    for heading, source in headings_of(shown).items():
        columns[heading.rstrip("?")] = source.removesuffix("±").removesuffix("!r")
    meanings = dict[str, str]()
    for part in note.removesuffix(".").split("; "):
        headings, _, meaning = part.partition(": ")
        for heading in headings.split(", "):
            if meaning and heading in columns:
                meanings[columns[heading]] = meaning
    return meanings
