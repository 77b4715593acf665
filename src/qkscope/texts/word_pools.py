"""The words that tasks are made of (``word_pools.toml``), and lists cut into disjoint pools."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib.resources import files

from qkscope.errors import BadInput
from qkscope.texts.task import USES, Use, seeded

_FILE = files("qkscope.texts").joinpath("word_pools.toml")
_LISTS = tomllib.loads(_FILE.read_text("utf-8"))

#: Forms of the prompts of tasks, by task and form.
FORMS: dict[str, dict[str, list[str]]] = _LISTS["forms"]
CATEGORIES: dict[str, list[str]] = {}
for _category, _members in _LISTS["categories"].items():
    CATEGORIES[_category] = _members.split()
FIVE = tuple(CATEGORIES)[:5]


def _words(name: str) -> tuple[str, ...]:
    return tuple(_LISTS[name].split())


OBJECTS = _words("objects")
BOXES = _words("boxes")
FILLER = _words("filler")
MEN = _words("men")
WOMEN = _words("women")
THINGS = _words("things")
PLACES = _words("places")
EVENTS = _words("events")
PEOPLE = _words("people")
FIRST_NAMES = tuple(name for pair in zip(MEN, WOMEN, strict=True) for name in pair)


def pools(words: Sequence[str], seed: int, what: str, least: int) -> dict[Use, list[str]]:
    """Cut a word list into three disjoint pools of at least ``least`` words each."""
    unique = checked_words(words, what)
    seeded(seed, "pools", what).shuffle(unique)
    size = len(unique) // len(USES)
    if size < least:
        needed = f"{least} words are needed for each of choosing, fitting and testing"
        more = f"give {least * len(USES)} or more"
        raise BadInput(f"{what}: {needed}, but {len(unique)} leave {size}: {more}.")
    pool_of: dict[Use, list[str]] = {}
    for number, use in enumerate(USES):
        start = number * size
        pool_of[use] = unique[start : start + size]
    return pool_of


def checked_words(words: Sequence[str], what: str) -> list[str]:
    """The different words of a list, in its order."""
    for word in words:
        if not word or word != word.strip():
            raise BadInput(
                f"{what} should be words without blanks around them, but there is {word!r}."
            )
    return list(dict.fromkeys(words))
