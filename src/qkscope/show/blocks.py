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
from qkscope.heads import Head
from qkscope.runs.result import Result, plain_value
from qkscope.show import Block, Row, Tables, counted, named, number

_TOKEN = ("position", "token", "attention", "logit")
_SCORES = ("row_accuracy", "accuracy", "ratio", "mass")
_CONTROLS = {"random": "random, as {}", "key_pca": "key PCA, as {}", "cov_qk": "Cov q Cov k, as {}", "sham": "sham, {}"}
_VERDICTS = {
    "interaction": "depends on what is asked", "mean only": "not shown to depend on what is asked",
    "not above null": "not above chance", "untested": "could not be tested",
}  # fmt: skip
_COMMANDS = ("atlas",)  # blocks that say how to go on, which takes the model's name
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
    drawn = [replace(b, options={**b.options, "model": result.model}) if b.kind in _COMMANDS else b for b in drawn]
    return [*drawn, *_points(result)]


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


# ---------------------------------------------------------------------- writers, and why

_RIVALS = {
    "share": "share (this split)", "signed": "signed share", "norm": "length", "variance": "variance",
    "patching": "attribution patching", "path": "path patching", "random": "random",
}  # fmt: skip


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
        title = title if name == "graph" else f"{title} ({name})"
        leads = "said" not in tables  # where words lead, the picture comes last
        yield Block("graph", title, words, own, {"prompt": prompt}, name, leads)


_EDGES = (
    ("key", "cut", "Writers cut from the keys",
     "How often the head still prefers the right key when the parts of the first writers are taken out of its keys and "
     "take their mean instead."),
    ("both", "keep", "Writers kept on both sides",
     "How often it prefers the right key when only the first writers of its query and of its keys are as they are, and "
     "all others take their mean."),
)  # fmt: skip


