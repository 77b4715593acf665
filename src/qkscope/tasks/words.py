"""The words that tasks are made of, as ``words.toml`` lists them."""

from __future__ import annotations

import tomllib
from importlib.resources import files

_LISTS = tomllib.loads(files("qkscope.tasks").joinpath("words.toml").read_text("utf-8"))

FORMS: dict[str, dict[str, list[str]]] = _LISTS.pop("forms")  # of the prompts of tasks, by task
CATEGORIES: dict[str, list[str]] = {name: words.split() for name, words in _LISTS.pop("categories").items()}
FIVE = tuple(CATEGORIES)[:5]
OBJECTS, BOXES, MEN, WOMEN, THINGS, PLACES, EVENTS, PEOPLE = (tuple(words.split()) for words in _LISTS.values())
NAMES = tuple(name for pair in zip(MEN, WOMEN, strict=True) for name in pair)
