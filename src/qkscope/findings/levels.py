"""Levels of a cause: this word decides where a head looks, a word of its kind, or any word there.

Words from three sources take a word's place beside random ones: *near* ones are the nearest rows
of the input embedding, *likely* ones follow what precedes, *fit* ones are those of both that make
the tokens up to the query likeliest, where the tokens behind the word lose at most 2 nats. A word
*keeps* a look that has half of its attention left. Every third of the near and likely words is set
aside: the source is chosen on these, and its other words are compared with the random ones by the
rules of `qkscope.findings.registry`.

All looks of a prompt share its changed prompts; the likelihood comes with the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkscope.changes import Words, word_replaced
from qkscope.findings.finding import Finding, Look, Row
from qkscope.findings.registry import FEWEST_WORDS, KEEPS, LEVELS, SCREENED, is_enough, judge
from qkscope.findings.relations import WHOLE
from qkscope.rerun.alternatives import Ids, Source, Word
from qkscope.sums.intervals import wilson

if TYPE_CHECKING:
    from qkscope.findings.because import Because

OF_A_SOURCE = 30
"""Words that take a word's place, near or likely ones: ten to choose a source on, twenty to test."""
RANDOM_WORDS = 20
"""Random words that take a word's place."""
SUSPECTS = 3
"""Words of a look that get all sources, beside the key's and the query's own; one of a prompt in
which not all tokens run again.
"""
LOST = 2.0
"""Nats that the tokens behind a word may lose with a word that fits."""
_SOURCES: tuple[Source, ...] = ("fit", "near", "likely")  # the first of those that keep as often
_CHOSEN_ON = FEWEST_WORDS // 2  # words of a source that it is chosen on, at least
_EXAMPLES = 3
_Z = 1.645  # of a 90% interval


@dataclass(frozen=True)
class Effect:
    """What the alternatives of a word do to every look.

    Parameters
    ----------
    changes : one for each alternative.
    left : attention left, as a share.
    rows : the attention rows then.
    likely : where the alternatives are random ones alone, what likely ones leave on average.
    """

    changes: tuple[Words, ...]
    left: Float[Tensor, "m n"]
    rows: Float[Tensor, "m n t"]
    likely: Float[Tensor, " n"] | None = None


@dataclass(frozen=True)
class Replacements:
    """Words that were put in the place of one, and what they do to every look.

    Parameters
    ----------
    word : whose place they take.
    ids : what stands there instead.
    sources : near, likely or random: where each comes from.
    is_tested : which of the near and likely words a kind is tested on; it is chosen on the rest.
    left : attention left, as a share.
    rows : the attention rows then.
    chance : log-probability of each word, after what precedes.
    behind : by place, the log-probability of the tokens behind the word up to it; of those that ran.
    usual : the same of the unchanged prompt's.
    """

    word: Word
    ids: tuple[Ids, ...]
    sources: tuple[tuple[Source, ...], ...]
    is_tested: Bool[Tensor, " m"]
    left: Float[Tensor, "m n"]
    rows: Float[Tensor, "m n t"]
    chance: Float[Tensor, " m"]
    behind: Float[Tensor, "m t"]
    usual: Float[Tensor, "m t"]

    @property
    def changes(self) -> tuple[Words, ...]:
        """What was run."""
        return tuple(word_replaced(self.word.start, ids) for ids in self.ids)

    def of(self, source: Source) -> Bool[Tensor, " m"]:
        """The words of a source, but for those that fit: these depend on the look."""
        return torch.tensor([source in own for own in self.sources], dtype=torch.bool)

    def fit(self, query: int) -> Bool[Tensor, " m"]:
        """The words that make the tokens up to a query likeliest: a third of them to choose on."""
        end = max(query, self.word.start)
        lost = self.usual[:, end] - self.behind[:, end]
        likelihood = self.chance + self.behind[:, end]
        fits = ~self.of("random") & (lost <= LOST)
        chosen = torch.zeros_like(fits)
        third = OF_A_SOURCE // 3
        for part, most in ((self.is_tested, OF_A_SOURCE - third), (~self.is_tested, third)):
            own = (fits & part).nonzero()[:, 0]
            best = likelihood[own].argsort(descending=True, stable=True)[:most]
            chosen[own[best]] = True
        return chosen

    def by_source(self, query: int) -> dict[Source, Bool[Tensor, " m"]]:
        """Which words each source has, for looks from a query."""
        found: dict[Source, Bool[Tensor, " m"]] = {"fit": self.fit(query)}
        for source in ("near", "likely", "random"):
            found[source] = self.of(source)
        return found


