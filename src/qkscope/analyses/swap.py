"""The causal test on a model: swap features between the right key and another, and see where the attention goes.

One capture of the held-out prompts serves every condition: the edited rows have a closed form (`qkscope.maths.swap`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkscope.analyses.clouds import make_clouds
from qkscope.analyses.fit import Fit
from qkscope.analyses.pairs import Pairs, Targets, draw_pairs
from qkscope.analyses.prompts import check_same_model, unit_runner, with_notes
from qkscope.attention import AttentionRows
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import Count, Seed, checked_class
from qkscope.maths import methods
from qkscope.maths.bases import Projector
from qkscope.maths.subspace import Subspace
from qkscope.maths.swap import Condition, Method, SwapRows
from qkscope.runs.result import Result, provenance
from qkscope.runs.work import Stage, Work, current_work, verb
from qkscope.tasks.task import Unit, UnitsToTest

SIZES = (1, 2, 4, 8, 12)
Own = Subspace | Tensor
"""A subspace of one's own: as a fit gives them, or a basis (d_head, r) whose span is swapped."""
_PARTS = tuple(field.name for field in fields(AttentionRows))


@checked_class
@dataclass(frozen=True)
class Swaps(Result):
    """Attention before and after, per head and condition; and the keys and queries as points, for the page."""


