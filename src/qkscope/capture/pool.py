"""What a head looked at, summed up in one vector per query: no key is named beforehand.

For each query and head, over the keys it sees but the first token(s) (which serve as a resting place), with the
attention ``a`` renormalised over them: the attended key ``Σ a_i k_i``, the mean key ``Σ k_i / n``, the share of the
model's attention they hold (the mass), the key that gets most, and a few keys drawn by lot. Layers that are alike wait
for each other and are summed up together; turning into the query's frame is linear, so sums are turned instead of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.capture.encode import Encoding
from qkscope.capture.gather import Gatherer, Layers
from qkscope.capture.probe import Facts
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space
from qkscope.capture.tap import Call
from qkscope.draws import derived_seed
from qkscope.heads import Head


@dataclass(frozen=True)
class Pooling:
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


class _Layout(NamedTuple):
    """Rows laid out as [sequence, slot], so that queries of one text meet its keys in one product."""

    query: Int[Tensor, "n m"]
    used: Bool[Tensor, "n m"]
    row: Int[Tensor, "b"]  # where each row stands in the table
    nth: Int[Tensor, "b"]

    @classmethod
    def of(cls, row: Int[Tensor, "b"], query: Int[Tensor, "b"], n: int) -> _Layout:
        m = max(int(torch.bincount(row, minlength=n).max()), 1)
        nth = (row[:, None] == row[None, :]).tril(-1).sum(dim=1)  # how many rows of the same text came before
        table = torch.zeros((n, m), dtype=torch.long, device=row.device)
        table[row, nth] = query
        used = torch.zeros((n, m), dtype=torch.bool, device=row.device)
        used[row, nth] = True
        return cls(table, used, row, nth)

    def to(self, device: torch.device) -> _Layout:
        return self if self.query.device == device else _Layout(*(x.to(device) for x in self))


class _Sight(NamedTuple):
    """What the chosen queries see: masks, the keys kept and drawn by lot among them, the columns left out."""

    mask: Float[Tensor, "n x m t"]
    kept: Bool[Tensor, "n x m t"]
    uniform: Float[Tensor, "n x m t"]
    valid: Bool[Tensor, "n x m"]
    all_valid: bool
    resting: Int[Tensor, "n s"]  # columns of the first token(s)
    is_resting: Bool[Tensor, "n s"]
    drawn: Int[Tensor, "n m s"]
    drawn_mask: Bool[Tensor, "n m s"]


class Pooler(Gatherer):
    """Pools one batch; layers that are alike wait for each other.

    Parameters
    ----------
    facts, heads, space
        As of any `Gatherer`.
    batch : Encoding
        Where the queries are, and whose; their keys are not read.
    skip : int
        How many tokens from the first one on are left out.
    draws, seed : int
        Keys drawn by lot for each query, and the seed of the lot.
    """

    def __init__(
        self, facts: Facts, heads: Sequence[Head], batch: Encoding, space: Space, skip: int, draws: int, seed: int
    ) -> None:
        super().__init__(facts, heads, batch.places.row.device, space)
        self.places, self.example, self.skip, self.draws, self.seed = batch.places, batch.example, skip, draws, seed
        mask = batch.inputs["attention_mask"]
        self.first, self.length = mask.argmax(dim=1), mask.sum(dim=1)
        self.layout = _Layout.of(self.places.row, self.places.query, len(mask))
        self.found: dict[str, Tensor] = {}

    def queries(self, device: torch.device) -> tuple[Int[Tensor, "n m"], Int[Tensor, "n m"]]:
        """The table of queries."""
        query = self.layout.to(device).query
        return torch.arange(len(query), device=device)[:, None], query

    def work_up(self, layers: Layers) -> None:
        """Pool layers that are alike."""
        call, plan = layers.call, layers.plan
        q, k = layers.q.float(), layers.k.float()
        own_q, keys = (q, k) if layers.own_k is layers.k else (layers.own_q, layers.own_k)
        seen, layout = self.once_per_mask(call, self._sight), self.layout.to(q.device)
        n, m, heads, _ = q.shape
        groups, size = k.shape[1], heads // k.shape[1]
        grouped = q.transpose(1, 2).reshape(n, groups, size * m, -1)
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
        if layers.sinks is not None:
            whole = torch.logaddexp(whole, layers.sinks.view(1, -1, 1).expand_as(whole))

        attended = (weights.view(n, groups, -1, k.shape[2]) @ keys).view(n, heads, m, -1)
        if seen.uniform.shape[1] == 1:  # heads that see the same share a mean
            mean = (seen.uniform @ keys).repeat_interleave(size, dim=1)
        else:
            mean = (seen.uniform.view(n, groups, -1, k.shape[2]) @ keys).view_as(attended)

        # from [sequence, slot] to one row per query
        row, nth = layout.row, layout.nth
        top = top[row, :, nth]
        valid = seen.valid.expand(-1, heads, -1)[row, :, nth]
        best = keys[row[:, None], torch.arange(heads, device=q.device) // size, top] * valid[..., None]
        summed = torch.stack([attended[row, :, nth], mean[row, :, nth], best], dim=2)  # b h 3 d
        lot, lot_mask = (value[row, nth][:, None].expand(-1, groups, -1) for value in (seen.drawn, seen.drawn_mask))
        lots = keys[row[:, None, None], torch.arange(groups, device=q.device)[:, None], lot]  # b g s d
        lot_logits = logits.gather(-1, seen.drawn[:, None].expand(-1, heads, -1, -1))[row, :, nth]
        own_q = own_q[row, nth]
        if self.space == "query_frame" and layers.rotary is not None:
            place = self.places.query.to(q.device)
            own_q, summed = layers.rotary.turn_back(own_q, summed, row, place, layers.offset)
            _, lots = layers.rotary.turn_back(own_q[:, :1], lots, row, place, layers.offset)
        numbers = torch.stack([(total - whole).exp(), top_weight, top_logit, whole], dim=-1)[row, :, nth]
        by_head = {"q": own_q, "summed": summed, "numbers": numbers, "valid": valid, "top_column": top}
        self._keep(plan.heads, plan.slots, len(self.heads), **by_head, drawn_logits=lot_logits)
        self._keep(plan.kv, plan.kv_slots, self.groups, drawn=lots, drawn_columns=lot, drawn_mask=lot_mask)

    def _keep(self, chosen: list[int], slots: list[int], width: int, **values: Tensor) -> None:
        for name, value in values.items():
            if name not in self.found:
                shape = (len(value), width, *value.shape[2:])
                self.found[name] = torch.zeros(shape, dtype=value.dtype, device=self.device)
            self.put(self.found[name], slots, self.choose(value, chosen))

    def _sight(self, call: Call) -> _Sight:
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
        is_resting = (resting >= 0) & (resting < mask.shape[-1])
        seen = kept.any(dim=1)  # where heads differ in what they see, a lot may fall on a key that one does not
        lot = self._lots(n, m, mask.shape[-1]).to(mask.device).masked_fill(~seen, -1.0)
        drawn = lot.topk(min(self.draws, lot.shape[-1]), dim=-1).indices
        drawn = torch.nn.functional.pad(drawn, (0, self.draws - drawn.shape[-1]))
        drawn_mask = torch.arange(self.draws, device=mask.device) < seen.sum(dim=-1, keepdim=True)
        resting = resting.clamp(0, mask.shape[-1] - 1)
        return _Sight(mask, kept, uniform, valid, bool(valid.all()), resting, is_resting, drawn, drawn_mask)

    def _lots(self, n: int, m: int, t: int) -> Float[Tensor, "n m t"]:
        """A number for each query and key, by the example and the place in it: padding and batches do not matter."""
        lots = torch.zeros(n, m, t)
        examples = dict(zip(self.places.row.tolist(), self.example.tolist(), strict=True))
        firsts, lengths, counts = self.first.tolist(), self.length.tolist(), self.layout.used.sum(dim=1).tolist()
        for row, example in examples.items():
            generator = torch.Generator().manual_seed(derived_seed(self.seed, "drawn keys", example))
            own = torch.rand(counts[row], lengths[row], generator=generator)
            lots[row, : counts[row], firsts[row] : firsts[row] + lengths[row]] = own
        return lots

    def finish(self) -> Pooling:
        """The batch, after the forward."""
        found = dict(self.found)
        self.check_finite(found["q"])
        scale, softcap = self.per_head()
        found |= zip(("attended", "mean", "top"), found.pop("summed").unbind(2), strict=True)
        found |= zip(("mass", "top_weight", "top_logit", "whole"), found.pop("numbers").unbind(-1), strict=True)
        return Pooling(
            heads=self.heads,
            kv_of_head=self.kv_of_head,
            scale=scale,
            softcap=softcap,
            example=self.example,
            row=self.places.row,
            query_positions=self.places.query,
            space=self.space,
            **found,
        )


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
) -> Pooling:
    """Run one batch and pool what every query of it attended to; the forward ends after the deepest layer asked for.

    Parameters
    ----------
    inputs : from `Scope.encode`: one row per example and query.
    heads, space : as in `Scope.capture`.
    skip : tokens from the first one on that are left out of every sum.
    draws, seed : keys drawn by lot for each query, and the seed of the lot.
    """
    pooler = Pooler(scope.facts, scope.parse(heads), inputs, space, skip, draws, seed)
    scope.watch(inputs.inputs, pooler.visit, rotary=space != "post_rope")
    return pooler.finish()
