"""Rows of tables and small sums over them, the files a drawing gives, and names of things."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qkscope.results.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]  # one line of a result's table
Files = dict[str, str | bytes]  # by their names in the run's folder


def mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    kept = [value for value in values if math.isfinite(value)]
    return statistics.fmean(kept) if kept else math.nan


class Estimate(NamedTuple):
    """A mean and its 95% interval; NaN ends where there is nothing to tell it from."""

    mean: float
    low: float
    high: float

    @property
    def ends(self) -> dict[str, Any]:
        """The interval, as a claim takes it."""
        return {"low": self.low, "high": self.high}

    @property
    def measured(self) -> dict[str, Any]:
        """The mean and its interval, as a claim takes them for ours."""
        return {"ours": self.mean, **self.ends}

    def among(self, count: int) -> Estimate:
        """The interval of one of several, widened for its having been chosen among them."""
        wider = statistics.NormalDist().inv_cdf(
            1 - 0.025 / count
        ) / statistics.NormalDist().inv_cdf(0.975)
        low = self.mean - (self.mean - self.low) * wider
        high = self.mean + (self.high - self.mean) * wider
        return Estimate(self.mean, low, high)


def over_runs(values: Iterable[float]) -> Estimate:
    """The mean over independent runs (seeds, directions, heads), with Student's interval: runs are
    few.

    >>> [round(x, 2) for x in over_runs([1.0, 2.0, 3.0])]
    [2.0, -0.48, 4.48]
    """
    from scipy.stats import t

    kept = [value for value in values if math.isfinite(value)]
    if len(kept) < 2:
        return Estimate(mean(kept), math.nan, math.nan)
    half = float(t.ppf(0.975, len(kept) - 1)) * statistics.stdev(kept) / math.sqrt(len(kept))
    return Estimate(mean(kept), mean(kept) - half, mean(kept) + half)


def over_key_heads(values: Mapping[str, float], group_size: int) -> Estimate:
    """The mean over key heads: heads that share one are one run, with their mean.

    >>> over_key_heads({"L0H0": 1.0, "L0H1": 3.0, "L1H0": 4.0}, 2).mean
    3.0
    """
    from qkscope.heads import Head

    groups: dict[tuple[int, int], list[float]] = {}
    for name, value in values.items():
        head = Head.parse(name)
        groups.setdefault((head.layer, head.kv(group_size)), []).append(value)
    return over_runs(mean(own) for own in groups.values())


def mean_of(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    """The mean of a column; NaN of nothing."""
    return mean(column(rows, name))


def share_of(flags: Iterable[bool]) -> Estimate:
    """A share of independent runs, with Wilson's interval, which has a width where all are alike.

    >>> [round(x, 2) for x in share_of([True] * 5)]
    [1.0, 0.57, 1.0]
    """
    from qkscope.sums.intervals import wilson

    known = list(flags)
    return (
        Estimate(mean(known), *wilson(sum(known), len(known)))
        if known
        else Estimate(*(math.nan,) * 3)
    )


def over_seeds(rows: Sequence[Row], score: Callable[[list[Row]], float]) -> Estimate:
    """The mean of a score over seeds, each scored by its own rows."""
    return over_runs(score(pick(rows, seed=seed)) for seed in distinct(rows, "seed"))


def pick(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> list[Row]:
    """Copies of the rows with these values."""
    return [dict(row) for row in rows if all(row[name] == value for name, value in wanted.items())]


def distinct(rows: Iterable[Mapping[str, Any]], *names: str) -> list[Any]:
    """Values of a column, or tuples of several columns, each once and in their order."""
    return list(
        dict.fromkeys(
            row[names[0]] if len(names) == 1 else tuple(row[name] for name in names) for row in rows
        )
    )


def files_of(result: Result, figure: Figure) -> Files:
    """The figure under its own name as PNG and PDF, and the page that shows it."""
    from qkscope_papers.figures import (
        with_page,
    )  # matplotlib: who only lists figures need not wait for it

    return with_page(result, {figure_name(result): figure})


def figure_name(result: Result) -> str:
    """``fig9`` of ``lee2026/fig9``."""
    return result.experiment.split("/")[1]


def column(rows: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """One column of a table."""
    return [row[name] for row in rows]


def differences(rows: Iterable[Mapping[str, Any]], first: str, second: str) -> list[Any]:
    """One column less another, row by row."""
    return [row[first] - row[second] for row in rows]


def heat_map(axis: Any, matrix: Any, **look: Any) -> Any:
    """A matrix of values from 0 to 1, cell by cell."""
    usual = {"cmap": "magma_r", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    return axis.imshow(matrix, **{**usual, **look})


def slanted(axis: Any, labels: Sequence[str], rotation: float, fontsize: float) -> None:
    """Long names below their places, read from the right."""
    look: Any = {
        "rotation": rotation,
        "ha": "right",
        "rotation_mode": "anchor",
        "fontsize": fontsize,
    }
    axis.set_xticks(range(len(labels)), labels, **look)


def model_name(result: Result) -> str:
    """The model without its folder or owner."""
    return (result.model or "").rstrip("/").split("/")[-1]


def name_axes(axis: Any) -> None:
    """Three principal components, seen from one side, without numbers: their scale says nothing."""
    axis.set(xticks=[], yticks=[], zticks=[])
    for i, label in enumerate((axis.set_xlabel, axis.set_ylabel, axis.set_zlabel), start=1):
        label(f"PC {i}", labelpad=-10)
    axis.view_init(elev=18, azim=-62)
    axis.set_box_aspect((1, 1, 1), zoom=0.95)


def scatter_sides(
    axis: Any,
    arrays: Mapping[str, Any],
    name: str,
    labels: Sequence[str],
    colours: Sequence[Any],
    components: slice,
) -> None:
    """Keys and queries of every label, on some of their components; three get named axes."""
    for i, label in enumerate(labels):
        for side, shown, marker, size, alpha in (
            ("key", "keys", "o", 10, 0.4),
            ("query", "queries", "^", 26, 0.9),
        ):
            points = arrays[f"{name}/{shown}"][arrays[f"{name}/{side}_labels"] == i][:, components]
            look: Any = {
                "marker": marker,
                "s": size,
                "alpha": alpha,
                "color": colours[i],
                "linewidths": 0,
            }
            axis.scatter(*points.T, label=label if side == "key" else None, **look)
    if axis.name == "3d":
        name_axes(axis)


def plane_axes(axis: Any, names: str = "PC 2, PC 3", **look: Any) -> None:
    """Two components without numbers, and a legend in full colours."""
    first, second = names.split(", ")
    axis.set(xlabel=first, ylabel=second, xticks=[], yticks=[])
    for handle in axis.legend(frameon=False, **look).legend_handles:
        handle.set_alpha(1)
