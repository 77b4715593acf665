"""The two passes over text: queries and keys against readings, and on other documents what heads attend to, by blocks.

Everything that is kept is a sum, so passes stop, go on and merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.analyses.names.readings import Readings
from qkscope.analyses.names.rules import RULES, holds
from qkscope.capture.encode import choose_side
from qkscope.capture.gather import Plan, layout_of
from qkscope.capture.inputs import pad_rows
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, Stop
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.factors import FactorFit, FactorSums, block_sums
from qkscope.runs.job import Job
from qkscope.tasks.sides import Passage

SKIP = 1  # tokens from the first on that are left out: a resting place of many heads
FIRST = 8  # the first query: one nearer to the start sees next to nothing
OFFSETS = 64  # distances of which curves are kept
EXAMPLES = 3  # places kept for each head and rule


@dataclass(frozen=True)
class Batch:
    """Passages padded on the right: a token's column is its place."""

    inputs: dict[str, Tensor]
    groups: Int[Tensor, " b"]
    numbers: Int[Tensor, " b"]  # of the passages

    @property
    def ids(self) -> Int[Tensor, "b t"]:
        """Its tokens."""
        return self.inputs["input_ids"]

    @property
    def there(self) -> Bool[Tensor, "b t"]:
        """Where they are no padding."""
        return self.inputs["attention_mask"].bool()


class Text:
    """Passages of a model's text, and the heads that are looked at."""

    def __init__(self, scope: Scope, heads: Sequence[Head], readings: Readings) -> None:
        self.scope, self.heads, self.readings = scope, tuple(heads), readings.to(scope.device)
        widths = {scope.facts.layers[head.layer].d_head for head in heads}
        if len(widths) > 1:
            raise BadInput(f"these heads have different widths {sorted(widths)}: take each width on its own.")
        self.d_head = widths.pop()
        shapes = tuple((layer.n_heads, layer.n_kv_heads) for layer in scope.facts.layers)
        layout = layout_of(shapes, self.heads)
        self.plans, self.kv_of_head = layout.plans, layout.kv_of_head
        self.columns = len(heads) + max(self.kv_of_head) + 1  # queries first, then key heads
        self.deepest = max(self.plans)

    def batch(self, passages: Sequence[Passage], indices: Sequence[int], groups: Sequence[int]) -> Batch:
        """Some passages, padded."""
        rows = [torch.tensor(passages[i].ids) for i in indices]
        padded = len({len(row) for row in rows}) > 1
        side = choose_side("right", self.scope.facts.sides, padded, self.scope.name)
        inputs = pad_rows(rows, self.scope.encoder.pad_id, side, self.scope.facts.takes_positions)
        device = self.scope.device
        named = (torch.tensor(list(x), device=device) for x in (groups, indices))
        return Batch({name: value.to(device) for name, value in inputs.items()}, *named)

    def watch(self, batch: Batch, take: Any) -> None:
        """Run a batch; ``take(call, plan)`` at each layer with heads that are looked at."""

        def visit(call: Call) -> None:
            if call.layer in self.plans:
                take(call, self.plans[call.layer])
            if call.layer == self.deepest:
                raise Stop

        self.scope.watch(batch.inputs, visit, rotary=True)

    def before_rotation(self, call: Call, plan: Plan) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b g t d"]]:
        """Queries and keys of a layer's heads, as they were before any rotation."""
        q, k = call.q, call.k
        offset = self.scope.facts.layers[call.layer].offset
        if call.rotary is not None and offset is not None:
            q, k = call.rotary.unrotated(q, k, offset)
        return q[:, plan.heads].float(), k[:, plan.kv].float()

    def rotate(self, call: Call, x: Float[Tensor, "b c t d"]) -> Float[Tensor, "b c t d"]:
        """Vectors as this layer rotates what stands at their places."""
        offset = self.scope.facts.layers[call.layer].offset
        if call.rotary is None or offset is None:
            return x
        rows = torch.arange(len(x), device=x.device)
        places = torch.arange(x.shape[2], device=x.device).expand(len(x), -1)
        return call.rotary.turn(x, rows, places, offset)

    def key_slots(self, plan: Plan) -> list[int]:
        """The columns of a layer's key heads."""
        return [len(self.heads) + slot for slot in plan.kv_slots]


