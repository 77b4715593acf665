"""A task's prompts through a model, in batches, and the rows of a contrast that each batch gives.

The list of batches is fixed; a prompt and its copy stay together. Contrasts that label the same
prompts run together: a prompt runs once and serves every contrast
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

from qkscope import BadInput, Scope
from qkscope.examples import Example, Key
from qkscope.heads import Head
from qkscope.model.capture_types import Capture
from qkscope.model.files import weights_part
from qkscope.model.inputs import FIRST_TOKEN, check_visible
from qkscope.model.spaces import Space
from qkscope.results.folder import sha256
from qkscope.results.result import provenance
from qkscope.texts.task import ASKED, Contrast, Task, Unit


def made_from(scope: Scope, task: Task, space: Space = "post_rope") -> dict[str, Any]:
    """Facts that an analysis was made from, for manifests and for refusing to mix."""
    notes = list(task.notes)
    if task.starts_with_key and not scope.encoder.adds_first:
        notes.append(FIRST_TOKEN)
    about: dict[str, Any] = {
        "model": scope.name,
        "revision": scope.revision,
        "weights": scope.weights_hash,
        "dtype": str(scope.model.dtype),
        "tokenizer": scope.tokenizer_hash,
        "task": task.name,
        "task_seed": task.seed,
        "asked": dict(task.asked),
        "space": space,
    }
    if notes:
        about["notes"] = notes
    return about


def made_with(scope: Scope, **asked: Any) -> dict[str, Any]:
    """The fields of a result that say which model it is of, and what was asked of it."""
    asked = {"model": scope.name, "weights": scope.weights_hash, **asked}
    return {"model": scope.name, "provenance": provenance(**asked)}


def with_notes(answer: str, about: Mapping[str, Any]) -> str:
    """Append the task's caveats to an answer, if it has any."""
    return " ".join([answer, *about.get("notes", ())])


def check_same_model(about: Mapping[str, Any], scope: Scope, what: str) -> None:
    """Refuse what was made with another model, or with another tokenizer."""
    weights = about.get("weights", scope.weights_hash)
    if weights != scope.weights_hash:
        copy = weights_part(str(weights)) == weights_part(str(scope.weights_hash))
        part = "settings (config.json, with the same weights)" if copy else "weights"
    elif about.get("tokenizer", scope.tokenizer_hash) != scope.tokenizer_hash:
        part = "tokenizer"
    else:
        return
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
    longest = [max(map(len, unit)) for unit in units]
    for i in sorted(range(len(units)), key=longest.__getitem__):
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
    """Make the function that captures the units of one batch, by number.

    ``how`` is as in `Scope.capture_inputs`. The heads whose columns are ``asked`` must see every
    named key.
    """
    columns = list(range(len(heads)) if asked is None else asked)
    looking = [heads[column] for column in columns]

    def run(indices: list[int]) -> UnitBatch:
        examples: list[Example] = []
        members: list[tuple[int, int]] = []
        for i in indices:
            examples += units[i]
            members += [(i, m) for m in range(len(units[i]))]
        encoded = scope.encode(examples, chat=chat)
        captured = scope.capture_inputs(encoded, heads=list(heads), **how)
        check_visible(encoded, looking, captured.bias[:, columns])
        of_example = torch.tensor(members, device=captured.example.device)
        unit, member = of_example[captured.example].unbind(1)
        return UnitBatch(captured, unit, member)

    return run


def null_units(
    units: Sequence[Unit], contrast: Contrast
) -> Callable[[UnitBatch], Int[Tensor, " b"]]:
    """Make the function that numbers the random unit of every row.

    Rows that are not independent of one another have one number. A unit is what the contrast says
    (see `Contrast.unit`); copies of a prompt are one unit too. Across a prompt and its copy, each
    has the word that it asks for itself; elsewhere what is drawn together stays together. Where all
    prompts have the same word it cannot be what tells them apart, and the prompt is the unit.
    """
    words = []
    for unit in units:
        members = range(len(unit))
        words.append([_words(unit, contrast, member) for member in members])
    varied = len({of_member for of_unit in words for of_member in of_unit}) > 1
    numbers = []
    for unit, of_unit in zip(units, words, strict=True):
        texts = tuple(_raw_text(example) for example in unit)
        of_members = [of_member if varied and of_member else texts for of_member in of_unit]
        numbers.append([_hashed(address) for address in of_members])

    def number(batch: UnitBatch) -> Int[Tensor, " b"]:
        rows = zip(batch.unit.tolist(), batch.member.tolist(), strict=True)
        of_rows = [numbers[i][m] for i, m in rows]
        return torch.tensor(of_rows, device=batch.unit.device)

    return number


def _raw_text(example: Example) -> str:
    """The text of an example as it was given, or its tokens."""
    if example.ids is None:
        return repr(example.text)
    return repr(example.ids)


def _hashed(texts: tuple[str, ...]) -> int:
    """Hash of some texts, the same in every process."""
    text = repr(texts).encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


