"""An exported circuit is read by circuit-tracer's own models, and the page about other tools does
what it says.
"""

import re
import runpy
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import qkscope as qk


def graph_models() -> Any:
    package = find_spec("circuit_tracer")
    assert package is not None
    assert package.origin is not None
    spec = spec_from_file_location(
        "graph_models", Path(package.origin).parent / "frontend" / "graph_models.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_exported_circuit_is_valid_for_circuit_tracer(tmp_path: Path) -> None:
    file, models = tmp_path / "graph.json", graph_models()
    found = qk.why(qk.Scope.load("nano:mixed"), "hat: O jam: Z jam:", circuit=True, export=file)
    graph = models.Model.model_validate_json(file.read_text(), strict=True)
    assert len(graph.nodes) == len(found.tables["nodes"])
    assert [models.Link.model_validate(link, strict=True) for link in graph.links]


PAGE = Path(__file__).parents[2] / "docs" / "connect.md"
BLOCK = r"```python\n(.*?)```\n```text\n(.*?)```"


def test_the_blocks_of_the_page_print_what_it_shows(tmp_path, capsys):
    found = re.findall(BLOCK, PAGE.read_text(), flags=re.DOTALL)
    assert len(found) == len(re.findall("```python", PAGE.read_text())) == 5
    script = tmp_path / "connect.py"  # a file: nnsight reads the source of a trace
    script.write_text("".join(code for code, _ in found))
    runpy.run_path(str(script))
    printed, shown = capsys.readouterr().out, "".join(text for _, text in found)
    number = r"\d\.\d+"
    assert re.sub(number, "#", printed) == re.sub(number, "#", shown)
    ours, pages = ([float(x) for x in re.findall(number, text)] for text in (printed, shown))
    assert max(abs(x - y) for x, y in zip(ours, pages, strict=True)) < 1e-4
