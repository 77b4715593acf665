"""The README's picture: who writes what L18H6 matches on, and what is left when two of them are
cut.

``qkscope trace binding --heads L18H6 -n 128 --out runs/trace``, then ``python
papers/scripts/circuit.py runs/trace``: every number in the picture is from that run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from qkscope.sums.intervals import wilson
from qkscope_papers.figures import INK, ORIGINAL, REST, TARGET, new_figure, palette, styled
from qkscope_papers.reports import DOCS

FIGURE = DOCS / "figures" / "circuit.png"
TOKENS = (
    "wheel",
    ":",
    "Z",
    "wheel",
    ":",
)  # the end of a prompt: the key stands at 2, the query at 4
PLACES = (0.0, 1.0, 2.0, 3.6, 4.6)
READERS = {"key": 2, "query": 4}
SHOWN = {"key": 2, "query": 3}  # writers of each side
LEAST = 0.05  # of the logit, to draw from where a writer read it
Rows = list[dict[str, Any]]


def circuit(axis: Any, tables: dict[str, Rows], head: str) -> None:
    """Tokens below, writers above what they wrote to, lines from where they read it, as wide as
    their share.
    """
    before = tables["check"][0]
    axis.set(xlim=(-0.6, 5.5), ylim=(-0.55, 3.6))
    axis.set_axis_off()
    for x, token in zip(PLACES, TOKENS, strict=True):
        axis.text(
            x, 0, token, ha="center", va="center", fontsize=13, family="monospace", weight="bold"
        )
    axis.text((PLACES[2] + PLACES[3]) / 2, 0, "↵", ha="center", va="center", fontsize=12)
    for side, at in READERS.items():
        x = PLACES[at]
        own = [row for row in tables["writers"] if row["side"] == side][: SHOWN[side]]
        for i, row in enumerate(own):
            y = 1.05 + 0.55 * i
            axis.text(x, y, f"{row['writer']}  {row['share']:.0%}", ha="center", va="center", fontsize=10,
                      bbox={"boxstyle": "round,pad=0.3", "fc": "white", "ec": INK, "lw": 0.8})  # fmt: skip
            for read in tables["sources"]:
                offset = read["offset"]
                if (
                    (read["side"], read["writer"]) == (side, row["writer"])
                    and offset
                    and read["share"] > LEAST
                ):
                    arrow = {"arrowstyle": "-", "color": ORIGINAL, "alpha": 0.75, "lw": 14 * read["share"],
                             "connectionstyle": "arc3,rad=-0.18", "shrinkA": 9, "shrinkB": 0}  # fmt: skip
                    axis.annotate(
                        "", (x - 0.43, y), (PLACES[at + offset], 0.02), arrowprops=arrow, zorder=0
                    )
        axis.text(
            x, -0.38, f"the {side}", ha="center", fontsize=9, color=palette()["hues"]["ink"][0]
        )
    arrow = {
        "arrowstyle": "-|>",
        "color": TARGET,
        "lw": 2.4,
        "connectionstyle": "arc3,rad=0.28",
        "mutation_scale": 16,
    }
    top = 1.05 + 0.55 * max(SHOWN.values()) - 0.2
    axis.annotate("", (PLACES[2], top - 0.35), (PLACES[4], top + 0.1), arrowprops=arrow)
    axis.text(
        3.3,
        3.28,
        f"{head} gives {before['attention']:.0%} of its attention",
        ha="center",
        color=TARGET,
    )
    axis.set_title(
        "Who wrote what it matches on (share of the logit), and what they read", loc="left"
    )


def cut(axis: Any, tables: dict[str, Rows]) -> None:
    """How often the head is right: before, with two writers cut from its keys, with two others cut."""
    before = tables["check"][0]
    writers = [row["writer"] for row in tables["writers"] if row["side"] == "key"][:2]
    rows = {
        row["by"]: row for row in tables["edges"]
        if (row["side"], row["kind"], row["replaced"], row["norms"], row["k"]) == ("key", "cut", "mean", "held", 2)
    }  # fmt: skip
    shown = [before, rows["share"], rows["random"]]
    low, high = wilson(before["accuracy"] * before["n"], before["n"])
    values = [row["accuracy"] for row in shown]
    ends = [[row["accuracy"] - row.get("low", low) for row in shown],
            [row.get("high", high) - row["accuracy"] for row in shown]]  # fmt: skip
    labels = [
        "nothing cut",
        " and ".join(writers) + "\ncut from its keys",
        "two others of\ntheir layers",
    ]
    axis.bar(labels, values, 0.6, yerr=ends, color=[REST, TARGET, REST], ecolor=INK, capsize=3)
    for x, value in enumerate(values):
        axis.text(x + 0.06, value / 2, f"{value:.0%}", ha="left", va="center", weight="bold")
    axis.axhline(1 / 9, color=INK, lw=0.8, ls=":")
    axis.text(2.45, 1 / 9 + 0.02, "chance", ha="right", fontsize=8)
    axis.set(ylim=(0, 1.05), yticks=(0, 0.5, 1))
    axis.set_title(f"How often it is right, of nine boxes ({before['n']} prompts)", loc="left")


def main() -> None:
    """Draw the run in a folder."""
    tables = json.loads((Path(sys.argv[1]) / "results.json").read_text())["tables"]
    with styled():
        figure = new_figure(10.4, 3.5)
        left, right = figure.subplots(1, 2, width_ratios=(1.75, 1))
        circuit(left, tables, tables["check"][0]["head"])
        cut(right, tables)
        figure.savefig(FIGURE, dpi=130)
    print(FIGURE)


if __name__ == "__main__":
    main()
