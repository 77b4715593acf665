"""qkscope: why did this attention head attend to that token?

Public names are imported on first use, so that ``import qkscope`` and ``qkscope --help`` stay instant.

The nouns that all share: `errors`, `kinds` (calls checked against their annotations), `draws` (random numbers by
address), `heads`, `examples`, `attention` (rows and their softmax), `hooks` (a subspace as an edit). The rooms, each
importing those before it: `runs`, `tasks`, `capture`, `linear`, `change`, `maths`, `analyses`, `show` and `cli`. The
papers, their toys, nano training and the bench are a second distribution, `qkscope_papers`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
    "alignment": "qkscope.maths.attribution",
    "atlas": "qkscope.analyses.atlas",
    "attribute": "qkscope.analyses.attribute",
    "decompose": "qkscope.analyses.decompose",
    "find_heads": "qkscope.analyses.find",
    "load": "qkscope.analyses.fit",
    "relative_attention": "qkscope.analyses.relative",
    "singular_basis": "qkscope.analyses.relative",
    "sparsity": "qkscope.analyses.sparsity",
    "swap": "qkscope.analyses.swap",
    "swap_downstream": "qkscope.analyses.downstream",
    "thin_svd": "qkscope.maths.bases",
    "trace": "qkscope.analyses.trace.trace",
    "view": "qkscope.show.live",
    "why": "qkscope.analyses.why.why",
    "write_gallery": "qkscope.show.gallery",
    "write_report": "qkscope.show.page",
    "tasks": "qkscope.tasks",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qkscope' has no attribute {name!r}")
    module = import_module(_HOME[name])
    globals()[name] = value = module if name == "tasks" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
