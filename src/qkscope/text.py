"""Small helpers that all rooms share: items in groups, values and texts in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], by: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by a property of each; the groups are in the order of their first items.

    >>> grouped(["hat", "jam", "hut"], lambda word: word[0])
    {'h': ['hat', 'hut'], 'j': ['jam']}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        group = groups.setdefault(by(item), [])
        group.append(item)
    return groups


def abbreviate(text: str, limit: int) -> str:
    """Cut a text to at most `limit` characters, the last of which is then an ellipsis.

    >>> abbreviate("unbelievable", 8)
    'unbelie…'
    """
    if len(text) <= limit:
        return text
    return f"{text[: limit - 1]}…"


def describe(value: Any) -> str:
    """Describe a value in a message: itself, shortened, or shape and type if it is an array.

    >>> describe([0] * 50)
    '[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, …'
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = type(value).__name__
        shape = tuple(value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{kind} of shape {shape}, {dtype}"
    words = repr(value).split()
    return abbreviate(" ".join(words), 80)
