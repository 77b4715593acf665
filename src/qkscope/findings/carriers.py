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
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.findings.because import Because, Reason
from qkscope.heads import parse_writers
from qkscope.linear.row import attention_with, restore
from qkscope.linear.run import Run, Side
from qkscope.rerun.alternatives import Word
from qkscope.seeds import derived_seed
from qkscope.sums.relative_logits import draw_alike

# alternatives of a word, half to choose writers on, half to test them; rows made at once
RUNS = 4
_SETS = 32
_DRAWS = 20
# of what was lost: what carriers bring back at least, and controls at most
_RESTORED = 0.5
_CONTROL = 0.1
_SECOND = 0.1  # of what was lost: a second writer brings back so much more than the first alone
_LOST = 0.1  # attention that a change must take away, for anything to be put back


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

    def rows(self) -> list[dict[str, Any]]:
        """The table ``carriers``: of the two words that are the same, or of the strongest causes
        about the key.
        """
        if len(self.names) < 2:  # the first layer reads the embedding alone
            return []
        words = {word.start: word for word in self.because.words}
        same = next((row for row in self.reason.relations if row["kind"] == "same word"), None)
        if same is not None:
            places = [int(place) for place in same["positions"].split(", ")]
        else:
            causes = [
                row["position"]
                for row in self.reason.words
                if row["after"] < _RESTORED * self.reason.before
            ]
            sides = (
                [at for at in causes if (at <= self.key) == early][:1] for early in (True, False)
            )
            places = [at for side in sides for at in side]
        return [row for at in places if (row := self._row(words[at])) is not None]

    def _row(self, word: Word) -> dict[str, Any] | None:
        runs = [
            self._changed(word, ids)
            for ids in self.because.others.of(word, self.because.count)[:RUNS]
        ]
        changed = [self._attention(run) for run in runs]
        half = len(runs) // 2
        lost = self.reason.before - sum(changed) / max(len(changed), 1)
        if half < 1 or lost < _LOST:
            return None
        whole = {side: [self._whole(run, side) for run in runs] for side in ("key", "query")}
        side: Side = "key" if sum(whole["key"]) >= sum(whole["query"]) else "query"
        writers = self._choose(runs[:half], side, sum(changed[:half]) / half)
        tested = range(half, len(runs))
        left = changed[half:]
        restored = [float(self._put_back(runs[i], self.run, side, [writers])[0]) for i in tested]
        numbers = [self.names.index(name) for name in writers]
        draws = [
            [
                self.names[i]
                for i in draw_alike(numbers, self.writers, derived_seed(self.seed, "carry", d))
            ]
            for d in range(_DRAWS)
        ]
        others = [float(self._put_back(runs[i], self.run, side, draws).mean()) for i in tested]
        pairs = [(i, half + (i - half + 1) % (len(runs) - half)) for i in tested]
        other_run = [float(self._put_back(runs[i], runs[j], side, [writers])[0]) for i, j in pairs]
        runs_of = {
            "changed": left, "restored": restored, "others": others, "other_run": other_run,
            "whole_side": whole[side][half:],
        }  # fmt: skip
        mean = {name: sum(values) / len(values) for name, values in runs_of.items()}
        gap = self.reason.before - mean["changed"]
        share = {name: (mean[name] - mean["changed"]) / gap if gap > 0 else 0.0 for name in mean}
        shown = (
            share["restored"] >= _RESTORED and max(share["others"], share["other_run"]) <= _CONTROL
        )
        return {
            "head": str(self.head), "side": side, "position": word.start, "text": word.text,
            "writers": ", ".join(writers), "before": self.reason.before, **mean, "share": share["restored"],
            "verdict": "shown" if shown else "not shown",
        }  # fmt: skip

    def _choose(self, runs: Sequence[Run], side: Side, left: float) -> list[str]:
        """The writer that brings back most by itself, and the one that adds most to it, if that is
        much.
        """
        chosen = list[str]()
        reached = -torch.inf
        for _ in range(2):
            sets = [[*chosen, name] for name in self.names if name not in chosen]
            restored = torch.stack(
                [self._put_back(run, self.run, side, sets) for run in runs]
            ).mean(0)
            most = float(restored.max())
            if most - reached > _SECOND * (self.reason.before - left):
                chosen = sets[int(restored.argmax())]
                reached = most
        return chosen

    # ------------------------------------------------------------------ one changed run

    def _changed(self, word: Word, ids: Sequence[int]) -> Run:
        prompt = self.because.put((word, ids))
        look = (self.query, self.key)
        runs = self.because.running(prompt[None], torch.tensor([self.query + 1]))[0]
        runs[self.key] = True
        return self.because.again.record(
            self.run.reader, prompt, look, self.head.layer, runs.nonzero()[:, 0]
        )

    def _look(self, run: Run) -> tuple[int, int]:
        """Query and key, as a run counts its tokens."""
        query, key = (self.query, self.key) if run is self.run else run.columns[0, :2].tolist()
        return query, key

    def _attention(self, run: Run) -> float:
        query, key = self._look(run)
        rows = run.calls[self.head.layer].rows(
            self.head.index, run.row[:1], torch.full_like(run.row[:1], query)
        )
        return float(rows.attention()[0, 0, key])

    def _put_back(
        self, run: Run, source: Run, side: Side, sets: Sequence[Sequence[str]]
    ) -> Float[Tensor, " x"]:
        """Attention on the key with some writers' parts of another run in this head's key or query."""
        (query, key), (other_query, other_key) = self._look(run), self._look(source)
        at = other_key if side == "key" else other_query
        some = [sets[i : i + _SETS] for i in range(0, len(sets), _SETS)]
        return torch.cat(
            [restore(run, source, self.head, query, key, x, side=side, at=at)[:, key] for x in some]
        )

    def _whole(self, run: Run, side: Side) -> float:
        """Attention on the key with the whole key, or query, of the unchanged run restored."""
        call, (query, key) = self.run.calls[self.head.layer], self._look(run)
        put: dict[str, Any] = {"q": call.q[0, self.head.index, self.query].float()[None]}
        if side == "key":
            put = {"keys": {key: call.k[0, self.run.index(self.head, "k"), self.key].float()[None]}}
        return float(attention_with(run, self.head, query, **put)[0, key])
