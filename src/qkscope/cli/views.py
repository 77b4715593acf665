"""Tables for people: which rows and columns of a result are printed, and how they are fitted into a line.

A view names the table that answers a verb's question, its columns, and what their headings mean. A verb may have
several: the first whose table is there is printed. Without any, a result's claims are printed, or the first six columns
in which the rows of its main table differ. Texts are shortened at a word, numbers never.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.cells import cell_len

from qkscope.runs.progress import plain_text

MOST_COLUMNS, MOST_ROWS = 6, 10
_GAP = "  "
_SHORTEST = 12  # what a text keeps before a column is left out for want of room

Row = Mapping[str, Any]
Rows = Sequence[Row]
Source = str | Callable[[Row], Any]
"""Where cells come from: a column, with its 95% interval where it ends in ``±``, or a function of the row."""


@dataclass(frozen=True)
class View:
    """A table as people see it.

    Parameters
    ----------
    table : its name.
    columns : names with commas between, ``heading=column`` where the heading is another; or headings and where their
        cells come from. A heading that ends in ``?`` is left out where all rows say the same.
    note : what the headings mean, in a line.
    pick : which rows, in which order; those after the tenth are left out.
    """

    table: str
    columns: str | Mapping[str, Source]
    note: str = ""
    pick: Callable[[Rows], Rows] = list


class Table(NamedTuple):
    """Texts of a table, and which of its columns hold numbers."""

    headings: list[str]
    cells: list[list[str]]
    numeric: list[bool]

    @classmethod
    def of(cls, rows: Rows, columns: Mapping[str, Source], digits: int | None = None) -> Table:
        """The cells of some rows, to so many digits; by default as many as tell something, with their intervals."""
        cells = [[_cell(source, row, digits) for source in columns.values()] for row in rows]
        numeric = [any(_is_number(_value(source, row)) for row in rows) for source in columns.values()]
        return cls([plain_text(heading) for heading in columns], cells, numeric)

    def take(self, columns: Sequence[int]) -> Table:
        """Some of its columns."""
        cells = [[row[i] for i in columns] for row in self.cells]
        return Table([self.headings[i] for i in columns], cells, [self.numeric[i] for i in columns])

    def widths(self) -> list[int]:
        """Of every column in full."""
        return [max(map(cell_len, column)) for column in zip(self.headings, *self.cells, strict=True)]

    def lines(self, widths: Sequence[int]) -> list[str]:
        """Heading, rule and rows, each cell as wide as its column."""
        short = [[shorten(text, wide) for text, wide in zip(row, widths, strict=True)] for row in self.cells]
        found = []
        for row in [self.headings, ["─" * wide for wide in widths], *short]:
            blanks = [" " * (wide - cell_len(text)) for text, wide in zip(row, widths, strict=True)]
            cells = zip(row, blanks, self.numeric, strict=True)
            found.append(_GAP.join(blank + text if right else text + blank for text, blank, right in cells).rstrip())
        return found

    def fitted(self, width: int) -> list[str]:
        r"""Lines of at most this width: texts give way first, the widest before others, then the last columns.

        >>> table = Table(["claim", "ours"], [["two of them move more than one", "0.5"]], [False, True])
        >>> print(*table.fitted(24), sep="\n")
        claim               ours
        ──────────────────  ────
        two of them move …   0.5
        """
        widths = self.widths()
        least = [
            max(cell_len(heading), wide if number else min(wide, _SHORTEST))
            for heading, wide, number in zip(self.headings, widths, self.numeric, strict=True)
        ]
        while _total(widths) > width and widths != least:
            widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=widths.__getitem__)
            widths[widest] -= 1
        if _total(widths) <= width or len(widths) == 1:
            return self.lines(widths)
        return self.take(range(len(widths) - 1)).fitted(width)

    def entire(self, width: int | None) -> list[str]:
        """Every column in full: one below the other where they do not stand side by side, the first one repeated."""
        widths, groups = self.widths(), [[0]]
        for i in range(1, len(widths)):
            if width and len(groups[-1]) > 1 and _total([widths[j] for j in [*groups[-1], i]]) > width:
                groups.append([0])
            groups[-1].append(i)
        return "\n\n".join("\n".join(self.take(group).lines([widths[i] for i in group])) for group in groups).split(
            "\n"
        )


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


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


# ---------------------------------------------------------------------- which rows and columns


def shown(verb: str, tables: Mapping[str, Rows], main: str = "") -> tuple[Table, int, str] | None:
    """The one table that a verb prints, how many rows there are in all, and what its headings mean.

    Parameters
    ----------
    verb : of the command, as ``swap``, or ``toy/retrieval`` where a verb has several.
    tables : all there are.
    main : the table to take where the verb has no view; the first one by default.
    """
    known = VIEWS.get(verb, VIEWS.get(verb.partition("/")[0], VIEWS[""]))
    view = next((view for view in known if tables.get(view.table)), None)
    rows = tables[view.table] if view else tables.get(main) or next((rows for rows in tables.values() if rows), [])
    if not rows or not known:
        return None
    view = view or View("", ", ".join(f"{name}?" for name in rows[0]))
    picked = list(view.pick(rows))[:MOST_ROWS]
    sources = _sources(view.columns) if isinstance(view.columns, str) else view.columns
    differ = [len(picked) == 1 or len({_cell(source, row) for row in picked}) > 1 for source in sources.values()]
    kept = [item for item, differs in zip(sources.items(), differ, strict=True) if differs or item[0][-1] != "?"]
    named = {heading.rstrip("?"): source for heading, source in (kept or list(sources.items()))[:MOST_COLUMNS]}
    return Table.of(picked, named), len(rows), view.note


def _sources(columns: str) -> dict[str, Source]:
    """Headings and columns of ``"head?, share±, after=orig_after"``."""
    named = (name.partition("=") for name in columns.split(", "))
    return {heading.rstrip("±"): column or heading.rstrip("?") for heading, _, column in named}


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


def _value(source: Source, row: Row) -> Any:
    return source(row) if callable(source) else row.get(source.rstrip("±"))


def _cell(source: Source, row: Row, digits: int | None = None) -> str:
    text = cell(_value(source, row), digits)
    if text and isinstance(source, str) and source.endswith("±"):
        name = source.rstrip("±")
        ends = (f"{name}_low", f"{name}_high") if f"{name}_low" in row else ("low", "high")
        if all(_is_number(row.get(end)) for end in ends):
            return "{} [{}, {}]".format(*(_two(row[column]) for column in (name, *ends)))
    return text


def _two(value: Any) -> str:
    """A number beside its interval: two decimals, more only of large ones."""
    return f"{round(value, 2) + 0.0:.2f}" if abs(value) < 100 else f"{value:.0f}"  # never -0.00


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _swapped(rows: Rows) -> Rows:
    """Of every head its features beside random subspaces and key PCA; of many heads, the joint feature alone."""
    joint = [row["feature"] for row in rows if row["kind"] == "feature"][-1]
    places = {name: place for place, name in enumerate(dict.fromkeys((row["head"], row["feature"]) for row in rows))}
    shown = [row for row in rows if row["kind"] in ("feature", "random", "key_pca")]
    shown.sort(key=lambda row: places[row["head"], row["feature"]])  # each beside its controls
    of_joint = [row for row in shown if row["feature"] == joint]
    fewer = [row for row in shown if row["feature"] == joint or row["kind"] == "feature"]
    least = [row for row in of_joint if row["kind"] != "key_pca"]
    return next((rows for rows in (shown, fewer, of_joint) if len(rows) <= MOST_ROWS), least)


def by(column: str, largest: bool = True) -> Callable[[Rows], Rows]:
    """Rows sorted by a column."""
    return lambda rows: sorted(rows, key=lambda row: row[column] or 0.0, reverse=largest)


def where(column: str, value: Any) -> Callable[[Rows], Rows]:
    """These rows, or all where there are none."""
    return lambda rows: [row for row in rows if row[column] == value] or rows


def _spread(rows: Rows) -> Rows:
    """The circuit's rows from the first to the last step, evenly."""
    own = [row for row in rows if row["circuit"]] or list(rows)
    places = {round(i * (len(own) - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)}
    return [own[place] for place in sorted(places)]


def _first_writers(rows: Rows) -> Rows:
    """The first writers of each head and side, as many of each as there is room for; keys first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["head"], row["side"]), []).append(row)
    most = max(MOST_ROWS // max(len(groups), 1), 1)
    return [row for group in sorted(groups, key=lambda group: group[1]) for row in groups[group][:most]]


def _both_sides(rows: Rows) -> Rows:
    """Of every head the first neuron of its key beside the first of its query, and so on."""
    groups: dict[str, list[list[Row]]] = {}
    for row in rows:
        groups.setdefault(row["head"], [[], []])[row["side"] == "query"].append(row)
    most = max(MOST_ROWS // max(len(groups), 1), 1)
    pairs = [pair for sides in groups.values() for pair in list(zip(*sides, strict=True))[:most]]
    return [{**key, "query": query["writer"], "of_query": query["share"]} for key, query in pairs]


_SWAPS = (
    "swap", "head?, feature, kind, before=orig_before, after=orig_after, shift±, rank?",
    "before, after: attention on the right key; shift: the share of both keys' attention that changes sides, 95% "
    "interval; random, key_pca: as many other directions.", _swapped,
)  # fmt: skip
VIEWS: dict[str, Sequence[View]] = {
    "": [View(
        "claims", "claim, source, ours±, control, verdict, reason",
        "source: the paper states or implies it, or it is ours; tie: the 95% interval leaves it open.",
    )],
    "why": [],  # its lines say it all
    "made": [],
    "trace": [
        View(
            "neurons",
            "head?, neuron of the key=writer, share, at=token, neuron of the query=query, its share=of_query",
            "share: of the logit of the key over the others; at: the key token that most of it is from; M9.N120: neuron"
            " 120 of the MLP of layer 9.", _both_sides,
        ),
        View(
            "feature_pairs", "head?, feature of the query=query_feature, of the key=key_feature, value±, share",
            "value: what this pair gives to the logit of the key over the others; 95% interval by word, of a task.",
        ),
        View(
            "heads",
            "head, key written by=key_writer, share=key_share, query written by=query_writer, its share=query_share, "
            "prompts=n",
            "share: of the logit of the right (or most attended) key over the others.", by("key_share"),
        ),
        View(
            "writers", "head?, side, writer, value±, share",
            "value: what this writer gives to the logit of the key over the others; 95% interval by word, of a task.",
            _first_writers,
        ),
    ],
    "heads": [View(
        "heads", "head, accuracy±, chance, row_accuracy, ratio±, mass",
        "accuracy: the right key gets most of the named keys; row_accuracy: most of all tokens; ratio: its share of "
        "the named keys' attention; mass: their attention together; in brackets 95% intervals.",
        where("reaches", True),
    )],
    "decompose": [View(
        "ranks", "head, contrast, rank, detected, rank_cv, verdict",
        "rank: dimensions kept; detected: directions above the null; rank_cv: dimensions that predict words left out.",
    )],
    "swap": [
        View(
            "downstream",
            "feature, kind, right before=accuracy_before, after=accuracy_after, target after=target_after, "
            "logit fell=fell±",
            "right: prompts that the model answers rightly; target: those it answers with the key swapped in; "
            "logit fell: right less target, 95% interval.",
        ),
        View(*_SWAPS),
    ],
    "demo": [View(*_SWAPS)],
    "svd": [View(
        "heads", "head, top, median, last, effective rank=effective_rank, error",
        "Singular values of the heads with fewest effective dimensions; error: of the factors multiplied out.",
        by("effective_rank", largest=False),
    )],
    "sparsity": [
        View(
            "training", "step, answers right?=accuracy, sparsity, rotated, difference±, change±",
            "Means over the circuit; rotated: singular vectors turned at random; change: since the first step.",
            _spread,
        ),
        View(
            "sparsity", "head, from, to, sparsity, rotated, difference±",
            "Edges of the circuit; rotated: singular vectors turned at random; difference with its 95% interval.",
            where("circuit", True),
        ),
    ],
    "atlas": [View(
        "atlas", "head, jobs=name, share±, looks, leaves, words=tokens",
        "jobs: what decides where it looks, with the share of its looks; share: of the first job, 95% interval by "
        "document; leaves: how often it gives .3 or more to a token that is not the first.", by("share"),
    )],
}  # fmt: skip
