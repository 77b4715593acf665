"""Heads by what decides where they look: the atlas as a map, a table that is searched and sorted, and looks as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from qkscope.show import Block, Row, Tables

FAMILIES = {
    "induction": "looks behind an earlier copy of its word", "duplicate token": "looks at an earlier copy of its word",
    "same word": "two equal words decide, elsewhere", "previous token": "looks one token back, whatever stands there",
    "position": "looks a fixed number of tokens back", "self": "looks at itself",
    "key word": "looks at certain words, whatever asks", "query word": "the word that asks decides",
    "key and query words": "both words decide", "few words": "one to four other words decide",
    "no few words": "more than four words decide", "no single word": "no single word decides",
    "sink": "rests on the first token",
}  # fmt: skip
"""What heads of each kind do."""
COLUMNS = {"head", "layer", "index", "kind", "name", "share", "looks", "leaves", "offset", "tokens"}


def family_of(kind: str) -> str:
    """The family of a head's kind: positions are one.

    >>> family_of("position -2"), family_of("induction")
    ('position', 'induction')
    """
    return "position" if kind.startswith("position") else kind


def atlas(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Every head on a map and in a line, which opens: its looks as text, the deciding words marked."""
    words = (
        "Each head is named by what decides where it looks, tested by changing every word of passages: its jobs, with "
        "their shares of its looks. Click a head on the map, a kind to see its heads alone, a column to sort, a line "
        "to open it."
    )
    scores = {row["head"]: row for row in tables.get("scores", ())}
    looks: dict[str, list[Row]] = {}
    for row in tables.get("examples", ()):
        looks.setdefault(row["head"], []).append(row)
    counts = Counter(family_of(row["kind"]) for row in rows)
    options = {
        "families": {family: [text, counts[family]] for family, text in FAMILIES.items() if counts[family]},
        "of": {row["head"]: family_of(row["kind"]) for row in rows},
        "scores": {head: {k: row[k] for k in ("name", "offset", "tokens", "looks")} for head, row in scores.items()},
        "looks": looks,
    }
    yield Block("atlas", "Every head", words, rows, options, name, leads=True)
