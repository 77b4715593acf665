"""A relative logit as pairs of a dictionary's features: one in the query, one in the keys.

A head reads each part of a token (its features, the error, the bias) by itself once its norms are
held, so that a relative logit is::

    ℓ = Σ_{g,f} q_g · Σ_t w_t k_f(t)     over pairs of parts: features, error and bias on both sides

With the error as a part everything sums, whatever the dictionary: that shows nothing. What counts
is how much lies in pairs of features, and in how few. Signs can cancel, so that a share of the
logit may be large by luck; ``held`` is therefore a share of ``Σ |pairs|``, error and bias included,
which no cancelling makes larger.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# the parts of a stream that are no features
ERROR = "error"  # what the dictionary misses
SKIP = "skip"  # what a transcoder passes on as it is
AFTER = "after"  # what was added after the dictionary
OTHERS = "other writers"  # what is not the MLP's
#: How many of the largest pairs are taken together.
PAIR_COUNTS = (1, 10)
#: The logit; what pairs of features give; all pairs, signs left out; shares of that by number of
#: pairs.
NUMBERS = ("logit", "pairs", "gross", *(f"held_{count}" for count in PAIR_COUNTS))


class FeatureTerms(NamedTuple):
    """Terms of one relative logit: every part of the query with every part of the weighted keys.

    Parameters
    ----------
    query, key : the features that are active there, in the order of rows and of columns.
    rest : the parts behind them on both sides, the bias last.
    values : what each pair gives; they sum to the logit.
    """

    query: Int[Tensor, " a"]
    key: Int[Tensor, " b"]
    rest: tuple[str, ...]
    values: Float[Tensor, "a+r b+r"]

    @classmethod
    def of(
        cls,
        ids: Int[Tensor, "p+1 s"],
        q: Float[Tensor, "s+r d"],
        keys: Float[Tensor, "s+r p d"],
        weights: Float[Tensor, " p"],
        *rest: str,
    ) -> FeatureTerms:
        """Multiply the parts of one query with those of its weighted keys.

        A feature that is active in several keys is one part of the weighted keys; weights hold the
        logit's scale.

        Parameters
        ----------
        ids : numbers of the features in the slots of the query, then of every key; −1 is empty.
        q, keys : vectors of the features in these slots, then of the rest.
        weights : of each key.
        rest : names of the parts that are no features.
        """
        slots = ids.shape[1]
        query_ids = ids[0]
        key_ids = ids[1:].mT
        is_active = query_ids >= 0
        active = q[:slots][is_active]
        query_parts = torch.cat([active, q[slots:]]).double()
        weighted = weights.double()[:, None] * keys.double()
        takes_part = (key_ids >= 0) & (weights != 0)
        numbers, row = key_ids[takes_part].unique(return_inverse=True)
        features = query_parts.new_zeros(len(numbers), query_parts.shape[-1])
        features.index_add_(0, row, weighted[:slots][takes_part])
        key_parts = torch.cat([features, weighted[slots:].sum(1)])
        return cls(query_ids[is_active], numbers, rest, query_parts @ key_parts.mT)

    @property
    def pairs(self) -> Float[Tensor, "a b"]:
        """Terms of a feature of the query with a feature of the key."""
        queries = len(self.query)
        keys = len(self.key)
        return self.values[:queries, :keys]

    def marginals(self) -> dict[str, dict[int | str, float]]:
        """By side, what each feature (by number) and other part gives; both sum to the logit."""
        query_parts = [*self.query.tolist(), *self.rest]
        key_parts = [*self.key.tolist(), *self.rest]
        of_query = self.values.sum(1).tolist()
        of_key = self.values.sum(0).tolist()
        return {
            "query": dict(zip(query_parts, of_query, strict=True)),
            "key": dict(zip(key_parts, of_key, strict=True)),
        }

    def largest(self, count: int, signed: bool = False) -> list[tuple[int, int, float]]:
        """The largest pairs of features, by size or as they are.

        Each is the feature of the query, that of the key, and what they give.
        """
        scores = self.pairs if signed else self.pairs.abs()
        most = min(count, self.pairs.numel())
        chosen = []
        for place in scores.flatten().topk(most).indices.tolist():
            row, column = divmod(place, len(self.key))
            value = float(self.pairs[row, column])
            query_feature = int(self.query[row])
            key_feature = int(self.key[column])
            chosen.append((query_feature, key_feature, value))
        return chosen

    def first(self, count: int) -> list[list[int]]:
        """The pairs that give most, by the numbers of their features.

        Where fewer give more than 0, the list is filled up with −1.
        """
        pairs = []
        for query_feature, key_feature, value in self.largest(count, signed=True):
            if value > 0:
                pairs.append([query_feature, key_feature])
        missing = count - len(pairs)
        return pairs + [[-1, -1]] * missing

    def numbers(self) -> Float[Tensor, " m"]:
        """Values of `NUMBERS`, which are compared with meaningless dictionaries."""
        sizes = self.pairs.flatten().abs().sort(descending=True).values
        gross = self.values.abs().sum()
        largest = torch.stack([sizes[:count].sum() for count in PAIR_COUNTS])
        held = largest / gross.clamp_min(1e-300)
        totals = torch.stack([self.values.sum(), self.pairs.sum(), gross])
        return torch.cat([totals, held]).cpu()
