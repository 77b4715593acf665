"""qkscope: why did this attention head attend to that token?

Public names are imported on first use, so that ``import qkscope`` and ``qkscope --help`` stay
instant. Which there are, and where they live, stands in ``__init__.pyi``, which type checkers and
editors read too. The mathematics has a shelf of its own, ``qkscope.sums``.

The nouns that all share: `errors`, `public` (names imported on first use), `text` (items in groups,
values in messages), `checking` (calls checked against their annotations), `seeds` (random numbers
by address), `heads`, `examples`, `attention` (rows and their softmax), `hooks` (a subspace as an
edit), `changes` (what can be changed in a run).

The rooms, in the order in which they may import each other: `results`, `texts`, `model`, `linear`,
`rerun`, `sums`, `findings`, `verbs`, `show` and `cli`. The papers, their toys, nano training and
the bench are a second distribution, `qkscope_papers`.
"""

from qkscope.public import importer, public_names

__version__ = "0.2.0"

_HOME = public_names(__file__)
__all__ = [*_HOME, "__version__"]

_MOVED = {
    "Head": "qkscope.heads.Head",
    "Moments": "qkscope.sums.Moments",
    "Subspace": "qkscope.sums.Subspace",
    "alignment": "qkscope.sums.alignment",
    "attribute": "qkscope.sums.attribute",
    "load": "qkscope.sums.load_fit",
    "singular_basis": "qkscope.sums.singular_basis",
    "thin_svd": "qkscope.sums.thin_svd",
    "view": "qkscope.show.server.view",
}
"""Names of 0.2 that are public elsewhere now."""

__getattr__ = importer(__name__, _HOME, _MOVED)


def __dir__() -> list[str]:
    return sorted(__all__)
