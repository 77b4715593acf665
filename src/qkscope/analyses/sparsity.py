"""How few singular vectors carry a head's relative attention, over many prompts, beside what means nothing.

Per edge (a head that looks from one role to another): sparsity ``(mean |c|)² / mean c²`` of the terms, the same under
independently rotated singular vectors (``rotated``: spectrum and rank stay) and along a rotated head space
(``rotated_shared``: every logit stays), the number of terms that reach r (``count``), that reach 99% of it
(``count_tol``), and the numbers that random terms of the same sum and norm would need for either (``count_null``,
``count_tol_null``).
``low`` and ``high`` are the 95% interval, by prompt, of ``difference = sparsity − rotated``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses import circuits
from qkscope.analyses.circuits import Edge
from qkscope.analyses.prompts import batches_of, made_from
from qkscope.analyses.relative import VALUES, relative_rows, singular_basis
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import Count, Natural, Seed, checked_class
from qkscope.maths.relative import rotated_terms
from qkscope.maths.significance import clustered_bootstrap
from qkscope.runs.result import Result, provenance
from qkscope.runs.work import stream, verb
from qkscope.tasks.task import ANSWER, Task, Unit


@checked_class
@dataclass(frozen=True)
class Sparsity(Result):
    """One row per edge, and every prompt's values in ``arrays`` (``[edges, prompts]``; NaN where there is none)."""

    edges: tuple[Edge, ...] = field(default=())


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
    step: int | str | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> Sparsity:
    """Measure the sparsity of relative attention at one checkpoint, on the task's test prompts.

    Parameters
    ----------
    scope : the model.
    task : whose roles are looked at, and whose test prompts are measured.
    heads : edges like ``L9H9:END>IO``, heads (which then look from the query to the answer), or a circuit's name. By
        default the model's published circuit, or the heads that do the task's duties most (`find_circuit`).
    n : prompts.
    controls : heads outside the circuit for each way to look.
    draws, seed : rotations of each null, and the seed of all draws.
    batch_size : prompts run together.
    step : what to call this checkpoint.
    out : folder for the result and its page; nothing is written by default.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope = qk.Scope.load("nano:mixed")
    >>> found = qk.sparsity(scope, qk.tasks.ioi(), "L1H3:END>IO", 4, controls=1, draws=2, progress=False)
    >>> [(row["head"], row["circuit"], row["n"]) for row in found.table()][0]
    ('L1H3', True, 4)
    """
    edges = [
        *(own := edges_for(scope, task, heads, batch_size, progress)),
        *circuits.outside(scope, own, controls, seed),
    ]
    arrays = measure_edges(scope, task, edges, n, draws=draws, batch_size=batch_size, seed=seed, progress=progress)
    rows = sparsity_rows(edges, arrays, scope.name, step, seed)
    return Sparsity(
        experiment=f"sparsity/{task.name}",
        answer=answer_of(rows),
        tables={"sparsity": rows},
        arrays=arrays,
        model=scope.name,
        seed=seed,
        provenance=provenance(**made_from(scope, task, "query_frame"), n=n, draws=draws, edges=[str(e) for e in edges]),
        edges=tuple(edges),
    )


def edges_for(
    scope: Scope,
    task: Task,
    heads: str | Head | Sequence[str | Head | Edge] | None,
    batch_size: int = 32,
    progress: bool | None = None,
) -> list[Edge]:
    """The edges asked for, checked against the task and the model; or the published ones; or those found."""
    if heads is None:
        known = circuits.circuit_of(scope.name, task.name)
        edges = (
            list(known.edges) if known else circuits.find_circuit(scope, task, batch_size=batch_size, progress=progress)
        )
    else:
        edges = named_edges(heads, task)
    for edge in edges:
        scope.check(edge.head)
    return edges


def named_edges(heads: str | Head | Sequence[str | Head | Edge], task: Task) -> list[Edge]:
    """Edges as a user writes them; a role that the task does not have is refused."""
    parts = [heads] if isinstance(heads, str | Head) else list(heads)
    edges = [
        e for part in parts for e in ([part] if isinstance(part, Edge) else circuits.parse_edges(str(part), task.name))
    ]
    if not edges:
        raise BadInput("no head was named: write heads like L9H9,L5H5:S2>S1+1, or leave them out.")
    circuits.check_roles(task, edges)
    return edges