@verb("swap", beside="fit")
def swap(
    scope: Scope,
    units: UnitsToTest,
    fit: Fit | None = None,
    heads: str | Head | Sequence[str | Head] | None = None,
    *,
    features: Sequence[str] | None = None,
    subspaces: Mapping[str, Own | Mapping[str | Head, Own]] | None = None,
    targets: Targets | None = None,
    space: Space = "post_rope",
    chat: bool = False,
    draws: Count = 20,
    sizes: Sequence[Count] = (),
    clouds: bool = False,
    downstream: bool = False,
    batch_size: Count = 32,
    seed: Seed = 0,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Swaps:
    """Swap features between the right key and another on held-out prompts, beside the baselines.

    Each feature is swapped alone, all together, obliquely, and as many dimensions that were chosen otherwise.

    Parameters
    ----------
    scope : the model.
    units : from ``task.test(n)``: words that nothing was fitted on.
    fit : features, as `decompose` gives them; not needed beside ``subspaces``.
    heads : which heads; by default all of the fit, or those that ``subspaces`` name.
    features : contrasts of the fit to swap; by default ``order`` and ``lexical`` of binding, the categories of a filter
        task, or all that were fitted. An empty list takes ``subspaces`` alone.
    subspaces : subspaces of your own by name, each swapped as a feature is, with the same controls beside it: a
        `Subspace`, or a basis of shape (d_head, r) of any independent columns, for all heads or by head. Key PCA and
        ``Cov_q Cov_k`` are made from the covariances of the fit; without one there are no such rows.
    targets : which key the right one is swapped with. By default a wrong key is drawn for each row. A function is given
        each `Example` and returns the place of the key in ``example.keys``, from 0 on; a sequence holds that place for
        each prompt, in the order of ``units`` (and of the prompts within a unit). Keys that are right are refused.
    space, chat : how the prompts run where there is no fit, which says it otherwise.
    draws : random subspaces per size.
    sizes : also a curve over the number of dimensions swapped (``tables["curve"]``), for each feature and baseline.
        ``tables["paired"]`` holds differences of two conditions' shifts on the same rows, with their intervals.
    clouds : also what a page draws: keys and queries as points (``tables["clouds"]``, arrays ``cloud/NAME/…``) and,
        where no sizes are named, the curve of 1, 2, 4, 8 and 12 dimensions.
    downstream : also patch the swap into the model and read its answer, as `swap_downstream` does.
    batch_size : prompts that run together.
    seed : of the keys that are drawn, of the random subspaces and of the intervals.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is written by default. The
        fit's own folder keeps its files, and its page tells the swaps too.
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
    chosen = Features.of(scope, fit, heads, features, subspaces, space=space, chat=chat)
    sizes = [k for k in SIZES if k <= scope.d_head] if clouds and not sizes else sizes
    if any(k > scope.d_head for k in sizes):
        raise BadInput(f"a curve of {max(sizes)} dimensions does not fit into a head of {scope.d_head}.")
    check_rows(scope, chosen.fit)
    pairs = draw_pairs(units, batch_size, seed, targets)
    patched = None
    if downstream:
        if fit is None or subspaces:
            raise BadInput("the answer is read with the features of a fit swapped: give one, and no subspaces.")
        from qkscope.analyses.downstream import swap_downstream  # which stands on this file

        run: Any = {"draws": draws, "batch_size": batch_size, "seed": seed, "out": out, "progress": progress}
        patched = swap_downstream(scope, units, fit, heads, features=features, **run)
    work = current_work().begin(
        scope,
        list(units),
        verb="swap",
        heads=[str(h) for h in chosen.heads],
        space=chosen.fit.space,
        chat=chosen.fit.chat,
        batch_size=batch_size,
    )
    rows = capture_rows(scope, units, chosen.fit, chosen.heads, pairs, progress, work)
    projectors, numbers = chosen.conditions(draws, seed)
    if rows.others is not None:
        projectors[Condition(chosen.joint, "sham")] = projectors[Condition(chosen.joint)]
    number = {str(head): x for head, x in zip(chosen.heads, numbers, strict=True)}
    table = [
        {**row, "condition_number": number[row["head"]] if row["kind"] == "oblique" else None}
        for row in rows.table(projectors, seed=seed)
        if row["kind"] != "oblique" or number[row["head"]] is not None
    ]
    by_size = chosen.methods(draws, seed) if sizes else {}
    pairs_of, everything = chosen.pairs(projectors, by_size, sizes)
    tables: dict[str, list[dict[str, Any]]] = {"swap": table, "paired": rows.paired(pairs_of, everything, seed=seed)}
    if sizes:
        tables["curve"] = rows.curve(by_size, sizes, against="random", seed=seed)
    answer = _answer(table, chosen) + pairs.one_cluster()
    if patched is not None:
        tables |= {name: patched.table(name) for name in patched.tables}
        answer += f" {patched.answer}"
    about = chosen.fit.provenance.get("asked", {})
    arrays: dict[str, Tensor] = {}
    if clouds:
        shown = {(name, head): chosen.subspaces[name, head] for head in chosen.heads for name in chosen.names}
        arrays, tables["clouds"] = make_clouds(rows, pairs.examples, shown, chosen.fit.words)
    return Swaps(
        experiment="swap",
        answer=with_notes(answer, about),
        tables=tables,
        arrays=arrays,
        model=scope.name,
        seed=seed,
        provenance=provenance(**{**about, "test_units": len(units), "draws": draws}),
    )


def _answer(table: list[dict[str, Any]], features: Features) -> str:
    rows = {(row["head"], row["feature"], row["kind"]): row for row in table}
    row, random = (rows[str(features.heads[0]), features.joint, kind] for kind in ("feature", "random"))
    size = "1 dimension" if row["rank"] == 1 else f"{row['rank']} dimensions"
    return (
        f"Swapping {features.joint} at {row['head']} ({size}) takes its attention on the right key from "
        f"{row['orig_before']:.2f} to {row['orig_after']:.2f} and on the target from {row['target_before']:.2f} to "
        f"{row['target_after']:.2f}; random subspaces of the same size leave {random['orig_after']:.2f}."
        + ("" if features.has_covariances else " Key PCA and Cov_q Cov_k need a fit of these heads, and are left out.")
    )


# ---------------------------------------------------------------------- what is swapped


def default_features(contrasts: Sequence[str]) -> list[str]:
    """``order`` and ``lexical`` where both are there, else every contrast but the pooled one."""
    if {"order", "lexical"} <= set(contrasts):
        return ["order", "lexical"]
    return [name for name in contrasts if name != "category"] or list(contrasts)


@dataclass(frozen=True)
class Features:
    """What is swapped at which heads: fitted features, and subspaces of one's own."""

    heads: list[Head]
    subspaces: Mapping[tuple[str, Head], Subspace]
    fit: Fit  # an empty one says in which space prompts run

    @classmethod
    def of(
        cls,
        scope: Scope,
        fit: Fit | None,
        heads: str | Head | Sequence[str | Head] | None,
        features: Sequence[str] | None = None,
        subspaces: Mapping[str, Own | Mapping[str | Head, Own]] | None = None,
        *,
        space: Space = "post_rope",
        chat: bool = False,
    ) -> Features:
        """As `swap` is asked for them; what was not fitted is refused before the model runs."""
        own = dict(subspaces or {})
        if fit is None and not own:
            raise BadInput("there is nothing to swap: give a fit, as decompose gives, or subspaces of your own.")
        fit = Fit("swap", {}, space=space, chat=chat) if fit is None else fit
        names = list(features) if features is not None else default_features(fit.contrasts)
        if both := [name for name in own if name in names]:
            raise BadInput(f"subspace {both[0]!r} is called as a fitted feature is: give it another name.")
        if (not names and not own) or len(set(names)) < len(names):
            raise BadInput(f"features are different contrasts of {', '.join(fit.contrasts)}, but got {names}.")
        if heads is None:
            named = [head for each in own.values() if isinstance(each, Mapping) for head in each]
            heads = list(fit.heads) or list(dict.fromkeys(named))
        chosen = parse_heads(heads)
        found = {(name, head): fit[name, head] for name in names for head in chosen}
        for name, given in own.items():
            found |= {(name, head): _own_subspace(name, given, scope.check(head), scope.d_head) for head in chosen}
        return cls(chosen, found, fit)

    @property
    def names(self) -> list[str]:
        """The features in order."""
        return list(dict.fromkeys(name for name, _ in self.subspaces))

    @property
    def joint(self) -> str:
        """What the swap of all together is called."""
        return methods.joint_name(self.names)

    @property
    def has_covariances(self) -> bool:
        """Whether the fit says how queries and keys vary at all these heads."""
        return bool(self.fit.sums) and set(self.heads) <= set(self.fit.heads)

    def conditions(self, draws: int, seed: int) -> tuple[dict[Condition, Projector], list[float | None]]:
        """Projectors of every condition, and the condition number of the features at each head."""
        bases = {name: [self.subspaces[name, head].basis("key").double() for head in self.heads] for name in self.names}
        groups = {name: [name] for name in self.names} | {self.joint: self.names}
        known = {}
        if self.has_covariances:
            known = {name: self.fit.covariances(self.heads, group) for name, group in groups.items()}
        return methods.conditions(bases, known, self._random(draws, seed))

    def methods(self, draws: int, seed: int) -> dict[str | Condition, Method]:
        """The features and the baselines by the number of dimensions."""
        found: dict[str | Condition, Method] = {
            Condition(name): methods.leading([self.subspaces[name, head].V.double() for head in self.heads])
            for name in self.names
        }
        if self.has_covariances:
            known = self.fit.covariances(self.heads, self.names)
            found |= {kind: make(*known) for kind, make in methods.BASELINES.items()}
        return {**found, "random": self._random(draws, seed)}

    def pairs(
        self,
        projectors: Mapping[Condition, Projector],
        by_size: Mapping[str | Condition, Method],
        sizes: Sequence[int],
    ) -> tuple[list[tuple[Condition, Condition]], dict[Condition, Projector]]:
        """What is compared on the same rows: all features with each alone and with what chose its directions
        otherwise, and each feature with the keys' principal components, also at every size.
        """
        joint = [one for one in (Condition(self.joint), Condition(self.joint, "summed")) if one in projectors]
        pairs = [(one, Condition(name)) for one in joint for name in self.names if len(self.names) > 1]
        for one in [*joint, *(Condition(name) for name in self.names)]:
            others = [Condition(one.feature, kind) for kind in methods.SHOWN]
            pairs += [(one, other) for other in others if other in projectors and other != one]
        found = dict(projectors)
        for k in sizes if "key_pca" in by_size else ():
            for name in self.names:
                pair = Condition(f"{name}, {k}"), Condition(f"key_pca, {k}")
                found |= {pair[0]: by_size[Condition(name)](k), pair[1]: by_size["key_pca"](k)}
                pairs.append(pair)
        return list(dict.fromkeys(pairs)), found

    def _random(self, draws: int, seed: int) -> Method:
        return methods.random(self.heads, next(iter(self.subspaces.values())).d_head, draws, seed)


def _own_subspace(name: str, given: Own | Mapping[str | Head, Own], head: Head, d_head: int) -> Subspace:
    """One's own subspace at one head; of a basis, both sides are its span."""
    if isinstance(given, Mapping):
        own = {Head.parse(at): each for at, each in given.items()}
        if head not in own:
            raise BadInput(f"subspace {name!r} is not given at {head}: there is {', '.join(map(str, own))}.")
        given = own[head]
    if isinstance(given, Subspace):
        if given.head is not None and given.head != head:
            raise BadInput(f"subspace {name!r} belongs to {given.head}, not to {head}: name subspaces of one head.")
        found = given
    else:
        shape = tuple(given.shape)
        given = given.detach().cpu().double()
        if len(shape) != 2 or not bool(given.isfinite().all()) or int(torch.linalg.matrix_rank(given)) < shape[1]:
            raise BadInput(
                f"subspace {name!r} should be a basis of shape ({d_head}, r) with independent columns, but has {shape}."
            )
        basis = torch.linalg.qr(given)[0]
        found = Subspace(basis, basis.new_ones(shape[1]), basis, shape[1], head, name)
    if found.d_head != d_head:
        raise BadInput(f"subspace {name!r} has {found.d_head} dimensions at {head}, where the head has {d_head}.")
    return found


# ---------------------------------------------------------------------- through the model


def check_swappable(space: str, downstream: bool = False) -> None:
    """Refuse a space in which attention, and so a swap, cannot be had."""
    if space == "pre_rope":
        raise BadInput("pre_rope vectors do not give the model's attention: fit in post_rope or query_frame for this.")
    if downstream and space != "post_rope":
        raise BadInput("a patched run writes post_rope keys: fit in post_rope to swap downstream.")


def check_rows(scope: Scope, fit: Fit) -> None:
    """Refuse what cannot be swapped before the model runs."""
    check_swappable(fit.space)
    check_same_model(fit.provenance.get("asked", {}), scope, "this fit")


def capture_rows(
    scope: Scope,
    units: Sequence[Unit],
    fit: Fit,
    heads: Sequence[Head],
    pairs: Pairs,
    progress: bool | None = None,
    work: Work | None = None,
) -> SwapRows:
    """Attention rows of held-out units, with their pairs (`draw_pairs` of the same units)."""
    check_rows(scope, fit)
    capture = unit_runner(scope, units, heads, space=fit.space, chat=fit.chat)

    def run(indices: list[int]) -> dict[str, Any]:
        rows = capture(indices).captured.rows()
        return {name: getattr(rows, name) for name in _PARTS}

    (parts,) = (work or Work()).run([Stage("rows", pairs.batches, run)], progress, last=True)
    rows = AttentionRows.cat([AttentionRows(**{name: part[name] for name in _PARTS}) for part in parts])
    return SwapRows(rows, pairs.orig, pairs.target, pairs.cluster, heads, pairs.others)
