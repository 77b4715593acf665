"""Tasks in one sentence: who is given the ring, a later year, a pronoun.

`ioi`: "Then, Simon and Andrew went to the store. Simon gave a ring to" → Andrew. Roles, by
construction: ``IO`` (Andrew), ``S1`` (the first Simon), ``S1+1`` (the word after it), ``S2`` (the
second) and ``END`` (the last word). Keys are the three names, the query is the last token; the
indirect object is the answer. Both orders of the names are drawn: ``ABBA`` puts the indirect object
first, ``BABA`` the subject. ``single`` tests on one prompt alone, that of franco2026's appendix G,
and chooses and fits on others.

- ``subject``: a copy in which the *other* name is repeated; + is the name that is not repeated, −
  the one that is. All before the repetition is the same in both, so the names themselves cancel:
  what is left is what the repetition did.
- ``name``: a copy with another indirect object; + is its name, − the copy's, seen by the same
  query. In the text it is exchanged with the subject's by the two names changing places before the
  repetition. ``subject`` cannot be: the names stand before what repeats one of them, and no key
  knows what comes after it.

Of the other two the answer is no key, so they name what the model may go on with.

`greater_than`: "The war lasted from the year 1732 to the year 17" → a year after 32. The query is
the last token. Keys are the two halves of the first year: ``YY``, which the answer depends on, and
``XX``. A tokenizer that reads digits one by one has ``YY`` stand for its tens, the digit that is to
be written next; one that reads the whole year as a token is refused. Roles: ``XX``, ``YY`` and
``END``.

- ``year``: a copy with another ``YY``; + is its token, − the copy's, seen by the same query.
- ``half``: + is ``YY``, − is ``XX``, query-centred.

`pronoun`: "So Mary is such a good cook, isn't" → she. The query is the last token, keys are the
name (the answer: it decides the pronoun) and the noun. Roles: ``NAME``, ``NOUN`` and ``END``.

- ``gender``: a copy with a name of the other kind; + is the name, − the copy's, seen by the same
  query.
- ``person``: + is the name, − the noun, query-centred.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal

from qkscope.checking import Seed, checked_call
from qkscope.examples import Answers, Draft, Example
from qkscope.texts.task import ANSWER, Contrast, Task, Unit, Use, from_walk, labels, rewritten
from qkscope.texts.word_pools import EVENTS, FORMS, MEN, NAMES, PEOPLE, PLACES, THINGS, WOMEN, pools

Order = Literal["both", "ABBA", "BABA", "single"]
TEMPLATES = FORMS["ioi"]["templates"]
_SINGLE = {"io": "Andrew", "subject": "Simon", "place": "restaurant", "thing": "basketball"}
CENTURIES = ("11", "12", "13", "14", "15", "16", "17", "18")
YEARS = tuple(f"{year:02d}" for year in range(11, 90) if year % 10)
PRONOUNS = (" he", " she")  # of the men and of the women


@checked_call
def ioi(form: Order = "both", seed: Seed = 0, *, chat: bool = False) -> Task:
    """Make the task of the indirect object.

    Parameters
    ----------
    form : ``ABBA`` (the indirect object stands first), ``BABA`` (the subject does), ``both``, in
        turn, or ``single``, whose test is one prompt: "Then, Simon and Andrew were working at the
        restaurant. Simon decided to give a basketball to".
    seed : of every draw.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> sorted(ioi("ABBA").test(1)[0][0].roles)
    ['END', 'IO', 'S1', 'S1+1', 'S2']
    """
    kept = set(_SINGLE.values()) if form == "single" else set()
    people = pools([word for word in NAMES if word not in kept], seed, "names", 3)
    goods = pools([word for word in THINGS if word not in kept], seed, "things", 1)
    spots = pools([word for word in PLACES if word not in kept], seed, "places", 1)

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        if form == "single" and use == "test":
            yield (
                _gift(
                    TEMPLATES[0], ("BABA", _SINGLE["io"], _SINGLE["subject"]), _SINGLE, contrast, 0
                ),
            )
            return
        for cluster in count():
            order = form if form in ("ABBA", "BABA") else ("ABBA", "BABA")[cluster % 2]
            template = rng.choice(TEMPLATES)
            io, subject, third = rng.sample(people[use], 3)
            fill = {"place": rng.choice(spots[use]), "thing": rng.choice(goods[use])}
            # of a subject's copy the text is the same up to the second mention, then the other name
            copies = {
                "subject": ("BABA" if order == "ABBA" else "ABBA", subject, io),
                "name": (order, third, subject),
            }
            drawn = [(order, io, subject), *(copies[name] for name in copies if name == contrast)]
            yield tuple(_gift(template, names, fill, contrast, cluster) for names in drawn)

    def exchange(example: Example, features: Sequence[str], one: int, other: int) -> Example | None:
        first = example.keys[one].span
        second = example.keys[other].span
        if "name" not in features or {first, second} != {
            example.roles.get("IO"),
            example.roles.get("S1"),
        }:
            return None
        return rewritten(example, {first: example.piece(second), second: example.piece(first)})

    contrasts = (
        Contrast("subject", "the name mentioned once / the name mentioned twice"),
        Contrast("name", "the indirect object / another name in its place", across=True),
    )
    return from_walk(
        "ioi", seed, contrasts, walk, {"form": form, "chat": chat}, (form,), exchange=exchange
    )


def _gift(
    template: str, names: tuple[str, str, str], fill: dict[str, str], contrast: str, cluster: int
) -> Example:
    order, io, subject = names
    words = {"A": io, "B": subject} if order == "ABBA" else {"A": subject, "B": io}
    body, last = re.fullmatch(r"(.*?)(\w+)", template, re.DOTALL).groups()  # type: ignore[union-attr]
    draft = Draft()
    before = ""
    for piece in re.split(r"(\{\w+\})", body):
        slot = piece[1:-1] if piece.startswith("{") else ""
        if slot in ("A", "B", "S"):
            name = words.get(slot, subject)
            before = "S2" if slot == "S" else "IO" if name == io else "S1"
            marks = labels(
                1 if name == io else -1, ANSWER if before == "S2" else contrast, ("name",)
            )
            draft.key(name, **marks).role(before)
        elif slot:
            draft.write(fill[slot])
        elif before == "S1":  # mark the first word after the subject
            blank, word, rest = re.fullmatch(r"(\W*)(\w+)(.*)", piece, re.DOTALL).groups()  # type: ignore[union-attr]
            draft.write(blank).write(word).role("S1+1").write(rest)
            before = ""
        else:
            draft.write(piece)
    return draft.write(last).role("END").example(cluster=cluster)


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
    happened = pools(EVENTS, seed, "events", least=1)
    ends = pools(YEARS, seed, "years", least=2)

    def prompt(event: str, century: str, year: str, contrast: str, cluster: int) -> Example:
        draft = Draft().write(f"The {event} lasted from the year ")
        draft.key(century, **labels(-1, contrast, ("year",))).role("XX")
        # the key is the tens, which is the token of all of YY where digits are read in twos
        draft.key(year[0], **labels(1, contrast)).write(year[1]).role("YY", 2).write(
            " to the year "
        )
        # a year of the same decade is no answer: where digits are read one by one, its first digit
        # says nothing
        sides = (
            tuple(f"{n:02d}" for n in range(100) if sign * (n // 10 - int(year[0])) > 0)
            for sign in (1, -1)
        )
        return draft.write(century).role("END").example(cluster, Answers(*sides))

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            event = rng.choice(happened[use])
            century = rng.choice(CENTURIES)
            unit = tuple(
                prompt(event, century, year, contrast, cluster) for year in rng.sample(ends[use], 2)
            )
            yield unit if contrast == "year" else unit[:1]

    contrasts = (
        Contrast("year", "the year's last two digits / another year's", across=True),
        Contrast("half", "the year's last two digits / its first two", center="query"),
    )
    return from_walk("greater_than", seed, contrasts, walk, {"chat": chat})


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
    named = (
        pools(MEN, seed, "names of men", least=1),
        pools(WOMEN, seed, "names of women", least=1),
    )
    trades = pools(PEOPLE, seed, "people", least=1)

    def prompt(name: str, turn: int, trade: str, contrast: str, cluster: int) -> Example:
        draft = (
            Draft()
            .write("So ")
            .key(name, **labels(1, contrast))
            .role("NAME")
            .write(" is such a good ")
        )
        draft.key(trade, **labels(-1, contrast, ("gender",))).role("NOUN").write(", ").write(
            "isn't"
        ).role("END")
        return draft.example(cluster, Answers((PRONOUNS[turn],), (PRONOUNS[1 - turn],)))

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            turns = [(cluster + other) % 2 for other in (0, 1)]
            names = [rng.choice(named[turn][use]) for turn in turns]
            trade = rng.choice(trades[use])
            unit = tuple(
                prompt(*told, trade, contrast, cluster) for told in zip(names, turns, strict=True)
            )
            yield unit if contrast == "gender" else unit[:1]

    contrasts = (
        Contrast("gender", "the name / a name that takes the other pronoun", across=True),
        Contrast("person", "the name / the noun", center="query"),
    )
    return from_walk("pronoun", seed, contrasts, walk, {"chat": chat})
