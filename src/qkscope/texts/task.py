"""A task makes marked examples from a seed: for choosing heads, for fitting each contrast, and for
testing.

The three uses draw their words from disjoint pools, so that nothing a head or a subspace was chosen
on is tested on. What is drawn together is a *unit*: one prompt, or a prompt with its counterfactual
copy. A unit is the random unit of every null and interval.

A task of ours is made of its contrasts and a walk (`from_walk`): a generator that draws one unit
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

#: The label that says which keys are right: +1 there, −1 for the other candidates. Head scores and swaps go by it.
ANSWER = "answer"
Use = Literal["choose", "fit", "test"]
USES: tuple[Use, ...] = ("choose", "fit", "test")
Center = Literal["none", "query"]
ASKED = (
    "asked"  # the role of the word a prompt asks for: prompts that ask alike are not independent
)
Unit = tuple[Example, ...]
Units = Sequence[Unit]
UnitsToTest = Sequence[Unit]
#: Gives a prompt in whose text the features of two keys (by name, by slot) are exchanged; None where there is no such.
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
            raise BadInput(
                f"task {self.name} has no contrast {contrast!r}: it has {', '.join(self.contrasts)}."
            )
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
    """A task of units that a walk draws; ``address`` is what its draws depend on besides seed, use
    and contrast.

    Its contrasts draw the same prompts, each with copies of its own: the walk takes the same
    numbers from its generator whatever the contrast, and what runs a prompt runs it once for all.
    Those named in ``apart`` draw their own.
    """
    shared = [contrast.name for contrast in contrasts if contrast.name not in apart]

    def draw(use: Use, contrast: str, n: int) -> Sequence[Unit]:
        drawn = shared[0] if contrast in shared else contrast
        return list(islice(walk(seeded(seed, name, *address, use, drawn), use, contrast), n))

    plain: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in asked.items()
    }
    return Task(
        name,
        {c.name: c for c in contrasts},
        draw,
        seed,
        plain["chat"],
        plain,
        (),
        starts_with_key,
        exchange,
    )


def rewritten(
    example: Example, pieces: Mapping[Span, str], slots: Mapping[int, int] | None = None
) -> Example:
    """An example with other text in some spans; keys stay where they are, or go where those in
    ``slots`` were.
    """

    def moved(place: int) -> int:
        return place + sum(
            len(piece) - (stop - start) for (start, stop), piece in pieces.items() if stop <= place
        )

    text = str(example.text)
    places = [key.span for key in example.keys]
    for (start, stop), piece in sorted(pieces.items(), reverse=True):
        text = text[:start] + piece + text[stop:]
    ends = [places[(slots or {}).get(i, i)] for i in range(len(places))]
    keys = [
        replace(key, span=(moved(a), moved(b)))
        for key, (a, b) in zip(example.keys, ends, strict=True)
    ]
    return Example(text, keys=tuple(keys), cluster=example.cluster, answers=example.answers)


def labels(sign: Sign, contrast: str, across: Sequence[str] = ()) -> dict[str, Sign]:
    """Labels of a key: right or wrong, and the same in the contrast it is drawn for; ``across``
    ones mark + alone.
    """
    marked = contrast != ANSWER and (sign > 0 or contrast not in across)
    return {ANSWER: sign, contrast: sign} if marked else {ANSWER: sign}


def seeded(*address: object) -> random.Random:
    """A random generator that depends on all of the address; text seeds are stable between Python
    processes.
    """
    return random.Random("/".join(map(str, address)))


def connected(count: int, links: Sequence[tuple[int, int]]) -> list[int]:
    """The component of each of ``count`` nodes, numbered in the order of their first nodes.

    >>> connected(4, [(3, 1)])
    [0, 1, 2, 1]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = tuple(zip(*links, strict=True)) or ((), ())
    graph = coo_array(([True] * len(links), ends), shape=(count, count))
    return [int(component) for component in connected_components(graph, directed=False)[1]]
