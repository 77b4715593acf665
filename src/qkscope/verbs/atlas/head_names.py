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
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.findings.head_jobs import DUPLICATE, INDUCTION, PREVIOUS, PUNCTUATION
from qkscope.heads import Head
from qkscope.model.tap import Call
from qkscope.rerun.rerun_tokens import prompt_of, room_of
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.texts.holdout import Passage

SINK = "sink"
#: What the names of kinds begin with that say an offset, or nothing.
NO_RULE = (PREVIOUS, "self", SINK, "position", "no ", "few ")
#: Ways to say which token a head looks at, besides its name.
BASELINES = ("offset", "previous", "itself", "tokens")
BEGUN = 16  # the first query token: those before it see little
FEW = 4  # looks under which a head rests on the first token
JOBS = 3  # of a name
_ATTENDED = 0.3  # attention from which on a head looks at a token
_STEPS = 50  # of expectation maximisation


@dataclass(frozen=True)
class Sights:
    """Passages as heads see them: to which token each looks most from every token.

    The first token is left out. The last token of a short passage is repeated, and nothing looks
    from there: what follows a token is not seen.
    """

    passages: Sequence[Passage]
    ids: Int[Tensor, "p t"]
    keys: Int[Tensor, "p h t"]
    attention: Float[Tensor, "p h t"]

    @classmethod
    def of(cls, scope: Scope, heads: Sequence[Head], passages: Sequence[Passage]) -> Sights:
        """Run passages, as many together as there is room for."""
        layers = {head.layer for head in heads}
        lengths = torch.tensor([len(passage.ids) for passage in passages])
        length = int(lengths.max())
        padded = [[*x.ids, *x.ids[-1:] * (length - len(x.ids))] for x in passages]
        ids = torch.tensor(padded)
        most = torch.zeros(2, len(ids), len(heads), length, device=scope.device)
        for some in torch.arange(len(ids)).split(max(room_of(scope) // length, 1)):

            def visit(call: Call, some: Tensor = some) -> None:
                of_layer = [h for h, head in enumerate(heads) if head.layer == call.layer]
                weights = call.attention([heads[h].index for h in of_layer])
                weights[..., 0] = 0
                largest = weights.max(-1)
                both = torch.stack([largest.indices.float(), largest.values])
                most[:, some[:, None], torch.tensor(of_layer)] = both.to(most)

            scope.watch(prompt_of(scope, ids[some]), visit, only=layers)
        keys, attention = most.cpu()
        places = torch.arange(length)
        if bool(((keys > places) & (attention > 0)).any()):
            raise BadInput(
                f"{scope.name} looks at tokens that follow as well, and the rules of an atlas are of "
                "heads that look back: take a decoder."
            )
        inside = places < lengths[:, None, None]
        return cls(passages, ids, keys.long(), attention * inside)

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
            self.ids[which].contiguous(),
            self.keys[which].contiguous(),
            self.attention[which].contiguous(),
        )


def score_rows(
    rows: Sequence[Mapping[str, Any]], jobs: Sequence[Mapping[str, Any]], fit: Sights, test: Sights
) -> list[dict[str, Any]]:
    """The table ``scores``: how often names and baselines say where heads look, on unseen text."""
    scores = []
    documents = torch.tensor([passage.group for passage in test.passages])
    names = _names(jobs)
    for h, row in enumerate(rows):
        guess = Guesses(h, names.get(row["head"], {}), fit)
        hits = guess.hits(test)
        if len(hits) < FEW:
            continue
        passage, _, _ = test.of_head(h)
        gain = (hits[:, 0] - hits[:, 1]).double()
        without, with_name = guess.losses(fit, test)
        differences = torch.stack([gain, (with_name - without).double()], dim=1)
        low, high = clustered_bootstrap(differences, documents[passage])
        right = hits.mean(0).tolist()
        scores.append({
            "head": row["head"], "kind": row["kind"], "looks": len(hits),
            **dict(zip(("name", *BASELINES), right, strict=True)), "gain": float(gain.mean()),
            "low": float(low[0]), "high": float(high[0]), "log_loss": float(without.mean()),
            "with_name": float(with_name.mean()), "loss_low": float(low[1]), "loss_high": float(high[1]),
        })  # fmt: skip
    return scores


def _names(jobs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By head its first jobs with their shares, which are its name."""
    names = dict[str, dict[str, float]]()
    for job in jobs:
        name = names.setdefault(job["head"], {})
        if len(name) < JOBS:
            name[job["job"]] = job["share"]
    return names


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
        earlier = (same & (at < key[:, None])).any(1).sum()
        later = (same & (at > key[:, None])).any(1).sum()
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
        _, query, keys = sights.of_head(self.h)
        best = self.chances(sights).argmax(2)
        offset = query - int(self.offsets.argmax())
        offset = torch.where(offset > 0, offset, query)
        guesses = torch.stack([best[:, -1], offset, query - 1, query, best[:, 4]], dim=1)
        return (guesses == keys[:, None]).float()

    def losses(self, fit: Sights, test: Sights) -> tuple[Float[Tensor, " l"], Float[Tensor, " l"]]:
        """Log-loss of a mixture of the baselines at every tested look, without and with the name
        among them.

        The mixture's weights are fitted on passages that the parts were not: on each half by tables
        of the other.
        """
        one = fit.every(2, 0)
        other = fit.every(2, 1)
        on_other = Guesses(self.h, self.jobs, one)._of_key(other)
        on_one = Guesses(self.h, self.jobs, other)._of_key(one)
        held_out = torch.cat([on_other, on_one])
        tested = self._of_key(test)
        without_name = _mixture_loss(held_out[:, :-1], tested[:, :-1])
        return without_name, _mixture_loss(held_out, tested)

    def _of_key(self, sights: Sights) -> Float[Tensor, "l m"]:
        """The probability of the token looked at, by each predictor."""
        _, _, keys = sights.of_head(self.h)
        chances = self.chances(sights)
        at_key = keys[:, None, None].expand(-1, chances.shape[1], 1)
        return chances.gather(2, at_key)[..., 0]


def _mixture_loss(
    fitted: Float[Tensor, "l m"], tested: Float[Tensor, "k m"]
) -> Float[Tensor, " k"]:
    """Log-loss at tested looks of a mixture whose weights are fitted on others.

    Expectation maximisation, with one more look shared among all ways to begin with.
    """
    looks, size = fitted.shape
    parts = fitted.contiguous()
    weights = torch.full((size,), 1 / size)
    for _ in range(_STEPS):
        responsible = weights * (parts.T @ (parts @ weights).reciprocal())
        weights = (responsible + 1 / size) / (looks + 1)
    return -(tested @ weights).log()


def _sums_to_one(chances: Float[Tensor, "l t"]) -> Float[Tensor, "l t"]:
    return chances / chances.sum(1, keepdim=True).clamp_min(1e-30)
