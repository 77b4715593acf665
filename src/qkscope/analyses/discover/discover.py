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
from torch import Tensor

from qkscope.analyses.decompose import decompose
from qkscope.analyses.discover.curve import SIZES, labelled_curve, text_curve
from qkscope.analyses.discover.evidence import contributions, example_rows, feature_row, logit_shares
from qkscope.analyses.discover.relations import main_relation, relation_rows
from qkscope.analyses.discover.rows import QueryRows, gather
from qkscope.analyses.discover.texts import LENGTH, QUERIES, checked_texts, different, text_examples
from qkscope.analyses.fit import Fit
from qkscope.analyses.singular import singular_basis
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput, check_least
from qkscope.examples import Example
from qkscope.heads import Head, parse_heads
from qkscope.kinds import checked_call, checked_class
from qkscope.maths.components import Components, Pairs, paired_components
from qkscope.maths.discovery import HeadTest, SelfContrast, directions_in_order, head_tests
from qkscope.maths.singular import SingularBasis
from qkscope.runs.job import Job
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.tasks.task import ANSWER, Task

RESTS = "rests on the first token"
ABOVE = "go together above the shuffled null"  # queries and attended keys do: this is what was tested, and no more
NOT_ABOVE = "not above the shuffled null"
UNTESTED = "untested"  # the replicates could not have told
RESTING = 0.02  # share of attention off the first token under which a head says nothing about what it looks for
_HEADS = 0.05  # false-discovery rate over the heads asked for: decides whether there is a first one
LEAST_REPLICATES = 39  # of two kinds: 1 in 20 of the fewer
_PER_DIRECTION = 10  # queries needed for each direction asked for


@checked_class
@dataclass(frozen=True)
class Discovery(Result):
    """Features of some heads: ``found["L18H6"]`` are the components of one (None where there are none)."""

    found: Mapping[Head, Components] = field(default_factory=dict)
    contrast: SelfContrast | None = None

    def __getitem__(self, head: str | Head) -> Components | None:
        return self.found.get(Head.parse(head))

    def table(self) -> list[dict[str, Any]]:
        """One row per feature."""
        return [dict(row) for row in self.tables["features"]]


