"""Reasons: the words that decide a look, who carried them, and every head by its rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qkscope.heads import Head
from qkscope.results.result import Record, Tables
from qkscope.show import PAGE_NAMES, Block, drawing, number
from qkscope.text import grouped

_CAUSES = {"yes": "shown", "open": "open"}
"""The verdict that a page colours, by whether a word is a cause."""
"""What the map of heads says of a head's score."""


def family_of(kind: str) -> str:
    """The family of a head's kind: positions are one.

    >>> family_of("position -2"), family_of("induction")
    ('position', 'induction')
    """
    return "position" if kind.startswith("position") else kind


@drawing("atlas", "head", "kind", "rule", "rest", "iou", "mean_row_iou", "cost", leads=True)
def _atlas(block: Block, tables: Tables) -> Iterator[Block]:
    """Every head.

    Each head by a rule that gives its attention from the text alone: fitted on some documents, its
    rows set beside the head's own on others (IoU), and the head's mean row by distance beside both.
    Rest is the weight of that mean row in the rule; over .5 counts as no rule. Cost is the rise of
    perplexity with the rule in the head's place. Click a head on the map, a kind to see its heads
    alone, a column to sort, a line to open it.
    """
    kinds = {row["head"]: family_of(row["kind"]) for row in block.rows}
    counts = Counter(kinds.values())
    families = {}
    for family, text in PAGE_NAMES["families"].items():
        if counts[family]:
            families[family] = [text, counts[family]]
    rows = []
    for row in block.rows:
        head = Head.parse(row["head"])
        rows.append({**row, "layer": head.layer, "index": head.index})
    beside = {row["head"]: dict(row) for row in tables.get("baselines", ())}
    looks = grouped(tables.get("examples", ()), lambda row: row["head"])
    options = {"families": families, "of": kinds, "beside": beside, "looks": looks}
    yield replace(block, rows=rows, options=options)


@drawing(
    "tests",
    "head",
    "position",
    "text",
    "before",
    "after",
    "low",
    "high",
    "goes_to",
    "cause",
    leads=True,
)
def _words(block: Block, tables: Tables) -> Iterator[Block]:
    """Because: words replaced.

    Attention on the key with one word of the prompt replaced by others with as many tokens: half
    likely, half random. The bar is what is left, the band its 90% interval over these words, the
    line the attention before. A word is a cause (shown) if the whole band is below half of that,
    and open if the band straddles half.
    """
    yield replace(block, rows=[_word_row(row) for row in block.rows])


def _word_row(row: Record) -> dict[str, Any]:
    """A word's row, with what the chart of tests calls its columns."""
    shown = dict(row)
    text = row["text"].strip() or row["text"]
    shown["writers"] = f"{text!r} (token {row['position']})"
    shown["band"] = "90% interval"
    shown["done"] = f"replaced by {row['words']} others"
    shown["control_low"] = row["low"]
    shown["control_high"] = min(row["high"], 1.0)
    shown["beside"] = f"attention goes to {row['goes_to']!r}"
    shown["verdict"] = _CAUSES.get(row["cause"], "no")
    return shown


@drawing(
    "tests",
    "head",
    "side",
    "writers",
    "before",
    "changed",
    "restored",
    "others",
    "other_run",
    "whole_side",
)
def _carriers(block: Block, tables: Tables) -> Iterator[Block]:
    """Carried by.

    The word is replaced, and what these writers wrote in the original prompt is restored in this
    head's key or query alone, norms live (path patching). The bar is the attention then; the band
    reaches from what the replacement left to what 20 other sets of writers of these layers restore;
    the line is the attention before. Shown: at least half of what was lost comes back, and at most
    a tenth with other writers, or with these writers from another replacement.
    """
    yield replace(block, rows=[_carrier_row(row) for row in block.rows])


def _carrier_row(row: Record) -> dict[str, Any]:
    """Carriers of a word, with what the chart of tests calls their columns."""
    shown = dict(row)
    word = f"{row['text'].strip()} (token {row['position']})"
    changed = row["changed"]
    others = row["others"]
    shown["done"] = f"restored in the {row['side']}, {word} replaced"
    shown["after"] = row["restored"]
    shown["control_low"] = min(changed, others)
    shown["band"] = "replaced, to control"
    shown["control_high"] = max(changed, others)
    shown["beside"] = f"replaced {number(changed, '.0%')}, control {number(others, '.0%')}"
    return shown
