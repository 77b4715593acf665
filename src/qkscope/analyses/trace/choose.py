"""What is learned on the words for choosing: every writer's mean part, and which writers come first, by each rival.

Orders of writers, for each side:

- ``share``: by the size of their share of the relative logit; ``signed``: by the share itself
- ``norm``: by the mean length of their part in this head's queries or keys; ``variance``: by how much that part varies
  (between the keys of a prompt; of queries, between prompts)
- ``patching``: attribution patching, the gradient of the relative logit through live norms times what differs from the
  mean; ``path``: the fall of the relative logit where the part alone is another prompt's, norms live
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import batches_of
from qkscope.analyses.trace.rows import SIDES, HeadRows, task_rows
from qkscope.capture.writers import Reader, Side
from qkscope.draws import derived_seed
from qkscope.heads import Head
from qkscope.maths.writers import relative_weights
from qkscope.runs.job import Job
from qkscope.tasks.task import Unit

ORDERS = ("share", "signed", "norm", "variance", "patching", "path")
_BANK = 64  # prompts whose parts may be put into others


@dataclass(frozen=True)
class Chosen:
    """What the words for choosing say about one head.

    Attributes
    ----------
    mean : by side, the mean part of each writer before the rotation; of keys, right and other ones together.
    mean_stream : by side, the mean of what each writer leaves in the residual stream.
    bank : by side, parts of single prompts.
    scores : of each order, by side.
    pairs : mean over prompts.
    """

    mean: dict[Side, Float[Tensor, "c d"]]
    mean_stream: dict[Side, Float[Tensor, "c d_model"]]
    bank: dict[Side, Float[Tensor, "m c d"]]
    scores: dict[str, dict[str, Float[Tensor, " c"]]]
    pairs: Float[Tensor, "c c"]


def choose_writers(
    reader: Reader,
    units: Sequence[Unit],
    projectors: dict[Head, Tensor],
    *,
    chat: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    job: Job | None = None,
    progress: bool | None = None,
) -> dict[Head, Chosen]:
    """One pass over the prompts for choosing."""
    sums = {head: _Sums(reader, head) for head in reader.heads}
    batches = batches_of(units, batch_size)
    generator = torch.Generator().manual_seed(derived_seed(seed, "banked"))
    banked = set(torch.randperm(len(units), generator=generator)[:_BANK].tolist())

    def run(indices: list[int]) -> list[dict[str, Tensor]]:
        _, rows = task_rows(reader, units, indices, chat, projectors)
        for one in rows:
            sums[one.head].add(one, path_effects(one, derived_seed(seed, "path", indices[0])))
        return [_bank(one, seed, indices[0]) for one in rows] if banked & set(indices) else []

    tensors = {f"{head} {name}": value for head, own in sums.items() for name, value in own.tensors().items()}
    pieces = (job or Job()).stream("choosing", batches, run, progress, tensors)
    order = sorted(reader.heads, key=lambda head: head.layer)  # as rows come
    return {head: sums[head].chosen([piece[i] for piece in pieces if piece]) for i, head in enumerate(order)}


class _Sums:
    """Sums over prompts for one head, in float64."""

    def __init__(self, reader: Reader, head: Head) -> None:
        c, d_model = len(reader.writers(head.layer)), reader.calls[head.layer].hidden.shape[-1]
        shapes = {
            "count": (1,), "rows": (1,), "value": (c,), "part": (c, reader.scope.facts.layers[head.layer].d_head),
            "length": (c,), "square": (c,), "within": (c,), "stream": (c - 1, d_model), "along": (c - 1,),
            "gradient": (d_model,), "path": (c,),
        }  # fmt: skip
        self.of_side = {
            side: {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()} for side in SIDES
        }
        self.pairs = torch.zeros(c, c, dtype=torch.float64)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        sides = {f"{side} {name}": value for side, own in self.of_side.items() for name, value in own.items()}
        return {**sides, "pairs": self.pairs}

    def add(self, rows: HeadRows, path: dict[str, Float[Tensor, " c"]]) -> None:
        """Take in a batch, and the sums over it of what each writer's path does."""
        split = rows.split()
        marginals = dict(zip(SIDES, split.marginals(), strict=True))
        self.pairs += split.pairs().sum(0).double().cpu()
        gradients = live_gradients(rows)
        for side, own in self.of_side.items():
            parts, stream = rows.parts[side].double(), rows.stream(side).double()
            shown = _shown(rows, side).to(parts)
            counts, mean = shown.sum(1), torch.einsum("np,ncpd->ncd", shown, parts)
            mean = mean / counts[:, None, None].clamp_min(1)
            apart = (parts - mean[:, :, None]).square().sum(-1)
            squares = parts.square().sum(-1)
            found = {
                "path": path[side],
                "count": shown.sum().reshape(1),
                "rows": shown.new_tensor([float(len(shown))]),
                "value": marginals[side].double().sum(0),
                "part": torch.einsum("np,ncpd->cd", shown, parts),
                "length": torch.einsum("np,ncp->c", shown, squares.sqrt()),
                "square": torch.einsum("np,ncp->c", shown, squares),
                "within": torch.einsum("np,ncp->nc", shown, apart).div(counts[:, None].clamp_min(1)).sum(0),
                "stream": torch.einsum("np,ncpd->cd", shown, stream),
                "along": torch.einsum("npd,ncpd->c", gradients[side].double(), stream),
                "gradient": gradients[side].double().sum((0, 1)),
            }
            for name, value in found.items():
                own[name] += value.cpu()

    def chosen(self, bank: Sequence[dict[str, Tensor]]) -> Chosen:
        """Means and orders."""
        scores: dict[str, dict[str, Tensor]] = {order: {} for order in ORDERS}
        mean, stream = {}, {}
        for side, own in self.of_side.items():
            rows, count = float(own["rows"]), float(own["count"])
            mean[side] = (own["part"] / count).float()
            stream[side] = (own["stream"] / count).float()
            scores["share"][side] = scores["signed"][side] = own["value"] / rows
            scores["norm"][side] = own["length"] / count
            between = own["square"] / count - (own["part"] / count).square().sum(-1)
            scores["variance"][side] = between if side == "query" else own["within"] / rows
            patched = (own["along"] - own["stream"] / count @ own["gradient"]) / rows
            scores["patching"][side] = torch.cat([patched, patched.new_zeros(1)])
            scores["path"][side] = own["path"] / rows
        banked = {side: torch.cat([piece[side] for piece in bank])[:_BANK] for side in SIDES}
        pairs = (self.pairs / float(self.of_side["query"]["rows"])).float()
        return Chosen(mean, stream, banked, scores, pairs)


