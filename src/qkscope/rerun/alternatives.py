"""Words of a prompt, and other words to put in their place.

A word is the tokens that stand together without a blank or punctuation between them (where a script
has no blanks, a token). What takes its place has as many tokens, so that nothing moves, the same
shape (leading blank, letters, digits, capital), and does not stand in the prompt. Half of the
alternatives are those that the model finds likely there, half are drawn at random: causes found by
one kind alone overlap with those found by the other by half.

Words of a word's *kind* come from the model itself, in any language: *near* ones are the nearest
rows of its input embedding, *likely* ones follow what precedes. Another form of the word itself
(case, plural, tense) is none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.model.encode import PIECE, token_texts
from qkscope.rerun.rerun_tokens import Again
from qkscope.seeds import derived_seed
from qkscope.text import grouped

_WITHOUT_BLANKS = re.compile(r"[぀-ヿ㐀-䶿一-鿿豈-﫿฀-໿ក-៿]")
_LEAST = 8  # tokens of a shape, under which others are taken as well
_RANKED = 4096  # next tokens that are ranked
_CHARACTERS = 256  # tried in the place of one
_LIKELY = 4  # of a word's alternatives
_ROWS = 8192  # of the embedding, compared at once
_STEM = 4  # letters that two forms of a word share at least
_ENDING = 3  # letters that they may differ in at the end

Ids = tuple[int, ...]
Source = Literal["near", "likely", "fit", "random"]
"""Where a word that takes another's place comes from."""


@dataclass(frozen=True, order=True)
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
    texts = token_texts(scope, ids)
    words = list[Word]()
    joined = getattr(scope.encoder, "unknown", None) is None  # a word-level tokenizer has no pieces
    for i, text in enumerate(texts):
        if words and joined and (not text or _continues(words[-1].text, text)):
            words[-1] = Word(words[-1].start, i + 1, words[-1].text + text)
        else:
            words.append(Word(i, i + 1, text))
    return words


def _continues(before: str, text: str) -> bool:
    """Whether a token continues the word before it."""
    a = before[-1:]
    b = text[:1]
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
            raise BadInput(
                f"{scope.name} has no tokenizer, so that no word can be put in another's place."
            )
        self.size = min(len(scope.tokenizer), scope.encoder.vocabulary or len(scope.tokenizer))
        self.texts = [token_texts(scope, [i])[0] for i in range(self.size)]
        special = {*scope.tokenizer.all_special_ids, *scope.tokenizer.get_added_vocab().values()}
        shapes: dict[Any, int] = {}
        self.shapes = torch.tensor(
            [shapes.setdefault(shape_of(text), len(shapes)) for text in self.texts]
        )
        whole = (bool(text.strip()) and "�" not in text and text != PIECE for text in self.texts)
        self.usable = torch.tensor([fine and i not in special for i, fine in enumerate(whole)])
        self.by_text = {
            text: i for i, text in reversed(list(enumerate(self.texts))) if self.usable[i]
        }
        self._centre: Tensor | None = None
        self.by_core = grouped(range(self.size), lambda i: self.texts[i].strip().lower())

    def text(self, token: int) -> str:
        """What a token reads as; its number where the model has more tokens than the tokenizer."""
        return self.texts[token] if token < self.size else str(token)

    def like(self, token: int, barred: Bool[Tensor, " v"] | None = None) -> Bool[Tensor, " v"]:
        """Tokens of the same shape; where these are few, all that can be used."""
        free = self.usable if barred is None else self.usable & ~barred
        same = free & (self.shapes == self.shapes[token])
        return same if int(same.sum()) >= _LEAST else free

    def closeness(self, scope: Scope, token: int) -> Float[Tensor, " v"]:
        """Cosine of every row of the centred input embedding with one of them."""
        weight = scope.model.get_input_embeddings().weight.detach()[: self.size]
        if self._centre is None:
            self._centre = weight.float().mean(0)
        own = weight[token].float() - self._centre
        parts = [
            torch.cosine_similarity(rows.float() - self._centre, own[None])
            for rows in weight.split(_ROWS)
        ]
        return torch.cat(parts).cpu()

    def variant(self, ids: Sequence[int], like: str) -> tuple[int, ...] | None:
        """The same word with the leading blank and capital of another one; None where the
        vocabulary has none.
        """
        if self.texts[ids[0]] == PIECE:
            return tuple(ids)
        text = self.texts[ids[0]].strip()
        core = like.strip()
        initial = text[:1].upper() if core[:1].isupper() else text[:1].lower()
        first = self.by_text.get(like.removesuffix(like.lstrip()) + initial + text[1:])
        return None if first is None else (first, *ids[1:])


