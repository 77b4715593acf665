"""Figures 5 and 13: G of some cells as pictures, and of all cells as numbers against r1 + r2 − d_head."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result

_SHOWN = {8: ((2, 2), (2, 4), (4, 4), (6, 6)), 16: ((4, 4), (6, 8), (8, 8), (12, 12))}
_SMOKE = {8: ((2, 2), (2, 5), (5, 5)), 16: ((4, 4), (4, 10), (10, 10))}


def draw(result: Result) -> dict[str, str | bytes]:
    """Heat maps row by d_head, then the two scatter plots."""
    rows = [dict(row) for row in result.tables["interactions"]]
    have = {(row["d_head"], row["r1"], row["r2"]) for row in rows}
    shown = {d: [r for r in dict.fromkeys((*_SHOWN[d], *_SMOKE[d])) if (d, *r) in have][:4] for d in _SHOWN}
    figure = new_figure(11, 9.8)
    with styled():
        parts: Any = figure.subfigures(2, 1, height_ratios=[2.05, 1])
        axes = parts[0].subplots(2, max(len(cells) for cells in shown.values()), squeeze=False)
        image = None
        for line, (d_head, cells) in zip(axes, shown.items(), strict=True):
            for axis, ranks in zip(line, cells, strict=False):
                row = next(r for r in rows if (r["d_head"], r["r1"], r["r2"]) == (d_head, *ranks))
                image = _heat_map(axis, result, row)
            for axis in line[len(cells) :]:
                axis.set_axis_off()
        parts[0].supylabel("query latents", fontsize=9)
        parts[0].supxlabel("key latents (lines: between z1 and z2)", fontsize=9)
        if image is not None:
            bar = parts[0].colorbar(image, ax=axes, shrink=0.6, pad=0.01, ticks=[-1, 0, 1])
            bar.set_label("G / largest entry")
        left, right = parts[1].subplots(1, 2)
        _scatter(left, rows, (("off_diagonal", "trained", ORIGINAL), ("rotated", "trained, latents rotated", TARGET),
                              ("untrained", "untrained", REST)), "share of |G|² off the diagonal")  # fmt: skip
        _scatter(right, rows, (("asymmetry", "G", ORIGINAL), ("off_asymmetry", "its off-diagonal part / √2", TARGET),
                               ("untrained_asymmetry", "untrained", REST)), "asymmetry |G − Gᵀ| / |G|")  # fmt: skip
    return with_page(result, {result.experiment.split("/")[1]: figure})


def _heat_map(axis: Axes, result: Result, row: dict[str, Any]) -> Any:
    prefix = f"G/{row['variant']}-{row['r1']}-{row['r2']}-h{row['d_head']}-"
    g = next(value for name, value in result.arrays.items() if name.startswith(prefix))
    image = axis.imshow((g / g.abs().max()).numpy(), cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    for place in (axis.axhline, axis.axvline):
        place(row["r1"] - 0.5, color=INK, lw=0.6)
    relation = {"below": "<", "boundary": "=", "above": ">"}[row["where"]]
    total = row["r1"] + row["r2"]
    facts = f"off-diagonal {row['off_diagonal']:.3f}, asymmetry {row['asymmetry']:.2f}"
    axis.set_title(f"({row['r1']}, {row['r2']}): {total} {relation} d_head {row['d_head']}\n{facts}", fontsize=8.5)
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(True)
    return image


def _scatter(axis: Axes, rows: list[dict[str, Any]], series: tuple[tuple[str, str, str], ...], label: str) -> None:
    for name, text, colour in series:
        for d_head, marker in ((8, "o"), (16, "s")):
            own = [row for row in rows if row["d_head"] == d_head]
            axis.scatter([row["r1"] + row["r2"] - d_head for row in own], [row[name] for row in own], s=20, c=colour,
                         marker=marker, alpha=0.75, linewidths=0, label=text if d_head == 8 else None)  # fmt: skip
    axis.axvline(0, color=INK, lw=0.8, ls=":")
    axis.set(xlabel="r1 + r2 − d_head   (circles: d_head 8, squares: 16)", ylabel=label)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8, loc="best")
