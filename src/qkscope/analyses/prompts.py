"""A task's prompts through a model: what an analysis was made from, a fixed list of batches in which a prompt and its
copy stay together, and the rows of a contrast that each batch gives.

Contrasts that label the same prompts, put together: a prompt runs once and serves every contrast that labels it.

The n-th units of a cluster, one of each contrast, make a *joint* unit; a prompt that several of them hold stands in it
once, with the labels of all. A contrast still sees its own units alone, with its own numbers: what is added up, and
what its nulls flip or deal, is what a pass over its own prompts would give (to rounding, as batches are others).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.capture.files import weights_part
from qkscope.capture.inputs import check_visible, notes_of
from qkscope.capture.pick import Capture
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.examples import Example, Key
from qkscope.heads import Head
from qkscope.runs.result import provenance
from qkscope.runs.work import stream
from qkscope.tasks.task import ASKED, Contrast, Task, Unit


def made_from(scope: Scope, task: Task, space: Space = "post_rope") -> dict[str, Any]:
    """What an analysis was made from, for manifests and for refusing to mix."""
    notes = notes_of(scope, task)
    return {
        "model": scope.name, "revision": scope.revision, "weights": scope.weights_hash,
        "dtype": str(scope.model.dtype), "tokenizer": scope.tokenizer_hash, "task": task.name, "task_seed": task.seed,
        "asked": dict(task.asked), "space": space, **({"notes": notes} if notes else {}),
    }  # fmt: skip


def made_with(scope: Scope, **asked: Any) -> dict[str, Any]:
    """The fields of a result that say which model it is of, and what was asked of it."""
    return {"model": scope.name, "provenance": provenance(model=scope.name, weights=scope.weights_hash, **asked)}


def with_notes(answer: str, about: Mapping[str, Any]) -> str:
    """Append the task's caveats to an answer, if it has any."""
    return " ".join([answer, *about.get("notes", ())])


def check_same_model(about: Mapping[str, Any], scope: Scope, what: str) -> None:
    """Refuse to use with a model what says that it was made with another one, or with another tokenizer."""
    for part, here in (("weights", scope.weights_hash), ("tokenizer", scope.tokenizer_hash)):
        there = about.get(part, here)
        if there != here:
            same = part == "weights" and weights_part(str(there)) == weights_part(str(here))
            part = "settings (config.json, with the same weights)" if same else part
            raise BadInput(f"{what} was made with other {part} than {scope.name} has here: load the same model.")


@dataclass(frozen=True)
class Options:
    """How prompts pass through a model, and what is drawn beside them."""

    space: Space = "post_rope"
    batch_size: int = 32
    chat: bool = False
    replicates: int = 199
    seed: int = 0
    progress: bool | None = None


@dataclass(frozen=True)
class Batch:
    """Capture rows, and which unit and which of its prompts each row belongs to."""

    captured: Capture
    unit: Int[Tensor, " b"]
    member: Int[Tensor, " b"]


