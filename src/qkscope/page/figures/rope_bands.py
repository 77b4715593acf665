"""Figures 21 and 22: alignment under RoPE, and the share of each feature's norm in each band."""

from __future__ import annotations

from typing import Any

import torch

from qkscope.page.figures.style import new_figure, styled, with_page
from qkscope.result import Result


def draw(result: Result) -> dict[str, str | bytes]:
    """Two heat maps: query side and key side."""
    name = result.experiment.split("/")[1]
    figure = new_figure(9.2, 3.9 if name == "fig21" else 3.3)
    with styled():
        axes = figure.subplots(1, 2)
        for axis, side in zip(axes, ("query", "key"), strict=True):
            image = _bands(axis, result, side) if name == "fig22" else _cosines(axis, result, side)
        label = "share of ‖W_Q f‖ (right: ‖W_K f‖), mean over seeds" if name == "fig22" else "|cos|"
        figure.colorbar(image, ax=list(axes), shrink=0.8, pad=0.01).set_label(label, fontsize=8)
    return with_page(result, {name: figure})


def _cosines(axis: Any, result: Result, side: str) -> Any:
    rows = [r for r in result.tables["alignment"] if r["side"] == side and not r["control"]]
    rows = [r for r in rows if r["seed"] == rows[0]["seed"]]
    features = [int(r["pair"].split("-")[side == "key"]) for r in rows]
    image = axis.imshow(result.arrays[side][features].numpy(), cmap="magma_r", vmin=0, vmax=1, aspect="auto")
    labels = [
        f"f_{feature} (pair {row['pair']}): {row['matched']:.3f}" for feature, row in zip(features, rows, strict=True)
    ]
    axis.set(title=f"{side} features", xlabel=f"singular vector {'u' if side == 'query' else 'v'}_k of the un-rotated "
                   "Ω",
             yticks=range(len(features)), yticklabels=labels)  # fmt: skip
    return image


def _bands(axis: Any, result: Result, side: str) -> Any:
    rows = [r for r in result.tables["bands"] if r["side"] == side and not r["control"]]
    pairs = list(dict.fromkeys((r["pair"], r["positional"]) for r in rows))
    names = [key for key in rows[0] if key.startswith("band_")]
    shares = torch.tensor(
        [[_mean([r[band] for r in rows if r["pair"] == pair]) for band in names] for pair, _ in pairs]
    )
    image = axis.imshow(shares.numpy(), cmap="magma_r", vmin=0, vmax=1, aspect="auto")
    for y, line in enumerate(shares.tolist()):
        for x, value in enumerate(line):
            axis.text(
                x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if value > 0.55 else "black"
            )
    axis.set(title=f"{side} features", xlabel="band (0 fast … 4 slow)", xticks=range(len(names)),
             yticks=range(len(pairs)),
             yticklabels=[f"{pair}{' (positional)' if positional else ''}" for pair, positional in pairs])  # fmt: skip
    return image


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
