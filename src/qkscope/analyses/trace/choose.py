"""What is learned on the words for choosing: every writer's mean part, and which writers come first, by each rival.

Orders of writers, for each side:

- ``share``: by the size of their share of the relative logit; ``signed``: by the share itself
- ``norm``: by the mean length of their part in this head's queries or keys; ``variance``: by how much that part varies
  (between the keys of a prompt; of queries, between prompts)
- ``patching``: attribution patching, the gradient of the relative logit through live norms times what differs from the
  mean; ``path``: the fall of the relative logit where the part alone is another prompt's, norms live
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from qkscope.analyses.prompts import batches_of
from qkscope.analyses.trace.rows import SIDES, HeadRows, task_rows
from qkscope.analyses.trace.tally import Tally, tensors_of
from qkscope.draws import derived_seed
from qkscope.heads import Head
from qkscope.linear.reader import Reader
from qkscope.linear.run import Side
from qkscope.runs.job import Job
from qkscope.tasks.task import Unit

ORDERS = ("share", "signed", "norm", "variance", "patching", "path")
_BANK = 64  # prompts whose parts may be put into others


@dataclass(frozen=True)
class Chosen:
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


def choose_writers(
    reader: Reader,
    units: Sequence[Unit],
    projectors: Mapping[Head, Tensor],
    *,
    chat: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    job: Job | None = None,
    progress: bool | None = None,
) -> dict[Head, Chosen]:
    """One pass over the prompts for choosing."""
    frames = {head: {side: reader.frame(head, side).double() for side in SIDES} for head in reader.heads}
    tallies = {head: Tally([""], _shapes(len(reader.writers(head.layer)), own["key"])) for head, own in frames.items()}
    batches = batches_of(units, batch_size)
    generator = torch.Generator().manual_seed(derived_seed(seed, "banked"))
    banked = set(torch.randperm(len(units), generator=generator)[:_BANK].tolist())

    def run(indices: list[int]) -> list[dict[str, Tensor]]:
        _, rows = task_rows(reader, units, indices, chat, projectors)
        found = [_sums(one, frames[one.head], derived_seed(seed, "path", indices[0])) for one in rows]
        bank = [_bank(one, seed, indices[0]) for one in rows] if banked & set(indices) else []
        for one, own in zip(rows, found, strict=True):  # a batch is added whole, or not at all
            tallies[one.head].add([""], {name: value[None] for name, value in own.items()})
        return bank

    pieces = (job or Job()).stream("choosing", batches, run, progress, tensors_of(tallies))
    order = sorted(reader.heads, key=lambda head: head.layer)  # as rows come
    return {head: _chosen(tallies[head], [piece[i] for piece in pieces if piece]) for i, head in enumerate(order)}


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
    split, path = rows.split(), path_effects(rows, seed)
    marginals = dict(zip(SIDES, split.marginals(), strict=True))
    gradients = live_gradients(rows)
    found = {"pairs": split.pairs().sum(0)}
    for side in SIDES:
        stream = rows.stream(side).double()
        framed = stream @ frames[side].to(stream.device).T  # tokens are turned differently: one frame for all
        shown = _shown(rows, side).to(stream)
        counts, mean = shown.sum(1), torch.einsum("np,ncpd->ncd", shown, framed)
        mean = mean / counts[:, None, None].clamp_min(1)
        apart = (framed - mean[:, :, None]).square().sum(-1)
        own = {
            "path": path[side],
            "count": shown.sum(),
            "rows": shown.new_tensor(len(shown)),
            "value": marginals[side].double().sum(0),
            "length": torch.einsum("np,ncp->c", shown, rows.parts[side].double().norm(dim=-1)),
            "framed": torch.einsum("np,ncpd->cd", shown, framed),
            "square": torch.einsum("np,ncp->c", shown, framed.square().sum(-1)),
            "within": torch.einsum("np,ncp->nc", shown, apart).div(counts[:, None].clamp_min(1)).sum(0),
            "stream": torch.einsum("np,ncpd->cd", shown, stream),
            "along": torch.einsum("npd,ncpd->c", gradients[side].double(), stream),
            "gradient": gradients[side].double().sum((0, 1)),
        }
        found |= {f"{side} {name}": value for name, value in own.items()}
    return found


def _chosen(tally: Tally, bank: Sequence[dict[str, Tensor]]) -> Chosen:
    """Means and orders."""
    scores: dict[str, dict[str, Tensor]] = {order: {} for order in ORDERS}
    mean, sums = {}, {name: value[0] for name, value in tally.sums.items()}
    for side in SIDES:
        own = {name.removeprefix(f"{side} "): value for name, value in sums.items() if name.startswith(side)}
        rows, count = float(own["rows"]), float(own["count"])
        mean[side] = (own["stream"] / count).float()
        scores["share"][side] = scores["signed"][side] = own["value"] / rows
        scores["norm"][side] = own["length"] / count
        between = own["square"] / count - (own["framed"] / count).square().sum(-1)
        scores["variance"][side] = pad(between if side == "query" else own["within"] / rows, (0, 1))
        scores["patching"][side] = pad((own["along"] - own["stream"] / count @ own["gradient"]) / rows, (0, 1))
        scores["path"][side] = own["path"] / rows
    banked = {side: torch.cat([piece[side] for piece in bank])[:_BANK] for side in SIDES}
    return Chosen(mean, banked, scores, (sums["pairs"] / rows).float())


def _shown(rows: HeadRows, side: Side) -> Tensor:
    """1 at every place of a side that counts: of keys, those named; the first token only where no other is."""
    if side == "query":
        return torch.ones_like(rows.signs[:, :1])
    named = rows.signs != 0
    later = named & (rows.run.columns[:, 1:] != rows.first()[:, None])
    return torch.where(later.any(1, keepdim=True), later, named).long()


def _bank(rows: HeadRows, seed: int, address: int) -> dict[str, Tensor]:
    """What writers left at each prompt's query, and at one of its named keys, drawn."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "bank", address))
    slots = torch.multinomial(_shown(rows, "key").float().cpu(), 1, generator=generator)[:, 0].to(rows.signs.device)
    keys = rows.stream("key")[torch.arange(len(slots), device=slots.device), :, slots]
    return {"query": rows.stream("query")[:, :, 0].cpu(), "key": keys.cpu()}


