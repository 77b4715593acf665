"""Figures 3 and 12 as a PNG, and as a page in which the cube and the sphere can be turned."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np

from qkscope.analyses.clouds import Cloud, Colouring
from qkscope.page.figures.style import figure_files, new_figure, styled
from qkscope.page.report import report_html
from qkscope.result import Result

_HEADS = ("trained", "untrained")
_BINS = 7  # of a continuous latent, for colours


def draw(result: Result) -> dict[str, str | bytes]:
    """The picture, and the page in which its points can be turned."""
    name = result.experiment.split("/")[1]
    discrete = result.tables["geometry"][0]["variant"] == "discrete"
    figure = new_figure(10.5, 5.6)
    with styled():
        for place, head in enumerate(_HEADS):
            axis: Any = figure.add_subplot(1, 2, place + 1, projection="3d")
            row = dict(result.tables["geometry"][place])
            colours = _colours(result, head, discrete)
            for side, marker, size in (("keys", "o", 14), ("queries", "^", 20)):
                points = result.arrays[f"{head}/{side}"].numpy()
                axis.scatter(*points.T, c=colours, marker=marker, s=size, alpha=0.7, linewidths=0, label=side)
            facts = f"{row['vertices']} vertices, " if discrete else ""
            axis.set_title(
                f"{head}: {facts}latent fit {row['latent_fit_key']:.2f}, query-key cosine {row['cosine']:.2f}"
            )
            axis.set(xlabel="PC 1", ylabel="PC 2", zlabel="PC 3", xticks=[], yticks=[], zticks=[])
            reach = 1.02 * max(float(result.arrays[f"{head}/{side}"].abs().max()) for side in ("keys", "queries"))
            axis.set(xlim=(-reach, reach), ylim=(-reach, reach), zlim=(-reach, reach))
            axis.view_init(elev=18, azim=-62)
            axis.set_box_aspect((1, 1, 1), zoom=0.98)
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle(f"z1 in query and key space, colour = {'its code' if discrete else 'its first coordinate'}")
    files = figure_files({name: figure})
    pictures = {name: files[f"figures/{name}.png"]}
    return {**files, "report.html": report_html([result], pictures, clouds=_clouds(result, discrete))}


def _colours(result: Result, head: str, discrete: bool) -> np.ndarray:
    if discrete:
        code = result.arrays[f"{head}/code"].numpy()
        return matplotlib.colormaps["tab10"](code % 10)
    first = result.arrays[f"{head}/latent"].numpy()[:, 0]
    return matplotlib.colormaps["viridis"]((np.clip(first, -2, 2) + 2) / 4)


def _clouds(result: Result, discrete: bool) -> list[Cloud]:
    """Keys and queries of both heads, coloured by the latent: its code, or where its first coordinate lies."""
    found = []
    for head in _HEADS:
        latent = result.arrays[f"{head}/latent"].numpy()
        if discrete:
            names = sorted({_code(z) for z in latent})
            labels = tuple(names.index(_code(z)) for z in latent)
        else:
            edges = np.quantile(latent[:, 0], np.linspace(0, 1, _BINS + 1)[1:-1])
            labels = tuple(np.digitize(latent[:, 0], edges).tolist())
            names = [f"part {i + 1} of {_BINS}" for i in range(_BINS)]
        colouring = Colouring(tuple(names), labels, labels, ordered=not discrete)
        keys, queries = (result.arrays[f"{head}/{side}"] for side in ("keys", "queries"))
        found.append(Cloud(f"{head} head", keys, queries, {"z1" if discrete else "first coordinate of z1": colouring}))
    return found


def _code(latent: np.ndarray) -> str:
    return "".join("+" if value > 0 else "−" for value in latent)
