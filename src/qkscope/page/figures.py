"""Results as PNG for pages and PDF for papers: one look for all figures, and pictures of what the verbs found.

Each ``draw_...`` takes a result and gives the files of its run folder: figures (heads, swaps, one prompt split,
discovered features, what a nano model learns) and the page. Figures are made without pyplot's global state, so drawing
never opens a window or leaks a figure.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from qkscope.heads import Head
from qkscope.page.colours import colours_of, line_of, palette
from qkscope.page.discovered import FAMILIES, family_of
from qkscope.page.report import report_html
from qkscope.runs.result import Result

logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells of every glyph it packs into a PDF
logging.getLogger("matplotlib").setLevel(logging.WARNING)

ORIGINAL, TARGET, REST, INK = (palette()["hues"][hue][0] for hue in ("blue", "orange", "pale", "ink"))
_STYLE: Any = {
    "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#666b75", "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "font.family": "sans-serif", "figure.facecolor": "white",
}  # fmt: skip


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """An empty figure in our style (inches)."""
    with matplotlib.rc_context(_STYLE):
        return Figure(figsize=(width, height), layout="constrained", **options)


def styled() -> Any:
    """Context in which axes take our style."""
    return matplotlib.rc_context(_STYLE)


def figure_files(figures: Mapping[str, Figure]) -> dict[str, bytes]:
    """``figures/NAME.png`` and ``.pdf`` of each; no dates inside, so a rerun gives the same bytes."""
    files = {}
    for name, figure in figures.items():
        for kind, options in (("png", {"dpi": 130}), ("pdf", {"metadata": {"CreationDate": None}})):
            buffer = io.BytesIO()
            with styled():
                figure.savefig(buffer, format=kind, **options)
            files[f"figures/{name}.{kind}"] = buffer.getvalue()
    return files


def with_page(result: Result, figures: Mapping[str, Figure]) -> dict[str, str | bytes]:
    """The figures' files, and the page that shows them beside what can be touched."""
    files = figure_files(figures)
    pictures = {name: files[f"figures/{name}.png"] for name in figures}
    return {**files, "report.html": report_html([result], pictures)}


Row = Mapping[str, Any]

_VARIANTS = ("_all", "_moving")  # of a method: on the page, not in the picture
_NOT_DRAWN = ("box",)
_TASKS = {
    "indirect objects": ("ioi",),
    "induction": ("induction",),
    "box binding, nine boxes": ("binding/list", "binding/sentence", "binding/question"),
    "list filtering, five of 25 items": ("filter/list", "filter/bullets", "filter/question"),
}


def column(rows: Sequence[Row], name: str) -> list[float]:
    """Numbers to draw: a gap where there is none."""
    return [np.nan if row[name] is None else row[name] for row in rows]


def head_map(axis: Axes, rows: Sequence[Row], name: str, top: float | None = 1.0, label: str = "") -> None:
    """One number of every head, layers across."""
    heads = [Head.parse(row["head"]) for row in rows]
    grid = np.full((1 + max(head.index for head in heads), 1 + max(head.layer for head in heads)), np.nan)
    for head, value in zip(heads, column(rows, name), strict=True):
        grid[head.index, head.layer] = value
    image = axis.imshow(grid, cmap="viridis", vmin=0, vmax=top, aspect="auto", origin="lower")
    axis.figure.colorbar(image, ax=axis, label=label)
    axis.set(ylabel="head")


# ---------------------------------------------------------------------- the verbs


def draw_verbs(ranking: Result, swaps: Result, parts: Result) -> dict[str, bytes]:
    """PNG and PDF files of the three pictures, by name."""
    with styled():
        return figure_files({"heads": _heads(ranking), "swap": _swaps(swaps), "tokens": _logits(parts)})


def _heads(ranking: Result) -> Figure:
    """Accuracy of every head, the best named."""
    rows = ranking.tables["heads"]
    figure = new_figure(7.5, 2.6)
    axis = figure.subplots()
    head_map(axis, rows, "accuracy", label="attends to the right key")
    for row in sorted(rows, key=lambda row: -row["accuracy"])[:5]:
        head = Head.parse(row["head"])
        at = (head.layer, head.index)
        axis.annotate(str(head), at, (8, -3), textcoords="offset points", color="white", fontsize=7)
    axis.set(xlabel="layer", title=f"Every head of {ranking.model}")
    return figure