class WordLevels:
    """Words of every source in the places that may matter to the looks of one prompt.

    Parameters
    ----------
    because : the looks.
    effects : of the words that may be causes, what a few alternatives leave.
    looks : numbers of the looks that are asked about.
    """

    def __init__(
        self, because: Because, effects: Mapping[Word, Effect], looks: Sequence[int]
    ) -> None:
        self.because = because
        self.effects = effects
        self.asked = {n: self._words_of(n) for n in looks}
        ends = dict[Word, int]()
        for n, words in self.asked.items():
            for word in words:
                ends[word] = max(ends.get(word, 0), because.looks[n].query + 1)
        self.replacements = dict(self._run(ends))

    def _words_of(self, n: int) -> list[Word]:
        """The words of a look that get all sources: the key's and the query's, and suspects."""
        look = self.because.looks[n]
        own = [word for word in self.because.seen if look.key in word or look.query in word]
        others = [word for word in self._suspects(n) if word not in own]
        is_long = look.query >= WHOLE
        return sorted(own + others[: 1 if is_long else SUSPECTS])

    def _suspects(self, n: int) -> list[Word]:
        """Words that a look sees and that a few alternatives take much away from, strongest first."""
        query = self.because.looks[n].query
        left = {word: float(effect.left[:, n].mean()) for word, effect in self.effects.items()}
        suspects = [word for word in left if left[word] < SCREENED and word.start <= query]
        return sorted(suspects, key=lambda word: left[word])

    # ------------------------------------------------------------------ runs

    def _run(self, ends: Mapping[Word, int]) -> Iterator[tuple[Word, Replacements]]:
        """Put words of every source in the places of some words, read up to a token each."""
        if not ends:
            return
        others = self.because.others
        others.prepare(list(ends), OF_A_SOURCE)
        chances = others.first_chances(list(ends))
        drawn = {word: others.by_source(word, OF_A_SOURCE, RANDOM_WORDS) for word in ends}
        prompts = [self.because.ids]
        stops = [max(ends.values())]
        for word, by_source in drawn.items():
            for ids in _each_once(by_source):
                prompts.append(self.because.with_change(word_replaced(word.start, ids)))
                stops.append(ends[word])
        reruns, runs = self.because.likely_rows(prompts, stops)
        assert reruns.likelihood is not None
        likelihood = reruns.likelihood.cpu() * runs
        usual = reruns.likelihood[:1].cpu() * runs  # of the same tokens, in the unchanged prompt
        at = 1
        for word, by_source in drawn.items():
            words = _each_once(by_source)
            here = slice(at, at + len(words))
            at += len(words)
            firsts = torch.tensor([ids[0] for ids in words], dtype=torch.long)
            yield (
                word,
                Replacements(
                    word,
                    words,
                    tuple(_sources_of(ids, by_source) for ids in words),
                    _tested(words, by_source),
                    self.because.left(reruns.attention[here]),
                    reruns.attention[here],
                    chances[word][firsts],
                    _up_to(likelihood[here], word.start),
                    _up_to(usual[here], word.start),
                ),
            )

    # ------------------------------------------------------------------ what they show

    def random_left(self, n: int) -> dict[Word, float]:
        """What random words leave of a look on average, of the words that were compared."""
        return {
            word: float(self.random_words(word).left[:, n].mean())
            for word in self.asked.get(n, ())
            if bool(self.replacements[word].of("random").any())
        }

    def random_words(self, word: Word) -> Effect:
        """What the random words in the place of one do, and what the likely ones leave."""
        own = self.replacements[word]
        chosen = own.of("random")
        likely = own.of("likely")
        left = own.left[likely].mean(0) if bool(likely.any()) else None
        return Effect(_some(own, chosen), own.left[chosen], own.rows[chosen], left)

    def findings(self, n: int) -> list[Finding]:
        """The level of each word of a look that was asked about; that any word does, of suspects
        alone.
        """
        look = self.because.looks[n]
        levels = [self._level(n, look, word) for word in self.asked.get(n, ())]
        suspects = {word.start for word in self._suspects(n)}
        return [
            finding
            for finding in levels
            if finding.kind != "any word" or finding.positions[0] in suspects
        ]

    def _level(self, n: int, look: Look, word: Word) -> Finding:
        """The first level whose rule holds; otherwise, that of a kind, which is not shown."""
        by_kind = {
            "any word": self._any_word(n, word),
            "kind": self._kind(n, look, word),
            "this word": self._this_word(n, look, word),
        }
        judged = {kind: judge(by_kind[kind]) for kind in LEVELS}
        return next((one for one in judged.values() if one.is_shown), judged["kind"])

    def _any_word(self, n: int, word: Word) -> Finding:
        own = self.replacements[word]
        finding = Finding("any word", word.text, (word.start,))
        finding = _compared(finding, own, n, own.of("random"), None)
        return replace(finding, counted=self._texts(own, own.of("random")))

    def _kind(self, n: int, look: Look, word: Word) -> Finding:
        """The source that keeps the look most often among words set aside, tested on the others."""
        own = self.replacements[word]
        finding = Finding("kind", word.text, (word.start,))
        source = chosen_source(own, n, look.query)
        if source is None:
            return finding
        chosen = own.by_source(look.query)[source]
        examples = self._keepers(own, n, chosen & ~own.is_tested)
        finding = _compared(finding, own, n, chosen & own.is_tested, own.of("random"))
        counted = self._texts(own, chosen & own.is_tested)
        return replace(finding, examples=examples, counted=counted)

    def _this_word(self, n: int, look: Look, word: Word) -> Finding:
        """The source whose words, of both parts, keep the look most often."""
        own = self.replacements[word]
        finding = Finding("this word", word.text, (word.start,))
        of_sources = own.by_source(look.query)
        enough = [
            of_sources[source] for source in _SOURCES if is_enough(_count(of_sources[source]))
        ]
        if not enough:
            return finding
        most = max(enough, key=lambda chosen: _kept(own, n, chosen))
        finding = _compared(finding, own, n, most, own.of("random"))
        return replace(finding, counted=self._texts(own, most))

    def _keepers(self, own: Replacements, n: int, chosen: Bool[Tensor, " m"]) -> tuple[str, ...]:
        """The words that keep a look best, of some."""
        numbers = chosen.nonzero()[:, 0]
        order = own.left[numbers, n].argsort(descending=True).tolist()
        best = [int(numbers[i]) for i in order if own.left[numbers[i], n] >= KEEPS][:_EXAMPLES]
        return tuple(self.text(own.ids[i]) for i in best)

    def _texts(self, own: Replacements, chosen: Bool[Tensor, " m"]) -> tuple[str, ...]:
        """What some words read as."""
        return tuple(self.text(own.ids[i]) for i in chosen.nonzero()[:, 0].tolist())

    def rows(self, n: int) -> Iterator[Row]:
        """Rows of the table ``words``: every word that was put in, once for each source it has."""
        look = self.because.looks[n]
        for word in self.asked.get(n, ()):
            own = self.replacements[word]
            of_sources = own.by_source(look.query)
            for source in ("near", "likely", "fit", "random"):
                for i in of_sources[source].nonzero()[:, 0].tolist():
                    yield {
                        "position": word.start,
                        "text": word.text,
                        "word": self.text(own.ids[i]),
                        "source": source,
                        "left": float(own.left[i, n]),
                    }

    def text(self, ids: Ids) -> str:
        """What the tokens of a word read as."""
        return "".join(self.because.others.lexicon.text(token) for token in ids)


