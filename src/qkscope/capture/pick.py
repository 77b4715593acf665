"""Queries and keys at chosen positions, with everything needed to rebuild the model's own attention row.

For a row (one query of one example), a head h with key head g, and the named keys i:
``ℓ_i = cap(scale_h · q_h·k_gi) + bias_hi``, ``rest_h = log Σ exp ℓ`` over every key not named (and the sink), so that
``softmax([ℓ_1 … ℓ_K, rest])`` is the model's attention on the named keys, and what is left for the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.capture.probe import Facts
from qkscope.capture.spaces import Space
from qkscope.capture.tap import Call, Stop
from qkscope.errors import BadInput
from qkscope.heads import Head


@dataclass(frozen=True)
class Places:
    """Where to look in a padded batch: one row per (example, query).

    `keys` holds columns of the batch; slots where `key_mask` is False are padding and may hold anything.
    """

    row: Int[Tensor, "b"]
    query: Int[Tensor, "b"]
    keys: Int[Tensor, "b k"]
    key_mask: Bool[Tensor, "b k"]

    @classmethod
    def everywhere(cls, row: Int[Tensor, "b"], query: Int[Tensor, "b"], mask: Int[Tensor, "n t"]) -> Places:
        """These queries, each with every token of its own sequence as a key: slot j is column j of the batch."""
        columns = torch.arange(mask.shape[1], device=mask.device).expand(len(row), -1)
        return cls(row, query, columns, mask.bool()[row])


@dataclass(frozen=True)
class Capture:
    """A batch of captured queries and keys; one row b per (example, query).

    Attributes
    ----------
    heads : tuple of Head
        The h axis.
    q : Float32 [b, h, d]
    k : Float32 [b, g, k, d]
        One entry per distinct (layer, key head), in order of first use by `heads`; 0 in padded slots.
    kv_of_head : Int [h]
        Which g a head reads.
    key_mask : Bool [b, k]
        False in padded key slots.
    scale : Float [h]
        Factor of the dot product, as the model's attention call passed it.
    softcap : Float [h] or None
        Soft-cap of the logits (inf in a head without one); None when no head has one.
    bias : Float [b, h, k]
        Additive mask of the named keys: 0, or -inf where the query cannot see the key (and in padded slots).
    rest : Float32 [b, h] or None
        Log-sum-exp of everything not named, the sink included; None when it was not asked for.
    example : Int [b]
        Index of the row's example in the list that was given.
    query_positions, key_positions : Int [b], [b, k]
        Columns of the padded batch.
    labels : mapping of str to Int [b, k]
        Label of each key per contrast.
    logits : Float32 [b, v] or None
        Next-token logits at the query; None when they were not asked for.
    space : str
        `post_rope`, `pre_rope` or `query_frame`. In `pre_rope` ``scale · q·k`` is not the model's logit.
    """

    heads: tuple[Head, ...]
    q: Float[Tensor, "b h d"]
    k: Float[Tensor, "b g k d"]
    kv_of_head: Int[Tensor, "h"]
    key_mask: Bool[Tensor, "b k"]
    scale: Float[Tensor, "h"]
    softcap: Float[Tensor, "h"] | None
    bias: Float[Tensor, "b h k"]
    rest: Float[Tensor, "b h"] | None
    example: Int[Tensor, "b"]
    query_positions: Int[Tensor, "b"]
    key_positions: Int[Tensor, "b k"]
    labels: Mapping[str, Int[Tensor, "b k"]] = field(default_factory=dict)
    logits: Float[Tensor, "b v"] | None = None
    space: Space = "post_rope"

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.example)

    def rows(self) -> AttentionRows:
        """The model's own attention rows, to be looked at or edited (not in `pre_rope`)."""
        if self.space == "pre_rope":
            raise BadInput("pre_rope vectors do not give the model's logits: capture post_rope or query_frame.")
        return AttentionRows(
            self.q, self.k, self.scale, self.kv_of_head, self.softcap, self.bias, self.rest, self.key_mask
        )

    def attention_logits(self) -> Float[Tensor, "b h k"]:
        """``cap(scale · q·k) + bias`` of the named keys: what goes into the softmax (not in `pre_rope`)."""
        return self.rows().logits()

    def attention(self) -> Float[Tensor, "b h k"]:
        """The model's attention on the named keys: the softmax is over the whole row, so it sums to less than 1."""
        if self.rest is None:
            raise BadInput("attention needs the whole row: capture with rest=True.")
        # one softmax keeps a digit that rows lose on their way through a log-sum-exp, which edits need
        return torch.softmax(torch.cat([self.attention_logits(), self.rest[..., None]], dim=-1), dim=-1)[..., :-1]

    def to(self, device: torch.device | str) -> Capture:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        labels = {name: value.to(device) for name, value in self.labels.items()}
        return dataclasses.replace(self, **moved, labels=labels)


