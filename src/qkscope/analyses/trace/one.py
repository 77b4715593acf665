"""One head on one prompt: its attention row, its query and one of its keys split among writers, and cuts right there.

The key's logit is taken against the mean of the others that the query sees, the first token aside (or against one
token). To cut a writer here its part takes its mean over the prompt's other tokens, the first excepted; the attention
row is then made anew. Random writers of the same layers stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.graph import Graph, trace_graph
from qkscope.analyses.trace.rows import ATTENDED, SIDES, addresses_of
from qkscope.analyses.trace.verdicts import FEW, verdict
from qkscope.capture.encode import Encoding
from qkscope.capture.folded import key_marginals, mean_parts
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tokens import token_texts
from qkscope.capture.writers import Parts, Reader, Recorded, Side
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head
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
    reader : of the head, among others.
    found : recorded with every token of the prompt as a key.
    asked : the prompt.
    head : the head.
    key, versus : tokens; by default the most attended one besides the first, against all others in sight but the first.
    projector : put between query and key.
    """

    def __init__(
        self,
        reader: Reader,
        found: Recorded,
        asked: Asked,
        head: Head,
        key: int | None = None,
        versus: int | None = None,
        projector: Float[Tensor, "d d"] | None = None,
    ) -> None:
        self.reader, self.found, self.asked, self.head, self.projector = reader, found, asked, head, projector
        column = reader.heads.index(head)
        self.captured, self.column = found.captured, column
        self.attention = found.captured.attention()[0, column]
        seen = found.captured.bias[0, column] > -torch.inf
        self.seen = [i for i, one in enumerate(seen.tolist()) if one]
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
    def writers(self) -> list[str]:
        """Names of the writers."""
        return self.reader.writers(self.head.layer)

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        return float(self.captured.scale[self.column])

    def _query(self) -> Float[Tensor, " d"]:
        return self._projected(self.captured.q[0, self.column])

    def logits(self) -> Float[Tensor, " t"]:
        """``scale · q·k`` of every token, before cap and mask."""
        keys = self.captured.k[0, self.captured.kv_of_head[self.column]]
        return keys @ self._query() * self.scale

    @property
    def total(self) -> float:
        """The relative logit."""
        return float(self.logits() @ self.weights)

    def where(self) -> str:
        """How much of its attention the head gives to the key, in words."""
        asking, key = self.asked.tokens[self.asked.query], self.asked.tokens[self.key]
        share = f"{float(self.attention[self.key]):.0%} of its attention"
        return f"{self.head} at {asking!r} gives {share} to {key!r} (token {self.key})"

    @property
    def distance(self) -> float:
        """What a bias for the distance (ALiBi) adds to it; 0 where there is none."""
        bias = self.captured.bias[0, self.column]
        return float(bias.masked_fill(bias == -torch.inf, 0.0) @ self.weights.to(bias))

    # ------------------------------------------------------------------ parts

    @cached_property
    def parts(self) -> dict[str, Float[Tensor, "c d"]]:
        """Before the rotation: parts of query and key, and their means over the prompt's other tokens."""
        if self.head.layer in self.reader.held:
            return self._pushed
        pair = self.found.slots([0, 1 + self.key])
        pieces = self.reader.stream(pair, self.head.layer)
        kept: dict[str, Tensor] = {}
        for side in SIDES:
            kept[side] = self.reader.read(pair, self.head, side, pieces)[0, :, 0]
            kept[f"mean_{side}"] = mean_parts(self.reader, self.found, self.head, side, [1 + i for i in self._rest])[0]
        return kept

    def weighted_keys(self) -> Float[Tensor, " d"]:
        """The key less the mean of those it is compared with, as the dot product sees them."""
        keys = self.captured.k[0, self.captured.kv_of_head[self.column]]
        return self.weights.to(keys) @ keys

    @property
    def _rest(self) -> list[int]:
        """Tokens that a cut part takes its mean over."""
        return [i for i in self.others if i not in (self.key, self.asked.query)] or self.others

    @cached_property
    def _pushed(self) -> dict[str, Float[Tensor, "c d"]]:
        """The same, and parts of the weighted keys after the rotation, with writers carried to every token.

        Tokens are taken some at a time, so that a long prompt takes no more room.
        """
        head, layer, slots = self.head, self.head.layer, self.found.columns.shape[1]
        kept: dict[str, Any] = {"weighted": 0.0, "mean_key": 0.0, "mean_query": 0.0}
        rest = self._rest
        for start in range(1, slots, _SLOTS):
            chunk = self.found.slots([0, *range(start, min(start + _SLOTS, slots))])
            pieces = self.reader.stream(chunk, layer)
            own = slice(start - 1, min(start + _SLOTS, slots) - 1)
            tokens = list(range(len(self.attention)))[own]
            k = self.reader.read(chunk, head, "key", pieces)
            turned = self.reader.turn(chunk, layer, k, "key")
            kept["weighted"] += torch.einsum("ckd,k->cd", turned[0], self.weights[own].to(turned))
            used = torch.tensor([float(i in rest) for i in tokens], device=k.device) / len(rest)
            kept["mean_key"] += torch.einsum("ckd,k->cd", k[0], used)
            kept["mean_query"] += torch.einsum("ckd,k->cd", self._as_queries(chunk, pieces)[0], used)
            if self.key in tokens:
                kept["key"] = k[0, :, tokens.index(self.key)]
            if start == 1:
                kept["query"] = self.reader.read(chunk, head, "query", pieces)[0, :, 0]
        return kept

    def _as_queries(self, chunk: Recorded, pieces: Sequence[Parts]) -> Float[Tensor, "n c p d"]:
        """What the other tokens would ask with: their streams read by this head's query weights."""
        return self.reader.read(chunk, self.head, "query", pieces, at=chunk.at("key"))

    @cached_property
    def _marginals(self) -> dict[str, Float[Tensor, " c"]]:
        q = self._projected(self._turned("query", self.parts["query"]))
        if self.head.layer in self.reader.held:
            weighted = self._pushed["weighted"]
            return {"query": q @ weighted.sum(0) * self.scale, "key": weighted @ q.sum(0) * self.scale}
        by_key = key_marginals(self.reader, self.found, self.head, self._query(), self.weights * self.scale)
        return {"query": q @ self.weighted_keys() * self.scale, "key": by_key}

    def marginals(self) -> dict[str, Float[Tensor, " c"]]:
        """By side, what each writer gives to the relative logit; both sum to it."""
        return self._marginals

    def pairs(self) -> Float[Tensor, "c c"]:
        """The same for pairs of a query writer and a key writer."""
        q = self._projected(self._turned("query", self.parts["query"]))
        return q @ self._pushed["weighted"].T * self.scale

    def _projected(self, q: Tensor) -> Tensor:
        return q if self.projector is None else q @ self.projector.to(q)

    @property
    def error(self) -> float:
        """How far the parts are from summing to the logit, as a share of the largest of them."""
        return max(float((v.sum() - self.total).abs() / v.abs().max()) for v in self.marginals().values())

    def _turned(self, side: Side, parts: Float[Tensor, "c d"]) -> Float[Tensor, "c d"]:
        """Vectors with the rotation of the query's, or the key's, place."""
        slot = 0 if side == "query" else 1 + self.key
        at = replace(self.found, columns=self.found.columns[:, [0, slot]])  # a rotation asks for places alone
        return self.reader.turn(at, self.head.layer, parts[None, :, None], side)[0, :, 0]

    # ------------------------------------------------------------------ cuts

    def away(self, writers: Mapping[str, Sequence[int]]) -> dict[str, Float[Tensor, " d"]]:
        """By side, what cutting some writers takes from the vector: their parts less the means, at its place."""
        moved: dict[str, Tensor] = {}
        for side in SIDES:
            chosen = list(writers.get(side, ()))
            away = (self.parts[side] - self.parts[f"mean_{side}"])[chosen].sum(0, keepdim=True)
            moved[side] = self._turned(side, away)[0]
        return moved

    def cut(self, writers: Mapping[str, Sequence[int]]) -> Float[Tensor, " t"]:
        """The attention row with some writers' parts replaced by their means over the prompt's other tokens."""
        away = self.away(writers)
        return self._row({self.key: -away["key"]}, -away["query"])

    def _row(self, keys: Mapping[int, Float[Tensor, " d"]], query: Tensor | float = 0.0) -> Float[Tensor, " t"]:
        """The attention row with vectors added to some keys, and to the query."""
        rows = self.captured.rows().of_head(self.column)
        own = rows.k[0, 0].clone()
        for place, vector in keys.items():
            own[place] += vector
        return rows.attention((own @ (rows.q[0, 0] + query) * self.scale)[None, None])[0, 0]

    def key_parts(self, places: Sequence[int]) -> Float[Tensor, "k c d"]:
        """Parts of some tokens' keys, before the rotation."""
        found = self.found.slots([0, *(1 + place for place in places)])
        return self.reader.read(found, self.head, "key")[0].transpose(0, 1)

    def with_keys(self, moved: Mapping[int, Float[Tensor, " d"]]) -> Float[Tensor, " t"]:
        """The attention row with vectors added to some keys, given before the rotation."""
        found = self.found.slots([0, *(1 + place for place in moved)])
        added = torch.stack(list(moved.values()))[None, None]
        turned = self.reader.turn(found, self.head.layer, added, "key")[0, 0]
        return self._row(dict(zip(moved, turned, strict=True)))

    def strongest(self, side: str, size: int) -> list[int]:
        """The writers that give most to the key's logit, biases aside, each at least `_SECOND` of what the first gives.

        Those against the key are no reason to look there, and one that gives next to nothing is none either.
        """
        values = self.marginals()[side]
        first = first_by(values, size, signed=True)
        least = max(_SECOND * float(values[first[0]]), 0.0) if first else 0.0
        return [i for i in first if float(values[i]) > least]

    def cut_rows(self, draws: int, seed: int) -> list[dict[str, Any]]:
        """The strongest writers cut, beside random ones of their kind and layers: a row for each side and number."""
        layers, made = addresses_of(self.writers), []
        sizes = [size for size in CUTS if size < len(layers)]
        for side in ("key", "query", "both"):
            for size in sizes:
                sides: Sequence[str] = SIDES if side == "both" else (side,)
                chosen = {one: self.strongest(one, size) for one in sides}
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
        before = float(self.attention[self.key])
        if before >= ATTENDED and not set(self.others) - {self.key, self.asked.query}:
            return "vacuous"
        return verdict(before, after, random)

    # ------------------------------------------------------------------ tables

    def writer_rows(self) -> list[dict[str, Any]]:
        """The table of writers of this prompt: no intervals, there is one prompt."""
        total, made = self.total, []
        for side, values in self.marginals().items():
            made += [
                {"head": str(self.head), "side": side, "writer": self.writers[i], "value": float(values[i]),
                 "share": float(values[i]) / total if total else None, "low": None, "high": None}
                for i in values.abs().argsort(descending=True).tolist()
            ]  # fmt: skip
        return made

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
        return trace_graph(self.reader, asked.encoded, self.head, asked.query, self.key, **options)

    def token_rows(self) -> list[dict[str, Any]]:
        """The head's attention to every token it sees, and its logit."""
        logits, attention = self.logits().tolist(), self.attention.tolist()
        return [
            {"head": str(self.head), "position": i, "token": self.asked.tokens[i], "attention": attention[i],
             "logit": logits[i]}
            for i in self.seen
        ]  # fmt: skip
