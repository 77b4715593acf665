"""Over many pairs: the mean logit difference of each line's answer and rival, in the clean prompt
and in the corrupted one, with intervals.

Intervals are percentiles of the mean over prompts that are drawn again (95%).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qkscope import BadInput, Scope
from qkscope.findings.pair import pair_rows
from qkscope.findings.question import Question
from qkscope.results.result import Rows, Tables
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.texts.pairs import PromptPair

MEASURES = {"lead": "clean", "lead_corrupted": "corrupted", "drop": "clean less corrupted"}
"""What is averaged, by its column in the table ``pairs``."""


def mean_leads(
    scope: Scope, pairs: Sequence[PromptPair], chat: bool = False, seed: int = 0
) -> tuple[str, Tables]:
    """Mean logit differences over pairs: a sentence, and the tables ``pairs`` and ``mean``.

    Parameters
    ----------
    scope : the model.
    pairs : prompts with answers and rivals; the usual ones where none are named.
    chat : whether prompts go into the chat template.
    seed : of the draws of an interval.
    """
    rows = [_row(scope, number, pair, chat) for number, pair in enumerate(pairs)]
    means = Rows()
    for column, what in MEASURES.items():
        values = [float(row[column]) for row in rows if row[column] is not None]
        if values:
            means.append(_mean(what, values, seed))
    return _sentence(rows, means), {"mean": means, "pairs": rows}


def _row(scope: Scope, number: int, pair: PromptPair, chat: bool) -> dict[str, Any]:
    """One line: its answer, its rival, and their leads."""
    try:
        question = Question(
            scope, pair.clean, pair.corrupted, answer=pair.answer, rival=pair.rival, chat=chat
        ).at_difference()
        output = question.output(question.run(last=0))
        changed = [] if pair.corrupted is None else pair_rows(question, output)
    except BadInput as error:
        raise BadInput(f"{pair.where}: {error}") from None
    corrupted = changed[-1]["lead"] if changed else None
    return {
        "prompt": number,
        "said": pair.clean,
        "answer": output.text_of("answer"),
        "rival": output.text_of("rival"),
        "right": output.likeliest == output.best,
        "lead": output.difference,
        "lead_corrupted": corrupted,
        "drop": None if corrupted is None else output.difference - corrupted,
    }


def _mean(what: str, values: Sequence[float], seed: int) -> dict[str, Any]:
    """A mean with its interval; of one prompt there is none."""
    column = torch.tensor(values, dtype=torch.float64)
    low, high = clustered_bootstrap(column, torch.arange(len(values)), seed=seed)
    ends = [None if end.isnan() else float(end) for end in (low, high)]
    return {
        "of": what, "lead": float(column.mean()), "low": ends[0], "high": ends[1],
        "n": len(values),
    }  # fmt: skip


def _sentence(rows: Rows, means: Rows) -> str:
    """The means in words."""
    right = sum(row["right"] for row in rows)
    told = []
    for row in means:
        ends = ""
        if row["low"] is not None:
            ends = f" (95% interval {row['low']:.2f} to {row['high']:.2f})"
        told.append(f"{row['of']} {row['lead']:.2f}{ends}")
    return (
        f"Over {len(rows)} prompts the answer leads its rival by, on average: {'; '.join(told)}"
        f" logits. The answer is the likeliest next token in {right}."
    )
