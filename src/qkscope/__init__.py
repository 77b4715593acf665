"""qkscope: why did this attention head attend to that token?

Public names are imported on first use, so that ``import qkscope`` and ``qkscope --help`` stay instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BadInput": "qkscope.errors",
    "Head": "qkscope.heads",
}

__all__ = ["BadInput", "Head", "__version__"]

if TYPE_CHECKING:
    from qkscope.errors import BadInput
    from qkscope.heads import Head


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'qkscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
