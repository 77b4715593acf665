"""``qkscope toy retrieval``: train chosen cells, or the paper's four grids, and say how well each
head does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qkscope.checking import Count, checked_call
from qkscope.errors import BadInput, check_device
from qkscope.results.folder import check_folder
from qkscope.results.result import Result, provenance
from qkscope_papers.fleet import check_trained
from qkscope_papers.lee2026.toy.ceilings import bayes_ceiling, dot_product_ceiling
from qkscope_papers.lee2026.toy.retrieval import AS_WRITTEN, Retrieval, Variant
from qkscope_papers.lee2026.toy.retrieval_plots import draw_heads
from qkscope_papers.lee2026.toy.stack import HeadCell
from qkscope_papers.lee2026.toy.trained import GRIDS, all_grids, grid, train_heads
from qkscope_papers.tables import pick
from qkscope_papers.trainer import Recipe


@checked_call
def train_retrieval(
    out: str | Path,
    *,
    grids: str | None = None,
    ranks: Sequence[int] = (3, 5),
    variant: Variant = "discrete",
    d_head: int = 16,
    seeds: Count = 1,
    lr: float = 1e-4,
    steps: int = 50_000,
    as_written: bool = False,
    device: str = "cpu",
    workers: Count | None = None,
    contexts: int = 4096,
    show: Callable[[Result], object] = lambda result: None,
) -> Result:
    """Train heads into ``out/heads`` (resuming what was interrupted) and write ``out/retrieval``, with
    a picture.

    Parameters
    ----------
    grids : ``all`` for the paper's four, or one as ``discrete-8``; without it, the one cell that
        ``ranks`` names.
    as_written : standard Gaussian maps and noise, as the paper's text has them, instead of those
        that reproduce it.
    contexts : fresh contexts per head for its accuracy and ceilings.
    show : told the result before it is written.
    """
    check_device(device)
    scales: dict[str, Any] = AS_WRITTEN if as_written else {}
    cells = _cells(grids, tuple(ranks), variant, d_head, seeds, scales)
    out = Path(out)
    folder = check_folder(out / "retrieval", "toy/retrieval")
    check_trained(out / "heads")
    start = time.perf_counter()
    recipe = Recipe(steps=steps)
    trained = train_heads(
        cells, out / "heads", lr=lr, recipe=recipe, device=device, workers=workers
    )
    seconds = time.perf_counter() - start
    rows: list[dict[str, Any]] = []
    for found in trained:
        task = found.cell.task
        rows.append({
            "variant": task.variant, "d_head": found.cell.d_head,
            **{f"r{k + 1}": r for k, r in enumerate(task.ranks)}, "seed": found.cell.seed,
            "steps": found.steps, "stopped": found.reason, "loss": found.loss,
            "accuracy": found.head.accuracy(contexts), "ceiling": bayes_ceiling(found.head.encoders, contexts),
            "dot_ceiling": dot_product_ceiling(task, contexts),
        })  # fmt: skip
    asked = {"grids": grids, "ranks": list(ranks), "seeds": seeds, "lr": lr}
    diverged = pick(rows, stopped="diverged")
    model_steps = sum(row["steps"] for row in rows)
    result = Result(
        experiment="toy/retrieval",
        answer=f"{len(rows)} heads, {model_steps:,} model-steps in {seconds:.0f} s of training"
        + (f"; {len(diverged)} diverged." if diverged else "; none diverged."),
        tables={"heads": rows},
        seconds=seconds,
        provenance=provenance(**asked, recipe=recipe.about(), device=device, as_written=as_written),
    )
    show(result)
    result.write(folder, files=draw_heads(result, trained))
    return result


def _cells(
    grids: str | None,
    ranks: tuple[int, ...],
    variant: Variant,
    d_head: int,
    seeds: int,
    scales: dict[str, Any],
) -> list[HeadCell]:
    if grids is None:
        return [
            HeadCell(Retrieval(ranks, variant, **scales), d_head, seed) for seed in range(seeds)
        ]
    if grids == "all":
        return all_grids(seeds, **scales)
    name, _, width = grids.partition("-")
    if name not in ("discrete", "continuous") or width not in {str(d) for d in GRIDS}:
        known = [f"{v}-{d}" for v in ("discrete", "continuous") for d in GRIDS]
        raise BadInput(f"there is no grid {grids!r}: take all, or one of {', '.join(known)}.")
    return [cell for seed in range(seeds) for cell in grid(name, int(width), seed=seed, **scales)]  # type: ignore[arg-type]
