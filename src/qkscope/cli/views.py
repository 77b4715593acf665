"""Tables for people: which rows and columns of a result are printed, and how they are fitted into a line.

A view names the table that answers a verb's question, its columns, and what their headings mean. A verb may have
several: the first whose table is there is printed. Without any, a result's claims are printed, or the first six columns
in which the rows of its main table differ. Texts give way to narrow lines, numbers never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import Box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from qkscope.runs.progress import plain_text

MOST_COLUMNS, MOST_ROWS = 6, 10
_SHORTEST = 12  # what a text keeps before a column is left out for want of room
_RULE = Box("\n".join(["    ", "    ", " ─  ", *["    "] * 5]) + "\n")  # below the headings alone

Row = Mapping[str, Any]
Rows = Sequence[Row]


@dataclass(frozen=True)
class View:
    """A table as people see it.

    Parameters
    ----------
    table : its name.
    columns : names with commas between, ``heading=column`` where the heading is another. A heading that ends in ``?``
        is left out where all rows say the same; a column that ends in ``±`` has its 95% interval, one in ``!r`` quotes.
    note : what the headings mean, in a line.
    pick : which rows, in which order; those after the tenth are left out.
    """

    table: str
    columns: str
    note: str = ""
    pick: Callable[[Rows], Rows] = list


def shown(verb: str, tables: Mapping[str, Rows], main: str = "") -> tuple[Rows, dict[str, str], int, str] | None:
    """The rows and columns of the one table that a verb prints, how many rows there are, and what its headings mean.

    Parameters
    ----------
    verb : of the command, as ``swap``, or ``toy/retrieval`` where a verb has several.
    tables : all there are.
    main : the table to take where the verb has no view; the first one by default.
    """
    known = VIEWS.get(verb, VIEWS.get(verb.partition("/")[0], VIEWS[""]))
    view = next((view for view in known if tables.get(view.table)), None)
    rows = tables[view.table] if view else tables.get(main) or next((rows for rows in tables.values() if rows), [])
    if not rows or not known or (view is None and tables.get("said")):  # lines say it all
        return None
    view = view or View("", ", ".join(f"{name}?" for name in rows[0]))
    picked = list(view.pick(rows))[:MOST_ROWS]
    named = (name.partition("=") for name in view.columns.split(", "))
    sources = {heading.rstrip("±"): column or heading.rstrip("?") for heading, _, column in named}
    kept = {
        heading.rstrip("?"): source
        for heading, source in sources.items()
        if heading[-1] != "?" or len(picked) == 1 or len({_cell(source, row) for row in picked}) > 1
    }
    return picked, dict(list((kept or sources).items())[:MOST_COLUMNS]), len(rows), view.note


def drawn(rows: Rows, columns: Mapping[str, str], width: int, *, whole: bool = False) -> Iterator[Table]:
    """Tables that stand one below the other where the columns do not fit side by side, the first column repeated.

    Parameters
    ----------
    columns : headings, and where their cells come from.
    width : of a line, in characters.
    whole : whether texts are left in full, numbers have four digits, and columns that do not fit come below; otherwise
        these are left out.
    """
    cells = [[_cell(source, row, 4 if whole else None) for row in rows] for source in columns.values()]
    numeric = [any(_is_number(row.get(source.rstrip("±"))) for row in rows) for source in columns.values()]
    needed, groups = list[int](), [[0]]
    for i, heading in enumerate(columns):
        longest = max(map(cell_len, cells[i]))
        needed.append(max(cell_len(heading), longest if whole or numeric[i] else min(longest, _SHORTEST)) + 2)
        if i and len(groups[-1]) > 1 and sum(needed[j] for j in [*groups[-1], i]) > width + 2:
            groups.append([0])
        groups[-1] += [i] if i else []
    for group in groups if whole else groups[:1]:
        table = Table(box=_RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for i in group:
            table.add_column(
                Text(plain_text(list(columns)[i])), justify="right" if numeric[i] else "left", no_wrap=numeric[i]
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
            return "{} [{}, {}]".format(*(f"{round(x, 2) + 0.0:.2f}" if abs(x) < 100 else f"{x:.0f}" for x in values))
    return repr(row[name]) if source.endswith("!r") else cell(row.get(name), digits)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


# ---------------------------------------------------------------------- which rows


def by(column: str, largest: bool = True) -> Callable[[Rows], Rows]:
    """Rows sorted by a column."""
    return lambda rows: sorted(rows, key=lambda row: row[column] or 0.0, reverse=largest)


def where(column: str, value: Any) -> Callable[[Rows], Rows]:
    """These rows, or all where there are none."""
    return lambda rows: [row for row in rows if row[column] == value] or rows


def _swapped(rows: Rows) -> Rows:
    """Of every head its features beside random subspaces and rivals; of many heads, the joint feature alone."""
    joint = [row["feature"] for row in rows if row["kind"] == "feature"][-1]
    places = list(dict.fromkeys((row["head"], row["feature"]) for row in rows))
    told = [row for row in rows if row["kind"] not in ("oblique", "summed", "cov_qk", "sham")]  # a new rival is told
    told.sort(key=lambda row: places.index((row["head"], row["feature"])))  # each beside its controls
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
    groups = [[row for row in rows if row["direction"] == way][:most] for way, most in (("for", 3), ("against", 2))]
    return [row for group in groups for row in group] or rows[:3]


def _first_writers(rows: Rows) -> Rows:
    """The first writers of each head and side, as many of each as there is room for; keys first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["head"], row["side"]), []).append(row)
    most = max(MOST_ROWS // max(len(groups), 1), 1)
    return [row for group in sorted(groups, key=lambda group: group[1]) for row in groups[group][:most]]


_SWAPS = (
    "swap", "head?, feature, kind, distance?=distance±, before=orig_before, after=orig_after, shift±, rank?",
    "before, after: attention on the right key; shift: the share of both keys' attention that changes sides, 95% "
    "interval; random, key_pca: as many other directions; distance: of the row, to that with the feature exchanged in "
    "the text.", _swapped,
)  # fmt: skip
VIEWS: dict[str, Sequence[View]] = {
    "": [View(
        "claims", "claim, source, ours±, control, verdict, reason",
        "source: the paper states or implies it, or it is ours; tie: the 95% interval leaves it open.",
    )],
    "why": [View(  # with a head its lines say it all
        "heads",
        "head, looks at=token!r, attention, P without it=probability, lead changes by=difference, it is=direction",
        pick=_for_and_against,
    )],
    "why/circuit": [
        View(
            "paths", "node, share, path to a word=way, because=reason",
            "share: of the lead, written straight to the answer; ←: by its largest part.",
        ),
        View("roles", "writer, role, score", "score: what the node gives to the lead, by integrated gradients."),
    ],
    "why/prompts": [
        View(
            "reasons", "head, reason=kind, prompts=count, of=prompts, share±, attention",
            "of: prompts where the head gives .3 or more to a token that is not the first; share: 95% interval.",
        ),
        View(
            "decides", "head, for, against, of=prompts, lead changes by=difference",
            "for, against: prompts where hiding the head's main token changes the lead over the rival by 0.1 or more.",
        ),
    ],
    "made": [],
    "trace": [
        View(
            "neurons", "head?, side, neuron=writer, share, at=token",
            "share: of the logit of the key over the others; at: the key token that most of it is from; M9.N120: neuron"
            " 120 of the MLP of layer 9.", _first_writers,
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
