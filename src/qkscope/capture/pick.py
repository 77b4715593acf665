"""Queries and keys at chosen positions, with everything needed to rebuild the model's own attention row.

For a row (one query of one example), a head h with key head g, and the named keys i:
``ℓ_i = cap(scale_h · q_h·k_gi) + bias_hi``, ``rest_h = log Σ exp ℓ`` over every key not named (and the sink), so that
``softmax([ℓ_1 … ℓ_K, rest])`` is the model's attention on the named keys, and what is left for the others.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.capture.probe import Facts
from qkscope.capture.spaces import Space
from qkscope.capture.tap import Call, Stop, overlay
from qkscope.errors import BadInput
from qkscope.heads import Head

T = TypeVar("T")


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

    def to(self, device: torch.device | str) -> Places:
        """The same places on another device."""
        return Places(*(part.to(device) for part in (self.row, self.query, self.keys, self.key_mask)))


@dataclass(frozen=True, repr=False)
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

    Examples
    --------
    >>> from qkscope import Example, Scope
    >>> example = Example.mark("hat jam hat", keys=["jam"])
    >>> (batch,) = Scope.load("nano:mixed").capture([example], "L2H3")
    >>> batch.attention().shape
    torch.Size([1, 1, 1])
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

    def __repr__(self) -> str:
        (_, groups, keys, width), names = self.k.shape, ", ".join(map(str, self.heads[:3]))
        heads = names + (f", … {len(self.heads)} heads" if len(self.heads) > 3 else "")
        return f"Capture({len(self)} rows of {heads}; {keys} keys of {groups} key heads, width {width}, {self.space})"

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

    def of_rows(self, rows: Int[Tensor, "n"]) -> Capture:
        """Some of the rows, in this order."""
        names = ("q", "k", "key_mask", "bias", "rest", "example", "query_positions", "key_positions", "logits")
        taken: dict[str, Any] = {name: value[rows] for name in names if (value := getattr(self, name)) is not None}
        labels = {name: value[rows] for name, value in self.labels.items()}
        return dataclasses.replace(self, **taken, labels=labels)


@dataclass
class Plan:
    """What to take in one layer: query heads and key heads, and the slots they go to."""

    heads: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)
    kv_slots: list[int] = field(default_factory=list)


class Gatherer(ABC):
    """A visitor of the tap that gathers some heads of one batch, layer by layer, into tensors allocated once.

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
        space: Space,
        stop: bool = True,
        own_keys: frozenset[int] = frozenset(),
    ) -> None:
        self.facts, self.heads, self.places, self.space, self.stop = facts, tuple(heads), places, space, stop
        layers = sorted({head.layer for head in heads})
        widths = sorted({facts.layers[layer].d_head for layer in layers})
        if len(widths) > 1:
            raise BadInput(f"these heads have different widths {widths}: take each width on its own.")
        if space == "pre_rope" and own_keys & set(layers):
            raise BadInput("edited keys are post_rope vectors: capture their layer in post_rope or query_frame.")
        for layer in layers:
            if space in facts.layers[layer].refusals:
                raise BadInput(f"{space} is not defined here: {facts.layers[layer].refusals[space]}; use post_rope.")
        self.d_head, self.deepest, self.device = widths[0], layers[-1], places.row.device
        self.plans, kv_of_head = plan_layers(facts, heads, own_keys)
        self.groups = max(kv_of_head) + 1
        self.kv_of_head = torch.tensor(kv_of_head, device=self.device)
        self.scale, self.softcap = torch.zeros(len(heads)), torch.full((len(heads),), torch.inf)
        self._indices: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
        self._by_mask: dict[tuple[Any, ...], tuple[Tensor | None, Any]] = {}

    def visit(self, call: Call) -> None:
        """Take what is wanted from one attention call."""
        plan = self.plans.get(call.layer)
        if plan is not None:
            self.scale[plan.slots] = call.scale
            if call.softcap is not None:
                self.softcap[plan.slots] = float(call.softcap)
            self.take(call, plan)
        if self.stop and call.layer == self.deepest:
            raise Stop

    @abstractmethod
    def take(self, call: Call, plan: Plan) -> None:
        """Take what the plan of its layer says from a call."""

    def put(self, out: Float[Tensor, "b n *r"], slots: list[int], value: Float[Tensor, "b m *r"]) -> None:
        """Write into some slots of a result."""
        first, last = slots[0], slots[-1] + 1
        if slots == list(range(first, last)):
            out[:, first:last] = value
        else:
            out.index_copy_(1, self.index(slots, out.device), value.to(out))

    def choose(self, values: Float[Tensor, "b h *r"], heads: list[int]) -> Float[Tensor, "b n *r"]:
        """Some heads of all, without a copy where they are all of them."""
        return values if heads == list(range(values.shape[1])) else values[:, self.index(heads, values.device)]

    def index(self, numbers: list[int], device: torch.device) -> Int[Tensor, "n"]:
        """A list of numbers on a device, brought there once: small GPU calls cost more than their work."""
        key = device, tuple(numbers)
        if key not in self._indices:
            self._indices[key] = torch.tensor(numbers, device=device)
        return self._indices[key]

    def once_per_mask(self, call: Call, make: Callable[[Call], T]) -> T:
        """What depends on the call's mask alone, made once: layers share their masks."""
        key = (id(call.mask), call.causal, call.q.shape[2], call.k.shape[2], call.q.device)
        if key not in self._by_mask:
            self._by_mask[key] = call.mask, make(call)  # the mask is held, so that its id is not used again
        return self._by_mask[key][1]

    def check_finite(self, values: Tensor) -> None:
        """Refuse vectors that overflowed."""
        if not bool(values.isfinite().all()):
            raise BadInput("the model's vectors are not finite (NaN or infinite): load it with dtype='float32'.")


