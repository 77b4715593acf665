"""The tables and the picture of docs/names.md, from what papers/scripts/names_measure.py and a run of ``discover``
wrote.

``python papers/scripts/names_page.py runs/names --text Python --hardware "one H200"`` takes what a measurement found
into docs/names.json, by model and text, and writes the tables anew; ``--picture`` draws its heads by name, too.
``python papers/scripts/names_page.py runs/swaps --swaps`` puts the swaps of a run of ``qkscope discover`` there.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from pages import DOCS, put

from qkscope.draws import derived_seed

STORE = DOCS / "names.json"
SCORES = {"duplicate": "current_current", "induction": "current_previous"}  # what tells the labelled heads
CALLED = {"previous": "previous token", "duplicate": "same token", "induction": "after a copy"}  # label: name
SHOWN = ("head", "name", "share", "low", "high", "coverage", "precision", "chance", "rest")


def take(folder: Path, text: str, heads: list[str], hardware: str) -> None:
    """What one measurement found, as far as the page shows it."""
    found = json.loads((folder / "names.json").read_text())
    rows = {row["head"]: row for row in found["heads"]}
    named = [row for row in found["heads"] if row["share"] is not None]
    explained, shares = [1 - row["rest"] for row in found["heads"]], [row["share"] for row in named]
    names = sorted({row["name"] for row in named})
    first = [
        max((r for r in named if r["name"] == n and r["rule"]), key=lambda r: r["share"], default=None) for n in names
    ]
    known = json.loads(STORE.read_text()) if STORE.exists() else {}
    known[f"{found['provenance']['asked']['model']}, {text}"] = {
        **found["summary"], "quartiles": statistics.quantiles(explained, method="inclusive"),
        "median_share": statistics.median(shares), "half_by_name": sum(share >= 0.5 for share in shares),
        "names": {n: [len(own), statistics.median(own)] for n in names
                  if (own := [row["share"] for row in named if row["name"] == n])},
        "called": {row["head"]: row["name"] for row in found["heads"]},
        "shown": [{k: rows[h][k] for k in SHOWN} for h in heads or [row["head"] for row in first if row]],
        "auc": [{**row, "ends": auc_ends(found["heads"], row),
                 "called": sum(rows[h]["name"] == CALLED[row["label"]] for h in row["which"].split())}
                for row in found["auc"]],
        "changes": found["changes"], "hardware": hardware, "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    STORE.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


def tables(known: dict[str, Any]) -> dict[str, str]:
    """Every table of the page, by its place there."""
    return {
        "heads": _table("model, text|documents|tokens|heads named|explained, median head [middle half of heads]|"
                        "heads half explained|"
                        "share of the name, median head|half by its name alone|largest sham",
                        [_counted(*item) for item in known.items()]),
        "called": _called(known),
        "known": _table("model, text|head|name|share|coverage|precision (chance)|not explained",
                        [_row(of, row) for of, entry in known.items() for row in entry["shown"]]),
        "labels": _table("model, text|labelled|heads|AUC|of them so called",
                         [_label(of, row) for of, entry in known.items() for row in entry["auc"]]),
        "changes": _table("model, text|head|token changed|slope|is it 1?|correlation|sham|is it 0?|places",
                          [_change(of, row) for of, entry in known.items() for row in entry["changes"]]),
    }  # fmt: skip


def _table(header: str, rows: list[list[Any]]) -> str:
    columns = header.split("|")
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(value: float) -> str:
    """Two decimals, without a zero before them or a minus before nothing."""
    shown = f"{round(value, 2) + 0.0:.2f}"
    return shown.replace("0.", ".", 1).replace("-", "−") if abs(round(value, 2)) < 1 else shown.replace("-", "−")


def _with(value: float, low: float, high: float) -> str:
    return f"{_short(value)} [{_short(low)}, {_short(high)}]"


def _counted(of: str, entry: dict[str, Any]) -> list[Any]:
    low, _, high = entry["quartiles"]
    return [
        of, entry["documents"], f"{entry['tested']:,}", f"{entry['named']} of {entry['heads']}",
        _with(entry["median_named_share"], low, high), entry["half_named"], _short(entry["median_share"]),
        entry["half_by_name"], f"{entry['largest_sham']:.3f}".lstrip("0"),
    ]  # fmt: skip


def _called(known: dict[str, Any]) -> str:
    """How many heads have each name, and the median share of the block that gave it."""
    total = {name: 0 for entry in known.values() for name in entry["names"]}
    for entry in known.values():
        for name, (count, _) in entry["names"].items():
            total[name] += count
    rows = []
    for name in sorted(total, key=lambda name: -total[name]):
        found = [entry["names"].get(name) for entry in known.values()]
        rows.append([name, *("" if one is None else f"{one[0]} ({_short(one[1])})" for one in found)])
    rows.append(["not named", *(entry["heads"] - entry["named"] for entry in known.values())])
    lines = [_table("|".join(["name", *known]), rows)]
    for (of, one), (other, two) in itertools.combinations(known.items(), 2):
        if one["called"].keys() == two["called"].keys():
            same = sum(name == two["called"][head] for head, name in one["called"].items())
            lines.append(f"\n{same} of {one['heads']} heads have the same name in {of} and in {other}.")
    return "\n".join(lines)


def _row(of: str, row: dict[str, Any]) -> list[str]:
    rule = ["", ""]
    if row["coverage"] is not None:
        rule = [_short(row["coverage"]), f"{_short(row['precision'])} ({_short(row['chance'])})"]
    share = "" if row["share"] is None else _with(row["share"], row["low"], row["high"])
    return [of, row["head"], row["name"], share, *rule, _short(row["rest"])]


def _label(of: str, row: dict[str, Any]) -> list[Any]:
    shown = "" if row["auc"] is None else _short(row["auc"])
    if row["ends"]:
        shown = _with(row["auc"], *row["ends"])
    return [of, row["label"], row["heads"], shown, row["called"]]


def auc_ends(rows: list[dict[str, Any]], label: dict[str, Any], draws: int = 1000) -> list[float] | None:
    """The 95% interval of an AUC with heads resampled, labelled and others apart; None where scores are not kept."""
    column, which = SCORES.get(label["label"]), label["which"].split()
    if column is None or label["auc"] is None:
        return None
    ones, others = (np.array([r[column] for r in rows if (r["head"] in which) is own]) for own in (True, False))
    random = np.random.default_rng(derived_seed(0, "auc", label["label"]))
    wins = (ones[:, None] > others).astype(float)
    drawn = [
        wins[random.integers(len(ones), size=len(ones))][:, random.integers(len(others), size=len(others))].mean()
        for _ in range(draws)
    ]
    return np.quantile(drawn, [0.025, 0.975]).tolist()


def _change(of: str, row: dict[str, Any]) -> list[Any]:
    slope, sham = (
        [row[name] for name in names] for names in (("slope", "low", "high"), ("sham_slope", "sham_low", "sham_high"))
    )
    return [
        of, row["head"], row["factor"], _with(*slope), _held_at(1, *slope[1:]), _short(row["correlation"]),
        _with(*sham), _held_at(0, *sham[1:]), row["n"],
    ]  # fmt: skip


def _held_at(value: float, low: float, high: float) -> str:
    return "above" if low > value else "below" if high < value else "tie"


def swaps(folder: Path) -> str:
    """Attention moved and logit carried by a block's directions and by rivals of the same size."""
    rows = json.loads((folder / "results.json").read_text())["tables"]["curve"]
    lines = []
    for head in dict.fromkeys(row["head"] for row in rows):
        own = [row for row in rows if row["head"] == head]
        sizes = list(dict.fromkeys(row["k"] for row in own))
        start = f"{head}, start {own[0]['orig_before']:.2f}/{own[0]['target_before']:.2f}"
        lines += [f"| {start} | " + " | ".join(f"k={k}" for k in sizes) + " |", "| --- " * (len(sizes) + 1) + "|"]
        for method in dict.fromkeys(row["method"] for row in own):
            cells = [f"{_gain(row, 'shift', 'gain')} / {_gain(row, 'carried', 'carried_gain')}"
                     for row in own if row["method"] == method]  # fmt: skip
            lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _gain(row: dict, value: str, gain: str) -> str:
    """A number, and whether the interval of its difference to the baseline is above, below or over zero."""
    shown = re.sub(r"^(-?)0\.", r"\1.", f"{row[value]:.2f}")
    if row[gain] is None:
        return shown
    return shown + ("+" if row[f"{gain}_low"] > 0 else "−" if row[f"{gain}_high"] < 0 else "=")


