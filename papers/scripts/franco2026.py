"""Write the tables of superposition.md and singular-vectors.md from runs of ``qkscope reproduce franco2026``.

``python papers/scripts/franco2026.py FOLDER…`` takes fig1, fig3, fig4, fig7b and fig9a below the folders, whatever
their preset, model and prompts; a table whose figure is not there stays as it is.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from pages import REPORTS, put

Rows = list[dict[str, Any]]


def by_p(rows: Rows) -> list[str]:
    """Figure 1: antipodal pairs and isotropy without a head."""
    lines = ["| p | antipodal pairs, seed by seed | ‖G/c − I‖, mean over seeds |", "| ---: | --- | ---: |"]
    for config in dict.fromkeys(row["config"] for row in rows if row["config"].startswith("no head")):
        own = [row for row in rows if row["config"] == config and not row["control"]]
        pairs = " ".join(str(row["antipodal"]) for row in own)
        lines.append(f"| {config.partition('=')[2]} | {pairs} | {_mean(own, 'isotropy_error'):.2g} |")
    return lines


def by_reading(rows: Rows) -> list[str]:
    """Figure 3: when each pair is learned, aligned and in place, under both readings of the loss."""
    lines = ["| reading | pair, target | half learned | stays aligned from | u_k stays from | aligned at the end |",
             "| --- | --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for config, pair in dict.fromkeys((row["config"], row["pair"]) for row in rows):
        own = [row for row in rows if (row["config"], row["pair"]) == (config, pair)]
        cells = [f"{_mean(own, name):,.0f}" for name in ("learned", "onset", "settled")]
        ends = sum(row["final"] >= 0.95 for row in own)
        target = f"{pair}, {own[0]['target_logit']:g}"
        lines.append(f"| {config[-1]} | {target} | {' | '.join(cells)} | {ends} of {len(own)} |")
    return lines


def by_start(rows: Rows) -> list[str]:
    """Figure 4: the largest ε from several starts of the head."""
    lines = ["| entries start at | raw, best of ten (95%) | best of the four in use | anti-whitened |",
             "| ---: | --- | ---: | ---: |"]  # fmt: skip
    for row in rows:
        ends = "" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f})"
        lines.append(
            f"| {row['start']:g} | {row['raw']:.3f}{ends} | {row['raw_top']:.3f} | {row['anti_whitened']:.3f} |"
        )
    return lines


def by_edge(rows: Rows) -> list[str]:
    """Heads of the circuit at the last checkpoint, and the mean of the controls."""
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    lines = ["| head | from → to | attention | sparsity | rotated | difference (95%) | `count` / null |",
             "| --- | --- | ---: | ---: | ---: | --- | ---: |"]  # fmt: skip
    for row in (row for row in last if row["circuit"]):
        gap = f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})".replace("-", "−")
        place = f"{row['head']} | {row['from']} → {row['to']}"
        counts = f"{row['count']:.1f} / {row['count_null']:.1f}" if row["count"] is not None else ""
        values = " | ".join(f"{row[name]:.2f}" for name in ("attention", "sparsity", "rotated"))
        lines.append(f"| {place} | {values} | {gap} | {counts} |")
    other = [row for row in last if not row["circuit"]]
    means = " | ".join(f"{_mean(other, name):.2f}" for name in ("attention", "sparsity", "rotated"))
    gap = f"{_mean(other, 'difference'):+.3f}".replace("-", "−")
    counts = f"{_mean(other, 'count'):.1f} / {_mean(other, 'count_null'):.1f}"
    return [*lines, f"| {len(other)} controls | the same places | {means} | {gap} (mean) | {counts} |"]


def by_step(rows: Rows) -> list[str]:
    """Figure 7b: the circuit along training."""
    lines = ["| step | answers right | sparsity | rotated | difference (95%) | outside the circuit | `count` / null |",
             "| ---: | ---: | ---: | ---: | --- | ---: | ---: |"]  # fmt: skip
    inside, outside = ([row for row in rows if row["circuit"] is flag] for flag in (True, False))
    shown = {0, *(round(k * (len(inside) - 1) / 7) for k in range(8))}
    for i, (row, other) in enumerate(zip(inside, outside, strict=True)):
        if i in shown:
            gap = f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})".replace("-", "−")
            outer = f"{other['difference']:+.3f}".replace("-", "−")
            values = f"{row['accuracy']:.2f} | {row['sparsity']:.3f} | {row['rotated']:.3f}"
            counts = f"{row['count']:.1f} / {row['count_null']:.1f}"
            lines.append(f"| {row['step']:,} | {values} | {gap} | {outer} | {counts} |")
    return lines


def _mean(rows: Rows, name: str) -> float:
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.fmean(values) if values else float("nan")


def main(folders: list[Path]) -> None:
    """Read the runs, and put their tables where they belong."""
    edges: list[str] = []
    toys = {"fig1": ("geometry", by_p), "fig3": ("onsets", by_reading), "fig4": ("starts", by_start)}
    for path in sorted(path for folder in folders for path in folder.rglob("results.json")):
        found = json.loads(path.read_text())
        paper, _, figure = found["experiment"].partition("/")
        if paper != "franco2026":
            continue
        asked = json.loads((path.parent / "manifest.json").read_text()).get("figure", {})
        tables, prompts = found["tables"], asked.get("prompts", "ioi")
        if figure in toys:
            table, write = toys[figure]
            put(REPORTS / "superposition.md", figure, "\n".join(write(tables[table])))
        elif figure == "fig7b" and tables.get("training") and prompts == "ioi":
            put(REPORTS / "singular-vectors.md", "training", "\n".join(by_step(tables["training"])))
        elif figure == "fig9a":
            edges += [f"**{found['model']}**, prompts `{prompts}`, preset {found['preset']}:", "",
                      *by_edge(tables["sparsity"]), ""]  # fmt: skip
    if edges:
        put(REPORTS / "singular-vectors.md", "heads", "\n".join(edges).rstrip())


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
