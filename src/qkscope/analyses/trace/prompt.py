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
from qkscope.analyses.trace.features import features_of_prompt, made_by
from qkscope.analyses.trace.one import Asked, PromptTrace
from qkscope.analyses.trace.rows import SIDES
from qkscope.analyses.trace.verdicts import controls_of, named_cut
from qkscope.capture.scope import Scope
from qkscope.examples import Example
from qkscope.heads import Head, Writer
from qkscope.linear.neurons import check_neurons
from qkscope.linear.reader import Reader
from qkscope.linear.run import Run
from qkscope.maths.dictionaries import Dictionary
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
    projectors: Mapping[Head, Tensor],
    dictionary: Dictionary | None = None,
    neurons: bool | Sequence[Writer] = False,
    chat: bool = False,
    draws: int = 20,
    seed: int = 0,
) -> dict[str, Any]:
    """Fields of a `Trace` of one prompt: split among writers, or among a dictionary's features."""
    asked, reader = Asked.of(scope, prompt, query, chat), Reader(scope, heads)
    layers = [] if dictionary is None else [dictionary.layer]
    run = reader.record(asked.inputs, asked.places, deep=dictionary is None, layers=layers, neurons=bool(neurons))
    tables: dict[str, list[dict[str, Any]]] = {}
    said = []
    for head in heads:
        one = PromptTrace(run, asked, head, key, versus, projectors.get(head))
        if dictionary is None:
            own, sentence = _writers_of(one, depth, draws, seed)
        else:
            own, sentence = features_of_prompt(one, dictionary, draws, seed, alone=len(heads) == 1)
        if neurons:
            named = () if isinstance(neurons, bool) else neurons
            without = check_neurons(run, head, named)
            own["neurons"] = one.neuron_rows(named)
            sentence += f" {_said_of_neurons(own['neurons'], without)}"
        for name, rows in own.items():
            tables.setdefault(name, []).extend(rows)
        said.append(sentence)
    about = {} if dictionary is None else made_by(dictionary, draws)
    told = {"heads": [str(h) for h in heads], **asked.told(prompt), **about}
    return {
        "experiment": "trace/prompt",
        "answer": " ".join(said),
        "tables": tables,
        "seed": seed,
        **made_with(scope, tokenizer=scope.tokenizer_hash, **told),
    }


def _writers_of(one: PromptTrace, depth: int, draws: int, seed: int) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Tables and the answer of one head."""
    cuts, drawn = one.cut_rows(draws, seed), one.graph(depth) if one.against else None
    check = {
        "head": str(one.head), "sum_error": one.error, "logit": one.total,
        "cancels": max(cancelling(own, one.total) for own in one.marginals().values()),
        "query": one.asked.query, "key": one.key, "attention": float(one.attention[one.key]),
        "first": float(one.attention[0]), "n": 1,
    }  # fmt: skip
    return {
        "writers": one.writer_rows(),
        "pairs": one.pair_rows(),
        "cuts": cuts,
        "graph": [] if drawn is None else drawn.rows,
        "prompt": [] if drawn is None else drawn.prompt,
        "tokens": one.token_rows(),
        "check": [check],
    }, _said(one, cuts)


def _said(one: PromptTrace, cuts: Sequence[dict[str, Any]]) -> str:
    if not one.attends:
        return one.where()
    marginals, total = one.marginals(), one.total
    named = {
        side: " and ".join(
            f"{one.writers[i]} ({float(marginals[side][i]) / total:.0%})" for i in one.strongest(side, 2)
        )
        for side in SIDES
    }
    said = f"{one.where()} Its key is written by {named['key']}, its query by {named['query']}."
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
