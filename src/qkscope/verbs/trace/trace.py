"""Trace: who wrote what a head matched on, with causal tests.

A relative logit (the right keys against the others) is split, exactly, among the writers of the
head's query and of its keys. The test stands beside it always: their parts are replaced in this
head alone, on words that nothing was chosen on, beside rivals of the same size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkscope import BadInput, Dictionary, Example, Scope, Subspace
from qkscope.checking import Count, Natural, Seed
from qkscope.findings.fitted_features import features_of
from qkscope.findings.graph import sources_of, trace_graph
from qkscope.findings.head_rows import ATTENDED, HeadRows, Pass, Tables, answer_signs, join_tables
from qkscope.findings.prompt_trace import PromptRun, PromptTrace, Question
from qkscope.findings.task_batches import made_from, units_hash, with_notes
from qkscope.findings.verdicts import (
    controls_of,
    says_cancels,
    says_right,
    that_sum,
    written_by,
)
from qkscope.heads import BIAS, Head, parse_heads, parse_writers
from qkscope.linear.attribution import check_neurons
from qkscope.linear.reader import Reader
from qkscope.results.result import Result, provenance
from qkscope.results.work import current_work, verb
from qkscope.sums.relative_logits import SIDES, Measurement, Tally, first_by, strongest_pairs
from qkscope.texts.task import Task, Units
from qkscope.verbs.trace.edges import DRAWS, Choice, EdgeTest, choose_writers, whole_heads
from qkscope.verbs.trace.features import (
    FeatureTest,
    check_dictionary,
    choose_features,
    prompt_features,
    says_pairs,
)

# prompts on which sources are looked for, and writers of each side that are followed
_SOURCES = 48
_FOLLOWED = 4
_BATCH = 16
_SHOWN = 5  # writers of each side in the table of all heads


class Trace(Result):
    """Writers of queries and keys with the edges cut and kept, neurons, or pairs of a dictionary's
    features.
    """

    @property
    def main(self) -> str:  # type: ignore[override]
        """The table that answers."""
        return next(
            (name for name in ("feature_pairs", "neurons") if name in self.tables), "writers"
        )


@verb("trace")
def trace(
    scope: Scope,
    what: Task | str | Example,
    head: str | Head | Sequence[str | Head] = "all",
    n: Count = 128,
    *,
    query: int | str | None = None,
    key: int | str | None = None,
    versus: int | str | None = None,
    depth: Natural = 2,
    feature: Subspace | None = None,
    dictionary: Dictionary | None = None,
    neurons: bool | str | Sequence[str] = False,
    whole: bool = True,
    draws: Count = DRAWS,
    chat: bool | None = None,
    batch_size: Count = 32,
    seed: Seed = 0,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Trace:
    """Say which writers made a head's query and keys (QK attribution), and test it by cutting and
    keeping edges.

    Parameters
    ----------
    scope : the model.
    what : a task (its right keys against its other keys), or one prompt.
    head : one head, several, or ``"all"``: of all heads of a task only writers are given, and no
        edge is cut.
    n : prompts of a task, for choosing and for testing each.
    query, key : tokens of one prompt, by place (from the end where negative) or by text (``"
        John"``, ``"to#2"``); by default its last token, and the token that the head attends to most
        besides the first.
    versus : the token that the key is compared with; by default all others that the query sees, but
        the first.
    depth : how many levels down the graph of one prompt (of a task: of its first) goes.
    feature : look inside this subspace alone: its projector is put between query and key.
    dictionary : split among this dictionary's features instead of writers (a transcoder's: what its
        MLP wrote), which are ablated and restored, beside copies of it without meaning.
    neurons : of one prompt, whether to name the first ten neurons a side of the MLPs before the
        head; or those to name, as ``"M9.N120"``.
    whole : whether whole heads are taken out of the running model, too (of a task).
    draws : random writers of the same layers beside those chosen; of a dictionary, copies of each
        kind.
    chat : whether a prompt goes into the chat template; a task says so itself.
    batch_size : prompts run together.
    seed : of every draw.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is
        written by default.
    part : as in `decompose`, of a task.
    progress : whether to show a bar; if not given, where stderr is a terminal.

    Returns
    -------
    Trace
        ``tables["writers"]``, ``["pairs"]``, ``["edges"]``, ``["whole"]``, ``["check"]``; of one
        prompt ``["tokens"]``, ``["cuts"]`` and ``["graph"]``, with neurons ``["neurons"]``. With a
        dictionary: ``["feature_pairs"]``, ``["features"]``, ``["copies"]``, ``["feature_edges"]``,
        ``["check"]``.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope = qk.Scope.load("nano:mixed")
    >>> found = qk.trace(scope, qk.tasks.induction(), "L1H0", 16, whole=False, progress=False)
    >>> found.table()[0]["writer"], found.tables["check"][0]["sum_error"] < 1e-4
    ('L0H2', True)
    """
    named = head != "all"
    alone = isinstance(what, str | Example)
    for h in parse_heads(head) if named else ():
        if h.layer == 0:
            raise BadInput(
                f"{h} is in the first layer, where only the embedding writes: trace a later head."
            )
    if (feature is not None or dictionary is not None) and not named:
        raise BadInput(
            "a feature or a dictionary is for a task or a prompt, at heads that are named: name them."
        )
    if neurons and (dictionary is not None or not alone):
        raise BadInput(
            "neurons are named of one prompt, and not beside a dictionary: give a prompt alone."
        )
    for name, value in {"query": query, "key": key, "versus": versus, "chat": chat}.items():
        if value is not None and not alone:
            raise BadInput(
                f"{name} is for one prompt, not for a task: leave it out, or give a prompt."
            )
    heads = [h for h in scope.parse(head) if h.layer > 0]
    if not heads:
        raise BadInput(
            f"{scope.name} has one layer, where only the embedding writes: there is nothing to trace."
        )
    asked: dict[str, Any] = {"heads": [str(h) for h in heads], "draws": draws}
    if dictionary is not None:
        check_dictionary(scope, heads, dictionary)
        dictionary = dictionary.to(scope.device)
        asked |= {"dictionary": repr(dictionary), "dictionary_hash": dictionary.fingerprint}
    projectors = {} if feature is None else {h: _projector(scope, h, feature) for h in heads}
    about: dict[str, Any] = {
        "model": scope.name,
        "weights": scope.weights_hash,
        "tokenizer": scope.tokenizer_hash,
    }
    if isinstance(what, str | Example):
        if isinstance(query, str):
            query = scope.place(what, query, chat=bool(chat))
        if isinstance(key, str):
            key = scope.place(what, key, chat=bool(chat))
        if isinstance(versus, str):
            versus = scope.place(what, versus, chat=bool(chat))
        layers = [] if dictionary is None else [dictionary.layer, *(h.layer for h in heads)]
        last = max(h.layer for h in heads)
        probe = PromptRun(
            scope,
            what,
            query,
            bool(chat),
            last=last,
            logits=False,
            layers=layers,
            neurons=bool(neurons),
        )
        each: Any = partial(_prompt_writers, depth=depth, draws=draws, seed=seed, neurons=neurons)
        if dictionary is not None:
            each = partial(prompt_features, dictionary=dictionary, draws=draws, seed=seed)
        every = [each(probe.head(h, key, versus, projectors.get(h))) for h in heads]
        answer = " ".join(sentence for sentence, _ in every)
        tables = join_tables(rows for _, rows in every)
        name = "prompt"
        about = about | probe.asked.told(what)
    else:
        how = Pass(
            Reader(scope, heads),
            what.chat,
            batch_size,
            seed,
            projectors,
            (),
            current_work(),
            progress,
        )
        choosing: Units = what.choose(n) if named else ()
        units = what.test(n)
        name = what.name
        about = made_from(scope, what)
        asked |= {
            "batch_size": how.batch_size,
            "feature": {str(h): float(p.sum()) for h, p in projectors.items()},
        }
        how.job.begin(
            scope, [list(choosing), list(units)], verb="trace", seed=seed, chat=how.chat, **asked
        )
        asked |= {"n": len(units), "whole": whole, "examples": units_hash([*choosing, *units])}
        if not named:
            answer, tables = _first_writers(how, units)
        elif dictionary is None:
            answer, tables = _task_writers(how, choosing, units, draws, depth, whole)
        else:
            answer, tables = _task_features(how, choosing, units, dictionary, draws)
    origin = provenance(**about, **asked, trace_seed=seed)
    answer = with_notes(answer, about)
    result = Trace(
        f"trace/{name}", tables, answer=answer, model=scope.name, seed=seed, provenance=origin
    )
    return that_sum(result, scope.model.dtype)


def _projector(scope: Scope, head: Head, feature: Subspace) -> Tensor:
    """``U Uᵀ`` of a feature of this head, this model, and of vectors as the dot product sees them."""
    space = features_of({feature.contrast or "to look inside": feature}, head, scope)[1]
    if space != "post_rope":
        raise BadInput(
            f"the feature was fitted in {space}: trace looks inside features fitted in post_rope."
        )
    basis = feature.basis("query").float()
    return basis @ basis.T


# ---------------------------------------------------------------------- one prompt


def _prompt_writers(
    one: PromptTrace, depth: int, draws: int, seed: int, neurons: Any
) -> tuple[str, Tables]:
    """The answer and tables of one head on one prompt."""
    pairs = strongest_pairs(one.pairs[0])
    tally = Tally.of_prompt(one.given(pairs))
    cuts = one.cut_rows(draws, seed)
    graph = trace_graph(one, depth)
    tables = {
        "writers": tally.writer_rows(one.head, one.writers),
        "pairs": tally.pair_rows(one.head, one.writers, pairs),
        "cuts": cuts,
        **graph.tables,
        "tokens": one.token_rows(),
        "check": [tally.check_row(
            one.head, query=one.asked.query, key=one.key, attention=float(one.attention[one.key]),
            first=float(one.attention[0]),
        )],
    }  # fmt: skip
    said = one.where()
    if not one.total:
        said += " The tokens that it is compared with have the same logit, so there is no relative logit to split."
    elif one.attends:
        named = {(side, one.writers[i]) for side in SIDES for i in one.strongest(side, 2)}
        giving = [row for row in tables["writers"] if (row["side"], row["writer"]) in named]
        key = written_by(giving, "key")
        query = written_by(giving, "query")
        said += (
            f" Its key is written by {key}, its query by {query}.{says_cancels(tables['writers'])}"
        )
        few = {row["k"]: row for row in cuts if row["side"] == "key" and row["k"] <= 2}
        if few:  # two writers are named, or one where no second gives much
            cut = few[max(few)]
            said += (
                f" With {cut['writers']} cut from the key, the attention there is {cut['after']:.0%}"
                f" ({controls_of(cut)}: {cut['control']:.0%}): {cut['verdict']}."
            )
    if neurons:
        wanted = [] if isinstance(neurons, bool) else parse_writers(neurons)
        without = ", ".join(map(str, check_neurons(one.run, one.head, wanted)))
        tables["neurons"] = one.neuron_rows(wanted)
        rows = {row["side"]: row for row in reversed(tables["neurons"])}
        first = {
            side: f"{row['writer']} ({row['share'] or 0:.0%}, at {row['token']!r})"
            for side, row in rows.items()
        }
        said += f" The first neuron of its key is {first['key']}, of its query {first['query']}."
        said += f" {without}: no neurons to name." if without else ""
    return said, tables


# ---------------------------------------------------------------------- all heads


def _first_writers(how: Pass, units: Units) -> tuple[str, Tables]:
    """First writers of every head over a task's prompts; no edge is cut."""

    def measure(rows: HeadRows, _numbers: list[int]) -> Measurement:
        given = rows.given()
        attention = rows.rows.attention()[:, 0].gather(1, rows.run.columns[:, 1:])
        looked = (attention * (rows.signs > 0)).sum(1)
        return given._replace(values={**given.values, "attention": looked})

    measures = dict.fromkeys(how.reader.heads, measure)
    tallies, _ = how.add_up("writers", units, measures, last=True, by_some=True)
    tables: Tables = {"heads": [], "writers": [], "check": []}
    for head, tally in tallies.items():
        rows = tally.writer_rows(head, how.reader.writers(head.layer), _SHOWN + 1)
        row: dict[str, Any] = {"head": str(head)}
        for side in ("key", "query"):
            first = [other for other in rows if other["side"] == side and other["writer"] != BIAS]
            tables["writers"] += first[:_SHOWN]
            row |= {f"{side}_writer": first[0]["writer"], f"{side}_share": first[0]["share"]}
        row |= {
            "logit": float(tally.mean("total")),
            "attention": float(tally.mean("attention")),
            "n": tally.rows,
        }
        tables["heads"].append(row)
        tables["check"].append(tally.check_row(head))
    common = Counter(row["key_writer"] for row in tables["heads"])
    frequent = ", ".join(f"{name} of {count}" for name, count in common.most_common(3))
    answer = f"First key writers of {common.total()} heads, the most frequent: {frequent}."
    return answer, tables


