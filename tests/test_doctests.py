"""The examples in docstrings run and print what they say; they share the models that they load."""

import doctest
import functools
import importlib
import pkgutil

import pytest

import qkscope
import qkscope_papers

MODULES = [
    module.name
    for package in (qkscope, qkscope_papers)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
]


@pytest.fixture(scope="module", autouse=True)
def _load_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qkscope.Scope, "load", staticmethod(functools.cache(qkscope.Scope.load)))
        yield


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
