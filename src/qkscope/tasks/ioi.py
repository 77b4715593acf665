"""Indirect objects: "Then, Simon and Andrew went to the store. Simon gave a ring to" → Andrew.

Roles, by construction: ``IO`` (Andrew), ``S1`` (the first Simon), ``S1+1`` (the word after it), ``S2`` (the second) and
``END`` (the last word). Keys are the three names, the query is the last token; the indirect object is the answer.
Both orders of the names are drawn: ``ABBA`` puts the indirect object first, ``BABA`` the subject. ``single`` tests on
one prompt alone, that of franco2026's appendix G, and chooses and fits on others.

- ``subject``: a copy in which the *other* name is repeated; + is the name that is not repeated, − the one that is. All
  before the repetition is the same in both, so the names themselves cancel: what is left is what the repetition did.
- ``name``: a copy with another indirect object; + is its name, − the copy's, seen by the same query.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import count
from typing import Literal

from qkscope.examples import Draft, Example
from qkscope.kinds import Seed, checked_call
from qkscope.tasks.task import ANSWER, Contrast, Task, Unit, Use, from_walk, labels, pools
from qkscope.tasks.words import NAMES, PLACES, THINGS

Order = Literal["both", "ABBA", "BABA", "single"]
#: ``{A}`` and ``{B}`` are the names in order of their first use, ``{S}`` the one repeated.
TEMPLATES = (
    "Then, {A} and {B} were working at the {place}. {S} decided to give a {thing} to",
    "Then, {A} and {B} went to the {place}. {S} gave a {thing} to",
    "When {A} and {B} got a {thing} at the {place}, {S} decided to give it to",
    "Then, {A} and {B} had a long talk at the {place}. Afterwards {S} gave a {thing} to",
    "After {A} and {B} went to the {place}, {S} gave a {thing} to",
    "The {place} {A} and {B} went to had a {thing}. {S} gave it to",
    "Friends {A} and {B} found a {thing} at the {place}. {S} gave it to",
    "While {A} and {B} were walking to the {place}, {S} offered a {thing} to",
)
_SINGLE = {"io": "Andrew", "subject": "Simon", "place": "restaurant", "thing": "basketball"}


@checked_call
def ioi(form: Order = "both", seed: Seed = 0, *, chat: bool = False) -> Task:
    """Make the task of the indirect object.

    Parameters
    ----------
    form : ``ABBA`` (the indirect object stands first), ``BABA`` (the subject does), ``both``, in turn, or ``single``,
        whose test is one prompt: "Then, Simon and Andrew were working at the restaurant. Simon decided to give a
        basketball to".
    seed : of every draw.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> sorted(ioi("ABBA").test(1)[0][0].roles)
    ['END', 'IO', 'S1', 'S1+1', 'S2']
    """
    kept = set(_SINGLE.values()) if form == "single" else set()
    people, goods, spots = (
        pools([word for word in words if word not in kept], seed, what, least)
        for words, what, least in ((NAMES, "names", 3), (THINGS, "things", 1), (PLACES, "places", 1))
    )

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        if form == "single" and use == "test":
            yield (_prompt(TEMPLATES[0], "BABA", _SINGLE["io"], _SINGLE["subject"], _SINGLE, contrast, 0),)
            return
        for cluster in count():
            order = form if form in ("ABBA", "BABA") else ("ABBA", "BABA")[cluster % 2]
            template = rng.choice(TEMPLATES)
            io, subject, third = rng.sample(people[use], 3)
            fill = {"place": rng.choice(spots[use]), "thing": rng.choice(goods[use])}
            # of a subject's copy the text is the same up to the second mention, then the other name
            copies = {"subject": ("BABA" if order == "ABBA" else "ABBA", subject, io), "name": (order, third, subject)}
            drawn = [(order, io, subject), *(copies[name] for name in copies if name == contrast)]
            yield tuple(_prompt(template, *names, fill, contrast, cluster) for names in drawn)

    contrasts = (
        Contrast("subject", "the name mentioned once / the name mentioned twice"),
        Contrast("name", "the indirect object / another name in its place", across=True),
    )
    return from_walk("ioi", seed, contrasts, walk, {"form": form, "chat": chat}, address=(form,))


def _prompt(
    template: str, order: str, io: str, subject: str, fill: dict[str, str], contrast: str, cluster: int
) -> Example:
    words = {"A": io, "B": subject} if order == "ABBA" else {"A": subject, "B": io}
    body, last = re.fullmatch(r"(.*?)(\w+)", template, re.DOTALL).groups()  # type: ignore[union-attr]
    draft, before = Draft(), ""
    for piece in re.split(r"(\{\w+\})", body):
        slot = piece[1:-1] if piece.startswith("{") else ""
        if slot in ("A", "B", "S"):
            name = words.get(slot, subject)
            before = "S2" if slot == "S" else "IO" if name == io else "S1"
            marks = labels(1 if name == io else -1, ANSWER if before == "S2" else contrast, ("name",))
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
