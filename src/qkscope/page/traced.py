"""What there is to look at in a trace: the graph of one logit, and edges cut and kept beside their rivals.

Beside it an answer to why: what was said, the logit's parts, cuts and swaps beside random ones, next tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qkscope.page.block import Block, Row, Tables, number

_RIVALS = {
    "share": "share (this split)", "signed": "signed share", "norm": "length", "variance": "variance",
    "patching": "attribution patching", "path": "path patching", "random": "random",
}  # fmt: skip


def graph(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
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


def edges(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """How often the head is still right with the first writers cut from its keys, and with only the first ones kept."""
    before = {row["head"]: row["accuracy"] for row in tables.get("check", ())}
    for side, kind, title, words in _EDGES:
        own = [
            {"head": row["head"], "method": _RIVALS[row["by"]], "k": row["k"], "shift": row["accuracy"],
             "low": row["low"], "high": row["high"]}
            for row in rows
            if (row["side"], row["kind"], row["replaced"], row["norms"]) == (side, kind, "mean", "held")
        ]  # fmt: skip
        start = ", ".join(f"{head} {number(value, '.0%')}" for head, value in before.items())
        told = f"{words} Before: {start}. Writers were chosen on other words, by each rule; 95% intervals by word."
        options = {"axis": f"writers {kind if kind == 'cut' else 'kept'}", "value": "right", "of": "writers"}
        if own:
            yield Block("curve", title, told, own, options, name)


_COPIES = {
    "dictionary": "the dictionary", "rotated": "rotated", "random": "random rows",
    "features": "codes of other features", "tokens": "codes of other tokens",
}  # fmt: skip


_BARS = 10
_WAYS = {"pairs both": "pairs of features", "dictionary query": "parts of the query", "dictionary key": "of the key"}


def features(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """A logit split by a dictionary: its largest pairs of features, and the parts of each side."""
    words = (
        "The logit of the key over the others, split by the dictionary. Each bar begins where the one above it ends;"
        " the last one is the logit. Error: what the dictionary misses of the stream; bias: its own and the model's;"
        " after: what layers between the dictionary and the head added."
    )
    for check in tables["check"]:
        head, logit = check["head"], check["logit"]
        own = [row for row in rows if row["head"] == head]
        pairs = [row for row in tables["feature_pairs"] if row["head"] == head][:_BARS]
        inside = logit * next(row["explained"] for row in tables["copies"] if row["head"] == head)
        rest = {"other pairs of features": inside - sum(row["value"] for row in pairs),
                "with error, bias, after": logit - inside}  # fmt: skip
        bars = {("pairs", "both"): {f"{r['query_feature']} × {r['key_feature']}": r["value"] for r in pairs} | rest}
        for side in ("query", "key"):
            every = [row for row in own if row["side"] == side]
            shown = [row for row in every if row["part"] in _NO_FEATURES or row in every[:_BARS]]
            bars["dictionary", side] = {row["part"]: row["value"] for row in shown}
            bars["dictionary", side]["other features"] = logit - sum(
                row["value"] for row in shown if row["part"] != "other features"
            )
        drawn = [
            {"head": head, "by": by, "side": side, "part": part, "value": value, "share": value / logit}
            for (by, side), values in bars.items()
            for part, value in values.items()
        ]
        yield Block("parts", f"What matched at {head}, in features", words, drawn, {"ways": _WAYS}, name)


_NO_FEATURES = ("error", "after", "bias", "other features")


def held(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """How much a dictionary's largest pairs hold, beside copies without meaning."""
    words = (
        "How much of all that is added to the logit, signs left out, the k largest pairs of features hold. A "
        "dictionary that says something holds much in few pairs; copies of it without meaning (turned, with random "
        "rows, with the codes of other features or of other tokens) show what any dictionary would hold. Lines: 95% "
        "intervals by word; of copies, the lowest and the highest draw."
    )
    own = [
        {"head": row["head"], "method": _COPIES[row["kind"]], "k": row["k"], "shift": row["held"], "low": row["low"],
         "high": row["high"]}
        for row in rows
    ]  # fmt: skip
    options = {"axis": "pairs", "value": "held", "of": "pairs"}
    yield Block("curve", "Pairs of features, and of copies without meaning", words, own, options, name)


_SPLITS = {
    "writers key": "writers of the key", "writers query": "writers of the query", "singular both": "singular vectors",
    "features query": "features",
}  # fmt: skip


def said(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """The lines of the answer, as a list."""
    yield Block("said", "In words", "", rows, table=name, leads=True)


def parts(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """One logit, split in each way there is."""
    words = (
        "The logit of the key over the mean of the other tokens in sight, split. Each bar begins where the one above it"
        " ends; the last one is the logit. A writer is the embedding, a head (L0H0) or the MLP of a layer (M0)."
        " Rest: all parts that are not named."
    )
    there = {f"{row['by']} {row['side']}" for row in rows}
    ways = {way: said for way, said in _SPLITS.items() if way in there}
    yield Block("parts", "What matched", words, rows, {"ways": ways}, name)


def cuts(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Writers cut and exchanged, beside random ones."""
    words = (
        "Attention on the key with its strongest writers cut: each one's part takes its mean over the prompt's other"
        " tokens. The band is what random writers of the same layers leave, the line what there was. Exchanged: the"
        " parts change places with another token's, and the attention there is drawn. Supported: the attention moves by"
        " more than a quarter, and further than with any of the random ones. Not here: it does not. Unattended: under"
        " 5% was there to move. Vacuous: all writers were exchanged, which shows nothing."
    )
    swaps = [row for row in tables.get("swaps", ()) if "other_after" in row]
    yield Block("tests", "Is it so", words, rows, {"swaps": swaps}, name)


def output(name: str, rows: Sequence[Row], tables: Tables) -> Iterator[Block]:
    """Next tokens before and after."""
    words = (
        "Chances of the next token, as they are and where the head may not look at the key (the whole model runs on)."
        " The line is the same without another key, the next most attended. Straight: what the head adds to the token's"
        " logit by what it read at the key, the last norm held."
    )
    yield Block("output", "What it does", words, rows, table=name)
