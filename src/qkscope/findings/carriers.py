"""Who carried the reason: a word is changed, and the parts of few writers are put back unchanged.

A word whose change breaks a head's attention acts through its key or its query. What at most two
writers left there in the unchanged prompt is put back into this head alone, its norms running: do
they bring the attention back? Writers are chosen on some alternatives of the word and tested on
others. Beside them: as many other writers of their layers, the same writers from another changed
run (which know nothing of the word), and the whole side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.changes import Words
from qkscope.findings.because import Because
from qkscope.findings.finding import Reason, Row
from qkscope.findings.registry import breaks_on_average, is_carried
from qkscope.heads import Side, parse_writers
from qkscope.linear.row import attention_with, restore
from qkscope.linear.run import Run
from qkscope.rerun.alternatives import Word
from qkscope.seeds import derived_seed
from qkscope.sums.relative_logits import draw_alike

RUNS = 4
"""Alternatives of a word: half to choose writers on, half to test them."""
_SETS = 32  # rows made at once
_DRAWS = 20
_SECOND = 0.1  # of what was lost: a second writer brings back so much more than the first alone
_LOST = 0.1  # attention that a change must take away, for anything to be put back
_KEY_FIRST: tuple[Side, Side] = ("key", "query")


@dataclass(frozen=True)
class Restored:
    """Attention on the key in some changed runs, averaged over them.

    Parameters
    ----------
    changed : before anything is put back.
    restored : with what the carriers wrote in the unchanged run.
    others : with what as many other writers wrote, on average.
    other_run : with what the carriers wrote in another changed run.
    whole_side : with the whole key, or query, of the unchanged run.
    """

    changed: float
    restored: float
    others: float
    other_run: float
    whole_side: float

    def share(self, attention: float, before: float) -> float:
        """Share of the lost attention that is brought back."""
        lost = before - self.changed
        return (attention - self.changed) / lost if lost > 0 else 0.0


class Carriers:
    """Carriers of the words that decide one look.

    Parameters
    ----------
    run : the unchanged prompt, recorded with every token as a key.
    because : its look, and other words.
    reason : what decides it.
    seed : of random writers.
    """

    def __init__(self, run: Run, because: Because, reason: Reason, seed: int = 0) -> None:
        self.run = run
        self.because = because
        self.reason = reason
        self.seed = seed
        self.head = reason.look.head
        self.query = reason.look.query
        self.key = reason.look.key
        self.names = run.reader.writers(self.head.layer)[:-1]
        self.writers = parse_writers(self.names)

    def rows(self) -> list[Row]:
        """The table ``carriers``: a row for each word that a change takes much attention with."""
        if len(self.names) < 2:  # the first layer reads the embedding alone
            return []
        words = {word.start: word for word in self.because.words}
        rows = list[Row]()
        for place in self._places():
            row = self._row(words[place])
            if row is not None:
                rows.append(row)
        return rows

    def _places(self) -> Sequence[int]:
        """Places of the two equal words, or of the strongest word up to the key and behind it."""
        same = self.reason.first("same word")
        if same is not None:
            return same.positions
        before = self.reason.before
        places = [row["position"] for row in self.reason.words if breaks_on_average(row, before)]
        up_to_key = [place for place in places if place <= self.key]
        behind_key = [place for place in places if place > self.key]
        return [*up_to_key[:1], *behind_key[:1]]

    def _row(self, word: Word) -> Row | None:
        """The row of one word; None where its alternatives leave the look as it is."""
        changes = self.because.alternatives(word)[:RUNS]
        runs = [self._changed(change) for change in changes]
        changed = [self._attention(run) for run in runs]
        half = len(runs) // 2
        if half < 1:
            return None
        before = self.reason.before
        lost = before - sum(changed) / len(changed)
        if lost < _LOST:
            return None
        whole = {side: [self._whole(run, side) for run in runs] for side in _KEY_FIRST}
        side = max(_KEY_FIRST, key=lambda side: sum(whole[side]))
        writers = self._choose(runs[:half], side, fmean(changed[:half]))
        whole_side = fmean(whole[side][half:])
        tested = self._test(runs[half:], side, writers, whole_side)
        share = tested.share(tested.restored, before)
        of_others = tested.share(tested.others, before)
        of_other_run = tested.share(tested.other_run, before)
        shown = is_carried(share, of_others, of_other_run)
        return {
            "head": str(self.head),
            "side": side,
            "position": word.start,
            "text": word.text,
            "writers": ", ".join(writers),
            "before": before,
            "changed": tested.changed,
            "restored": tested.restored,
            "others": tested.others,
            "other_run": tested.other_run,
            "whole_side": tested.whole_side,
            "share": share,
            "verdict": "shown" if shown else "not shown",
        }

    def _choose(self, runs: Sequence[Run], side: Side, left: float) -> list[str]:
        """The writer that brings back most by itself, and a second one if it adds much to it."""
        chosen = list[str]()
        reached = -torch.inf
        for _ in range(2):
            sets = [[*chosen, name] for name in self.names if name not in chosen]
            by_run = [self._put_back(run, self.run, side, sets) for run in runs]
            restored = torch.stack(by_run).mean(0)
            most = float(restored.max())
            if most - reached > _SECOND * (self.reason.before - left):
                chosen = sets[int(restored.argmax())]
                reached = most
        return chosen

    def _test(
        self, runs: Sequence[Run], side: Side, writers: Sequence[str], whole: float
    ) -> Restored:
        """Put back what some writers, and their controls, wrote in the unchanged run."""
        random_sets = self._random_sets(writers)
        next_runs = [*runs[1:], runs[0]]
        changed = list[float]()
        restored = list[float]()
        others = list[float]()
        other_run = list[float]()
        for run, next_run in zip(runs, next_runs, strict=True):
            changed.append(self._attention(run))
            (with_writers,) = self._put_back(run, self.run, side, [writers])
            restored.append(float(with_writers))
            with_others = self._put_back(run, self.run, side, random_sets)
            others.append(float(with_others.mean()))
            (from_next_run,) = self._put_back(run, next_run, side, [writers])
            other_run.append(float(from_next_run))
        return Restored(
            changed=fmean(changed),
            restored=fmean(restored),
            others=fmean(others),
            other_run=fmean(other_run),
            whole_side=whole,
        )

    def _random_sets(self, writers: Sequence[str]) -> list[list[str]]:
        """Random sets of as many other writers of the same kinds and layers."""
        numbers = [self.names.index(name) for name in writers]
        seeds = [derived_seed(self.seed, "carry", draw) for draw in range(_DRAWS)]
        draws = [draw_alike(numbers, self.writers, seed) for seed in seeds]
        return [[self.names[i] for i in draw] for draw in draws]

    # ------------------------------------------------------------------ one changed run

    def _changed(self, change: Words) -> Run:
        """The run of the prompt with a change, recorded where it differs."""
        prompt = self.because.with_change(change)
        length = torch.tensor([self.query + 1])
        (runs,) = self.because.running(prompt[None], length)
        runs[self.key] = True
        at = runs.nonzero()[:, 0]
        look = (self.query, self.key)
        again = self.because.again
        return again.record(self.run.reader, prompt, look, self.head.layer, at)

    def _look(self, run: Run) -> tuple[int, int]:
        """Query and key of the look, by a run's own count of tokens."""
        if run is self.run:
            return self.query, self.key
        query, key = run.columns[0, :2].tolist()
        return query, key

    def _attention(self, run: Run) -> float:
        """The look's attention in a changed run."""
        query, key = self._look(run)
        prompt = run.row[:1]
        queries = torch.full_like(prompt, query)
        rows = run.calls[self.head.layer].rows(self.head.index, prompt, queries)
        return float(rows.attention()[0, 0, key])

    def _put_back(
        self, run: Run, source: Run, side: Side, sets: Sequence[Sequence[str]]
    ) -> Float[Tensor, " x"]:
        """Attention on the key with sets of writers' parts, of another run, in its key or query."""
        query, key = self._look(run)
        other_query, other_key = self._look(source)
        at = other_key if side == "key" else other_query
        on_key = []
        for start in range(0, len(sets), _SETS):
            some = sets[start : start + _SETS]
            rows = restore(run, source, self.head, query, key, some, side=side, at=at)
            on_key.append(rows[:, key])
        return torch.cat(on_key)

    def _whole(self, run: Run, side: Side) -> float:
        """Attention on the key with the whole key, or query, of the unchanged run restored."""
        call = self.run.calls[self.head.layer]
        query, key = self._look(run)
        put: dict[str, Any]
        if side == "query":
            vector = call.q[0, self.head.index, self.query]
            put = {"q": vector.float()[None]}
        else:
            kv = self.run.index(self.head, "k")
            vector = call.k[0, kv, self.key]
            put = {"keys": {key: vector.float()[None]}}
        return float(attention_with(run, self.head, query, **put)[0, key])
