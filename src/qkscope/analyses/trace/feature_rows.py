"""What is kept of prompts that a dictionary splits: the pairs to show, and how few hold how much, beside the copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.rows import SIDES
from qkscope.heads import Head
from qkscope.maths.dictionaries import NULLS, NUMBERS, SIZES, FeatureTerms
from qkscope.maths.significance import clustered_bootstrap

SHOWN = 20
OTHERS = "other features"
_KINDS = ("dictionary", *NULLS)
_AT = {name: place for place, name in enumerate(NUMBERS)}
_CALLED = {
    "rotated": "rotated",
    "random": "random",
    "features": "codes of other features",
    "tokens": "codes of other tokens",
}
_OWNERS = {**_CALLED, "rotated": "a rotated dictionary", "random": "a random dictionary"}


class Chosen(NamedTuple):
    """Pairs and features to show, by number."""

    pairs: list[tuple[int, int]]
    features: dict[str, list[int]]

    def of(self, terms: FeatureTerms) -> Float[Tensor, " v"]:
        """What they give in one prompt: pairs; of each side features, the rest, and all other features."""
        at = [{int(f): i for i, f in enumerate(ids)} for ids in (terms.query, terms.key)]
        found = [float(terms.pairs[at[0][g], at[1][f]]) if g in at[0] and f in at[1] else 0.0 for g, f in self.pairs]
        for side, values in terms.marginals().items():
            parts: list[int | str] = [*self.features[side], *terms.rest]
            named = [values.pop(part, 0.0) for part in parts]
            found += [*named, sum(values.values())]
        return torch.tensor(found, dtype=torch.float64)


def choose_pairs(terms: Sequence[FeatureTerms]) -> Chosen:
    """The largest on average."""
    pairs: dict[tuple[int, int], float] = {}
    sides: dict[str, dict[int, float]] = {side: {} for side in SIDES}
    for own in terms:
        for g, f, value in own.largest(own.pairs.numel()):
            pairs[g, f] = pairs.get((g, f), 0.0) + value
        for side, values in own.marginals().items():
            for part, value in values.items():
                if isinstance(part, int):
                    sides[side][part] = sides[side].get(part, 0.0) + value

    def first(sums: Mapping[Any, float]) -> list[Any]:
        return sorted(sums, key=lambda one: -abs(sums[one]))[:SHOWN]

    return Chosen(first(pairs), {side: first(own) for side, own in sides.items()})


@dataclass
class Measured:
    """One head: what prompts gave, prompt after prompt.

    Attributes
    ----------
    values, numbers, about : what `Chosen.of`, `FeatureSplit.numbers` and `FeatureSplit.about` give.
    words : what each prompt asks for.
    error : how far parts are from summing to the logit, at most.
    """

    head: Head
    chosen: Chosen
    rest: tuple[str, ...]
    values: Float[Tensor, "n v"]
    numbers: Float[Tensor, "n x m"]
    about: Float[Tensor, "n 7"]
    words: list[str]
    error: float

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Pairs, parts, copies, what few pairs hold, and the check."""
        head, logit = str(self.head), self.numbers[:, 0, 0].mean()
        mean, low, high = self._interval(self.values)
        rows: list[dict[str, Any]] = [
            {"value": float(v), "share": float(v / logit), "low": float(a), "high": float(b)}
            for v, a, b in zip(mean, low, high, strict=True)
        ]
        pairs = [
            {"head": head, "query_feature": f"f{g}", "key_feature": f"f{f}", **rows.pop(0)}
            for g, f in self.chosen.pairs
        ]
        pairs.sort(key=lambda row: -abs(row["value"]))
        parts = []
        for side in SIDES:
            named = [*(f"f{f}" for f in self.chosen.features[side]), *self.rest, OTHERS]
            parts += [{"head": head, "side": side, "part": name, **rows.pop(0)} for name in named]
        copies, held = self._copies(head)
        return {"feature_pairs": pairs, "features": parts, "copies": copies, "held": held, "check": [self._check(head)]}

    def _interval(self, values: Float[Tensor, "n v"]) -> tuple[Tensor, Tensor, Tensor]:
        places = {word: i for i, word in enumerate(dict.fromkeys(self.words))}
        low, high = clustered_bootstrap(values, torch.tensor([places[word] for word in self.words]))
        return values.mean(0), low, high

    def _copies(self, head: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The dictionary with its interval over words, each null with the lowest and highest of its draws."""
        own, low, high = self._interval(self.numbers[:, 0].nan_to_num(posinf=0.0))
        copies, held, draws = [], [], (self.numbers.shape[1] - 1) // len(NULLS)
        for place, kind in enumerate(_KINDS):
            start = 1 + (place - 1) * draws
            mine = self.numbers[:, start : start + draws] if place else self.numbers[:, :1]
            means = mine.mean(0)
            ends = (means.amin(0), means.amax(0)) if place else (low, high)
            row: dict[str, Any] = {"head": head, "kind": kind}
            for name, column, per in (("explained", "pairs", own[0]), ("first", "held_1", 1), ("ten", "held_10", 1)):
                at = _AT[column]
                least, most = sorted(float(end[at] / per) for end in ends)  # a logit below 0 turns them round
                row |= {name: float(means[:, at].mean() / per), f"{name}_low": least, f"{name}_high": most}
            needed = mine[:, :, _AT["needed"]].median(0).values.median()
            below = None if place == 0 else bool(means[:, _AT["held_10"]].max() < own[_AT["held_10"]])
            copies.append({**row, "needed": float(needed), "below": below, "draws": len(means)})
            for size in SIZES:
                at = _AT[f"held_{size}"]
                held.append({"head": head, "kind": kind, "k": size, "held": float(means[:, at].mean()),
                             "low": float(ends[0][at]), "high": float(ends[1][at])})  # fmt: skip
        return copies, held

    def _check(self, head: str) -> dict[str, Any]:
        active_query, active_key, lost, whole, attention, first, accuracy = self.about.mean(0).tolist()
        mean = self.numbers[:, 0].mean(0)
        return {
            "head": head, "sum_error": self.error, "logit": float(mean[0]),
            "cancels": float(mean[_AT["gross"]] / mean[0].abs()), "attention": attention, "first": first,
            "accuracy": accuracy, "active_query": active_query, "active_key": active_key, "lost": lost / whole,
            "n": len(self.words),
        }  # fmt: skip

    def answer(self, where: str, tables: Mapping[str, Sequence[Mapping[str, Any]]], alone: bool) -> str:
        """What is said of a head: alone in full, else in short; that copies hold as much comes before any number."""
        ours, *copies = tables["copies"]
        level = [_OWNERS[row["kind"]] for row in copies if not row["below"]]
        owners = " or ".join(filter(None, (", ".join(level[:-1]), *level[-1:])))
        told = f"these pairs say no more than those of {owners}" if level else ""
        (share, shares), (ten, tens) = (_beside(ours, copies, name) for name in ("explained", "ten"))
        little = ", most of it not" if ours["explained"] < 0.5 else ""
        lies = f"{share} of the logit lies in pairs of features{little} ({shares})"
        above = "" if level else ": more than with any copy without meaning"
        hold = f"the ten largest pairs of a prompt hold {ten} of all that is added, signs left out{above} ({tens})."
        if not alone:
            return f"{self.head}: {told}{'; ' if told else ''}{lies}, and {hold}"
        first = "".join(
            f" The first pair is {pair['query_feature']} of the query with {pair['key_feature']} of the key"
            f" ({_percent(pair['share'])} of the logit)."
            for pair in tables["feature_pairs"][:1]
        )
        return (
            f"{where}{f' {told.capitalize()}.' if told else ''} {lies}; the dictionary misses"
            f" {_percent(tables['check'][0]['lost'])} of the stream here, and its error takes part in the rest.{first}"
            f" {hold[0].upper()}{hold[1:]}"
        )


def _beside(ours: Mapping[str, Any], copies: Sequence[Mapping[str, Any]], name: str) -> tuple[str, str]:
    """A number of the dictionary and the lowest and highest of its copies, with places enough to tell these apart.

    >>> _beside({"ten": 0.0012}, [{"kind": "random", "ten_low": 0.0011, "ten_high": 0.0014}], "ten")
    ('0.12%', 'random 0.11% to 0.14%')
    """
    ends = [(row[f"{name}_low"], row[f"{name}_high"]) for row in copies]
    more = int(any(low != high and _percent(low) == _percent(high) for low, high in ends))
    told = [dict.fromkeys(_percent(end, more) for end in both) for both in ends]
    beside = (f"{_CALLED[row['kind']]} {' to '.join(own)}" for row, own in zip(copies, told, strict=True))
    return _percent(ours[name], more), ", ".join(beside)


def _percent(share: float, more: int = 0) -> str:
    """In whole percents, below ten with one place; with more places where these do not do.

    >>> _percent(0.256), _percent(-0.0314), _percent(-0.0001)
    ('26%', '-3.1%', '0.0%')
    """
    places = more + (0 if abs(share) >= 0.0995 else 1)
    return f"{round(100 * share, places) + 0.0:.{places}f}%"
