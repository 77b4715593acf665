"""One prompt: any query token, any key token, some heads; who wrote them, and what cutting them does there.

A prompt is run once for each token that asks, and every head is answered from that run (`Probe`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from qkscope.analyses.prompts import made_with
from qkscope.analyses.trace.edges import says_cancels
from qkscope.analyses.trace.one import Asked, PromptTrace
from qkscope.analyses.trace.rows import ATTENDED, SIDES
from qkscope.analyses.trace.verdicts import controls_of, named_cut
from qkscope.capture.scope import Scope
from qkscope.examples import Example
from qkscope.heads import Head, Writer
from qkscope.linear.neurons import check_neurons
from qkscope.linear.reader import Reader
from qkscope.linear.run import Run
from qkscope.maths.writers import cancelling


def trace_prompt(
    scope: Scope,
    prompt: str | Example,
    heads: Sequence[Head],
    *,
    query: int | None = None,
    key: int | None = None,
    versus: int | None = None,
    depth: int = 2,
    projectors: Mapping[Head, Tensor] | None = None,
    neurons: bool | Sequence[Writer] = False,
    chat: bool = False,
    draws: int = 20,
    seed: int = 0,
) -> dict[str, Any]:
    """Fields of a `Trace` of one prompt."""
    asked, reader = Asked.of(scope, prompt, query, chat), Reader(scope, heads)
    run = reader.record(asked.inputs, asked.places, deep=True, neurons=bool(neurons))
    named = () if isinstance(neurons, bool) else neurons
    names = ("writers", "pairs", "cuts", "graph", "prompt", "tokens", "check")
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    said = []
    for head in heads:
        one = PromptTrace(run, asked, head, key, versus, (projectors or {}).get(head))
        cuts = one.cut_rows(draws, seed)
        tables["writers"] += one.writer_rows()
        tables["pairs"] += one.pair_rows()
        tables["cuts"] += cuts
        tables["tokens"] += one.token_rows()
        if one.against:
            drawn = one.graph(depth)
            tables["graph"] += drawn.rows
            tables["prompt"] += drawn.prompt
        tables["check"].append({
            "head": str(head), "sum_error": one.error, "logit": one.total,
            "cancels": max(cancelling(own, one.total) for own in one.marginals().values()),
            "query": asked.query, "key": one.key, "attention": float(one.attention[one.key]),
            "first": float(one.attention[0]), "n": 1,
        })  # fmt: skip
        said.append(_said(one, cuts))
        if neurons:
            without = check_neurons(run, head, named)
            rows = one.neuron_rows(named)
            tables.setdefault("neurons", []).extend(rows)
            said.append(_said_of_neurons(rows, without))
    return {
        "experiment": "trace/prompt",
        "answer": " ".join(said),
        "tables": tables,
        "seed": seed,
        **made_with(scope, tokenizer=scope.tokenizer_hash, heads=[str(h) for h in heads], **asked.told(prompt)),
    }


def _said(one: PromptTrace, cuts: Sequence[dict[str, Any]]) -> str:
    where = one.where()
    if float(one.attention[one.key]) < ATTENDED:
        return f"{where}: it does not attend there, so what follows explains a logit and no attention."
    marginals, total = one.marginals(), one.total
    named = {
        side: " and ".join(
            f"{one.writers[i]} ({float(marginals[side][i]) / total:.0%})" for i in one.strongest(side, 2)
        )
        for side in SIDES
    }
    said = f"{where}. Its key is written by {named['key']}, its query by {named['query']}."
    said += says_cancels(one.writer_rows())
    if (cut := named_cut(cuts)) is not None:
        said += (
            f" With {cut['writers']} cut from the key, the attention there is {cut['after']:.0%}"
            f" ({controls_of(cut)}: {cut['random']:.0%}): {cut['verdict']}."
        )
    return said


def _said_of_neurons(rows: Sequence[dict[str, Any]], without: Sequence[Writer]) -> str:
    first = {side: next(row for row in rows if row["side"] == side) for side in SIDES}
    told = {side: f"{row['writer']} ({row['share'] or 0:.0%}, at {row['token']!r})" for side, row in first.items()}
    missing = f" {', '.join(map(str, without))}: no neurons to name." if without else ""
    return f"The first neuron of its key is {told['key']}, of its query {told['query']}.{missing}"


_READERS: WeakKeyDictionary[Scope, tuple[str, Reader]] = WeakKeyDictionary()


def reader_of(scope: Scope) -> Reader:
    """A reader of all heads, kept as long as the model's weights are what they were."""
    weights = scope.weights_hash
    if scope not in _READERS or _READERS[scope][0] != weights:
        _READERS[scope] = weights, Reader(scope, scope.heads())
    return _READERS[scope][1]


class Probe:
    """A prompt that can be asked about.

    Parameters
    ----------
    scope : the model.
    prompt : a text, or an example with at most one marked query.
    chat : whether it goes into the chat template.

    Examples
    --------
    >>> probe = Probe(Scope.load("nano:mixed"), "hat: O jam: Z jam:")
    >>> probe.head("L1H0").asked.tokens[-2:]
    ['jam', ':']
    """

    def __init__(self, scope: Scope, prompt: str | Example, chat: bool = False) -> None:
        self.scope, self.prompt, self.chat, self.reader = scope, prompt, chat, reader_of(scope)
        self._runs: dict[int, tuple[Asked, Run]] = {}

    def run(self, query: int | None = None) -> tuple[Asked, Run]:
        """The prompt with one token asking: the last one, where none is named."""
        asked = Asked.of(self.scope, self.prompt, query, self.chat)
        if asked.query not in self._runs:
            self._runs[asked.query] = asked, self.reader.record(asked.inputs, asked.places, deep=True, logits=True)
        return self._runs[asked.query]

    def head(self, head: str | Head, query: int | None = None, key: int | None = None) -> PromptTrace:
        """One head, asked from one token about another; see `PromptTrace`."""
        asked, run = self.run(query)
        return PromptTrace(run, asked, self.scope.check(head), key)
