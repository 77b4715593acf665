"""Words that decide a look together: either of them is enough, or both are needed.

Where no reason is shown, sets of words are replaced by random ones. *Either*: no single word but
the key's and the query's own breaks the look, but all others together do; the smallest set that does is found
by restoring halves of it, quarters, and so on to single words, and is tested on other draws. *Both*:
a few words each break the look, and with every other word of the prompt replaced it stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.changes import Words, together, word_replaced
from qkscope.findings.finding import Finding, Reason
from qkscope.findings.registry import LEFT, judge
from qkscope.findings.relations import interval
from qkscope.rerun.alternatives import Ids, Word

if TYPE_CHECKING:
    from qkscope.findings.because import Because

MOST_WORDS = 40
"""Words in sight, up to which sets of them are tried."""
MOST_TOGETHER = 3
"""Words of a set that are still a reason."""
_DRAWS = 8
"""Draws of random words that test a set; half as many others find it."""


class JointCauses:
    """Sets of words of one look.

    Parameters
    ----------
    because : the looks of the prompt.
    n : number of the look.
    reason : its words, and what was found so far.
    """

    def __init__(self, because: Because, n: int, reason: Reason) -> None:
        self.because = because
        self.n = n
        self.reason = reason
        self.look = reason.look
        self.seen = [word for word in because.seen if word.start <= self.look.query]
        drawn = {word: because.others.random(word, 2 * _DRAWS) for word in self.seen}
        self.random = {word: own for word, own in drawn.items() if own}

    def findings(self) -> list[Finding]:
        """Either, both, or nothing."""
        if len(self.seen) > MOST_WORDS:
            return []
        starts = {row["position"] for row in self.reason.causes}
        causes = [word for word in self.random if word.start in starts]
        found = [] if any(not self._is_own(word) for word in causes) else self._either()
        return found or self._both(causes)

    def _is_own(self, word: Word) -> bool:
        """Whether a word is the key's or the query's."""
        return self.look.key in word or self.look.query in word

    # ------------------------------------------------------------------ either

    def _either(self) -> list[Finding]:
        """The smallest set of words that decide the look together, though none does alone."""
        words = [word for word in self.random if not self._is_own(word)]
        if len(words) < 2 or not self._breaks(words):
            return []
        chosen = self._smallest(words)
        if not 2 <= len(chosen) <= MOST_TOGETHER:
            return []
        others = [word for word in words if word not in chosen][: len(chosen)]
        alone = [float(self._left([word], _DRAWS).mean()) for word in chosen]
        changes = self._changes(chosen, _DRAWS)
        controls = self._changes(others, _DRAWS) if others else ()
        mean, low, high = interval(self._left_of(changes))
        finding = replace(
            self._finding("either", chosen),
            changes=changes,
            controls=controls,
            alone=min(alone),
            measured=float(mean),
            control=float(self._left_of(controls).mean()) if controls else 1.0,
            low=float(low),
            high=float(high),
        )
        return [judge(finding)]

    def _smallest(self, words: Sequence[Word]) -> list[Word]:
        """Restore parts of a set as long as the rest still breaks the look: halves, then smaller."""
        chosen = list(words)
        size = len(chosen) // 2
        while size:
            for part in list(_parts(chosen, size)):
                rest = [word for word in chosen if word not in part]
                if rest and self._breaks(rest):
                    chosen = rest
            size //= 2
        return chosen

    def _breaks(self, words: Sequence[Word]) -> bool:
        """Whether random words in these places leave less than half of the look."""
        return float(self._left(words, _DRAWS // 2, _DRAWS).mean()) < LEFT

    # ------------------------------------------------------------------ both

    def _both(self, causes: Sequence[Word]) -> list[Finding]:
        """Whether a few words that each break the look keep it where all others are replaced."""
        if not 2 <= len(causes) <= MOST_TOGETHER:
            return []
        others = [word for word in self.random if word not in causes]
        changes = self._changes(others, _DRAWS)
        without = [float(self._left([*others, word], _DRAWS).mean()) for word in causes]
        mean, low, high = interval(self._left_of(changes))
        alone = max(row["after"] for row in self.reason.causes) / self.reason.before
        finding = replace(
            self._finding("both", causes),
            changes=changes,
            controls=self._changes([*others, causes[0]], _DRAWS),
            alone=alone,
            measured=float(mean),
            control=max(without),
            low=float(low),
            high=float(high),
        )
        return [judge(finding)]

    # ------------------------------------------------------------------ runs

    def _finding(self, kind: str, words: Sequence[Word]) -> Finding:
        text = ", ".join(word.text.strip() for word in words)
        starts = tuple(word.start for word in words)
        return Finding(kind, text, starts, examples=tuple(word.text for word in words))

    def _changes(self, words: Sequence[Word], count: int, first: int = 0) -> tuple[Words, ...]:
        """Replace every one of some words, so many times; draws are counted from the first."""
        return tuple(
            together(*(self._replaced(word, first + i) for word in sorted(words)))
            for i in range(count)
        )

    def _replaced(self, word: Word, draw: int) -> Words:
        drawn: list[Ids] = self.random[word]
        return word_replaced(word.start, drawn[draw % len(drawn)])

    def _left(self, words: Sequence[Word], count: int, first: int = 0) -> Float[Tensor, " m"]:
        return self._left_of(self._changes(words, count, first))

    def _left_of(self, changes: Sequence[Words]) -> Float[Tensor, " m"]:
        """What is left of the look with each change."""
        prompts = [self.because.with_change(change) for change in changes]
        rows = self.because.rows(prompts, [self.look.query + 1] * len(prompts))
        return torch.nan_to_num(self.because.left(rows)[:, self.n])


def _parts(words: Sequence[Word], size: int) -> Iterator[Sequence[Word]]:
    for start in range(0, len(words), size):
        yield words[start : start + size]
