"""The causal test on a model: swap features between the right key and another, and see where the
attention goes.

One capture of the held-out prompts serves every condition: the edited rows have a closed form
(`qkscope.sums.swap_algebra`). Which keys change places is drawn once for every condition and every verb
that swaps, each by the address of its prompt: the same units and seed give the same, in whatever
batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.checking import Count, Seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.findings.fit import Fit
from qkscope.findings.task_batches import (
    batches_of,
    check_same_model,
    clusters_of,
    made_with,
    unit_runner,
    with_notes,
)
from qkscope.heads import Head, parse_heads
from qkscope.model.scope import Scope
from qkscope.model.spaces import Space
from qkscope.results.folder import sha256
from qkscope.results.result import Result
from qkscope.results.work import Stage, Work, current_work, verb
from qkscope.seeds import derived_seed
from qkscope.sums import swap_methods as methods
from qkscope.sums.bases import Projector
from qkscope.sums.subspace import Subspace
from qkscope.sums.swap_algebra import Condition, Method, SwapRows, draw_targets
from qkscope.texts.task import ANSWER, ASKED, Units, UnitsToTest
from qkscope.verbs.swap.clouds import make_clouds

SIZES = (1, 2, 4, 8, 12)
#: A subspace of one's own: as a fit gives them, or a basis (d_head, r) whose span is swapped.
Basis = Subspace | Tensor
Own = Mapping[str, Basis | Mapping[str | Head, Basis]]


class Swaps(Result):
    """Attention before and after, per head and condition; and the keys and queries as points, for
    the page.
    """


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
    clouds: bool = False,
    downstream: bool = False,
    truth: bool = False,
    batch_size: Count = 32,
    seed: Seed = 0,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Swaps:
    """Test features causally: swap them between the right key and another on held-out prompts,
    beside baselines.

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
    clouds : also what a page draws: keys and queries as points (``tables["clouds"]``) and,
        where no sizes are named, the curve of 1, 2, 4, 8 and 12 dimensions.
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
    sizes = [k for k in SIZES if k <= scope.d_head] if clouds and not sizes else sizes
    if any(k > scope.d_head for k in sizes):
        raise BadInput(
            f"a curve of {max(sizes)} dimensions does not fit into a head of {scope.d_head}."
        )
    pairs, (projectors, numbers) = (
        draw_pairs(units, batch_size, seed),
        chosen.conditions(draws, seed),
    )
    asked: Any = {
        "heads": [str(head) for head in chosen.heads],
        "space": fitted.space,
        "chat": fitted.chat,
    }
    patched = exchanged = None
    if truth:
        from qkscope.verbs.swap.truth import (
            exchanging_task,
            more_conditions,
            truth_runner,
            truth_sentence,
        )

        task = exchanging_task(fit)
        exchanged = truth_runner(scope, chosen, pairs, task)
        asked |= {"truth": chosen.names, "seed": seed}
    if downstream:
        if fit is None or subspaces:
            raise BadInput(
                "the answer is read with the features of a fit swapped: give one, and no subspaces."
            )
        from qkscope.verbs.swap.downstream import (
            answer_rows,
            patched_runner,
        )  # which stands on this file

        written = {kind: projectors[Condition(chosen.joint, kind)] for kind in methods.SHOWN}
        patched = patched_runner(scope, units, chosen, pairs, written)
        factors = [
            factor.detach().cpu().double().flatten() for each in written.values() for factor in each
        ]
        # a fit of the same name may have been made anew
        asked |= {
            "draws": draws,
            "seed": seed,
            "projectors": sha256(torch.cat(factors).numpy().tobytes()),
        }
    work = current_work().begin(scope, list(units), verb="swap", batch_size=batch_size, **asked)
    run = partial(work.run, progress=progress, last=True)
    rows = capture_rows(scope, units, fitted, chosen.heads, pairs, run, (patched, exchanged))
    if truth:
        projectors |= more_conditions(scope, chosen, task, projectors, len(units), seed)
    if rows.others is not None:
        projectors[Condition(chosen.joint, "sham")] = projectors[Condition(chosen.joint)]
    number = dict(zip(map(str, chosen.heads), numbers, strict=True))
    table = [
        {**row, "condition_number": number[row["head"]] if row["kind"] == "oblique" else None}
        for row in rows.table(projectors, seed=seed)
        if row["kind"] != "oblique" or number[row["head"]] is not None
    ]
    by_size = chosen.methods(draws, seed) if sizes else {}
    compared = rows.paired(*chosen.comparisons(projectors, by_size, sizes), seed=seed)
    tables: dict[str, list[dict[str, Any]]] = {"swap": table, "paired": compared}
    if sizes:
        tables["curve"] = rows.curve(
            by_size, sizes, {name: "random" for name in by_size if name != "random"}, seed
        )
    at = {
        row["kind"]: row
        for row in table
        if row["head"] == asked["heads"][0] and row["feature"] == chosen.joint
    }
    row = at["feature"]
    random = at["random"]
    size = "1 dimension" if row["rank"] == 1 else f"{row['rank']} dimensions"
    alone = len(pairs.cluster.unique()) < 2
    nearest = (
        f" {truth_sentence(table, row['head'], [*chosen.names, chosen.joint])}" if truth else ""
    )
    answer = (
        f"Swapping {chosen.joint} at {row['head']} ({size}) takes its attention on the right key from "
        f"{row['orig_before']:.2f} to {row['orig_after']:.2f} and on the target from {row['target_before']:.2f} to "
        f"{row['target_after']:.2f}; random subspaces of the same size leave {random['orig_after']:.2f}."
        + nearest
        + (
            ""
            if chosen.has_covariances
            else " Key PCA and Cov_q Cov_k need a fit of these heads, and are left out."
        )
        + (
            " All prompts are copies or ask for one word, so there are no intervals."
            if alone
            else ""
        )
    )
    about = {**fitted.provenance.get("asked", {}), "test_units": len(units), "draws": draws}
    if rows.answers is not None:
        tables["downstream"], said, about["read"] = answer_rows(
            rows.answers, written, chosen, pairs, draws
        )
        answer += f" {said}"
    if clouds:
        shown = {
            (name, head): chosen.subspaces[name, head]
            for head in chosen.heads
            for name in chosen.names
        }
        tables["clouds"] = make_clouds(rows, pairs.examples, shown, fitted.words)
    answer = with_notes(answer, about)
    return Swaps("swap", tables, answer=answer, seed=seed, **made_with(scope, **about))


