"""A task's prompts through a model: what an analysis was made from, a fixed list of batches in
which a prompt and its copy stay together, and the rows of a contrast that each batch gives.

Contrasts that label the same prompts, put together: a prompt runs once and serves every contrast
that labels it. A contrast still sees its own units alone, with its own numbers: what is added up,
and what its nulls flip or deal, is what a pass over its own prompts would give (to rounding, as
batches are others).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput, Head, Scope
from qkscope.examples import Example, Key
from qkscope.model.capture_types import Capture
from qkscope.model.files import weights_part
from qkscope.model.inputs import FIRST_TOKEN, check_visible
from qkscope.model.spaces import Space
from qkscope.results.folder import sha256
from qkscope.results.result import provenance
from qkscope.texts.task import ASKED, Contrast, Task, Unit


def made_from(scope: Scope, task: Task, space: Space = "post_rope") -> dict[str, Any]:
    """What an analysis was made from, for manifests and for refusing to mix."""
    notes = [
        *task.notes,
        *([FIRST_TOKEN] if task.starts_with_key and not scope.encoder.adds_first else []),
    ]
    return {
        "model": scope.name, "revision": scope.revision, "weights": scope.weights_hash,
        "dtype": str(scope.model.dtype), "tokenizer": scope.tokenizer_hash, "task": task.name, "task_seed": task.seed,
        "asked": dict(task.asked), "space": space, **({"notes": notes} if notes else {}),
    }  # fmt: skip


def made_with(scope: Scope, **asked: Any) -> dict[str, Any]:
    """The fields of a result that say which model it is of, and what was asked of it."""
    asked = {"model": scope.name, "weights": scope.weights_hash, **asked}
    return {"model": scope.name, "provenance": provenance(**asked)}


def with_notes(answer: str, about: Mapping[str, Any]) -> str:
    """Append the task's caveats to an answer, if it has any."""
    return " ".join([answer, *about.get("notes", ())])


def check_same_model(about: Mapping[str, Any], scope: Scope, what: str) -> None:
    """Refuse to use with a model what says that it was made with another one, or with another
    tokenizer.
    """
    for part, here in (("weights", scope.weights_hash), ("tokenizer", scope.tokenizer_hash)):
        there = about.get(part, here)
        if there != here:
            same = part == "weights" and weights_part(str(there)) == weights_part(str(here))
            part = "settings (config.json, with the same weights)" if same else part
            raise BadInput(
                f"{what} was made with other {part} than {scope.name} has here: load the same model."
            )


class UnitBatch(NamedTuple):
    """Capture rows, and which unit and which of its prompts each row belongs to."""

    captured: Capture
    unit: Int[Tensor, " b"]
    member: Int[Tensor, " b"]


def batches_of(units: Sequence[Unit], batch_size: int) -> list[list[int]]:
    """The fixed list of batches: units sorted by length, about ``batch_size`` prompts in each."""
    batches = list[list[int]]()
    room = 0
    for i in sorted(range(len(units)), key=lambda i: (max(map(len, units[i])), i)):
        room -= len(units[i])
        if room < 0:
            batches.append([])
            room = batch_size - len(units[i])
        batches[-1].append(i)
    return batches


def units_hash(units: Sequence[Unit]) -> str:
    """Fingerprint of the examples: their text, marks and labels."""
    return sha256("".join(map(repr, units)))[:32]


def unit_runner(
    scope: Scope,
    units: Sequence[Unit],
    heads: Sequence[Head],
    *,
    asked: Sequence[int] | None = None,
    chat: bool = False,
    **how: Any,
) -> Callable[[list[int]], UnitBatch]:
    """What captures the units of one batch, by number; ``how`` as in `Scope.capture_inputs`.

    The heads whose columns are ``asked`` must see every named key.
    """
    looking = list(range(len(heads)) if asked is None else asked)

    def run(indices: list[int]) -> UnitBatch:
        members = [(i, m) for i in indices for m in range(len(units[i]))]
        encoded = scope.encode([units[i][m] for i, m in members], chat=chat)
        captured = scope.capture_inputs(encoded, heads=list(heads), **how)
        check_visible(encoded, [heads[i] for i in looking], captured.bias[:, looking])
        unit, member = torch.tensor(members, device=captured.example.device)[
            captured.example
        ].unbind(1)
        return UnitBatch(captured, unit, member)

    return run


def null_units(
    units: Sequence[Unit], contrast: Contrast
) -> Callable[[UnitBatch], Int[Tensor, " b"]]:
    """The number of the random unit of every row: equal for rows that are not independent of one
    another.

    A unit is what the contrast says (see `Contrast.unit`); copies of a prompt are one unit too.
    Across a prompt and its copy, each has the word that it asks for itself; elsewhere what is drawn
    together stays together. Where all prompts have the same word it cannot be what tells them
    apart, and the prompt is the unit.
    """
    words = [[_words(unit, contrast, member) for member in range(len(unit))] for unit in units]
    varied = len({own for row in words for own in row}) > 1
    texts = [tuple(repr(e.text if e.ids is None else e.ids) for e in unit) for unit in units]

    def hashed(unit: tuple[str, ...]) -> int:  # the same in every process
        digest = hashlib.blake2b(
            repr(unit).encode("utf-8", "backslashreplace"), digest_size=8
        ).digest()
        return int.from_bytes(digest, "big", signed=True)

    numbers = [
        [hashed(own if varied and own else text) for own in row]
        for row, text in zip(words, texts, strict=True)
    ]

    def number(batch: UnitBatch) -> Int[Tensor, " b"]:
        rows = zip(batch.unit.tolist(), batch.member.tolist(), strict=True)
        return torch.tensor([numbers[i][m] for i, m in rows], device=batch.unit.device)

    return number


