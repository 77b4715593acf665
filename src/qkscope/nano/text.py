r"""What the nano models read: the tasks' own texts by the thousand, made as ids on the device.

A text with slots (``{word0}: {box0}\n … {asked0}: {answer0}``) is tokenised once; a batch is its ids, repeated, with
random words scattered into the slots. The ids are those the tokenizer gives for the finished text (a test compares
them with the tasks' prompts). Loss is taken on answers alone, and on the second copy of repeated words.

No story has two names of the pool that ``ioi(seed=0)`` tests with, so each of its test prompts has a pair of names that
is new to the task; repeated words are drawn from the whole vocabulary, names among them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkscope.nano.words import BOS, PAD, SPECIAL, vocabulary, word_ids
from qkscope.tasks.binding import LINES
from qkscope.tasks.filter import FORMS
from qkscope.tasks.ioi import TEMPLATES
from qkscope.tasks.task import pools
from qkscope.tasks.words import BOXES, CATEGORIES, FIVE, NAMES, OBJECTS, PLACES, THINGS

QUESTIONS = {"list": 6, "sentence": 4, "question": 3}
"""Questions about one context: fewer where they are long."""
_BETWEEN = {"list": "\n", "sentence": ". ", "question": "\n"}
_ITEMS = 5
_ANY_WORD = "hat"


class Rows(NamedTuple):
    """Ids of n texts, and which of them are to be predicted from what stands before."""

    ids: Int[Tensor, "n t"]
    asked: Bool[Tensor, "n t"]


class Slotted:
    """Texts with slots, tokenised once; all of them have the same slots.

    Parameters
    ----------
    texts : with ``{name}`` for each slot; slots called ``answer…`` are to be predicted.
    slots : their names, in the order of the values.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], slots: Sequence[str], device: torch.device) -> None:
        found = [_tokenised(tokenizer, text) for text in texts]
        length = max(len(ids) for ids, _ in found)
        padded = [ids + [word_ids()[PAD]] * (length - len(ids)) for ids, _ in found]
        self.ids = torch.tensor(padded, device=device)
        where = [[place for slot in slots for place in places[slot]] for _, places in found]
        self.where = torch.tensor(where, device=device)
        # a slot may come twice in a text: its value goes to both places
        columns = [i for i, slot in enumerate(slots) for _ in found[0][1][slot]]
        self.column = torch.tensor(columns, device=device)
        self.asked = torch.tensor([slots[i].startswith("answer") for i in columns], device=device)

    def fill(self, values: Int[Tensor, "n s"], text: Int[Tensor, " n"] | None = None) -> Rows:
        """One row per line of values; ``text`` says which of the texts each is, the first if not given."""
        text = torch.zeros_like(values[:, 0]) if text is None else text
        ids, where = self.ids[text], self.where[text]
        asked = torch.zeros_like(ids, dtype=torch.bool).scatter(1, where, self.asked.expand_as(where))
        return Rows(ids.scatter(1, where, values[:, self.column]), asked)


def _tokenised(tokenizer: Any, text: str) -> tuple[list[int], dict[str, list[int]]]:
    """Ids, and the tokens of each slot."""
    written, starts = "", {}  # type: str, dict[str, list[int]]
    for i, piece in enumerate(re.split(r"\{(\w+)\}", text)):
        if i % 2:
            starts.setdefault(piece, []).append(len(written))
        written += _ANY_WORD if i % 2 else piece
    encoded = tokenizer(written, return_offsets_mapping=True)
    token_at = {start: i for i, (start, stop) in enumerate(encoded["offset_mapping"]) if stop > start}
    return encoded["input_ids"], {slot: [token_at[start] for start in own] for slot, own in starts.items()}


def stacked(groups: Sequence[Rows]) -> Rows:
    """All rows in one batch, shorter ones padded on the right, where causal attention cannot see it."""
    length = max(rows.ids.shape[1] for rows in groups)
    pad = torch.nn.functional.pad
    ids = [pad(rows.ids, (0, length - rows.ids.shape[1]), value=word_ids()[PAD]) for rows in groups]
    return Rows(torch.cat(ids), torch.cat([pad(rows.asked, (0, length - rows.asked.shape[1])) for rows in groups]))


