"""Heads by name: the atlas of all of them, a card for each that was looked at closely, and who reads whom.

Names come in families: what kind of thing a head goes by, one colour for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkscope.analyses.names.readings import AFTER_COPY, COPY, SAME_BEFORE, SHAM
from qkscope.analyses.names.sentence import block_words
from qkscope.analyses.names.study import counted
from qkscope.heads import Head
from qkscope.maths.factors import MEAN, REST
from qkscope.show import Block, Row, Tables, number

FAMILIES = {
    "distance": "how far back a key stands",
    "certain keys": "the same keys, whatever asks",
    "same token": "keys that share a token with the asking place",
    "after a copy": "what followed an earlier copy of the asking token",
    "token pairs": "certain tokens for certain tokens",
    "not named": "nothing that can be read off the text",
}
"""What heads of each go by."""
_RULED = {COPY: "same token", SAME_BEFORE: "same token", AFTER_COPY: "after a copy"}


def family_of(row: Mapping[str, Any]) -> str:
    """The family of a head that was named.

    >>> family_of({"block": "current · previous", "rule": "after a copy"})
    'after a copy'
    >>> family_of({"block": "current · previous", "rule": None}), family_of({"block": None, "rule": None})
    ('token pairs', 'not named')
    """
    return _RULED.get(row["rule"]) or block_family(*(row["block"] or " · ").split(" · "))


def block_family(query: str, key: str) -> str:
    """The family of a block, whatever rule a head keeps.

    >>> block_family("mean", "mean"), block_family("start", "mean"), block_family("mean", "current")
    ('distance', 'distance', 'certain keys')
    """
    if not query:
        return "not named"
    if key == MEAN:
        return "distance"
    return "certain keys" if query == MEAN else "token pairs"


NAMED = {"head", "layer", "index", "name", "share", "low", "high", "block", "rule", "sham", "rest", "sentence"}
_PLACES = ("text", "query_start", "query_stop", "key_start", "key_stop", "query_at", "key_at", "document")
_SMALL = 0.02  # share under which blocks are drawn together
_TERMS = (
    "All was fitted on other documents than it is measured on. Share: the part of the logit, by which attention "
    "prefers some keys to others, that a block explains, with its 95% interval over documents. Coverage: how often a "
    "key that keeps the rule is in sight. Precision: how often it is then the key with most attention except the "
    "first token. Chance: the same for a key drawn at random."
)

ByHead = Mapping[str, Mapping[str, Sequence[Row]]]


def named(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """All heads as an atlas; some that were looked at closely as cards."""
    yield from (_atlas if name == "atlas" else _cards)(name, rows, tables)


def _atlas(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Every head on a map and in a line, which opens."""
    words = (
        "Each head is named by the largest block of its logit, measured on documents that nothing was fitted on. Click "
        "a head on the map, a name to see its heads alone, a column to sort, a line to open it."
    )
    of, counts = _by_head(tables), Counter((family_of(row), row["name"]) for row in rows)
    order = sorted(counts, key=lambda which: (list(FAMILIES).index(which[0]), -counts[which]))
    options = {
        "heads": {row["head"]: {"family": family_of(row), **_seen(row, of)} for row in rows},
        "distances": _distances(of),
        "names": [[family, each, counts[family, each]] for family, each in order],
        "families": FAMILIES,
    }
    yield Block("atlas", "Every head", words, rows, options, name, leads=True)


