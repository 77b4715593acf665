"""Progress of a long run: one line on a terminal, or a line a minute in the log.

There is one standard error, so there is one line: what is under way, from the widest step to the
count inside it. It disappears at the end.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial

log = logging.getLogger(__name__)

_EVERY = 60.0  # seconds between two lines in the log
_STEPS: list[str] = []  # what is under way, the widest step first
_LOGGED: list[float] = []  # one time: of the last line in the log, or when the first step began
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@contextmanager
def doing(step: str, shown: bool | None = None) -> Iterator[Callable[[str], None]]:
    """Name what runs inside the block; yields a function that renames it.

    Parameters
    ----------
    step : in a few words, as ``fitting L18H6``.
    shown : False for silence, True to write the line even where standard error is no terminal, as
        in a notebook.
    """
    place = len(_STEPS)
    watched = sys.stderr.isatty() if shown is None else shown

    def name(text: str) -> None:
        _STEPS[place:] = [text]
        now = time.monotonic()
        _LOGGED[:] = _LOGGED or [now]
        if shown is None and not watched and now - _LOGGED[0] >= _EVERY:
            _LOGGED[0] = now
            log.info("%s", ": ".join(_STEPS))

    name(step)
    try:
        with _drawn() if watched and not place else nullcontext():
            yield name
    finally:
        del _STEPS[place:]


def _drawn() -> AbstractContextManager[object]:
    """Draw the line every quarter of a second; whatever else is written goes above it."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, force_terminal=True, force_jupyter=False)
    text = partial(Text, no_wrap=True, overflow="ellipsis")
    return Live(
        get_renderable=lambda: text(": ".join(_STEPS)),
        console=console,
        transient=True,
        redirect_stdout=False,
    )


@contextmanager
def counting(
    total: int, what: str = "examples", shown: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Count to a total, with the time left; yields a function that advances the count.

    Parameters
    ----------
    total : to count to.
    what : the plural of what is counted.
    shown : as in `doing`.

    >>> with counting(3, shown=False) as advance:
    ...     advance(1)
    """
    started = time.monotonic()
    done = 0
    with doing(f"0 of {total:,} {what}", shown) as name:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            seconds_each = (time.monotonic() - started) / max(done, 1)
            left = seconds_each * (total - done)
            rest = "all done"
            if left:
                rest = f"{timedelta(seconds=round(left))} left"
            name(f"{done:,} of {total:,} {what}, {rest}")

        yield advance


def plain_text(text: str) -> str:
    r"""Write out the characters of a text that would steer a terminal.

    >>> plain_text("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _STEERING.sub(lambda match: ascii(match[0])[1:-1], text)
