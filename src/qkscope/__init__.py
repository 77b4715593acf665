"""qkscope: why did this attention head attend to that token?

Public names are imported on first use, so that ``import qkscope`` and ``qkscope --help`` stay
instant. Which there are, and where they live, stands in ``__init__.pyi``, which type checkers and
editors read too.

The nouns that all share: `errors`, `checking` (calls checked against their annotations), `seeds`
(random numbers by address), `heads`, `examples`, `changes` (what can be different in a run),
`attention` (rows and their softmax), `hooks` (a subspace as an edit). The rooms, in
the order in which they may import each other: `results`,
`texts`, `model`, `linear`, `rerun`, `sums`, `findings`, `verbs`, `show` and `cli`. The papers, their
toys, nano training and the bench are a second distribution, `qkscope_papers`.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME = {name: home for home, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qkscope' has no attribute {name!r}")
    home = _HOME[name]
    if name == "tasks":  # a module, and no name of one
        value = import_module(f"{home}.{name}")
    else:
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
