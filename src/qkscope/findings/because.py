"""Because: the words that decide where heads look, found by putting other words in their place.

A look is a head, a query p and a key t with attention a(p, t). Every word in sight is replaced by
others (`Alternatives`) and the model runs again: a word is a *cause* where the 90% interval of what
is left, over alternatives, is below half of a(p, t). Two alternatives screen every word; only those
that leave less than three quarters get all. What relates the causes is tested in `relations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.changes import Inserted, Words, word_replaced
from qkscope.findings.finding import Look, Reason, Row
from qkscope.findings.joint import JointCauses
from qkscope.findings.levels import Effect, WordLevels
from qkscope.findings.registry import SCREENED, cause_of, in_order
from qkscope.findings.relations import WHOLE, WORDS, Relations, few_or_none, interval
from qkscope.rerun.alternatives import Alternatives, Word
from qkscope.rerun.reads import Reruns
from qkscope.rerun.rerun_tokens import Again

SCREEN = 2
"""Alternatives that every word is screened with."""
NEAR = 64
"""Of more than `WHOLE` tokens from a change on, those run that are so near to something."""
# tokens that the screen may run (256 are all words of a prompt of that length), and, on a CPU,
# multiplications
_AFFORDABLE = 2**16
_WORK = 2**42

LevelsOf = Literal["all", "undecided", "none"]
"""Looks whose words get all sources: all, those that no relation decides, or none."""


class Because:
    """Looks of one prompt, and what decides each of them; all looks share every changed prompt.

    Parameters
    ----------
    again : the prompt, run once.
    looks : which heads look from where to where.
    seed : of alternatives.
    count : alternatives of each word.
    screen : those that every word is tried with first; only words that may be causes of a look get
        all.

    Attributes
    ----------
    before : the attention row of each look in the unchanged prompt.
    attention : of it, on the key.
    seen, words : words in sight of any look, and those of them that are tried.
    """

    def __init__(
        self,
        again: Again,
        looks: Sequence[Look],
        seed: int = 0,
        count: int = WORDS,
        screen: int = SCREEN,
    ) -> None:
        self.again = again
        self.looks = list(looks)
        self.seed = seed
        self.count = count
        self.screen = screen
        self.ids = again.ids.cpu()
        self.others = Alternatives(again, seed)
        self.texts = [self.others.lexicon.text(token) for token in self.ids.tolist()]
        self.last = max(look.head.layer for look in looks)
        self._queries = torch.tensor([look.query for look in looks])
        self._keys = torch.tensor([look.key for look in looks])
        self.before = again.attention([(look.head, look.query) for look in looks])
        self.attention = self._at_keys(self.before[None])[0]
        self.seen = self._words_in_sight()
        self.words = self._affordable(self.seen)

    # ------------------------------------------------------------------ which words are tried

    @property
    def _furthest(self) -> int:
        """The last query of all looks."""
        return int(self._queries.max())

    def _words_in_sight(self) -> list[Word]:
        """Words that any look can see; a first token that no text has, as <bos>, stays."""
        first_is_text = bool(self.others.lexicon.usable[self.ids[0]])
        words = [word for word in self.others.words if word.start <= self._furthest]
        return [word for word in words if word.start > 0 or first_is_text]

    def _affordable(self, words: list[Word]) -> list[Word]:
        """All words; of a long prompt copies of what stands at keys and queries, then near ones,
        within a budget.
        """
        places = {place for look in self.looks for place in (look.key, look.query)}
        cores = {
            word.core
            for word in words
            if any(word.start - 2 < place <= word.stop for place in places)
        }

        def distance(word: Word) -> float:
            """To the nearest key or query; a copy of a word there counts as nearer."""
            nearest = min(abs(word.start - place) for place in places)
            return nearest / (NEAR if word.core in cores else 1)

        budget = self._budget()
        most = 3 * NEAR if self.again.runs_alone(self._furthest) else len(self.ids)
        kept = list[Word]()
        for word in sorted(words, key=distance):
            tokens = self._furthest + 1 - word.start
            budget -= self.screen * (tokens if tokens <= WHOLE else most)
            if budget >= 0:
                kept.append(word)
        return sorted(kept)

    def _budget(self) -> int:
        """Tokens that the screen may run."""
        scope = self.again.scope
        if scope.device.type != "cpu":
            return _AFFORDABLE
        layers = {n: call for n, call in self.again.calls.items() if n <= self.last}
        sizes = [call.q[0, :, 0].numel() for call in layers.values()]
        weights = scope.model.num_parameters(exclude_embeddings=True)
        weights_that_run = weights * len(sizes) // len(self.again.calls)
        work_of_a_token = 2 * len(self.ids) * sum(sizes) + weights_that_run
        return min(_AFFORDABLE, _WORK // work_of_a_token)

    @property
    def held(self) -> str:
        """What a sentence must say where tokens far from everything are not run again."""
        is_far = bool(self.words) and self._furthest + 1 - self.words[0].start > WHOLE
        if not is_far or not self.again.runs_alone(self._furthest):
            return ""
        return f"; tokens over {NEAR} away from it, the key and the query are held"

    # ------------------------------------------------------------------ changed prompts

    def with_change(self, change: Words | Inserted) -> Int[Tensor, " t"]:
        """The prompt with a change in it."""
        return change.applied(self.ids)

    def alternatives(self, word: Word) -> list[Words]:
        """The changes that put other words in the place of one."""
        return [word_replaced(word.start, tokens) for tokens in self.others.of(word, self.count)]

    def left(self, rows: Float[Tensor, "b n t"]) -> Float[Tensor, "b n"]:
        """How much of each look is left in attention rows, as a share."""
        return self._at_keys(rows) / self.attention

    def _at_keys(self, rows: Float[Tensor, "b n t"]) -> Float[Tensor, "b n"]:
        keys = self._keys.to(rows.device).expand(len(rows), -1)
        return rows.gather(2, keys[..., None])[..., 0].cpu()

    @cached_property
    def _longer(self) -> Again:
        """The prompt with its last token twice, for changes that put a token in."""
        ids = torch.cat([self.again.ids, self.again.ids[-1:]])
        longer = Again.of(self.again.scope, ids, self.last)
        longer.is_grown = True
        return longer

    def rows(
        self, prompts: Sequence[Int[Tensor, " t"]], ends: Sequence[int] = ()
    ) -> Float[Tensor, "b n t"]:
        """The attention rows of every look in changed prompts, on the model's device.

        Parameters
        ----------
        prompts : as long as the prompt, or one token longer: then every look asks from one token
            further.
        ends : tokens of each prompt that are read; all looks are by default, and those beyond mean
            nothing.
        """
        if not prompts:
            return self.before[None][:0]
        ids = torch.stack(list(prompts))
        more = ids.shape[1] - len(self.ids)
        again = self._longer if more else self.again
        stops = torch.tensor(ends or [self._furthest + 1 + more] * len(ids))
        runs = self.running(ids, stops)
        reads = [(look.head, look.query + more) for look in self.looks]
        return again.run(ids, runs, reads).attention

    def likely_rows(
        self, prompts: Sequence[Int[Tensor, " t"]], ends: Sequence[int]
    ) -> tuple[Reruns, Bool[Tensor, "b t"]]:
        """The attention rows of every look in changed prompts, how likely their tokens are, and
        which of them ran.

        Parameters
        ----------
        prompts : the prompt itself, and changed ones, as long; of the former the tokens run that
            run in any of the latter.
        ends : tokens of each prompt that are read.
        """
        ids = torch.stack(list(prompts))
        runs = self.running(ids, torch.tensor(ends))
        runs[0] |= runs[1:].any(0)
        reads = [(look.head, look.query) for look in self.looks]
        return self.again.run(ids, runs, reads, likelihood=True), runs

    def running(self, ids: Int[Tensor, "b t"], stops: Int[Tensor, " b"]) -> Bool[Tensor, "b t"]:
        """Tokens of changed prompts that run: from the first change to the last reader.

        Of many, those run that are near a change, or before a key or a query.
        """
        base = self.again if ids.shape[1] == len(self.ids) else self._longer
        differs = (ids != base.ids.cpu()).int()
        runs = (differs.cumsum(1) > 0) & (torch.arange(ids.shape[1]) < stops[:, None])
        runs[torch.arange(len(ids)), stops - 1] = True
        ends = torch.zeros(ids.shape[1], dtype=torch.int)
        ends[torch.cat([self._keys, self._queries])] = 1
        is_behind_change = _within(differs, NEAR)
        is_before_end = _within(ends.flip(0), NEAR).flip(0)
        is_short = runs.sum(1, keepdim=True) <= WHOLE
        return runs & (is_behind_change | is_before_end | is_short)

    # ------------------------------------------------------------------ causes

    def reasons(
        self, follow: bool = True, near: bool = True, levels: LevelsOf = "all"
    ) -> list[Reason]:
        """What decides each look.

        Parameters
        ----------
        follow : whether to test that the attention follows another word of the prompt.
        near : whether to test pairs of equal words also where one alone does not take half of the
            attention away.
        levels : looks whose words are told from words of their kind, and from any word.
        """
        self.others.prepare(self.words)
        effects = self._effects_of_suspects()
        reasons = [
            self._reason(look, float(attention))
            for look, attention in zip(self.looks, self.attention, strict=True)
        ]
        relations = Relations(self, effects, near)
        for n, reason in enumerate(reasons):
            reason.findings += relations.findings(n, reason, follow)
        asked = [n for n, reason in enumerate(reasons) if _is_asked(reason, levels)]
        found = WordLevels(self, effects, asked)
        alike = relations.same_kinds(found)
        by_random = effects if levels == "none" else self._effects_of_random_words(effects, found)
        for n, reason in enumerate(reasons):
            reason.words += self._word_rows(n, effects, found, by_random)
            reason.replaced += found.rows(n)
            reason.findings += alike.get(n, []) + found.findings(n)
            if n in found.asked and not any(finding.is_reason for finding in reason.findings):
                reason.findings += JointCauses(self, n, reason).findings()
            if not any(finding.is_reason for finding in reason.findings):
                reason.findings.append(few_or_none(reason.causes))
            reason.findings = in_order(reason.findings)
        return reasons

    def _reason(self, look: Look, attention: float) -> Reason:
        tried = sum(word.start <= look.query for word in self.words)
        seen = sum(word.start <= look.query for word in self.seen)
        return Reason(look, attention, tried, seen)

    def _effects_of_suspects(self) -> dict[Word, Effect]:
        """What all alternatives do, of words that may be causes of any look."""
        screen = self._effects(self.words, slice(0, self.screen))
        ends = dict[Word, int]()  # how far a suspect is read
        for word, effect in screen.items():
            queries = self._queries[self._matters(word, effect.left.mean(0))]
            if len(queries):
                ends[word] = int(queries.max()) + 1
        others = self._effects([*ends], slice(self.screen, self.count), [*ends.values()])
        return {word: _joined(screen[word], more) for word, more in others.items()}

    def _matters(self, word: Word, mean: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Looks that see a word and that its alternatives take much away from."""
        return (mean < SCREENED) & (word.start <= self._queries)

    def _effects_of_random_words(
        self, effects: Mapping[Word, Effect], found: WordLevels
    ) -> dict[Word, Effect]:
        """What random words do alone, of words that did not get all sources for every look."""
        ends = dict[Word, int]()
        for n, look in enumerate(self.looks):
            for word, effect in effects.items():
                matters = bool(self._matters(word, effect.left.mean(0))[n])
                if matters and word not in found.asked.get(n, ()):
                    ends[word] = max(ends.get(word, 0), look.query + 1)
        drawn = {word: self.others.random(word, self.count) for word in ends}
        changes = {
            word: tuple(word_replaced(word.start, ids) for ids in own)
            for word, own in drawn.items()
        }
        alone = self._effects_of(changes, [*ends.values()])
        return {
            word: replace(effect, likely=self._likely_left(word, effects[word]))
            for word, effect in alone.items()
        }

    def _likely_left(self, word: Word, effect: Effect) -> Float[Tensor, " n"] | None:
        """What the likely ones of a word's alternatives leave on average; None without any."""
        likely = {word_replaced(word.start, ids) for ids in self.others.likely(word, self.count)}
        is_likely = torch.tensor([change in likely for change in effect.changes])
        return effect.left[is_likely].mean(0) if bool(is_likely.any()) else None

    def _effects(
        self, words: Sequence[Word], which: slice, ends: Sequence[int] = ()
    ) -> dict[Word, Effect]:
        """What some alternatives of each word do."""
        changes = {word: tuple(self.alternatives(word)[which]) for word in words}
        return self._effects_of(changes, ends)

    def _effects_of(
        self, changes: Mapping[Word, tuple[Words, ...]], ends: Sequence[int] = ()
    ) -> dict[Word, Effect]:
        """What some changes of each word do, read up to a token each."""
        prompts = [self.with_change(change) for own in changes.values() for change in own]
        until = [end for end, own in zip(ends, changes.values(), strict=False) for _ in own]
        rows = self.rows(prompts, until)
        sizes = [len(own) for own in changes.values()]
        parts = zip(self.left(rows).split(sizes), rows.split(sizes), strict=True)
        return {
            word: Effect(own, left, part)
            for (word, own), (left, part) in zip(changes.items(), parts, strict=True)
        }

    def _word_rows(
        self,
        n: int,
        effects: Mapping[Word, Effect],
        found: WordLevels,
        by_random: Mapping[Word, Effect],
    ) -> list[Row]:
        """Rows of the table ``because`` for one look: words that matter to it, strongest first."""
        asked = found.asked.get(n, ())
        matter = [
            word
            for word, effect in effects.items()
            if word in asked or bool(self._matters(word, effect.left.mean(0))[n])
        ]
        rows = list[Row]()
        for word in sorted({*matter, *asked}):
            effect = found.random_words(word) if word in asked else by_random[word]
            if len(effect.left):
                rows.append(self._word_row(n, word, effect))
        return sorted(rows, key=lambda row: row["after"])

    def _word_row(self, n: int, word: Word, effect: Effect) -> Row:
        """What random words in the place of one leave of a look, and likely ones beside them."""
        mean, low, high = (float(value) for value in interval(effect.left[:, n]))
        before = float(self.attention[n])
        gained = effect.rows[:, n].mean(0) - self.before[n]
        gained[word.start : word.stop] = -1
        goes_to = int(gained.argmax())
        return {
            "head": str(self.looks[n].head),
            "position": word.start,
            "end": word.stop,
            "text": word.text,
            "before": before,
            "after": mean * before,
            "low": max(low, 0.0) * before,
            "high": high * before,
            "likely": None if effect.likely is None else float(effect.likely[n]) * before,
            "words": len(effect.left),
            "goes_to": self.texts[goes_to],
            "goes_to_position": goes_to,
            "cause": cause_of(low, high),
        }


def _is_asked(reason: Reason, levels: LevelsOf) -> bool:
    """Whether the words of a look get all sources."""
    if levels == "undecided":
        return not any(finding.is_reason for finding in reason.findings)
    return levels == "all"


def _joined(first: Effect, second: Effect) -> Effect:
    """The effect of two sets of alternatives of one word."""
    return Effect(
        first.changes + second.changes,
        torch.cat([first.left, second.left]),
        torch.cat([first.rows, second.rows]),
    )


def _within(marks: Int[Tensor, "*b t"], distance: int) -> Bool[Tensor, "*b t"]:
    """Places that have a mark at most so many places before them, or at them."""
    windows = pad(marks, (distance, 0)).unfold(-1, distance, 1)
    return windows[..., 1:, :].any(-1)
