"""A task traced at some heads: writers chosen on some words; edges and whole heads taken out on others; the answer.

A head that is taken out of the running model puts out its mean over all tokens but the first, at every token, for all
readers; an edge is its part in one reader alone. MLPs are live, or held at what they put out before, their answers to
the head left standing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import batches_of, made_from, units_hash, with_notes, words_of
from qkscope.analyses.trace.edges import Choice, EdgeTest, choose_writers
from qkscope.analyses.trace.features import features_of_task, made_by
from qkscope.analyses.trace.graph import sources_of, trace_graph
from qkscope.analyses.trace.prompt import PromptTrace, Question
from qkscope.analyses.trace.rows import ATTENDED, Pass, Tables, Tally, answer_signs, join_tables, metrics_of
from qkscope.analyses.trace.verdicts import says_cancels, says_right, written_by
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import answer_ids
from qkscope.capture.patch import Edit
from qkscope.change.whole import held_at, noted, summed_outputs
from qkscope.draws import derived_seed
from qkscope.heads import Head, Writer, parse_writers
from qkscope.linear.reader import Reader
from qkscope.maths.dictionaries import Dictionary
from qkscope.maths.writers import METRICS, draw_alike, first_by
from qkscope.runs.result import provenance
from qkscope.runs.work import stream
from qkscope.tasks.task import ANSWER, Task, Unit

_SOURCES, _FOLLOWED = 48, 4  # prompts on which sources are looked for, and writers of each side that are followed
_PROMPTS, _MEANS, _MOST = 48, 32, 3  # prompts tested, prompts that means are taken over, heads taken out at once
_BATCH = 16
_KINDS = (("live", "chosen"), ("held", "chosen"), ("live", "random"))


def trace_task(
    how: Pass, task: Task, n: int, *, whole: bool, depth: int, draws: int, dictionary: Dictionary | None
) -> dict[str, Any]:
    """Fields of a `Trace`: writers, or a dictionary's features, chosen on some words and tested on others."""
    reader, job, choosing, units = how.reader, how.job, task.choose(n), task.test(n)
    asked = {
        "heads": [str(h) for h in reader.heads], "draws": draws, "batch_size": how.batch_size,
        "feature": {str(h): float(p.sum()) for h, p in how.projectors.items()},
        **({} if dictionary is None else made_by(dictionary, draws)),
    }  # fmt: skip
    job.begin(reader.scope, [list(choosing), list(units)], verb="trace", seed=how.seed, chat=task.chat, **asked)
    about = {**made_from(reader.scope, task), **asked, "n": n}
    if dictionary is not None:
        tables, answer = features_of_task(how, choosing, units, dictionary, draws)
    else:
        chosen = choose_writers(how, choosing)
        tests = {h: EdgeTest(h, reader.writers(h.layer), chosen[h], how.seed, draws) for h in reader.heads}
        tallies = _tested(how, tests, units)
        every: list[Tables] = [test.tables(tallies[head]) for head, test in tests.items()]
        answer = " ".join((_answer if len(tests) == 1 else _in_short)(own) for own in every)
        for head in reader.heads if whole else ():
            run = partial(whole_heads, how, head, chosen[head], choosing, units)
            every.append({"whole": job.once(f"whole {head}", run)})
        every.append(job.once(f"sources {depth}", partial(_sources, how, units, chosen, depth)))
        tables = join_tables(every)
        about |= {"trace_seed": how.seed, "whole": whole, "examples": units_hash([*choosing, *units])}
    return {
        "experiment": f"trace/{task.name}",
        "answer": with_notes(answer, about),
        "tables": tables,
        "model": about["model"],
        "seed": how.seed,
        "provenance": provenance(**about),
    }


def _tested(how: Pass, tests: Mapping[Head, EdgeTest], units: Sequence[Unit]) -> dict[Head, Tally]:
    words = words_of(units)
    tallies = {head: test.tally(words) for head, test in tests.items()}

    def measure(indices: list[int]) -> Any:
        numbers, every = how.rows(units, indices)
        asking = [words[i] for i in numbers]
        return [(rows.head, asking, *tests[rows.head].measure(rows, torch.tensor(numbers))) for rows in every], None

    how.add_up("testing", units, measure, tallies, last=True)
    return tallies


