"""A task: writers chosen on some words, their edges cut and kept on others, what they read.

Of named heads; of all heads only the first writers of each are given, and nothing is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from qkscope.findings.graph import sources_of, trace_graph
from qkscope.findings.head_rows import ATTENDED, HeadRows, Pass, answer_signs, join_tables
from qkscope.findings.prompt_trace import AskedPrompt, PromptTrace
from qkscope.findings.verdicts import says_cancels, says_right, written_by
from qkscope.heads import BIAS, Head, Side
from qkscope.results.result import Record, Tables
from qkscope.sums.relative_logits import SIDES, Measurement, first_by
from qkscope.texts.task import Unit, Units
from qkscope.verbs.trace.edges import Choice, EdgeTest, choose_writers
from qkscope.verbs.trace.whole_heads import whole_heads

# prompts on which sources are looked for, and writers of each side that are followed
_SOURCES = 48
_FOLLOWED = 4
_BATCH = 16
_SHOWN = 5  # writers of each side in the table of all heads


def task_writers(
    how: Pass, choosing: Units, units: Units, draws: int, depth: int, whole: bool
) -> tuple[str, Tables]:
    """Test chosen writers by their edges and as whole heads, and follow what they read.

    Parameters
    ----------
    how : the heads, and how prompts go through the model.
    choosing, units : prompts on which writers are chosen, and on which they are tested.
    draws : random writers beside those chosen.
    depth : levels of the graph of the first prompt.
    whole : whether whole heads are taken out of the running model.
    """
    chosen = choose_writers(how, choosing)
    tests = {}
    for head in how.reader.heads:
        names = how.reader.writers(head.layer)
        tests[head] = EdgeTest(head, names, chosen[head], how.seed, draws)
    measures = {head: test.measure for head, test in tests.items()}
    tallies, _ = how.add_up("testing", units, measures, last=True)
    parts = [test.tables(tallies[head]) for head, test in tests.items()]
    say = _answer if len(parts) == 1 else _in_short
    answer = " ".join(say(tables) for tables in parts)
    if whole:
        for head in how.reader.heads:
            run = partial(whole_heads, how, head, chosen[head], choosing, units)
            rows = how.job.once(f"whole {head}", run)
            parts.append({"whole": rows})
    read = partial(_sources, how, units, chosen, depth)
    parts.append(how.job.once(f"sources {depth}", read))
    return answer, join_tables(parts)


def first_writers(how: Pass, units: Units) -> tuple[str, Tables]:
    """Name the first writers of every head over a task's prompts; no edge is cut."""
    measures = dict.fromkeys(how.reader.heads, _measure_writers)
    tallies, _ = how.add_up("writers", units, measures, last=True, by_some=True)
    tables: Tables = {"heads": [], "writers": [], "check": []}
    for head, tally in tallies.items():
        rows = tally.writer_rows(head, how.reader.writers(head.layer), _SHOWN + 1)
        named = [other for other in rows if other["writer"] != BIAS]
        row: dict[str, Any] = {"head": str(head)}
        for side in ("key", "query"):
            first = [other for other in named if other["side"] == side]
            tables["writers"] += first[:_SHOWN]
            row[f"{side}_writer"] = first[0]["writer"]
            row[f"{side}_share"] = first[0]["share"]
        row["logit"] = float(tally.mean("total"))
        row["attention"] = float(tally.mean("attention"))
        row["n"] = tally.rows
        tables["heads"].append(row)
        tables["check"].append(tally.check_row(head))
    common = Counter(row["key_writer"] for row in tables["heads"])
    frequent = [f"{name} of {count}" for name, count in common.most_common(3)]
    listed = ", ".join(frequent)
    answer = f"First key writers of {common.total()} heads, the most frequent: {listed}."
    return answer, tables


def _measure_writers(rows: HeadRows, _numbers: list[int]) -> Measurement:
    """Measure what writers give on each prompt, and the attention on the right keys."""
    given = rows.given()
    columns = rows.run.columns[:, 1:]
    attention = rows.rows.attention()[:, 0].gather(1, columns)
    on_right = (attention * (rows.signs > 0)).sum(1)
    return given._replace(values={**given.values, "attention": on_right})


# ---------------------------------------------------------------------- what the writers read


