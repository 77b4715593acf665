"""Measurements of the instrument that are installed with the papers: speeds, and known answers.

Every speed we claim is a ratio against the plain way of doing the same work, measured in the same
run. What comes in: nothing but the name of a row; what goes out: ``{"name", "plain_s", "ours_s",
"ratio", "note"}``. Both sides of a row do the same work, and most rows check that they give the
same numbers.

In reading order: `harness` (rows, sides that alternate, ratios), then the rows: `maths` (sums and
SVDs), `models` (the embedded model: looking, swapping, pooling), `shapes` (models of known shapes
on a GPU), `toys` (trainers), `gradients` (theirs, by hand), `jobs` (long ones). `known` has
compiled programs: what `trace` finds in them, beside what their weights say.
"""
