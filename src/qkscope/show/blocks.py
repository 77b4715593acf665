"""What there is to look at in a result, as blocks: words, rows, and the kind of chart that the page
draws from them.

A table is drawn by its columns, whoever made it (`drawing`): heads with an accuracy are a map,
conditions before and after are bars, tokens with a logit are a prompt. Blocks are made of tables
and arrays alone, so that a run folder that is read back gives the page it gave at first. Words are
said here, in the docstrings: the first line is the title of a block, the rest stands beside its
chart. Scripts only draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qkscope.heads import Head
from qkscope.results.result import Record, Records, Result, Tables, plain_value
from qkscope.show import PAGE_NAMES, TABLE_DRAWINGS, Block, counted, drawing, number
from qkscope.show import reasons as reasons

SCRIPTS: dict[str, list[str]] = PAGE_NAMES["scripts"]
"""What draws a kind of block, where that is not the script of its name alone."""

_TOKEN = ("position", "token", "attention", "logit")
_SCORES = ("row_accuracy", "accuracy", "ratio", "mass")
_PANELS = 24


def blocks_of(result: Result) -> list[Block]:
    """Everything of a result that can be drawn, in the order in which one would tell it."""
    tables = plain_value(result.tables)
    return [
        replace(
            block, options={**block.options, "model": result.model}
        )  # for the commands that a chart names
        for name, rows in tables.items()
        for columns, draw in TABLE_DRAWINGS
        if rows and columns <= set(rows[0])
        for block in draw(name, rows, tables)
    ]


@drawing("map", "head", "accuracy", "row_accuracy", "chance")
def _map(block: Block, tables: Tables) -> Iterator[Block]:
    """Every head.

    How often each head attends to the right key, in colour. Record accuracy: most of all tokens;
    accuracy: most of the named keys. Point at a head, or use the arrow keys, for its scores with
    95% intervals and what chance gives.
    """
    heads = [Head.parse(row["head"]) for row in block.rows]
    grid = (max(head.layer for head in heads) + 1) * (max(head.index for head in heads) + 1)
    if 2 * len(heads) >= grid:  # a few heads of many are a table, and no map
        yield replace(
            block, options={"scores": [score for score in _SCORES if score in block.rows[0]]}
        )


@drawing(
    "swaps",
    "head",
    "condition",
    "orig_before",
    "target_before",
    "orig_after",
    "target_after",
    "shift",
    usual="swap",
)
def _swaps(block: Block, tables: Tables) -> Iterator[Block]:
    """Swapping features.

    The feature's coordinates are exchanged between the right key and another, the target. If the
    head uses the feature, its attention moves to the target; the shift says how far (1: all of it).
    Below are controls: subspaces of the same size, chosen in other ways. Lines are 95% intervals
    over prompts.
    """
    yield replace(
        block, options={"conditions": {row["condition"]: _condition(row) for row in block.rows}}
    )


def _condition(row: Record) -> dict[str, Any]:
    """What a condition is called, whether it is a control, and the name whose colour it has."""
    feature = row.get("feature", row["condition"])
    kind = row.get("kind", "feature")
    other = "{}" if kind == "feature" else f"{{}}, {kind.replace('_', ' ')}"
    name = PAGE_NAMES["controls"].get(kind, other).format(feature.replace("_", " "))
    return {
        "name": name,
        "control": kind in PAGE_NAMES["controls"],
        "of": kind if kind in PAGE_NAMES["controls"] else feature,
    }


@drawing("curve", "head", "method", "k", "shift", "low", "high", usual="curve")
def _curve(block: Block, tables: Tables) -> Iterator[Block]:
    """How many dimensions it takes.

    How far the attention moves when only the first k directions are swapped, with 95% intervals
    over prompts.
    """
    yield block


@drawing("pattern", "head", "query", "key", "token", "attention", usual="pattern")
def _pattern(block: Block, tables: Tables) -> Iterator[Block]:
    """Attention patterns.

    From each token (row) to those before it (column); darker is more. Point at a cell for its
    attention.
    """
    for head in dict.fromkeys(row["head"] for row in block.rows):
        rows = [row for row in block.rows if row["head"] == head]
        yield replace(block, title=f"Attention pattern of {head}", rows=rows)


def _parts_of(rows: Records) -> list[str]:
    return [
        c
        for c in rows[0]
        if c not in _TOKEN and all(isinstance(row.get(c), float | None) for row in rows)
    ]


@drawing("tokens", *_TOKEN, usual="attention")
def _attention(block: Block, tables: Tables) -> Iterator[Block]:
    """Where it looks.

    The prompt, shaded by the head's attention. The underlined token is the query.
    """
    if not _parts_of(block.rows):
        keys = {row["key"] for row in tables.get("parts", ())}
        at = next((row["position"] for row in block.rows if row["position"] in keys), None)
        yield replace(block, options={"parts": [], "key": at})


@drawing("tokens", *_TOKEN, usual="tokens")
def _tokens(block: Block, tables: Tables) -> Iterator[Block]:
    """One prompt, split.

    The prompt. Under each token: the parts of its attention logit, up for and down against; grey is
    what no feature explains. The last token is the query.
    """
    if parts := _parts_of(block.rows):
        yield replace(block, options={"parts": parts})


@drawing("spectra", "head", "contrast", "component", "value", "null_median", "null_high", "kept")
def _spectra(block: Block, tables: Tables) -> Iterator[Block]:
    """How many directions.

    How much each direction of a contrast weighs at a head (singular values, the largest first). The
    band is what chance gives, from its median to its 95% quantile, as far as directions were
    tested. Filled dots were kept. For new words: directions that predict the contrast of words or
    prompts left out of the fit. Centred: what all queries share was subtracted first.
    """
    facts = {(row["contrast"], row["head"]): row for row in tables.get("ranks", ())}
    names = list(dict.fromkeys((row["contrast"], row["head"]) for row in block.rows))
    panels = [_panel(facts[at]) for at in names[:_PANELS] if at in facts]
    more = f" {len(names) - len(panels)} more are in the table." if len(names) > len(panels) else ""
    shown = [row for row in block.rows if (row["contrast"], row["head"]) in names[:_PANELS]]
    if panels:
        yield replace(block, words=block.words + more, rows=shown, options={"panels": panels})


def _panel(facts: Record) -> dict[str, Any]:
    """A contrast at a head, and what is said of its directions."""
    new = f", {facts['rank_cv']} for new words" if "rank_cv" in facts else ""
    centred = ", centred" if facts.get("center", "none") != "none" else ""
    lines = [
        f"{facts['contrast']} at {facts['head']}",
        f"{counted(facts['rank'], 'direction')} kept",
        f"{facts['detected']} above chance{new}",
        f"{PAGE_NAMES['verdicts'].get(facts['verdict'], facts['verdict'])}{centred}",
    ]
    return {"head": facts["head"], "contrast": facts["contrast"], "lines": lines}


# ---------------------------------------------------------------------- writers, and why


@drawing("graph", "head", "source", "target", "kind", "of", "value", "share", usual="graph")
def _graph(block: Block, tables: Tables) -> Iterator[Block]:
    """Back to the words.

    Solid lines lead down to the writers, to the writers of what those read, and on to the words; a
    line is as wide as its share, and what is not drawn is added up as the rest at each node. Dashed
    lines lead to why a head looked where it did, which is a logit of its own (main: writers with a
    fifth of it). Point at a node for its numbers; click it to follow it.
    """
    for head in dict.fromkeys(row["head"] for row in block.rows):
        nodes = [row for row in tables["nodes"] if row["head"] == head]
        prompt = [row for row in tables.get("prompt", ()) if row["head"] == head]
        rows = [row for row in block.rows if row["head"] == head]
        # words go before it
        root = nodes[0]
        leads = "said" not in tables
        head = "the answer" if root["attention"] is None else head
        told = f"The answer leads its rival by {number(root['value'], '.1f')} logits."
        if root["attention"] is not None:
            key = next(
                (row["token"] for row in prompt if row["position"] == root["towards"]), "the key"
            )
            unseen = (
                " That is hardly any attention: what is drawn explains little."
                if root["attention"] < 0.05
                else ""
            )
            told = (
                f"{head} gives {key!r} {number(root['attention'], '.0%')} of its attention; its logit over the others"
                f" is {number(root['value'], '.1f')}.{unseen}"
            )
        title = f"{block.title} from {head}"
        options = {"prompt": prompt, "nodes": nodes}
        yield replace(
            block,
            title=title,
            words=f"{told} {block.words}",
            rows=rows,
            options=options,
            leads=leads,
        )


@drawing("curve", "by", "replaced", "done", "k", "share", "low", "high")
def _kept(block: Block, tables: Tables) -> Iterator[Block]:
    """What the first nodes keep in the running model.

    The answer's lead over its rival, as a share of what it is, where only the first k nodes
    (writers at tokens) run and all others take their mean over other prompts. Nodes against the
    answer come last, so a share can exceed 1.
    """
    rows = [
        {**row, "head": ""}
        for row in block.rows
        if (row["replaced"], row["done"]) == ("mean", "kept") and row["k"]
    ]
    yield replace(block, rows=rows, options=PAGE_NAMES["nodes"])


_EDGES = (
    "head",
    "side",
    "kind",
    "by",
    "replaced",
    "norms",
    "k",
    "accuracy",
    "logit_kept",
    "overshoots",
)


@drawing("curve", *_EDGES)
def _cut_edges(block: Block, tables: Tables) -> Iterator[Block]:
    """Writers cut from the keys.

    How often the head still prefers the right key when the parts of the first writers are taken out
    of its keys, in this head alone and with norms held, and take their mean instead, or another
    prompt's parts.
    """
    return _edges(block, tables, ("key", "cut"), "writers cut")


@drawing("curve", *_EDGES)
def _kept_edges(block: Block, tables: Tables) -> Iterator[Block]:
    """Writers kept on both sides.

    How often it prefers the right key when only the first writers of its query and of its keys stay
    as they are, in this head alone and with norms held, and all others take their mean, or another
    prompt's parts.
    """
    return _edges(block, tables, ("both", "keep"), "writers kept")


def _edges(block: Block, tables: Tables, which: tuple[str, str], axis: str) -> Iterator[Block]:
    before = ", ".join(
        f"{row['head']} {number(row['accuracy'], '.0%')}" for row in tables.get("check", ())
    )
    words = f"{block.words} Before: {before}. Writers were chosen on other words, by each rule; 95% intervals by word."
    rows = [
        row for row in block.rows if (row["side"], row["kind"], row["norms"]) == (*which, "held")
    ]
    rows = [{**row, "by": "resample"} if row["replaced"] != "mean" else row
            for row in rows if row["replaced"] == "mean" or row["by"] == "share"]  # fmt: skip
    if rows:
        yield replace(block, words=words, rows=rows, options={**PAGE_NAMES["edges"], "axis": axis})


@drawing("parts", "head", "side", "part", "value", "share", "low", "high")
def _features(block: Block, tables: Tables) -> Iterator[Block]:
    """What matched in features.

    The logit of the key over the others, split by the dictionary. Each bar begins where the one
    above it ends; the last one is the logit. Error: what the dictionary misses of the stream; bias:
    its own and the model's; after: what layers between the dictionary and the head added.
    """
    for check in tables["check"]:
        head = check["head"]
        logit = check["logit"]
        pairs = {
            f"{row['query_feature']} × {row['key_feature']}": row["value"]
            for row in tables["feature_pairs"]
            if row["head"] == head
        }
        inside = logit * next(row["explained"] for row in tables["copies"] if row["head"] == head)
        pairs |= {
            "other pairs of features": inside - sum(pairs.values()),
            "with error, bias, after": logit - inside,
        }
        rows = [
            {
                "head": head,
                "by": "pairs",
                "side": "both",
                "part": part,
                "value": value,
                "share": value / logit,
            }
            for part, value in pairs.items()
        ]
        rows += [{**row, "by": "dictionary"} for row in block.rows if row["head"] == head]
        title = f"What matched at {head}, in features"
        yield replace(block, title=title, rows=rows, options={"ways": PAGE_NAMES["dictionary"]})


@drawing("curve", "head", "side", "edge", "k", "kind", "after", "low", "high")
def _feature_edges(block: Block, tables: Tables) -> Iterator[Block]:
    """Features cut from the key, and those of copies without meaning.

    Attention left when the features of the first k pairs are set to their mean in this head's key.
    A meaningful dictionary takes it away with few pairs; copies without meaning (rotated, with
    random rows, with the codes of other features or other tokens) show what any dictionary would
    do. Lines: 95% intervals by word; for copies, the lowest and the highest draw.
    """
    rows = [row for row in block.rows if (row["side"], row["edge"]) == ("key", "ablated")]
    yield replace(block, rows=rows, options=PAGE_NAMES["feature_edges"])


@drawing("said", "line", leads=True)
def _said(block: Block, tables: Tables) -> Iterator[Block]:
    """In words."""
    yield block


@drawing("parts", "head", "query", "key", "part", "side", "value", "share", "by")
def _parts(block: Block, tables: Tables) -> Iterator[Block]:
    """What matched.

    The logit of the key over the mean of the other tokens in sight, split. Each bar begins where
    the one above it ends; the last one is the logit. A writer is the embedding, a head (L0H0) or
    the MLP of a layer (M0). Rest: all parts that are not named.
    """
    there = {f"{row['by']} {row['side']}" for row in block.rows}
    yield replace(
        block,
        options={
            "ways": {way: words for way, words in PAGE_NAMES["splits"].items() if way in there}
        },
    )


@drawing(
    "tests",
    "head",
    "side",
    "k",
    "writers",
    "before",
    "after",
    "control_low",
    "control_high",
    "verdict",
)
def _cuts(block: Block, tables: Tables) -> Iterator[Block]:
    """Writers cut.

    Attention on the key with its strongest writers cut, in this head alone and with norms frozen:
    each one's part takes its mean over the prompt's other tokens (mean ablation). The band is what
    random writers of the same layers leave, the line the attention before. Supported: it falls by
    more than a quarter, and further than with any random writers. Not here: it does not.
    Unattended: there was under 5% to begin with.
    """
    sides = {"both": "cut from both", "key": "cut from the key", "query": "cut from the query"}
    yield replace(
        block, rows=[{**row, "done": sides[row["side"]], **_beside(row)} for row in block.rows]
    )


def _beside(row: Record) -> dict[str, str]:
    """The words for what random changes left."""
    low = number(row["control_low"], ".0%")
    high = number(row["control_high"], ".0%")
    return {"beside": "" if row["control_high"] is None else f"control {low} to {high}"}


@drawing("decide", "head", "key", "token", "probability", "difference", "direction", leads=True)
def _deciding(block: Block, tables: Tables) -> Iterator[Block]:
    """Heads that decide."""
    yield block


@drawing("output", "head", "key", "token", "before", "without_key", "without_other", "direct")
def _output(block: Block, tables: Tables) -> Iterator[Block]:
    """Effect on the next token.

    Its probability, before and with the key hidden from this head (attention knockout; the whole
    model runs on). The line is the same with its second key hidden instead. Direct: what the head
    adds to the token's logit by what it read at the key, the last norm frozen.
    """
    yield replace(block, options={"after": "with this key hidden"})


@drawing("tests", "head", "changes", "before", "after", "control_low", "control_high", "verdict")
def _changes(block: Block, tables: Tables) -> Iterator[Block]:
    """What if.

    The head's attention on the key with these changes. The band is what controls leave (other heads
    of the layer ablated, or with that key hidden; for an MLP, those of other layers), the line the
    attention before. Supported: it falls by more than a quarter, and further than with any control.
    """
    told = {"done": "", "band": "controls"}
    yield replace(
        block,
        rows=[{**row, "writers": row["changes"], **told, **_beside(row)} for row in block.rows],
    )


@drawing("output", "token", "before", "after")
def _next_tokens(block: Block, tables: Tables) -> Iterator[Block]:
    """The next token.

    Probability of the next token, before and with these changes.
    """
    rows = [
        {**row, "without_key": row["after"], "without_other": None, "direct": None}
        for row in block.rows
    ]
    yield replace(block, rows=rows, options={"after": "with the changes"})