def chosen_source(own: Replacements, n: int, query: int) -> Source | None:
    """The source whose words keep a look most often, of those that sources are chosen on.

    None where no source has enough words in both parts.
    """
    of_sources = own.by_source(query)
    chosen: Source | None = None
    most = -1.0
    for source in _SOURCES:
        first = of_sources[source] & ~own.is_tested
        second = of_sources[source] & own.is_tested
        if _count(first) >= _CHOSEN_ON and is_enough(_count(second)):
            share = _kept(own, n, first)
            if share > most:
                chosen = source
                most = share
    return chosen


def _compared(
    finding: Finding,
    own: Replacements,
    n: int,
    words: Bool[Tensor, " m"],
    controls: Bool[Tensor, " m"] | None,
) -> Finding:
    """How many of some words keep a look, and of their controls; nothing where these are too few."""
    compared = [words] if controls is None else [words, controls]
    if not is_enough(*map(_count, compared)):
        return finding
    share = _kept(own, n, words)
    low, high = wilson(share * _count(words), _count(words), _Z)
    finding = replace(finding, changes=_some(own, words), measured=share, low=low, high=high)
    if controls is None:
        return finding
    return replace(finding, controls=_some(own, controls), control=_kept(own, n, controls))


def _some(own: Replacements, chosen: Bool[Tensor, " m"]) -> tuple[Words, ...]:
    """The changes that put some of the words in."""
    changes = own.changes
    return tuple(changes[i] for i in chosen.nonzero()[:, 0].tolist())


