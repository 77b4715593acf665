"""Tasks over a list: which box is the jam in, which of these are fruits, what comes next.

`binding`: keys are the box labels, the query is the last token. Three contrasts (Lee et al. 2026,
section 5.2 and appendix E):

- ``order``: the same words in every prompt, shuffled, and one fixed word asked for; + is the box at
  its place, − the other boxes. The word's own direction enters through the mean, so the query is
  centred.
- ``lexical``: a copy of the prompt with the word asked for replaced in both places; + is its box, −
  the box of the copy, seen by the same query. ``own_query`` is the authors' estimator, ``E[q kᵀ]``
  of the prompts less that of the copies, each query with its own key. Copies then take their word
  from a pool that the prompts never use: with one pool for both, + and − would be exchangeable, and
  the difference nothing but noise.
- ``box``: a copy with the answer's label replaced; + is the label, − the label of the copy.

To exchange features of two boxes in the text, entries change places (``order``: a box keeps its
label and its word), words change places (``lexical``), or labels (``box``): each with the others or
without.

The last two are drawn together: one prompt and two copies of it. ``order`` has prompts of its own,
as one set of words in all of them is what it means.

`filter`: find the fruits in a list. Keys are the items' last tokens, the query is the prompt's last
token. One contrast per category (+ its items, − all other items, in prompts that ask for it) as in
Lee et al. 2026, section 5.1, and ``category``, which pools all of them and centres the query:
within one category every query is alike, so its ΔC is ``q̄ (μ⁺ − μ⁻)ᵀ`` whatever the head does. In
the text a category is exchanged by two items changing places: all categories at once, so that of
one alone there is no such text.

`induction`: a list of words comes a second time and breaks off; which word follows? ``cat tree lamp
cat tree`` → lamp. The query is the last token, keys are the words of the first copy. Roles:
``PREV`` (the last word's first occurrence), ``NEXT`` (the word after it, the answer) and ``END``
(the last word).

- ``next``: + is the word after the first occurrence, − every other word of the first copy,
  query-centred.
- ``word``: a copy in which the word asked about is another one, in both places; + is what follows
  it, − the same word in the copy, seen by the same query.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Literal

from qkscope.checking import Count, Interval, Natural, Seed, checked_call
from qkscope.errors import BadInput
from qkscope.examples import Draft, Example, Sign, Span
from qkscope.texts.task import (
    ANSWER,
    ASKED,
    Contrast,
    Task,
    Unit,
    Use,
    from_walk,
    labels,
    rewritten,
    seeded,
)
from qkscope.texts.word_pools import BOXES, CATEGORIES, FORMS, OBJECTS, checked_words, pools

POOLED = "category"
LINES = FORMS[
    "binding"
]  # before the word, between word and label, after the label, the question about a word
LISTS = FORMS["filter"]  # before the list, before an item, after an item, the question
_CHAT = "Which box is the {} in?\nAnswer: Box"  # appendix E; in a chat the model's turn follows it
_FIND = {
    "find": ("", "", ", ", " Find the {}.")
}  # as in the paper; not in LISTS, whose words the nano models know
Pairs = Sequence[tuple[str, str]]
FILLER = (
    "so",
    "well",
    "then",
    "now",
    "just",
    "again",
    "also",
    "once",
    "here",
    "there",
    "still",
    "yet",
    "soon",
)


@checked_call
def binding(
    entities: Annotated[int, Interval(ge=2, le=20)] = 9,
    form: Literal["list", "sentence", "question"] = "list",
    seed: Seed = 0,
    *,
    lexical: Literal["same_query", "own_query"] = "same_query",
    words: Sequence[str] = OBJECTS,
    boxes: Sequence[str] = BOXES,
    pool: int | None = None,
    filler: Natural = 0,
    chat: bool = False,
) -> Task:
    """Make the binding task.

    Parameters
    ----------
    entities : pairs of word and box in a prompt, 2 to 20.
    form : ``list`` (``hat: O``), ``sentence``, or ``question`` (with the start of its answer; in a
        chat it ends ``Answer: Box``, as in the paper).
    seed : of every draw.
    lexical : the lexical contrast: one query for both keys, or the authors' estimator: each
        prompt's own query, and copies with words of a pool of their own.
    words, boxes : what to draw from; the words are cut into disjoint pools for choosing, fitting
        and testing.
    pool : how many different words the lexical contrast is fitted on; all of the fitting pool by
        default, and with ``own_query`` half of it, as the copies' words are the others.
    filler : up to so many words before each pair, so that order is not token position.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> binding(2, "sentence").test(1)[0][0].text.count("Box")
    3
    """
    labelled = checked_words(boxes, "boxes")
    if len(labelled) <= entities:
        raise BadInput(
            f"{entities} entities and a counterfactual need {entities + 1} boxes, but got {len(labelled)}."
        )
    split = pools(words, seed, "binding words", least=entities + 1)
    disjoint = lexical == "own_query"
    cut = max(entities, len(split["fit"]) // 2) if disjoint and pool is None else pool
    fitted = split["fit"][:cut]
    address = (form, entities)

    before, between, after, question = LINES[form]
    question = _CHAT if chat and form == "question" else question
    ahead = question[: question.index("{")]
    rest = question[question.index("}") + 1 :]

    def prompt(
        pairs: Pairs, asked: int, contrast: str, rng: random.Random, cluster: int, own: Sign = 1
    ) -> Example:
        """The contrast's + key is marked, as ``own`` says (its − keys too, unless they come from
        the copy).
        """
        draft = Draft()
        for i, (word, box) in enumerate(pairs):
            padding = " ".join(rng.choices(FILLER, k=rng.randint(0, filler)))
            marks = labels(1 if i == asked else -1, contrast, ("lexical", "box"))
            marks |= {contrast: own} if contrast == "lexical" and i == asked else {}
            draft.write(
                (padding.capitalize() + ". " if padding else "") + f"{before}{word}{between}"
            )
            draft.key(box, **marks).write(after)
        word = pairs[asked][0]
        return (
            draft.write(ahead)
            .write(word)
            .role(ASKED)
            .write(rest.format(word))
            .example(cluster=cluster)
        )

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        drawn = fitted if use == "fit" else split[use]
        copied = (
            split["fit"][cut:] if disjoint and use == "fit" else drawn
        )  # where a copy's word comes from
        swapped = seeded(
            seed, "binding", *address, use, "box"
        )  # apart, so that both contrasts draw the same prompts
        fixed_words = rng.sample(split[use], entities)
        fixed_boxes = rng.sample(labelled, entities)
        for cluster in count():
            if contrast == "order":
                named = rng.sample(fixed_words, entities)
                boxes = rng.sample(fixed_boxes, entities)
                asked = named.index(fixed_words[0])
            else:
                named = rng.sample(drawn, entities)
                boxes = rng.sample(labelled, entities)
                asked = rng.randrange(entities)
            pairs = list(zip(named, boxes, strict=True))
            state = rng.getstate()
            first = prompt(pairs, asked, contrast, rng, cluster)
            if contrast not in ("lexical", "box"):
                yield (first,)
                continue
            other = rng.choice([word for word in copied if word not in named]), boxes[asked]
            if contrast == "box":
                other = named[asked], swapped.choice([box for box in labelled if box not in boxes])
            after_both = rng.getstate()
            rng.setstate(state)  # the copy gets the same filler
            pairs[asked] = other
            yield first, prompt(pairs, asked, contrast, rng, cluster, -1 if disjoint else 1)
            rng.setstate(after_both)

    def exchange(example: Example, features: Sequence[str], one: int, other: int) -> Example | None:
        text = str(example.text)
        pair = (one, other)
        spans = dict[int, tuple[Span, Span]]()
        for slot in pair:
            start, stop = example.keys[slot].span
            ahead_of = [word for word in words if text[:start].endswith(f"{before}{word}{between}")]
            if not ahead_of or not set(features) <= {"order", "lexical", "box"}:
                return None
            end = start - len(between)
            spans[slot] = (end - len(max(ahead_of, key=len)), end), (start, stop)
        pieces = dict[Span, str]()
        for slot, partner in (pair, pair[::-1]):
            place = partner if "order" in features else slot
            word = partner if "lexical" in features else slot
            box = partner if "box" in features else slot
            pieces |= {
                spans[place][0]: text[slice(*spans[word][0])],
                spans[place][1]: text[slice(*spans[box][1])],
            }
        return rewritten(example, pieces, {one: other, other: one} if "order" in features else None)

    contrasts = (
        Contrast(
            "order", "the box at the asked place / the other boxes", center="query", unit="prompt"
        ),
        Contrast(
            "lexical",
            "the asked word's box / the same box with another word",
            across=not disjoint,
            unit=ASKED,
        ),
        Contrast("box", "the answer's label / another label in its place", across=True),
    )
    asked_for = {
        "entities": entities, "form": form, "lexical": lexical, "pool": pool, "filler": filler, "chat": chat,
        "words": tuple(words), "boxes": tuple(boxes),
    }  # fmt: skip
    return from_walk(
        "binding", seed, contrasts, walk, asked_for, address, apart=["order"], exchange=exchange
    )


@checked_call
def filter_task(
    categories: int | Sequence[str] = 5,
    form: Literal["list", "bullets", "question", "find"] = "list",
    seed: Seed = 0,
    *,
    items: Count = 5,
    words: Mapping[str, Sequence[str]] = CATEGORIES,
    chat: bool = False,
) -> Task:
    """Make the filter task (``qkscope.texts.tasks.filter``).

    Parameters
    ----------
    categories : 5 or 13 for the papers' sets, or names from ``words``.
    form : ``list``, ``bullets``, ``question``, or ``find`` (the paper's: the list, then ``Find the
        fruits.``).
    seed : of every draw.
    items : items of each category in a prompt.
    words : words of every category; your own lists are welcome, and words of several tokens too.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> filter_task(["fish", "birds"], items=2).test(1)[0][0].keys[0].labels["answer"] in (1, -1)
    True
    """
    named = (
        list(words)[:categories] if isinstance(categories, int) else list(dict.fromkeys(categories))
    )
    if isinstance(categories, int) and len(named) != categories:
        raise BadInput(
            f"there are word lists for {len(words)} categories, but {categories} were asked for."
        )
    for name in (name for name in named if name not in words):
        raise BadInput(f"there is no word list for {name!r}: there is {', '.join(words)}.")
    if len(named) < 2:
        raise BadInput(f"a list needs 2 categories or more, but got {len(named)}.")
    if {ANSWER, POOLED} & set(named):
        raise BadInput(
            f"a category cannot be called {ANSWER!r} or {POOLED!r}: these name contrasts."
        )
    split = {name: pools(words[name], seed, name, least=items) for name in named}
    home: dict[str, str] = {}
    for name in named:
        for word in (word for word in words[name] if home.setdefault(word, name) != name):
            raise BadInput(
                f"{word!r} is one of the {home[word]} and of the {name}: a word needs one category."
            )
    start, before, after, question = (LISTS | _FIND)[form]

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            # every category is asked for equally often
            wanted = contrast if contrast in named else named[cluster % len(named)]
            chosen = [
                (word, name) for name in named for word in rng.sample(split[name][use], items)
            ]
            rng.shuffle(chosen)
            draft = Draft().write(start)
            for i, (word, name) in enumerate(chosen):
                draft.write(before).key(word, **labels(1 if name == wanted else -1, contrast))
                draft.write(after if i + 1 < len(chosen) or form == "bullets" else ".")
            yield (draft.write(question.format(wanted)).example(cluster=cluster),)

    def exchange(example: Example, features: Sequence[str], one: int, other: int) -> Example | None:
        first = example.keys[one].span
        second = example.keys[other].span
        if POOLED not in features and not set(named) <= set(features):
            return None
        return rewritten(example, {first: example.piece(second), second: example.piece(first)})

    says = {name: f"{name} / all other items, when {name} are asked for" for name in named}
    contrasts = [Contrast(name, said, unit="prompt") for name, said in says.items()]
    pooled = "items of the asked category / other items"
    contrasts.append(Contrast(POOLED, pooled, center="query", unit="prompt"))
    lists = {name: list(words[name]) for name in named}
    asked = {"categories": named, "form": form, "items": items, "chat": chat, "words": lists}
    # The pooled contrast could take its prompts from the categories'. It is held against their
    # span, and with a sample in common the two would agree more than two fits do.
    apart = [contrast.name for contrast in contrasts]
    address = (form, items, *named)
    return from_walk(
        "filter", seed, contrasts, walk, asked, address, not chat and not start, apart, exchange
    )


@checked_call
def induction(
    length: Annotated[int, Interval(ge=3, le=32)] = 8, seed: Seed = 0, *, chat: bool = False
) -> Task:
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
            first = _repeated(listed, at, contrast, cluster)
            copy = [other if i == at else word for i, word in enumerate(listed)]
            yield (
                (first, _repeated(copy, at, contrast, cluster)) if contrast == "word" else (first,)
            )

    says = "the word after the first occurrence / the other words"
    contrasts = (
        Contrast("next", says, center="query", unit="END"),
        Contrast(
            "word",
            "the word after the one repeated / the same after another",
            across=True,
            unit="END",
        ),
    )
    return from_walk(
        "induction", seed, contrasts, walk, {"length": length, "chat": chat}, address=(length,)
    )


def _repeated(listed: Sequence[str], at: int, contrast: str, cluster: int) -> Example:
    draft = Draft().write("Words:")
    for i, word in enumerate(listed):
        draft.write(" ").key(word, **labels(1 if i == at + 1 else -1, contrast, ("word",)))
        if i in (at, at + 1):
            draft.role("PREV" if i == at else "NEXT")
    for word in listed[: at + 1]:
        draft.write(" ").write(word)
    return draft.role("END").example(cluster=cluster)
