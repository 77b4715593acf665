"""Trace: who wrote what a head matched on, and is it so.

A relative logit (the right keys against the others) is split, exactly, among the writers of the head's query and of its
keys. The test stands beside it always: their parts are replaced in this head alone, on words that nothing was chosen
on, beside rivals of the same size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkscope.analyses.prompts import batches_of, check_same_model, made_from, units_hash, with_notes
from qkscope.analyses.trace.choose import Chosen, choose_writers
from qkscope.analyses.trace.edges import DRAWS, EdgeTest, whole_heads
from qkscope.analyses.trace.features import check_dictionary, features_of_task, made_by
from qkscope.analyses.trace.graph import sources_of, trace_graph
from qkscope.analyses.trace.many import Texts, trace_many
from qkscope.analyses.trace.prompt import trace_prompt
from qkscope.analyses.trace.result import FeatureTrace, NeuronTrace, Trace, trace_fields
from qkscope.analyses.trace.rows import SIDES, answer_signs, task_rows, words_of
from qkscope.analyses.trace.tally import Tally, tensors_of
from qkscope.analyses.trace.verdicts import that_sum
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head, parse_writers
from qkscope.kinds import Count, Natural, checked_call
from qkscope.linear.reader import Reader
from qkscope.maths.dictionaries import Dictionary
from qkscope.maths.subspace import Subspace
from qkscope.maths.writers import first_by, relative_weights
from qkscope.runs.job import Job
from qkscope.runs.provenance import provenance
from qkscope.tasks.task import Task

_SOURCES, _FOLLOWED = 48, 4  # prompts on which sources are looked for, and writers of each side that are followed


@checked_call
def trace(
    scope: Scope,
    what: Task | str | Example | Texts,
    head: str | Head | Sequence[str | Head] = "all",
    n: Count = 128,
    *,
    query: int | None = None,
    key: int | None = None,
    versus: int | None = None,
    depth: Natural = 2,
    feature: Subspace | None = None,
    dictionary: Dictionary | None = None,
    neurons: bool | str | Sequence[str] = False,
    whole: bool = True,
    draws: Count = DRAWS,
    chat: bool | None = None,
    batch_size: Count = 32,
    seed: Natural = 0,
    shard: tuple[int, int] = (0, 1),
    progress: bool | None = None,
    job: Job | None = None,
) -> Trace:
    """Split what a head matched on among the writers of its query and of its keys, and cut and keep them.

    Parameters
    ----------
    scope : the model.
    what : a task (its right keys against its other keys), one prompt, or a list of texts or documents
        (`qkscope.tasks.texts`; the most attended token of a drawn query against all others but the first).
    head : one head, several, or ``"all"``: of all heads of a task only writers are given, and no edge is cut.
    n : prompts of a task, for choosing and for testing each; passages of texts.
    query, key : tokens of one prompt, by place, from the end where negative; by default its last token, and the token
        that the head attends to most besides the first.
    versus : the token that the key is compared with; by default all others that the query sees, but the first.
    depth : how many levels down the graph of one prompt (of a task: of its first) goes.
    feature : look inside this subspace alone: its projector is put between query and key.
    dictionary : split among this dictionary's features instead of writers, beside copies of it without meaning; edges
        are not cut then.
    neurons : of one prompt, whether to name the first ten neurons a side of the MLPs before the head; or those to name,
        as ``"M9.N120"``.
    whole : whether whole heads are taken out of the running model, too (of a task).
    draws : random writers of the same layers beside those chosen; of a dictionary, copies of each kind.
    chat : whether a prompt goes into the chat template; a task says so itself.
    batch_size : prompts run together.
    seed : of every draw.
    shard : ``(i, n)`` takes every n-th batch of the test from the i-th on; `merge_traces` adds them up.
    progress : whether to show a bar; if not given, where stderr is a terminal.
    job : where finished pieces are kept, so that the same call goes on after it was stopped; nowhere by default.

    Returns
    -------
    Trace
        ``tables["writers"]``, ``["pairs"]``, ``["edges"]``, ``["whole"]``, ``["check"]``; of one prompt ``["tokens"]``,
        ``["cuts"]`` and ``["graph"]``, with neurons ``["neurons"]``. With a dictionary: ``["feature_pairs"]``,
        ``["features"]``, ``["copies"]``, ``["held"]``, ``["check"]``.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope = qk.Scope.load("nano:mixed")
    >>> found = qk.trace(scope, qk.tasks.induction(), "L1H0", 16, whole=False, progress=False)
    >>> found.table()[0]["writer"], found.tables["check"][0]["sum_error"] < 1e-4
    ('L0H2', True)
    """
    start = time.perf_counter()
    heads, named = _checked_heads(scope, head), head != "all"
    if shard != (0, 1) and not (named and isinstance(what, Task)):
        raise BadInput("shards are for a task and heads that are named: leave shard out, or name both.")
    if not 0 <= shard[0] < shard[1]:
        raise BadInput(f"a shard is (i, n) with i from 0 to n - 1, but got {shard}.")
    if feature is not None and not (named and isinstance(what, Task | str | Example)):
        raise BadInput("a feature is looked into on a task or on a prompt, at a head that is named: name it.")
    projectors = {} if feature is None else {one: _projector(scope, one, feature) for one in heads}
    if neurons and (dictionary is not None or not isinstance(what, str | Example)):
        raise BadInput("neurons are named of one prompt, and not beside a dictionary: give a prompt alone.")
    if dictionary is not None:
        if not named or not isinstance(what, Task | str | Example) or shard != (0, 1):
            raise BadInput("a dictionary is for a task or a prompt, at heads that are named, in one piece: name them.")
        check_dictionary(scope, heads, dictionary)
    if not isinstance(what, str | Example):
        _refuse("a task" if isinstance(what, Task) else "texts", query=query, key=key, versus=versus, chat=chat)
    own: Any
    if isinstance(what, str | Example):
        own = {"query": query, "key": key, "versus": versus, "chat": bool(chat)}
        own |= {"depth": depth, "draws": draws, "seed": seed, "projectors": projectors, "dictionary": dictionary}
        own["neurons"] = neurons if isinstance(neurons, bool) else parse_writers(neurons)
        fields = trace_prompt(scope, what, heads, **own)
    elif isinstance(what, Task) and named:
        run = (n, whole, depth, draws, batch_size, seed, shard, progress)
        fields = _TaskTrace(Reader(scope, heads), what, projectors, dictionary, job or Job(), *run).fields()
    else:
        own = {"batch_size": batch_size} if isinstance(what, Task) else {}
        fields = trace_many(scope, what, heads, n, seed=seed, progress=progress, job=job or Job(), **own)
    kind = FeatureTrace if dictionary is not None else NeuronTrace if neurons else Trace
    found: Trace = kind(**fields)
    return replace(that_sum(found, scope.model.dtype), seconds=time.perf_counter() - start)


def _checked_heads(scope: Scope, head: Any) -> list[Head]:
    heads = [one for one in scope.parse(head) if head != "all" or one.layer > 0]
    if not heads:
        raise BadInput(f"{scope.name} has one layer, where only the embedding writes: there is nobody to trace.")
    check_layers(heads)
    return heads


def check_layers(heads: Sequence[Head]) -> None:
    """Refuse heads that nobody but the embedding writes for."""
    for one in heads:
        if one.layer == 0:
            raise BadInput(f"{one} is in the first layer, where only the embedding writes: trace a later head.")


def _refuse(what: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise BadInput(f"{name} is for one prompt, not for {what}: leave it out, or give a prompt.")


def _projector(scope: Scope, head: Head, feature: Subspace) -> Tensor:
    """``U Uᵀ`` of a feature of this head, this model, and of vectors as the dot product sees them."""
    if feature.head not in (None, head):
        raise BadInput(f"the feature belongs to {feature.head}, not to {head}: trace one head, with a feature of it.")
    check_same_model(feature.about, scope, "the feature")
    space = feature.about.get("space", "post_rope")
    if space != "post_rope":
        raise BadInput(f"the feature was fitted in {space}: trace looks inside features fitted in post_rope.")
    basis = feature.basis("query").float()
    if basis.shape[0] != scope.facts.layers[head.layer].d_head:
        raise BadInput(
            f"the feature has width {basis.shape[0]}, but {head} has {scope.facts.layers[head.layer].d_head}."
        )
    return basis @ basis.T


@dataclass(frozen=True)
class _TaskTrace:
    """A trace of a task: whose heads read what, how much of it, and where what is done is kept."""

    reader: Reader
    task: Task
    projectors: dict[Head, Tensor]
    dictionary: Dictionary | None
    job: Job
    n: int
    whole: bool
    depth: int
    draws: int
    batch_size: int
    seed: int
    shard: tuple[int, int]
    progress: bool | None

    def fields(self) -> dict[str, Any]:
        """Choose on some words, test on others."""
        reader, task, job = self.reader, self.task, self.job
        choosing, units = task.choose(self.n), task.test(self.n)
        asked_of = {
            "heads": [str(h) for h in reader.heads], "draws": self.draws, "batch_size": self.batch_size,
            "feature": {str(h): float(p.sum()) for h, p in self.projectors.items()},
            **({"shard": list(self.shard)} if self.dictionary is None else made_by(self.dictionary, self.draws)),
        }  # fmt: skip
        job.begin(reader.scope, [list(choosing), list(units)], verb="trace", seed=self.seed, chat=task.chat, **asked_of)
        about = {**made_from(reader.scope, task), **asked_of, "n": self.n}
        own: Any = {"chat": task.chat, "seed": self.seed, "progress": self.progress}
        more: Any = {"batch_size": self.batch_size, "job": job, **own}
        if self.dictionary is not None:
            given = (reader, choosing, units, self.projectors, self.dictionary, self.draws)
            tables, answer = features_of_task(*given, **more)
            made = {"tables": tables, "answer": with_notes(answer, about), "provenance": provenance(**about)}
            return {"experiment": f"trace/{task.name}", "model": about["model"], "seed": self.seed, **made}
        chosen = choose_writers(reader, choosing, self.projectors, **more)
        tests = {h: EdgeTest(h, reader.writers(h.layer), chosen[h], self.seed, self.draws) for h in reader.heads}
        tallies = self._tested(tests, units)
        once: dict[str, list[dict[str, Any]]] = {"whole": []}
        if self.whole and self.shard[0] == 0:
            for h in reader.heads:
                run = partial(whole_heads, reader, h, chosen[h], choosing, units, words_of(units), **own)
                once["whole"] += job.once(f"whole {h}", run)
        if self.shard[0] == 0:
            once |= job.once(f"sources {self.depth}", partial(self._sources, units, chosen))
        about |= {"trace_seed": self.seed, "whole": self.whole, "examples": units_hash([*choosing, *units])}
        return trace_fields({h: test.asked for h, test in tests.items()}, tallies, once, about, self.seed, task.name)

    def _sources(self, units: Sequence[Any], chosen: Mapping[Head, Chosen]) -> dict[str, list[dict[str, Any]]]:
        """Which tokens the first writers read, on some prompts; and one prompt's graph."""
        reader = self.reader
        made: dict[str, list[dict[str, Any]]] = {"sources": [], "graph": [], "prompt": []}
        examples = [unit[0] for unit in units[:_SOURCES]]
        encoded = [reader.scope.encode(examples[i : i + 16], chat=self.task.chat) for i in range(0, len(examples), 16)]
        batches = [(one, relative_weights(answer_signs(one))) for one in encoded]
        for head in reader.heads:
            names, shares = reader.writers(head.layer), chosen[head].scores["share"]
            writers = {side: [names[i] for i in first_by(shares[side], _FOLLOWED)] for side in SIDES}
            made["sources"] += sources_of(reader, batches, head, writers)
            one = reader.scope.encode(examples[:1], chat=self.task.chat)
            signs, columns = answer_signs(one)[0], one.places.keys[0]
            right, others = (columns[signs.sign() == sign].tolist() for sign in (1, -1))
            query = int(one.places.query[0])
            options: Any = {"others": others, "depth": self.depth, "projector": self.projectors.get(head)}
            drawn = trace_graph(reader.record_prompt(one), head, query, right[0], **options)
            made["graph"] += drawn.rows
            made["prompt"] += drawn.prompt
        return made

    def _tested(self, tests: Mapping[Head, EdgeTest], units: Sequence[Any]) -> dict[Head, Tally]:
        words = words_of(units)
        tallies = {head: test.asked.tally(words) for head, test in tests.items()}

        def add(indices: list[int]) -> None:
            numbers, rows = task_rows(self.reader, units, indices, self.task.chat, self.projectors)
            found = [tests[one.head].measure(one, torch.tensor(numbers)) for one in rows]
            for one, own in zip(rows, found, strict=True):  # a batch is added whole, or not at all
                tallies[one.head].add([words[i] for i in numbers], *own)

        every = batches_of(units, self.batch_size)
        index, count = self.shard
        if len(every) < count:
            raise BadInput(
                f"{len(every)} batches cannot be shared among {count}: take fewer shards or smaller batches."
            )
        self.job.stream("testing", every[index::count], add, self.progress, tensors_of(tallies))
        return tallies
