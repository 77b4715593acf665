r"""What the nano models read: one token per word, mark or line break, and the tasks' own texts.

The vocabulary is the words that tasks are made of. Blanks separate words and are no tokens; a text
begins with ``<s>``, on which heads can rest. Decoding puts blanks back where the tasks have them,
so prompts survive the round trip.

Rows are made as ids on the device. A text with slots (``{word0}: {box0}\n … {asked0}: {answer0}``)
is tokenised once; a batch is its ids, repeated, with random words scattered into the slots. The ids
are those the tokenizer gives for the finished text (a test compares them with the tasks' prompts).
Loss is taken on answers alone, and on the second copy of repeated words.

No story has two names of the pool that ``ioi(seed=0)`` tests with, so each of its test prompts has
a pair of names that is new to the task; repeated words are drawn from the whole vocabulary, names
among them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkscope.texts.list_tasks import FILLER, LINES, LISTS
from qkscope.texts.sentence_tasks import TEMPLATES
from qkscope.texts.word_pools import (
    BOXES,
    CATEGORIES,
    FIRST_NAMES,
    FIVE,
    OBJECTS,
    PLACES,
    THINGS,
    pools,
)

CONTEXT = 256
BOS, PAD, UNKNOWN = SPECIAL = ("<s>", "<pad>", "<unk>")
_TOKEN = r"\n|\w+|[^\w\s]"


@cache
def vocabulary() -> tuple[str, ...]:
    """Every token: the special ones, marks, then the words of the tasks' lists and texts."""
    templates = [" ".join(parts) for parts in (*LINES.values(), *LISTS.values())]
    texts = [re.sub(r"\{\w*\}", " ", template) for template in (*templates, *TEMPLATES)]
    texts += ["Words:", *FILLER, *(filler.capitalize() for filler in FILLER)]
    texts += [*OBJECTS, *BOXES, *FIRST_NAMES, *THINGS, *PLACES, *FIVE]
    for words in CATEGORIES.values():
        texts += words
    found: set[str] = set()
    for text in texts:
        found.update(re.findall(_TOKEN, text))
    marks = sorted(token for token in found if not token[0].isalnum())
    words = sorted(token for token in found if token[0].isalnum())
    return (*SPECIAL, *marks, *words)


@cache
def word_ids() -> dict[str, int]:
    """The id of every token."""
    return {token: i for i, token in enumerate(vocabulary())}


