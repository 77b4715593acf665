"""Which heads attend to the right key: every head scored in one pass.

Candidates are the keys labelled ``answer``. ``accuracy``: of the candidates, a right one gets the
most attention; ``row_accuracy``: of all tokens it does, which is how Lee et al. 2026 choose heads.
``ratio`` is the share of the attention on candidates that goes to the right ones, ``mass`` the
share of all attention that candidates get. A head that mostly looks at the first token, or at
itself, can be accurate among candidates and have a row accuracy of 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import Head, Result, Scope
from qkscope.checking import Count, Share, checked_class
from qkscope.findings.task_batches import batches_of, clusters_of, made_from, made_with, with_notes
from qkscope.model.encode import Encoding
from qkscope.model.inputs import check_visible
from qkscope.results.work import Stage, current_work, verb
from qkscope.sums.nulls import clustered_bootstrap, wilson
from qkscope.texts.task import ANSWER, Task

THRESHOLD = 0.30
Score = Literal["accuracy", "row_accuracy", "ratio", "mass"]


@checked_class
class Ranking(Result):
    """Heads, best first."""

    def above(self, threshold: Share = THRESHOLD, by: Score = "accuracy") -> list[Head]:
        """Heads whose score is at least the threshold, best first; an empty list is an answer too."""
        return [Head.parse(row["head"]) for row in self.top(by) if row[by] >= threshold]

    def top(self, by: Score = "accuracy") -> list[dict[str, Any]]:
        """All rows, best first by this score."""
        return sorted((dict(row) for row in self.tables["heads"]), key=lambda row: -row[by])


@verb("heads")
def find_heads(
    scope: Scope,
    task: Task,
    n: Count = 256,
    *,
    threshold: Share = THRESHOLD,
    by: Score = "accuracy",
    batch_size: Count = 32,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Ranking:
    """Rank every head on a task: how often it attends to the right key, with intervals and the
    chance level.

    The prompts are used for nothing else.

    Parameters
    ----------
    scope : the model.
    task : whose prompts are run, and whose keys labelled ``answer`` are the candidates.
    n : prompts.
    threshold : the score that a head must reach to be named; one that prefers the right key no more
        often than chance is not.
    by : which score ranks the heads: accuracy, row_accuracy, ratio or mass.
    batch_size : prompts run together.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is
        written by default.
    part : as in `decompose`.
    progress : whether to say how far it is; if not given, where stderr is a terminal.

    Examples
    --------
    >>> import qkscope as qk
    >>> found = qk.find_heads(qk.Scope.load("nano:mixed"), qk.tasks.induction(), 32, progress=False)
    >>> [str(head) for head in found.above(0.9)]
    ['L1H0', 'L1H1', 'L1H3', 'L1H2']
    """
    units = task.choose(n)
    heads = scope.heads()

    def run(indices: list[int]) -> list[Tensor]:
        members = [(i, example) for i in indices for example in units[i]]
        encoded = scope.encode([example for _, example in members], chat=task.chat)
        whole = scope.capture_inputs(encoded, places=encoded.everywhere())
        keys = encoded.places.keys[:, None].expand(-1, len(heads), -1)
        check_visible(encoded, heads, whole.bias.gather(-1, keys), by_some=True)
        unit = torch.tensor([i for i, _ in members], device=encoded.example.device)[encoded.example]
        return [x.cpu() for x in (*_scores(encoded, whole.attention()), unit)]

    work = current_work().begin(
        scope, list(units), verb="heads", batch_size=batch_size, chat=task.chat
    )
    batches = work.run(Stage("scores", batches_of(units, batch_size), run), progress, last=True)
    hits, row_hits, ratios, masses, chances, unit = (
        torch.cat(x) for x in zip(*batches, strict=True)
    )
    chance = float(chances.mean())
    cluster = clusters_of(units, unit)
    low, high = clustered_bootstrap(ratios, cluster)
    trials = len(cluster.unique())  # copies of a prompt are one trial
    rows: list[dict[str, Any]] = []
    for i, head in enumerate(heads):
        bounds = wilson(int(hits[:, i].sum()) * trials / len(hits), trials)
        row: dict[str, Any] = {
            "head": str(head), "accuracy": float(hits[:, i].float().mean()), "low": bounds[0], "high": bounds[1],
            "chance": chance, "row_accuracy": float(row_hits[:, i].float().mean()),
            "ratio": float(ratios[:, i].mean()), "ratio_low": float(low[i]), "ratio_high": float(high[i]),
            "mass": float(masses[:, i].mean()), "n": len(hits),
        }  # fmt: skip
        rows.append({**row, "reaches": row[by] >= threshold and row["accuracy"] > chance})
    rows.sort(key=lambda row: -row[by])
    best = rows[0]
    first = max(rows, key=lambda row: row["row_accuracy"])
    attends = "it attends to it most of all tokens"
    whole = attends if first is best else f"of all tokens, {first['head']} attends to it most"
    # digits enough to tell the best score from the threshold
    digits = next(
        (
            i
            for i in range(9)
            if f"{best[by]:.{i}%}" != f"{threshold:.{i}%}" or best[by] >= threshold
        ),
        9,
    )
    none = f"No head reaches {threshold:.0%}: " * (best[by] < threshold)
    score = f"{best[by]:.{digits}%}"
    if by != "accuracy":
        none = f"{none}{best['head']} is first by {by} ({score}): "
        score = f"{best['accuracy']:.0%}"
    answer = (
        f"{none}{best['head']} prefers the right key in {score} of {best['n']} prompts (95% interval "
        f"{best['low']:.0%}-{best['high']:.0%}, chance {chance:.0%}); {whole} in {first['row_accuracy']:.0%}."
    )
    about = made_from(scope, task)
    made = {
        "answer": with_notes(answer, about),
        "seed": task.seed,
        **made_with(scope, **about, n=n),
    }
    return Ranking(f"heads/{task.name}", {"heads": rows}, **made)


def _scores(encoded: Encoding, rows: Float[Tensor, "b h t"]) -> tuple[Tensor, ...]:
    """Per row and head: right among candidates, right of all tokens, ratio, mass; and per row the
    chance level.
    """
    labels = encoded.labels[ANSWER]
    keys = encoded.places.keys
    attention = (
        rows.gather(-1, keys[:, None].expand(-1, rows.shape[1], -1)) * (labels != 0)[:, None]
    )
    right = (labels > 0).to(rows.dtype)
    right_token = rows.new_zeros(rows.shape[0], rows.shape[2]).scatter_reduce(
        1, keys, right, "amax"
    )
    mass = attention.sum(dim=-1)
    return (
        # a head that gives the candidates nothing prefers none of them: argmax would name the first
        (right.gather(1, attention.argmax(-1)) > 0) & (mass > 0),
        right_token.gather(1, rows.argmax(-1)) > 0,
        (attention * right[:, None]).sum(-1) / mass.clamp_min(torch.finfo(mass.dtype).tiny),
        mass,
        right.sum(-1) / (labels != 0).sum(-1),
    )
