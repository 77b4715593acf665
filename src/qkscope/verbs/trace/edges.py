"""Edges of one head: its writers chosen on some words in several ways, cut and kept on others.

An edge is one writer's part in one side of one head. To *cut* edges their parts are replaced (by a
mean, or by those of another prompt) and all else stays; to *keep* edges all the others are
replaced. Orders of writers, for each side:

- ``share``: by the size of their share of the relative logit; ``signed``: by the share itself
- ``variance``: by how much their part in this head's queries or keys varies (between the keys of a
  prompt; of queries, between prompts)
- ``patching``: attribution patching, the gradient of the relative logit through live norms times
  what differs from the mean
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.findings.head_rows import HeadRows, Pass
from qkscope.heads import Head, Side, Writer, parse_writers
from qkscope.results.result import Tables
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

EDGE_ORDERS = ("share", "signed", "variance", "patching")
RANDOM = "random"
EDGE_COUNTS = (1, 2, 3, 5, 10)
DRAWS = 20
#: Above this share of the relative logit, what is kept does more than all writers did.
OVERSHOOT = 1.1
_BANK = 64  # prompts whose parts may be put into others
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
    """Score every head's writers in one pass over the prompts for choosing."""
    generator = torch.Generator().manual_seed(derived_seed(how.seed, "banked"))
    order = torch.randperm(len(units), generator=generator)
    banked = set(order[:_BANK].tolist())
    scores = dict[Head, Callable[[HeadRows, list[int]], Measurement]]()
    for head in how.reader.heads:
        frames = {side: how.reader.frame(head, side) for side in SIDES}
        scores[head] = partial(_scores, how.seed, banked, frames)
    tallies, kept = how.add_up("choosing", units, scores, [""] * len(units))
    choices = {}
    for head, bank in zip(scores, kept, strict=True):
        choices[head] = _choice(tallies[head], bank)
    return choices


def _scores(
    seed: int, banked: set[int], frames: Mapping[Side, Tensor], rows: HeadRows, numbers: list[int]
) -> Measurement:
    """Sums of each writer's scores over the places of the prompts for choosing (float64).

    Where a prompt is to be banked, also what writers left there.
    """
    sums = {"pairs": rows.pairs}
    for side in SIDES:
        for name, value in _side_sums(rows, side, frames[side]).items():
            sums[f"{side} {name}"] = value
    if not banked & set(numbers):
        return Measurement(sums)
    return Measurement(sums, kept=_banked(rows, derived_seed(seed, "bank", numbers[0])))


def _side_sums(rows: HeadRows, side: Side, frame: Tensor) -> dict[str, Float[Tensor, " n *v"]]:
    """Sums over the places of one side, which give means, variances and patching scores."""
    stream = rows.streams[side].double()
    shown = _shown(rows, side).double()
    share = shown / shown.sum(1, keepdim=True).clamp_min(1)
    framed = stream @ frame.to(stream).T  # tokens are turned differently: one frame for all
    mean = torch.einsum("np,ncpd->ncd", share, framed)
    apart = framed - mean[:, :, None]
    # squared lengths, n c p
    square = framed.square().sum(-1)
    square_apart = apart.square().sum(-1)
    gradient = _gradient(rows, side)
    return {
        "count": shown.sum(1),
        "value": rows.marginals[side],
        "framed": torch.einsum("np,ncpd->ncd", shown, framed),
        "square": torch.einsum("np,ncp->nc", shown, square),
        "within": torch.einsum("np,ncp->nc", share, square_apart),
        "stream": torch.einsum("np,ncpd->ncd", shown, stream),
        "along": torch.einsum("npd,ncpd->nc", gradient, stream),
        "gradient": gradient.sum(1),
    }


def _gradient(rows: HeadRows, side: Side) -> Float[Tensor, "n p d_model"]:
    """Gradient of the relative logit on the stream of one side, norms live, the other side held."""
    (hidden,) = rows.run.hidden([rows.head.layer], rows.slots[side])
    x = hidden.clone().requires_grad_()
    with torch.enable_grad():
        vectors = rows.run.live(rows.head, side, x[None])
        if side == "query":
            logit = rows.logit(q=vectors[..., 0, :])
        else:
            logit = rows.logit(k=vectors)
        return torch.autograd.grad(logit.sum(), x)[0].double()


