"""Figures 12-18: matched |cos| of the four pairs against what was varied, and over training by p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

from qkscope.page.figures.style import INK, REST, new_figure, styled, with_page
from qkscope.result import Result

_LABELS = {
    "fig12": "probability p of a feature", "fig14": "weight λ of the head's loss", "fig15": "features n",
    "fig16": "width of the head d_head", "fig17": "keys in the context", "fig18": "seed",
}  # fmt: skip


def draw(result: Result) -> dict[str, str | bytes]:
    """One panel per side; a dot per pair and seed; grey crosses before training, dotted what chance finds."""
    name = result.experiment.split("/")[1]
    rows = list(result.tables["alignment"])
    if name == "fig13":
        return with_page(result, {name: _over_training(rows)})
    figure = new_figure(9.6, 3.7)
    with styled():
        axes = figure.subplots(1, 2, sharey=True)
        by_seed = name == "fig18"
        keys: list[Any] = list(dict.fromkeys((r["config"], r["seed"]) if by_seed else r["config"] for r in rows))
        for axis, side in zip(axes, ("query", "key"), strict=True):
            own = [r for r in rows if r["side"] == side]
            _dots(axis, own, keys, by_seed)
            labels = [f"{config[-1] if config[-1] == 'B' else 'C'}{seed}" for config, seed in keys] if by_seed else [
                key.split("=")[1] for key in keys]  # fmt: skip
            axis.set(title=f"{side} features and {'u' if side == 'query' else 'v'}_k", xticks=range(len(keys)),
                     xticklabels=labels, ylim=(-0.03, 1.05),
                     xlabel="reading of the loss and seed" if by_seed else _LABELS[name])  # fmt: skip
        axes[0].set_ylabel("matched |cos|")
        axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return with_page(result, {name: figure})


def _dots(axis: Any, rows: Sequence[Any], keys: Sequence[Any], by_seed: bool) -> None:
    colours = matplotlib.colormaps["viridis"]
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    for i, pair in enumerate(pairs):
        shift = (i - (len(pairs) - 1) / 2) * 0.13
        for control in (True, False):
            own = [r for r in rows if r["pair"] == pair and r["control"] == control]
            x = [keys.index((r["config"], r["seed"]) if by_seed else r["config"]) + shift for r in own]
            logit = f"{own[0]['target_logit']:g}" if own else ""
            label = ("untrained" if i == 0 else None) if control else f"pair {pair}, logit {logit}"
            axis.scatter(x, [r["matched"] for r in own], s=12 if control else 20, marker="x" if control else "o",
                         color=REST if control else colours(i / max(len(pairs) - 1, 1) * 0.85), linewidths=0.8,
                         label=label)  # fmt: skip
    axis.axhline(rows[0]["best_random"], color=INK, lw=0.9, ls=":", label="best of random, mean")


def _over_training(rows: Sequence[Any]) -> Any:
    figure = new_figure(7.6, 4.0)
    colours = matplotlib.colormaps["viridis"]
    configs = list(dict.fromkeys(row["config"] for row in rows))
    with styled():
        axis = figure.subplots()
        for i, config in enumerate(configs):
            own = [r for r in rows if r["config"] == config]
            steps = sorted({r["step"] for r in own})
            means = [_mean([r["matched"] for r in own if r["step"] == step]) for step in steps]
            lows = [min(r["matched"] for r in own if r["step"] == step) for step in steps]
            colour = colours(i / max(len(configs) - 1, 1) * 0.92)
            axis.plot(steps, means, "-o", color=colour, ms=3, lw=1.4, label=config)
            axis.plot(steps, lows, "-", color=colour, lw=0.6, alpha=0.5)
        axis.axhline(rows[0]["best_random"], color=INK, lw=0.9, ls=":", label="best of random")
        axis.set(xlabel="step", ylabel="matched |cos|: mean (thick), least (thin)", ylim=(-0.03, 1.05))
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
