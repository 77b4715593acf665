"""The docs are what the code does: their Python runs as written, and their generated pages are today's."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import qkscope

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
    for page in [*DOCS.rglob("*.md"), *(DOCS.parent / "papers" / "docs").glob("*.md")]:
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]*figures/[^)]+)\)", page.read_text()):
            assert (page.parent / picture).is_file(), f"{page.name} shows {picture}, which is not there"
            taken.add(picture)
    shot = [DOCS / one for one in taken if one.startswith(("figures/gallery", "figures/start", "figures/contrast"))]
    assert len(shot) > 8
    assert max(one.stat().st_size for one in shot) < 150e3
    assert sum(one.stat().st_size for one in shot) < 1.5e6


def test_every_page_is_on_the_front_page():
    listed = set(re.findall(r"^[./\w-]+$", (DOCS / "index.md").read_text(), flags=re.MULTILINE))
    pages = {page.relative_to(DOCS) for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    reports = {Path("../papers/docs", page.name) for page in (DOCS.parent / "papers" / "docs").glob("*.md")}
    assert listed == {str(page.with_suffix("")) for page in pages | reports} - {"index"}


def test_the_reference_names_every_command_as_it_is():
    assert between("commands.md", "commands") == generator().commands_page(), "run: python docs/generate.py commands"


def test_the_architecture_names_files_that_are_there():
    text = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|js|toml))`", text)) - {
        "tasks/NAME.py",
        "analyses/VERB.py",
        "tests/test_rooms.py",
    }
    assert len(named) > 25
    sources = (DOCS.parent / "src" / "qkscope", DOCS.parent / "papers" / "src" / "qkscope_papers", DOCS.parent)
    assert [name for name in sorted(named) if not any((source / name).is_file() for source in sources)] == []
    inside = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|js|toml))` \(`(\w+)`", text)
    assert len(inside) > 15
    for name, defined in inside:
        home = next(source / name for source in sources if (source / name).is_file())
        assert re.search(rf"\b{defined}\b", home.read_text()), f"{name} has no {defined}"


def test_the_python_interface_names_what_is_there():
    named = re.findall(r"auto(?:class|function):: ([\w.]+)\.(\w+)", (DOCS / "api.md").read_text())
    assert len(named) > 40
    assert [f"{module}.{name}" for module, name in named if not hasattr(importlib.import_module(module), name)] == []
    assert set(qkscope.__all__) - {"tasks", "__version__"} <= {name for _, name in named}
