"""Tasks whose answer is no key: a later year, a pronoun. Both name what the model may go on with.

`greater_than`: "The war lasted from the year 1732 to the year 17" → a year after 32. The query is the last token. Keys
are the two halves of the first year: ``YY``, which the answer depends on, and ``XX``. A tokenizer that reads digits one
by one has ``YY`` stand for its tens, the digit that is to be written next; one that reads the whole year as a token is
refused. Roles: ``XX``, ``YY`` and ``END``.

- ``year``: a copy with another ``YY``; + is its token, − the copy's, seen by the same query.
- ``half``: + is ``YY``, − is ``XX``, query-centred.

`pronoun`: "So Mary is such a good cook, isn't" → she. The query is the last token, keys are the name (the answer: it
decides the pronoun) and the noun. Roles: ``NAME``, ``NOUN`` and ``END``.

- ``gender``: a copy with a name of the other kind; + is the name, − the copy's, seen by the same query.
- ``person``: + is the name, − the noun, query-centred.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import count

from qkscope.examples import Answers, Draft, Example
from qkscope.kinds import Seed, checked_call
from qkscope.tasks.task import Contrast, Task, Unit, Use, from_walk, labels, pools
from qkscope.tasks.words import EVENTS, MEN, PEOPLE, WOMEN

CENTURIES = ("11", "12", "13", "14", "15", "16", "17", "18")
YEARS = tuple(f"{year:02d}" for year in range(11, 90) if year % 10)
PRONOUNS = (" he", " she")  # of the men and of the women


@checked_call
def greater_than(seed: Seed = 0, *, chat: bool = False) -> Task:
    """Make the greater-than task.

    Parameters
    ----------
    seed : of every draw.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> sorted(greater_than().test(1)[0][0].roles)
    ['END', 'XX', 'YY']
    """
    happened, ends = pools(EVENTS, seed, "events", least=1), pools(YEARS, seed, "years", least=2)

    def prompt(event: str, century: str, year: str, contrast: str, cluster: int) -> Example:
        draft = Draft().write(f"The {event} lasted from the year ")
        draft.key(century, **labels(-1, contrast, ("year",))).role("XX")
        # the key is the tens, which is the token of all of YY where digits are read in twos
        draft.key(year[0], **labels(1, contrast)).write(f"{year[1]} to the year ").write(century).role("END")
        example = draft.example(cluster)
        tens = example.keys[1].span[0]
        return replace(example, roles={**example.roles, "YY": (tens, tens + 2)}, answers=_decades(year[0]))

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            event, century = rng.choice(happened[use]), rng.choice(CENTURIES)
            unit = tuple(prompt(event, century, year, contrast, cluster) for year in rng.sample(ends[use], 2))
            yield unit if contrast == "year" else unit[:1]

    contrasts = (
        Contrast("year", "the year's last two digits / another year's", across=True),
        Contrast("half", "the year's last two digits / its first two", center="query"),
    )
    return from_walk("greater_than", seed, contrasts, walk, {"chat": chat})


@cache
def _decades(tens: str) -> Answers | None:
    """Years of later and of earlier decades.

    One of the same decade is no answer: where digits are read one by one, its first digit says nothing.
    """
    later, earlier = (tuple(f"{n:02d}" for n in range(100) if sign * (n // 10 - int(tens)) > 0) for sign in (1, -1))
    return Answers(later, earlier) if later and earlier else None


@checked_call
def pronoun(seed: Seed = 0, *, chat: bool = False) -> Task:
    """Make the pronoun task.

    Parameters
    ----------
    seed : of every draw.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> pronoun().test(1)[0][0].text.endswith("isn't")
    True
    """
    named = (pools(MEN, seed, "names of men", least=1), pools(WOMEN, seed, "names of women", least=1))
    trades = pools(PEOPLE, seed, "people", least=1)

    def prompt(name: str, trade: str, contrast: str, cluster: int) -> Example:
        draft = Draft().write("So ").key(name, **labels(1, contrast)).role("NAME").write(" is such a good ")
        draft.key(trade, **labels(-1, contrast, ("gender",))).role("NOUN").write(", ").write("isn't").role("END")
        return draft.example(cluster=cluster)

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            turns = [(cluster + other) % 2 for other in (0, 1)]
            names, trade = [rng.choice(named[turn][use]) for turn in turns], rng.choice(trades[use])
            unit = tuple(
                replace(
                    prompt(name, trade, contrast, cluster), answers=Answers((PRONOUNS[turn],), (PRONOUNS[1 - turn],))
                )
                for name, turn in zip(names, turns, strict=True)
            )
            yield unit if contrast == "gender" else unit[:1]

    contrasts = (
        Contrast("gender", "the name / a name that takes the other pronoun", across=True),
        Contrast("person", "the name / the noun", center="query"),
    )
    return from_walk("pronoun", seed, contrasts, walk, {"chat": chat})
