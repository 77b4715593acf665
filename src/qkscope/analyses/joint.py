"""Contrasts that label the same prompts, put together: a prompt runs once and serves every contrast that labels it.

The n-th units of a cluster, one of each contrast, make a *joint* unit; a prompt that several of them hold stands in it
once, with the labels of all. A contrast still sees its own units alone, with its own numbers: what is added up, and
what its nulls flip or deal, is what a pass over its own prompts would give (to rounding, as batches are others).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import overload

import torch

from qkscope.analyses.prompts import Batch, cluster_of
from qkscope.examples import Example, Key
from qkscope.tasks.task import WINDOW, LazyUnits, Unit

Units = Mapping[str, Sequence[Unit]]
"""The units of some contrasts, by name."""


@dataclass(frozen=True)
class Joint:
    """Prompts that run together, and what each contrast has of them.

    Parameters
    ----------
    prompts : each once, with the labels of all contrasts.
    members : by contrast, the number of its unit, and where the unit's prompts stand here.
    """

    prompts: Unit
    members: Mapping[str, tuple[int, tuple[int, ...]]]


class Prompts(Sequence[Unit]):
    """The prompts of joint units, which run as units do."""

    def __init__(self, joints: Sequence[Joint]) -> None:
        self._joints = joints

    def __len__(self) -> int:
        return len(self._joints)

    def __iter__(self) -> Iterator[Unit]:
        return (joint.prompts for joint in self._joints)

    @overload
    def __getitem__(self, i: int) -> Unit: ...
    @overload
    def __getitem__(self, i: slice) -> list[Unit]: ...
    def __getitem__(self, i: int | slice) -> Unit | list[Unit]:
        return [joint.prompts for joint in self._joints[i]] if isinstance(i, slice) else self._joints[i].prompts


def that_share(units: Units) -> list[list[str]]:
    """The contrasts in lists of those that share prompts, as far as their first window shows; others stand alone."""
    found: list[tuple[list[str], set[object]]] = []
    for name, own in units.items():
        prompts: set[object] = {(e.cluster, e.text, e.ids) for unit in islice(own, WINDOW) for e in unit}
        sharing = [group for group in found if group[1] & prompts]
        names = [other for group in sharing for other in group[0]]
        found = [group for group in found if group not in sharing]
        found.append(([*names, name], prompts.union(*(group[1] for group in sharing))))
    return [names for names, _ in found]


def joined(units: Units) -> Sequence[Joint]:
    """The joint units of contrasts, a window of each at a time."""

    def walk() -> Iterator[Joint]:
        drawn = {name: enumerate(own) for name, own in units.items()}
        for _ in range(0, max(map(len, units.values())), WINDOW):
            yield from _window({name: list(islice(own, WINDOW)) for name, own in drawn.items()})

    if max(map(len, units.values())) <= WINDOW:
        return list(walk())
    return LazyUnits(walk, sum(1 for _ in walk()))


def _window(units: Mapping[str, list[tuple[int, Unit]]]) -> Iterator[Joint]:
    """The n-th unit of a cluster meets the n-th of other contrasts: copies of a prompt stay as many as they are."""
    found: dict[tuple[object, int], list[tuple[str, int, Unit]]] = {}
    for name, own in units.items():
        often = Counter[object]()
        for number, unit in own:
            cluster = cluster_of(unit, number)
            found.setdefault((cluster, often[cluster]), []).append((name, number, unit))
            often[cluster] += 1
    for together in found.values():
        prompts = list[Example]()
        members = {name: (number, _places(unit, prompts)) for name, number, unit in together}
        yield Joint(tuple(prompts), members)


def _places(unit: Unit, prompts: list[Example]) -> tuple[int, ...]:
    """Where the prompts of a unit stand among those of other contrasts; new ones are added."""
    others, places = len(prompts), list[int]()
    for example in unit:
        for place, there in enumerate(prompts[:others]):
            both = None if place in places else _with_labels(there, example)
            if both is not None:
                prompts[place] = both
                places.append(place)
                break
        else:
            places.append(len(prompts))
            prompts.append(example)
    return tuple(places)


def _with_labels(one: Example, other: Example) -> Example | None:
    """The prompt with the labels of both, where they are one prompt with the same marks."""
    if (one.text, one.ids) != (other.text, other.ids) or len(one.keys) != len(other.keys):
        return None
    pairs = list(zip(one.keys, other.keys, strict=True))
    if any(a.span != b.span or {**a.labels, **b.labels} != {**b.labels, **a.labels} for a, b in pairs):
        return None
    both = replace(one, keys=tuple(Key(a.span, {**a.labels, **b.labels}) for a, b in pairs))
    return both if both == replace(other, keys=both.keys) else None


def rows_of(batch: Batch, joints: Sequence[Joint], contrast: str) -> Batch | None:
    """The rows of a contrast's own prompts, numbered by its own units; None where the batch holds none."""
    rows, where = list[int](), list[tuple[int, int]]()
    for row, (joint, prompt) in enumerate(zip(batch.unit.tolist(), batch.member.tolist(), strict=True)):
        number, places = joints[joint].members.get(contrast, (0, ()))
        if prompt in places:
            rows.append(row)
            where.append((number, places.index(prompt)))
    if not rows:
        return None
    device = batch.unit.device
    own = torch.tensor(where, device=device)
    return Batch(batch.captured.of_rows(torch.tensor(rows, device=device)), own[:, 0], own[:, 1])