def _swaps(swaps: Result) -> Figure:
    """Attention on the right key and on the target after each swap, one panel per head."""
    rows = swaps.tables["swap"]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    figure = new_figure(3.4 * len(heads), 4.6)
    axes = np.atleast_1d(figure.subplots(1, len(heads), sharey=True))
    for axis, head in zip(axes, heads, strict=True):
        own = [row for row in rows if row["head"] == head]
        before = {"condition": "before", "orig_after": own[0]["orig_before"], "target_after": own[0]["target_before"]}
        shown = [before, *own]
        places = np.arange(len(shown))[::-1]
        axis.barh(places + 0.2, column(shown, "orig_after"), 0.4, color=ORIGINAL, label="right key")
        axis.barh(places - 0.2, column(shown, "target_after"), 0.4, color=TARGET, label="target")
        axis.set_yticks(places, [row["condition"].replace("_", " ") for row in shown])
        axis.set(xlabel="attention after the swap", xlim=(0, 1), title=head)
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1.06), ncols=2, frameon=False)
    return figure


def _logits(parts: Result) -> Figure:
    """The logit of every token, stacked from its features and the residual."""
    rows = parts.tables["tokens"]
    names = [name for name in rows[0] if name not in ("position", "token", "attention", "logit")]
    figure = new_figure(max(6.0, 0.34 * len(rows)), 4.2)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    places = np.arange(len(rows))
    top.bar(places, column(rows, "attention"), color=ORIGINAL)
    top.set(ylabel="attention", ylim=(0, 1), title=parts.answer.split(":")[0])
    up, down = np.zeros(len(rows)), np.zeros(len(rows))
    for name, colour in colours_of(names).items():
        values = np.array(column(rows, name))
        bottom.bar(places, values, bottom=np.where(values > 0, up, down), color=colour, label=name)
        up, down = up + values.clip(min=0), down + values.clip(max=0)
    bottom.plot(places, column(rows, "logit"), "k_", markersize=9, label="logit")
    bottom.axhline(0, color="black", linewidth=0.6)
    bottom.set_xticks(places, [repr(row["token"])[1:-1] for row in rows], rotation=60, ha="right", fontsize=7)
    bottom.set_ylabel("logit")
    bottom.legend(ncols=len(names) + 1, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.32))
    return figure


# ---------------------------------------------------------------------- features without labels


def draw_discovery(result: Result) -> dict[str, str | bytes]:
    """How much attention each method moves at every size, head by head."""
    with styled():
        return with_page(result, {"curve": _curve(result)} if result.tables.get("curve") else {})


def draw_atlas(result: Result) -> dict[str, str | bytes]:
    """Every head in the colour of its name's family, and how much of each one's logit has a name."""
    with styled():
        return with_page(result, {"atlas": _atlas(result.tables["atlas"])})


