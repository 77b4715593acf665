"""Which keys change places in a swap, and the attention rows that are edited.

One capture of the held-out prompts serves every condition: the edited rows have a closed form
(`qkscope.sums.swap_algebra`). Which keys change places is drawn once for every condition and every
verb that swaps, each by the address of its prompt: the same units and seed give the same, in
whatever batches.
"""

from __future__ import annotations

from collections.abc import Sequence
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
            "pre_rope vectors do not give the model's attention: fit in post_rope or query_frame for this."
        )
    if downstream and space != "post_rope":
        raise BadInput("a patched run writes post_rope keys: fit in post_rope to swap downstream.")


class Pairs(NamedTuple):
    """The keys that change places: a row for each query of each held-out prompt, in the order in
    which batches run.
    """

    batches: list[list[int]]
    examples: list[Example]  # of each row
    unit: Int[Tensor, " n"]
    orig: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    others: (
        tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None
    )  # two keys for the sham swap; None where there are none
    cluster: Int[
        Tensor, " n"
    ]  # rows that ask for the same word, or are of the same unit: resampled together


def draw_pairs(units: Units, batch_size: int = 32, seed: int = 0) -> Pairs:
    """A right key and a wrong one of every row, uniformly drawn once, for every condition and every
    verb.

    A sham swaps two keys whose swap should do nothing: two right ones (a filter list), or two wrong
    ones beside the target.
    """
    if not units or not all(units):
        raise BadInput(
            "there are no examples, or a unit without one: give at least one prompt in each."
        )
    batches = batches_of(units, batch_size)
    members = [(i, m) for batch in batches for i in batch for m in range(len(units[i]))]
    rows = [(i, m) for i, m in members for _ in units[i][m].queries or (0,)]
    examples = [units[i][m] for i, m in rows]
    labels = torch.zeros(
        len(rows), max(len(example.keys) for example in examples), dtype=torch.long
    )
    for row, example in enumerate(examples):
        labels[row, : len(example.keys)] = torch.tensor([key.label(ANSWER) for key in example.keys])
    right = labels > 0
    wrong = labels < 0
    for row in (~(right.any(1) & wrong.any(1))).nonzero()[:1, 0].tolist():
        raise BadInput(
            f"a swap needs keys labelled {ANSWER!r} 1 and -1, and {examples[row].show(80)} has not both."
        )
    unit, member = torch.tensor(rows).unbind(1)

    def draw(what: str, beside: Tensor, allowed: Tensor) -> Tensor:
        return draw_targets(beside, allowed, derived_seed(seed, what), unit, member)

    orig = draw("right", torch.full((len(labels),), -1), right)
    target = draw("wrong", orig, wrong)
    others = None
    free = wrong & (torch.arange(labels.shape[1]) != target[:, None])
    if bool((right.sum(dim=1) > 1).all()):
        others = orig, draw("sham", orig, right)
    elif bool((free.sum(dim=1) > 1).all()):
        first = draw("sham", target, free)
        others = first, draw("sham, the other", first, free)
    if all(ASKED in example.roles for example in examples):
        # a task has a few dozen words and any number of prompts: resampling prompts would trust the
        # words too much
        words = [example.piece(example.roles[ASKED]) for example in examples]
        cluster = torch.tensor([words.index(word) for word in words])
    else:
        cluster = clusters_of(units, unit)
    return Pairs(batches, examples, unit, orig, target, others, cluster)


def capture_rows(
    scope: Scope,
    units: Units,
    fit: Fit,
    heads: Sequence[Head],
    pairs: Pairs,
    run: Any = None,
    more: Any = (None, None),
) -> SwapRows:
    """Attention rows of held-out units, with their pairs (`draw_pairs` of the same units).

    ``run`` runs the stage (by default nothing is kept); of ``more``, what reads the model's answers
    too (`patched_runner`), and what gives the rows of other texts (`truth_runner`).
    """
    capture, (patched, exchanged) = (
        unit_runner(scope, units, heads, space=fit.space, chat=fit.chat),
        more,
    )

    def captured(indices: list[int]) -> dict[str, Any]:
        rows, answers = patched(indices) if patched else (capture(indices).captured, None)
        return {
            "rows": dict(vars(rows.rows())),
            "answers": answers,
            **(exchanged(indices, rows) if exchanged else {}),
        }

    parts = (run or partial(Work().run, last=True))(Stage("rows", pairs.batches, captured))
    rows = AttentionRows.cat([AttentionRows(**part["rows"]) for part in parts])
    answers = torch.cat([part["answers"] for part in parts], dim=1) if patched else None
    truth = {
        (name, reading): torch.cat([part["truth"][f"{reading}/{name}"] for part in parts])
        for reading, _, name in (which.partition("/") for which in parts[0].get("truth", ()))
    }
    frame = (
        AttentionRows.cat([AttentionRows(**part["frame"]) for part in parts])
        if "frame" in parts[0]
        else None
    )
    return SwapRows(
        rows, pairs.orig, pairs.target, pairs.cluster, heads, pairs.others, answers, truth, frame
    )