def _banked(rows: HeadRows, address: int) -> dict[Side, Float[Tensor, "n c d_model"]]:
    """What writers left at each prompt's query, and at one of its named keys, drawn."""
    generator = torch.Generator().manual_seed(address)
    named = _shown(rows, "key").float().cpu()
    drawn = torch.multinomial(named, 1, generator=generator)[:, 0]
    slots = drawn.to(rows.signs.device)
    prompts = torch.arange(len(slots), device=slots.device)
    queries = rows.streams["query"][:, :, 0]
    keys = rows.streams["key"][prompts, :, slots]
    return {"query": queries.cpu(), "key": keys.cpu()}


def _choice(tally: Tally, bank: Sequence[Mapping[Side, Tensor] | None]) -> Choice:
    """Turn the sums of one head into mean parts and orders of writers."""
    mean = dict[Side, Tensor]()
    banked = dict[Side, Tensor]()
    scores = dict[tuple[str, Side], Tensor]()
    for side in SIDES:
        count = tally.mean(f"{side} count")
        stream = tally.mean(f"{side} stream") / count
        framed = tally.mean(f"{side} framed") / count
        variance = tally.mean(f"{side} within")
        if side == "query":  # one a prompt: it varies between prompts alone
            mean_square = tally.mean(f"{side} square") / count
            variance = mean_square - framed.square().sum(-1)
        along = tally.mean(f"{side} along")
        patching = along - stream @ tally.mean(f"{side} gradient")
        mean[side] = stream.float()
        value = tally.mean(f"{side} value")
        scores["share", side] = value
        scores["signed", side] = value
        scores["variance", side] = pad(variance, (0, 1))
        scores["patching", side] = pad(patching, (0, 1))
        pieces = [piece[side] for piece in bank if piece]
        banked[side] = torch.cat(pieces)[:_BANK]
    return Choice(mean, banked, scores, tally.mean("pairs").float())


def _shown(rows: HeadRows, side: Side) -> Int[Tensor, "n p"]:
    """Mask of the places of a side that count: of keys, those named, the first token last of all.

    The first token counts only where no other key is named.
    """
    if side == "query":
        return torch.ones_like(rows.signs[:, :1])
    named = rows.signs != 0
    first = rows.rows.present().int().argmax(1)
    keys = rows.run.columns[:, 1:]
    is_later = keys != first[:, None]
    later = named & is_later
    return torch.where(later.any(1, keepdim=True), later, named).long()


# ---------------------------------------------------------------------- cut and kept


class CutEdge(NamedTuple):
    """Which edges are replaced, how they were chosen, and what with.

    Attributes
    ----------
    side, kind : query, key or both; cut or keep.
    by : the order of writers, or `RANDOM`.
    replaced, norms : by the mean or by another prompt's parts; norms held or live.
    k : how many writers of each side.
    """

    side: str
    kind: str
    by: str
    replaced: str
    norms: str
    k: int


def all_edges(writers: int) -> list[CutEdge]:
    """Conditions that a head with so many writers is tested in.

    Each order at the mean and at another prompt's parts, the share with live norms too, and random
    writers.
    """
    ways = list(product(EDGE_ORDERS, ("mean", "resample"), ("held",)))
    ways.append(("share", "mean", "live"))
    ways.append((RANDOM, "mean", "held"))
    sizes = [k for k in EDGE_COUNTS if k < writers - 1]
    sides_and_kinds = list(product(("key", "query", "both"), ("cut", "keep")))
    edges = list[CutEdge]()
    for by, replaced, norms in ways:
        for side, kind in sides_and_kinds:
            edges += [CutEdge(side, kind, by, replaced, norms, k) for k in sizes]
    return edges


