"""A row, two sides that alternate, and a ratio.

``ratio = plain_s / ours_s`` (times faster), except for overhead rows, where it is ``ours_s /
plain_s`` (the cost). The two sides alternate and each gives its median, so that a busy machine
slows both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch

from qkscope.errors import BadInput
from qkscope.results.progress import doing

Row = dict[str, Any]
_ROWS: dict[str, Callable[[], Row]] = {}


def bench(only: Sequence[str] | None = None) -> list[Row]:
    """Run all rows, or those named, and return ``{"name", "plain_s", "ours_s", "ratio", "note"}``
    for each.
    """
    for module in (
        "maths",
        "toys",
        "gradients",
        "models",
        "shapes",
        "jobs",
    ):  # they register their rows
        import_module(f"qkscope_bench.{module}")
    unknown = [name for name in only or () if name not in _ROWS]
    if unknown:
        raise BadInput(f"there is no bench row {unknown[0]!r}: there is {', '.join(_ROWS)}.")
    rows = []
    for name in only or _ROWS:
        with doing(f"bench: {name}"):
            rows.append({"name": name, **_ROWS[name]()})
    return rows


def row(function: Callable[[], Row]) -> Callable[[], Row]:
    """Register a row under its function's name."""
    _ROWS[function.__name__] = function
    return function


class Seconds(NamedTuple):
    """Seconds that the plain way takes, and ours."""

    plain: float
    ours: float

    def faster(self, note: str) -> Row:
        """A row that says how many times faster we are."""
        return {
            "plain_s": self.plain,
            "ours_s": self.ours,
            "ratio": self.plain / self.ours,
            "note": note,
        }

    def overhead(self, note: str) -> Row:
        """A row that says how many times the cost it is."""
        return {
            "plain_s": self.plain,
            "ours_s": self.ours,
            "ratio": self.ours / self.plain,
            "note": note,
        }


def not_here(reason: str) -> Row:
    """A row that this machine cannot measure."""
    return {"plain_s": None, "ours_s": None, "ratio": None, "note": reason}


def compare(
    plain: Callable[[], Any],
    ours: Callable[[], Any],
    repeats: int = 1,
    *,
    warm: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Median seconds of both, alternating, until all that was ordered from a GPU is done; one round
    warms up.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + warm):
        for side, call in zip(seconds, (plain, ours), strict=True):
            start = clock()
            call()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if turn or not warm:
                side.append(clock() - start)
    return Seconds(statistics.median(seconds[0]), statistics.median(seconds[1]))


def hardware(device: torch.device) -> str:
    """What it was measured on."""
    return "one GPU" if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