def batches_of(units: Sequence[Unit], batch_size: int) -> list[list[int]]:
    """The fixed list of batches: units sorted by length, about ``batch_size`` prompts in each."""
    lengths = [max(len(example) for example in unit) for unit in units]
    step = max(batch_size // max(map(len, units), default=1), 1)
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    return [order[start : start + step] for start in range(0, len(order), step)]


def units_hash(units: Sequence[Unit]) -> str:
    """Fingerprint of the examples: their text, marks and labels."""
    digest = hashlib.sha256()
    for unit in units:
        digest.update(repr(unit).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:32]


def capture_units(
    scope: Scope,
    units: Sequence[Unit],
    heads: Sequence[Head],
    batch_size: int = 32,
    chat: bool = False,
    rest: bool = True,
) -> Iterator[Batch]:
    """Stream the units batch by batch; one that does not fit into memory comes in parts, each of whole units."""
    run = unit_runner(scope, units, heads, space="post_rope", chat=chat, rest=rest)
    return stream(batches_of(units, batch_size), run)


def unit_runner(
    scope: Scope, units: Sequence[Unit], heads: Sequence[Head], *, space: Space, chat: bool, rest: bool = True
) -> Callable[[list[int]], Batch]:
    """What captures the units of one batch, by number."""

    def run(indices: list[int]) -> Batch:
        members = [(i, m) for i in indices for m in range(len(units[i]))]
        encoded = scope.encode([units[i][m] for i, m in members], chat=chat)
        captured = scope.capture_inputs(encoded, heads=list(heads), space=space, rest=rest)
        check_visible(encoded, captured.heads, captured.bias)
        where = torch.tensor(members, device=captured.example.device)[captured.example]
        return Batch(captured, where[:, 0], where[:, 1])

    return run


def null_units(units: Sequence[Unit], contrast: Contrast) -> Callable[[Batch], Int[Tensor, " b"]]:
    """The number of the random unit of every row: equal for rows that are not independent of one another.

    A unit is what the contrast says (see `Contrast.unit`); copies of a prompt are one unit too. Across a prompt and its
    copy, each has the word that it asks for itself; elsewhere what is drawn together stays together. Where all prompts
    have the same word it cannot be what tells them apart, and the prompt is the unit.
    """
    names = (_named(unit, contrast, member) for unit in units for member in range(len(unit)))
    first = next(names, None)
    varied = any(name != first for name in names)

    def number(batch: Batch) -> Int[Tensor, " b"]:
        rows = list(zip(batch.unit.tolist(), batch.member.tolist(), strict=True))
        known = {}
        for i, m in set(rows):
            name = _named(units[i], contrast, m) if varied else None
            known[i, m] = _hash(name if name is not None else tuple(_text(example) for example in units[i]))
        return torch.tensor([known[row] for row in rows], device=batch.unit.device)

    return number


def _named(unit: Unit, contrast: Contrast, member: int) -> tuple[str, ...] | None:
    """What a row of this prompt is told apart by; nothing where its prompt is."""
    if contrast.unit == "prompt":
        return None
    own = [unit[member]] if contrast.across else list(unit)
    if contrast.unit == "key":
        spans = [(e, key.span) for e in own for key in e.keys if key.label(contrast.name) > 0]
    else:
        spans = [(e, e.roles[contrast.unit]) for e in own if contrast.unit in e.roles]
    return tuple(sorted(str(example.piece(span)) for example, span in spans)) or None


def _text(example: Example) -> str:
    return repr(example.text if example.ids is None else example.ids)


def _hash(name: tuple[str, ...]) -> int:
    """A number for a unit, the same in every process."""
    digest = hashlib.blake2b(repr(name).encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


Rows = tuple[Float[Tensor, "b h d"], Float[Tensor, "b g k d"], Int[Tensor, "b k"], Int[Tensor, " b"]]


def whole_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of a batch that came in parts: some may have fewer slots for keys, filled up with what is ignored."""
    slots = max(labels.shape[1] for _, _, labels, _ in parts)
    filled = [
        (q, pad(k, (0, 0, 0, slots - k.shape[2])), pad(labels, (0, slots - labels.shape[1])), prompts)
        for q, k, labels, prompts in parts
    ]
    q, k, labels, prompts = (torch.cat(column) for column in zip(*filled, strict=True))
    return q, k, labels, prompts


def contrast_rows(batch: Batch, contrast: Contrast) -> Rows:
    """Queries, keys, labels and units of one contrast.

    Across a prompt and its copy, each query meets its own + key (labelled +) and the copy's (labelled −).
    """
    captured = batch.captured
    if contrast.name not in captured.labels:
        raise BadInput(f"no key of this batch has a label for {contrast.name!r}.")
    labels = captured.labels[contrast.name].long()
    if not contrast.across:
        return captured.q, captured.k, labels, batch.unit
    if not bool(((labels > 0).sum(dim=1) == 1).all()):
        raise BadInput(f"contrast {contrast.name!r} compares a prompt with its copy: mark one + key in each.")
    rows = torch.arange(len(labels), device=labels.device)
    partner = (batch.unit[:, None] == batch.unit) & (batch.member[:, None] != batch.member)
    if not bool((partner.sum(dim=1) == 1).all()):
        raise BadInput(f"contrast {contrast.name!r} needs a prompt and one copy in each unit.")
    right = captured.k[rows, :, (labels > 0).long().argmax(dim=1)]
    pair = torch.stack([right, right[partner.long().argmax(dim=1)]], dim=2)
    return captured.q, pair, torch.tensor([[1, -1]], device=labels.device).expand(len(labels), 2), batch.unit


def cluster_of(unit: Unit, number: int) -> object:
    """What tells the clusters of units apart: their own word for it, or else their number."""
    return ("unit", number) if unit[0].cluster == "" else unit[0].cluster


def words_of(units: Sequence[Unit]) -> list[str]:
    """What prompts share that ask alike: the word each unit asks for, or its cluster where none is marked."""
    asked = [unit[0].roles.get(ASKED) for unit in units]
    if any(span is None for span in asked):
        return [f"prompt {cluster_of(unit, i)}" for i, unit in enumerate(units)]
    return [unit[0].piece(span) for unit, span in zip(units, asked, strict=True) if span is not None]


def clusters_of(units: Sequence[Unit], unit: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """A number for each row by its unit's cluster: copies of one prompt are resampled together."""
    numbers: dict[object, int] = {}
    own = {i: numbers.setdefault(cluster_of(units[i], i), len(numbers)) for i in unit.unique().tolist()}
    return torch.tensor([own[i] for i in unit.tolist()])


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


def that_share(units: Units) -> list[list[str]]:
    """The contrasts in lists of those that share prompts; others stand alone."""
    groups: list[tuple[list[str], set[object]]] = []
    for name, drawn in units.items():
        prompts: set[object] = {(e.cluster, e.text, e.ids) for unit in drawn for e in unit}
        sharing = [group for group in groups if group[1] & prompts]
        names = [other for group in sharing for other in group[0]]
        groups = [group for group in groups if group not in sharing]
        groups.append(([*names, name], prompts.union(*(group[1] for group in sharing))))
    return [names for names, _ in groups]


def joined(units: Units) -> list[Joint]:
    """The n-th unit of a cluster meets the n-th of other contrasts: copies of a prompt stay as many as they are."""
    meeting: dict[tuple[object, int], list[tuple[str, int, Unit]]] = {}
    for name, drawn in units.items():
        often = Counter[object]()
        for number, unit in enumerate(drawn):
            cluster = cluster_of(unit, number)
            meeting.setdefault((cluster, often[cluster]), []).append((name, number, unit))
            often[cluster] += 1
    joints = []
    for together in meeting.values():
        prompts = list[Example]()
        members = {name: (number, _places(unit, prompts)) for name, number, unit in together}
        joints.append(Joint(tuple(prompts), members))
    return joints


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
