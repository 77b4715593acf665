"""Words of a prompt, and other words to put in their place.

A word is the tokens that stand together without a blank or punctuation between them (where a script has no blanks, a
token). What takes its place has as many tokens, so that nothing moves, the same shape (leading blank, letters, digits,
capital), and does not stand in the prompt. Half of the alternatives are those that the model finds likely there, half
are drawn at random: causes found by one kind alone overlap with those found by the other by half.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkscope.capture.encode import PIECE, token_texts
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.change.again import Again
from qkscope.draws import derived_seed
from qkscope.errors import BadInput

_WITHOUT_BLANKS = re.compile(r"[぀-ヿ㐀-䶿一-鿿豈-﫿฀-໿ក-៿]")
_LEAST = 8  # tokens of a shape, under which others are taken as well
_RANKED, _POSITIONS = 4096, 64  # next tokens that are ranked, and tokens of a prompt whose logits are held at once
_CHARACTERS = 256  # tried in the place of one

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Word:
    """Tokens ``start`` to ``stop - 1`` of a prompt, as they read together."""

    start: int
    stop: int
    text: str

    @property
    def core(self) -> str:
        """What makes two words the same: the text without blanks and case."""
        return self.text.strip().lower()

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, token: int) -> bool:
        return self.start <= token < self.stop


def words_of(scope: Scope, ids: Sequence[int]) -> list[Word]:
    """The words of a prompt, in their order; every token is in one.

    Parameters
    ----------
    scope : the model, for its tokenizer.
    ids : tokens of the prompt.

    Examples
    --------
    >>> scope = Scope.load("nano:mixed")
    >>> [word.text for word in words_of(scope, scope.encode(["hat: O jam:"]).inputs["input_ids"][0].tolist())][1:4]
    ['hat', ':', 'O']
    """
    texts, words = token_texts(scope, ids), list[Word]()
    joined = getattr(scope.encoder, "unknown", None) is None  # a word-level tokenizer has no pieces
    for i, text in enumerate(texts):
        if words and joined and (not text or _continues(words[-1].text, text)):
            words[-1] = Word(words[-1].start, i + 1, words[-1].text + text)
        else:
            words.append(Word(i, i + 1, text))
    return words


def _continues(before: str, text: str) -> bool:
    """Whether a token goes on with the word before it."""
    a, b = before[-1:], text[:1]
    inside = (a.isalnum() or a == "_") and (b.isalnum() or b == "_")
    return inside and not _WITHOUT_BLANKS.match(a) and not _WITHOUT_BLANKS.match(b)


class Lexicon:
    """The tokens of a vocabulary by their shape; made once for a tokenizer.

    Parameters
    ----------
    scope : the model.
    """

    def __init__(self, scope: Scope) -> None:
        if scope.tokenizer is None:
            raise BadInput(f"{scope.name} has no tokenizer, so that no word can be put in another's place.")
        self.size = min(len(scope.tokenizer), scope.encoder.vocabulary or len(scope.tokenizer))
        self.texts = [token_texts(scope, [i])[0] for i in range(self.size)]
        special = {*scope.tokenizer.all_special_ids, *scope.tokenizer.get_added_vocab().values()}
        shapes: dict[Any, int] = {}
        self.shapes = torch.tensor([shapes.setdefault(shape_of(text), len(shapes)) for text in self.texts])
        whole = (bool(text.strip()) and "�" not in text and text != PIECE for text in self.texts)
        self.usable = torch.tensor([fine and i not in special for i, fine in enumerate(whole)])
        self.by_text = {text: i for i, text in reversed(list(enumerate(self.texts))) if self.usable[i]}
        self.by_core: dict[str, list[int]] = {}
        for i, text in enumerate(self.texts):
            self.by_core.setdefault(text.strip().lower(), []).append(i)

    def text(self, token: int) -> str:
        """What a token reads as; its number where the model has more tokens than the tokenizer."""
        return self.texts[token] if token < self.size else str(token)

    def like(self, token: int, barred: Bool[Tensor, " v"] | None = None) -> Bool[Tensor, " v"]:
        """Tokens of the same shape; where these are few, all that can be used."""
        free = self.usable if barred is None else self.usable & ~barred
        same = free & (self.shapes == self.shapes[token])
        return same if int(same.sum()) >= _LEAST else free

    def variant(self, ids: Sequence[int], like: str) -> tuple[int, ...] | None:
        """The same word with the leading blank and capital of another one; None where the vocabulary has none."""
        if self.texts[ids[0]] == PIECE:
            return tuple(ids)
        text, core = self.texts[ids[0]].strip(), like.strip()
        initial = text[:1].upper() if core[:1].isupper() else text[:1].lower()
        first = self.by_text.get(like.removesuffix(like.lstrip()) + initial + text[1:])
        return None if first is None else (first, *ids[1:])


def shape_of(text: str) -> tuple[bool, ...]:
    """Leading blank, letters, digits, capital, script: what an alternative has in common with a word."""
    core = text.strip()
    return text.startswith(" "), core.isalpha(), core.isdigit(), core[:1].isupper(), core.isascii()


_LEXICONS: WeakKeyDictionary[Scope, Lexicon] = WeakKeyDictionary()


def lexicon_of(scope: Scope) -> Lexicon:
    """A model's lexicon, made once."""
    if scope not in _LEXICONS:
        _LEXICONS[scope] = Lexicon(scope)
    return _LEXICONS[scope]


