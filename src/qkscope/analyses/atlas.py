"""Every head of a model named: a sentence for each, the share of its logit that it explains, and how sure that is.

Queries and keys of all heads are explained by readings of the text (`qkscope.maths.factors`) on some documents; on
others, that share no text with them, each head's logit comes apart into blocks, and the largest gives the name. A third
pass, over some passages with one query in each, says who wrote each head's keys and queries (`trace` says more of one).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.analyses.names.sentence import UNNAMED
from qkscope.analyses.names.sight import FIRST, PASSAGES, TESTED, Options
from qkscope.analyses.names.study import Study, Texts, counted, documents_of, passages_of
from qkscope.analyses.prompts import made_with
from qkscope.analyses.trace.many import TEXTS, first_writers, told
from qkscope.analyses.trace.rows import Pass
from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head, Writer
from qkscope.kinds import Seed, checked_class
from qkscope.linear.reader import Reader
from qkscope.runs.result import Result
from qkscope.runs.work import Work, current_work, verb
from qkscope.tasks.sides import LENGTH, Passage
from qkscope.tasks.texts import text_hash

_TRACED = 32  # passages, one query each, on which writers are asked for
_FEW = 3  # heads of which the sentences themselves are the answer
_MUCH = 0.1  # share of a logit from which on a writer counts as read
_FIRSTS = ("key_writer", "key_share", "query_writer", "query_share")


@checked_class
@dataclass(frozen=True)
class Atlas(Result):
    """All heads, those with the largest named share first."""


@verb("atlas")
def atlas(
    scope: Scope,
    texts: Texts = None,
    n: int = PASSAGES,
    *,
    heads: str | Head | Sequence[str | Head] | None = None,
    test: int = TESTED,
    length: int = LENGTH,
    batch_size: int = 16,
    seed: Seed = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> Atlas:
    """Name every head.

    Parameters
    ----------
    scope : the model.
    texts : documents, or strings that are documents of their own; if not given, the texts that come with Python.
    n, test : passages to fit on, and others, of other documents, to test on.
    heads : heads by name; all by default.
    length : the most tokens of a passage.
    batch_size : passages per batch.
    seed : of every draw.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is written by default.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> from qkscope import tasks
    >>> scope = Scope.load("nano:mixed", device="cpu")
    >>> texts = [unit[0].text for unit in tasks.induction().draw("fit", "answer", 400)]
    >>> found = atlas(scope, texts, 160, test=40, heads="L1H1", progress=False)
    >>> [(row["head"], row["name"]) for row in found.table()]
    [('L1H1', 'after a copy')]
    """
    options = Options(n, test, length, batch_size, seed, progress)
    documents, job = documents_of(texts), current_work()
    chosen = scope.parse(heads)
    study = Study.of(scope, chosen, passages_of(scope, documents, options), options, job, verb="atlas")
    tables = study.tables()
    firsts, reads, refused = _reads(study, job)
    rows = sorted((row | firsts[row["head"]] for row in tables.pop("heads")), key=lambda row: -(row["share"] or 0))
    return Atlas(
        experiment="atlas",
        answer=_answer(rows) + _tested_words(study) + (_read_words(reads) if refused is None else f" {refused}"),
        tables={"atlas": rows, **tables, "reads": reads},
        seed=seed,
        **made_with(scope, text=text_hash(documents), **study.counted()),
    )


def _answer(rows: Sequence[Mapping[str, Any]]) -> str:
    if len(rows) <= _FEW:
        return " ".join(f"{row['head']}: {row['sentence']}" for row in rows)
    named = [row for row in rows if row["name"] != UNNAMED]
    middle = statistics.median(1 - row["rest"] for row in rows)
    most = ", ".join(f"{name} ({count})" for name, count in Counter(row["name"] for row in named).most_common(4))
    half = sum(row["rest"] <= 0.5 for row in rows)
    return (
        f"{len(named)} of {counted(len(rows), 'head')} have a name, most often {most or 'none'}. What can be read off "
        f"the text explains half or more of the logit of {counted(half, 'head')}, and {middle:.0%} of that of the "
        "median head."
    )


def _tested_words(study: Study) -> str:
    fitted, tested = (len({p.group for p in side}) for side in (study.fitted, study.tested))
    return f" Fitted on {counted(fitted, 'document')}, tested on {tested} others."


def _reads(study: Study, job: Work) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], str | None]:
    """Each head's first writers, the largest few of each side, and why there are none where a model has no such split.

    ``traced`` counts the passages in which a head gives one token besides the first 5% of its attention.
    """
    heads = study.text.heads
    units = [(one_query(p, i, study.options.seed),) for i, p in enumerate(study.tested[:_TRACED]) if len(p.ids) > FIRST]
    try:
        reader = Reader(study.text.scope, heads)
        how = Pass(reader, batch_size=TEXTS, job=job, progress=study.options.progress)
        found = told(reader, first_writers(how, units))["tables"]
    except BadInput as error:
        nothing: dict[str, Any] = {**dict.fromkeys(_FIRSTS), "traced": 0}
        return {str(head): nothing for head in heads}, [], f"Who wrote keys and queries is not said: {error}"
    counts = {row["head"]: row["n"] for row in found["heads"]}
    firsts = {row["head"]: {name: row[name] for name in _FIRSTS} | {"traced": row["n"]} for row in found["heads"]}
    reads = [
        {"reader": row["head"], "side": row["side"], "writer": row["writer"], "share": row["share"],
         "n": counts[row["head"]]}
        for row in found["writers"]
    ]  # fmt: skip
    return firsts, reads, None


def one_query(passage: Passage, number: int, seed: int) -> Example:
    """A passage with one query drawn in it."""
    place = FIRST + derived_seed(seed, "traced", number) % (len(passage.ids) - FIRST)
    return Example(ids=passage.ids, queries=((place, place + 1),), cluster=passage.group)


def _read_words(reads: Sequence[Mapping[str, Any]]) -> str:
    """The head that has a good part of the keys of most others."""
    keys = [row for row in reads if row["side"] == "key" and row["share"] >= _MUCH and Writer.parse(row["writer"]).head]
    if not keys:
        return ""
    writer, count = Counter(row["writer"] for row in keys).most_common(1)[0]
    return (
        f" The head that most others read is {writer}: a tenth or more of the logit at {counted(count, 'head')} comes "
        "from what it wrote into their keys."
    )
