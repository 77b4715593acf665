"""The docs are what the code does: their Python runs as written, and their generated pages are today's."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path

import qkscope
from qkscope.runs.claims import Claim

DOCS = Path(__file__).parent.parent / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def between(page, name):
    return re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", (DOCS / page).read_text(), flags=re.DOTALL)[1]


def test_the_ten_minute_start_runs_as_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "start.md").read_text(), flags=re.DOTALL):
        exec(compile(block, "start.md", "exec"), names)  # the block is ours, from the file under test
    printed = capsys.readouterr().out
    for said in (
        "L18H6 at ':' (token 13) attends to ' Z' (token 6)",
        "prefers the right key",
        "lexical at L18H6: rank",
        "Swapping both at L18H6",
        "of its attention",
    ):
        assert said in printed
    assert (tmp_path / "report.html").stat().st_size < 8e6


def test_pictures_are_there_and_small():
    taken = set()
    for page in DOCS.rglob("*.md"):
        for picture in re.findall(r"!\[[^\]]*\]\((figures/[^)]+)\)", page.read_text()):
            assert (DOCS / picture).is_file(), f"{page.name} shows {picture}, which is not there"
            taken.add(picture)
    shot = [DOCS / one for one in taken if one.startswith(("figures/gallery", "figures/start", "figures/contrast"))]
    assert len(shot) > 8
    assert max(one.stat().st_size for one in shot) < 150e3
    assert sum(one.stat().st_size for one in shot) < 1.5e6


def test_the_page_of_errors_has_them():
    assert between("errors.md", "errors").count("\n") > 300


def test_every_page_is_on_the_front_page():
    listed = set(re.findall(r"^[\w/-]+$", (DOCS / "index.md").read_text(), flags=re.MULTILINE))
    assert listed == {
        str(p.relative_to(DOCS).with_suffix("")) for p in DOCS.rglob("*.md") if "_build" not in p.parts
    } - {"index"}


def test_the_reference_names_every_command_as_it_is():
    assert between("commands.md", "commands") == generator().commands_page(), "run: python docs/generate.py commands"


def test_every_claim_on_the_results_page_was_decided_by_its_rule():
    known = json.loads((DOCS / "results.json").read_text())
    assert known
    for entry in known.values():
        for claim in entry["claims"]:
            assert claim["holds"] == Claim.from_json(claim).holds
    said = [
        (name.partition("/")[0], entry["model"], claim["claim"], claim["ours"], claim["control"])
        for name, entry in known.items()
        for claim in entry["claims"]
        if "source" in claim and (claim["ours"] or 0) % 1  # runs of before have none; two cells may both read 1
    ]
    assert len(said) == len(set(said)), "a claim stands twice"
    for claim in (claim for entry in known.values() for claim in entry["claims"] if "source" in claim):
        assert (claim["reason"] != "") == (claim["holds"] is False), claim
        assert claim["source"] != "stated" or re.match(r"[A-Z§][^:]*\d[^:]*:", claim["paper"]), claim
    for page, place, text in generator().results_pages(known):
        assert between(page, place) == text, "run: python docs/generate.py results"


def test_the_tables_of_names_are_those_that_were_measured(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    for name, table in (
        importlib.import_module("names_page").tables(json.loads((DOCS / "names.json").read_text())).items()
    ):
        assert between("names.md", name) == table, "run: python docs/names_page.py"


def test_the_architecture_names_files_that_are_there():
    text = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|js|toml))`", text)) - {
        "tasks/NAME.py",
        "analyses/VERB.py",
        "tests/test_rooms.py",
    }
    assert len(named) > 25
    assert [name for name in sorted(named) if not (DOCS.parent / "src" / "qkscope" / name).is_file()] == []


def test_the_python_interface_names_what_is_there():
    named = re.findall(r"auto(?:class|function):: ([\w.]+)\.(\w+)", (DOCS / "api.md").read_text())
    assert len(named) > 40
    assert [f"{module}.{name}" for module, name in named if not hasattr(importlib.import_module(module), name)] == []
    assert set(qkscope.__all__) - {"tasks", "__version__"} <= {name for _, name in named}