def _sources(how: Pass, units: Sequence[Unit], chosen: Mapping[Head, Choice], depth: int) -> Tables:
    """Tables of the tokens that first writers read, and of the first prompt's graph."""
    reader = how.reader
    prompts = [unit[:1] for unit in units[:_SOURCES]]
    deep = replace(how, projectors={}, layers=range(max(reader.layers)))
    traces = _first_prompt(how, prompts[0])
    parts = list[Tables]()
    for i, head in enumerate(reader.heads):
        names = reader.writers(head.layer)
        scores = chosen[head].scores
        followed = dict[Side, list[str]]()
        for side in SIDES:
            first = first_by(scores["share", side], _FOLLOWED)
            followed[side] = [names[writer] for writer in first]
        batches = _rows_of_head(deep, prompts, i)
        graph = trace_graph(traces[i], depth)
        parts.append({"sources": sources_of(batches, followed), **graph.tables})
    return join_tables(parts)


def _rows_of_head(how: Pass, prompts: Units, number: int) -> Iterator[HeadRows]:
    """Rows of one of the heads, by its number, batch after batch of prompts."""
    for numbers in torch.arange(len(prompts)).split(_BATCH):
        _, of_heads = how.rows(prompts, numbers)
        yield of_heads[number]


def _first_prompt(how: Pass, unit: Unit) -> list[PromptTrace]:
    """Traces of all heads on one prompt of a task, from its first query to its first right key."""
    encoded = how.reader.scope.encode(unit, chat=how.chat)
    asked = AskedPrompt.first_of(how.reader.scope, encoded)
    run = how.reader.record(asked.inputs, asked.places, deep=True)
    keys = encoded.places.keys[0]
    signs = answer_signs(encoded)[0]
    right = keys[signs == 1].tolist()
    others = keys[signs == -1].tolist()
    traces = []
    for head in how.reader.heads:
        projector = how.projectors.get(head)
        traces.append(PromptTrace(run, asked, head, right[0], others, projector))
    return traces


# ---------------------------------------------------------------------- in words


def _answer(tables: Tables) -> str:
    """Answer for one head."""
    (check,) = tables["check"]
    text = says_right(check)
    if check["attention"] < ATTENDED:
        only = f"only {check['attention']:.1%} of its attention"
        text = f"{check['head']} gives its right key {only}: there is little to trace."
    key = written_by(tables["writers"], "key")
    query = written_by(tables["writers"], "query")
    text += f" Its key is written by {key}, its query by {query}."
    text += says_cancels(tables["writers"])
    cut = _edge(tables, "key", "cut", "share", 2)
    random = _edge(tables, "key", "cut", "random", 2)
    if cut and random:
        interval = f"95% interval {cut['low']:.0%}-{cut['high']:.0%}"
        control = f"two other writers of their layers cut: {random['accuracy']:.0%}"
        text += (
            " With those two parts cut from its keys, in this head alone and with norms held,"
            f" it is right in {cut['accuracy']:.0%} ({interval}; {control})."
        )
    at_mean = _edge(tables, "both", "keep", "share", 5, "mean")
    at_others = _edge(tables, "both", "keep", "share", 5, "resample")
    if at_mean and at_others:
        text += (
            f" Five writers a side kept there, others at their mean: {_says_kept(at_mean)};"
            f" at another prompt's parts: {_says_kept(at_others)}."
        )
    return text


def _says_kept(row: Record) -> str:
    """Say how often the head is right with few writers kept, and what share they hold."""
    text = f"{row['accuracy']:.0%} right, {row['logit_kept']:.0%} of the logit"
    if row["overshoots"]:
        text += ", which overshoots"
    return text


def _in_short(tables: Tables) -> str:
    """Short answer for one head of several: its key's writers, and what is left without them."""
    (check,) = tables["check"]
    key = written_by(tables["writers"], "key")
    text = f"{check['head']}: key written by {key}"
    cut = _edge(tables, "key", "cut", "share", 2)
    if cut is not None:
        before = f"before {check['accuracy']:.0%}"
        text += f"; cut there, norms held, {cut['accuracy']:.0%} right, {before}"
    return f"{text}."


def _edge(
    tables: Tables, side: str, kind: str, by: str, k: int, replaced: str = "mean"
) -> Record | None:
    """Row of the table ``edges``, norms held."""
    wanted = {"side": side, "kind": kind, "by": by, "k": k, "replaced": replaced, "norms": "held"}
    for row in tables["edges"]:
        if wanted.items() <= row.items():
            return row
    return None