def is_form(core: str, other: str) -> bool:
    """Whether two words look like forms of one (plural, tense): equal but for a short ending.

    >>> is_form("city", "cities"), is_form("dog", "dogs"), is_form("near", "behind")
    (False, True, False)
    """
    if core + "s" == other or other + "s" == core:
        return True
    letters = zip(core, other, strict=False)
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], letters)])
    rest = max(len(core), len(other)) - shared
    return shared >= _STEM and rest <= _ENDING


@torch.no_grad()
def near_tokens(
    scope: Scope, token: int, count: int = 20, barred: Bool[Tensor, " v"] | None = None
) -> list[int]:
    """Tokens of a token's kind for a model, the nearest first.

    Nearest by the cosine of centred rows of the input embedding, among tokens of the same shape
    that are no other form of the same word.

    Parameters
    ----------
    scope : the model.
    token : whose kind is meant.
    count : the most tokens.
    barred : tokens that are left out.

    Examples
    --------
    >>> scope = Scope.load("smollm2-135m")
    >>> lexicon = lexicon_of(scope)
    >>> [lexicon.text(i) for i in near_tokens(scope, lexicon.by_text[" Italy"], 3)]
    [' Germany', ' France', ' Spain']
    """
    lexicon = lexicon_of(scope)
    free = lexicon.like(token, barred)
    free[token] = False
    closeness = lexicon.closeness(scope, token).masked_fill(~free, -torch.inf)
    ranked = closeness.argsort(descending=True)[: 4 * count].tolist()
    core = lexicon.texts[token].strip().lower()
    others = [(i, lexicon.texts[i].strip().lower()) for i in ranked if free[i]]
    return [i for i, other in others if other != core and not is_form(core, other)][:count]


