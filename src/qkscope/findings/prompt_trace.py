"""One head on one prompt: who wrote its query and key, and what cutting these writers does there.

The key's logit is taken against the mean of the others that the query sees, except the first token
(or against one token). To cut a writer here its part of the stream takes its mean over the prompt's
other tokens, the first excepted, in this head alone and with its norms frozen; the attention row is
then made anew. Random writers of the same layers stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Example, Scope
from qkscope.findings.head_rows import ATTENDED, HeadRows
from qkscope.findings.verdicts import FEWEST_SETS, verdict
from qkscope.heads import Head, Side, Writer, parse_writers
from qkscope.linear.attribution import first_neurons
from qkscope.linear.reader import Reader
from qkscope.linear.row import Norms, attention_with, mean_parts, vectors_with
from qkscope.linear.run import Run
from qkscope.model.capture_types import Places
from qkscope.model.encode import Encoding, token_texts
from qkscope.seeds import derived_seed
from qkscope.sums.relative_logits import SIDES, Tally, different, draw_alike, first_by

Prompt: TypeAlias = str | Example
#: How many writers of a side are cut at once.
CUTS = (1, 2, 3, 5)
_SECOND = 0.05  # of the first writer's part: one that gives less is not named beside it


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt as the model sees it, and the query token."""

    encoded: Encoding
    tokens: list[str]
    query: int

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Inputs of the model."""
        return self.encoded.inputs

    @property
    def places(self) -> Places:
        """The query, with every token of the prompt as a key."""
        row = self.encoded.places.row[:1]
        query = torch.full_like(row, self.query)
        return Places.everywhere(row, query, self.inputs["attention_mask"])

    def told(self, prompt: Prompt) -> dict[str, Any]:
        """Facts about the prompt that a result keeps."""
        shown = prompt if isinstance(prompt, str) else prompt.show(2000)
        return {"prompt": shown, "query": self.query, "tokens": self.tokens}

    @classmethod
    def of(cls, scope: Scope, prompt: Prompt, query: int | None, chat: bool) -> AskedPrompt:
        """Tokenise a prompt; without a query its last token asks, or the one marked."""
        if isinstance(prompt, Example) and len(prompt.queries) > 1:
            raise BadInput(
                f"a prompt is asked about from one query, but {len(prompt.queries)} are marked:"
                " mark one."
            )
        asked = cls.first_of(scope, scope.encode([prompt], chat=chat))
        length = len(asked.tokens)
        place = asked.query if query is None else checked_place(query, length, "query")
        if length < 2:
            raise BadInput(
                "the prompt has one token, and a head chooses among several: give a longer one."
            )
        if place == 0:
            raise BadInput(
                "the query is the first token, which sees only itself: name a later one."
            )
        return replace(asked, query=place)

    @classmethod
    def first_of(cls, scope: Scope, encoded: Encoding) -> AskedPrompt:
        """The first query of a prompt that is tokenised already."""
        ids = encoded.inputs["input_ids"][0].tolist()
        query = int(encoded.places.query[0])
        return cls(encoded, token_texts(scope, ids), query)


def checked_place(place: int, length: int, what: str) -> int:
    """A token's place counted from the start; a negative one is counted from the end."""
    if not -length <= place < length:
        tokens = f"{length} tokens, 0 to {length - 1}"
        raise BadInput(f"{what} {place} is out of range: the prompt has {tokens}.")
    return place % length


