"""Names as predictions: on unseen text, does what a head is called say which token it looks at?

A name is a list of jobs with shares. Each job is a rule that gives every token in sight a chance
(the token after a copy of the query's, the previous one, the tokens that drew attention on other
passages, ...), and a name is their mixture. Beside it stand the best fixed offset, the previous
token, the query itself and a table of tokens, all fitted on the same passages: how often is each
right, and how much does the name lower the log-loss of a mixture of these four?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput, Head, Scope
from qkscope.findings.head_jobs import DUPLICATE, INDUCTION, PREVIOUS, PUNCTUATION
from qkscope.model.tap import Call
from qkscope.rerun.rerun_tokens import prompt_of, room_of
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.texts.holdout import Passage

SINK = "sink"
NO_RULE = (
    PREVIOUS,
    "self",
    SINK,
    "position",
    "no ",
    "few ",
)  # kinds that say an offset, or nothing
BASELINES = (
    "offset",
    "previous",
    "itself",
    "tokens",
)  # ways to say which token a head looks at, besides its name
BEGUN = 16  # the first query token: those before it see little
FEW = 4  # looks under which a head rests on the first token
JOBS = 3  # of a name
_ATTENDED = 0.3


@dataclass(frozen=True)
class Sights:
    """Passages as heads see them: to which token each looks most from every token, the first token
    left out.

    The last token of a short passage is repeated, and nothing looks from there: what follows a
    token is not seen.
    """

    passages: Sequence[Passage]
    ids: Int[Tensor, "p t"]
    keys: Int[Tensor, "p h t"]
    attention: Float[Tensor, "p h t"]

    @classmethod
    def of(cls, scope: Scope, heads: Sequence[Head], passages: Sequence[Passage]) -> Sights:
        """Run passages, as many together as there is room for."""
        layers = {head.layer for head in heads}
        length = max(len(passage.ids) for passage in passages)
        ids = torch.tensor([[*x.ids, *x.ids[-1:] * (length - len(x.ids))] for x in passages])
        seen = torch.zeros(2, len(ids), len(heads), length, device=scope.device)
        for some in torch.arange(len(ids)).split(max(room_of(scope) // length, 1)):

            def visit(call: Call, some: Tensor = some) -> None:
                own = [h for h, head in enumerate(heads) if head.layer == call.layer]
                weights = call.attention([heads[h].index for h in own])
                weights[..., 0] = 0
                most = weights.max(-1)
                seen[:, some[:, None], torch.tensor(own)] = torch.stack(
                    [most.indices.float(), most.values]
                ).to(seen)

            scope.watch(prompt_of(scope, ids[some]), visit, only=layers)
        at = torch.arange(length)
        if bool(((seen[0].cpu() > at) & (seen[1].cpu() > 0)).any()):
            raise BadInput(
                f"{scope.name} looks at tokens that follow as well, and the rules of an atlas are of "
                "heads that look back: take a decoder."
            )
        ends = torch.tensor([len(passage.ids) for passage in passages])[:, None, None]
        return cls(passages, ids, seen[0].long().cpu(), seen[1].cpu() * (at < ends))

    @cached_property
    def looks(self) -> Bool[Tensor, "p h t"]:
        """From where each head looks at a token besides the first."""
        return (self.attention >= _ATTENDED) & (torch.arange(self.keys.shape[2]) >= BEGUN)

    def of_head(self, h: int) -> tuple[Int[Tensor, " l"], Int[Tensor, " l"], Int[Tensor, " l"]]:
        """All looks of a head: passage, query token, key token."""
        passage, query = self.looks[:, h].nonzero().unbind(1)
        return passage, query, self.keys[passage, h, query]

    def every(self, step: int, start: int) -> Sights:
        """Every n-th passage."""
        which = slice(start, None, step)
        return Sights(
            self.passages[which],
            *(x[which].contiguous() for x in (self.ids, self.keys, self.attention)),
        )


def score_rows(
    rows: Sequence[Mapping[str, Any]], jobs: Sequence[Mapping[str, Any]], fit: Sights, test: Sights
) -> list[dict[str, Any]]:
    """How often each head's name, and each baseline, says to which token it looks, on looks of
    unseen documents.
    """
    made = []
    documents = torch.tensor([passage.group for passage in test.passages])
    by_head = groupby(jobs, lambda job: job["head"])
    names = {head: {job["job"]: job["share"] for job in islice(own, JOBS)} for head, own in by_head}
    for h, row in enumerate(rows):
        guess = Guesses(h, names.get(row["head"], {}), fit)
        hits = guess.hits(test)
        groups = documents[test.of_head(h)[0]]
        if len(hits) < FEW:
            continue
        gain, without, with_name = (hits[:, 0] - hits[:, 1]).double(), *guess.losses(fit, test)
        low, high = clustered_bootstrap(
            torch.stack([gain, (with_name - without).double()], dim=1), groups
        )
        made.append({
            "head": row["head"], "kind": row["kind"], "looks": len(hits), "name": float(hits[:, 0].mean()),
            **{name: float(hits[:, 1 + i].mean()) for i, name in enumerate(BASELINES)}, "gain": float(gain.mean()),
            "low": float(low[0]), "high": float(high[0]), "log_loss": float(without.mean()),
            "with_name": float(with_name.mean()), "loss_low": float(low[1]), "loss_high": float(high[1]),
        })  # fmt: skip
    return made


class Guesses:
    """Predictors of where one head looks, fitted on some passages; each gives a probability to
    every visible token.

    Parameters
    ----------
    h : the head's number.
    jobs : what its name says, with shares: each job is a rule, the name their mixture.
    fit : passages to fit on.
    """

    def __init__(self, h: int, jobs: Mapping[str, float], fit: Sights) -> None:
        self.h = h
        self.jobs = jobs
        at = torch.arange(fit.ids.shape[1])
        passage, query, key = fit.of_head(h)
        self.tokens, numbers = torch.cat([torch.tensor([-1]), fit.ids.flatten()]).unique(
            return_inverse=True
        )
        # 0 is the number of all others
        size = len(self.tokens)
        numbers = numbers[1:].view_as(fit.ids)
        there = fit.looks[:, h].flip(1).cumsum(1).flip(1)  # looks that see a token
        there[:, 0] = 0
        asked = numbers[passage, query]
        drawn = numbers[passage, key].bincount(minlength=size)
        self.rates = (drawn + 0.1) / (
            torch.zeros(size).index_add(0, numbers.flatten(), there.flatten().float()) + 10
        )
        self.asked = torch.zeros(size, len(at)).index_put(
            (asked, query - key), torch.ones(len(key)), accumulate=True
        )
        self.offsets = (query - key).bincount(minlength=len(at))
        same = (
            (numbers[passage] == numbers[passage, key][:, None])
            & (at >= 1)
            & (at <= query[:, None])
        )
        earlier, later = (
            (same & side).any(1).sum() for side in (at < key[:, None], at > key[:, None])
        )
        self.late = 1 if earlier > later else -1  # of equal tokens: the last, or the first
        smooth = self.offsets + 0.5 / (1 + at)
        self.profile = smooth / smooth.sum()

    def chances(self, sights: Sights) -> Float[Tensor, "l m t"]:
        """Probabilities at every look by each predictor: uniform, offset, previous, itself, tokens,
        and the name.
        """
        passage, query, _ = sights.of_head(self.h)
        ids = sights.ids[passage]
        at = torch.arange(sights.ids.shape[1])
        q = query[:, None]
        seen = ((at >= 1) & (at <= q)).float()
        back = (q - at).clamp(0, len(self.profile) - 1)
        number = torch.searchsorted(self.tokens, sights.ids).clamp_max(len(self.tokens) - 1)
        number = number.where(self.tokens[number] == sights.ids, 0)
        rates = self.rates[number][passage]
        ways = {
            "alike": seen, "offset": self.profile[back] * seen,
            PREVIOUS: (at == q - 1).float(), "self": (at == q).float(),
            "tokens": seen * rates * (1 + 1e-4 * self.late * at),
        }  # fmt: skip
        ways = {name: _sums_to_one(way) for name, way in ways.items()}
        same = ((ids == ids.gather(1, q)) & (at >= 1) & (at < q)).float()
        recent = same * 0.5 ** (
            same.flip(1).cumsum(1).flip(1) - 1
        )  # each copy half as likely as the next one
        asked = 3 * self.profile + self.asked[number[passage, query]]
        rules = {
            INDUCTION: recent.roll(1, 1), DUPLICATE: recent, "same word": recent, PREVIOUS: ways[PREVIOUS],
            "self": ways["self"], "key word": ways["tokens"], PUNCTUATION: ways["tokens"],
            "key and query words": ways["tokens"], "query word": asked.gather(1, back) * seen * rates,
        }  # fmt: skip
        name = torch.zeros_like(seen)
        for job, share in self.jobs.items():
            steps = job.removeprefix("position -")
            rule = (
                (at == q - int(steps)).float()
                if steps.isdigit()
                else rules.get(job, ways["offset"])
            )
            name += share * _sums_to_one(rule)
        name = torch.where(name.sum(1, keepdim=True) > 0, name, ways["offset"])
        return torch.stack([*ways.values(), _sums_to_one(name)], dim=1)

    def hits(self, sights: Sights) -> Float[Tensor, "l m"]:
        """Whether the name, and each baseline, is right at every look."""
        (_, q, keys), best = sights.of_head(self.h), self.chances(sights).argmax(2)
        offset = q - int(self.offsets.argmax())
        guesses = torch.stack(
            [best[:, -1], torch.where(offset > 0, offset, q), q - 1, q, best[:, 4]], dim=1
        )
        return (guesses == keys[:, None]).float()

    def losses(self, fit: Sights, test: Sights) -> tuple[Float[Tensor, " l"], Float[Tensor, " l"]]:
        """Log-loss of a mixture of the baselines at every tested look, without and with the name
        among them.

        The mixture's weights are fitted on passages that the parts were not: on each half by tables
        of the other.
        """
        halves = [fit.every(2, i) for i in (0, 1)]
        own = torch.cat(
            [Guesses(self.h, self.jobs, a)._of_key(b) for a, b in (halves, halves[::-1])]
        )
        tested = self._of_key(test)
        losses = []
        for size in (own.shape[1] - 1, own.shape[1]):
            weights = torch.full((size,), 1 / size)
            parts = own[:, :size].contiguous()
            for _ in range(
                50
            ):  # expectation maximisation, one look shared among all ways to begin with
                weights = (weights * (parts.T @ (parts @ weights).reciprocal()) + 1 / size) / (
                    len(own) + 1
                )
            losses.append(-(tested[:, :size] @ weights).log())
        return losses[0], losses[1]

    def _of_key(self, sights: Sights) -> Float[Tensor, "l m"]:
        keys = sights.of_head(self.h)[2]
        return self.chances(sights).gather(2, keys[:, None, None].expand(-1, 6, 1))[..., 0]


def _sums_to_one(chances: Float[Tensor, "l t"]) -> Float[Tensor, "l t"]:
    return chances / chances.sum(1, keepdim=True).clamp_min(1e-30)
