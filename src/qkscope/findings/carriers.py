"""Who carried the reason: a word is changed, and what few writers wrote in the unchanged run is put
back.

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
        """The share of what the change took away that an attention brings back."""
        lost = before - self.changed
        return (attention - self.changed) / lost if lost > 0 else 0.0


class Carriers:
    """One look of an unchanged run, and words that decide it.

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
        rows = (self._row(words[place]) for place in self._places())
        return [row for row in rows if row is not None]

    def _places(self) -> Sequence[int]:
        """The two words that are the same, or the strongest up to the key and the strongest behind."""
        same = self.reason.first("same word")
        if same is not None:
            return same.positions
        before = self.reason.before
        places = [row["position"] for row in self.reason.words if breaks_on_average(row, before)]
        up_to_key = [place for place in places if place <= self.key]
        behind_key = [place for place in places if place > self.key]
        return [*up_to_key[:1], *behind_key[:1]]

    def _row(self, word: Word) -> Row | None:
        changes = self.because.alternatives(word)[:RUNS]
        runs = [self._changed(change) for change in changes]
        changed = [self._attention(run) for run in runs]
        half = len(runs) // 2
        lost = self.reason.before - sum(changed) / max(len(changed), 1)
        if half < 1 or lost < _LOST:
            return None
        whole = {side: [self._whole(run, side) for run in runs] for side in _KEY_FIRST}
        side = max(_KEY_FIRST, key=lambda side: sum(whole[side]))
        writers = self._choose(runs[:half], side, fmean(changed[:half]))
        tested = self._test(runs[half:], side, writers, fmean(whole[side][half:]))
        before = self.reason.before
        share = tested.share(tested.restored, before)
        controls = [tested.share(control, before) for control in (tested.others, tested.other_run)]
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
            "verdict": "shown" if is_carried(share, *controls) else "not shown",
        }

    def _choose(self, runs: Sequence[Run], side: Side, left: float) -> list[str]:
        """The writer that brings back most by itself, and the one that adds most to it, if that is
        much.
        """
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
        restored = [float(self._put_back(run, self.run, side, [writers])[0]) for run in runs]
        others = [float(self._put_back(run, self.run, side, random_sets).mean()) for run in runs]
        next_runs = [*runs[1:], runs[0]]
        other_run = [
            float(self._put_back(run, other, side, [writers])[0])
            for run, other in zip(runs, next_runs, strict=True)
        ]
        changed = [self._attention(run) for run in runs]
        return Restored(fmean(changed), fmean(restored), fmean(others), fmean(other_run), whole)

    def _random_sets(self, writers: Sequence[str]) -> list[list[str]]:
        """As many other writers of the same kinds and layers, drawn again and again."""
        numbers = [self.names.index(name) for name in writers]
        seeds = [derived_seed(self.seed, "carry", draw) for draw in range(_DRAWS)]
        draws = [draw_alike(numbers, self.writers, seed) for seed in seeds]
        return [[self.names[i] for i in draw] for draw in draws]

    # ------------------------------------------------------------------ one changed run

    def _changed(self, change: Words) -> Run:
        prompt = self.because.with_change(change)
        runs = self.because.running(prompt[None], torch.tensor([self.query + 1]))[0]
        runs[self.key] = True
        at = runs.nonzero()[:, 0]
        look = (self.query, self.key)
        return self.because.again.record(self.run.reader, prompt, look, self.head.layer, at)

    def _look(self, run: Run) -> tuple[int, int]:
        """Query and key, as a run counts its tokens."""
        if run is self.run:
            return self.query, self.key
        query, key = run.columns[0, :2].tolist()
        return query, key

    def _attention(self, run: Run) -> float:
        query, key = self._look(run)
        prompt = run.row[:1]
        rows = run.calls[self.head.layer].rows(
            self.head.index, prompt, torch.full_like(prompt, query)
        )
        return float(rows.attention()[0, 0, key])

    def _put_back(
        self, run: Run, source: Run, side: Side, sets: Sequence[Sequence[str]]
    ) -> Float[Tensor, " x"]:
        """Attention on the key with some writers' parts of another run in this head's key or query."""
        query, key = self._look(run)
        other_query, other_key = self._look(source)
        at = other_key if side == "key" else other_query
        parts = [
            restore(run, source, self.head, query, key, sets[i : i + _SETS], side=side, at=at)
            for i in range(0, len(sets), _SETS)
        ]
        return torch.cat([rows[:, key] for rows in parts])

    def _whole(self, run: Run, side: Side) -> float:
        """Attention on the key with the whole key, or query, of the unchanged run restored."""
        call = self.run.calls[self.head.layer]
        query, key = self._look(run)
        if side == "query":
            vector = call.q[0, self.head.index, self.query].float()[None]
            put: dict[str, Any] = {"q": vector}
        else:
            vector = call.k[0, self.run.index(self.head, "k"), self.key].float()[None]
            put = {"keys": {key: vector}}
        return float(attention_with(run, self.head, query, **put)[0, key])
