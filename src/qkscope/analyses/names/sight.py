"""What is looked at: how much text, passages in batches, heads, what a query sees, and what heads attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.analyses.names.readings import Readings, holds
from qkscope.attention import soft
from qkscope.capture.encode import choose_side
from qkscope.capture.gather import Plan, layout_of
from qkscope.capture.inputs import pad_rows
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, Stop
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import Count, Prompts, checked_class
from qkscope.tasks.sides import LENGTH, Passage

PASSAGES, TESTED = 192, 64  # passages to fit on, and to test on
SKIP = 1  # tokens from the first on that are left out: a resting place of many heads
FIRST = 8  # the first query: one nearer to the start sees next to nothing


@checked_class
@dataclass(frozen=True)
class Options:
    """How much text is read, and how; what cannot be is refused before a model is loaded.

    Attributes
    ----------
    n, test : passages to fit on, and others to test on.
    length : the most tokens of a passage.
    batch_size : passages per batch.
    seed : of every draw.
    progress : whether to say how far it is; if not given, where stderr is a terminal.
    """

    n: Prompts = PASSAGES
    test: Prompts = TESTED
    length: Count = LENGTH
    batch_size: Count = 16
    seed: int = 0
    progress: bool | None = None

    def asked(self) -> dict[str, Any]:
        """All that decides the numbers."""
        return {name: value for name, value in vars(self).items() if name != "progress"}


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

    def rotate(self, call: Call, x: Float[Tensor, "b c t d"], first: int = 0) -> Float[Tensor, "b c t d"]:
        """Vectors as this layer rotates what stands at their places, in the batch's rows from ``first`` on."""
        offset = self.scope.facts.layers[call.layer].offset
        if call.rotary is None or offset is None:
            return x
        rows = torch.arange(first, first + len(x), device=x.device)
        places = torch.arange(x.shape[2], device=x.device).expand(len(x), -1)
        return call.rotary.turn(x, rows, places, offset)

    def key_slots(self, plan: Plan) -> list[int]:
        """The columns of a layer's key heads."""
        return [len(self.heads) + slot for slot in plan.kv_slots]

    def key_of(self, plan: Plan) -> list[int]:
        """For each of a layer's heads, which of the layer's key heads it reads."""
        return [plan.kv_slots.index(self.kv_of_head[slot]) for slot in plan.slots]


def by_length(passages: Sequence[Passage], batch_size: int) -> list[list[int]]:
    """Numbers of passages, those of about the same length together; fixed, so that a rerun gives the same numbers."""
    order = sorted(range(len(passages)), key=lambda i: (len(passages[i].ids), i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


class Ruled(NamedTuple):
    """How far rules apply to queries: whether a key that keeps one is in sight, and the share of keys that do."""

    kept: Bool[Tensor, "b 1 t s"]
    exists: Bool[Tensor, "b t r"]
    rate: Float[Tensor, "b t r"]


@dataclass(frozen=True)
class Sight:
    """What the queries of a batch see, the same for every head but where a window narrows it."""

    batch: Batch
    x: Float[Tensor, "b t p"]
    asked: Bool[Tensor, "b t"]  # queries that count
    kept: Bool[Tensor, "b t s"]  # keys in sight of those, but the first
    rules: Bool[Tensor, "b t s r"]
    other: Int[Tensor, " b"]  # a passage of another document for each, as long or as near as there is
    _ruled: list[Ruled] = field(default_factory=list)

    @classmethod
    def of(cls, text: Text, batch: Batch) -> Sight:
        """Of one batch."""
        places = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        asked = batch.there & (places >= FIRST)
        kept = (places[:, None] >= places) & (places >= SKIP) & batch.there[:, None] & asked[..., None]
        return cls(batch, text.readings.features(batch.ids), asked, kept, holds(batch.ids), _others(batch.groups))

    def ruled(self, kept: Bool[Tensor, "b 1 t s"]) -> Ruled:
        """How far rules apply with these keys in sight; layers with the same window share it."""
        for known in self._ruled:
            if known.kept.device == kept.device and torch.equal(known.kept, kept):
                return known
        rules = self.rules.to(kept.device) & kept[:, 0, :, :, None]
        rate = rules.sum(dim=2) / kept[:, 0].sum(dim=2, keepdim=True).clamp_min(1)
        self._ruled.append(Ruled(kept, rules.any(dim=2), rate))
        return self._ruled[-1]


def _others(groups: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """For each row the next one of another document; itself where there is none."""
    n = len(groups)
    ring = (torch.arange(n, device=groups.device)[:, None] + torch.arange(n, device=groups.device)) % n
    differs = groups[ring] != groups[:, None]
    return ring.gather(1, differs.int().argmax(dim=1, keepdim=True))[:, 0]


class Attended(NamedTuple):
    """What some heads of a layer attend to, except the first token: logits before a soft-cap, with any bias."""

    q: Float[Tensor, "b h t d"]  # as the dot product sees them
    k: Float[Tensor, "b h t d"]
    raw: Float[Tensor, "b h t s"]
    bias: Float[Tensor, "b 1 t s"]  # what a model adds to a logit by distance; 0 in most
    kept: Bool[Tensor, "b 1 t s"]
    attention: Float[Tensor, "b h t s"]  # the model's own, 0 where a key is not kept
    logits: Float[Tensor, "b h t s"]  # all that the model's softmax is given, its sink last where there is one

    @property
    def whole(self) -> Float[Tensor, "b h t"]:
        """Log-sum-exp of the model's whole row."""
        return self.logits.logsumexp(dim=-1)


def attend(
    text: Text, call: Call, plan: Plan, kept: Bool[Tensor, "b t s"], first: int = 0, count: int | None = None
) -> Attended:
    """The attention of a layer's heads that are looked at, from its call; of ``count`` rows of the batch, or all."""
    t, device = call.q.shape[2], call.q.device
    rows = torch.arange(first, len(call.q) if count is None else first + count, device=device)
    own, b = slice(first, first + len(rows)), len(rows)
    q, k = call.q[own, plan.heads].float(), call.k[own, plan.kv].float()[:, text.key_of(plan)]
    mask = call.mask_rows(rows.repeat_interleave(t), torch.arange(t, device=device).repeat(b)).unflatten(0, (b, t))
    mask = mask.transpose(1, 2)  # b 1 t s, or one for each head
    mask = mask if mask.shape[1] == 1 else mask[:, plan.heads]
    visible = mask > -torch.inf
    seen = kept[own, None].to(device) & visible
    raw = (call.scale * q) @ k.mT
    logits = call.cap(raw) + mask
    if call.sinks is not None:
        sinks = call.sinks.float()[plan.heads].view(1, -1, 1, 1).expand(b, -1, t, 1)
        logits = torch.cat([logits, sinks], dim=-1)
    attention = soft(logits)[..., :t] * seen
    attention = attention if call.causal else attention.nan_to_num_()  # a padded query may see nothing
    bias = mask.masked_fill(~visible, 0.0)
    return Attended(q, k, raw.add_(bias), bias, seen, attention, logits)
