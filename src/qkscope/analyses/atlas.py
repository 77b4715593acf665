"""Every head of a model in one pass: how many directions it matches on, with false-discovery control over all heads.

A first pass carries the sums of all heads and a few null replicates each (`head_tests` pools them); a second one, over
passages that the first has not seen, says how much of the logit those directions carry, what swapping the first two
does, what the attended tokens are to the asking ones, and where the directions are strongest. Directions, not features:
taking a head's directions apart is `discover`'s work. A third pass, over some of those passages with one query in each,
says who wrote each head's keys and queries (`trace` says more of a head).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from qkscope.analyses.discover.evidence import Evidence
from qkscope.analyses.discover.rows import relation_words
from qkscope.analyses.discover.study import (
    AttentionSpace,
    Findings,
    Options,
    Study,
    counted,
    share_words,
    untested_words,
)
from qkscope.analyses.discover.texts import LENGTH, QUERIES, Texts, checked_texts
from qkscope.analyses.trace.many import first_writers, told
from qkscope.analyses.trace.rows import is_head
from qkscope.capture.scope import Scope
from qkscope.capture.writers import Reader
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.kinds import Count, checked_call, checked_class
from qkscope.maths import methods
from qkscope.maths.bases import checked_svd
from qkscope.maths.discovery import head_tests
from qkscope.runs.job import Job
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.tasks.texts import text_hash

_SWAPPED = 2  # directions of the causal test: the difference between methods shows at small sizes
_TRACED = 32  # passages, one query each, on which writers are asked for
_MUCH = 0.1  # share of a logit from which on a writer counts as read
_FIRSTS = ("key_writer", "key_share", "query_writer", "query_share")


@checked_class
@dataclass(frozen=True)
class Atlas(Result):
    """All heads, those with most directions first."""


@checked_call
def atlas(
    scope: Scope,
    texts: Texts,
    n: int = 256,
    *,
    heads: str | Head | Sequence[str | Head] | None = None,
    test: int = 64,
    queries: int = QUERIES,
    length: int = LENGTH,
    space: AttentionSpace = "query_frame",
    skip: int = 1,
    replicates: int = 41,
    draws: int = 8,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool | None = None,
    job: Job | None = None,
) -> Atlas:
    """Look for directions above the null at every head.

    Parameters
    ----------
    scope : the model.
    texts : passages, or documents to cut into them (`qkscope.tasks.texts`); ``n`` of them are taken for the sums and
        ``test`` others for the evidence.
    n, test : passages to take; where there are fewer, both get their share.
    heads : heads by name; all by default.
    queries, length : queries drawn in each passage, and its tokens at most.
    space : ``query_frame`` (the default: directions of content and offset, not of the place in the text) or
        ``post_rope``. What is before rotation does not give the attention that all of this rests on.
    skip : tokens from the first on that are left out: a resting place of many heads.
    replicates : null replicates of each head, half of them of each kind; they are pooled over heads, so a few are
        enough.
    draws : random subspaces beside each swap.
    batch_size : passages per batch; they exchange what they attended to within one.
    seed : of every draw.
    progress : whether to say how far it is; if not given, where stderr is a terminal.
    job : where finished pieces are kept, so that the same call goes on after it was stopped; nowhere by default.

    Examples
    --------
    >>> from qkscope import tasks
    >>> scope = Scope.load("nano:mixed", device="cpu")
    >>> texts = [unit[0].text for unit in tasks.induction().test(64)]
    >>> found = atlas(scope, texts, 48, test=16, heads="L1H0,L1H1", progress=False)
    >>> [(row["head"], row["directions"]) for row in found.table()]
    [('L1H0', 5), ('L1H1', 4)]
    """
    start = time.perf_counter()
    options = Options(space, skip, queries, length, replicates, draws, batch_size, seed, progress)
    study = Study(scope, tuple(scope.parse(heads)), options, job=job or Job())
    unique, n, test = checked_passages(texts, n, test)
    examples = study.passages(unique, n + test)
    cut = len(examples) * n // (n + test)
    rows, least = sum(len(example.queries) for example in examples[:cut]), 2 * scope.d_head
    if rows < least:
        raise BadInput(
            f"heads of {scope.d_head} dimensions need {least} queries, but this text gives {rows}: give about "
            f"{-(-least // queries)} passages."
        )
    study.job.begin(
        scope, examples, verb="atlas", heads=[str(head) for head in study.heads], cut=cut, **options.asked()
    )
    contrast = study.contrast()
    study.add("sums", examples[:cut], contrast)
    tested = study.rows("test", examples[cut:], 4)
    tables = _tables(Findings.of(study, contrast, head_tests(contrast), tested))
    firsts, tables["reads"], refused = _reads(study, examples[cut:])
    tables["atlas"] = [row | firsts[row["head"]] for row in tables["atlas"]]
    used = {"queries": queries, "length": length, "skip": skip, "replicates": replicates}
    return Atlas(
        experiment="atlas",
        answer=_answer(tables["atlas"]) + (_read_words(tables["reads"]) if refused is None else f" {refused}"),
        tables=tables,
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**contrast.about, texts=text_hash(texts), n=cut, test=len(examples) - cut, **used),
    )


def _answer(rows: Sequence[Mapping[str, Any]]) -> str:
    above, best, looks = sum(row["directions"] > 0 for row in rows), rows[0], relation_words(rows[0])
    which = f", which looks at {looks}" if looks else ""
    most = (
        f" Most of all at {best['head']}{which}: {counted(best['directions'], 'direction')}, which carry "
        f"{share_words(best['logit_share'], 'its logit')}."
        if best["directions"]
        else ""
    )
    return (
        f"In {above} of {counted(len(rows), 'head')} queries and the keys they attend to go together more than when "
        f"passages are shuffled (false-discovery rate 5%).{most}{untested_words(rows)}"
    )


def _reads(
    study: Study, examples: Sequence[Example]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], str | None]:
    """Each head's first writers, the largest few of each side, and why there are none where a model has no such split.

    ``traced`` counts the passages in which a head gives one token besides the first 5% of its attention.
    """
    units = [(_one_query(example, study.options.seed),) for example in examples[:_TRACED]]
    try:
        reader = Reader(study.scope, study.heads)
        found = told(reader, first_writers(reader, units, study.job, progress=study.options.progress))["tables"]
    except BadInput as error:
        nothing: dict[str, Any] = {**dict.fromkeys(_FIRSTS), "traced": 0}
        return {str(head): nothing for head in study.heads}, [], f"Who wrote keys and queries is not said: {error}"
    counts = {row["head"]: row["n"] for row in found["heads"]}
    firsts = {row["head"]: {name: row[name] for name in _FIRSTS} | {"traced": row["n"]} for row in found["heads"]}
    reads = [
        {"reader": row["head"], "side": row["side"], "writer": row["writer"], "share": row["share"],
         "n": counts[row["head"]]}
        for row in found["writers"]
    ]  # fmt: skip
    return firsts, reads, None


def _one_query(example: Example, seed: int) -> Example:
    drawn = derived_seed(seed, "traced", example.cluster) % len(example.queries)
    return replace(example, queries=example.queries[drawn : drawn + 1])


def _read_words(reads: Sequence[Mapping[str, Any]]) -> str:
    """The head that has a good part of the keys of most others."""
    keys = [row for row in reads if row["side"] == "key" and row["share"] >= _MUCH and is_head(row["writer"])]
    if not keys:
        return ""
    writer, count = Counter(row["writer"] for row in keys).most_common(1)[0]
    return (
        f" The head that most others read is {writer}: a tenth or more of the logit at {counted(count, 'head')} comes "
        "from what it wrote into their keys."
    )


@checked_call
def checked_passages(texts: Texts, n: Count, test: Count) -> tuple[tuple[str, ...], int, int]:
    """The different passages, and how many of them to sum over and to test on."""
    unique = checked_texts(texts)
    if len(unique) < n + test:  # keep the shares of both
        n, test = max(len(unique) * n // (n + test), 1), max(len(unique) * test // (n + test), 1)
    return unique, n, test


def _tables(findings: Findings) -> dict[str, list[dict[str, Any]]]:
    contrast, study, tested = findings.contrast, findings.study, findings.tested
    deltas, cov_k = contrast.delta().cpu(), contrast.covariances()[1].cpu()
    directions = checked_svd(deltas)[0]
    options = study.options

    def of_layer(layer: int) -> list[dict[str, Any]]:
        return [of_head(h) for h, head in enumerate(contrast.heads) if head.layer == layer]

    def of_head(h: int) -> dict[str, Any]:
        head, own = contrast.heads[h], slice(h, h + 1)
        rank = 0 if tested.rests(h) else findings.tests[h].rank
        evidence = Evidence.of(tested, h)
        every = {
            "feature": methods.moving(deltas[own]),
            "key_pca": methods.key_pca(cov_k[own]),
            "random": methods.random([head], contrast.d_head, options.draws, options.seed),
        }
        effects = evidence.swap(every, _SWAPPED)
        basis = directions[h, :, : max(rank, 1)]
        carried = evidence.parts(basis, basis, evidence.q.mean(dim=0)).sum(dim=1, keepdim=True)
        row = {
            **findings.head_row(h, rank, tested), "layer": head.layer, "index": head.index,
            "logit_share": float(evidence.shares(carried)) if rank else 0.0,
            **{(kind if name == "feature" else f"{kind}_{name}"): float(getattr(effect, kind).mean())
               for kind in ("shift", "carried") for name, effect in effects.items()},
        }  # fmt: skip
        shown = evidence.examples(study.scope, 1, carried[:, 0], count=3, around=5) if rank else []
        return {"row": row, "examples": shown}

    made: list[dict[str, Any]] = []
    for layer in sorted({head.layer for head in contrast.heads}):
        made += study.job.once(f"layer {layer}", partial(of_layer, layer))
    rows = sorted((one["row"] for one in made), key=lambda row: (-row["directions"], -row["logit_share"]))
    return {
        "atlas": rows,
        "relations": findings.relations,
        "examples": [example for one in made for example in one["examples"]],
    }
