"""Figure 4: alignment against anisotropy, raw and anti-whitened, beside random directions and the bounds."""

from __future__ import annotations

from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result


def draw(result: Result) -> dict[str, str | bytes]:
    """Left: where Theorem 2 speaks; right: the range of the paper."""
    rows = list(result.tables["anisotropy"])
    figure = new_figure(10.4, 4.2)
    with styled():
        axes = figure.subplots(1, 2, sharey=True, width_ratios=[1, 2])
        for axis, part in zip(axes, ([r for r in rows if r["epsilon"] <= 0.2], rows), strict=True):
            x = [r["epsilon"] for r in part]
            for kind, label, colour, style in (
                ("raw", "raw, best of all ten vectors", ORIGINAL, "-o"),
                ("raw_top", "raw, best of the four in use", ORIGINAL, "--s"),
                ("anti_whitened", "anti-whitened, best of ten", TARGET, "-o"),
            ):
                axis.errorbar(x, [r[kind] for r in part], [r[f"{kind}_sd"] for r in part], fmt=style, color=colour,
                              ms=4, lw=1.3, capsize=2, label=label)  # fmt: skip
            axis.plot(x, [r["raw_untrained"] for r in part], "x", color=REST, ms=5, label="untrained head, best of ten")
            axis.axhline(rows[0]["random"], color=INK, lw=0.9, ls=":", label="random direction, best of ten")
            axis.axhline(rows[0]["random_top"], color=INK, lw=0.9, ls="-.", label="random direction, best of four")
            axis.plot(x, [r["bound"] for r in part], "-", color="#7a4fa3", lw=1.6, label="Theorem 2 (where it speaks)")
            axis.plot(x, [r["sharp"] for r in part], "--", color="#7a4fa3", lw=1, label="sharp bound, 2√c/(1+c)")
            axis.set(xlabel="ε = ‖E‖ with c = 1", ylim=(0, 1.04))
        axes[0].set(ylabel="|cos|, mean over pairs, sides and directions", title="where Theorem 2 speaks")
        axes[1].set_title("the range of GPT-2's dictionaries, on another scale (see text)")
        axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return with_page(result, {result.experiment.split("/")[1]: figure})
