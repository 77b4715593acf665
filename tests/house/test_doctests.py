"""Every public call says what its parameters are, and shows itself in an example; all examples of
docstrings run.
"""

import doctest
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest

import qkscope
import qkscope as qk
import qkscope_bench
import qkscope_papers
from qkscope import sums, tasks

MODULES = [
    module.name
    for package in (qkscope, qkscope_papers, qkscope_bench)
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


def documented() -> Iterator[tuple[str, Any, str]]:
    """Name, signature and docstring of public functions, classes, and their public methods."""
    things = {
        name: getattr(qk, name)
        for name in qk.__all__
        if name not in ("BadInput", "sums", "tasks", "__version__")
    }
    things |= {f"sums.{name}": getattr(sums, name) for name in sums.__all__}
    things |= {
        f"tasks.{name}": thing for name, thing in vars(tasks).items() if name in tasks.__all__
    }
    for name, thing in things.items():
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield name, thing, thing.__doc__ or ""
        for part, member in vars(thing).items() if inspect.isclass(thing) else ():
            member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if inspect.isfunction(member) and not part.startswith("_"):
                yield f"{name}.{part}", member, member.__doc__ or ""


def gaps() -> list[str]:
    found = []
    for name, thing, text in documented():
        takes = [n for n in inspect.signature(thing).parameters if n not in ("self", "cls")]
        missing = [
            n
            for n in takes
            if not re.search(rf"^\s*(\w+, )*\**{n}(, \w+)*\s*:", text, re.MULTILINE)
        ]
        found += [f"{name}: {n}" for n in missing]
        if "." not in name.removeprefix("tasks.").removeprefix("sums.") and ">>>" not in text:
            found.append(f"{name}: no example")
    return found


def test_every_public_parameter_is_documented_and_every_public_name_has_an_example():
    assert gaps() == []
    assert set(dir(qk)) == set(qk.__all__)
    assert set(dir(sums)) == set(sums.__all__)
