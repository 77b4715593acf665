"""The causal test on a model: swap features between the right key and another, and see where the attention goes.

One capture of the held-out prompts serves every condition: the edited rows have a closed form (`qkscope.maths.swap`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from qkscope.analyses.about import check_same_model, with_notes
from qkscope.analyses.clouds import make_clouds
from qkscope.analyses.fit import Fit
from qkscope.analyses.prompts import batches_of, clusters_of, unit_runner
from qkscope.attention import AttentionRows
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput, check_kind
from qkscope.examples import Example
from qkscope.heads import Head, parse_heads
from qkscope.kinds import checked_call, checked_class
from qkscope.maths import methods
from qkscope.maths.bases import Projector
from qkscope.maths.subspace import Subspace
from qkscope.maths.swap import Condition, Method, SwapRows, draw_targets
from qkscope.runs.job import Job
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.tasks.task import ANSWER, ASKED, Unit

SIZES = (1, 2, 4, 8, 12)
Own = Subspace | Tensor
"""A subspace of one's own: as a fit gives them, or a basis (d_head, r) whose span is swapped."""
Targets = Callable[[Example], int] | Sequence[int]
_PARTS = tuple(field.name for field in fields(AttentionRows))


@checked_class
@dataclass(frozen=True)
class Swaps(Result):
    """Attention before and after, per head and condition; and the keys and queries as points, for the page."""

    def table(self) -> list[dict[str, Any]]:
        """One row per head and condition."""
        return [dict(row) for row in self.tables["swap"]]


