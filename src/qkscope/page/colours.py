"""One colour for each name, in charts and in figures alike.

The table is in ``static/colours.js``, which draws the page's charts: hues for white paper and for dark, chosen so that
colour-blind readers tell them apart, and the names that have one of their own. Another name takes one by its letters
(FNV-1a); where that is taken already, the next; where all are, a deeper one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_MARK = "/* table */"


@cache
def palette() -> dict[str, Any]:
    """The table: ``hues`` (on white, on dark), ``named``, ``others`` and ``spare`` for other names, ``lines``."""
    text = (Path(__file__).parent / "static" / "colours.js").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text.split(_MARK)[1])
    return found


def hues_of(names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The hue of each name and how deep it is, known names first.

    >>> hues_of(["mine", "order", "key_pca"])
    {'mine': ('petrol', 0), 'order': ('turquoise', 0), 'key_pca': ('gold', 0)}
    """
    table = palette()
    met = {name: (table["named"][name], 0) for name in names if name in table["named"]}
    for name in names:
        if name not in met:
            start = _hash(name) % len(table["others"])
            taken = Counter(hue for hue, _ in met.values())
            hue = min([*table["others"][start:], *table["others"][:start], *table["spare"]], key=lambda hue: taken[hue])
            met[name] = (hue, taken[hue])
    return {name: met[name] for name in names}


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """The colour of each name on white paper.

    >>> colours_of(["order", "lexical"])
    {'order': '#1FA1AD', 'lexical': '#A845B8'}
    """
    hues = palette()["hues"]
    return {name: _mixed(hues[hue][0], hues["ink"][0], 0.65**deep) for name, (hue, deep) in hues_of(names).items()}


def _mixed(one: str, other: str, share: float) -> str:
    """A colour with a share of one and the rest of another."""
    parts = (share * int(one[i : i + 2], 16) + (1 - share) * int(other[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part):02X}" for part in parts)


def line_of(name: str) -> str:
    """How its line is drawn: baselines are broken."""
    return str(palette()["lines"].get(name, "solid"))


def _hash(name: str) -> int:
    found = 2166136261
    for byte in name.encode("utf-8", "surrogatepass"):
        found = (found ^ byte) * 16777619 & 0xFFFFFFFF
    return found