def _sources(how: Pass, units: Sequence[Unit], chosen: Mapping[Head, Choice], depth: int) -> Tables:
    """Which tokens the first writers read, on some prompts; and one prompt's graph."""
    reader, tables = how.reader, Tables(sources=[], graph=[], prompt=[])
    firsts = [unit[:1] for unit in units[:_SOURCES]]
    deep = replace(how, projectors={}, layers=range(max(reader.layers)))
    prompt = reader.scope.encode(firsts[0], chat=how.chat)
    asked = Question.first_of(reader.scope, prompt)
    right, others = (prompt.places.keys[0][answer_signs(prompt)[0] == sign].tolist() for sign in (1, -1))
    run = reader.record(asked.inputs, asked.places, deep=True)
    for i, head in enumerate(reader.heads):
        names, shares = reader.writers(head.layer), chosen[head].scores["share"]
        writers = {side: [names[i] for i in first_by(own, _FOLLOWED)] for side, own in shares.items()}
        batches = (deep.rows(firsts, some)[1][i] for some in torch.arange(len(firsts)).split(_BATCH))
        tables["sources"] += sources_of(batches, writers)
        graph = trace_graph(PromptTrace(run, asked, head, right[0], others, how.projectors.get(head)), depth)
        tables["graph"] += graph.rows
        tables["prompt"] += graph.prompt
    return tables


# ---------------------------------------------------------------------- whole heads


def whole_heads(
    how: Pass, head: Head, chosen: Choice, choosing: Sequence[Unit], units: Sequence[Unit]
) -> list[dict[str, Any]]:
    """Take out the first one, two and three head writers, and as many others of their layers."""
    reader, chat = how.reader, how.chat
    names, shares = reader.writers(head.layer), chosen.scores["share"]
    order = first_by(shares["query"].abs() + shares["key"].abs(), len(names))
    heads = [other for i in order if (other := Writer.parse(names[i]).head)][:_MOST]
    if not heads:
        return []
    instead, words = _mean_outputs(reader, choosing[:_MEANS], chat), words_of(units)
    only = [writer for writer in parse_writers(names) if writer.head]
    cases: list[Any] = [(size, mlps, kind) for size in range(1, len(heads) + 1) for mlps, kind in _KINDS]

    def taken(size: int, kind: str, number: int) -> list[Head]:
        if kind == "chosen":
            return heads[:size]
        mine = [only.index(Writer.parse(other)) for other in heads[:size]]  # each prompt has heads of its own
        drawn = draw_alike(mine, only, derived_seed(how.seed, "whole", size, number))
        return [other for c in drawn if (other := only[c].head)]

    def run(indices: list[int]) -> tuple[list[str], dict[Any, Tensor]]:
        encoded = reader.scope.encode([units[i][0] for i in indices], chat=chat)
        right = _right_tokens(reader, encoded, chat)
        with noted(part for block in reader.blocks for part in block.parts) as outputs:
            values: dict[Any, Tensor] = {None: _measure(reader, head, encoded, right)}
        for size, mlps, kind in cases:
            out = [taken(size, kind, i) for i in indices]
            edits = [
                Edit.outputs(other, torch.tensor([other in own for own in out]), instead[other.layer][other.index])
                for other in dict.fromkeys(other for own in out for other in own)
            ]
            with held_at(outputs if mlps == "held" else {}):
                values[size, mlps, kind] = _measure(reader, head, encoded, right, edits)
        return [words[indices[int(e)]] for e in encoded.example], values

    tally = Tally(sorted(words[:_PROMPTS]), dict.fromkeys([None, *cases], (len(METRICS) + 1,)))
    for batch in stream(batches_of(units[:_PROMPTS], _BATCH), run, how.progress):
        tally.add(*batch)
    before, accuracy, rows = float(tally.mean(None)[-1]), METRICS.index("accuracy"), []
    for case in tally.sums:
        size, mlps, kind = case or (0, "live", "chosen")
        values, (low, high) = tally.mean(case).tolist(), tally.interval(case)
        named = ", ".join(map(str, heads[:size])) or "none"
        rows.append({
            "head": str(head), "removed": f"{size} others of their layers" if kind == "random" else named,
            "size": size, "mlps": mlps, "kind": kind, **dict(zip(METRICS, values, strict=False)),
            "low": float(low[accuracy]), "high": float(high[accuracy]), "answer_before": before,
            "answer": values[-1], "n": tally.rows, "draws": tally.rows if kind == "random" else 1,
        })  # fmt: skip
    return rows


