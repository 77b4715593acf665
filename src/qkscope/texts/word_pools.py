"""The words that tasks are made of, as ``word_pools.toml`` lists them, and lists cut into disjoint
pools.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib.resources import files

from qkscope.errors import BadInput
from qkscope.texts.task import USES, Use, seeded

_LISTS = tomllib.loads(files("qkscope.texts").joinpath("word_pools.toml").read_text("utf-8"))

FORMS: dict[str, dict[str, list[str]]] = _LISTS.pop("forms")  # of the prompts of tasks, by task
CATEGORIES: dict[str, list[str]] = {
    name: words.split() for name, words in _LISTS.pop("categories").items()
}
FIVE = tuple(CATEGORIES)[:5]
OBJECTS, BOXES, MEN, WOMEN, THINGS, PLACES, EVENTS, PEOPLE = (
    tuple(words.split()) for words in _LISTS.values()
)
NAMES = tuple(name for pair in zip(MEN, WOMEN, strict=True) for name in pair)


def pools(words: Sequence[str], seed: int, what: str, least: int) -> dict[Use, list[str]]:
    """Cut a word list into three disjoint pools of at least ``least`` words each."""
    unique = checked_words(words, what)
    seeded(seed, "pools", what).shuffle(unique)
    size = len(unique) // len(USES)
    if size < least:
        lacking = f"{what}: {least} words are needed for each of choosing, fitting and testing"
        raise BadInput(
            f"{lacking}, but {len(unique)} leave {size}: give {least * len(USES)} or more."
        )
    return {use: unique[i * size : (i + 1) * size] for i, use in enumerate(USES)}


def checked_words(words: Sequence[str], what: str) -> list[str]:
    """The different words of a list, in its order."""
    for word in words:
        if not word or word != word.strip():
            raise BadInput(
                f"{what} should be words without blanks around them, but there is {word!r}."
            )
    return list(dict.fromkeys(words))
