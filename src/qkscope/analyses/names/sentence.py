"""A name and a sentence for a head, by template, from what was measured on the tested documents; nothing else is said.

A block leads if it has the largest share among those without a rest or the sham in them. It gives the head its name if
that share is at least 5% and its whole interval lies above what the sham is given; otherwise the head is not named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.names.look import Looked
from qkscope.analyses.names.readings import AFTER_COPY, BEFORE, COPY, ITSELF, RULES, SAME_BEFORE, SHAM
from qkscope.maths.factors import MEAN, REST, shares

UNNAMED = "not named"
LEAST = 0.05  # share under which nothing is named
_KEEPS, _TIMES = 0.25, 3  # precision from which on a head keeps a rule, and how many times chance it has to be
_RESTS = 0.3  # attention off the first token under which it is said
_SECOND = 0.1  # share from which on a second block is said

_THIS = {
    "current": "the asking token", "previous": "the token before the asking one", "2 back": "the token 2 before it",
    "3 back": "the token 3 before it", "4 back": "the token 4 before it",
    "followed": "what followed the asking token's last copy",
    "start": "whether the asking token opens a sentence or line, or was there before",
    "position": "its position",
}  # fmt: skip
_THAT = {
    "current": "the key's token", "previous": "the token before the key", "2 back": "the token 2 before the key",
    "3 back": "the token 3 before the key", "4 back": "the token 4 before the key",
    "followed": "what followed the key token's last copy",
    "start": "whether the key opens a sentence or line, or its token was there before",
    "position": "the key's position",
}  # fmt: skip
_EQUAL = {
    ("current", "current"): (COPY, "same token", "looks for earlier copies of the asking token"),
    ("current", "previous"): (AFTER_COPY, "after a copy", "looks for what followed an earlier copy of its token"),
    ("previous", "previous"): (SAME_BEFORE, "same token before", "looks for tokens with the same token before them"),
}  # fmt: skip


@dataclass(frozen=True)
class HeadShares:
    """One head's shares on the tested documents, with intervals by document."""

    parts: tuple[str, ...]
    share: Float[Tensor, "f f"]
    low: Float[Tensor, "f f"]
    high: Float[Tensor, "f f"]
    sham: tuple[float, float, float]
    rest: tuple[float, float, float]

    @classmethod
    def of(cls, looked: Looked, parts: tuple[str, ...], h: int, seed: int = 0) -> HeadShares:
        """Of one head; documents are resampled, and all blocks share the draws."""
        blocks = looked.blocks[:, h]
        sham, rest = parts.index(SHAM), parts.index(REST)
        plain = [i for i in range(len(parts)) if i not in (sham, rest)]
        of_sham = blocks[:, sham].sum(1) + blocks[:, :, sham].sum(1) - blocks[:, sham, sham]
        of_sham = of_sham - blocks[:, sham, rest] - blocks[:, rest, sham]
        left = looked.logit[:, h] - blocks[:, plain][:, :, plain].sum(dim=(1, 2))
        every = torch.cat([blocks.flatten(1), of_sham[:, None], left[:, None]], dim=1)
        found = shares(every, looked.logit[:, h], seed=seed)
        share, low, high = (x[:-2].reshape(len(parts), len(parts)).cpu() for x in found)
        (s, s_low, s_high), (r, r_low, r_high) = ([float(x[i]) for x in found] for i in (-2, -1))
        return cls(parts, share, low, high, (s, s_low, s_high), (r, r_low, r_high))

    def block(self, query: str, key: str) -> tuple[float, float, float]:
        """A block's share and its interval."""
        at = self.parts.index(query), self.parts.index(key)
        return float(self.share[at]), float(self.low[at]), float(self.high[at])

    def named(self) -> list[tuple[str, str]]:
        """Blocks that may give a name, the largest first."""
        can = [part for part in self.parts if part not in (SHAM, REST)]
        found = [(q, k) for q in can for k in can if self._stands(q, k)]
        return sorted(found, key=lambda pair: -self.block(*pair)[0])

    def _stands(self, query: str, key: str) -> bool:
        share, low, _ = self.block(query, key)
        return share >= LEAST and low > max(self.sham[2], 0.0)


