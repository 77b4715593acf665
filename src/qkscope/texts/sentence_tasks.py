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
from typing import Literal, NamedTuple

from qkscope.checking import Seed, checked_call
from qkscope.examples import Answers, Draft, Example, Sign
from qkscope.texts.task import ANSWER, Contrast, Task, Unit, Use, from_walk, labels, rewritten
from qkscope.texts.word_pools import (
    EVENTS,
    FIRST_NAMES,
    FORMS,
    MEN,
    PEOPLE,
    PLACES,
    THINGS,
    WOMEN,
    pools,
)

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
    people = pools([word for word in FIRST_NAMES if word not in kept], seed, "names", 3)
    goods = pools([word for word in THINGS if word not in kept], seed, "things", 1)
    spots = pools([word for word in PLACES if word not in kept], seed, "places", 1)

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        if form == "single" and use == "test":
            names = _Names("BABA", _SINGLE["io"], _SINGLE["subject"])
            yield (_gift(TEMPLATES[0], names, _SINGLE, contrast, 0),)
            return
        for cluster in count():
            if form in ("ABBA", "BABA"):
                order: str = form
            else:
                order = "ABBA" if cluster % 2 == 0 else "BABA"
            template = rng.choice(TEMPLATES)
            io, subject, third = rng.sample(people[use], 3)
            fill = {"place": rng.choice(spots[use]), "thing": rng.choice(goods[use])}
            drawn = [_Names(order, io, subject)]
            if contrast == "subject":
                # the same text up to the second mention, then the other name
                drawn.append(_Names("BABA" if order == "ABBA" else "ABBA", subject, io))
            elif contrast == "name":
                drawn.append(_Names(order, third, subject))
            yield tuple(_gift(template, names, fill, contrast, cluster) for names in drawn)

    def exchange(example: Example, features: Sequence[str], one: int, other: int) -> Example | None:
        first = example.keys[one].span
        second = example.keys[other].span
        roles = example.roles
        names = {roles.get("IO"), roles.get("S1")}
        if "name" not in features or {first, second} != names:
            return None
        return rewritten(example, {first: example.piece(second), second: example.piece(first)})

    contrasts = (
        Contrast("subject", "the name mentioned once / the name mentioned twice"),
        Contrast("name", "the indirect object / another name in its place", across=True),
    )
    parameters = {"form": form, "chat": chat}
    return from_walk("ioi", seed, contrasts, walk, parameters, (form,), exchange=exchange)


class _Names(NamedTuple):
    """Names of one prompt: ``ABBA`` mentions the indirect object first, ``BABA`` the subject."""

    order: str
    io: str
    subject: str

    def at(self, slot: str) -> str:
        """The name at slot A, B or S of a template."""
        if slot == "S":
            return self.subject
        return self.io if (slot == "A") == (self.order == "ABBA") else self.subject


def _gift(
    template: str, names: _Names, fill: dict[str, str], contrast: str, cluster: int
) -> Example:
    """Fill in a template and mark its names, roles and last word."""
    end = re.search(r"\w+\Z", template)
    assert end is not None
    draft = Draft()
    role = ""  # of the name before the current piece
    for piece in re.split(r"(\{\w+\})", template[: end.start()]):
        slot = piece[1:-1] if piece.startswith("{") else ""
        if slot in ("A", "B", "S"):
            role = _add_name(draft, names, slot, contrast)
        elif slot:
            draft.write(fill[slot])
        elif role == "S1":
            _write_after_subject(draft, piece)
            role = ""
        else:
            draft.write(piece)
    return draft.write(end.group()).role("END").example(cluster=cluster)


def _add_name(draft: Draft, names: _Names, slot: str, contrast: str) -> str:
    """Add the name at a slot as a key, with its role; return the role."""
    name = names.at(slot)
    is_answer = name == names.io
    if slot == "S":
        role = "S2"
    else:
        role = "IO" if is_answer else "S1"
    marked = ANSWER if role == "S2" else contrast  # the second mention is in no contrast
    sign: Sign = 1 if is_answer else -1
    draft.key(name, **labels(sign, marked, ("name",))).role(role)
    return role


def _write_after_subject(draft: Draft, piece: str) -> None:
    """Write the text after the first subject, its first word in the role ``S1+1``."""
    word = re.search(r"\w+", piece)
    assert word is not None
    draft.write(piece[: word.start()])
    draft.write(word.group()).role("S1+1")
    draft.write(piece[word.end() :])


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

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            event = rng.choice(happened[use])
            century = rng.choice(CENTURIES)
            years = rng.sample(ends[use], 2)
            unit = tuple(_war(event, century, year, contrast, cluster) for year in years)
            yield unit if contrast == "year" else unit[:1]

    contrasts = (
        Contrast("year", "the year's last two digits / another year's", across=True),
        Contrast("half", "the year's last two digits / its first two", center="query"),
    )
    return from_walk("greater_than", seed, contrasts, walk, {"chat": chat})


def _war(event: str, century: str, year: str, contrast: str, cluster: int) -> Example:
    """A prompt that asks for a year after one, whose two halves are keys."""
    draft = Draft().write(f"The {event} lasted from the year ")
    draft.key(century, **labels(-1, contrast, ("year",))).role("XX")
    # the key is the tens, which is the token of all of YY where digits are read in twos
    tens = year[0]
    ones = year[1]
    draft.key(tens, **labels(1, contrast)).write(ones).role("YY", 2)
    draft.write(" to the year ").write(century).role("END")
    # a year of the same decade is no answer: its first digit, where digits are read one by one, is
    # also that of years before
    decade = 10 * int(tens)
    later = tuple(f"{n:02d}" for n in range(decade + 10, 100))
    earlier = tuple(f"{n:02d}" for n in range(decade))
    return draft.example(cluster, Answers(later, earlier))


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
    names = (  # by gender, as `PRONOUNS`
        pools(MEN, seed, "names of men", least=1),
        pools(WOMEN, seed, "names of women", least=1),
    )
    trades = pools(PEOPLE, seed, "people", least=1)

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            gender = cluster % 2
            name = rng.choice(names[gender][use])
            other_name = rng.choice(names[1 - gender][use])
            trade = rng.choice(trades[use])
            prompt = _praise(name, gender, trade, contrast, cluster)
            if contrast == "gender":
                yield prompt, _praise(other_name, 1 - gender, trade, contrast, cluster)
            else:
                yield (prompt,)

    contrasts = (
        Contrast("gender", "the name / a name that takes the other pronoun", across=True),
        Contrast("person", "the name / the noun", center="query"),
    )
    return from_walk("pronoun", seed, contrasts, walk, {"chat": chat})


def _praise(name: str, gender: int, trade: str, contrast: str, cluster: int) -> Example:
    """A prompt that asks for a name's pronoun, the one numbered ``gender`` in `PRONOUNS`."""
    draft = Draft().write("So ")
    draft.key(name, **labels(1, contrast)).role("NAME")
    draft.write(" is such a good ")
    draft.key(trade, **labels(-1, contrast, ("gender",))).role("NOUN")
    draft.write(", ").write("isn't").role("END")
    right = PRONOUNS[gender]
    wrong = PRONOUNS[1 - gender]
    return draft.example(cluster, Answers((right,), (wrong,)))
