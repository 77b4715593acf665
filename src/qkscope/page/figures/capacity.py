"""Figure 23: which singular vector each pair lies on when there are more pairs than vectors, and how long it is."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import MaxNLocator

from qkscope.page.figures.style import ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result


def draw(result: Result) -> dict[str, str | bytes]:
    """Heat maps of the query side by number of pairs; below them feature norms by rank of the target logit."""
    configs = [key.split("/", 1)[1] for key in result.arrays if key.startswith("query/")]
    columns = min(len(configs), 6)
    lines = -(-len(configs) // columns)
    figure = new_figure(2.1 * columns + 0.8, (2.9 + 1.7) * lines)
    with styled():
        axes = figure.subplots(2 * lines, columns, squeeze=False, height_ratios=[2.9, 1.7] * lines)
        image = None
        for place in range(lines * columns):
            above, below = (
                axes[2 * (place // columns)][place % columns],
                axes[2 * (place // columns) + 1][place % columns],
            )
            if place >= len(configs):
                above.set_axis_off()
                below.set_axis_off()
                continue
            config = configs[place]
            image = above.imshow(result.arrays[f"query/{config}"].numpy(), cmap="magma_r", vmin=0, vmax=1,
                                 aspect="auto", interpolation="nearest")  # fmt: skip
            width = result.arrays[f"query/{config}"].shape[1]
            above.axhline(width - 0.5, color=TARGET, lw=1)
            above.set_title(config, fontsize=8.5)
            above.set(xlabel="u_k", ylabel="pair, by logit" if place % columns == 0 else "")
            for side in (above.xaxis, above.yaxis, below.xaxis):
                side.set_major_locator(MaxNLocator(4, integer=True))
            _norms(below, result, config, width, place % columns == 0)
        assert image is not None
        figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.4, pad=0.01).set_label(
            "|cos| of query features and u_k"
        )
    return with_page(result, {result.experiment.split("/")[1]: figure})


def _norms(axis: Any, result: Result, config: str, width: int, first: bool) -> None:
    rows = [
        r for r in result.tables["alignment"] if r["config"] == config and r["side"] == "query" and not r["control"]
    ]
    top = max(r["feature_norm"] for r in result.tables["alignment"] if not r["control"])  # one scale for all panels
    axis.bar(range(len(rows)), [r["feature_norm"] for r in rows],
             color=[TARGET if i >= width else ORIGINAL for i in range(len(rows))])  # fmt: skip
    axis.axhline(1, color=REST, lw=0.8, ls=":")
    axis.set(xlabel="pair (orange: surplus)", ylabel="feature norm" if first else "", ylim=(0, 1.05 * top))
