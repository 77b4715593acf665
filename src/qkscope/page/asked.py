"""Blocks of an answer to why: what was said, the logit's parts, cuts and swaps beside random ones, next tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qkscope.page.block import Block, Row, Tables

SAID = {"line"}
PARTS = {"head", "query", "key", "part", "side", "value", "share", "by"}
CUTS = {"head", "side", "k", "writers", "before", "after", "random_low", "random_high", "top_token", "verdict"}
OUTPUT = {"head", "key", "token", "before", "without_key", "without_other", "direct"}
_WAYS = {
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
        " ends; the last one is the logit. A writer is the embedding, a head (L16H0) or the MLP of a layer (M13)."
        " Rest: all parts that are not named."
    )
    there = {f"{row['by']} {row['side']}" for row in rows}
    ways = {way: said for way, said in _WAYS.items() if way in there}
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
