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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import Example, Result, Scope
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
    """Ranking of heads, best first."""

    def above(self, threshold: Share = THRESHOLD, by: Score = "accuracy") -> list[Head]:
        """Heads whose score is at least the threshold, best first; there may be none."""
        reaching = [row for row in self.top(by) if row[by] >= threshold]
        return [Head.parse(row["head"]) for row in reaching]

    def top(self, by: Score = "accuracy") -> list[dict[str, Any]]:
        """All rows, best first by this score."""
        rows = [dict(row) for row in self.tables["heads"]]
        return sorted(rows, key=lambda row: -row[by])


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
        examples: list[Example] = []
        unit_of_example: list[int] = []
        for i in indices:
            examples += units[i]
            unit_of_example += [i] * len(units[i])
        encoded = scope.encode(examples, chat=task.chat)
        captured = scope.capture_inputs(encoded, places=encoded.everywhere())
        keys = encoded.places.keys[:, None]
        keys_of_heads = keys.expand(-1, len(heads), -1)
        bias_at_keys = captured.bias.gather(-1, keys_of_heads)
        check_visible(encoded, heads, bias_at_keys, by_some=True)
        scores = _scores(encoded, captured.attention())
        unit = torch.tensor(unit_of_example, device=encoded.example.device)
        scores["unit"] = unit[encoded.example]
        return {name: score.cpu() for name, score in scores.items()}

    work = current_work().begin(
        scope, list(units), verb="heads", batch_size=batch_size, chat=task.chat
    )
    stage = Stage("scores", batches_of(units, batch_size), run)
    batches = work.run(stage, progress, last=True)
    scores = {}
    for name in batches[0]:
        scores[name] = torch.cat([batch[name] for batch in batches])
    rows = _rows(heads, scores, clusters_of(units, scores["unit"]))
    for row in rows:
        beats_chance = row["accuracy"] > row["chance"]
        row["reaches"] = row[by] >= threshold and beats_chance
    rows.sort(key=lambda row: -row[by])
    about = made_from(scope, task)
    answer = with_notes(_answer(rows, threshold, by), about)
    name = f"heads/{task.name}"
    about_run = made_with(scope, **about, n=n)
    return Ranking(name, {"heads": rows}, answer=answer, seed=task.seed, **about_run)


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
        hit_trials = int(hits.sum()) * trials / len(hits)
        accuracy_low, accuracy_high = wilson(hit_trials, trials)
        row: dict[str, Any] = {
            "head": str(head),
            "accuracy": _share(hits),
            "low": accuracy_low,
            "high": accuracy_high,
            "chance": chance,
            "row_accuracy": _share(row_hits),
            "ratio": float(ratios.mean()),
            "ratio_low": float(low[i]),
            "ratio_high": float(high[i]),
            "mass": float(masses.mean()),
            "n": len(hits),
        }
        rows.append(row)
    return rows


def _share(hits: Bool[Tensor, " n"]) -> float:
    """Share of rows that hit."""
    return float(hits.float().mean())


def _answer(rows: Sequence[Mapping[str, Any]], threshold: float, by: Score) -> str:
    """Say which head is best, and which attends to the right key most of all tokens."""
    best = rows[0]
    reaches = best[by] >= threshold
    lead = ""
    if not reaches:
        lead = f"No head reaches {threshold:.0%}: "
    score = _apart_from(best[by], threshold)
    if by != "accuracy":
        lead += f"{best['head']} is first by {by} ({score}): "
        score = f"{best['accuracy']:.0%}"
    prefers = f"{best['head']} prefers the right key in {score} of {best['n']} prompts"
    interval = f"95% interval {best['low']:.0%}-{best['high']:.0%}"
    beside = f"{interval}, chance {best['chance']:.0%}"
    first = max(rows, key=lambda row: row["row_accuracy"])
    whole = f"of all tokens, {first['head']} attends to it most"
    if first is best:
        whole = "it attends to it most of all tokens"
    return f"{lead}{prefers} ({beside}); {whole} in {first['row_accuracy']:.0%}."


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
    batch, heads, tokens = attention.shape
    keys_of_heads = keys[:, None].expand(-1, heads, -1)
    on_keys = attention.gather(-1, keys_of_heads)
    on_candidates = on_keys * candidates[:, None]
    # 1 at the right tokens of a row, b by t
    right_token = attention.new_zeros(batch, tokens)
    right_token = right_token.scatter_reduce(1, keys, right, "amax")
    mass = on_candidates.sum(dim=-1)
    on_right = (on_candidates * right[:, None]).sum(-1)
    is_right = right.gather(1, on_candidates.argmax(-1)) > 0
    tiny = torch.finfo(mass.dtype).tiny
    # a head that gives the candidates nothing prefers none of them: argmax would name the first
    hit = is_right & (mass > 0)
    row_hit = right_token.gather(1, attention.argmax(-1)) > 0
    ratio = on_right / mass.clamp_min(tiny)
    chance = right.sum(-1) / candidates.sum(-1)
    return {"hit": hit, "row_hit": row_hit, "ratio": ratio, "mass": mass, "chance": chance}