def measure_edges(
    scope: Scope,
    task: Task,
    edges: Sequence[Edge],
    n: int,
    *,
    draws: int = 20,
    batch_size: int = 32,
    seed: Seed = 0,
    progress: bool | None = None,
) -> dict[str, Tensor]:
    """Every prompt's values (`VALUES`, [edges, prompts]), and terms (first prompt and mean) with the spectrum."""
    units: list[Unit] = [unit[:1] for unit in task.test(n)]
    heads = list(dict.fromkeys(edge.head for edge in edges))
    basis = singular_basis(scope, heads)
    queries = list(dict.fromkeys(edge.duty.query for edge in edges))
    keys = list(dict.fromkeys(edge.duty.key for edge in edges))
    out = {name: torch.full((len(edges), len(units)), torch.nan, dtype=torch.float64) for name in VALUES}
    first = torch.full((len(edges), basis.S.shape[-1]), torch.nan, dtype=torch.float64)
    turned = first.clone()
    sums, counts = torch.zeros_like(first), torch.zeros(len(edges))

    def run(indices: list[int]) -> None:
        inputs, columns = circuits.locate(scope, [units[i][0] for i in indices], [*queries, *keys], task.chat)
        places = circuits.rows_from(inputs, columns[:, : len(queries)])
        captured = scope.capture_inputs(inputs, places=places, heads=heads, space="query_frame")
        for q, query in enumerate(queries):
            own = [e for e, edge in enumerate(edges) if edge.duty.query == query]
            slots = torch.stack([columns[:, len(queries) + keys.index(edges[e].duty.key)] for e in own], dim=1)
            rows = list(range(q, len(places.row), len(queries)))
            found = relative_rows(captured, slots, basis, rows, [heads.index(edges[e].head) for e in own])
            for name, value in found.values(draws, seed, indices).items():
                out[name][torch.tensor(own)[:, None], torch.tensor(indices)] = value.T
            seen = found.terms.isfinite().all(-1)
            sums[own] += torch.where(seen[..., None], found.terms, 0.0).sum(0)
            counts[own] += seen.sum(0)
            if 0 in indices:
                at = indices.index(0)
                first[own] = found.terms[at]
                turned[own] = rotated_terms(found.query[at], found.s, found.key[at], 1, seed)[0]

    for _ in stream(batches_of(units, batch_size), run, progress):
        pass
    blind = next((edge for edge, seen in zip(edges, counts.tolist(), strict=True) if edge.circuit and not seen), None)
    if blind is not None:
        raise BadInput(
            f"{blind} cannot be measured: in no prompt does {blind.duty.query} see {blind.duty.key} and one token "
            "more; heads look back, so name the later place first."
        )
    mean = sums / counts[:, None].clamp_min(1)
    sigma = basis.S[basis.index([edge.head for edge in edges])].double()
    return {**out, "terms_first": first, "terms_rotated": turned, "terms_mean": mean, "sigma": sigma}


def answers_right(scope: Scope, task: Task, n: int, batch_size: int = 32) -> Float[Tensor, " n"]:
    """Whether the model itself prefers the right key's word to every wrong one's as the next token; 0 or 1.

    Of tasks that are answered by copying a key; the words compared are the tokens at the keys.
    """
    units: list[Unit] = [unit[:1] for unit in task.test(n)]
    right = torch.zeros(len(units), dtype=torch.float64)

    def run(indices: list[int]) -> None:
        encoded = scope.encode([units[i][0] for i in indices], chat=task.chat)
        found = scope.capture_inputs(encoded, heads=[Head(0, 0)], rest=False, logits=True)
        assert found.logits is not None
        places, labels = encoded.places, encoded.labels[ANSWER]
        words = encoded.inputs["input_ids"][places.row[:, None], places.keys]
        scores = found.logits.gather(1, words)
        best, rival = (
            scores.masked_fill(~(places.key_mask & (sign * labels > 0)), -torch.inf).amax(1) for sign in (1, -1)
        )
        right[indices] = (best > rival).double().cpu()

    for _ in stream(batches_of(units, batch_size), run, False):
        pass
    return right


def sparsity_rows(
    edges: Sequence[Edge], arrays: Mapping[str, Tensor], model: str, step: int | str | None, seed: Seed = 0
) -> list[dict[str, Any]]:
    """The table: means over prompts; the interval is of ``difference``, by prompt."""
    rows = []
    for e, edge in enumerate(edges):
        own = {name: arrays[name][e] for name in VALUES}
        gap = own["sparsity"] - own["rotated"]
        kept = gap.isfinite()
        low = high = torch.tensor(torch.nan)
        if bool(kept.any()):
            low, high = clustered_bootstrap(gap[kept], torch.arange(len(gap))[kept], seed=seed)
        rows.append({
            "model": model, "head": str(edge.head), "step": step, "role": edge.duty.role, "from": edge.duty.query,
            "to": edge.duty.key, "circuit": edge.circuit,
            **{name: float(values.nanmean()) for name, values in own.items()},
            "difference": float(gap.nanmean()), "low": float(low), "high": float(high),
            "positive": float((own["relative"] > 0).double().mean()), "n": int(kept.sum()),
        })  # fmt: skip
    return rows


def group_difference(
    arrays: Mapping[str, Tensor], chosen: Sequence[int], baseline: Mapping[str, Tensor] | None = None
) -> tuple[float, float, float]:
    """Mean of ``sparsity − rotated`` over some edges, with its interval by prompt; less that of a ``baseline``.

    Prompts are the same ones at every checkpoint, so the interval of the change is a paired one.
    """
    index = list(chosen)
    gap = (arrays["sparsity"] - arrays["rotated"])[index].nanmean(0)
    if baseline is not None:
        gap = gap - (baseline["sparsity"] - baseline["rotated"])[index].nanmean(0)
    kept = gap.isfinite()
    if not bool(kept.any()):
        return float("nan"), float("nan"), float("nan")
    low, high = clustered_bootstrap(gap[kept], torch.arange(len(gap))[kept])
    return float(gap[kept].mean()), float(low), float(high)


def answer_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The finding in a sentence: the circuit against the rotated basis and against the heads outside."""
    inside, control = ([row for row in rows if row["circuit"] is wanted] for wanted in (True, False))

    def mean(of: Sequence[Mapping[str, Any]], name: str) -> float:
        values = [row[name] for row in of if row[name] == row[name]]
        return sum(values) / len(values) if values else float("nan")

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