@dataclass
class Plan:
    """What to take in one layer: query heads and key heads, and the slots they go to."""

    heads: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)
    kv_slots: list[int] = field(default_factory=list)


@dataclass
class _Local:
    """What the layers on one device need, made once per batch: small GPU calls cost more than their work."""

    row: Int[Tensor, "b"]
    query: Int[Tensor, "b"]
    keys: Int[Tensor, "b k"]
    key_mask: Bool[Tensor, "b k"]
    index: dict[tuple[int, ...], Tensor]
    masks: dict[tuple[int, bool, int, int], _Masks] = field(default_factory=dict)


class _Masks(NamedTuple):
    """Additive masks of the chosen queries; layers share them, and `source` keeps their key from being used again."""

    source: Tensor | None
    at_keys: Float[Tensor, "b m k"]
    elsewhere: Float[Tensor, "b m t"]


def plan_layers(
    facts: Facts, heads: Sequence[Head], own_keys: frozenset[int] = frozenset()
) -> tuple[dict[int, Plan], list[int], int]:
    """What each layer gives to which slots, which key head each head reads, and how many key heads there are."""
    plans: dict[int, Plan] = {}
    groups: dict[tuple[int, int], int] = {}
    kv_of_head = []
    for slot, head in enumerate(heads):
        shape = facts.layers[head.layer]
        kv = head.index if head.layer in own_keys else head.kv(shape.n_heads // shape.n_kv_heads)
        plan = plans.setdefault(head.layer, Plan())
        if (head.layer, kv) not in groups:
            groups[head.layer, kv] = len(groups)
            plan.kv.append(kv)
            plan.kv_slots.append(groups[head.layer, kv])
        plan.heads.append(head.index)
        plan.slots.append(slot)
        kv_of_head.append(groups[head.layer, kv])
    return plans, kv_of_head, len(groups)


class Picker:
    """A visitor of the tap that gathers one batch, layer by layer, into tensors allocated once.

    Parameters
    ----------
    facts : Facts
        What the model is.
    heads : sequence of Head
        Which heads, in the order of the result.
    places : Places
        Where to look.
    space : str
        Which vectors to keep.
    rest : bool
        Whether to sum up the keys that are not named.
    stop : bool
        Whether to end the forward after the deepest layer asked for.
    own_keys : collection of int
        Layers in which every query head has keys of its own (they were edited).
    """

    def __init__(
        self,
        facts: Facts,
        heads: Sequence[Head],
        places: Places,
        space: Space = "post_rope",
        rest: bool = True,
        stop: bool = True,
        own_keys: frozenset[int] = frozenset(),
    ) -> None:
        self.facts, self.heads, self.places, self.space, self.stop = facts, tuple(heads), places, space, stop
        self.d_head = self._one_width()
        if space == "pre_rope" and own_keys & {head.layer for head in heads}:
            raise BadInput("edited keys are post_rope vectors: capture their layer in post_rope or query_frame.")
        for layer in sorted({head.layer for head in heads}):
            if space in facts.layers[layer].refusals:
                raise BadInput(f"{space} is not defined here: {facts.layers[layer].refusals[space]}; use post_rope.")
        self.plans, kv_of_head, groups = plan_layers(facts, self.heads, own_keys)
        self.deepest = max(self.plans)
        self._on: dict[torch.device, _Local] = {}
        row = places.row.tolist()
        self._one_each = row == list(range(len(row)))
        rows, keys = places.keys.shape
        device = places.keys.device
        self.q = torch.zeros(rows, len(heads), self.d_head, device=device)
        self.k = torch.zeros(rows, groups, keys, self.d_head, device=device)
        self.bias = torch.zeros(rows, len(heads), keys, device=device)
        self.rest = torch.zeros(rows, len(heads), device=device) if rest else None
        self.scale = torch.zeros(len(heads))
        self.softcap = torch.full((len(heads),), torch.inf)
        self.kv_of_head = torch.tensor(kv_of_head, device=device)

    def _one_width(self) -> int:
        widths = {self.facts.layers[head.layer].d_head for head in self.heads}
        if len(widths) > 1:
            raise BadInput(f"these heads have different widths {sorted(widths)}: capture each width on its own.")
        return widths.pop()

    def _local(self, device: torch.device) -> _Local:
        if device not in self._on:
            row, query, keys, key_mask = (value.to(device) for value in vars(self.places).values())
            lists = {
                tuple(own) for plan in self.plans.values() for own in (plan.heads, plan.slots, plan.kv, plan.kv_slots)
            }
            together = torch.tensor([number for own in lists for number in own]).to(device)
            index = dict(zip(lists, together.split([len(own) for own in lists]), strict=True))
            self._on[device] = _Local(row, query, keys.masked_fill(~key_mask, 0), key_mask, index)
        return self._on[device]

    def _masks(self, call: Call, at: _Local) -> _Masks:
        queries, keys = call.q.shape[2], call.k.shape[2]
        key = (id(call.mask), call.causal, queries, keys)
        if key not in at.masks:
            rows = call.mask_rows(at.row, at.query)
            at_keys = rows.gather(-1, at.keys[:, None].expand(-1, rows.shape[1], -1))
            named = torch.zeros(len(at.row), keys + 1, dtype=torch.bool, device=at.row.device)
            named = named.scatter(1, at.keys.masked_fill(~at.key_mask, keys), True)[:, None, :keys]
            elsewhere = rows.masked_fill(named, -torch.inf)
            at.masks[key] = _Masks(call.mask, at_keys.masked_fill(~at.key_mask[:, None], -torch.inf), elsewhere)
        return at.masks[key]

    def visit(self, call: Call) -> None:
        """Take what is wanted from one attention call."""
        plan = self.plans.get(call.layer)
        if plan is not None:
            with torch.no_grad():
                self._take(call, plan)
        if self.stop and call.layer == self.deepest:
            raise Stop

    def _take(self, call: Call, plan: Plan) -> None:
        at = self._local(call.q.device)
        masks = self._masks(call, at)
        # every head of one position is a small tensor, so heads are chosen after positions
        every_q = call.q[at.row, :, at.query].float()
        q = _choose(every_q, plan.heads, at)
        k = call.k[at.row[:, None, None], at.index[tuple(plan.kv)][:, None], at.keys[:, None]].float()
        bias = masks.at_keys if masks.at_keys.shape[1] == 1 else _choose(masks.at_keys, plan.heads, at)
        bias = self._logits_set(call, plan, at, q, k, bias.expand(-1, len(plan.heads), -1))
        self._put(self.bias, plan.slots, bias)
        if self.rest is not None:
            self._put(self.rest, plan.slots, _choose(self._rest(call, at, every_q, masks.elsewhere), plan.heads, at))
        q, k = self._into_space(call, plan, at, q, k)
        self._put(self.q, plan.slots, q)
        self._put(self.k, plan.kv_slots, k)
        self.scale[plan.slots] = call.scale
        if call.softcap is not None:
            self.softcap[plan.slots] = float(call.softcap)

    def _put(self, out: Tensor, slots: list[int], value: Tensor) -> None:
        first, last = slots[0], slots[-1] + 1
        if slots == list(range(first, last)):
            out[:, first:last] = value
        else:
            out.index_copy_(1, self._local(out.device).index[tuple(slots)], value.to(out))

    def _rest(self, call: Call, at: _Local, q: Tensor, mask: Tensor) -> Float[Tensor, "b h"]:
        batch, groups, _, _ = call.k.shape
        sums = []
        for start in range(0, len(q), batch):  # at most one more copy of the keys, however many queries an example has
            part = slice(start, start + batch)
            row = at.row[part]
            every_k = (call.k if self._one_each and len(row) == batch else call.k[row]).float()
            grouped = q[part].unflatten(1, (groups, -1)) * call.scale
            logits = call.cap((grouped @ every_k.transpose(-1, -2)).flatten(1, 2))
            for head, rows, query, key, value in call.logits_set:
                hit = (rows == row[:, None]) & (query == at.query[part][:, None])
                at_row, entry = hit.nonzero(as_tuple=True)
                logits[at_row, head, key[entry]] = value[entry].to(logits)
            sums.append((logits + mask[part]).logsumexp(-1))
        rest = torch.cat(sums) if len(sums) > 1 else sums[0]
        return rest if call.sinks is None else torch.logaddexp(rest, call.sinks.float().expand_as(rest))

    def _logits_set(self, call: Call, plan: Plan, at: _Local, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        """A logit that was set by hand becomes part of the bias, so that `cap(scale q·k) + bias` is what was set."""
        if not any(head in plan.heads for head, *_ in call.logits_set):
            return bias
        bias = bias.clone()
        for head, rows, query, key, value in call.logits_set:
            if head not in plan.heads:
                continue
            slot = plan.heads.index(head)
            kv = plan.kv.index(head // (call.q.shape[1] // call.k.shape[1]))
            logits = call.cap(call.scale * torch.einsum("bd,bkd->bk", q[:, slot], k[:, kv]))
            hit = (rows == at.row[:, None, None]) & (query == at.query[:, None, None]) & (key == at.keys[..., None])
            at_row, at_key, entry = hit.nonzero(as_tuple=True)
            bias[at_row, slot, at_key] += value[entry].to(bias) - logits[at_row, at_key]
        return bias

    def _into_space(self, call: Call, plan: Plan, at: _Local, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.facts.layers[call.layer]
        rotary = call.rotary
        if self.space == "post_rope" or rotary is None or layer.offset is None:
            return q, k
        if self.space == "query_frame":
            return rotary.turn_back(q, k, at.row, at.query, layer.offset)
        part = slice(layer.offset, layer.offset + rotary.q.shape[-1])
        # latent attention shares one rotated key among all heads
        kv = at.index[tuple(plan.kv)].clamp_max(rotary.k.shape[1] - 1)
        q, k = q.clone(), k.clone()
        q[..., part] = _choose(rotary.q[at.row, :, at.query], plan.heads, at).float()
        k[..., part] = rotary.k[at.row[:, None, None], kv[:, None], at.keys[:, None]].float()
        return q, k

    def finish(
        self,
        example: Int[Tensor, "b"],
        labels: Mapping[str, Int[Tensor, "b k"]],
        logits: Float[Tensor, "b v"] | None = None,
    ) -> Capture:
        """The batch, after the forward."""
        if not bool(self.q.isfinite().all()):
            raise BadInput("the model's vectors are not finite (NaN or infinite): load it with dtype='float32'.")
        if logits is not None and bool(logits.isnan().any()):
            raise BadInput("the model's logits are NaN: load it with dtype='float32', or check its weights.")
        self.k.masked_fill_(~self.places.key_mask[:, None, :, None], 0.0)
        device = self.q.device
        capped = bool(self.softcap.isfinite().any())
        return Capture(
            heads=self.heads,
            q=self.q,
            k=self.k,
            kv_of_head=self.kv_of_head,
            key_mask=self.places.key_mask,
            scale=self.scale.to(device),
            softcap=self.softcap.to(device) if capped else None,
            bias=self.bias,
            rest=self.rest,
            example=example,
            query_positions=self.places.query,
            key_positions=self.places.keys,
            labels=labels,
            logits=logits,
            space=self.space,
        )


def _choose(values: Float[Tensor, "b h *r"], heads: list[int], at: _Local) -> Float[Tensor, "b n *r"]:
    """Some heads of all, without a copy where they are all of them."""
    return values if heads == list(range(values.shape[1])) else values[:, at.index[tuple(heads)]]
