"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import qkscope_papers

MODULES = [module.name for module in pkgutil.walk_packages(qkscope_papers.__path__, "qkscope_papers.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
