"""Every speed we claim, as a ratio against the plain way of doing the same work, measured in the same run.

``ratio = plain_s / ours_s`` (times faster), except for overhead rows, where it is ``ours_s / plain_s`` (the cost).
The two sides alternate and each gives its median, so that a busy machine slows both alike.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from qkscope.errors import BadInput

Row = dict[str, Any]
_ROWS: dict[str, Callable[[], Row]] = {}
_log = logging.getLogger(__name__)


def bench(only: Sequence[str] | None = None) -> list[Row]:
    """Run all rows, or those named, and return ``{"name", "plain_s", "ours_s", "ratio", "note"}`` for each."""
    for module in ("maths", "toys", "models", "jobs", "discovery"):  # they register their rows
        import_module(f"qkscope.bench.{module}")
    unknown = [name for name in only or () if name not in _ROWS]
    if unknown:
        raise BadInput(f"there is no bench row {unknown[0]!r}: there is {', '.join(_ROWS)}.")
    rows = []
    for name in only or _ROWS:
        _log.info("bench: %s ...", name)
        rows.append({"name": name, **_ROWS[name]()})
    return rows


def row(function: Callable[[], Row]) -> Callable[[], Row]:
    """Register a row under its function's name."""
    _ROWS[function.__name__] = function
    return function


def compare(
    plain: Callable[[], Any], ours: Callable[[], Any], repeats: int, *, warm: bool = True
) -> tuple[float, float]:
    """Median seconds of both, alternating."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + warm):
        for side, call in zip(seconds, (plain, ours), strict=True):
            start = time.perf_counter()
            call()
            if turn or not warm:
                side.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def faster(plain_s: float, ours_s: float, note: str) -> Row:
    """A row that says how many times faster we are."""
    return {"plain_s": plain_s, "ours_s": ours_s, "ratio": plain_s / ours_s, "note": note}


def overhead(plain_s: float, ours_s: float, note: str) -> Row:
    """A row that says how many times the cost it is."""
    return {"plain_s": plain_s, "ours_s": ours_s, "ratio": ours_s / plain_s, "note": note}


def not_here(reason: str) -> Row:
    """A row that this machine cannot measure."""
    return {"plain_s": None, "ours_s": None, "ratio": None, "note": reason}


def wait(device: torch.device) -> None:
    """Until what was ordered is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def hardware(device: torch.device) -> str:
    """What it was measured on."""
    return "one GPU" if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
