"""Some heads in depth: what each matches on, by name, with the evidence on documents that nothing was fitted on.

Beside what the atlas says of a head: the token pairs behind its leading block and the block's directions by their
tokens; the change of the logit when a token is changed in the text, against the one predicted; and how much attention
the block's directions move when they are swapped, beside rivals of the same size. A task's prompts are text too: other
words are tested on than were fitted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.discover import closer
from qkscope.analyses.discover.changes import CHANGES, change_row
from qkscope.analyses.names.sight import PASSAGES, TESTED, Options
from qkscope.analyses.names.study import Study, Texts, counted, documents_of, passages_of
from qkscope.analyses.prompts import cluster_of, made_with
from qkscope.analyses.relative import singular_basis
from qkscope.analyses.swap import SIZES
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import Count, Natural, Seed, checked_class
from qkscope.maths import methods
from qkscope.maths.factors import MEAN
from qkscope.maths.singular import SingularBasis
from qkscope.maths.swap import Condition, Method
from qkscope.runs.progress import doing
from qkscope.runs.result import Result
from qkscope.runs.work import current_work, verb
from qkscope.tasks.sides import LENGTH, Passage
from qkscope.tasks.task import ANSWER, Task, Unit
from qkscope.tasks.texts import text_hash

_TABLES = ("directions", "pairs", "changes", "curve")
_KEPT = 8  # directions of a block that other tools read (`arrays`)


@checked_class
@dataclass(frozen=True)
class Discovery(Result):
    """Some heads by name; ``tables["heads"]`` says what each is."""

    main = "heads"


@verb("discover")
def discover(
    scope: Scope,
    source: Texts | Task,
    heads: str | Head | Sequence[str | Head],
    n: Count = PASSAGES,
    *,
    test: Count = TESTED,
    length: Count = LENGTH,
    changes: Natural = CHANGES,
    sizes: Sequence[Count] = SIZES,
    draws: Count = 20,
    batch_size: int = 16,
    seed: Seed = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> Discovery:
    """Find what some heads match on, and test it.

    Parameters
    ----------
    scope : the model.
    source : documents, or strings that are documents of their own; a task, whose prompts are read; None for the texts
        that come with Python.
    heads : heads like ``"L18H6"``, or a list of them.
    n, test : passages (or prompts) to fit on, and others to test on.
    length : the most tokens of a passage.
    changes : tokens that are changed in the text at each head; 0 for none.
    sizes : dimensions of the curve (``tables["curve"]``) over the rivals; none for no curve.
    draws : random subspaces beside each swap.
    batch_size : passages per batch.
    seed : of every draw.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is written by default.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> from qkscope import tasks
    >>> scope = Scope.load("nano:mixed", device="cpu")
    >>> found = discover(scope, tasks.induction(), "L1H1", 200, test=60, sizes=[2], progress=False)
    >>> found.tables["heads"][0]["name"]
    'after a copy'
    """
    options = Options(n, test, length, batch_size, seed, progress)
    chosen = tuple(scope.check(head) for head in parse_heads(heads))
    sizes, job = [k for k in sizes if k <= scope.d_head], current_work()
    if isinstance(source, Task):
        of: dict[str, Any] = {"task": source.name, "asked": dict(source.asked), "task_seed": source.seed}
        sides = _prompts(scope, source, options)
    else:
        documents = documents_of(source)
        sides, of = passages_of(scope, documents, options), {"text": text_hash(documents)}
    study = Study.of(
        scope, chosen, sides, options, job, True, verb="discover", changes=changes, sizes=sizes, draws=draws
    )
    tables = study.tables() | {name: [] for name in _TABLES}
    singular, arrays = _singular(scope, chosen), dict[str, Tensor]()
    for h, head in enumerate(chosen):
        with doing(f"testing {head} ({h + 1} of {len(chosen)} heads)", progress):
            made = job.once(f"head {head}", partial(_closer, study, h, singular, changes, sizes, draws))
        for name in _TABLES:
            tables[name] += made[name]
        if made["basis"] is not None:
            arrays[f"{head}/key_pattern"] = made["basis"]
    return Discovery(
        experiment="discover",
        answer=_answer(tables),
        tables=tables,
        arrays=arrays,
        seed=seed,
        **made_with(scope, space="query_frame", **of, **study.counted()),
    )


def _prompts(scope: Scope, task: Task, options: Options) -> tuple[list[Passage], list[Passage]]:
    """A task's prompts as passages: words of the fitting and of the testing set are not the same."""
    try:
        fitted: Sequence[Unit] = task.draw("fit", ANSWER, options.n)
    except BadInput:  # a file that labels its right keys for other uses only
        fitted = task.fit(next(iter(task.contrasts)), options.n)
    return _read(scope, task, fitted), _read(scope, task, task.test(options.test))


