"""Plain text as examples: passages of bounded length, with one query drawn in each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.tasks.texts import Document

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"]
"""Passages, or documents to cut into them."""
_LENGTH = 96  # tokens of a passage
_CHARACTERS = 480  # of a passage, before it is tokenised: about as many tokens as it may have of English
_FIRST_QUERY = 4  # a query nearer to the start sees next to nothing


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


def text_examples(scope: Scope, texts: Sequence[str], seed: int = 0) -> list[Example]:
    """Passages as token ids with a query drawn by lot in each; what is too short to ask in, or a copy, is left out."""
    if scope.tokenizer is None:
        raise BadInput(f"{scope.name} has no tokenizer: text cannot be read without one.")
    encoded = scope.tokenizer(list(texts), truncation=True, max_length=_LENGTH, verbose=False)["input_ids"]
    first: dict[tuple[int, ...], Example] = {}  # passages that differ only where they are cut off are copies
    for i, ids in enumerate(map(tuple, encoded)):
        if len(ids) > _FIRST_QUERY and ids not in first:
            place = _FIRST_QUERY + derived_seed(seed, "queries", i) % (len(ids) - _FIRST_QUERY)
            first[ids] = Example(ids=ids, queries=((place, place + 1),), cluster=i)
    return list(first.values())
