"""Where a long run stands: one line on a terminal, written over and gone at the end; elsewhere a line a minute.

There is one standard error, so there is one line: whoever counts (`counting`) fills it, whoever begins a step (`doing`)
says what the count is of, and whoever prints takes it away first (`clear`).
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_EVERY = 60.0  # seconds between lines where nobody watches
_REFRESH = 0.2  # and on a terminal


class _Line:
    """The line: what is on the screen, and when something was last said."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.steps: list[str] = []
        self.shown = 0  # characters on the screen
        self.said = float("-inf")  # when the screen was last written
        self.logged: float | None = None  # when a line was last logged, or the first could have been

    def tell(self, text: str, live: bool) -> None:
        with self.lock:
            now = time.monotonic()
            if self.logged is None:
                self.logged = now
            if live and now - self.said >= _REFRESH:
                self.said = now
                width = max(20, shutil.get_terminal_size().columns) - 1
                text = text if len(text) <= width else text[: width - 1] + "…"
                sys.stderr.write(f"\r{text}{' ' * (self.shown - len(text))}")
                sys.stderr.flush()
                self.shown = max(len(text), 1)
            elif not live and now - self.logged >= _EVERY:
                self.logged = now
                log.info("%s", text)

    def clear(self) -> None:
        with self.lock:
            if self.shown:
                sys.stderr.write(f"\r{' ' * self.shown}\r")
                sys.stderr.flush()
            self.shown, self.said = 0, float("-inf")


_LINE = _Line()


def tell(text: str, shown: bool | None = None) -> None:
    """Say where things stand, if it is time to.

    Parameters
    ----------
    text : in a few words.
    shown : as in `counting`.
    """
    if shown is not False:
        _LINE.tell(text, live=bool(shown) or sys.stderr.isatty())


def clear() -> None:
    """Take the line off the screen; the next `tell` writes it again."""
    _LINE.clear()


@contextmanager
def doing(step: str, shown: bool | None = None) -> Iterator[None]:
    """Name what runs inside: the line begins with it.

    Parameters
    ----------
    step : in a few words, as ``fitting L18H6``.
    shown : as in `counting`.
    """
    _LINE.steps.append(step)
    tell(f"{step} ...", shown)
    try:
        yield
    finally:
        _LINE.steps.pop()
        clear()


@contextmanager
def counting(total: int, what: str = "examples", shown: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Count to a total, with the time left; gives the function to say how many more are done.

    Parameters
    ----------
    total : how many there are.
    what : is counted.
    shown : False for silence, True to write the line even where standard error is no terminal, as in a notebook.

    >>> with counting(3, shown=False) as advance:
    ...     advance(1)
    """
    started, done = time.monotonic(), 0
    tell(_named(f"0 of {total:,} {what}"), shown)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        left = (time.monotonic() - started) / max(done, 1) * (total - done)
        tell(_named(f"{done:,} of {total:,} {what}, " + (f"{in_words(left)} left" if left else "all done")), shown)

    try:
        yield advance
    finally:
        clear()


def in_words(seconds: float) -> str:
    """A time as one says it.

    >>> in_words(8.4), in_words(125), in_words(7300)
    ('8 s', '2 min 5 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _named(text: str) -> str:
    return f"{_LINE.steps[-1]}: {text}" if _LINE.steps else text


def plain_text(text: str) -> str:
    r"""Text for a terminal: characters that would steer it are written out.

    >>> plain_text("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    steers = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
    return steers.sub(lambda found: ascii(found[0])[1:-1], text)