def picture(folder: Path) -> None:
    """Every head by layer in the colour of its name."""
    from qkscope.show.figures import figure_files, styled

    with styled():
        files = figure_files({"atlas": _atlas(json.loads((folder / "names.json").read_text())["heads"])})
    (DOCS / "figures/names").mkdir(parents=True, exist_ok=True)
    (DOCS / "figures/names/atlas.png").write_bytes(files["figures/atlas.png"])


def _atlas(rows: list[dict]) -> Any:
    """Above, squares as large as the share that gave the name; below, a bar for each head, rest in grey."""
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MaxNLocator

    from qkscope.show.discovered import FAMILIES, family_of
    from qkscope.show.figures import INK, REST, colours_of, new_figure

    column = lambda rows, name: [np.nan if row[name] is None else row[name] for row in rows]  # noqa: E731
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


def main() -> None:
    """Take a folder, and write the page's tables anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--text", default="Python")
    parser.add_argument("--heads", default="", help="Heads to show, like L14H3,L16H0; the first of each name.")
    parser.add_argument("--hardware", default="two CPU cores")
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--swaps", action="store_true")
    given = parser.parse_args()
    if given.swaps:
        put(DOCS / "names.md", "swaps", swaps(given.folder))
    elif given.folder:
        take(given.folder, given.text, [head for head in given.heads.split(",") if head], given.hardware)
    if given.picture:
        picture(given.folder)
    for name, table in tables(json.loads(STORE.read_text())).items():
        put(DOCS / "names.md", name, table)


if __name__ == "__main__":
    main()
