"""Every head at once: first writers of queries and keys, over a task's prompts or over texts.

On texts the key is the token that the head attends to most besides the first, against all the others that the query
sees; a prompt where even that one has under 5% of the attention does not count for this head. No edge is cut here.

A text comes as passages of bounded length, with one query drawn in each (`text_units`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import torch

from qkscope.analyses.trace.rows import ATTENDED, HeadRows, Pass, Tables
from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import BIAS, Head
from qkscope.linear.reader import Reader
from qkscope.maths.writers import Measurement, Tally
from qkscope.tasks.task import Unit
from qkscope.tasks.texts import Document

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"]
"""Passages, or documents to cut into them."""
_LENGTH = 96  # tokens of a passage
_CHARACTERS = 480  # of a passage, before it is tokenised: about as many tokens as it may have of English
_FIRST_QUERY = 4  # a query nearer to the start sees next to nothing
SHOWN = 5  # writers of each side in the table
TEXTS = 8  # texts run together: every token's writers are held
_GROUPS = 64  # of texts, which intervals resample: sums are as large for many texts as for these


def cut(texts: Texts) -> list[tuple[str, int]]:
    """Passages, each with the number of the text that it is from; a text that is a string already is a passage."""
    pieces = ((passages(text.text) if isinstance(text, Document) else (text,)) for text in texts)
    return [(piece, i) for i, own in enumerate(pieces) for piece in own]


def passages(text: str) -> tuple[str, ...]:
    """Text cut at blank lines, short pieces joined and long ones cut at line ends or blanks."""
    pieces: list[str] = []
    for piece in (piece.strip("\n") for piece in re.split(r"\n\s*\n", text)):
        while len(piece) > _CHARACTERS:
            cut = max(piece.rfind("\n", 1, _CHARACTERS), piece.rfind(" ", 1, _CHARACTERS))
            cut = cut if cut > _CHARACTERS // 2 else _CHARACTERS
            pieces.append(piece[:cut])
            piece = piece[cut:].lstrip("\n")
        pieces += [piece] if piece.strip() else []
    joined: list[str] = []
    for piece in pieces:
        if joined and len(joined[-1]) + len(piece) < _CHARACTERS // 2:
            piece = f"{joined.pop()}\n\n{piece}"
        joined.append(piece)
    return tuple(joined)


def text_units(scope: Scope, texts: Texts, n: int, seed: int = 0) -> list[Unit]:
    """Up to n passages at random as token ids, with a random query in each and the number of its text as cluster.

    What is too short to ask in, or a copy, is left out.
    """
    if scope.tokenizer is None:
        raise BadInput(f"{scope.name} has no tokenizer: text cannot be read without one.")
    pieces, generator = cut(texts), torch.Generator().manual_seed(derived_seed(seed, "texts"))
    order = torch.randperm(len(pieces), generator=generator).tolist()[:n]
    first: dict[tuple[int, ...], Unit] = {}  # passages that differ only where they are cut off are copies
    for i, (text, number) in enumerate(pieces[place] for place in order):
        ids = tuple(scope.tokenizer(text, truncation=True, max_length=_LENGTH, verbose=False)["input_ids"])
        if len(ids) > _FIRST_QUERY and ids not in first:
            place = _FIRST_QUERY + derived_seed(seed, "queries", i) % (len(ids) - _FIRST_QUERY)
            first[ids] = (Example(ids=ids, queries=((place, place + 1),), cluster=number),)
    if not first:
        raise BadInput("no text is long enough to ask in: give longer ones.")
    return list(first.values())


def first_writers(how: Pass, units: Sequence[Unit], named: bool = False) -> dict[Head, Tally]:
    """What each writer gives to the reader's heads, summed over prompts.

    Parameters
    ----------
    how : prompts are run.
    units : prompts of a task, or passages of text with one query each and the number of their text as cluster.
    named : whether keys are named, as a task does it; otherwise it is the most attended key.
    """
    words = None if named else [f"text {int(own.cluster) % _GROUPS}" for own, *_ in units]

    def measure(rows: HeadRows, _numbers: list[int]) -> Measurement:
        given, attention = rows.given(), rows.rows.attention()[:, 0].gather(1, rows.run.columns[:, 1:])
        looked = (attention * (rows.signs > 0)).sum(1)  # of a text, a prompt counts where there is attention to explain
        return Measurement({**given.values, "attention": looked}, given.error, (looked >= ATTENDED) | named)

    measures = dict.fromkeys(how.reader.heads, measure)
    return how.add_up("writers", units, measures, words, last=True, named=named, by_some=True)[0]


def told(reader: Reader, tallies: Mapping[Head, Tally]) -> tuple[str, Tables]:
    """The answer, and tables of all heads."""
    heads, writers, check = list[dict[str, Any]](), [], []
    columns = ("key_writer", "key_share", "query_writer", "query_share", "logit", "attention")
    for head, tally in tallies.items():
        row: dict[str, Any] = {"head": str(head), **dict.fromkeys(columns), "n": tally.rows}
        if tally.rows:
            rows = tally.writer_rows(head, reader.writers(head.layer), SHOWN + 1)
            for side in ("key", "query"):
                own = [one for one in rows if one["side"] == side and one["writer"] != BIAS][:SHOWN]
                writers += own
                row |= {f"{side}_writer": own[0]["writer"], f"{side}_share": own[0]["share"]}
            row |= {"logit": float(tally.mean("total")), "attention": float(tally.mean("attention"))}
            check.append(tally.check_row(head))
        heads.append(row)
    common = Counter(row["key_writer"] for row in heads if row["n"])
    said = ", ".join(f"{name} of {count}" for name, count in common.most_common(3))
    answer = f"First key writers of {common.total()} heads, the most frequent: {said}." if said else "No head attends."
    return answer, {"heads": heads, "writers": writers, "check": check}
