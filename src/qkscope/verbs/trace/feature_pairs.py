"""A dictionary's features instead of writers: pairs that a logit lies in, beside meaningless copies.

Features, the dictionary's error, what layers after it added and the biases are parts of the stream
like any other, and go through the head's norms, weights and rotation as writers do. A transcoder
splits what one MLP wrote instead, and all other writers are one part. Pairs are chosen on a task's
words for choosing and measured on those for testing; of one prompt the largest are shown.

Pairs are also *cut*: in each prompt the features of its first pairs, in this head's query or key
alone, are put at their mean over the keys that the right one is compared with (ablated); or
everything there is put at that mean, and they alone are put back (restored). The same is done with
the first pairs of every copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.findings.head_rows import HeadRows, Pass
from qkscope.findings.task_batches import batches_of
from qkscope.findings.verdicts import verdict
from qkscope.heads import BIAS, Head, Side, Writer
from qkscope.linear.run import Parts
from qkscope.model.dictionary import Coded, Dictionary
from qkscope.results.result import Tables
from qkscope.seeds import derived_seed
from qkscope.sums.feature_terms import AFTER, ERROR, NUMBERS, OTHERS, SKIP, FeatureTerms
from qkscope.sums.relative_logits import METRICS, SIDES, Measurement, Tally
from qkscope.texts.task import Unit
from qkscope.verbs.trace.null_dictionaries import NULLS, null_code

SHOWN_PAIRS = 20
OTHER_FEATURES = "other features"
#: Pairs whose features are ablated or restored together, and what is done to which side.
CUT_PAIRS = (1, 2, 5, 10)
PAIR_CUTS = tuple(product(("key", "query", "both"), ("ablated", "restored"), CUT_PAIRS))
_AT_ONCE = 2**26  # numbers of a stream that are held at once
_AT = {name: place for place, name in enumerate(NUMBERS)}
_LOOKS = ("attention", "first", "accuracy")
_ATTENTION = METRICS.index("attention")
_ABOUT = ("active_query", "active_key", "lost", "whole", *_LOOKS)
_CALLED = {
    "rotated": "a rotated dictionary",
    "random": "a random dictionary",
    "features": "codes of other features",
    "tokens": "codes of other tokens",
}


def check_dictionary(scope: Scope, heads: Sequence[Head], dictionary: Dictionary) -> None:
    """Refuse a dictionary of another width than the model, or one that stands behind what a head
    reads.
    """
    embedded = scope.model.get_input_embeddings().weight.shape[-1]
    width = getattr(scope.model.config.get_text_config(), "hidden_size", embedded)
    if dictionary.decoder.shape[1] != width:
        wide = f"has width {dictionary.decoder.shape[1]}, and the residual stream of {scope.name} has {width}"
        raise BadInput(f"{dictionary.name} {wide}: take a dictionary of this model.")
    inside = dictionary.splits != "stream"
    for head in heads:
        if dictionary.layer + inside > head.layer:
            stands = f"stands before layer {dictionary.layer}"
            if inside:
                stands = f"splits what M{dictionary.layer} wrote"
            late = f"{stands}, and {head} reads what enters layer {head.layer}"
            raise BadInput(
                f"{dictionary.name} {late}: take a dictionary of that layer or an earlier one."
            )


class FeatureSplit:
    """The relative logits of one head on one batch, ready to be split by codes of a dictionary.

    Parameters
    ----------
    rows : the head, on what was recorded.
    dictionary : on the batch's device.
    """

    def __init__(self, rows: HeadRows, dictionary: Dictionary) -> None:
        self.rows = rows
        self.dictionary = dictionary
        self.stream = rows.run.hidden([rows.head.layer], slice(None))[0]
        # what the features describe, and what their encoder is given
        if dictionary.splits == "stream":
            self.target = rows.run.entered[dictionary.layer]
        else:
            self.target = self._written()
        self.x = self.target
        if dictionary.splits == "transcoder":
            mlp = rows.run.reader.blocks[dictionary.layer].parts[0]
            self.x = rows.run.module_inputs[mlp]
        self.coded = dictionary.code(self.x)
        at_query = torch.ones_like(rows.weights[:, :1])
        self.there = torch.cat([at_query, rows.weights], dim=1) != 0
        self.rest = rest_of(dictionary, rows.head)

    def _written(self) -> Float[Tensor, "n p d"]:
        """What the MLP of the dictionary's layer left in the stream that the head reads."""
        writer = str(Writer(self.dictionary.layer, "mlp"))
        if writer not in self.rows.writers:
            raise BadInput(
                f"layer {self.dictionary.layer} has no one MLP to split: take another dictionary."
            )
        place = self.rows.writers.index(writer)
        # the query stands before the keys
        return torch.cat([self.rows.streams[side][:, place] for side in SIDES], dim=1)

    def null(self, kind: str, seed: int) -> Coded:
        """Codes of a copy without meaning."""
        return null_code(kind, self.dictionary, self.x, self.coded, seed, self.there, self.target)

    def terms(self, coded: Coded | None = None) -> list[FeatureTerms]:
        """Terms of every prompt's relative logit, by these codes or by the dictionary's own."""
        coded = self.coded if coded is None else coded
        rows = self.rows
        prompts, slots, width = self.x.shape
        step = max(_AT_ONCE // (prompts * coded.ids.shape[-1] * width), 1)
        q = rows.projected(self._read(coded, "query", [0])[:, :, 0])
        keys = [
            self._read(coded, "key", list(range(start, min(start + step, slots))))
            for start in range(1, slots, step)
        ]
        k = torch.cat(keys, dim=2)
        terms = list[FeatureTerms]()
        for i, ids in enumerate(coded.ids):
            weights = rows.weights[i].to(q).double() * rows.scale
            terms.append(FeatureTerms.of(ids, q[i], k[i], weights, *self.rest))
        return terms

    def _read(self, coded: Coded, side: Side, places: list[int]) -> Float[Tensor, "n c p d"]:
        """Queries or keys split among features and the rest, as the dot product sees them."""
        coded = coded.at(places)
        target = self.target[:, places]
        features = coded.parts().transpose(1, 2)
        others = self.stream[:, places] - target
        rest = {
            ERROR: target - features.sum(1) - coded.bias - coded.skip,
            SKIP: coded.skip,
            AFTER: others,
            OTHERS: others,
            BIAS: coded.bias.expand_as(target),
        }
        pieces = [Parts(["feature"], features)]
        pieces += [Parts([name], rest[name][:, None]) for name in self.rest]
        return self.rows.run.read(self.rows.head, side, pieces, places)

    # ------------------------------------------------------------------ cut

    def edges(self, coded: Coded, terms: Sequence[FeatureTerms]) -> Float[Tensor, "n x"]:
        """Attention on the right keys with the features of the first pairs cut, by `PAIR_CUTS`."""
        rows = self.rows
        first = [term.first(CUT_PAIRS[-1]) for term in terms]
        pairs = torch.tensor(first, device=rows.signs.device)  # [n, pairs, side]
        compared = (rows.signs < 0).to(self.x)
        usual = compared / (rows.signs < 0).sum(1, keepdim=True).clamp_min(1)
        away = {
            side: self._away(coded, side, pairs[..., number], usual)
            for number, side in enumerate(SIDES)
        }
        vectors = rows.without(away, _times())
        measured = torch.cat([rows.measure(q, k) for q, k in vectors])
        return measured[..., _ATTENTION].mT

    def _away(
        self, coded: Coded, side: Side, chosen: Int[Tensor, "n pairs"], usual: Float[Tensor, "n k"]
    ) -> Float[Tensor, "n c p d_model"]:
        """What taking parts to their mean takes out of the stream: of the first pairs, and of all.

        Parameters
        ----------
        chosen : the feature of each pair on this side; below 0 where there is none.
        usual : weights of the keys whose mean stands instead.
        """
        rows = self.rows
        slots = rows.slots[side]
        in_an_earlier_pair = (chosen[:, :, None] == chosen[:, None]).tril(-1).any(-1)
        counted = ~(in_an_earlier_pair | (chosen < 0))
        amounts = coded.at(slots).amounts(chosen)
        mean_amounts = torch.einsum(
            "nk,nkc->nc", usual, coded.at(rows.slots["key"]).amounts(chosen)
        )
        apart = (amounts - mean_amounts[:, None]) * counted[:, None]
        features = apart[..., None] * coded.directions(chosen)[:, None]
        sizes = torch.tensor(CUT_PAIRS) - 1
        of_pairs = features.cumsum(2)[:, :, sizes]
        mean = torch.einsum("nk,nkd->nd", usual, self.stream[:, 1:])
        of_all = (self.stream[:, slots] - mean[:, None])[:, :, None]
        changed = rows.signs > 0 if side == "key" else torch.ones_like(rows.signs[:, :1])
        parts = torch.cat([of_pairs, of_all], dim=2)
        return (parts * changed[..., None, None]).transpose(1, 2)


def _times() -> Float[Tensor, "2 x c"]:
    """How often each of `PAIR_CUTS` takes out the first pairs' features, and all, of query and key.

    To restore, all is taken out and the features are put back.
    """
    ablated = torch.eye(len(CUT_PAIRS), len(CUT_PAIRS) + 1)
    restored = -ablated + torch.eye(len(CUT_PAIRS) + 1)[-1]
    ways = torch.cat([ablated, restored])
    none = torch.zeros_like(ways)
    query = torch.cat([none, ways, ways])
    key = torch.cat([ways, none, ways])
    return torch.stack([query, key])


@dataclass(frozen=True)
class Chosen:
    """Pairs (of the query's feature and the key's) and features of each side that are shown."""

    pairs: list[tuple[int, int]]
    query: list[int]
    key: list[int]


def rest_of(dictionary: Dictionary, head: Head) -> tuple[str, ...]:
    """Parts of what a head reads that are no features."""
    if dictionary.splits == "stream":
        return (ERROR, AFTER, BIAS) if dictionary.layer < head.layer else (ERROR, BIAS)
    return (ERROR, OTHERS, BIAS) if dictionary.skip is None else (ERROR, SKIP, OTHERS, BIAS)


def choose_features(how: Pass, units: Sequence[Unit], dictionary: Dictionary) -> dict[Head, Chosen]:
    """By head, the pairs and the features that are largest on average over some prompts."""

    def choose() -> list[list[Any]]:
        terms: dict[Head, list[FeatureTerms]] = {head: [] for head in how.reader.heads}
        for indices in batches_of(units, how.batch_size):
            _, batch = how.rows(units, indices)
            for rows in batch:
                terms[rows.head] += FeatureSplit(rows, dictionary).terms()
        chosen = [largest(of_head) for of_head in terms.values()]
        return [[each.pairs, each.query, each.key] for each in chosen]

    kept = how.job.once("features chosen", choose)
    chosen = dict[Head, Chosen]()
    for head, (pairs, query, key) in zip(how.reader.heads, kept, strict=True):
        chosen[head] = Chosen([(g, f) for g, f in pairs], query, key)
    return chosen


def largest(terms: Sequence[FeatureTerms]) -> Chosen:
    """The pairs, and the features of the query and of the key, that give most on average."""
    pairs = Counter[Any]()
    features: dict[Side, Counter[Any]] = {side: Counter() for side in SIDES}
    for term in terms:
        pairs.update({(g, f): value for g, f, value in term.largest(term.pairs.numel())})
        marginals = term.marginals()
        for side in SIDES:
            values = marginals[side].items()
            features[side].update({part: value for part, value in values if isinstance(part, int)})
    return Chosen(_strongest(pairs), _strongest(features["query"]), _strongest(features["key"]))


def _strongest(sums: Counter[Any]) -> list[Any]:
    """Those that give most, whatever their sign."""
    return sorted(sums, key=lambda name: -abs(sums[name]))[:SHOWN_PAIRS]


class FeatureTest:
    """Chosen pairs and features of one head, and what they give in each prompt, beside copies
    without meaning.

    Parameters
    ----------
    head, dictionary : whose logit, and what splits it.
    chosen : pairs and features to be shown.
    draws : of each null.
    seed : of them.
    """

    def __init__(
        self, head: Head, dictionary: Dictionary, chosen: Chosen, draws: int, seed: int
    ) -> None:
        self.head = head
        self.dictionary = dictionary
        self.draws = draws
        self.seed = seed
        self.pairs = chosen.pairs
        rest = rest_of(dictionary, head)
        self.parts: dict[Side, list[int | str]] = {
            "query": [*chosen.query, *rest],
            "key": [*chosen.key, *rest],
        }

    def measure(self, rows: HeadRows, numbers: list[int]) -> Measurement:
        """Parts of the logit, `NUMBERS` and `PAIR_CUTS` of the dictionary and its copies, and the codes."""
        split = FeatureSplit(rows, self.dictionary)
        terms = split.terms()
        by_copy = [terms]
        edges = [split.edges(split.coded, terms)]
        for copy in self._copies_of(split, numbers):
            by_copy.append(split.terms(copy))
            edges.append(split.edges(copy, by_copy[-1]))
        compared = [torch.stack([term.numbers() for term in copy]) for copy in by_copy]
        values = {
            "values": torch.stack([self.given(term) for term in terms]),
            "numbers": torch.stack(compared, dim=1),
            "edges": torch.stack(edges, dim=1),
            "about": _about(rows, split),
        }
        sums = torch.tensor([float(term.values.sum()) for term in terms])
        missed = sums - rows.logit().cpu()
        return Measurement(values, missed.abs() / torch.tensor(list(map(_largest_part, terms))))

    def _copies_of(self, split: FeatureSplit, numbers: list[int]) -> Iterator[Coded]:
        """Codes of every copy without meaning; numbers of prompts address copies of tokens."""
        for kind in NULLS:
            for draw in range(self.draws):
                # the others are dictionaries, the same for all prompts
                where = numbers[:1] if kind == "tokens" else ()
                yield split.null(kind, derived_seed(self.seed, "dictionary", kind, draw, *where))

    def given(self, terms: FeatureTerms) -> Float[Tensor, " v"]:
        """What pairs give in one prompt; of each side features, the rest, and all other features."""
        row_of = {int(feature): i for i, feature in enumerate(terms.query)}
        column_of = {int(feature): i for i, feature in enumerate(terms.key)}
        given = list[float]()
        for g, f in self.pairs:
            both = g in row_of and f in column_of
            given.append(float(terms.pairs[row_of[g], column_of[f]]) if both else 0.0)
        marginals = terms.marginals()
        for side in SIDES:
            values = marginals[side]
            given += [values.pop(part, 0.0) for part in self.parts[side]]
            given.append(sum(values.values()))
        return torch.tensor(given, dtype=torch.float64)

    def tables(self, tally: Tally) -> Tables:
        """Pairs, parts, copies, edges, and the check."""
        numbers = tally.mean("numbers")
        check = self._check(tally, numbers[0])
        pairs, parts = self._parts(tally, check["logit"])
        return {
            "feature_pairs": sorted(pairs, key=lambda row: -abs(row["value"])),
            "features": parts,
            "copies": self._copies(numbers, tally.interval("numbers", [0])),
            "feature_edges": self._edges(check["attention"], tally),
            "check": [check],
        }

    def _check(self, tally: Tally, numbers: Float[Tensor, " m"]) -> dict[str, Any]:
        """The logit, how far its parts miss it, and what the codes are like."""
        about = dict(zip(_ABOUT, tally.mean("about").tolist(), strict=True))
        logit = float(numbers[0])
        return {
            "head": str(self.head), "sum_error": tally.error, "logit": logit,
            "cancels": float(numbers[_AT["gross"]]) / abs(logit), **{name: about[name] for name in _LOOKS},
            "active_query": about["active_query"], "active_key": about["active_key"],
            "lost": about["lost"] / about["whole"], "n": tally.rows,
        }  # fmt: skip

    def _parts(
        self, tally: Tally, logit: float
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The tables ``feature_pairs`` and ``features``, in the order of `given`."""
        head = str(self.head)
        lows, highs = tally.interval("values")
        columns = [ends.tolist() for ends in (tally.mean("values"), lows, highs)]
        numbers = (
            {"value": value, "share": value / logit, "low": low, "high": high}
            for value, low, high in zip(*columns, strict=True)
        )
        pairs = [
            {"head": head, "query_feature": self._name(g), "key_feature": self._name(f), **next(numbers)}
            for g, f in self.pairs
        ]  # fmt: skip
        parts = [
            {"head": head, "side": side, "part": self._name(part), **next(numbers)}
            for side in SIDES
            for part in (*self.parts[side], OTHER_FEATURES)
        ]
        return pairs, parts

    def _name(self, part: int | str) -> str:
        """What a part is called: a feature by its number, and by its MLP where it splits one."""
        if isinstance(part, str):
            return part
        return (
            f"f{part}"
            if self.dictionary.splits == "stream"
            else f"M{self.dictionary.layer}.f{part}"
        )

    def _edges(self, before: float, tally: Tally) -> list[dict[str, Any]]:
        """What cutting the features of the first pairs leaves; of copies the lowest and highest."""
        means = tally.mean("edges")
        lows, highs = tally.interval("edges", [0])
        rows = []
        for place, (side, edge, size) in enumerate(PAIR_CUTS):
            after, *copies = means[:, place].split([1, *[self.draws] * len(NULLS)])
            judged = _judge(edge, before, after, torch.cat(copies))
            about = {"head": str(self.head), "side": side, "edge": edge, "k": size}
            rows.append({
                **about, "kind": "dictionary", "before": before, "after": float(after.mean()),
                "low": float(lows[0, place]), "high": float(highs[0, place]), "verdict": judged,
            })  # fmt: skip
            for kind, values in zip(NULLS, copies, strict=True):
                rows.append({
                    **about, "kind": kind, "before": before, "after": float(values.mean()),
                    "low": float(values.min()), "high": float(values.max()), "verdict": None,
                })  # fmt: skip
        return rows

    def _copies(
        self, numbers: Float[Tensor, "x m"], interval: tuple[Tensor, Tensor]
    ) -> list[dict[str, Any]]:
        """The table ``copies``: the dictionary and each null.

        The dictionary has its interval over words, a null the lowest and highest of its draws.
        """
        ours, *nulls = numbers.split([1, *[self.draws] * len(NULLS)])
        logit = ours[0, 0]
        low, high = interval
        columns = _shares(ours, (low[0], high[0]), logit)
        rows = [
            {"head": str(self.head), "kind": "dictionary", **columns, "below": None, "draws": 1}
        ]
        held = _AT["held_10"]
        for kind, draws in zip(NULLS, nulls, strict=True):
            columns = _shares(draws, (draws.amin(0), draws.amax(0)), logit)
            below = bool(draws[:, held].max() < ours[0, held])
            about = {"head": str(self.head), "kind": kind}
            rows.append({**about, **columns, "below": below, "draws": len(draws)})
        return rows


def _about(rows: HeadRows, split: FeatureSplit) -> Float[Tensor, "n a"]:
    """`_ABOUT` of every prompt: how many features are active, what is lost, where the head looks."""
    coded = split.coded
    weight = split.there.double()
    active = coded.active.double()
    at_keys = (active * weight)[:, 1:].sum(1) / weight[:, 1:].sum(1).clamp_min(1)
    described = split.target - coded.bias
    missing = described - coded.parts().sum(-2) - coded.skip
    lost = (missing.double().square().sum(-1) * weight).sum(1)
    whole = (described.double().square().sum(-1) * weight).sum(1)
    measured = rows.measure()[0]
    looks = [measured[:, METRICS.index(name)].double() for name in _LOOKS]
    return torch.stack([active[:, 0], at_keys, lost, whole, *looks], dim=1)


def _largest_part(terms: FeatureTerms) -> float:
    """The size of the largest part of either side."""
    return max(abs(value) for side in terms.marginals().values() for value in side.values())


def _judge(edge: str, before: float, after: Tensor, copies: Float[Tensor, " x"]) -> str:
    """The verdict on one cut: of what is left, or with features restored of what is still missing."""
    if edge == "ablated":
        return verdict(before, float(after), copies)
    return verdict(before, before - float(after), before - copies)


def _shares(
    draws: Float[Tensor, "x m"], ends: tuple[Tensor, Tensor], logit: Tensor
) -> dict[str, float]:
    """How much of the logit pairs explain, and how much of all terms the first and first ten hold."""
    columns = dict[str, float]()
    whole: Tensor | int
    for name, column, whole in (
        ("explained", "pairs", logit),
        ("first", "held_1", 1),
        ("ten", "held_10", 1),
    ):
        place = _AT[column]
        # a logit below 0 turns the ends round
        low, high = sorted(float(end[place] / whole) for end in ends)
        columns[name] = float(draws[:, place].mean() / whole)
        columns[f"{name}_low"] = low
        columns[f"{name}_high"] = high
    return columns


# ---------------------------------------------------------------------- in words


def says_pairs(where: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Describe a head's pairs in words; that copies hold as much comes before any number."""
    ours, *copies = tables["copies"]
    (check,) = tables["check"]
    level = [_CALLED[row["kind"]] for row in copies if not row["below"]]
    told = f" These pairs say no more than those of {_or(level)}." if level else ""
    little = ", most of it not" if ours["explained"] < 0.5 else ""
    above = "" if level else ": more than with any copy without meaning"
    return (
        f"{where}{told} {_percent(ours['explained'])} of the logit lies in pairs of features{little}"
        f" ({_says_copies(copies, 'explained')}); the dictionary misses {_percent(check['lost'])} of the stream here,"
        f" and its error takes part in the rest.{_says_first(tables['feature_pairs'])} The ten largest pairs of a"
        f" prompt hold {_percent(ours['ten'])} of all that is added, signs left out{above}"
        f" ({_says_copies(copies, 'ten')}).{_says_edges(tables['feature_edges'])}"
    )


def _or(names: Sequence[str]) -> str:
    """Names as a list whose last two are joined by *or*."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _says_copies(copies: Sequence[Mapping[str, Any]], name: str) -> str:
    """The lowest and highest draw of each kind of copy."""
    ends = [
        f"{_CALLED[row['kind']]} {_percent(row[f'{name}_low'])} to {_percent(row[f'{name}_high'])}"
        for row in copies
    ]
    return ", ".join(ends)


def _says_first(pairs: Sequence[Mapping[str, Any]]) -> str:
    """The first pair and its share, if there is one."""
    if not pairs:
        return ""
    pair = pairs[0]
    return (
        f" The first pair is {pair['query_feature']} of the query with {pair['key_feature']} of the key"
        f" ({_percent(pair['share'])} of the logit)."
    )


def _says_edges(edges: Sequence[Mapping[str, Any]]) -> str:
    """What is left without the first five pairs' features, and what they restore, beside copies."""
    first_five = [row for row in edges if row["side"] == "key" and row["k"] == 5]
    ours = {row["edge"]: row for row in first_five if row["kind"] == "dictionary"}
    copies = [row for row in first_five if row["kind"] != "dictionary"]
    low = min(row["low"] for row in copies if row["edge"] == "ablated")
    high = max(row["high"] for row in copies if row["edge"] == "restored")
    cut = ours["ablated"]
    back = ours["restored"]
    return (
        f" With the features of the first five pairs set to their mean in its key {cut['after']:.0%} of"
        f" {cut['before']:.0%} attention is left (with copies {low:.0%} or more): {cut['verdict']}. Put back alone into"
        f" a key at its mean they restore {back['after']:.0%} (copies {high:.0%} or less): {back['verdict']}."
    )


def _percent(share: float) -> str:
    """Format shares in percent, with enough digits to tell the lowest copy from the highest.

    >>> _percent(0.256), _percent(-0.0314), _percent(0.0012)
    ('25.6%', '-3.14%', '0.12%')
    """
    digits = 1 if abs(share) >= 0.1 else 2
    return f"{100 * share:.{digits}f}%"
