"""One prompt: the writers of a head's query and key, cut, and followed down to the words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qkscope.findings.graph import trace_graph
from qkscope.findings.head_rows import join_tables
from qkscope.findings.prompt_trace import PromptTrace
from qkscope.findings.verdicts import SAID_OF_CUTS, controls_of, says_cancels, written_by
from qkscope.heads import parse_writers
from qkscope.linear.attribution import check_neurons
from qkscope.results.result import Records, Tables
from qkscope.sums.relative_logits import SIDES, Tally, strongest_pairs

_NAMED = 2  # writers of a side in the answer


def prompt_writers(
    traces: Iterable[PromptTrace],
    depth: int,
    draws: int,
    seed: int,
    neurons: bool | str | Sequence[str],
) -> tuple[str, Tables]:
    """Split each head's logit among writers, cut the strongest, and follow them: answer and tables.

    Parameters
    ----------
    traces : heads on one prompt.
    depth : levels of the graph below the writers.
    draws, seed : of random writers beside each cut.
    neurons : whether to name MLP neurons, or which.
    """
    answers = list[str]()
    parts = list[Tables]()
    for one in traces:
        tables = _tables(one, depth, draws, seed)
        answer = _answer(one, tables)
        if neurons:
            wanted = [] if isinstance(neurons, bool) else parse_writers(neurons)
            without = check_neurons(one.run, one.head, wanted)
            tables["neurons"] = one.neuron_rows(wanted)
            answer += _says_neurons(tables["neurons"])
            if without:
                answer += f" {', '.join(map(str, without))}: no neurons to name."
        answers.append(answer)
        parts.append(tables)
    return " ".join(answers), join_tables(parts)


def _tables(one: PromptTrace, depth: int, draws: int, seed: int) -> Tables:
    """The tables of one head on one prompt."""
    pairs = strongest_pairs(one.pairs[0])
    tally = Tally.of_prompt(one.given(pairs))
    attention = float(one.attention[one.key])
    first = float(one.attention[0])
    check = tally.check_row(
        one.head, query=one.asked.query, key=one.key, attention=attention, first=first
    )
    tables: Tables = {
        "writers": tally.writer_rows(one.head, one.writers),
        "pairs": tally.pair_rows(one.head, one.writers, pairs),
        "cuts": one.cut_rows(draws, seed),
    }
    tables |= trace_graph(one, depth).tables
    return tables | {"tokens": one.token_rows(), "check": [check]}


# ---------------------------------------------------------------------- in words


def _answer(one: PromptTrace, tables: Tables) -> str:
    """Say how much attention the key gets, who wrote it and the query, and what cuts leave."""
    if not one.total:
        return (
            f"{one.where()} The tokens that it is compared with have the same logit,"
            " so there is no relative logit to split."
        )
    if not one.attends:
        return one.where()
    strongest = set()
    for side in SIDES:
        for number in one.strongest(side, _NAMED):
            strongest.add((side, one.writers[number]))
    writers = tables["writers"]
    giving = [row for row in writers if (row["side"], row["writer"]) in strongest]
    key = written_by(giving, "key")
    query = written_by(giving, "query")
    cancels = says_cancels(writers)
    written = f"Its key is written by {key}, its query by {query}.{cancels}"
    return f"{one.where()} {written}{_says_cut(tables['cuts'])}"


def _says_cut(cuts: Records) -> str:
    """Say what is left with the named key writers cut: two, or one where no second gives much."""
    of_key = [row for row in cuts if row["side"] == "key"]
    few = [row for row in of_key if row["k"] <= _NAMED]
    if not few:
        return ""
    cut = max(few, key=lambda row: row["k"])
    left = f"the attention there is {cut['after']:.0%}"
    control = f"{controls_of(cut)}: {cut['control']:.0%}"
    judged = SAID_OF_CUTS[cut["verdict"]]
    return f" With {cut['writers']} cut from the key, {left} ({control}): {judged}."


def _says_neurons(rows: Records) -> str:
    """Say the first neuron of each side, with its share and the token where most of it stands."""
    told = {}
    for row in reversed(rows):  # the first of a side comes last, and stays
        side = row["side"]
        share = f"{row['share'] or 0:.0%}"
        told[side] = f"{row['writer']} ({share}, at {row['token']!r})"
    return f" The first neuron of its key is {told['key']}, of its query {told['query']}."
