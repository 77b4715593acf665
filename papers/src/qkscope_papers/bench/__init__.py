"""Every speed we claim, as a ratio against the plain way of doing the same work, measured in the
same run.

What comes in: nothing but the name of a row; what goes out: ``{"name", "plain_s", "ours_s",
"ratio", "note"}``. Both sides of a row do the same work, and most rows check that they give the
same numbers.

In reading order: `harness` (rows, sides that alternate, ratios), then the rows: `maths` (sums and
SVDs), `models` (the embedded model: looking, swapping, pooling), `shapes` (models of known shapes
on a GPU), `toys` (trainers), `jobs` (long ones).
"""
