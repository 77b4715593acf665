"""Which heads attend to the right key: every head scored in one pass.

Candidates are the keys labelled ``answer``. A head is right when the candidate that gets the most attention is labelled
+1. ``ratio`` is the share of its attention on candidates that goes to the right ones, ``mass`` the share of all its
attention that the candidates get: a head can be right while it looks elsewhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from qkscope.analyses.units import capture_units
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.intervals import clustered_bootstrap, wilson
from qkscope.result import Result, provenance
from qkscope.tasks.task import ANSWER, Task


@dataclass(frozen=True)
class Ranking(Result):
    """Heads, best first."""

    def above(self, threshold: float = 0.30, by: str = "accuracy") -> list[Head]:
        """Heads whose score is at least the threshold, best first; an empty list is an answer too."""
        return [Head.parse(row["head"]) for row in self.top(by) if row[by] >= threshold]

    def top(self, by: str = "accuracy") -> list[dict[str, Any]]:
        """All rows, best first by this score."""
        rows = [dict(row) for row in self.tables["heads"]]
        if rows and by not in rows[0]:
            raise BadInput(f"heads are ranked by accuracy, ratio or mass, not by {by!r}.")
        return sorted(rows, key=lambda row: -row[by])


def find_heads(
    scope: Scope, task: Task, n: int = 256, *, batch_size: int = 32, progress: bool | None = None
) -> Ranking:
    """Score every head on ``n`` prompts of the task that are used for nothing else."""
    start = time.perf_counter()
    heads, units = scope.heads(), task.choose(n)
    right, share, mass, clusters, chances = [], [], [], [], []
    for batch in capture_units(scope, units, heads, batch_size=batch_size, chat=task.chat, progress=progress):
        captured = batch.captured
        labels = captured.labels[ANSWER][:, None]
        attention = captured.attention() * (labels != 0)
        named = attention.sum(dim=-1)
        right.append((labels.expand_as(attention).gather(-1, attention.argmax(-1, keepdim=True)) > 0)[..., 0])
        share.append((attention * (labels > 0)).sum(-1) / named.clamp_min(torch.finfo(named.dtype).tiny))
        mass.append(named)
        clusters.append(batch.unit)
        chances.append((labels[:, 0] > 0).sum(-1) / (labels[:, 0] != 0).sum(-1))
    hits, ratios, masses, unit = (torch.cat(x).cpu() for x in (right, share, mass, clusters))
    chance = float(torch.cat(chances).float().mean())
    low, high = clustered_bootstrap(ratios, unit)
    rows: list[dict[str, Any]] = []
    for i, head in enumerate(heads):
        accuracy = float(hits[:, i].float().mean())
        bounds = wilson(int(hits[:, i].sum()), len(hits))
        rows.append({
            "head": str(head), "accuracy": accuracy, "low": bounds[0], "high": bounds[1], "chance": chance,
            "ratio": float(ratios[:, i].mean()), "ratio_low": float(low[i]), "ratio_high": float(high[i]),
            "mass": float(masses[:, i].mean()), "n": len(hits),
        })  # fmt: skip
    rows.sort(key=lambda row: -row["accuracy"])
    best = rows[0]
    return Ranking(
        experiment=f"heads/{task.name}",
        answer=(
            f"{best['head']} attends to the right key in {best['accuracy']:.0%} of {best['n']} prompts "
            f"(95% interval {best['low']:.0%}-{best['high']:.0%}, chance {chance:.0%})."
        ),
        tables={"heads": rows},
        model=scope.name,
        seed=task.seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**job(scope, task), n=n),
    )


def job(scope: Scope, task: Task, space: Space = "post_rope") -> dict[str, Any]:
    """What an analysis was made from, for manifests and for refusing to mix."""
    return {
        "model": scope.name, "revision": scope.revision, "weights": scope.weights_hash,
        "tokenizer": scope.tokenizer_hash, "task": task.name, "task_seed": task.seed, "asked": dict(task.asked),
        "space": space,
    }  # fmt: skip
