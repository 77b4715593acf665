"""Figures 5, 6 and 24: terms of relative attention, one row per token pair; a term against its pair's strength."""

from __future__ import annotations

import math
from typing import Any

from qkscope.page.figures.style import INK, ORIGINAL, REST, new_figure, styled, with_page
from qkscope.result import Result


def draw(result: Result) -> dict[str, str | bytes]:
    """Early, late, and late in a rotated basis; or four scatter plots."""
    name = result.experiment.split("/")[1]
    return with_page(result, {name: _scatter(result) if name == "fig6" else _maps(result)})


def _maps(result: Result) -> Any:
    panels = (
        ("terms/early", "before training"),
        ("terms/late", "after training"),
        ("rotated/late", "after, U and V rotated"),
    )
    figure = new_figure(10.5, 4.4)
    with styled():
        axes = figure.subplots(1, 3, sharey=True)
        for axis, (key, title) in zip(axes, panels, strict=True):
            terms = result.arrays[key]
            shares = terms / terms.abs().sum(-1, keepdim=True)
            image = axis.imshow(shares.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
            axis.set(title=title, xlabel="singular vector k", xticks=range(0, terms.shape[1], 3))
        rows = {row["when"]: row for row in result.tables["terms"] if row["seed"] == result.tables["terms"][0]["seed"]}
        for axis, key, column in (
            (axes[0], "early", "sparsity"),
            (axes[1], "late", "sparsity"),
            (axes[2], "late", "rotated"),
        ):
            axis.set_title(f"{axis.get_title()}: sparsity {rows[key][column]:.3f}")
        axes[0].set_ylabel("token pair")
        figure.colorbar(image, ax=list(axes), shrink=0.7, pad=0.01).set_label("c_k / Σ|c|")
    return figure


def _scatter(result: Result) -> Any:
    first = result.tables["strength"][0]["seed"]
    rows = [r for r in result.tables["strength"] if r["seed"] == first]
    late, early = ([r for r in rows if r["control"] is flag] for flag in (False, True))
    figure = new_figure(2.75 * len(late), 3.2)
    with styled():
        axes = figure.subplots(1, len(late), squeeze=False)[0]
        for i, (axis, row) in enumerate(zip(axes, late, strict=True)):
            x = result.arrays["strength"][:, i].numpy()
            for key, colour, size in (("terms/early", REST, 4), ("terms/late", ORIGINAL, 6)):
                axis.scatter(x, result.arrays[key][:, i].numpy(), s=size, color=colour, alpha=0.6, linewidths=0)
            axis.axline((0, 0), slope=row["target_logit"], color=INK, lw=0.8, ls=":")
            before = math.fabs(early[i]["correlation"])
            axis.set_title(
                f"pair {row['pair']}: r = {row['correlation']:.3f}\n(grey, untrained: {before:.2f})", fontsize=8.5
            )
            axis.set_xlabel("x_q (x_k − mean other x_k)")
        axes[0].set_ylabel("term c_k (dotted: slope = target)")
    return figure
