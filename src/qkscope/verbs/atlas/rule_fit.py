"""Fit: which at most five parts give a head's attention, with which weights.

A rule is a mixture, so its weights are found by expectation maximisation: each step shares every
entry of the head's rows among the parts in proportion to what they give it,

    w_p ← w_p · Σ_rows Σ_keys a(i, j) r_p(i, j) / Σ_q w_q r_q(i, j).

Candidates that any head may have (the first token, offsets, decays, copies) are joined by the
head's own: kinds of words that it gives more, or asks from more, than its mean row by distance
says. From all of these the least are taken out, in rounds, until five are left. *Rest* is what no
other part says, so that its weight shrinks a little at every step: where others can say the same,
they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.findings.distances import Distances
from qkscope.findings.rules import (
    MOST,
    AfterCopy,
    At,
    Decay,
    Else,
    First,
    Near,
    Offset,
    OfKind,
    Part,
    Rest,
    Rule,
    SameWord,
    Text,
    else_first,
    shared,
)
from qkscope.verbs.atlas.head_patterns import Patterns
from qkscope.verbs.atlas.word_classes import WordClasses

_OFFSETS = 9
_DECAYS = (0.7, 0.88, 0.96)
# parts of all attention, by the mean row, that kinds of keys have; and of all queries, of queries
_KEY_SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
_LAST_SHARES = (0.05, 0.1, 0.2)
_QUERY_SHARES = (0.1, 0.2, 0.35, 0.5, 0.7)
_OF_BOTH = 3  # the kind of keys that a kind of queries asks for, as a number in `_KEY_SHARES`
_PRIOR = 1 / 200  # of all attention: what a class begins with, at the mean row's rate
_STEPS = 40  # of expectation maximisation, in each round
_LEFT = (16, 10, 7, 6, MOST)  # parts after each round
_SHRINK = 0.97  # of the weight of rest, at every step
_LEAST = 0.02  # a weight under which a part is left out

#: Candidates that are the same for every head.
GENERIC: tuple[Part, ...] = (
    First(),
    *(Offset(steps) for steps in range(_OFFSETS)),
    *(Decay(factor) for factor in _DECAYS),
    SameWord("last"),
    SameWord("every"),
    AfterCopy("last"),
    AfterCopy("every"),
)

#: Copies, and where there are none all tokens by a head's own distances.
COPIES: tuple[Part, ...] = tuple(Else(part, Near()) for part in GENERIC[-4:])


class RuleFit:
    """Rules of heads, fitted on passages: kinds of words on every other one, weights on the rest.

    Parameters
    ----------
    patterns : of the heads, in all these passages.
    classes : of words.
    kinds : whether parts may speak of kinds of words.
    """

    def __init__(self, patterns: Patterns, classes: WordClasses, kinds: bool = True) -> None:
        self.all_patterns = patterns
        several = len(patterns.passages) > 1
        self.kind_patterns = patterns.some(0, 2) if several else patterns
        self.patterns = patterns.some(1, 2) if several else patterns
        self.classes = classes
        self.kinds = kinds

    @cached_property
    def _entries(self) -> Bool[Tensor, "p t t"]:
        """Entries of patterns that count: queries that do, and keys that they see."""
        length = self.patterns.ids.shape[1]
        seen = torch.ones(length, length).tril().bool()
        return self.patterns.counted[:, :, None] & seen

    def _packed(self, part: Part, text: Text) -> Float[Tensor, " e"]:
        """What a part gives each entry; where it names no token, its weight is the first one's."""
        rows = else_first(part.rows(text))
        return rows.expand(self._entries.shape)[self._entries]

    @cached_property
    def _generic(self) -> Float[Tensor, "c e"]:
        """Rows of the candidates that all heads share."""
        text = Text(self.patterns.ids)
        return torch.stack([self._packed(part, text) for part in GENERIC])

    def rule(self, h: int) -> Rule:
        """The rule of one head."""
        distances = self.distances(h)
        text = Text(self.patterns.ids, distances)
        special: list[Part] = [Rest(), *COPIES]
        if self.kinds:
            special += self._of_kinds(h, Text(self.kind_patterns.ids, distances))
        rows = torch.cat(
            [torch.stack([self._packed(part, text) for part in special]), self._generic]
        )
        given = self.patterns.attention[:, h][self._entries]
        shrink = torch.ones(len(rows))
        shrink[0] = _SHRINK
        different = first_of_equal(rows)
        parts, weights = _largest_parts(rows[different], given, shrink[different])
        candidates = (*special, *GENERIC)
        every = [candidates[i] for i in different]
        kept = [(w, every[i]) for i, w in zip(parts, weights, strict=True) if w >= _LEAST]
        total = sum(weight for weight, _ in kept)
        return Rule([(weight / total, part) for weight, part in kept], distances)

    def distances(self, h: int) -> Distances:
        """A head's mean row by distance."""
        return Distances.of(self.all_patterns.mean(h))

    def mean_row(self, h: int) -> Rule:
        """A head's mean row by distance, as a rule."""
        return Rule([(1.0, Rest())], self.distances(h))

    def best_offset(self, h: int) -> Rule:
        """The fixed offset that a head gives most, beside the first token."""
        distances = self.distances(h)
        steps = max(range(_OFFSETS), key=lambda k: distances.back[k])
        rows = self._generic[[0, 1 + steps]]
        given = self.patterns.attention[:, h][self._entries]
        weights = mixture_weights(rows, given, torch.ones(2)).tolist()
        return Rule([(weights[0], First()), (weights[1], Offset(steps))])

    # ------------------------------------------------------------------ kinds of a head's own

    def _of_kinds(self, h: int, text: Text) -> list[Part]:
        """Parts that speak of words which this head looks at more, or looks from more."""
        keys = [self.classes.kind(kind) for kind in self._key_kinds(h, text)]
        queries = [self.classes.kind(kind) for kind in self._query_kinds(h, text)]
        parts: list[Part] = [OfKind(kind) for kind in keys]
        for kind, share in zip(keys, _KEY_SHARES, strict=True):
            if share in _LAST_SHARES:
                parts.append(OfKind(kind, "last"))
        for kind in queries:
            then = (Near(), OfKind(keys[_OF_BOTH]), Offset(0), Offset(1))
            parts += [At(kind, part) for part in then]
        return parts

    def _key_kinds(self, h: int, text: Text) -> list[Bool[Tensor, " c"]]:
        """Classes that get most beside the mean row by distance, in sets that nest."""
        counted = self.kind_patterns.counted[:, :, None] & text.inside
        expected = shared(text.by_distance) * (1 - text.on_first[:, None]) * counted
        given = self.kind_patterns.attention[:, h] * counted
        return _nested(self._by_class(given.sum(1)), self._by_class(expected.sum(1)), _KEY_SHARES)

    def _query_kinds(self, h: int, text: Text) -> list[Bool[Tensor, " c"]]:
        """Classes that leave the first token most beside the mean at their place."""
        counted = self.kind_patterns.counted
        left = (1 - self.kind_patterns.attention[:, h, :, 0]) * counted
        expected = (1 - text.on_first) * counted
        return _nested(self._by_class(left), self._by_class(expected), _QUERY_SHARES)

    def _by_class(self, amounts: Float[Tensor, "p t"]) -> Float[Tensor, " c"]:
        """Sums of what tokens have, by their class."""
        sums = torch.zeros(self.classes.count)
        return sums.index_add(
            0, self.classes.of_token[self.kind_patterns.ids].flatten(), amounts.flatten()
        )