@cache
def nano_tokenizer() -> Any:
    """A fast tokenizer for `vocabulary`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = word_ids()
    rules = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    rules.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), "removed", invert=True)
    first = [(BOS, ids[BOS])]
    rules.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=first)
    # a blank before each word, none before . , ?
    words = decoders.WordPiece(prefix="##", cleanup=True)
    colon = decoders.Replace(" :", ":")
    end = decoders.Replace(" \n", "\n")
    start = decoders.Replace("\n ", "\n")
    rules.decoder = decoders.Sequence([words, colon, end, decoders.Fuse(), start])
    special = {"bos_token": BOS, "pad_token": PAD, "unk_token": UNKNOWN}
    options = {"model_max_length": CONTEXT, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=rules, **special, **options)


# ---------------------------------------------------------------- rows of text

QUESTIONS = {"list": 6, "sentence": 4, "question": 3}
"""Questions about one context: fewer where they are long."""
_BETWEEN = {"list": "\n", "sentence": ". ", "question": "\n"}
_ITEMS = 5
_ANY_WORD = "hat"


class TextRows(NamedTuple):
    """Ids of n texts, and which of them are to be predicted from what stands before."""

    ids: Int[Tensor, "n t"]
    asked: Bool[Tensor, "n t"]


class SlotTexts:
    """Texts with slots, tokenised once; all of them have the same slots.

    Parameters
    ----------
    texts : with ``{name}`` for each slot; slots called ``answer…`` are to be predicted.
    slots : their names, in the order of the values.
    """

    def __init__(
        self, tokenizer: Any, texts: Sequence[str], slots: Sequence[str], device: torch.device
    ) -> None:
        found = [_tokenised(tokenizer, text) for text in texts]
        length = max(len(ids) for ids, _ in found)
        padded = [ids + [word_ids()[PAD]] * (length - len(ids)) for ids, _ in found]
        self.ids = torch.tensor(padded, device=device)
        where = []
        for _, places in found:
            where.append([place for slot in slots for place in places[slot]])
        self.where = torch.tensor(where, device=device)
        # a slot may come twice in a text: its value goes to both places
        columns: list[int] = []
        for i, slot in enumerate(slots):
            columns += [i] * len(found[0][1][slot])
        self.column = torch.tensor(columns, device=device)
        self.asked = torch.tensor([slots[i].startswith("answer") for i in columns], device=device)

    def fill(self, values: Int[Tensor, "n s"], text: Int[Tensor, " n"] | None = None) -> TextRows:
        """One row per line of values; ``text`` says which of the texts each is, the first if not
        given.
        """
        text = torch.zeros_like(values[:, 0]) if text is None else text
        where = self.where[text]
        ids = self.ids[text].scatter(1, where, values[:, self.column])
        nothing = torch.zeros_like(ids, dtype=torch.bool)
        return TextRows(ids, nothing.scatter(1, where, self.asked.expand_as(where)))


def _tokenised(tokenizer: Any, text: str) -> tuple[list[int], dict[str, list[int]]]:
    """Ids, and the tokens of each slot."""
    written = ""
    starts: dict[str, list[int]] = {}
    for i, piece in enumerate(re.split(r"\{(\w+)\}", text)):
        is_slot = i % 2 == 1
        if is_slot:
            starts.setdefault(piece, []).append(len(written))
        written += _ANY_WORD if is_slot else piece
    encoded = tokenizer(written, return_offsets_mapping=True)
    token_at: dict[int, int] = {}
    for i, (start, stop) in enumerate(encoded["offset_mapping"]):
        if stop > start:
            token_at[start] = i
    places = {slot: [token_at[start] for start in own] for slot, own in starts.items()}
    return encoded["input_ids"], places


def stacked(groups: Sequence[TextRows]) -> TextRows:
    """All rows in one batch, shorter ones padded on the right, where causal attention cannot see
    it.
    """
    length = max(rows.ids.shape[1] for rows in groups)
    ids = []
    asked = []
    for rows in groups:
        missing = (0, length - rows.ids.shape[1])
        ids.append(torch.nn.functional.pad(rows.ids, missing, value=word_ids()[PAD]))
        asked.append(torch.nn.functional.pad(rows.asked, missing))
    return TextRows(torch.cat(ids), torch.cat(asked))


class Texts:
    """Draws rows of every kind of text on one device, that of the generators."""

    def __init__(self, tokenizer: Any, device: torch.device) -> None:
        self.tokenizer = tokenizer
        self.device = device
        self._slotted: dict[tuple[str, ...], SlotTexts] = {}
        self._known: dict[tuple[str, ...], Tensor] = {}
        held = set(pools(FIRST_NAMES, 0, "names", least=3)["test"])
        self._names = sorted(FIRST_NAMES, key=lambda name: name in held)  # those of the tests last
        self._free = len(FIRST_NAMES) - len(held)

    def binding(self, n: int, form: str, entities: int, draw: torch.Generator) -> TextRows:
        """Contexts of words and boxes, each with several questions."""
        questions = min(QUESTIONS[form], entities)
        words = self._some(OBJECTS, n, entities, draw)
        labels = self._some(BOXES, n, entities, draw)
        asked = _orders(n, entities, draw)[:, :questions]
        values = torch.cat([words, labels, words.gather(1, asked), labels.gather(1, asked)], dim=1)
        text, slots = _binding_text(form, entities, questions)
        return self._filled([text], slots, values)

    def filter(self, n: int, form: str, draw: torch.Generator) -> TextRows:
        """Lists of things, and one of the asked category, whichever, as the answer."""
        items = torch.cat([self._some(CATEGORIES[name], n, _ITEMS, draw) for name in FIVE], dim=1)
        wanted = _below(len(FIVE), n, draw)
        chosen = wanted * _ITEMS + _below(_ITEMS, n, draw)
        answer = items.gather(1, chosen[:, None])
        shuffled = items.gather(1, _orders(n, items.shape[1], draw))
        category = self._ids(FIVE)[wanted][:, None]
        text, slots = _filter_text(form)
        return self._filled([text], slots, torch.cat([shuffled, category, answer], dim=1))

    def ioi(self, n: int, draw: torch.Generator) -> TextRows:
        """Two people, one of them named twice; the other is the answer."""
        first, second = self._pairs(n, draw)
        swapped = _coin(n, draw)
        subject = torch.where(swapped, first, second)
        answer = torch.where(swapped, second, first)
        place = self._ids(PLACES)[_below(len(PLACES), n, draw)]
        thing = self._ids(THINGS)[_below(len(THINGS), n, draw)]
        text = _below(len(TEMPLATES), n, draw)
        values = torch.stack([first, second, subject, place, thing, answer], dim=1)
        texts = [f"{template} {{answer}}" for template in TEMPLATES]
        return self._filled(texts, ("A", "B", "S", "place", "thing", "answer"), values, text)

    def repeats(self, n: int, length: int, titled: bool, draw: torch.Generator) -> TextRows:
        """Different words, and then the same again; with or without the title that the task's
        prompts have.
        """
        words = _orders(n, len(vocabulary()) - len(SPECIAL), draw)[:, :length] + len(SPECIAL)
        start = self._ids((BOS, "Words", ":") if titled else (BOS,))
        ids = torch.cat([start.expand(n, -1), words, words], dim=1)
        asked = torch.zeros_like(ids, dtype=torch.bool)
        asked[:, len(start) + length + 1 :] = True  # the first word of the copy cannot be known
        return TextRows(ids, asked)

    def _pairs(self, n: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Two different names each, never both from the pool of the tests."""
        free = self._free
        first = _below(len(FIRST_NAMES), n, draw)
        choices = torch.where(first < free, len(FIRST_NAMES) - 1, free)
        second = (torch.rand(n, generator=draw, device=draw.device) * choices).long()
        second = torch.where((first < free) & (second >= first), second + 1, second)
        pair = torch.stack([first, second])
        pair = self._ids(self._names)[torch.where(_coin(n, draw), pair.flip(0), pair)]
        return pair[0], pair[1]

    def _some(
        self, words: Sequence[str], n: int, count: int, draw: torch.Generator
    ) -> Int[Tensor, "n count"]:
        return self._ids(words)[_orders(n, len(words), draw)[:, :count]]

    def _ids(self, words: Sequence[str]) -> Int[Tensor, " w"]:
        key = tuple(words)
        if key not in self._known:
            self._known[key] = torch.tensor([word_ids()[word] for word in key], device=self.device)
        return self._known[key]

    def _filled(
        self, texts: Sequence[str], slots: Sequence[str], values: Tensor, text: Tensor | None = None
    ) -> TextRows:
        key = tuple(texts)
        if key not in self._slotted:
            self._slotted[key] = SlotTexts(self.tokenizer, texts, slots, self.device)
        return self._slotted[key].fill(values, text)


