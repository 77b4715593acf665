"""The README's and the docs' Python runs as written, on the embedded model."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("name", ["README.md"])
def test_the_twenty_lines_run_as_written(name, capsys, tmp_path, monkeypatch):
    found = blocks(name)
    monkeypatch.chdir(tmp_path)
    assert found
    for block in found:
        names: dict = {}
        exec(compile(block, name, "exec"), names)  # the block is ours, from the file under test
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
