"""The rooms and the direction of their imports: the instrument, and the papers, which are built on
it.
"""

import ast
import re
from functools import cache
from pathlib import Path

import qkscope

SOURCE = Path(qkscope.__file__).parent
NOUNS = [
    "errors", "public", "text", "checking", "seeds", "heads", "examples", "attention", "hooks", "changes"
]  # fmt: skip
ROOMS = [
    *NOUNS,
    "results",
    "texts",
    "model",
    "linear",
    "rerun",
    "sums",
    "findings",
    "verbs",
    "show",
    "cli",
]
"""In the order of the design: a room imports itself and those above it."""
PAPERS = SOURCE.parents[1] / "papers" / "src" / "qkscope_papers"
BENCH = SOURCE.parents[1] / "bench" / "qkscope_bench"
ALONE = {
    "results": {"results", *NOUNS},
    "sums": {"sums", "results", *NOUNS} - {"examples"},
    "texts": {"texts", "results", *NOUNS},
    "model": {"model", "results", *NOUNS},
    "linear": {"linear", "model", *NOUNS},
    "rerun": {"rerun", "linear", "model", *NOUNS},
}


def files() -> dict[Path, str]:
    """Every file and its room; the package itself and its entry stand above and below all."""
    found = {
        path: path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")
    }
    return {path: room for path, room in found.items() if room not in ("__init__", "__main__")}


def every_file() -> list[Path]:
    """Those of both distributions, and the bench."""
    return [*SOURCE.rglob("*.py"), *PAPERS.rglob("*.py"), *BENCH.rglob("*.py")]


def _home(name: str) -> str:
    """The module of a public name; a room or a noun is its own."""
    home = qkscope._HOME.get(name, "qkscope")
    return f"qkscope.{name}" if home == "qkscope" else home


@cache
def modules(path: Path) -> set[str]:
    """What a file imports, wherever in it, and by whatever form of words."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by dots"
            public = {alias.name: _home(alias.name) for alias in node.names}
            names |= set(public.values()) if node.module == "qkscope" else {node.module or ""}
    return names


def imported(path: Path) -> set[str]:
    """Rooms that a file imports."""
    return {name.split(".")[1] for name in modules(path) if name.startswith("qkscope.")} - {
        "__version__"
    }


def test_every_file_is_in_a_room_and_every_room_is_there():
    assert set(files().values()) == set(ROOMS)


def test_no_room_imports_one_below_it():
    for path, room in files().items():
        for other in imported(path):
            assert ROOMS.index(other) <= ROOMS.index(room), (
                f"{path.relative_to(SOURCE)} imports {other}"
            )


def verb_of(module: str) -> str:
    """The verb that a module belongs to; a folder is one verb."""
    return module.removeprefix("qkscope.verbs.").partition(".")[0]


def test_verbs_do_not_import_verbs():
    """What two of them need stands in `findings`."""
    imports = set()
    for path in SOURCE.glob("verbs/**/*.py"):
        if path != SOURCE / "verbs" / "__init__.py":
            verb = path.relative_to(SOURCE / "verbs").parts[0].removesuffix(".py")
            others = {verb_of(name) for name in modules(path) if name.startswith("qkscope.verbs.")}
            imports |= {(verb, other) for other in others - {verb}}
    assert imports == set()


def test_these_rooms_know_the_nouns_and_what_they_stand_on_alone():
    for path, room in files().items():
        assert imported(path) <= ALONE.get(room, set(ROOMS)), (
            f"{path.relative_to(SOURCE)} imports {imported(path)}"
        )


def test_nothing_of_the_instrument_knows_the_papers():
    """Their verbs come by entry points, in one place."""
    for path in SOURCE.rglob("*.py"):
        assert not any(
            name.startswith(("qkscope_papers", "qkscope_bench")) for name in modules(path)
        ), path
    loaders = [
        path.relative_to(SOURCE)
        for path in SOURCE.rglob("*.py")
        if "entry_points(" in path.read_text()
    ]
    assert loaders == [Path("cli/__init__.py")]


def test_the_papers_stand_on_the_instrument_and_on_no_command_but_their_own():
    rooms = {room: set() for room in ("cli", "")}
    for path in [*PAPERS.rglob("*.py"), *BENCH.rglob("*.py")]:
        rooms["cli" if path.name == "cli.py" else ""] |= imported(path)
        assert not any(name.startswith("qkscope.show.server") for name in modules(path)), path
    assert "cli" in rooms["cli"]
    assert "cli" not in rooms[""]


def test_no_file_is_longer_than_a_reader_holds():
    assert [path.name for path in every_file() if len(path.read_text().splitlines()) > 650] == []


def test_no_file_imports_a_private_name_of_another():
    private = re.compile(r"^\s*from qkscope[\w.]* import .*(?<!\w)_(?!_)\w", re.MULTILINE)
    assert [path.name for path in every_file() if private.search(path.read_text())] == []


def test_each_room_says_which_files_it_has():
    for room in (path.parent for path in every_file() if path.name == "__init__.py"):
        said = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        inside = {path.stem for path in room.glob("*.py")} | {
            path.parent.name for path in room.glob("*/__init__.py")
        }
        for name in inside - {"__init__", "__main__"}:
            assert re.search(rf"`{name}\b", said), f"{room} does not name {name}"


def definitions(path: Path) -> set[str]:
    """Public names that a file defines at its top: classes, functions, aliases, constants."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_") and len(name) > 1} - {"log"}


TWICE = {
    "cli/tools.py": {"why", "trace", "atlas"},  # what agents call a verb
    "cli/begin.py": {"fetch"},  # the command, of what `qkscope.model.files` does
}
WAITING = {
    "Call", "Changes", "FEW", "Heads", "Kind", "Node", "Output", "Part", "Place",
    "Prompt", "Row", "Rows", "Rule", "TOKENS", "Tables", "Texts", "sparsity",
}  # fmt: skip
"""Names with several meanings that are still to be told apart: take one out, never put one in."""


def test_no_file_and_no_name_stands_twice():
    """A reader who meets a name in two files may take it for one idea."""
    files_of = {}
    names_of = {}
    for path in SOURCE.rglob("*.py"):
        if path.name in ("__init__.py", "__main__.py"):
            continue
        files_of.setdefault(path.name, []).append(path)
        place = path.relative_to(SOURCE).as_posix()
        for name in definitions(path) - TWICE.get(place, set()):
            names_of.setdefault(name, []).append(place)
    assert {name for name, paths in files_of.items() if len(paths) > 1} == set()
    several = {name: places for name, places in names_of.items() if len(places) > 1}
    assert {name: places for name, places in several.items() if name not in WAITING} == {}
    assert set(several) >= WAITING, "tell fewer: a name that is told apart now waits no more"