def plan_layers(
    facts: Facts, heads: Sequence[Head], own_keys: frozenset[int] = frozenset()
) -> tuple[dict[int, Plan], list[int]]:
    """What each layer gives to which slots, and which key head (in order of first use) each head reads."""
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
    return plans, kv_of_head


class Picker(Gatherer):
    """Gathers queries and keys at chosen places; with ``rest``, sums up the keys that are not named."""

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
        super().__init__(facts, heads, places, space, stop, own_keys)
        rows, keys = places.keys.shape
        self.q = torch.zeros(rows, len(heads), self.d_head, device=self.device)
        self.k = torch.zeros(rows, self.groups, keys, self.d_head, device=self.device)
        self.bias = torch.zeros(rows, len(heads), keys, device=self.device)
        self.rest = torch.zeros(rows, len(heads), device=self.device) if rest else None
        self._one_each = places.row.tolist() == list(range(rows))
        self._at: dict[torch.device, Places] = {}

    def _places(self, device: torch.device) -> Places:
        """The places on a layer's device, padded slots pointing at column 0."""
        if device not in self._at:
            at = self.places.to(device)
            self._at[device] = dataclasses.replace(at, keys=at.keys.masked_fill(~at.key_mask, 0))
        return self._at[device]

    def _masks(self, call: Call) -> tuple[Float[Tensor, "b m k"], Float[Tensor, "b m t"]]:
        """Additive masks of the chosen queries: of the named keys, and of all the others."""
        at, keys = self._places(call.q.device), call.k.shape[2]
        rows = call.mask_rows(at.row, at.query)
        at_keys = rows.gather(-1, at.keys[:, None].expand(-1, rows.shape[1], -1))
        named = torch.zeros(len(at.row), keys + 1, dtype=torch.bool, device=at.row.device)
        named = named.scatter(1, at.keys.masked_fill(~at.key_mask, keys), True)[:, None, :keys]
        return at_keys.masked_fill(~at.key_mask[:, None], -torch.inf), rows.masked_fill(named, -torch.inf)

    def take(self, call: Call, plan: Plan) -> None:
        """Queries, named keys, their masks, and the rest of the rows."""
        at = self._places(call.q.device)
        at_keys, elsewhere = self.once_per_mask(call, self._masks)
        # every head of one position is a small tensor, so heads are chosen after positions
        every_q = call.q[at.row, :, at.query].float()
        q, k = self.choose(every_q, plan.heads), self._keys(call.k, plan, at)
        bias = at_keys if at_keys.shape[1] == 1 else self.choose(at_keys, plan.heads)
        self.put(self.bias, plan.slots, self._with_set(call, plan, at, q, k, bias.expand(-1, len(plan.heads), -1)))
        if self.rest is not None:
            self.put(self.rest, plan.slots, self.choose(self._rest(call, at, every_q, elsewhere), plan.heads))
        offset = self.facts.layers[call.layer].offset
        if call.rotary is not None and offset is not None:
            if self.space == "query_frame":
                q, k = call.rotary.turn_back(q, k, at.row, at.query, offset)
            elif self.space == "pre_rope":
                every_q, every_k = call.rotary.unrotated(call.q, call.k, offset)
                q, k = self.choose(every_q[at.row, :, at.query], plan.heads), self._keys(every_k, plan, at)
        self.put(self.q, plan.slots, q)
        self.put(self.k, plan.kv_slots, k)

    def _keys(self, k: Float[Tensor, "n g t d"], plan: Plan, at: Places) -> Float[Tensor, "b g k d"]:
        return k[at.row[:, None, None], self.index(plan.kv, k.device)[:, None], at.keys[:, None]].float()

    def _rest(self, call: Call, at: Places, q: Tensor, mask: Tensor) -> Float[Tensor, "b h"]:
        batch, groups, _, _ = call.k.shape
        sums = []
        for start in range(0, len(q), batch):  # at most one more copy of the keys, however many queries an example has
            part = slice(start, start + batch)
            row, query = at.row[part], at.query[part]
            every_k = (call.k if self._one_each and len(row) == batch else call.k[row]).float()
            grouped = q[part].unflatten(1, (groups, -1)) * call.scale
            logits = call.cap((grouped @ every_k.transpose(-1, -2)).flatten(1, 2))
            for head, value in call.set_logits.items():
                logits[:, head] = overlay(logits[:, head], value[row, query])
            sums.append((logits + mask[part]).logsumexp(-1))
        rest = torch.cat(sums) if len(sums) > 1 else sums[0]
        return rest if call.sinks is None else torch.logaddexp(rest, call.sinks.float().expand_as(rest))

    def _with_set(self, call: Call, plan: Plan, at: Places, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        """A logit that was set by hand becomes part of the bias, so that `cap(scale q·k) + bias` is what was set."""
        for head in call.set_logits.keys() & set(plan.heads):
            slot, kv = plan.heads.index(head), plan.kv.index(head // (call.q.shape[1] // call.k.shape[1]))
            logits = call.cap(call.scale * torch.einsum("bd,bkd->bk", q[:, slot], k[:, kv]))
            there = call.set_logits[head][at.row, at.query].gather(-1, at.keys)
            bias = bias.clone()
            bias[:, slot] = overlay(bias[:, slot], bias[:, slot] + there - logits)
        return bias

    def finish(
        self,
        example: Int[Tensor, "b"],
        labels: Mapping[str, Int[Tensor, "b k"]],
        logits: Float[Tensor, "b v"] | None = None,
    ) -> Capture:
        """The batch, after the forward."""
        self.check_finite(self.q)
        if logits is not None and bool(logits.isnan().any()):
            raise BadInput("the model's logits are NaN: load it with dtype='float32', or check its weights.")
        self.k.masked_fill_(~self.places.key_mask[:, None, :, None], 0.0)
        capped = bool(self.softcap.isfinite().any())
        return Capture(
            heads=self.heads,
            q=self.q,
            k=self.k,
            kv_of_head=self.kv_of_head,
            key_mask=self.places.key_mask,
            scale=self.scale.to(self.device),
            softcap=self.softcap.to(self.device) if capped else None,
            bias=self.bias,
            rest=self.rest,
            example=example,
            query_positions=self.places.query,
            key_positions=self.places.keys,
            labels=labels,
            logits=logits,
            space=self.space,
        )
