"""qkscope: why did this attention head attend to that token?

Public names are imported on first use, so that ``import qkscope`` and ``qkscope --help`` stay instant.

The nouns that all share: `errors`, `kinds` (calls checked against their annotations), `draws` (random numbers by
address), `heads`, `examples`, `attention` (rows and their softmax), `hooks` (a subspace as an edit). The rooms, each
importing those before it: `runs`, `tasks`, `capture`, `linear`, `change`, `maths`, `analyses`, `nano`, `page`,
`explorer`; and below the instrument `papers`, `bench`, `cli`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BadInput": "qkscope.errors",
    "Dictionary": "qkscope.maths.dictionaries",
    "Example": "qkscope.examples",
    "Head": "qkscope.heads",
    "Moments": "qkscope.maths.moments",
    "Result": "qkscope.runs.result",
    "Scope": "qkscope.capture.scope",
    "Subspace": "qkscope.maths.subspace",
    "alignment": "qkscope.maths.bridge",
    "atlas": "qkscope.analyses.atlas",
    "attribute": "qkscope.analyses.attribute",
    "decompose": "qkscope.analyses.decompose",
    "discover": "qkscope.analyses.discover.discover",
    "find_heads": "qkscope.analyses.find",
    "load": "qkscope.analyses.fit",
    "list_families": "qkscope.analyses.models",
    "relative_attention": "qkscope.analyses.relative",
    "reproduce": "qkscope.papers.registry",
    "singular_basis": "qkscope.analyses.relative",
    "sparsity": "qkscope.analyses.sparsity",
    "swap": "qkscope.analyses.swap",
    "swap_downstream": "qkscope.analyses.downstream",
    "thin_svd": "qkscope.maths.bases",
    "trace": "qkscope.analyses.trace.trace",
    "view": "qkscope.explorer.opening",
    "why": "qkscope.analyses.why.why",
    "write_gallery": "qkscope.page.gallery",
    "write_report": "qkscope.page.report",
}
_ROOMS = ("tasks",)

__all__ = [
    "BadInput", "Dictionary", "Example", "Head", "Moments", "Result", "Scope", "Subspace", "__version__", "alignment",
    "atlas", "attribute", "decompose", "discover", "find_heads", "list_families", "load", "relative_attention",
    "reproduce", "singular_basis", "sparsity", "swap", "swap_downstream", "tasks", "thin_svd", "trace", "view", "why",
    "write_gallery", "write_report",
]  # fmt: skip

if TYPE_CHECKING:
    from qkscope import tasks
    from qkscope.analyses.atlas import atlas
    from qkscope.analyses.attribute import attribute
    from qkscope.analyses.decompose import decompose
    from qkscope.analyses.discover.discover import discover
    from qkscope.analyses.downstream import swap_downstream
    from qkscope.analyses.find import find_heads
    from qkscope.analyses.fit import load
    from qkscope.analyses.models import list_families
    from qkscope.analyses.relative import relative_attention, singular_basis
    from qkscope.analyses.sparsity import sparsity
    from qkscope.analyses.swap import swap
    from qkscope.analyses.trace.trace import trace
    from qkscope.analyses.why.why import why
    from qkscope.capture.scope import Scope
    from qkscope.errors import BadInput
    from qkscope.examples import Example
    from qkscope.explorer.opening import view
    from qkscope.heads import Head
    from qkscope.maths.bases import thin_svd
    from qkscope.maths.bridge import alignment
    from qkscope.maths.dictionaries import Dictionary
    from qkscope.maths.moments import Moments
    from qkscope.maths.subspace import Subspace
    from qkscope.page.gallery import write_gallery
    from qkscope.page.report import write_report
    from qkscope.papers.registry import reproduce
    from qkscope.runs.result import Result


def __getattr__(name: str) -> Any:
    if name in _HOME or name in _ROOMS:
        value = getattr(import_module(_HOME[name]), name) if name in _HOME else import_module(f"qkscope.{name}")
        globals()[name] = value
        return value
    raise AttributeError(f"module 'qkscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
