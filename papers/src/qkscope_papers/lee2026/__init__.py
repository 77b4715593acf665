"""Lee et al. 2026, *Decomposing Query-Key Feature Interactions*, arXiv 2602.04752.

In full: *Decomposing Query-Key Feature Interactions Using Contrastive Covariances*. In come
settings; out goes each figure's `Result` and its drawing. Files in reading order:

- Toys, in ``toy/``, trained for all figures at once by `cells`: `ranks` (Figs. 2, 11), `geometry`
  (3, 12), `swaps` (4, 14, 15), `interactions` (5, 13), `closed_form` (appendix B).
- Language models, whose heads and fits `language` finds once: `points` (what views are made of),
  `category_views` (6), `binding_views` (8, 17), `swap_plots` (how swaps are drawn), `filter_swaps`
  (7, 19), `binding_swaps` (9, 18, 20), `logit_split` (10), `entity_counts` (16), `category_sums`
  (categories as the released script sums them).
- Of both, ours: `truth` (how near swaps come to the feature exchanged in the input), `planted_cut`
  (where a subspace is cut).
"""
