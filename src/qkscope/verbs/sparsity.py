"""How few singular vectors carry a head's relative attention, over prompts and over training,
beside its nulls.

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

from qkscope import BadInput, Head, Scope
from qkscope.checking import Count, Natural, Seed, checked_class
from qkscope.findings.published import (
    CIRCUITS,
    Duty,
    Edge,
    find_circuit,
    locate,
    outside,
    parse_edges,
    rows_from,
)
from qkscope.findings.singular_rows import relative_rows, singular_basis
from qkscope.findings.task_batches import batches_of, made_from, made_with, units_hash
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
    """One row per edge, and every prompt's values in ``arrays`` (``[edges, prompts]``; NaN where
    there is none).

    Of several checkpoints, those of the last stand under their names, those before it under
    ``CHECKPOINT/NAME``.
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
    >>> qk.sparsity(scope, task, "L1H3:END>IO", 4, controls=1, draws=2, progress=False).table()[0]["n"]
    4
    """
    named = CIRCUITS.get((scope.name, task.name)) if heads is None else parse_edges(heads, task)
    edges = named or find_circuit(scope, task, batch_size=batch_size)
    for edge in edges:
        scope.check(edge.head)
    edges = [*edges, *outside(scope, edges, controls, seed)]
    arrays = _measured(scope, task, edges, n, draws, batch_size, seed, progress)
    rows = []
    for e, edge in enumerate(edges):
        own = {name: arrays[name][e] for name in arrays if name not in _OF_VECTORS}
        gap, low, high = group_difference(arrays, [e], seed=seed)
        rows.append({
            "model": scope.name, "head": str(edge.head), "step": None, "role": edge.duty.role, "from": edge.duty.query,
            "to": edge.duty.key, "circuit": edge.circuit, **{name: float(own[name].nanmean()) for name in own},
            "difference": gap, "low": low, "high": high, "positive": float((own["relative"] > 0).double().mean()),
            "n": int(own["sparsity"].isfinite().sum()),
        })  # fmt: skip
    asked = {
        **made_from(scope, task, "query_frame"),
        "n": n,
        "draws": draws,
        "edges": list(map(str, edges)),
    }
    made: Any = {
        "answer": _answer(rows),
        "arrays": arrays,
        "seed": seed,
        **made_with(scope, **asked),
    }
    return Sparsity(f"sparsity/{task.name}", {"sparsity": rows}, edges=tuple(edges), **made)


def _measured(
    scope: Scope,
    task: Task,
    edges: Sequence[Edge],
    n: int,
    draws: int,
    batch_size: int,
    seed: int,
    progress: Any,
) -> dict[str, Tensor]:
    """Every prompt's values ([edges, prompts]), and terms (first prompt and mean) with the
    spectrum.
    """
    units: list[Unit] = [unit[:1] for unit in task.test(n)]
    places = [(edge.head, edge.duty.query, edge.duty.key) for edge in edges]
    heads, queries, keys = (list(dict.fromkeys(column)) for column in zip(*places, strict=True))
    basis = singular_basis(scope, heads)
    out = dict[str, Tensor]()
    terms = torch.full((len(edges), len(units), basis.S.shape[-1]), torch.nan, dtype=torch.float64)
    turned = torch.full_like(terms[:, 0], torch.nan)

    def run(indices: list[int]) -> None:
        inputs, columns = locate(
            scope, [units[i][0] for i in indices], [*queries, *keys], task.chat
        )
        places = rows_from(inputs, columns[:, : len(queries)])
        captured = scope.capture_inputs(inputs, places=places, heads=heads, space="query_frame")
        for q, query in enumerate(queries):
            own = [e for e, edge in enumerate(edges) if edge.duty.query == query]
            slots = columns[:, [len(queries) + keys.index(edges[e].duty.key) for e in own]]
            rows = list(range(q, len(places.row), len(queries)))
            found = relative_rows(
                captured, slots, basis, rows, [heads.index(edges[e].head) for e in own]
            )
            where = torch.tensor(own)[:, None], torch.tensor(indices)
            terms[where] = found.terms.transpose(0, 1)
            for name, value in found.values(draws, seed, indices).items():
                out.setdefault(name, torch.full_like(terms[..., 0], torch.nan))[where] = value.T
            if 0 in indices:
                at = indices.index(0)
                turned[own] = rotated_terms(found.query[at], found.s, found.key[at], 1, seed)[0]

    list(stream(batches_of(units, batch_size), run, progress))
    for edge, seen in zip(edges, terms.isfinite().all(-1).any(1).tolist(), strict=True):
        if edge.circuit and not seen:
            unseen = f"in no prompt does {edge.duty.query} see {edge.duty.key} and one token more"
            raise BadInput(
                f"{edge} cannot be measured: {unseen}; heads look back, so name the later place first."
            )
    sigma = basis.S[basis.index([edge.head for edge in edges])].double()
    return out | dict(
        zip(_OF_VECTORS, (terms[:, 0], turned, terms.nanmean(1).nan_to_num(0), sigma), strict=True)
    )


def group_difference(
    arrays: Mapping[str, Tensor],
    chosen: Sequence[int],
    baseline: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Mean of ``sparsity − rotated`` over some edges, with its interval by prompt; less that of a
    ``baseline``.

    Prompts are the same ones at every checkpoint, so the interval of the change is a paired one.
    """
    index = list(chosen)
    gap = (arrays["sparsity"] - arrays["rotated"])[index].nanmean(0)
    if baseline is not None:
        gap = gap - (baseline["sparsity"] - baseline["rotated"])[index].nanmean(0)
    known = gap[gap.isfinite()]
    if not len(known):
        return float("nan"), float("nan"), float("nan")
    low, high = clustered_bootstrap(known, torch.arange(len(known)), seed=seed)
    return float(known.mean()), float(low), float(high)


