"""The reports are what the ledger says, and every script behind them can be loaded."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from qkscope.results.claims import Claim
from qkscope_papers import registry
from qkscope_papers.registry import marked

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "papers" / "results.json"
SCRIPTS = {
    path.stem: path.parent
    for folder in (ROOT / "papers" / "scripts", ROOT / "bench")
    for path in sorted(folder.glob("*.py"))
}
NEEDS = {"peers": "transformer_lens", "compile_programs": "tracr"}


def script(name: str) -> ModuleType:
    folder = str(SCRIPTS[name])
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def between(page: Path, name: str) -> str:
    return re.search(
        rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", page.read_text(), flags=re.DOTALL
    )[1]


def test_every_claim_on_the_results_page_was_decided_by_its_rule():
    known = json.loads(LEDGER.read_text())
    assert known
    for entry in known.values():
        for claim in entry["claims"]:
            assert claim["holds"] == Claim.from_json(claim).holds
    said = [
        (name.partition("/")[0], entry["model"], claim["claim"], claim["ours"], claim["control"])
        for name, entry in known.items()
        for claim in entry["claims"]
        if "source" in claim
        and (claim["ours"] or 0) % 1  # runs of before have none; two cells may both read 1
    ]
    assert len(said) == len(set(said)), "a claim stands twice"
    for claim in (
        claim for entry in known.values() for claim in entry["claims"] if "source" in claim
    ):
        assert (claim["reason"] != "") == (claim["holds"] is False), claim
        assert claim["source"] != "stated" or re.match(r"[A-Z§][^:]*\d[^:]*:", claim["paper"]), (
            claim
        )
    for page, place, text in script("results").results_pages(known):
        assert between(page, place) == text, "run: python papers/scripts/results.py"


def test_every_row_is_counted_once_and_holds_only_with_an_interval_and_a_rule_that_can_fail():
    known, made = json.loads(LEDGER.read_text()), script("results")
    rows = [
        (name.partition("@")[0], row) for name, entry in known.items() for row in entry["claims"]
    ]
    for figure, row in rows:
        claim = Claim.from_json(row)
        assert marked(figure, claim) == claim, "run: python papers/scripts/results.py"
        if made._sort(row) in ("holds", "tie", "fails"):
            assert claim.exact or None not in (row["low"], row["high"]), row
            assert made._sort(row) != "holds" or not row["lenient"], row
    for mark in registry._marks():
        assert any(
            figure in mark["figures"] and mark["claim"] in row["claim"] for figure, row in rows
        ), mark


def test_rows_of_a_smaller_preset_fill_gaps_and_tables_are_those_that_were_measured():
    old = Claim("share of 12", "", 1.0, None, "ours > 0.5").to_json()
    kept = Claim("a mean", "", 1.0, None, "ours > 0", low=0.5, high=1.5).to_json()
    new = Claim("share of 9", "", 0.9, None, "ours > 0.5", low=0.4, high=1.0).to_json()
    rows, made_by = [old, kept], {"preset": "default"}
    script("results")._add(rows, [new, kept | {"ours": 2.0}, kept | {"claim": "another"}], made_by)
    assert [row["ours"] for row in rows] == [0.9, 1.0, 1.0]
    assert [row.get("made") for row in rows] == [made_by, None, made_by]
    assert "was 1, without an interval, and holds" in rows[0]["changed"]
    made = script("three_models")
    known = json.loads(made.STORE.read_text())
    for name, table in made.TABLES.items():
        assert between(made.PAGE, name) == table(known), (
            "run: python bench/three_models.py --only page"
        )


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_loads(name):
    pytest.importorskip(NEEDS.get(name, "torch"))
    assert script(name).__doc__