# ---------------------------------------------------------------------- what is swapped


def default_features(contrasts: Sequence[str]) -> list[str]:
    """``order`` and ``lexical`` where both are there, else every contrast but the pooled one."""
    if {"order", "lexical"} <= set(contrasts):
        return ["order", "lexical"]
    return [name for name in contrasts if name != "category"] or list(contrasts)


def check_swappable(space: str, downstream: bool = False) -> None:
    """Refuse a space in which attention, and so a swap, cannot be had."""
    if space == "pre_rope":
        raise BadInput(
            "pre_rope vectors do not give the model's attention: fit in post_rope or query_frame for this."
        )
    if downstream and space != "post_rope":
        raise BadInput("a patched run writes post_rope keys: fit in post_rope to swap downstream.")


class Features(NamedTuple):
    """What is swapped at which heads: fitted features, and subspaces of one's own."""

    heads: list[Head]
    subspaces: Mapping[tuple[str, Head], Subspace]
    fit: Fit
    names: list[str]  # of the features, in order
    joint: str  # what the swap of all together is called

    @classmethod
    def of(
        cls,
        scope: Scope,
        fit: Fit,
        heads: Any,
        features: Sequence[str] | None = None,
        subspaces: Own | None = None,
    ) -> Features:
        """Make the features that `swap` is asked for; refuse those that were not fitted, before the
        model runs.
        """
        own = dict(subspaces or {})
        names = default_features(fit.contrasts) if features is None else list(features)
        every = [*names, *own]
        if not every:
            raise BadInput(
                "there is nothing to swap: give a fit, as decompose gives, or subspaces of your own."
            )
        if len(set(every)) < len(every):
            raise BadInput(
                f"features are different contrasts of {', '.join(fit.contrasts)}, but got {every}."
            )
        if heads is None:
            named = [head for each in own.values() if isinstance(each, Mapping) for head in each]
            heads = list(fit.heads) or list(dict.fromkeys(named))
        chosen = parse_heads(heads)
        known = {(name, head): fit[name, head] for name in names for head in chosen}
        for name, given in own.items():
            known |= {
                (name, head): _subspace(name, given, scope.check(head), scope.d_head)
                for head in chosen
            }
        check_swappable(fit.space)
        check_same_model(fit.provenance.get("asked", {}), scope, "this fit")
        return cls(chosen, known, fit, every, methods.joint_name(every))

    @property
    def has_covariances(self) -> bool:
        """Whether the fit says how queries and keys vary at all these heads."""
        return bool(self.fit.sums) and set(self.heads) <= set(self.fit.heads)

    def conditions(
        self, draws: int, seed: int
    ) -> tuple[dict[Condition, Projector], list[float | None]]:
        """Projectors of every condition, and the condition number of the features at each head."""
        bases = {
            name: [self.subspaces[name, head].basis("key").double() for head in self.heads]
            for name in self.names
        }
        groups = (
            {name: [name] for name in self.names} | {self.joint: self.names}
            if self.has_covariances
            else {}
        )
        known = {name: self.fit.covariances(self.heads, group) for name, group in groups.items()}
        return methods.conditions(bases, known, self._random(draws, seed))

    def methods(self, draws: int, seed: int) -> dict[str | Condition, Method]:
        """The features and the baselines by the number of dimensions."""
        by_size: dict[str | Condition, Method] = {
            Condition(name): methods.leading(
                [self.subspaces[name, head].V.double() for head in self.heads]
            )
            for name in self.names
        }
        if self.has_covariances:
            known = self.fit.covariances(self.heads, self.names)
            by_size |= {kind: make(*known) for kind, make in methods.BASELINES.items()}
        return {**by_size, "random": self._random(draws, seed)}

    def comparisons(
        self,
        projectors: Mapping[Condition, Projector],
        by_size: Mapping[Any, Method],
        sizes: Sequence[int],
    ) -> tuple[list[tuple[Condition, Condition]], dict[Condition, Projector]]:
        """Pairs of conditions compared on the same rows: all features with each alone and with
        directions chosen otherwise, and each feature with the keys' principal components, also at
        every size.
        """
        alone = [Condition(name) for name in self.names]
        every = dict(projectors)
        joint = [
            what
            for what in (Condition(self.joint), Condition(self.joint, "summed"))
            if what in projectors
        ]
        pairs = [(what, other) for what in joint for other in alone if len(alone) > 1]
        others = [
            (what, Condition(what.feature, kind))
            for what in [*joint, *alone]
            for kind in methods.SHOWN
        ]
        pairs += [(what, other) for what, other in others if other in projectors and other != what]
        for k in sizes if "key_pca" in by_size else ():
            for name in self.names:
                pair = Condition(f"{name}, {k}"), Condition(f"key_pca, {k}")
                every |= {pair[0]: by_size[Condition(name)](k), pair[1]: by_size["key_pca"](k)}
                pairs.append(pair)
        return list(dict.fromkeys(pairs)), every

    def _random(self, draws: int, seed: int) -> Method:
        return methods.random(self.heads, next(iter(self.subspaces.values())).d_head, draws, seed)


