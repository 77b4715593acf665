"""The public names of a package: those its stub lists, each imported on first use.

``__init__.pyi`` is what type checkers and editors read; reading it here too keeps one list.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LINE = re.compile(r"^from (\S+) import (\w+) as \w+$", re.MULTILINE)


def public_names(package: str) -> dict[str, str]:
    """The public names of a file ``__init__.py``, each with the module it lives in.

    Parameters
    ----------
    package : the path of that file; its stub lies beside it.
    """
    stub = Path(package).with_suffix(".pyi").read_text(encoding="utf-8")
    return {name: home for home, name in _LINE.findall(stub)}


def importer(
    package: str, homes: Mapping[str, str], moved: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package that imports a name when it is asked for.

    Parameters
    ----------
    package : its name.
    homes : public names, each with the module it lives in.
    moved : names that it had in the version before, each with where to take it from now.
    """

    def get(name: str) -> Any:
        if name in homes:
            value = _value(homes[name], name)
            vars(import_module(package))[name] = value
            return value
        if moved and name in moved:
            home, _, new_name = moved[name].rpartition(".")
            going = f"{package}.{name} goes with the next version: use {moved[name]}."
            warnings.warn(going, DeprecationWarning, stacklevel=2)
            return _value(home, new_name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def _value(home: str, name: str) -> Any:
    """A module's attribute, or its module of that name."""
    module = import_module(home)
    is_package = hasattr(module, "__path__")
    if is_package and name not in vars(module) and find_spec(f"{home}.{name}"):
        return import_module(f"{home}.{name}")
    return getattr(module, name)
