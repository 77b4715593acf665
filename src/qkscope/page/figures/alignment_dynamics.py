"""Figure 3: singular vectors, features, and one against the other, across training; and when each pair aligns.

Steps stand on a square-root scale, as pairs are learned in the first few per cent of training.
"""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np

from qkscope.page.figures.style import INK, new_figure, styled, with_page
from qkscope.result import Result

_LINES = (("vector", "u_k(s) and u_k(s')"), ("feature", "f(s) and f(s')"), ("both", "f(s) and u_k(s')"))


def draw(result: Result) -> dict[str, str | bytes]:
    """Three rows of heat maps, a column per pair; below, matched |cos| over the steps."""
    pairs = list(dict.fromkeys((row["pair"], row["target_logit"]) for row in result.tables["onsets"]))
    steps = result.arrays["steps"].tolist()
    figure = new_figure(2.7 * len(pairs) + 0.8, 10.4)
    with styled():
        parts: Any = figure.subfigures(2, 1, height_ratios=[3, 1])
        axes = parts[0].subplots(3, len(pairs), squeeze=False, sharex=True, sharey=True)
        image, edges = None, _edges(steps)
        for line, (kind, label) in zip(axes, _LINES, strict=True):
            for k, axis in enumerate(line):
                image = axis.pcolormesh(edges, edges, result.arrays[f"{kind}/{k}"].numpy(), cmap="magma_r", vmin=0,
                                        vmax=1, rasterized=True)  # fmt: skip
                if kind == "vector":
                    axis.set_title(f"k = {k + 1}: pair {pairs[k][0]}, logit {pairs[k][1]:g}", fontsize=9)
                _spread(axis, steps[-1], "xy")
                axis.tick_params(labelsize=7)
            line[0].set_ylabel(f"|cos| of {label}\nstep s")
        for axis in axes[-1]:
            axis.set_xlabel("step s'")
            axis.tick_params(axis="x", rotation=45)
        parts[0].colorbar(image, ax=axes, shrink=0.5, pad=0.01).set_label("|cos|")
        axes[0, 0].invert_yaxis()  # shared by all
        _curves(parts[1].subplots(), result, pairs)
    return with_page(result, {result.experiment.split("/")[1]: figure})


def _edges(steps: list[int]) -> np.ndarray:
    """Where one checkpoint's cell ends and the next begins: half way on the scale that is shown."""
    roots = np.sqrt(np.array(steps, dtype=float))
    return np.concatenate([[roots[0]], (roots[1:] + roots[:-1]) / 2, [roots[-1]]]) ** 2


def _spread(axis: Any, last: int, which: str) -> None:
    ticks = [round(last * share) for share in (0, 0.0125, 0.05, 0.125, 0.25, 0.5, 1)]
    for name in which:
        getattr(axis, f"set_{name}scale")("function", functions=(lambda x: np.sqrt(np.abs(x)), np.square))
        getattr(axis, f"set_{name}lim")(0, last)
        getattr(axis, f"set_{name}ticks")(ticks, [f"{tick:,}" for tick in ticks])


def _curves(axis: Any, result: Result, pairs: list[tuple[str, float]]) -> None:
    colours = matplotlib.colormaps["viridis"]
    rows = [r for r in result.tables["alignment"] if r["side"] == "query"]
    for i, (pair, logit) in enumerate(pairs):
        colour = colours(i / max(len(pairs) - 1, 1) * 0.85)
        for n, seed in enumerate(dict.fromkeys(r["seed"] for r in rows)):
            own = [r for r in rows if r["pair"] == pair and r["seed"] == seed]
            axis.plot([r["step"] for r in own], [r["matched"] for r in own], "-", color=colour,
                      lw=1.2 if n == 0 else 0.5, label=f"pair {pair}, logit {logit:g}" if n == 0 else None)  # fmt: skip
    axis.axhline(rows[0]["best_random"], color=INK, lw=0.9, ls=":", label="best of random")
    _spread(axis, max(r["step"] for r in rows), "x")
    axis.set(xlabel="step (thin: other seeds)", ylabel="matched |cos|, query side", ylim=(0, 1.05))
    axis.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
