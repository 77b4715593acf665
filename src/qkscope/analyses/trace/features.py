"""A dictionary's features instead of writers: which pairs of them a relative logit lies in, beside meaningless copies.

Features, the dictionary's error, what layers after it added and the biases are parts of the stream like any other, and
go through the head's norms, weights and rotation as writers do. Pairs are chosen on a task's words for choosing and
measured on those for testing; of one prompt the largest are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import batches_of
from qkscope.analyses.trace.prompt import PromptTrace
from qkscope.analyses.trace.rows import HeadRows, Pass, Tables
from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.linear.run import Parts
from qkscope.maths import dictionaries
from qkscope.maths.dictionaries import AFTER, BIAS, ERROR, NULLS, Coded, Dictionary, FeatureTerms, null_code
from qkscope.maths.writers import METRICS, SIDES, Measurement, Side, Tally
from qkscope.tasks.task import Unit

SHOWN = 20
OTHERS = "other features"
_AT_ONCE = 2**26  # numbers of a stream that are held at once
_AT = {name: place for place, name in enumerate(dictionaries.NUMBERS)}
_LOOKS = ("attention", "first", "accuracy")
_ABOUT = ("active_query", "active_key", "lost", "whole", *_LOOKS)
_CALLED = {
    "rotated": "a rotated dictionary",
    "random": "a random dictionary",
    "features": "codes of other features",
    "tokens": "codes of other tokens",
}


def check_dictionary(scope: Scope, heads: Sequence[Head], dictionary: Dictionary) -> None:
    """Refuse a dictionary of another width than the model, or one that stands behind what a head reads."""
    width = scope.model.get_input_embeddings().weight.shape[-1]
    width = getattr(scope.model.config.get_text_config(), "hidden_size", width)
    if (own := dictionary.decoder.shape[1]) != width:
        wide = f"has width {own}, and the residual stream of {scope.name} has {width}"
        raise BadInput(f"{dictionary.name} {wide}: take a dictionary of this model.")
    for head in heads:
        if dictionary.layer > head.layer:
            late = f"stands before layer {dictionary.layer}, and {head} reads what enters layer {head.layer}"
            raise BadInput(f"{dictionary.name} {late}: take a dictionary of that layer or an earlier one.")


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
        pieces = [Parts(["feature"], features), *(Parts([name], rest[name][:, None]) for name in self.rest)]
        return rows.run.read(rows.head, side, pieces, places)


def rest_of(dictionary: Dictionary, head: Head) -> tuple[str, ...]:
    """Parts of what a head reads that are no features."""
    return (ERROR, AFTER, BIAS) if dictionary.layer < head.layer else (ERROR, BIAS)


def choose_features(how: Pass, units: Sequence[Unit], dictionary: Dictionary) -> dict[Head, list[Any]]:
    """By head, the pairs and the features of each side that are largest on average over some prompts."""

    def choose() -> list[Any]:
        terms: dict[Head, list[FeatureTerms]] = {head: [] for head in how.reader.heads}
        for indices in batches_of(units, how.batch_size):
            for rows in how.rows(units, indices)[1]:
                terms[rows.head] += FeatureSplit(rows, dictionary).terms()
        return [largest(own) for own in terms.values()]

    return dict(zip(how.reader.heads, how.job.once("features chosen", choose), strict=True))


def largest(terms: Sequence[FeatureTerms]) -> list[Any]:
    """The pairs, and the features of the query and of the key, that give most on average."""
    sums = [Counter[Any](), *(Counter[Any]() for _ in SIDES)]
    for own in terms:
        sums[0].update({(g, f): value for g, f, value in own.largest(own.pairs.numel())})
        for counter, values in zip(sums[1:], own.marginals().values(), strict=True):
            counter.update({part: value for part, value in values.items() if isinstance(part, int)})
    return [sorted(counter, key=lambda name: -abs(counter[name]))[:SHOWN] for counter in sums]


class FeatureTest:
    """Chosen pairs and features of one head, and what they give in each prompt, beside copies without meaning.

    Parameters
    ----------
    head, dictionary : whose logit, and what splits it.
    chosen : pairs to be shown, then features of the query and of the key, by number.
    draws : of each null.
    seed : of them.
    """

    def __init__(self, head: Head, dictionary: Dictionary, chosen: Sequence[list[Any]], draws: int, seed: int) -> None:
        self.head, self.dictionary, self.draws, self.seed = head, dictionary, draws, seed
        self.pairs, self.rest = [(g, f) for g, f in chosen[0]], rest_of(dictionary, head)
        sides = zip(SIDES, chosen[1:], strict=True)
        self.parts: dict[str, list[Any]] = {side: [*numbers, *self.rest] for side, numbers in sides}

    def measure(self, rows: HeadRows, numbers: list[int]) -> Measurement:
        """Parts of the logit, `NUMBERS` of the dictionary and of its copies, and what the codes are like.

        What is kept is how many pairs it takes for most of the logit, of each prompt and dictionary.
        """
        split = FeatureSplit(rows, self.dictionary)
        x, coded, there, terms = split.x, split.coded, split.there, split.terms()
        every = [terms]
        for kind in NULLS:
            for draw in range(self.draws):
                where = numbers[:1] if kind == "tokens" else ()  # the others are dictionaries, the same for all prompts
                seed = derived_seed(self.seed, "dictionary", kind, draw, *where)
                every.append(split.terms(null_code(kind, self.dictionary, x, coded, seed, there)))
        compared = torch.stack([torch.stack([own.numbers() for own in some]) for some in every], dim=1)
        active, weight, stream = coded.active.double(), there.double(), x - coded.bias
        keys = (active * weight)[:, 1:].sum(1) / weight[:, 1:].sum(1).clamp_min(1)
        missing = stream - coded.parts().sum(-2)
        squares = [(part.double().square().sum(-1) * weight).sum(1) for part in (missing, stream)]
        looks = [rows.measure()[0, :, METRICS.index(name)].double() for name in _LOOKS]
        parts = [max(abs(value) for side in own.marginals().values() for value in side.values()) for own in terms]
        missed = torch.tensor([float(own.values.sum()) for own in terms]) - rows.logit().cpu()
        values = {
            "values": torch.stack([self.given(own) for own in terms]),
            "numbers": compared,
            "about": torch.stack([active[:, 0], keys, *squares, *looks], dim=1),
        }
        return Measurement(values, missed.abs() / torch.tensor(parts), kept=compared[..., _AT["needed"]])

    def given(self, terms: FeatureTerms) -> Float[Tensor, " v"]:
        """What pairs give in one prompt; of each side features, the rest, and all other features."""
        at = [{int(f): i for i, f in enumerate(ids)} for ids in (terms.query, terms.key)]
        given = [float(terms.pairs[at[0][g], at[1][f]]) if g in at[0] and f in at[1] else 0.0 for g, f in self.pairs]
        for side, own in terms.marginals().items():
            given += [own.pop(part, 0.0) for part in self.parts[side]]
            given.append(sum(own.values()))
        return torch.tensor(given, dtype=torch.float64)

    def tables(self, tally: Tally, needed: Float[Tensor, "n x"]) -> Tables:
        """Pairs, parts, copies, what few pairs hold, and the check; of the pairs needed the median is told."""
        numbers, head = tally.mean("numbers"), str(self.head)
        columns = [column.tolist() for column in (tally.mean("values"), *tally.interval("values"))]
        logit = float(numbers[0, 0])
        rows = [{"value": v, "share": v / logit, "low": a, "high": b} for v, a, b in zip(*columns, strict=True)]
        pairs = [{"head": head, "query_feature": f"f{g}", "key_feature": f"f{f}", **rows.pop(0)} for g, f in self.pairs]
        parts = [
            {"head": head, "side": side, "part": f"f{part}" if isinstance(part, int) else part, **rows.pop(0)}
            for side in SIDES
            for part in (*self.parts[side], OTHERS)
        ]
        about = dict(zip(_ABOUT, tally.mean("about").tolist(), strict=True))
        check = {
            "head": head, "sum_error": tally.error, "logit": logit,
            "cancels": float(numbers[0, _AT["gross"]]) / abs(logit), **{name: about[name] for name in _LOOKS},
            "active_query": about["active_query"], "active_key": about["active_key"],
            "lost": about["lost"] / about["whole"], "n": tally.rows,
        }  # fmt: skip
        copies, held = self._copies(numbers, tally.interval("numbers", [0]), needed)
        pairs.sort(key=lambda row: -abs(row["value"]))
        return {"feature_pairs": pairs, "features": parts, "copies": copies, "held": held, "check": [check]}

    def _copies(
        self, numbers: Float[Tensor, "x m"], interval: tuple[Tensor, Tensor], needed: Float[Tensor, "n x"]
    ) -> list[list[dict[str, Any]]]:
        """The dictionary with its interval over words, each null with the lowest and highest of its draws."""
        own, copies, held = numbers[0], [], []
        for place, kind in enumerate(("dictionary", *NULLS)):
            mine = slice(1 + (place - 1) * self.draws, 1 + place * self.draws) if place else slice(0, 1)
            means = numbers[mine]
            ends = (means.amin(0), means.amax(0)) if place else tuple(end[0] for end in interval)
            row: dict[str, Any] = {"head": str(self.head), "kind": kind}
            for name, column, per in (("explained", "pairs", own[0]), ("first", "held_1", 1), ("ten", "held_10", 1)):
                at = _AT[column]
                least, most = sorted(float(end[at] / per) for end in ends)  # a logit below 0 turns them round
                row |= {name: float(means[:, at].mean() / per), f"{name}_low": least, f"{name}_high": most}
            middle = float(needed[:, mine].median(0).values.median())
            below = bool(means[:, _AT["held_10"]].max() < own[_AT["held_10"]]) if place else None
            copies.append({**row, "needed": middle, "below": below, "draws": len(means)})
            for size in dictionaries.SIZES:
                at = _AT[f"held_{size}"]
                held.append({"head": str(self.head), "kind": kind, "k": size, "held": float(means[:, at].mean()),
                             "low": float(ends[0][at]), "high": float(ends[1][at])})  # fmt: skip
        return [copies, held]


def prompt_features(one: PromptTrace, dictionary: Dictionary, draws: int, seed: int) -> tuple[str, Tables]:
    """The answer and tables of one head on one prompt: its largest pairs are shown."""
    used = one.weights[0].nonzero()[:, 0]
    rows = HeadRows(one.run.slots([0, *(1 + used).tolist()]), one.head, one.signs[:, used], one.projector)
    test = FeatureTest(one.head, dictionary, largest(FeatureSplit(rows, dictionary).terms()), draws, seed)
    given = test.measure(rows, [0])
    tables = test.tables(Tally.of_prompt(given), given.kept)
    tables["check"][0] |= {"query": one.asked.query, "key": one.key}
    return says_pairs(one.where(), tables), {**tables, "tokens": one.token_rows()}


# ---------------------------------------------------------------------- in words


def says_pairs(where: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What is said of a head; that copies hold as much comes before any number."""
    (ours, *copies), (check,) = tables["copies"], tables["check"]
    level = [_CALLED[row["kind"]] for row in copies if not row["below"]]
    owners = " or ".join(filter(None, (", ".join(level[:-1]), *level[-1:])))
    told = f" These pairs say no more than those of {owners}." if level else ""
    beside = {
        name: ", ".join(f"{_CALLED[row['kind']]} {_percent(row[low])} to {_percent(row[high])}" for row in copies)
        for name, low, high in ((name, f"{name}_low", f"{name}_high") for name in ("explained", "ten"))
    }
    little = ", most of it not" if ours["explained"] < 0.5 else ""
    above = "" if level else ": more than with any copy without meaning"
    first = "".join(
        f" The first pair is {pair['query_feature']} of the query with {pair['key_feature']} of the key"
        f" ({_percent(pair['share'])} of the logit)."
        for pair in tables["feature_pairs"][:1]
    )
    return (
        f"{where}{told} {_percent(ours['explained'])} of the logit lies in pairs of features{little}"
        f" ({beside['explained']}); the dictionary misses {_percent(check['lost'])} of the stream here, and its error"
        f" takes part in the rest.{first} The ten largest pairs of a prompt hold {_percent(ours['ten'])} of all that is"
        f" added, signs left out{above} ({beside['ten']})."
    )


def _percent(share: float) -> str:
    """In percents, with places enough to tell the lowest copy from the highest.

    >>> _percent(0.256), _percent(-0.0314), _percent(0.0012)
    ('25.6%', '-3.14%', '0.12%')
    """
    return f"{100 * share:.{1 if abs(share) >= 0.1 else 2}f}%"
