"""An exported circuit is read by circuit-tracer's own models; its wheel is there without what it depends on."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import qkscope as qk


def graph_models() -> Any:
    package = find_spec("circuit_tracer")
    assert package is not None
    assert package.origin is not None
    spec = spec_from_file_location("graph_models", Path(package.origin).parent / "frontend" / "graph_models.py")
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