def _answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """The finding in a sentence: the circuit against the rotated basis and against the heads
    outside.
    """
    inside = [row for row in rows if row["circuit"] is True]
    control = [row for row in rows if row["circuit"] is False]

    def mean(of: Sequence[Mapping[str, Any]], name: str) -> float:
        return float(torch.tensor([row[name] for row in of]).nanmean())

    below = sum(row["high"] < 0 for row in inside)
    text = (
        f"Sparsity is {mean(inside, 'sparsity'):.2f} over {len(inside)} edges of the circuit "
        f"({len({row['head'] for row in inside})} heads), "
        f"{mean(inside, 'rotated'):.2f} under rotated singular vectors ({below} of {len(inside)} edges are below "
        f"theirs, by their 95% intervals); {mean(inside, 'count_tol'):.1f} vectors reach 99% of the relative logit, "
        f"where random terms need {mean(inside, 'count_tol_null'):.1f}"
    )
    if control:
        text += f"; heads outside the circuit: {mean(control, 'sparsity'):.2f} against {mean(control, 'rotated'):.2f}"
    return text + "."


def answers_right(scope: Scope, task: Task, n: int, batch_size: int = 32) -> Float[Tensor, " n"]:
    """Whether the model itself prefers the right key's word to every wrong one's as the next token;
    0 or 1.

    Of tasks that are answered by copying a key; the words compared are the tokens at the keys.
    """
    units: list[Unit] = [unit[:1] for unit in task.test(n)]
    right = torch.zeros(len(units), dtype=torch.float64)

    def run(indices: list[int]) -> None:
        encoded = scope.encode([units[i][0] for i in indices], chat=task.chat)
        logits = scope.capture_inputs(encoded, heads=[Head(0, 0)], rest=False, logits=True).logits
        assert logits is not None
        tokens, signs = answer_tokens(scope.encoder, encoded, task.chat)
        scores = logits.cpu().gather(1, tokens)
        best, rival = (
            scores.masked_fill(sign * signs <= 0, -torch.inf).amax(1) for sign in (1, -1)
        )
        right[indices] = (best > rival).double()

    list(stream(batches_of(units, batch_size), run, False))
    return right


# ---------------------------------------------------------------------- over training


class Checkpoint(NamedTuple):
    """One checkpoint: its name in the run, and what `Scope.load` takes. ``weights`` is known for
    local files.
    """

    label: str
    model: str
    revision: str | None = None
    weights: str | None = None

    @property
    def step(self) -> int | str | None:
        """The number in its name (``step1000`` is 1000), or the name; None of a model that is no
        checkpoint.
        """
        numbers = re.findall(r"\d+", self.label)
        return int(numbers[-1]) if numbers else self.label or None


def checkpoints(model: str, revisions: str | Sequence[str] | None = None) -> list[Checkpoint]:
    """The checkpoints asked for, by step where all have one; those that cannot exist are refused by
    name.

    Parameters
    ----------
    model : hub id, ``nano:NAME``, or a folder; one without ``config.json`` holds one subfolder per
        checkpoint.
    revisions : ``"a,b,c"``, a list, or ``all`` (of a folder or a nano); None is the model as it is.
    """
    if revisions is None:
        return [Checkpoint("", model, weights=local_hash(model))]
    listed = revisions.split(",") if isinstance(revisions, str) else revisions
    names = [name for name in (str(part).strip() for part in listed) if name]
    if not names or len(set(names)) < len(names):
        raise BadInput("name each revision once, like step1000,step2000, or leave them out.")
    if names == ["all"]:
        there = revisions_of(model)
        if there is None:
            raise BadInput(
                f"the revisions of {model} are not known here: name them, like step1000,step2000."
            )
        names = there or names
    check_revisions(model, names)
    folder = Path(model).expanduser()
    if folder.is_dir():
        points = [
            Checkpoint(name, str(folder / name), weights=folder_hash(folder / name))
            for name in names
        ]
    else:
        points = [Checkpoint(name, model, name) for name in names]
    refuse_copies(
        model, {point.label: point.weights for point in points if point.weights is not None}
    )
    numbered = all(isinstance(point.step, int) for point in points)
    return sorted(points, key=lambda point: int(point.step or 0)) if numbered else points


