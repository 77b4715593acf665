"""One head on one prompt: its attention row, its query and one of its keys split among writers, and cuts right there.

The key's logit is taken against the mean of the others that the query sees, the first token aside (or against one
token). To cut a writer here its part of the stream takes its mean over the prompt's other tokens, the first excepted,
in this head alone and with its norms frozen; the attention row is then made anew. Random writers of the same layers
stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.graph import Graph, trace_graph
from qkscope.analyses.trace.rows import ATTENDED, SIDES
from qkscope.analyses.trace.tally import writer_rows
from qkscope.analyses.trace.verdicts import FEW, verdict
from qkscope.attention import soft
from qkscope.capture.encode import Encoding
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tokens import token_texts
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head, Writer, parse_writers
from qkscope.linear.neurons import first_neurons
from qkscope.linear.run import Direction, Parts, Run, Side, named
from qkscope.maths.writers import different, draw_alike, first_by

CUTS = (1, 2, 3, 5)
_SECOND = 0.05  # of the first writer's part: one that gives less is not named beside it
_SLOTS = 256  # tokens whose writers are held at once


@dataclass(frozen=True)
class Asked:
    """A prompt as the model sees it, and the tokens in question."""

    encoded: Encoding
    tokens: list[str]
    query: int

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the model is given."""
        return self.encoded.inputs

    @property
    def places(self) -> Places:
        """The query, with every token of the prompt as a key."""
        row = self.encoded.places.row
        return Places.everywhere(row, torch.full_like(row, self.query), self.inputs["attention_mask"])

    def told(self, prompt: str | Example) -> dict[str, Any]:
        """What a result says of the prompt."""
        shown = prompt if isinstance(prompt, str) else prompt.show(2000)
        return {"prompt": shown, "query": self.query, "tokens": self.tokens}

    @classmethod
    def of(cls, scope: Scope, prompt: str | Example, query: int | None, chat: bool) -> Asked:
        """The prompt, tokenised; the query is its last token (or the one marked) where none is named."""
        if isinstance(prompt, Example) and len(prompt.queries) > 1:
            raise BadInput(f"a prompt is asked about from one query, but {len(prompt.queries)} are marked: mark one.")
        encoded = scope.encode([prompt], chat=chat)
        ids = encoded.inputs["input_ids"][0].tolist()
        place = int(encoded.places.query[0]) if query is None else checked_place(query, len(ids), "query")
        if len(ids) < 2:
            raise BadInput("the prompt has one token, and a head chooses among several: give a longer one.")
        if place == 0:
            raise BadInput("the query is the first token, which sees only itself: name a later one.")
        return cls(encoded, token_texts(scope, ids), place)


def checked_place(place: int, length: int, what: str) -> int:
    """A place from the start, also where it was counted from the end."""
    if not -length <= place < length:
        raise BadInput(f"{what} {place} is out of range: the prompt has {length} tokens, 0 to {length - 1}.")
    return place % length


