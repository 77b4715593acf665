"""The theorems: formula against minimum, bound against the worst feature, overlap against μ."""

from __future__ import annotations

from typing import Any

import matplotlib

from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure, styled, with_page
from qkscope.result import Result


def draw(result: Result) -> dict[str, str | bytes]:
    """One figure per theorem."""
    name = result.experiment.split("/")[1]
    figure = new_figure(*{"thm1": (9.6, 3.9), "thm2": (6.4, 4.1), "thm3": (6.6, 4.1)}[name])
    with styled():
        {"thm1": _first, "thm2": _second, "thm3": _third}[name](figure, result)
    return with_page(result, {name: figure})


def _first(figure: Any, result: Result) -> None:
    rows = list(result.tables["minimiser"])
    left, right = figure.subplots(1, 2)
    kinds = [(f, p) for f in ("random", "isotropic", "flat") for p in (0.1, 0.5, 1.0)]
    for teacher, colour in (("whitened", ORIGINAL), ("indicator", TARGET)):
        own = [r for r in rows if r["teacher"] == teacher]
        x = [kinds.index((r["features"], r["p"])) for r in own]
        left.scatter(x, [max(r["error"], 1e-17) for r in own], s=16, color=colour, alpha=0.7, linewidths=0,
                     label=f"{teacher} target")  # fmt: skip
    left.axhline(1e-3, color=INK, lw=0.8, ls=":")
    left.set(yscale="log", ylabel="relative error of the formula", xticks=range(len(kinds)))
    left.set_xticklabels([f"{f}\np={p:g}" for f, p in kinds], fontsize=7, rotation=45)
    left.legend(frameon=False, fontsize=8)
    left.set_title("p = 1 and flat features: where Theorem 1 is silent", fontsize=9)
    chosen = [r for r in rows if r["p"] < 1 and r["features"] != "flat"]
    for (teacher, kind), marker in {("whitened", "raw"): "o", ("indicator", "raw"): "o",
                                    ("whitened", "whitened"): "s", ("indicator", "whitened"): "s"}.items():  # fmt: skip
        own = [r for r in chosen if r["teacher"] == teacher]
        right.scatter([r["isotropy_error"] for r in own], [r[kind] for r in own], s=18, marker=marker,
                      facecolors="none" if kind == "whitened" else None, alpha=0.8,
                      edgecolors=ORIGINAL if teacher == "whitened" else TARGET,
                      color=None if kind == "whitened" else (ORIGINAL if teacher == "whitened" else TARGET),
                      label=f"{teacher} target, |cos| with {'G⁻¹f' if kind == 'whitened' else 'f'}")  # fmt: skip
    right.set(xlabel="‖G/c − I‖ of the query features", ylabel="|cos| of the top singular vector", ylim=(None, 1.01))
    right.legend(frameon=False, fontsize=7.5)


def _second(figure: Any, result: Result) -> None:
    rows = list(result.tables["bound"])
    axis = figure.subplots()
    x = [r["epsilon"] for r in rows]
    axis.plot(x, [r["random"] for r in rows], "o-", color=REST, ms=4, label="a random feature, mean")
    axis.plot(x, [r["worst"] for r in rows], "o", color=ORIGINAL, ms=5, label="the worst feature found")
    axis.plot(x, [r["sharp"] for r in rows], "-", color=ORIGINAL, lw=1, label="sin θ ≤ ε (sharp)")
    axis.plot(x, [r["bound"] for r in rows], "s-", color=TARGET, ms=4, label="Theorem 2")
    axis.axvspan(1 - (2 / 3) ** 0.5, max(x), color=REST, alpha=0.2, lw=0)
    axis.text(0.4, 0.06, "Theorem 2 is silent", color=INK, fontsize=8.5)
    axis.set(xlabel="ε = ‖E‖", ylabel="|cos| of feature and singular vector", ylim=(0, 1.03))
    axis.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0.22, 0.12))


def _third(figure: Any, result: Result) -> None:
    rows = [r for r in result.tables["orthogonalisation"] if r["mu"] > 0]
    axis = figure.subplots()
    colours = matplotlib.colormaps["viridis"]
    tilts = list(dict.fromkeys(r["tilt"] for r in rows))
    for i, tilt in enumerate(tilts):
        own = [r for r in rows if r["tilt"] == tilt]
        colour = colours(i / max(len(tilts) - 1, 1) * 0.85)
        floor = 1e-9
        label = f"teacher tilted by {tilt:g}" if tilt else "orthogonal teacher (0)"
        axis.plot(
            [r["mu"] for r in own], [max(r["overlap"], floor) for r in own], "o-", color=colour, ms=4, label=label
        )
        if tilt:
            axis.plot([r["mu"] for r in own], [max(r["bound"], floor) for r in own], "--", color=colour, lw=1,
                      label="   its bound [CE′ − CE*]/μ")  # fmt: skip
    axis.axhline(2, color=INK, lw=0.8, ls=":")
    axis.text(10, 2.4, "above 2 the bound says nothing", fontsize=8, ha="right")
    axis.set(xscale="log", yscale="log", xlabel="μ", ylabel="(q1·q2)² + (k1·k2)² at the minimum")
    axis.legend(frameon=False, fontsize=8)
