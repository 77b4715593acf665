"""What there is to look at in a result, as blocks: words, rows, and the kind of chart that the page draws from them.

A table is drawn by its columns, whoever made it (`TABLES`): heads with an accuracy are a map, conditions with attention
before and after are bars, tokens with a logit are a prompt. Blocks are made of tables and arrays alone, so that a run
folder that is read back gives the page it gave at first. Words are said here; scripts only draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qkscope.analyses.clouds import clouds_of
from qkscope.analyses.discover.study import counted
from qkscope.heads import Head
from qkscope.runs.result import Result, plain_value

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]

_TOKEN = ("position", "token", "attention", "logit")
_SCORES = ("row_accuracy", "accuracy", "ratio", "mass")
_CONTROLS = {"random": "random, as {}", "key_pca": "key PCA, as {}", "cov_qk": "Cov q Cov k, as {}", "sham": "sham, {}"}
_PANELS = 24
_STEPS = 999  # of a point's coordinate: finer than a screen shows


@dataclass(frozen=True)
class Block:
    """One thing to look at: ``rows`` are what the reader can copy, ``options`` what the chart needs besides."""

    kind: str
    title: str
    words: str
    rows: Sequence[Row]
    options: Mapping[str, Any] = field(default_factory=dict)
    table: str = ""  # whose rows these are
    leads: bool = False  # told before the pictures


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
    return [*drawn, *_points(result)]


def number(value: Any, how: str = "") -> str:
    """A value as text, to four digits or as ``how`` says; a dash where there is none.

    >>> number(0.12345), number(-0.5, ".2f"), number(float("nan")), number(None), number(True), number(1.5e-7)
    ('0.1235', '−0.50', '–', '–', 'yes', '1.50e-7')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if how or isinstance(value, int):
        return format(value, how).replace("-", "−")
    if isinstance(value, float) and value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}".replace("-", "−") if isinstance(value, float) else str(value)


def _titled(title: str, name: str, usual: str) -> str:
    return title if name == usual else f"{title} ({name.replace('_', ' ')})"


# ---------------------------------------------------------------------- contrasts


