"""The two passes over text: queries and keys against readings, and on other documents what heads attend to, by blocks.

Everything that is kept is a sum, so passes stop, go on and merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.analyses.names.readings import RULES
from qkscope.analyses.names.sight import SKIP, Attended, Options, Sight, Text, attend, by_length
from qkscope.capture.gather import Plan
from qkscope.capture.tap import Call
from qkscope.maths.factors import FactorFit, FactorSums, block_sums
from qkscope.runs.work import Stage, Work
from qkscope.tasks.sides import Passage

OFFSETS = 64  # distances of which curves are kept
EXAMPLES = 3  # places kept for each head and rule
_MATCHED = 4  # every so-manieth query is asked whether another document's does as well: neighbours are alike
_HELD = {"cpu": 2**22, "gpu": 2**29}  # bytes of a table of logits: what stays in a cache, what fills a GPU


@torch.no_grad()
def fit_factors(text: Text, passages: Sequence[Passage], job: Work, options: Options) -> FactorFit:
    """Every head's query and key factors, fitted on all tokens of some passages but the first of each."""
    readings = text.readings
    sums = FactorSums(readings.names, readings.widths, text.columns, text.d_head, device=text.scope.device)

    def run(indices: list[int]) -> None:
        batch = text.batch(passages, indices, [passages[i].group for i in indices])
        used = batch.there.clone()
        used[:, :SKIP] = False
        where = used.nonzero(as_tuple=True)
        x = readings.features(batch.ids)[where]

        def take(call: Call, plan: Plan) -> None:
            q, k = text.before_rotation(call, plan)
            for slots, y in ((plan.slots, q), (text.key_slots(plan), k)):
                sums.add(slots, x, y.transpose(1, 2)[where])

        text.watch(batch, take)
        sums.see(x)

    job.run([Stage("factors", by_length(passages, options.batch_size), run, sums.tensors())], options.progress)
    return sums.fit()


