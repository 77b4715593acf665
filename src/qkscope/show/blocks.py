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
from qkscope.results.result import Record, Records, Result, Rows, Tables, plain_value
from qkscope.show import PAGE_NAMES, TABLE_DRAWINGS, Block, counted, drawing, number
from qkscope.show import reasons as reasons

SCRIPTS: dict[str, list[str]] = PAGE_NAMES["scripts"]
"""What draws a kind of block, where that is not the script of its name alone."""

_TOKEN = ("position", "token", "attention", "logit")
_SCORES = ("row_accuracy", "accuracy", "ratio", "mass")
_PANELS = 24
_UNSEEN = 0.05  # of the attention: below it, a split explains little


def blocks_of(result: Result) -> list[Block]:
    """Everything of a result that can be drawn, in the order in which one would tell it."""
    tables = plain_value(result.tables)
    blocks = []
    for name, rows in tables.items():
        for block in _drawn(name, rows, tables):
            # the model is for the commands that a chart names
            options = {**block.options, "model": result.model}
            blocks.append(replace(block, options=options))
    return blocks


def _drawn(name: str, rows: Records, tables: Tables) -> Iterator[Block]:
    """The blocks of one table: of every drawing whose columns it has."""
    if not rows:
        return
    for columns, draw in TABLE_DRAWINGS:
        if columns <= set(rows[0]):
            yield from draw(name, rows, tables)


@drawing("map", "head", "accuracy", "row_accuracy", "chance")
def _map(block: Block, tables: Tables) -> Iterator[Block]:
    """Every head.

    How often each head attends to the right key, in colour. Record accuracy: most of all tokens;
    accuracy: most of the named keys. Point at a head, or use the arrow keys, for its scores with
    95% intervals and what chance gives.
    """
    heads = [Head.parse(row["head"]) for row in block.rows]
    layers = 1 + max(head.layer for head in heads)
    columns = 1 + max(head.index for head in heads)
    if 2 * len(heads) >= layers * columns:  # a few heads of many are a table, and no map
        scores = [score for score in _SCORES if score in block.rows[0]]
        yield replace(block, options={"scores": scores})


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
    conditions = {row["condition"]: _condition(row) for row in block.rows}
    yield replace(block, options={"conditions": conditions})


def _condition(row: Record) -> dict[str, Any]:
    """What a condition is called, whether it is a control, and the name whose colour it has."""
    feature = row.get("feature", row["condition"])
    kind = row.get("kind", "feature")
    said = feature.replace("_", " ")
    control = PAGE_NAMES["controls"].get(kind)
    if control is not None:
        return {"name": control.format(said), "control": True, "of": kind}
    if kind != "feature":
        said += f", {kind.replace('_', ' ')}"
    return {"name": said, "control": False, "of": feature}


@drawing("curve", "head", "method", "k", "shift", "low", "high", usual="curve")
def _curve(block: Block, tables: Tables) -> Iterator[Block]:
    """How many dimensions it takes.

    How far the attention moves when only the first k directions are swapped, with 95% intervals
    over prompts.
    """
    yield block


def _parts_of(rows: Records) -> list[str]:
    """The parts that a table of tokens splits the logit in: its other columns of numbers."""
    parts = []
    for column in rows[0]:
        numbers = all(isinstance(row.get(column), float | None) for row in rows)
        if numbers and column not in _TOKEN:
            parts.append(column)
    return parts


@drawing("tokens", *_TOKEN, usual="attention")
def _attention(block: Block, tables: Tables) -> Iterator[Block]:
    """Where it looks.

    The prompt, shaded by the head's attention. The underlined token is the query.
    """
    if not _parts_of(block.rows):
        keys = {row["key"] for row in tables.get("parts", ())}
        positions = [row["position"] for row in block.rows]
        at = next((position for position in positions if position in keys), None)
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
    facts = {_spectrum(row): row for row in tables.get("ranks", ())}
    names = list(dict.fromkeys(_spectrum(row) for row in block.rows))
    first = names[:_PANELS]
    panels = [_panel(facts[name]) for name in first if name in facts]
    if not panels:
        return
    words = block.words
    if len(names) > len(panels):
        words += f" {len(names) - len(panels)} more are in the table."
    shown = [row for row in block.rows if _spectrum(row) in first]
    yield replace(block, words=words, rows=shown, options={"panels": panels})


def _spectrum(row: Record) -> tuple[str, str]:
    """The contrast and the head that a row's direction is of."""
    return row["contrast"], row["head"]


def _panel(facts: Record) -> dict[str, Any]:
    """A contrast at a head, and what is said of its directions."""
    head = facts["head"]
    contrast = facts["contrast"]
    detected = f"{facts['detected']} above chance"
    if "rank_cv" in facts:
        detected += f", {facts['rank_cv']} for new words"
    verdict: str = facts["verdict"]
    judged = PAGE_NAMES["verdicts"].get(verdict, verdict)
    if facts.get("center", "none") != "none":
        judged += ", centred"
    kept = f"{counted(facts['rank'], 'direction')} kept"
    lines = [f"{contrast} at {head}", kept, detected, judged]
    return {"head": head, "contrast": contrast, "lines": lines}


# ---------------------------------------------------------------------- writers, and why


