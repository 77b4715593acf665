"""Rows of alignment before and after training, and small sums over rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qkscope.toys.superposition_models import TrainedToy
from qkscope.toys.superposition_rows import Row, alignment_rows


def before_and_after(toys: Mapping[str, Sequence[TrainedToy]], *, joint: bool = False) -> list[Row]:
    """Rows of every toy after training, and, as the control, before."""
    rows = []
    for config, found in toys.items():
        for trained in found:
            for check, control in ((-1, False), (0, True)):
                rows += alignment_rows(config, trained.cell.seed, trained.steps[check], trained.at(check),
                                       control=control, joint=joint)  # fmt: skip
    return rows


def mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    kept = [value for value in values if math.isfinite(value)]
    return statistics.fmean(kept) if kept else math.nan


def least(values: Iterable[float]) -> float:
    """The smallest; NaN of nothing."""
    return min(values, default=math.nan)


def pick(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]