def live_gradients(rows: HeadRows) -> dict[Side, Float[Tensor, "n p d_model"]]:
    """How the relative logit changes with the stream at each place, the other side held, norms live."""
    found = {}
    for side in SIDES:
        x = rows.entered(side).clone().requires_grad_()
        with torch.enable_grad():
            (found[side],) = torch.autograd.grad(rows.live(x[None], side).sum(), x)
    return found


@torch.no_grad()
def path_effects(rows: HeadRows, seed: int) -> dict[str, Float[Tensor, " c"]]:
    """The fall of the relative logit, summed over prompts, where one part alone is another prompt's, norms live."""
    n, total = len(rows.signs), rows.total()
    generator = torch.Generator().manual_seed(seed)
    other = (torch.arange(n) + torch.randint(1, max(n, 2), (n,), generator=generator)) % n
    effects: dict[str, Tensor] = {}
    for side in SIDES:
        x, stream = rows.entered(side), rows.stream(side)
        donor = stream[other.to(stream.device)]
        if side == "key":  # a key of the other prompt in every slot, right or not
            slots = torch.rand(rows.signs.shape, generator=generator).to(stream.device)
            slots = slots.masked_fill(rows.signs[other.to(stream.device)] == 0, -1).argsort(dim=1, descending=True)
            counts = (rows.signs[other.to(stream.device)] != 0).sum(1, keepdim=True).clamp_min(1)
            slots = slots.gather(1, torch.arange(slots.shape[1], device=slots.device) % counts)
            donor = donor.gather(2, slots[:, None, :, None].expand_as(donor))
        falls = []
        for some in torch.arange(stream.shape[1]).split(16):
            moved = x[None] + (donor - stream)[:, some].transpose(0, 1)
            falls.append((total - rows.live(moved, side)).sum(1))
        effects[side] = torch.cat([*falls, total.new_zeros(1)]).double().cpu()
    return effects
