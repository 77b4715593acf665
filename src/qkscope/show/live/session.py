"""What the live page asks of a model: where heads look, why one looks there, and what if it did not.

Answers are the results that `qkscope.why` and `qkscope.show.live.what_if` give, with the blocks that a saved page draws
of them. A question names the prompt, the token that asks, the head and the key, and changes are words, so that the
page's address is the whole state.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qkscope.analyses.prompts import made_with
from qkscope.analyses.trace.prompt import Probe, PromptTrace, Question, reader_of
from qkscope.analyses.why.parts import feature_rows
from qkscope.analyses.why.why import answer_probe
from qkscope.capture.scope import Scope
from qkscope.change.rows import Rerun
from qkscope.errors import BadInput
from qkscope.kinds import checked_class
from qkscope.linear.run import Run
from qkscope.runs.result import Result
from qkscope.show.blocks import blocks_of
from qkscope.show.live.features import FeatureStore
from qkscope.show.live.what_if import WhatIf
from qkscope.show.page import report_html

EXAMPLES = (
    "When Mary and John went to the store, John gave a drink to",
    "hat: O\njam: Z\ncat: B\npen: K\njam:",
    "The war lasted from the year 1743 to the year 17",
)
_LONGEST = 2048  # tokens
_CHARACTERS = 64 * _LONGEST
_KEPT = 2200  # tokens of all prompts that stay in memory
_CHANGES = 20
_TEXTS = 3  # of a head that a folder names


@dataclass
class LiveRun:
    """A prompt run with one token asking; without a probe where the model's writers cannot be told apart."""

    asked: Question
    run: Run
    again: Rerun
    probe: Probe | None


