"""*Singular Vectors of Attention Heads Align with Features*, 2026: one file per kind of figure.

In come settings; out goes each figure's `Result` and its drawing. Files in reading order:

- Toys, in ``toy/``, trained for all figures at once by `cells`: `geometry` (Figs. 1, 19),
  `alignments` (2, 11), `dynamics` (3, 13), `anisotropy` (4), `token_pairs` and `decomposition` (5,
  6, 24), `emergence` (7a), `sweeps` (12, 14-18), `rope` (21, 22), `capacity` (23).
- Language models, on `prompts`, all from one sweep over checkpoints in `model_sweep`:
  `model_sparsity` (7b), `model_terms` (8, 25), `model_counts` (9a, 9b).
- `isotropy` (20), of dictionaries.
- `theory` (the theorems as formulas), `theorems` (1, 2, 3 tried numerically).
- `dictionary`: whether the toy's own features, taken as a dictionary, give its true pairs. No paper
  asks this.
- `bridge`: whether contrasts and singular vectors find the same. No paper asks this.
"""