@checked_call
def discover(
    scope: Scope,
    source: Sequence[str] | Task,
    heads: str | Head | Sequence[str | Head],
    n: int = 256,
    *,
    directions: int = 16,
    queries: int = QUERIES,
    length: int = LENGTH,
    space: Space = "query_frame",
    skip: int = 1,
    replicates: int = 199,
    draws: int = 20,
    sizes: Sequence[int] = SIZES,
    contrasts: Sequence[str] | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool | None = None,
    job: Job | None = None,
) -> Discovery:
    """Find what some heads match on.

    Parameters
    ----------
    source : passages of text, or a task (its queries are asked; its labels serve the comparison alone).
    n : passages to take: two thirds to fit, one third to test. Of a task, units to fit and as many to test.
    directions : the most directions to look for at a head.
    queries, length : queries drawn in each passage, and its tokens at most.
    space : ``query_frame`` (the default: features of content and offset, not of the place in the text) or
        ``post_rope``; what is before rotation does not give the attention that all of this rests on.
    skip : tokens from the first on that are left out: a resting place of many heads.
    replicates : null replicates of each head, half of them of each kind (`qkscope.maths.discovery`).
    sizes : dimensions of the curve (``tables["curve"]``) over the rivals; none for no curve.
    contrasts : labelled contrasts of the task to compare with; all by default.
    job : where finished pieces are kept, so that the same call goes on after it was stopped; nowhere by default.
    """
    start = time.perf_counter()
    check_least(1, queries=queries, length=length, draws=draws, batch_size=batch_size)
    check_least(0, skip=skip)
    check_least(1, sizes=min(sizes, default=1))
    if contrasts is not None and not isinstance(source, Task):
        raise BadInput("contrasts are of a task, and text has none: leave them out.")
    chosen = [scope.check(head) for head in parse_heads(heads)]
    if not 1 <= directions <= scope.d_head:
        raise BadInput(f"directions are from 1 to the {scope.d_head} dimensions of a head, but got {directions}.")
    check_replicates(replicates)
    if space == "pre_rope":
        raise BadInput("pre_rope vectors do not give the model's attention: take query_frame or post_rope.")
    sizes = [k for k in sizes if k <= scope.d_head]
    task = source if isinstance(source, Task) else None
    fit_on, test_on = _examples(scope, source, n, queries, length, seed)
    rows = sum(max(len(example.queries), 1) for example in fit_on)
    if rows < _PER_DIRECTION * directions:
        raise BadInput(f"{directions} directions need {_PER_DIRECTION * directions} queries to fit on, but there are "
                       f"{rows} here: give more text, raise n, or ask for fewer directions.")  # fmt: skip
    about = {
        "model": scope.name,
        "weights": scope.weights_hash,
        "space": space,
        "source": task.name if task else "text",
    }
    options: Any = {"space": space, "skip": skip, "batch_size": batch_size, "chat": bool(task and task.chat),
                    "seed": seed, "progress": progress}  # fmt: skip
    job = (job or Job()).begin(
        scope, [fit_on, test_on], verb="discover", heads=[str(head) for head in chosen], n=n, queries=queries,
        length=length, replicates=replicates, directions=directions, draws=draws, sizes=sizes,
        contrasts=None if contrasts is None else list(contrasts), task=None if task is None else dict(task.asked),
        task_seed=None if task is None else task.seed, **{k: v for k, v in options.items() if k != "progress"},
    )  # fmt: skip
    contrast = SelfContrast(
        chosen, scope.d_head, kv_of_head=key_heads(scope, chosen), replicates=replicates, seed=seed, about=about,
        device=scope.device,
    )  # fmt: skip
    fitted = gather(scope, fit_on, chosen, contrast=contrast, draws=8, job=job, name="fit", **options)
    tested = gather(scope, test_on, chosen, draws=4, job=job, name="test", **options)
    assert fitted is not None
    assert tested is not None
    fit = None
    if task is not None:
        fit = decompose(
            scope, task, chosen, n, contrasts=contrasts, space=space, batch_size=2 * batch_size, seed=seed,
            out=job.sub("contrasts"), progress=progress,
        )  # fmt: skip
    singular = _singular(scope, chosen)

    tests = head_tests(contrast, alpha=_HEADS)
    found: dict[Head, Components] = {}
    relations = job.once("relations", lambda: relation_rows(scope, tested))
    tables: dict[str, list[dict[str, Any]]] = {"heads": [], "features": [], "examples": [], "spectrum": []}
    tables["relations"] = relations
    for h, head in enumerate(chosen):
        make = partial(_one_head, scope, fitted, tested, h, tests[h], directions, contrast, fit, singular, relations,
                       draws, seed)  # fmt: skip
        made = job.once(f"head {head}", make)
        if made["components"] is not None:
            found[head] = Components.from_plain(made["components"])
        for name in ("heads", "features", "examples", "spectrum"):
            tables[name] += made[name]
    if sizes:
        tables["curve"] = (
            text_curve(fitted, tested, contrast, singular, sizes, draws, seed, job)
            if task is None or fit is None
            else labelled_curve(scope, task, fit, contrast, singular, n, sizes, draws, batch_size, seed, progress, job)
        )
    return Discovery(
        experiment="discover",
        answer=_answer(tables),
        tables=tables,
        arrays=_arrays(found),
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**about, n=n, heads=[str(h) for h in chosen], queries=queries, length=length, skip=skip,
                              replicates=replicates, directions=directions),
        found=found,
        contrast=contrast,
    )  # fmt: skip


