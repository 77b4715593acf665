"""What there is to look at in a result, as blocks: words, rows, and the kind of chart that the page draws from them.

A table is drawn by its columns, whoever made it: heads with an accuracy are a map, conditions with attention before and
after are bars, tokens with a logit are a prompt. So a run folder that is read back gives the page it gave at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qkscope.analyses.clouds import Cloud, clouds_of
from qkscope.heads import Head
from qkscope.runs.result import Result

Row = Mapping[str, Any]

_MAP = {"head", "accuracy", "row_accuracy", "chance"}
_SWAP = {"head", "condition", "orig_before", "target_before", "orig_after", "target_after", "shift", "shift_low",
         "shift_high"}  # fmt: skip
_CURVE = {"head", "method", "k", "shift", "low", "high"}
_TOKENS = {"position", "token", "attention", "logit"}
_SPECTRUM = {"head", "contrast", "component", "value", "null_median", "null_high", "kept"}
_PANELS = 24
_CLOUDS = 8


@dataclass(frozen=True)
class Block:
    """One thing to look at: ``rows`` are what the reader can copy, ``options`` what the chart needs besides."""

    kind: str
    title: str
    words: str
    rows: Sequence[Row]
    options: Mapping[str, Any] = field(default_factory=dict)


def blocks_of(result: Result) -> list[Block]:
    """Everything of a result that can be drawn, in the order in which one would tell it."""
    return [*_tables(result), *_cloud_block(clouds_of(result))]


def drawn_tables(result: Result) -> set[str]:
    """Names of the tables that a chart shows whole."""
    return {name for name, rows in result.tables.items() if _kind(rows)}


def _kind(rows: Sequence[Row]) -> str:
    """Which chart shows these rows; a few heads of many are a table, and no map."""
    columns = set(rows[0]) if rows else set()
    if columns >= _MAP:
        heads = [Head.parse(row["head"]) for row in rows]
        grid = (max(head.layer for head in heads) + 1) * (max(head.index for head in heads) + 1)
        return "map" if 2 * len(rows) >= grid else ""
    if columns >= _SWAP:
        return "swaps"
    if columns >= _CURVE:
        return "curve"
    if columns >= _SPECTRUM:
        return "spectra"
    return "tokens" if columns >= _TOKENS else ""


def _tables(result: Result) -> Iterator[Block]:
    for name, rows in result.tables.items():
        kind = _kind(rows)
        if kind == "map":
            scores = [s for s in ("row_accuracy", "accuracy", "ratio", "mass") if s in rows[0]]
            yield Block("map", "Every head", "How often each head attends to the right key. Point at a head, or use "
                        "the arrow keys; the interval is of the accuracy.", rows, {"scores": scores})  # fmt: skip
        elif kind == "swaps":
            yield Block("swaps", _titled("Swapping features", name, "swap"),
                        "Attention on the right key and on the one it was swapped with, after the feature's "
                        "coordinates were exchanged between them. Random subspaces of the same size stand beside "
                        "each feature; the shift has its 95% interval by prompt.", rows)  # fmt: skip
        elif kind == "curve":
            yield Block("curve", _titled("How many dimensions it takes", name, "curve"),
                        "Attention shifted when only the first k directions are swapped, with 95% intervals.",
                        rows)  # fmt: skip
        elif kind == "spectra":
            yield from _spectra(rows, result.tables.get("ranks", ()))
        elif kind == "tokens":
            parts = [c for c in rows[0] if c not in _TOKENS and isinstance(rows[0][c], float)]
            yield Block("tokens", _titled("One prompt, split", name, "tokens"),
                        "The prompt as it reads. Under each token: the parts of its attention logit, up for and down "
                        "against; grey is what no feature explains. The last token asks.", rows,
                        {"parts": parts})  # fmt: skip


def _titled(title: str, name: str, usual: str) -> str:
    return title if name == usual else f"{title} ({name.replace('_', ' ')})"


def _spectra(rows: Sequence[Row], ranks: Sequence[Row]) -> Iterator[Block]:
    facts = {(row["contrast"], row["head"]): row for row in ranks}
    names = list(dict.fromkeys((row["contrast"], row["head"]) for row in rows))
    panels = [{**facts[name], "name": f"{name[0]} at {name[1]}"} for name in names[:_PANELS] if name in facts]
    if panels:
        more = len(names) - len(panels)
        shown = [row for row in rows if (row["contrast"], row["head"]) in names[:_PANELS]]
        yield Block("spectra", "How many directions", "Singular values of the contrast at each head, centred where "
                    "it says so. The band is the same under its null, from the median to the 95% quantile, as far as "
                    "components were tested; filled dots are the directions that were kept. Detected are those above "
                    "the band, the more the more data there is; predictive those that rebuild the contrast of words "
                    "or prompts that were left out."
                    + (f" {more} more are in the table." if more else ""), shown, {"panels": panels})  # fmt: skip


def _cloud_block(clouds: Sequence[Cloud]) -> Iterator[Block]:
    rows: list[Row] = []
    panels = []
    for cloud in clouds[:_CLOUDS]:
        for side, points in (("key", cloud.keys), ("query", cloud.queries)):
            labels = {
                by: [colouring.names[i] if 0 <= i < len(colouring.names) else None for i in
                     (colouring.keys if side == "key" else colouring.queries)]
                for by, colouring in cloud.colourings.items()
            }  # fmt: skip
            for i, (x, y, z) in enumerate(points.tolist()):
                at = {"x": round(x, 4), "y": round(y, 4), "z": round(z, 4)}
                rows.append({"cloud": cloud.title, "side": side, **at} | {by: of[i] for by, of in labels.items()})
        panels.append({
            "name": cloud.title,
            "colourings": {by: {"names": c.names, "ordered": c.ordered} for by, c in cloud.colourings.items()},
        })  # fmt: skip
    if panels:
        yield Block("cloud", "Keys and queries in the subspace",
                    "Three principal components of the feature's subspace. Drag to turn, or use the arrow keys; "
                    "point at one to read it.", rows, {"panels": panels})  # fmt: skip
