"""The test in the text itself: another token is put where a head's leading block reads one, and the model is run again.

For a query t and the key s it attends to most (of those far enough off), the token that the block reads at the key is
replaced. The key's part then changes by ``B_b (x' − x)``, with B_b fitted on other documents, so the relative logit
should change by ``scale · q_t · R_{s−t} B_b (x' − x)``, with the query as it was. The slope of actual on predicted
changes is 1 if the key reads that token so. With the query's own part of the block in the place of q_t the slope is
that of the block alone. Two shams: the token six places further back is changed, and predicted as if it were the right
one; and the right token is changed, but predicted with tokens in each other's place (a permuted vocabulary). For a
block whose key part is the mean, the query's token is changed in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.names.readings import BACK, SHAM
from qkscope.analyses.names.sight import FIRST, Attended, Sight, Text, attend, by_length
from qkscope.analyses.names.study import Study
from qkscope.capture.gather import Plan
from qkscope.capture.tap import Call
from qkscope.draws import derived_seed
from qkscope.maths.factors import MEAN, shares
from qkscope.tasks.sides import Passage

CHANGES = 48  # places that are changed for each head
_APART = 8  # tokens between a changed one and the other end at least: only one end should change
_FARTHER = 6  # places that the sham is further back
_SAME = 0.33  # of the changes, that put the asking token there: equal tokens are rare, and matter
_FEWEST = 8


@dataclass(frozen=True)
class _Place:
    """One change: a passage up to its query, where, and what."""

    passage: int
    query: int
    key: int
    at: int  # the token that is changed
    new: int


def changeable(pair: tuple[str, str] | None) -> tuple[str, str] | None:
    """Which side of a block can be changed by one token, and the factor there; None if neither."""
    if pair is None:
        return None
    for side, part in (("key", pair[1]), ("query", pair[0])):
        if part in BACK and part != SHAM:
            return side, part
    return None


@torch.no_grad()
def change_row(study: Study, h: int, pair: tuple[str, str], count: int = CHANGES) -> dict[str, Any] | None:
    """How the logit changed beside what was predicted: slope with its interval by document, correlation, sham."""
    found = changeable(pair)
    if found is None:
        return None
    side, factor = found
    one = _One(study, h, side, factor, pair)
    before = one.places(count)
    if len(before) < _FEWEST:
        return None
    actual, predicted, groups = one.measured(before, 0)
    sham, sham_predicted, _ = one.measured(before, _FARTHER)
    seed = study.options.seed
    slope, low, high = _slope(actual, predicted[0], groups, seed)
    block_slope, block_low, block_high = _slope(actual, predicted[1], groups, seed)
    permuted_slope, _, _ = _slope(actual, predicted[2], groups, seed)
    sham_slope, sham_low, sham_high = _slope(sham, sham_predicted[0], groups, seed)
    return {
        "head": str(study.text.heads[h]), "factor": factor, "kind": side, "slope": slope, "low": low, "high": high,
        "correlation": _correlation(actual, predicted[0]), "sham_slope": sham_slope, "sham_low": sham_low,
        "sham_high": sham_high, "n": len(before), "block": " · ".join(pair), "block_slope": block_slope,
        "block_low": block_low, "block_high": block_high, "block_correlation": _correlation(actual, predicted[1]),
        "permuted_slope": permuted_slope, "permuted_correlation": _correlation(actual, predicted[2]),
    }  # fmt: skip


def _correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def _slope(y: Tensor, x: Tensor, groups: Int[Tensor, " n"], seed: int) -> tuple[float, float, float]:
    """``Σ xy / Σ x²`` and its interval; no change predicted means no change expected, so there is no intercept."""
    _, cluster = groups.unique(return_inverse=True)
    sums = torch.zeros(int(cluster.max()) + 1, 2, dtype=torch.float64)
    sums.index_add_(0, cluster, torch.stack([x * y, x * x], dim=1))
    slope, low, high = shares(sums[:, :1], sums[:, 1], seed=seed)
    return float(slope), float(low), float(high)


class _One:
    """One head, and the side of its block that is changed."""

    def __init__(self, study: Study, h: int, side: str, factor: str, pair: tuple[str, str]) -> None:
        self.study, self.h, self.side, self.factor = study, h, side, factor
        self.other = pair[0] if side == "key" else pair[1]  # the part that the changed one meets
        drawn = torch.Generator().manual_seed(derived_seed(study.options.seed, "permuted"))
        self.permuted = torch.randperm(len(study.text.readings.vocabulary), generator=drawn)
        self.text = Text(study.text.scope, [study.text.heads[h]], study.text.readings)
        self.slot = h if side == "query" else len(study.text.heads) + study.text.kv_of_head[h]
        self.back = BACK[factor]

    def places(self, count: int) -> list[_Place]:
        """Random queries, with the key that the head attends to most among those far enough off."""
        study, seed = self.study, self.study.options.seed
        long = [i for i, passage in enumerate(study.tested) if len(passage.ids) > 2 * FIRST + _APART + _FARTHER]
        if not long:
            return []
        generator = torch.Generator().manual_seed(derived_seed(seed, "changed", str(study.text.heads[self.h])))
        fitted = torch.tensor([token for passage in study.fitted for token in passage.ids])
        asked = []
        for j in range(count):
            i = long[j % len(long)]
            first = FIRST + _APART + _FARTHER + self.back + 1
            asked.append((i, int(torch.randint(first, len(study.tested[i].ids), (1,), generator=generator))))
        made = []
        tops = self._top([Passage("", 0, study.tested[i].ids[: t + 1]) for i, t in asked])
        for (i, t), s in zip(asked, tops, strict=True):
            if s is None:
                continue
            at = (s if self.side == "key" else t) - self.back
            new = int(fitted[torch.randint(len(fitted), (1,), generator=generator)])
            if self.side == "key" and float(torch.rand(1, generator=generator)) < _SAME:
                new = study.tested[i].ids[t]
            if new != study.tested[i].ids[at]:
                made.append(_Place(i, t, s, at, new))
        return made

    def _top(self, passages: Sequence[Passage]) -> list[int | None]:
        """The key that the last query of each passage attends to most, of those that can be changed alone.

        None where none of them is in sight, as behind a narrow window.
        """
        found = dict[int, int | None]()

        def take(indices: list[int], _call: Call, _sight: Sight, seen: Attended) -> None:
            for row, i in enumerate(indices):
                last = len(passages[i].ids) - 1
                own = seen.attention[row, 0, last].clone()
                own[: self.back + _FARTHER + 1], own[last - _APART - self.back :] = 0, 0
                found[i] = int(own.argmax()) if float(own.max()) > 0 else None

        self._run(passages, take)
        return [found[i] for i in range(len(passages))]

    def measured(
        self, places: Sequence[_Place], farther: int
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, "3 n"], Int[Tensor, " n"]]:
        """Actual and predicted changes of the relative logit, and the documents; ``farther`` makes the sham.

        Predicted with the whole other side, with its part of the block, and for permuted tokens.
        """
        tested = self.study.tested
        plain = [tested[place.passage].ids[: place.query + 1] for place in places]
        changed = []
        for ids, place in zip(plain, places, strict=True):
            at = place.at - farther
            changed.append((*ids[:at], place.new, *ids[at + 1 :]))
        logits = torch.zeros(2, len(places), dtype=torch.float64)  # before, and after
        predicted = torch.zeros(3, len(places), dtype=torch.float64)

        def take(after: int, indices: list[int], call: Call, sight: Sight, seen: Attended) -> None:
            for row, i in enumerate(indices):
                place = places[i]
                own, others = seen.raw[row, 0, place.query], seen.kept[row, 0, place.query].clone()
                others[place.key] = False
                logits[after, i] = float(own[place.key] - (own * others).sum() / others.sum().clamp_min(1))
                if not after:
                    tokens = (place.new, plain[i][place.at - farther])
                    predicted[:, i] = torch.tensor(
                        self._predicted(call, sight, seen, row, place, tokens, others), dtype=torch.float64
                    )

        for after, texts in enumerate((plain, changed)):
            self._run([Passage("", 0, ids) for ids in texts], partial(take, after))
        return logits[1] - logits[0], predicted, torch.tensor([tested[place.passage].group for place in places])

    def _predicted(
        self, call: Call, sight: Sight, seen: Attended, row: int, place: _Place, pair: tuple[int, int], others: Tensor
    ) -> tuple[float, float, float]:
        """The change for a new token in the place of an old one: with the other side, with its part, and permuted."""
        fit, vocabulary = self.study.fit, self.text.readings.vocabulary
        coefficients = fit.coefficients[fit.where(self.factor)][:, self.slot]
        at = place.key if self.side == "key" else place.query
        tokens = torch.tensor(pair, device=vocabulary.device)
        wrong = vocabulary[self.permuted.to(vocabulary.device)[torch.searchsorted(vocabulary, tokens)]]
        changes = []
        for some in (tokens, wrong):
            x = self.text.readings.token_features(some, self.factor)
            moved = torch.zeros_like(seen.q[:1, :1])
            moved[0, 0, at] = (x[0] - x[1]).to(coefficients) @ coefficients
            changes.append(call.scale * self.text.rotate(call, moved, row)[0, 0, at])
        whole, part = self._other_side(call, sight, row, place, others, seen.q, seen.k)
        return float(whole @ changes[0]), float(part @ changes[0]), float(whole @ changes[1])

    def _other_side(
        self, call: Call, sight: Sight, row: int, place: _Place, others: Tensor, q: Tensor, k: Tensor
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
        """What the change meets: the query, or the key against others in sight; whole, and its part of the block."""
        slot = self.h if self.side == "key" else len(self.study.text.heads) + self.study.text.kv_of_head[self.h]
        fit = self.study.fit
        if self.other == MEAN:
            part = fit.y_mean[slot].to(q).expand(q.shape[2], -1)
        else:
            own = fit.where(self.other)
            part = (sight.x[row][:, own].to(q) - fit.x_mean[own].to(q)) @ fit.coefficients[own][:, slot].to(q)
        part = self.text.rotate(call, part[None, None], row)[0, 0]
        if self.side == "key":
            return q[row, 0, place.query], part[place.query]
        weight = others[:, None] / others.sum().clamp_min(1)
        key = k[row, 0]
        return key[place.key] - (key * weight).sum(0), part[place.key] - (part * weight).sum(0)

    def _run(self, passages: Sequence[Passage], take: Any) -> None:
        """What the head attends to in each passage, batch by batch."""
        for indices in by_length(passages, self.study.options.batch_size):
            batch = self.text.batch(passages, indices, [0] * len(indices))
            sight = Sight.of(self.text, batch)

            def visit(call: Call, plan: Plan, indices: list[int] = indices, sight: Sight = sight) -> None:
                take(indices, call, sight, attend(self.text, call, plan, sight.kept))

            self.text.watch(batch, visit)