def _count(chosen: Bool[Tensor, " m"]) -> int:
    return int(chosen.sum())


def _kept(own: Replacements, n: int, chosen: Bool[Tensor, " m"]) -> float:
    """The share of some words that keep a look."""
    return float((own.left[chosen, n] >= KEEPS).float().mean())


def _each_once(by_source: Mapping[Source, Sequence[Ids]]) -> tuple[Ids, ...]:
    """The words of all sources, each once."""
    return tuple(dict.fromkeys(ids for own in by_source.values() for ids in own))


def _sources_of(ids: Ids, by_source: Mapping[Source, Sequence[Ids]]) -> tuple[Source, ...]:
    return tuple(source for source, own in by_source.items() if ids in own)


def _tested(words: Sequence[Ids], by_source: Mapping[Source, Sequence[Ids]]) -> Bool[Tensor, " m"]:
    """Set every third word aside, so that each source has as large a part: every third near word,
    then likely words until a third of these is.
    """
    is_tested = {ids: i % 3 > 0 for i, ids in enumerate(by_source["near"])}
    likely = by_source["likely"]
    known = [is_tested[ids] for ids in likely if ids in is_tested]
    tested = sum(known)
    aside = len(known) - tested
    for ids in likely:
        if ids not in is_tested:
            is_tested[ids] = 2 * aside >= tested
            tested += is_tested[ids]
            aside += not is_tested[ids]
    return torch.tensor([is_tested.get(ids, False) for ids in words], dtype=torch.bool)


def _up_to(likelihood: Float[Tensor, "m t"], start: int) -> Float[Tensor, "m t"]:
    """By place, the log-probability of the tokens behind a word's first one, up to that place."""
    from_start = likelihood.clone()
    from_start[:, :start] = 0
    summed = from_start.cumsum(1).roll(1, 1)
    summed[:, 0] = 0
    return summed