def name_row(looked: Looked, own: HeadShares, h: int) -> dict[str, Any]:
    """The name of a head, the share and interval of the block that gave it, its rule, and the sentence."""
    blocks = own.named()
    numbers: dict[str, Any] = {
        "offset_share": own.block(MEAN, MEAN)[0], "current_current": own.block("current", "current")[0],
        "current_previous": own.block("current", "previous")[0], "sham": own.sham[0], "rest": own.rest[0],
        "mass": float(looked.mass[:, h].sum() / looked.queries.sum()), "offset": peak(looked, h),
    }  # fmt: skip
    if not blocks:
        return {
            "name": UNNAMED, "share": None, "low": None, "high": None, "coverage": None, "precision": None,
            "chance": None, "block": None, **numbers, "rule": None,
            "sentence": f"No reading names it: the largest stay under {LEAST:.0%} of its logit, or within what a sham "
                        f"is given. {_left(own)}",
        }  # fmt: skip
    rates = {rule: rule_rates(looked, h, rule) for rule in RULES}
    name, rule, does = _named(blocks[0], rates, numbers["offset"])
    share, low, high = own.block(*blocks[0])
    said = [f"{_cap(does)}: {share:.0%} of its logit [{low:.0%}, {high:.0%}]."]
    if rule is not None:
        coverage, precision, chance = (rates[rule][column] for column in ("coverage", "precision", "chance"))
        said.append(
            f"Such a key is in sight of {coverage:.0%} of queries; the key with most attention then is one in "
            f"{precision:.0%} (chance {chance:.0%})."
        )
    for pair in blocks[1:2]:
        if own.block(*pair)[0] >= _SECOND:
            said.append(f"Besides, {_named(pair, rates, numbers['offset'])[2]} ({own.block(*pair)[0]:.0%}).")
    if numbers["mass"] < _RESTS:
        said.append(f"It gives {numbers['mass']:.0%} of its attention to tokens other than the first.")
    said.append(_left(own, share))
    ruled = dict.fromkeys(("coverage", "precision", "chance")) if rule is None else rates[rule]
    return {
        "name": name, "share": share, "low": low, "high": high, **ruled, "block": " · ".join(blocks[0]), **numbers,
        "rule": rule, "sentence": " ".join(said),
    }  # fmt: skip


def block_words(query: str, key: str) -> str:
    """What a block is made of, in words.

    >>> block_words("current", "previous"), block_words("mean", "mean")
    ('the asking token with the token before the key', 'distance alone')
    """
    if query == MEAN:
        return "distance alone" if key == MEAN else f"{_THAT[key]}, whatever asks"
    return f"distance, by {_THIS[query]}" if key == MEAN else f"{_THIS[query]} with {_THAT[key]}"


def _left(own: HeadShares, share: float = 0.0) -> str:
    more = ": more than the name explains" if 0 < share < own.rest[0] else ""
    return f"{max(own.rest[0], 0):.0%} of the logit is not explained{more}."


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]


def _named(pair: tuple[str, str], rates: Mapping[str, Mapping[str, float]], offset: int) -> tuple[str, str | None, str]:
    """Name, rule and what the head does, of a block."""
    query, key = pair
    if pair == (MEAN, MEAN):
        return _by_distance(rates, offset)
    if pair in _EQUAL:
        rule, name, does = _EQUAL[pair]
        if rates[rule]["precision"] >= max(_KEEPS, _TIMES * rates[rule]["chance"]):
            return name, rule, does
    if query == MEAN:
        return f"keys by {key}", None, f"looks for certain keys, whatever asks: it goes by {_THAT[key]}"
    if key == MEAN:
        return f"distance by {query}", None, f"how far it looks goes by {_THIS[query]}"
    return f"{query} with {key}", None, f"matches {_THIS[query]} with {_THAT[key]}"


def _by_distance(rates: Mapping[str, Mapping[str, float]], offset: int) -> tuple[str, str | None, str]:
    at = {0: (ITSELF, "itself"), 1: (BEFORE, "previous token")}
    rule, name = at.get(offset, (f"{offset} back", f"{offset} back"))
    if rule in rates and rates[rule]["precision"] >= max(_KEEPS, _TIMES * rates[rule]["chance"]):
        where = {ITSELF: "at the asking token itself", BEFORE: "at the token before"}.get(rule, f"{offset} tokens back")
        return name, rule, f"looks {where}, by distance alone"
    return "by distance", None, f"goes by distance alone, most for {offset} back"


def peak(looked: Looked, h: int) -> int:
    """The distance at which the means alone give the largest logit; at one is the token before."""
    curve = looked.curve[1, h] / looked.count[h].clamp_min(1)
    return int(torch.where(looked.count[h] > 0, curve, -torch.inf).argmax())


def rule_rates(looked: Looked, h: int, rule: str) -> dict[str, float]:
    """How often a rule applies, how often the head then keeps it, and how often a random key would."""
    r = list(RULES).index(rule)
    covered = float(looked.covered[:, h, r].sum())
    if not covered:
        return {"coverage": 0.0, "precision": 0.0, "chance": 0.0}
    return {
        "coverage": covered / float(looked.queries.sum()),
        "precision": float(looked.hits[:, h, r].sum()) / covered,
        "chance": float(looked.chance[:, h, r].sum()) / covered,
    }
