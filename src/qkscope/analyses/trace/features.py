"""A dictionary's features instead of writers: which pairs of them a relative logit lies in, beside meaningless copies.

Features, the dictionary's error, what layers after it added and the biases are parts of the stream like any other, and
go through the head's norms, weights and rotation as writers do. Pairs are chosen on a task's words for choosing and
measured on those for testing; of one prompt the largest are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import batches_of
from qkscope.analyses.trace.feature_rows import Chosen, Measured, choose_pairs
from qkscope.analyses.trace.one import PromptTrace
from qkscope.analyses.trace.rows import HeadRows, edge_rows, task_batch, words_of
from qkscope.analyses.trace.verdicts import says_right
from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.run import Parts, Side
from qkscope.maths.dictionaries import AFTER, BIAS, ERROR, NULLS, Coded, Dictionary, FeatureTerms, null_code
from qkscope.maths.writers import METRICS, relative_weights
from qkscope.runs.job import Job
from qkscope.tasks.task import Unit

_AT_ONCE = 2**26  # numbers of a stream that are held at once


def check_dictionary(scope: Scope, heads: Sequence[Head], dictionary: Dictionary) -> None:
    """Refuse a dictionary of another width than the model, or one that stands behind what a head reads."""
    width, layers = scope.model.get_input_embeddings().weight.shape[-1], len(scope.facts.layers)
    width = getattr(scope.model.config.get_text_config(), "hidden_size", width)
    if dictionary.decoder.shape[1] != width:
        raise BadInput(
            f"{dictionary.name} has width {dictionary.decoder.shape[1]}, and the residual stream of {scope.name} has "
            f"{width}: take a dictionary of this model."
        )
    if dictionary.layer > layers:
        raise BadInput(f"{dictionary.name} stands before layer {dictionary.layer}, and {scope.name} has {layers}.")
    for head in heads:
        if dictionary.layer > head.layer:
            raise BadInput(
                f"{dictionary.name} stands before layer {dictionary.layer}, and {head} reads what enters layer "
                f"{head.layer}: take a dictionary of that layer or an earlier one."
            )


def rest_of(dictionary: Dictionary, head: Head) -> tuple[str, ...]:
    """Parts of what a head reads that are no features."""
    return (ERROR, AFTER, BIAS) if dictionary.layer < head.layer else (ERROR, BIAS)


class FeatureSplit:
    """The relative logits of one head on one batch, ready to be split by codes of a dictionary.

    Parameters
    ----------
    rows : the head, on what was recorded.
    dictionary : on the batch's device.
    """

    def __init__(self, rows: HeadRows, dictionary: Dictionary) -> None:
        self.rows, self.dictionary, self.weights = rows, dictionary, relative_weights(rows.signs)
        self.x = rows.run.entered[dictionary.layer]
        self.coded = dictionary.code(self.x)
        self.there = torch.cat([torch.ones_like(self.weights[:, :1]), self.weights], dim=1) != 0
        self.rest = rest_of(dictionary, rows.head)

    def terms(self, coded: Coded | None = None) -> list[FeatureTerms]:
        """One for each prompt, by these codes or by the dictionary's own."""
        coded, slots = self.coded if coded is None else coded, self.x.shape[1]
        step = max(_AT_ONCE // (len(self.x) * coded.ids.shape[-1] * self.x.shape[-1]), 1)
        q = self._read(coded, "query", [0])[:, :, 0]
        chunks = [list(range(start, min(start + step, slots))) for start in range(1, slots, step)]
        k = torch.cat([self._read(coded, "key", chunk) for chunk in chunks], dim=2)
        if self.rows.projector is not None:
            q = q @ self.rows.projector.to(q)
        each = zip(coded.ids, q, k, self.weights, strict=True)
        scale, rest = self.rows.scale, self.rest
        return [FeatureTerms.of((ids[0], own), (ids[1:], keys), w.to(own), scale, rest) for ids, own, keys, w in each]

    def _read(self, coded: Coded, side: Side, places: list[int]) -> Float[Tensor, "n c p d"]:
        rows, coded = self.rows, coded.at(places)
        features, x = coded.parts().transpose(1, 2), self.x[:, places]
        error = x - features.sum(1) - coded.bias
        pieces = [Parts(["feature"] * features.shape[1], features), Parts([ERROR], error[:, None])]
        if AFTER in self.rest:
            pieces.append(Parts([AFTER], (rows.run.entered[rows.head.layer][:, places] - x)[:, None]))
        pieces.append(Parts([BIAS], coded.bias.expand_as(x)[:, None]))
        return rows.run.read(rows.head, side, pieces, places)

    def numbers(self, own: Sequence[FeatureTerms], draws: int, seed: int, address: int) -> Float[Tensor, "n x m"]:
        """`NUMBERS` of the dictionary, then of so many draws of each null."""
        every = [own]
        for kind in NULLS:
            for draw in range(draws):
                where = (address,) if kind == "tokens" else ()  # the others are dictionaries, the same for all prompts
                drawn = derived_seed(seed, "dictionary", kind, draw, *where)
                every.append(self.terms(null_code(kind, self.dictionary, self.x, self.coded, drawn, self.there)))
        return torch.stack([torch.stack([terms.numbers() for terms in one]) for one in every], dim=1)

    def about(self) -> Float[Tensor, "n 7"]:
        """Active features of the query, of a key; the squares of the error, and of the stream less the bias.

        Behind them the attention on the right key, on the first token, and whether it is the first of the named ones.
        """
        active, weight = self.coded.active.double(), self.there.double()
        stream = self.x - self.coded.bias
        lost = stream - self.coded.parts().sum(-2)
        squares = [(v.double().square().sum(-1) * weight).sum(1) for v in (lost, stream)]
        keys = (active * weight)[:, 1:].sum(1) / weight[:, 1:].sum(1).clamp_min(1)
        run, rows = self.rows.run, self.rows
        plain = edge_rows(run.captured, rows.head, run.columns[:, 1:], rows.signs)
        measured = plain.measure(plain.rows.q[None, :, 0], plain.keys()[None])[0].double()
        looks = [measured[:, METRICS.index(name)] for name in ("attention", "first", "accuracy")]
        return torch.stack([active[:, 0], keys, *squares, *looks], dim=1).cpu()


def measure(split: FeatureSplit, chosen: Chosen, draws: int, seed: int, address: int) -> dict[str, Any]:
    """Fields of `Measured` of one batch."""
    own, total = split.terms(), split.rows.total().tolist()
    largest = [max(abs(v) for side in terms.marginals().values() for v in side.values()) for terms in own]
    away = [abs(float(terms.values.sum()) - true) for terms, true in zip(own, total, strict=True)]
    return {
        "values": torch.stack([chosen.of(terms) for terms in own]),
        "numbers": split.numbers(own, draws, seed, address),
        "about": split.about(),
        "error": max(one / size for one, size in zip(away, largest, strict=True)),
    }


# ---------------------------------------------------------------------- a prompt, and a task


def features_of_prompt(
    one: PromptTrace, dictionary: Dictionary, draws: int, seed: int, *, alone: bool
) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Tables and the answer of one head on one prompt: its largest pairs are shown."""
    run = one.run
    places = [i for i, weight in enumerate(one.weights.tolist()) if weight]
    signs = torch.tensor([[1 if i == one.key else -1 for i in places]], device=run.row.device)
    rows = HeadRows(run.slots([0, *(1 + i for i in places)]), one.head, signs, [], one.projector)
    split = FeatureSplit(rows, dictionary.to(run.row.device))
    chosen = choose_pairs(split.terms())
    measured = Measured(one.head, chosen, split.rest, words=[""], **measure(split, chosen, draws, seed, 0))
    tables = {**measured.tables(), "tokens": one.token_rows()}
    tables["check"][0] |= {"query": one.asked.query, "key": one.key}
    return tables, measured.answer(one.where(), tables, alone)


def features_of_task(
    reader: Reader,
    choosing: Sequence[Unit],
    units: Sequence[Unit],
    projectors: Mapping[Head, Tensor],
    dictionary: Dictionary,
    draws: int,
    *,
    chat: bool,
    batch_size: int,
    seed: int,
    progress: bool | None,
    job: Job,
) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Tables and the answer: pairs chosen on the words for choosing, all else on those for testing."""
    heads, dictionary = reader.heads, dictionary.to(reader.scope.device)

    def splits(own: Sequence[Unit], indices: list[int]) -> tuple[list[int], list[FeatureSplit]]:
        numbers, signs, run = task_batch(reader, own, indices, chat, [dictionary.layer])
        return numbers, [FeatureSplit(HeadRows(run, h, signs, [], projectors.get(h)), dictionary) for h in heads]

    def choose() -> list[Any]:
        terms: list[list[FeatureTerms]] = [[] for _ in heads]
        for indices in batches_of(choosing, batch_size):
            for own, split in zip(terms, splits(choosing, indices)[1], strict=True):
                own += split.terms()
        return [list(choose_pairs(own)) for own in terms]

    chosen = [Chosen([(g, f) for g, f in pairs], features) for pairs, features in job.once("features chosen", choose)]

    def run(indices: list[int]) -> dict[str, Any]:
        numbers, made = splits(units, indices)
        own = [measure(s, c, draws, seed, indices[0]) for s, c in zip(made, chosen, strict=True)]
        return {"numbers": numbers, "heads": own}

    pieces, words = job.stream("features", batches_of(units, batch_size), run, progress), words_of(units)
    tables: dict[str, list[dict[str, Any]]] = {}
    said = []
    for place, head in enumerate(heads):
        own = [piece["heads"][place] for piece in pieces]
        joined: Any = {name: torch.cat([piece[name] for piece in own]) for name in ("values", "numbers", "about")}
        asking = [words[i] for piece in pieces for i in piece["numbers"]]
        error = max(piece["error"] for piece in own)
        measured = Measured(head, chosen[place], rest_of(dictionary, head), words=asking, error=error, **joined)
        found = measured.tables()
        for name, more in found.items():
            tables.setdefault(name, []).extend(more)
        said.append(measured.answer(says_right(found["check"][0]), found, len(heads) == 1))
    return tables, " ".join(said)


def made_by(dictionary: Dictionary, draws: int) -> dict[str, Any]:
    """What a result says of the dictionary, and of its copies."""
    return {"dictionary": repr(dictionary), "dictionary_hash": dictionary.fingerprint, "draws": draws}
