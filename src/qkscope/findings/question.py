"""A question about a prompt, parsed and checked once: the command line, Python and the live page
make the same one.

Which head looks from which token at which, and what is the answer compared with? What needs no
model is checked when the question is made; a token that is named by its text is looked up when the
prompt is encoded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qkscope import BadInput, Example, Scope
from qkscope.findings.next_token import Asked, Output
from qkscope.findings.prompt_trace import PromptRun, PromptTrace
from qkscope.heads import Head

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
    answer: str | None = None
    rival: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        if self.key is not None and self.head is None:
            raise BadInput("a key is asked about with a head: name one, or leave the key out.")
        for what, text in (("answer", self.answer), ("rival", self.rival)):
            if text is not None and not text.strip():
                raise BadInput(f"the {what} {text!r} is blank: name a word, as ' John'.")
        if self.answer is not None and self.answer == self.rival:
            raise BadInput(f"{self.answer!r} is the answer itself: name another one as its rival.")
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

    def output(self, run: PromptRun) -> Output:
        """The answer and its rival, in a run of the prompt.

        Inside a ``with`` block that changes something, both are those of the unchanged prompt.
        """
        if not self.scope.has_changes:
            return Output(run.run, run.asked, self.rival, self.answer)
        with self.scope.unchanged():
            plain = PromptRun(self.scope, self.prompt, run.asked.query, self.chat, last=0)
            before = Output(plain.run, plain.asked, self.rival, self.answer)
        rival = before.typed["rival"] or Asked(before.rival)
        answer = before.typed["answer"] or Asked(before.best)
        return Output(run.run, run.asked, rival, answer, before)

    def look(self, run: PromptRun, **options: Any) -> PromptTrace:
        """The head that is asked about, in a run of the prompt; options as in `PromptTrace`."""
        assert self.head is not None
        return run.head(self.head, self.place(self.key), **options)


def _text(prompt: str | Example) -> object:
    """What a prompt says, whatever is marked in it."""
    if isinstance(prompt, str):
        return prompt
    return prompt.ids if prompt.text is None else prompt.text
