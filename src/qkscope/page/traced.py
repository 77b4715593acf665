"""What there is to look at in a trace: the graph of one logit, and edges cut and kept beside their rivals."""

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