class PromptTrace(HeadRows):
    """Trace of one head on one prompt: its key, what it is compared with, and its writers.

    Parameters
    ----------
    run : recorded with every token of the prompt as a key.
    asked : the prompt.
    head : the head.
    key, versus : tokens; by default the most attended one besides the first, against all others in
        sight but the first.
    projector : put between query and key.

    Attributes
    ----------
    total : the relative logit.
    attends : whether there is any attention to explain.
    seen, others, free : tokens in sight; without the first; and without the key and the query
        either.
    """

    def __init__(
        self,
        run: Run,
        asked: AskedPrompt,
        head: Head,
        key: int | None = None,
        versus: int | Sequence[int] | None = None,
        projector: Tensor | None = None,
    ) -> None:
        no_signs = torch.zeros_like(run.columns[:, 1:])
        super().__init__(run, head, no_signs, projector, 1 + asked.query)
        self.asked = asked
        self.attention = self.rows.attention()[0, 0]
        self.seen = run.seen(head, asked.query)
        self.others = [i for i in self.seen if i > 0]
        if not self.others:
            raise BadInput(
                f"{head} sees nothing but the first token from token {asked.query}:"
                " name a later query."
            )
        if key is None:
            self.key = self.most_attended(self.others)
        else:
            self.key = self._checked(key, "key")
        self.against = self._compared_with(versus)
        if self.key in self.against:
            raise BadInput(f"token {self.key} cannot be compared with itself: name another token.")
        self.signs[0, self.against] = -1
        self.signs[0, self.key] = 1
        self.total = float(self.logit())
        self.attends = float(self.attention[self.key]) >= ATTENDED
        self.free = [i for i in self.others if i not in (self.key, asked.query)]

    def _compared_with(self, versus: int | Sequence[int] | None) -> list[int]:
        """The tokens that the key is compared with: those named, or all others but the first."""
        if versus is None:
            return [i for i in self.others if i != self.key]
        named = [versus] if isinstance(versus, int) else versus
        return [self._checked(i, "versus") for i in named]

    def _checked(self, place: int, what: str) -> int:
        """A token that the head sees, counted from the start."""
        place = checked_place(place, len(self.asked.tokens), what)
        if place in self.seen:
            return place
        why = f"is out of sight of {self.head}, which looks only so far back"
        if place > self.asked.query:
            why = (
                f"stands after the query (token {self.asked.query}), and this model looks back only"
            )
        raise BadInput(f"token {place} {why}: name another token.")

    def most_attended(self, tokens: Sequence[int], row: Float[Tensor, " t"] | None = None) -> int:
        """Token with most attention among some, in the head's row or in another."""
        values = (self.attention if row is None else row).tolist()
        return max(tokens, key=values.__getitem__)

    def token(self, i: int) -> str:
        """A token as a sentence names it."""
        text = self.asked.tokens[i]
        if not text:
            return f"token {i} (inside a character)"
        return f"{text!r} (token {i})"

    def where(self) -> str:
        """Say how much of its attention the head gives to the key."""
        asking = self.asked.tokens[self.asked.query]
        key = f"{self.asked.tokens[self.key]!r} (token {self.key})"
        share = f"{float(self.attention[self.key]):.0%} of its attention"
        where = f"{self.head} at {asking!r} gives {share} to {key}"
        if not self.attends:
            where += ": it does not attend there, so what follows explains a logit and no attention"
        return f"{where}."

    # ------------------------------------------------------------------ cuts

    @cached_property
    def _mean(self) -> Float[Tensor, "c d_model"]:
        """The mean of each writer's part over the prompt's other tokens."""
        return mean_parts(self.run, self.head.layer, self.free or self.others)

    def cut(
        self, sets: Sequence[Mapping[Side, Sequence[int]]], norms: Norms = "frozen"
    ) -> Float[Tensor, "x t"]:
        """Attention rows with the parts of each set of writers replaced by their means, by side."""
        tokens: dict[Side, int] = {"query": self.asked.query, "key": self.key}
        vectors = dict[Side, Tensor]()
        for side, token in tokens.items():
            names = list[list[str]]()
            for chosen in sets:
                names.append([self.writers[i] for i in chosen.get(side, ())])
            vectors[side] = vectors_with(self.run, self.head, side, token, self._mean, names, norms)
        keys = {self.key: vectors["key"]}
        return attention_with(self.run, self.head, self.asked.query, q=vectors["query"], keys=keys)

    def strongest(self, side: Side, size: int) -> list[int]:
        """The writers that give most to the key's logit, biases aside.

        Each gives at least `_SECOND` of what the first gives: one that gives next to nothing is no
        reason to look there, and those against the key are none either.
        """
        values = self.marginals[side][0]
        first = first_by(values, size, signed=True)
        if not first:
            return []
        most = float(values[first[0]])
        least = max(_SECOND * most, 0.0)
        return [i for i in first if float(values[i]) > least]

    def cut_rows(self, draws: int, seed: int, live: bool = False) -> list[dict[str, Any]]:
        """Rows of the table ``cuts``: the strongest writers cut, beside random ones alike.

        A row for each side and number. With ``live``, rows of one or two writers of a side also say
        what is left where norms are live.
        """
        rows = []
        for side, size in product(("key", "query", "both"), CUTS):
            sides = [each for each in SIDES if side in (each, "both")]
            chosen = {each: self.strongest(each, size) for each in sides}
            enough = all(len(writers) == size for writers in chosen.values())
            if not enough or size >= len(self.writers) - 1:
                continue
            random = self._random_like(chosen, size, draws, seed)
            row = self._cut_row(side, size, chosen, random, draws)
            if live and self.free and side != "both" and size <= 2:
                (live_row,) = self.cut([chosen], "live")
                row["live"] = float(live_row[self.key])
            rows.append(row)
        return rows

    def _random_like(
        self, chosen: Mapping[Side, Sequence[int]], size: int, draws: int, seed: int
    ) -> list[Mapping[Any, list[int]]]:
        """Different sets of random writers of the same kinds and layers as those chosen."""
        writers = parse_writers(self.writers[:-1])
        sets = list[Mapping[Any, list[int]]]()
        for draw in range(draws):
            drawn = dict[Side, list[int]]()
            for side, strongest in chosen.items():
                address = derived_seed(seed, "cut", side, size, draw)
                drawn[side] = draw_alike(strongest, writers, address, FEWEST_SETS)
            sets.append(drawn)
        return different(sets)

    def _cut_row(
        self,
        side: str,
        size: int,
        chosen: Mapping[Side, Sequence[int]],
        random: Sequence[Mapping[Side, Sequence[int]]],
        draws: int,
    ) -> dict[str, Any]:
        """Attention before and after one cut, and after the random ones that differ."""
        row, *random_rows = self.cut([chosen, *random])
        before = float(self.attention[self.key])
        after = float(row[self.key])
        controls = torch.stack(random_rows)[:, self.key]
        names = [self.writers[i] for writers in chosen.values() for i in writers]
        top = self.most_attended(self.others, row)
        no_mean = not self.free  # there are no other tokens to take a mean over
        return {
            "head": str(self.head),
            "side": side,
            "k": size,
            "writers": ", ".join(dict.fromkeys(names)),
            "before": before,
            "after": after,
            "control": float(controls.mean()),
            "control_low": float(controls.min()),
            "control_high": float(controls.max()),
            "first": float(row[0]),
            "top": top,
            "top_token": self.asked.tokens[top],
            "draws": draws,
            "sets": len(controls),
            "verdict": verdict(before, after, controls, vacuous=no_mean),
        }

    # ------------------------------------------------------------------ tables

    @cached_property
    def tally(self) -> Tally:
        """Tally of what the writers give, without pairs."""
        return Tally.of_prompt(self.given())

    def neuron_rows(self, named: Sequence[Writer] = ()) -> list[dict[str, Any]]:
        """The first ten neurons of each side, or those named: the table ``neurons``.

        The token is the one where the largest part of a neuron stands.
        """
        rows = []
        for side, direction in self.directions.items():
            for neuron, value, slot in first_neurons(self.run, direction, named):
                position = slot - 1
                row = {
                    "head": str(self.head),
                    "side": side,
                    "writer": str(neuron),
                    "layer": neuron.layer,
                    "value": value,
                    "share": value / self.total if self.total else None,
                    "position": position,
                    "token": self.asked.tokens[position],
                }
                rows.append(row)
        return rows

    def token_rows(self) -> list[dict[str, Any]]:
        """The head's attention to every token it sees, and its logit."""
        query = self.projected(self.rows.q[0, 0])
        products = self.rows.k[0, 0] @ query
        logits = (products * self.scale).tolist()
        attention = self.attention.tolist()
        rows = []
        for position in self.seen:
            token = self.asked.tokens[position]
            row = {"head": str(self.head), "position": position, "token": token}
            row |= {"attention": attention[position], "logit": logits[position]}
            rows.append(row)
        return rows