class PromptTrace:
    """One head on one prompt: its attention row, and its query and one of its keys split among writers.

    Parameters
    ----------
    run : recorded with every token of the prompt as a key.
    asked : the prompt.
    head : the head.
    key, versus : tokens; by default the most attended one besides the first, against all others in sight but the first.
    projector : put between query and key.
    """

    def __init__(
        self,
        run: Run,
        asked: Asked,
        head: Head,
        key: int | None = None,
        versus: int | None = None,
        projector: Float[Tensor, "d d"] | None = None,
    ) -> None:
        self.reader, self.run, self.asked, self.head, self.projector = run.reader, run, asked, head, projector
        self.rows = run.calls[head.layer].rows(head.index, run.row, torch.full_like(run.row, asked.query))
        self.attention = self.rows.attention()[0, 0]
        self.seen = run.seen(head, asked.query)
        others = [i for i in self.seen if i > 0]
        if not others:
            raise BadInput(f"{head} sees nothing but the first token from token {asked.query}: name a later query.")
        best = max(others, key=lambda i: float(self.attention[i]))
        self.key = best if key is None else self._checked(key)
        against = [i for i in others if i != self.key] if versus is None else [self._checked(versus, "versus")]
        if versus is not None and against == [self.key]:
            raise BadInput(f"token {self.key} cannot be compared with itself: name another token.")
        self.against = against
        self.weights = torch.zeros_like(self.attention)
        self.weights[against] = -1 / max(len(against), 1)
        self.weights[self.key] += 1
        self.others = others

    def _checked(self, place: int, what: str = "key") -> int:
        place = checked_place(place, len(self.asked.tokens), what)
        if place > self.asked.query and place not in self.seen:
            raise BadInput(
                f"token {place} stands after the query (token {self.asked.query}), and this model looks back only:"
                " name an earlier key, or a later query."
            )
        if place not in self.seen:
            raise BadInput(f"token {place} is out of sight of {self.head}, which looks only so far back: name another.")
        return place

    @property
    def told_apart(self) -> bool:
        """Whether there was a reader, so that writers can be told apart."""
        return self.run.reader is not None

    def token(self, i: int) -> str:
        """A token as a sentence names it."""
        text = self.asked.tokens[i]
        return f"{text!r} (token {i})" if text else f"token {i} (inside a character)"

    @cached_property
    def writers(self) -> list[str]:
        """Names of the writers."""
        return self.reader.writers(self.head.layer)

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        return self.run.calls[self.head.layer].scale

    def logits(self) -> Float[Tensor, " t"]:
        """``scale · q·k`` of every token, before cap and mask."""
        return self.rows.k[0, 0] @ self._projected(self.rows.q[0, 0]) * self.scale

    @property
    def total(self) -> float:
        """The relative logit."""
        return float(self.logits() @ self.weights)

    def where(self) -> str:
        """How much of its attention the head gives to the key, in words."""
        asking, key = self.asked.tokens[self.asked.query], self.asked.tokens[self.key]
        share = f"{float(self.attention[self.key]):.0%} of its attention"
        unseen = ": it does not attend there, so what follows explains a logit and no attention"
        return f"{self.head} at {asking!r} gives {share} to {key!r} (token {self.key}){'' if self.attends else unseen}."

    @property
    def attends(self) -> bool:
        """Whether there is any attention to explain."""
        return float(self.attention[self.key]) >= ATTENDED

    @property
    def distance(self) -> float:
        """What a bias for the distance (ALiBi) adds to it; 0 where there is none."""
        assert self.rows.bias is not None
        bias = self.rows.bias[0, 0]
        return float(bias.masked_fill(bias == -torch.inf, 0.0) @ self.weights.to(bias))

    # ------------------------------------------------------------------ parts

    def weighted_keys(self) -> Float[Tensor, " d"]:
        """The key less the mean of those it is compared with, as the dot product sees them."""
        return self.weights @ self.rows.k[0, 0]

    @cached_property
    def _directions(self) -> dict[Side, Direction]:
        used = self.weights.nonzero()[:, 0]
        return self.run.ask(self.head, 1 + self.asked.query, used + 1, self.weights[used][None], self.projector)[1]

    @cached_property
    def _marginals(self) -> dict[Side, Float[Tensor, " c"]]:
        answers = {side: self.run.answer(direction).values for side, direction in self._directions.items()}
        return {side: torch.stack([own[name].sum() for name in self.writers]) for side, own in answers.items()}

    def marginals(self) -> dict[Side, Float[Tensor, " c"]]:
        """By side, what each writer gives to the relative logit; both sum to it."""
        return self._marginals

    def pairs(self) -> Float[Tensor, "c c"]:
        """The same for pairs of a query writer and a key writer."""
        at = [1 + self.asked.query]
        q = self.run.read(self.head, "query", self.run.slots(at).stream(self.head.layer), at)[0, :, 0]
        met: Tensor | float = 0.0
        for slots, pieces in self._chunks(self.weights.nonzero()[:, 0].tolist()):
            keys = self.run.read(self.head, "key", pieces, slots)[0]
            met = met + torch.einsum("ckd,k->cd", keys, self.weights[[i - 1 for i in slots]].to(keys))
        return self._projected(q) @ met.T * self.scale  # type: ignore[union-attr]

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[list[int], list[Parts]]]:
        """Slots of some tokens, and what writers left there, a few at a time: a long prompt takes no more room."""
        for start in range(0, len(tokens), _SLOTS):
            slots = [1 + i for i in tokens[start : start + _SLOTS]]
            yield slots, self.run.slots(slots).stream(self.head.layer)

    def _projected(self, q: Tensor) -> Tensor:
        return q if self.projector is None else q @ self.projector.to(q)

    @property
    def error(self) -> float:
        """How far the parts are from summing to the logit, as a share of the largest of them."""
        return max(float((v.sum() - self.total).abs() / v.abs().max()) for v in self.marginals().values())

    # ------------------------------------------------------------------ cuts

    @cached_property
    def mean(self) -> Float[Tensor, "c d_model"]:
        """What each writer but the biases leaves in the stream, on average over the prompt's other tokens."""
        rest = [i for i in self.others if i not in (self.key, self.asked.query)] or self.others
        return torch.stack([named(pieces)[0].sum(1) for _, pieces in self._chunks(rest)]).sum(0) / len(rest)

    def moved(self, side: Side, place: int, instead: Float[Tensor, "c d_model"]) -> Float[Tensor, "c d"]:
        """What this head's vector at a token loses where a writer's part of the stream there is another one."""
        slots = [1 + place]
        away = named(self.run.slots(slots).stream(self.head.layer))[0, :, 0] - instead
        pieces = [Parts(["away"], away[None, :, None])]
        read = self.run.read(self.head, side, pieces, slots)[0, :, 0]
        return torch.cat([read[:-1], torch.zeros_like(read[:1])])  # biases stay

    @cached_property
    def _cut(self) -> dict[str, Float[Tensor, "c d"]]:
        return {
            "query": self.moved("query", self.asked.query, self.mean),
            "key": self.moved("key", self.key, self.mean),
        }

    def away(self, writers: Mapping[str, Sequence[int]]) -> dict[str, Float[Tensor, " d"]]:
        """By side, what cutting some writers takes from the vector at its place."""
        return {side: self._cut[side][list(writers.get(side, ()))].sum(0) for side in SIDES}

    def cut(self, writers: Mapping[str, Sequence[int]]) -> Float[Tensor, " t"]:
        """The attention row with some writers' parts replaced by their means over the prompt's other tokens."""
        away = self.away(writers)
        return self.changed({self.key: -away["key"]}, -away["query"])

    def exchanged(self, other: int) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c d"]]:
        """What the key, and another token's key, gain where a writer's parts of the stream there change places."""
        here, there = (named(self.run.slots([1 + i]).stream(self.head.layer))[0, :, 0] for i in (self.key, other))
        return -self.moved("key", self.key, there), -self.moved("key", other, here)

    def changed(self, keys: Mapping[int, Float[Tensor, " d"]], query: Tensor | float = 0.0) -> Float[Tensor, " t"]:
        """The attention row with vectors added to some keys, and to the query."""
        own = self.rows.k[0, 0].clone()
        for place, vector in keys.items():
            own[place] += vector
        return self.attend(self.row_of(own, self.rows.q[0, 0] + query))

    def row_of(self, keys: Float[Tensor, "t d"], query: Float[Tensor, " d"]) -> Float[Tensor, " t"]:
        """The row's logits with other keys and another query, as the softmax sees them."""
        return self.rows.logits((keys @ query * self.scale)[None, None].to(self.rows.q))[0, 0]

    def attend(self, logits: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
        """The attention that logits give."""
        return soft(logits, None if self.rows.rest is None else self.rows.rest[0, 0])

    def strongest(self, side: Side, size: int) -> list[int]:
        """The writers that give most to the key's logit, biases aside, each at least `_SECOND` of what the first gives.

        Those against the key are no reason to look there, and one that gives next to nothing is none either.
        """
        values = self.marginals()[side]
        first = first_by(values, size, signed=True)
        least = max(_SECOND * float(values[first[0]]), 0.0) if first else 0.0
        return [i for i in first if float(values[i]) > least]

    def cut_rows(self, draws: int, seed: int) -> list[dict[str, Any]]:
        """The strongest writers cut, beside random ones of their kind and layers: a row for each side and number."""
        layers, made = parse_writers(self.writers[:-1]), []
        sizes = [size for size in CUTS if size < len(layers)]
        for side in ("key", "query", "both"):
            for size in sizes:
                chosen: dict[str, list[int]] = {
                    one: self.strongest(one, size) for one in SIDES if side in (one, "both")
                }
                if any(len(own) < size for own in chosen.values()):
                    continue
                row = self.cut(chosen)
                alike = different(
                    {
                        one: draw_alike(own, layers, derived_seed(seed, "cut", one, size, draw), FEW)
                        for one, own in chosen.items()
                    }
                    for draw in range(draws)
                )
                random = torch.stack([self.cut(other)[self.key] for other in alike])
                top = max(self.others, key=lambda i: float(row[i]))
                made.append({
                    "head": str(self.head), "side": side, "k": size,
                    "writers": ", ".join(dict.fromkeys(self.writers[i] for own in chosen.values() for i in own)),
                    "before": float(self.attention[self.key]), "after": float(row[self.key]),
                    "random": float(random.mean()), "random_low": float(random.min()),
                    "random_high": float(random.max()), "first": float(row[0]), "top": top,
                    "top_token": self.asked.tokens[top], "draws": draws, "sets": len(alike),
                    "verdict": self._verdict(float(row[self.key]), random),
                })  # fmt: skip
        return made

    def _verdict(self, after: float, random: Float[Tensor, " draws"]) -> str:
        """What a cut shows; without other tokens to take a mean over, nothing."""
        if self.attends and not set(self.others) - {self.key, self.asked.query}:
            return "vacuous"
        return verdict(float(self.attention[self.key]), after, random)

    # ------------------------------------------------------------------ tables

    def writer_rows(self) -> list[dict[str, Any]]:
        """The table of writers of this prompt: no intervals, there is one prompt."""
        return writer_rows(self.head, self.writers, self.marginals(), self.total)

    def neuron_rows(self, named: Sequence[Writer] = ()) -> list[dict[str, Any]]:
        """The first ten neurons of each side, or those named, with the token where the largest part of each stands."""
        total = self.total
        return [
            {"head": str(self.head), "side": side, "writer": str(neuron), "layer": neuron.layer, "value": value,
             "share": value / total if total else None, "position": slot - 1, "token": self.asked.tokens[slot - 1]}
            for side, asked in self._directions.items()
            for neuron, value, slot in first_neurons(self.run, asked, named)
        ]  # fmt: skip

    def pair_rows(self, count: int = 20) -> list[dict[str, Any]]:
        """The strongest pairs."""
        pairs, names = self.pairs(), self.writers
        flat = pairs[:-1, :-1].abs().flatten().argsort(descending=True)[:count]
        return [
            {"head": str(self.head), "query_writer": names[a], "key_writer": names[b], "value": float(pairs[a, b]),
             "low": None, "high": None}
            for a, b in (divmod(int(i), len(names) - 1) for i in flat)
        ]  # fmt: skip

    def graph(self, depth: int = 2) -> Graph:
        """What the writers read, level by level."""
        asked, others = self.asked, self.against
        options: Any = {"others": others, "depth": depth, "projector": self.projector}
        return trace_graph(self.run, self.head, asked.query, self.key, **options)

    def token_rows(self) -> list[dict[str, Any]]:
        """The head's attention to every token it sees, and its logit."""
        logits, attention = self.logits().tolist(), self.attention.tolist()
        return [
            {"head": str(self.head), "position": i, "token": self.asked.tokens[i], "attention": attention[i],
             "logit": logits[i]}
            for i in self.seen
        ]  # fmt: skip
