"""Causal tests of writers: chosen on some words in several ways, cut and kept in one head on
others, heads taken out.

An edge is one writer's part in one side of one head. To *cut* edges their parts are replaced (by a
mean, or by those of another prompt) and all else stays; to *keep* edges all the others are
replaced. Orders of writers, for each side:

- ``share``: by the size of their share of the relative logit; ``signed``: by the share itself
- ``variance``: by how much their part in this head's queries or keys varies (between the keys of a
  prompt; of queries, between prompts)
- ``patching``: attribution patching, the gradient of the relative logit through live norms times
  what differs from the mean

A head that is taken out of the running model puts out its mean over all tokens but the first, at
every token, for all readers. MLPs are live, or held at what they put out before, their answers to
the head left standing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.findings.head_rows import HeadRows, Pass, Tables
from qkscope.heads import Head, Writer, parse_writers
from qkscope.linear.run import Side
from qkscope.seeds import derived_seed, draw_bits
from qkscope.sums.relative_logits import (
    METRICS,
    SIDES,
    Measurement,
    Tally,
    draw_alike,
    first_by,
    strongest_pairs,
)
from qkscope.texts.task import Unit

ORDERS = ("share", "signed", "variance", "patching")
RANDOM = "random"
SIZES = (1, 2, 3, 5, 10)
DRAWS = 20
OVERSHOOT = (
    1.1  # above this share of the relative logit, what is kept does more than all writers did
)
_BANK = 64  # prompts whose parts may be put into others
# prompts tested, prompts that means are taken over, heads taken out at once
_PROMPTS = 48
_MEANS = 32
_MOST = 3
_BATCH = 16
_KINDS = (("live", "chosen"), ("held", "chosen"), ("live", "random"))
_ACCURACY = METRICS.index("accuracy")


class Choice(NamedTuple):
    """Statistics of one head's writers on the words for choosing.

    Attributes
    ----------
    mean : by side, the mean of what each writer leaves in the residual stream; of keys, right and
        other ones together.
    bank : by side, what it left in single prompts.
    scores : by order and side.
    pairs : mean over prompts.
    """

    mean: dict[Side, Float[Tensor, "c d_model"]]
    bank: dict[Side, Float[Tensor, "m c d_model"]]
    scores: dict[tuple[str, Side], Float[Tensor, " c"]]
    pairs: Float[Tensor, "c c"]


def choose_writers(how: Pass, units: Sequence[Unit]) -> dict[Head, Choice]:
    """One pass over the prompts for choosing."""
    generator = torch.Generator().manual_seed(derived_seed(how.seed, "banked"))
    banked = set(torch.randperm(len(units), generator=generator)[:_BANK].tolist())
    frames = {
        head: {side: how.reader.frame(head, side) for side in SIDES} for head in how.reader.heads
    }
    scores = {head: partial(_scores, how.seed, banked, own) for head, own in frames.items()}
    tallies, kept = how.add_up("choosing", units, scores, [""] * len(units))
    return {head: _choice(tallies[head], own) for head, own in zip(scores, kept, strict=True)}


def _scores(
    seed: int, banked: set[int], frames: Any, rows: HeadRows, numbers: list[int]
) -> Measurement:
    """Sums of each writer's scores over the places of the prompts for choosing (float64), and parts
    for the bank.
    """
    sums = {"pairs": rows.pairs}
    for side in SIDES:
        stream = rows.streams[side].double()
        shown = _shown(rows, side).double()
        framed = (
            stream @ frames[side].to(stream).T
        )  # tokens are turned differently: one frame for all
        counts = shown.sum(1, keepdim=True).clamp_min(1)
        apart = framed - torch.einsum("np,ncpd->ncd", shown / counts, framed)[:, :, None]
        x = rows.run.hidden([rows.head.layer], rows.slots[side])[0].clone().requires_grad_()
        with torch.enable_grad():  # of the relative logit, the other side held, norms live
            other = rows.run.live(rows.head, side, x[None])
            logit = rows.logit(other[..., 0, :]) if side == "query" else rows.logit(k=other)
            gradient = torch.autograd.grad(logit.sum(), x)[0].double()
        own = {
            "count": shown.sum(1),
            "value": rows.marginals[side],
            "framed": torch.einsum("np,ncpd->ncd", shown, framed),
            "square": torch.einsum("np,ncp->nc", shown, framed.square().sum(-1)),
            "within": torch.einsum("np,ncp->nc", shown / counts, apart.square().sum(-1)),
            "stream": torch.einsum("np,ncpd->ncd", shown, stream),
            "along": torch.einsum("npd,ncpd->nc", gradient, stream),
            "gradient": gradient.sum(1),
        }
        sums |= {f"{side} {name}": value for name, value in own.items()}
    if not banked & set(numbers):
        return Measurement(sums)
    # what writers left at each prompt's query, and at one of its named keys, drawn
    generator = torch.Generator().manual_seed(derived_seed(seed, "bank", numbers[0]))
    slots = torch.multinomial(_shown(rows, "key").float().cpu(), 1, generator=generator)[:, 0].to(
        rows.signs.device
    )
    keys = rows.streams["key"][torch.arange(len(slots), device=slots.device), :, slots]
    return Measurement(
        sums, kept={"query": rows.streams["query"][:, :, 0].cpu(), "key": keys.cpu()}
    )


def _choice(tally: Tally, bank: Sequence[Mapping[Side, Tensor] | None]) -> Choice:
    """Turn the sums of one head into mean parts and orders of writers."""
    mean = dict[Side, Tensor]()
    scores = dict[tuple[str, Side], Tensor]()
    for side in SIDES:
        of = {
            name.removeprefix(f"{side} "): tally.mean(name)
            for name in tally.sums
            if name.startswith(side)
        }
        stream = of["stream"] / of["count"]
        count = of["count"]
        mean[side] = stream.float()
        between = of["square"] / count - (of["framed"] / count).square().sum(-1)
        scores["share", side] = scores["signed", side] = of["value"]
        scores["variance", side] = pad(between if side == "query" else of["within"], (0, 1))
        scores["patching", side] = pad(of["along"] - stream @ of["gradient"], (0, 1))
    banked = {side: torch.cat([piece[side] for piece in bank if piece])[:_BANK] for side in SIDES}
    return Choice(mean, banked, scores, tally.mean("pairs").float())


def _shown(rows: HeadRows, side: Side) -> Int[Tensor, "n p"]:
    """1 at every place of a side that counts: of keys, those named; the first token only where no
    other is.
    """
    if side == "query":
        return torch.ones_like(rows.signs[:, :1])
    named = rows.signs != 0
    first = rows.rows.present().int().argmax(1)
    later = named & (rows.run.columns[:, 1:] != first[:, None])
    return torch.where(later.any(1, keepdim=True), later, named).long()


# ---------------------------------------------------------------------- cut and kept


#: Which edges are replaced, how they were chosen, and what with: the first columns of the table ``edges``.
Edge = dict[str, Any]


def all_edges(writers: int) -> list[Edge]:
    """Every condition: each order at the mean and at another prompt's parts, live norms, and random
    writers.
    """
    ways = [
        *product(ORDERS, ("mean", "resample"), ("held",)),
        ("share", "mean", "live"),
        (RANDOM, "mean", "held"),
    ]
    cells = product(
        ways, ("key", "query", "both"), ("cut", "keep"), [k for k in SIZES if k < writers - 1]
    )
    names = ("side", "kind", "by", "replaced", "norms", "k")
    return [dict(zip(names, (side, kind, *way, k), strict=True)) for way, side, kind, k in cells]


def edge_masks(
    edges: Sequence[tuple[Edge, int]],
    scores: Mapping[Any, Tensor],
    writers: Sequence[Writer],
    seed: int = 0,
) -> Bool[Tensor, "2 x c"]:
    """Which parts of the query, and which of the keys, each condition replaces.

    Parameters
    ----------
    edges : the conditions, each with the number of its draw.
    scores : by order and side.
    writers : all but the last, the biases.
    seed : of the random writers.
    """
    masks = torch.zeros(2, len(edges), len(writers) + 1, dtype=torch.bool)
    for (row, (edge, draw)), (at, side) in product(enumerate(edges), enumerate(SIDES)):
        if edge["side"] in (side, "both"):
            by = "share" if edge["by"] == RANDOM else edge["by"]
            k = edge["k"]
            chosen = first_by(scores[by, side], k, signed=by == "signed")
            if edge["by"] == RANDOM:
                chosen = draw_alike(chosen, writers, derived_seed(seed, "edges", side, k, draw))
            masks[at, row, chosen] = True
            if edge["kind"] == "keep":
                masks[at, row, :-1] = ~masks[at, row, :-1]
    return masks


class EdgeTest:
    """The conditions of one head, and what they measure on each batch."""

    def __init__(
        self, head: Head, writers: Sequence[str], chosen: Choice, seed: int, draws: int = DRAWS
    ) -> None:
        self.head = head
        self.chosen = chosen
        self.seed = seed
        self.writers = writers
        self.pairs = strongest_pairs(chosen.pairs)
        self.draws = draws
        self.cells = all_edges(len(writers))
        drawn = [
            (i, draw)
            for i, edge in enumerate(self.cells)
            for draw in range(draws if edge["by"] == RANDOM else 1)
        ]
        self.cell_of = torch.tensor([i for i, _ in drawn])
        self.edges = [(self.cells[i], draw) for i, draw in drawn]
        self.masks = edge_masks(
            self.edges, chosen.scores, parse_writers(writers[:-1]), derived_seed(seed, str(head))
        )

    def measure(self, rows: HeadRows, numbers: list[int]) -> Measurement:
        """Writers, pairs and every condition; ``numbers`` address other prompts."""
        given = rows.given(self.pairs)
        whole = rows.measure()[0].cpu()
        measured = whole.new_empty(len(self.edges), *whole.shape)
        ways = [(edge["replaced"], edge["norms"]) for edge, _ in self.edges]
        for replaced, norms in dict.fromkeys(ways):
            index = torch.tensor([i for i, way in enumerate(ways) if way == (replaced, norms)])
            instead = self.instead(rows, numbers if replaced == "resample" else None)
            every = rows.replaced(instead, self.masks[:, index], norms)
            measured[index] = torch.cat([rows.measure(q, k).cpu() for q, k in every])
        cells = whole.new_zeros(len(self.cells), *whole.shape).index_add(0, self.cell_of, measured)
        cells /= torch.bincount(self.cell_of)[:, None, None]
        return given._replace(
            values={**given.values, "whole": whole, "edges": cells.transpose(0, 1)}
        )

    def instead(
        self, rows: HeadRows, numbers: list[int] | None = None
    ) -> dict[Side, Float[Tensor, "*n c p d_model"]]:
        """What parts of the stream are replaced by, by side: their means, or those of prompts of
        the bank, drawn.
        """
        device = rows.signs.device
        bank = self.chosen.bank
        if numbers is None:
            return {side: self.chosen.mean[side].to(device)[None, :, None] for side in SIDES}
        address = torch.tensor(numbers)[:, None]
        slots = torch.arange(1 + rows.signs.shape[1])
        donors = draw_bits(derived_seed(self.seed, "resample"), address, slots) % len(bank["query"])
        return {
            side: bank[side][donors[:, rows.run.at(side)]].transpose(1, 2).to(device)
            for side in SIDES
        }

    def tables(self, tally: Tally) -> Tables:
        """Rows of ``writers``, ``pairs``, ``edges`` and ``check``."""
        values = tally.mean("edges").tolist()
        total = float(tally.mean("total"))
        edges = []
        lows, highs = (end[:, _ACCURACY].tolist() for end in tally.interval("edges"))
        for edge, (*measured, logit), low, high in zip(
            self.cells, values, lows, highs, strict=True
        ):
            edges.append({
                "head": str(self.head), **edge, **dict(zip(METRICS, measured, strict=False)),
                "logit_kept": logit / total, "overshoots": logit / total > OVERSHOOT, "low": low, "high": high,
                "n": tally.rows, "draws": self.draws if edge["by"] == RANDOM else 1,
            })  # fmt: skip
        whole = dict(zip(METRICS[:-1], tally.mean("whole").tolist(), strict=False))
        return {
            "writers": tally.writer_rows(self.head, self.writers),
            "pairs": tally.pair_rows(self.head, self.writers, self.pairs),
            "edges": edges,
            "check": [tally.check_row(self.head, **whole)],
        }
