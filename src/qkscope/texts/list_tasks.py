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
from dataclasses import dataclass
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
from qkscope.texts.word_pools import (
    BOXES,
    CATEGORIES,
    FILLER,
    FORMS,
    OBJECTS,
    checked_words,
    pools,
)

#: Of a prompt: before the word, between word and label, after the label, the question about a word.
LINES = FORMS["binding"]
#: Of a prompt: before the list, before an item, after an item, the question.
LISTS = FORMS["filter"]
POOLED = "category"  # the contrast that pools all categories

_CHAT = "Which box is the {} in?\nAnswer: Box"  # appendix E; in a chat the model's turn follows it
# as in the paper; not in LISTS, whose words the nano models know
_FIND = {"find": ("", "", ", ", " Find the {}.")}

WordPairs = Sequence[tuple[str, str]]


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
    labels_of_boxes = checked_words(boxes, "boxes")
    if len(labels_of_boxes) <= entities:
        raise BadInput(
            f"{entities} entities and a counterfactual need {entities + 1} boxes, "
            f"but got {len(labels_of_boxes)}."
        )
    split = pools(words, seed, "binding words", least=entities + 1)
    disjoint = lexical == "own_query"
    if disjoint and pool is None:
        pool_size: int | None = max(entities, len(split["fit"]) // 2)
    else:
        pool_size = pool
    before, between, after, question = LINES[form]
    if chat and form == "question":
        question = _CHAT
    wording = _Wording(before, between, after, question, tuple(words), filler)
    address = (form, entities)

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        drawn = split[use]
        copied = drawn  # where a copy's word comes from
        if use == "fit":
            drawn = split["fit"][:pool_size]
            copied = split["fit"][pool_size:] if disjoint else drawn
        # of its own, so that both contrasts draw the same prompts
        box_rng = seeded(seed, "binding", *address, use, "box")
        fixed_words = rng.sample(split[use], entities)
        fixed_boxes = rng.sample(labels_of_boxes, entities)
        for cluster in count():
            if contrast == "order":
                prompt_words = rng.sample(fixed_words, entities)
                prompt_boxes = rng.sample(fixed_boxes, entities)
                asked = prompt_words.index(fixed_words[0])
            else:
                prompt_words = rng.sample(drawn, entities)
                prompt_boxes = rng.sample(labels_of_boxes, entities)
                asked = rng.randrange(entities)
            pairs = list(zip(prompt_words, prompt_boxes, strict=True))
            before_filler = rng.getstate()
            first = wording.prompt(pairs, asked, contrast, rng, cluster)
            if contrast not in ("lexical", "box"):
                yield (first,)
                continue
            # drawn for both contrasts, so that both go on with the same numbers
            new_word = rng.choice([word for word in copied if word not in prompt_words])
            if contrast == "lexical":
                pairs[asked] = (new_word, prompt_boxes[asked])
            else:
                free = [box for box in labels_of_boxes if box not in prompt_boxes]
                pairs[asked] = (prompt_words[asked], box_rng.choice(free))
            after_both = rng.getstate()
            rng.setstate(before_filler)  # the copy gets the same filler
            sign: Sign = -1 if disjoint else 1
            yield first, wording.prompt(pairs, asked, contrast, rng, cluster, sign)
            rng.setstate(after_both)

    order = "the box at the asked place / the other boxes"
    same_box = "the asked word's box / the same box with another word"
    label = "the answer's label / another label in its place"
    contrasts = (
        Contrast("order", order, center="query", unit="prompt"),
        Contrast("lexical", same_box, across=not disjoint, unit=ASKED),
        Contrast("box", label, across=True),
    )
    parameters = {
        "entities": entities,
        "form": form,
        "lexical": lexical,
        "pool": pool,
        "filler": filler,
        "chat": chat,
        "words": tuple(words),
        "boxes": tuple(boxes),
    }
    return from_walk(
        "binding",
        seed,
        contrasts,
        walk,
        parameters,
        address,
        apart=["order"],
        exchange=wording.exchange,
    )


@dataclass(frozen=True)
class _Wording:
    """How a binding prompt is worded.

    Attributes
    ----------
    before, between, after : text before a word, between it and its label, and after the label.
    question : about a word, which stands at each ``{}``.
    words : all that may be drawn.
    filler : up to so many words before each pair.
    """

    before: str
    between: str
    after: str
    question: str
    words: tuple[str, ...]
    filler: int

    def prompt(
        self,
        pairs: WordPairs,
        asked: int,
        contrast: str,
        rng: random.Random,
        cluster: int,
        sign: Sign = 1,
    ) -> Example:
        """Write a prompt about one of the pairs, and mark the keys of a contrast.

        Parameters
        ----------
        pairs : words and boxes, in their order.
        asked : number of the pair that is asked about.
        contrast : whose keys are marked; − keys too, unless they come from the copy.
        rng : draws the filler.
        cluster : of the example.
        sign : of the lexical contrast's key: the copy's is − if each prompt has its own query.
        """
        draft = Draft()
        for i, (word, box) in enumerate(pairs):
            padding = " ".join(rng.choices(FILLER, k=rng.randint(0, self.filler)))
            if padding:
                padding = padding.capitalize() + ". "
            marks = labels(1 if i == asked else -1, contrast, ("lexical", "box"))
            if contrast == "lexical" and i == asked:
                marks[contrast] = sign
            draft.write(f"{padding}{self.before}{word}{self.between}")
            draft.key(box, **marks).write(self.after)
        word = pairs[asked][0]
        ahead = self.question[: self.question.index("{")]
        rest = self.question[self.question.index("}") + 1 :]
        draft.write(ahead).write(word).role(ASKED)
        draft.write(rest.format(word))
        return draft.example(cluster=cluster)

    def exchange(
        self, example: Example, features: Sequence[str], one: int, other: int
    ) -> Example | None:
        """Exchange features of two boxes in the text: the place, the word, the label."""
        if not set(features) <= {"order", "lexical", "box"}:
            return None
        words: dict[int, Span] = {}
        for slot in (one, other):
            word = self._word_before(example, slot)
            if word is None:
                return None
            words[slot] = word
        pieces: dict[Span, str] = {}
        for slot, partner in ((one, other), (other, one)):
            place = partner if "order" in features else slot
            word_of = partner if "lexical" in features else slot
            box_of = partner if "box" in features else slot
            pieces[words[place]] = example.piece(words[word_of])
            box = example.keys[box_of].span
            pieces[example.keys[place].span] = example.piece(box)
        moved = {one: other, other: one} if "order" in features else None
        return rewritten(example, pieces, moved)

    def _word_before(self, example: Example, slot: int) -> Span | None:
        """Where the word of a box stands; None if none of the words stands before it."""
        start, _ = example.keys[slot].span
        ahead = str(example.text)[:start]
        matches = []
        for word in self.words:
            if ahead.endswith(f"{self.before}{word}{self.between}"):
                matches.append(word)
        if not matches:
            return None
        end = start - len(self.between)
        return end - len(max(matches, key=len)), end


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
    names = _category_names(categories, words)
    split = {name: pools(words[name], seed, name, least=items) for name in names}
    _check_homes(names, words)
    start, before, after, question = (LISTS | _FIND)[form]

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            # every category is asked for equally often
            wanted = contrast if contrast in names else names[cluster % len(names)]
            chosen = []
            for name in names:
                for word in rng.sample(split[name][use], items):
                    chosen.append((word, name))
            rng.shuffle(chosen)
            draft = Draft().write(start)
            for i, (word, name) in enumerate(chosen):
                is_last = i + 1 == len(chosen)
                sign: Sign = 1 if name == wanted else -1
                draft.write(before).key(word, **labels(sign, contrast))
                draft.write("." if is_last and form != "bullets" else after)
            draft.write(question.format(wanted))
            yield (draft.example(cluster=cluster),)

    def exchange(example: Example, features: Sequence[str], one: int, other: int) -> Example | None:
        """All categories at once are exchanged by two items changing places; one alone is not."""
        if POOLED in features or set(names) <= set(features):
            return _with_keys_exchanged(example, one, other)
        return None

    contrasts = []
    for name in names:
        says = f"{name} / all other items, when {name} are asked for"
        contrasts.append(Contrast(name, says, unit="prompt"))
    says = "items of the asked category / other items"
    contrasts.append(Contrast(POOLED, says, center="query", unit="prompt"))
    parameters = {
        "categories": names,
        "form": form,
        "items": items,
        "chat": chat,
        "words": {name: list(words[name]) for name in names},
    }
    return from_walk(
        "filter",
        seed,
        contrasts,
        walk,
        parameters,
        address=(form, items, *names),
        starts_with_key=not chat and not start,
        # The pooled contrast could take its prompts from the categories'. It is held against their
        # span, and with a sample in common the two would agree more than two fits do.
        apart=[contrast.name for contrast in contrasts],
        exchange=exchange,
    )


def _category_names(
    categories: int | Sequence[str], words: Mapping[str, Sequence[str]]
) -> list[str]:
    """Names of the categories asked for, or a refusal."""
    if isinstance(categories, int):
        names = list(words)[:categories]
        if len(names) != categories:
            raise BadInput(
                f"there are word lists for {len(words)} categories, "
                f"but {categories} were asked for."
            )
    else:
        names = list(dict.fromkeys(categories))
    for name in names:
        if name not in words:
            raise BadInput(f"there is no word list for {name!r}: there is {', '.join(words)}.")
    if len(names) < 2:
        raise BadInput(f"a list needs 2 categories or more, but got {len(names)}.")
    if {ANSWER, POOLED} & set(names):
        raise BadInput(
            f"a category cannot be called {ANSWER!r} or {POOLED!r}: these name contrasts."
        )
    return names


def _check_homes(names: Sequence[str], words: Mapping[str, Sequence[str]]) -> None:
    """Refuse a word of two categories."""
    home: dict[str, str] = {}
    for name in names:
        for word in words[name]:
            first = home.setdefault(word, name)
            if first != name:
                raise BadInput(
                    f"{word!r} is one of the {first} and of the {name}: a word needs one category."
                )


def _with_keys_exchanged(example: Example, one: int, other: int) -> Example:
    """The example with the texts of two keys in each other's places."""
    first = example.keys[one].span
    second = example.keys[other].span
    return rewritten(example, {first: example.piece(second), second: example.piece(first)})


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
            place = rng.randrange(length - 1)  # the last word has no word after it in its own copy
            first = _repeated(listed, place, contrast, cluster)
            if contrast == "word":
                copy = list(listed)
                copy[place] = other
                yield first, _repeated(copy, place, contrast, cluster)
            else:
                yield (first,)

    after_first = "the word after the first occurrence / the other words"
    after_other = "the word after the one repeated / the same after another"
    contrasts = (
        Contrast("next", after_first, center="query", unit="END"),
        Contrast("word", after_other, across=True, unit="END"),
    )
    parameters = {"length": length, "chat": chat}
    return from_walk("induction", seed, contrasts, walk, parameters, address=(length,))


def _repeated(listed: Sequence[str], place: int, contrast: str, cluster: int) -> Example:
    """A list of words, and the same again up to one place."""
    draft = Draft().write("Words:")
    for i, word in enumerate(listed):
        draft.write(" ")
        sign: Sign = 1 if i == place + 1 else -1
        draft.key(word, **labels(sign, contrast, ("word",)))
        if i == place:
            draft.role("PREV")
        elif i == place + 1:
            draft.role("NEXT")
    for word in listed[: place + 1]:
        draft.write(" ").write(word)
    return draft.role("END").example(cluster=cluster)
