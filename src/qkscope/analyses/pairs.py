"""Which keys change places: a right key of every held-out row, the one it is swapped with, and two more for a sham.

They are drawn once for every condition and every verb that swaps, each by the address of its prompt: the same units and
seed give the same, in whatever batches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from qkscope.analyses.prompts import batches_of, clusters_of
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.maths.swap import draw_targets
from qkscope.tasks.task import ANSWER, ASKED, Unit

Targets = Callable[[Example], int] | Sequence[int]
"""What `swap` is told of the keys to swap with: a function of an example, or a key of each prompt."""


@dataclass(frozen=True)
class Pairs:
    """The keys that change places: a row for each query of each held-out prompt, in the order in which batches run."""

    batches: list[list[int]]
    examples: list[Example]  # of each row
    unit: list[int]
    orig: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    others: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None  # two keys for the sham swap; None where there are none
    cluster: Int[Tensor, " n"]  # rows that ask for the same word, or are of the same unit: resampled together

    def rows_of(self, units: Sequence[int]) -> Int[Tensor, " m"]:
        """The rows of some units."""
        known: dict[int, list[int]] = {}
        for row, unit in enumerate(self.unit):
            known.setdefault(unit, []).append(row)
        return torch.tensor([row for unit in units for row in known[unit]])

    def one_cluster(self) -> str:
        """What to say where there is nothing to resample."""
        alone = len(self.cluster.unique()) < 2
        return " All its prompts are one or ask for one word: there are no intervals." if alone else ""


def draw_pairs(units: Sequence[Unit], batch_size: int = 32, seed: int = 0, targets: Targets | None = None) -> Pairs:
    """A right key and a wrong one of every row, uniformly drawn once, for every condition and every verb."""
    check_answers(units)
    batches = batches_of(units, batch_size)
    listed = [
        (i, m)
        for batch in batches
        for i in batch
        for m, example in enumerate(units[i])
        for _ in example.queries or (0,)
    ]
    examples = [units[i][m] for i, m in listed]
    labels = torch.zeros(len(listed), max(len(example.keys) for example in examples), dtype=torch.long)
    for row, example in enumerate(examples):
        labels[row, : len(example.keys)] = torch.tensor([key.label(ANSWER) for key in example.keys])
    unit, member = torch.tensor(listed).unbind(1)

    def draw(what: str, beside: Tensor, allowed: Tensor) -> Tensor:
        return draw_targets(beside, allowed, derived_seed(seed, what), unit, member)

    orig = draw("right", torch.full((len(labels),), -1), labels > 0)
    target = draw("wrong", orig, labels < 0) if targets is None else _given_targets(units, listed, targets)
    others = _sham(draw, labels, orig, target)
    return Pairs(batches, examples, [i for i, _ in listed], orig, target, others, _clusters(units, listed))


def _given_targets(units: Sequence[Unit], listed: Sequence[tuple[int, int]], targets: Targets) -> Int[Tensor, " n"]:
    """The keys that were named, checked."""
    prompts = [(i, m) for i, unit in enumerate(units) for m in range(len(unit))]
    given = [targets(units[i][m]) for i, m in prompts] if callable(targets) else targets
    named = [operator.index(key) for key in given]
    if len(named) != len(prompts):
        raise BadInput(f"targets should name a key of each of {len(prompts)} prompts, but there are {len(named)}.")
    for (i, m), key in zip(prompts, named, strict=True):
        keys = units[i][m].keys
        if not 0 <= key < len(keys):
            raise BadInput(f"a target is the place of a key, from 0 to {len(keys) - 1}, but got {key!r}.")
        if keys[key].label(ANSWER) > 0:
            raise BadInput(f"a target is not a right key, but key {key} is one in {units[i][m].show(80)}.")
    of = dict(zip(prompts, named, strict=True))
    return torch.tensor([of[row] for row in listed])


def _sham(
    draw: Callable[[str, Tensor, Tensor], Tensor],
    labels: Int[Tensor, "n k"],
    orig: Int[Tensor, " n"],
    target: Int[Tensor, " n"],
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None:
    """Two keys whose swap should do nothing: two right ones (a filter list), or two wrong ones beside the target."""
    right = labels > 0
    if bool((right.sum(dim=1) > 1).all()):
        return orig, draw("sham", orig, right)
    free = (labels < 0) & (torch.arange(labels.shape[1]) != target[:, None])
    if not bool((free.sum(dim=1) > 1).all()):
        return None
    one = draw("sham", target, free)
    return one, draw("sham, the other", one, free)


def _clusters(units: Sequence[Unit], listed: Sequence[tuple[int, int]]) -> Int[Tensor, " n"]:
    """A number for each row, the same for rows that ask for the same word; for rows of one unit where none is marked.

    A task has a few dozen words and any number of prompts: resampling prompts alone would trust the words too much.
    """
    examples = [units[i][m] for i, m in listed]
    if all(ASKED in example.roles for example in examples):
        numbers: dict[str, int] = {}
        asked = [example.piece(example.roles[ASKED]) for example in examples]
        return torch.tensor([numbers.setdefault(word, len(numbers)) for word in asked])
    return clusters_of(units, torch.tensor([i for i, _ in listed]))


def check_answers(units: Sequence[Unit]) -> None:
    """Every example to be swapped needs a right key and a wrong one."""
    if not units or not all(units):
        raise BadInput("there are no examples, or a unit without one: give at least one prompt in each.")
    for unit in units:
        for example in unit:
            if not {1, -1} <= {key.label(ANSWER) for key in example.keys}:
                raise BadInput(
                    f"a swap needs keys labelled {ANSWER!r} 1 and -1 in every example, but this one has not both: "
                    f"{example.show(80)}."
                )
