"""Names as predictions: on unseen text, does what a head is called say which token it looks at?

A name is a list of jobs with shares. Each job is a rule that gives every token in sight a chance (the token after a
copy of the query's, the previous one, the tokens that drew attention on other passages, ...), and a name is their
mixture. Beside it stand the best fixed offset, the previous token, the query itself and a table of tokens, all fitted
on the same passages: how often is each right, and how much does the name lower the log-loss of a mixture of these four?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.capture.scope import Scope
from qkscope.change.again import Again
from qkscope.heads import Head
from qkscope.maths.significance import clustered_bootstrap
from qkscope.tasks.sides import Passage

INDUCTION, DUPLICATE, PREVIOUS, PUNCTUATION, SINK = (
    "induction", "duplicate token", "previous token", "punctuation", "sink",
)  # fmt: skip
NO_RULE = (PREVIOUS, "self", SINK, "position", "no ", "few ")  # kinds that say an offset, or nothing
BASELINES = ("offset", "previous", "itself", "tokens")
"""Ways to say which token a head looks at, besides its name."""
BEGUN = 16  # the first token that asks: the ones before it see little
FEW = 4  # looks under which a head rests on the first token
JOBS = 3  # of a name
_ATTENDED = 0.3


@dataclass(frozen=True)
class Sight:
    """One passage as heads see it: to which token each looks most from every token, the first token left out."""

    passage: Passage
    keys: Int[Tensor, "h t"]
    attention: Float[Tensor, "h t"]

    @classmethod
    def of(cls, scope: Scope, heads: Sequence[Head], passage: Passage, again: Again | None = None) -> Sight:
        """Run a passage, unless it was."""
        again = again or Again.of(scope, torch.tensor(passage.ids, device=scope.device))
        keys, attention = torch.zeros(2, len(heads), len(passage.ids))
        by_layer: dict[int, list[int]] = {}
        for h, head in enumerate(heads):
            by_layer.setdefault(head.layer, []).append(h)
        for layer, own in by_layer.items():
            weights = again.calls[layer].attention([heads[h].index for h in own])[0].float()
            weights[..., 0] = 0
            most = weights.max(-1)
            keys[own], attention[own] = most.indices.float().cpu(), most.values.cpu()
        return cls(passage, keys.long(), attention)

    @property
    def looks(self) -> Bool[Tensor, "h t"]:
        """From where each head looks at a token besides the first."""
        return (self.attention >= _ATTENDED) & (torch.arange(self.keys.shape[1]) >= BEGUN)


def score_rows(
    rows: Sequence[Mapping[str, Any]], jobs: Sequence[Mapping[str, Any]], fit: Sequence[Sight], test: Sequence[Sight]
) -> list[dict[str, Any]]:
    """How often each head's name, and each baseline, says to which token it looks, on looks of unseen documents."""
    made = []
    for h, row in enumerate(rows):
        shares = {job["job"]: job["share"] for job in jobs if job["head"] == row["head"]}
        guess = Guesses(h, dict(list(shares.items())[:JOBS]), fit)
        hits = torch.cat([guess.hits(sight) for sight in test])
        if len(hits) < FEW:
            continue
        groups = torch.cat([torch.full((int(sight.looks[h].sum()),), sight.passage.group) for sight in test])
        gain, without, with_name = (hits[:, 0] - hits[:, 1]).double(), *guess.losses(fit, test)
        low, high = clustered_bootstrap(gain[:, None], groups)
        ends = clustered_bootstrap((with_name - without)[:, None].double(), groups)
        made.append({
            "head": row["head"], "kind": row["kind"], "looks": len(hits), "name": float(hits[:, 0].mean()),
            **{name: float(hits[:, 1 + i].mean()) for i, name in enumerate(BASELINES)}, "gain": float(gain.mean()),
            "low": float(low[0]), "high": float(high[0]), "log_loss": float(without.mean()),
            "with_name": float(with_name.mean()), "loss_low": float(ends[0][0]), "loss_high": float(ends[1][0]),
        })  # fmt: skip
    return made