_READERS: WeakKeyDictionary[Scope, tuple[str, Reader]] = WeakKeyDictionary()


def reader_of(scope: Scope) -> Reader:
    """A reader of all heads, kept as long as the model's weights are what they were."""
    weights = scope.weights_hash
    if scope not in _READERS or _READERS[scope][0] != weights:
        _READERS[scope] = weights, Reader(scope, scope.heads())
    return _READERS[scope][1]


class PromptRun:
    """A prompt run once with one query token: every head is read from that run.

    Parameters
    ----------
    scope : the model.
    prompt : a text, or an example with at most one marked query.
    query : the query token; by default the one marked, or the last.
    chat : whether it goes into the chat template.
    last : the last layer whose heads are asked about: writers are kept up to there; of all layers
        by default.
    options : more of `Reader.record`; by default the model runs on to its logits.

    Examples
    --------
    >>> probe = PromptRun(Scope.load("nano:mixed"), "hat: O jam: Z jam:")
    >>> probe.head("L1H0").asked.tokens[-2:]
    ['jam', ':']
    """

    def __init__(
        self,
        scope: Scope,
        prompt: Prompt,
        query: int | None = None,
        chat: bool = False,
        last: int | None = None,
        **options: Any,
    ) -> None:
        self.scope = scope
        self.prompt = prompt
        self.asked = AskedPrompt.of(scope, prompt, query, chat)
        self.reader = reader_of(scope)
        options = {"deep": True, "last": last, "logits": True, **options}
        self.run = self.reader.record(self.asked.inputs, self.asked.places, **options)

    def head(
        self,
        head: str | Head,
        key: int | None = None,
        versus: int | None = None,
        projector: Tensor | None = None,
    ) -> PromptTrace:
        """Trace one head, asked about one token; see `PromptTrace`."""
        return PromptTrace(self.run, self.asked, self.scope.check(head), key, versus, projector)
