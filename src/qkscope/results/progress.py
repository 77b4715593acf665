"""Progress of a long run: one line on a terminal, gone at the end; elsewhere a line a minute in the
log.

There is one standard error, so there is one line: what is under way, from the widest step to the
count inside it.
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

_EVERY = 60.0  # seconds between lines where nobody watches
_STEPS: list[str] = []
_LOGGED: list[float] = []  # when a line was last logged, or the first could have been


@contextmanager
def doing(step: str, shown: bool | None = None) -> Iterator[Callable[[str], None]]:
    """Name what runs inside; gives the function that names it anew.

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
    """The line on the screen, drawn anew by rich every quarter of a second; what else is written
    goes above it.
    """
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
    """Count to a total, with the time left; gives the function to say how many more are done.

    Parameters
    ----------
    total : how many there are.
    what : is counted.
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
            left = (time.monotonic() - started) / max(done, 1) * (total - done)
            name(
                f"{done:,} of {total:,} {what}, "
                + (f"{timedelta(seconds=round(left))} left" if left else "all done")
            )

        yield advance


def plain_text(text: str) -> str:
    r"""Text for a terminal: characters that would steer it are written out.

    >>> plain_text("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    steers = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
    return steers.sub(lambda match: ascii(match[0])[1:-1], text)
