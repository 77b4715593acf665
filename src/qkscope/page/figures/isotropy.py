"""Figure 20: the spectrum of a dictionary's Gram matrix, and its distance from isotropic on both scales."""

from __future__ import annotations

from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result

_COLOURS = (ORIGINAL, TARGET, "#5a9367", "#8b5fa8")


def draw(result: Result) -> dict[str, str | bytes]:
    """Left the eigenvalues of G / c, right ‖E‖ at c = tr G / d beside random rows and without the mean."""
    name = result.experiment.split("/")[1]
    rows = [dict(row) for row in result.tables["isotropy"]]
    figure = new_figure(9.2, 3.7)
    with styled():
        left, right = figure.subplots(1, 2)
        for i, row in enumerate(rows):
            spectrum = result.arrays[f"spectrum/{row['dictionary']}"].numpy()
            left.plot(range(1, len(spectrum) + 1), spectrum, color=_COLOURS[i % 4], lw=1.5,
                      label=f"{row['dictionary']} ({row['n']:,} × {row['d']})")  # fmt: skip
        left.axhline(1, color=INK, lw=0.6, ls=":")
        left.set(
            xscale="log", yscale="log", xlabel="place of the eigenvalue", title="eigenvalues of G / c, c = tr G / d"
        )
        left.legend(frameon=False, fontsize=8)
        kinds = (("e_trace", "as it is", TARGET), ("e_centred", "mean row taken out", ORIGINAL),
                 ("random", "random rows", REST))  # fmt: skip
        for j, (column, label, colour) in enumerate(kinds):
            places = [i + 0.26 * (j - 1) for i in range(len(rows))]
            bars = right.bar(places, [row[column] for row in rows], 0.24, color=colour, label=label, zorder=2)
            right.bar_label(bars, fmt="%.1f", fontsize=7.5)
        right.axhspan(10, 55, color=REST, alpha=0.3, lw=0, zorder=0)
        right.set_yscale("log")
        right.set_xticks(range(len(rows)), [row["dictionary"] for row in rows], fontsize=8)
        right.set_title("‖E‖ (grey band: the paper's GPT-2 dictionaries)")
        right.legend(frameon=False, fontsize=8)
    return with_page(result, {name: figure})
