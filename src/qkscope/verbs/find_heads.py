"""Which heads attend to the right key: every head scored in one pass.

Candidates are the keys labelled ``answer``. ``accuracy``: of the candidates, a right one gets the
most attention; ``row_accuracy``: of all tokens it does, which is how Lee et al. 2026 choose heads.
``ratio`` is the share of the attention on candidates that goes to the right ones, ``mass`` the
share of all attention that candidates get. A head that mostly looks at the first token, or at
itself, can be accurate among candidates and have a row accuracy of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import Result, Scope
from qkscope.checking import Count, Share, checked_class
from qkscope.findings.task_batches import batches_of, clusters_of, made_from, made_with, with_notes
from qkscope.heads import Head
from qkscope.model.encode import Encoding
from qkscope.model.inputs import check_visible
from qkscope.results.work import Stage, current_work, verb
from qkscope.sums.intervals import clustered_bootstrap, wilson
from qkscope.texts.task import ANSWER, Task

THRESHOLD = 0.30
_DIGITS = 9  # of a percentage, at most
Score = Literal["accuracy", "row_accuracy", "ratio", "mass"]


@checked_class
class Ranking(Result):
    """Heads, best first."""

    def above(self, threshold: Share = THRESHOLD, by: Score = "accuracy") -> list[Head]:
        """Heads whose score is at least the threshold, best first; there may be none."""
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
    """Rank every head on a task by how often it attends to the right key.

    Intervals and the chance level stand beside it; the prompts are used for nothing else.

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

    def run(indices: list[int]) -> dict[str, Tensor]:
        members = [(i, example) for i in indices for example in units[i]]
        encoded = scope.encode([example for _, example in members], chat=task.chat)
        captured = scope.capture_inputs(encoded, places=encoded.everywhere())
        keys = encoded.places.keys[:, None].expand(-1, len(heads), -1)
        check_visible(encoded, heads, captured.bias.gather(-1, keys), by_some=True)
        unit_of_example = torch.tensor([i for i, _ in members], device=encoded.example.device)
        scores = _scores(encoded, captured.attention())
        scores["unit"] = unit_of_example[encoded.example]
        return {name: score.cpu() for name, score in scores.items()}

    work = current_work().begin(
        scope, list(units), verb="heads", batch_size=batch_size, chat=task.chat
    )
    batches = work.run(Stage("scores", batches_of(units, batch_size), run), progress, last=True)
    scores = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    rows = _rows(heads, scores, clusters_of(units, scores["unit"]))
    for row in rows:
        row["reaches"] = row[by] >= threshold and row["accuracy"] > row["chance"]
    rows.sort(key=lambda row: -row[by])
    about = made_from(scope, task)
    return Ranking(
        f"heads/{task.name}",
        {"heads": rows},
        answer=with_notes(_answer(rows, threshold, by), about),
        seed=task.seed,
        **made_with(scope, **about, n=n),
    )


def _rows(
    heads: Sequence[Head], scores: Mapping[str, Tensor], cluster: Int[Tensor, " n"]
) -> list[dict[str, Any]]:
    """A row for each head: means over prompts with their 95% intervals."""
    chance = float(scores["chance"].mean())
    low, high = clustered_bootstrap(scores["ratio"], cluster)
    trials = len(cluster.unique())  # copies of a prompt are one trial
    rows = []
    for i, head in enumerate(heads):
        hits = scores["hit"][:, i]
        row_hits = scores["row_hit"][:, i]
        ratios = scores["ratio"][:, i]
        masses = scores["mass"][:, i]
        ends = wilson(int(hits.sum()) * trials / len(hits), trials)
        row: dict[str, Any] = {
            "head": str(head),
            "accuracy": float(hits.float().mean()),
            "low": ends[0],
            "high": ends[1],
            "chance": chance,
            "row_accuracy": float(row_hits.float().mean()),
            "ratio": float(ratios.mean()),
            "ratio_low": float(low[i]),
            "ratio_high": float(high[i]),
            "mass": float(masses.mean()),
            "n": len(hits),
        }
        rows.append(row)
    return rows


def _answer(rows: Sequence[Mapping[str, Any]], threshold: float, by: Score) -> str:
    """The best head in a sentence, and which head attends to the right key most of all tokens."""
    best = rows[0]
    first = max(rows, key=lambda row: row["row_accuracy"])
    whole = f"of all tokens, {first['head']} attends to it most"
    if first is best:
        whole = "it attends to it most of all tokens"
    lead = "" if best[by] >= threshold else f"No head reaches {threshold:.0%}: "
    score = _apart_from(best[by], threshold)
    if by != "accuracy":
        lead += f"{best['head']} is first by {by} ({score}): "
        score = f"{best['accuracy']:.0%}"
    return (
        f"{lead}{best['head']} prefers the right key in {score} of {best['n']} prompts (95% interval "
        f"{best['low']:.0%}-{best['high']:.0%}, chance {best['chance']:.0%}); {whole} in {first['row_accuracy']:.0%}."
    )


def _apart_from(score: float, threshold: float) -> str:
    """A score in percent, with digits enough to tell it from a threshold that it misses."""
    for digits in range(_DIGITS):
        text = f"{score:.{digits}%}"
        if score >= threshold or text != f"{threshold:.{digits}%}":
            return text
    return f"{score:.{_DIGITS}%}"


def _scores(encoded: Encoding, attention: Float[Tensor, "b h t"]) -> dict[str, Tensor]:
    """Score each row and head, and give each row its chance level.

    ``hit``: right among candidates; ``row_hit``: right of all tokens; ``ratio`` and ``mass`` as
    above.
    """
    labels = encoded.labels[ANSWER]
    keys = encoded.places.keys
    candidates = labels != 0
    right = (labels > 0).to(attention.dtype)
    on_keys = attention.gather(-1, keys[:, None].expand(-1, attention.shape[1], -1))
    on_candidates = on_keys * candidates[:, None]
    right_token = attention.new_zeros(attention.shape[0], attention.shape[2])
    right_token = right_token.scatter_reduce(1, keys, right, "amax")
    mass = on_candidates.sum(dim=-1)
    on_right = (on_candidates * right[:, None]).sum(-1)
    hit = right.gather(1, on_candidates.argmax(-1)) > 0
    tiny = torch.finfo(mass.dtype).tiny
    return {
        # a head that gives the candidates nothing prefers none of them: argmax would name the first
        "hit": hit & (mass > 0),
        "row_hit": right_token.gather(1, attention.argmax(-1)) > 0,
        "ratio": on_right / mass.clamp_min(tiny),
        "mass": mass,
        "chance": right.sum(-1) / candidates.sum(-1),
    }
