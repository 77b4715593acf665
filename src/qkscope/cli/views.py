"""What a command shows of its tables: one table, at most six columns and ten rows; `--all` prints the rest.

A view names the table that answers a verb's question, its columns by the heading they get, and what the headings mean.
A verb may have several: the first whose table is there is shown. A verb without any shows the first six columns in
which the rows of its main table differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qkscope.runs.progress import plain_text

MOST_COLUMNS, MOST_ROWS = 6, 10

Row = Mapping[str, Any]
Rows = Sequence[Row]
Source = str | tuple[str, str, str] | Callable[[Row], Any]
"""Where cells come from: a column, a value with the two ends of its interval, or a function of the row."""


@dataclass(frozen=True)
class View:
    """A table as people see it.

    Parameters
    ----------
    table : its name.
    columns : headings and where their cells come from, or a function of the rows that gives them. A heading that ends
        in ``?`` is left out where all rows say the same.
    note : what the headings mean, in a line.
    pick : which rows, in which order; those after the tenth are left out.
    made : makes other rows of the table's, before any is picked.
    """

    table: str
    columns: Mapping[str, Source] | Callable[[Rows], Mapping[str, Source]]
    note: str = ""
    pick: Callable[[Rows], Rows] = list
    made: Callable[[Rows], Rows] = list


class Shown(NamedTuple):
    """What is printed: headings, cells, which columns hold numbers, how many rows there are in all, and the note."""

    headings: list[str]
    cells: list[list[str]]
    numeric: list[bool]
    rows: int
    note: str


def shown(verb: str, tables: Mapping[str, Rows], main: str = "") -> Shown | None:
    """The one table that a verb shows.

    Parameters
    ----------
    verb : of the command, as ``swap``, or ``toy/retrieval`` where a verb has several.
    tables : all there are.
    main : the table to take where the verb has no view; the first one by default.
    """
    known = VIEWS.get(verb) or VIEWS.get(verb.partition("/")[0], ())
    view = next((view for view in known if tables.get(view.table)), None)
    if view is None:
        rows = tables.get(main) or next((rows for rows in tables.values() if rows), [])
        view = View("", _differing)
    else:
        rows = view.made(tables[view.table])
    if not rows:
        return None
    picked = list(view.pick(rows))[:MOST_ROWS]
    columns = view.columns(picked) if callable(view.columns) else view.columns
    kept: dict[str, Source] = {}
    for heading, source in columns.items():
        differs = len({_cell(source, row) for row in picked}) > 1
        if differs or not heading.endswith("?"):
            kept[heading.rstrip("?")] = source
    chosen = list(kept.items())[:MOST_COLUMNS]
    return Shown(
        headings=[heading for heading, _ in chosen],
        cells=[[_cell(source, row) for _, source in chosen] for row in picked],
        numeric=[any(_is_number(_value(source, row)) for row in picked) for _, source in chosen],
        rows=len(rows),
        note=view.note,
    )


def whole(rows: Rows) -> Shown:
    """Every row and column of a table, to four digits."""
    columns = list(rows[0])
    return Shown(
        headings=[plain_text(column) for column in columns],
        cells=[[cell(row[column], digits=4) for column in columns] for row in rows],
        numeric=[any(_is_number(row[column]) for row in rows) for column in columns],
        rows=len(rows),
        note="",
    )


def cell(value: Any, digits: int | None = None) -> str:
    """A value as text, on one line.

    >>> [cell(value) for value in (0.12345, 12.345, 1234.5, 4.3e-05, 0.0, float("nan"), None, True, 7)]
    ['0.123', '12.3', '1234', '4e-05', '0.000', '', '', 'yes', '7']
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return plain_text(str(value)).replace("\n", "\\n").replace("\t", "\\t")
    if digits is not None:
        return f"{value:.{digits}g}"
    if math.isnan(value):
        return ""
    size = abs(value)
    if size and size < 5e-4:
        return f"{value:.0e}"
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def _value(source: Source, row: Row) -> Any:
    if callable(source):
        return source(row)
    return row.get(source if isinstance(source, str) else source[0])


def _cell(source: Source, row: Row) -> str:
    text = cell(_value(source, row))
    if isinstance(source, tuple) and text:
        value, low, high = (row.get(name) for name in source)
        if _is_number(low) and _is_number(high):
            return "{} [{}, {}]".format(*map(_two, (value, low, high)))
    return text


