"""Examples: text with marked pieces, where a head looks from and what it may look at.

A mark is a pair of character offsets ``(start, stop)`` with ``text[start:stop]`` the marked piece.
Tokens come later: `Scope.encode` finds them on the ids the model sees, so no piece is ever
tokenised on its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from qkscope.checking import Count, checked_class
from qkscope.errors import BadInput
from qkscope.text import describe

#: Start and stop of a piece: character offsets into `Example.text`, or token offsets into
#: `Example.ids`.
Span = tuple[int, int]
#: A key's label in a contrast; 0 takes no part.
Sign = Literal[-1, 0, 1]


@checked_class
@dataclass(frozen=True)
class Key:
    """A piece that the query may attend to, with its label in each contrast.

    The label is +1, -1, or 0 for "takes no part".

    >>> Key((4, 7), {"lexical": 1}).label("order")
    0
    """

    span: Span
    labels: Mapping[str, Sign] = field(default_factory=dict)

    def label(self, contrast: str) -> Sign:
        """The label in one contrast, 0 where none was given."""
        return self.labels.get(contrast, 0)


@checked_class
@dataclass(frozen=True)
class Answers:
    """What the model may go on with after a prompt, as text: the first token of each is read.

    >>> Answers([" is"], [" are"])
    Answers(right=(' is',), wrong=(' are',))
    """

    right: tuple[str, ...]
    wrong: tuple[str, ...]

    def __post_init__(self) -> None:
        texts = (*self.right, *self.wrong)
        if not self.right or not self.wrong or not all(texts):
            raise BadInput(
                "answers are at least one right and one wrong text that is not empty: name both."
            )
        both = sorted(set(self.right) & set(self.wrong))
        if both:
            raise BadInput(f"{both[0]!r} is named as a right and as a wrong answer: keep one.")


@checked_class
@dataclass(frozen=True)
class Example:
    """Text (or ids) with marked queries and keys.

    Parameters
    ----------
    text : str, optional
        The prompt. Give either this or `ids`.
    ids : sequence of int, optional
        Token ids, taken as they are; spans then count tokens.
    queries : sequence of (start, stop)
        Where the head looks from; none means the last token the model sees (after the chat
        template, if any).
    keys : sequence of Key
        What it may look at.
    cluster : str or int
        Examples that share it are not independent (the same prompt with other words): intervals are
        clustered by it.
    roles : mapping of str to (start, stop)
        Places with a name ("S1", "IO", "END"), for circuits whose heads look from one to another. A
        token may not reach out of its role into a neighbour: the tokenizer would have merged the
        two.
    answers : Answers, optional
        What the model may go on with, right and wrong; without them it is asked for the keys' own
        tokens.
    where : str
        Where it was read ("mine.jsonl, line 3"), for messages.

    >>> example = Example.mark("The hat is in Box O. The hat is in Box", keys={"O": {"lexical": 1}})
    >>> [example.piece(key.span) for key in example.keys]
    ['O']
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    queries: tuple[Span, ...] = ()
    keys: tuple[Key, ...] = ()
    cluster: str | int = ""
    roles: Mapping[str, Span] = field(default_factory=dict, repr=False)
    answers: Answers | None = field(default=None, repr=False)
    where: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.ids is None):
            raise BadInput("an example needs either text or ids, and not both: give one of them.")
        if len(self) == 0:
            raise BadInput("the prompt is empty: give at least one character (or one token id).")
        if self.text is not None and _has_surrogate(self.text):
            raise BadInput(
                "the prompt has half a surrogate pair, which no tokenizer reads: take it out."
            )
        key_spans = [key.span for key in self.keys]
        for span in (*self.queries, *key_spans, *self.roles.values()):
            self._check_span(span)

    def __len__(self) -> int:
        """Characters of the text, or number of ids."""
        return len(self._sequence)

    @property
    def _sequence(self) -> Sequence[Any]:
        if self.text is not None:
            return self.text
        return self.ids or ()

    def piece(self, span: Span) -> Any:
        """What stands at a span: a piece of text, or a tuple of ids.

        Parameters
        ----------
        span : start and stop.
        """
        self._check_span(span)
        return self._sequence[slice(*span)]

    def _check_span(self, span: Span) -> None:
        start, stop = span
        if not 0 <= start < stop <= len(self):
            raise BadInput(
                f"the mark {start}:{stop} lies outside the prompt of length {len(self)}: "
                f"{self.show()}."
            )

    def show(self, limit: Count = 300) -> str:
        """The prompt for a message, shortened.

        Parameters
        ----------
        limit : characters that it has at most, about.
        """
        shown = repr(self._sequence)
        if len(shown) <= limit:
            return shown
        begin = shown[: limit // 2]
        end = shown[-limit // 2 :]
        return f"{begin} ... {end}"

    @classmethod
    def mark(
        cls,
        text: str,
        keys: Mapping[str, Mapping[str, Sign]] | Sequence[str] = (),
        queries: Sequence[str] = (),
        cluster: str | int = "",
    ) -> Example:
        """Mark pieces by searching for them; each must stand in the text exactly once.

        Parameters
        ----------
        text : str
            The prompt.
        keys : mapping or sequence of str
            The words to mark as keys, with their labels where there are any.
        queries : sequence of str
            The words to mark as queries; none means the last token.
        cluster : str or int
            As in `Example`.
        """
        labels = keys if isinstance(keys, Mapping) else {word: {} for word in keys}
        marked = []
        for word, signs in labels.items():
            marked.append(Key(find_span(text, word), dict(signs)))
        spans = [find_span(text, word) for word in queries]
        return cls(text, queries=tuple(spans), keys=tuple(marked), cluster=cluster)


def _has_surrogate(text: str) -> bool:
    """Whether a text has half a surrogate pair."""
    if text.isascii():
        return False
    return any("\ud800" <= character <= "\udfff" for character in text)


def find_span(text: str, word: str) -> Span:
    """Where a word stands in a text, as a whole word; it must stand there exactly once.

    >>> find_span("The cat saw a category.", "cat")
    (4, 7)
    """
    # an edge of the word only counts as a word border where it is a letter or digit
    before = r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", word) else ""
    pattern = f"{before}{re.escape(word)}{after}"
    spans = [match.span() for match in re.finditer(pattern, text)]
    if not spans:
        raise BadInput(
            f"{word!r} does not stand in the text {describe(text)}: check its spelling and case."
        )
    if len(spans) > 1:
        starts = ", ".join(str(start) for start, _ in spans[:8])
        raise BadInput(
            f"{word!r} stands {len(spans)} times in the text {describe(text)} (at {starts}): "
            "name it by its span (start, stop) instead."
        )
    return spans[0]


class Draft:
    """Write a text piece by piece and mark as you go, so that no word has to be searched for.

    >>> draft = Draft().write("hat: ").key("O", lexical=1).write("; jam: ").key("Z")
    >>> example = draft.write("; hat:").example()
    >>> example.text
    'hat: O; jam: Z; hat:'
    >>> [example.piece(key.span) for key in example.keys]
    ['O', 'Z']
    """

    def __init__(self) -> None:
        self._text = ""
        self._last: Span = (0, 0)
        self._keys: list[Key] = []
        self._roles: dict[str, Span] = {}

    def write(self, piece: str) -> Draft:
        """Add unmarked text."""
        start = len(self._text)
        self._text += piece
        self._last = (start, len(self._text))
        return self

    def key(self, piece: str, /, **labels: Any) -> Draft:
        """Add a piece and mark it as a key, with its labels: ``key("O", order=1, lexical=-1)``."""
        self.write(piece)
        self._keys.append(Key(self._last, labels))
        return self

    def role(self, name: str, characters: int = 0) -> Draft:
        """Name the piece written last, or that many characters: ``write("to").role("END")``."""
        start, stop = self._last
        if characters:
            start = stop - characters
        self._roles[name] = (start, stop)
        return self

    def example(self, cluster: str | int = "", answers: Answers | None = None) -> Example:
        """The finished example."""
        return Example(
            self._text,
            keys=tuple(self._keys),
            cluster=cluster,
            roles=dict(self._roles),
            answers=answers,
        )