def edge_masks(
    edges: Sequence[tuple[CutEdge, int]],
    scores: Mapping[tuple[str, Side], Tensor],
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
    parts = len(writers) + 1
    masks = torch.zeros(2, len(edges), parts, dtype=torch.bool)
    for row, (edge, draw) in enumerate(edges):
        for number, side in enumerate(SIDES):
            if edge.side not in (side, "both"):
                continue
            mask = masks[number, row]
            mask[_chosen(edge, side, scores, writers, seed, draw)] = True
            if edge.kind == "keep":  # all others are replaced, but for the biases
                mask[:-1] = ~mask[:-1]
    return masks


def _chosen(
    edge: CutEdge,
    side: Side,
    scores: Mapping[tuple[str, Side], Tensor],
    writers: Sequence[Writer],
    seed: int,
    draw: int,
) -> list[int]:
    """Numbers of the writers that a condition names on one side."""
    if edge.by != RANDOM:
        return first_by(scores[edge.by, side], edge.k, signed=edge.by == "signed")
    alike = first_by(scores["share", side], edge.k)
    return draw_alike(alike, writers, derived_seed(seed, "edges", side, edge.k, draw))


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
        self.edges = list[tuple[CutEdge, int]]()
        cells = list[int]()
        for number, edge in enumerate(self.cells):
            for draw in range(draws if edge.by == RANDOM else 1):
                self.edges.append((edge, draw))
                cells.append(number)
        self.cell_of = torch.tensor(cells)
        address = derived_seed(seed, str(head))
        parsed = parse_writers(writers[:-1])
        self.masks = edge_masks(self.edges, chosen.scores, parsed, address)

    def measure(self, rows: HeadRows, numbers: list[int]) -> Measurement:
        """Writers, pairs and every condition; ``numbers`` address other prompts."""
        given = rows.given(self.pairs)
        whole = rows.measure()[0].cpu()
        measured = whole.new_empty(len(self.edges), *whole.shape)
        ways = [(edge.replaced, edge.norms) for edge, _ in self.edges]
        for replaced, norms in dict.fromkeys(ways):
            same_way = torch.tensor([way == (replaced, norms) for way in ways])
            instead = self.instead(rows, numbers if replaced == "resample" else None)
            vectors = rows.replaced(instead, self.masks[:, same_way], norms)
            pieces = [rows.measure(q, k).cpu() for q, k in vectors]
            measured[same_way] = torch.cat(pieces)
        cells = whole.new_zeros(len(self.cells), *whole.shape)
        cells.index_add_(0, self.cell_of, measured)
        cells /= torch.bincount(self.cell_of)[:, None, None]
        values = {**given.values, "whole": whole, "edges": cells.transpose(0, 1)}
        return given._replace(values=values)

    def instead(
        self, rows: HeadRows, numbers: list[int] | None = None
    ) -> dict[Side, Float[Tensor, "*n c p d_model"]]:
        """Replacements of the writers' parts of the stream, by side.

        Their means; with the numbers of prompts, the parts of prompts of the bank, drawn.
        """
        device = rows.signs.device
        parts = dict[Side, Tensor]()
        if numbers is None:
            for side in SIDES:
                mean = self.chosen.mean[side].to(device)
                parts[side] = mean[None, :, None]
            return parts
        bank = self.chosen.bank
        address = torch.tensor(numbers)[:, None]
        slots = torch.arange(1 + rows.signs.shape[1])
        bits = draw_bits(derived_seed(self.seed, "resample"), address, slots)
        donors = bits % len(bank["query"])
        for side in SIDES:
            donors_of_side = donors[:, rows.run.at(side)]
            given = bank[side][donors_of_side]
            parts[side] = given.transpose(1, 2).to(device)
        return parts

    def tables(self, tally: Tally) -> Tables:
        """Rows of ``writers``, ``pairs``, ``edges`` and ``check``."""
        whole = tally.mean("whole").tolist()
        # all but the logit, which the row has already
        measured = dict(zip(METRICS[:-1], whole, strict=False))
        return {
            "writers": tally.writer_rows(self.head, self.writers),
            "pairs": tally.pair_rows(self.head, self.writers, self.pairs),
            "edges": self._edge_rows(tally),
            "check": [tally.check_row(self.head, **measured)],
        }

    def _edge_rows(self, tally: Tally) -> list[dict[str, Any]]:
        """The table ``edges``; intervals are of the accuracy."""
        total = float(tally.mean("total"))
        values = tally.mean("edges").tolist()
        lowest, highest = tally.interval("edges")
        low = lowest[:, _ACCURACY].tolist()
        high = highest[:, _ACCURACY].tolist()
        rows = []
        for number, edge in enumerate(self.cells):
            *looks, logit = values[number]
            measured = dict(zip(METRICS, looks, strict=False))
            kept = logit / total
            row = {
                "head": str(self.head),
                **edge._asdict(),
                **measured,
                "logit_kept": kept,
                "overshoots": kept > OVERSHOOT,
                "low": low[number],
                "high": high[number],
                "n": tally.rows,
                "draws": self.draws if edge.by == RANDOM else 1,
            }
            rows.append(row)
        return rows
