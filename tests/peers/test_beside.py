"""TransformerLens and nnsight beside qkscope, in one environment: `.ci/peers` makes it and runs this folder."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PINS = dict(
    line.split("==")
    for line in (Path(__file__).parents[2] / "requirements-peers.txt").read_text().splitlines()
    if "==" in line
)


def test_what_is_installed_is_what_is_pinned():
    assert {package: importlib.metadata.version(package) for package in PINS} == PINS
    assert PINS["transformer-lens"].startswith("4.")
    assert PINS["nnsight"].startswith("0.8.")


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
