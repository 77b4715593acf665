"""Every public call says what each of its parameters is, and shows itself in an example that runs (test_doctests)."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import qkscope as qk
from qkscope import tasks


def documented() -> Iterator[tuple[str, Any, str]]:
    """Name, signature and docstring of public functions, classes, and their public methods."""
    things = {name: getattr(qk, name) for name in qk.__all__ if name not in ("BadInput", "tasks", "__version__")}
    things |= {f"tasks.{name}": thing for name, thing in vars(tasks).items() if name in tasks.__all__}
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
        missing = [n for n in takes if not re.search(rf"^\s*(\w+, )*\**{n}(, \w+)*\s*:", text, re.MULTILINE)]
        found += [f"{name}: {n}" for n in missing]
        if "." not in name.removeprefix("tasks.") and ">>>" not in text:
            found.append(f"{name}: no example")
    return found


def test_every_public_parameter_is_documented_and_every_public_name_has_an_example():
    assert gaps() == []
    assert set(dir(qk)) == set(qk.__all__)
