"""Pronouns: "So Mary is such a good cook, isn't" → she.

The query is the last token, keys are the name (the answer: it decides the pronoun) and the noun. Roles: ``NAME``,
``NOUN`` and ``END``.

- ``gender``: a copy with a name of the other kind; + is the name, − the copy's, seen by the same query.
- ``person``: + is the name, − the noun, query-centred.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from qkscope.examples import Answers, Draft, Example
from qkscope.kinds import Seed, checked_call
from qkscope.tasks.task import ANSWER, Contrast, Task, Unit, Use, made, pools
from qkscope.tasks.words import MEN, PEOPLE, WOMEN

PRONOUNS = (" he", " she")  # of the men and of the women


@checked_call
def pronoun(
    seed: Seed = 0,
    *,
    men: Sequence[str] = MEN,
    women: Sequence[str] = WOMEN,
    people: Sequence[str] = PEOPLE,
    chat: bool = False,
) -> Task:
    """Make the pronoun task.

    Parameters
    ----------
    seed : of every draw.
    men, women : names by the pronoun they take, in turn the one asked about.
    people : what they are good at; each list is cut into disjoint pools for choosing, fitting and testing.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> pronoun().test(1)[0][0].text.endswith("isn't")
    True
    """
    named = (pools(men, seed, "names of men", least=1), pools(women, seed, "names of women", least=1))
    trades = pools(people, seed, "people", least=1)

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            names = [rng.choice(named[(cluster + other) % 2][use]) for other in (0, 1)]
            trade = rng.choice(trades[use])
            turns = [PRONOUNS[(cluster + other) % 2] for other in (0, 1)]
            answers = [Answers((right,), (wrong,)) for right, wrong in (turns, turns[::-1])]
            pairs = zip(names, answers, strict=True)
            unit = tuple(replace(_prompt(name, trade, contrast, cluster), answers=own) for name, own in pairs)
            yield unit if contrast == "gender" else unit[:1]

    contrasts = (
        Contrast("gender", "the name / a name that takes the other pronoun", across=True),
        Contrast("person", "the name / the noun", center="query"),
    )
    asked = {"men": tuple(men), "women": tuple(women), "people": tuple(people), "chat": chat}
    return made("pronoun", seed, contrasts, walk, asked)


def _prompt(name: str, trade: str, contrast: str, cluster: int) -> Example:
    right = {ANSWER: 1} | ({contrast: 1} if contrast != ANSWER else {})
    wrong = {ANSWER: -1} | ({"person": -1} if contrast == "person" else {})
    draft = Draft().write("So ").key(name, **right).role("NAME").write(" is such a good ")
    return draft.key(trade, **wrong).role("NOUN").write(", ").write("isn't").role("END").example(cluster=cluster)