class Texts:
    """Draws rows of every kind of text on one device."""

    def __init__(self, tokenizer: Any, device: torch.device) -> None:
        self.tokenizer, self.device = tokenizer, device
        self._boxes: dict[tuple[str, int, int], Slotted] = {}
        self._lists: dict[str, Slotted] = {}
        self._known: dict[tuple[str, ...], Tensor] = {}
        held = set(pools(NAMES, 0, "names", least=3)["test"])
        self._names = sorted(NAMES, key=lambda name: name in held)  # those of the tests last
        self._free = len(NAMES) - len(held)

    def binding(self, n: int, form: str, entities: int, draw: torch.Generator) -> Rows:
        """Contexts of words and boxes, each with several questions."""
        questions = min(QUESTIONS[form], entities)
        key = (form, entities, questions)
        if key not in self._boxes:
            text, slots = binding_text(*key)
            self._boxes[key] = Slotted(self.tokenizer, [text], slots, self.device)
        words, labels = self._some(OBJECTS, n, entities, draw), self._some(BOXES, n, entities, draw)
        asked = _orders(n, entities, self.device, draw)[:, :questions]
        return self._boxes[key].fill(torch.cat([words, labels, words.gather(1, asked), labels.gather(1, asked)], dim=1))

    def filter(self, n: int, form: str, draw: torch.Generator) -> Rows:
        """Lists of things, and one of the asked category, whichever, as the answer."""
        if form not in self._lists:
            self._lists[form] = Slotted(self.tokenizer, [filter_text(form)], _FILTER_SLOTS, self.device)
        items = torch.cat([self._some(CATEGORIES[name], n, _ITEMS, draw) for name in FIVE], dim=1)
        wanted = torch.randint(len(FIVE), (n, 1), generator=draw, device=self.device)
        answer = items.gather(1, wanted * _ITEMS + self._below(_ITEMS, n, draw))
        shuffled = items.gather(1, _orders(n, items.shape[1], self.device, draw))
        return self._lists[form].fill(torch.cat([shuffled, self._ids(FIVE)[wanted], answer], dim=1))

    def ioi(self, n: int, draw: torch.Generator) -> Rows:
        """Two people, one of them named twice; the other is the answer."""
        first, second = self._pairs(n, draw)
        swapped = torch.rand(n, generator=draw, device=self.device) < 0.5
        subject, answer = torch.where(swapped, first, second), torch.where(swapped, second, first)
        place, thing = (self._ids(words)[self._below(len(words), n, draw)[:, 0]] for words in (PLACES, THINGS))
        text = self._below(len(TEMPLATES), n, draw)[:, 0]
        return self._stories.fill(torch.stack([first, second, subject, place, thing, answer], dim=1), text)

    def repeats(self, n: int, length: int, titled: bool, draw: torch.Generator) -> Rows:
        """Different words, and then the same again; with or without the title that the task's prompts have."""
        words = _orders(n, len(vocabulary()) - len(SPECIAL), self.device, draw)[:, :length] + len(SPECIAL)
        start = self._ids((BOS, "Words", ":") if titled else (BOS,))
        ids = torch.cat([start.expand(n, -1), words, words], dim=1)
        asked = torch.zeros_like(ids, dtype=torch.bool)
        asked[:, len(start) + length + 1 :] = True  # the first word of the copy cannot be known
        return Rows(ids, asked)

    @cached_property
    def _stories(self) -> Slotted:
        slots = ("A", "B", "S", "place", "thing", "answer")
        return Slotted(self.tokenizer, [template + " {answer}" for template in TEMPLATES], slots, self.device)

    def _pairs(self, n: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Two different names each, never both from the pool of the tests."""
        free = self._free
        first = self._below(len(NAMES), n, draw)[:, 0]
        choices = torch.where(first < free, len(NAMES) - 1, free)
        second = (torch.rand(n, generator=draw, device=self.device) * choices).long()
        second = torch.where((first < free) & (second >= first), second + 1, second)
        pair, swapped = torch.stack([first, second]), torch.rand(n, generator=draw, device=self.device) < 0.5
        pair = self._ids(self._names)[torch.where(swapped, pair.flip(0), pair)]
        return pair[0], pair[1]

    def _below(self, limit: int, n: int, draw: torch.Generator) -> Int[Tensor, "n 1"]:
        return torch.randint(limit, (n, 1), generator=draw, device=self.device)

    def _some(self, words: Sequence[str], n: int, count: int, draw: torch.Generator) -> Int[Tensor, "n count"]:
        return self._ids(words)[_orders(n, len(words), self.device, draw)[:, :count]]

    def _ids(self, words: Sequence[str]) -> Int[Tensor, " w"]:
        key = tuple(words)
        if key not in self._known:
            self._known[key] = torch.tensor([word_ids()[word] for word in key], device=self.device)
        return self._known[key]


def _orders(n: int, size: int, device: torch.device, draw: torch.Generator) -> Int[Tensor, "n size"]:
    """A random order of 0 … size − 1 in each row."""
    return torch.rand(n, size, generator=draw, device=device).argsort(dim=1)


def binding_text(form: str, entities: int, questions: int) -> tuple[str, list[str]]:
    """A context with questions and answers, and its slots: words, boxes, words asked for, answers."""
    before, between, after, question = LINES[form]
    context = "".join(f"{before}{{word{i}}}{between}{{box{i}}}{after}" for i in range(entities))
    turns = (question.format(f"{{asked{i}}}") + f" {{answer{i}}}" for i in range(questions))
    counts = {"word": entities, "box": entities, "asked": questions, "answer": questions}
    return context + _BETWEEN[form].join(turns), [f"{slot}{i}" for slot, count in counts.items() for i in range(count)]


_FILTER_SLOTS = [*(f"item{i}" for i in range(_ITEMS * len(FIVE))), "category", "answer"]


def filter_text(form: str) -> str:
    """A list of things, the question and one answer."""
    start, before, after, question = FORMS[form]
    count = _ITEMS * len(FIVE)
    items = (f"{before}{{item{i}}}" + (after if i + 1 < count or form == "bullets" else ".") for i in range(count))
    return start + "".join(items) + question.format("{category}") + " {answer}"
