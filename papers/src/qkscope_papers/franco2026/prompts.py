"""What language models are asked on: one task's prompts, the paper's prompt, natural text.

Natural text has no indirect objects, but it has tokens that stood before. A prompt ends with such a
token (``END``); ``PREV`` is the token before it, ``MATCH`` its last earlier place, ``NEXT`` the
token after that. What goes together when prompts are drawn again, for intervals: the template of a
prompt, or the group of documents of a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from qkscope import tasks
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.model.scope import Scope
from qkscope.texts.documents import python_texts
from qkscope.texts.holdout import Passage, split
from qkscope.texts.sentence_tasks import TEMPLATES
from qkscope.texts.task import Task, Unit, Use, seeded

IOI = "ioi"
SINGLE = "single"
TEXT = "text"
KINDS = (IOI, SINGLE, TEXT)
_LENGTH = 128  # tokens of a passage
_LEAST = 16  # tokens before the one that is asked about


def prompts_of(kind: str, model: str, revision: str | None, seed: int) -> Task:
    """The task of a kind; texts are cut by the model's own tokenizer."""
    if kind != TEXT:
        return tasks.ioi("single" if kind == SINGLE else "both", seed)
    if model.startswith("nano:"):
        raise BadInput(
            f"{model} knows the words of its own tasks alone: name another model for natural text."
        )
    tokenizer: Any = Scope.load(model, revision=revision, check=False).tokenizer
    return text_task(lambda text: tokenizer(text)["input_ids"], seed)


def text_task(encode: Callable[[str], Sequence[int]], seed: int) -> Task:
    """Prompts from the default texts, each side's from documents of its own."""
    sides = split(python_texts(), encode, length=_LENGTH, seed=seed)

    @cache
    def units(use: Use) -> list[Unit]:
        passages = list(sides[use])
        seeded(seed, "text", use).shuffle(passages)
        return [
            (example,) for passage in passages if (example := _repeated(passage, seed)) is not None
        ]

    return Task(TEXT, {}, lambda use, contrast, n: units(use)[:n], seed, asked={"length": _LENGTH})


def _repeated(passage: Passage, seed: int) -> Example | None:
    """The passage up to a token that stood before, drawn among all such; None if there is none."""
    ids = passage.ids
    found = []
    last: dict[int, int] = {}
    for at, token in enumerate(ids):
        before = last.get(token, 0)  # the first place is where idle heads look
        if at >= _LEAST and 0 < before < at - 2:
            found.append((at, before))
        last[token] = at
    if not found:
        return None
    at, before = seeded(seed, "repeated", passage.document, *ids[:8]).choice(found)
    places = {"END": at, "PREV": at - 1, "MATCH": before, "NEXT": before + 1}
    roles = {name: (place, place + 1) for name, place in places.items()}
    return Example(ids=ids[: at + 1], roles=roles, cluster=passage.group)


def clusters_of(task: Task, n: int) -> Int[Tensor, " n"]:
    """Which test prompts go together: those of one template, or of texts that share much."""
    examples = [unit[0] for unit in task.test(n)]
    if task.name == TEXT:
        return torch.tensor([int(example.cluster) for example in examples])
    shapes = [
        re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(template))) for template in TEMPLATES
    ]
    texts = [example.text or "" for example in examples]
    return torch.tensor(
        [next(i for i, shape in enumerate(shapes) if shape.fullmatch(text)) for text in texts]
    )
