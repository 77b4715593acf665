"""A question about a prompt, parsed and checked once: the command line, Python and the live page
make the same one.

Which head looks from which token at which, and what is the answer compared with? What needs no
model is checked when the question is made; a token that is named by its text is looked up when the
prompt is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from torch import Tensor

from qkscope import BadInput, Example, Scope
from qkscope.findings.next_token import NamedToken, Output, text_ids
from qkscope.findings.prompt_trace import PromptRun, PromptTrace
from qkscope.heads import Head
from qkscope.model.encode import token_texts

Token = int | str
"""A token of a prompt: its place (from the end if negative), or its text, as in ``"to#2"``."""


@dataclass(frozen=True)
class Question:
    """What is asked of one prompt, or of a pair of prompts.

    Parameters
    ----------
    scope : the model.
    prompt : the prompt; of a pair the clean one.
    corrupted : the other prompt of a pair: of as many tokens, some of them other words.
    head : whose look is asked about; any, if None.
    query : the token that the head looks from; the one marked, or the last one, if None.
    key : the token attended to; the one attended to most besides the first, if None.
    answer : the token whose logit is asked about; the likeliest next one, if None.
    rival : the token that the answer is compared with; a rule chooses one, if None.
    chat : whether the prompts go into the chat template.
    appended : what `at_difference` has put behind the prompt that was typed.

    Examples
    --------
    >>> question = Question.of(Scope.load("nano:mixed"), "hat: O jam: Z jam:", "L2H3", key="Z")
    >>> str(question.head), question.place(question.key)
    ('L2H3', 6)
    """

    scope: Scope
    prompt: str | Example
    corrupted: str | Example | None = None
    head: Head | None = None
    query: Token | None = None
    key: Token | None = None
    answer: str | NamedToken | None = None
    rival: str | NamedToken | None = None
    chat: bool = False
    appended: str = ""

    def __post_init__(self) -> None:
        if self.key is not None and self.head is None:
            raise BadInput("a key is asked about with a head: name one, or leave the key out.")
        for what, text in (("answer", self.answer), ("rival", self.rival)):
            if isinstance(text, str) and not text.strip():
                raise BadInput(f"the {what} {text!r} is blank: name a word, as ' John'.")
        if self.answer is not None and self.answer == self.rival:
            text = self.answer if isinstance(self.answer, str) else self.answer.text
            raise BadInput(f"{text!r} is the answer itself: name another one as its rival.")
        if self.corrupted is not None and _text(self.corrupted) == _text(self.prompt):
            raise BadInput("the two prompts of a pair are the same: change a word in one of them.")

    @classmethod
    def of(
        cls, scope: Scope, prompt: str | Example, head: str | Head | None = None, **asked: Any
    ) -> Question:
        """Make a question whose head may be named by its text."""
        parsed = Head.parse(head) if isinstance(head, str) else head
        return cls(scope, prompt, head=parsed, **asked)

    def about(self, head: Head | None) -> Question:
        """The same question about another head, or about all heads."""
        return replace(self, head=head)

    def place(self, token: Token | None) -> int | None:
        """The place of a token of the prompt that is named by its text; a place is given back."""
        if not isinstance(token, str):
            return token
        return self.scope.place(self.prompt, token, chat=self.chat)

    def run(self, **options: Any) -> PromptRun:
        """Run the prompt, with the writers before its head; options as in `PromptRun`."""
        if "last" not in options and self.head is not None:
            options["last"] = self.scope.check(self.head).layer
        return PromptRun(self.scope, self.prompt, self.place(self.query), self.chat, **options)

    def at_difference(self) -> Question:
        """The same question, asked where the texts of answer and rival begin to differ.

        Texts of several tokens may begin alike: what they share is put behind the prompt, and the
        next token is asked about. A question about single tokens is given back.
        """
        given = {"answer": self.answer, "rival": self.rival}
        ids = {
            role: text_ids(self.scope, text)
            for role, text in given.items()
            if isinstance(text, str)
        }
        if all(len(tokens) == 1 for tokens in ids.values()):
            return self
        texts = {role: str(text) for role, text in given.items() if isinstance(text, str)}
        if "answer" not in ids and self._asks_last:  # does the rival begin as the next tokens do?
            next_ids = self._next_ids(len(ids["rival"]))
            if next_ids[0] == ids["rival"][0]:
                ids["answer"] = next_ids
                texts["answer"] = "".join(token_texts(self.scope, next_ids))
        shared = _shared(ids)
        if any(len(tokens) == shared for tokens in ids.values()):
            raise BadInput(_begins(texts))
        asked = {
            role: NamedToken(tokens[shared], texts[role], len(tokens), shared)
            for role, tokens in ids.items()
        }
        question = self._behind(ids["rival"][:shared]) if shared else self
        answer = asked.get("answer", self.answer)
        return replace(question, answer=answer, rival=asked.get("rival", self.rival))

    @property
    def _prompt_ids(self) -> list[int]:
        """The unchanged prompt's tokens."""
        with self.scope.unchanged():
            encoded = self.scope.encode([self.prompt], chat=self.chat)
        return [int(token) for token in encoded.inputs["input_ids"][0]]

    @property
    def _asks_last(self) -> bool:
        """Whether the query is the prompt's last token."""
        marked = isinstance(self.prompt, Example) and bool(self.prompt.queries)
        if self.query is None:
            return not marked
        return self.place(self.query) in (-1, len(self._prompt_ids) - 1)

    def _next_ids(self, count: int) -> list[int]:
        """The model's greedy continuation of the unchanged prompt."""
        with self.scope.unchanged():
            encoded = self.scope.encode([self.prompt], chat=self.chat, padding_side=None)
            ids = self.scope.generate(encoded, count)
        assert isinstance(ids, Tensor)
        return [int(token) for token in ids[0]]

    def _behind(self, shared: list[int]) -> Question:
        """The question after some more tokens."""
        ids = self._prompt_ids
        if not self._asks_last:
            raise BadInput(
                "answer and rival begin with the same token, which is asked about behind the last"
                " token alone: leave the query out, or name texts that differ in their first token."
            )
        together = [*ids, *shared]
        text = "".join(token_texts(self.scope, shared))
        prompt: str | Example = Example(ids=tuple(together))
        if isinstance(self.prompt, str) and not self.chat:
            written = self.prompt + text
            if self.scope.encode([written]).inputs["input_ids"][0].tolist() == together:
                prompt = written
        corrupted = self.corrupted
        if corrupted is not None:
            with self.scope.unchanged():
                other = self.scope.encode([corrupted], chat=self.chat).inputs["input_ids"][0]
            corrupted = Example(ids=(*other.tolist(), *shared))
        return replace(
            self, prompt=prompt, corrupted=corrupted, query=None, chat=False, appended=text
        )

    def output(self, run: PromptRun) -> Output:
        """The answer and its rival, in a run of the prompt.

        Inside a ``with`` block that changes something, both are those of the unchanged prompt.
        """
        if not self.scope.has_changes:
            return Output(run.run, run.asked, self.rival, self.answer)
        with self.scope.unchanged():
            plain = PromptRun(self.scope, self.prompt, run.asked.query, self.chat, last=0)
            before = Output(plain.run, plain.asked, self.rival, self.answer)
        rival = before.typed["rival"] or NamedToken(before.rival)
        answer = before.typed["answer"] or NamedToken(before.best)
        return Output(run.run, run.asked, rival, answer, before)

    def look(self, run: PromptRun, **options: Any) -> PromptTrace:
        """The head that is asked about, in a run of the prompt; options as in `PromptTrace`."""
        assert self.head is not None
        return run.head(self.head, self.place(self.key), **options)


