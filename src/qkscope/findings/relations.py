"""Relations between words that decide a look: proposed, tested by changing the words, and judged.

- *same word*: two causes with one text; each changed alone breaks the attention, both changed into
  one other word do not, and both changed into two different words do, of one kind or not.
- *same kind*: two causes; each changed alone breaks the attention, both changed into two words of
  one kind (a word and the nearest one in the input embedding) do not, and both changed into words
  of two kinds do.
- *follows*: the word asked about becomes another word of the prompt, and the attention goes where
  that one stands.
- *position*: no word matters, and a word put in after the key moves the attention to the token at
  the same distance.
- *self*; *no single word*; *no few words* (more than four causes and no reason is shown).

All looks share the changed prompts: what is needed for any of them runs in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from scipy.stats import t as student
from torch import Tensor

from qkscope.changes import Inserted, Words, together, word_replaced
from qkscope.findings.finding import Finding, Look, Reason, Row
from qkscope.findings.registry import FEW, LEFT, SCREENED, judge
from qkscope.rerun.alternatives import Ids, Word
from qkscope.seeds import derived_seed

if TYPE_CHECKING:
    from qkscope.findings.because import Because
    from qkscope.findings.levels import Effect, WordLevels

WORDS = 8
"""Alternatives of a word."""
LEAST = 6
"""Words that a test of a relation needs."""
_INSERTED = 2  # words that are put in after a key, where many looks share a passage
WHOLE = 256
"""Tokens from a change on, from which on only those run that are near it, a key or a query."""

_ALIKE = 3  # strongest words of a look of which every two may be of one kind

Pair = tuple[Word, Word]
"""Two words, the earlier one first."""
PairChanges = tuple[tuple[Words, ...], tuple[Words, ...]]
"""Changes of both words that should keep a look, and those that should not."""


@dataclass(frozen=True)
class PairEffect:
    """What is left of every look with both words of a pair replaced.

    Parameters
    ----------
    same, different : changes into one other word, and into two; or into two words of one kind, and
        of two.
    mean, low, high : what the former leave on average, with its 90% interval.
    control : what the latter leave.
    """

    same: tuple[Words, ...]
    different: tuple[Words, ...]
    mean: Float[Tensor, " n"]
    low: Float[Tensor, " n"]
    high: Float[Tensor, " n"]
    control: Float[Tensor, " n"]


@dataclass(frozen=True)
class Target:
    """Another word of the prompt that can be asked about, and the key where it stands then."""

    change: Words
    key: int


class Relations:
    """What relates the words that decide some looks of one prompt.

    Parameters
    ----------
    because : the looks.
    effects : of the words that may be causes, what their alternatives leave.
    near : whether pairs are tested also where one word alone leaves half of the attention or more.
    """

    def __init__(self, because: Because, effects: Mapping[Word, Effect], near: bool) -> None:
        self.because = because
        self.effects = effects
        means = {word: effect.left.mean(0).tolist() for word, effect in effects.items()}
        self.left = [
            {word: means[word][n] for word in effects if word.start <= look.query}
            for n, look in enumerate(because.looks)
        ]
        threshold = SCREENED if near else LEFT
        self.pairs = [equal_pairs(left, threshold) for left in self.left]
        self.positions = self._test_positions()
        self.pair_effects = self.test_pairs(self._ends_of(self.pairs))
        self.kind_effects = dict[Pair, PairEffect | None]()
        if because.count >= WORDS:
            self._test_kinds(self.pairs)

    def findings(self, n: int, reason: Reason, follow: bool) -> list[Finding]:
        """All findings of one look, in the order of precedence.

        Parameters
        ----------
        n : number of the look.
        reason : its words.
        follow : whether to test that the attention follows another word.
        """
        look = reason.look
        findings = list[Finding]()
        if look.query == look.key:
            finding = Finding("self", self.because.texts[look.key], (look.key,))
            findings.append(judge(finding))
        if n in self.positions:
            findings.append(self.positions[n])
        same = self._same_words(n)
        findings += same
        if follow and same and same[0].is_shown:
            findings.append(self._follows(n, same[0]))
        return findings

    # ------------------------------------------------------------------ the same word

    def _ends_of(self, of_looks: Sequence[Sequence[Pair]]) -> dict[Pair, int]:
        """By pair, the token before which all looks ask that it may matter to."""
        ends = dict[Pair, int]()
        for look, pairs in zip(self.because.looks, of_looks, strict=True):
            for pair in pairs:
                ends[pair] = max(ends.get(pair, 0), look.query + 1)
        return ends

    def test_pairs(
        self, pairs: Mapping[Pair, int], changes_of: Callable[[Pair], PairChanges] | None = None
    ) -> dict[Pair, PairEffect | None]:
        """Replace both words of pairs, for looks whose query comes before a token.

        None for a pair that too few other words fit.
        """
        changes_of = changes_of or self._changes_of
        changes = {pair: changes_of(pair) for pair in pairs}
        tested = {pair: both for pair, both in changes.items() if both[0]}
        prompts = list[Tensor]()
        ends = list[int]()
        for pair, (same, different) in tested.items():
            prompts += [self.because.with_change(change) for change in (*same, *different)]
            ends += [pairs[pair]] * (len(same) + len(different))
        left = self.because.left(self.because.rows(prompts, ends))
        sizes = [len(same) + len(different) for same, different in tested.values()]
        effects: dict[Pair, PairEffect | None] = dict.fromkeys(pairs)
        for (pair, (same, different)), both in zip(tested.items(), left.split(sizes), strict=True):
            of_same, of_different = both.split([len(same), len(different)])
            control = of_different.mean(0)
            effects[pair] = PairEffect(same, different, *interval(of_same), control)
        return effects

    def _changes_of(self, pair: Pair) -> PairChanges:
        """Make both words of a pair one other word, or two; nothing where too few fit."""
        return self._changes(pair, lambda tokens: tokens)

    def _changes_of_kind(self, pair: Pair) -> PairChanges:
        """Make both words of a pair two words of one kind, or of two; nothing where too few fit."""
        others = self.because.others
        return self._changes(pair, lambda tokens: others.nearest(tokens))

    def _changes(self, pair: Pair, partner: Callable[[Ids], Ids | None]) -> PairChanges:
        """Put a word in the earlier place of a pair and its partner in the later one; or the
        partner of the next word.
        """
        a, b = pair
        others = self.because.others
        fitting = list[tuple[Words, Words]]()
        for tokens in dict.fromkeys(others.of(b, WORDS) + others.of(a, WORDS)):
            other = partner(tokens)
            x = others.lexicon.variant(tokens, a.text)
            y = None if other is None else others.lexicon.variant(other, b.text)
            if x is not None and y is not None and (len(x), len(y)) == (len(a), len(b)):
                fitting.append((word_replaced(a.start, x), word_replaced(b.start, y)))
            if len(fitting) == WORDS:
                break
        if len(fitting) < LEAST:
            return (), ()
        next_ones = [*fitting[1:], fitting[0]]
        same = tuple(together(x, y) for x, y in fitting)
        different = tuple(together(x, y) for (x, _), (_, y) in zip(fitting, next_ones, strict=True))
        return same, different

    def _same_words(self, n: int) -> list[Finding]:
        """What equal words are to a look: those shown first, then words before punctuation."""
        findings = [self._same_word(n, pair) for pair in self.pairs[n]]
        return sorted(
            findings,
            key=lambda finding: (
                not finding.is_shown,
                not finding.text.strip().isalnum(),
                finding.alone,
            ),
        )

    def _same_word(self, n: int, pair: Pair) -> Finding:
        effect = self.pair_effects[pair]
        alone = max(self.left[n][word] for word in pair)
        positions = (pair[0].start, pair[1].start)
        finding = Finding("same word", pair[0].text, positions, alone=alone)
        if effect is not None:
            finding = replace(
                finding,
                changes=effect.same,
                controls=effect.different,
                measured=float(effect.mean[n]),
                control=self._different(n, pair, effect),
                low=float(effect.low[n]),
                high=float(effect.high[n]),
            )
        return judge(finding)

    def _different(self, n: int, pair: Pair, effect: PairEffect) -> float:
        """What two different words leave: of any kinds, or of one, whichever leave more."""
        of_kind = self.kind_effects.get(pair)
        different = float(effect.control[n])
        return different if of_kind is None else max(different, float(of_kind.mean[n]))

    # ------------------------------------------------------------------ words of one kind

    def same_kinds(self, found: WordLevels) -> dict[int, list[Finding]]:
        """By look, which of its strongest words need only be of one kind, those shown first.

        How strong a word is rests on random words, of looks whose words got all sources.
        """
        left = {n: found.random_left(n) for n in found.asked}
        pairs = {n: pairs_of_strongest(left[n]) for n in left}
        self._test_kinds([pairs.get(n, []) for n in range(len(self.left))])
        findings = dict[int, list[Finding]]()
        for n, own in pairs.items():
            judged = [self._same_kind(n, pair, left[n]) for pair in own]
            tested = [finding for finding in judged if finding.measured is not None]
            findings[n] = sorted(tested, key=lambda finding: not finding.is_shown)
        return findings

    def _test_kinds(self, of_looks: Sequence[Sequence[Pair]]) -> None:
        """Replace both words of pairs by words of one kind, and of two, once each."""
        ends = self._ends_of(of_looks)
        new = {pair: end for pair, end in ends.items() if pair not in self.kind_effects}
        self.kind_effects |= self.test_pairs(new, self._changes_of_kind)

    def _same_kind(self, n: int, pair: Pair, left: Mapping[Word, float]) -> Finding:
        effect = self.kind_effects[pair]
        a, b = pair
        alone = max(left[a], left[b])
        both = f"{a.text.strip()}, {b.text.strip()}"
        finding = Finding("same kind", both, (a.start, b.start), alone=alone)
        if effect is not None:
            finding = replace(
                finding,
                changes=effect.same,
                controls=effect.different,
                measured=float(effect.mean[n]),
                control=float(effect.control[n]),
                low=float(effect.low[n]),
                high=float(effect.high[n]),
                examples=(a.text, b.text),
            )
        return judge(finding)

    # ------------------------------------------------------------------ another word asked about

    def _follows(self, n: int, same: Finding) -> Finding:
        """Ask for another word of the prompt: the later one of two equal words becomes that one."""
        a, b = next(pair for pair in self.pairs[n] if pair[0].text == same.text)
        look = self.because.looks[n]
        finding = Finding("follows", b.text, (b.start,))
        targets = self._targets(a, b, look) if a.start <= look.key < b.start else []
        draws = torch.Generator().manual_seed(derived_seed(self.because.seed, "follows", b.start))
        order = torch.randperm(len(targets), generator=draws).tolist()
        chosen = [targets[i] for i in order[: self.because.count]]
        if not chosen:
            return judge(finding)
        prompts = [self.because.with_change(target.change) for target in chosen]
        rows = self.because.rows(prompts)[:, n] / self.because.attention[n]
        moved = [row[target.key] for row, target in zip(rows, chosen, strict=True)]
        without = self.effects[b].rows[:, n, [target.key for target in chosen]]
        finding = replace(
            finding,
            changes=tuple(target.change for target in chosen),
            alone=float(rows[:, look.key].mean()),
            measured=float(torch.stack(moved).mean()),
            control=float(without.mean() / self.because.attention[n]),
        )
        return judge(finding)

    def _targets(self, a: Word, b: Word, look: Look) -> list[Target]:
        """Other words of the prompt that can take the place of the one asked about.

        The key stands to each as the key of the look stands to the word ``a``.
        """
        lexicon = self.because.others.lexicon
        tokens = self.because.ids.tolist()
        targets = list[Target]()
        for word in self.because.words:
            like = lexicon.variant(tokens[word.start : word.stop], b.text)
            key = word.start + look.key - a.start
            if look.key >= a.stop:
                key = word.stop + look.key - a.stop
            fits = word.core != a.core and len(word) == len(b) and word.core[:1].isalnum()
            if like is None or not fits or key >= b.start:
                continue
            is_kept = lexicon.texts[like[0]].strip() == self.because.texts[word.start].strip()
            if is_kept:
                targets.append(Target(word_replaced(b.start, like), key))
        return targets

    # ------------------------------------------------------------------ position

    def _test_positions(self) -> dict[int, Finding]:
        """Put a word in after the key of looks that no word decides, and read the same distance."""
        undecided = [
            n
            for n, look in enumerate(self.because.looks)
            if look.query != look.key and not any(share < LEFT for share in self.left[n].values())
        ]
        changes, ends = self._insertions([self.because.looks[n] for n in undecided])
        prompts = [
            self.because.with_change(change) for of_key in changes.values() for change in of_key
        ]
        rows = self.because.rows(prompts, ends)
        stays = self.because.left(rows[:, :, 0:])
        moves = self.because.left(rows[:, :, 1:])
        sizes = [len(of_key) for of_key in changes.values()]
        stays_by_key = dict(zip(changes, stays.split(sizes), strict=True))
        moves_by_key = dict(zip(changes, moves.split(sizes), strict=True))
        findings = dict[int, Finding]()
        for n in undecided:
            key = self.because.looks[n].key
            if key not in changes:
                continue
            finding = Finding(
                "position",
                self.because.texts[key],
                (key,),
                changes=changes[key],
                alone=float(stays_by_key[key][:, n].mean()),
                measured=float(moves_by_key[key][:, n].mean()),
            )
            findings[n] = judge(finding)
        return findings

    def _insertions(
        self, looks: Sequence[Look]
    ) -> tuple[dict[int, tuple[Inserted, ...]], list[int]]:
        """By key, the tokens to put in after it; and how far each of these prompts is read."""
        furthest = dict[int, int]()
        for look in looks:
            if look.query - look.key <= WHOLE:
                furthest[look.key] = max(furthest.get(look.key, 0), look.query)
        is_small = self.because.count < WORDS
        least = _INSERTED if is_small else LEAST
        changes = dict[int, tuple[Inserted, ...]]()
        ends = list[int]()
        for key, query in furthest.items():
            token = Word(key, key + 1, self.because.texts[key])
            others = self.because.others.of(token, self.because.count)
            single = [tokens[0] for tokens in others if len(tokens) == 1]
            if is_small:
                single = single[:_INSERTED]
            if len(single) >= least:
                changes[key] = tuple(Inserted(key + 1, other) for other in single)
                ends += [query + 2] * len(single)
        return changes, ends


def few_or_none(causes: Sequence[Row]) -> Finding:
    """What is said where no reason is shown: how many words are causes."""
    kind = "no single word"
    if causes:
        kind = "few words" if len(causes) <= FEW else "no few words"
    text = ", ".join(row["text"].strip() for row in causes)
    return judge(Finding(kind, text, tuple(row["position"] for row in causes)))


def equal_pairs(left: Mapping[Word, float], threshold: float) -> list[Pair]:
    """Pair the two strongest words of each text, of those that leave less than a threshold."""
    by_core = dict[str, list[Word]]()
    for word, share in left.items():
        if share < threshold:
            by_core.setdefault(word.core, []).append(word)
    pairs = list[Pair]()
    for words in by_core.values():
        strongest = sorted(words, key=lambda word: left[word])[:2]
        if len(strongest) == 2:
            pairs.append((min(strongest), max(strongest)))
    return pairs


def pairs_of_strongest(left: Mapping[Word, float]) -> list[Pair]:
    """Every two of the strongest words, of those that break a look alone and are one token each."""
    causes = [word for word in left if left[word] < LEFT and len(word) == 1]
    strongest = sorted(sorted(causes, key=lambda word: left[word])[:_ALIKE])
    return [*combinations(strongest, 2)]


def interval(values: Float[Tensor, " m *n"]) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of some numbers, and the ends of its 90% interval (Student's t)."""
    mean = values.mean(0)
    if len(values) < 2:
        return mean, torch.full_like(mean, -torch.inf), torch.full_like(mean, torch.inf)
    quantile = float(student.ppf(0.95, len(values) - 1))
    half = quantile * values.std(0) / len(values) ** 0.5
    return mean, mean - half, mean + half
