"""A task makes marked examples from a seed: for choosing heads, for fitting each contrast, and for testing.

The three uses draw their words from disjoint pools, so that nothing a head or a subspace was chosen on is tested on.
What is drawn together is a *unit*: one prompt, or a prompt with its counterfactual copy. A unit is the random unit of
every null and interval.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from qkscope.errors import BadInput
from qkscope.examples import Example

ANSWER = "answer"
"""The label that says which keys are right: +1 there, −1 for the other candidates. Head scores and swaps go by it."""

Use = Literal["choose", "fit", "test"]
USES: tuple[Use, ...] = ("choose", "fit", "test")
Unit = tuple[Example, ...]


@dataclass(frozen=True)
class Contrast:
    """Which (query, key) pairs are + and which are −.

    Parameters
    ----------
    name : the label on the keys.
    says : + and − in words.
    across : whether − is the + key of the counterfactual copy, seen by the same query (labels then mark + alone).
    center : centring that this contrast needs to mean what it says ("none" is the papers').
    paired : whether each + key has one − key; decides which null applies.
    """

    name: str
    says: str
    across: bool = False
    center: Literal["none", "query", "both"] = "none"
    paired: bool = True


@dataclass(frozen=True)
class Task:
    """Named contrasts and a way to draw units for each use."""

    name: str
    contrasts: Mapping[str, Contrast]
    draw: Callable[[Use, str, int], list[Unit]]
    seed: int = 0
    chat: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)  # the parameters, for the manifest

    def choose(self, n: int) -> list[Unit]:
        """Units for scoring heads."""
        return self.draw("choose", ANSWER, _positive(n))

    def fit(self, contrast: str, n: int) -> list[Unit]:
        """Units for one contrast."""
        if contrast not in self.contrasts:
            raise BadInput(f"task {self.name} has no contrast {contrast!r}: it has {', '.join(self.contrasts)}.")
        return self.draw("fit", contrast, _positive(n))

    def test(self, n: int) -> list[Unit]:
        """Held-out units for swaps."""
        return self.draw("test", ANSWER, _positive(n))


def seeded(*address: object) -> random.Random:
    """A random generator that depends on all of the address; text seeds are stable between Python processes."""
    return random.Random("/".join(map(str, address)))


def pools(words: Sequence[str], seed: int, what: str, least: int) -> dict[Use, list[str]]:
    """Cut a word list into three disjoint pools of at least ``least`` words each."""
    unique = list(dict.fromkeys(words))
    seeded(seed, "pools", what).shuffle(unique)
    size = len(unique) // len(USES)
    if size < least:
        raise BadInput(
            f"{what}: {least} words are needed for each of choosing, fitting and testing, but {len(unique)} leave"
            f" {size}: give {least * len(USES)} or more."
        )
    return {use: unique[i * size : (i + 1) * size] for i, use in enumerate(USES)}


def _positive(n: int) -> int:
    if n < 1:
        raise BadInput(f"the number of examples must be at least 1, but is {n}.")
    return n
