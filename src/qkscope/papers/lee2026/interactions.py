"""Figures 5 and 13: ``G = Bᵀ W_Qᵀ W_K A``, how each coordinate of the query's latents meets each one of the key's.

What the pictures suggest, as numbers: the share of ‖G‖² off the diagonal (superposition), the share between different
latents, and the asymmetry ``‖G − Gᵀ‖/‖G‖``. The paper reads a strong diagonal as *feature splits*: the head would treat
each coordinate as a feature. But ``G = cI`` is diagonal in every basis. So each latent's coordinates are also rotated
at random, ``G → RᵀGR``: a diagonal that survives any rotation is no evidence that the head prefers these coordinates.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.maths.bases import random_bases
from qkscope.maths.draws import derived_seed
from qkscope.papers.fleet import one_thread
from qkscope.papers.lee2026.cells import PRESETS, heads_of
from qkscope.papers.lee2026.toy.retrieval import Retrieval, asymmetry, cross_variable, off_diagonal
from qkscope.papers.lee2026.toy.trained import TrainedHead
from qkscope.papers.registry import Settings
from qkscope.result import Claim, Result, provenance

Row = dict[str, Any]
_ROTATIONS = 20


@one_thread()
def run(settings: Settings) -> Result:
    """G of every cell of both grids, and what can be said of it in numbers."""
    work, heads = PRESETS[settings.preset], heads_of(settings)
    rows = [interaction_row(trained, settings.seed) for trained in heads]
    below, above = ([row for row in rows if row["where"] == where] for where in ("below", "above"))
    arrays = {f"G/{t.cell.slug}": t.head.interactions().float() for t in heads}
    variant = rows[0]["variant"]
    return Result(
        experiment=f"lee2026/{settings.figure}",
        answer=(
            f"Off-diagonal energy of G ({variant}): at most {_extreme(below, 'off_diagonal', max):.3f} where "
            f"r1 + r2 < d_head, at least {_extreme(above, 'off_diagonal', min):.3f} where r1 + r2 > d_head; asymmetry "
            f"{_median(below, 'asymmetry'):.2f} below and {_median(above, 'asymmetry'):.2f} above (untrained "
            f"{_median(rows, 'untrained_asymmetry'):.2f})."
        ),
        tables={"interactions": rows},
        claims=_claims(variant, below, above),
        arrays=arrays,
        preset=settings.preset,
        seed=settings.seed,
        provenance=provenance(figure=settings.figure, preset=settings.preset, lr=work.lr, rotations=_ROTATIONS),
    )


def interaction_row(trained: TrainedHead, seed: int) -> Row:
    """One cell in numbers, beside the same head before training and after random rotations of its latents."""
    cell, task = trained.cell, trained.cell.task
    g, untrained = trained.head.interactions(), cell.untrained().interactions()
    total = task.total_rank
    rotated = [off_diagonal(rotate(g, task, derived_seed(seed, 17, draw))) for draw in range(_ROTATIONS)]
    return {
        "variant": task.variant, "d_head": cell.d_head, "r1": task.ranks[0], "r2": task.ranks[1],
        "where": "below" if total < cell.d_head else "boundary" if total == cell.d_head else "above",
        "off_diagonal": off_diagonal(g), "cross_latent": cross_variable(g, task), "rotated": statistics.mean(rotated),
        "untrained": off_diagonal(untrained),
        "asymmetry": asymmetry(g), "off_asymmetry": off_asymmetry(g), "untrained_asymmetry": asymmetry(untrained),
    }  # fmt: skip


def rotate(g: Float[Tensor, "R R"], task: Retrieval, seed: int) -> Float[Tensor, "R R"]:
    """``RᵀGR`` with one random rotation per latent, the same for query and key."""
    blocks = [random_bases(r, r, 1, derived_seed(seed, k))[0] for k, r in enumerate(task.ranks)]
    rotation = torch.block_diag(*blocks)
    return rotation.mT @ g @ rotation


def off_asymmetry(g: Float[Tensor, "R R"]) -> float:
    """Asymmetry of what is off the diagonal alone: 0 symmetric, 1 as in random entries, √2 antisymmetric."""
    off = g - torch.diag(g.diagonal())
    norm = float(off.norm())
    return float((off - off.mT).norm()) / (math.sqrt(2) * norm) if norm > 0 else math.nan


def _claims(variant: str, below: list[Row], above: list[Row]) -> list[Claim]:
    claims = [
        Claim("off-diagonal energy separates superposition from room enough (lowest above d_head; control: highest "
              "below)", "seen in the figure",
              _extreme(above, "off_diagonal", min), _extreme(below, "off_diagonal", max),
              "ours > control"),
        Claim("a strong diagonal shows feature splits (median off-diagonal energy below d_head; control: latents "
              "rotated at random)", "feature splits", _median(below, "off_diagonal"), _median(below, "rotated"),
              "ours < 0.5 * control"),
    ]  # fmt: skip
    if variant == "continuous":
        claims.append(Claim("interactions are symmetric (median asymmetry; control: untrained)", "symmetric",
                            _median(below + above, "asymmetry"), _median(below + above, "untrained_asymmetry"),
                            "ours < 0.2 * control"))  # fmt: skip
    else:
        claims.append(Claim("interactions are not symmetric (median asymmetry of the off-diagonal part above d_head; "
                            "control: random entries)", "no symmetry", _median(above, "off_asymmetry"), 1.0,
                            "ours > 0.5 * control"))  # fmt: skip
    return claims


def _median(rows: list[Row], name: str) -> float:
    return statistics.median(row[name] for row in rows) if rows else math.nan


def _extreme(rows: list[Row], name: str, pick: Any) -> float:
    return float(pick(row[name] for row in rows)) if rows else math.nan
