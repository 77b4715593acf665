"""A run folder as a page: its own, if we have drawn it; else one drawn anew from its data.

A page that came with a folder could hold anybody's scripts. What is not whole is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qkscope.errors import BadInput
from qkscope.page.report import drawn_here, report_html
from qkscope.runs.folder import PAGE
from qkscope.runs.result import Result

_LARGEST_PICTURE, _MOST_PICTURES = 1 << 25, 50


def stored_page(folder: Path, result: Result) -> str:
    """The page of a run that was read from this folder, as text."""
    if drawn_here(folder / PAGE):
        return (folder / PAGE).read_text(encoding="utf-8")
    with drawn_from(folder):
        return report_html([result], pictures_of(folder))


@contextmanager
def drawn_from(folder: Path) -> Iterator[None]:
    """Say in a sentence that a folder holds JSON, but not what a run writes."""
    try:
        yield
    except BadInput:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise BadInput(f"{folder} is damaged or half-written: run the command that made it again.") from None


def pictures_of(folder: Path) -> dict[str, bytes]:
    """The folder's own figures, and nothing that a link there points to."""
    own = [path for path in sorted(folder.glob("figures/*.png")) if path.is_file() and not path.is_symlink()]
    small = [path for path in own if path.stat().st_size <= _LARGEST_PICTURE]
    read = {path.stem: path.read_bytes() for path in small[:_MOST_PICTURES]}
    return {name: content for name, content in read.items() if content.startswith(b"\x89PNG")}
