"""The one exception that means "the input is wrong, and here is what to do".

The command line turns it into a sentence on stderr and exit code 2; everything else that escapes is a bug.
"""

from __future__ import annotations

import errno


class BadInput(ValueError):
    """Something the user gave cannot be used; the message is one sentence that says why and what to do."""


class Terminated(KeyboardInterrupt):
    """A scheduler asked us to stop (SIGTERM): as if Ctrl-C had been pressed, but for the exit code."""


def check_name_length(error: OSError) -> None:
    """Say in a sentence that a file's name is too long, where that is what went wrong."""
    if error.errno == errno.ENAMETOOLONG:
        shown = str(error.filename)[:60]
        raise BadInput(f"the name {shown}… is longer than a disk takes: choose a shorter one.") from None


def check_least(least: int, **counts: int) -> None:
    """Refuse numbers under the least that makes sense, by their names."""
    for name, value in counts.items():
        if value < least:
            raise BadInput(f"{name} is at least {least}, but got {value}.")


def check_kind(value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuse a value of another kind; ``what`` says what it should have been."""
    if not isinstance(value, kind):
        raise BadInput(f"{what}, but got {type(value).__name__}.")
