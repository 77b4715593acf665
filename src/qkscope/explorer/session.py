"""What the live page asks of a model: where heads look, why one looks there, and what if it did not.

A prompt is run once and every token can ask (`qkscope.explorer.looked`); answers name the token that asks, the head and
the key, and changes are words (`qkscope.explorer.what_if`), so that the page's address is the whole state. Answers are
plain values, ready for JSON.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.fit import Fit
from qkscope.analyses.trace.one import PromptTrace
from qkscope.analyses.trace.prompt import Probe, reader_of
from qkscope.analyses.why.why import why
from qkscope.capture.pick import Capture
from qkscope.capture.scope import Scope
from qkscope.capture.tokens import token_texts
from qkscope.change.rows import Row
from qkscope.errors import BadInput
from qkscope.explorer.answers import Answer
from qkscope.explorer.features import FITTED_ON, Features
from qkscope.explorer.looked import Looked
from qkscope.explorer.what_if import Change, WhatIf
from qkscope.heads import Head
from qkscope.kinds import checked_class
from qkscope.runs.result import Result
from qkscope.tasks.task import Task

PROMPT = "When Mary and John went to the store, John gave a drink to"
EXAMPLES = (PROMPT, "hat: O\njam: Z\ncat: B\npen: K\njam:", "The war lasted from the year 1743 to the year 17")
_LONGEST = 2048  # tokens
_CHARACTERS = 64 * _LONGEST
_KEPT = 2200  # tokens of all prompts that stay in memory
_DRAWS, _RUN = 20, 8  # random changes beside one, and how many of them run through the model
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
            captured = known.captured(at)
            attention = captured.attention()[0, :, : at + 1]
            matter, logits = self._matter(known, captured, attention, at)
            return {
                "tokens": known.tokens,
                "query": at,
                "attention": _bytes(attention),
                "matter": matter,
                "next": self._next([logits]),
                "seconds": time.perf_counter() - start,
            }

    def why(self, prompt: str, query: int, head: str, key: int | None = None) -> dict[str, Any]:
        """Why a head looks from one token at another: parts of the logit, writers, a test of them, and what it does."""
        with self._lock:
            start = time.perf_counter()
            one = self._answer(prompt, query, head, key)
            removed = self._changed(one, [Change("remove")])
            return {**one.plain(), "removed": removed, "said": one.words(removed), "python": one.python(),
                    "seconds": time.perf_counter() - start}  # fmt: skip

    def change(self, prompt: str, query: int, head: str, key: int, changes: Sequence[str]) -> dict[str, Any]:
        """The head's row with some changes made, all heads after it and the next token, beside random changes."""
        with self._lock:
            start = time.perf_counter()
            if not 0 < len(changes) <= _CHANGES:
                raise BadInput(f"from 1 to {_CHANGES} changes are made at once, but got {len(changes)}.")
            one = self._answer(prompt, query, head, key)
            found = self._changed(one, [Change.parse(text) for text in changes])
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
            if one.trace is not None:
                results.append(why(self.scope, prompt, one.head, query, key, probe=Probe(self.scope, prompt)))
            for texts in (["remove"], list(changes)):
                if texts:
                    results.append(one.result(self._changed(one, [Change.parse(text) for text in texts]), texts))
        return {"html": report_html(results, title=f"why {one.head}"), "name": f"why-{one.head}.html"}

    # ------------------------------------------------------------------ how it is answered

    def _matter(
        self, known: Looked, captured: Capture, attention: Float[Tensor, "h t"], query: int
    ) -> tuple[list[dict[str, Any]], Float[Tensor, " v"]]:
        """Heads without whose attention to their first key the next token changes, and its logits as they are."""
        top = _elsewhere(attention).max(dim=1)
        chosen = top.values.argsort(descending=True)[: _TRIED if len(known.tokens) <= _SHORT else _TRIED // 4].tolist()
        rows: list[Row | None] = [None]
        for i in chosen:
            logits = captured.rows().of_head(i).logits()[0, 0].clone()
            logits[int(top.indices[i])] = -torch.inf
            rows.append((captured.heads[i], logits))
        run = known.again.run(query, rows).logits
        moved = moved_by(run)
        order = sorted(range(len(chosen)), key=lambda j: -moved[j])[:_MATTER]
        found = [(chosen[j], moved[j]) for j in order]
        return [
            {"head": str(captured.heads[i]), "key": int(top.indices[i]), "attention": float(top.values[i]), "moved": m}
            for i, m in found
        ], run[0]

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
            row = known.captured(query).attention()[0, list(self.scope.heads()).index(at), : query + 1]
            key = int(_elsewhere(row[None]).argmax())
        if not 0 <= key <= query:
            raise BadInput(f"token {key} is not before the token that asks: choose from 0 to {query}.")
        name = (prompt, query, at, key)
        if self._answered is not None and self._answered[0] == name:
            return self._answered[1]
        captured, trace = known.captured(query), None
        if known.found is not None:
            trace = PromptTrace(known.found, asked, at, key)
        own = self.features.of.get(at, {})
        bases: dict[str, tuple[Tensor, Tensor]] = {}
        for label, one in own.items():
            turned = [self._turned(known, query, at, b) if one.framed else b for b in (one.query, one.key)]
            bases[label] = turned[0], turned[1]
        what_if = WhatIf(captured, at, key, trace, {n: b[1] for n, b in bases.items()})
        made = Answer(known, asked, prompt, what_if, trace, {n: b[0] for n, b in bases.items()}, self.features)
        self._answered = name, made
        return made

    def _turned(self, known: Looked, query: int, head: Head, basis: Float[Tensor, "d r"]) -> Float[Tensor, "d r"]:
        """A basis of the query's frame, as the dot product at this token sees it."""
        call, offset = known.calls[head.layer], self.scope.facts.layers[head.layer].offset
        if call.rotary is None or offset is None:
            return basis
        row, at = torch.zeros(1, dtype=torch.long), torch.tensor([[query]])
        return call.rotary.turn(basis.T[None, :, None].float(), row, at, offset)[0, :, 0].T

    def _changed(self, one: Answer, changes: Sequence[Change]) -> dict[str, Any]:
        """What some changes do, beside random ones."""
        what_if, query = one.what_if, one.asked.query
        row = what_if.changed(changes)
        beside = what_if.random(changes, _DRAWS)
        after = what_if.attend(row)[: query + 1]
        run = one.looked.again.run(query, [None, (one.head, row), *beside[:_RUN]])
        moved = moved_by(run.logits)
        own = [float(what_if.attend(logits)[one.key]) for head, logits in beside if head == one.head]
        verdict = what_if.judge(changes, float(after[one.key]), own)
        return one.outcome(changes, verdict, after.tolist(), own, moved) | {
            "all": _bytes(run.attention[1]),
            "next": self._next([run.logits[0], run.logits[1]]),
        }

    def _next(self, logits: Sequence[Float[Tensor, " v"]], shown: int = 8) -> list[dict[str, Any]]:
        """The likeliest next tokens, before and after."""
        runs = [one.softmax(-1) for one in logits]
        best: list[int] = list(dict.fromkeys(i for p in runs for i in p.topk(min(shown, len(p))).indices.tolist()))
        best.sort(key=lambda i: -max(float(p[i]) for p in runs))
        return [
            {
                "token": token_texts(self.scope, [i])[0],
                "before": float(runs[0][i]),
                "after": float(runs[-1][i]) if len(runs) > 1 else None,
            }
            for i in best[:shown]
        ]


def _elsewhere(attention: Float[Tensor, "h t"]) -> Float[Tensor, "h t"]:
    """Attention with that on the first token taken away: many heads rest there."""
    elsewhere = attention.clone()
    elsewhere[:, 0] = -1
    return elsewhere


def moved_by(logits: Float[Tensor, "b v"]) -> list[float]:
    """How much of the first row's probability each other row has elsewhere (total variation)."""
    chances = logits.softmax(-1)
    return ((chances[1:] - chances[:1]).abs().sum(-1) / 2).tolist()


def _bytes(attention: Float[Tensor, "h t"]) -> str:
    return base64.b64encode((attention * 255).round().to(torch.uint8).numpy().tobytes()).decode()