# ---------------------------------------------------------------------- a task


def _task_writers(
    how: Pass, choosing: Units, units: Units, draws: int, depth: int, whole: bool
) -> tuple[str, Tables]:
    """Writers chosen on some words, edges and whole heads taken out on others, and what the first
    writers read.
    """
    reader = how.reader
    chosen = choose_writers(how, choosing)
    tests = {
        h: EdgeTest(h, reader.writers(h.layer), chosen[h], how.seed, draws) for h in reader.heads
    }
    tallies, _ = how.add_up(
        "testing", units, {h: test.measure for h, test in tests.items()}, last=True
    )
    every = [test.tables(tallies[head]) for head, test in tests.items()]
    answer = " ".join((_answer if len(tests) == 1 else _in_short)(own) for own in every)
    for head in reader.heads if whole else ():
        run = partial(whole_heads, how, head, chosen[head], choosing, units)
        every.append({"whole": how.job.once(f"whole {head}", run)})
    every.append(how.job.once(f"sources {depth}", partial(_sources, how, units, chosen, depth)))
    return answer, join_tables(every)


def _task_features(
    how: Pass, choosing: Units, units: Units, dictionary: Dictionary, draws: int
) -> tuple[str, Tables]:
    """Pairs of features, chosen on some words and tested on others."""
    how = replace(how, layers=[dictionary.layer])
    chosen = choose_features(how, choosing, dictionary)
    tests = {
        head: FeatureTest(head, dictionary, own, draws, how.seed) for head, own in chosen.items()
    }
    tallies, _ = how.add_up(
        "features", units, {h: test.measure for h, test in tests.items()}, last=True
    )
    every = [test.tables(tallies[head]) for head, test in tests.items()]
    return " ".join(says_pairs(says_right(own["check"][0]), own) for own in every), join_tables(
        every
    )