def _cards(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """For each head its sentence, its blocks, and what else was looked at."""
    of = _by_head(tables)
    for i, row in enumerate(rows):
        head = row["head"]
        options = {
            **_seen(row, of),
            "head": head,
            "sentence": row["sentence"],
            "distances": _distances(of),
            "pairs": of.get("pairs", {}).get(head, []),
            "directions": of.get("directions", {}).get(head, []),
            "changes": [_change_words(change) for change in of.get("changes", {}).get(head, [])],
        }
        words = _TERMS if i == 0 else ""  # said once
        yield Block("cards", f"{head}: {row['name']}", words, of.get("blocks", {}).get(head, []), options, name, True)


def _by_head(tables: Tables) -> ByHead:
    found: dict[str, dict[str, list[Row]]] = {}
    for name, rows in tables.items():
        if rows and "head" in rows[0]:
            own = found.setdefault(name, {})
            for row in rows:
                own.setdefault(row["head"], []).append(row)
    return found


def _distances(of: ByHead) -> list[int]:
    """The same for every head."""
    return [row["distance"] for rows in [*of.get("distances", {}).values()][:1] for row in rows]


def _seen(row: Row, of: ByHead) -> dict[str, Any]:
    """What is drawn of one head: its blocks, the curve over distances, and texts."""
    head = row["head"]
    curve = of.get("distances", {}).get(head, [])
    return {
        "bar": _bar(row, of.get("blocks", {}).get(head, [])),
        "curve": [
            *(_centred(curve, column) for column in ("logit", "mean")),
            [_whole(r["attention"], 1000) for r in curve],
        ],
        "rule": row["rule"],
        "examples": [
            {part: text.get(part) for part in _PLACES} | {"attention": _round(text["attention"])}
            for text in of.get("examples", {}).get(head, [])
        ],
        "facts": _facts(row),
    }


def _centred(curve: Sequence[Row], column: str) -> list[int]:
    """Less its mean, which attention does not see; in hundredths, as a page holds many."""
    middle = sum(row[column] for row in curve) / max(len(curve), 1)
    return [_whole(row[column] - middle, 100) for row in curve]


def _whole(value: float, parts: int) -> int:
    return round(parts * value)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _bar(row: Row, blocks: Sequence[Row]) -> list[list[Any]]:
    """Words, family, share and interval of each part of a logit; they sum to 1."""
    own = [b for b in blocks if not {b["query"], b["key"]} & {SHAM, REST} and abs(b["share"]) >= _SMALL]
    parts: list[list[Any]] = []
    for block in sorted(own, key=lambda block: -block["share"]):
        pair = (block["query"], block["key"])
        family = family_of(row) if " · ".join(pair) == row["block"] else block_family(*pair)
        parts.append([block_words(*pair), family, *(_round(block[column]) for column in ("share", "low", "high"))])
    small = 1 - row["rest"] - sum(part[2] for part in parts)
    parts.append(["smaller blocks together", "others", _round(small), None, None])
    parts.append(["sham", "sham", _round(row["sham"]), None, None])
    parts.append(["rest: not explained", "rest", _round(row["rest"] - row["sham"]), None, None])
    return parts


def _facts(row: Row) -> str:
    """Whether it matters who asks, how much it looks at all, and who wrote."""
    said = []
    if row.get("mass") is not None:
        said.append(f"{_percent(row['mass'])} of its attention is off the first token.")
    if row.get("match") is not None:
        said.append(
            f"With the query of another document at the same place, its best key stands out {_percent(row['match'])} "
            f"less (q {number(row['match_q'], '.2g')})."
        )
    if row.get("traced"):
        sides = [f"{row[f'{side}_writer']} ({_percent(row[f'{side}_share'])})" for side in ("key", "query")]
        wrote = f"Its keys were written first by {sides[0]}, its queries by {sides[1]}"
        said.append(f"{wrote}, in {counted(row['traced'], 'passage')}.")
    return " ".join(said)


def _percent(share: float | None) -> str:
    return number(None if share is None else round(share, 2) + 0.0, ".0%")  # never −0%


def _change_words(row: Row) -> str:
    slope, low, high, sham = (
        number(round(row[column], 2) + 0.0, ".2f") for column in ("slope", "low", "high", "sham_slope")
    )
    return (
        f"Changed in the text ({row['factor']}, at the {row['kind']}): slope {slope} [{low}, {high}], sham {sham}; "
        f"correlation {number(row['correlation'], '.2f')}, {counted(row['n'], 'place')}. At slope 1 the logit changes "
        "as was predicted from other documents; the sham changes another token."
    )


def reads(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Which head reads what which other wrote."""
    later = [row for row in rows if Head.parse(row["reader"]).layer > 0]
    passages = max((row["n"] for row in later), default=0)
    words = (
        "Heads read what earlier parts of the model wrote: heads, MLPs and the embedding. The logit by which a head's "
        "most attended token (except the first) leads the others is a sum over those who wrote its key, and also over "
        "those who wrote its query. A column is a reading head, a line a writer; a mark is as large as the writer's "
        "share of that sum, and the five largest of each head are drawn. Marks in a line: many read this writer "
        "(readers: heads of whose logit it has a tenth or more). Means over passages in which that token gets 5% of "
        f"the head's attention, at most {passages}; point at a mark for how many, as few give a loose share. Having "
        "written is not yet being needed: qkscope trace tests that. Heads of the first layer read the embedding alone "
        "and are not drawn. Click a mark to see its reader alone."
    )
    if later:
        yield Block("reads", "Who reads whom", words, later, table=name)
