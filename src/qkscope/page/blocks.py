"""What there is to look at in a result, as blocks: words, rows, and the kind of chart that the page draws from them.

A table is drawn by its columns, whoever made it (`TABLES`): heads with an accuracy are a map, conditions with attention
before and after are bars, tokens with a logit are a prompt. Blocks are made of tables and arrays alone, so that a run
folder that is read back gives the page it gave at first. Words are said here; scripts only draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from qkscope.analyses.clouds import clouds_of
from qkscope.analyses.names.study import counted
from qkscope.heads import Head
from qkscope.page import discovered, traced
from qkscope.page.block import Block, Row, Tables
from qkscope.runs.result import Result, plain_value

_TOKEN = ("position", "token", "attention", "logit")
_SCORES = ("row_accuracy", "accuracy", "ratio", "mass")
_CONTROLS = {"random": "random, as {}", "key_pca": "key PCA, as {}", "cov_qk": "Cov q Cov k, as {}", "sham": "sham, {}"}
_VERDICTS = {
    "interaction": "depends on what is asked", "mean only": "not shown to depend on what is asked",
    "not above null": "not above chance", "untested": "could not be tested",
}  # fmt: skip
_COMMANDS = ("atlas", "cards")  # blocks that say how to go on, which takes the model's name
_PANELS = 24
_STEPS = 999  # of a point's coordinate: finer than a screen shows


def blocks_of(result: Result) -> list[Block]:
    """Everything of a result that can be drawn, in the order in which one would tell it."""
    tables = plain_value(result.tables)
    drawn = [
        block
        for name, rows in tables.items()
        for columns, draw in TABLES
        if rows and columns <= set(rows[0])
        for block in draw(name, rows, tables)
    ]
    named = [replace(b, options={**b.options, "model": result.model}) if b.kind in _COMMANDS else b for b in drawn]
    return [*named, *_points(result)]


def _titled(title: str, name: str, usual: str) -> str:
    return title if name == usual else f"{title} ({name.replace('_', ' ')})"


# ---------------------------------------------------------------------- contrasts


def _map(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """A few heads of many are a table, and no map."""
    heads = [Head.parse(row["head"]) for row in rows]
    grid = (max(head.layer for head in heads) + 1) * (max(head.index for head in heads) + 1)
    if 2 * len(rows) >= grid:
        words = (
            "How often each head attends to the right key, in colour. Point at a head, or use the arrow keys: its "
            "share of prompts comes with a 95% interval and with what chance gives."
        )
        yield Block("map", "Every head", words, rows, {"scores": [s for s in _SCORES if s in rows[0]]}, name)


def _swaps(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    words = (
        "The feature's coordinates are exchanged between the right key and another, the target. If the head uses the "
        "feature, its attention moves to the target; the shift says how far (1: all of it). Subspaces of the same size "
        "that were chosen otherwise stand below. Lines are 95% intervals over prompts."
    )
    said = {row["condition"]: _condition(row) for row in rows}
    yield Block("swaps", _titled("Swapping features", name, "swap"), words, rows, {"conditions": said}, name)


def _condition(row: Row) -> dict[str, Any]:
    """What a condition is called, whether it is a control, and the name whose colour it has."""
    feature, kind = row.get("feature", row["condition"]).replace("_", " "), row.get("kind", "feature")
    other = "{}" if kind == "feature" else f"{{}}, {kind.replace('_', ' ')}"
    of = kind if kind in _CONTROLS else row.get("feature", row["condition"])
    return {"name": _CONTROLS.get(kind, other).format(feature), "control": kind in _CONTROLS, "of": of}


def _curve(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    words = "How far the attention moves when only the first k directions are swapped, with 95% intervals over prompts."
    yield Block("curve", _titled("How many dimensions it takes", name, "curve"), words, rows, table=name)


def _tokens(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    parts = [c for c in rows[0] if c not in _TOKEN and all(isinstance(row.get(c), float | None) for row in rows)]
    if not parts:
        words = "The prompt as it reads, filled by the head's attention. The last token asks."
        at = next(
            (row["position"] for row in rows if row["position"] in {p["key"] for p in tables.get("parts", ())}), None
        )
        yield Block("tokens", _titled("Where it looks", name, "attention"), words, rows, {"parts": [], "key": at}, name)
        return
    words = (
        "The prompt as it reads. Under each token: the parts of its attention logit, up for and down against; grey is "
        "what no feature explains. The last token asks."
    )
    yield Block("tokens", _titled("One prompt, split", name, "tokens"), words, rows, {"parts": parts}, name)


def _spectra(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    facts = {(row["contrast"], row["head"]): row for row in tables.get("ranks", ())}
    names = list(dict.fromkeys((row["contrast"], row["head"]) for row in rows))
    panels = [_panel(facts[at]) for at in names[:_PANELS] if at in facts]
    more = f" {len(names) - len(panels)} more are in the table." if len(names) > len(panels) else ""
    words = (
        "How much each direction of a contrast weighs at a head (singular values, the largest first). The band is what "
        "chance gives, from its median to its 95% quantile, as far as directions were tested. Filled dots were kept. "
        "Directions that hold for new words or prompts rebuild the contrast of those that were left out; where it says "
        f"centred, what all queries share was taken out first.{more}"
    )
    shown = [row for row in rows if (row["contrast"], row["head"]) in names[:_PANELS]]
    if panels:
        yield Block("spectra", "How many directions", words, shown, {"panels": panels}, name)


def _panel(facts: Row) -> dict[str, Any]:
    """A contrast at a head, and what is said of its directions."""
    new = f", {facts['rank_cv']} for new words" if "rank_cv" in facts else ""
    centred = ", centred" if facts.get("center", "none") != "none" else ""
    return {
        "head": facts["head"], "contrast": facts["contrast"],
        "lines": [
            f"{facts['contrast']} at {facts['head']}",
            f"{counted(facts['rank'], 'direction')} kept",
            f"{facts['detected']} above chance{new}",
            f"{_VERDICTS.get(facts['verdict'], facts['verdict'])}{centred}",
        ],
    }  # fmt: skip


def _points(result: Result) -> Iterator[Block]:
    """Points that can be turned, in thousandths of the farthest; the script makes a row of each."""
    panels: list[dict[str, Any]] = []
    ways: list[dict[str, Any]] = []
    for cloud in clouds_of(result):
        sides = (cloud.keys, cloud.queries)
        unit = (max((float(side.abs().max()) for side in sides if side.numel()), default=0.0) or 1.0) / _STEPS
        keys, queries = ((side / unit).round().int().flatten().tolist() for side in sides)
        labels = {by: asdict(colouring) for by, colouring in cloud.colourings.items()}
        if labels not in ways:  # heads of one run share them
            ways.append(labels)
        at = ways.index(labels)
        panels.append({"name": cloud.title, "unit": unit, "keys": keys, "queries": queries, "labels": at})
    words = (
        "Three principal components of the feature's subspace, in one scale. Drag to turn, or use the arrow keys; "
        "point at one to read it."
    )
    if panels:
        options = {"panels": panels, "labels": ways}
        yield Block("cloud", "Keys and queries in the subspace", words, [], options, "clouds")


# ---------------------------------------------------------------------- the lists

TABLES: Sequence[tuple[set[str], Callable[[str, Sequence[Row], Tables], Iterator[Block]]]] = (
    ({"head", "accuracy", "row_accuracy", "chance"}, _map),
    ({"head", "condition", "orig_before", "target_before", "orig_after", "target_after", "shift", "shift_low",
      "shift_high"}, _swaps),
    ({"head", "method", "k", "shift", "low", "high"}, _curve),
    ({*_TOKEN}, _tokens),
    ({"head", "contrast", "component", "value", "null_median", "null_high", "kept"}, _spectra),
    (discovered.NAMED, discovered.named),
    ({"reader", "side", "writer", "share", "n"}, discovered.reads),
    ({"head", "id", "parent", "kind", "side", "writer", "layer", "position", "towards", "share"}, traced.graph),
    ({"head", "side", "kind", "by", "replaced", "norms", "k", "accuracy", "logit_kept", "overshoots"}, traced.edges),
    ({"head", "side", "part", "value", "share", "low", "high"}, traced.features),
    ({"head", "kind", "k", "held", "low", "high"}, traced.held),
    ({"line"}, traced.said),
    ({"head", "query", "key", "part", "side", "value", "share", "by"}, traced.parts),
    ({"head", "side", "k", "writers", "before", "after", "random_low", "random_high", "top_token", "verdict"},
     traced.cuts),
    ({"head", "key", "token", "before", "without_key", "without_other", "direct"}, traced.output),
)  # fmt: skip
"""What a table is drawn as: the columns it is known by, and what makes its blocks."""

SCRIPTS = {
    "map": ["map.js"], "swaps": ["swaps.js"], "curve": ["curve.js"], "tokens": ["prompt.js"], "spectra": ["spectra.js"],
    "cards": ["passage.js", "named.js", "cards.js"], "atlas": ["map.js", "passage.js", "named.js", "atlas.js"],
    "cloud": ["cloud.js"],
    "graph": ["graph.js"], "reads": ["reads.js"], "said": ["why.js"], "parts": ["why.js"], "tests": ["why.js"],
    "output": ["why.js"],
}  # fmt: skip
"""What draws each kind of block."""