def by_length(passages: Sequence[Passage], batch_size: int) -> list[list[int]]:
    """Numbers of passages, those of about the same length together; fixed, so that a rerun gives the same numbers."""
    order = sorted(range(len(passages)), key=lambda i: (len(passages[i].ids), i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@torch.no_grad()
def fit_factors(
    text: Text, passages: Sequence[Passage], job: Job, *, batch_size: int = 16, progress: bool | None = None
) -> FactorFit:
    """Every head's query and key factors, fitted on all tokens of some passages but the first of each."""
    readings = text.readings
    sums = FactorSums(readings.names, readings.widths, text.columns, text.d_head, device=text.scope.device)

    def run(indices: list[int]) -> None:
        batch = text.batch(passages, indices, [passages[i].group for i in indices])
        used = batch.there.clone()
        used[:, :SKIP] = False
        x = readings.features(batch.ids)[used]

        def take(call: Call, plan: Plan) -> None:
            q, k = text.before_rotation(call, plan)
            for slots, y in ((plan.slots, q), (text.key_slots(plan), k)):
                sums.add(slots, x, y.transpose(1, 2)[used])

        text.watch(batch, take)
        sums.see(x)

    job.stream("factors", by_length(passages, batch_size), run, progress, sums.tensors())
    return sums.fit()


@dataclass(frozen=True)
class Looked:
    """What heads attended to in tested documents: u documents, h heads, f parts, r rules.

    Attributes
    ----------
    blocks : Float64 [u, h, f, f], and logit [u, h] : sums of ``(attention − mass · uniform) · logit`` over queries and
        keys in sight but the first, by pair of parts and in all; attention is the model's own, so a query counts for
        what its head gives to tokens other than the first.
    own, foreign : [u, h] : the logit that attention gains over uniform, with the query that stands there, and with one
        that stands at the same place in another document.
    mass : [u, h], queries [u] : attention on tokens other than the first, and number of queries.
    covered : [u, r] and hits [u, h, r], chance [u, r] : queries for which a rule's key is in sight; of those, how often
        the most attended key is one; how often one drawn by lot would be.
    curve : [2, h, o] and count [o] : the logit by distance, and the part of it that is of the means alone.
    attended : [h, o] : attention by distance.
    examples : [h, r, n, 4] : attention, passage, query and key of places where the most attended key keeps the rule.
    """

    groups: tuple[int, ...]
    blocks: Float[Tensor, "u h f f"]
    logit: Float[Tensor, "u h"]
    own: Float[Tensor, "u h"]
    foreign: Float[Tensor, "u h"]
    mass: Float[Tensor, "u h"]
    queries: Float[Tensor, " u"]
    covered: Float[Tensor, "u r"]
    hits: Float[Tensor, "u h r"]
    chance: Float[Tensor, "u r"]
    curve: Float[Tensor, "2 h o"]
    attended: Float[Tensor, "h o"]
    count: Float[Tensor, " o"]
    examples: Float[Tensor, "h r n 4"]

    @classmethod
    def empty(cls, groups: Sequence[int], heads: int, parts: int, device: torch.device | str) -> Looked:
        """Nothing yet."""
        u, r, o = len(groups), len(RULES), OFFSETS
        shapes = {
            "blocks": (u, heads, parts, parts), "logit": (u, heads), "own": (u, heads), "foreign": (u, heads),
            "mass": (u, heads), "queries": (u,), "covered": (u, r), "hits": (u, heads, r), "chance": (u, r),
            "curve": (2, heads, o), "attended": (heads, o), "count": (o,), "examples": (heads, r + 1, EXAMPLES, 4),
        }  # fmt: skip
        zeros = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
        return cls(tuple(groups), **zeros)

    def tensors(self) -> dict[str, Tensor]:
        """The sums by name, sharing memory."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@torch.no_grad()
def look(
    text: Text,
    fit: FactorFit,
    passages: Sequence[Passage],
    job: Job,
    *,
    batch_size: int = 16,
    progress: bool | None = None,
) -> Looked:
    """What heads attended to in some passages, by blocks, rules and distances."""
    groups = sorted({passage.group for passage in passages})
    number = {group: i for i, group in enumerate(groups)}
    found = Looked.empty(groups, len(text.heads), len(fit.names), text.scope.device)

    def run(indices: list[int]) -> None:
        batch = text.batch(passages, indices, [number[passages[i].group] for i in indices])
        sight = Sight.of(text, batch)

        def take(call: Call, plan: Plan) -> None:
            _take(text, fit, sight, call, plan, found)

        text.watch(batch, take)
        _add(found.queries, batch.groups, sight.asked.sum(dim=1))
        _add(found.covered, batch.groups, (sight.exists & sight.asked[..., None]).sum(dim=1))
        _add(found.chance, batch.groups, (sight.rate * sight.asked[..., None]).sum(dim=1))
        found.count.add_(sight.by_distance(sight.kept[:, None].double())[0])

    job.stream("looked", by_length(passages, batch_size), run, progress, found.tensors())
    return found


@dataclass(frozen=True)
class Sight:
    """What the queries of a batch see, the same for every head (a window narrows it)."""

    batch: Batch
    x: Float[Tensor, "b t p"]
    asked: Bool[Tensor, "b t"]  # queries that count
    kept: Bool[Tensor, "b t s"]  # keys in sight of those, but the first
    rules: Bool[Tensor, "b t s r"]
    exists: Bool[Tensor, "b t r"]
    rate: Float[Tensor, "b t r"]
    other: Int[Tensor, " b"]  # a passage of another document for each, as long or as near as there is

    @classmethod
    def of(cls, text: Text, batch: Batch) -> Sight:
        """Of one batch."""
        places = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        asked = batch.there & (places >= FIRST)
        kept = (places[:, None] >= places) & (places >= SKIP) & batch.there[:, None] & asked[..., None]
        rules = holds(batch.ids) & kept[..., None]
        exists = rules.any(dim=2)
        rate = rules.sum(dim=2) / kept.sum(dim=2, keepdim=True).clamp_min(1)
        rate = torch.where(exists, rate, 0.0)
        return cls(batch, text.readings.features(batch.ids), asked, kept, rules, exists, rate, _others(batch.groups))

    def by_distance(self, values: Float[Tensor, "b h t s"]) -> Float[Tensor, "h o"]:
        """Sums over queries of what stands so many places back."""
        t = values.shape[2]
        places = torch.arange(t, device=values.device)
        most = min(OFFSETS, t)
        back = places[:, None] - torch.arange(most, device=values.device)
        taken = values.gather(3, back.clamp_min(0).expand(*values.shape[:2], -1, -1)) * (back >= 0)
        return torch.nn.functional.pad(taken.sum(dim=(0, 2)), (0, OFFSETS - most))


def _others(groups: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """For each row the next one of another document; itself where there is none."""
    n = len(groups)
    ring = (torch.arange(n, device=groups.device)[:, None] + torch.arange(n, device=groups.device)) % n
    differs = groups[ring] != groups[:, None]
    return ring.gather(1, differs.int().argmax(dim=1, keepdim=True))[:, 0]


class Attended(NamedTuple):
    """What some heads of a layer attend to, first token aside: logits as they are before a soft-cap, with any bias."""

    q: Float[Tensor, "b h t d"]  # as the dot product sees them
    k: Float[Tensor, "b h t d"]
    raw: Float[Tensor, "b h t s"]
    bias: Float[Tensor, "b 1 t s"]  # what a model adds to a logit by distance; 0 in most
    kept: Bool[Tensor, "b 1 t s"]
    attention: Float[Tensor, "b h t s"]  # the model's own, 0 where a key is not kept
    whole: Float[Tensor, "b h t"]  # log-sum-exp of the model's whole row


def attend(text: Text, call: Call, plan: Plan, kept: Bool[Tensor, "b t s"]) -> Attended:
    """The attention of a layer's heads that are looked at, from its call."""
    b, _, t, _ = call.q.shape
    kv = torch.tensor([plan.kv_slots.index(text.kv_of_head[slot]) for slot in plan.slots], device=call.q.device)
    q, k = call.q[:, plan.heads].float(), call.k[:, plan.kv].float()[:, kv]
    rows = torch.arange(b, device=q.device)
    mask = call.mask_rows(rows.repeat_interleave(t), torch.arange(t, device=q.device).repeat(b)).unflatten(0, (b, t))
    mask = mask.transpose(1, 2)  # b 1 t s, or one for each head
    mask = mask if mask.shape[1] == 1 else mask[:, plan.heads]
    visible = mask > -torch.inf
    seen = kept[:, None].to(q.device) & visible
    raw = call.scale * q @ k.mT
    logits = call.cap(raw) + mask
    if call.sinks is not None:
        sinks = call.sinks.float()[plan.heads].view(1, -1, 1, 1).expand(b, -1, t, 1)
        logits = torch.cat([logits, sinks], dim=-1)
    whole = logits.logsumexp(dim=-1)
    attention = (logits[..., :t] - whole[..., None]).exp().nan_to_num() * seen
    bias = mask.masked_fill(~visible, 0.0)
    return Attended(q, k, raw + bias, bias, seen, attention, whole)


def _take(text: Text, fit: FactorFit, sight: Sight, call: Call, plan: Plan, found: Looked) -> None:
    """One layer of one batch."""
    groups, slots = sight.batch.groups.to(call.q.device), plan.slots
    turned_q, turned_k, raw, bias, kept, attention, _ = attend(text, call, plan, sight.kept)
    q, k = text.before_rotation(call, plan)
    kv = torch.tensor([plan.kv_slots.index(text.kv_of_head[slot]) for slot in slots], device=q.device)
    b, h, _, _ = q.shape
    rows = torch.arange(b, device=q.device)
    uniform = kept / kept.sum(dim=-1, keepdim=True).clamp_min(1)
    mass = attention.sum(dim=-1, keepdim=True)
    weights = attention - mass * uniform
    _add_heads(found.logit, groups, slots, (weights * raw).sum(dim=(2, 3)))
    _add_heads(found.mass, groups, slots, mass[..., 0].sum(dim=2))

    rotate = lambda parts: [text.rotate(call, part.transpose(1, 2)) for part in parts]  # noqa: E731
    x = sight.x.to(q)
    q_parts = rotate(fit.parts(slots, x, q.transpose(1, 2)))
    k_parts = rotate(fit.parts(text.key_slots(plan), x, k.transpose(1, 2)))
    grouped = kv.tolist() == [i * len(plan.kv) // h for i in range(h)]
    blocks = block_sums(q_parts, k_parts if grouped else [part[:, kv] for part in k_parts], call.scale * weights)
    blocks[:, :, 0, 0] += (weights * bias).sum(dim=(2, 3))
    _add_heads(found.blocks, groups, slots, blocks)

    # the query's own logit against that of another document's query at the same place, on the same keys
    alone = torch.where(kept, call.cap(raw - bias) + bias, -torch.inf)
    other = sight.other.to(q.device)
    foreign_raw = call.scale * turned_q[other] @ turned_k.mT + bias
    foreign = torch.where(kept, call.cap(foreign_raw - bias) + bias, -torch.inf)
    both = (sight.asked & sight.asked[sight.other])[:, None].to(q.device) & (other != rows)[:, None, None]
    for sums, own_logits, values in ((found.own, alone, raw), (found.foreign, foreign, foreign_raw)):
        gained = ((own_logits.softmax(dim=-1).nan_to_num() - uniform) * values).sum(dim=-1)
        _add_heads(sums, groups, slots, (gained * both).sum(dim=2))

    # the most attended key, and which rules it keeps
    weight, top = attention.max(dim=-1)  # b h t
    rules = sight.rules.to(q.device)
    kept_rules = rules.gather(2, top.transpose(1, 2)[..., None].expand(-1, -1, -1, len(RULES)))  # b t h r
    kept_rules = (kept_rules & sight.asked[..., None, None].to(q.device)).permute(0, 2, 1, 3)
    _add_heads(found.hits, groups, slots, kept_rules.sum(dim=2))
    _keep_examples(found.examples, slots, weight, top, kept_rules, sight)

    mean = call.scale * q_parts[0] @ k_parts[0][:, kv].mT + bias
    slot = torch.tensor(slots, device=found.curve.device)
    found.curve[0, slot] += sight.by_distance((raw * kept).double()).to(found.curve)
    found.curve[1, slot] += sight.by_distance((mean * kept).double()).to(found.curve)
    found.attended[slot] += sight.by_distance(attention.double()).to(found.attended)


def _keep_examples(
    examples: Float[Tensor, "h r n 4"],
    slots: Sequence[int],
    weight: Float[Tensor, "b h t"],
    top: Int[Tensor, "b h t"],
    rules: Bool[Tensor, "b h t r"],
    sight: Sight,
) -> None:
    """The places with most attention on the key, for each rule, and for any key at all; one in a passage."""
    slot = torch.tensor(list(slots), device=examples.device)
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


def _add(sums: Float[Tensor, "u *x"], groups: Int[Tensor, " b"], values: Tensor) -> None:
    sums.index_add_(0, groups.to(sums.device), values.to(sums))


def _add_heads(sums: Float[Tensor, "u h *x"], groups: Int[Tensor, " b"], slots: Sequence[int], values: Tensor) -> None:
    """Add what a layer's heads gave in each row to its document."""
    slot = torch.tensor(list(slots), device=sums.device)
    by_document = torch.zeros((len(sums), *values.shape[1:]), dtype=sums.dtype, device=sums.device)
    _add(by_document, groups, values)
    sums.index_add_(1, slot, by_document)