def _two(value: Any) -> str:
    """A number beside its interval: two decimals, more only of large ones."""
    return f"{round(value, 2) + 0.0:.2f}" if abs(value) < 100 else f"{value:.0f}"  # never -0.00


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _differing(rows: Rows) -> dict[str, Source]:
    """The columns in which rows differ; of a single row, all."""
    names = list(rows[0])
    found = [name for name in names if len({cell(row.get(name)) for row in rows}) > 1] if len(rows) > 1 else names
    return {name: name for name in found or names}


# ---------------------------------------------------------------------- rows to show


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


def _of_swaps(rows: Rows) -> dict[str, Source]:
    several = len({row["head"] for row in rows}) > 1
    return {
        **({"head": "head"} if several else {}), "feature": "feature", "kind": "kind",
        **({} if several else {"rank": "rank"}), "before": "orig_before", "after": "orig_after",
        "shift": ("shift", "shift_low", "shift_high"),
    }  # fmt: skip


def _by(column: str, largest: bool = True) -> Callable[[Rows], Rows]:
    return lambda rows: sorted(rows, key=lambda row: row[column] or 0.0, reverse=largest)


def _where(column: str, value: Any) -> Callable[[Rows], Rows]:
    """These rows, or all where there are none."""
    return lambda rows: [row for row in rows if row[column] == value] or rows


