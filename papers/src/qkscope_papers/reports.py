"""Where the reports of a clone lie, and how scripts write into them.

A script writes what stands on a page between ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
REPORTS = ROOT / "papers" / "docs"
BENCH_REPORTS = ROOT / "bench" / "docs"
LEDGER = ROOT / "papers" / "results.json"


def put(page: Path, name: str, table: str) -> None:
    """Write a table into its place on a page."""
    pattern = rf"(<!-- {name} -->\n).*?\n?(<!-- /{name} -->)"
    page.write_text(
        re.sub(pattern, lambda m: f"{m[1]}{table}\n{m[2]}", page.read_text(), flags=re.DOTALL)
    )


def text_cell(value: str) -> str:
    """Text as a cell of a table has it: marks that Markdown would read are escaped."""
    return re.sub(r"([|*_<>\[\]])", r"\\\1", value.replace("\n", " "))


def number_cell(value: float | None) -> str:
    """A number as a cell has it."""
    return "" if value is None else f"{value:.4g}".replace("-", "−")
