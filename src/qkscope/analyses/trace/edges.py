"""Writers chosen on some words, in several ways, and their edges cut and kept on others.

Orders of writers, for each side:

- ``share``: by the size of their share of the relative logit; ``signed``: by the share itself
- ``norm``: by the mean length of their part in this head's queries or keys; ``variance``: by how much that part varies
  (between the keys of a prompt; of queries, between prompts)
- ``patching``: attribution patching, the gradient of the relative logit through live norms times what differs from the
  mean; ``path``: the fall of the relative logit where the part alone is another prompt's, norms live
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from qkscope.analyses.trace.rows import SIDES, HeadRows, Pass, Tally, metrics_of, strongest_pairs
from qkscope.draws import derived_seed, draw_bits
from qkscope.heads import Head, parse_writers
from qkscope.linear.run import Side
from qkscope.maths.writers import METRICS, RANDOM, SIZES, Edge, EdgeKind, edge_masks
from qkscope.maths.writers import SIDES as EDGE_SIDES
from qkscope.tasks.task import Unit

ORDERS = ("share", "signed", "norm", "variance", "patching", "path")
DRAWS = 20
OVERSHOOT = 1.1  # above this share of the relative logit, what is kept does more than all writers did
_BANK = 64  # prompts whose parts may be put into others


@dataclass(frozen=True)
class Choice:
    """What the words for choosing say about one head.

    Attributes
    ----------
    mean : by side, the mean of what each writer leaves in the residual stream; of keys, right and other ones together.
    bank : by side, what it left in single prompts.
    scores : of each order, by side.
    pairs : mean over prompts.
    """

    mean: dict[Side, Float[Tensor, "c d_model"]]
    bank: dict[Side, Float[Tensor, "m c d_model"]]
    scores: dict[str, dict[str, Float[Tensor, " c"]]]
    pairs: Float[Tensor, "c c"]


def choose_writers(how: Pass, units: Sequence[Unit]) -> dict[Head, Choice]:
    """One pass over the prompts for choosing."""
    reader, seed = how.reader, how.seed
    frames = {head: {side: reader.frame(head, side).double() for side in SIDES} for head in reader.heads}
    tallies = {head: Tally([""], _shapes(len(reader.writers(head.layer)), own["key"])) for head, own in frames.items()}
    generator = torch.Generator().manual_seed(derived_seed(seed, "banked"))
    banked = set(torch.randperm(len(units), generator=generator)[:_BANK].tolist())

    def measure(indices: list[int]) -> Any:
        _, every = how.rows(units, indices)
        path = derived_seed(seed, "path", indices[0])
        sums = [(rows.head, [""], _sums(rows, frames[rows.head], path)) for rows in every]
        return sums, [_bank(rows, seed, indices[0]) for rows in every] if banked & set(indices) else []

    pieces = how.add_up("choosing", units, measure, tallies)
    return {h: _choice(tallies[h], [piece[i] for piece in pieces if piece]) for i, h in enumerate(reader.heads)}


def _shapes(c: int, frame: Float[Tensor, "d_head d_model"]) -> dict[str, tuple[int, ...]]:
    """Of what `_sums` gives, for a head with so many writers."""
    d_head, d_model = frame.shape
    shapes = {
        "count": (), "rows": (), "value": (c,), "length": (c,), "framed": (c - 1, d_head), "square": (c - 1,),
        "within": (c - 1,), "stream": (c - 1, d_model), "along": (c - 1,), "gradient": (d_model,), "path": (c,),
    }  # fmt: skip
    return {f"{side} {name}": shape for side in SIDES for name, shape in shapes.items()} | {"pairs": (c, c)}


def _sums(rows: HeadRows, frames: Mapping[Side, Float[Tensor, "d_head d_model"]], seed: int) -> dict[str, Tensor]:
    """What a batch gives, summed over its prompts, in float64."""
    path, sums = path_effects(rows, seed), {"pairs": rows.pairs.sum(0)}
    for side in SIDES:
        stream, shown = rows.stream(side).double(), _shown(rows, side).double()
        framed = stream @ frames[side].to(stream.device).T  # tokens are turned differently: one frame for all
        counts = shown.sum(1, keepdim=True).clamp_min(1)
        mean = torch.einsum("np,ncpd->ncd", shown / counts, framed)
        apart = (framed - mean[:, :, None]).square().sum(-1)
        gradient = live_gradient(rows, side).double()
        own = {
            "path": path[side],
            "count": shown.sum(),
            "rows": shown.new_tensor(len(shown)),
            "value": rows.marginals[side].double().sum(0),
            "length": torch.einsum("np,ncp->c", shown, rows.read(side).double().norm(dim=-1)),
            "framed": torch.einsum("np,ncpd->cd", shown, framed),
            "square": torch.einsum("np,ncp->c", shown, framed.square().sum(-1)),
            "within": torch.einsum("np,ncp->c", shown / counts, apart),
            "stream": torch.einsum("np,ncpd->cd", shown, stream),
            "along": torch.einsum("npd,ncpd->c", gradient, stream),
            "gradient": gradient.sum((0, 1)),
        }
        sums |= {f"{side} {name}": value for name, value in own.items()}
    return {name: value[None] for name, value in sums.items()}


def _choice(tally: Tally, bank: Sequence[dict[str, Tensor]]) -> Choice:
    """Means and orders."""
    scores: dict[str, dict[str, Tensor]] = {order: {} for order in ORDERS}
    mean, sums = {}, {name: value[0] for name, value in tally.sums.items()}
    for side in SIDES:
        own = {name.removeprefix(f"{side} "): value for name, value in sums.items() if name.startswith(side)}
        rows, count = own["rows"], own["count"]
        mean[side] = (own["stream"] / count).float()
        between = own["square"] / count - (own["framed"] / count).square().sum(-1)
        ways = {
            "share": own["value"] / rows,
            "signed": own["value"] / rows,
            "norm": own["length"] / count,
            "variance": pad(between if side == "query" else own["within"] / rows, (0, 1)),
            "patching": pad((own["along"] - own["stream"] / count @ own["gradient"]) / rows, (0, 1)),
            "path": own["path"] / rows,
        }
        for order in ORDERS:
            scores[order][side] = ways[order]
    banked = {side: torch.cat([piece[side] for piece in bank])[:_BANK] for side in SIDES}
    return Choice(mean, banked, scores, (sums["pairs"] / rows).float())


def _shown(rows: HeadRows, side: Side) -> Int[Tensor, "n p"]:
    """1 at every place of a side that counts: of keys, those named; the first token only where no other is."""
    if side == "query":
        return torch.ones_like(rows.signs[:, :1])
    named = rows.signs != 0
    later = named & (rows.run.columns[:, 1:] != rows.plain.first[:, None])
    return torch.where(later.any(1, keepdim=True), later, named).long()


def _bank(rows: HeadRows, seed: int, address: int) -> dict[str, Tensor]:
    """What writers left at each prompt's query, and at one of its named keys, drawn."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "bank", address))
    slots = torch.multinomial(_shown(rows, "key").float().cpu(), 1, generator=generator)[:, 0].to(rows.signs.device)
    keys = rows.stream("key")[torch.arange(len(slots), device=slots.device), :, slots]
    return {"query": rows.stream("query")[:, :, 0].cpu(), "key": keys.cpu()}