@dataclass(frozen=True)
class Looked:
    """What heads attended to in tested documents: u documents, h heads, f parts, r rules.

    Attributes
    ----------
    blocks : Float64 [u, h, f, f], and logit [u, h] : sums of ``(attention − mass · uniform) · logit`` over queries and
        keys in sight but the first, by pair of parts and in all; attention is the model's own, so a query counts for
        what its head gives to tokens other than the first.
    covariance : [u, h, f, f], and spread [u, h] : the same with every key in sight counted alike: sums of covariances
        of blocks with the logit, over the keys of a query, and of the logit's variance; no parts where not asked for.
    own, foreign : [u, h] : how far the best key stands out from those in sight, in their standard deviations: with
        the query that stands there, and with one that stands at the same place in another document.
    mass : [u, h], queries [u] : attention on tokens other than the first, and number of queries.
    covered, hits, chance : [u, h, r] : queries for which a rule's key is in sight; of those, how often the most
        attended key is one; how often one drawn at random would be.
    curve : [2, h, o] : the logit by distance, and the part of it that is of the means alone.
    attended, count : [h, o] : attention and number of pairs by distance.
    examples : [h, r, n, 4] : attention, passage, query and key of places where the most attended key keeps the rule.
    """

    groups: tuple[int, ...]
    blocks: Float[Tensor, "u h f f"]
    logit: Float[Tensor, "u h"]
    covariance: Float[Tensor, "u h g g"]
    spread: Float[Tensor, "u h"]
    own: Float[Tensor, "u h"]
    foreign: Float[Tensor, "u h"]
    mass: Float[Tensor, "u h"]
    queries: Float[Tensor, " u"]
    covered: Float[Tensor, "u h r"]
    hits: Float[Tensor, "u h r"]
    chance: Float[Tensor, "u h r"]
    curve: Float[Tensor, "2 h o"]
    attended: Float[Tensor, "h o"]
    count: Float[Tensor, "h o"]
    examples: Float[Tensor, "h r n 4"]

    @classmethod
    def empty(
        cls, groups: Sequence[int], heads: int, parts: int, device: torch.device | str, covariance: bool = False
    ) -> Looked:
        """Nothing yet."""
        u, r, o, g = len(groups), len(RULES), OFFSETS, parts * covariance
        shapes = {
            "blocks": (u, heads, parts, parts), "logit": (u, heads), "covariance": (u, heads, g, g),
            "spread": (u, heads), "own": (u, heads), "foreign": (u, heads),
            "mass": (u, heads), "queries": (u,), "covered": (u, heads, r), "hits": (u, heads, r),
            "chance": (u, heads, r), "curve": (2, heads, o), "attended": (heads, o), "count": (heads, o),
            "examples": (heads, r + 1, EXAMPLES, 4),
        }  # fmt: skip
        zeros = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
        return cls(tuple(groups), **zeros)

    def tensors(self) -> dict[str, Tensor]:
        """The sums by name, sharing memory."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@torch.no_grad()
def look(
    text: Text, fit: FactorFit, passages: Sequence[Passage], job: Work, options: Options, covariance: bool = False
) -> Looked:
    """What heads attended to in some passages, by blocks, rules and distances; with covariances if asked for."""
    groups = sorted({passage.group for passage in passages})
    number = {group: i for i, group in enumerate(groups)}
    found = Looked.empty(groups, len(text.heads), len(fit.names), text.scope.device, covariance)

    def run(indices: list[int]) -> None:
        batch = text.batch(passages, indices, [number[passages[i].group] for i in indices])
        sight = Sight.of(text, batch)
        text.watch(batch, lambda call, plan: _take(text, fit, sight, call, plan, found))
        _add(found.queries, batch.groups, sight.asked.sum(dim=1))

    batches = by_length(passages, options.batch_size)
    job.run([Stage("looked", batches, run, found.tensors(), merge=_merged)], options.progress)
    return found


def _take(text: Text, fit: FactorFit, sight: Sight, call: Call, plan: Plan, found: Looked) -> None:
    """One layer of one batch, a few rows at a time."""
    device, t = call.q.device, call.q.shape[2]
    slot = torch.tensor(plan.slots, device=found.curve.device)
    sides = [_Side(text, fit, sight, call, slots) for slots in (plan.slots, text.key_slots(plan))]
    at_once = max(1, _HELD["cpu" if device.type == "cpu" else "gpu"] // (4 * len(plan.heads) * t * t))
    kept, tops = [], []
    for first in range(0, len(call.q), at_once):
        count = min(at_once, len(call.q) - first)
        seen = attend(text, call, plan, sight.kept, first, count)
        groups = sight.batch.groups[first : first + count].to(device)
        tops.append(seen.attention.max(dim=-1))  # the most attended key
        mass = seen.attention.sum(dim=-1, keepdim=True)
        weights = seen.attention - mass / seen.kept.sum(dim=-1, keepdim=True).clamp_min(1) * seen.kept
        q_parts = sides[0].parts(seen.q, first)
        k_parts = sides[1].parts(call.k[first : first + count, plan.kv].float(), first)
        if text.key_of(plan) != [i * len(plan.kv) // len(plan.heads) for i in range(len(plan.heads))]:
            k_parts = k_parts[:, text.key_of(plan)]
        blocks = call.scale * block_sums(q_parts, k_parts, weights, causal=True)
        blocks[:, :, 0, 0] += (weights * seen.bias).sum(dim=(2, 3))
        logit = torch.einsum("bhts,bhts->bh", weights, seen.raw)
        for sums, values in ((found.blocks, blocks), (found.logit, logit), (found.mass, mass.sum(dim=(2, 3)))):
            _add_heads(sums, groups, slot, values)
        if found.covariance.shape[-1]:
            even = seen.kept / seen.kept.sum(dim=-1, keepdim=True).clamp_min(1)
            apart = even * (seen.raw - (even * seen.raw).sum(dim=-1, keepdim=True))
            blocks = call.scale * block_sums(q_parts, k_parts, apart, causal=True)
            blocks[:, :, 0, 0] += (apart * seen.bias).sum(dim=(2, 3))
            _add_heads(found.covariance, groups, slot, blocks)
            _add_heads(found.spread, groups, slot, (apart * seen.raw).sum(dim=(2, 3)))
        for sums, values in zip((found.own, found.foreign), _stand_out(call, plan, sight, seen, first), strict=True):
            _add_heads(sums, groups, slot, values)
        _add_curve(found.curve[0], slot, seen.raw * seen.kept)
        _add_curve(found.attended, slot, seen.attention)
        _add_curve(found.curve[1], slot, (seen.bias * seen.kept).expand_as(seen.raw))
        kept.append(seen.kept[:, :1])
    every, groups = torch.cat(kept), sight.batch.groups.to(device)
    ruled = sight.ruled(every)
    weight, top = (torch.cat(x) for x in zip(*tops, strict=True))  # b h t
    rules = sight.rules.to(device).gather(2, top.transpose(1, 2)[..., None].expand(-1, -1, -1, len(RULES)))
    rules = (rules & sight.asked[..., None, None].to(device)).permute(0, 2, 1, 3) & (weight > 0)[..., None]
    _add_heads(found.hits, groups, slot, rules.sum(dim=2))
    for sums, values in ((found.covered, ruled.exists), (found.chance, ruled.rate)):
        _add_heads(sums, groups, slot, values.sum(dim=1)[:, None].expand(-1, len(slot), -1))
    _keep_examples(found.examples, slot, weight, top, rules, sight)
    pairs = every.sum(dim=0).float()  # 1 t s
    means = call.scale * sides[0].mean[0] @ sides[1].mean[0, text.key_of(plan)].mT
    _add_curve(found.curve[1], slot, (means * pairs)[None])
    _add_curve(found.count, slot, pairs[None].expand(1, len(slot), -1, -1))


class _Side:
    """Queries or keys of a layer in parts, as they are rotated at their places."""

    def __init__(self, text: Text, fit: FactorFit, sight: Sight, call: Call, slots: Sequence[int]) -> None:
        self.text, self.call, self.x, self.fit = text, call, sight.x, fit.of(slots)
        # places are the same in every row, and the longest has them all
        longest, t = int(sight.batch.there.sum(dim=1).argmax()), call.q.shape[2]
        mean = self.fit.y_mean.to(call.q.device, torch.float32)
        self.mean = text.rotate(call, mean[None, :, None].expand(-1, -1, t, -1), longest)

    def parts(self, y: Float[Tensor, "b c t d"], first: int) -> Float[Tensor, "b c f t d"]:
        """The parts of some rows' rotated vectors; they sum to them."""
        b, c = y.shape[:2]
        factors = list(self.fit.factor_parts(self.x[first : first + b].to(y)))  # b t c d
        flat = torch.stack([part.transpose(1, 2) for part in factors], dim=2).flatten(1, 2)
        turned = self.text.rotate(self.call, flat, first).unflatten(1, (c, len(factors)))
        mean = self.mean.expand(b, -1, -1, -1)
        rest = y - mean - turned.sum(dim=2)
        return torch.cat([mean[:, :, None], turned, rest[:, :, None]], dim=2)