@drawing("graph", "head", "source", "target", "kind", "of", "value", "share", usual="graph")
def _graph(block: Block, tables: Tables) -> Iterator[Block]:
    """Back to the words.

    Solid lines lead down to the writers, to the writers of what those read, and on to the words; a
    line is as wide as its share, and what is not drawn is added up as the rest at each node. Dashed
    lines lead to why a head looked where it did, which is a logit of its own (main: writers with a
    fifth of it). Point at a node for its numbers; click it to follow it.
    """
    leads = "said" not in tables  # where nothing is said in words, it comes first
    for head in dict.fromkeys(row["head"] for row in block.rows):
        nodes = _rows_of(head, tables["nodes"])
        prompt = _rows_of(head, tables.get("prompt", ()))
        root = nodes[0]
        if root["attention"] is None:
            name = "the answer"
            told = f"The answer leads its rival by {number(root['value'], '.1f')} logits."
        else:
            name = head
            told = _told_root(head, root, prompt)
        yield replace(
            block,
            title=f"{block.title} from {name}",
            words=f"{told} {block.words}",
            rows=_rows_of(head, block.rows),
            options={"prompt": prompt, "nodes": nodes},
            leads=leads,
        )


def _rows_of(head: str, rows: Records) -> Records:
    """A head's rows of a table."""
    return [row for row in rows if row["head"] == head]


def _told_root(head: str, root: Record, prompt: Records) -> str:
    """What a graph of a head's logit goes back from: its attention on the key, and that logit."""
    key = "the key"
    for row in prompt:
        if row["position"] == root["towards"]:
            key = row["token"]
            break
    attention = number(root["attention"], ".0%")
    value = number(root["value"], ".1f")
    told = (
        f"{head} gives {key!r} {attention} of its attention; its logit over the others is {value}."
    )
    if root["attention"] < _UNSEEN:
        told += " That is hardly any attention: what is drawn explains little."
    return told


@drawing("curve", "by", "replaced", "done", "k", "share", "low", "high")
def _kept(block: Block, tables: Tables) -> Iterator[Block]:
    """What the first nodes keep in the running model.

    The answer's lead over its rival, as a share of what it is, where only the first k nodes
    (writers at tokens) run and all others take their mean over other prompts. Nodes against the
    answer come last, so a share can exceed 1.
    """
    rows = []
    for row in block.rows:
        if row["replaced"] == "mean" and row["done"] == "kept" and row["k"]:
            rows.append({**row, "head": ""})
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
    """A curve of edges of one side that were cut or kept, norms held."""
    before = []
    for check in tables.get("check", ()):
        accuracy = number(check["accuracy"], ".0%")
        before.append(f"{check['head']} {accuracy}")
    words = (
        f"{block.words} Before: {', '.join(before)}. "
        "Writers were chosen on other words, by each rule; 95% intervals by word."
    )
    rows = []
    for row in block.rows:
        if (row["side"], row["kind"]) != which or row["norms"] != "held":
            continue
        if row["replaced"] == "mean":
            rows.append(row)
        elif row["by"] == "share":  # another prompt's parts, beside the mean
            rows.append({**row, "by": "resample"})
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
        rows = _pair_rows(head, check["logit"], tables)
        rows += [{**row, "by": "dictionary"} for row in _rows_of(head, block.rows)]
        title = f"What matched at {head}, in features"
        yield replace(block, title=title, rows=rows, options={"ways": PAGE_NAMES["dictionary"]})


def _pair_rows(head: str, logit: float, tables: Tables) -> Rows:
    """A head's logit split among pairs of features, what other pairs give, and all the rest."""
    parts = {}
    for row in _rows_of(head, tables["feature_pairs"]):
        parts[f"{row['query_feature']} × {row['key_feature']}"] = row["value"]
    copies = _rows_of(head, tables["copies"])
    inside = logit * copies[0]["explained"]
    parts["other pairs of features"] = inside - sum(parts.values())
    parts["with error, bias, after"] = logit - inside
    rows = []
    for part, value in parts.items():
        row = {"head": head, "by": "pairs", "side": "both", "part": part}
        rows.append({**row, "value": value, "share": value / logit})
    return rows


@drawing("curve", "head", "side", "edge", "k", "kind", "after", "low", "high")
def _feature_edges(block: Block, tables: Tables) -> Iterator[Block]:
    """Features cut from the key, and those of copies without meaning.

    Attention left when the features of the first k pairs are set to their mean in this head's key.
    A meaningful dictionary takes it away with few pairs; copies without meaning (rotated, with
    random rows, with the codes of other features or other tokens) show what any dictionary would
    do. Lines: 95% intervals by word; for copies, the lowest and the highest draw.
    """
    of_the_key = [row for row in block.rows if row["side"] == "key"]
    rows = [row for row in of_the_key if row["edge"] == "ablated"]
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
    ways = {way: words for way, words in PAGE_NAMES["splits"].items() if way in there}
    yield replace(block, options={"ways": ways})


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
    rows = []
    for row in block.rows:
        rows.append({**row, "done": sides[row["side"]], "beside": _beside(row)})
    yield replace(block, rows=rows)


def _beside(row: Record) -> str:
    """The words for what random changes left."""
    if row["control_high"] is None:
        return ""
    low = number(row["control_low"], ".0%")
    high = number(row["control_high"], ".0%")
    return f"control {low} to {high}"


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
    rows = []
    for row in block.rows:
        told = {"writers": row["changes"], "done": "", "band": "controls", "beside": _beside(row)}
        rows.append({**row, **told})
    yield replace(block, rows=rows)


@drawing("output", "token", "before", "after")
def _next_tokens(block: Block, tables: Tables) -> Iterator[Block]:
    """The next token.

    Probability of the next token, before and with these changes.
    """
    rows = []
    for row in block.rows:
        rows.append({**row, "without_key": row["after"], "without_other": None, "direct": None})
    yield replace(block, rows=rows, options={"after": "with the changes"})
