"""A task makes marked examples from a seed: to choose heads, to fit each contrast, and to test.

The three uses draw their words from disjoint pools, so that nothing a head or a subspace was chosen
on is tested on. What is drawn together is a *unit*: one prompt, or a prompt with its counterfactual
copy. A unit is the random unit of every null and interval.

A built-in task is made of its contrasts and a walk (`from_walk`): a generator that draws one unit
after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from qkscope.checking import Count, checked_class
from qkscope.errors import BadInput
from qkscope.examples import Example, Sign, Span
from qkscope.heads import Center

#: The label of right keys (+1) and of the other candidates (−1): head scores and swaps go by it.
ANSWER = "answer"
Use = Literal["choose", "fit", "test"]
USES: tuple[Use, ...] = ("choose", "fit", "test")
#: Role of the word that a prompt asks for: prompts that share it are not independent.
ASKED = "asked"
Unit = tuple[Example, ...]
Units = Sequence[Unit]
UnitsToTest = Sequence[Unit]
#: Exchanges features (by name) of two keys (by slot) in a prompt's text; None if no text does.
Exchange = Callable[[Example, Sequence[str], int, int], Example | None]


@checked_class
@dataclass(frozen=True)
class Contrast:
    """Which (query, key) pairs are + and which are −.

    Parameters
    ----------
    name : the label on the keys.
    says : + and − in words.
    across : whether − is the + key of the counterfactual copy, seen by the same query (labels then
        mark + alone).
    center : centring that this contrast needs to mean what it says ("none" is the papers').
    unit : what prompts are told apart by in the nulls and in cross-validation, as prompts that
        share it are not independent: the text of their + keys (``key``), the piece in a role of
        that name, or ``prompt``, where by design nothing but the arrangement varies.

    Examples
    --------
    >>> Contrast("mine", "the right box / the others").center
    'none'
    """

    name: str
    says: str
    across: bool = False
    center: Center = "none"
    unit: str = "key"


@checked_class
@dataclass(frozen=True)
class Task:
    """Named contrasts and a way to draw units for each use.

    Parameters
    ----------
    name : what it is called; of the built-in ones, the name of the function that makes it.
    contrasts : by their names.
    draw : gives n units for a use and a contrast.
    seed : of every draw.
    chat : whether prompts go into the model's chat template.
    asked : the parameters it was made with, for the manifest.
    notes : what a reader of its results must know, as sentences.
    starts_with_key : whether a labelled key may be the first thing in a prompt.
    exchange : exchanges features of two keys in a prompt's text, keys in the slots that a swap of
        them leaves them in.

    Examples
    --------
    >>> from qkscope import tasks
    >>> task = tasks.binding(3)
    >>> list(task.contrasts)
    ['order', 'lexical', 'box']
    >>> len(task.test(2)), len(task.fit("lexical", 1)[0])
    (2, 2)
    >>> prompt = task.test(1)[0][0]
    >>> prompt.text.split()
    ['brush:', 'X', 'knife:', 'U', 'pen:', 'J', 'knife:']
    >>> task.exchange(prompt, ["lexical"], 0, 2).text.split()
    ['pen:', 'X', 'knife:', 'U', 'brush:', 'J', 'knife:']
    """

    name: str
    contrasts: Mapping[str, Contrast]
    draw: Callable[[Use, str, int], Sequence[Unit]]
    seed: int = 0
    chat: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    starts_with_key: bool = False
    exchange: Exchange | None = None

    def choose(self, n: Count) -> Sequence[Unit]:
        """Units for scoring heads.

        Parameters
        ----------
        n : how many.
        """
        return self.draw("choose", ANSWER, n)

    def fit(self, contrast: str, n: Count) -> Sequence[Unit]:
        """Units for one contrast.

        Parameters
        ----------
        contrast : its name.
        n : how many.
        """
        if contrast not in self.contrasts:
            names = ", ".join(self.contrasts)
            raise BadInput(f"task {self.name} has no contrast {contrast!r}: it has {names}.")
        return self.draw("fit", contrast, n)

    def test(self, n: Count) -> Sequence[Unit]:
        """Held-out units for swaps.

        Parameters
        ----------
        n : how many.
        """
        return self.draw("test", ANSWER, n)


def from_walk(
    name: str,
    seed: int,
    contrasts: Sequence[Contrast],
    walk: Callable[[random.Random, Use, str], Iterator[Unit]],
    asked: Mapping[str, Any],
    address: Sequence[object] = (),
    starts_with_key: bool = False,
    apart: Sequence[str] = (),
    exchange: Exchange | None = None,
) -> Task:
    """Make a task of the units that a walk draws.

    Its contrasts draw the same prompts, each with copies of its own: the walk takes the same
    numbers from its generator whatever the contrast, and what runs a prompt runs it once for all.

    Parameters
    ----------
    name, seed, starts_with_key, exchange : of the task.
    contrasts : in their order.
    walk : draws units without end, for a use and a contrast.
    asked : the parameters that the task was made with.
    address : what draws depend on besides seed, use and contrast.
    apart : names of contrasts that draw prompts of their own.
    """
    shared = [contrast.name for contrast in contrasts if contrast.name not in apart]

    def draw(use: Use, contrast: str, n: int) -> Sequence[Unit]:
        drawn_as = shared[0] if contrast in shared else contrast
        rng = seeded(seed, name, *address, use, drawn_as)
        return list(islice(walk(rng, use, contrast), n))

    plain = dict(asked)  # as JSON has it
    for key, value in asked.items():
        if isinstance(value, tuple):
            plain[key] = list(value)
    return Task(
        name=name,
        contrasts={contrast.name: contrast for contrast in contrasts},
        draw=draw,
        seed=seed,
        chat=plain["chat"],
        asked=plain,
        starts_with_key=starts_with_key,
        exchange=exchange,
    )


def rewritten(
    example: Example, pieces: Mapping[Span, str], slots: Mapping[int, int] | None = None
) -> Example:
    """An example with other text in some spans.

    Parameters
    ----------
    example : whose text.
    pieces : the new text, by span.
    slots : by slot of a key, the slot whose place it takes; other keys stay where they are.
    """

    def moved(place: int) -> int:
        """Where a character of the old text stands in the new one."""
        shift = 0
        for (start, stop), piece in pieces.items():
            if stop <= place:
                shift += len(piece) - (stop - start)
        return place + shift

    text = str(example.text)
    for (start, stop), piece in sorted(pieces.items(), reverse=True):
        text = text[:start] + piece + text[stop:]
    keys = []
    for slot, key in enumerate(example.keys):
        target = slots.get(slot, slot) if slots else slot
        start, stop = example.keys[target].span
        keys.append(replace(key, span=(moved(start), moved(stop))))
    return Example(text, keys=tuple(keys), cluster=example.cluster, answers=example.answers)


def labels(sign: Sign, contrast: str, across: Sequence[str] = ()) -> dict[str, Sign]:
    """Labels of a key: right or wrong, and the same in the contrast it is drawn for.

    Contrasts named in ``across`` mark + alone.
    """
    if contrast == ANSWER or (sign <= 0 and contrast in across):
        return {ANSWER: sign}
    return {ANSWER: sign, contrast: sign}


def seeded(*address: object) -> random.Random:
    """A random generator for an address; text seeds are the same in every Python process."""
    return random.Random("/".join(map(str, address)))


def connected(count: int, links: Sequence[tuple[int, int]]) -> list[int]:
    """The component of each of ``count`` nodes, numbered in the order of their first nodes.

    >>> connected(4, [(3, 1)])
    [0, 1, 2, 1]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    starts = [start for start, _ in links]
    stops = [stop for _, stop in links]
    graph = coo_array(([True] * len(links), (starts, stops)), shape=(count, count))
    _, components = connected_components(graph, directed=False)
    return [int(component) for component in components]
