"""Pairs of keys that change places in a swap, and the attention rows that are edited.

One capture of the held-out prompts serves every condition: the edited rows have a closed form
(`qkscope.sums.swap_algebra`). Which keys change places is drawn once for every condition and every
verb that swaps, each by the address of its prompt: the same units and seed give the same, in
whatever batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.findings.fit import Fit
from qkscope.findings.task_batches import batches_of, clusters_of, unit_runner
from qkscope.heads import Head
from qkscope.model.scope import Scope
from qkscope.results.work import Stage, Work
from qkscope.seeds import derived_seed
from qkscope.sums.swap_algebra import SwapRows, draw_targets
from qkscope.texts.task import ANSWER, ASKED, Units


def check_swappable(space: str, downstream: bool = False) -> None:
    """Refuse a space in which attention, and so a swap, cannot be had."""
    if space == "pre_rope":
        raise BadInput(
            "pre_rope vectors do not give the model's attention:"
            " fit in post_rope or query_frame for this."
        )
    if downstream and space != "post_rope":
        raise BadInput("a patched run writes post_rope keys: fit in post_rope to swap downstream.")


class Pairs(NamedTuple):
    """The keys that change places, in the order in which batches run.

    There is a row for each query of each held-out prompt. ``others`` are two keys for the sham
    swap, None where there are none; rows of one ``cluster`` ask for the same word, or are of the
    same unit, and are resampled together.
    """

    batches: list[list[int]]
    examples: list[Example]  # of each row
    unit: Int[Tensor, " n"]
    orig: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    others: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None
    cluster: Int[Tensor, " n"]

    def rows_of(self, units: Sequence[int]) -> Int[Tensor, " b"]:
        """Numbers of the rows of some units, unit by unit."""
        of_units = [(self.unit == unit).nonzero()[:, 0] for unit in units]
        return torch.cat(of_units)


def draw_pairs(units: Units, batch_size: int = 32, seed: int = 0) -> Pairs:
    """Draw a right key and a wrong one of every row, once for every condition and every verb.

    A sham swaps two keys whose swap should do nothing: two right ones (a filter list), or two wrong
    ones beside the target.
    """
    if not units or not all(units):
        raise BadInput(
            "there are no examples, or a unit without one: give at least one prompt in each."
        )
    batches = batches_of(units, batch_size)
    unit, member = _row_numbers(units, batches).unbind(1)
    places = zip(unit.tolist(), member.tolist(), strict=True)
    examples = [units[i][m] for i, m in places]
    labels = _labels(examples)
    right = labels > 0
    wrong = labels < 0
    both = right.any(1) & wrong.any(1)
    if not bool(both.all()):
        example = examples[int((~both).nonzero()[0])]
        raise BadInput(
            f"a swap needs keys labelled {ANSWER!r} 1 and -1, and {example.show(80)} has not both."
        )

    def draw(what: str, beside: Tensor, allowed: Tensor) -> Tensor:
        return draw_targets(beside, allowed, derived_seed(seed, what), unit, member)

    no_key = torch.full((len(labels),), -1)
    orig = draw("right", no_key, right)
    target = draw("wrong", orig, wrong)
    others = None
    is_target = torch.arange(labels.shape[1]) == target[:, None]
    free = wrong & ~is_target
    if bool((right.sum(dim=1) > 1).all()):
        others = orig, draw("sham", orig, right)
    elif bool((free.sum(dim=1) > 1).all()):
        first = draw("sham", target, free)
        others = first, draw("sham, the other", first, free)
    return Pairs(batches, examples, unit, orig, target, others, _clusters(units, examples, unit))


def _row_numbers(units: Units, batches: Sequence[Sequence[int]]) -> Int[Tensor, "n 2"]:
    """The unit of each row, and which of its prompts the row is of, in the order of batches."""
    rows = []
    for batch in batches:
        for i in batch:
            for member, example in enumerate(units[i]):
                queries = max(len(example.queries), 1)  # its last token, where none is marked
                rows += [(i, member)] * queries
    return torch.tensor(rows)


def _labels(examples: Sequence[Example]) -> Int[Tensor, "n k"]:
    """Labels of each row's keys as answers; 0 where a row has fewer keys than others."""
    width = max(len(example.keys) for example in examples)
    labels = torch.zeros(len(examples), width, dtype=torch.long)
    for row, example in enumerate(examples):
        of_row = [key.label(ANSWER) for key in example.keys]
        labels[row, : len(of_row)] = torch.tensor(of_row)
    return labels


def _clusters(
    units: Units, examples: Sequence[Example], unit: Int[Tensor, " n"]
) -> Int[Tensor, " n"]:
    """Number rows alike that are resampled together."""
    if not all(ASKED in example.roles for example in examples):
        return clusters_of(units, unit)
    # a task has a few dozen words and any number of prompts: resampling prompts would trust the
    # words too much
    words = [example.piece(example.roles[ASKED]) for example in examples]
    return torch.tensor([words.index(word) for word in words])


def capture_rows(
    scope: Scope,
    units: Units,
    fit: Fit,
    heads: Sequence[Head],
    pairs: Pairs,
    run: Any = None,
    more: Any = (None, None),
) -> SwapRows:
    """Capture attention rows of held-out units, with their pairs (`draw_pairs` of the same units).

    ``run`` runs the stage (by default nothing is kept); of ``more``, what reads the model's answers
    too (`patched_runner`), and what gives the rows of other texts (`truth_runner`).
    """
    capture = unit_runner(scope, units, heads, space=fit.space, chat=fit.chat)
    patched, exchanged = more

    def captured(indices: list[int]) -> dict[str, Any]:
        if patched:
            rows, answers = patched(indices)
        else:
            rows = capture(indices).captured
            answers = None
        part = {"rows": dict(vars(rows.rows())), "answers": answers}
        if exchanged:
            part |= exchanged(indices, rows)
        return part

    run = run or partial(Work().run, last=True)
    parts = run(Stage("rows", pairs.batches, captured))
    answers = None
    if patched:
        answers = torch.cat([part["answers"] for part in parts], dim=1)
    truth = {}
    for which in parts[0].get("truth", ()):
        reading, _, name = which.partition("/")
        of_parts = [part["truth"][which] for part in parts]
        truth[name, reading] = torch.cat(of_parts)
    frame = _joined(parts, "frame") if "frame" in parts[0] else None
    return SwapRows(
        rows=_joined(parts, "rows"),
        orig=pairs.orig,
        target=pairs.target,
        cluster=pairs.cluster,
        heads=heads,
        others=pairs.others,
        answers=answers,
        truth=truth,
        frame=frame,
    )


def _joined(parts: Sequence[Mapping[str, Any]], name: str) -> AttentionRows:
    """The attention rows of all batches."""
    return AttentionRows.cat([AttentionRows(**part[name]) for part in parts])
