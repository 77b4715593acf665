"""Which heads attend to the right key: every head scored in one pass.

Candidates are the keys labelled ``answer``. ``accuracy``: of the candidates, a right one gets the most attention;
``row_accuracy``: of all tokens it does, which is how Lee et al. 2026 choose heads. ``ratio`` is the share of the
attention on candidates that goes to the right ones, ``mass`` the share of all attention that candidates get. A head
that mostly looks at the first token, or at itself, can be accurate among candidates and have a row accuracy of 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import batches_of, clusters_of, made_from, with_notes
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import check_visible
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import Prompts, checked_call, checked_class
from qkscope.maths.significance import clustered_bootstrap, wilson
from qkscope.runs.provenance import provenance
from qkscope.runs.result import Result
from qkscope.runs.shards import stream
from qkscope.tasks.task import ANSWER, Task

THRESHOLD = 0.30
SCORES = ("accuracy", "row_accuracy", "ratio", "mass")


@checked_class
@dataclass(frozen=True)
class Ranking(Result):
    """Heads, best first."""

    def above(self, threshold: float = THRESHOLD, by: str = "accuracy") -> list[Head]:
        """Heads whose score is at least the threshold, best first; an empty list is an answer too."""
        if not 0 <= threshold <= 1:
            raise BadInput(f"a threshold is a share from 0 to 1, but got {threshold}.")
        return [Head.parse(row["head"]) for row in self.top(by) if row[by] >= threshold]

    def top(self, by: str = "accuracy") -> list[dict[str, Any]]:
        """All rows, best first by this score."""
        rows = [dict(row) for row in self.tables["heads"]]
        if by not in SCORES:
            raise BadInput(f"heads are ranked by {', '.join(SCORES)}, not by {by!r}.")
        return sorted(rows, key=lambda row: -row[by])


def above_chance(row: Mapping[str, Any]) -> bool:
    """Whether a head prefers the right key more often than chance does."""
    return row["accuracy"] > row["chance"]


def no_head(threshold: float, best: Mapping[str, Any], by: str = "accuracy") -> tuple[str, str]:
    """Say that no head reaches a threshold, and give the best score with digits enough to see it."""
    digits = next((i for i in range(9) if f"{best[by]:.{i}%}" != f"{threshold:.{i}%}"), 9)
    return f"No head reaches {threshold:.0%}: ", f"{best[by]:.{digits}%}"


@checked_call
def find_heads(
    scope: Scope, task: Task, n: Prompts = 256, *, batch_size: int = 32, progress: bool | None = None
) -> Ranking:
    """Score every head on ``n`` prompts of the task that are used for nothing else.

    Parameters
    ----------
    scope : the model.
    task : whose prompts are run, and whose keys labelled ``answer`` are the candidates.
    n : prompts.
    batch_size : prompts run together.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> import qkscope as qk
    >>> found = qk.find_heads(qk.Scope.load("nano:mixed"), qk.tasks.induction(), 32, progress=False)
    >>> [str(head) for head in found.above(0.9)]
    ['L1H0', 'L1H1', 'L1H3', 'L1H2']
    """
    start = time.perf_counter()
    heads, units = scope.heads(), task.choose(n)

    def run(indices: list[int]) -> tuple[Tensor, ...]:
        members = [(i, example) for i in indices for example in units[i]]
        encoded = scope.encode([example for _, example in members], chat=task.chat)
        whole = scope.capture_inputs(encoded, places=encoded.everywhere())
        keys = encoded.places.keys[:, None].expand(-1, len(heads), -1)
        check_visible(encoded, heads, whole.bias.gather(-1, keys), by_some=True)
        scores = _scores(encoded, whole.attention())
        unit = torch.tensor([i for i, _ in members], device=encoded.example.device)[encoded.example]
        return tuple(x.cpu() for x in (*scores, unit))

    found = [part.value for part in stream(batches_of(units, batch_size), run, progress)]
    hits, row_hits, ratios, masses, chances, unit = (torch.cat(x) for x in zip(*found, strict=True))
    chance = float(chances.mean())
    cluster = clusters_of(units, unit)
    low, high = clustered_bootstrap(ratios, cluster)
    trials = len(cluster.unique())  # copies of a prompt are one trial
    rows: list[dict[str, Any]] = []
    for i, head in enumerate(heads):
        accuracy = float(hits[:, i].float().mean())
        bounds = wilson(int(hits[:, i].sum()) * trials / len(hits), trials)
        rows.append({
            "head": str(head), "accuracy": accuracy, "low": bounds[0], "high": bounds[1], "chance": chance,
            "row_accuracy": float(row_hits[:, i].float().mean()),
            "ratio": float(ratios[:, i].mean()), "ratio_low": float(low[i]), "ratio_high": float(high[i]),
            "mass": float(masses[:, i].mean()), "n": len(hits),
        })  # fmt: skip
    rows.sort(key=lambda row: -row["accuracy"])
    best, first = rows[0], max(rows, key=lambda row: row["row_accuracy"])
    whole = (
        "it attends to it most of all tokens" if first is best else f"of all tokens, {first['head']} attends to it most"
    )
    about = made_from(scope, task)
    none, score = no_head(THRESHOLD, best) if best["accuracy"] < THRESHOLD else ("", f"{best['accuracy']:.0%}")
    answer = (
        f"{none}{best['head']} prefers the right key in {score} of {best['n']} prompts (95% interval "
        f"{best['low']:.0%}-{best['high']:.0%}, chance {chance:.0%}); {whole} in {first['row_accuracy']:.0%}."
    )
    return Ranking(
        experiment=f"heads/{task.name}",
        answer=with_notes(answer, about),
        tables={"heads": rows},
        model=scope.name,
        seed=task.seed,
        seconds=time.perf_counter() - start,
        provenance=provenance(**about, n=n),
    )


def _scores(encoded: Encoding, rows: Float[Tensor, "b h t"]) -> tuple[Tensor, ...]:
    """Per row and head: right among candidates, right of all tokens, ratio, mass; and per row the chance level."""
    labels, keys = encoded.labels[ANSWER], encoded.places.keys
    attention = rows.gather(-1, keys[:, None].expand(-1, rows.shape[1], -1)) * (labels != 0)[:, None]
    right = (labels > 0).to(rows.dtype)
    right_of = right[:, None].expand_as(attention)
    right_token = rows.new_zeros(rows.shape[0], rows.shape[2]).scatter_reduce(1, keys, right, "amax")
    mass = attention.sum(dim=-1)
    return (
        # a head that gives the candidates nothing prefers none of them: argmax would name the first
        (right_of.gather(-1, attention.argmax(-1, keepdim=True))[..., 0] > 0) & (mass > 0),
        right_token[:, None].expand_as(rows).gather(-1, rows.argmax(-1, keepdim=True))[..., 0] > 0,
        (attention * right_of).sum(-1) / mass.clamp_min(torch.finfo(mass.dtype).tiny),
        mass,
        right.sum(-1) / (labels != 0).sum(-1),
    )