def _examples(
    scope: Scope, source: Sequence[str] | Task, n: int, queries: int, length: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """What to fit on and what to test on: other words of a task, other passages of a text."""
    if isinstance(source, Task):
        try:
            units = source.draw("fit", ANSWER, n)
        except BadInput:  # a file that labels its right keys for other uses only
            units = source.fit(next(iter(source.contrasts)), n)
        return different([unit[0] for unit in units]), different([unit[0] for unit in source.test(n)])
    check_least(1, n=n)
    texts = checked_texts(source)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()[:n]
    examples = text_examples(scope, [texts[i] for i in order], queries=queries, length=length, seed=seed)
    cut = max(2 * len(examples) // 3, 1)
    if len(examples) < 3:
        raise BadInput("these passages are too short to ask in: give passages of a few words each, 3 or more.")
    return examples[:cut], examples[cut:]


def key_heads(scope: Scope, heads: Sequence[Head]) -> list[int]:
    """Which of the drawn keys each head reads: key heads in order of first use."""
    places: dict[tuple[int, int], int] = {}
    return [places.setdefault((head.layer, head.kv(scope.group_size)), len(places)) for head in heads]


def _singular(scope: Scope, heads: Sequence[Head]) -> SingularBasis | None:
    try:
        return singular_basis(scope, list(heads))
    except BadInput:  # a family whose projections cannot be read off
        return None


def check_replicates(replicates: int) -> None:
    """As many as a test at 5% needs."""
    if type(replicates) is not int or replicates < LEAST_REPLICATES:
        raise BadInput(f"replicates are at least {LEAST_REPLICATES}, to tell 5% of chance, but got {replicates!r}.")


def _one_head(
    scope: Scope, fitted: QueryRows, tested: QueryRows, h: int, test: HeadTest, directions: int, contrast: SelfContrast,
    fit: Fit | None, singular: SingularBasis | None, relations: Sequence[Mapping[str, Any]], draws: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """One head's rows of every table, and its components."""
    head = contrast.heads[h]
    mass = float(fitted.mass[:, h].mean())
    rests = mass < RESTING or not bool(fitted.valid[:, h].any())
    # few passages span few directions: with those projected out, replicates have no room left, and anything passes
    most = min(directions, len(fitted.example.unique()) // 4)
    further, null_high = directions_in_order(contrast, h, most)
    rank = max(further, 1) if test.rank and not rests else 0  # whether there is a first one, the heads together decide
    spectrum = torch.linalg.svdvals(contrast.delta()[h])
    tables: dict[str, Any] = {"features": [], "examples": [], "components": None}
    tables["spectrum"] = [
        {
            "head": str(head), "component": j + 1, "value": float(spectrum[j]),
            "null_high": null_high[j] if j < len(null_high) else None, "above": j < rank,
        }
        for j in range(min(max(rank + 3, 12), len(spectrum)))
    ]  # fmt: skip
    row: dict[str, Any] = {
        "head": str(head), "queries": int(fitted.valid[:, h].sum()), "mass": mass,
        "top_weight": float(fitted.top_weight[fitted.valid[:, h], h].mean()), "directions": rank,
        "z": test.z, "p": test.p, "q": test.q, "features": 0, "identifiable": 0, "rejected": 0, "logit_share": 0.0,
        "diagonal": None, "diagonal_null": None, **main_relation(relations, str(head)),
        "verdict": RESTS if rests else NOT_ABOVE if test.tested else UNTESTED,
    }  # fmt: skip
    if rank:
        own, held = (
            Pairs(rows.q[keep, h], rows.attended[keep, h], rows.mean[keep, h], rows.example[keep])
            for rows in (fitted, tested)
            for keep in (rows.valid[:, h],)
        )
        components = paired_components(own, rank, held=held, seed=seed)
        tables["components"] = components.to_plain()
        parts, whole = contributions(tested, h, components)
        shares = logit_shares(parts, whole)
        labelled = {} if fit is None else {name: fit[name, head].basis("key") for name in fit.contrasts}
        for number, feature in enumerate(components.features, 1):
            evidence = feature_row(tested, h, components, feature, contrast, shares, labelled=labelled,
                                   singular=singular, draws=draws, seed=seed)  # fmt: skip
            tables["features"].append({**evidence, "feature": number})
            strength = parts[:, list(feature.index)].sum(dim=1)
            tables["examples"] += example_rows(scope, tested, h, number, strength)
        kept = [j for feature in components.features for j in feature.index]
        row |= {
            "features": len(components.features),
            "identifiable": sum(feature.identifiable for feature in components.features),
            "rejected": len(components.rejected), "logit_share": float(shares[kept].sum()) if kept else 0.0,
            "verdict": _verdict(components),
        }  # fmt: skip
        if rank > 1 and any(feature.identifiable for feature in components.features):
            row |= {"diagonal": components.diagonal, "diagonal_null": components.diagonal_bound}
    return {**tables, "heads": [row]}


def _verdict(components: Components) -> str:
    if not components.features:
        return "directions that no key answers"
    if components.rank == 1:
        return "one direction"
    if not any(feature.identifiable for feature in components.features):
        return "a span, not identifiable"  # and so is the diagonal of what one could turn as one likes
    return "matches like with like" if components.matched else "directions, not matched one to one"


def _answer(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = tables["heads"]
    said = [f"{row['head']}: {counted(row['features'], 'feature')} in {counted(row['directions'], 'direction')} "
            f"({row['verdict']})" for row in rows[:4]]  # fmt: skip
    more = f"; and {len(rows) - 4} more heads" if len(rows) > 4 else ""
    above = sum(row["directions"] > 0 for row in rows)
    tested = (
        f"Queries and attended keys go together above the shuffled null in {above} of {counted(len(rows), 'head')}."
    )
    return "; ".join(said) + more + ". " + tested + untested_words(rows)


def untested_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """What to do about heads that could not be tested; nothing where there are none."""
    count = sum(row["verdict"] == UNTESTED for row in rows)
    return f" {counted(count, 'head')} could not be tested: raise --replicates, or the batch size." if count else ""


def counted(number: int, what: str) -> str:
    """A number and its noun."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _arrays(found: Mapping[Head, Components]) -> dict[str, Tensor]:
    names = ("query", "key", "query_mean", "key_mean", "query_pattern", "key_pattern")
    return {f"{head}/{name}": getattr(c, name) for head, c in found.items() for name in names}
