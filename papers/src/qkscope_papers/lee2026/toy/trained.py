"""Trained retrieval heads on disk: what is there is loaded, the rest is trained.

A head's file name holds a hash of everything that made it (task, width, seed, learning rate,
recipe), so a folder can serve many figures and never hands out a head trained in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from qkscope.results.folder import read_tensors
from qkscope.seeds import derived_seed
from qkscope_papers.fleet import short_hash, train_missing
from qkscope_papers.lee2026.toy.retrieval import VARIANTS, Retrieval, RetrievalHead, Variant
from qkscope_papers.lee2026.toy.stack import HeadCell, RetrievalStack
from qkscope_papers.trainer import Outcome, Recipe, Trainer

GRIDS: dict[int, tuple[int, ...]] = {
    8: (2, 3, 4, 5, 6),
    16: (4, 6, 8, 10, 12),
}  # d_head: ranks of either variable


@dataclass(frozen=True)
class HeadRun:
    """A head, the cell it was trained for, and how training ended."""

    cell: HeadCell
    head: RetrievalHead
    steps: int
    reason: str
    loss: float


def grid(
    variant: Variant, d_head: int, ranks: Sequence[int] | None = None, seed: int = 0, **task: Any
) -> list[HeadCell]:
    """The cells of one of the paper's grids: every pair of ranks."""
    values = GRIDS[d_head] if ranks is None else ranks
    return [
        HeadCell(Retrieval((a, b), variant, **task), d_head, seed) for a in values for b in values
    ]


def all_grids(seeds: int = 1, **task: Any) -> list[HeadCell]:
    """The paper's four grids, 100 cells for each seed."""
    return [
        cell
        for s in range(seeds)
        for v in VARIANTS
        for d_head in GRIDS
        for cell in grid(v, d_head, seed=s, **task)
    ]


def train_heads(
    cells: Sequence[HeadCell],
    folder: str | Path,
    *,
    lr: float = 1e-4,
    recipe: Recipe | None = None,
    device: str = "cpu",
    workers: int | None = None,
) -> list[HeadRun]:
    """Heads for these cells, in their order; interrupted training goes on where its last checkpoint
    stands.
    """
    folder = Path(folder)
    recipe = recipe or Recipe()
    hashes = {cell: short_hash([asdict(cell), lr, recipe.about()]) for cell in cells}
    paths = {cell: folder / f"{cell.slug}-{own}.safetensors" for cell, own in hashes.items()}

    def trainers(missing: list[HeadCell]) -> list[Trainer]:
        for cell in missing:
            cell.task.warn_if_crowded(cell.d_head)
        groups = _groups(missing, merge_widths=device != "cpu")
        return [
            _trainer(RetrievalStack(group, device=device), lr, recipe, folder) for group in groups
        ]

    def keep(trainer: Trainer, outcome: Outcome) -> None:
        task = trainer.task
        assert isinstance(task, RetrievalStack)
        for i, (cell, head) in enumerate(zip(task.cells, task.heads(outcome.params), strict=True)):
            ended = {
                "steps": outcome.stopped_at[i],
                "reason": outcome.reasons[i],
                "loss": outcome.final_loss[i],
            }
            head.save(paths[cell], **ended, lr=lr)

    train_missing(paths, trainers, keep, workers)
    return [_read(cell, paths[cell]) for cell in cells]


def _trainer(task: RetrievalStack, lr: float, recipe: Recipe, folder: Path) -> Trainer:
    seed = derived_seed(task.cells[0].seed, 7, VARIANTS.index(task.variant))
    name = short_hash([task.about(), lr, recipe.about(), task.device.type])
    checkpoint = folder / f"training-{name}.safetensors"
    # on a GPU a smaller stack has to be recorded again, which takes a while
    compact = 1.0 if task.device.type == "cpu" else 0.6
    return Trainer(task, lr, recipe, seed=seed, checkpoint=checkpoint, compact_below=compact)


def _groups(cells: Sequence[HeadCell], merge_widths: bool) -> list[list[HeadCell]]:
    """Cells that can share a stack: the same data; on CPU also the same width, as padding costs
    arithmetic there.
    """

    def key(cell: HeadCell) -> tuple[Any, ...]:
        task = cell.task
        shared = (cell.seed, task.variant, task.d, task.keys, task.payloads, len(task.ranks))
        return shared if merge_widths else (*shared, cell.d_head)

    return [list(group) for _, group in groupby(sorted(cells, key=lambda c: (key(c), c.slug)), key)]


def _read(cell: HeadCell, path: Path) -> HeadRun:
    head = RetrievalHead.load(path, encoders=cell.task.encoders(cell.seed))
    about = read_tensors(path, "retrieval head")[1]["about"]
    return HeadRun(cell, head, about["steps"], about["reason"], about["loss"])