def _subspace(
    name: str, given: Basis | Mapping[str | Head, Basis], head: Head, d_head: int
) -> Subspace:
    """The user's subspace at one head; a basis serves both query and key side."""
    if isinstance(given, Mapping):
        by_head = {Head.parse(at): each for at, each in given.items()}
        if head not in by_head:
            raise BadInput(
                f"subspace {name!r} is not given at {head}: there is {', '.join(map(str, by_head))}."
            )
        given = by_head[head]
    if isinstance(given, Tensor):
        basis = given.detach().cpu().double()
        rank = given.shape[-1]
        if (
            basis.ndim != 2
            or not bool(basis.isfinite().all())
            or int(torch.linalg.matrix_rank(basis)) < rank
        ):
            raise BadInput(
                f"subspace {name!r} should be a basis of shape ({d_head}, r) with independent columns."
            )
        basis = torch.linalg.qr(basis)[0]
        given = Subspace(basis, basis.new_ones(rank), basis, rank, head, name)
    if given.d_head != d_head or given.head not in (None, head):
        own = f"has {given.d_head} dimensions at {given.head or head}"
        raise BadInput(f"subspace {name!r} {own}, but is swapped at {head}, which has {d_head}.")
    return given


# ---------------------------------------------------------------------- which keys change places


