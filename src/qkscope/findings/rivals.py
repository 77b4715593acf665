"""Which token an answer is compared with, where nobody names one.

A good rival is what the answer could have been. An answer that is copied from the prompt is compared
with the other word of the prompt, of its shape, that plays most alike a part there, however unlikely
it is: the surer a model is, the less it leaves to the other name. Alike is the cosine of what heads
can read there: the values v of a layer, less their mean over the prompt, averaged over the later half
of the layers, ``mean_l cos(v_l(answer), v_l(word))``. (By its logit a place that is named once beats
the name that is named twice: ' Paris' for ' James' and ' Maria'.) Any other answer is compared with
the likeliest next token of its kind: of its shape, and a function word (``the``, ``to``) where the
answer is one. A function word is never a rival because it stands in the prompt.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import Scope
from qkscope.model.encode import PIECE, token_texts
from qkscope.model.tap import Call
from qkscope.rerun.alternatives import Word, shape_of, words_of

PROMPT_WORD = "the word of the prompt most like it there"
SAME_KIND = "the likeliest other token of its kind"
ANY_TOKEN = "the likeliest other token"
_LISTED = 3  # words of the prompt among the candidates
_RANKED = 256  # likeliest next tokens among which one of the answer's kind is looked for
_WORDS = Path(__file__).with_name("function_words.toml")


@dataclass(frozen=True)
class Candidate:
    """A token that an answer may be compared with.

    Parameters
    ----------
    token : its id.
    why : what it is: `PROMPT_WORD`, `SAME_KIND` or `ANY_TOKEN`.
    word : the word of the prompt that it begins, where that is of several tokens.
    size : how many.
    """

    token: int
    why: str
    word: str = ""
    size: int = 1


@cache
def function_words() -> frozenset[str]:
    """English function words, in lower case."""
    return frozenset(tomllib.loads(_WORDS.read_text(encoding="utf-8"))["words"].split())


def is_function_word(text: str) -> bool:
    """Whether a text is an English function word.

    >>> is_function_word(" The"), is_function_word(" Mary")
    (True, False)
    """
    return text.strip().lower() in function_words()


def candidates(
    scope: Scope,
    ids: Sequence[int],
    calls: Mapping[int, Call],
    logits: Float[Tensor, " v"],
    answer: int,
) -> list[Candidate]:
    """The tokens that an answer may be compared with; the first is its rival.

    Parameters
    ----------
    scope : the model.
    ids : the prompt, up to the token whose next one is asked about.
    calls : by layer, its attention calls.
    logits : of the next token.
    answer : its id.
    """
    text = token_texts(scope, [answer])[0]
    places = _places_of(scope, ids, text)
    words = _prompt_words(scope, ids, text)
    if places and len(words) > 1:
        alike = _likeness(calls, len(ids), places)
        order = {token: max(alike[word.stop - 1] for word in at) for token, at in words.items()}
    else:
        order = {token: float(logits[token]) for token in words}
    best_first = sorted(words, key=order.__getitem__, reverse=True)
    prompt_words = [_of_word(token, words[token][0]) for token in best_first[:_LISTED]]
    likely = _likely(scope, logits, answer, text)
    if places:
        ordered = [*prompt_words, *likely]
    else:
        ordered = likely or prompt_words
    return _different(scope, ordered) or [Candidate(_second(logits, answer), ANY_TOKEN)]


def _of_word(token: int, word: Word) -> Candidate:
    """A word of the prompt as a candidate, by its first token."""
    if len(word) == 1:
        return Candidate(token, PROMPT_WORD)
    return Candidate(token, PROMPT_WORD, word.text, len(word))


def _likely(scope: Scope, logits: Float[Tensor, " v"], answer: int, text: str) -> list[Candidate]:
    """The two likeliest other tokens of an answer's kind, and the likeliest of any."""
    ranked = logits.topk(min(_RANKED, len(logits))).indices.tolist()
    texts = {token: token_texts(scope, [token])[0] for token in ranked}
    others = [token for token in ranked if token != answer and _is_other(texts[token], text)]
    same_kind = [token for token in others if _is_alike(texts[token], text)]
    kinds = [Candidate(token, SAME_KIND) for token in same_kind[:2]]
    return kinds + [Candidate(token, ANY_TOKEN) for token in others[:1]]


def _likeness(calls: Mapping[int, Call], length: int, places: Sequence[int]) -> list[float]:
    """How alike each token of a prompt is to those at some places, as later heads read them."""
    layers = sorted(calls)
    sums = torch.zeros(length)
    for layer in layers[len(layers) // 2 :]:
        values = calls[layer].v[0, :, :length].transpose(0, 1).flatten(1).float().cpu()
        values = values - values[1:].mean(0)
        cosines = [torch.cosine_similarity(values, values[place][None]) for place in places]
        sums += torch.stack(cosines).amax(0)
    return sums.tolist()


def _second(logits: Float[Tensor, " v"], answer: int) -> int:
    """The likeliest token besides the answer."""
    first, second = logits.topk(2).indices.tolist()
    return int(second if first == answer else first)


def _prompt_words(scope: Scope, ids: Sequence[int], answer: str) -> dict[int, list[Word]]:
    """By its first token, the prompt's words that are of an answer's shape and are not the answer."""
    words = dict[int, list[Word]]()
    if not answer.strip().isalnum():
        return words
    for word in words_of(scope, ids):
        first = token_texts(scope, [ids[word.start]])[0]
        if first == PIECE or not word.core.isalnum() or is_function_word(word.text):
            continue
        if _is_other(first, answer) and shape_of(first) == shape_of(answer):
            words.setdefault(ids[word.start], []).append(word)
    return words


def _places_of(scope: Scope, ids: Sequence[int], answer: str) -> list[int]:
    """Where the words of the prompt end that an answer begins, with or without a blank: it may be
    copied from there. Nowhere for a function word.
    """
    if not answer.strip().isalnum() or is_function_word(answer):
        return []
    words = words_of(scope, ids)
    texts = token_texts(scope, [ids[word.start] for word in words])
    return [
        word.stop - 1
        for word, text in zip(words, texts, strict=True)
        if text.strip() == answer.strip()
    ]


def _is_other(text: str, answer: str) -> bool:
    """Whether a token says something, and something else than an answer in other letters."""
    core = text.strip().lower()
    return text == PIECE or (bool(core) and core != answer.strip().lower())


def _is_alike(text: str, answer: str) -> bool:
    """Whether two tokens are of one kind: their shape, and whether they are function words."""
    same_shape = shape_of(text) == shape_of(answer)
    return same_shape and is_function_word(text) == is_function_word(answer)


def _different(scope: Scope, found: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that read differently, in their order."""
    by_text = dict[str, Candidate]()
    for candidate in found:
        text = token_texts(scope, [candidate.token])[0]
        name = str(candidate.token) if text == PIECE else text.strip().lower()
        by_text.setdefault(name, candidate)
    return [*by_text.values()]
