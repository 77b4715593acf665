"""Trained toys of superposition on disk: what is there is loaded, the rest is trained.

A toy's file holds its weights at every checkpoint of its training, the first before the first step:
dynamics and untrained controls come from the same file. Its name holds a hash of everything that
made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.results.folder import read_tensors, write_tensors
from qkscope.seeds import derived_seed
from qkscope_papers.fleet import short_hash, train_missing
from qkscope_papers.franco2026.toy.stack import SuperpositionStack, ToyCell
from qkscope_papers.franco2026.toy.superposition import Toy
from qkscope_papers.trainer import Outcome, Trainer

_WEIGHTS = ("W", "b", "W_Q", "W_K")


@dataclass(frozen=True)
class ToyRun:
    """A toy at every checkpoint, the cell it was trained for, and how training ended."""

    cell: ToyCell
    steps: list[int]
    weights: dict[str, Float[Tensor, " checks *s"]]
    reason: str
    loss: float

    @property
    def toy(self) -> Toy:
        """The toy after training."""
        return self.at(-1)

    def at(self, check: int) -> Toy:
        """The toy at one of its checkpoints; 0 is before training."""
        W, b, W_Q, W_K = (self.weights[name][check] for name in _WEIGHTS)
        return Toy(W, b, W_Q, W_K, self.cell.task)


def train_toys(
    cells: Sequence[ToyCell], folder: str | Path, *, device: str = "cpu", workers: int | None = None
) -> list[ToyRun]:
    """Toys for these cells, in their order; interrupted training goes on where its last checkpoint
    stands.
    """
    folder = Path(folder)
    paths = {cell: folder / f"{_slug(cell)}.safetensors" for cell in cells}

    def trainers(missing: list[ToyCell]) -> list[Trainer]:
        return [
            _trainer(SuperpositionStack(group, device=device), folder) for group in stacks(missing)
        ]

    def keep(trainer: Trainer, outcome: Outcome) -> None:
        task = trainer.task
        history = outcome.history
        assert isinstance(task, SuperpositionStack)
        assert history is not None
        checks = range(len(outcome.curve_steps))
        along = [
            task.toys({name: value[check] for name, value in history.items()}) for check in checks
        ]
        for i, cell in enumerate(task.cells):
            weights = {
                name: torch.stack([getattr(toys[i], name).float() for toys in along])
                for name in _WEIGHTS
            }
            ended = {
                "steps": outcome.curve_steps,
                "reason": outcome.reasons[i],
                "loss": outcome.final_loss[i],
            }
            write_tensors(
                paths[cell],
                "superposition toy",
                weights,
                {"about": {"cell": cell_to_json(cell), **ended}},
            )

    train_missing(paths, trainers, keep, workers)
    return [_read(cell, paths[cell]) for cell in cells]


def stacks(cells: Sequence[ToyCell]) -> list[list[ToyCell]]:
    """Cells that train side by side: one shape, length and seed, and so one stream of tokens."""
    ordered = sorted(cells, key=lambda cell: (cell.stack_key(), _slug(cell)))
    return [list(group) for _, group in groupby(ordered, ToyCell.stack_key)]


def cell_to_json(cell: ToyCell) -> dict[str, Any]:
    """As JSON would have it."""
    return {**vars(cell), "task": cell.task.to_json()}


def _trainer(task: SuperpositionStack, folder: Path) -> Trainer:
    first = task.cells[0]
    name = short_hash(
        [task.about(), cell_to_json(first), [cell.lr for cell in task.cells], task.device.type]
    )
    rates = [cell.lr for cell in task.cells]
    seed = derived_seed(first.seed, 24)
    checkpoint = folder / f"training-{name}.safetensors"
    return Trainer(task, rates, first.recipe(), seed=seed, checkpoint=checkpoint, keep_history=True)


def _read(cell: ToyCell, path: Path) -> ToyRun:
    weights, manifest = read_tensors(path, "superposition toy")
    about = manifest["about"]
    return ToyRun(cell, about["steps"], weights, about["reason"], about["loss"])


def _slug(cell: ToyCell) -> str:
    t = cell.task
    return f"n{t.n}-d{t.d}-h{t.d_head}-c{t.context}-s{cell.seed}-{short_hash(cell_to_json(cell))}"
