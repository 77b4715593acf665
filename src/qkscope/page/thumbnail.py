"""A run as a small picture: its first figure, or a drawing of what it found in the page's own colours.

Drawings are SVG of numbers alone, so that they follow light and dark; nothing of a run's text goes into them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup
from PIL import Image

from qkscope.heads import Head
from qkscope.page.block import Row, Tables
from qkscope.page.blocks import blocks_of
from qkscope.page.colours import colours_of
from qkscope.runs.result import Result, plain_value

_WIDTH, _HEIGHT = 320, 150
_FOR, _AGAINST, _SOFT = "var(--original)", "var(--target)", "var(--soft)"
_PIXELS, _COLOURS = (640, 300), 48  # of a figure: as sharp as a dense screen shows
_MOST = 14  # bars


def thumbnail(result: Result, pictures: Mapping[str, bytes]) -> Markup:
    """The first figure that can be read, or else the first drawing that the result's tables give, or nothing."""
    for content in pictures.values():
        small = _shrunk(content)
        if small:
            return Markup('<img alt="" src="data:image/png;base64,{}">').format(base64.b64encode(small).decode())
    tables = plain_value(result.tables)
    kinds = {block.kind: block.rows for block in reversed(blocks_of(result))}
    drawn = next((draw(kinds[kind]) for kind, draw in _DRAWN.items() if kind in kinds), None) or _numbers(tables)
    box = Markup('<svg viewBox="-4 -4 {} {}" aria-hidden="true">{}</svg>')
    return box.format(_WIDTH + 8, _HEIGHT + 8, Markup("").join(drawn)) if drawn else Markup("")