def _words(unit: Unit, contrast: Contrast, member: int) -> tuple[str, ...]:
    """The words that tell the rows of one prompt apart; empty if the prompt itself does."""
    examples = [unit[member]] if contrast.across else unit
    if contrast.unit == "prompt":
        return ()
    if contrast.unit == "key":
        spans = [(e, key.span) for e in examples for key in e.keys if key.label(contrast.name) > 0]
    else:
        spans = [(e, e.roles[contrast.unit]) for e in examples if contrast.unit in e.roles]
    return tuple(sorted(str(example.piece(span)) for example, span in spans))


class ContrastRows(NamedTuple):
    """The rows of one contrast: queries, keys, labels of the keys (1, −1 or 0), number of the unit."""

    q: Float[Tensor, "b h d"]
    k: Float[Tensor, "b g k d"]
    labels: Int[Tensor, "b k"]
    unit: Int[Tensor, " b"]


def contrast_rows(batch: UnitBatch, contrast: Contrast) -> ContrastRows:
    """Give queries, keys, labels and units of one contrast.

    Across a prompt and its copy, each query meets its own + key (labelled +) and the copy's
    (labelled −).
    """
    captured = batch.captured
    labels = captured.labels.get(contrast.name, torch.zeros_like(captured.key_mask)).long()
    if not contrast.across:
        return ContrastRows(captured.q, captured.k, labels, batch.unit)
    right = labels > 0
    same_unit = batch.unit[:, None] == batch.unit
    partner = same_unit & (batch.member[:, None] != batch.member)
    if not bool(((right.sum(dim=1) == 1) & (partner.sum(dim=1) == 1)).all()):
        raise BadInput(
            f"contrast {contrast.name!r} compares a prompt with one copy: mark one + key in each."
        )
    rows = torch.arange(len(labels), device=labels.device)
    right_key = captured.k[rows, :, right.long().argmax(dim=1)]
    copy_key = right_key[partner.long().argmax(dim=1)]
    keys = torch.stack([right_key, copy_key], dim=2)
    signs = torch.tensor([[1, -1]], device=labels.device).expand(len(labels), 2)
    return ContrastRows(captured.q, keys, signs, batch.unit)


def cluster_of(unit: Unit, number: int) -> object:
    """Cluster of a unit: the one it names, or its number."""
    return ("unit", number) if unit[0].cluster == "" else unit[0].cluster


def words_of(units: Sequence[Unit]) -> list[str]:
    """The word that each unit asks for, or its cluster if none is marked: equal for prompts that
    ask alike.
    """
    if all(ASKED in unit[0].roles for unit in units):
        return [unit[0].piece(unit[0].roles[ASKED]) for unit in units]
    return [f"prompt {cluster_of(unit, i)}" for i, unit in enumerate(units)]


def clusters_of(units: Sequence[Unit], unit: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """A number for each row by its unit's cluster: copies of one prompt are resampled together."""
    numbers: dict[object, int] = {}
    return torch.tensor(
        [numbers.setdefault(cluster_of(own, i), len(numbers)) for i, own in enumerate(units)]
    )[unit]


Joint = dict[tuple[str, int], tuple[Example, dict[str, tuple[int, int]]]]
"""Prompts that run together, each once, with the labels of all contrasts; by contrast, each one's
unit and place there.
"""


def joined(units: Mapping[str, Sequence[Unit]]) -> list[Joint]:
    """The units of some contrasts, those that begin with the same prompt together; a prompt stands
    there once.

    Copies within a contrast stay as many as they are: the n-th copy meets the n-th of other
    contrasts.
    """
    joints = dict[tuple[str, int], Joint]()
    for name, drawn in units.items():
        often = Counter[str]()
        for number, unit in enumerate(drawn):
            texts = [
                repr((e.text, e.ids, e.queries, [key.span for key in e.keys])) for e in unit
            ]  # but for labels
            joint = joints.setdefault((texts[0], often[texts[0]]), {})
            often[texts[0]] += 1
            for member, (text, example) in enumerate(zip(texts, unit, strict=True)):
                copy = text, texts[:member].count(text)
                prompt, owners = joint.get(copy, (example, {}))
                both = zip(prompt.keys, example.keys, strict=True)
                keys = tuple(Key(a.span, {**a.labels, name: b.label(name)}) for a, b in both)
                joint[copy] = replace(prompt, keys=keys), {**owners, name: (number, member)}
    return list(joints.values())


def rows_of(batch: UnitBatch, joints: Sequence[Joint], contrast: str) -> UnitBatch | None:
    """The rows of a contrast's own prompts, numbered by its own units; None where the batch holds
    none.
    """
    rows = list(zip(batch.unit.tolist(), batch.member.tolist(), strict=True))
    owners = {
        row: list(joints[i].values())[place][1].get(contrast) for row, (i, place) in enumerate(rows)
    }
    where = {row: owner for row, owner in owners.items() if owner is not None}
    if not where:
        return None
    index = torch.tensor(list(where), device=batch.unit.device)
    own = torch.tensor(list(where.values()), device=batch.unit.device)
    return UnitBatch(batch.captured.of_rows(index), own[:, 0], own[:, 1])
