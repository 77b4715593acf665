"""A batch of prompts as rows of one head: query and named keys split among writers, and their attention rows.

Sums by word: what each prompt gives is added up for the word it asks for.

Any number of prompts takes the same room, shards add up exactly, and intervals resample words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.analyses.prompts import cluster_of
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import check_visible
from qkscope.capture.pick import Capture
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.run import Parts, Run, Side, named
from qkscope.maths.significance import clustered_bootstrap
from qkscope.maths.writers import EdgeRows, WriterSplit, relative_weights
from qkscope.tasks.task import ANSWER, ASKED, Unit

SIDES: tuple[Side, Side] = ("query", "key")
ATTENDED = 0.05
"""A key with less attention than this is said to be unattended before anything is traced to it."""


@dataclass(frozen=True)
class HeadRows:
    """One head on one batch.

    Attributes
    ----------
    run, head : who reads what.
    signs : +1 right keys, −1 other keys, 0 none.
    pieces : what entered the head's layer, split among writers.
    projector : put between query and key, to look inside a feature; none by default.
    """

    run: Run
    head: Head
    signs: Int[Tensor, "n k"]
    pieces: list[Parts]
    projector: Float[Tensor, "d d"] | None = None

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        return float(self.run.calls[self.head.layer].scale)

    @cached_property
    def parts(self) -> dict[Side, Float[Tensor, "n c p d"]]:
        """By side, queries and named keys split among writers, as the dot product sees them."""
        return {side: self.run.read(self.head, side, self.pieces) for side in SIDES}

    def split(self) -> WriterSplit:
        """The relative logit, ready to be split."""
        q, k = (self.parts[side] for side in SIDES)
        return WriterSplit(q[:, :, 0], k, relative_weights(self.signs), self.scale, self.projector)

    def total(self) -> Float[Tensor, " n"]:
        """The relative logit itself, from the model's own vectors."""
        q, k = (self.run.true(self.head, side) for side in SIDES)
        q = q if self.projector is None else q @ self.projector.to(q)
        return torch.einsum("nd,nkd,nk->n", q[:, 0], k, relative_weights(self.signs)) * self.scale

    def edges(self, instead: dict[Side, Float[Tensor, "*n c p d_model"]]) -> EdgeRows:
        """Rows in which what writers left in the stream can be replaced by this, norms frozen; biases stay."""
        away = {}
        for side in SIDES:
            given = [Parts(["instead"], instead[side].expand_as(self.stream(side)))]
            away[side] = self.parts[side] - self.run.read(self.head, side, given, self.run.at(side))
            away[side][:, -1] = 0
        plain = edge_rows(self.run.captured, self.head, self.run.columns[:, 1:], self.signs)
        return replace(plain, dq=away["query"][:, :, 0], dk=away["key"], projector=self.projector)

    def first(self) -> Int[Tensor, " n"]:
        """The column of each prompt's first token."""
        return self.run.captured.key_mask.int().argmax(1)  # padding stands before it, or behind the prompt

    def live(self, x: Float[Tensor, "x n p d_model"], side: Side) -> Float[Tensor, "x n p d"]:
        """What the head makes of other streams at the places of a side, its norms recomputed."""
        return self.run.live(self.head, side, x)

    def stream(self, side: Side) -> Float[Tensor, "n c p d_model"]:
        """What each writer but the biases left at the places of a side, in the residual stream."""
        return named(self.pieces)[:, :, self.run.at(side)]


def edge_rows(captured: Capture, head: Head, named: Int[Tensor, "n k"], signs: Int[Tensor, "n k"]) -> EdgeRows:
    """A head's attention rows over all tokens, with some of them named; no part of them can be replaced yet."""
    rows = captured.rows().of_head(captured.heads.index(head))
    first = rows.present().int().argmax(1)  # padding stands before it, or behind the prompt
    nothing = rows.q[:, :0]
    return EdgeRows(rows, named, signs, first, nothing, nothing[:, :, None].expand(-1, -1, named.shape[1], -1))


def words_of(units: Sequence[Unit]) -> list[str]:
    """What prompts share that ask alike: the word each unit asks for, or its cluster where none is marked."""
    asked = [unit[0].roles.get(ASKED) for unit in units]
    if any(span is None for span in asked):
        return [f"prompt {cluster_of(unit, i)}" for i, unit in enumerate(units)]
    return [unit[0].piece(span) for unit, span in zip(units, asked, strict=True) if span is not None]


def answer_signs(encoded: Encoding) -> Int[Tensor, "n k"]:
    """+1 for right keys, −1 for others, 0 in slots that are none."""
    if ANSWER not in encoded.labels:
        raise BadInput("a task is traced by its keys labelled answer, and this one has none: label the right ones.")
    return encoded.labels[ANSWER].long().masked_fill(~encoded.places.key_mask, 0)


def task_batch(
    reader: Reader, units: Sequence[Unit], indices: Sequence[int], chat: bool, layers: Sequence[int] = ()
) -> tuple[Encoding, Int[Tensor, "n k"], Run]:
    """The prompts of some units through the model; what entered ``layers`` is kept besides those read."""
    encoded = reader.scope.encode([example for i in indices for example in units[i]], chat=chat)
    signs = answer_signs(encoded)
    run = reader.record(encoded.inputs, encoded.places, layers=layers)
    named = run.captured.bias.gather(-1, run.columns[:, None, 1:].expand(-1, len(reader.heads), -1))
    check_visible(encoded, reader.heads, named)
    return encoded, signs, run


def task_rows(
    reader: Reader, units: Sequence[Unit], indices: Sequence[int], chat: bool, projectors: dict[Head, Tensor]
) -> tuple[Encoding, list[HeadRows]]:
    """The same as rows of every head, split among writers."""
    encoded, signs, run = task_batch(reader, units, indices, chat)
    return encoded, [
        HeadRows(run, head, signs, pieces, projectors.get(head))
        for layer, pieces in run.streams(max(reader.layers))
        for head in reader.heads
        if head.layer == layer
    ]


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
        """The sums as tensors, words in the order of the alphabet."""
        words = sorted(self.counts)
        return {f"{prefix} {name}": torch.stack([own[word] for word in words]) for name, own in self.sums.items()}

    @classmethod
    def of_arrays(
        cls, prefix: str, arrays: Mapping[str, Tensor], counts: Mapping[str, float], largest: Mapping[str, float]
    ) -> Tally:
        """What `arrays` gave, read back."""
        sums = {
            name.removeprefix(f"{prefix} "): dict(zip(sorted(counts), value, strict=True))
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
