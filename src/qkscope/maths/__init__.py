"""Pure tensors: what queries and keys say about a head. No model, no text.

In come queries, keys and labels of chosen positions, attention rows, or a head's weights; out go sums, subspaces with
their controls, swaps in closed form, splits of a logit, and singular vectors. Files in reading order:

- ``sums``: what streams and merges; ``[v; 1]`` and centring. ``moments``: the sums of a contrast.
- ``significance``: the same sums under H0, p-values, intervals. ``bases``: SVDs that are multiplied out, of many
  matrices at once too, and what several bases are to each other. ``controls``: what a rank is worth. ``subspace``:
  ``ΔC = U S Vᵀ``, cut at a rank.
- ``swap``, ``methods``: the causal test, what can be swapped, and how well any subspace could do.
- ``attribution``: a logit split among subspaces, and the one table of every split. ``writers``: a relative logit's
  keys, what is measured of rows, sums by word, writers at random. ``dictionaries``: a logit split among a dictionary's
  features, and dictionaries without meaning; reading one.
- ``singular``: a head's singular vectors. ``relative``: relative attention as a sum of their terms, how few carry it.
  ``bridge``: which of them carry a feature.
- ``factors``: queries and keys as sums of readable causes, and the share of each pair of them.
"""