def shape_of(text: str) -> tuple[bool, ...]:
    """Leading blank, letters, digits, capital, script: what an alternative has in common with a
    word.
    """
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
        self.again = again
        self.seed = seed
        self.ids = again.ids.tolist()
        self.words = words_of(again.scope, self.ids)
        self.lexicon = lexicon_of(again.scope)
        self.barred = torch.zeros(self.lexicon.size, dtype=torch.bool)
        self.barred[[i for word in self.words for i in self.lexicon.by_core.get(word.core, ())]] = (
            True
        )
        self._kept: dict[tuple[Word, int], list[Ids]] = {}
        self._likely: dict[tuple[Word, int], list[Ids]] = {}
        self._ranked: dict[int, Int[Tensor, " k"]] = {}
        self._nearest: dict[Ids, Ids | None] = {}

    def of(self, word: Word, count: int = 8) -> list[Ids]:
        """Up to ``count`` other words for one, likely and random ones in turn; fewer if its shape
        has no more.
        """
        if (word, count) not in self._kept:
            likely = self.likely(word, _LIKELY)[: count // 2]
            drawn = [ids for ids in self.random(word, count) if ids not in likely][
                : count - len(likely)
            ]
            mixed = [ids for pair in zip(likely, drawn, strict=False) for ids in pair]
            self._kept[word, count] = (mixed + likely[len(drawn) :] + drawn[len(likely) :])[:count]
        return self._kept[word, count]

    def near(self, word: Word, count: int) -> list[Ids]:
        """Words of a word's kind: the nearest in the input embedding; none for a word of pieces."""
        if len(word) > 1 or self._is_cut(word):
            return []
        tokens = near_tokens(self.again.scope, self.ids[word.start], count, self.barred)
        return [(token,) for token in tokens]

    def nearest(self, ids: Ids) -> Ids | None:
        """The word nearest to another one in the input embedding; None for a word of pieces."""
        if len(ids) > 1:
            return None
        if ids not in self._nearest:
            tokens = near_tokens(self.again.scope, ids[0], 1, self.barred)
            self._nearest[ids] = (tokens[0],) if tokens else None
        return self._nearest[ids]

    def likely(self, word: Word, count: int) -> list[Ids]:
        """What the model finds likely in a word's place, after what precedes, the likeliest first."""
        self.prepare([word], count)
        return self._likely[word, count]

    def random(self, word: Word, count: int) -> list[Ids]:
        """Words of the same shape, drawn at random."""
        if self._is_cut(word):
            return self._characters(word, count)
        return self._drawn(word, count)

    def by_source(self, word: Word, count: int, random: int) -> dict[Source, list[Ids]]:
        """Up to ``count`` near and likely words each, and ``random`` ones that are none of these."""
        found: dict[Source, list[Ids]] = {
            "near": self.near(word, count),
            "likely": self.likely(word, count),
        }
        of_a_kind = {*found["near"], *found["likely"]}
        drawn = [ids for ids in self.random(word, 2 * count) if ids not in of_a_kind]
        found["random"] = drawn[:random]
        return found

    def first_chances(self, words: Sequence[Word]) -> dict[Word, Float[Tensor, " v"]]:
        """Log-probabilities of every first token in the places of some words, after what precedes;
        zeros in the place of the first word.
        """
        before = sorted({word.start - 1 for word in words} - {-1})
        chances = {-1: torch.zeros(self.lexicon.size)}
        if before:
            at = torch.tensor(before)[:, None]
            logits = self._next_tokens(self.again.ids.cpu()[at], at)
            chances |= dict(zip(before, logits.float().log_softmax(-1).cpu(), strict=True))
        return {word: chances[word.start - 1] for word in words}

    def _is_cut(self, word: Word) -> bool:
        """Whether a word has a character that the tokenizer cuts into pieces."""
        return any(self.lexicon.texts[i] == PIECE for i in self.ids[word.start : word.stop])

    def prepare(self, words: Sequence[Word], count: int = _LIKELY) -> None:
        """Find the likely ones of some words together: first pieces of a word's shape, continued by
        the likeliest.
        """
        new = [word for word in words if (word, count) not in self._likely]
        before = sorted({word.start - 1 for word in new} - {-1, *self._ranked})
        if before:
            at = torch.tensor(before)[:, None]
            logits = self._next_tokens(self.again.ids.cpu()[at], at)
            ranked = logits.topk(min(_RANKED, self.lexicon.size)).indices.cpu()
            self._ranked |= dict(zip(before, ranked, strict=True))
        self._likely |= {(word, count): [] for word in new}
        begun: list[tuple[Word, Ids]] = [
            (word, (first,)) for word in new for first in self._first(word, count)
        ]
        while begun:
            for word, ids in begun:
                if len(ids) == len(word):
                    self._likely[word, count].append(ids)
            begun = [(word, ids) for word, ids in begun if len(ids) < len(word)]
            begun = self._continued(begun) if begun else []

    def _first(self, word: Word, count: int) -> list[int]:
        """The likeliest first pieces of a word's shape."""
        if word.start == 0 or self._is_cut(word):  # nothing comes before it
            return []
        ranked = self._ranked[word.start - 1]
        fits = self.lexicon.like(self.ids[word.start], self.barred)
        return ranked[fits[ranked]][:count].tolist()

    def _continued(self, begun: Sequence[tuple[Word, Ids]]) -> list[tuple[Word, Ids]]:
        """Words with as many pieces, each with the likeliest next one of its shape."""
        at = [[*range(word.start, word.start + len(ids))] for word, ids in begun]
        tokens = torch.tensor([ids for _, ids in begun])
        logits = self._next_tokens(tokens, torch.tensor(at))
        allowed = torch.stack(
            [self.lexicon.like(self.ids[word.start + len(ids)]) for word, ids in begun]
        )
        best = logits.masked_fill(~allowed.to(logits.device), -torch.inf).argmax(-1).tolist()
        return [(word, (*ids, piece)) for (word, ids), piece in zip(begun, best, strict=True)]

    def _next_tokens(
        self, tokens: Int[Tensor, "b s"], at: Int[Tensor, "b s"]
    ) -> Float[Tensor, "b v"]:
        """Next-token logits of the lexicon's tokens, after tokens that stand at some places."""
        ids = self.again.ids.cpu().repeat(len(at), 1).scatter(1, at, tokens)
        runs = torch.zeros(ids.shape, dtype=torch.bool).scatter(1, at, True)
        logits = self.again.run(ids, runs, logits=True).logits
        assert logits is not None
        return logits[:, : self.lexicon.size]

    def _drawn(self, word: Word, count: int) -> list[Ids]:
        """Pieces of the same shapes, drawn at random."""
        draws = self._generator(word)
        columns = []
        for at in range(word.start, word.stop):
            pool = self.lexicon.like(
                self.ids[at], self.barred if at == word.start else None
            ).nonzero()[:, 0]
            columns.append(pool[torch.randint(len(pool), (2 * count,), generator=draws)])
        return list(dict.fromkeys(map(tuple, torch.stack(columns, dim=1).tolist())))[:count]

    def _characters(self, word: Word, count: int) -> list[Ids]:
        """Other characters of the script, for one that the tokenizer cuts into pieces."""
        tokenizer = self.again.scope.tokenizer
        draws = self._generator(word)
        block = ord(word.text.strip()[:1] or "?") & ~0xFFF
        points = block + torch.randint(0x1000, (_CHARACTERS,), generator=draws)
        texts = [word.text.replace(word.text.strip()[:1], chr(point)) for point in points.tolist()]
        ids = [
            tuple(tokenizer.encode(text, add_special_tokens=False))
            for text in texts
            if text.strip().isalnum()
        ]
        return list(dict.fromkeys(one for one in ids if len(one) == len(word)))[:count]

    def _generator(self, word: Word) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.seed, "word", word.start))
