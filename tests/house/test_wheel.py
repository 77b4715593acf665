"""What the package says of itself agrees wherever it is said; `.ci/wheel` builds it and uses it
alone.
"""

import re
import tomllib
from pathlib import Path

import yaml

import qkscope

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAPERS = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_one_version_everywhere_and_the_workflow_runs_what_we_run_on_every_python_that_is_named():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    assert {PROJECT["version"], PAPERS["version"], str(CITATION["version"]), newest} == {
        qkscope.__version__
    }
    assert PAPERS["dependencies"][0] == f"qkscope=={qkscope.__version__}"
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"run": ".ci/run"} in workflow["jobs"]["run"]["steps"]
    tried = {"3.11", *workflow["jobs"]["pythons"]["strategy"]["matrix"]["python"]}
    assert {f"Programming Language :: Python :: {version}" for version in tried} <= {
        *PROJECT["classifiers"]
    }
    assert len(tried) == sum("Python :: 3." in kind for kind in PROJECT["classifiers"])
    gate = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make lint", "make test", "make test-papers", ".ci/wheel", ".ci/peers"} <= set(gate)


def test_every_file_of_data_that_is_shipped_stands_with_its_licence():
    """In a NOTICE, whose lines at the margin name files; what is no data is under LICENSE."""
    packages = (
        (ROOT, "qkscope"),
        (ROOT / "papers", "qkscope_papers"),
        (ROOT / "papers", "qkscope_bench"),
    )
    for place, package in packages:
        named = re.findall(
            r"^[\w./*-]+(?:, [\w./*-]+)*$", (place / "NOTICE").read_text(), flags=re.MULTILINE
        )
        patterns = [pattern for line in named for pattern in line.split(", ")]
        files = [path for path in (place / "src" / package).rglob("*.*") if path.is_file()]
        data = [
            path for path in files if not re.search(r"\.(pyi?|pyc|typed|js|css|html)$", path.name)
        ]
        assert [str(path) for path in data if not any(map(path.match, patterns))] == []


def test_every_pin_admits_what_the_project_asks_for():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    lists = [[p["dependencies"], *p["optional-dependencies"].values()] for p in (PROJECT, PAPERS)]
    asked = [
        Requirement(one)
        for project in lists
        for needs in project
        for one in needs
        if "qkscope" not in one
    ]
    assert all(one.specifier.contains(pins[canonicalize_name(one.name)]) for one in asked)


def test_every_pin_is_installed_by_hash():
    """Every pin stands with hashes in one file, and nothing else does; the embedded model's data
    has its own.
    """
    pinned = {
        line
        for line in (ROOT / "constraints.txt").read_text().split()
        if "==" in line and "smollm2" not in line
    }
    found: list[str] = []
    for name in ("requirements.txt", "requirements-torch.txt", "requirements-docs.txt"):
        for block in re.split(r"\n(?=\S)", (ROOT / name).read_text().strip())[1:]:
            pin, *hashes = block.split(" \\\n")
            found.append(pin)
            assert hashes
            assert all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}", one) for one in hashes)
    assert sorted(found) == sorted(pinned)
    setup = (ROOT / "requirements.txt").read_text()
    assert all(
        f"\n{name}==" in setup for name in ("hatchling", "editables", "pytest", "transformers")
    )
    assert "--require-hashes" in (ROOT / "Makefile").read_text()
