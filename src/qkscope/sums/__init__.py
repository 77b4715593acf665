"""Pure tensors: what queries and keys say about a head. No model, no text.

In come queries, keys and labels of chosen positions, attention rows, or a head's weights; out go
sums, subspaces with their controls, swaps in closed form, splits of a logit, and singular vectors.
Files in reading order:

- ``nulls``: ΔC from sums, the same sums under H0, p-values. ``intervals``: how sure a mean is, and
  whether neighbouring units are alike. ``moments``: what streams and merges, and the sums of a
  contrast.
- ``bases``: SVDs that are multiplied out, of many matrices at once too, and what several bases are
  to each other. ``cross_validation``: directions that predict units left out. ``controls``: what a
  rank is worth. ``subspace``: ``ΔC = U S Vᵀ``, cut at a rank.
- ``swap_algebra``, ``swap_methods``: the causal test, what can be swapped, and how well any
  subspace could do.
- ``singular``: a head's singular vectors, and relative attention as a sum of their terms: how few
  carry it.
- ``feature_split``: a logit split among subspaces, the one table of every split, and which singular
  vectors carry a feature. ``relative_logits``: a relative logit's keys, what is measured of rows,
  sums by word, writers at random. ``feature_terms``: one split among pairs of a dictionary's
  features.

It is also the shelf on which users find the mathematics, ``qkscope.sums.NAME``: the names that
``__init__.pyi`` lists, imported on first use. Those that need a model (`singular_basis`,
`attribute`, `load_fit`) live in rooms below, and no file of this room imports them.
"""

from qkscope.public import importer, public_names

_HOME = public_names(__file__)
__all__ = [*_HOME]

__getattr__ = importer(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
