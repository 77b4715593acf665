"""Every speed we claim, as a ratio against the plain way of doing the same work.

In reading order: `harness` (rows, sides that alternate, ratios), then the rows: `maths` (sums and SVDs), `models` (the
embedded model), `discovery`, `toys`, `jobs` (long ones).
"""
