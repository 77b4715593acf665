"""Greater than: "The war lasted from the year 1732 to the year 17" → a year after 32.

The query is the last token. Keys are the two halves of the first year: ``YY``, which the answer depends on, and ``XX``.
A tokenizer that reads digits one by one has ``YY`` stand for its tens, the digit that is to be written next; one that
reads the whole year as a token is refused. Roles: ``XX``, ``YY`` and ``END``.

- ``year``: a copy with another ``YY``; + is its token, − the copy's, seen by the same query.
- ``half``: + is ``YY``, − is ``XX``, query-centred.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import count

from qkscope.errors import BadInput
from qkscope.examples import Answers, Draft, Example
from qkscope.kinds import Seed, checked_call
from qkscope.tasks.task import ANSWER, Contrast, Task, Unit, Use, made, pools
from qkscope.tasks.words import EVENTS

YEARS = tuple(f"{year:02d}" for year in range(11, 90) if year % 10)


@checked_call
def greater_than(
    seed: Seed = 0,
    *,
    events: Sequence[str] = EVENTS,
    centuries: Sequence[str] = ("11", "12", "13", "14", "15", "16", "17", "18"),
    years: Sequence[str] = YEARS,
    chat: bool = False,
) -> Task:
    """Make the greater-than task.

    Parameters
    ----------
    seed : of every draw.
    events, years : what to draw from; each is cut into disjoint pools for choosing, fitting and testing.
    centuries : the first halves of years, shared by all pools.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> sorted(greater_than().test(1)[0][0].roles)
    ['END', 'XX', 'YY']
    """
    for half in (*centuries, *years):
        if len(half) != 2 or not half.isascii() or not half.isdigit():
            raise BadInput(f"half a year is two digits, but got {half!r}.")
    if not centuries:
        raise BadInput("there are no centuries: give at least one.")
    happened, ends = pools(events, seed, "events", least=1), pools(years, seed, "years", least=2)

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            event, century = rng.choice(happened[use]), rng.choice(list(centuries))
            year, other = rng.sample(ends[use], 2)
            first = _prompt(event, century, year, contrast, cluster)
            yield (first, _prompt(event, century, other, contrast, cluster)) if contrast == "year" else (first,)

    contrasts = (
        Contrast("year", "the year's last two digits / another year's", across=True),
        Contrast("half", "the year's last two digits / its first two", center="query"),
    )
    asked = {"events": tuple(events), "centuries": tuple(centuries), "years": tuple(years), "chat": chat}
    return made("greater_than", seed, contrasts, walk, asked)


def _prompt(event: str, century: str, year: str, contrast: str, cluster: int) -> Example:
    right = {ANSWER: 1} | ({contrast: 1} if contrast != ANSWER else {})
    wrong = {ANSWER: -1} | ({"half": -1} if contrast == "half" else {})
    draft = Draft().write(f"The {event} lasted from the year ").key(century, **wrong).role("XX")
    # the key is the tens, which is the token of all of YY where digits are read in twos
    made = draft.key(year[0], **right).write(f"{year[1]} to the year ").write(century).role("END").example(cluster)
    tens = made.keys[1].span[0]
    return replace(made, roles={**made.roles, "YY": (tens, tens + 2)}, answers=_answers(year[0]))


@cache
def _answers(tens: str) -> Answers | None:
    """Years of later and of earlier decades.

    One of the same decade is no answer: where digits are read one by one, its first digit says nothing.
    """
    later, earlier = (tuple(f"{n:02d}" for n in range(100) if sign * (n // 10 - int(tens)) > 0) for sign in (1, -1))
    return Answers(later, earlier) if later and earlier else None
