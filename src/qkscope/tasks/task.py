"""A task makes marked examples from a seed: for choosing heads, for fitting each contrast, and for testing.

The three uses draw their words from disjoint pools, so that nothing a head or a subspace was chosen on is tested on.
What is drawn together is a *unit*: one prompt, or a prompt with its counterfactual copy. A unit is the random unit of
every null and interval.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.kinds import checked_class

ANSWER = "answer"
"""The label that says which keys are right: +1 there, −1 for the other candidates. Head scores and swaps go by it."""

Use = Literal["choose", "fit", "test"]
USES: tuple[Use, ...] = ("choose", "fit", "test")
ASKED = "asked"  # the role of the word a prompt asks for: prompts that ask alike are not independent
Unit = Annotated[tuple[Example, ...], "a unit (as task.test(512) gives)"]


@checked_class
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
    unit : what prompts are told apart by in the nulls and in cross-validation, as prompts that share it are not
        independent: the text of their + keys (``key``), the piece in a role of that name, or ``prompt``, where by
        design nothing but the arrangement varies.
    """

    name: str
    says: str
    across: bool = False
    center: Literal["none", "query", "both"] = "none"
    paired: bool = True
    unit: str = "key"

    def __post_init__(self) -> None:
        if self.center not in ("none", "query", "both"):
            raise BadInput(f"center is one of none, query, both, but got {self.center!r}.")


@checked_class
@dataclass(frozen=True)
class Task:
    """Named contrasts and a way to draw units for each use."""

    comes_from = "as tasks.binding() or tasks.from_jsonl(file) makes"

    name: str
    contrasts: Mapping[str, Contrast]
    draw: Callable[[Use, str, int], Sequence[Unit]]
    seed: int = 0
    chat: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)  # the parameters, for the manifest
    notes: tuple[str, ...] = ()  # what a reader of its results must know, as sentences
    starts_with_key: bool = False  # whether a labelled key may be the first thing in a prompt

    def __post_init__(self) -> None:
        for name in self.contrasts:
            checked_name(name)

    def choose(self, n: int) -> Sequence[Unit]:
        """Units for scoring heads."""
        return self.draw("choose", ANSWER, _positive(n))

    def fit(self, contrast: str, n: int) -> Sequence[Unit]:
        """Units for one contrast."""
        if contrast not in self.contrasts:
            raise BadInput(f"task {self.name} has no contrast {contrast!r}: it has {', '.join(self.contrasts)}.")
        return self.draw("fit", contrast, _positive(n))

    def test(self, n: int) -> Sequence[Unit]:
        """Held-out units for swaps."""
        return self.draw("test", ANSWER, _positive(n))


def seeded(*address: object) -> random.Random:
    """A random generator that depends on all of the address; text seeds are stable between Python processes."""
    return random.Random("/".join(map(str, address)))


def pools(words: Sequence[str], seed: int, what: str, least: int) -> dict[Use, list[str]]:
    """Cut a word list into three disjoint pools of at least ``least`` words each."""
    unique = checked_words(words, what)
    seeded(seed, "pools", what).shuffle(unique)
    size = len(unique) // len(USES)
    if size < least:
        raise BadInput(
            f"{what}: {least} words are needed for each of choosing, fitting and testing, but {len(unique)} leave"
            f" {size}: give {least * len(USES)} or more."
        )
    return {use: unique[i * size : (i + 1) * size] for i, use in enumerate(USES)}


def checked_name(name: str) -> str:
    """A name for a contrast: any that can be shown."""
    if not name.strip() or not name.isprintable():
        raise BadInput(f"a contrast cannot be called {name!r}, which cannot be shown: rename it.")
    return name


def checked_words(words: Sequence[str], what: str) -> list[str]:
    """The different words of a list, in its order; anything that is not a list of words is refused."""
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise BadInput(f"{what} should be a list of words, but got {type(words).__name__}.")
    for word in words:
        if not isinstance(word, str) or not word.strip() or word != word.strip():
            raise BadInput(f"{what} should be words without blanks around them, but there is {word!r}.")
    return list(dict.fromkeys(words))


def checked_count(value: int, what: str, low: int, high: int | None = None) -> int:
    """A whole number in a range, or a sentence that says what it counts."""
    if type(value) is not int or value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise BadInput(f"{what} should be a whole number {wanted}, but got {value!r}.")
    return value


def _positive(n: int) -> int:
    return checked_count(n, "the number of examples", 1)