def live_gradient(rows: HeadRows, side: Side) -> Float[Tensor, "n p d_model"]:
    """How the relative logit changes with the stream at each place of a side, the other held, norms live."""
    x = rows.entered(side).clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(rows.live(x[None], side).sum(), x)[0]


@torch.no_grad()
def path_effects(rows: HeadRows, seed: int) -> dict[Side, Float[Tensor, " c"]]:
    """The fall of the relative logit, summed over prompts, where one part alone is another prompt's, norms live."""
    n, total, device = len(rows.signs), rows.logit(), rows.signs.device
    generator = torch.Generator().manual_seed(seed)
    other = ((torch.arange(n) + torch.randint(1, max(n, 2), (n,), generator=generator)) % n).to(device)
    effects: dict[Side, Tensor] = {}
    for side in SIDES:
        x, stream = rows.entered(side), rows.stream(side)
        donor = stream[other]
        if side == "key":  # a key of the other prompt in every slot, right or not
            named = rows.signs[other] != 0
            slots = torch.rand(rows.signs.shape, generator=generator).to(device)
            slots = slots.masked_fill(~named, -1).argsort(dim=1, descending=True)
            counts = named.sum(1, keepdim=True).clamp_min(1)
            slots = slots.gather(1, torch.arange(slots.shape[1], device=device) % counts)
            donor = donor.gather(2, slots[:, None, :, None].expand_as(donor))
        falls = []
        for some in torch.arange(stream.shape[1]).split(16):
            moved = x[None] + (donor - stream)[:, some].transpose(0, 1)
            falls.append((total - rows.live(moved, side)).sum(1))
        effects[side] = torch.cat([*falls, total.new_zeros(1)]).double().cpu()
    return effects


# ---------------------------------------------------------------------- cut and kept


def all_edges(writers: int, draws: int) -> list[Edge]:
    """Every condition: each order, each rival replacement of the first one, and random writers."""
    kinds: tuple[EdgeKind, ...] = ("cut", "keep")
    cells = list(product(EDGE_SIDES, kinds, [k for k in SIZES if k < writers - 1]))
    ways: list[Any] = [(by, "mean", "held") for by in ORDERS]
    ways += [("share", "resample", "held"), ("share", "mean", "live")]
    edges = [Edge(side, kind, by, k, *way) for by, *way in ways for side, kind, k in cells]
    return edges + [Edge(side, kind, RANDOM, k, draw=draw) for draw in range(draws) for side, kind, k in cells]