def _nested(
    given: Float[Tensor, " c"], expected: Float[Tensor, " c"], shares: Sequence[float]
) -> list[Bool[Tensor, " c"]]:
    """Sets of the classes with the highest rates that hold such shares of what is expected, or a
    little more: a kind that no text has would be the first token under another name.
    """
    whole = expected.sum().clamp(min=1e-9)
    prior = _PRIOR * whole
    rates = (given + prior * given.sum() / whole) / (expected + prior)
    order = rates.argsort(descending=True)
    held = expected[order].cumsum(0) / whole
    sets = []
    for share in shares:
        members = torch.zeros(len(given), dtype=torch.bool)
        members[order[: int((held < share).sum()) + 1]] = True
        sets.append(members)
    return sets


# ---------------------------------------------------------------------- weights


def first_of_equal(rows: Float[Tensor, "c e"]) -> list[int]:
    """The numbers of rows that equal none before them, by their product with random numbers.

    >>> first_of_equal(torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]))
    [0, 1]
    """
    draws = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(0))
    numbers = dict[float, int]()
    for i, value in enumerate((rows @ draws).tolist()):
        numbers.setdefault(float(f"{value:.6g}"), i)
    return list(numbers.values())


@dataclass(frozen=True)
class _Mixture:
    """Some candidates, by number, and their weights."""

    numbers: Int[Tensor, " c"]
    weights: Float[Tensor, " c"]


def _largest_parts(
    rows: Float[Tensor, "c e"], given: Float[Tensor, " e"], shrink: Float[Tensor, " c"]
) -> tuple[list[int], list[float]]:
    """The few candidates that are left when the least go, round by round; their weights."""
    mixture = _Mixture(torch.arange(len(rows)), mixture_weights(rows, given, shrink))
    for size in _LEFT:
        if len(mixture.numbers) <= size:
            continue
        top = mixture.weights.topk(size).indices.sort().values
        numbers = mixture.numbers[top]
        begin = mixture.weights[top]
        weights = mixture_weights(rows[numbers], given, shrink[numbers], begin)
        mixture = _Mixture(numbers, weights)
    return mixture.numbers.tolist(), mixture.weights.tolist()


def mixture_weights(
    rows: Float[Tensor, "c e"],
    given: Float[Tensor, " e"],
    shrink: Float[Tensor, " c"],
    begin: Float[Tensor, " c"] | None = None,
) -> Float[Tensor, " c"]:
    """Weights of a mixture by expectation maximisation; they sum to 1.

    Parameters
    ----------
    rows : what each candidate gives each entry.
    given : the head's own attention there.
    shrink : a factor on each weight at every step.
    begin : weights to begin with; alike, if not given.

    Examples
    --------
    >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> mixture_weights(rows, torch.tensor([0.75, 0.25]), torch.ones(2))
    tensor([0.7500, 0.2500])
    """
    weights = torch.ones(len(rows)) if begin is None else begin
    weights = weights / weights.sum()
    for _ in range(_STEPS):
        says = weights @ rows
        weights = weights * (rows @ (given / (says + 1e-9))) * shrink
        weights = weights / weights.sum()
    return weights