def _last_step(rows: Rows) -> Rows:
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def _spread(rows: Rows) -> Rows:
    """The circuit's rows from the first to the last step, evenly."""
    own = [row for row in rows if row["circuit"]] or list(rows)
    places = {round(i * (len(own) - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)}
    return [own[place] for place in sorted(places)]


def _first_writers(rows: Rows) -> Rows:
    """The first writers of each head and side, as many of each as there is room for."""
    found: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        found.setdefault((row["head"], row["side"]), []).append(row)
    most = max(MOST_ROWS // max(len(found), 1), 1)
    order = sorted(found, key=lambda of: of[1])  # keys first; heads stay in their order
    return [row for of in order for row in found[of][:most]]


def _sides(rows: Rows) -> Rows:
    """Of every head the first of its key beside the first of its query, and so on."""
    found: dict[str, list[list[Row]]] = {}
    for row in rows:
        found.setdefault(row["head"], [[], []])[row["side"] == "query"].append(row)
    every = [zip(*sides, strict=True) for sides in found.values()]
    return [{**key, "query": query["writer"], "of_query": query["share"]} for own in every for key, query in own]


_SWAPPED = (
    "before, after: attention on the right key; shift: the share of both keys' attention that changes sides, 95% "
    "interval; random, key_pca: as many other directions."
)
_VERDICTS: Mapping[str, Any] = {
    "claim": "claim", "source": "source", "ours": ("ours", "low", "high"), "control": "control", "verdict": "verdict",
    "reason": "reason",
}  # fmt: skip
_CLAIMS = View(
    "claims",
    _VERDICTS,
    "source: the paper states or implies it, or it is ours; tie: the 95% interval leaves it open.",
)

_NAMED: tuple[Mapping[str, Source], str] = (
    {"head": "head", "name": "name", "share": ("share", "low", "high"), "precision": "precision", "by lot": "chance",
     "rest": "rest"},
    "share: of the logit, with its 95% interval by document; precision: how often the most attended key is the named "
    "one, where there is one; by lot: the same for a key drawn at random; rest: of the logit, not explained.",
)  # fmt: skip

VIEWS: Mapping[str, Sequence[View]] = {
    "trace": [
        View(
            "neurons",
            {"head?": "head", "neuron of the key": "writer", "share": "share", "at": "token",
             "neuron of the query": "query", "its share": "of_query"},
            "share: of the logit of the key over the others; at: the key token that most of it is from; M9.N120: neuron"
            " 120 of the MLP of layer 9.",
            _first_writers,
            _sides,
        ),
        View(
            "feature_pairs",
            {"head?": "head", "feature of the query": "query_feature", "of the key": "key_feature",
             "value": ("value", "low", "high"), "share": "share"},
            "value: what this pair gives to the logit of the key over the others; 95% interval by word, of a task.",
        ),
        View(
            "heads",
            {"head": "head", "key written by": "key_writer", "share": "key_share", "query written by": "query_writer",
             "its share": "query_share", "prompts": "n"},
            "share: of the logit of the right (or most attended) key over the others.",
            _by("key_share"),
        ),
        View(
            "writers",
            {"head?": "head", "side": "side", "writer": "writer", "value": ("value", "low", "high"), "share": "share"},
            "value: what this writer gives to the logit of the key over the others; 95% interval by word, of a task.",
            _first_writers,
        ),
    ],
    "heads": [View(
        "heads",
        {"head": "head", "accuracy": ("accuracy", "low", "high"), "chance": "chance", "row_accuracy": "row_accuracy",
         "ratio": ("ratio", "ratio_low", "ratio_high"), "mass": "mass"},
        "accuracy: the right key gets most of the named keys; row_accuracy: most of all tokens; ratio: its share of "
        "the named keys' attention; mass: their attention together; in brackets 95% intervals.",
    )],
    "decompose": [View(
        "ranks",
        {"head": "head", "contrast": "contrast", "rank": "rank", "detected": "detected", "rank_cv": "rank_cv",
         "verdict": "verdict"},
        "rank: dimensions kept; detected: directions above the null; rank_cv: dimensions that predict words left out.",
    )],
    "swap": [
        View(
            "downstream",
            {"swapped": lambda row: f"{row['feature']}, {row['kind']}", "in": "heads", "right before":
             "accuracy_before", "after": "accuracy_after", "target after": "target_after",
             "logit fell": ("fell", "low", "high")},
            "right: prompts that the model answers rightly; target: those it answers with the key swapped in; "
            "logit fell: right less target, 95% interval.",
        ),
        View("swap", _of_swaps, _SWAPPED, _swapped),
    ],
    "svd": [View(
        "rows",
        {"head": "head", "top": "top", "median": "median", "last": "last", "effective rank": "effective_rank",
         "error": "error"},
        "Singular values of the heads with fewest effective dimensions; error: of the factors multiplied out.",
        _by("effective_rank", largest=False),
    )],
    "sparsity": [
        View(
            "training",
            {"step": "step", "answers right?": "accuracy", "sparsity": "sparsity", "rotated": "rotated",
             "difference": ("difference", "low", "high"), "change": ("change", "change_low", "change_high")},
            "Means over the circuit; rotated: singular vectors turned at random; change: since the first step.",
            _spread,
        ),
        View(
            "sparsity",
            {"head": "head", "from": "from", "to": "to", "sparsity": "sparsity", "rotated": "rotated",
             "difference": ("difference", "low", "high")},
            "Edges of the circuit; rotated: singular vectors turned at random; difference with its 95% interval.",
            _where("circuit", True),
        ),
    ],
    "discover": [View("heads", *_NAMED)],
    "atlas": [View("atlas", *_NAMED)],
    "models": [View(
        "rows",
        {"family": "family", "outcome": "verdict", "tokens": "length", "why not": lambda row:
         row["reason"].partition(": ")[2] or row["reason"]},
        pick=_where("supported", False),
    )],
    "bench": [View(
        "rows", {"row": "name", "plain, s": "plain_s", "ours, s": "ours_s", "ratio": "ratio", "what": "note"},
    )],
    "list": [View("rows", {"paper": "paper", "figure": "figure", "shows": "shows"})],
    "lee2026": [_CLAIMS],
    "franco2026": [_CLAIMS],
    "demo": [View("swap", _of_swaps, _SWAPPED, _swapped)],
    "toy/retrieval": [View(
        "heads",
        {"variant?": "variant", "r1": "r1", "r2": "r2", "seed?": "seed", "steps": "steps", "accuracy": "accuracy",
         "ceiling": "ceiling"},
        "r1, r2: ranks of the two latents; ceiling: accuracy of a perfect head.",
    )],
    "toy/superposition": [View(
        "alignment",
        {"toy?": "config", "pair": "pair", "side": "side", "matched": "matched", "best": "best", "random":
         "best_random"},
        "|cos| of a feature with its own singular vector (matched), with the nearest (best), with a random direction.",
        _where("control", False),
    )],
    "train": [View(
        "accuracy",
        {"task": "task", "accuracy": ("accuracy", "low", "high"), "among keys": "choice", "chance": "chance"},
        "At the last step: prompts answered rightly, 95% interval; among keys: where only keys can be answered.",
        _last_step,
    )],
}  # fmt: skip
