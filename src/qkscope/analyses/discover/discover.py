"""A head's features without labels: one pass over any text or task, and the evidence for each feature beside it.

The directions come from the self-contrast (`qkscope.maths.discovery`). What is tested is that queries and attended keys
go together more than when passages exchange them; that a head *uses* what goes together is for the swaps to say, and
heads that only follow their mean query pass the test too. Directions are taken apart into independent components shared
by queries and attended keys (`qkscope.maths.components`); and what is found is tested on text that nothing was fitted
on. For a task with labels the labelled contrasts stand beside it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from qkscope.analyses.decompose import decompose
from qkscope.analyses.discover.curve import Curve
from qkscope.analyses.discover.evidence import Evidence, feature_row, nearest_contrast, nearest_singular
from qkscope.analyses.discover.rows import QueryRows, relation_words
from qkscope.analyses.discover.study import AttentionSpace, Findings, Options, Study, counted, untested_words
from qkscope.analyses.discover.texts import LENGTH, QUERIES, Texts, checked_texts, different
from qkscope.analyses.fit import Fit
from qkscope.analyses.fit_folder import checked_contrasts
from qkscope.analyses.relative import singular_basis
from qkscope.analyses.swap import SIZES
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head, parse_heads
from qkscope.kinds import Count, checked_call, checked_class
from qkscope.maths import methods
from qkscope.maths.components import Components, paired_components
from qkscope.maths.discovery import SelfContrast, directions_in_order, head_tests
from qkscope.maths.singular import SingularBasis
from qkscope.runs.job import Job
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.tasks.task import ANSWER, Task, Unit
from qkscope.tasks.texts import text_hash

_SPAN = "a span, not identifiable"
_PER_DIRECTION = 10  # queries needed for each direction asked for
_TABLES = ("heads", "features", "examples", "spectrum")  # with rows of every head


@checked_class
@dataclass(frozen=True)
class Discovery(Result):
    """Features of some heads: ``found["L18H6"]`` are the components of one (None where there are none)."""

    main = "features"

    found: Mapping[Head, Components] = field(default_factory=dict)
    contrast: SelfContrast | None = None

    def __getitem__(self, head: str | Head) -> Components | None:
        return self.found.get(Head.parse(head))


@checked_call
def discover(
    scope: Scope,
    source: Texts | Task,
    heads: str | Head | Sequence[str | Head],
    n: Count = 256,
    *,
    directions: Count = 16,
    queries: int = QUERIES,
    length: int = LENGTH,
    space: AttentionSpace = "query_frame",
    skip: int = 1,
    replicates: int = 199,
    draws: int = 20,
    sizes: Sequence[Count] = SIZES,
    ceiling: bool = True,
    contrasts: Sequence[str] | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool | None = None,
    job: Job | None = None,
) -> Discovery:
    """Find what some heads match on.

    Parameters
    ----------
    scope : the model.
    source : passages of text, documents to cut into them (`qkscope.tasks.texts`), or a task (its queries are asked; its
        labels serve the comparison alone).
    heads : heads like ``"L18H6"``, or a list of them.
    n : passages to take: two thirds to fit, one third to test. Of a task, units to fit and as many to test.
    directions : the most directions to look for at a head.
    queries, length : queries drawn in each passage, and its tokens at most.
    space : ``query_frame`` (the default: features of content and offset, not of the place in the text) or
        ``post_rope``. What is before rotation does not give the attention that all of this rests on.
    skip : tokens from the first on that are left out: a resting place of many heads.
    replicates : null replicates of each head, half of them of each kind (`qkscope.maths.discovery`).
    draws : random subspaces beside each swap.
    sizes : dimensions of the curve (``tables["curve"]``) over the rivals; none for no curve.
    ceiling : whether the curve has a basis learned by gradient, for every size. That is most of the curve's work:
        leave it out to be done sooner.
    contrasts : labelled contrasts of the task to compare with; all by default.
    batch_size : examples per batch; passages exchange what they attended to within one. The labelled contrasts and
        the curve of a task, which look at named keys alone, take twice as many.
    seed : of every draw.
    progress : whether to say how far it is; if not given, where stderr is a terminal.
    job : where finished pieces are kept, so that the same call goes on after it was stopped; nowhere by default.

    Examples
    --------
    >>> from qkscope import tasks
    >>> scope = Scope.load("nano:mixed", device="cpu")
    >>> found = discover(scope, tasks.induction(), "L1H1", 40, directions=2, sizes=[], progress=False)
    >>> found.tables["heads"][0]["directions"]
    2
    """
    start = time.perf_counter()
    options = Options(space, skip, queries, length, replicates, draws, batch_size, seed, progress)
    chosen = tuple(scope.check(head) for head in parse_heads(heads))
    hashed = {} if isinstance(source, Task) else {"texts": text_hash(source)}
    source = checked_source(source, n, directions, contrasts, options)
    task = source if isinstance(source, Task) else None
    if directions > scope.d_head:
        raise BadInput(f"directions are from 1 to the {scope.d_head} dimensions of a head, but got {directions}.")
    study = Study(scope, chosen, options, bool(task and task.chat), job or Job())
    fit_on, test_on = _examples(study, source, n)
    _check_queries(directions, sum(max(len(example.queries), 1) for example in fit_on), "these examples have")
    sizes = [k for k in sizes if k <= scope.d_head]
    asked = {"heads": [str(head) for head in chosen], "n": n, "directions": directions}
    study.job.begin(
        scope,
        [fit_on, test_on],
        verb="discover",
        sizes=sizes,
        ceiling=ceiling,
        chat=study.chat,
        contrasts=None if contrasts is None else list(contrasts),
        task=task and [task.asked, task.seed],
        **asked,
        **options.asked(),
    )
    contrast = study.contrast(source=task.name if task else "text")
    fitted = study.rows("fit", fit_on, 8, contrast)
    tested = study.rows("test", test_on, 4)
    fit = None if task is None else _labelled(study, task, n, contrasts)
    singular = _singular(scope, chosen)
    findings = Findings.of(study, contrast, head_tests(contrast), tested)
    found: dict[Head, Components] = {}
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in _TABLES} | {"relations": findings.relations}
    for h, head in enumerate(chosen):
        made = study.job.once(f"head {head}", partial(_one_head, findings, fitted, h, directions, fit, singular))
        if made["components"] is not None:
            found[head] = Components.from_plain(made["components"])
        for name in _TABLES:
            tables[name] += made[name]
    if sizes:
        curve = Curve(study, contrast, singular, sizes, ceiling)
        tables["curve"] = curve.on_task(task, fit, n) if task and fit else curve.on_text(fitted, tested)
    names = ("query", "key", "query_mean", "key_mean", "query_pattern", "key_pattern")
    used = {
        name: value for name, value in options.asked().items() if name in ("queries", "length", "skip", "replicates")
    }
    return Discovery(
        experiment="discover",
        answer=_answer(tables["heads"]),
        tables=tables,
        arrays={f"{head}/{name}": getattr(own, name) for head, own in found.items() for name in names},
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**contrast.about, **hashed, **asked, **used),
        found=found,
        contrast=contrast,
    )


@checked_call
def checked_source(
    source: Texts | Task, n: Count, directions: Count, contrasts: Sequence[str] | None, options: Options
) -> tuple[str, ...] | Task:
    """The task, or its different passages; what cannot be asked of any model is refused before one is loaded."""
    if isinstance(source, Task):
        checked_contrasts(source, contrasts)
        source.test(1)
        _check_queries(directions, len(_units(source, n)), f"the prompts of {source.name} have")
        return source
    if contrasts is not None:
        raise BadInput("contrasts are of a task, and text has none: leave them out.")
    texts = checked_texts(source)
    passages = min(n, len(texts))
    _check_queries(directions, options.queries * max(2 * passages // 3, 1), f"{passages} passages have at most")
    return texts


def _check_queries(directions: int, count: int, said: str) -> None:
    """Refuse to look for more directions than so many queries can tell."""
    needed = _PER_DIRECTION * directions
    if count < needed:
        raise BadInput(
            f"{directions} directions need {needed} queries to fit on, but {said} {count}: give more text, raise n, or "
            "ask for fewer directions."
        )


def _units(task: Task, n: int) -> Sequence[Unit]:
    try:
        return task.draw("fit", ANSWER, n)
    except BadInput:  # a file that labels its right keys for other uses only
        return task.fit(next(iter(task.contrasts)), n)


def _examples(study: Study, source: Sequence[str] | Task, n: int) -> tuple[list[Example], list[Example]]:
    """What to fit on and what to test on: other words of a task, other passages of a text."""
    if isinstance(source, Task):
        return different([unit[0] for unit in _units(source, n)]), different([unit[0] for unit in source.test(n)])
    examples = study.passages(source, n)
    if len(examples) < 3:
        raise BadInput("these passages are too short to ask in: give passages of a few words each, 3 or more.")
    cut = max(2 * len(examples) // 3, 1)
    return examples[:cut], examples[cut:]


def _labelled(study: Study, task: Task, n: int, contrasts: Sequence[str] | None) -> Fit:
    options = study.options
    return decompose(
        study.scope,
        task,
        study.heads,
        n,
        contrasts=contrasts,
        space=options.space,
        batch_size=options.labelled_batch_size,
        seed=options.seed,
        out=study.job.sub("contrasts"),
        progress=options.progress,
    )


def _singular(scope: Scope, heads: Sequence[Head]) -> SingularBasis | None:
    try:
        return singular_basis(scope, list(heads))
    except BadInput:  # a family whose projections cannot be read off
        return None


def _one_head(
    findings: Findings, fitted: QueryRows, h: int, directions: int, fit: Fit | None, singular: SingularBasis | None
) -> dict[str, Any]:
    """One head's rows of every table, and its components."""
    contrast, study = findings.contrast, findings.study
    # few passages span few directions: with those projected out, replicates have no room left, and anything passes
    most = min(directions, len(fitted.example.unique()) // 4)
    further, null_high = directions_in_order(contrast, h, most)
    # whether there is a first one, the heads together decide
    rank = max(further, 1) if findings.tests[h].rank and not fitted.rests(h) else 0
    spectrum = torch.linalg.svdvals(contrast.delta()[h])
    made: dict[str, Any] = {"features": [], "examples": [], "components": None}
    made["spectrum"] = [
        {
            "head": str(contrast.heads[h]), "component": j + 1, "value": float(spectrum[j]),
            "null_high": null_high[j] if j < len(null_high) else None, "above": j < rank,
        }
        for j in range(min(max(rank + 3, 12), len(spectrum)))
    ]  # fmt: skip
    row: dict[str, Any] = {
        "queries": int(fitted.valid[:, h].sum()), "features": 0, "identifiable": 0, "rejected": 0, "logit_share": 0.0,
        "diagonal": None, "diagonal_null": None,
    }  # fmt: skip
    above = ""
    if rank:
        own = fitted.of_head(h)
        components = paired_components(own, rank, held=findings.tested.of_head(h), seed=study.options.seed)
        made |= _features(findings, h, components, fit, singular)
        identifiable = sum(feature.identifiable for feature in components.features)
        row |= {
            "features": len(components.features), "identifiable": identifiable,
            "rejected": len(components.rejected), "logit_share": sum(r["logit_share"] for r in made["features"]),
        }  # fmt: skip
        if rank > 1 and identifiable:
            row |= {"diagonal": components.diagonal, "diagonal_null": components.diagonal_bound}
        above = _verdict(components)
    return {**made, "heads": [findings.head_row(h, rank, fitted, above) | row]}


def _features(
    findings: Findings, h: int, components: Components, fit: Fit | None, singular: SingularBasis | None
) -> dict[str, Any]:
    """The features of one head, with their evidence and examples."""
    options, head, scope = findings.study.options, findings.contrast.heads[h], findings.study.scope
    cov_q, cov_k = (c[h : h + 1].cpu() for c in findings.contrast.covariances())
    baselines = {
        "key_pca": methods.key_pca(cov_k),
        "cov_qk": methods.cov_qk(cov_q, cov_k),
        "random": methods.random([head], scope.d_head, options.draws, options.seed),
    }
    evidence = Evidence.of(findings.tested, h)
    parts = evidence.parts(components.query, components.query_pattern, components.query_mean)
    shares = evidence.shares(parts)
    labelled = {} if fit is None else {name: fit[name, head].basis("key") for name in fit.contrasts}
    rows, examples = [], []
    for number, feature in enumerate(components.features, 1):
        index, basis = list(feature.index), components.key_basis(feature)
        rows.append({
            "head": str(head), "feature": number, "logit_share": float(shares[index].sum()),
            **feature_row(evidence, components, feature, baselines, options.seed), **nearest_contrast(basis, labelled),
            **nearest_singular(basis, None if singular is None else singular[head]),
        })  # fmt: skip
        examples += evidence.examples(scope, number, parts[:, index].sum(dim=1))
    return {"components": components.to_plain(), "features": rows, "examples": examples}


def _verdict(components: Components) -> str:
    """What the components of a head with directions above the null are."""
    if not components.features:
        return "directions that no key answers"
    if components.rank == 1:
        return "one direction"
    if not any(feature.identifiable for feature in components.features):
        return _SPAN  # and so is the diagonal of what one could turn as one likes
    return "matches like with like" if components.matched else "directions, not matched one to one"


def _answer(rows: Sequence[Mapping[str, Any]]) -> str:
    more = [f"and {len(rows) - 4} more heads"] if len(rows) > 4 else []
    said = "; ".join([*(_head_answer(row) for row in rows[:4]), *more])
    above = sum(row["directions"] > 0 for row in rows)
    shuffled = f" In {above} of {counted(len(rows), 'head')} this is more than when passages are shuffled."
    return f"{said}.{shuffled}{untested_words(rows)}"


def _head_answer(row: Mapping[str, Any]) -> str:
    """What a head looks at, and in how much of it queries and keys go together."""
    looks = f"{row['head']} looks at {relation_words(row) or 'no token that has a name here'}"
    if not row["directions"]:
        return f"{looks}, and its queries and keys go together in no direction ({row['verdict']})"
    how = {
        _SPAN: "which cannot be told apart one by one",
        "matches like with like": f"{counted(row['features'], 'feature')} that match like with like",
    }.get(row["verdict"], f"{counted(row['features'], 'feature')} ({row['verdict']})")
    return f"{looks}, and its queries and keys go together in {counted(row['directions'], 'direction')}, {how}"