def _map(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """A few heads of many are a table, and no map."""
    heads = [Head.parse(row["head"]) for row in rows]
    grid = (max(head.layer for head in heads) + 1) * (max(head.index for head in heads) + 1)
    if 2 * len(rows) >= grid:
        words = (
            "How often each head attends to the right key. Point at a head, or use the arrow keys; the interval is of "
            "the accuracy."
        )
        yield Block("map", "Every head", words, rows, {"scores": [s for s in _SCORES if s in rows[0]]}, name)


def _swaps(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    words = (
        "Attention on the right key and on the one it was swapped with, after the feature's coordinates were exchanged "
        "between them. Random subspaces of the same size stand beside each feature; the shift has its 95% interval by "
        "prompt."
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
    words = "Attention shifted when only the first k directions are swapped, with 95% intervals."
    yield Block("curve", _titled("How many dimensions it takes", name, "curve"), words, rows, table=name)


def _tokens(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    words = (
        "The prompt as it reads. Under each token: the parts of its attention logit, up for and down against; grey is "
        "what no feature explains. The last token asks."
    )
    parts = [c for c in rows[0] if c not in _TOKEN and all(isinstance(row.get(c), float | None) for row in rows)]
    yield Block("tokens", _titled("One prompt, split", name, "tokens"), words, rows, {"parts": parts}, name)


def _spectra(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    facts = {(row["contrast"], row["head"]): row for row in tables.get("ranks", ())}
    names = list(dict.fromkeys((row["contrast"], row["head"]) for row in rows))
    panels = [{**facts[at], "name": f"{at[0]} at {at[1]}"} for at in names[:_PANELS] if at in facts]
    more = f" {len(names) - len(panels)} more are in the table." if len(names) > len(panels) else ""
    words = (
        "Singular values of the contrast at each head, centred where it says so. The band is the same under its null, "
        "from the median to the 95% quantile, as far as components were tested; filled dots are the directions that "
        "were kept. Detected are those above the band, the more the more data there is; predictive those that rebuild "
        f"the contrast of words or prompts that were left out.{more}"
    )
    shown = [row for row in rows if (row["contrast"], row["head"]) in names[:_PANELS]]
    if panels:
        yield Block("spectra", "How many directions", words, shown, {"panels": panels}, name)


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


# ---------------------------------------------------------------------- features without labels


def _cards(name: str, heads: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """For each head its spectrum and a card per feature: what speaks for it, and the texts where it is strongest."""
    examples = tables.get("examples", ())
    for i, head in enumerate(heads):
        features, texts, spectrum = (
            [row for row in tables.get(each, ()) if row["head"] == head["head"]]
            for each in ("features", "examples", "spectrum")
        )
        options = {
            "cards": [_card(row) for row in features],
            "examples": texts,
            "spectrum": spectrum,
            "marks": _marks(examples) if i == 0 else [],  # said once
        }
        title = f"{head['head']}: {head['verdict']}"
        yield Block("cards", title, _head_words(head), features, options, "features", leads=True)


def _head_words(head: Row) -> str:
    said = (
        f"Queries and attended keys go together in {counted(head['directions'], 'direction')} above the shuffled null "
        f"(q {number(head['q'], '.2g')}, z {number(head.get('z'), '.1f')}), {counted(head['features'], 'feature')}; "
        f"{number(head['mass'], '.0%')} of its attention is off the first token; its features carry "
        f"{number(head['logit_share'], '.0%')} of the logit of the most attended key over another."
    )
    if head["diagonal"] is not None:
        shares = [number(head[column], ".0%") for column in ("diagonal", "diagonal_null")]
        said += f" Like meets like: {shares[0]} of the interaction (chance up to {shares[1]})."
    relation = _relation(head)
    return f"{said} It attends most to {relation}." if relation else said


def _relation(row: Row) -> str:
    """What the attended token is to the asking one, beside chance."""
    rate, chance = (number(row.get(name), ".0%") for name in ("relation_rate", "relation_chance"))
    return f"{row['relation']} ({rate}, chance {chance})" if row.get("relation") is not None else ""


def _marks(examples: Sequence[Row]) -> list[str]:
    """Which marks the texts have."""
    itself = any(row["query_start"] == row["key_start"] for row in examples)
    return [*(("query", "key") if examples else ()), *(("both",) if itself else ())]


def _card(row: Row) -> dict[str, Any]:
    facts = [
        f"query and key agree {number(row['match'], '.2f')} (chance {number(row['match_null'], '.2f')})",
        f"stability {number(row['stability'], '.2f')}",
        f"logit share {number(row['logit_share'], '.0%')}",
    ]
    if not row["identifiable"]:
        facts.insert(0, "only the span is a finding: its directions are not identifiable")
    if row.get("nearest_contrast"):
        chance = row.get("contrast_cos_chance")
        beside = "" if chance is None else f", chance {chance:.2f}"
        facts.append(f"nearest contrast {row['nearest_contrast']} (cos {number(row['contrast_cos'], '.2f')}{beside})")
    if row.get("singular_cos") is not None:
        facts.append(f"singular vector {row['singular_vector'] + 1} (cos {row['singular_cos']:.2f})")
    bars = [["this feature", row["carried"], row["carried_low"], row["carried_high"]]]
    for name in ("cov_qk", "key_pca", "random"):
        if f"carried_{name}" in row:
            bars.append([name.replace("_", " "), row[f"carried_{name}"], None, None])
    return {
        "feature": row["feature"], "facts": "; ".join(facts) + ".", "loose": not row["identifiable"], "bars": bars,
        "title": f"Feature {row['feature']}" + (f", {row['size']} dimensions" if row["size"] > 1 else ""),
    }  # fmt: skip


def _atlas(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    words = (
        "Directions in which queries and attended keys go together more than when passages exchange them "
        "(false-discovery rate 5% over all heads, z in units of the null): this says that they go together, not that "
        "the head uses it, and heads that only follow their mean query pass too. Beside it: what they carry of the "
        "logit between the most attended key and another, what the first two carry beside as many key principal "
        "components and random directions, and what the most attended token is to the asking one. Click a column to "
        "sort."
    )
    examples = tables.get("examples", ())
    texts = {row["head"]: row for row in reversed(examples)}  # the first of each head
    relations = {row["head"]: _relation(row) for row in rows}
    options = {"examples": texts, "relations": relations, "marks": _marks(examples)}
    yield Block("atlas", "Every head", words, rows, options, name, leads=True)


# ---------------------------------------------------------------------- who wrote it


def _graph(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """One picture for each logit that was followed down."""
    for root in (row for row in rows if row["kind"] == "root"):
        prompt = [row for row in tables.get("prompt", ()) if row["head"] == root["head"]]
        key = next((row["token"] for row in prompt if row["position"] == root["towards"]), "the key")
        unseen = " That is hardly any attention: what is drawn explains little." if root["attention"] < 0.05 else ""
        words = (
            f"{root['head']} gives {key!r} {number(root['attention'], '.0%')} of its attention; its logit over the "
            f"others is {number(root['value'], '.1f')}.{unseen} Solid lines lead down to who wrote the query and the "
            "key, to the tokens that these writers read, and to who wrote there, as wide as their share of the logit; "
            "the rest is not drawn. Dashed lines lead to why a head looked where it did, which is a logit of its own "
            "(main: writers with a fifth of it). Point at a place for its numbers; click it to follow it."
        )
        own = [row for row in rows if row["head"] == root["head"]]
        title = f"Who wrote the query and the key of {root['head']}"
        yield Block("graph", _titled(title, name, "graph"), words, own, {"prompt": prompt}, name, leads=True)


# ---------------------------------------------------------------------- the lists

TABLES: Sequence[tuple[set[str], Callable[[str, Sequence[Row], Tables], Iterator[Block]]]] = (
    ({"head", "accuracy", "row_accuracy", "chance"}, _map),
    ({"head", "condition", "orig_before", "target_before", "orig_after", "target_after", "shift", "shift_low",
      "shift_high"}, _swaps),
    ({"head", "method", "k", "shift", "low", "high"}, _curve),
    ({*_TOKEN}, _tokens),
    ({"head", "contrast", "component", "value", "null_median", "null_high", "kept"}, _spectra),
    ({"head", "directions", "features", "mass", "logit_share", "diagonal", "verdict"}, _cards),
    ({"head", "layer", "index", "directions", "mass", "logit_share", "carried", "verdict"}, _atlas),
    ({"head", "id", "parent", "kind", "side", "writer", "layer", "position", "towards", "share"}, _graph),
)  # fmt: skip
"""What a table is drawn as: the columns it is known by, and what makes its blocks."""

SCRIPTS = {
    "map": ["map.js"], "swaps": ["swaps.js"], "curve": ["curve.js"], "tokens": ["prompt.js"], "spectra": ["spectra.js"],
    "cards": ["spectra.js", "cards.js"], "atlas": ["cards.js", "atlas.js"], "cloud": ["cloud.js"],
    "graph": ["graph.js"],
}  # fmt: skip
"""What draws each kind of block."""