def _shown(rows: HeadRows, side: Side) -> Tensor:
    """1 at every place of a side that counts: of keys, those named; the first token only where no other is."""
    if side == "query":
        return torch.ones_like(rows.signs[:, :1])
    named = rows.signs != 0
    later = named & (rows.found.columns[:, 1:] != rows.first()[:, None])
    return torch.where(later.any(1, keepdim=True), later, named).long()


def _bank(rows: HeadRows, seed: int, address: int) -> dict[str, Tensor]:
    """Parts of each prompt: of its query, and of one of its named keys, drawn."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "bank", address))
    slots = torch.multinomial(_shown(rows, "key").float().cpu(), 1, generator=generator)[:, 0].to(rows.signs.device)
    keys = rows.parts["key"][torch.arange(len(slots), device=slots.device), :, slots]
    return {"query": rows.parts["query"][:, :, 0].cpu(), "key": keys.cpu()}


def live_gradients(rows: HeadRows) -> dict[Side, Float[Tensor, "n p d_model"]]:
    """How the relative logit changes with the stream at each place, the other side held, norms live."""
    weights = relative_weights(rows.signs)
    true = {side: rows.reader.true(rows.found, rows.head, side) for side in SIDES}
    found = {}
    for side in SIDES:
        x = rows.found.entered[rows.head.layer][:, rows.found.at(side)].clone().requires_grad_()
        with torch.enable_grad():
            made = rows.turned(rows.reader.vectors(rows.head, side, x, rows.found)[:, None], side)[:, 0]
            q, k = (made, true["key"]) if side == "query" else (true["query"], made)
            q = q if rows.projector is None else q @ rows.projector.to(q)
            logit = torch.einsum("nd,nkd,nk->", q[:, 0], k, weights) * rows.scale
            (found[side],) = torch.autograd.grad(logit, x)
    return found


@torch.no_grad()
def path_effects(rows: HeadRows, seed: int) -> dict[str, Float[Tensor, " c"]]:
    """The fall of the relative logit, summed over prompts, where one part alone is another prompt's, norms live."""
    n, weights = len(rows.signs), relative_weights(rows.signs)
    generator = torch.Generator().manual_seed(seed)
    other = (torch.arange(n) + torch.randint(1, max(n, 2), (n,), generator=generator)) % n
    true = {side: rows.reader.true(rows.found, rows.head, side) for side in SIDES}
    total = rows.total()
    effects: dict[str, Tensor] = {}
    for side in SIDES:
        x, stream = rows.found.entered[rows.head.layer][:, rows.found.at(side)], rows.stream(side)
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
            made = rows.live(moved, side)
            q, k = (
                (made, true["key"].expand(len(some), -1, -1, -1))
                if side == "query"
                else (true["query"].expand(len(some), -1, -1, -1), made)
            )
            q = q if rows.projector is None else q @ rows.projector.to(q)
            logit = torch.einsum("xnd,xnkd,nk->xn", q[:, :, 0], k, weights) * rows.scale
            falls.append((total - logit).sum(1))
        effects[side] = torch.cat([*falls, total.new_zeros(1)]).double().cpu()
    return effects
