"""A dictionary's features instead of writers: which pairs of them a relative logit lies in, beside
meaningless copies.

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
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Scope
from qkscope.findings.head_rows import HeadRows, Pass, Tables
from qkscope.findings.task_batches import batches_of
from qkscope.findings.verdicts import verdict
from qkscope.heads import Head, Writer
from qkscope.linear.run import Parts
from qkscope.seeds import derived_seed
from qkscope.sums import dictionaries
from qkscope.sums.dictionaries import (
    AFTER,
    BIAS,
    ERROR,
    NULLS,
    OTHERS,
    SKIP,
    Coded,
    Dictionary,
    FeatureTerms,
)
from qkscope.sums.relative_logits import METRICS, SIDES, Measurement, Side, Tally
from qkscope.texts.task import Unit

SHOWN = 20
OTHER_FEATURES = "other features"
#: Pairs whose features are ablated or restored together, and what is done to which side.
PAIRS = (1, 2, 5, 10)
EDGES = tuple(product(("key", "query", "both"), ("ablated", "restored"), PAIRS))
_AT_ONCE = 2**26  # numbers of a stream that are held at once
_AT = {name: place for place, name in enumerate(dictionaries.NUMBERS)}
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
    width = scope.model.get_input_embeddings().weight.shape[-1]
    width = getattr(scope.model.config.get_text_config(), "hidden_size", width)
    if (own := dictionary.decoder.shape[1]) != width:
        wide = f"has width {own}, and the residual stream of {scope.name} has {width}"
        raise BadInput(f"{dictionary.name} {wide}: take a dictionary of this model.")
    inside = dictionary.splits != "stream"
    for head in heads:
        if dictionary.layer + inside > head.layer:
            stands = (
                f"splits what M{dictionary.layer} wrote"
                if inside
                else f"stands before layer {dictionary.layer}"
            )
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
        self.target = self.x = (
            rows.run.entered[dictionary.layer] if dictionary.splits == "stream" else self._written()
        )
        if dictionary.splits == "transcoder":
            self.x = rows.run.given[rows.run.reader.blocks[dictionary.layer].parts[0]]
        self.coded = dictionary.code(self.x)
        self.there = torch.cat([torch.ones_like(rows.weights[:, :1]), rows.weights], dim=1) != 0
        self.rest = rest_of(dictionary, rows.head)

    def _written(self) -> Float[Tensor, "n p d"]:
        """What the MLP of the dictionary's layer left in the stream that the head reads."""
        writer = str(Writer(self.dictionary.layer, "mlp"))
        if writer not in self.rows.writers:
            raise BadInput(
                f"layer {self.dictionary.layer} has no one MLP to split: take another dictionary."
            )
        place = self.rows.writers.index(writer)
        return torch.cat(
            [self.rows.streams[side][:, place] for side in SIDES], dim=1
        )  # the query stands before keys

    def null(self, kind: str, seed: int) -> Coded:
        """Codes of a copy without meaning."""
        return dictionaries.null_code(
            kind, self.dictionary, self.x, self.coded, seed, self.there, self.target
        )

    def terms(self, coded: Coded | None = None) -> list[FeatureTerms]:
        """Terms of every prompt's relative logit, by these codes or by the dictionary's own."""
        coded = self.coded if coded is None else coded
        slots = self.x.shape[1]
        rows = self.rows
        step = max(_AT_ONCE // (len(self.x) * coded.ids.shape[-1] * self.x.shape[-1]), 1)
        q = rows.projected(self._read(coded, "query", [0])[:, :, 0])
        chunks = [list(range(start, min(start + step, slots))) for start in range(1, slots, step)]
        k = torch.cat([self._read(coded, "key", chunk) for chunk in chunks], dim=2)
        return [
            FeatureTerms.of(ids, own, keys, w.to(own).double() * rows.scale, *self.rest)
            for ids, own, keys, w in zip(coded.ids, q, k, rows.weights, strict=True)
        ]

    def _read(self, coded: Coded, side: Side, places: list[int]) -> Float[Tensor, "n c p d"]:
        rows = self.rows
        coded = coded.at(places)
        target = self.target[:, places]
        features = coded.parts().transpose(1, 2)
        others = self.stream[:, places] - target
        rest = {
            ERROR: target - features.sum(1) - coded.bias - coded.skip, SKIP: coded.skip, AFTER: others, OTHERS: others,
            BIAS: coded.bias.expand_as(target),
        }  # fmt: skip
        pieces = [
            Parts(["feature"], features),
            *(Parts([name], rest[name][:, None]) for name in self.rest),
        ]
        return rows.run.read(rows.head, side, pieces, places)

    # ------------------------------------------------------------------ cut

    def edges(self, coded: Coded, terms: Sequence[FeatureTerms]) -> Float[Tensor, "n x"]:
        """Attention on the right keys with the features of the first pairs ablated or restored, by
        `EDGES`.
        """
        rows = self.rows
        sizes = torch.tensor(PAIRS) - 1
        pairs = torch.tensor(
            [own.first(PAIRS[-1]) for own in terms], device=rows.signs.device
        )  # [n, pairs, side]
        others = (rows.signs < 0).to(self.x) / (rows.signs < 0).sum(1, keepdim=True).clamp_min(1)
        mean = torch.einsum("nk,nkd->nd", others, self.stream[:, 1:])
        away = dict[Side, Tensor]()
        for number, side in enumerate(SIDES):
            chosen = pairs[..., number]
            slots = rows.slots[side]
            again = (chosen[:, :, None] == chosen[:, None]).tril(-1).any(-1) | (
                chosen < 0
            )  # in an earlier pair, none
            usual = torch.einsum("nk,nkc->nc", others, coded.at(rows.slots["key"]).amounts(chosen))
            apart = (coded.at(slots).amounts(chosen) - usual[:, None]) * ~again[:, None]
            parts = (apart[..., None] * coded.directions(chosen)[:, None]).cumsum(2)[:, :, sizes]
            parts = torch.cat([parts, (self.stream[:, slots] - mean[:, None])[:, :, None]], dim=2)
            changed = rows.signs > 0 if side == "key" else torch.ones_like(rows.signs[:, :1])
            away[side] = (parts * changed[..., None, None]).transpose(1, 2)
        ablated = torch.eye(len(PAIRS), len(PAIRS) + 1)
        restored = (
            -ablated + torch.eye(len(PAIRS) + 1)[-1]
        )  # all is taken out, and they are put back
        ways = torch.cat([ablated, restored])
        none = torch.zeros_like(ways)
        often = torch.stack([torch.cat([none, ways, ways]), torch.cat([ways, none, ways])])
        return torch.cat([rows.measure(q, k) for q, k in rows.without(away, often)])[
            ..., _ATTENTION
        ].mT


def rest_of(dictionary: Dictionary, head: Head) -> tuple[str, ...]:
    """Parts of what a head reads that are no features."""
    if dictionary.splits != "stream":
        return (ERROR, *([SKIP] if dictionary.skip is not None else []), OTHERS, BIAS)
    return (ERROR, AFTER, BIAS) if dictionary.layer < head.layer else (ERROR, BIAS)


def choose_features(
    how: Pass, units: Sequence[Unit], dictionary: Dictionary
) -> dict[Head, list[Any]]:
    """By head, the pairs and the features of each side that are largest on average over some
    prompts.
    """

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
    """Chosen pairs and features of one head, and what they give in each prompt, beside copies
    without meaning.

    Parameters
    ----------
    head, dictionary : whose logit, and what splits it.
    chosen : pairs to be shown, then features of the query and of the key, by number.
    draws : of each null.
    seed : of them.
    """

    def __init__(
        self, head: Head, dictionary: Dictionary, chosen: Sequence[list[Any]], draws: int, seed: int
    ) -> None:
        self.head = head
        self.dictionary = dictionary
        self.draws = draws
        self.seed = seed
        self.pairs = [(g, f) for g, f in chosen[0]]
        self.rest = rest_of(dictionary, head)
        sides = zip(SIDES, chosen[1:], strict=True)
        self.parts: dict[str, list[Any]] = {side: [*numbers, *self.rest] for side, numbers in sides}

    def measure(self, rows: HeadRows, numbers: list[int]) -> Measurement:
        """Parts of the logit, `NUMBERS` and `EDGES` of the dictionary and of its copies, and what
        codes are like.
        """
        split = FeatureSplit(rows, self.dictionary)
        coded = split.coded
        there = split.there
        terms = split.terms()
        every = [terms]
        edges = [split.edges(coded, terms)]
        for kind in NULLS:
            for draw in range(self.draws):
                where = (
                    numbers[:1] if kind == "tokens" else ()
                )  # the others are dictionaries, the same for all prompts
                copy = split.null(kind, derived_seed(self.seed, "dictionary", kind, draw, *where))
                every.append(split.terms(copy))
                edges.append(split.edges(copy, every[-1]))
        compared = torch.stack(
            [torch.stack([own.numbers() for own in some]) for some in every], dim=1
        )
        active = coded.active.double()
        weight = there.double()
        keys = (active * weight)[:, 1:].sum(1) / weight[:, 1:].sum(1).clamp_min(1)
        described = split.target - coded.bias
        missing = described - coded.parts().sum(-2) - coded.skip
        squares = [
            (part.double().square().sum(-1) * weight).sum(1) for part in (missing, described)
        ]
        looks = [rows.measure()[0, :, METRICS.index(name)].double() for name in _LOOKS]
        parts = [
            max(abs(value) for side in own.marginals().values() for value in side.values())
            for own in terms
        ]
        missed = torch.tensor([float(own.values.sum()) for own in terms]) - rows.logit().cpu()
        values = {
            "values": torch.stack([self.given(own) for own in terms]),
            "numbers": compared,
            "edges": torch.stack(edges, dim=1),
            "about": torch.stack([active[:, 0], keys, *squares, *looks], dim=1),
        }
        return Measurement(values, missed.abs() / torch.tensor(parts))

    def given(self, terms: FeatureTerms) -> Float[Tensor, " v"]:
        """What pairs give in one prompt; of each side features, the rest, and all other features."""
        at = [{int(f): i for i, f in enumerate(ids)} for ids in (terms.query, terms.key)]
        given = [
            float(terms.pairs[at[0][g], at[1][f]]) if g in at[0] and f in at[1] else 0.0
            for g, f in self.pairs
        ]
        for side, own in terms.marginals().items():
            given += [own.pop(part, 0.0) for part in self.parts[side]]
            given.append(sum(own.values()))
        return torch.tensor(given, dtype=torch.float64)

    def tables(self, tally: Tally) -> Tables:
        """Pairs, parts, copies, edges, and the check."""
        numbers = tally.mean("numbers")
        head = str(self.head)
        columns = [column.tolist() for column in (tally.mean("values"), *tally.interval("values"))]
        logit = float(numbers[0, 0])
        rows = [
            {"value": v, "share": v / logit, "low": a, "high": b}
            for v, a, b in zip(*columns, strict=True)
        ]
        name = (
            "f{}" if self.dictionary.splits == "stream" else f"M{self.dictionary.layer}.f{{}}"
        ).format
        pairs = [
            {"head": head, "query_feature": name(g), "key_feature": name(f), **rows.pop(0)}
            for g, f in self.pairs
        ]
        parts = [
            {
                "head": head,
                "side": side,
                "part": name(part) if isinstance(part, int) else part,
                **rows.pop(0),
            }
            for side in SIDES
            for part in (*self.parts[side], OTHER_FEATURES)
        ]
        about = dict(zip(_ABOUT, tally.mean("about").tolist(), strict=True))
        check = {
            "head": head, "sum_error": tally.error, "logit": logit,
            "cancels": float(numbers[0, _AT["gross"]]) / abs(logit), **{name: about[name] for name in _LOOKS},
            "active_query": about["active_query"], "active_key": about["active_key"],
            "lost": about["lost"] / about["whole"], "n": tally.rows,
        }  # fmt: skip
        copies = self._copies(numbers, tally.interval("numbers", [0]))
        pairs.sort(key=lambda row: -abs(row["value"]))
        edges = self._edges(check["attention"], tally)
        return {
            "feature_pairs": pairs,
            "features": parts,
            "copies": copies,
            "feature_edges": edges,
            "check": [check],
        }

    def _edges(self, before: float, tally: Tally) -> list[dict[str, Any]]:
        """What ablating and restoring the features of the first pairs leaves; of copies the lowest
        and highest draw.
        """
        means = tally.mean("edges")
        interval = tally.interval("edges", [0])
        rows = []
        for place, (side, edge, size) in enumerate(EDGES):
            sign, start = (
                (1, 0.0) if edge == "ablated" else (-1, before)
            )  # what is left, or still missing
            after, *others = means[:, place].split([1, *[self.draws] * len(NULLS)])
            said = verdict(before, start + sign * float(after), start + sign * torch.cat(others))
            ends = [
                [end[0, place] for end in interval],
                *((own.min(), own.max()) for own in others),
            ]
            for kind, own, (low, high) in zip(
                ("dictionary", *NULLS), (after, *others), ends, strict=True
            ):
                rows.append({"head": str(self.head), "side": side, "edge": edge, "k": size, "kind": kind,
                             "before": before, "after": float(own.mean()), "low": float(low), "high": float(high),
                             "verdict": said if kind == "dictionary" else None})  # fmt: skip
        return rows

    def _copies(
        self, numbers: Float[Tensor, "x m"], interval: tuple[Tensor, Tensor]
    ) -> list[dict[str, Any]]:
        """The dictionary with its interval over words, each null with the lowest and highest of its
        draws.
        """
        own = numbers[0]
        copies = []
        for place, kind in enumerate(("dictionary", *NULLS)):
            mine = (
                slice(1 + (place - 1) * self.draws, 1 + place * self.draws)
                if place
                else slice(0, 1)
            )
            means = numbers[mine]
            ends = (means.amin(0), means.amax(0)) if place else tuple(end[0] for end in interval)
            row: dict[str, Any] = {"head": str(self.head), "kind": kind}
            for name, column, per in (
                ("explained", "pairs", own[0]),
                ("first", "held_1", 1),
                ("ten", "held_10", 1),
            ):
                at = _AT[column]
                least, most = sorted(
                    float(end[at] / per) for end in ends
                )  # a logit below 0 turns them round
                row |= {
                    name: float(means[:, at].mean() / per),
                    f"{name}_low": least,
                    f"{name}_high": most,
                }
            below = bool(means[:, _AT["held_10"]].max() < own[_AT["held_10"]]) if place else None
            copies.append({**row, "below": below, "draws": len(means)})
        return copies


# ---------------------------------------------------------------------- in words


def says_pairs(where: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Describe a head's pairs in words; that copies hold as much comes before any number."""
    (ours, *copies), (check,) = tables["copies"], tables["check"]
    level = [_CALLED[row["kind"]] for row in copies if not row["below"]]
    owners = " or ".join(filter(None, (", ".join(level[:-1]), *level[-1:])))
    told = f" These pairs say no more than those of {owners}." if level else ""
    beside = {
        name: ", ".join(
            f"{_CALLED[row['kind']]} {_percent(row[low])} to {_percent(row[high])}"
            for row in copies
        )
        for name, low, high in (
            (name, f"{name}_low", f"{name}_high") for name in ("explained", "ten")
        )
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
        f" added, signs left out{above} ({beside['ten']}).{_says_edges(tables['feature_edges'])}"
    )


def _says_edges(edges: Sequence[Mapping[str, Any]]) -> str:
    """What is left without the features of the first five pairs, and what they bring back alone,
    beside the copies.
    """
    own = [row for row in edges if row["side"] == "key" and row["k"] == 5]
    cut, back = (row for row in own if row["kind"] == "dictionary")
    low = min(row["low"] for row in own if row["edge"] == "ablated" and row is not cut)
    high = max(row["high"] for row in own if row["edge"] == "restored" and row is not back)
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
    return f"{100 * share:.{1 if abs(share) >= 0.1 else 2}f}%"
