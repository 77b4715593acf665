"""One prompt in one model: run once for each token that asks, and every head is answered from that run."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from qkscope.analyses.trace.one import Asked, PromptTrace
from qkscope.analyses.trace.prompt import record_prompt
from qkscope.capture.scope import Scope
from qkscope.capture.writers import Reader, Recorded
from qkscope.examples import Example
from qkscope.heads import Head

_READERS: WeakKeyDictionary[Scope, tuple[tuple[int, ...], Reader]] = WeakKeyDictionary()


def reader_of(scope: Scope) -> Reader:
    """A reader of all heads, kept as long as the model's weights are what they were."""
    versions = tuple(parameter._version for parameter in scope.model.parameters())
    if scope not in _READERS or _READERS[scope][0] != versions:
        _READERS[scope] = versions, Reader(scope, scope.heads())
    return _READERS[scope][1]


class Probe:
    """A prompt that can be asked about.

    Parameters
    ----------
    scope : the model.
    prompt : a text, or an example with at most one marked query.
    chat : whether it goes into the chat template.
    reader : of all heads of this model, where there is one already: making it takes a moment.

    Examples
    --------
    >>> probe = Probe(Scope.load("nano:mixed"), "hat: O jam: Z jam:")
    >>> probe.head("L1H0").asked.tokens[-2:]
    ['jam', ':']
    """

    def __init__(self, scope: Scope, prompt: str | Example, chat: bool = False, reader: Reader | None = None) -> None:
        self.scope, self.prompt, self.chat = scope, prompt, chat
        self.reader = reader_of(scope) if reader is None else reader
        self._runs: dict[int, tuple[Asked, Recorded]] = {}

    def run(self, query: int | None = None) -> tuple[Asked, Recorded]:
        """The prompt with one token asking: the last one, where none is named."""
        asked = Asked.of(self.scope, self.prompt, query, self.chat)
        if asked.query not in self._runs:
            self._runs[asked.query] = asked, record_prompt(self.reader, asked)
        return self._runs[asked.query]

    def head(
        self, head: str | Head, query: int | None = None, key: int | None = None, versus: int | None = None
    ) -> PromptTrace:
        """One head, asked from one token about another; see `PromptTrace`."""
        asked, found = self.run(query)
        return PromptTrace(self.reader, found, asked, self.scope.check(head), key, versus)
