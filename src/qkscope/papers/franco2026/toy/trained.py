"""Trained toys of superposition on disk: ask for cells, get toys; what is there is loaded, what is not is trained.

A toy's file holds its weights at every checkpoint of its training, the first before the first step: dynamics and
untrained controls come from the same file. Its name holds a hash of everything that made it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.maths.draws import derived_seed
from qkscope.papers.fleet import train_all
from qkscope.papers.franco2026.toy.stack import StackedSuperposition, ToyCell
from qkscope.papers.franco2026.toy.superposition import Toy
from qkscope.papers.trainer import Trainer
from qkscope.runs.folder import only_writer
from qkscope.runs.store import read_tensors, write_tensors

_WEIGHTS = ("W", "b", "W_Q", "W_K")


@dataclass(frozen=True)
class TrainedToy:
    """A toy at every checkpoint, the cell it was trained for, and how training ended."""

    cell: ToyCell
    steps: list[int]
    weights: dict[str, Float[Tensor, "checks *s"]]
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
) -> list[TrainedToy]:
    """Toys for these cells, in their order; interrupted training goes on where its last checkpoint stands."""
    folder = Path(folder)
    paths = {cell: folder / f"{_slug(cell)}.safetensors" for cell in cells}
    if any(not path.exists() for path in paths.values()):
        with only_writer(folder):
            _train_missing(paths, folder, device, workers)
    return [_read(cell, paths[cell]) for cell in cells]


def _train_missing(paths: Mapping[ToyCell, Path], folder: Path, device: str, workers: int | None) -> None:
    missing = [cell for cell in paths if not paths[cell].exists()]
    tasks = [StackedSuperposition(group, device=device) for group in stacks(missing)]
    trainers = [_trainer(task, folder) for task in tasks]
    for task, trainer, trained in zip(tasks, trainers, train_all(trainers, workers), strict=True):
        assert trained.history is not None
        along = [
            task.toys({name: value[check] for name, value in trained.history.items()})
            for check in range(len(trained.curve_steps))
        ]
        for i, cell in enumerate(task.cells):
            weights = {name: torch.stack([getattr(toys[i], name).float() for toys in along]) for name in _WEIGHTS}
            about = {"cell": cell_to_json(cell), "steps": trained.curve_steps, "reason": trained.reasons[i],
                     "loss": trained.final_loss[i]}  # fmt: skip
            write_tensors(paths[cell], "superposition toy", weights, {"about": about})
        assert trainer.checkpoint is not None
        trainer.checkpoint.unlink(missing_ok=True)


def stacks(cells: Sequence[ToyCell]) -> list[list[ToyCell]]:
    """Cells that train side by side: one shape, one length, one seed and so one stream of tokens."""
    ordered = sorted(cells, key=lambda cell: (cell.stack_key(), _slug(cell)))
    return [list(group) for _, group in groupby(ordered, ToyCell.stack_key)]


def cell_to_json(cell: ToyCell) -> dict[str, Any]:
    """As JSON would have it."""
    return {**vars(cell), "task": cell.task.to_json()}


def _trainer(task: StackedSuperposition, folder: Path) -> Trainer:
    first = task.cells[0]
    name = _hash([task.about(), cell_to_json(first), [cell.lr for cell in task.cells], task.device.type])
    rates, seed = [cell.lr for cell in task.cells], derived_seed(first.seed, 24)
    checkpoint = folder / f"training-{name}.safetensors"
    return Trainer(task, rates, first.recipe(), seed=seed, checkpoint=checkpoint, keep_history=True)


def _read(cell: ToyCell, path: Path) -> TrainedToy:
    weights, manifest = read_tensors(path, "superposition toy")
    about = manifest["about"]
    return TrainedToy(cell, about["steps"], weights, about["reason"], about["loss"])


def _slug(cell: ToyCell) -> str:
    t = cell.task
    return f"n{t.n}-d{t.d}-h{t.d_head}-c{t.context}-s{cell.seed}-{_hash(cell_to_json(cell))}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]