def _shrunk(content: bytes) -> bytes:
    """A PNG in few colours and no larger than a card; nothing where it cannot be read."""
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            flat = Image.new("RGB", image.size, "white")
            flat.paste(image.convert("RGBA"), mask=image.convert("RGBA").getchannel("A"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return b""
    flat.thumbnail(_PIXELS, Image.Resampling.LANCZOS)
    kept = io.BytesIO()
    flat.quantize(_COLOURS).save(kept, "PNG", optimize=True)
    return kept.getvalue()


# ---------------------------------------------------------------------- drawings


def _rect(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0) -> Markup:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'  # text is refused by :.1f
    return Markup(f'<rect {box} fill="{colour}" fill-opacity="{opacity:.2f}"/>')


def _path(points: Iterable[tuple[float, float]], colour: str, wide: float, opacity: float = 1.0) -> Markup:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    look = f'fill="none" stroke="{colour}" stroke-width="{wide:.1f}" stroke-opacity="{opacity:.2f}"'
    return Markup(f'<polyline points="{places}" {look} stroke-linecap="round"/>')


def _map(rows: Sequence[Row]) -> list[Markup]:
    heads = [Head.parse(row["head"]) for row in rows]
    layers, tall = 1 + max(head.layer for head in heads), 1 + max(head.index for head in heads)
    side = min(_WIDTH / layers, _HEIGHT / tall)
    left, top = (_WIDTH - layers * side) / 2, (_HEIGHT - tall * side) / 2
    shades = [0.08 + 0.92 * min(max(row["accuracy"] or 0.0, 0.0), 1.0) for row in rows]
    return [
        _rect(left + head.layer * side, top + (tall - 1 - head.index) * side, 0.92 * side, 0.92 * side, _FOR, shade)
        for head, shade in zip(heads, shades, strict=True)
    ]


def _graph(rows: Sequence[Row]) -> list[Markup]:
    """Each part of the logit at its token and its layer, and a line to what it is part of."""
    by_id = {row["id"]: row for row in rows if row["kind"] != "why" and None not in (row["position"], row["layer"])}
    columns = sorted({row["position"] for row in by_id.values()})
    levels = sorted({row["layer"] for row in by_id.values()}, reverse=True)
    at = {}
    for key, row in by_id.items():
        across = _place(columns.index(row["position"]), len(columns), _WIDTH)
        at[key] = (across, _place(levels.index(row["layer"]), len(levels), _HEIGHT))
    drawn = []
    for key, row in sorted(by_id.items(), key=lambda item: -abs(item[1]["share"] or 0)):
        if row["parent"] in at and at[key] != at[row["parent"]]:
            share = row["share"] or 0.0
            wide = max(0.6, min(8 * abs(share), 9.0))
            drawn.append(_path([at[key], at[row["parent"]]], _FOR if share >= 0 else _AGAINST, wide, 0.7))
    return drawn + [_path([place, place], "var(--ink)", 5) for place in sorted(set(at.values()))]


def _place(i: int, count: int, room: float) -> float:
    return room * (i + 0.5) / count


def _swaps(rows: Sequence[Row]) -> list[Markup]:
    """Attention on the right key and on the target, before and after each swap of the first head."""
    own = [row for row in rows if row["head"] == rows[0]["head"]][: _MOST // 2]
    pairs = [(own[0]["orig_before"], own[0]["target_before"]), *((r["orig_after"], r["target_after"]) for r in own)]
    return _bars([(value, colour) for pair in pairs for value, colour in zip(pair, (_FOR, _AGAINST), strict=True)])


def _curve(rows: Sequence[Row]) -> list[Markup]:
    own = [row for row in rows if row["head"] == rows[0]["head"]]
    methods = list(dict.fromkeys(row["method"] for row in own))
    colours = colours_of(methods)
    return _lines({colours[m]: [(r["k"], r["shift"]) for r in own if r["method"] == m] for m in methods})


def _spectra(rows: Sequence[Row]) -> list[Markup]:
    """Singular values of each contrast at the first head; what chance gives in grey."""
    own = [row for row in rows if row["head"] == rows[0]["head"]]
    names = list(dict.fromkeys(row["contrast"] for row in own))
    colours = colours_of(names)
    chance = [(row["component"], row["null_high"]) for row in own if row["contrast"] == names[0]]
    found = {colours[n]: [(r["component"], r["value"]) for r in own if r["contrast"] == n] for n in names}
    return _lines({_SOFT: chance, **found})


def _parts(rows: Sequence[Row]) -> list[Markup]:
    """One logit as a waterfall."""
    own = [row for row in rows if (row["by"], row["side"]) == (rows[0]["by"], rows[0]["side"])]
    ends, total = [0.0], 0.0
    for row in own:
        ends.append(total := total + row["value"])
    low, high = min(*ends, 0.0), max(*ends, 0.0)
    step, scale = _HEIGHT / max(len(own), 1), _WIDTH / ((high - low) or 1.0)
    return [
        _rect(
            (min(a, b) - low) * scale, i * step, max(abs(b - a) * scale, 1), 0.75 * step, _FOR if b >= a else _AGAINST
        )
        for i, (a, b) in enumerate(pairwise(ends))
    ]


def _tokens(rows: Sequence[Row]) -> list[Markup]:
    return _bars([(row["attention"], _FOR) for row in rows[:60]])


def _numbers(tables: Tables) -> list[Markup]:
    """What no chart draws: sparsity over training, or the first numbers there are as bars."""
    training = tables.get("training") or ()
    if training and {"step", "circuit", "sparsity", "rotated"} <= set(training[0]):
        own = [row for row in training if row["circuit"]]
        return _lines(
            {_FOR: [(r["step"], r["sparsity"]) for r in own], _SOFT: [(r["step"], r["rotated"]) for r in own]}
        )
    for rows in tables.values():
        column = next((name for name, value in (rows[0] if rows else {}).items() if isinstance(value, float)), None)
        if column is not None:
            return _bars([(row.get(column), _FOR) for row in rows[:_MOST]])
    return []


def _bars(values: Sequence[tuple[Any, str]]) -> list[Markup]:
    sizes = [abs(value) if isinstance(value, int | float) else 0.0 for value, _ in values]
    step, most = _WIDTH / len(values), max(sizes) or 1.0
    tall = [_HEIGHT * size / most for size in sizes]
    return [
        _rect(i * step, _HEIGHT - high, 0.8 * step, high, colour)
        for i, (high, (_, colour)) in enumerate(zip(tall, values, strict=True))
    ]


def _lines(found: Mapping[str, Sequence[tuple[Any, Any]]]) -> list[Markup]:
    """A line for each colour."""
    whole = {colour: [p for p in points if None not in p] for colour, points in found.items()}
    every = [point for points in whole.values() for point in points]
    if not every:
        return []
    low, high = (min(x for x, _ in every), max(x for x, _ in every))
    least, most = (min(0, *(y for _, y in every)), max(y for _, y in every))
    across, up = _WIDTH / ((high - low) or 1), _HEIGHT / ((most - least) or 1)
    return [
        _path([((x - low) * across, (most - y) * up) for x, y in sorted(points)], colour, 2.5)
        for colour, points in whole.items()
    ]


_DRAWN: Mapping[str, Callable[[Sequence[Row]], list[Markup]]] = {
    "graph": _graph, "map": _map, "swaps": _swaps, "curve": _curve, "spectra": _spectra, "parts": _parts,
    "tokens": _tokens,
}  # fmt: skip
"""What is drawn of a run, the most telling first."""