def _stand_out(
    call: Call, plan: Plan, sight: Sight, seen: Attended, first: int
) -> tuple[Float[Tensor, "b h"], Float[Tensor, "b h"]]:
    """How far the best key stands out, of the own and of another document's query; a scale of either drops out."""
    b, _, t, _ = seen.q.shape
    rows = torch.arange(first, first + b, device=seen.q.device)
    other = sight.other.to(rows.device)[rows]
    some = torch.arange(0, t, _MATCHED, device=rows.device)
    asked = sight.asked.to(rows.device)[:, some]
    both = (asked[rows] & asked[other] & (other != rows)[:, None])[:, None]  # b 1 t
    kept = seen.kept[:, :, some]
    count = kept.sum(dim=-1).clamp_min(1)
    foreign = (call.scale * call.q[other][:, plan.heads][:, :, some].float()) @ seen.k.mT + seen.bias[:, :, some]
    found = []
    for logits in (seen.raw[:, :, some], foreign):
        inside = logits * kept
        mean = inside.sum(dim=-1) / count
        spread = (inside.square().sum(dim=-1) / count - mean.square()).clamp_min(1e-12).sqrt()
        best = logits.masked_fill(~kept, -torch.inf).amax(dim=-1)
        found.append(torch.where(both, (best - mean) / spread, 0.0).sum(dim=2))
    return found[0], found[1]


