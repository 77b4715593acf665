"""One head on a batch of prompts, split among writers; and a pass over all prompts, batch by batch.

``ℓ = Σ_t w_t scale q·k_t``, the relative logit of the keys marked + over those marked −, is linear
in the query and in the keys once norms are frozen: ``q = Σ_c q_c`` and ``k_t = Σ_c k_c(t)``, so
that pairs of writers, and writers of one side, sum to it. `HeadRows` gives them, and attention rows
in which parts are others; keys that are not named, the first token among them, stay as they are. A
`Pass` measures all prompts of a task and adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput
from qkscope.attention import AttentionRows
from qkscope.findings.task_batches import asked_words, batches_of
from qkscope.heads import Head, Side
from qkscope.linear.attribution import values_of
from qkscope.linear.reader import Reader
from qkscope.linear.run import KINDS, Direction, Parts, Run, named
from qkscope.model.encode import Encoding
from qkscope.model.inputs import check_visible
from qkscope.results.result import Tables
from qkscope.results.work import Stage, Work
from qkscope.sums.relative_logits import SIDES, Measurement, Tally, metrics, relative_weights
from qkscope.texts.task import ANSWER, Units

#: A key with less attention than this is said to be unattended before anything is traced to it.
ATTENDED = 0.05
# tokens of all prompts whose writers are held at once, and of each prompt at least
_PLACES = 128
_EACH = 10
# conditions that are measured at once, norms held and norms running
_CONDITIONS = {"held": 128, "live": 8}


@dataclass(eq=False)
class HeadRows:
    """Attention rows of one head on one batch, with its writers.

    Parameters
    ----------
    run, head : who reads what; slots from 1 on are keys.
    signs : +1 right keys, −1 other keys, 0 none.
    projector : put between query and key, to look inside a feature; none by default.
    query : the slot of the query.

    Attributes
    ----------
    scale : factor on q·k.
    writers : their names, the biases last.
    slots : of each side.
    """

    run: Run
    head: Head
    signs: Int[Tensor, "n k"]
    projector: Float[Tensor, "d d"] | None = None
    query: int = 0

    def __post_init__(self) -> None:
        self.scale = float(self.run.calls[self.head.layer].scale)
        self.writers = self.run.reader.writers(self.head.layer)
        keys = range(1, self.run.columns.shape[1])
        self.slots: dict[Side, list[int]] = {"query": [self.query], "key": list(keys)}

    @cached_property
    def weights(self) -> Float[Tensor, "n k"]:
        """Weights of the keys in the relative logit."""
        return relative_weights(self.signs)

    # ------------------------------------------------------------------ the relative logit

    def vectors(self, side: Side) -> Float[Tensor, "n p d"]:
        """The model's own query, or its named keys."""
        kind = KINDS[side]
        place = (self.head.layer, self.run.index(self.head, kind))
        vectors = self.run.vectors([place], kind, self.slots[side])
        return vectors[:, 0]

    def logit(self, q: Tensor | None = None, k: Tensor | None = None) -> Float[Tensor, "*x n"]:
        """Relative logit of other queries [*x, n, d] and keys [*x, n, k, d], or of the model's."""
        q = self.rows.q[:, 0] if q is None else q
        k = self.vectors("key") if k is None else k
        weights = self.weights.to(q)
        products = torch.einsum("...nd,...nkd,nk->...n", self.projected(q), k, weights)
        return products * self.scale

    def projected(self, q: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Apply the projector, if there is one, to a query."""
        return q if self.projector is None else q @ self.projector.to(q)

    @cached_property
    def directions(self) -> dict[Side, Direction]:
        """Directions of the relative logit on the stream, at the query and the keys that count."""
        used = self.weights.any(0).nonzero()[:, 0]
        right_first = self.signs[0, used].argsort(descending=True, stable=True)
        used = used[right_first]
        weights = self.weights[:, used]
        _, directions = self.run.ask(self.head, self.query, 1 + used, weights, self.projector)
        return directions

    @cached_property
    def marginals(self) -> dict[Side, Float[Tensor, "n c"]]:
        """Parts of the relative logit by side and writer; those of a side sum to it."""
        if len(self.signs) > 1 and self.projector is None:
            # writers of a batch stand side by side; those of one prompt would take too much room
            return split_together([self])[self.head]
        marginals = dict[Side, Tensor]()
        for side, direction in self.directions.items():
            values = self.run.answer(direction).values
            by_writer = [values[name].sum(1) for name in self.writers]
            marginals[side] = torch.stack(by_writer, 1)
        return marginals

    @cached_property
    def pairs(self) -> Float[Tensor, "n c c"]:
        """Parts of the relative logit by pair of a query writer and a key writer."""
        queries = self.read("query")[:, :, 0]
        q = self.projected(queries) * self.scale
        weighted_keys: Tensor | float = 0.0
        for slots, pieces in self._pieces(self.directions["key"].slots.tolist()):
            keys = self.run.read(self.head, "key", pieces, slots)
            columns = [slot - 1 for slot in slots]
            weights = self.weights[:, columns].to(keys)
            weighted_keys = weighted_keys + torch.einsum("ncpd,np->ncd", keys, weights)
        return q @ weighted_keys.mT  # type: ignore[union-attr]

    def given(self, pairs: Sequence[tuple[int, int]] = ()) -> Measurement:
        """Measure the logit, and what writers and some pairs give to it.

        The error says how far the writers of a side miss the logit, beside the largest part.
        """
        total = self.logit()
        values: dict[str, Tensor] = {"total": total}
        missed_by = []
        largest_of = []
        for side in SIDES:
            parts = self.marginals[side]
            values[side] = parts
            missed_by.append((parts.sum(1) - total).abs())
            largest_of.append(parts.abs().amax(1))
        if pairs:
            by_pair = [self.pairs[:, query, key] for query, key in pairs]
            values["pairs"] = torch.stack(by_pair, dim=1)
        missed = torch.stack(missed_by).amax(0)
        largest = torch.stack(largest_of).amax(0)
        return Measurement(values, missed / largest.clamp_min(1e-30))

    def _pieces(self, slots: list[int]) -> Iterable[tuple[list[int], list[Parts]]]:
        """Parts of the stream that writers left, a few slots at a time to save memory."""
        step = max(_PLACES // len(self.signs), _EACH)
        for start in range(0, len(slots), step):
            piece = slots[start : start + step]
            yield piece, self.run.slots(piece).stream(self.head.layer)

    def read(self, side: Side) -> Float[Tensor, "n c p d"]:
        """Queries or keys split among writers, as the dot product sees them."""
        vectors = []
        for slots, parts in self._pieces(self.slots[side]):
            vectors.append(self.run.read(self.head, side, parts, slots))
        return torch.cat(vectors, dim=2)

    # ------------------------------------------------------------------ parts replaced

    @cached_property
    def streams(self) -> dict[Side, Float[Tensor, "n c p d_model"]]:
        """Parts of the stream by side: what each writer but the biases left at its places."""
        streams = dict[Side, Tensor]()
        for side, slots in self.slots.items():
            pieces = [named(parts) for _, parts in self._pieces(slots)]
            streams[side] = torch.cat(pieces, dim=2)
        return streams

    @cached_property
    def rows(self) -> AttentionRows:
        """The model's attention rows, over every token of each prompt."""
        call = self.run.calls[self.head.layer]
        queries = self.run.columns[:, self.query]
        rows = call.rows(self.head.index, self.run.row, queries)
        # the mask says where padding ends and the first token stands
        mask = self.run.inputs.get("attention_mask")
        if mask is None:
            return rows
        of_rows = mask[self.run.row].bool()
        return replace(rows, key_mask=of_rows.to(rows.k.device))

    def measure(
        self, q: Float[Tensor, "x n d"] | None = None, k: Float[Tensor, "x n k d"] | None = None
    ) -> Float[Tensor, "x n m"]:
        """`METRICS` of the rows, with other queries and other named keys."""
        named = self.run.columns[:, self.slots["key"]]
        return metrics(self.rows, named, self.signs, q, k, self.projector)

    def replaced(
        self,
        instead: Mapping[Side, Float[Tensor, "*n c p d_model"]],
        masks: Bool[Tensor, "2 x c"],
        norms: str = "held",
    ) -> Iterator[tuple[Float[Tensor, "x n d"], Float[Tensor, "x n k d"]]]:
        """Queries and keys with the parts of the stream replaced that each of x conditions names.

        Biases stay.

        Parameters
        ----------
        instead : by side, what each writer but the biases leaves instead.
        masks : of the query and of the keys, the writers that each condition names.
        norms : held, or live.
        """
        away = {side: self.streams[side] - instead[side] for side in SIDES}
        return self.without(away, masks[..., :-1], norms)

    @torch.no_grad()
    def without(
        self,
        away: Mapping[Side, Float[Tensor, "n c p d_model"]],
        often: Tensor,
        norms: str = "held",
    ) -> Iterator[tuple[Float[Tensor, "x n d"], Float[Tensor, "x n k d"]]]:
        """Queries and keys with parts taken out of the stream, as often as each condition says.

        With norms held the parts go through the head's weights first, and are taken out of its
        query and keys; with norms live they are taken out of the stream, which the head then reads.
        """
        whole = dict[Side, Tensor]()
        parts = dict[Side, Tensor]()
        for side in SIDES:
            if norms == "held":
                taken_out = [Parts(["away"], away[side])]
                read = self.run.read(self.head, side, taken_out, self.slots[side])
                whole[side] = self.vectors(side)
                parts[side] = read[:, :-1]  # the biases, which are read with them, stay
            else:
                (hidden,) = self.run.hidden([self.head.layer], self.slots[side])
                whole[side] = hidden
                parts[side] = away[side]
        for times in often.split(_CONDITIONS[norms], dim=1):
            vectors = dict[Side, Tensor]()
            for side, number in zip(SIDES, times, strict=True):
                of_side = whole[side]
                flat_parts = parts[side].transpose(0, 1).flatten(1)
                lost = number.to(of_side) @ flat_parts
                left = of_side[None] - lost.unflatten(1, of_side.shape)
                if norms == "live":
                    left = self.run.live(self.head, side, left)
                vectors[side] = left
            yield vectors["query"][:, :, 0], vectors["key"]


#: By head, what is measured of its rows on a batch and the numbers of their units.
Measures = Mapping[Head, Callable[[HeadRows, list[int]], Measurement]]


def split_together(batch: Sequence[HeadRows]) -> dict[Head, dict[Side, Float[Tensor, "n c"]]]:
    """Split the logits of several heads on one batch among writers at once; each keeps its own."""
    weights = torch.stack([rows.weights for rows in batch], dim=1)
    of_head = {rows.head: rows for rows in batch}
    for heads, query, key in values_of(batch[0].run, weights, list(of_head)):
        for head, of_query, of_key in zip(heads, query.unbind(1), key.unbind(1), strict=True):
            of_head[head].marginals = {"query": of_query, "key": of_key}
    return {head: rows.marginals for head, rows in of_head.items()}


def answer_signs(encoded: Encoding) -> Int[Tensor, "n k"]:
    """+1 for right keys, −1 for others, 0 in slots that are none."""
    if ANSWER not in encoded.labels:
        raise BadInput(
            "a task is traced by its keys labelled answer, and this one has none:"
            " label the right ones."
        )
    return encoded.labels[ANSWER].long().masked_fill(~encoded.places.key_mask, 0)


# ---------------------------------------------------------------------- a pass over prompts


def join_tables(parts: Iterable[Tables]) -> Tables:
    """Tables of several heads as one."""
    joined: Tables = {}
    for tables in parts:
        for name, rows in tables.items():
            joined.setdefault(name, []).extend(rows)
    return joined


@dataclass(frozen=True)
class Pass:
    """One pass of prompts through a model, batch by batch, and the work that it is kept in.

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

    def rows(
        self, units: Units, indices: Sequence[int], by_some: bool = False
    ) -> tuple[list[int], list[HeadRows]]:
        """Run the prompts of some units: each row's unit, and the rows of every head.

        Parameters
        ----------
        units, indices : all units, and the numbers of those that run.
        by_some : whether a named key may be out of sight of some of the heads.
        """
        examples = [example for i in indices for example in units[i]]
        unit_of = [i for i in indices for _ in units[i]]
        encoded = self.reader.scope.encode(examples, chat=self.chat)
        heads = self.reader.heads
        signs = answer_signs(encoded)
        run = self.reader.record(encoded.inputs, encoded.places, layers=self.layers)
        keys = run.columns[:, None, 1:]
        keys_of_heads = keys.expand(-1, len(heads), -1)
        seen = run.captured.bias.gather(-1, keys_of_heads)
        check_visible(encoded, heads, seen, by_some)
        rows = [HeadRows(run, head, signs, self.projectors.get(head)) for head in heads]
        return [unit_of[int(example)] for example in encoded.example], rows

    def add_up(
        self,
        name: str,
        units: Units,
        measures: Measures,
        words: Sequence[str] | None = None,
        last: bool = False,
        by_some: bool = False,
    ) -> tuple[dict[Head, Tally], list[list[Any]]]:
        """Measure every prompt at every head, in batches, and add up by word.

        Comes back with each head's sums, and with what else its batches keep.

        Parameters
        ----------
        name : of the stage of the work.
        units : the prompts.
        measures : by head, what takes `HeadRows` of a batch and the numbers of their units.
        words : of each unit, a list; by default what it asks for.
        last : whether nothing is shared out between processes after it.
        by_some : whether a named key may be out of sight of some of the heads.
        """
        asked_for = asked_words(units) if words is None else words
        tallies = {head: Tally(sorted(asked_for)) for head in measures}
        sums = dict[str, Tensor]()  # those of all tallies, under the head and the name

        def run(indices: list[int]) -> list[Any]:
            numbers, batch = self.rows(units, indices, by_some)
            if len(batch) > 1 and not self.projectors:
                split_together(batch)
            # all heads are measured before any is added: a batch is added whole, or not at all
            measured = [measures[rows.head](rows, numbers) for rows in batch]
            words_of_batch = [asked_for[i] for i in numbers]
            for rows, measurement in zip(batch, measured, strict=True):
                tally = tallies[rows.head]
                tally.add(words_of_batch, measurement)
                for name_of_sum, total in tally.sums.items():
                    sums[f"{rows.head} {name_of_sum}"] = total
            return [measurement.kept for measurement in measured]

        stage = Stage(name, batches_of(units, self.batch_size), run, sums, merge=merge_sums)
        kept = self.job.run(stage, self.progress, last=last)
        for address, total in sums.items():
            head, _, name_of_sum = address.partition(" ")
            tallies[Head.parse(head)].sums[name_of_sum] = total
        return tallies, [list(column) for column in zip(*kept, strict=True)]


def merge_sums(name: str, total: Tensor, piece: Tensor) -> Tensor:
    """Add a piece of the tensor of this name to its total; of errors, keep the largest."""
    if name.endswith(" error"):
        return torch.maximum(total, piece)
    return total.add_(piece)
