"""Known answers: programs compiled to weights, whose heads' true writers are read off the weights.

In: the names of programs. Out: what `trace` finds beside the truth. Files: `compiled` (the programs
as models), `programs` (the figure: writers and words, beside rivals).
"""
