"""The bridge: are the subspaces that contrasts find spanned by singular vectors of the weights?

Heads are found on the binding task, features fitted in the query's frame; `qkscope.analyses.bridge` asks which
singular vectors carry them and how much of their swaps the singular vectors alone reproduce. Neither paper asks this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from qkscope import tasks
from qkscope.analyses.bridge import SIZES, bridge
from qkscope.analyses.decompose import decompose
from qkscope.analyses.find import find_heads
from qkscope.analyses.singular import singular_basis
from qkscope.capture.scope import Scope
from qkscope.page.figures.style import INK, ORIGINAL, REST, TARGET, new_figure
from qkscope.papers.plots import Files, files_of, model_name
from qkscope.papers.registry import Settings, figure
from qkscope.papers.rows import Row
from qkscope.runs.claims import Claim
from qkscope.runs.result import Result


@dataclass(frozen=True)
class BridgeWork:
    """Counts of one preset."""

    choose: int
    fit: int
    test: int
    heads: int
    draws: int


WORK = {
    "smoke": BridgeWork(32, 32, 32, 2, 4),
    "default": BridgeWork(128, 256, 192, 4, 20),
    "paper": BridgeWork(256, 1000, 1000, 9, 50),
}
_CONTRASTS = ("lexical", "order")


@figure("franco2026", "bridge", "Contrasts against singular vectors")
def run(settings: Settings) -> Result:
    """Alignment and swaps at the best binding heads."""
    work = WORK[settings.preset]
    scope = Scope.load(settings.model, device=settings.device)
    # a nano answers lists by looking at the colons, and the other forms by looking at the boxes
    task = tasks.binding(9, "sentence" if settings.model.startswith("nano:") else "list", settings.seed)
    ranking = find_heads(scope, task, work.choose)
    heads = [row["head"] for row in ranking.top("row_accuracy")[: work.heads]]
    fit = decompose(scope, task, heads, work.fit, contrasts=list(_CONTRASTS), space="query_frame", seed=settings.seed)
    found = bridge(
        scope,
        fit,
        singular_basis(scope, heads),
        task.test(work.test),
        draws=work.draws,
        seed=settings.seed,
        sizes=[k for k in SIZES if k <= scope.d_head],
    )
    lexical = [dict(row) for row in found.tables["alignment"] if row["contrast"] == "lexical"]
    return Result(
        experiment=f"franco2026/{settings.figure}",
        answer=found.answer,
        tables={**found.tables, "heads": ranking.top("row_accuracy")[: work.heads]},
        arrays=found.arrays,
        claims=_claims(lexical),
        preset=settings.preset,
        model=settings.model,
        seed=settings.seed,
        provenance=found.provenance,
    )


def _claims(rows: list[Row]) -> list[Claim]:
    """Of the lexical feature, means over heads."""

    def mean(name: str) -> float:
        return sum(row[name] for row in rows) / len(rows)

    said = "not asked in either paper"
    return [
        Claim("Singular vectors that carry 90% of the lexical feature (control: rotated vectors)", said,
              mean("vectors"), mean("vectors_rotated"), "ours < 0.5 * control"),
        Claim("The same against principal axes of the keys, which know the prompts and no weights", said,
              mean("vectors"), mean("vectors_key_pca"), "ours < control"),
        Claim("Share of its key subspace in the span of as many singular vectors as its rank (control: random axes, "
              "chosen alike)", said, mean("key"), mean("key_random"), "ours > 1.5 * control"),
        Claim("The same against as many principal axes of the keys, chosen alike", said, mean("key"),
              mean("key_key_pca"), "ours > control"),
        Claim("Share of its query subspace (control: random axes, chosen alike)", said, mean("query"),
              mean("query_random"), "ours > 1.5 * control"),
        Claim("Shift of attention when these vectors are swapped (control: rotated vectors, chosen alike)", said,
              mean("shift_singular"), mean("shift_rotated"), "ours > 1.5 * control"),
        Claim("The same against as many principal components of the keys", said,
              mean("shift_singular"), mean("shift_key_pca"), "ours > control"),
        Claim("The same against the contrast's own directions: they are the whole of the feature", said,
              mean("shift_singular"), mean("shift_contrast"), "ours > 0.9 * control"),
    ]  # fmt: skip


# ---------------------------------------------------------------------- the drawing

_LINES = {
    "contrast": ("contrast's own directions", TARGET, "-"), "singular": ("singular vectors, by share", ORIGINAL, "-"),
    "omega_svd": ("singular vectors, by σ", ORIGINAL, "--"), "key_pca": ("key PCA", "#5a9367", "-"),
    "rotated": ("rotated vectors, by share", INK, ":"), "random": ("random", REST, "-"),
}  # fmt: skip


@run.drawing
def draw(result: Result) -> Files:
    """A column per head: the lexical feature over the singular vectors, its overlaps, and swaps by size."""
    rows = [dict(row) for row in result.tables["alignment"] if row["contrast"] == "lexical"]
    curve = [dict(row) for row in result.tables["curve"] if row["contrast"] == "lexical"]
    figure = new_figure(3.1 * len(rows) + 0.6, 7.4)
    axes = figure.subplots(3, len(rows), squeeze=False)
    for i, row in enumerate(rows):
        carried = result.arrays[f"carried/lexical/{row['head']}"].numpy()
        _carried(axes[0, i], carried, row)
        _overlaps(axes[1, i], row)
        _swaps(axes[2, i], [r for r in curve if r["head"] == row["head"]], row)
    axes[0, 0].set_ylabel("share of tr ΔC")
    axes[1, 0].set_ylabel("share of the subspace")
    axes[2, 0].set_ylabel("shift of attention")
    axes[1, 0].legend(frameon=False, fontsize=7, ncols=3, loc="upper left", columnspacing=1.0)
    handles, labels = axes[2, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(f"{model_name(result)}: the lexical feature against singular vectors", fontsize=10)
    return files_of(result, figure)


def _carried(axis: Axes, carried: Any, row: Row) -> None:
    total = float(carried.sum()) or 1.0  # a feature that is nothing at this head has no shares
    axis.bar(np.arange(len(carried)), carried / total, 0.9, color=ORIGINAL)
    axis.axhline(0, color=INK, lw=0.5)
    carriers = f"{row['head']}, rank {row['rank']}: {row['vectors']:.0f} vectors carry 90%"
    controls = ", ".join(
        f"{label} {row[f'vectors_{kind}']:.0f}"
        for kind, label in (("rotated", "rotated"), ("random", "random"), ("key_pca", "key PCA"))
    )
    axis.set_title(f"{carriers}\n({controls})", fontsize=8.5)
    axis.set_xlabel("singular vector, largest σ first", fontsize=8)


def _overlaps(axis: Axes, row: Row) -> None:
    kinds = (("", "by share", ORIGINAL), ("_leading", "by σ", "#7f97b5"), ("_rotated", "rotated", INK),
             ("_key_pca", "key PCA", "#5a9367"), ("_random", "random axes", REST))  # fmt: skip
    for j, (suffix, label, colour) in enumerate(kinds):
        places, values = [side + 0.17 * (j - 2) for side in (0, 1)], [row[f"query{suffix}"], row[f"key{suffix}"]]
        bars = axis.bar(places, values, 0.16, color=colour, label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=6.5)
    axis.set_xticks([0, 1], ["query space", "key space"], fontsize=8)
    axis.set_ylim(0, 1.45)
    axis.set_yticks([0, 0.5, 1])
    axis.set_title(f"in the span of {row['rank']} vectors", fontsize=8.5)


def _swaps(axis: Axes, rows: Sequence[Row], row: Row) -> None:
    for method, (label, colour, style) in _LINES.items():
        line = sorted((r for r in rows if r["method"] == method), key=lambda r: r["k"])
        x = [r["k"] for r in line]
        axis.plot(x, [r["shift"] for r in line], style, marker="o", ms=3, lw=1.4, color=colour, label=label)
        axis.fill_between(x, [r["low"] for r in line], [r["high"] for r in line], color=colour, alpha=0.1, lw=0)
    axis.axvline(row["rank"], color=REST, lw=0.8, ls=":")
    axis.set_xlabel("dimensions swapped", fontsize=8)
