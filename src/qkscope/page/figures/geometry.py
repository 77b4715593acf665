"""Figures 3 and 12 as a PNG, and as a page in which the cube and the sphere can be turned."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np

from qkscope.page.figures.style import figure_files, new_figure, styled
from qkscope.page.plain import plain_page
from qkscope.result import Result

_HEADS = ("trained", "untrained")


def draw(result: Result) -> dict[str, str | bytes]:
    """The picture, and the interactive page with plotly's script inside."""
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
    files: dict[str, str | bytes] = dict(figure_files({name: figure}))
    files["report.html"] = _page(result, discrete)
    return files


def _colours(result: Result, head: str, discrete: bool) -> np.ndarray:
    if discrete:
        code = result.arrays[f"{head}/code"].numpy()
        return matplotlib.colormaps["tab10"](code % 10)
    first = result.arrays[f"{head}/latent"].numpy()[:, 0]
    return matplotlib.colormaps["viridis"]((np.clip(first, -2, 2) + 2) / 4)


def _page(result: Result, discrete: bool) -> str:
    """The plain page with the 3-D plot put in before its first table."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=2, specs=[[{"type": "scene"}] * 2], horizontal_spacing=0.02,
                           subplot_titles=[head.capitalize() for head in _HEADS])  # fmt: skip
    for column, head in enumerate(_HEADS, start=1):
        colours = [matplotlib.colors.to_hex(colour) for colour in _colours(result, head, discrete)]
        latent = result.arrays[f"{head}/latent"].numpy()
        text = [_describe(z, discrete) for z in latent]
        for side, symbol in (("keys", "circle"), ("queries", "diamond")):
            x, y, z = result.arrays[f"{head}/{side}"].numpy().T
            marker = {"size": 3.5, "symbol": symbol, "color": colours, "opacity": 0.8}
            figure.add_trace(
                go.Scatter3d(x=x, y=y, z=z, mode="markers", name=side, legendgroup=side, showlegend=column == 1,
                             marker=marker, text=text, hovertemplate=f"{side[:-1] if side == 'keys' else 'query'}"
                             "<br>z1 = %{text}<extra></extra>"),
                row=1, col=column,
            )  # fmt: skip
    scene = {axis: {"title": {"text": f"PC {i + 1}"}, "showticklabels": False} for i, axis in
             enumerate(("xaxis", "yaxis", "zaxis"))}  # fmt: skip
    figure.update_layout(
        height=560, margin={"l": 0, "r": 0, "t": 40, "b": 0}, paper_bgcolor="white", font={"color": "#22262e"},
        scene={**scene, "aspectmode": "cube"}, scene2={**scene, "aspectmode": "cube"},
        legend={"orientation": "h", "y": 0, "itemsizing": "constant"},
    )  # fmt: skip
    plot = figure.to_html(full_html=False, include_plotlyjs=True, div_id="geometry", config={"displaylogo": False})
    caption = "<figcaption>Turn it with the mouse; hover a point for its latent.</figcaption>"
    top, heading, rest = plain_page(result).partition("<h2>")
    return f"{top}<figure style='margin:1rem 0'>{plot}{caption}</figure>{heading}{rest}"


def _describe(latent: np.ndarray, discrete: bool) -> str:
    return "".join("+" if value > 0 else "−" for value in latent) if discrete else ", ".join(f"{v:.1f}" for v in latent)
