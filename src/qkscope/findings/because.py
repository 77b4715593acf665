"""Because: the words that decide where heads look, found by putting other words in their place.

A look is a head, a query p and a key t with attention a(p, t). Every word in sight is replaced by
others (`Alternatives`) and the model runs again: a word is a *cause* where the 90% interval of what
is left, over alternatives, is below half of a(p, t). The relations between causes are tests of
their own, each beside a control:

- *same word*: two causes with one text; each changed alone breaks the attention, both changed into
  one other word do not, and both changed into two different words do.
- *follows*: the word asked about becomes another word of the prompt, and the attention goes where
  that one stands.
- *position*: no word matters, and a word put in after the key moves the attention to the token at
  the same distance.
- *key word*, *query word*: a cause at the key's or the query's own word.
- *self*; *no single word*; *no few words* (more than four causes and none of the above).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import pad

from qkscope.heads import Head
from qkscope.rerun.alternatives import Alternatives, Word
from qkscope.rerun.rerun_tokens import Again
from qkscope.seeds import derived_seed

Effect = tuple[Float[Tensor, "m n"], Float[Tensor, "m n t"]]
"""What the alternatives of a word leave of each look, and the attention rows then."""
Pair = tuple[Word, Word]
# How many words took a pair's place; of each look, what is left with both changed into one other
# word, the ends of its interval, and what is left with two different ones.
Together = tuple[int, list[list[float]]]
# alternatives of a word, and those that every word is screened with
WORDS = 8
SCREEN = 2
# of the attention: a cause leaves less; what two alternatives leave more of is none
_LEFT = 0.5
_SCREENED = 0.75
# by how much a pair must restore more than its controls, with so many words
_GAIN = 0.25
_LEAST = 6
_FEW = 4  # causes that are a reason
_SAID = {True: "shown", False: "not shown"}
_INSERTED = 2  # words that are put in after a key, where many looks share a passage
# tokens that the screen may run, of 256 all words; on a CPU, multiplications
_AFFORDABLE = 2**16
_WORK = 2**42
# of more tokens than these from a change on, those run that are near it, a key or a query
_WHOLE = 256
NEAR = 64


class Look(NamedTuple):
    """A head that looks from one token at another."""

    head: Head
    query: int
    key: int


@dataclass
class Reason:
    """What decides one look: words by how much of the attention is left without them, and tested
    relations.

    Attributes
    ----------
    before : attention of the look.
    tried, seen : words that were changed, of so many in sight.
    words : rows of the table ``because``, strongest first.
    relations : rows of the table ``relation``, in the order of precedence.
    """

    look: Look
    before: float
    tried: int
    seen: int
    words: list[dict[str, Any]] = field(default_factory=list)
    relations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def causes(self) -> list[dict[str, Any]]:
        """Words whose replacement breaks the attention."""
        return [row for row in self.words if row["cause"] == "yes"]

    @property
    def kind(self) -> str:
        """The first relation that was shown."""
        return next(
            (row["kind"] for row in self.relations if row["verdict"] == "shown"), "no few words"
        )


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
        self.last = max(look.head.layer for look in looks)
        furthest = max(look.query for look in looks)
        self._queries = torch.tensor([x.query for x in looks])
        self._keys = torch.tensor([x.key for x in looks])
        self.before = again.attention([(look.head, look.query) for look in looks])
        self.attention = self._at_keys(self.before[None])[0]
        usable = self.others.lexicon.usable
        self.seen = [
            word
            for word in self.others.words
            if word.start <= furthest and (word.start or usable[self.ids[0]])
        ]  # a first token that no text has, as <bos>, stays
        self.words = self._affordable(self.seen, furthest)
        far = (
            self.words
            and furthest + 1 - self.words[0].start > _WHOLE
            and again.runs_alone(furthest)
        )
        self.held = (
            f"; tokens over {NEAR} away from it, the key and the query are held" if far else ""
        )
        self.texts = [self.others.lexicon.text(i) for i in self.ids.tolist()]

    def _affordable(self, words: list[Word], furthest: int) -> list[Word]:
        """All words; of a long prompt copies of what stands at keys and queries, then near ones,
        within a budget.
        """
        places = {place for look in self.looks for place in (look.key, look.query)}
        cores = {
            word.core
            for word in words
            if any(word.start - 2 < place <= word.stop for place in places)
        }

        def rank(word: Word) -> float:
            return min(abs(word.start - place) for place in places) / (
                NEAR if word.core in cores else 1
            )

        left = _AFFORDABLE
        kept = list[Word]()
        scope = self.again.scope
        if scope.device.type == "cpu":
            asked = [
                call.q[0, :, 0].numel()
                for layer, call in self.again.calls.items()
                if layer <= self.last
            ]
            weights = (
                scope.model.num_parameters(exclude_embeddings=True)
                * len(asked)
                // len(self.again.calls)
            )
            left = min(left, _WORK // (2 * len(self.ids) * sum(asked) + weights))
        most = 3 * NEAR if self.again.runs_alone(furthest) else len(self.ids)
        for word in sorted(words, key=rank):
            tokens = furthest + 1 - word.start
            left -= self.screen * (tokens if tokens <= _WHOLE else most)
            kept += [word] if left >= 0 else []
        return sorted(kept)

    # ------------------------------------------------------------------ changed prompts

    def _at_keys(self, rows: Float[Tensor, "b n t"]) -> Float[Tensor, "b n"]:
        return rows.gather(2, self._keys.to(rows.device).expand(len(rows), -1)[..., None])[
            ..., 0
        ].cpu()

    def put(self, *changes: tuple[Word, Sequence[int]]) -> Int[Tensor, " t"]:
        """The prompt with other tokens in place of some words."""
        ids = self.ids.clone()
        for word, tokens in changes:
            ids[word.start : word.stop] = torch.tensor(tokens)
        return ids

    @cached_property
    def _longer(self) -> Again:
        return Again.of(
            self.again.scope, torch.cat([self.again.ids, self.again.ids[-1:]]), self.last
        )

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
        stops = torch.tensor(ends or [int(self._queries.max()) + 1 + more] * len(ids))
        runs = self.running(ids, stops)
        reads = [(look.head, look.query + more) for look in self.looks]
        return again.run(ids, runs, reads).attention

    def running(self, ids: Int[Tensor, "b t"], stops: Int[Tensor, " b"]) -> Bool[Tensor, "b t"]:
        """Tokens of changed prompts that run: from the first change to the last reader; of many,
        those near.
        """
        differ = (
            ids != (self.again if ids.shape[1] == len(self.ids) else self._longer).ids.cpu()
        ).int()
        runs = (differ.cumsum(1) > 0) & (torch.arange(ids.shape[1]) < stops[:, None])
        runs[torch.arange(len(ids)), stops - 1] = True
        ends = torch.zeros(ids.shape[1], dtype=torch.int).index_fill(
            0, torch.cat([self._keys, self._queries]), 1
        )
        behind = pad(differ, (NEAR, 0)).unfold(-1, NEAR, 1)
        before = pad(ends.flip(0), (NEAR, 0)).unfold(-1, NEAR, 1)
        near = behind[:, 1:].any(-1) | before[1:].any(-1).flip(0)
        return runs & (near | (runs.sum(1, keepdim=True) <= _WHOLE))

    # ------------------------------------------------------------------ causes

    def reasons(self, follow: bool = True, near: bool = True) -> list[Reason]:
        """What decides each look.

        Parameters
        ----------
        follow : whether to test that the attention follows another word of the prompt.
        near : whether to test pairs of equal words also where one alone does not take half of the
            attention away.
        """
        self.others.prepare(self.words)
        first = self._effects(self.words, slice(0, self.screen))
        suspects = dict[
            Word, int
        ]()  # words that may be causes of looks, and how far these are read
        for word, (left, _) in zip(self.words, first, strict=True):
            asking = self._queries[(left.mean(0) < _SCREENED) & (word.start <= self._queries)]
            suspects |= {word: int(asking.max()) + 1} if len(asking) else {}
        more = self._effects([*suspects], slice(self.screen, self.count), [*suspects.values()])
        begun = dict(zip(self.words, first, strict=True))
        effects = {
            word: (torch.cat([begun[word][0], left]), torch.cat([begun[word][1], rows]))
            for word, (left, rows) in zip(suspects, more, strict=True)
        }
        reasons = list[Reason]()
        for look, a in zip(self.looks, self.attention, strict=True):
            tried = sum(word.start <= look.query for word in self.words)
            seen = sum(word.start <= look.query for word in self.seen)
            reasons.append(Reason(look, float(a), tried, seen))
        for word in suspects:
            for n, row in self._word_rows(word, *effects[word]):
                reasons[n].words.append(row)
        for reason in reasons:
            reason.words.sort(key=lambda row: row["after"])
        self._relate(reasons, effects, follow, _SCREENED if near else _LEFT)
        return reasons

    def _effects(
        self, words: Sequence[Word], which: slice, ends: Sequence[int] = ()
    ) -> list[Effect]:
        """Attention left [m, n] by some alternatives of each word, and the attention rows [m, n,
        t].
        """
        prompts = [
            [self.put((word, ids)) for ids in self.others.of(word, self.count)[which]]
            for word in words
        ]
        until = [end for end, each in zip(ends, prompts, strict=False) for _ in each]
        rows = self.rows([ids for each in prompts for ids in each], until)
        left = self._at_keys(rows) / self.attention
        sizes = [len(each) for each in prompts]
        return list(zip(left.split(sizes), rows.split(sizes), strict=True))

    def _word_rows(
        self, word: Word, left: Tensor, rows: Tensor
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows of the table ``because`` for one word, one for each look that it matters to."""
        mean, low, high = interval(left)
        gained = rows.mean(0) - self.before
        gained[:, word.start : word.stop] = -1
        to = gained.argmax(1).tolist()
        for n in ((mean < _SCREENED) & (word.start <= self._queries)).nonzero()[:, 0].tolist():
            before = float(self.attention[n])
            ends = (float(low[n]), float(high[n]))
            row = {
                "head": str(self.looks[n].head), "position": word.start, "end": word.stop, "text": word.text,
                "before": before, "after": float(mean[n]) * before, "low": max(ends[0], 0.0) * before,
                "high": ends[1] * before, "words": len(left), "goes_to": self.texts[to[n]],
                "goes_to_position": to[n], "cause": "yes" if ends[1] < _LEFT else "open" if ends[0] < _LEFT else "no",
            }  # fmt: skip
            yield n, row

    # ------------------------------------------------------------------ relations

    def _relate(
        self, reasons: list[Reason], effects: Mapping[Word, Effect], follow: bool, least: float
    ) -> None:
        every = {
            word: (left.mean(0).tolist(), (word.start <= self._queries).tolist())
            for word, (left, _) in effects.items()
        }
        means = [
            {word: left[n] for word, (left, sees) in every.items() if sees[n]}
            for n in range(len(reasons))
        ]
        broken = [[word for word, left in own.items() if left < _LEFT] for own in means]
        near = [[word for word, left in own.items() if left < least] for own in means]
        moved = self._moved(
            [n for n, look in enumerate(self.looks) if not broken[n] and look.query != look.key]
        )
        pairs = [
            [pair for core in {word.core for word in own} if (pair := _pair(core, own, means[n]))]
            for n, own in enumerate(near)
        ]
        ends = dict[Pair, int]()
        for look, own in zip(self.looks, pairs, strict=True):
            ends |= {pair: max(ends.get(pair, 0), look.query + 1) for pair in own}
        tested = self._same(ends)
        for n, (reason, look) in enumerate(zip(reasons, self.looks, strict=True)):
            if look.query == look.key:
                reason.relations.append(
                    relation("self", self.texts[look.key], [look.key], verdict="shown")
                )
            if n in moved:
                reason.relations.append(moved[n])
            same = [
                self._same_row(n, pair, max(means[n][word] for word in pair), tested[pair])
                for pair in pairs[n]
            ]
            same.sort(
                key=lambda row: (
                    row["verdict"] != "shown",
                    not row["text"].strip().isalnum(),
                    row["alone"],
                )
            )
            reason.relations += same
            if follow and same and same[0]["verdict"] == "shown":
                pair = next(pair for pair in pairs[n] if pair[0].text == same[0]["text"])
                reason.relations.append(self._follows(n, pair, effects[pair[1]][1]))
            starts = {row["position"] for row in reason.causes}
            causes = [word for word in effects if word.start in starts]
            for kind, at in (("key word", look.key), ("query word", look.query)):
                for word in (word for word in causes if at in word and look.query != look.key):
                    rest = sorted(left for other, left in means[n].items() if other != word)
                    control = rest[len(rest) // 2] if rest else None
                    reason.relations.append(
                        relation(
                            kind,
                            word.text,
                            [word.start],
                            alone=means[n][word],
                            control=control,
                            verdict="shown",
                        )
                    )
            if all(row["verdict"] != "shown" for row in reason.relations):
                kind = (
                    "no few words"
                    if len(causes) > _FEW
                    else "few words"
                    if causes
                    else "no single word"
                )
                text = ", ".join(word.text.strip() for word in causes)
                reason.relations.append(
                    relation(kind, text, [word.start for word in causes], verdict="shown")
                )

    def _same(self, pairs: Mapping[Pair, int]) -> dict[Pair, Together | None]:
        """Attention left with both words of a pair replaced, for looks whose query comes before a
        token.
        """
        lexicon = self.others.lexicon
        prompts = list[Tensor]()
        ends = list[int]()
        counts = dict[Pair, int]()
        for (a, b), end in pairs.items():
            both = []
            for ids in dict.fromkeys(self.others.of(b, WORDS) + self.others.of(a, WORDS)):
                x = lexicon.variant(ids, a.text)
                y = lexicon.variant(ids, b.text)
                if x is not None and y is not None and (len(x), len(y)) == (len(a), len(b)):
                    both.append((x, y))
            both = both[:WORDS] if len(both) >= _LEAST else []
            counts[a, b] = len(both)
            prompts += [self.put((a, x), (b, y)) for x, y in both]
            prompts += [
                self.put((a, x), (b, both[(i + 1) % len(both)][1])) for i, (x, _) in enumerate(both)
            ]
            ends += [end] * 2 * len(both)
        tested: dict[Pair, Together | None] = dict.fromkeys(pairs)
        some = {
            pair: count for pair, count in counts.items() if count
        }  # a pair without words has no results
        left = (self._at_keys(self.rows(prompts, ends)) / self.attention).split(
            [2 * count for count in some.values()]
        )
        for (pair, count), each in zip(some.items(), left, strict=True):
            one, two = each.split(count)
            tested[pair] = count, torch.stack([*interval(one), two.mean(0)], dim=1).tolist()
        return tested

    def _same_row(
        self, n: int, pair: Pair, alone: float, results: Together | None
    ) -> dict[str, Any]:
        text = pair[0].text
        positions = [word.start for word in pair]
        if results is None:
            return relation("same word", text, positions, alone=alone, verdict="untested")
        count, (together, low, high, different) = results[0], results[1][n]
        shown = alone < _LEFT < together and min(together - alone, together - different) >= _GAIN
        ends = {"low": low, "high": high, "words": count, "verdict": _SAID[shown]}
        return relation(
            "same word",
            text,
            positions,
            alone=alone,
            together=together,
            different=different,
            **ends,
        )

    def _follows(
        self, n: int, pair: tuple[Word, Word], without: Float[Tensor, "m n t"]
    ) -> dict[str, Any]:
        """Test *follows*: the later word becomes another of the prompt; the attention should move
        to that one.
        """
        (a, b), look, tokens = pair, self.looks[n], self.ids.tolist()
        if not a.start <= look.key < b.start:
            return relation("follows", b.text, [b.start], verdict="untested")
        targets = []
        for word in self.words:
            ids = self.others.lexicon.variant(tokens[word.start : word.stop], b.text)
            key = (
                word.stop + look.key - a.stop
                if look.key >= a.stop
                else word.start + look.key - a.start
            )
            kept = (
                ids is not None
                and self.others.lexicon.texts[ids[0]].strip() == self.texts[word.start].strip()
            )
            if (
                kept
                and word.core != a.core
                and len(word) == len(b)
                and word.core[:1].isalnum()
                and key < b.start
            ):
                targets.append((ids, key))
        draws = torch.Generator().manual_seed(derived_seed(self.seed, "follows", b.start))
        chosen = [
            targets[i] for i in torch.randperm(len(targets), generator=draws).tolist()[: self.count]
        ]
        if not chosen:
            return relation("follows", b.text, [b.start], verdict="untested")
        rows = self.rows([self.put((b, ids)) for ids, _ in chosen])[:, n] / self.attention[n]
        there = float(
            torch.stack([row[key] for row, (_, key) in zip(rows, chosen, strict=True)]).mean()
        )
        here = float(rows[:, look.key].mean())
        control = float(without[:, n, [key for _, key in chosen]].mean() / self.attention[n])
        shown = there >= _LEFT and here < _LEFT and there - control >= _GAIN
        ends = {"words": len(chosen), "verdict": _SAID[shown]}
        return relation(
            "follows", b.text, [b.start], alone=here, together=there, control=control, **ends
        )

    def _moved(self, still: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Test *position* where no word decides: insert a word after the key, read attention at the
        same distance.
        """
        furthest = dict[int, int]()
        for look in (
            self.looks[n] for n in still if self.looks[n].query - self.looks[n].key <= _WHOLE
        ):
            furthest[look.key] = max(furthest.get(look.key, 0), look.query)
        keys = dict[int, slice]()
        prompts = list[Tensor]()
        ends = list[int]()
        for key, query in furthest.items():
            more = [
                ids
                for ids in self.others.of(Word(key, key + 1, self.texts[key]), self.count)
                if len(ids) == 1
            ]
            more = more if self.count >= WORDS else more[:_INSERTED]
            if len(more) >= min(_LEAST, _INSERTED if self.count < WORDS else _LEAST):
                keys[key] = slice(len(prompts), len(prompts) + len(more))
                prompts += [
                    torch.cat([self.ids[: key + 1], torch.tensor(ids), self.ids[key + 1 :]])
                    for ids in more
                ]
                ends += [query + 2] * len(more)
        rows = self.rows(prompts, ends)
        made = {}
        kept = self._at_keys(rows[:, :, 0:]) / self.attention
        moved = self._at_keys(rows[:, :, 1:]) / self.attention
        for n in (n for n in still if self.looks[n].key in keys):
            key = self.looks[n].key
            old = float(kept[keys[key], n].mean())
            same = float(moved[keys[key], n].mean())
            numbers = {
                "words": len(kept[keys[key]]),
                "verdict": _SAID[same >= _LEFT and old < _LEFT],
            }
            made[n] = relation(
                "position", self.texts[key], [key], alone=old, together=same, **numbers
            )
        return made


def _pair(core: str, words: Sequence[Word], left: Mapping[Word, float]) -> Pair | None:
    """The two strongest words with this core among some, in order of position; None if there are
    fewer.
    """
    same = sorted((word for word in words if word.core == core), key=lambda word: left[word])[:2]
    return None if len(same) < 2 else (min(same), max(same))


def relation(kind: str, text: str, positions: Sequence[int], **numbers: Any) -> dict[str, Any]:
    """Make a row of the table ``relation``; numbers are shares of the attention in the unchanged
    prompt.
    """
    empty = dict.fromkeys(("alone", "together", "different", "control", "low", "high", "words"))
    return {
        "kind": kind,
        "text": text,
        "positions": ", ".join(map(str, positions)),
        **empty,
        **numbers,
    }


def interval(values: Float[Tensor, "m *n"]) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of some numbers, and the ends of its 90% interval."""
    mean = values.mean(0)
    if len(values) < 2:
        return mean, torch.full_like(mean, -torch.inf), torch.full_like(mean, torch.inf)
    half = float(student.ppf(0.95, len(values) - 1)) * values.std(0) / len(values) ** 0.5
    return mean, mean - half, mean + half
