"""Which pages were drawn here: a page may hold scripts, so that one which somebody else made is not opened.

The user's cache keeps the hash of every page that this user's qkscope has drawn. A page that came with a folder from
elsewhere is not among them, whatever it says of itself.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from qkscope.capture.cache import cache_dir

_LARGEST = 1 << 28  # bytes of a page


def remember(page: bytes) -> None:
    """Note that we have drawn this page; where the cache cannot be written, it is drawn anew when it is viewed."""
    with suppress(OSError):
        _notes().parent.mkdir(parents=True, exist_ok=True)
        with _notes().open("a", encoding="ascii") as file:
            file.write(_hash(page) + "\n")


def drawn_here(path: Path) -> bool:
    """Whether this file is a page that we have drawn, bit for bit."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return False
        return _hash(path.read_bytes()) in _notes().read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False


def _notes() -> Path:
    return cache_dir("pages", "drawn.txt")


def _hash(page: bytes) -> str:
    return hashlib.sha256(page).hexdigest()