def _sources(how: Pass, units: Units, chosen: Mapping[Head, Choice], depth: int) -> Tables:
    """Which tokens the first writers read, on some prompts; and one prompt's graph."""
    reader = how.reader
    every = []
    firsts = [unit[:1] for unit in units[:_SOURCES]]
    deep = replace(how, projectors={}, layers=range(max(reader.layers)))
    prompt = reader.scope.encode(firsts[0], chat=how.chat)
    asked = Question.first_of(reader.scope, prompt)
    right, others = (
        prompt.places.keys[0][answer_signs(prompt)[0] == sign].tolist() for sign in (1, -1)
    )
    run = reader.record(asked.inputs, asked.places, deep=True)
    for i, head in enumerate(reader.heads):
        names = reader.writers(head.layer)
        scores = chosen[head].scores
        writers = {
            side: [names[i] for i in first_by(scores["share", side], _FOLLOWED)] for side in SIDES
        }
        batches = (
            deep.rows(firsts, some)[1][i] for some in torch.arange(len(firsts)).split(_BATCH)
        )
        graph = trace_graph(
            PromptTrace(run, asked, head, right[0], others, how.projectors.get(head)), depth
        )
        every.append({"sources": sources_of(batches, writers), **graph.tables})
    return join_tables(every)


def _answer(tables: Tables) -> str:
    """The answer for one head."""
    (check,) = tables["check"]
    cut = _edge(tables, "key", "cut", "share", 2)
    beside = _edge(tables, "key", "cut", "random", 2)
    keeps = [
        _edge(tables, "both", "keep", "share", 5, replaced) for replaced in ("mean", "resample")
    ]
    text = says_right(check)
    if check["attention"] < ATTENDED:
        only = f"only {check['attention']:.1%} of its attention"
        text = f"{check['head']} gives its right key {only}: there is little to trace."
    key = written_by(tables["writers"], "key")
    query = written_by(tables["writers"], "query")
    text += f" Its key is written by {key}, its query by {query}.{says_cancels(tables['writers'])}"
    if cut and beside:
        text += (
            f" With those two parts cut from its keys, in this head alone and with norms held, it is right in"
            f" {cut['accuracy']:.0%} (95% interval {cut['low']:.0%}-{cut['high']:.0%}; two other writers of their"
            f" layers cut: {beside['accuracy']:.0%})."
        )
    if all(keeps):
        told = "{accuracy:.0%} right, {logit_kept:.0%} of the logit"
        mean, other = (
            told.format(**row) + ", which overshoots" * row["overshoots"] for row in keeps if row
        )
        text += f" Five writers a side kept there, others at their mean: {mean}; at another prompt's parts: {other}."
    return text


def _in_short(tables: Tables) -> str:
    """The short answer for one head among several: its key's writers, and what is left without
    them.
    """
    (check,) = tables["check"]
    cut = _edge(tables, "key", "cut", "share", 2)
    left = (
        ""
        if cut is None
        else f"; cut there, norms held, {cut['accuracy']:.0%} right, before {check['accuracy']:.0%}"
    )
    return f"{check['head']}: key written by {written_by(tables['writers'], 'key')}{left}."


def _edge(
    tables: Tables, side: str, kind: str, by: str, k: int, replaced: str = "mean"
) -> dict[str, Any] | None:
    """A row of edges, norms held."""
    wanted = {"side": side, "kind": kind, "by": by, "k": k, "replaced": replaced, "norms": "held"}
    return next((row for row in tables["edges"] if wanted.items() <= row.items()), None)