def same_places(
    scope: Scope, prompt: str | Example, corrupted: str | Example, chat: bool = False
) -> list[tuple[int, int]]:
    """Spans of tokens in which the prompts of a pair differ, as (start, stop); the two are to have
    as many tokens.
    """
    pair = [scope.encode([each], chat=chat).inputs["input_ids"][0] for each in (prompt, corrupted)]
    sizes = [len(ids) for ids in pair]
    if sizes[0] != sizes[1]:
        raise BadInput(
            f"the clean prompt has {sizes[0]} tokens and the corrupted one {sizes[1]}: write them"
            " with as many, so that each token has one in its place."
        )
    differs = (pair[0] != pair[1]).tolist()
    spans = list[tuple[int, int]]()
    for place, differs_here in enumerate(differs):
        if differs_here and spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        elif differs_here:
            spans.append((place, place + 1))
    return spans


def _shared(ids: Mapping[str, Sequence[int]]) -> int:
    """How many tokens the texts of an answer and its rival begin with alike."""
    if len(ids) < 2:
        return 0
    pairs = zip(*ids.values(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _begins(texts: Mapping[str, str]) -> str:
    """Why an answer and a rival cannot be told apart."""
    answer = texts["answer"]
    rival = texts["rival"]
    if answer.strip() == rival.strip():
        return f"{rival!r} is what comes next itself: name another one as its rival."
    short, long = sorted((answer, rival), key=len)
    return f"{long!r} begins with {short!r}: name a rival that goes on otherwise."


def _text(prompt: str | Example) -> object:
    """What a prompt says, whatever is marked in it."""
    if isinstance(prompt, str):
        return prompt
    return prompt.ids if prompt.text is None else prompt.text
