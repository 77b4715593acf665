"""Write the tables of docs/models.md and docs/benchmarks.md from what the commands print.

``qkscope models --json | python docs/generate.py models`` and
``qkscope bench --json | python docs/generate.py bench --hardware "two CPU cores"``. The bench rows also go into
docs/benchmarks.json, one entry per hardware; the page keeps its text and takes new tables.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent


def models(rows: list[dict]) -> None:
    """The families, supported ones first, with their limits."""
    lines = ["| family | can be looked into | largest error | limits, or why not |", "| --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: not row["supported"]):
        error = "" if row["max_error"] is None else f"{row['max_error']:.1e}"
        lines.append(f"| `{row['family']}` | {'yes' if row['supported'] else 'no'} | {error} | {row['reason']} |")
    _put(DOCS / "models.md", "families", "\n".join(lines))


def bench(rows: list[dict], hardware: str) -> None:
    """The ratios on one machine, beside those of the others."""
    store = DOCS / "benchmarks.json"
    known = json.loads(store.read_text()) if store.exists() else {}
    entry = known.setdefault(hardware, {})
    for row in rows:
        if row["ratio"] is not None:
            entry[row["name"]] = {**row, "date": datetime.date.today().isoformat()}
    store.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    lines = []
    for where, found in known.items():
        lines += [
            f"## {where}",
            "",
            "| row | plain | ours | ratio | what | date |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, row in found.items():
            times = f"{row['plain_s']:.3g} s | {row['ours_s']:.3g} s"
            lines.append(f"| `{name}` | {times} | {row['ratio']:.3g}× | {row['note']} | {row['date']} |")
        lines.append("")
    _put(DOCS / "benchmarks.md", "bench", "\n".join(lines).rstrip())


def _put(page: Path, name: str, table: str) -> None:
    text = page.read_text()
    pattern = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
    page.write_text(re.sub(pattern, lambda match: match[1] + table + match[2], text, flags=re.DOTALL))


def main() -> None:
    """Read rows from standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["models", "bench"])
    parser.add_argument("--hardware", default="two CPU cores")
    given = parser.parse_args()
    rows = json.load(sys.stdin)["rows"]
    models(rows) if given.what == "models" else bench(rows, given.hardware)


if __name__ == "__main__":
    main()