def _read(scope: Scope, task: Task, units: Sequence[Unit]) -> list[Passage]:
    clusters: dict[object, int] = {}
    found: dict[tuple[int, ...], Passage] = {}
    for number, unit in enumerate(units):
        group = clusters.setdefault(cluster_of(unit, number), len(clusters))
        for tokens in scope.encoder.tokenise(list(unit), task.chat):
            found.setdefault(tuple(tokens.ids), Passage(f"{task.name} {number}", group, tuple(tokens.ids)))
    return list(found.values())


def _singular(scope: Scope, heads: Sequence[Head]) -> SingularBasis | None:
    try:
        return singular_basis(scope, list(heads))
    except BadInput:  # a family whose projections cannot be read off
        return None


def _closer(
    study: Study, h: int, singular: SingularBasis | None, changes: int, sizes: Sequence[int], draws: int
) -> dict[str, Any]:
    """One head's rows of the further tables, and its block's directions among keys."""
    named = study.shares(h).named()
    pair = next((pair for pair in named if pair != (MEAN, MEAN)), None)
    made: dict[str, Any] = {name: [] for name in _TABLES} | {"basis": None}
    if pair is None:
        return made
    found = closer.directions_of(study, h, *pair)
    tested = closer.look_closer(study, h, pair, study.tested, found)
    made["pairs"] = closer.pair_rows(study, h, tested)
    if found is not None:
        made["directions"] = closer.direction_rows(study, h, pair, found, tested)
    if changes and (row := change_row(study, h, pair, changes)) is not None:
        made["changes"] = [row]
    block = block_delta(study, h, pair)
    made["basis"] = methods.moving(block[None])(min(_KEPT, study.text.d_head)).left[0]
    if sizes:
        fitted = closer.look_closer(study, h, None, study.fitted[: len(study.tested)], None)
        made["curve"] = _curve(study, h, block, fitted, tested, singular, sizes, draws)
    return made


def block_delta(study: Study, h: int, pair: tuple[str, str]) -> Float[Tensor, "d d"]:
    """``Cov(q_a) R̄ Cov(k_b) R̄ᵀ``: where both parts of a block vary, in the query's frame; a mean has one direction."""
    text, covariances = study.text, []
    slots = (h, len(text.heads) + text.kv_of_head[h])
    for name, slot in zip(pair, slots, strict=True):
        if name == MEAN:
            mean = study.fit.y_mean[slot].double().cpu()
            covariances.append(torch.outer(mean, mean))
            continue
        own = study.fit.where(name)
        b = study.fit.coefficients[own][:, slot].double().cpu()
        covariances.append(b.T @ study.fit.x_covariance[own, own].double().cpu() @ b)
    turn = closer.mean_rotation(text, text.heads[h], study.looked.attended[h]).double()
    return covariances[0] @ turn @ covariances[1] @ turn.T


def _curve(
    study: Study,
    h: int,
    block: Float[Tensor, "d d"],
    fitted: closer.Rows,
    tested: closer.Rows,
    singular: SingularBasis | None,
    sizes: Sequence[int],
    draws: int,
) -> list[dict[str, Any]]:
    """How much attention the block's directions move at every size, beside rivals made from the fitted documents."""
    head = study.text.heads[h]
    cov_q, cov_k = fitted.covariances()
    every: dict[str | Condition, Method] = {
        "block": methods.moving(block[None]),
        "cov_qk_moving": methods.moving(cov_q @ cov_k),
        "key_pca": methods.key_pca(cov_k),
        "random": methods.random([head], study.text.d_head, draws, study.options.seed),
    }
    if singular is not None:
        every["omega_svd"] = methods.omega_svd(singular, [head])
    return tested.swaps(head).curve(every, sizes, against="block", seed=study.options.seed)


def _answer(tables: dict[str, list[dict[str, Any]]]) -> str:
    rows = tables["heads"]
    if len(rows) == 1:
        said = f"{rows[0]['head']}: {rows[0]['sentence']}"
    else:
        said = f"{counted(len(rows), 'head')}: " + ", ".join(f"{row['head']} {row['name']}" for row in rows) + "."
    for row in tables["changes"][:1]:
        said += (
            f" In {row['head']}'s block {row['block']}, a token changed in the text changes the logit by "
            f"{row['slope']:.2f} of what was predicted [{row['low']:.2f}, {row['high']:.2f}] (correlation "
            f"{row['correlation']:.2f}; with permuted tokens {row['permuted_correlation']:.2f}); a sham by "
            f"{row['sham_slope']:.2f}."
        )
    return said
