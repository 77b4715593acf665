"""A dictionary's features instead of writers: which pairs of them a relative logit lies in, beside meaningless copies.

Features, the dictionary's error, what layers after it added and the biases are parts of the stream like any other, and
go through the head's norms, weights and rotation as writers do. Pairs are chosen on a task's words for choosing and
measured on those for testing; of one prompt the largest are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import batches_of, words_of
from qkscope.analyses.trace.prompt import PromptTrace
from qkscope.analyses.trace.rows import SIDES, HeadRows, Pass, Tables, Tally, join_tables, metrics_of
from qkscope.analyses.trace.verdicts import says_right
from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.run import Parts, Side
from qkscope.maths.dictionaries import (
    AFTER,
    BIAS,
    ERROR,
    NULLS,
    NUMBERS,
    SIZES,
    Coded,
    Dictionary,
    FeatureTerms,
    null_code,
)
from qkscope.maths.writers import METRICS
from qkscope.tasks.task import Unit

SHOWN = 20
OTHERS = "other features"
_AT_ONCE = 2**26  # numbers of a stream that are held at once
_AT = {name: place for place, name in enumerate(NUMBERS)}
_CALLED = {
    "rotated": "rotated",
    "random": "random",
    "features": "codes of other features",
    "tokens": "codes of other tokens",
}
_OWNERS = {**_CALLED, "rotated": "a rotated dictionary", "random": "a random dictionary"}


def check_dictionary(scope: Scope, heads: Sequence[Head], dictionary: Dictionary) -> None:
    """Refuse a dictionary of another width than the model, or one that stands behind what a head reads."""
    width = scope.model.get_input_embeddings().weight.shape[-1]
    width = getattr(scope.model.config.get_text_config(), "hidden_size", width)
    if dictionary.decoder.shape[1] != width:
        raise BadInput(
            f"{dictionary.name} has width {dictionary.decoder.shape[1]}, and the residual stream of {scope.name} has "
            f"{width}: take a dictionary of this model."
        )
    for head in heads:
        if dictionary.layer > head.layer:
            raise BadInput(
                f"{dictionary.name} stands before layer {dictionary.layer}, and {head} reads what enters layer "
                f"{head.layer}: take a dictionary of that layer or an earlier one."
            )


class FeatureSplit:
    """The relative logits of one head on one batch, ready to be split by codes of a dictionary.

    Parameters
    ----------
    rows : the head, on what was recorded.
    dictionary : on the batch's device.
    """

    def __init__(self, rows: HeadRows, dictionary: Dictionary) -> None:
        self.rows, self.dictionary = rows, dictionary
        self.x = rows.run.entered[dictionary.layer]
        self.coded = dictionary.code(self.x)
        self.there = torch.cat([torch.ones_like(rows.weights[:, :1]), rows.weights], dim=1) != 0
        self.rest = rest_of(dictionary, rows.head)

    def terms(self, coded: Coded | None = None) -> list[FeatureTerms]:
        """One for each prompt, by these codes or by the dictionary's own."""
        coded, slots, rows = self.coded if coded is None else coded, self.x.shape[1], self.rows
        step = max(_AT_ONCE // (len(self.x) * coded.ids.shape[-1] * self.x.shape[-1]), 1)
        q = rows.projected(self._read(coded, "query", [0])[:, :, 0])
        chunks = [list(range(start, min(start + step, slots))) for start in range(1, slots, step)]
        k = torch.cat([self._read(coded, "key", chunk) for chunk in chunks], dim=2)
        return [
            FeatureTerms.of((ids[0], own), (ids[1:], keys), w.to(own), rows.scale, self.rest)
            for ids, own, keys, w in zip(coded.ids, q, k, rows.weights, strict=True)
        ]

    def _read(self, coded: Coded, side: Side, places: list[int]) -> Float[Tensor, "n c p d"]:
        rows, coded = self.rows, coded.at(places)
        features, x = coded.parts().transpose(1, 2), self.x[:, places]
        rest = {
            ERROR: x - features.sum(1) - coded.bias,
            AFTER: rows.run.entered[rows.head.layer][:, places] - x,
            BIAS: coded.bias.expand_as(x),
        }
        pieces = [Parts(["feature"] * features.shape[1], features)]
        pieces += [Parts([name], rest[name][:, None]) for name in self.rest]
        return rows.run.read(rows.head, side, pieces, places)

    def measure(self, choice: FeatureChoice, draws: int, seed: int, address: int) -> tuple[dict[str, Tensor], Tensor]:
        """What a `Tally` takes of each prompt, and how far parts are from summing to the logit.

        ``values`` is what `FeatureChoice.of` gives; ``numbers`` are `NUMBERS` of the dictionary, then of so many draws
        of each null; ``about``: active features of the query, of a key; the squares of the error, and of the stream
        less the bias; behind them the attention on the right key, on the first token, and whether it is the first of
        the named ones.
        """
        own = self.terms()
        every = [own]
        for kind in NULLS:
            for draw in range(draws):
                where = (address,) if kind == "tokens" else ()  # the others are dictionaries, the same for all prompts
                drawn = derived_seed(seed, "dictionary", kind, draw, *where)
                every.append(self.terms(null_code(kind, self.dictionary, self.x, self.coded, drawn, self.there)))
        numbers = torch.stack([torch.stack([terms.numbers() for terms in one]) for one in every], dim=1)
        active, weight = self.coded.active.double(), self.there.double()
        stream = self.x - self.coded.bias
        lost = stream - self.coded.parts().sum(-2)
        squares = [(v.double().square().sum(-1) * weight).sum(1) for v in (lost, stream)]
        keys = (active * weight)[:, 1:].sum(1) / weight[:, 1:].sum(1).clamp_min(1)
        measured = metrics_of(self.rows.rows, self.rows.plain.named, self.rows.signs).double()
        looks = [measured[:, METRICS.index(name)] for name in ("attention", "first", "accuracy")]
        largest = [max(abs(v) for side in terms.marginals().values() for v in side.values()) for terms in own]
        sums = torch.tensor([float(terms.values.sum()) for terms in own])
        return {
            "values": torch.stack([choice.of(terms) for terms in own]),
            "numbers": numbers,
            "about": torch.stack([active[:, 0], keys, *squares, *looks], dim=1),
        }, (sums - self.rows.logit().cpu()).abs() / torch.tensor(largest)


def rest_of(dictionary: Dictionary, head: Head) -> tuple[str, ...]:
    """Parts of what a head reads that are no features."""
    return (ERROR, AFTER, BIAS) if dictionary.layer < head.layer else (ERROR, BIAS)


class FeatureChoice(NamedTuple):
    """Pairs and features to show, by number."""

    pairs: list[tuple[int, int]]
    features: dict[str, list[int]]

    @classmethod
    def of_terms(cls, terms: Sequence[FeatureTerms]) -> FeatureChoice:
        """The largest on average."""
        pairs: dict[Any, float] = {}
        sides: dict[str, dict[Any, float]] = {side: {} for side in SIDES}
        for own in terms:
            for g, f, value in own.largest(own.pairs.numel()):
                pairs[g, f] = pairs.get((g, f), 0.0) + value
            for side, values in own.marginals().items():
                for part, value in values.items():
                    if isinstance(part, int):
                        sides[side][part] = sides[side].get(part, 0.0) + value
        first, *others = (sorted(sums, key=lambda one: -abs(sums[one]))[:SHOWN] for sums in (pairs, *sides.values()))
        return cls(first, dict(zip(sides, others, strict=True)))

    def of(self, terms: FeatureTerms) -> Float[Tensor, " v"]:
        """What they give in one prompt: pairs; of each side features, the rest, and all other features."""
        at = [{int(f): i for i, f in enumerate(ids)} for ids in (terms.query, terms.key)]
        given = [float(terms.pairs[at[0][g], at[1][f]]) if g in at[0] and f in at[1] else 0.0 for g, f in self.pairs]
        for side, values in terms.marginals().items():
            parts: list[int | str] = [*self.features[side], *terms.rest]
            named = [values.pop(part, 0.0) for part in parts]
            given += [*named, sum(values.values())]
        return torch.tensor(given, dtype=torch.float64)

    def size(self, rest: tuple[str, ...]) -> int:
        """How many numbers `of` gives."""
        return len(self.pairs) + sum(len(own) + len(rest) + 1 for own in self.features.values())

    def tables(self, head: Head, rest: tuple[str, ...], tally: Tally, needed: Float[Tensor, "n x"]) -> Tables:
        """Pairs, parts, copies, what few pairs hold, and the check.

        Parameters
        ----------
        head, rest : whose logit, and which parts of it are no features.
        tally : of what `FeatureSplit.measure` gives.
        needed : pairs for most of the logit, of each prompt and dictionary, of which the median is told.
        """
        numbers = tally.mean("numbers")
        columns = [column.tolist() for column in (tally.mean("values"), *tally.interval("values"))]
        logit, name = float(numbers[0, 0]), str(head)
        rows = [{"value": v, "share": v / logit, "low": a, "high": b} for v, a, b in zip(*columns, strict=True)]
        pairs = [{"head": name, "query_feature": f"f{g}", "key_feature": f"f{f}", **rows.pop(0)} for g, f in self.pairs]
        parts = [
            {"head": name, "side": side, "part": part, **rows.pop(0)}
            for side in SIDES
            for part in (*(f"f{f}" for f in self.features[side]), *rest, OTHERS)
        ]
        copies, held = _copies(name, numbers, tally.interval("numbers", [0]), needed)
        active_query, active_key, lost, whole, attention, first, accuracy = tally.mean("about").tolist()
        check = {
            "head": name, "sum_error": float(tally.error), "logit": logit,
            "cancels": float(numbers[0, _AT["gross"]]) / abs(logit), "attention": attention, "first": first,
            "accuracy": accuracy, "active_query": active_query, "active_key": active_key, "lost": lost / whole,
            "n": tally.rows,
        }  # fmt: skip
        pairs.sort(key=lambda row: -abs(row["value"]))
        return {"feature_pairs": pairs, "features": parts, "copies": copies, "held": held, "check": [check]}


def _copies(
    head: str, numbers: Float[Tensor, "x m"], interval: tuple[Tensor, Tensor], needed: Float[Tensor, "n x"]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The dictionary with its interval over words, each null with the lowest and highest of its draws."""
    own, draws = numbers[0], (len(numbers) - 1) // len(NULLS)
    copies, held = [], []
    for place, kind in enumerate(("dictionary", *NULLS)):
        mine = slice(1 + (place - 1) * draws, 1 + place * draws) if place else slice(0, 1)
        means = numbers[mine]
        ends = (means.amin(0), means.amax(0)) if place else tuple(end[0] for end in interval)
        row: dict[str, Any] = {"head": head, "kind": kind}
        for name, column, per in (("explained", "pairs", own[0]), ("first", "held_1", 1), ("ten", "held_10", 1)):
            at = _AT[column]
            least, most = sorted(float(end[at] / per) for end in ends)  # a logit below 0 turns them round
            row |= {name: float(means[:, at].mean() / per), f"{name}_low": least, f"{name}_high": most}
        middle = float(needed[:, mine].median(0).values.median())
        below = bool(means[:, _AT["held_10"]].max() < own[_AT["held_10"]]) if place else None
        copies.append({**row, "needed": middle, "below": below, "draws": len(means)})
        for size in SIZES:
            at = _AT[f"held_{size}"]
            held.append({"head": head, "kind": kind, "k": size, "held": float(means[:, at].mean()),
                         "low": float(ends[0][at]), "high": float(ends[1][at])})  # fmt: skip
    return copies, held


# ---------------------------------------------------------------------- a prompt, and a task


def features_of_prompt(
    one: PromptTrace, dictionary: Dictionary, draws: int, seed: int, alone: bool
) -> tuple[Tables, str]:
    """Tables and the answer of one head on one prompt: its largest pairs are shown."""
    run, used = one.run, one.weights[0].nonzero()[:, 0]
    rows = HeadRows(run.slots([0, *(1 + used).tolist()]), one.head, one.signs[:, used], one.projector)
    split = FeatureSplit(rows, dictionary.to(run.row.device))
    choice = FeatureChoice.of_terms(split.terms())
    values, error = split.measure(choice, draws, seed, 0)
    needed = values["numbers"][..., _AT["needed"]]
    tables = choice.tables(one.head, split.rest, Tally.of_prompt(values, error), needed)
    answer = says_pairs(one.where(), tables, alone)
    tables["check"][0] |= {"query": one.asked.query, "key": one.key}
    return {**tables, "tokens": one.token_rows()}, answer


def features_of_task(
    how: Pass, choosing: Sequence[Unit], units: Sequence[Unit], dictionary: Dictionary, draws: int
) -> tuple[Tables, str]:
    """Tables and the answer: pairs chosen on the words for choosing, all else on those for testing."""
    heads, dictionary = how.reader.heads, dictionary.to(how.reader.scope.device)
    how = replace(how, layers=[dictionary.layer])

    def choose() -> list[Any]:
        terms: dict[Head, list[FeatureTerms]] = {head: [] for head in heads}
        for indices in batches_of(choosing, how.batch_size):
            for rows in how.rows(choosing, indices)[1]:
                terms[rows.head] += FeatureSplit(rows, dictionary).terms()
        return [list(FeatureChoice.of_terms(own)) for own in terms.values()]

    choices, words = {}, words_of(units)
    for head, (pairs, features) in zip(heads, how.job.once("features chosen", choose), strict=True):
        choices[head] = FeatureChoice([(g, f) for g, f in pairs], features)
    shapes: Any = {"numbers": (1 + len(NULLS) * draws, len(NUMBERS)), "about": (7,)}
    asked = [words[i] for indices in batches_of(units, how.batch_size) for i in indices]
    tallies = {h: Tally(asked, {**shapes, "values": (own.size(rest_of(dictionary, h)),)}) for h, own in choices.items()}

    def measure(indices: list[int]) -> Any:
        numbers, every = how.rows(units, indices)
        asking, given = [words[i] for i in numbers], []
        for rows in every:
            own = FeatureSplit(rows, dictionary).measure(choices[rows.head], draws, how.seed, indices[0])
            given.append((rows.head, asking, *own))
        return given, [values["numbers"][..., _AT["needed"]] for _, _, values, _ in given]

    kept = how.add_up("features", units, measure, tallies, last=True)
    needed = (torch.cat(batches) for batches in zip(*kept, strict=True))
    every = [
        choices[h].tables(h, rest_of(dictionary, h), tallies[h], own) for h, own in zip(heads, needed, strict=True)
    ]
    said = [says_pairs(says_right(own["check"][0]), own, len(heads) == 1) for own in every]
    return join_tables(every), " ".join(said)


def made_by(dictionary: Dictionary, draws: int) -> dict[str, Any]:
    """What a result says of the dictionary, and of its copies."""
    return {"dictionary": repr(dictionary), "dictionary_hash": dictionary.fingerprint, "draws": draws}


# ---------------------------------------------------------------------- in words


def says_pairs(where: str, tables: Mapping[str, Sequence[Mapping[str, Any]]], alone: bool) -> str:
    """What is said of a head: alone in full, else in short; that copies hold as much comes before any number."""
    (ours, *copies), (check,) = tables["copies"], tables["check"]
    level = [_OWNERS[row["kind"]] for row in copies if not row["below"]]
    owners = " or ".join(filter(None, (", ".join(level[:-1]), *level[-1:])))
    told = f"these pairs say no more than those of {owners}" if level else ""
    (share, shares), (ten, tens) = (_beside(ours, copies, name) for name in ("explained", "ten"))
    little = ", most of it not" if ours["explained"] < 0.5 else ""
    lies = f"{share} of the logit lies in pairs of features{little} ({shares})"
    above = "" if level else ": more than with any copy without meaning"
    hold = f"the ten largest pairs of a prompt hold {ten} of all that is added, signs left out{above} ({tens})."
    if not alone:
        return f"{check['head']}: {told}{'; ' if told else ''}{lies}, and {hold}"
    first = "".join(
        f" The first pair is {pair['query_feature']} of the query with {pair['key_feature']} of the key"
        f" ({_percent(pair['share'])} of the logit)."
        for pair in tables["feature_pairs"][:1]
    )
    return (
        f"{where}{f' {told.capitalize()}.' if told else ''} {lies}; the dictionary misses"
        f" {_percent(check['lost'])} of the stream here, and its error takes part in the rest.{first}"
        f" {hold[0].upper()}{hold[1:]}"
    )


def _beside(ours: Mapping[str, Any], copies: Sequence[Mapping[str, Any]], name: str) -> tuple[str, str]:
    """A number of the dictionary and the lowest and highest of its copies, with places enough to tell these apart.

    >>> _beside({"ten": 0.0012}, [{"kind": "random", "ten_low": 0.0011, "ten_high": 0.0014}], "ten")
    ('0.12%', 'random 0.11% to 0.14%')
    """
    ends = [(row[f"{name}_low"], row[f"{name}_high"]) for row in copies]
    more = int(any(low != high and _percent(low) == _percent(high) for low, high in ends))
    told = [dict.fromkeys(_percent(end, more) for end in both) for both in ends]
    beside = (f"{_CALLED[row['kind']]} {' to '.join(own)}" for row, own in zip(copies, told, strict=True))
    return _percent(ours[name], more), ", ".join(beside)


def _percent(share: float, more: int = 0) -> str:
    """In whole percents, below ten with one place; with more places where these do not do.

    >>> _percent(0.256), _percent(-0.0314), _percent(-0.0001)
    ('26%', '-3.1%', '0.0%')
    """
    places = more + (0 if abs(share) >= 0.0995 else 1)
    return f"{round(100 * share, places) + 0.0:.{places}f}%"
