"""The causal test: swap features between the right key and another; see where attention goes.

One capture of the held-out prompts serves every condition, and one draw of the keys that change
places (`qkscope.findings.swap_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qkscope.checking import Count, Seed
from qkscope.errors import BadInput
from qkscope.findings.fit import Fit
from qkscope.findings.swap_rows import capture_rows, draw_pairs
from qkscope.findings.task_batches import made_with, with_notes
from qkscope.heads import Head
from qkscope.model.scope import Scope
from qkscope.model.spaces import Space
from qkscope.results.folder import sha256
from qkscope.results.result import Result
from qkscope.results.work import current_work, verb
from qkscope.sums import swap_methods as methods
from qkscope.sums.bases import Projector
from qkscope.sums.swap_algebra import Condition
from qkscope.texts.task import UnitsToTest
from qkscope.verbs.swap.downstream import answer_rows, answer_sentence, answers_read, patched_runner
from qkscope.verbs.swap.features import Basis, Features
from qkscope.verbs.swap.truth import (
    exchanging_task,
    more_conditions,
    truth_runner,
    truth_sentence,
)

CURVE_SIZES = (1, 2, 4, 8, 12)


class Swaps(Result):
    """Attention before and after, per head and condition."""


@verb("swap", beside="fit")
def swap(
    scope: Scope,
    units: UnitsToTest,
    fit: Fit | None = None,
    heads: str | Head | Sequence[str | Head] | None = None,
    *,
    features: Sequence[str] | None = None,
    subspaces: Mapping[str, Basis | Mapping[str | Head, Basis]] | None = None,
    space: Space = "post_rope",
    chat: bool = False,
    draws: Count = 20,
    sizes: Sequence[Count] = (),
    curve: bool = False,
    downstream: bool = False,
    truth: bool = False,
    batch_size: Count = 32,
    seed: Seed = 0,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Swaps:
    """Test features causally: swap them between two keys of held-out prompts, beside baselines.

    Each feature is swapped alone, all together, obliquely, and as many dimensions that were chosen
    otherwise.

    Parameters
    ----------
    scope : the model.
    units : from ``task.test(n)``: words that nothing was fitted on.
    fit : features, as `decompose` gives them; not needed beside ``subspaces``.
    heads : which heads; by default all of the fit, or those that ``subspaces`` name.
    features : contrasts of the fit to swap; by default ``order`` and ``lexical`` of binding, the
        categories of a filter task, or all that were fitted. An empty list takes ``subspaces``
        alone.
    subspaces : subspaces of your own by name, each swapped as a feature is, with the same controls
        beside it: a `Subspace`, or a basis of shape (d_head, r) of any independent columns, for all
        heads or by head. Key PCA and ``Cov_q Cov_k`` are made from the covariances of the fit;
        without one there are no such rows.
    space, chat : how the prompts run where there is no fit, which says it otherwise.
    draws : random subspaces per size.
    sizes : also a curve over the number of dimensions swapped (``tables["curve"]``), for each
        feature and baseline. ``tables["paired"]`` holds differences of two conditions' shifts on
        the same rows, with their intervals.
    curve : draw that curve where no sizes are named, too: of 1, 2, 4, 8 and 12 dimensions.
    downstream : also patch the swap into all heads at once and read the model's answer
        (``tables["downstream"]``), of prompts with one query and features fitted in ``post_rope``;
        it is right where the likeliest candidate is.
    truth : also exchange each feature in the text (binding, filter, ioi), and say how far every
        edited row is from the one that the model has then (``distance``, and how much ``nearer``
        than key PCA), beside a subspace trained for it, Ω, the whole key and nothing done.
    batch_size : prompts that run together.
    seed : of the keys that are drawn, of the random subspaces and of the intervals.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is
        written by default. The fit's own folder keeps its files, and its page tells the swaps too.
    part : as in `decompose`.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> from qkscope import Scope, swap, tasks
    >>> scope, task = Scope.load("nano:mixed"), tasks.binding(5, form="sentence")
    >>> mine = torch.eye(scope.d_head)[:, :2]
    >>> swaps = swap(scope, task.test(4), heads="L1H0", subspaces={"mine": mine}, progress=False)
    >>> [(row["feature"], row["kind"], row["rank"]) for row in swaps.table()]
    [('mine', 'feature', 2), ('mine', 'random', 2), ('mine', 'sham', 2)]
    """
    fitted = Fit("swap", {}, space=space, chat=chat) if fit is None else fit
    chosen = Features.of(scope, fitted, heads, features, subspaces)
    sizes = _checked_sizes(sizes, curve, scope.d_head)
    pairs = draw_pairs(units, batch_size, seed)
    projectors, numbers = chosen.conditions(draws, seed)
    asked: Any = {
        "heads": [str(head) for head in chosen.heads],
        "space": fitted.space,
        "chat": fitted.chat,
    }
    exchanged = None
    if truth:
        task = exchanging_task(fit)
        exchanged = truth_runner(scope, chosen, pairs, task)
        asked |= {"truth": chosen.names, "seed": seed}
    patched = None
    if downstream:
        if fit is None or subspaces:
            raise BadInput(
                "the answer is read with the features of a fit swapped: give one, and no subspaces."
            )
        written = {}
        for kind in methods.SHOWN_METHODS:
            written[kind] = projectors[Condition(chosen.joint, kind)]
        patched = patched_runner(scope, units, chosen, pairs, written)
        # a fit of the same name may have been made anew
        asked |= {"draws": draws, "seed": seed, "projectors": _hash(written.values())}
    work = current_work().begin(scope, list(units), verb="swap", batch_size=batch_size, **asked)
    run = partial(work.run, progress=progress, last=True)
    rows = capture_rows(scope, units, fitted, chosen.heads, pairs, run, (patched, exchanged))
    if truth:
        projectors |= more_conditions(scope, chosen, task, projectors, len(units), seed)
    if rows.others is not None:
        projectors[Condition(chosen.joint, "sham")] = projectors[Condition(chosen.joint)]
    table = _with_condition_numbers(rows.table(projectors, seed=seed), chosen.heads, numbers)
    by_size = chosen.methods(draws, seed) if sizes else {}
    comparisons = chosen.comparisons(projectors, by_size, sizes)
    paired = rows.paired(comparisons.pairs, comparisons.projectors, seed=seed)
    tables: dict[str, Any] = {"swap": table, "paired": paired}
    if sizes:
        controls = {name: "random" for name in by_size if name != "random"}
        tables["curve"] = rows.curve(by_size, sizes, controls, seed)
    clusters = len(pairs.cluster.unique())
    answer = _answer(table, chosen, truth, alone=clusters < 2)
    about = dict(fitted.provenance.get("asked", {}))
    about |= {"test_units": len(units), "draws": draws}
    if rows.answers is not None:
        read = answers_read(pairs.examples)
        tables["downstream"] = answer_rows(rows.answers, written, chosen, pairs, draws)
        answer += f" {answer_sentence(tables['downstream'][0], read)}"
        about["read"] = read
    answer = with_notes(answer, about)
    return Swaps("swap", tables, answer=answer, seed=seed, **made_with(scope, **about))


def _checked_sizes(sizes: Sequence[int], curve: bool, d_head: int) -> Sequence[int]:
    """The sizes of the curve: the usual ones if it is asked for and none are named."""
    if curve and not sizes:
        return [k for k in CURVE_SIZES if k <= d_head]
    if any(k > d_head for k in sizes):
        raise BadInput(f"a curve of {max(sizes)} dimensions does not fit into a head of {d_head}.")
    return sizes


def _hash(projectors: Iterable[Projector]) -> str:
    """Fingerprint of the factors of some projectors."""
    factors = []
    for projector in projectors:
        for factor in projector:
            factors.append(factor.detach().cpu().double().flatten())
    return sha256(torch.cat(factors).numpy().tobytes())


def _with_condition_numbers(
    rows: Iterable[Mapping[str, Any]], heads: Sequence[Head], numbers: Sequence[float | None]
) -> list[dict[str, Any]]:
    """Say how well oblique features can be told apart; leave out heads at which they cannot."""
    number_of = dict(zip(map(str, heads), numbers, strict=True))
    table = []
    for row in rows:
        number = number_of[row["head"]] if row["kind"] == "oblique" else None
        if row["kind"] != "oblique" or number is not None:
            table.append({**row, "condition_number": number})
    return table


def _answer(
    table: Sequence[Mapping[str, Any]], chosen: Features, truth: bool, *, alone: bool
) -> str:
    """Say what the swap of all features does at the first head, beside random subspaces.

    ``alone``: all prompts are one cluster.
    """
    first = str(chosen.heads[0])
    by_kind = {}
    for row in table:
        if (row["head"], row["feature"]) == (first, chosen.joint):
            by_kind[row["kind"]] = row
    row = by_kind["feature"]
    random = by_kind["random"]
    rank = row["rank"]
    size = "1 dimension" if rank == 1 else f"{rank} dimensions"
    on_right = f"{row['orig_before']:.2f} to {row['orig_after']:.2f}"
    on_target = f"{row['target_before']:.2f} to {row['target_after']:.2f}"
    control = f"random subspaces of the same size leave {random['orig_after']:.2f}"
    answer = (
        f"Swapping {chosen.joint} at {first} ({size}) takes its attention on the right key"
        f" from {on_right} and on the target from {on_target}; {control}."
    )
    if truth:
        features = [*chosen.names, chosen.joint]
        answer += f" {truth_sentence(table, row['head'], features)}"
    if not chosen.has_covariances:
        answer += " Key PCA and Cov_q Cov_k need a fit of these heads, and are left out."
    if alone:
        answer += " All prompts are copies or ask for one word, so there are no intervals."
    return answer
