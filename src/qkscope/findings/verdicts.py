"""Verdicts on parts and on cuts: what an answer may say of them.

Nothing of parts that do not sum to their logit; and of a cut only beside enough controls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor

from qkscope.findings.head_rows import ATTENDED
from qkscope.heads import BIAS, parse_writers
from qkscope.results.result import Result

R = TypeVar("R", bound=Result)

#: Different control sets under which nothing is tested.
FEWEST_SETS = 5
#: Shares of a side cancel, and the answer says so, where they sum to more than this without signs.
CANCELS = 3.0
#: What a change must take away of the attention that depends on it.
_TAKEN = 0.25
# how far a sum of parts may miss the logit, as a share of the largest part: in 16 bits, and in more
_HALF = 2e-2
_SINGLE = 1e-3
_MEASURED = ("check", "tokens", "attention", "output", "whole")  # tables that no split is in


def no_sum(head: object, error: float, dtype: object, single: float = _SINGLE) -> str | None:
    """Warn, in a sentence, if a head's parts miss its logit by more than rounding does.

    In more than 16 bits ``single`` is allowed.

    >>> no_sum("L1H0", 1e-6, "torch.float32"), no_sum("L1H0", 7e-3, "torch.bfloat16")
    (None, None)
    """
    allowed = _HALF if str(dtype).endswith("float16") else single
    if error <= allowed:
        return None
    missed = f"they miss it by {error:.1g} of the largest part, and {allowed:g} is allowed"
    return (
        f"The parts of {head} do not sum to its logit ({missed}), so no writers, shares or cuts of"
        " it are given: its query or key is changed here in a way that the split does not know;"
        " take a shorter prompt, or another head."
    )


def that_sum(result: R, dtype: object) -> R:
    """Drop the splits of heads whose parts do not sum (`no_sum`); the answer names these heads."""
    checks = result.tables["check"]
    warnings = dict[str, str]()
    for row in checks:
        warning = no_sum(row["head"], row["sum_error"], dtype)
        if warning is not None:
            warnings[row["head"]] = warning
    if not warnings:
        return result
    answer = " ".join(warnings.values())
    if len(warnings) < len(checks):
        answer += f" The tables hold the other {len(checks) - len(warnings)} heads."
    tables = dict[str, list[Mapping[str, Any]]]()
    for name, rows in result.tables.items():
        tables[name] = list(rows)
        if name not in _MEASURED:
            tables[name] = [row for row in rows if row["head"] not in warnings]
    return replace(result, answer=answer, tables=tables)


def verdict(
    before: float, after: float, random: Float[Tensor, " sets"], *, vacuous: bool = False
) -> str:
    """Judge whether attention depends on what was changed, beside random changes of the same size.

    It ``depends on`` what takes away more than a quarter of it, and more than any of the random
    changes; else it ``does not``. That is ``untested`` with fewer than `FEWEST_SETS` different
    random changes, where there was no attention before, and where nothing else could come out.

    Parameters
    ----------
    before, after : attention on the key, and what is left of it.
    random : what random changes of the same size leave.
    vacuous : whether the change could show nothing.

    >>> import torch
    >>> others = torch.tensor([0.7, 0.8, 0.7, 0.8, 0.9])
    >>> verdict(0.8, 0.1, others), verdict(0.8, 0.75, others)
    ('depends on', 'does not')
    >>> verdict(0.01, 0.0, others), verdict(0.8, 0.1, others[:4])
    ('untested', 'untested')
    """
    if before < ATTENDED or vacuous or len(random) < FEWEST_SETS:
        return "untested"
    taken = before - after > _TAKEN * before
    more_than_random = after < float(random.min())
    return "depends on" if taken and more_than_random else "does not"


SAID_OF_CUTS = {
    "depends on": "it depends on them",
    "does not": "it does not depend on them",
    "untested": "untested",
}
"""Verdicts on a cut, as a sentence on the attention there ends."""


# ---------------------------------------------------------------- sentences of several answers


def says_right(check: Mapping[str, Any]) -> str:
    """Say how much a head attends to a task's right keys, and how often it prefers them."""
    attends = f"{check['head']} gives {check['attention']:.0%} of its attention to the right key"
    prompts = f"{check['accuracy']:.0%} of {check['n']} prompts"
    return f"{attends} and prefers it to the other named keys in {prompts}."


def says_cancels(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say, with a blank before it, for each side of a head that its writers' shares cancel."""
    sentences = ""
    for side in ("key", "query"):
        of_side = [row for row in rows if row["side"] == side]
        size = sum(abs(row["share"]) for row in of_side)
        if size > CANCELS:
            sentences += (
                f" Large positive and negative shares of its {side} cancel (without signs they sum"
                f" to {size:.1f} times the logit): trust cuts, not single shares."
            )
    return sentences


def written_by(rows: Iterable[Mapping[str, Any]], side: str) -> str:
    """Name the first two writers of one side of a head, biases left out, with their shares."""
    of_side = [row for row in rows if row["side"] == side]
    writers = [row for row in of_side if row["writer"] != BIAS]
    first = []
    for row in writers[:2]:
        share = f"{row['share']:.0%}"
        first.append(f"{row['writer']} ({share})")
    return " and ".join(first)


_PLURALS = {"head": "heads", "mlp": "MLPs", "neuron": "neurons"}


def controls_of(row: Mapping[str, Any]) -> str:
    """Say how many different sets of random writers stand beside a cut, and of which kind."""
    of_cut = {writer.kind for writer in parse_writers(row["writers"].split(", "))}
    kinds = _PLURALS.get(of_cut.pop(), "writers") if len(of_cut) == 1 else "writers"
    if row["sets"] > 1:
        return f"{row['sets']} different sets of random {kinds}"
    return f"the one other set of {kinds}"
