"""The result of a trace of a task: its answer in words, and shards added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.analyses.prompts import with_notes
from qkscope.analyses.trace.edges import Asked, says_cancels, tables_of
from qkscope.analyses.trace.rows import ATTENDED
from qkscope.analyses.trace.tally import Tally, tensors_of
from qkscope.analyses.trace.verdicts import says_right, that_sum
from qkscope.errors import BadInput
from qkscope.heads import BIAS, Head
from qkscope.kinds import checked_class
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.runs.shards import check_split


@checked_class
@dataclass(frozen=True)
class Trace(Result):
    """Writers of queries and keys, with the edges cut and kept."""

    main = "writers"


@checked_class
@dataclass(frozen=True)
class NeuronTrace(Trace):
    """A trace of one prompt with the neurons of its MLPs."""

    main = "neurons"


@checked_class
@dataclass(frozen=True)
class FeatureTrace(Trace):
    """Pairs of a dictionary's features, beside copies without meaning."""

    main = "feature_pairs"


def trace_fields(
    asked: Mapping[Head, Asked],
    tallies: Mapping[Head, Tally],
    more: Mapping[str, list[dict[str, Any]]],
    about: Mapping[str, Any],
    seed: int,
    task: str,
) -> dict[str, Any]:
    """Fields of a `Trace`: tables of some heads from their tallies, the answer, and of a shard what another adds to."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for head, own in asked.items():
        for name, rows in tables_of(own, tallies[head], about["draws"]).items():
            tables.setdefault(name, []).extend(rows)
    tables |= {name: rows for name, rows in more.items() if rows}
    kept = {
        str(head): {"writers": own.writers, "pairs": own.pairs, "words": tallies[head].words}
        for head, own in asked.items()
    }
    shard = {"tally": kept} if about["shard"] != [0, 1] else {}
    told = _answer if len(asked) == 1 else _in_short
    return {
        "experiment": f"trace/{task}",
        "answer": with_notes(" ".join(told(str(head), tables) for head in asked), about),
        "tables": tables,
        "arrays": tensors_of(tallies),
        "model": about["model"],
        "seed": seed,
        "provenance": provenance(**about, **shard),
    }


def _answer(head: str, tables: Mapping[str, list[dict[str, Any]]]) -> str:
    check = next(row for row in tables["check"] if row["head"] == head)
    said = {side: _first_writers(head, side, tables["writers"]) for side in ("key", "query")}
    cells = (("key", "cut", "share", 2), ("key", "cut", "random", 2), ("both", "keep", "share", 5))
    cut, beside, keep = (_edge(head, tables, *cell) for cell in cells)
    text = says_right(check)
    if check["attention"] < ATTENDED:
        text = f"{head} gives its right key only {check['attention']:.1%} of its attention: there is little to trace."
    text += f" Its key is written by {said['key']}, its query by {said['query']}."
    text += says_cancels([row for row in tables["writers"] if row["head"] == head])
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


def _in_short(head: str, tables: Mapping[str, list[dict[str, Any]]]) -> str:
    """One head among several: its key's writers, and what is left without them."""
    check = next(row for row in tables["check"] if row["head"] == head)
    cut = _edge(head, tables, "key", "cut", "share", 2)
    left = "" if cut is None else f"; without both {cut['accuracy']:.0%} right, before {check['accuracy']:.0%}"
    return f"{head}: key written by {_first_writers(head, 'key', tables['writers'])}{left}."


def _edge(
    head: str, tables: Mapping[str, list[dict[str, Any]]], side: str, kind: str, by: str, k: int
) -> dict[str, Any] | None:
    """A row of edges, replaced by means, norms held."""
    wanted = {"head": head, "side": side, "kind": kind, "by": by, "k": k, "replaced": "mean", "norms": "held"}
    return next((row for row in tables["edges"] if wanted.items() <= row.items()), None)


def _first_writers(head: str, side: str, rows: Sequence[Mapping[str, Any]], count: int = 2) -> str:
    own = [row for row in rows if row["head"] == head and row["side"] == side and row["writer"] != BIAS][:count]
    return " and ".join(f"{row['writer']} ({row['share']:.0%})" for row in own)


_SAME = ("weights", "tokenizer", "dtype", "task", "task_seed", "asked", "examples", "heads", "n", "batch_size", "draws",
         "feature", "trace_seed", "whole")  # fmt: skip


def merge_traces(folders: Sequence[str | Path]) -> Trace:
    """The shards of one trace, added up: what one process would have found, to rounding.

    Parameters
    ----------
    folders : that ``qkscope trace --shard`` wrote.
    """
    if not folders:
        raise BadInput("there are no shards to add up: name the folders that trace --shard wrote.")
    shards = [Result.read(folder) for folder in folders]
    made = [dict(shard.provenance.get("asked", {})) for shard in shards]
    asked: dict[Head, Asked] = {}
    tallies: dict[Head, Tally] = {}
    for folder, shard, own in zip(folders, shards, made, strict=True):
        if not shard.experiment.startswith("trace/") or "tally" not in own:
            raise BadInput(f"{folder} is no shard of a trace of a task: name folders that trace --shard wrote.")
        differs = [name for name in _SAME if own.get(name) != made[0].get(name)]
        if differs:
            raise BadInput(f"{folder} is of another job ({', '.join(differs)} differ): name shards of one job.")
        for name, kept in own["tally"].items():
            head = Head.parse(name)
            if head not in asked:
                asked[head] = Asked.of(head, kept["writers"], kept["pairs"])
                tallies[head] = asked[head].tally(kept["words"])
            tallies[head].merge(head, shard.arrays)
    check_split([(folder, own["shard"]) for folder, own in zip(folders, made, strict=True)])
    names = ("whole", "sources", "graph", "prompt")  # the first shard's
    more = {name: [dict(row) for shard in shards for row in shard.tables.get(name, ())] for name in names}
    about = {name: value for name, value in made[0].items() if name != "tally"} | {"shard": [0, 1]}
    fields = trace_fields(asked, tallies, more, about, shards[0].seed, shards[0].experiment.partition("/")[2])
    return that_sum(Trace(**fields), about["dtype"])
