"""Sums by word: what each prompt gives is added up for the word it asks for.

Any number of prompts takes the same room, shards add up exactly, and intervals resample words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkscope.maths.significance import clustered_bootstrap


@dataclass
class Tally:
    """Sums of named vectors by word, how many prompts each word has, and the largest of some numbers."""

    counts: dict[str, float] = field(default_factory=dict)
    sums: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, words: Sequence[str], values: Mapping[str, Float[Tensor, "n *v"]], **largest: float) -> None:
        """Take in prompts."""
        own = Tally(largest=dict(largest))
        for word in words:
            own.counts[word] = own.counts.get(word, 0.0) + 1
        for name, value in values.items():
            sums = own.sums.setdefault(name, {})
            for word, row in zip(words, value.double().cpu(), strict=True):
                sums[word] = sums[word] + row if word in sums else row
        self.merge(own)

    def merge(self, other: Tally) -> None:
        """Add what another process, or another batch, tallied."""
        for word, count in other.counts.items():
            self.counts[word] = self.counts.get(word, 0.0) + count
        for name, sums in other.sums.items():
            mine = self.sums.setdefault(name, {})
            for word, value in sums.items():
                mine[word] = mine[word] + value if word in mine else value
        for name, number in other.largest.items():
            self.largest[name] = max(number, self.largest.get(name, number))

    @property
    def rows(self) -> int:
        """How many prompts there were."""
        return int(sum(self.counts.values()))

    def mean(self, name: str) -> Float[Tensor, "*v"]:
        """The mean over all prompts."""
        return torch.stack(list(self.sums[name].values())).sum(0) / self.rows

    def interval(
        self, name: str, columns: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "*v"], Float[Tensor, "*v"]]:
        """Its 95% interval, of some columns or of all, resampling words; NaN where there is one word alone."""
        words = sorted(self.counts)  # whatever order shards came in
        sizes = torch.tensor([self.counts[word] for word in words], dtype=torch.float64)
        means = torch.stack([self.sums[name][word] for word in words])
        means = means if columns is None else means[:, list(columns)]
        means = means / sizes.view(-1, *[1] * (means.ndim - 1))
        rows = torch.repeat_interleave(torch.arange(len(words)), sizes.long())
        return clustered_bootstrap(means[rows], rows)

    # ------------------------------------------------------------------ to disk and back

    def arrays(self, prefix: str) -> dict[str, Tensor]:
        """The sums as tensors, words in the order of `counts`."""
        return {f"{prefix} {name}": torch.stack([own[w] for w in self.counts]) for name, own in self.sums.items()}

    @classmethod
    def of_arrays(
        cls, prefix: str, arrays: Mapping[str, Tensor], counts: Mapping[str, float], largest: Mapping[str, float]
    ) -> Tally:
        """What `arrays` gave, read back."""
        sums = {
            name.removeprefix(f"{prefix} "): dict(zip(counts, value, strict=True))
            for name, value in arrays.items()
            if name.startswith(f"{prefix} ")
        }
        return cls(dict(counts), sums, dict(largest))


class WordSums:
    """Sums by word of several heads at once, in tensors that are as large before the first prompt as after the last.

    Parameters
    ----------
    words : all that will come.
    sizes : of each head's vector, by its name.
    """

    def __init__(self, words: Sequence[str], sizes: Mapping[str, int]) -> None:
        self.words = list(dict.fromkeys(words))
        self._place = {word: i for i, word in enumerate(self.words)}
        self._sums, self._counts, self._largest = (
            {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
            for shapes in (
                {name: (len(self.words), size) for name, size in sizes.items()},
                {name: (len(self.words),) for name in sizes},
                {name: (1,) for name in sizes},
            )
        )

    def tensors(self) -> dict[str, Tensor]:
        """All of them, for a job to keep."""
        kinds = {"sum": self._sums, "count": self._counts, "error": self._largest}
        return {f"{name} {kind}": value for kind, own in kinds.items() for name, value in own.items()}

    def add(
        self,
        name: str,
        words: Sequence[str],
        values: Float[Tensor, "n v"],
        error: Float[Tensor, " n"],
        used: Bool[Tensor, " n"],
    ) -> None:
        """Take in the prompts of a batch that count for this head."""
        used = used.cpu()
        places = torch.tensor([self._place[word] for word in words])[used]
        self._sums[name].index_add_(0, places, values.cpu().double()[used])
        self._counts[name].index_add_(0, places, torch.ones(len(places), dtype=torch.float64))
        if len(places):
            self._largest[name].clamp_(min=float(error.cpu()[used].max()))

    def tally(self, name: str, columns: Mapping[str, int]) -> Tally:
        """One head's, its vector cut into named columns."""
        there = self._counts[name].nonzero()[:, 0].tolist()
        parts = self._sums[name].split(list(columns.values()), dim=1)
        return Tally(
            {self.words[i]: float(self._counts[name][i]) for i in there},
            {column: {self.words[i]: part[i] for i in there} for column, part in zip(columns, parts, strict=True)},
            {"error": float(self._largest[name])} if there else {},
        )
