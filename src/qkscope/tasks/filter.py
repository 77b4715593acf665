"""Filter heads: find the fruits in a list. Keys are the items' last tokens, the query is the prompt's last token.

One contrast per category (+ its items, − all other items, in prompts that ask for it) as in Lee et al. 2026, section
5.1, and ``category``, which pools all of them and centres the query: within one category every query is alike, so its
ΔC is ``q̄ (μ⁺ − μ⁻)ᵀ`` whatever the head does. In the text a category is exchanged by two items changing places: all
categories at once, so that of one alone there is no such text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Literal

from qkscope.errors import BadInput
from qkscope.examples import Draft, Example
from qkscope.kinds import Count, Seed, checked_call
from qkscope.tasks.task import ANSWER, Contrast, Task, Unit, Use, from_walk, labels, pools, rewritten
from qkscope.tasks.words import CATEGORIES

Form = Literal["list", "bullets", "question", "find"]
POOLED = "category"
FORMS: dict[str, tuple[str, str, str, str]] = {
    # before the list, before an item, after an item, the question
    "list": ("Items:", " ", ",", "\nThe {} in the list are:"),
    "bullets": ("Items:\n", "- ", "\n", "\nThe {} in the list are:"),
    "question": ("", "", ", ", "\nQuestion: Which of these are {}?\nAnswer:"),
}
_FIND = {"find": ("", "", ", ", " Find the {}.")}  # as in the paper; not in FORMS, whose words the nano models know


@checked_call
def filter_task(
    categories: int | Sequence[str] = 5,
    form: Form = "list",
    seed: Seed = 0,
    *,
    items: Count = 5,
    words: Mapping[str, Sequence[str]] = CATEGORIES,
    chat: bool = False,
) -> Task:
    """Make the filter task (``qkscope.tasks.filter``).

    Parameters
    ----------
    categories : 5 or 13 for the papers' sets, or names from ``words``.
    form : ``list``, ``bullets``, ``question``, or ``find`` (the paper's: the list, then ``Find the fruits.``).
    seed : of every draw.
    items : items of each category in a prompt.
    words : words of every category; your own lists are welcome, and words of several tokens too.
    chat : whether prompts go into the model's chat template.

    Examples
    --------
    >>> filter_task(["fish", "birds"], items=2).test(1)[0][0].keys[0].labels["answer"] in (1, -1)
    True
    """
    named = list(words)[:categories] if isinstance(categories, int) else list(dict.fromkeys(categories))
    if isinstance(categories, int) and len(named) != categories:
        raise BadInput(f"there are word lists for {len(words)} categories, but {categories} were asked for.")
    for name in (name for name in named if name not in words):
        raise BadInput(f"there is no word list for {name!r}: there is {', '.join(words)}.")
    if len(named) < 2:
        raise BadInput(f"a list needs 2 categories or more, but got {len(named)}.")
    if {ANSWER, POOLED} & set(named):
        raise BadInput(f"a category cannot be called {ANSWER!r} or {POOLED!r}: these name contrasts.")
    split = {name: pools(words[name], seed, name, least=items) for name in named}
    home: dict[str, str] = {}
    for name in named:
        for word in (word for word in words[name] if home.setdefault(word, name) != name):
            raise BadInput(f"{word!r} is one of the {home[word]} and of the {name}: a word needs one category.")
    start, before, after, question = (FORMS | _FIND)[form]

    def walk(rng: random.Random, use: Use, contrast: str) -> Iterator[Unit]:
        for cluster in count():
            # every category is asked for equally often
            wanted = contrast if contrast in named else named[cluster % len(named)]
            chosen = [(word, name) for name in named for word in rng.sample(split[name][use], items)]
            rng.shuffle(chosen)
            draft = Draft().write(start)
            for i, (word, name) in enumerate(chosen):
                draft.write(before).key(word, **labels(1 if name == wanted else -1, contrast))
                draft.write(after if i + 1 < len(chosen) or form == "bullets" else ".")
            yield (draft.write(question.format(wanted)).example(cluster=cluster),)

    def exchange(example: Example, features: Sequence[str], one: int, other: int) -> Example | None:
        first, second = (example.keys[slot].span for slot in (one, other))
        if POOLED not in features and not set(named) <= set(features):
            return None
        return rewritten(example, {first: example.piece(second), second: example.piece(first)})

    says = {name: f"{name} / all other items, when {name} are asked for" for name in named}
    contrasts = [Contrast(name, said, paired=False, unit="prompt") for name, said in says.items()]
    pooled = "items of the asked category / other items"
    contrasts.append(Contrast(POOLED, pooled, center="query", paired=False, unit="prompt"))
    lists = {name: list(words[name]) for name in named}
    asked = {"categories": named, "form": form, "items": items, "chat": chat, "words": lists}
    # The pooled contrast could take its prompts from the categories'. It is held against their span, and with a sample
    # in common the two would agree more than two fits do.
    apart, address = [contrast.name for contrast in contrasts], (form, items, *named)
    return from_walk("filter", seed, contrasts, walk, asked, address, not chat and not start, apart, exchange)
