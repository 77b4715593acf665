"""Edges cut and kept on words that nothing was chosen on, and the writers and pairs there, with intervals by word.

Whole heads taken out of the running model, beside their edges: another question, with the model's answer as well.

A head that is taken out puts out its mean over all tokens but the first, at every token, for all readers; an edge is
its part in one reader alone. MLPs are live, or held at what they put out before, their answers to the head left
standing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.prompts import batches_of
from qkscope.analyses.trace.choose import ORDERS, Chosen
from qkscope.analyses.trace.rows import SIDES, HeadRows, answer_signs, edge_rows, sum_errors
from qkscope.analyses.trace.tally import Tally, writer_rows
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import answer_ids
from qkscope.capture.patch import Edit
from qkscope.change.whole import held, noted, summed_outputs
from qkscope.draws import derived_seed, draw_bits
from qkscope.heads import Head, Writer, parse_writers
from qkscope.linear.reader import Reader
from qkscope.linear.run import Side
from qkscope.maths.writers import METRICS, RANDOM, SIZES, Edge, EdgeKind, EdgeRows, cancelling, draw_alike, edge_masks
from qkscope.maths.writers import SIDES as EDGE_SIDES
from qkscope.runs.shards import stream
from qkscope.tasks.task import ANSWER, Unit

DRAWS = 20
PAIRS = 20
CANCELS = 3.0  # above this (see `cancelling`) the answer says that shares cancel
OVERSHOOT = 1.1  # above this share of the relative logit, what is kept does more than all writers did


def all_edges(writers: int, draws: int = DRAWS) -> list[Edge]:
    """Every condition: each order, each rival replacement of the first one, and random writers."""
    sizes = [k for k in SIZES if k < writers - 1]
    kinds: tuple[EdgeKind, ...] = ("cut", "keep")
    cells = list(product(EDGE_SIDES, kinds, sizes))
    edges = [Edge(side, kind, by, k) for by in ORDERS for side, kind, k in cells]
    edges += [Edge(side, kind, "share", k, replaced="resample") for side, kind, k in cells]
    edges += [Edge(side, kind, "share", k, norms="live") for side, kind, k in cells]
    return edges + [Edge(side, kind, RANDOM, k, draw=draw) for draw in range(draws) for side, kind, k in cells]


@dataclass(frozen=True)
class Asked:
    """What is tallied of one head, and in which order: enough to make its tables."""

    head: Head
    writers: list[str]
    pairs: list[tuple[int, int]]
    cells: list[Edge]

    @classmethod
    def of(cls, head: Head, writers: Sequence[str], pairs: Sequence[Sequence[int]]) -> Asked:
        """With every condition of a head that has so many writers; those drawn at random count once."""
        return cls(head, list(writers), [(int(a), int(b)) for a, b in pairs], all_edges(len(writers), 1))

    def tally(self, words: Iterable[str]) -> Tally:
        """An empty one, for what `EdgeTest.measure` gives."""
        c, m = len(self.writers), len(METRICS)
        shapes = {"total": (), "query": (c,), "key": (c,), "whole": (m,), "pairs": (len(self.pairs),)}
        return Tally(words, {**shapes, "edges": (len(self.cells), m)})


class EdgeTest:
    """The conditions of one head, and what they measure on each batch."""

    def __init__(self, head: Head, writers: Sequence[str], chosen: Chosen, seed: int, draws: int = DRAWS) -> None:
        self.head, self.chosen, self.seed = head, chosen, seed
        self.edges = all_edges(len(writers), draws)
        self.masks = edge_masks(self.edges, chosen.scores, parse_writers(writers[:-1]), derived_seed(seed, str(head)))
        flat = chosen.pairs[:-1, :-1].abs().flatten().argsort(descending=True)[:PAIRS]
        self.asked = Asked.of(head, writers, [divmod(int(i), len(writers) - 1) for i in flat])
        places = {edge: i for i, edge in enumerate(self.asked.cells)}
        self.cell_of = torch.tensor([places[replace(edge, draw=0)] for edge in self.edges])

    def measure(self, rows: HeadRows, numbers: Int[Tensor, " n"]) -> tuple[dict[str, Float[Tensor, "n *v"]], Tensor]:
        """What every prompt of a batch gives, and the error of its sums; ``numbers`` address other prompts."""
        split = rows.split()
        by_query, by_key = split.marginals()
        pairs = split.pairs()
        before = rows.edges(self.instead(rows, None))
        nothing = torch.zeros(1, by_key.shape[1], dtype=torch.bool, device=by_key.device)
        whole = before.replaced(nothing, nothing)[0].cpu()
        measured = whole.new_empty(len(self.edges), *whole.shape)
        ways: Any = {("mean", "held"): before, ("resample", "held"): self._resampled(rows, numbers)}
        for way in (*ways, ("mean", "live")):
            index = torch.tensor([i for i, edge in enumerate(self.edges) if (edge.replaced, edge.norms) == way])
            values = self._held(ways[way], index) if way in ways else self._live(rows, before, index)
            measured[index] = values.cpu()
        cells = whole.new_zeros(len(self.asked.cells), *whole.shape).index_add(0, self.cell_of, measured)
        cells /= torch.bincount(self.cell_of)[:, None, None]
        total = rows.total()
        return {
            "query": by_query, "key": by_key, "total": total, "whole": whole,
            "pairs": torch.stack([pairs[:, a, b] for a, b in self.asked.pairs], dim=1),
            "edges": cells.transpose(0, 1),
        }, sum_errors(total, by_query, by_key)  # fmt: skip

    def instead(self, rows: HeadRows, donors: Int[Tensor, "n p"] | None) -> dict[Side, Tensor]:
        """What parts of the stream are replaced by, by side: their means, or those of these prompts of the bank."""
        device = rows.signs.device
        if donors is None:
            return {side: self.chosen.mean[side].to(device)[None, :, None] for side in SIDES}
        keys = self.chosen.bank["key"].to(device)[donors[:, 1:]].transpose(1, 2)
        return {"query": self.chosen.bank["query"].to(device)[donors[:, 0]][:, :, None], "key": keys}

    def _resampled(self, rows: HeadRows, numbers: Int[Tensor, " n"]) -> EdgeRows:
        places = torch.arange(1 + rows.signs.shape[1])
        drawn = draw_bits(derived_seed(self.seed, "resample"), numbers.cpu()[:, None], places)
        return rows.edges(self.instead(rows, (drawn % len(self.chosen.bank["query"])).to(rows.signs.device)))

    def _held(self, edges: EdgeRows, index: Int[Tensor, " x"]) -> Float[Tensor, "x n m"]:
        query, key = (mask[index].to(edges.signs.device).split(128) for mask in self.masks)
        return torch.cat([edges.replaced(q, k) for q, k in zip(query, key, strict=True)])

    @torch.no_grad()
    def _live(self, rows: HeadRows, before: EdgeRows, index: Int[Tensor, " x"]) -> Float[Tensor, "x n m"]:
        """Parts replaced in the residual stream, and the head's norms run again."""
        found = []
        for some in index.split(8):
            made = {}
            for side, masks in zip(SIDES, self.masks, strict=True):
                x = rows.entered(side)
                mask = masks[some, :-1].to(rows.signs.device)
                away = rows.stream(side) - self.chosen.mean[side].to(x.device)[None, :, None]
                moved = (mask.to(x) @ away.transpose(0, 1).flatten(1)).unflatten(1, (len(x), *x.shape[1:]))
                made[side] = rows.run.live(self.head, side, x[None] - moved)
            found.append(before.measure(made["query"][:, :, 0], made["key"]))
        return torch.cat(found)