def refuse_copies(model: str, weights: Mapping[str, str]) -> None:
    """Refuse a checkpoint whose weights another one has already; hubs have served such copies for
    whole sweeps.
    """
    seen: dict[str, str] = {}
    for label, digest in weights.items():
        first = seen.setdefault(
            weights_part(digest), label
        )  # with another config they are a copy all the same
        if first != label:
            same = f"revisions {first!r} and {label!r} of {model} hold the same weights (hash {digest[:12]})"
            raise BadInput(f"{same}: one of them is not the checkpoint it is called; leave it out.")


def _over_heads(
    edges: Sequence[Edge], circuit: bool, arrays: Mapping[str, Tensor], first: Any
) -> dict[str, Any]:
    """Means over the edges of the circuit, or over the controls, and the change since the first
    checkpoint.
    """
    chosen = [i for i, edge in enumerate(edges) if edge.circuit is circuit]
    accuracy = float(arrays["right"].mean()) if "right" in arrays else None
    means = {name: float(arrays[name][chosen].nanmean()) for name in _MEANS}
    gap = group_difference(arrays, chosen)
    change = group_difference(arrays, chosen, first)
    ends = dict(
        zip(
            ("difference", "low", "high", "change", "change_low", "change_high"),
            gap + change,
            strict=True,
        )
    )
    return {"circuit": circuit, "accuracy": accuracy, **means, **ends, "heads": len(chosen)}


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
    """Measure how few singular vectors carry the attention of a circuit's heads, at one checkpoint
    or over training.

    A sweep that was stopped goes on with the checkpoints that are missing.

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
    edges: Any = model if heads is None and (model, task.name) in CIRCUITS else heads
    if edges is not None:
        parse_edges(edges, task)  # refused before a model is loaded
    plan = {
        "model": model, "task": task.name, "asked": dict(task.asked), "task_seed": task.seed, "heads": heads, "n": n,
        "controls": controls, "draws": draws, "seed": seed, "examples": units_hash(task.test(n)), "dtype": dtype,
    }  # fmt: skip
    work = current_work().open(
        {**plan, "last": points[-1].label, "weights": [point.weights for point in points]}
    )
    pieces: dict[str, Any] = {}

    def measure(point: Checkpoint) -> dict[str, Any]:
        scope = Scope.load(point.model, revision=point.revision, device=device, dtype=dtype)
        more = 0 if pieces else controls
        found = sparsity(
            scope, task, edges, n, controls=more, draws=draws, batch_size=batch_size, seed=seed
        )
        right = (
            {"right": answers_right(scope, task, n, batch_size)} if task.name in _COPYING else {}
        )
        rows = [{**row, "model": model, "step": point.step} for row in found.table()]
        chosen = [asdict(edge) for edge in found.edges]
        return {
            "weights": scope.weights_hash,
            "edges": chosen,
            "rows": rows,
            "arrays": {**found.arrays, **right},
        }

    for point in reversed(points):  # heads are looked for in the last one, and measured in all
        with doing(f"{model} {point.label} ({len(pieces) + 1} of {len(points)})"):
            piece = pieces[point.label] = work.once(
                f"checkpoint {point.label}", partial(measure, point)
            )
        refuse_copies(model, {label: own["weights"] for label, own in pieces.items()})
        edges = [
            Edge(Head(**edge["head"]), Duty(**edge["duty"]), edge["circuit"])
            for edge in piece["edges"]
        ]
    arrays = {point.label: pieces[point.label]["arrays"] for point in points}
    last = points[-1].label
    tables = {"sparsity": [row for point in points for row in pieces[point.label]["rows"]]}
    answer = _answer(pieces[last]["rows"])
    if len(points) > 1:
        tables["training"] = [
            {
                "step": point.step,
                **_over_heads(edges, circuit, arrays[point.label], arrays[points[0].label]),
            }
            for point in points
            for circuit in dict.fromkeys(edge.circuit for edge in edges)
        ]
        before, *_, after = (row for row in tables["training"] if row["circuit"])
        answer = (
            f"From checkpoint {points[0].label} to {last}, sparsity minus that of rotated singular vectors goes from "
            f"{before['difference']:.3f} to {after['difference']:.3f} over the circuit (change {after['change']:.3f}, "
            f"95% interval {after['change_low']:.3f} to {after['change_high']:.3f}). At {last}: "
            f"{answer[0].lower()}{answer[1:]}"
        )
    weights = {point.label: pieces[point.label]["weights"] for point in points}
    kept = {f"{p}/{k}" if p != last else k: v for p, of in arrays.items() for k, v in of.items()}
    origin = provenance(**plan, edges=[asdict(edge) for edge in edges], weights=weights)
    made: Any = {
        "answer": answer,
        "arrays": kept,
        "model": model,
        "seed": seed,
        "provenance": origin,
    }
    return Sparsity(f"sparsity/{task.name}", tables, edges=tuple(edges), **made)
