"""Binding: which box is the jam in? Keys are the box labels, the query is the last token.

Three contrasts (Lee et al. 2026, section 5.2 and appendix E):

- ``order``: the same words in every prompt, shuffled, and one fixed word asked for; + is the box at its place, − the
  other boxes. The word's own direction enters through the mean, so the query is centred.
- ``lexical``: a copy of the prompt with the word asked for replaced in both places; + is its box, − the box of the
  copy, seen by the same query. ``own_query`` is the authors' estimator, ``E[q kᵀ]`` of the prompts less that of the
  copies, each query with its own key. Copies then take their word from a pool that the prompts never use: with one
  pool for both, + and − would be exchangeable, and the difference nothing but noise.
- ``box``: a copy with the answer's label replaced; + is the label, − the label of the copy.

To exchange features of two boxes in the text, entries change places (``order``: a box keeps its label and its word),
words change places (``lexical``), or labels (``box``): each with the others or without.

The last two are drawn together: one prompt and two copies of it. ``order`` has prompts of its own, as one set of words
in all of them is what it means.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Literal

from qkscope.errors import BadInput
from qkscope.examples import Draft, Example, Sign, Span
from qkscope.kinds import Interval, Natural, Seed, checked_call
from qkscope.tasks.task import (
    ASKED,
    Contrast,
    Task,
    Unit,
    Use,
    checked_words,
    from_walk,
    labels,
    pools,
    rewritten,
    seeded,
)
from qkscope.tasks.words import BOXES, OBJECTS

Form = Literal["list", "sentence", "question"]
LINES: dict[str, tuple[str, str, str, str]] = {
    # before the word, between word and label, after the label, the question about a word
    "list": ("", ": ", "\n", "{}:"),
    "sentence": ("The ", " is in Box ", ". ", "The {} is in Box"),
    "question": ("The ", " is in Box ", ". ", "Which box is the {0} in? The {0} is in Box"),
}
_CHAT = "Which box is the {} in?\nAnswer: Box"  # appendix E; in a chat the model's turn follows it
Pairs = Sequence[tuple[str, str]]
FILLER = ("so", "well", "then", "now", "just", "again", "also", "once", "here", "there", "still", "yet", "soon")


@checked_call
def binding(
    entities: Annotated[int, Interval(ge=2, le=20)] = 9,
    form: Form = "list",
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
    form : ``list`` (``hat: O``), ``sentence``, or ``question`` (with the start of its answer; in a chat it ends
        ``Answer: Box``, as in the paper).
    seed : of every draw.
    lexical : the lexical contrast: one query for both keys, or the authors' estimator: each prompt's own query, and
        copies with words of a pool of their own.
    words, boxes : what to draw from; the words are cut into disjoint pools for choosing, fitting and testing.
    pool : how many different words the lexical contrast is fitted on; all of the fitting pool by default, and with
        ``own_query`` half of it, as the copies' words are the others.
    filler : up to so many words before each pair, so that order is not token position.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> binding(2, "sentence").test(1)[0][0].text.count("Box")
    3
    """
    labelled = checked_words(boxes, "boxes")
    if len(labelled) <= entities:
        raise BadInput(f"{entities} entities and a counterfactual need {entities + 1} boxes, but got {len(labelled)}.")
    split = pools(words, seed, "binding words", least=entities + 1)
    disjoint = lexical == "own_query"
    least, most = (entities, len(split["fit"]) - 1) if disjoint else (entities + 1, len(split["fit"]))
    if pool is not None and not least <= pool <= most:
        raise BadInput(f"{entities} entities and a counterfactual need a pool from {least} to {most}, but got {pool}.")
    cut = max(entities, len(split["fit"]) // 2) if disjoint and pool is None else pool
    fitted, address = split["fit"][:cut], (form, entities)

    before, between, after, question = LINES[form]
    question = _CHAT if chat and form == "question" else question
    ahead, rest = question[: question.index("{")], question[question.index("}") + 1 :]

    def prompt(pairs: Pairs, asked: int, contrast: str, rng: random.Random, cluster: int, own: Sign = 1) -> Example:
        """The contrast's + key is marked, as ``own`` says (its − keys too, unless they come from the copy)."""
        draft = Draft()
        for i, (word, box) in enumerate(pairs):
            padding = " ".join(rng.choices(FILLER, k=rng.randint(0, filler)))
            marks = labels(1 if i == asked else -1, contrast, ("lexical", "box"))
            marks |= {contrast: own} if contrast == "lexical" and i == asked else {}
            draft.write((padding.capitalize() + ". " if padding else "") + f"{before}{word}{between}")
            draft.key(box, **marks).write(after)
        word = pairs[asked][0]
        return draft.write(ahead).write(word).role(ASKED).write(rest.format(word)).example(cluster=cluster)

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        drawn = fitted if use == "fit" else split[use]
        copied = split["fit"][cut:] if disjoint and use == "fit" else drawn  # where a copy's word comes from
        swapped = seeded(seed, "binding", *address, use, "box")  # apart, so that both contrasts draw the same prompts
        fixed_words, fixed_boxes = rng.sample(split[use], entities), rng.sample(labelled, entities)
        for cluster in count():
            if contrast == "order":
                named, boxes = rng.sample(fixed_words, entities), rng.sample(fixed_boxes, entities)
                asked = named.index(fixed_words[0])
            else:
                named, boxes = rng.sample(drawn, entities), rng.sample(labelled, entities)
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
        text, pair, spans = str(example.text), (one, other), dict[int, tuple[Span, Span]]()
        for slot in pair:
            start, stop = example.keys[slot].span
            ahead_of = [word for word in words if text[:start].endswith(f"{before}{word}{between}")]
            if not ahead_of or not set(features) <= {"order", "lexical", "box"}:
                return None
            end = start - len(between)
            spans[slot] = (end - len(max(ahead_of, key=len)), end), (start, stop)
        pieces = dict[Span, str]()
        for slot, partner in (pair, pair[::-1]):
            place, word, box = (partner if name in features else slot for name in ("order", "lexical", "box"))
            pieces |= {spans[place][0]: text[slice(*spans[word][0])], spans[place][1]: text[slice(*spans[box][1])]}
        return rewritten(example, pieces, {one: other, other: one} if "order" in features else None)

    contrasts = (
        Contrast("order", "the box at the asked place / the other boxes", center="query", paired=False, unit="prompt"),
        Contrast("lexical", "the asked word's box / the same box with another word", across=not disjoint, unit=ASKED),
        Contrast("box", "the answer's label / another label in its place", across=True),
    )
    asked_for = {
        "entities": entities, "form": form, "lexical": lexical, "pool": pool, "filler": filler, "chat": chat,
        "words": tuple(words), "boxes": tuple(boxes),
    }  # fmt: skip
    return from_walk("binding", seed, contrasts, walk, asked_for, address, apart=["order"], exchange=exchange)