def _edges(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """How often the head is still right with the first writers cut from its keys, and with only the first ones kept."""
    before = ", ".join(f"{row['head']} {number(row['accuracy'], '.0%')}" for row in tables.get("check", ()))
    rule = f"Before: {before}. Writers were chosen on other words, by each rule; 95% intervals by word."
    for side, kind, title, words in _EDGES:
        wanted = (side, kind, "mean", "held")
        own = [row for row in rows if (row["side"], row["kind"], row["replaced"], row["norms"]) == wanted]
        options = {"axis": f"writers {kind if kind == 'cut' else 'kept'}", "value": "right", "of": "writers",
                   "line": "by", "height": "accuracy", "names": _RIVALS}  # fmt: skip
        if own:
            yield Block("curve", title, f"{words} {rule}", own, options, name)


_COPIES = {
    "dictionary": "the dictionary", "rotated": "rotated", "random": "random rows",
    "features": "codes of other features", "tokens": "codes of other tokens",
}  # fmt: skip


_WAYS = {"pairs both": "pairs of features", "dictionary query": "parts of the query", "dictionary key": "of the key"}


def _features(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """A logit split by a dictionary: its largest pairs of features, and the parts of each side."""
    words = (
        "The logit of the key over the others, split by the dictionary. Each bar begins where the one above it ends;"
        " the last one is the logit. Error: what the dictionary misses of the stream; bias: its own and the model's;"
        " after: what layers between the dictionary and the head added."
    )
    for check in tables["check"]:
        head, logit = check["head"], check["logit"]
        pairs = {
            f"{row['query_feature']} × {row['key_feature']}": row["value"]
            for row in tables["feature_pairs"]
            if row["head"] == head
        }
        inside = logit * next(row["explained"] for row in tables["copies"] if row["head"] == head)
        pairs |= {"other pairs of features": inside - sum(pairs.values()), "with error, bias, after": logit - inside}
        drawn = [
            {"head": head, "by": "pairs", "side": "both", "part": part, "value": value, "share": value / logit}
            for part, value in pairs.items()
        ]
        drawn += [{**row, "by": "dictionary"} for row in rows if row["head"] == head]
        yield Block("parts", f"What matched at {head}, in features", words, drawn, {"ways": _WAYS}, name)


def _held(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """How much a dictionary's largest pairs hold, beside copies without meaning."""
    words = (
        "How much of all that is added to the logit, signs left out, the k largest pairs of features hold. A "
        "dictionary that says something holds much in few pairs; copies of it without meaning (turned, with random "
        "rows, with the codes of other features or of other tokens) show what any dictionary would hold. Lines: 95% "
        "intervals by word; of copies, the lowest and the highest draw."
    )
    options = {"axis": "pairs", "value": "held", "of": "pairs", "line": "kind", "height": "held", "names": _COPIES}
    yield Block("curve", "Pairs of features, and of copies without meaning", words, rows, options, name)


_SPLITS = {
    "writers key": "writers of the key", "writers query": "writers of the query", "singular both": "singular vectors",
    "features query": "features",
}  # fmt: skip


def _said(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """The lines of the answer, as a list."""
    yield Block("said", "In words", "", rows, table=name, leads=True)


def _parts(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """One logit, split in each way there is."""
    words = (
        "The logit of the key over the mean of the other tokens in sight, split. Each bar begins where the one above it"
        " ends; the last one is the logit. A writer is the embedding, a head (L0H0) or the MLP of a layer (M0)."
        " Rest: all parts that are not named."
    )
    there = {f"{row['by']} {row['side']}" for row in rows}
    ways = {way: said for way, said in _SPLITS.items() if way in there}
    yield Block("parts", "What matched", words, rows, {"ways": ways}, name)


def _cuts(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Writers cut and exchanged, beside random ones."""
    words = (
        "Attention on the key with its strongest writers cut: each one's part takes its mean over the prompt's other"
        " tokens. The band is what random writers of the same layers leave, the line what there was. Exchanged: the"
        " parts change places with another token's, and the attention there is drawn. Supported: the attention moves by"
        " more than a quarter, and further than with any of the random ones. Not here: it does not. Unattended: under"
        " 5% was there to move. Vacuous: all writers were exchanged, which shows nothing."
    )
    exchanged = [
        {**row, "side": "exchanged", "before": row["other_before"], "after": row["other_after"], "random_low": 0.0}
        for row in tables.get("swaps", ())
        if "other_after" in row
    ]
    yield Block("tests", "Causal tests", words, [_test(row) for row in (*rows, *exchanged)], table=name)


def _test(row: Row) -> Row:
    """A row with the words for what was done, and for what random writers left."""
    if row["side"] == "exchanged":
        done = f"exchanged with {row['other_token'].strip()} (token {row['other']})"
        return {**row, "done": done, "beside": f"random at most {number(row['random_high'], '.0%')}"}
    done = "cut from both" if row["side"] == "both" else f"cut from the {row['side']}"
    return {**row, "done": done, "beside": _random(row)}


def _random(row: Row) -> str:
    low, high = (number(row[end], ".0%") for end in ("random_low", "random_high"))
    return "" if row["random_high"] is None else f"random {low} to {high}"


def _output(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Next tokens before and after."""
    words = (
        "Chances of the next token, as they are and where the head may not look at the key (the whole model runs on)."
        " The line is the same without another key, the next most attended. Straight: what the head adds to the token's"
        " logit by what it read at the key, the last norm held."
    )
    yield Block("output", "What it does", words, rows, {"after": "without this attention"}, name)


def _changes(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Attention on the key before and after some changes, beside random changes of the same size."""
    words = (
        "Attention on the key with these changes: in this head, at this token. The band is what random changes of the"
        " same size leave, the line what there was. Supported: it falls by more than a quarter, and further than with"
        " any of the random ones. Vacuous: a whole key was exchanged, which is all that the head sees of a token."
    )
    shown = [{**row, "writers": row["changes"], "k": 1, "done": "", "beside": _random(row)} for row in rows]
    yield Block("tests", "What if", words, shown, table=name)


def _next_tokens(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    words = "Probability of the next token as it is, and with these changes: the model runs on from this head."
    shown = [
        {"token": row["token"], "before": row["before"], "without_key": row["after"], "without_other": None,
         "direct": None}
        for row in rows
    ]  # fmt: skip
    yield Block("output", "So what: the next token", words, shown, {"after": "with the changes"}, name)


# ---------------------------------------------------------------------- the lists

TABLES: Sequence[tuple[set[str], Callable[[str, Sequence[Row], Tables], Iterator[Block]]]] = (
    ({"head", "accuracy", "row_accuracy", "chance"}, _map),
    ({"head", "condition", "orig_before", "target_before", "orig_after", "target_after", "shift"}, _swaps),
    ({"head", "method", "k", "shift", "low", "high"}, _curve),
    ({*_TOKEN}, _tokens),
    ({"head", "contrast", "component", "value", "null_median", "null_high", "kept"}, _spectra),
    (named.COLUMNS, named.atlas),
    ({"head", "id", "parent", "kind", "side", "writer", "layer", "position", "towards", "share"}, _graph),
    ({"head", "side", "kind", "by", "replaced", "norms", "k", "accuracy", "logit_kept", "overshoots"}, _edges),
    ({"head", "side", "part", "value", "share", "low", "high"}, _features),
    ({"head", "kind", "k", "held", "low", "high"}, _held),
    ({"line"}, _said),
    ({"head", "query", "key", "part", "side", "value", "share", "by"}, _parts),
    ({"head", "side", "k", "writers", "before", "after", "control_low", "control_high", "verdict"}, _cuts),
    ({"head", "key", "token", "before", "without_key", "without_other", "direct"}, _output),
    ({"head", "changes", "before", "after", "random_low", "random_high", "moved", "verdict"}, _changes),
    ({"token", "before", "after"}, _next_tokens),
)
"""What a table is drawn as: the columns it is known by, and what makes its blocks."""

SCRIPTS = {
    "map": ["map.js"], "swaps": ["swaps.js"], "curve": ["curve.js"], "tokens": ["prompt.js"], "spectra": ["spectra.js"],
    "atlas": ["map.js", "atlas.js"],
    "cloud": ["cloud.js"],
    "graph": ["graph.js"], "said": ["why.js"], "parts": ["why.js"], "tests": ["why.js"],
    "output": ["why.js"],
}  # fmt: skip
"""What draws each kind of block."""