class Pairs(NamedTuple):
    """The keys that change places: a row for each query of each held-out prompt, in the order in
    which batches run.
    """

    batches: list[list[int]]
    examples: list[Example]  # of each row
    unit: Int[Tensor, " n"]
    orig: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    others: (
        tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None
    )  # two keys for the sham swap; None where there are none
    cluster: Int[
        Tensor, " n"
    ]  # rows that ask for the same word, or are of the same unit: resampled together


def draw_pairs(units: Units, batch_size: int = 32, seed: int = 0) -> Pairs:
    """A right key and a wrong one of every row, uniformly drawn once, for every condition and every
    verb.

    A sham swaps two keys whose swap should do nothing: two right ones (a filter list), or two wrong
    ones beside the target.
    """
    if not units or not all(units):
        raise BadInput(
            "there are no examples, or a unit without one: give at least one prompt in each."
        )
    batches = batches_of(units, batch_size)
    members = [(i, m) for batch in batches for i in batch for m in range(len(units[i]))]
    rows = [(i, m) for i, m in members for _ in units[i][m].queries or (0,)]
    examples = [units[i][m] for i, m in rows]
    labels = torch.zeros(
        len(rows), max(len(example.keys) for example in examples), dtype=torch.long
    )
    for row, example in enumerate(examples):
        labels[row, : len(example.keys)] = torch.tensor([key.label(ANSWER) for key in example.keys])
    right = labels > 0
    wrong = labels < 0
    for row in (~(right.any(1) & wrong.any(1))).nonzero()[:1, 0].tolist():
        raise BadInput(
            f"a swap needs keys labelled {ANSWER!r} 1 and -1, and {examples[row].show(80)} has not both."
        )
    unit, member = torch.tensor(rows).unbind(1)

    def draw(what: str, beside: Tensor, allowed: Tensor) -> Tensor:
        return draw_targets(beside, allowed, derived_seed(seed, what), unit, member)

    orig = draw("right", torch.full((len(labels),), -1), right)
    target = draw("wrong", orig, wrong)
    others = None
    free = wrong & (torch.arange(labels.shape[1]) != target[:, None])
    if bool((right.sum(dim=1) > 1).all()):
        others = orig, draw("sham", orig, right)
    elif bool((free.sum(dim=1) > 1).all()):
        first = draw("sham", target, free)
        others = first, draw("sham, the other", first, free)
    if all(ASKED in example.roles for example in examples):
        # a task has a few dozen words and any number of prompts: resampling prompts would trust the
        # words too much
        words = [example.piece(example.roles[ASKED]) for example in examples]
        cluster = torch.tensor([words.index(word) for word in words])
    else:
        cluster = clusters_of(units, unit)
    return Pairs(batches, examples, unit, orig, target, others, cluster)


def capture_rows(
    scope: Scope,
    units: Units,
    fit: Fit,
    heads: Sequence[Head],
    pairs: Pairs,
    run: Any = None,
    more: Any = (None, None),
) -> SwapRows:
    """Attention rows of held-out units, with their pairs (`draw_pairs` of the same units).

    ``run`` runs the stage (by default nothing is kept); of ``more``, what reads the model's answers
    too (`patched_runner`), and what gives the rows of other texts (`truth_runner`).
    """
    capture, (patched, exchanged) = (
        unit_runner(scope, units, heads, space=fit.space, chat=fit.chat),
        more,
    )

    def captured(indices: list[int]) -> dict[str, Any]:
        rows, answers = patched(indices) if patched else (capture(indices).captured, None)
        return {
            "rows": dict(vars(rows.rows())),
            "answers": answers,
            **(exchanged(indices, rows) if exchanged else {}),
        }

    parts = (run or partial(Work().run, last=True))(Stage("rows", pairs.batches, captured))
    rows = AttentionRows.cat([AttentionRows(**part["rows"]) for part in parts])
    answers = torch.cat([part["answers"] for part in parts], dim=1) if patched else None
    truth = {
        (name, reading): torch.cat([part["truth"][f"{reading}/{name}"] for part in parts])
        for reading, _, name in (which.partition("/") for which in parts[0].get("truth", ()))
    }
    frame = (
        AttentionRows.cat([AttentionRows(**part["frame"]) for part in parts])
        if "frame" in parts[0]
        else None
    )
    return SwapRows(
        rows, pairs.orig, pairs.target, pairs.cluster, heads, pairs.others, answers, truth, frame
    )