def _words(unit: Unit, contrast: Contrast, member: int) -> tuple[str, ...]:
    """The words that tell the rows of one prompt apart; empty if the prompt itself does."""
    if contrast.unit == "prompt":
        return ()
    words = []
    for example in [unit[member]] if contrast.across else unit:
        if contrast.unit == "key":
            spans = [key.span for key in example.keys if key.label(contrast.name) > 0]
        elif contrast.unit in example.roles:
            spans = [example.roles[contrast.unit]]
        else:
            spans = []
        words += [str(example.piece(span)) for span in spans]
    return tuple(sorted(words))


class ContrastRows(NamedTuple):
    """The rows of one contrast: queries, keys, labels of keys (1, −1 or 0), number of the unit."""

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
    has_one_key = right.sum(dim=1) == 1
    has_one_copy = partner.sum(dim=1) == 1
    if not bool((has_one_key & has_one_copy).all()):
        raise BadInput(
            f"contrast {contrast.name!r} compares a prompt with one copy: mark one + key in each."
        )
    rows = torch.arange(len(labels), device=labels.device)
    right_key = captured.k[rows, :, right.long().argmax(dim=1)]
    copy_key = right_key[partner.long().argmax(dim=1)]
    keys = torch.stack([right_key, copy_key], dim=2)
    own_and_copy = torch.tensor([[1, -1]], device=labels.device)
    signs = own_and_copy.expand(len(labels), 2)
    return ContrastRows(captured.q, keys, signs, batch.unit)


def cluster_of(unit: Unit, number: int) -> object:
    """Cluster of a unit: the one it names, or its number."""
    named = unit[0].cluster
    if named == "":
        return ("unit", number)
    return named


def asked_words(units: Sequence[Unit]) -> list[str]:
    """The word that each unit asks for, or its cluster if none is marked.

    They are equal for prompts that ask alike.
    """
    prompts = [unit[0] for unit in units]
    if all(ASKED in prompt.roles for prompt in prompts):
        return [prompt.piece(prompt.roles[ASKED]) for prompt in prompts]
    return [f"prompt {cluster_of(unit, i)}" for i, unit in enumerate(units)]


def clusters_of(units: Sequence[Unit], unit: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """A number for each row by its unit's cluster: copies of one prompt are resampled together."""
    numbers: dict[object, int] = {}
    clusters = []
    for i, examples in enumerate(units):
        clusters.append(numbers.setdefault(cluster_of(examples, i), len(numbers)))
    return torch.tensor(clusters)[unit]


# ---------------------------------------------------------------------- contrasts that run together


class JointPrompt(NamedTuple):
    """A prompt with the labels of several contrasts, and its unit and place there in each."""

    prompt: Example
    owners: dict[str, tuple[int, int]]


Joint = dict[tuple[str, int], JointPrompt]
"""Prompts that run together, each once, by their text and how many copies come before."""


def joined(units: Mapping[str, Sequence[Unit]]) -> list[Joint]:
    """Put the units of some contrasts together that begin with the same prompt.

    A prompt stands there once. Copies within a contrast stay as many as they are: the n-th copy
    meets the n-th of other contrasts.
    """
    joints = dict[tuple[str, int], Joint]()
    for name, drawn in units.items():
        often = Counter[str]()
        for number, unit in enumerate(drawn):
            texts = [_text_and_marks(example) for example in unit]
            first = texts[0]
            joint = joints.setdefault((first, often[first]), {})
            often[first] += 1
            for member, (text, example) in enumerate(zip(texts, unit, strict=True)):
                copy = text, texts[:member].count(text)
                known = joint.get(copy, JointPrompt(example, {}))
                prompt = _with_labels(known.prompt, example, name)
                joint[copy] = JointPrompt(prompt, {**known.owners, name: (number, member)})
    return list(joints.values())


def _text_and_marks(example: Example) -> str:
    """Key that tells prompts apart: all but their labels."""
    spans = [key.span for key in example.keys]
    return repr((example.text, example.ids, example.queries, spans))


def _with_labels(prompt: Example, example: Example, contrast: str) -> Example:
    """Give the keys of a prompt the labels that an example of a contrast has."""
    keys = []
    for key, labelled in zip(prompt.keys, example.keys, strict=True):
        labels = {**key.labels, contrast: labelled.label(contrast)}
        keys.append(Key(key.span, labels))
    return replace(prompt, keys=tuple(keys))


def rows_of(batch: UnitBatch, joints: Sequence[Joint], contrast: str) -> UnitBatch | None:
    """The rows of a contrast's own prompts, numbered by its own units; None if there are none."""
    rows = []
    numbers = []
    members = zip(batch.unit.tolist(), batch.member.tolist(), strict=True)
    for row, (number, place) in enumerate(members):
        prompts = list(joints[number].values())
        owner = prompts[place].owners.get(contrast)
        if owner is not None:
            rows.append(row)
            numbers.append(owner)
    if not rows:
        return None
    index = torch.tensor(rows, device=batch.unit.device)
    unit, member = torch.tensor(numbers, device=batch.unit.device).unbind(1)
    return UnitBatch(batch.captured.of_rows(index), unit, member)