class EdgeTest:
    """The conditions of one head, and what they measure on each batch."""

    def __init__(self, head: Head, writers: Sequence[str], chosen: Choice, seed: int, draws: int = DRAWS) -> None:
        self.head, self.chosen, self.seed = head, chosen, seed
        self.writers, self.pairs, self.draws = writers, strongest_pairs(chosen.pairs), draws
        self.edges, self.cells = (all_edges(len(writers), count) for count in (draws, 1))  # random ones count once
        self.masks = edge_masks(self.edges, chosen.scores, parse_writers(writers[:-1]), derived_seed(seed, str(head)))
        places = {edge: i for i, edge in enumerate(self.cells)}
        self.cell_of = torch.tensor([places[replace(edge, draw=0)] for edge in self.edges])

    def tally(self, words: Iterable[str]) -> Tally:
        """An empty one, for what `measure` gives."""
        c, m = len(self.writers), len(METRICS)
        shapes = {"total": (), "query": (c,), "key": (c,), "whole": (m,), "pairs": (len(self.pairs),)}
        return Tally(sorted(words), {**shapes, "edges": (len(self.cells), m)})

    def measure(self, rows: HeadRows, numbers: Int[Tensor, " n"]) -> tuple[dict[str, Float[Tensor, "n *v"]], Tensor]:
        """What every prompt of a batch gives, and the error of its sums; ``numbers`` address other prompts."""
        values, error = rows.given(self.pairs)
        whole = metrics_of(rows.rows, rows.plain.named, rows.signs).cpu()
        measured = whole.new_empty(len(self.edges), *whole.shape)
        drawn = draw_bits(
            derived_seed(self.seed, "resample"), numbers.cpu()[:, None], torch.arange(1 + rows.signs.shape[1])
        )
        donors = {"mean": None, "resample": (drawn % len(self.chosen.bank["query"])).to(rows.signs.device)}
        for way in dict.fromkeys((edge.replaced, edge.norms) for edge in self.edges):
            index = torch.tensor([i for i, edge in enumerate(self.edges) if (edge.replaced, edge.norms) == way])
            replaced, norms = way
            run = self._live if norms == "live" else self._held
            measured[index] = run(rows, self.instead(rows, donors[replaced]), index).cpu()
        cells = whole.new_zeros(len(self.cells), *whole.shape).index_add(0, self.cell_of, measured)
        cells /= torch.bincount(self.cell_of)[:, None, None]
        return {**values, "whole": whole, "edges": cells.transpose(0, 1)}, error

    def instead(self, rows: HeadRows, donors: Int[Tensor, "n p"] | None) -> dict[Side, Float[Tensor, "*n c p d_model"]]:
        """What parts of the stream are replaced by, by side: their means, or those of these prompts of the bank."""
        device = rows.signs.device
        if donors is None:
            return {side: self.chosen.mean[side].to(device)[None, :, None] for side in SIDES}
        keys = self.chosen.bank["key"].to(device)[donors[:, 1:]].transpose(1, 2)
        return {"query": self.chosen.bank["query"].to(device)[donors[:, 0]][:, :, None], "key": keys}

    def _held(self, rows: HeadRows, instead: Mapping[Side, Tensor], index: Int[Tensor, " x"]) -> Float[Tensor, "x n m"]:
        edges = rows.edges(instead)
        query, key = (mask[index].to(edges.signs.device).split(128) for mask in self.masks)
        return torch.cat([edges.replaced(q, k) for q, k in zip(query, key, strict=True)])

    @torch.no_grad()
    def _live(self, rows: HeadRows, instead: Mapping[Side, Tensor], index: Int[Tensor, " x"]) -> Float[Tensor, "x n m"]:
        """Parts replaced in the residual stream, and the head's norms run again."""
        measured = []
        for some in index.split(8):
            made = {}
            for side, masks in zip(SIDES, self.masks, strict=True):
                x, away = rows.entered(side), rows.stream(side) - instead[side]
                moved = masks[some, :-1].to(x) @ away.transpose(0, 1).flatten(1)
                made[side] = rows.run.live(self.head, side, x[None] - moved.unflatten(1, (len(x), *x.shape[1:])))
            measured.append(rows.plain.measure(made["query"][:, :, 0], made["key"]))
        return torch.cat(measured)

    def tables(self, tally: Tally) -> dict[str, list[dict[str, Any]]]:
        """Rows of ``writers``, ``pairs``, ``edges`` and ``check``."""
        values, (low, high), total = tally.mean("edges"), tally.interval("edges"), float(tally.mean("total"))
        accuracy, edges = METRICS.index("accuracy"), []
        for i, edge in enumerate(self.cells):
            *measured, logit = values[i].tolist()
            edges.append({
                "head": str(self.head), "side": edge.side, "kind": edge.kind, "by": edge.by, "replaced": edge.replaced,
                "norms": edge.norms, "k": edge.k, **dict(zip(METRICS, measured, strict=False)),
                "logit_kept": logit / total, "overshoots": logit / total > OVERSHOOT, "low": float(low[i, accuracy]),
                "high": float(high[i, accuracy]), "n": tally.rows, "draws": self.draws if edge.by == RANDOM else 1,
            })  # fmt: skip
        whole = dict(zip(METRICS[:-1], tally.mean("whole").tolist(), strict=False))
        return {
            "writers": tally.writer_rows(self.head, self.writers),
            "pairs": tally.pair_rows(self.head, self.writers, self.pairs),
            "edges": edges,
            "check": [tally.check_row(self.head, **whole)],
        }
