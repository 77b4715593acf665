"""Sums by word: what each prompt gives is added up for the word it asks for.

Any number of prompts takes the same room, shards add up exactly, and intervals resample words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkscope.analyses.trace.rows import SIDES
from qkscope.heads import Head
from qkscope.linear.run import Side
from qkscope.maths.significance import clustered_bootstrap


class Tally:
    """Sums of named vectors by word, how many prompts each word has, and how far parts were from summing, at most.

    Its tensors are as large before the first prompt as after the last.

    Parameters
    ----------
    words : all that will come.
    shapes : of the vectors, by their names.
    """

    def __init__(self, words: Iterable[str], shapes: Mapping[Any, tuple[int, ...]]) -> None:
        self.words = sorted(set(words))  # whatever order they, or shards, come in
        self._place = {word: i for i, word in enumerate(self.words)}
        self.counts, self.error = (torch.zeros(size, dtype=torch.float64) for size in (len(self.words), 1))
        self.sums = {name: torch.zeros(len(self.words), *shape, dtype=torch.float64) for name, shape in shapes.items()}

    def tensors(self, of: object) -> dict[str, Tensor]:
        """All of them, to be kept beside others'."""
        return {f"{of} {name}": own for name, own in {**self.sums, "count": self.counts, "error": self.error}.items()}

    def add(
        self,
        words: Sequence[str],
        values: Mapping[Any, Float[Tensor, "n *v"]],
        error: Float[Tensor, " n"] | None = None,
        used: Bool[Tensor, " n"] | None = None,
    ) -> None:
        """Take in prompts, all or those that count."""
        used = torch.ones(len(words), dtype=torch.bool) if used is None else used.cpu()
        places = torch.tensor([self._place[word] for word in words])[used]
        self.counts.index_add_(0, places, torch.ones(len(places), dtype=torch.float64))
        for name, value in values.items():
            self.sums[name].index_add_(0, places, value.cpu().double()[used])
        if error is not None and len(places):
            self.error.clamp_(min=float(error.cpu()[used].max()))

    def merge(self, of: object, tensors: Mapping[str, Tensor]) -> None:
        """Add what another process kept."""
        for name, own in self.tensors(of).items():
            own.copy_(torch.maximum(own, tensors[name]) if own is self.error else own + tensors[name])

    @property
    def rows(self) -> int:
        """How many prompts there were."""
        return int(self.counts.sum())

    def mean(self, name: Any) -> Float[Tensor, "*v"]:
        """The mean over all prompts."""
        return self.sums[name].sum(0) / self.rows

    def sides(self) -> dict[Side, Float[Tensor, " c"]]:
        """The means of what is given by side."""
        return {side: self.mean(side) for side in SIDES}

    def interval(
        self, name: Any, columns: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "*v"], Float[Tensor, "*v"]]:
        """Its 95% interval, of some columns or of all, resampling words; NaN where there is one word alone."""
        there = self.counts.nonzero()[:, 0]
        sizes, means = self.counts[there], self.sums[name][there]
        means = means if columns is None else means[:, list(columns)]
        means = means / sizes.view(-1, *[1] * (means.ndim - 1))
        rows = torch.repeat_interleave(torch.arange(len(there)), sizes.long())
        return clustered_bootstrap(means[rows], rows)


def tensors_of(tallies: Mapping[Head, Tally]) -> dict[str, Tensor]:
    """All tensors of the tallies of some heads."""
    return {name: own for head, tally in tallies.items() for name, own in tally.tensors(head).items()}


def writer_rows(
    head: Head,
    names: Sequence[str],
    values: Mapping[Side, Float[Tensor, " c"]],
    total: float,
    count: int | None = None,
    interval: Callable[[Side, list[int]], tuple[Tensor, Tensor]] | None = None,
) -> list[dict[str, Any]]:
    """The table of writers: both sides, the largest first (the first ``count``), with intervals where there are any."""
    made = []
    for side in SIDES:
        order = values[side].abs().argsort(descending=True).tolist()[:count]
        ends = [[None] * len(order)] * 2 if interval is None else [end.tolist() for end in interval(side, order)]
        made += [
            {"head": str(head), "side": side, "writer": names[i], "value": float(values[side][i]),
             "share": float(values[side][i]) / total if total else None, "low": low, "high": high}
            for i, low, high in zip(order, *ends, strict=True)
        ]  # fmt: skip
    return made
