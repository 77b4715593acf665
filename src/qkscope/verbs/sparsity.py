"""How few singular vectors carry a head's relative attention, over prompts and over training.

Per edge (a head that looks from one role to another): sparsity ``(mean |c|)² / mean c²`` of the
terms, the same under independently rotated singular vectors (``rotated``: spectrum and rank stay)
and along a rotated head space (``rotated_shared``: every logit stays), the number of terms that
reach r (``count``), that reach 99% of it (``count_tol``), and the numbers that random terms of the
same sum and norm would need for either (``count_null``, ``count_tol_null``). ``low`` and ``high``
are the 95% interval, by prompt, of ``difference = sparsity − rotated``.

Over training the same edges and prompts are measured at every checkpoint, each a piece of the work:
a sweep that was stopped goes on. Heads of no published circuit are chosen on the last checkpoint,
on prompts used for nothing else. Weights are hashed, and two revisions with the same weights are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.checking import Count, Natural, Seed, checked_class
from qkscope.findings.published import (
    CIRCUITS,
    Duty,
    Edge,
    columns_of_roles,
    find_circuit,
    outside,
    parse_edges,
    rows_from,
)
from qkscope.findings.singular_rows import RelativeRows, relative_rows, singular_basis
from qkscope.findings.task_batches import batches_of, made_from, made_with, units_hash
from qkscope.heads import Head
from qkscope.model.files import folder_hash, local_hash, weights_part
from qkscope.model.inputs import answer_tokens
from qkscope.model.load import check_revisions, revisions_of
from qkscope.results.progress import doing
from qkscope.results.result import Result, provenance
from qkscope.results.work import current_work, stream, verb
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.sums.singular import rotated_terms
from qkscope.texts.task import Task, Unit

_COPYING = ("binding", "induction", "ioi")  # tasks whose answer is the word at the right key
_OF_VECTORS = ("terms_first", "terms_rotated", "terms_mean", "sigma")
_MEANS = (
    "sparsity",
    "rotated",
    "rotated_shared",
    "count",
    "count_tol",
    "count_null",
    "count_tol_null",
    "attention",
)


@checked_class
@dataclass(frozen=True)
class Sparsity(Result):
    """Sparsity of every edge, a row each, with every prompt's values in ``arrays``.

    Arrays are ``[edges, prompts]``, NaN where there is no value. Of several checkpoints, those of
    the last stand under their names, those before it under ``CHECKPOINT/NAME``.
    """

    edges: tuple[Edge, ...] = field(default=())


# ---------------------------------------------------------------------- one checkpoint


@verb("sparsity")
def sparsity(
    scope: Scope,
    task: Task,
    heads: str | Head | Sequence[str | Head | Edge] | None = None,
    n: int = 128,
    *,
    controls: Natural = 12,
    draws: Count = 20,
    batch_size: Count = 32,
    seed: Seed = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> Sparsity:
    """Measure the sparsity of relative attention at one checkpoint, on the task's test prompts.

    Parameters
    ----------
    scope : the model.
    task : whose roles are looked at, and whose test prompts are measured.
    heads : edges like ``L9H9:END>IO``, heads (which then look from the query to the answer), or a
        circuit's name. By default the model's published circuit, or the heads that do the task's
        duties most (`find_circuit`).
    n : prompts.
    controls : heads outside the circuit for each way to look.
    draws, seed : rotations of each null, and the seed of all draws.
    batch_size : prompts run together.
    out : folder for the result and its page; nothing is written by default.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope, task = qk.Scope.load("nano:mixed"), qk.tasks.ioi()
    >>> quick = {"controls": 1, "draws": 2, "progress": False}
    >>> qk.sparsity(scope, task, "L1H3:END>IO", 4, **quick).table()[0]["n"]
    4
    """
    if heads is None:
        edges = CIRCUITS.get((scope.name, task.name)) or []
    else:
        edges = parse_edges(heads, task)
    if not edges:
        edges = find_circuit(scope, task, batch_size=batch_size)
    for edge in edges:
        scope.check(edge.head)
    edges = [*edges, *outside(scope, edges, controls, seed)]
    measurement = EdgeMeasurement(scope, task, edges, n, draws, seed)
    arrays = measurement.over_prompts(batch_size, progress)
    rows = []
    for number, edge in enumerate(edges):
        rows.append(_row(scope.name, edge, number, arrays, seed))
    about = made_from(scope, task, "query_frame")
    about |= {"n": n, "draws": draws, "edges": list(map(str, edges))}
    return Sparsity(
        f"sparsity/{task.name}",
        {"sparsity": rows},
        edges=tuple(edges),
        answer=_answer(rows),
        arrays=arrays,
        seed=seed,
        **made_with(scope, **about),
    )


def _row(
    model: str, edge: Edge, number: int, arrays: Mapping[str, Tensor], seed: int
) -> dict[str, Any]:
    """Means over prompts of one edge, with the interval of the difference."""
    values = {}
    for name, array in arrays.items():
        if name not in _OF_VECTORS:
            values[name] = array[number]
    means = {name: float(value.nanmean()) for name, value in values.items()}
    is_positive = values["relative"] > 0
    is_measured = values["sparsity"].isfinite()
    gap, low, high = group_difference(arrays, [number], seed=seed)
    return {
        "model": model,
        "head": str(edge.head),
        "step": None,
        "role": edge.duty.role,
        "from": edge.duty.query,
        "to": edge.duty.key,
        "circuit": edge.circuit,
        **means,
        "difference": gap,
        "low": low,
        "high": high,
        "positive": float(is_positive.double().mean()),
        "n": int(is_measured.sum()),
    }


class EdgeMeasurement:
    """Relative attention of some edges over their singular bases, prompt by prompt.

    Attributes
    ----------
    values : of every edge and prompt, by name; NaN where the key is not seen.
    terms : of every edge, prompt and singular vector.
    turned : the first prompt's terms under rotated singular vectors.
    """

    def __init__(
        self, scope: Scope, task: Task, edges: Sequence[Edge], n: int, draws: int, seed: int
    ) -> None:
        self.scope = scope
        self.task = task
        self.edges = edges
        self.draws = draws
        self.seed = seed
        self.units: list[Unit] = [unit[:1] for unit in task.test(n)]
        self.heads = list(dict.fromkeys(edge.head for edge in edges))
        self.queries = list(dict.fromkeys(edge.duty.query for edge in edges))
        self.keys = list(dict.fromkeys(edge.duty.key for edge in edges))
        self.basis = singular_basis(scope, self.heads)
        self.values: dict[str, Tensor] = {}
        components = self.basis.S.shape[-1]
        shape = (len(edges), len(self.units), components)
        self.terms = torch.full(shape, torch.nan, dtype=torch.float64)
        self.turned = torch.full_like(self.terms[:, 0], torch.nan)

    def over_prompts(self, batch_size: int, progress: bool | None) -> dict[str, Tensor]:
        """Measure every prompt; refuse an edge of the circuit that no prompt shows."""
        for _ in stream(batches_of(self.units, batch_size), self.run, progress):
            pass  # kept in `values`, `terms` and `turned`
        is_whole = self.terms.isfinite().all(-1)
        seen = is_whole.any(1).tolist()
        for edge, is_seen in zip(self.edges, seen, strict=True):
            if edge.circuit and not is_seen:
                places = f"{edge.duty.query} see {edge.duty.key}"
                unseen = f"in no prompt does {places} and one token more"
                raise BadInput(
                    f"{edge} cannot be measured: {unseen};"
                    " heads look back, so name the later place first."
                )
        index = self.basis.index([edge.head for edge in self.edges])
        of_first = self.terms[:, 0]
        means = self.terms.nanmean(1).nan_to_num(0)
        singular_values = self.basis.S[index].double()
        of_vectors = (of_first, self.turned, means, singular_values)
        return self.values | dict(zip(_OF_VECTORS, of_vectors, strict=True))

    def run(self, indices: list[int]) -> None:
        """Measure one batch of prompts."""
        examples = [self.units[i][0] for i in indices]
        roles = [*self.queries, *self.keys]
        inputs, columns = columns_of_roles(self.scope, examples, roles, self.task.chat)
        places = rows_from(inputs, columns[:, : len(self.queries)])
        captured = self.scope.capture_inputs(
            inputs, places=places, heads=self.heads, space="query_frame"
        )
        for q, query in enumerate(self.queries):
            numbers = []
            slots = []
            heads = []
            for number, edge in enumerate(self.edges):
                if edge.duty.query == query:
                    numbers.append(number)
                    slots.append(self._column(edge))
                    heads.append(self.heads.index(edge.head))
            rows = list(range(q, len(places.row), len(self.queries)))
            attended = columns[:, slots]
            split = relative_rows(captured, attended, self.basis, rows, heads)
            self._keep(split, numbers, indices)

    def _column(self, edge: Edge) -> int:
        """The column of `columns_of_roles` in which an edge's key stands."""
        return len(self.queries) + self.keys.index(edge.duty.key)

    def _keep(self, split: RelativeRows, edges: Sequence[int], prompts: list[int]) -> None:
        """Keep the terms and values of some edges on some prompts."""
        row = torch.tensor(edges)[:, None]
        where = (row, torch.tensor(prompts))
        self.terms[where] = split.terms.transpose(0, 1)
        for name, value in split.values(self.draws, self.seed, prompts).items():
            if name not in self.values:
                of_prompts = self.terms[..., 0]
                self.values[name] = torch.full_like(of_prompts, torch.nan)
            self.values[name][where] = value.T
        if 0 in prompts:
            at = prompts.index(0)
            query = split.query[at]
            key = split.key[at]
            (turned,) = rotated_terms(query, split.s, key, 1, self.seed)
            self.turned[edges] = turned