def _orders(n: int, size: int, draw: torch.Generator) -> Int[Tensor, "n size"]:
    """A random order of 0 … size − 1 in each row."""
    return torch.rand(n, size, generator=draw, device=draw.device).argsort(dim=1)


def _below(limit: int, n: int, draw: torch.Generator) -> Int[Tensor, " n"]:
    return torch.randint(limit, (n,), generator=draw, device=draw.device)


def _coin(n: int, draw: torch.Generator) -> Bool[Tensor, " n"]:
    return torch.rand(n, generator=draw, device=draw.device) < 0.5


def _binding_text(form: str, entities: int, questions: int) -> tuple[str, list[str]]:
    """A context with questions and answers, and its slots: words, boxes, asked words, answers."""
    before, between, after, question = LINES[form]
    context = "".join(f"{before}{{word{i}}}{between}{{box{i}}}{after}" for i in range(entities))
    turns = [question.format(f"{{asked{i}}}") + f" {{answer{i}}}" for i in range(questions)]
    counts = {"word": entities, "box": entities, "asked": questions, "answer": questions}
    slots: list[str] = []
    for slot, count in counts.items():
        slots += [f"{slot}{i}" for i in range(count)]
    return context + _BETWEEN[form].join(turns), slots


def _filter_text(form: str) -> tuple[str, list[str]]:
    """A list of things, the question and one answer, and their slots."""
    start, before, after, question = LISTS[form]
    slots = [f"item{i}" for i in range(_ITEMS * len(FIVE))]
    ends = [after] * (len(slots) - 1) + [after if form == "bullets" else "."]
    items = "".join(f"{before}{{{slot}}}{end}" for slot, end in zip(slots, ends, strict=True))
    text = start + items + question.format("{category}") + " {answer}"
    return text, [*slots, "category", "answer"]
