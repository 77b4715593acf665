"""Figures 2 and 11: |cos| of features and singular vectors, and singular values beside target logits."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result

_SHOWN = 24  # singular vectors of the short figure


def draw(result: Result) -> dict[str, str | bytes]:
    """Figure 2: features of interest and spectra. Figure 11: all features and all vectors."""
    name = result.experiment.split("/")[1]
    configs = [key.split("/", 1)[1] for key in result.arrays if key.startswith("query/")]
    figure = new_figure(11.5, 4.0 * len(configs)) if name == "fig2" else new_figure(9.5, 4.9 * len(configs))
    with styled():
        axes = figure.subplots(len(configs), 3 if name == "fig2" else 2, squeeze=False)
        image = None
        for line, config in zip(axes, configs, strict=True):
            pairs = _pairs(result, config)
            for axis, side in zip(line[:2], ("query", "key"), strict=True):
                matrix = result.arrays[f"{side}/{config}"]
                features: Any = [pair[side == "key"] for pair in pairs] if name == "fig2" else range(len(matrix))
                shown = matrix[list(features)][:, :_SHOWN] if name == "fig2" else matrix
                image = _heat_map(axis, shown.numpy(), side, config, list(features))
            if name == "fig2":
                _spectrum(line[2], result, config)
        assert image is not None
        figure.colorbar(image, ax=axes[:, :2].ravel().tolist(), shrink=0.5, pad=0.01).set_label("|cos|")
    return with_page(result, {name: figure})


def _pairs(result: Result, config: str) -> list[tuple[int, int]]:
    rows = [
        r for r in result.tables["alignment"] if r["config"] == config and r["side"] == "query" and not r["control"]
    ]
    named = dict.fromkeys(row["pair"] for row in rows)
    return [(int(a), int(b)) for a, b in (pair.split("-") for pair in named)]


def _heat_map(axis: Axes, matrix: Any, side: str, config: str, features: list[int]) -> Any:
    image = axis.imshow(matrix, cmap="magma_r", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    letter = "u" if side == "query" else "v"
    few = len(features) <= 25
    axis.set(title=f"{config}: {side} features", xlabel=f"singular vector {letter}_k", ylabel="feature")
    if few:
        axis.set(yticks=range(len(features)), yticklabels=[str(f) for f in features])
    return image


def _spectrum(axis: Axes, result: Result, config: str) -> None:
    spectra = [r for r in result.tables["spectra"] if r["config"] == config]
    trained = next(r for r in spectra if not r["control"])["singular_values"][:_SHOWN]
    untrained = next(r for r in spectra if r["control"])["singular_values"][:_SHOWN]
    rows = [
        r for r in result.tables["alignment"] if r["config"] == config and r["side"] == "query" and not r["control"]
    ]
    targets = [r["target_logit"] for r in rows if r["seed"] == rows[0]["seed"]]
    axis.plot(range(len(targets)), targets, "_", color=INK, ms=11, mew=1.6, label="target logit of the pair")
    axis.plot(range(len(trained)), trained, "o", color=ORIGINAL, ms=4, label="singular value, trained")
    axis.plot(range(len(untrained)), untrained, "o", color=REST, ms=3, label="singular value, untrained")
    low = min(r["matched"] for r in rows)
    axis.set(xlabel="k", ylim=(-0.05 * max(targets), None))
    axis.set_title(
        f"{config}: least matched |cos| {low:.3f}\n(best of random {rows[0]['best_random']:.2f})", fontsize=9
    )
    axis.title.set_color(TARGET if low < 0.9 else INK)
    axis.legend(frameon=False, fontsize=8)
