"""TransformerLens and nnsight beside qkscope, in one environment: `.ci/peers` makes it and runs this folder."""

import importlib
import importlib.metadata

import pytest
from packaging.requirements import Requirement


@pytest.mark.parametrize("package", ["qkscope", "transformer-lens", "nnsight"])
def test_each_finds_what_it_asks_for(package):
    importlib.import_module(package.replace("-", "_"))
    asked = [Requirement(line) for line in importlib.metadata.requires(package) or []]
    plain = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert plain
    assert [
        f"{one}, but there is {found}"
        for one in plain
        if not one.specifier.contains(found := importlib.metadata.version(one.name), prereleases=True)
    ] == []
