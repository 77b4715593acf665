"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import qkscope

MODULES = [m.name for m in pkgutil.walk_packages(qkscope.__path__, "qkscope.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    count = sum(bool(t.examples) for name in MODULES for t in finder.find(importlib.import_module(name)))
    assert count >= 15
