"""What a head looked at, summed up in one vector per query: no key is named beforehand.

For each query and head, over the keys it sees but the first token(s) (which serve as a resting place), with the
attention ``a`` renormalised over them: the attended key ``Σ a_i k_i``, the mean key ``Σ k_i / n``, the share of the
model's attention they hold (the mass), the key that gets most, and a few keys drawn by lot. Layers that are alike wait
for each other and are summed up together; turning into the query's frame is linear, so sums are turned instead of keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.capture.encode import Encoding
from qkscope.capture.pick import Places, Plan, plan_layers
from qkscope.capture.probe import Facts
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space, check_space
from qkscope.capture.tap import Call, Stop
from qkscope.errors import BadInput
from qkscope.heads import Head

_HELD = {"cpu": 2**21, "gpu": 2**28}  # bytes of keys that may wait: what stays in a cache, what fills a GPU


@dataclass(frozen=True)
class Pooled:
    """A batch of queries and what they attended to; one row b per (example, query), in the order of the places.

    Attributes
    ----------
    q, attended, mean, top : Float32 [b, h, d]
        Query, attended key, mean key, and the key with most attention.
    valid : Bool [b, h]
        False where a query sees nothing but the first token(s): the row then holds zeros.
    mass : Float32 [b, h]
        The model's attention on the kept keys together.
    top_column, top_weight : Int, Float32 [b, h]
        Where the key with most attention stands in the padded batch, and its share of the mass.
    top_logit, whole : Float32 [b, h]
        Its logit, and the log-sum-exp of the model's whole row, first token and sinks included.
    drawn : Float32 [b, g, s, d]
        Keys drawn by lot without replacement, once per key head.
    drawn_columns, drawn_mask : Int, Bool [b, g, s]
        Where they stand; a query that sees fewer has masked slots.
    drawn_logits : Float32 [b, h, s]
    kv_of_head, scale, softcap : as in `Capture`.
    """

    heads: tuple[Head, ...]
    q: Float[Tensor, "b h d"]
    attended: Float[Tensor, "b h d"]
    mean: Float[Tensor, "b h d"]
    top: Float[Tensor, "b h d"]
    valid: Bool[Tensor, "b h"]
    mass: Float[Tensor, "b h"]
    top_column: Int[Tensor, "b h"]
    top_weight: Float[Tensor, "b h"]
    top_logit: Float[Tensor, "b h"]
    whole: Float[Tensor, "b h"]
    drawn: Float[Tensor, "b g s d"]
    drawn_columns: Int[Tensor, "b g s"]
    drawn_mask: Bool[Tensor, "b g s"]
    drawn_logits: Float[Tensor, "b h s"]
    kv_of_head: Int[Tensor, "h"]
    scale: Float[Tensor, "h"]
    softcap: Float[Tensor, "h"]
    example: Int[Tensor, "b"]
    row: Int[Tensor, "b"]
    query_positions: Int[Tensor, "b"]
    space: Space = "post_rope"

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.example)

    def to(self, device: torch.device | str) -> Pooled:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


class _Layout(NamedTuple):
    """Rows laid out as [sequence, slot], so that queries of one text meet its keys in one product."""

    query: Int[Tensor, "n m"]
    used: Bool[Tensor, "n m"]
    row: Int[Tensor, "b"]  # where each row stands in the table
    nth: Int[Tensor, "b"]

    def to(self, device: torch.device) -> _Layout:
        return self if self.query.device == device else _Layout(*(x.to(device) for x in self))


class _Seen(NamedTuple):
    """Masks of the chosen queries, and the keys drawn among those they see; `source` keeps its id from being reused."""

    source: Tensor | None
    mask: Float[Tensor, "n x m t"]
    kept: Bool[Tensor, "n x m t"]
    uniform: Float[Tensor, "n x m t"]
    valid: Bool[Tensor, "n x m"]
    all_valid: bool
    resting: Int[Tensor, "n s"]  # columns of the first token(s)
    is_resting: Bool[Tensor, "n s"]
    drawn: Int[Tensor, "n m s"]
    drawn_mask: Bool[Tensor, "n m s"]


class _Kind(NamedTuple):
    """What layers must have in common to be pooled together; `layer` sets one apart from all others."""

    layer: int | None
    mask: int
    causal: bool
    keys: int
    size: int  # query heads to a key head
    scale: float
    softcap: float | None
    sinkless: bool
    device: torch.device
    offset: int | None
    turned: tuple[Any, ...] | None


class _Layer(NamedTuple):
    """What is left of a call until its turn: queries at their places and every key, also as the space has them."""

    kind: _Kind
    call: Call
    plan: Plan
    q: Float[Tensor, "n m h d"]
    k: Float[Tensor, "n g t d"]
    own_q: Float[Tensor, "n m h d"]
    own_k: Float[Tensor, "n g t d"]
    sinks: Float[Tensor, "h"] | None


class Pooler:
    """A visitor of the tap that pools one batch.

    Parameters
    ----------
    facts : what the model is.
    heads : which heads, in the order of the result.
    places : where the queries are; their keys are not read.
    first, length : first column of each sequence that is not padding, and how many there are.
    example : index of each row's example, an address for the lot.
    skip : how many tokens from the first one on are left out.
    draws : keys drawn by lot for each query.
    """

    def __init__(
        self,
        facts: Facts,
        heads: Sequence[Head],
        places: Places,
        first: Int[Tensor, "n"],
        length: Int[Tensor, "n"],
        example: Int[Tensor, "b"],
        space: Space = "post_rope",
        skip: int = 1,
        draws: int = 2,
        seed: int = 0,
    ) -> None:
        self.facts, self.heads, self.space, self.skip, self.draws, self.seed = (
            facts,
            tuple(heads),
            space,
            skip,
            draws,
            seed,
        )
        widths = {facts.layers[head.layer].d_head for head in heads}
        if len(widths) > 1:
            raise BadInput(f"these heads have different widths {sorted(widths)}: pool each width on its own.")
        for layer in sorted({head.layer for head in heads}):
            if space in facts.layers[layer].refusals:
                raise BadInput(f"{space} is not defined here: {facts.layers[layer].refusals[space]}; use post_rope.")
        self.row, self.query, self.example = places.row, places.query, example
        self.first, self.length = first, length
        self.layout = _lay_out(places.row, places.query, len(first))
        self._plans, kv_of_head, groups = plan_layers(facts, self.heads)
        self.deepest = max(self._plans)
        self._seen: dict[tuple[int, bool, int, torch.device], _Seen] = {}
        self._waiting: list[_Layer] = []
        rows, h, d, device = len(places.row), len(heads), widths.pop(), places.row.device
        self.q = torch.zeros(rows, h, d, device=device)
        self.summed = torch.zeros(rows, h, 3, d, device=device)  # attended, mean, top
        self.numbers = torch.zeros(rows, h, 4, device=device)  # mass, weight of the top, its logit, the whole row
        self.valid = torch.zeros(rows, h, dtype=torch.bool, device=device)
        self.top_column = torch.zeros(rows, h, dtype=torch.long, device=device)
        self.drawn = torch.zeros(rows, groups, draws, d, device=device)
        self.drawn_columns = torch.zeros(rows, groups, draws, dtype=torch.long, device=device)
        self.drawn_mask = torch.zeros(rows, groups, draws, dtype=torch.bool, device=device)
        self.drawn_logits = torch.zeros(rows, h, draws, device=device)
        self.kv_of_head = torch.tensor(kv_of_head, device=device)
        self.scale, self.softcap = torch.zeros(h), torch.full((h,), torch.inf)

    def visit(self, call: Call) -> None:
        """Take what is wanted from one attention call; layers that are alike wait for each other."""
        plan = self._plans.get(call.layer)
        if plan is not None:
            with torch.no_grad():
                self._take(call, plan)
                if call.layer == self.deepest:
                    self._pool()
        if call.layer == self.deepest:
            raise Stop

    def _take(self, call: Call, plan: Plan) -> None:
        kind = self._kind(call)
        held = sum(layer.k.nbytes for layer in self._waiting)
        if held and (kind != self._waiting[0].kind or held > _HELD["cpu" if kind.device.type == "cpu" else "gpu"]):
            self._pool()
        query = self.layout.to(call.q.device).query
        rows = torch.arange(len(query), device=query.device)[:, None]
        q, k = call.q[rows, :, query].float(), call.k.float()
        own_q, own_k = q, k
        if self.space == "pre_rope" and call.rotary is not None and kind.offset is not None:
            part = slice(kind.offset, kind.offset + call.rotary.q.shape[-1])
            own_q, own_k = q.clone(), k.clone()
            own_q[..., part] = call.rotary.q[rows, :, query].float()
            own_k[..., part] = call.rotary.k.float()  # broadcasts where latent attention shares one rotated key
        # of the calls of one kind only the first is kept whole: its mask and its rotation are those of all
        first = self._waiting[0].call if self._waiting else call
        self._waiting.append(_Layer(kind, first, plan, q, k, own_q, own_k, call.sinks))

    def _kind(self, call: Call) -> _Kind:
        alone = call.mask is not None and call.mask.shape[1] > 1  # heads of this layer see what others do not
        offset = self.facts.layers[call.layer].offset if call.rotary is not None else None
        turned = (call.rotary.function, id(call.rotary.cos), call.rotary.q.shape[-1]) if call.rotary else None
        return _Kind(
            call.layer if alone else None, id(call.mask), call.causal, call.k.shape[2],
            call.q.shape[1] // call.k.shape[1], call.scale, call.softcap, call.sinks is None, call.q.device,
            offset, turned,
        )  # fmt: skip

    def _pool(self) -> None:
        """Pool the layers that wait, as if they were one with many heads: small products cost more than their work."""
        layers, self._waiting = self._waiting, []
        kind, call = layers[0].kind, layers[0].call
        plan = _side_by_side(layers)
        q, own_q = (_together([getattr(layer, name) for layer in layers], 2) for name in ("q", "own_q"))
        k = _together([layer.k for layer in layers], 1)
        keys = k if layers[0].own_k is layers[0].k else _together([layer.own_k for layer in layers], 1)
        seen, layout = self._look(call), self.layout.to(q.device)
        n, m, heads, _ = q.shape
        groups = k.shape[1]
        grouped = q.transpose(1, 2).reshape(n, groups, kind.size * m, -1)
        logits = call.cap(call.scale * (grouped @ k.mT)).view(n, heads, m, k.shape[2]) + seen.mask
        resting = logits.gather(-1, seen.resting[:, None, None].expand(-1, heads, m, -1))
        logits = logits.masked_fill_(~seen.kept, -torch.inf)
        weights = logits.softmax(-1)
        if not seen.all_valid:
            weights = weights.masked_fill(~seen.valid[..., None], 0.0)
        top_weight, top = weights.max(dim=-1)
        top_logit = logits.gather(-1, top[..., None])[..., 0]
        total = (top_logit - top_weight.log()).masked_fill(~seen.valid, -torch.inf)  # log-sum-exp of the kept keys
        whole = torch.logaddexp(total, resting.masked_fill(~seen.is_resting[:, None, None], -torch.inf).logsumexp(-1))
        if call.sinks is not None:
            sinks = torch.cat([layer.sinks for layer in layers if layer.sinks is not None])
            whole = torch.logaddexp(whole, sinks.float().view(1, -1, 1).expand_as(whole))

        attended = (weights.view(n, groups, -1, k.shape[2]) @ keys).view(n, heads, m, -1)
        if seen.uniform.shape[1] == 1:  # heads that see the same share a mean
            mean = (seen.uniform @ keys).repeat_interleave(kind.size, dim=1)
        else:
            mean = (seen.uniform.view(n, groups, -1, k.shape[2]) @ keys).view_as(attended)
        kv = torch.arange(heads, device=q.device) // kind.size
        lot = seen.drawn[:, None].expand(-1, groups, -1, -1)
        lot_logits = logits.gather(-1, seen.drawn[:, None].expand(-1, heads, -1, -1))

        # from [sequence, slot] to one row per query
        row, nth = layout.row, layout.nth
        top = top[row, :, nth]
        valid = seen.valid.expand(-1, heads, -1)[row, :, nth]
        best = keys[row[:, None], kv, top] * valid[..., None]
        summed = torch.stack([attended[row, :, nth], mean[row, :, nth], best], dim=2)  # b h 3 d
        lots = keys[row[:, None, None], torch.arange(groups, device=q.device)[:, None], lot[row, :, nth]]  # b g s d
        own_q = own_q[row, nth]
        if self.space == "query_frame" and call.rotary is not None and kind.offset is not None:
            place = self.query.to(q.device)
            own_q, summed = call.rotary.turn_back(own_q, summed, row, place, kind.offset)
            _, lots = call.rotary.turn_back(own_q[:, :1], lots, row, place, kind.offset)
        numbers = torch.stack([(total - whole).exp(), top_weight, top_logit, whole], dim=-1)
        self._put(self.q, plan, own_q)
        self._put(self.summed, plan, summed)
        self._put(self.numbers, plan, numbers[row, :, nth])
        self._put(self.valid, plan, valid)
        self._put(self.top_column, plan, top)
        self._put(self.drawn_logits, plan, lot_logits[row, :, nth])
        self._put(self.drawn, plan, lots, groups=True)
        for out, value in ((self.drawn_columns, seen.drawn), (self.drawn_mask, seen.drawn_mask)):
            self._put(out, plan, value[row, nth][:, None].expand(-1, groups, -1), groups=True)
        self.scale[plan.slots] = call.scale
        if call.softcap is not None:
            self.softcap[plan.slots] = float(call.softcap)

    def _put(self, out: Tensor, plan: Plan, value: Tensor, groups: bool = False) -> None:
        chosen, slots = (plan.kv, plan.kv_slots) if groups else (plan.heads, plan.slots)
        if chosen != list(range(value.shape[1])):
            value = value.index_select(1, torch.tensor(chosen, device=value.device))
        first, last = slots[0], slots[-1] + 1
        if slots == list(range(first, last)):
            out[:, first:last] = value
        else:
            out.index_copy_(1, torch.tensor(slots, device=out.device), value.to(out))

    def _look(self, call: Call) -> _Seen:
        key = (id(call.mask), call.causal, call.k.shape[2], call.q.device)
        if key not in self._seen:
            query, used, *_ = self.layout.to(call.q.device)
            n, m = query.shape
            rows = torch.arange(n, device=query.device)
            mask = call.mask_rows(rows.repeat_interleave(m), query.flatten()).unflatten(0, (n, m)).transpose(1, 2)
            columns = torch.arange(mask.shape[-1], device=mask.device)
            end = (self.first.to(columns.device) + self.skip)[:, None]
            kept = (mask > -torch.inf) & (columns >= end)[:, None, None] & used[:, None, :, None]
            uniform = kept / kept.sum(dim=-1, keepdim=True).clamp_min(1)
            valid = kept.any(dim=-1)
            resting = end - 1 - columns[: self.skip]
            seen = kept.any(dim=1)  # where heads differ in what they see, a lot may fall on a key that one does not
            lot = self._lots(n, m, mask.shape[-1]).to(mask.device).masked_fill(~seen, -1.0)
            drawn = lot.topk(min(self.draws, lot.shape[-1]), dim=-1).indices
            if drawn.shape[-1] < self.draws:
                drawn = torch.nn.functional.pad(drawn, (0, self.draws - drawn.shape[-1]))
            nth = torch.arange(self.draws, device=mask.device)
            self._seen[key] = _Seen(
                call.mask, mask, kept, uniform, valid, bool(valid.all()), resting.clamp(0, mask.shape[-1] - 1),
                (resting >= 0) & (resting < mask.shape[-1]), drawn, nth < seen.sum(dim=-1, keepdim=True),
            )  # fmt: skip
        return self._seen[key]

    def _lots(self, n: int, m: int, t: int) -> Float[Tensor, "n m t"]:
        """A number for each query and key, by the example and the place in it: padding and batches do not matter."""
        lots = torch.zeros(n, m, t)
        examples = dict(zip(self.row.tolist(), self.example.tolist(), strict=True))
        firsts, lengths, counts = self.first.tolist(), self.length.tolist(), self.layout.used.sum(dim=1).tolist()
        for row, example in examples.items():
            generator = torch.Generator().manual_seed(((self.seed << 32) + example) % 2**64)
            own = torch.rand(counts[row], lengths[row], generator=generator)
            lots[row, : counts[row], firsts[row] : firsts[row] + lengths[row]] = own
        return lots

    def finish(self) -> Pooled:
        """The batch, after the forward."""
        if not bool(self.q.isfinite().all()):
            raise BadInput("the model's vectors are not finite (NaN or infinite): load it with dtype='float32'.")
        attended, mean, top = self.summed.unbind(2)
        mass, top_weight, top_logit, whole = self.numbers.unbind(-1)
        device = self.q.device
        return Pooled(
            self.heads, self.q, attended, mean, top, self.valid, mass, self.top_column, top_weight, top_logit, whole,
            self.drawn, self.drawn_columns, self.drawn_mask, self.drawn_logits, self.kv_of_head,
            self.scale.to(device), self.softcap.to(device), self.example, self.row, self.query, self.space,
        )  # fmt: skip


def _side_by_side(layers: Sequence[_Layer]) -> Plan:
    """One plan for layers whose heads are numbered through."""
    plan, heads, groups = Plan(), 0, 0
    for layer in layers:
        plan.heads += [heads + head for head in layer.plan.heads]
        plan.kv += [groups + kv for kv in layer.plan.kv]
        plan.slots += layer.plan.slots
        plan.kv_slots += layer.plan.kv_slots
        heads, groups = heads + layer.q.shape[2], groups + layer.k.shape[1]
    return plan


def _together(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _lay_out(row: Int[Tensor, "b"], query: Int[Tensor, "b"], n: int) -> _Layout:
    counts = torch.bincount(row, minlength=n)
    m = max(int(counts.max()), 1)
    nth = (row[:, None] == row[None, :]).tril(-1).sum(dim=1)  # how many rows of the same text came before
    flat = row * m + nth
    table = torch.zeros(n * m, dtype=torch.long, device=row.device).index_copy(0, flat, query)
    used = torch.zeros(n * m, dtype=torch.bool, device=row.device)
    used[flat] = True
    return _Layout(table.view(n, m), used.view(n, m), row, nth)


@torch.no_grad()
def pool(
    scope: Scope,
    inputs: Encoding,
    heads: str | Head | Sequence[str | Head] | None = None,
    *,
    space: Space = "post_rope",
    skip: int = 1,
    draws: int = 2,
    seed: int = 0,
) -> Pooled:
    """Run one batch and pool what every query of it attended to; the forward ends after the deepest layer asked for.

    Parameters
    ----------
    inputs : from `Scope.encode`: one row per example and query.
    heads, space : as in `Scope.capture`.
    skip : tokens from the first one on that are left out of every sum.
    draws : keys drawn by lot for each query.
    """
    check_space(space)
    wanted = scope.parse(heads)
    mask = inputs.inputs["attention_mask"]
    pooler = Pooler(scope.facts, wanted, inputs.places, mask.argmax(dim=1), mask.sum(dim=1),
                    inputs.example, space, skip, draws, seed)  # fmt: skip
    scope.watch(inputs.inputs, pooler.visit, rotary=space != "post_rope")
    return pooler.finish()
