"""Pairs of prompts from a file: clean and corrupted, with an answer and its rival, a line each.

::

    {"clean": "… John gave a drink to", "corrupted": "… Mary gave a drink to",
     "answer": " Mary", "rival": " John"}

(on one line). ``prompt`` is read as ``clean``, and the names that TransformerLens' notebooks and
EAP-IG use are read, too (`NAMES`). Without ``corrupted`` a line names its own answer and rival alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.text import describe
from qkscope.texts.documents import read_text

NAMES = {
    "clean": ("clean", "prompt", "clean_prompt"),
    "corrupted": ("corrupted", "corrupt", "corrupted_prompt", "corrupt_prompt"),
    "answer": ("answer", "correct", "correct_answer", "label"),
    "rival": ("rival", "incorrect", "incorrect_answer", "wrong_answer"),
}
"""By what a line holds, the names that it may have."""


@dataclass(frozen=True)
class PromptPair:
    """A line of a file of pairs.

    Parameters
    ----------
    clean : the prompt.
    corrupted : the other prompt, if there is one.
    answer, rival : next tokens of the clean prompt, if they are named.
    where : the file and its line, for messages.
    """

    clean: str
    corrupted: str | None
    answer: str | None
    rival: str | None
    where: str


def has_pairs(path: str | Path) -> bool:
    """Whether a line of a file names a corrupted prompt or a rival."""
    names = {*NAMES["corrupted"], *NAMES["rival"]}
    for text in read_text(Path(path), "a file with one JSON object per line").split("\n"):
        try:
            line = json.loads(text) if text.strip() else {}
        except ValueError:  # refused with its line where the file is read
            continue
        if isinstance(line, dict) and names & line.keys():
            return True
    return False


def read_pairs(path: str | Path) -> list[PromptPair]:
    """Read a file of pairs; every line is checked, and an error names the line."""
    text = read_text(Path(path), "a file with one JSON object per line")
    return [
        _pair(line, f"{path}, line {number}")
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]


def _pair(text: str, where: str) -> PromptPair:
    """Read one line."""
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict):
        raise BadInput(f"{where}: a line is one JSON object, but got {describe(text)}.")
    held = {role: _named(line, role, where) for role in NAMES}
    if held["clean"] is None:
        raise BadInput(f"{where}: there is no prompt: name it as clean, or as prompt.")
    Example(held["clean"])  # refuses an empty one
    return PromptPair(held["clean"], held["corrupted"], held["answer"], held["rival"], where)


def _named(line: Mapping[str, Any], role: str, where: str) -> str | None:
    """What a line holds under any of the names of a role."""
    for name in NAMES[role]:
        value = line.get(name)
        if value is None:
            continue
        if isinstance(value, str) and value.strip():
            return value
        raise BadInput(f"{where}, {name}: should be a text, but got {describe(value)}.")
    return None