def tables_of(asked: Asked, tally: Tally, draws: int = DRAWS) -> dict[str, list[dict[str, Any]]]:
    """Rows of ``writers``, ``pairs``, ``edges`` and ``check`` of one head."""
    total, name, names = float(tally.mean("total")), str(asked.head), asked.writers
    values, (low, high) = tally.mean("pairs"), tally.interval("pairs")
    pairs = [
        {"head": name, "query_writer": names[a], "key_writer": names[b], "value": float(values[i]),
         "low": float(low[i]), "high": float(high[i])}
        for i, (a, b) in enumerate(asked.pairs)
    ]  # fmt: skip
    whole = dict(zip(METRICS, tally.mean("whole").tolist(), strict=True))
    check = {
        "head": name, "sum_error": float(tally.error), "logit": total,
        "cancels": max(cancelling(own, total) for own in tally.sides().values()),
        **{key: whole[key] for key in METRICS[:-1]}, "n": tally.rows,
    }  # fmt: skip
    return {
        "writers": writer_rows(asked.head, names, tally.sides(), total, interval=tally.interval),
        "pairs": pairs,
        "edges": _edge_rows(asked, tally, total, draws),
        "check": [check],
    }


def says_cancels(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence for each side of one head's writers whose shares cancel, with a blank before it; none elsewhere."""
    said = ""
    for side in ("key", "query"):
        sizes = sum(abs(row["share"]) for row in rows if row["side"] == side)
        if sizes > CANCELS:
            said += (
                f" Shares of its {side} cancel: without their signs they sum to {sizes:.1f} times the logit, so that"
                " one share alone says little."
            )
    return said


def _edge_rows(asked: Asked, tally: Tally, total: float, draws: int) -> list[dict[str, Any]]:
    values, (low, high) = tally.mean("edges"), tally.interval("edges")
    accuracy, made = METRICS.index("accuracy"), []
    for i, edge in enumerate(asked.cells):
        found = dict(zip(METRICS, values[i].tolist(), strict=True))
        kept = found["logit"] / total
        made.append({
            "head": str(asked.head), "side": edge.side, "kind": edge.kind, "by": edge.by, "replaced": edge.replaced,
            "norms": edge.norms, "k": edge.k, **{name: found[name] for name in METRICS[:-1]}, "logit_kept": kept,
            "overshoots": kept > OVERSHOOT, "low": float(low[i, accuracy]), "high": float(high[i, accuracy]),
            "n": tally.rows, "draws": draws if edge.by == RANDOM else 1,
        })  # fmt: skip
    return made


PROMPTS, MEANS, MOST = 48, 32, 3  # prompts tested, prompts that means are taken over, heads taken out at once
_BATCH = 16


def strongest_heads(chosen: Chosen, writers: Sequence[str]) -> list[Head]:
    """Head writers by the size of their shares of the query and of the key side together."""
    shares = chosen.scores["share"]
    size = shares["query"].abs() + shares["key"].abs()
    order = size[:-1].argsort(descending=True).tolist()
    return [head for i in order if (head := Writer.parse(writers[i]).head)][:MOST]


def whole_heads(
    reader: Reader,
    head: Head,
    chosen: Chosen,
    choosing: Sequence[Unit],
    units: Sequence[Unit],
    words: Sequence[str],
    *,
    chat: bool = False,
    seed: int = 0,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """Take out the first one, two and three head writers, and as many others of their layers."""
    names = reader.writers(head.layer)
    heads = strongest_heads(chosen, names)
    if not heads:
        return []
    instead = _mean_outputs(reader, choosing[:MEANS], chat)
    only = [writer for writer in parse_writers(names) if writer.head]
    cases: list[Any] = [(size, mlps, kind) for size in range(1, len(heads) + 1) for mlps, kind in _KINDS]

    def run(indices: list[int]) -> tuple[list[str], dict[Any, Tensor]]:
        encoded = reader.scope.encode([units[i][0] for i in indices], chat=chat)
        right = _right_tokens(reader, encoded, chat)
        with noted(part for block in reader.blocks for part in block.parts) as outputs:
            found: dict[Any, Tensor] = {None: _measure(reader, head, encoded, right)}
        own = [words[indices[int(e)]] for e in encoded.example]
        for size, mlps, kind in cases:
            masks: dict[Head, Tensor] = {}
            for row, i in enumerate(indices):
                chosen_heads = heads[:size]
                if kind == "random":  # each prompt has heads of its own
                    mine = [only.index(Writer.parse(h)) for h in chosen_heads]
                    drawn = draw_alike(mine, only, derived_seed(seed, "whole", size, i))
                    chosen_heads = [other for c in drawn if (other := only[c].head)]
                for one in chosen_heads:
                    masks.setdefault(one, torch.zeros(len(indices), dtype=torch.bool))[row] = True
            edits = [Edit.outputs(one, rows, instead[one.layer][one.index]) for one, rows in masks.items()]
            with held(outputs if mlps == "held" else {}):
                found[size, mlps, kind] = _measure(reader, head, encoded, right, edits)
        return own, found

    tally = Tally(words[:PROMPTS], dict.fromkeys([None, *cases], (len(METRICS) + 1,)))
    for part in stream(batches_of(units[:PROMPTS], _BATCH), run, progress):
        tally.add(*part.value)
    return _whole_rows(head, heads, tally)


_KINDS = (("live", "chosen"), ("held", "chosen"), ("live", "random"))


def _whole_rows(head: Head, heads: Sequence[Head], tally: Tally) -> list[dict[str, Any]]:
    before = tally.mean(None).tolist()
    made = []
    for case in tally.sums:
        size, mlps, kind = case or (0, "live", "chosen")
        values, (low, high) = tally.mean(case).tolist(), tally.interval(case)
        accuracy = METRICS.index("accuracy")
        named = ", ".join(map(str, heads[:size])) or "none"
        made.append({
            "head": str(head), "removed": f"{size} others of their layers" if kind == "random" else named,
            "size": size, "mlps": mlps, "kind": kind, **dict(zip(METRICS, values, strict=False)),
            "low": float(low[accuracy]), "high": float(high[accuracy]),
            "answer_before": before[-1], "answer": values[-1], "n": tally.rows,
            "draws": tally.rows if kind == "random" else 1,
        })  # fmt: skip
    return made


@torch.no_grad()
def _mean_outputs(reader: Reader, units: Sequence[Unit], chat: bool) -> dict[int, Float[Tensor, "h e"]]:
    sums: dict[int, Tensor] = {}
    count = 0
    for batch in batches_of(units, _BATCH):
        encoded = reader.scope.encode([units[i][0] for i in batch], chat=chat)
        shown = encoded.inputs["attention_mask"].bool().clone()
        shown[torch.arange(len(shown)), shown.int().argmax(1)] = False
        count += int(shown.sum())
        found = summed_outputs(reader.scope, encoded.inputs, shown)
        sums = {layer: sums.get(layer, 0) + value for layer, value in found.items()}
    return {layer: (value / count).float() for layer, value in sums.items()}


def _right_tokens(reader: Reader, encoded: Encoding, chat: bool) -> list[list[int]]:
    """The tokens that answer each prompt: those that are named, or its right keys' own."""
    named = answer_ids(reader.scope, encoded.examples, chat)
    tokens = encoded.inputs["input_ids"].gather(1, encoded.places.keys)
    right = encoded.labels[ANSWER] > 0
    return [
        tokens[row][right[row]].tolist() if found is None else found[0]
        for row, found in enumerate(named[int(e)] for e in encoded.example)
    ]


def _measure(
    reader: Reader, head: Head, encoded: Encoding, right: Sequence[Sequence[int]], edits: Sequence[Edit] = ()
) -> Float[Tensor, "n m"]:
    """`METRICS` of the head, and the probability of the right answer, in a run with these edits."""
    captured = reader.scope.capture_inputs(encoded, places=encoded.everywhere(), heads=[head], logits=True, edits=edits)
    assert captured.logits is not None
    signs = answer_signs(encoded)
    rows = edge_rows(captured, head, encoded.places.keys.masked_fill(~encoded.places.key_mask, 0), signs)
    found = rows.measure(rows.rows.q[None, :, 0], rows.keys()[None])[0]
    chances = captured.logits.softmax(-1)
    answer = torch.stack([chances[i, list(own)].sum() for i, own in enumerate(right)])
    return torch.cat([found, answer[:, None]], dim=1).cpu()
