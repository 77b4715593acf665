"""Figures 4, 14 and 15: attention on the original and the target key, before and after each kind of swap."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from qkscope.page.figures.style import INK, ORIGINAL, TARGET, new_figure, styled, with_page
from qkscope.result import Result

Row = dict[str, Any]
_FULL = (
    ("z1", "z1"), ("z1_oblique", "z1, oblique"), ("z1_oracle", "z1, oracle"),
    ("z2", "z2"), ("z2_oblique", "z2, oblique"), ("z2_oracle", "z2, oracle"),
    ("both", "z1 + z2"), ("both_summed", "summed, not joined"), ("both_oracle", "both, oracle"),
    ("random_z1", "random r1"), ("random_z2", "random r2"), ("random_both", "random r1 + r2"),
    ("key_pca_both", "key PCA r1 + r2"), ("cov_qk_both", "Cov_q Cov_k r1 + r2"),
    ("untrained_both", "untrained, z1 + z2"),
)  # fmt: skip
_SHORT = (("z1", "z1"), ("z2", "z2"), ("both", "z1+z2"), ("both_oracle", "oracle"), ("random_both", "random"),
          ("key_pca_both", "key PCA"), ("cov_qk_both", "Cov·Cov"))  # fmt: skip


def draw(result: Result) -> dict[str, str | bytes]:
    """One wide panel for a single head, small multiples for several."""
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result.tables["swap"]:
        cells.setdefault((row["variant"], row["d_head"], row["r1"], row["r2"]), {})[row["condition"]] = dict(row)
    variants = list(dict.fromkeys(key[0] for key in cells))
    single = len(cells) == 1
    columns = 1 if single else max(sum(key[0] == v for key in cells) for v in variants)
    figure = new_figure(10.5, 4.4) if single else new_figure(2.75 * columns + 0.6, 3.1 * len(variants) + 0.4)
    with styled():
        axes = figure.subplots(len(variants), columns, squeeze=False, sharey=True)
        for line, variant in zip(axes, variants, strict=True):
            own = [(key, cell) for key, cell in cells.items() if key[0] == variant]
            for axis, (key, cell) in zip(line, own, strict=False):
                title = f"{key[0]}, ({key[2]}, {key[3]}), d_head {key[1]}"
                _bars(axis, cell, _FULL if single else _SHORT, title)
            for axis in line[len(own) :]:
                axis.set_axis_off()
            line[0].set_ylabel("attention")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return with_page(result, {result.experiment.split("/")[1]: figure})


def _bars(axis: Axes, cell: dict[str, Row], conditions: tuple[tuple[str, str], ...], title: str) -> None:
    shown = [(label, cell[name]) for name, label in conditions if name in cell]
    start = cell["both"]
    labels = ["start", *(label for label, _ in shown)]
    orig = [start["orig_before"], *(row["orig_after"] for _, row in shown)]
    target = [start["target_before"], *(row["target_after"] for _, row in shown)]
    places = range(len(labels))
    axis.bar([x - 0.2 for x in places], orig, 0.38, color=ORIGINAL, label="on the original key")
    axis.bar([x + 0.2 for x in places], target, 0.38, color=TARGET, label="on the target key")
    errors = [0.0, *((row["high"] - row["low"]) / 2 for _, row in shown)]
    axis.errorbar([x + 0.2 for x in places], target, errors, fmt="none", ecolor=INK, elinewidth=0.8)
    axis.set_xticks(list(places), labels, rotation=55, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_ylim(0, 1.05)
    axis.axhline(start["orig_before"], color=ORIGINAL, lw=0.7, ls=":")
    axis.set_title(title + ("\nvacuous: z1 + z2 fill the head" if start["vacuous"] else ""), fontsize=8.5)
