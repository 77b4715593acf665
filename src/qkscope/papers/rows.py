"""Rows of a table, and small sums over them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]  # one line of a result's table


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
