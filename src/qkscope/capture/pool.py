"""What a head looked at, summed up in one vector per query: no key is named beforehand.

For each query and head, over the keys it sees but the first token(s) (which serve as a resting place), with the
attention ``a`` renormalised over them: the attended key ``Σ a_i k_i``, the mean key ``Σ k_i / n``, the share of the
model's attention they hold (the mass), the key that gets most, and a few keys drawn by lot. Sums are taken inside the
attention call, so nothing grows with the length of a text; turning into the query's frame is linear, so sums are turned
instead of keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.capture.encode import Encoded
from qkscope.capture.pick import Places, Plan, plan_layers
from qkscope.capture.probe import Facts
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Space, check_space
from qkscope.capture.tap import Call, Stop, tap
from qkscope.errors import BadInput
from qkscope.heads import Head


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
    kv_of_head, scale, softcap : as in `Captured`.
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
    flat: Int[Tensor, "b"]  # where each row stands in the flattened table


class _Seen(NamedTuple):
    """Masks of the chosen queries, and the keys drawn among those they see; `source` keeps its id from being reused."""

    source: Tensor | None
    mask: Float[Tensor, "n x m t"]
    kept: Bool[Tensor, "n x m t"]
    uniform: Float[Tensor, "n x m t"]
    drawn: Int[Tensor, "n m s"]
    drawn_mask: Bool[Tensor, "n m s"]


class Pooler:
    """A visitor of the tap that pools one batch, layer by layer.

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
        rows, h, d, device = len(places.row), len(heads), widths.pop(), places.row.device
        self.vectors = torch.zeros(4, rows, h, d, device=device)  # q, attended, mean, top
        self.numbers = torch.zeros(4, rows, h, device=device)  # mass, weight of the top, its logit, the whole row
        self.valid = torch.zeros(rows, h, dtype=torch.bool, device=device)
        self.top_column = torch.zeros(rows, h, dtype=torch.long, device=device)
        self.drawn = torch.zeros(rows, groups, draws, d, device=device)
        self.drawn_columns = torch.zeros(rows, groups, draws, dtype=torch.long, device=device)
        self.drawn_mask = torch.zeros(rows, groups, draws, dtype=torch.bool, device=device)
        self.drawn_logits = torch.zeros(rows, h, draws, device=device)
        self.kv_of_head = torch.tensor(kv_of_head, device=device)
        self.scale, self.softcap = torch.zeros(h), torch.full((h,), torch.inf)

    def visit(self, call: Call) -> None:
        """Pool one attention call."""
        plan = self._plans.get(call.layer)
        if plan is not None:
            with torch.no_grad():
                self._pool(call, plan)
        if call.layer == self.deepest:
            raise Stop

    def _pool(self, call: Call, plan: Plan) -> None:
        seen = self._look(call)
        query, flat = self.layout.query.to(call.q.device), self.layout.flat.to(call.q.device)
        n, m = query.shape
        size = call.q.shape[1] // call.k.shape[1]
        rows = torch.arange(n, device=query.device)
        # [n, m, every head, d]: a position is a small tensor, so heads are chosen after positions
        q = call.q[rows[:, None], :, query].float()
        k = call.k.float()
        grouped = q.transpose(1, 2).reshape(n, call.k.shape[1], size * m, -1)
        logits = call.cap(call.scale * (grouped @ k.mT)).view(n, -1, m, k.shape[2])
        whole = (logits + seen.mask).logsumexp(-1)
        if call.sinks is not None:
            whole = torch.logaddexp(whole, call.sinks.float().view(1, -1, 1).expand_as(whole))
        logits = logits.masked_fill(~seen.kept, -torch.inf)
        total = logits.logsumexp(-1)
        valid = total > -torch.inf
        weights = (logits - total.masked_fill(~valid, 0.0)[..., None]).exp()
        top_weight, top = weights.max(dim=-1)

        keys = self._keys(call, k)
        heads_kv = torch.arange(call.q.shape[1], device=k.device) // size
        attended = (weights.view(n, call.k.shape[1], -1, k.shape[2]) @ keys).view(n, -1, m, keys.shape[-1])
        if seen.uniform.shape[1] == 1:  # heads that see the same share a mean
            mean = (seen.uniform @ keys).repeat_interleave(size, dim=1)
        else:
            mean = (seen.uniform.view(n, call.k.shape[1], -1, k.shape[2]) @ keys).view_as(attended)
        best = keys[rows[:, None, None], heads_kv[None, :, None], top] * valid[..., None]
        lots = keys[
            rows[:, None, None, None], torch.arange(keys.shape[1], device=k.device)[:, None, None], seen.drawn[:, None]
        ]
        lot_logits = logits.gather(-1, seen.drawn[:, None].expand(-1, logits.shape[1], -1, -1))

        vectors = torch.stack([self._queries(call, q, rows, query).transpose(1, 2), attended, mean, best])
        vectors = vectors.permute(0, 1, 3, 2, 4).flatten(1, 2)[:, flat]  # 4 b h d
        lots = lots.transpose(1, 2).flatten(0, 1)[flat]  # b g s d
        if self.space == "query_frame" and call.rotary is not None and self.facts.layers[call.layer].offset is not None:
            vectors, lots = self._turn_back(call, vectors, lots)
        numbers = torch.stack([(total - whole).exp(), top_weight, total + top_weight.log(), whole])
        self._put(self.vectors, 2, plan, vectors)
        self._put(self.numbers, 2, plan, numbers.transpose(2, 3).flatten(1, 2)[:, flat])
        self._put(self.valid, 1, plan, valid.transpose(1, 2).flatten(0, 1)[flat])
        self._put(self.top_column, 1, plan, top.transpose(1, 2).flatten(0, 1)[flat])
        self._put(self.drawn_logits, 1, plan, lot_logits.transpose(1, 2).flatten(0, 1)[flat])
        self._put(self.drawn, 1, plan, lots, groups=True)
        for out, value in ((self.drawn_columns, seen.drawn), (self.drawn_mask, seen.drawn_mask)):
            self._put(out, 1, plan, value.flatten(0, 1)[flat][:, None].expand(-1, keys.shape[1], -1), groups=True)
        self.scale[plan.slots] = call.scale
        if call.softcap is not None:
            self.softcap[plan.slots] = float(call.softcap)

    def _put(self, out: Tensor, dim: int, plan: Plan, value: Tensor, groups: bool = False) -> None:
        chosen, slots = (plan.kv, plan.kv_slots) if groups else (plan.heads, plan.slots)
        if chosen != list(range(value.shape[dim])):
            value = value.index_select(dim, torch.tensor(chosen, device=value.device))
        first, last = slots[0], slots[-1] + 1
        if slots == list(range(first, last)):
            out.narrow(dim, first, last - first).copy_(value)
        else:
            out.index_copy_(dim, torch.tensor(slots, device=out.device), value.to(out))

    def _look(self, call: Call) -> _Seen:
        key = (id(call.mask), call.causal, call.k.shape[2], call.q.device)
        if key not in self._seen:
            query, used, _ = (x.to(call.q.device) for x in self.layout)
            n, m = query.shape
            rows = torch.arange(n, device=query.device)
            mask = call.mask_rows(rows.repeat_interleave(m), query.flatten()).unflatten(0, (n, m)).transpose(1, 2)
            columns = torch.arange(mask.shape[-1], device=mask.device)
            resting = columns < (self.first.to(columns.device) + self.skip)[:, None]
            kept = (mask > -torch.inf) & ~resting[:, None, None] & used[:, None, :, None]
            uniform = kept / kept.sum(dim=-1, keepdim=True).clamp_min(1)
            seen = kept.any(dim=1)  # where heads differ in what they see, a lot may fall on a key that one does not
            lot = self._lots(n, m, mask.shape[-1]).to(mask.device).masked_fill(~seen, -1.0)
            drawn = lot.topk(min(self.draws, lot.shape[-1]), dim=-1).indices
            if drawn.shape[-1] < self.draws:
                drawn = torch.nn.functional.pad(drawn, (0, self.draws - drawn.shape[-1]))
            nth = torch.arange(self.draws, device=mask.device)
            self._seen[key] = _Seen(call.mask, mask, kept, uniform, drawn, nth < seen.sum(dim=-1, keepdim=True))
        return self._seen[key]

    def _lots(self, n: int, m: int, t: int) -> Float[Tensor, "n m t"]:
        """A number for each query and key, by the example and the place in it: padding and batches do not matter."""
        lots = torch.zeros(n, m, t)
        examples = dict(zip(self.row.tolist(), self.example.tolist(), strict=True))
        firsts, lengths, counts = self.first.tolist(), self.length.tolist(), self.layout.used.sum(dim=1).tolist()
        for row, example in examples.items():
            generator = torch.Generator().manual_seed((self.seed << 32) + example)
            own = torch.rand(counts[row], lengths[row], generator=generator)
            lots[row, : counts[row], firsts[row] : firsts[row] + lengths[row]] = own
        return lots

    def _keys(self, call: Call, k: Float[Tensor, "n g t d"]) -> Float[Tensor, "n g t d"]:
        """The keys to be summed: those of the dot product, or those before the rotation."""
        layer = self.facts.layers[call.layer]
        if self.space != "pre_rope" or call.rotary is None or layer.offset is None:
            return k
        part = slice(layer.offset, layer.offset + call.rotary.k.shape[-1])
        k = k.clone()
        k[..., part] = call.rotary.k.float()  # broadcasts where latent attention shares one rotated key
        return k

    def _queries(
        self, call: Call, q: Float[Tensor, "n m h d"], rows: Tensor, query: Tensor
    ) -> Float[Tensor, "n m h d"]:
        layer = self.facts.layers[call.layer]
        if self.space != "pre_rope" or call.rotary is None or layer.offset is None:
            return q
        part = slice(layer.offset, layer.offset + call.rotary.q.shape[-1])
        q = q.clone()
        q[..., part] = call.rotary.q[rows[:, None], :, query].float()
        return q

    def _turn_back(self, call: Call, vectors: Tensor, lots: Tensor) -> tuple[Tensor, Tensor]:
        assert call.rotary is not None
        offset = self.facts.layers[call.layer].offset or 0
        row, query = self.row.to(vectors.device), self.query.to(vectors.device)
        q, keys = call.rotary.turn_back(vectors[0], vectors[1:].permute(1, 2, 0, 3), row, query, offset)
        _, lots = call.rotary.turn_back(vectors[0], lots, row, query, offset)
        return torch.cat([q[None], keys.permute(2, 0, 1, 3)]), lots

    def finish(self) -> Pooled:
        """The batch, after the forward."""
        if not bool(self.vectors[0].isfinite().all()):
            raise BadInput("the model's vectors are not finite (NaN or infinite): load it with dtype='float32'.")
        q, attended, mean, top = self.vectors
        mass, top_weight, top_logit, whole = self.numbers
        device = q.device
        return Pooled(
            self.heads, q, attended, mean, top, self.valid, mass, self.top_column, top_weight, top_logit, whole,
            self.drawn, self.drawn_columns, self.drawn_mask, self.drawn_logits, self.kv_of_head,
            self.scale.to(device), self.softcap.to(device), self.example, self.row, self.query, self.space,
        )  # fmt: skip


def _lay_out(row: Int[Tensor, "b"], query: Int[Tensor, "b"], n: int) -> _Layout:
    counts = torch.bincount(row, minlength=n)
    m = max(int(counts.max()), 1)
    nth = (row[:, None] == row[None, :]).tril(-1).sum(dim=1)  # how many rows of the same text came before
    flat = row * m + nth
    table = torch.zeros(n * m, dtype=torch.long, device=row.device).index_copy(0, flat, query)
    used = torch.zeros(n * m, dtype=torch.bool, device=row.device)
    used[flat] = True
    return _Layout(table.view(n, m), used.view(n, m), flat)


@torch.no_grad()
def pool(
    scope: Scope,
    inputs: Encoded,
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
    with tap(scope.model, pooler.visit, scope.facts.layer_of, rotary=space != "post_rope"):
        scope._body(inputs.inputs)
    return pooler.finish()