def _atlas(rows: Sequence[Row]) -> Figure:
    """Above, squares as large as the share that gave the name; below, a bar for each head, rest in grey."""
    colours, counts = colours_of(list(FAMILIES)), Counter(family_of(row) for row in rows)
    rows = [
        {**row, "share": float(np.nan_to_num(share))} for row, share in zip(rows, column(rows, "share"), strict=True)
    ]
    order = sorted(rows, key=lambda row: (list(FAMILIES).index(family_of(row)), -row["share"]))
    layers, heads = (1 + max(row[name] for row in rows) for name in ("layer", "index"))
    tall = min(max(heads * min(8.3 / layers, 0.35), 1), 6)  # inches, so that cells are square
    figure = new_figure(9, tall + 3.5)
    above, below = figure.subplots(2, 1, height_ratios=(tall, 1.8))
    for row in rows:
        above.add_patch(Rectangle((row["layer"] - 0.46, row["index"] - 0.46), 0.92, 0.92, color=REST, alpha=0.25, lw=0))
        side = 0.92 * min(max(row["share"], 0), 1) ** 0.5
        corner = (row["layer"] - side / 2, row["index"] - side / 2)
        above.add_patch(Rectangle(corner, side, side, color=colours[family_of(row)], lw=0))
    above.set(xlim=(-0.5, layers - 0.5), ylim=(-0.5, heads - 0.5), xlabel="layer", ylabel="head", aspect="equal")
    for axis in (above.xaxis, above.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    above.set_title("Every head by its name; a full square: all of its logit is explained by the block that names it")
    places, share = np.arange(len(order)), np.array(column(order, "share"))
    known = 1 - np.array(column(order, "rest"))
    below.bar(places, np.ones(len(order)), 1, color=REST, alpha=0.35)
    below.bar(places, known.clip(0, 1), 1, color=[colours[family_of(row)] for row in order], alpha=0.45)
    below.bar(places, share.clip(0, 1), 1, color=[colours[family_of(row)] for row in order])
    below.axhline(0.5, color=INK, lw=0.8, ls=":")
    below.set(
        xlim=(-0.5, len(order) - 0.5), ylim=(0, 1), xlabel="heads, by name and share", ylabel="share of the logit"
    )
    below.set_xticks([])
    below.set_title("Full: the block that names it; pale: other blocks; grey: not explained")
    names = [name for name in FAMILIES if counts[name]]
    handles = [Patch(color=colours[name], label=f"{name} ({counts[name]})") for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8.5)
    return figure


def _is_variant(name: str, methods: Collection[str]) -> bool:
    return any(name.endswith(end) and name.removesuffix(end) in methods for end in _VARIANTS)


def _curve(result: Result) -> Figure:
    rows = result.tables["curve"]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    sizes = sorted({row["k"] for row in rows})
    methods = dict.fromkeys(row["method"] for row in rows)
    names = [name for name in methods if not _is_variant(name, methods) and name not in _NOT_DRAWN]
    look = colours_of(names)
    width = max(3.2 * len(heads), 4.8)
    columns = max(1, min(len(names), int(width / (0.6 + 0.065 * max(map(len, names))))))  # inches of an entry
    figure = new_figure(width, 5 + 0.2 * -(-len(names) // columns))
    axes = figure.subplots(2, len(heads), sharex=True, sharey="row", squeeze=False)
    ends = {"shift": ("low", "high"), "carried": ("carried_low", "carried_high")}
    for place, head in enumerate(heads):
        for axis, (kind, (low, high)) in zip(axes[:, place], ends.items(), strict=True):
            for name in names:
                own = [row for row in rows if row["head"] == head and row["method"] == name]
                at, label = [sizes.index(row["k"]) for row in own], name.replace("_", " ")
                style: Any = {"color": look[name], "linestyle": line_of(name), "marker": "o", "markersize": 3}
                axis.plot(at, column(own, kind), label=label, **style)
                if name == "block":
                    axis.fill_between(at, column(own, low), column(own, high), color=look[name], alpha=0.15)
            axis.set_xticks(range(len(sizes)), sizes)
        axes[0, place].set(title=head)
        axes[1, place].set(xlabel="dimensions swapped")
    axes[0, 0].set_ylabel("attention moved (shift)")
    axes[1, 0].set_ylabel("logit carried")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
    return figure


# ---------------------------------------------------------------------- nano


def draw_nano(result: Result) -> dict[str, str | bytes]:
    """A panel per task; a line per form with its 95% interval over training, and chance dashed."""
    rows, since = result.tables["accuracy"], result.tables["parts"][0]["all_forms_from"]
    figure = new_figure(11.5, 5.6)
    with styled():
        axes = figure.subplots(2, 2, sharex=True, sharey=True)
        for axis, (title, names) in zip(axes.flat, _TASKS.items(), strict=True):
            _panel(axis, title, {name: [row for row in rows if row["task"] == name] for name in names}, since)
        for axis in axes[1]:
            axis.set_xlabel("training step")
        for axis in axes[:, 0]:
            axis.set_ylabel("accuracy")
        figure.supxlabel(
            f"Solid: the likeliest of all tokens is right (first question of {rows[0]['n']} test prompts; band: 95% "
            "interval). Dotted: a right candidate is likelier than the others. Grey, dashed: chance among candidates."
            + ("\nFrom the vertical line on, all forms of binding are trained." if since >= 0 else ""),
            fontsize=8.5,
        )
    return with_page(result, {"accuracy": figure})


def _panel(axis: Axes, title: str, lines: Mapping[str, Sequence[Row]], since: int) -> None:
    for colour, (name, rows) in zip((ORIGINAL, TARGET, "#5a9a5a"), lines.items(), strict=False):
        steps = column(rows, "step")
        axis.fill_between(steps, column(rows, "low"), column(rows, "high"), color=colour, alpha=0.18, lw=0)
        axis.plot(steps, column(rows, "accuracy"), color=colour, lw=1.4, label=name)
        axis.plot(steps, column(rows, "choice"), color=colour, lw=0.9, ls=":")
        axis.axhline(rows[0]["chance"], color=REST, lw=1, ls="--", zorder=0)
    if since >= 0:
        axis.axvline(since, color=INK, lw=0.8, zorder=0)
    axis.set(title=title, ylim=(-0.02, 1.04))
    if len(lines) > 1:
        axis.legend(frameon=False, loc="lower right", fontsize=8)
