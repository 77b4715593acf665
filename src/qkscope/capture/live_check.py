"""Which architectures can be looked into: answered by looking into a tiny random model of each, never from a list.

A family is supported when `Scope` takes its tiny model and the self-check holds; the error shown is
``max |softmax([cap(scale · q·k) + mask, rest]) − eager attention|`` over all heads: of a padded batch against itself,
and against each prompt alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch
from transformers.utils import logging

from qkscope.capture.families import FAMILIES, tiny_model
from qkscope.capture.scope import Scope
from qkscope.capture.weights import head_weights
from qkscope.errors import BadInput
from qkscope.kinds import checked_call


class FamilyRow(TypedDict):
    """One row of the table: `reason` says why a family is refused, or what a supported one cannot do."""

    family: str
    supported: bool
    reason: str
    max_error: float | None


@checked_call
def list_families(families: Iterable[str] | None = None) -> list[FamilyRow]:
    """Check families live.

    Parameters
    ----------
    families : iterable of str, optional
        Keys of `FAMILIES`, all by default.

    Returns
    -------
    list of FamilyRow
        In the order of `FAMILIES` (or the order asked for).
    """
    with _quietly():
        return [check_family(family) for family in (FAMILIES if families is None else families)]


def check_family(family: str) -> FamilyRow:
    """Build one tiny model, look into it, and say what came out."""
    try:
        scope = Scope.from_model(tiny_model(family), check=False)
        check = scope.self_check()
        error = max(check.attention_error, check.padding_error)
    except BadInput as refusal:
        if family not in FAMILIES:
            raise
        return FamilyRow(family=family, supported=False, reason=str(refusal), max_error=None)
    except Exception as failure:  # one family that breaks (or that this transformers lacks) must not hide the others
        first_line = next(iter(str(failure).splitlines()), "")
        reason = f"its tiny model failed with {type(failure).__name__}: {first_line}"
        return FamilyRow(family=family, supported=False, reason=reason, max_error=None)
    return FamilyRow(family=family, supported=True, reason="; ".join(_limits(scope)), max_error=error)


def _limits(scope: Scope) -> Iterator[str]:
    refused = {(space, why) for layer in scope.facts.layers for space, why in layer.refusals.items()}
    for space, why in sorted(refused):
        yield f"no {space}: {why}"
    try:
        head_weights(scope)
    except BadInput as refusal:
        yield f"no weights: {refusal}"


@contextmanager
def _quietly() -> Iterator[None]:
    """No warnings (tiny configs make transformers warn about ratios and kernels that do not matter) and one thread.

    On matrices this small a second thread does nothing but wait, and on a busy machine it waits long.
    """
    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_num_threads(threads)
