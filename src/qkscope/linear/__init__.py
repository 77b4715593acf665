"""One linear engine: who writes what a head reads, with norms frozen.

- `blocks`: a model's blocks taken apart; `layer`: one layer's own code, its norms frozen
- `run`: what one forward leaves, writers pushed up and directions pulled down; `reader`: makes runs
- `many`: many heads at once; `neurons`: an MLP's neurons as writers
- `check`: whether parts sum to the whole; `ablate`: whole heads taken out of the running model
"""