class Guesses:
    """Ways to say where one head looks, fitted on some passages; each gives every token in sight a chance.

    Parameters
    ----------
    h : the head's number.
    jobs : what its name says, with shares: each job is a rule, the name their mixture.
    fit : passages to fit on.
    """

    def __init__(self, h: int, jobs: Mapping[str, float], fit: Sequence[Sight]) -> None:
        self.h, self.jobs = h, jobs
        self.drawn, self.there = Counter[int](), Counter[int]()
        length = max((len(sight.passage.ids) for sight in fit), default=1)
        self.offsets, self.asked = torch.zeros(length), dict[int, Tensor]()
        late = 0
        for sight in fit:
            ids, queries = sight.passage.ids, sight.looks[h].nonzero()[:, 0]
            keys = sight.keys[h, queries]
            for q, key in zip(queries.tolist(), keys.tolist(), strict=True):
                self.asked.setdefault(ids[q], torch.zeros(length))[q - key] += 1
                self.drawn[ids[key]] += 1
                late += (ids[key] in ids[1:key]) - (ids[key] in ids[key + 1 : q + 1])
            self.offsets += torch.bincount(queries - keys, minlength=length)
            for i, token in enumerate(ids[1:], 1):  # every look that sees it
                self.there[token] += int((queries >= i).sum())
        self.late = 1 if late > 0 else -1  # of equal tokens: the last, or the first
        smooth = self.offsets + 0.5 / (1 + torch.arange(length))
        self.profile = smooth / smooth.sum()

    def chances(self, sight: Sight) -> Float[Tensor, "l m t"]:
        """At every look of a passage: all tokens alike, the offset, previous, itself, tokens; and the name."""
        ids, at = torch.tensor(sight.passage.ids), torch.arange(len(sight.passage.ids))
        q = sight.looks[self.h].nonzero()
        seen = ((at >= 1) & (at <= q)).float()
        rates = torch.tensor([(self.drawn[i] + 0.1) / (self.there[i] + 10) for i in ids.tolist()])
        ways = {
            "alike": seen, "offset": self.profile[(q - at).clamp(0, len(self.profile) - 1)] * seen,
            PREVIOUS: (at == q - 1).float(), "self": (at == q).float(),
            "tokens": seen * rates * (1 + 1e-4 * self.late * at),
        }  # fmt: skip
        ways = {name: _sums_to_one(way) for name, way in ways.items()}
        same = ((ids == ids[q]) & (at >= 1) & (at < q)).float()
        recent = same * 0.5 ** (same.flip(1).cumsum(1).flip(1) - 1)  # each copy half as likely as the next one
        none = torch.zeros(len(self.profile))
        asked = torch.stack([3 * self.profile + self.asked.get(int(ids[i]), none) for i in q[:, 0]]) if len(q) else seen
        rules = {
            INDUCTION: recent.roll(1, 1), DUPLICATE: recent, "same word": recent, PREVIOUS: ways[PREVIOUS],
            "self": ways["self"], "key word": ways["tokens"], PUNCTUATION: ways["tokens"],
            "key and query words": ways["tokens"],
            "query word": asked.gather(1, (q - at).clamp(0, len(self.profile) - 1)) * seen * rates,
        }  # fmt: skip
        name = torch.zeros_like(seen)
        for job, share in self.jobs.items():
            back = job.removeprefix("position -")
            rule = (at == q - int(back)).float() if back.isdigit() else rules.get(job, ways["offset"])
            name += share * _sums_to_one(rule)
        name = torch.where(name.sum(1, keepdim=True) > 0, name, ways["offset"])
        return torch.stack([*ways.values(), _sums_to_one(name)], dim=1)

    def hits(self, sight: Sight) -> Float[Tensor, "l m"]:
        """Whether the name, and each baseline, is right at every look of a passage."""
        q, chances = sight.looks[self.h].nonzero()[:, 0], self.chances(sight)
        best = chances.argmax(2)
        offset = q - int(self.offsets.argmax())
        guesses = torch.stack([best[:, -1], torch.where(offset > 0, offset, q), q - 1, q, best[:, 4]], dim=1)
        return (guesses == sight.keys[self.h, q][:, None]).float()

    def losses(self, fit: Sequence[Sight], test: Sequence[Sight]) -> tuple[Float[Tensor, " l"], Float[Tensor, " l"]]:
        """Log-loss of a mixture of the baselines at every tested look, without and with the name among them.

        The mixture's weights are fitted on passages that the parts were not: on each half by tables of the other.
        """
        halves = [(Guesses(self.h, self.jobs, fit[i::2]), fit[1 - i :: 2]) for i in (0, 1)]
        own = torch.cat([guess._of_key(sight) for guess, half in halves for sight in half])
        tested, losses = torch.cat([self._of_key(sight) for sight in test]), []
        for size in (own.shape[1] - 1, own.shape[1]):
            weights = torch.full((size,), 1 / size)
            for _ in range(50):  # expectation maximisation, one look shared among all ways to begin with
                parts = own[:, :size] * weights
                weights = ((parts / parts.sum(1, keepdim=True)).sum(0) + 1 / size) / (len(own) + 1)
            losses.append(-(tested[:, :size] @ weights).log())
        return losses[0], losses[1]

    def _of_key(self, sight: Sight) -> Float[Tensor, "l m"]:
        keys = sight.keys[self.h, sight.looks[self.h].nonzero()[:, 0]]
        return self.chances(sight).gather(2, keys[:, None, None].expand(-1, 6, 1))[..., 0]


def _sums_to_one(chances: Float[Tensor, "l t"]) -> Float[Tensor, "l t"]:
    return chances / chances.sum(1, keepdim=True).clamp_min(1e-30)