def group_difference(
    arrays: Mapping[str, Tensor],
    chosen: Sequence[int],
    baseline: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Mean of ``sparsity − rotated`` over some edges, with its interval by prompt.

    That of a ``baseline`` is taken off. Prompts are the same ones at every checkpoint, so the
    interval of the change is a paired one.
    """
    index = list(chosen)
    of_edges = arrays["sparsity"] - arrays["rotated"]
    gap = of_edges[index].nanmean(0)
    if baseline is not None:
        baseline_gap = baseline["sparsity"] - baseline["rotated"]
        gap = gap - baseline_gap[index].nanmean(0)
    known = gap[gap.isfinite()]
    if not len(known):
        return float("nan"), float("nan"), float("nan")
    prompts = torch.arange(len(known))
    low, high = clustered_bootstrap(known, prompts, seed=seed)
    return float(known.mean()), float(low), float(high)


def _answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """Compare the circuit with the rotated basis and with heads outside, in a sentence."""
    inside = [row for row in rows if row["circuit"] is True]
    control = [row for row in rows if row["circuit"] is False]

    def mean(of: Sequence[Mapping[str, Any]], name: str) -> float:
        values = [row[name] for row in of]
        return float(torch.tensor(values).nanmean())

    edges = len(inside)
    heads = len({row["head"] for row in inside})
    below = sum(row["high"] < 0 for row in inside)
    circuit = f"{edges} edges of the circuit ({heads} heads)"
    measured = f"{mean(inside, 'sparsity'):.2f} over {circuit}"
    rotated = f"{mean(inside, 'rotated'):.2f} under rotated singular vectors"
    compared = f"{below} of {edges} edges are below theirs, by their 95% intervals"
    needed = f"{mean(inside, 'count_tol'):.1f} vectors reach 99% of the relative logit"
    null = f"where random terms need {mean(inside, 'count_tol_null'):.1f}"
    text = f"Sparsity is {measured}, {rotated} ({compared}); {needed}, {null}"
    if control:
        text += f"; heads outside the circuit: {mean(control, 'sparsity'):.2f}"
        text += f" against {mean(control, 'rotated'):.2f}"
    return text + "."


def answers_right(scope: Scope, task: Task, n: int, batch_size: int = 32) -> Float[Tensor, " n"]:
    """Whether the model itself says the right key's word sooner than every wrong one's; 0 or 1.

    Of tasks that are answered by copying a key; the words compared are the tokens at the keys.
    """
    units: list[Unit] = [unit[:1] for unit in task.test(n)]
    right = torch.zeros(len(units), dtype=torch.float64)

    def run(indices: list[int]) -> None:
        prompts = [units[i][0] for i in indices]
        encoded = scope.encode(prompts, chat=task.chat)
        captured = scope.capture_inputs(encoded, heads=[Head(0, 0)], rest=False, logits=True)
        assert captured.logits is not None
        tokens, signs = answer_tokens(scope.encoder, encoded, task.chat)
        scores = captured.logits.cpu().gather(1, tokens)
        best = scores.masked_fill(signs <= 0, -torch.inf).amax(1)
        rival = scores.masked_fill(signs >= 0, -torch.inf).amax(1)
        right[indices] = (best > rival).double()

    for _ in stream(batches_of(units, batch_size), run, False):
        pass  # kept in `right`
    return right


# ---------------------------------------------------------------------- over training


class Checkpoint(NamedTuple):
    """One checkpoint: its name in the run, and what `Scope.load` takes.

    ``weights`` is known for local files.
    """

    label: str
    model: str
    revision: str | None = None
    weights: str | None = None

    @property
    def step(self) -> int | str | None:
        """Step in the checkpoint's name (``step1000`` is 1000), or the name, if there is one."""
        numbers = re.findall(r"\d+", self.label)
        return int(numbers[-1]) if numbers else self.label or None


def checkpoints(model: str, revisions: str | Sequence[str] | None = None) -> list[Checkpoint]:
    """List the checkpoints asked for, by step where all have one.

    Those that cannot exist are refused by name.

    Parameters
    ----------
    model : hub id, ``nano:NAME``, or a folder; one without ``config.json`` holds one subfolder per
        checkpoint.
    revisions : ``"a,b,c"``, a list, or ``all`` (of a folder or a nano); None is the model as it is.
    """
    if revisions is None:
        return [Checkpoint("", model, weights=local_hash(model))]
    names = _revision_names(model, revisions)
    check_revisions(model, names)
    points = [_checkpoint(model, name) for name in names]
    weights = {point.label: point.weights for point in points if point.weights is not None}
    refuse_copies(model, weights)
    if not all(isinstance(point.step, int) for point in points):
        return points
    return sorted(points, key=lambda point: int(point.step or 0))


def _revision_names(model: str, revisions: str | Sequence[str]) -> list[str]:
    """The names in a list or between commas, each once; ``all`` is all that are known."""
    listed = revisions.split(",") if isinstance(revisions, str) else revisions
    stripped = [str(name).strip() for name in listed]
    names = [name for name in stripped if name]
    if not names or len(set(names)) < len(names):
        raise BadInput("name each revision once, like step1000,step2000, or leave them out.")
    if names != ["all"]:
        return names
    known = revisions_of(model)
    if known is None:
        raise BadInput(
            f"the revisions of {model} are not known here: name them, like step1000,step2000."
        )
    return known or names


def _checkpoint(model: str, name: str) -> Checkpoint:
    """One revision of a model; of a folder, the subfolder of that name."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return Checkpoint(name, model, name)
    return Checkpoint(name, str(folder / name), weights=folder_hash(folder / name))


def refuse_copies(model: str, weights: Mapping[str, str]) -> None:
    """Refuse a checkpoint whose weights another one has already.

    Hubs have served such copies for whole sweeps.
    """
    seen: dict[str, str] = {}
    for label, digest in weights.items():
        # with another config they are a copy all the same
        first = seen.setdefault(weights_part(digest), label)
        if first != label:
            copies = f"revisions {first!r} and {label!r} of {model}"
            same = f"{copies} hold the same weights (hash {digest[:12]})"
            raise BadInput(f"{same}: one of them is not the checkpoint it is called; leave it out.")


def _over_heads(
    edges: Sequence[Edge],
    circuit: bool,
    arrays: Mapping[str, Tensor],
    first: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Means over the edges of the circuit, or over the controls, and the change since the first."""
    chosen = [i for i, edge in enumerate(edges) if edge.circuit is circuit]
    difference, low, high = group_difference(arrays, chosen)
    change, change_low, change_high = group_difference(arrays, chosen, first)
    accuracy = None
    if "right" in arrays:
        accuracy = float(arrays["right"].mean())
    means = {name: float(arrays[name][chosen].nanmean()) for name in _MEANS}
    return {
        "circuit": circuit,
        "accuracy": accuracy,
        **means,
        "difference": difference,
        "low": low,
        "high": high,
        "change": change,
        "change_low": change_low,
        "change_high": change_high,
        "heads": len(chosen),
    }


@verb("sparsity")
def sweep(
    model: str,
    task: Task,
    revisions: str | Sequence[str] | None = None,
    heads: str | None = None,
    n: int = 128,
    *,
    out: str | Path,
    controls: Natural = 12,
    draws: Count = 20,
    seed: Seed = 0,
    batch_size: Count = 32,
    device: str | None = None,
    dtype: str | None = None,
) -> Sparsity:
    """Measure how few singular vectors carry the attention of a circuit's heads, over training too.

    It is measured at one checkpoint or at several. A sweep that was stopped goes on with the
    checkpoints that are missing.

    Parameters
    ----------
    model : as in `Scope.load`.
    task : whose roles are looked at.
    revisions : checkpoints like step1000,step2000; all, of a nano or a folder of checkpoints.
    heads : edges like L9H9:END>IO,L5H5:S2>S1+1, or a circuit as gpt2; by default published ones, or
        those found.
    n : prompts.
    out : folder for the results.
    controls : heads outside the circuit for each way to look.
    draws : rotations of each null.
    seed : of all draws.
    batch_size : prompts run together.
    device, dtype : as in `Scope.load`.
    """
    points = checkpoints(model, revisions)
    edges: Any = heads
    if heads is None and (model, task.name) in CIRCUITS:
        edges = model
    if edges is not None:
        parse_edges(edges, task)  # refused before a model is loaded
    plan = {
        "model": model,
        "task": task.name,
        "asked": dict(task.asked),
        "task_seed": task.seed,
        "heads": heads,
        "n": n,
        "controls": controls,
        "draws": draws,
        "seed": seed,
        "examples": units_hash(task.test(n)),
        "dtype": dtype,
    }
    last = points[-1].label
    of_points = [point.weights for point in points]
    work = current_work().open({**plan, "last": last, "weights": of_points})

    def measure(point: Checkpoint, edges: Any, controls: int) -> dict[str, Any]:
        scope = Scope.load(point.model, revision=point.revision, device=device, dtype=dtype)
        result = sparsity(
            scope, task, edges, n, controls=controls, draws=draws, batch_size=batch_size, seed=seed
        )
        arrays = dict(result.arrays)
        if task.name in _COPYING:
            arrays["right"] = answers_right(scope, task, n, batch_size)
        rows = []
        for row in result.table():
            rows.append({**row, "model": model, "step": point.step})
        return {
            "weights": scope.weights_hash,
            "edges": [asdict(edge) for edge in result.edges],
            "rows": rows,
            "arrays": arrays,
        }

    pieces: dict[str, Any] = {}
    for point in reversed(points):  # heads are looked for in the last one, and measured in all
        make = partial(measure, point, edges, 0 if pieces else controls)
        count = f"{len(pieces) + 1} of {len(points)}"
        with doing(f"{model} {point.label} ({count})"):
            piece = work.once(f"checkpoint {point.label}", make)
        pieces[point.label] = piece
        hashes = {label: each["weights"] for label, each in pieces.items()}
        refuse_copies(model, hashes)
        edges = [_edge(fields) for fields in piece["edges"]]
    rows: list[Any] = []
    for point in points:
        rows += pieces[point.label]["rows"]
    tables = {"sparsity": rows}
    answer = _answer(pieces[last]["rows"])
    if len(points) > 1:
        tables["training"] = _training(points, edges, pieces)
        trend = _trend(points, tables["training"])
        clause = answer[0].lower() + answer[1:]
        answer = f"{trend} At {last}: {clause}"
    arrays = {}
    for point in points:
        prefix = "" if point.label == last else f"{point.label}/"
        for name, array in pieces[point.label]["arrays"].items():
            arrays[prefix + name] = array
    weights = {point.label: pieces[point.label]["weights"] for point in points}
    told_edges = [asdict(edge) for edge in edges]
    return Sparsity(
        f"sparsity/{task.name}",
        tables,
        edges=tuple(edges),
        answer=answer,
        arrays=arrays,
        model=model,
        seed=seed,
        provenance=provenance(**plan, edges=told_edges, weights=weights),
    )


def _edge(fields: Mapping[str, Any]) -> Edge:
    """Make an edge of the fields that `asdict` gave."""
    head = Head(**fields["head"])
    duty = Duty(**fields["duty"])
    return Edge(head, duty, fields["circuit"])


def _training(
    points: Sequence[Checkpoint], edges: Sequence[Edge], pieces: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for each checkpoint, of the circuit and of the controls."""
    first = pieces[points[0].label]["arrays"]
    rows = []
    for point in points:
        arrays = pieces[point.label]["arrays"]
        for circuit in dict.fromkeys(edge.circuit for edge in edges):
            rows.append({"step": point.step, **_over_heads(edges, circuit, arrays, first)})
    return rows


def _trend(points: Sequence[Checkpoint], rows: Sequence[Mapping[str, Any]]) -> str:
    """How the circuit changes from the first checkpoint to the last."""
    circuit = [row for row in rows if row["circuit"]]
    before = circuit[0]
    after = circuit[-1]
    first = points[0].label
    last = points[-1].label
    differences = f"{before['difference']:.3f} to {after['difference']:.3f}"
    interval = f"{after['change_low']:.3f} to {after['change_high']:.3f}"
    change = f"change {after['change']:.3f}, 95% interval {interval}"
    return (
        f"From checkpoint {first} to {last}, sparsity minus that of rotated singular vectors"
        f" goes from {differences} over the circuit ({change})."
    )