@torch.no_grad()
def _mean_outputs(reader: Reader, units: Sequence[Unit], chat: bool) -> dict[int, Float[Tensor, "h e"]]:
    sums: dict[int, Tensor] = {}
    count = 0
    for batch in batches_of(units, _BATCH):
        encoded = reader.scope.encode([units[i][0] for i in batch], chat=chat)
        shown = encoded.inputs["attention_mask"].bool().clone()
        shown[torch.arange(len(shown)), shown.int().argmax(1)] = False
        count += int(shown.sum())
        added = summed_outputs(reader.scope, encoded.inputs, shown)
        sums = {layer: sums.get(layer, 0) + value for layer, value in added.items()}
    return {layer: (value / count).float() for layer, value in sums.items()}


def _right_tokens(reader: Reader, encoded: Encoding, chat: bool) -> list[list[int]]:
    """The tokens that answer each prompt: those that are named, or its right keys' own."""
    named = answer_ids(reader.scope, encoded.examples, chat)
    tokens = encoded.inputs["input_ids"].gather(1, encoded.places.keys)
    right = encoded.labels[ANSWER] > 0
    return [
        tokens[row][right[row]].tolist() if answers is None else answers[0]
        for row, answers in enumerate(named[int(e)] for e in encoded.example)
    ]


def _measure(
    reader: Reader, head: Head, encoded: Encoding, right: Sequence[Sequence[int]], edits: Sequence[Edit] = ()
) -> Float[Tensor, "n m"]:
    """`METRICS` of the head, and the probability of the right answer, in a run with these edits."""
    captured = reader.scope.capture_inputs(encoded, places=encoded.everywhere(), heads=[head], logits=True, edits=edits)
    assert captured.logits is not None
    named = encoded.places.keys.masked_fill(~encoded.places.key_mask, 0)
    measured = metrics_of(captured.rows().of_head(0), named, answer_signs(encoded))
    chances = captured.logits.softmax(-1)
    answer = torch.stack([chances[i, list(own)].sum() for i, own in enumerate(right)])
    return torch.cat([measured, answer[:, None]], dim=1).cpu()


# ---------------------------------------------------------------------- the answer


def _answer(tables: Tables) -> str:
    """One head alone."""
    (check,) = tables["check"]
    cells = (("key", "cut", "share", 2), ("key", "cut", "random", 2), ("both", "keep", "share", 5))
    cut, beside, keep = (_edge(tables, *cell) for cell in cells)
    text = says_right(check)
    if check["attention"] < ATTENDED:
        only = f"{check['attention']:.1%} of its attention"
        text = f"{check['head']} gives its right key only {only}: there is little to trace."
    key, query = (written_by(tables["writers"], side) for side in ("key", "query"))
    text += f" Its key is written by {key}, its query by {query}.{says_cancels(tables['writers'])}"
    if cut and beside:
        text += (
            f" With those two parts cut from its keys it is right in {cut['accuracy']:.0%} (95% interval"
            f" {cut['low']:.0%}-{cut['high']:.0%}; two other writers of their layers cut: {beside['accuracy']:.0%})."
        )
    if keep:
        over = ", which overshoots" if keep["overshoots"] else ""
        text += (
            f" Five writers a side kept, all others replaced: {keep['accuracy']:.0%} right, {keep['logit_kept']:.0%} of"
            f" the logit{over}."
        )
    return text


def _in_short(tables: Tables) -> str:
    """One head among several: its key's writers, and what is left without them."""
    (check,) = tables["check"]
    cut = _edge(tables, "key", "cut", "share", 2)
    left = "" if cut is None else f"; without both {cut['accuracy']:.0%} right, before {check['accuracy']:.0%}"
    return f"{check['head']}: key written by {written_by(tables['writers'], 'key')}{left}."


def _edge(tables: Tables, side: str, kind: str, by: str, k: int) -> dict[str, Any] | None:
    """A row of edges, replaced by means, norms held."""
    wanted = {"side": side, "kind": kind, "by": by, "k": k, "replaced": "mean", "norms": "held"}
    return next((row for row in tables["edges"] if wanted.items() <= row.items()), None)