class Alternatives:
    """Other words for every word of a prompt.

    Parameters
    ----------
    again : the prompt, run once.
    seed : of what is drawn.
    """

    def __init__(self, again: Again, seed: int = 0) -> None:
        self.again, self.seed, self.ids = again, seed, again.ids.tolist()
        self.words, self.lexicon = words_of(again.scope, self.ids), lexicon_of(again.scope)
        self.cores = {word.core for word in self.words}
        self.barred = torch.zeros(self.lexicon.size, dtype=torch.bool)
        self.barred[[i for core in self.cores for i in self.lexicon.by_core.get(core, ())]] = True
        self._kept: dict[tuple[int, int, int], list[Ids]] = {}

    def of(self, word: Word, count: int = 8) -> list[Ids]:
        """So many other words for one, likely and drawn ones in turn; fewer where there are no more of its shape."""
        key = word.start, word.stop, count
        if key not in self._kept:
            if any(self.lexicon.texts[i] == PIECE for i in self.ids[word.start : word.stop]):
                likely, drawn = list[Ids](), self._characters(word, count)
            else:
                likely, drawn = self._likely(word, count // 2), self._drawn(word, count)
            drawn = [ids for ids in drawn if ids not in likely][: count - len(likely)]
            mixed = [ids for pair in zip(likely, drawn, strict=False) for ids in pair]
            self._kept[key] = (mixed + likely[len(drawn) :] + drawn[len(likely) :])[:count]
        return self._kept[key]

    @cached_property
    def _ranked(self) -> Int[Tensor, "t k"]:
        """The likeliest next tokens at every token of the prompt, in their order."""
        every = torch.arange(len(self.ids), device=self.again.scope.device)
        nothing = torch.zeros(len(every), 0, dtype=torch.long, device=every.device)
        ranked = []
        for some in every.split(_POSITIONS):
            places = Places(torch.zeros_like(some), some, nothing[: len(some)], nothing[: len(some)].bool())
            logits = self.again.scope.watch(self.again.inputs, logits_at=places)
            assert logits is not None
            ranked.append(logits[:, : self.lexicon.size].topk(min(_RANKED, self.lexicon.size)).indices.cpu())
        return torch.cat(ranked)

    def _likely(self, word: Word, count: int) -> list[Ids]:
        """The likeliest first pieces of its shape, each continued by the likeliest pieces of their shapes."""
        if word.start == 0:  # nothing comes before it
            return []
        ranked = self._ranked[word.start - 1]
        first = ranked[self.lexicon.like(self.ids[word.start], self.barred)[ranked]][:count]
        if not len(first):
            return []
        made = first[:, None].to(self.again.ids)
        for at in range(word.start + 1, word.stop):
            logits = self.again.run(torch.cat([self.again.ids[: word.start].expand(len(made), -1), made], dim=1))
            assert logits is not None
            allowed = self.lexicon.like(self.ids[at]).to(logits.device)
            best = logits[:, : self.lexicon.size].masked_fill(~allowed, -torch.inf).argmax(-1)
            made = torch.cat([made, best[:, None].to(made)], dim=1)
        return list(dict.fromkeys(map(tuple, made.tolist())))

    def _drawn(self, word: Word, count: int) -> list[Ids]:
        """Pieces of the same shapes, drawn at random."""
        draws, columns = self._generator(word), []
        for at in range(word.start, word.stop):
            allowed = self.lexicon.like(self.ids[at], self.barred if at == word.start else None)
            pool = allowed.nonzero()[:, 0]
            columns.append(pool[torch.randint(len(pool), (2 * count,), generator=draws)])
        return list(dict.fromkeys(map(tuple, torch.stack(columns, dim=1).tolist())))[:count]

    def _characters(self, word: Word, count: int) -> list[Ids]:
        """Other characters of the script, for one that the tokenizer cuts into pieces."""
        tokenizer, draws = self.again.scope.tokenizer, self._generator(word)
        block = ord(word.text.strip()[:1] or "?") & ~0xFFF
        points = block + torch.randint(0x1000, (_CHARACTERS,), generator=draws)
        texts = [word.text.replace(word.text.strip()[:1], chr(point)) for point in points.tolist()]
        ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts if text.strip().isalnum()]
        return list(dict.fromkeys(one for one in ids if len(one) == len(word)))[:count]

    def _generator(self, word: Word) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.seed, "word", word.start))