@checked_class
class Session:
    """A model that is looked into; its server asks one question at a time."""

    def __init__(self, scope: Scope, features: FeatureStore | None = None) -> None:
        if scope.tokenizer is None:
            raise BadInput(f"{scope.name} has no tokenizer, so that no prompt can be typed: add one to its folder.")
        self.scope = scope
        self.features = features or FeatureStore()
        self._questions: dict[tuple[str, int], LiveRun] = {}
        self._answer: tuple[tuple[Any, ...], tuple[Result, WhatIf]] | None = None
        try:
            self._no_writers = ""
            reader_of(scope)
        except BadInput as error:  # the rest can be shown all the same
            self._no_writers = str(error)

    # ------------------------------------------------------------------ what is asked

    def describe(self) -> dict[str, Any]:
        """The model, its heads, and what is known of them already."""
        store = self.features
        return {
            "model": self.scope.name, "heads": [str(head) for head in self.scope.heads()],
            "fitted": [str(head) for head in store.of],
            "names": {str(head): name for head, name in store.names.items()},
            "examples": EXAMPLES, "folder": store.folder,
        }  # fmt: skip

    def look(self, prompt: str, query: int | None = None) -> dict[str, Any]:
        """Tokens, the attention of every head from one of them (a byte each), and which heads matter there."""
        start, question = time.perf_counter(), self._ask(prompt, query)
        at, heads = question.asked.query, list(self.scope.heads())
        rows = [question.again.row(at, head).attention()[0].cpu() for head in heads]
        attention = torch.cat(rows)[:, : at + 1]
        try:
            if question.probe is None:
                raise BadInput(self._no_writers)
            result: Result = answer_probe(question.probe)
            first = result.tables["heads"][0]
        except BadInput as error:  # of some families it cannot be said which heads matter
            result = Result("why", {"heads": []}, answer=str(error))
            elsewhere = attention[:, 1:].max(dim=1)  # many heads rest on the first token
            best = int(elsewhere.values.argmax())
            first = {"head": str(heads[best]), "key": 1 + int(elsewhere.indices[best])}
        return {
            "tokens": question.asked.tokens, "query": at, "attention": _bytes(attention),
            "result": result.to_json(), "first": {name: first[name] for name in ("head", "key")},
            "seconds": time.perf_counter() - start,
        }  # fmt: skip

    def why(self, prompt: str, query: int, head: str, key: int | None = None) -> dict[str, Any]:
        """Why a head looks from one token at another: the result of `why`, and what folders know of the head."""
        result, what_if = self._why(prompt, query, head, key)
        trace, store = what_if.trace, self.features
        python = (
            "import qkscope as qk\n\n"
            f"scope = qk.Scope.load({self.scope.name!r})\n"
            f'print(qk.why(scope, {prompt!r}, "{trace.head}", query={trace.asked.query}, key={trace.key}))\n'
        )
        return {
            **_shown(result), "head": str(trace.head), "key": trace.key, "python": python,
            "row": trace.attention[: trace.asked.query + 1].tolist(), "fitted": list(what_if.features),
            "about": store.sentences.get(trace.head, ""), "texts": store.texts.get(trace.head, [])[:_TEXTS],
        }  # fmt: skip

    def change(self, prompt: str, query: int, head: str, key: int, changes: Sequence[str]) -> dict[str, Any]:
        """The head's row with some changes made, all heads after it and the next token, beside random changes."""
        if not 0 < len(changes) <= _CHANGES:
            raise BadInput(f"from 1 to {_CHANGES} changes are made at once, but got {len(changes)}.")
        what_if = self._why(prompt, query, head, key)[1]
        result, attention = what_if.result(self.scope, changes)
        row = attention[list(self.scope.heads()).index(what_if.trace.head)].tolist()
        words = list(map(what_if.words, changes))
        return {**_shown(result), "row": row, "attention": _bytes(attention), "words": words}

    def save(self, prompt: str, query: int, head: str, key: int, changes: Sequence[str] = ()) -> dict[str, Any]:
        """One offline page of the answer, and of the changes."""
        result, what_if = self._why(prompt, query, head, key)
        changed = [what_if.result(self.scope, changes)[0]] if changes else []
        name = f"why {what_if.trace.head}"
        return {"html": report_html([result, *changed], title=name), "name": f"{name.replace(' ', '-')}.html"}

    # ------------------------------------------------------------------ how it is answered

    def _ask(self, prompt: str, query: int | None) -> LiveRun:
        """Run a prompt with one token asking; some of the last are kept."""
        if not prompt.strip():
            raise BadInput("the prompt is empty: type a few words.")
        if len(prompt) > _CHARACTERS:
            raise BadInput(f"the prompt has {len(prompt)} characters: at most {_CHARACTERS} are looked at here.")
        asked = Question.of(self.scope, prompt, query, chat=False)
        limit = getattr(self.scope.model.config.get_text_config(), "max_position_embeddings", None)
        longest = min(_LONGEST, limit) if isinstance(limit, int) and limit > 0 else _LONGEST
        if len(asked.tokens) > longest:
            raise BadInput(f"the prompt has {len(asked.tokens)} tokens: at most {longest} are looked at here.")
        name, kept = (prompt, asked.query), self._questions
        if name not in kept:
            while kept and sum(len(each.asked.tokens) for each in kept.values()) + len(asked.tokens) > _KEPT:
                kept.pop(next(iter(kept)))
            if self._no_writers:
                columns = torch.cat([asked.places.query[:, None], asked.places.keys], dim=1)
                probe, run = None, Run(None, asked.places.row, columns, asked.inputs)  # type: ignore[arg-type]
                self.scope.watch(asked.inputs, lambda call: run.calls.__setitem__(call.layer, call))
            else:
                probe = Probe(self.scope, prompt, asked.query)
                asked, run = probe.asked, probe.run
            kept[name] = LiveRun(asked, run, Rerun(self.scope, asked.inputs, run.calls), probe)
        kept[name] = kept.pop(name)  # the newest last
        return kept[name]

    def _why(self, prompt: str, query: int, head: str, key: int | None) -> tuple[Result, WhatIf]:
        """One head at one token; the last one asked about is kept."""
        question, at = self._ask(prompt, query), self.scope.check(head)
        name = (prompt, question.asked.query, at, key)
        if self._answer is None or self._answer[0] != name:
            trace = PromptTrace(question.run, question.asked, at, key)
            features = self.features.at(at, self.scope, question.run.calls[at.layer], question.asked.query)
            if question.probe is None:
                told = made_with(self.scope, tokenizer=self.scope.tokenizer_hash, **question.asked.told(prompt))
                tables = {
                    "said": [{"line": self._no_writers}],
                    "attention": trace.token_rows(),
                    "parts": feature_rows(trace, features),
                }
                result = Result("why", tables, answer=trace.where(), **told)
            else:
                result = answer_probe(question.probe, at, trace.key, features or None)
            self._answer = (*name[:3], trace.key), (result, WhatIf(trace, question.again, features))
        return self._answer[1]


def _shown(result: Result) -> dict[str, Any]:
    """A result as JSON, and the blocks that a page draws of it."""
    return {"result": result.to_json(), "blocks": [block.to_json() for block in blocks_of(result)]}


def _bytes(attention: torch.Tensor) -> str:
    """A byte for each number, as the page reads them."""
    return base64.b64encode((attention * 255).round().to(torch.uint8).cpu().numpy().tobytes()).decode()
