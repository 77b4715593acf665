"""Figures 1 and 19: cosines among features, and their Gram matrices, one panel per configuration."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from qkscope.page.figures.style import new_figure, styled, with_page
from qkscope.result import Result


def draw(result: Result) -> dict[str, str | bytes]:
    """A heat map per configuration (the first seed), its numbers above it."""
    name = result.experiment.split("/")[1]
    kind = "gram" if name == "fig19" else "cosines"
    panels = {key.split("/", 1)[1]: value for key, value in result.arrays.items() if key.startswith(f"{kind}/")}
    figure = new_figure(3.3 * len(panels) + 0.5, 3.9)
    with styled():
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (config, matrix) in zip(axes, panels.items(), strict=True):
            row = next(r for r in result.tables["geometry"] if r["config"] == config and not r["control"])
            image = _panel(axis, matrix, f"{config}\n{_facts(row, kind)}", kind)
        label = "cos(f_i, f_j)" if kind == "cosines" else "W Wᵀ / its mean diagonal"
        figure.colorbar(image, ax=list(axes), shrink=0.7, pad=0.01, ticks=[-1, 0, 1]).set_label(label)
    return with_page(result, {name: figure})


def _facts(row: Any, kind: str) -> str:
    if kind == "gram":
        return f"‖G/c − I‖ = {row['isotropy_error']:.2f}"
    if row["config"].startswith("no head"):
        return f"{row['antipodal']} antipodal pairs"
    return f"features of interest: |cos| with others ≤ {row['interest_overlap']:.3f}"


def _panel(axis: Axes, matrix: Any, title: str, kind: str) -> Any:
    shown = matrix / matrix.diagonal().mean() if kind == "gram" else matrix
    image = axis.imshow(shown.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    axis.set_title(title, fontsize=8.5)
    what = "dimension" if kind == "gram" else "feature"
    axis.set(xlabel=what, ylabel=what if axis.get_subplotspec().colspan.start == 0 else "")  # type: ignore[union-attr]
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(5, integer=True))
    for spine in axis.spines.values():
        spine.set_visible(True)
    return image
