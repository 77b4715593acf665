"""What the live page asks of a model: where heads look, why one looks there, and what if it did not.

A prompt is run once and every token can ask (`qkscope.explorer.looked`); answers name the token that asks, the head and
the key, and changes are words (`qkscope.explorer.what_if`), so that the page's address is the whole state. Answers are
plain values, ready for JSON.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.fit import Fit
from qkscope.analyses.trace.one import PromptTrace
from qkscope.analyses.trace.prompt import Probe, reader_of
from qkscope.analyses.why.why import why
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.explorer.answers import Answer, in_bytes, moved_by, next_tokens
from qkscope.explorer.features import FITTED_ON, Features, Pattern
from qkscope.explorer.looked import Looked
from qkscope.explorer.what_if import Change, WhatIf
from qkscope.kinds import checked_class
from qkscope.runs.result import Result
from qkscope.tasks.task import Task

PROMPT = "When Mary and John went to the store, John gave a drink to"
EXAMPLES = (PROMPT, "hat: O\njam: Z\ncat: B\npen: K\njam:", "The war lasted from the year 1743 to the year 17")
_LONGEST = 2048  # tokens
_CHARACTERS = 64 * _LONGEST
_KEPT = 2200  # tokens of all prompts that stay in memory
_CHANGES = 20
_TRIED, _SHORT, _MATTER = 32, 256, 5  # heads whose attention is hidden in turn, up to how many tokens, and those told


@checked_class
class Session:
    """A model that is looked into by several requests, one at a time."""

    def __init__(self, scope: Scope, fit: Fit | None = None, task: Task | None = None, folder: str = "") -> None:
        if scope.tokenizer is None:
            raise BadInput(f"{scope.name} has no tokenizer, so that no prompt can be typed: add one to its folder.")
        self.scope = scope
        self.features = Features(task, folder) if fit is None else Features.of_fit(fit, task, folder)
        self._lock = threading.Lock()
        self._kept: dict[str, Looked] = {}
        self._answered: tuple[tuple[Any, ...], Answer] | None = None
        try:
            self._no_writers = ""
            reader_of(scope)
        except BadInput as error:  # the rest can be shown all the same
            self._no_writers = str(error)

    @classmethod
    def load(cls, scope: Scope, folder: str | Path | None = None) -> Session:
        """With what a folder of decompose, discover or atlas knows, or with nothing yet."""
        made = cls(scope)
        if folder is not None:
            made.features = Features.read(folder, scope)
        return made

    # ------------------------------------------------------------------ what is asked

    def describe(self) -> dict[str, Any]:
        """The model, its heads, and what is known of them already."""
        known = self.features
        return {
            "model": self.scope.name, "heads": [str(head) for head in self.scope.heads()],
            "fitted": [str(head) for head in list(known.of)],  # another request may be fitting one more
            "said": {str(head): name for head, (name, _) in known.said.items()},
            "prompt": PROMPT, "examples": EXAMPLES, "longest": self._longest, "folder": known.folder,
            "task": known.task.name, "fitted_on": FITTED_ON, "no_writers": self._no_writers,
        }  # fmt: skip

    def look(self, prompt: str, query: int | None = None) -> dict[str, Any]:
        """Tokens, the attention of every head from one of them (a byte each), and the likeliest next tokens.

        ``matter`` are heads with much attention on another token than the first, those first without whose attention
        the next token changes most: where to look first.
        """
        with self._lock:
            start = time.perf_counter()
            known = self._looked(prompt)
            at = len(known.tokens) - 1 if query is None else query
            known.asked(at)
            attention = known.attention(at)
            matter, logits = self._matter(known, attention, at)
            return {
                "tokens": known.tokens,
                "query": at,
                "attention": in_bytes(attention),
                "matter": matter,
                "next": next_tokens(self.scope, logits),
                "seconds": time.perf_counter() - start,
            }

    def why(self, prompt: str, query: int, head: str, key: int | None = None) -> dict[str, Any]:
        """Why a head looks from one token at another: parts of the logit, writers, a test of them, and what it does."""
        with self._lock:
            start = time.perf_counter()
            one = self._answer(prompt, query, head, key)
            return {**one.plain(), "python": one.python(), "seconds": time.perf_counter() - start}

    def change(self, prompt: str, query: int, head: str, key: int, changes: Sequence[str]) -> dict[str, Any]:
        """The head's row with some changes made, all heads after it and the next token, beside random changes."""
        with self._lock:
            start = time.perf_counter()
            if not 0 < len(changes) <= _CHANGES:
                raise BadInput(f"from 1 to {_CHANGES} changes are made at once, but got {len(changes)}.")
            one = self._answer(prompt, query, head, key)
            found = one.changed([Change.parse(text) for text in changes])
            return {**found, "changes": list(changes), "seconds": time.perf_counter() - start}

    def fit(self, head: str) -> dict[str, Any]:
        """Fit the task's features at one more head; kept in the user's cache."""
        with self._lock:
            at = self.scope.check(head)
            self.features.fit(self.scope, at)
            self._answered = None
            return {"head": str(at), "features": list(self.features.of[at])}

    def save(self, prompt: str, query: int, head: str, key: int, changes: Sequence[str] = ()) -> dict[str, Any]:
        """One offline page of the answer."""
        from qkscope.page.report import report_html

        with self._lock:
            one = self._answer(prompt, query, head, key)
            results: list[Result] = []
            if one.one.told_apart:
                results.append(why(self.scope, prompt, one.head, query, key, probe=Probe(self.scope, prompt)))
            results += [one.result(texts) for texts in (["remove"], list(changes)) if texts]
        return {"html": report_html(results, title=f"why {one.head}"), "name": f"why-{one.head}.html"}

    # ------------------------------------------------------------------ how it is answered

    def _matter(
        self, known: Looked, attention: Float[Tensor, "h t"], query: int
    ) -> tuple[list[dict[str, Any]], Float[Tensor, "1 v"]]:
        """Heads without whose attention to their first key the next token changes, and its logits as they are."""
        heads, top = list(self.scope.heads()), _elsewhere(attention).max(dim=1)
        chosen = top.values.argsort(descending=True)[: _TRIED if len(known.tokens) <= _SHORT else _TRIED // 4].tolist()
        rows = [known.again.without(query, heads[i], int(top.indices[i])) for i in chosen]
        run = known.again.run(query, [None, *rows]).logits
        moved = dict(zip(chosen, moved_by(run), strict=True))
        return [
            {"head": str(heads[i]), "key": int(top.indices[i]), "attention": float(top.values[i]), "moved": moved[i]}
            for i in sorted(chosen, key=lambda i: -moved[i])[:_MATTER]
        ], run[:1]

    @property
    def _longest(self) -> int:
        limit = getattr(self.scope.model.config.get_text_config(), "max_position_embeddings", None)
        return min(_LONGEST, limit) if isinstance(limit, int) and limit > 0 else _LONGEST

    def _looked(self, prompt: str) -> Looked:
        if prompt in self._kept:
            self._kept[prompt] = self._kept.pop(prompt)  # the newest last
            return self._kept[prompt]
        if not prompt.strip():
            raise BadInput("the prompt is empty: type a few words.")
        if len(prompt) > _CHARACTERS:
            raise BadInput(f"the prompt has {len(prompt)} characters: at most {_CHARACTERS} are looked at here.")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise BadInput("the prompt holds half of a character: type it again.") from None
        found = Looked.look(self.scope, None if self._no_writers else reader_of(self.scope), prompt, self._longest)
        while self._kept and sum(len(one.tokens) for one in self._kept.values()) + len(found.tokens) > _KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[prompt] = found
        return found

    def _answer(self, prompt: str, query: int, head: str, key: int | None) -> Answer:
        """One head at one token; the last one asked about is kept."""
        at, known = self.scope.check(head), self._looked(prompt)
        asked = known.asked(query)
        if key is None:
            row = known.again.row(query, at).attention()[0, :, : query + 1]
            key = int(_elsewhere(row).argmax())
        if not 0 <= key <= query:
            raise BadInput(f"token {key} is not before the token that asks: choose from 0 to {query}.")
        name = (prompt, query, at, key)
        if self._answered is not None and self._answered[0] == name:
            return self._answered[1]
        call = known.run.calls[at.layer]
        own = {
            label: one.at(self.scope, call, query) if isinstance(one, Pattern) else one
            for label, one in self.features.of.get(at, {}).items()
        }
        what_if = WhatIf(PromptTrace(known.run, asked, at, key), known.again, own)
        self._answered = name, Answer(self.scope, prompt, what_if, self.features)
        return self._answered[1]


def _elsewhere(attention: Float[Tensor, "h t"]) -> Float[Tensor, "h t"]:
    """Attention with that on the first token taken away: many heads rest there."""
    elsewhere = attention.clone()
    elsewhere[:, 0] = -1
    return elsewhere
