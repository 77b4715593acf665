"""Units by the million: drawn in order and held a window at a time, so that memory does not grow with their number.

What reads them takes a window's units in any order (`qkscope.analyses.prompts` sorts them by length), then the next's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import islice
from typing import overload

from qkscope.tasks.task import Unit, Use

WINDOW = 8192
"""How many units are held at once."""


def drawn(walk: Callable[[Use, str, int], Iterator[Unit]]) -> Callable[[Use, str, int], Sequence[Unit]]:
    """Make a sequence of what a generator draws: a list, or more than a window of units held in part."""

    @wraps(walk)
    def draw(use: Use, contrast: str, n: int) -> Sequence[Unit]:
        return list(walk(use, contrast, n)) if n <= WINDOW else Drawn(lambda: walk(use, contrast, n), n)

    return draw


class Drawn(Sequence[Unit]):
    """Units of which one window is in memory: going forward draws on, going back draws again from the start."""

    def __init__(self, walk: Callable[[], Iterator[Unit]], n: int) -> None:
        self._walk, self._n = walk, n
        self._rest, self._held, self._window = walk(), list[Unit](), -1

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Unit]:
        return self._walk()

    @overload
    def __getitem__(self, i: int) -> Unit: ...
    @overload
    def __getitem__(self, i: slice) -> list[Unit]: ...
    def __getitem__(self, i: int | slice) -> Unit | list[Unit]:
        if isinstance(i, slice):
            return [self[j] for j in range(self._n)[i]]
        window, place = divmod(range(self._n)[i], WINDOW)
        if window < self._window:
            self._rest, self._window = self._walk(), -1
        while self._window < window:
            self._held = []  # the one before goes first
            self._held = list(islice(self._rest, WINDOW))
            self._window += 1
        return self._held[place]
