"""The docs are what the code does: their generated pages are today's, and what they name is there."""

import importlib
import importlib.util
import re
from pathlib import Path

import qkscope

DOCS = Path(__file__).parents[2] / "docs"
MADE = {"commands.md", "families.md"}  # by docs/generate.py
REPORTS = [DOCS.parent / room / "docs" for room in ("papers", "bench")]


def test_pages_and_pictures_are_there():
    shown = {
        page.parent / picture
        for page in [
            *DOCS.rglob("*.md"),
            *(page for reports in REPORTS for page in reports.glob("*.md")),
        ]
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]*figures/[^)]+)\)", page.read_text())
    }
    assert [picture for picture in shown if not picture.is_file()] == []
    screens = {path: path.stat().st_size for path in (DOCS / "figures").rglob("*.*")}
    assert set(screens) <= shown, "a picture that no page shows"
    assert max(screens.values()) < 150e3
    assert sum(screens.values()) < 1.5e6
    listed = set(re.findall(r"^[./\w-]+$", (DOCS / "index.md").read_text(), flags=re.MULTILINE))
    pages = {page.relative_to(DOCS) for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    by_hand = [page for page in pages if str(page) not in MADE]
    assert len(by_hand) <= 13, "an index and twelve pages; reports stand with the papers"
    reports = {
        Path("..", page.relative_to(DOCS.parent))
        for folder in REPORTS
        for page in folder.glob("*.md")
    }
    assert listed == {str(page.with_suffix("")) for page in pages | reports} - {"index"}


def test_the_reference_names_every_command_as_it_is():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (DOCS / "commands.md").read_text()
    between = re.search(r"<!-- commands -->\n(.*?)\n<!-- /commands -->", page, flags=re.DOTALL)[1]
    assert between == generate.commands_page(), "run: python docs/generate.py commands"


def test_what_the_docs_name_is_there():
    pages = (DOCS / "architecture.md", DOCS.parent / "DECISIONS.md")
    text = "\n".join(page.read_text() for page in pages)
    sources = (
        DOCS.parent / "src" / "qkscope",
        DOCS.parent / "papers" / "src" / "qkscope_papers",
        DOCS.parent / "bench" / "qkscope_bench",
        DOCS.parent,
    )
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|js|toml))`(?: \(`(\w+)`)?", text)
    assert len(named) > 25
    for name, defined in named:
        homes = [source / name for source in sources if (source / name).is_file()]
        assert homes, f"there is no {name}"
        assert re.search(rf"\b{defined}\b", homes[0].read_text()), f"{name} has no {defined}"
    named = re.findall(r"auto(?:class|function):: ([\w.]+)\.(\w+)", (DOCS / "api.md").read_text())
    assert len(named) > 40
    assert [
        f"{module}.{name}"
        for module, name in named
        if not hasattr(importlib.import_module(module), name)
    ] == []
    public = {*qkscope.__all__, *qkscope.sums.__all__} - {"sums", "tasks", "__version__"}
    assert public <= {name for _, name in named}
