"""One head on a batch of prompts, split among writers, and sums of what prompts give, by the word they ask for.

``ℓ = Σ_t w_t scale q·k_t``, the relative logit of the keys marked + over those marked −, is linear in the query and in
the keys once norms are frozen. `HeadRows` gives each writer's part of it, pairs of writers, and attention rows in which
parts are others. A `Tally` adds up what prompts give: any number of them takes the same room, and intervals resample
words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.analyses.prompts import batches_of
from qkscope.attention import AttentionRows
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import check_visible
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.many import values_of
from qkscope.linear.reader import Reader
from qkscope.linear.run import Direction, Parts, Run, Side, named
from qkscope.maths.significance import clustered_bootstrap
from qkscope.maths.writers import EdgeRows, cancelling, relative_weights
from qkscope.runs.work import Stage, Work
from qkscope.tasks.task import ANSWER, Unit

SIDES: tuple[Side, Side] = ("query", "key")
ATTENDED = 0.05
"""A key with less attention than this is said to be unattended before anything is traced to it."""
PAIRS = 20
Tables = dict[str, list[dict[str, Any]]]
_PLACES, _EACH = 128, 10  # tokens of all prompts whose writers are held at once, and of each prompt at least


class HeadRows:
    """One head on one batch.

    Parameters
    ----------
    run, head : who reads what; slots from 1 on are keys.
    signs : +1 right keys, −1 other keys, 0 none.
    projector : put between query and key, to look inside a feature; none by default.
    query : the slot of the query.
    """

    def __init__(
        self,
        run: Run,
        head: Head,
        signs: Int[Tensor, "n k"],
        projector: Float[Tensor, "d d"] | None = None,
        query: int = 0,
    ) -> None:
        self.run, self.head, self.signs, self.projector = run, head, signs, projector
        self.slots: dict[Side, list[int]] = {"query": [query], "key": list(range(1, run.columns.shape[1]))}
        self._streams: dict[Side, Tensor] = {}

    @cached_property
    def weights(self) -> Float[Tensor, "n k"]:
        """Of the keys in the relative logit."""
        return relative_weights(self.signs)

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        return float(self.run.calls[self.head.layer].scale)

    @cached_property
    def writers(self) -> list[str]:
        """Names of the writers."""
        return self.run.reader.writers(self.head.layer)

    def logit(self, q: Tensor | None = None, k: Tensor | None = None) -> Float[Tensor, "*x n"]:
        """The relative logit of the model's own vectors, or of other queries [*x, n, d] and keys [*x, n, k, d]."""
        q, k = self.rows.q[:, 0] if q is None else q, self.plain.keys() if k is None else k
        return torch.einsum("...nd,...nkd,nk->...n", self.projected(q), k, self.weights.to(q)) * self.scale

    def live(self, x: Float[Tensor, "x n p d_model"], side: Side) -> Float[Tensor, "x n"]:
        """The relative logit with other streams at the places of a side, norms running; the other side is held."""
        made = self.run.live(self.head, side, x)
        return self.logit(made[..., 0, :]) if side == "query" else self.logit(k=made)

    def projected(self, q: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """A query as the projector leaves it."""
        return q if self.projector is None else q @ self.projector.to(q)

    @cached_property
    def directions(self) -> dict[Side, Direction]:
        """What the relative logit asks of the stream at the query, and at the keys that count."""
        used = self.weights.any(0).nonzero()[:, 0]
        used = used[self.signs[0, used].argsort(descending=True, stable=True)]  # a prompt's key stands first
        return self.run.ask(self.head, self.slots["query"][0], 1 + used, self.weights[:, used], self.projector)[1]

    @cached_property
    def marginals(self) -> dict[Side, Float[Tensor, "n c"]]:
        """By side, what each writer gives to the relative logit; both sum to it."""
        if len(self.signs) > 1 and self.projector is None:  # writers of a batch side by side; of one prompt too many
            ((_, query, key),) = values_of(self.run, self.weights[:, None], [self.head])
            return {"query": query[:, 0], "key": key[:, 0]}
        answers = {side: self.run.answer(direction).values for side, direction in self.directions.items()}
        return {side: torch.stack([own[name].sum(1) for name in self.writers], 1) for side, own in answers.items()}

    @cached_property
    def pairs(self) -> Float[Tensor, "n c c"]:
        """What each pair of a query writer and a key writer gives."""
        q = self.projected(self.read("query")[:, :, 0]) * self.scale
        met: Tensor | float = 0.0
        for slots, pieces in self._pieces(self.directions["key"].slots.tolist()):
            keys = self.run.read(self.head, "key", pieces, slots)
            met = met + torch.einsum("ncpd,np->ncd", keys, self.weights[:, [i - 1 for i in slots]].to(keys))
        return q @ met.mT  # type: ignore[union-attr]

    def given(self, pairs: Sequence[tuple[int, int]] = ()) -> tuple[dict[str, Float[Tensor, "n *v"]], Tensor]:
        """What a `Tally` takes of each prompt, and how far parts are from summing to the logit (`sum_errors`)."""
        values: dict[str, Tensor] = {"total": self.logit()} | {side: self.marginals[side] for side in SIDES}
        if pairs:
            values["pairs"] = torch.stack([self.pairs[:, a, b] for a, b in pairs], dim=1)
        return values, sum_errors(values["total"], *self.marginals.values())

    def _pieces(self, slots: list[int]) -> Iterable[tuple[list[int], list[Parts]]]:
        """What writers left at some slots, a few at a time: a long prompt takes no more room."""
        step = max(_PLACES // len(self.signs), _EACH)
        for some in (slots[start : start + step] for start in range(0, len(slots), step)):
            yield some, self.run.slots(some).stream(self.head.layer)

    def read(self, side: Side) -> Float[Tensor, "n c p d"]:
        """Queries or keys split among writers, as the dot product sees them."""
        made = [self.run.read(self.head, side, pieces, some) for some, pieces in self._pieces(self.slots[side])]
        return torch.cat(made, dim=2)

    def stream(self, side: Side) -> Float[Tensor, "n c p d_model"]:
        """What each writer but the biases left at the places of a side, in the residual stream."""
        if side not in self._streams:
            every = [named(pieces) for _, pieces in self._pieces(self.slots[side])]
            self._streams[side] = torch.cat(every, dim=2)
        return self._streams[side]

    def mean_stream(self, slots: list[int]) -> Float[Tensor, "n c d_model"]:
        """The mean of what each writer but the biases left at some slots."""
        return torch.stack([named(pieces).sum(2) for _, pieces in self._pieces(slots)]).sum(0) / len(slots)

    def entered(self, side: Side) -> Float[Tensor, "n p d_model"]:
        """The whole stream at the places of a side."""
        return self.run.entered[self.head.layer][:, self.slots[side]]

    def lost(self, side: Side, instead: Float[Tensor, "*n c p d_model"]) -> Float[Tensor, "n c p d"]:
        """What vectors lose where a writer's part of the stream is another one, norms frozen; biases stay."""
        pieces = [Parts(["away"], self.stream(side) - instead)]
        away = self.run.read(self.head, side, pieces, self.slots[side])
        away[:, -1] = 0
        return away

    @cached_property
    def rows(self) -> AttentionRows:
        """The model's attention rows, over every token of each prompt."""
        at = self.run.columns[:, self.slots["query"][0]]
        rows = self.run.calls[self.head.layer].rows(self.head.index, self.run.row, at)
        mask = self.run.inputs.get("attention_mask")  # says where padding ends and the first token stands
        return rows if mask is None else replace(rows, key_mask=mask[self.run.row].bool().to(rows.k.device))

    @cached_property
    def plain(self) -> EdgeRows:
        """The same with keys named, and nothing replaced."""
        return edge_rows(self.rows, self.run.columns[:, self.slots["key"]], self.signs, self.projector)

    def edges(self, instead: Mapping[Side, Float[Tensor, "*n c p d_model"]]) -> EdgeRows:
        """Rows in which what writers left in the stream can be replaced by this."""
        dq, dk = (self.lost(side, instead[side]) for side in SIDES)
        return replace(self.plain, dq=dq[:, :, 0], dk=dk)


def edge_rows(
    rows: AttentionRows, named: Int[Tensor, "n k"], signs: Int[Tensor, "n k"], projector: Tensor | None = None
) -> EdgeRows:
    """A head's attention rows over all tokens, with some of them named; no part of them can be replaced yet."""
    first = rows.present().int().argmax(1)  # padding stands before it, or behind the prompt
    nothing = rows.q[:, :0]
    return EdgeRows(
        rows, named, signs, first, nothing, nothing[:, :, None].expand(-1, -1, named.shape[1], -1), projector
    )


def metrics_of(rows: AttentionRows, named: Int[Tensor, "n k"], signs: Int[Tensor, "n k"]) -> Float[Tensor, "n m"]:
    """`METRICS` of rows as they are."""
    edges = edge_rows(rows, named, signs)
    return edges.measure(rows.q[None, :, 0], edges.keys()[None])[0]


def sum_errors(total: Float[Tensor, " n"], *sides: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    """How far the parts of each side are from summing to the logit, at most, as a share of the largest of them."""
    missed = torch.stack([(values.sum(1) - total).abs() for values in sides]).amax(0)
    return missed / torch.stack([values.abs().amax(1) for values in sides]).amax(0).clamp_min(1e-30)


def answer_signs(encoded: Encoding) -> Int[Tensor, "n k"]:
    """+1 for right keys, −1 for others, 0 in slots that are none."""
    if ANSWER not in encoded.labels:
        raise BadInput("a task is traced by its keys labelled answer, and this one has none: label the right ones.")
    return encoded.labels[ANSWER].long().masked_fill(~encoded.places.key_mask, 0)


def named_columns(run: Run) -> Int[Tensor, "n h k"]:
    """Columns of the named keys, for each head of what was captured."""
    return run.columns[:, None, 1:].expand(-1, len(run.reader.heads), -1)


# ---------------------------------------------------------------------- sums by word, and their tables


class Tally:
    """Sums of named vectors by word, how many prompts each word has, and how far parts were from summing, at most.

    Its tensors are as large before the first prompt as after the last.

    Parameters
    ----------
    words : all that will come; intervals resample them in this order.
    shapes : of the vectors, by their names.
    """

    def __init__(self, words: Iterable[str], shapes: Mapping[Any, tuple[int, ...]]) -> None:
        self.words = list(dict.fromkeys(words))
        self._place = {word: i for i, word in enumerate(self.words)}
        self.counts, self.error = (torch.zeros(size, dtype=torch.float64) for size in (len(self.words), 1))
        self.sums = {name: torch.zeros(len(self.words), *shape, dtype=torch.float64) for name, shape in shapes.items()}

    @classmethod
    def of_prompt(cls, values: Mapping[Any, Float[Tensor, "1 *v"]], error: Float[Tensor, " 1"]) -> Tally:
        """Of one prompt alone, which has no intervals."""
        made = cls([""], {name: value.shape[1:] for name, value in values.items()})
        made.add([""], values, error)
        return made

    def tensors(self) -> dict[str, Tensor]:
        """All of them, to be kept."""
        return {**self.sums, "count": self.counts, "error": self.error}

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

    @property
    def rows(self) -> int:
        """How many prompts there were."""
        return int(self.counts.sum())

    def mean(self, name: Any) -> Float[Tensor, "*v"]:
        """The mean over all prompts."""
        return self.sums[name].sum(0) / self.rows

    def interval(
        self, name: Any, columns: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "*v"], Float[Tensor, "*v"]]:
        """Its 95% interval, of some columns or of all, resampling words; NaN where there is one word alone."""
        there = self.counts.nonzero()[:, 0]
        sizes, means = self.counts[there], self.sums[name][there]
        means = means if columns is None else means[:, list(columns)]
        if len(there) < 2:
            return (torch.full_like(means[0], torch.nan),) * 2
        means = means / sizes.view(-1, *[1] * (means.ndim - 1))
        rows = torch.repeat_interleave(torch.arange(len(there)), sizes.long())
        return clustered_bootstrap(means[rows], rows)

    def ends(self, name: str, columns: Sequence[int] | None = None) -> list[list[float | None]]:
        """The ends of intervals as tables have them: None where there are none."""
        ends: list[list[float | None]] = [end.tolist() for end in self.interval(name, columns)]
        return ends if len(self.words) > 1 else [[None] * len(end) for end in ends]

    def writer_rows(self, head: Head, names: Sequence[str], count: int | None = None) -> list[dict[str, Any]]:
        """The table of writers: both sides, the largest first (the first ``count``)."""
        made, total = [], float(self.mean("total"))
        for side in SIDES:
            values = self.mean(side)
            order = values.abs().argsort(descending=True).tolist()[:count]
            ends = self.ends(side, order)
            made += [
                {"head": str(head), "side": side, "writer": names[i], "value": float(values[i]),
                 "share": float(values[i]) / total if total else None, "low": low, "high": high}
                for i, low, high in zip(order, *ends, strict=True)
            ]  # fmt: skip
        return made

    def pair_rows(self, head: Head, names: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """The table of pairs."""
        columns = self.mean("pairs").tolist(), *self.ends("pairs")
        return [
            {"head": str(head), "query_writer": names[a], "key_writer": names[b], "value": v, "low": low, "high": high}
            for (a, b), v, low, high in zip(pairs, *columns, strict=True)
        ]

    def check_row(self, head: Head, **more: Any) -> dict[str, Any]:
        """The row of this head in the table ``check``."""
        total = float(self.mean("total"))
        cancels = max(cancelling(self.mean(side), total) for side in SIDES)
        return {"head": str(head), "sum_error": float(self.error), "logit": total, "cancels": cancels, **more,
                "n": self.rows}  # fmt: skip


def strongest_pairs(pairs: Float[Tensor, "c c"]) -> list[tuple[int, int]]:
    """The largest pairs by size, biases left out."""
    flat = pairs[:-1, :-1].abs().flatten().argsort(descending=True)[:PAIRS].tolist()
    return [divmod(i, len(pairs) - 1) for i in flat]


def join_tables(every: Iterable[Tables]) -> Tables:
    """Tables of several heads as one."""
    joined: Tables = {}
    for name, rows in (item for tables in every for item in tables.items()):
        joined.setdefault(name, []).extend(rows)
    return joined


@dataclass(frozen=True)
class Pass:
    """How prompts go through a model, batch by batch, and where what is done is kept.

    Parameters
    ----------
    reader : of the heads.
    chat : whether prompts go into the chat template.
    batch_size : prompts run together.
    seed : of every draw.
    projectors : of heads that are looked at inside a feature.
    layers : others whose input is kept.
    job : keeps what is done.
    progress : whether to say how far it is.
    """

    reader: Reader
    chat: bool = False
    batch_size: int = 32
    seed: int = 0
    projectors: Mapping[Head, Tensor] = field(default_factory=dict)
    layers: Sequence[int] = ()
    job: Work = field(default_factory=Work)
    progress: bool | None = None

    def encode(self, units: Sequence[Unit], indices: Sequence[int]) -> tuple[list[int], Encoding]:
        """The prompts of some units, tokenised, and the number of each row's unit."""
        encoded = self.reader.scope.encode([example for i in indices for example in units[i]], chat=self.chat)
        of_example = [i for i in indices for _ in units[i]]
        return [of_example[int(e)] for e in encoded.example], encoded

    def rows(self, units: Sequence[Unit], indices: Sequence[int]) -> tuple[list[int], list[HeadRows]]:
        """The prompts of some units of a task through the model, as rows of every head."""
        numbers, encoded = self.encode(units, indices)
        signs, heads = answer_signs(encoded), self.reader.heads
        run = self.reader.record(encoded.inputs, encoded.places, layers=self.layers)
        check_visible(encoded, heads, run.captured.bias.gather(-1, named_columns(run)))
        return numbers, [HeadRows(run, head, signs, self.projectors.get(head)) for head in heads]

    def add_up(
        self,
        name: str,
        units: Sequence[Unit],
        measure: Callable[[list[int]], tuple[Sequence[tuple[Any, ...]], Any]],
        tallies: Mapping[Head, Tally],
        last: bool = False,
    ) -> list[Any]:
        """Add up what ``measure`` gives of each batch: heads with what `Tally.add` takes, and what else is kept."""

        def run(indices: list[int]) -> Any:
            given, kept = measure(indices)
            for head, *own in given:  # a batch is added whole, or not at all
                tallies[head].add(*own)
            return kept

        sums = {f"{head} {name}": own for head, tally in tallies.items() for name, own in tally.tensors().items()}
        stage = Stage(name, batches_of(units, self.batch_size), run, sums, merge=merge_sums)
        return self.job.run([stage], self.progress, last=last)[0]


def merge_sums(name: str, total: Tensor, piece: Tensor) -> Tensor:
    """Add a piece of the tensor of this name to its total; of errors, keep the largest."""
    return torch.maximum(total, piece) if name.endswith(" error") else total.add_(piece)