def _add_curve(sums: Float[Tensor, "n o"], slot: Int[Tensor, " h"], values: Float[Tensor, "b h t s"]) -> None:
    """Add what stands so many places back, over all queries."""
    t = values.shape[2]
    places = torch.arange(t, device=values.device)
    most = min(OFFSETS, t)
    back = places[:, None] - torch.arange(most, device=values.device)
    taken = values.gather(3, back.clamp_min(0).expand(*values.shape[:2], -1, -1)) * (back >= 0)
    found = torch.nn.functional.pad(taken.sum(dim=(0, 2), dtype=torch.float64), (0, OFFSETS - most))
    sums.index_add_(0, slot, found.to(sums))


def _keep_examples(
    examples: Float[Tensor, "h r n 4"],
    slot: Int[Tensor, " h"],
    weight: Float[Tensor, "b h t"],
    top: Int[Tensor, "b h t"],
    rules: Bool[Tensor, "b h t r"],
    sight: Sight,
) -> None:
    """The places with most attention on the key, for each rule, and for any key at all; one in a passage."""
    weight = weight * sight.asked[:, None].to(weight)
    every = torch.cat([rules, torch.ones_like(rules[..., :1])], dim=-1)
    scored = (weight[..., None] * every).permute(1, 3, 0, 2)  # h r b t
    best, query = scored.max(dim=-1)  # h r b
    key = top.permute(1, 0, 2)[:, None].expand(-1, every.shape[-1], -1, -1).gather(3, query[..., None])[..., 0]
    passage = sight.batch.numbers.to(best.device).expand_as(query)
    fresh = torch.stack([best, passage.to(best), query.to(best), key.to(best)], dim=-1).to(examples)
    merged = torch.cat([examples[slot], fresh], dim=2)
    first = merged[..., 0].topk(EXAMPLES, dim=2).indices
    examples[slot] = merged.gather(2, first[..., None].expand(-1, -1, -1, 4))


def _merged(name: str, total: Tensor, piece: Tensor) -> Tensor:
    """Add a piece of this tensor to its total; of examples, keep those with most attention."""
    if name != "examples":
        return total.add_(piece)
    both = torch.cat([total, piece], dim=2)
    return both.gather(2, both[..., 0].topk(EXAMPLES, dim=2).indices[..., None].expand(-1, -1, -1, 4))


def _add(sums: Float[Tensor, "u *x"], groups: Int[Tensor, " b"], values: Tensor) -> None:
    sums.index_add_(0, groups.to(sums.device), values.to(sums))


def _add_heads(
    sums: Float[Tensor, "u h *x"], groups: Int[Tensor, " b"], slot: Int[Tensor, " h"], values: Float[Tensor, "b h *x"]
) -> None:
    """Add what a layer's heads gave in each row to its document."""
    by_document = torch.zeros((len(sums), *values.shape[1:]), dtype=sums.dtype, device=sums.device)
    _add(by_document, groups, values)
    sums.index_add_(1, slot, by_document)
