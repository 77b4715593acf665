"""A dictionary's features instead of writers: the pairs of a logit, beside meaningless copies.

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

from collections import defaultdict
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
from qkscope.findings.verdicts import SAID_OF_CUTS, verdict
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
#: Which of `NUMBERS` each column of the table ``copies`` shows.
_COLUMNS = {"explained": "pairs", "first": "held_1", "ten": "held_10"}
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
    """Refuse a dictionary of another width than the model, or of what a head does not read."""
    embedded = scope.model.get_input_embeddings().weight.shape[-1]
    width = getattr(scope.model.config.get_text_config(), "hidden_size", embedded)
    described = dictionary.decoder.shape[1]
    if described != width:
        wide = f"has width {described}, and the residual stream of {scope.name} has {width}"
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
        (self.stream,) = rows.run.hidden([rows.head.layer], slice(None))
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
        """Output of the dictionary's MLP, as it stands in the stream that the head reads."""
        writer = str(Writer(self.dictionary.layer, "mlp"))
        if writer not in self.rows.writers:
            raise BadInput(
                f"layer {self.dictionary.layer} has no one MLP to split: take another dictionary."
            )
        place = self.rows.writers.index(writer)
        # the query stands before the keys
        written = [self.rows.streams[side][:, place] for side in SIDES]
        return torch.cat(written, dim=1)

    def null(self, kind: str, seed: int) -> Coded:
        """Codes of a copy without meaning."""
        return null_code(kind, self.dictionary, self.x, self.coded, seed, self.there, self.target)

    def terms(self, coded: Coded | None = None) -> list[FeatureTerms]:
        """Terms of every prompt's relative logit, by these codes or by the dictionary's own."""
        coded = self.coded if coded is None else coded
        rows = self.rows
        prompts, slots, width = self.x.shape
        at_one_slot = prompts * coded.ids.shape[-1] * width
        step = max(_AT_ONCE // at_one_slot, 1)
        queries = self._read(coded, "query", [0])
        q = rows.projected(queries[:, :, 0])
        keys = list[Tensor]()
        for start in range(1, slots, step):
            places = range(start, min(start + step, slots))
            keys.append(self._read(coded, "key", list(places)))
        k = torch.cat(keys, dim=2)
        terms = list[FeatureTerms]()
        for i, ids in enumerate(coded.ids):
            weights = rows.weights[i].to(q).double() * rows.scale
            of_prompt = FeatureTerms.of(ids, q[i], k[i], weights, *self.rest)
            terms.append(of_prompt)
        return terms

    def _read(self, coded: Coded, side: Side, places: list[int]) -> Float[Tensor, "n c p d"]:
        """Queries or keys split among features and the rest, as the dot product sees them."""
        coded = coded.at(places)
        target = self.target[:, places]
        features = coded.parts().transpose(1, 2)
        error = target - features.sum(1) - coded.bias - coded.skip
        others = self.stream[:, places] - target
        rest = {
            ERROR: error,
            SKIP: coded.skip,
            AFTER: others,
            OTHERS: others,
            BIAS: coded.bias.expand_as(target),
        }
        pieces = [Parts(["feature"], features)]
        for name in self.rest:
            vectors = rest[name]
            pieces.append(Parts([name], vectors[:, None]))
        return self.rows.run.read(self.rows.head, side, pieces, places)

    # ------------------------------------------------------------------ cut

    def edges(self, coded: Coded, terms: Sequence[FeatureTerms]) -> Float[Tensor, "n x"]:
        """Attention on the right keys with the features of the first pairs cut, by `PAIR_CUTS`."""
        rows = self.rows
        first = [term.first(CUT_PAIRS[-1]) for term in terms]
        pairs = torch.tensor(first, device=rows.signs.device)  # [n, pairs, side]
        is_compared = rows.signs < 0
        count = is_compared.sum(1, keepdim=True).clamp_min(1)
        usual = is_compared.to(self.x) / count
        away = dict[Side, Tensor]()
        for side, chosen in zip(SIDES, pairs.unbind(-1), strict=True):
            away[side] = self._away(coded, side, chosen, usual)
        vectors = rows.without(away, _times())
        measured = torch.cat([rows.measure(q, k) for q, k in vectors])
        return measured[..., _ATTENTION].mT

    def _away(
        self, coded: Coded, side: Side, chosen: Int[Tensor, "n pairs"], usual: Float[Tensor, "n k"]
    ) -> Float[Tensor, "n c p d_model"]:
        """Difference of the stream's parts from their mean: of the first pairs, and of all.

        Parameters
        ----------
        chosen : the feature of each pair on this side; below 0 where there is none.
        usual : weights of the keys whose mean stands instead.
        """
        rows = self.rows
        slots = rows.slots[side]
        is_same = chosen[:, :, None] == chosen[:, None]
        in_an_earlier_pair = is_same.tril(-1).any(-1)
        counted = ~(in_an_earlier_pair | (chosen < 0))
        # how active each feature is at the places of this side, and at the keys, n p pairs
        amounts = coded.at(slots).amounts(chosen)
        at_keys = coded.at(rows.slots["key"]).amounts(chosen)
        mean_amounts = torch.einsum("nk,nkc->nc", usual, at_keys)
        apart = (amounts - mean_amounts[:, None]) * counted[:, None]
        directions = coded.directions(chosen)
        features = apart[..., None] * directions[:, None]
        sizes = torch.tensor(CUT_PAIRS) - 1
        of_pairs = features.cumsum(2)[:, :, sizes]
        mean = torch.einsum("nk,nkd->nd", usual, self.stream[:, 1:])
        of_all = self.stream[:, slots] - mean[:, None]
        changed = torch.ones_like(rows.signs[:, :1])
        if side == "key":
            changed = rows.signs > 0
        parts = torch.cat([of_pairs, of_all[:, :, None]], dim=2)
        return (parts * changed[..., None, None]).transpose(1, 2)


def _times() -> Float[Tensor, "2 x c"]:
    """How often each of `PAIR_CUTS` takes out the first pairs' features, and all, of query and key.

    To restore, all is taken out and the features are put back.
    """
    # one column for each number of pairs, and the last for all
    columns = len(CUT_PAIRS) + 1
    ablated = torch.eye(len(CUT_PAIRS), columns)
    take_out_all = torch.eye(columns)[-1]
    restored = -ablated + take_out_all
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
    if dictionary.splits != "stream":
        if dictionary.skip is None:
            return (ERROR, OTHERS, BIAS)
        return (ERROR, SKIP, OTHERS, BIAS)
    if dictionary.layer < head.layer:
        return (ERROR, AFTER, BIAS)
    return (ERROR, BIAS)


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
    pairs = defaultdict[tuple[int, int], float](float)
    features = {side: defaultdict[int, float](float) for side in SIDES}
    for term in terms:
        for query_feature, key_feature, value in term.largest(term.pairs.numel()):
            pairs[query_feature, key_feature] += value
        marginals = term.marginals()
        for side in SIDES:
            for part, value in marginals[side].items():
                if isinstance(part, int):
                    features[side][part] += value
    query = _strongest(features["query"])
    key = _strongest(features["key"])
    return Chosen(_strongest(pairs), query, key)


def _strongest(sums: Mapping[Any, float]) -> list[Any]:
    """Names with the largest sums, whatever their sign."""
    return sorted(sums, key=lambda name: -abs(sums[name]))[:SHOWN_PAIRS]


class FeatureTest:
    """What chosen pairs and features of one head give in each prompt, beside meaningless copies.

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
        """Measure parts of the logit, and `NUMBERS` and `PAIR_CUTS` of dictionary and copies."""
        split = FeatureSplit(rows, self.dictionary)
        terms = split.terms()
        compared = [_numbers(terms)]
        edges = [split.edges(split.coded, terms)]
        for copy in self._copies_of(split, numbers):
            of_copy = split.terms(copy)
            compared.append(_numbers(of_copy))
            edges.append(split.edges(copy, of_copy))
        given = [self.given(term) for term in terms]
        values = {
            "values": torch.stack(given),
            "numbers": torch.stack(compared, dim=1),
            "edges": torch.stack(edges, dim=1),
            "about": _about(rows, split),
        }
        sums = torch.tensor([float(term.values.sum()) for term in terms])
        missed = sums - rows.logit().cpu()
        sizes = torch.tensor([_largest_part(term) for term in terms])
        return Measurement(values, missed.abs() / sizes)

    def _copies_of(self, split: FeatureSplit, numbers: list[int]) -> Iterator[Coded]:
        """Codes of every copy without meaning; numbers of prompts address copies of tokens."""
        for kind in NULLS:
            for draw in range(self.draws):
                # the others are dictionaries, the same for all prompts
                where = numbers[:1] if kind == "tokens" else ()
                seed = derived_seed(self.seed, "dictionary", kind, draw, *where)
                yield split.null(kind, seed)

    def given(self, terms: FeatureTerms) -> Float[Tensor, " v"]:
        """Values of pairs in one prompt; by side, of features, the rest, and all others."""
        row_of = {int(feature): i for i, feature in enumerate(terms.query)}
        column_of = {int(feature): i for i, feature in enumerate(terms.key)}
        given = list[float]()
        for query_feature, key_feature in self.pairs:
            value = 0.0
            if query_feature in row_of and key_feature in column_of:
                value = float(terms.pairs[row_of[query_feature], column_of[key_feature]])
            given.append(value)
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
        pairs.sort(key=lambda row: -abs(row["value"]))
        interval = tally.interval("numbers", [0])
        return {
            "feature_pairs": pairs,
            "features": parts,
            "copies": self._copies(numbers, interval),
            "feature_edges": self._edges(check["attention"], tally),
            "check": [check],
        }

    def _check(self, tally: Tally, numbers: Float[Tensor, " m"]) -> dict[str, Any]:
        """Row of the table ``check``: the logit, its parts' error, and facts about the codes."""
        about = dict(zip(_ABOUT, tally.mean("about").tolist(), strict=True))
        logit = float(numbers[0])
        gross = float(numbers[_AT["gross"]])
        looks = {name: about[name] for name in _LOOKS}
        return {
            "head": str(self.head),
            "sum_error": tally.error,
            "logit": logit,
            "cancels": gross / abs(logit),
            **looks,
            "active_query": about["active_query"],
            "active_key": about["active_key"],
            "lost": about["lost"] / about["whole"],
            "n": tally.rows,
        }

    def _parts(
        self, tally: Tally, logit: float
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The tables ``feature_pairs`` and ``features``, in the order of `given`."""
        head = str(self.head)
        lows, highs = tally.interval("values")
        columns = [ends.tolist() for ends in (tally.mean("values"), lows, highs)]
        measured = list[dict[str, Any]]()
        for value, low, high in zip(*columns, strict=True):
            share = value / logit
            measured.append({"value": value, "share": share, "low": low, "high": high})
        numbers = iter(measured)
        pairs = list[dict[str, Any]]()
        for g, f in self.pairs:
            features = {"query_feature": self._name(g), "key_feature": self._name(f)}
            pairs.append({"head": head, **features, **next(numbers)})
        parts = list[dict[str, Any]]()
        for side in SIDES:
            for part in (*self.parts[side], OTHER_FEATURES):
                about = {"head": head, "side": side, "part": self._name(part)}
                parts.append({**about, **next(numbers)})
        return pairs, parts

    def _name(self, part: int | str) -> str:
        """What a part is called: a feature by its number, and by its MLP where it splits one."""
        if isinstance(part, str):
            return part
        if self.dictionary.splits == "stream":
            return f"f{part}"
        return f"M{self.dictionary.layer}.f{part}"

    def _edges(self, before: float, tally: Tally) -> list[dict[str, Any]]:
        """Rows of the first pairs' features cut or restored; of copies the lowest and highest."""
        means = tally.mean("edges")
        lows, highs = tally.interval("edges", [0])
        rows = []
        for place, (side, edge, size) in enumerate(PAIR_CUTS):
            after, *copies = self._by_copy(means[:, place])
            about = {"head": str(self.head), "side": side, "edge": edge, "k": size}
            ours = {
                "kind": "dictionary",
                "before": before,
                "after": float(after.mean()),
                "low": float(lows[0, place]),
                "high": float(highs[0, place]),
                "verdict": _judge(edge, before, after, torch.cat(copies)),
            }
            rows.append({**about, **ours})
            for kind, values in zip(NULLS, copies, strict=True):
                of_copy = {
                    "kind": kind,
                    "before": before,
                    "after": float(values.mean()),
                    "low": float(values.min()),
                    "high": float(values.max()),
                    "verdict": None,
                }
                rows.append({**about, **of_copy})
        return rows

    def _by_copy(self, values: Float[Tensor, " x *m"]) -> Sequence[Tensor]:
        """Values of the dictionary, and of the draws of each kind of copy."""
        draws = [self.draws] * len(NULLS)
        return values.split([1, *draws])

    def _copies(
        self, numbers: Float[Tensor, "x m"], interval: tuple[Tensor, Tensor]
    ) -> list[dict[str, Any]]:
        """The table ``copies``: the dictionary and each null.

        The dictionary has its interval over words, a null the lowest and highest of its draws.
        """
        ours, *nulls = self._by_copy(numbers)
        logit = ours[0, 0]
        low, high = interval
        columns = _shares(ours, (low[0], high[0]), logit)
        about = {"head": str(self.head), "kind": "dictionary"}
        rows = [{**about, **columns, "below": None, "draws": 1}]
        held = _AT["held_10"]
        our_share = ours[0, held]
        for kind, draws in zip(NULLS, nulls, strict=True):
            columns = _shares(draws, (draws.amin(0), draws.amax(0)), logit)
            below = bool(draws[:, held].max() < our_share)
            about = {"head": str(self.head), "kind": kind}
            rows.append({**about, **columns, "below": below, "draws": len(draws)})
        return rows


def _numbers(terms: Sequence[FeatureTerms]) -> Float[Tensor, "n m"]:
    """`NUMBERS` of every prompt."""
    return torch.stack([term.numbers() for term in terms])


def _about(rows: HeadRows, split: FeatureSplit) -> Float[Tensor, "n a"]:
    """`_ABOUT` of every prompt: how many features are active, what is lost, what is attended to."""
    coded = split.coded
    weight = split.there.double()
    active = coded.active.double()
    active_keys = (active * weight)[:, 1:].sum(1)
    keys = weight[:, 1:].sum(1).clamp_min(1)
    at_keys = active_keys / keys
    described = split.target - coded.bias
    missing = described - coded.parts().sum(-2) - coded.skip
    # squared lengths, n p, summed over the places that count
    missing_square = missing.double().square().sum(-1)
    described_square = described.double().square().sum(-1)
    lost = (missing_square * weight).sum(1)
    whole = (described_square * weight).sum(1)
    measured = rows.measure()[0]
    looks = [measured[:, METRICS.index(name)].double() for name in _LOOKS]
    return torch.stack([active[:, 0], at_keys, lost, whole, *looks], dim=1)


def _largest_part(terms: FeatureTerms) -> float:
    """The size of the largest part of either side."""
    sides = terms.marginals().values()
    return max(abs(value) for side in sides for value in side.values())


_RESTORED = {"depends on": "shown", "does not": "not shown", "untested": "untested"}
"""What a verdict on a cut is called where features are put back."""


def _judge(edge: str, before: float, after: Tensor, copies: Float[Tensor, " x"]) -> str:
    """The verdict on a cut: of what is left, or with features restored of what is still missing."""
    if edge == "ablated":
        return verdict(before, float(after), copies)
    judged = verdict(before, before - float(after), before - copies)
    return _RESTORED[judged]


def _shares(
    draws: Float[Tensor, "x m"], ends: tuple[Tensor, Tensor], logit: Tensor
) -> dict[str, float]:
    """How much of the logit pairs explain, and what the first and the first ten hold of all."""
    columns = dict[str, float]()
    wholes: dict[str, Tensor | int] = {"explained": logit, "first": 1, "ten": 1}
    for name, whole in wholes.items():
        place = _AT[_COLUMNS[name]]
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
    explained = f"{_percent(ours['explained'])} of the logit lies in pairs of features{little}"
    lost = f"the dictionary misses {_percent(check['lost'])} of the stream here"
    held = f"{_percent(ours['ten'])} of all that is added, signs left out{above}"
    sentences = [
        f" {explained} ({_says_copies(copies, 'explained')});",
        f" {lost}, and its error takes part in the rest.",
        _says_first(tables["feature_pairs"]),
        f" The ten largest pairs of a prompt hold {held} ({_says_copies(copies, 'ten')}).",
        _says_edges(tables["feature_edges"]),
    ]
    return where + told + "".join(sentences)


def _or(names: Sequence[str]) -> str:
    """Names as a list whose last two are joined by *or*."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _says_copies(copies: Sequence[Mapping[str, Any]], name: str) -> str:
    """Say the lowest and highest draw of each kind of copy."""
    ends = []
    for row in copies:
        low = _percent(row[f"{name}_low"])
        high = _percent(row[f"{name}_high"])
        ends.append(f"{_CALLED[row['kind']]} {low} to {high}")
    return ", ".join(ends)


def _says_first(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Say the first pair and its share, if there is one."""
    if not pairs:
        return ""
    pair = pairs[0]
    features = f"{pair['query_feature']} of the query with {pair['key_feature']} of the key"
    return f" The first pair is {features} ({_percent(pair['share'])} of the logit)."


def _says_edges(edges: Sequence[Mapping[str, Any]]) -> str:
    """Say what the first five pairs' features leave when cut, and restore, beside copies."""
    of_key = [row for row in edges if row["side"] == "key"]
    first_five = [row for row in of_key if row["k"] == 5]
    ours = {row["edge"]: row for row in first_five if row["kind"] == "dictionary"}
    copies = [row for row in first_five if row["kind"] != "dictionary"]
    ablated = [row["low"] for row in copies if row["edge"] == "ablated"]
    restored = [row["high"] for row in copies if row["edge"] == "restored"]
    low = min(ablated)
    high = max(restored)
    cut = ours["ablated"]
    back = ours["restored"]
    left = f"{cut['after']:.0%} of {cut['before']:.0%} attention is left"
    return (
        f" With the features of the first five pairs set to their mean in its key {left}"
        f" (with copies {low:.0%} or more): {SAID_OF_CUTS[cut['verdict']]}."
        f" Put back alone into a key at its mean they restore {back['after']:.0%}"
        f" (copies {high:.0%} or less): {back['verdict']}."
    )


def _percent(share: float) -> str:
    """Format shares in percent, with enough digits to tell the lowest copy from the highest.

    >>> _percent(0.256), _percent(-0.0314), _percent(0.0012)
    ('25.6%', '-3.14%', '0.12%')
    """
    digits = 1 if abs(share) >= 0.1 else 2
    return f"{100 * share:.{digits}f}%"
