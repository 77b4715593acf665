"""Plain text as examples: passages of bounded length, with a few queries drawn in each.

A passage is the random unit of every null, so passages are many and short, and no two are the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import torch

from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.tasks.texts import Document

log = logging.getLogger(__name__)

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"]
"""Passages, or documents to cut into them."""
LENGTH = 96  # tokens of a passage
QUERIES = 8  # queries drawn in it
_CHARACTERS = 480  # of a passage, before it is tokenised: about LENGTH tokens of English
_FIRST_QUERY = 4  # a query nearer to the start sees next to nothing
LEAST = 24  # passages under which nothing can be told from chance


def cut(texts: Texts) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Passages, and the number of the text that each is from; a text that is a string already is a passage."""
    found: list[str] = []
    text_of: list[int] = []
    for i, text in enumerate(texts):
        found += passages(text.text) if isinstance(text, Document) else [str(text)]
        text_of += [i] * (len(found) - len(text_of))
    return tuple(found), tuple(text_of)


def passages(text: str) -> tuple[str, ...]:
    """Text cut at blank lines, short pieces joined and long ones cut at line ends or blanks."""
    found: list[str] = []
    for piece in re.split(r"\n\s*\n", text):
        piece = piece.strip("\n")
        while len(piece) > _CHARACTERS:
            cut = max(piece.rfind("\n", 1, _CHARACTERS), piece.rfind(" ", 1, _CHARACTERS))
            cut = cut if cut > _CHARACTERS // 2 else _CHARACTERS
            found.append(piece[:cut])
            piece = piece[cut:].lstrip("\n")
        if piece.strip():
            found.append(piece)
    joined: list[str] = []
    for piece in found:
        if joined and len(joined[-1]) + len(piece) < _CHARACTERS // 2:
            joined[-1] += "\n\n" + piece
        else:
            joined.append(piece)
    return tuple(joined)


def checked_texts(texts: Texts, least: int = LEAST) -> tuple[str, ...]:
    """The different passages, if there are enough of them to tell a feature from chance."""
    if isinstance(texts, str) or not all(isinstance(text, str | Document) for text in texts):
        raise BadInput("texts are a list of strings, or the documents that qkscope.tasks.texts.read_documents gives.")
    pieces, _ = cut(texts)
    unique = tuple(dict.fromkeys(text for text in pieces if text.strip()))
    lines = {line.strip() for text in unique for line in text.splitlines() if line.strip()}
    if unique and len(lines) < least and sum(map(len, pieces)) > 20 * max(map(len, lines)):
        raise BadInput(
            f"this text has {len(lines)} different lines over and over, and a feature cannot be told from "
            f"them: give {least} different passages or more."
        )
    if len(unique) < least:
        raise BadInput(
            f"{len(unique)} passages of text are too few to tell a feature from chance: give {least} or more"
            f" (about {least * _CHARACTERS // 1000} kB of text, cut at blank lines)."
        )
    return unique


def text_examples(
    scope: Scope, texts: Sequence[str], *, queries: int = QUERIES, length: int = LENGTH, seed: int = 0
) -> list[Example]:
    """Examples of token ids with queries drawn by lot; passages too short to ask in are left out."""
    if scope.tokenizer is None:
        raise BadInput(f"{scope.name} has no tokenizer: text cannot be read without one.")
    encoded = scope.tokenizer(list(texts), truncation=True, max_length=length, verbose=False)["input_ids"]
    made = []
    for i, ids in enumerate(encoded):
        room = len(ids) - _FIRST_QUERY
        if room < 1:
            continue
        generator = torch.Generator().manual_seed(derived_seed(seed, "queries", i))
        places = (torch.randperm(room, generator=generator)[:queries] + _FIRST_QUERY).sort().values.tolist()
        made.append(Example(ids=tuple(ids), queries=tuple((p, p + 1) for p in places), cluster=i))
    return different(made, same=lambda example: example.ids)


def different(
    examples: Sequence[Example], same: Callable[[Example], Any] = lambda e: (e.text, e.ids, e.queries)
) -> list[Example]:
    """Each example once: a copy is no further evidence. Passages that differ only where they are cut off are copies."""
    first: dict[Any, Example] = {}
    for example in examples:
        first.setdefault(same(example), example)
    if len(first) < len(examples):
        log.warning(
            "%d of %d examples are copies of others: they are asked once.", len(examples) - len(first), len(examples)
        )
    return list(first.values())
