"""The README's and the docs' Python runs as written, on the embedded model."""

import re
from pathlib import Path

import pytest
import typer

from qkscope.cli import app

ROOT = Path(__file__).parent.parent


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_the_table_of_verbs_has_every_verb_with_options_that_it_takes():
    text = (ROOT / "README.md").read_text()
    table = text.split("| verb | what it gives |")[1].split("\n\n")[0]
    root = typer.main.get_command(app)
    named: dict = {}
    for row in table.splitlines()[2:]:
        cells = row.split(" | ")
        verbs = [command.split()[0] for command in re.findall(r"`([^`]+)`", cells[0])]
        for verb in verbs:
            named.setdefault(verb, set()).update(re.findall(r"(?<![\w-])--[a-z]+", row) if len(set(verbs)) == 1 else ())
    assert set(named) == set(root.list_commands(None))
    for verb, options in named.items():
        known = {name for one in root.get_command(None, verb).params for name in one.opts} | {"--json"}
        assert options <= known, f"{verb} takes no {options - known}"


def run_blocks(name):
    found = blocks(name)
    assert found
    names: dict = {}
    for block in found:
        exec(compile(block, name, "exec"), names)  # the block is ours, from the file under test
    return names


def test_the_ten_lines_run_as_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_blocks("README.md")
    printed = capsys.readouterr().out
    shown = (ROOT / "README.md").read_text().split("$ qkscope why")[1].split("```")[0].splitlines()[1:]
    for line in shown:  # what the first screen shows is what it prints
        assert " ".join(line.split()).rstrip(" …") in " ".join(printed.split())
    assert "L17H8" in names["circuit"].answer
    after = {row["condition"]: row["orig_after"] for row in names["swaps"].table()}
    assert after["both"] < 0.3 < after["random_both"]
    assert "</html>" in (tmp_path / "report.html").read_text()


def test_the_twenty_lines_run_as_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_blocks("docs/api.md")
    printed = capsys.readouterr().out
    assert "prefers the right key" in printed
    assert "lexical at L18H6: rank" in printed
    swapped = {
        tuple(line.split()[:2]): float(line.split()[3]) for line in printed.splitlines() if line.startswith("both ")
    }
    assert swapped["both", "feature"] < 0.3 < swapped["both", "random"]
    assert "</html>" in (tmp_path / "report.html").read_text()
    parts = names["parts"].tables["tokens"]
    for row in parts:
        assert row["logit"] == pytest.approx(row["order"] + row["lexical"] + row["residual"], abs=1e-3)
