"""The notebooks run from their first cell to their last, as a reader runs them, on a small model."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def run_cell(source: str, names: dict, where: str) -> object:
    """Run a cell; what its last expression gives is what a notebook would show."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, where, "exec"), names)  # the cell is ours, from the file under test
    return None if last is None else eval(compile(ast.Expression(last.value), where, "eval"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_results(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKSCOPE_MODEL", "nano:mixed")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells), "clear the outputs before you commit"
    names: dict = {}
    shown = [run_cell("".join(cell["source"]), names, path.name) for cell in cells]
    assert any("<iframe" in one._repr_html_() for one in shown if hasattr(one, "_repr_html_")), (
        "no result is shown"
    )
    assert len(capsys.readouterr().out) > 200
