"""Figures 5 and 13: how the query's latents meet the key's, ``G = Bᵀ W_Qᵀ W_K A``.

What the pictures suggest, as numbers: the share of ‖G‖² off the diagonal (superposition), the share
between different latents, and the asymmetry ``‖G − Gᵀ‖/‖G‖``. The paper reads a strong diagonal as
*feature splits*: the head would treat each coordinate as a feature. But ``G = cI`` is diagonal in
every basis. So each latent's coordinates are also rotated at random, ``G → RᵀGR``: a diagonal that
survives any rotation is no evidence that the head prefers these coordinates.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from qkscope.results.claims import Claim
from qkscope.results.result import Result
from qkscope.seeds import derived_seed
from qkscope.sums.bases import random_bases
from qkscope_papers.figures import INK, ORIGINAL, REST, TARGET, new_figure
from qkscope_papers.lee2026.cells import WORK, Cells, toy_figure, train, whole_grids
from qkscope_papers.lee2026.toy.retrieval import Retrieval, asymmetry, off_diagonal
from qkscope_papers.lee2026.toy.trained import HeadRun
from qkscope_papers.registry import Settings
from qkscope_papers.tables import Estimate, Files, Row, column, files_of, over_seeds, pick

_ROTATIONS = 20


@toy_figure(
    "fig5", "Interactions G, continuous task", whole_grids(("continuous", 8), ("continuous", 16))
)
@toy_figure(
    "fig13", "Interactions G, discrete task", whole_grids(("discrete", 8), ("discrete", 16))
)
def run(settings: Settings, cells: Cells) -> Result:
    """G of every cell of both grids, and what can be said of it in numbers."""
    work = WORK[settings.preset]
    heads = train(cells, settings)
    rows = [interaction_row(trained, settings.seed) for trained in heads]
    below = pick(rows, where="below")
    above = pick(rows, where="above")
    arrays = {f"G/{t.cell.slug}": t.head.interactions().float() for t in heads}
    variant = rows[0]["variant"]
    answer = (
        f"Off-diagonal energy of G ({variant}): at most "
        f"{_extreme(below, 'off_diagonal', max):.3f} where r1 + r2 < d_head, at least "
        f"{_extreme(above, 'off_diagonal', min):.3f} where r1 + r2 > d_head; asymmetry "
        f"{_median(below, 'asymmetry'):.2f} below and {_median(above, 'asymmetry'):.2f} "
        f"above (untrained {_median(rows, 'untrained_asymmetry'):.2f})."
    )
    claims = _claims(variant, below, above)
    about = {"lr": work.lr, "rotations": _ROTATIONS}
    return settings.result(answer, {"interactions": rows}, claims, arrays, about=about)


def interaction_row(trained: HeadRun, seed: int) -> Row:
    """One cell in numbers, beside the same head before training and after random rotations of its
    latents.
    """
    cell = trained.cell
    task = cell.task
    g = trained.head.interactions()
    untrained = cell.untrained().interactions()
    rotated = []
    for draw in range(_ROTATIONS):
        rotated.append(off_diagonal(rotate(g, task, derived_seed(seed, 17, draw))))
    return {
        "variant": task.variant,
        "d_head": cell.d_head,
        "seed": cell.seed,
        "r1": task.ranks[0],
        "r2": task.ranks[1],
        "where": _where(task.total_rank, cell.d_head),
        "off_diagonal": off_diagonal(g),
        "rotated": statistics.mean(rotated),
        "untrained": off_diagonal(untrained),
        "asymmetry": asymmetry(g),
        "off_asymmetry": off_asymmetry(g),
        "untrained_asymmetry": asymmetry(untrained),
    }


def _where(total: int, d_head: int) -> str:
    """Whether the latents leave room in the head, fill it, or do not fit."""
    if total == d_head:
        return "boundary"
    return "below" if total < d_head else "above"


def rotate(g: Float[Tensor, "R R"], task: Retrieval, seed: int) -> Float[Tensor, "R R"]:
    """``RᵀGR`` with one random rotation per latent, the same for query and key."""
    blocks = [random_bases(r, r, 1, derived_seed(seed, k))[0] for k, r in enumerate(task.ranks)]
    rotation = torch.block_diag(*blocks)
    return rotation.mT @ g @ rotation


def off_asymmetry(g: Float[Tensor, "R R"]) -> float:
    """Asymmetry of what is off the diagonal alone: 0 symmetric, 1 as in random entries, √2
    antisymmetric.
    """
    off = g - torch.diag(g.diagonal())
    norm = float(off.norm())
    return float((off - off.mT).norm()) / (math.sqrt(2) * norm) if norm > 0 else math.nan


def _claims(variant: str, below: list[Row], above: list[Row]) -> list[Claim]:
    """Of Fig. 13 F.1 says another thing, so that there two are implied only."""
    said = "§4, Fig. 5" if variant == "continuous" else "implied by §4, Fig. 5"
    off = _typical(above, "off_diagonal")
    split = _typical(below, "off_diagonal")
    tells = Claim(
        "off-diagonal energy tells superposition from room enough (median above d_head; "
        "control: median below)",
        paper=f"{said}: off-diagonal interactions in G",
        **off.measured,
        control=split.mean,
        rule="ours > 2 * control",
    )
    splits = Claim(
        "a strong diagonal shows feature splits (median off-diagonal energy below d_head; "
        "control: latents rotated at random)",
        paper=f"{said}: feature splits, as indicated by the strong diagonals",
        **split.measured,
        control=_median(below, "rotated"),
        rule="ours < 0.5 * control",
        why=(
            "Where there is room G is close to a multiple of the identity, which is diagonal in "
            "every basis: rotating the latents leaves the diagonal about as strong."
        ),
    )
    if variant == "continuous":
        return [tells, splits, _symmetry_claim(below + above)]
    return [tells, splits, _no_symmetry_claim(above)]


def _typical(rows: list[Row], name: str) -> Estimate:
    """The median over cells, with its interval over seeds."""
    return over_seeds(rows, lambda own: _median(own, name))


def _symmetry_claim(rows: list[Row]) -> Claim:
    found = _typical(rows, "asymmetry")
    return Claim(
        "interactions are symmetric (median asymmetry; control: untrained)",
        paper="§F.1: symmetry in interactions, in the continuous case",
        **found.measured,
        control=_median(rows, "untrained_asymmetry"),
        rule="ours < 0.2 * control",
    )


def _no_symmetry_claim(above: list[Row]) -> Claim:
    found = _typical(above, "off_asymmetry")
    return Claim(
        "interactions are not symmetric (median asymmetry of the off-diagonal part above "
        "d_head; control: random entries)",
        paper="§F.1, Fig. 13: we no longer see symmetry",
        **found.measured,
        control=1.0,
        rule="ours > 0.5 * control",
    )


def _median(rows: list[Row], name: str) -> float:
    return statistics.median(column(rows, name)) if rows else math.nan


def _extreme(rows: list[Row], name: str, pick: Any) -> float:
    return float(pick(column(rows, name))) if rows else math.nan


# ---------------------------------------------------------------------- the drawing

_SHOWN = {8: ((2, 2), (2, 4), (4, 4), (6, 6)), 16: ((4, 4), (6, 8), (8, 8), (12, 12))}
_SMOKE = {8: ((2, 2), (2, 5), (5, 5)), 16: ((4, 4), (4, 10), (10, 10))}


_ENERGY = (
    ("off_diagonal", "trained", ORIGINAL),
    ("rotated", "trained, latents rotated", TARGET),
    ("untrained", "untrained", REST),
)
_ASYMMETRY = (
    ("asymmetry", "G", ORIGINAL),
    ("off_asymmetry", "its off-diagonal part / √2", TARGET),
    ("untrained_asymmetry", "untrained", REST),
)


@run.drawing
def draw(result: Result) -> Files:
    """Heat maps row by d_head, then the two scatter plots."""
    rows = [dict(row) for row in result.tables["interactions"]]
    have = {(row["d_head"], row["r1"], row["r2"]) for row in rows}
    shown = {
        d: [r for r in dict.fromkeys((*_SHOWN[d], *_SMOKE[d])) if (d, *r) in have][:4]
        for d in _SHOWN
    }
    figure = new_figure(11, 9.8)
    parts: Any = figure.subfigures(2, 1, height_ratios=[2.05, 1])
    axes = parts[0].subplots(2, max(len(cells) for cells in shown.values()), squeeze=False)
    image = None
    for line, (d_head, cells) in zip(axes, shown.items(), strict=True):
        for axis, ranks in zip(line, cells, strict=False):
            row = next(r for r in rows if (r["d_head"], r["r1"], r["r2"]) == (d_head, *ranks))
            image = _heat_map(axis, result, row)
        for axis in line[len(cells) :]:
            axis.set_axis_off()
    parts[0].supylabel("query latents", fontsize=9)
    parts[0].supxlabel("key latents (lines: between z1 and z2)", fontsize=9)
    if image is not None:
        bar = parts[0].colorbar(image, ax=axes, shrink=0.6, pad=0.01, ticks=[-1, 0, 1])
        bar.set_label("G / largest entry")
    left, right = parts[1].subplots(1, 2)
    _scatter(left, rows, _ENERGY, "share of |G|² off the diagonal")
    _scatter(right, rows, _ASYMMETRY, "asymmetry |G − Gᵀ| / |G|")
    return files_of(result, figure)


def _heat_map(axis: Axes, result: Result, row: dict[str, Any]) -> Any:
    """G of one cell, with its ranks and what they leave off the diagonal."""
    prefix = f"G/{row['variant']}-{row['r1']}-{row['r2']}-h{row['d_head']}-"
    g = next(value for name, value in result.arrays.items() if name.startswith(prefix))
    look: Any = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1, "interpolation": "nearest"}
    image = axis.imshow((g / g.abs().max()).numpy(), **look)
    axis.axhline(row["r1"] - 0.5, color=INK, lw=0.6)
    axis.axvline(row["r1"] - 0.5, color=INK, lw=0.6)
    relation = {"below": "<", "boundary": "=", "above": ">"}[row["where"]]
    total = row["r1"] + row["r2"]
    ranks = f"({row['r1']}, {row['r2']}): {total} {relation} d_head {row['d_head']}"
    facts = f"off-diagonal {row['off_diagonal']:.3f}, asymmetry {row['asymmetry']:.2f}"
    axis.set_title(f"{ranks}\n{facts}", fontsize=8.5)
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(True)
    return image


def _scatter(
    axis: Axes, rows: list[dict[str, Any]], series: tuple[tuple[str, str, str], ...], label: str
) -> None:
    for name, text, colour in series:
        for d_head, marker in ((8, "o"), (16, "s")):
            own = pick(rows, d_head=d_head)
            x = [row["r1"] + row["r2"] - d_head for row in own]
            named = text if d_head == 8 else None
            look: Any = {"s": 20, "c": colour, "marker": marker, "alpha": 0.75, "linewidths": 0}
            axis.scatter(x, column(own, name), label=named, **look)
    axis.axvline(0, color=INK, lw=0.8, ls=":")
    axis.set(xlabel="r1 + r2 − d_head   (circles: d_head 8, squares: 16)", ylabel=label)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8, loc="best")
