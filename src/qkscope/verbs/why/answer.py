"""What `why` answers: a result that reads as words, has tables, and can be compared with another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from qkscope import Result
from qkscope.checking import checked_class


@checked_class
@dataclass(frozen=True)
class Why(Result):
    """The answer: in words (`str`), in tables, and as a page."""

    @property
    def main(self) -> str:  # type: ignore[override]
        """The table that answers: of one head, of all heads, or of many prompts."""
        named = ("attention", "heads", "reasons", "decides", "mean", "paths", "roles")
        return next((name for name in named if name in self.tables), "")

    def __str__(self) -> str:
        lines = [f"  {row['line']}" for row in self.tables.get("said", ())]
        return "\n".join([self.answer, *lines])

    def diff(self, other: Result) -> Result:
        """What differs between this answer and another: heads, or attention, words and writers,
        largest change first.

        Parameters
        ----------
        other : an answer to the same question of another prompt, head or model.
        """
        rows = [row for table in _COMPARED for row in _changes(self, other, table)]
        rows.sort(key=lambda row: -abs(row["change"]))
        return Result(
            "why/diff", {"diff": rows}, answer=_in_words(self, other, rows), model=self.model
        )

    def to_networkx(self) -> Any:
        """The graph of writers and what they read, as a `networkx.MultiDiGraph` from writers to
        their readers.
        """
        graph = import_module("networkx").MultiDiGraph()
        for row in self.tables.get("nodes", ()):
            graph.add_node(row["id"], **row)
        for row in self.tables.get("graph", ()):
            if row["source"] is not None:
                graph.add_edge(row["source"], row["target"], **row)
        return graph


_COMPARED = {
    "heads": ("head", "difference"),
    "writers": ("side", "writer", "share"),
    "because": ("text", "after"),
    "attention": ("token", "attention"),
}
"""Tables that two answers are compared by: columns that name a row, and the number of it."""


_SAID = 3  # differences in the sentence


def _in_words(this: Result, other: Result, rows: Sequence[Mapping[str, Any]]) -> str:
    """What differs most between two answers."""
    parts = list[str]()
    asked = [answer.tables.get("asked", ()) for answer in (this, other)]
    if all(asked):
        one, two = (
            f"{row['answer']!r} {row['probability']:.0%} over {row['rival']!r} by {row['lead']:.1f}"
            for (row,) in asked
        )
        parts.append(f"The answer is {one} in the first and {two} in the other." if one != two
                     else f"Both answer {one}.")  # fmt: skip
    largest = [row for row in rows if row["change"]][:_SAID]
    if not largest:
        return " ".join([*parts, "No number of theirs differs."])
    told = [
        f"{_COLUMNS[row['table']]} {row['what']!r} {_shown(row['this'])} → {_shown(row['other'])}"
        for row in largest
    ]
    return " ".join([*parts, f"What differs most: {', '.join(told)}."])


def _shown(value: float | None) -> str:
    """A number of a sentence; a dash where an answer has none."""
    return "—" if value is None else f"{value:.2f}"


_COLUMNS = {
    "heads": "the change of the lead without",
    "writers": "the share of",
    "because": "attention left with another word for",
    "attention": "attention on",
}
"""What the number of each compared table is."""


def _changes(before: Result, after: Result, table: str) -> Iterator[dict[str, Any]]:
    """What differs in one table between two answers, a row each."""
    *names, number = _COMPARED[table]

    def numbers(answer: Result) -> dict[tuple[Any, ...], float]:
        rows = answer.tables.get(table, ())
        return {tuple(row[name] for name in names): row[number] or 0.0 for row in rows}

    ours = numbers(before)
    theirs = numbers(after)
    for key in ours.keys() | theirs.keys():
        yield {
            "table": table,
            "what": " ".join(map(str, key)),
            "column": number,
            "this": ours.get(key),
            "other": theirs.get(key),
            "change": theirs.get(key, 0.0) - ours.get(key, 0.0),
        }