@checked_call
def swap(
    scope: Scope,
    units: Sequence[Unit],
    fit: Fit | None = None,
    heads: str | Head | Sequence[str | Head] | None = None,
    *,
    features: Sequence[str] | None = None,
    subspaces: Mapping[str, Own | Mapping[str | Head, Own]] | None = None,
    targets: Targets | None = None,
    space: Space = "post_rope",
    chat: bool = False,
    draws: int = 20,
    sizes: Sequence[int] = (),
    clouds: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool | None = None,
    job: Job | None = None,
) -> Swaps:
    """Swap each feature alone, all together, obliquely, and the baselines of the same size, on held-out units.

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
    clouds : also keys and queries as points, for a page (``tables["clouds"]`` and arrays ``cloud/NAME/…``).
    batch_size : prompts that run together.
    seed : of the keys that are drawn, of the random subspaces and of the intervals.
    progress : whether to show a progress bar; by default where one is looking.
    job : where finished pieces are kept, so that the same call goes on after it was stopped; nowhere by default.

    Examples
    --------
    >>> from qkscope import Scope, swap, tasks
    >>> scope, task = Scope.load("nano:mixed"), tasks.binding(5, form="sentence")
    >>> mine = torch.eye(scope.d_head)[:, :2]
    >>> swaps = swap(scope, task.test(4), heads="L1H0", subspaces={"mine": mine}, progress=False)
    >>> [(row["feature"], row["kind"], row["rank"]) for row in swaps.table()]
    [('mine', 'feature', 2), ('mine', 'random', 2), ('mine', 'sham', 2)]
    """
    start = time.perf_counter()
    chosen = Features.of(scope, fit, heads, features, subspaces, space=space, chat=chat)
    if draws < 1:
        raise BadInput(f"draws is the number of random subspaces, at least 1, but got {draws}.")
    for k in sizes:
        if not 1 <= k <= scope.d_head:
            raise BadInput(f"a curve of {k} dimensions does not fit into a head of {scope.d_head}.")
    check_rows(scope, chosen.fit)
    pairs = draw_pairs(units, batch_size, seed, targets)
    job = (job or Job()).begin(
        scope, list(units), verb="swap", heads=[str(h) for h in chosen.heads], space=chosen.fit.space,
        chat=chosen.fit.chat, batch_size=batch_size,
    )  # fmt: skip
    rows = capture_rows(scope, units, chosen.fit, chosen.heads, pairs, progress, job)
    projectors, numbers = chosen.conditions(draws, seed)
    if rows.others is not None:
        projectors[Condition(chosen.joint, "sham")] = projectors[Condition(chosen.joint)]
    number = {str(head): x for head, x in zip(chosen.heads, numbers, strict=True)}
    table = [
        {**row, "condition_number": number[row["head"]] if row["kind"] == "oblique" else None}
        for row in rows.table(projectors, seed=seed)
        if row["kind"] != "oblique" or number[row["head"]] is not None
    ]
    tables: dict[str, list[dict[str, Any]]] = {"swap": table}
    if sizes:
        tables["curve"] = rows.curve(chosen.methods(draws, seed), sizes, against="random", seed=seed)
    about = chosen.fit.provenance.get("asked", {})
    arrays: dict[str, Tensor] = {}
    if clouds:
        shown = {(name, head): chosen.subspaces[name, head] for head in chosen.heads for name in chosen.names}
        arrays, tables["clouds"] = make_clouds(rows, pairs.examples, shown, chosen.fit.words)
    return Swaps(
        experiment="swap",
        answer=with_notes(_answer(table, chosen) + pairs.one_cluster(), about),
        tables=tables,
        arrays=arrays,
        model=scope.name,
        seed=seed,
        seconds=time.perf_counter() - start,
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
        every = [*names, *own]
        if not every or len(set(every)) < len(every):
            raise BadInput(f"features are different contrasts of {', '.join(fit.contrasts)}, but got {every}.")
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
        known = (
            {name: fitted_covariances(self.fit, self.heads, group) for name, group in groups.items()}
            if self.has_covariances
            else {}
        )
        return methods.conditions(bases, known, self._random(draws, seed))

    def methods(self, draws: int, seed: int) -> dict[str | Condition, Method]:
        """The features and the baselines by the number of dimensions."""
        found: dict[str | Condition, Method] = {
            Condition(name): methods.leading([self.subspaces[name, head].V.double() for head in self.heads])
            for name in self.names
        }
        if self.has_covariances:
            cov_q, cov_k = fitted_covariances(self.fit, self.heads, self.names)
            found |= {"key_pca": methods.key_pca(cov_k), "cov_qk": methods.cov_qk(cov_q, cov_k)}
        return {**found, "random": self._random(draws, seed)}

    def _random(self, draws: int, seed: int) -> Method:
        return methods.random(len(self.heads), next(iter(self.subspaces.values())).d_head, draws, seed)


def fitted_covariances(fit: Fit, heads: Sequence[Head], names: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Covariances of the queries and keys that some contrasts were fitted on; of all that were, for one's own."""
    chosen = list(fit.sums) if names is None or not set(names) <= set(fit.sums) else list(names)
    first, *others = (fit.sums[name] for name in chosen)
    index = [fit.heads.index(head) for head in heads]
    cov_q = first.cov_q.merge(*(s.cov_q for s in others)).matrix()
    cov_k = first.cov_k.merge(*(s.cov_k for s in others)).matrix()
    return cov_q[index].cpu(), cov_k[index].cpu()


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
        if len(shape) != 2 or not shape[1] or int(torch.linalg.matrix_rank(given.detach().double())) < shape[1]:
            raise BadInput(
                f"subspace {name!r} should be a basis of shape ({d_head}, r) with independent columns, but has {shape}."
            )
        basis = torch.linalg.qr(given.detach().cpu().double())[0]
        found = Subspace(basis, basis.new_ones(shape[1]), basis, shape[1], head, name)
    if found.d_head != d_head:
        raise BadInput(f"subspace {name!r} has {found.d_head} dimensions at {head}, where the head has {d_head}.")
    return found


# ---------------------------------------------------------------------- which keys change places


@dataclass(frozen=True)
class Pairs:
    """The keys that change places: a row for each query of each held-out prompt, in the order in which batches run."""

    batches: list[list[int]]
    examples: list[Example]  # of each row
    unit: list[int]
    orig: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    others: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None  # two keys for the sham swap; None where there are none
    cluster: Int[Tensor, " n"]  # rows that ask for the same word, or are of the same unit: resampled together

    def rows_of(self, units: Sequence[int]) -> Int[Tensor, " m"]:
        """The rows of some units."""
        known: dict[int, list[int]] = {}
        for row, unit in enumerate(self.unit):
            known.setdefault(unit, []).append(row)
        return torch.tensor([row for unit in units for row in known[unit]])

    def one_cluster(self) -> str:
        """What to say where there is nothing to resample."""
        alone = len(self.cluster.unique()) < 2
        return " All its prompts are one or ask for one word: there are no intervals." if alone else ""


def draw_pairs(units: Sequence[Unit], batch_size: int = 32, seed: int = 0, targets: Targets | None = None) -> Pairs:
    """A right key and a wrong one of every row, uniformly drawn once, for every condition and every verb."""
    check_answers(units)
    batches = batches_of(units, batch_size)
    listed = [
        (i, m)
        for batch in batches
        for i in batch
        for m, example in enumerate(units[i])
        for _ in example.queries or (0,)
    ]
    examples = [units[i][m] for i, m in listed]
    labels = torch.zeros(len(listed), max(len(example.keys) for example in examples), dtype=torch.long)
    for row, example in enumerate(examples):
        labels[row, : len(example.keys)] = torch.tensor([key.label(ANSWER) for key in example.keys])
    orig = draw_targets(torch.full((len(labels),), -1), labels > 0, seed)
    target = draw_targets(orig, labels < 0, seed + 1) if targets is None else _given_targets(units, listed, targets)
    others = _sham(labels, orig, target, seed)
    return Pairs(batches, examples, [i for i, _ in listed], orig, target, others, _clusters(units, listed))


def _given_targets(units: Sequence[Unit], listed: Sequence[tuple[int, int]], targets: Targets) -> Int[Tensor, " n"]:
    """The keys that were named, checked."""
    prompts = [(i, m) for i, unit in enumerate(units) for m in range(len(unit))]
    named = [targets(units[i][m]) for i, m in prompts] if callable(targets) else list(targets)
    if len(named) != len(prompts):
        raise BadInput(f"targets should name a key of each of {len(prompts)} prompts, but there are {len(named)}.")
    for (i, m), key in zip(prompts, named, strict=True):
        keys = units[i][m].keys
        if not isinstance(key, int) or not 0 <= key < len(keys):
            raise BadInput(f"a target is the place of a key, from 0 to {len(keys) - 1}, but got {key!r}.")
        if keys[key].label(ANSWER) > 0:
            raise BadInput(f"a target is not a right key, but key {key} is one in {units[i][m].show(80)}.")
    of = dict(zip(prompts, named, strict=True))
    return torch.tensor([of[row] for row in listed])


def _sham(
    labels: Int[Tensor, "n k"], orig: Int[Tensor, " n"], target: Int[Tensor, " n"], seed: int
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None:
    """Two keys whose swap should do nothing: two right ones (a filter list), or two wrong ones beside the target."""
    right = labels > 0
    if bool((right.sum(dim=1) > 1).all()):
        return orig, draw_targets(orig, right, seed + 2)
    free = (labels < 0) & (torch.arange(labels.shape[1]) != target[:, None])
    if not bool((free.sum(dim=1) > 1).all()):
        return None
    one = draw_targets(target, free, seed + 2)
    return one, draw_targets(one, free, seed + 3)


def _clusters(units: Sequence[Unit], listed: Sequence[tuple[int, int]]) -> Int[Tensor, " n"]:
    """A number for each row, the same for rows that ask for the same word; for rows of one unit where none is marked.

    A task has a few dozen words and any number of prompts: resampling prompts alone would trust the words too much.
    """
    examples = [units[i][m] for i, m in listed]
    if all(ASKED in example.roles for example in examples):
        numbers: dict[str, int] = {}
        asked = [example.piece(example.roles[ASKED]) for example in examples]
        return torch.tensor([numbers.setdefault(word, len(numbers)) for word in asked])
    return clusters_of(units, torch.tensor([i for i, _ in listed]))


def check_answers(units: Sequence[Unit]) -> None:
    """Every example to be swapped needs a right key and a wrong one."""
    check_kind(units, Sequence, "what is swapped are held-out units, as task.test(512) gives")
    if not units:
        raise BadInput("there are no examples: give at least one.")
    for unit in units:
        if not unit:
            raise BadInput("a unit holds no example: give one prompt or more in each.")
        for example in unit:
            if not {1, -1} <= {key.label(ANSWER) for key in example.keys}:
                raise BadInput(
                    f"a swap needs keys labelled {ANSWER!r} 1 and -1 in every example, but this one has not both: "
                    f"{example.show(80)}."
                )


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
    job: Job | None = None,
    name: str = "rows",
) -> SwapRows:
    """Attention rows of held-out units, with their pairs (`draw_pairs` of the same units)."""
    check_rows(scope, fit)
    capture = unit_runner(scope, units, heads, space=fit.space, chat=fit.chat)

    def run(indices: list[int]) -> dict[str, Any]:
        rows = capture(indices).captured.rows()
        return {name: getattr(rows, name) for name in _PARTS}

    parts = (job or Job()).stream(name, pairs.batches, run, progress)
    rows = AttentionRows.cat([AttentionRows(**{name: part[name] for name in _PARTS}) for part in parts])
    return SwapRows(rows, pairs.orig, pairs.target, pairs.cluster, heads, pairs.others)
