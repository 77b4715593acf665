"""Induction: a list of words comes a second time and breaks off; which word follows?

``cat tree lamp cat tree`` → lamp. The query is the last token, keys are the words of the first copy. Roles: ``PREV``
(the last word's first occurrence), ``NEXT`` (the word after it, the answer) and ``END`` (the last word).

- ``next``: + is the word after the first occurrence, − every other word of the first copy, query-centred.
- ``word``: a copy in which the word asked about is another one, in both places; + is what follows it, − the same word
  in the copy, seen by the same query.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated

from qkscope.examples import Draft, Example
from qkscope.kinds import Interval, Seed, checked_call
from qkscope.tasks.task import Contrast, Task, Unit, Use, from_walk, labels, pools
from qkscope.tasks.words import OBJECTS


@checked_call
def induction(length: Annotated[int, Interval(ge=3, le=32)] = 8, seed: Seed = 0, *, chat: bool = False) -> Task:
    """Make the induction task.

    Parameters
    ----------
    length : different words in the list, from 3 to 32.
    seed : of every draw.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> len(induction(4).test(1)[0][0].keys)
    4
    """
    split = pools(OBJECTS, seed, "words", least=length + 1)  # one more for the copy

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            *listed, other = rng.sample(split[use], length + 1)
            at = rng.randrange(length - 1)  # the last word has no word after it in its own copy
            first = _prompt(listed, at, contrast, cluster)
            copy = [other if i == at else word for i, word in enumerate(listed)]
            yield (first, _prompt(copy, at, contrast, cluster)) if contrast == "word" else (first,)

    says = "the word after the first occurrence / the other words"
    contrasts = (
        Contrast("next", says, center="query", paired=False, unit="END"),
        Contrast("word", "the word after the one repeated / the same after another", across=True, unit="END"),
    )
    return from_walk("induction", seed, contrasts, walk, {"length": length, "chat": chat}, address=(length,))


def _prompt(listed: Sequence[str], at: int, contrast: str, cluster: int) -> Example:
    draft = Draft().write("Words:")
    for i, word in enumerate(listed):
        draft.write(" ").key(word, **labels(1 if i == at + 1 else -1, contrast, ("word",)))
        if i in (at, at + 1):
            draft.role("PREV" if i == at else "NEXT")
    for word in listed[: at + 1]:
        draft.write(" ").write(word)
    return draft.role("END").example(cluster=cluster)
