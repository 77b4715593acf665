"""Gather some heads of one batch; layers that are alike wait for each other and are done together.

On a GPU a small product costs more than its work: what is done for all layers at once is launched
once. On a CPU what waits must still be in the cache when its turn comes, so few layers do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput
from qkscope.heads import Head
from qkscope.model.capture_types import Capture, Facts, Places
from qkscope.model.spaces import Rotary, Space
from qkscope.model.tap import Call, Stop

#: Bytes that may wait: what stays in a CPU's cache, and what fills a GPU.
_MAY_WAIT = {"cpu": 2**21, "gpu": 2**28}


@dataclass
class Plan:
    """What to take in one layer: query heads and key heads, and the slots they go to."""

    heads: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)
    kv_slots: list[int] = field(default_factory=list)


@lru_cache(maxsize=4096)
def index_on(device: torch.device, numbers: tuple[int, ...]) -> Int[Tensor, " n"]:
    """Move numbers to a device, once: small GPU calls cost more than their work."""
    return torch.tensor(numbers).to(device, non_blocking=True)


@lru_cache(maxsize=64)  # a batch comes every few milliseconds, and a model has a thousand heads
def layout_of(
    shapes: tuple[tuple[int, int], ...],
    heads: tuple[Head, ...],
    own_keys: frozenset[int] = frozenset(),
) -> tuple[dict[int, Plan], tuple[int, ...]]:
    """What to take in each layer, and which key head each head reads.

    Parameters
    ----------
    shapes : tuple of (int, int)
        Query heads and key heads of each layer.
    heads : tuple of Head
        The heads wanted, one slot each.
    own_keys : frozenset of int
        Layers in which every query head has keys of its own.
    """
    plans: dict[int, Plan] = {}
    kv_slots: dict[tuple[int, int], int] = {}
    kv_of_head = []
    for slot, head in enumerate(heads):
        n_heads, n_kv_heads = shapes[head.layer]
        kv = head.index if head.layer in own_keys else head.kv(n_heads // n_kv_heads)
        plan = plans.setdefault(head.layer, Plan())
        kv_slot = kv_slots.get((head.layer, kv))
        if kv_slot is None:
            kv_slot = len(kv_slots)
            kv_slots[head.layer, kv] = kv_slot
            plan.kv.append(kv)
            plan.kv_slots.append(kv_slot)
        plan.heads.append(head.index)
        plan.slots.append(slot)
        kv_of_head.append(kv_slot)
    return plans, tuple(kv_of_head)


class _Layer(NamedTuple):
    """What is kept of a layer's call while it waits: queries at their places, and every key."""

    plan: Plan
    q: Float[Tensor, "n h d"]
    k: Float[Tensor, "b g t d"]
    sinks: Float[Tensor, " h"] | None


class _Kind(NamedTuple):
    """What layers must have in common to be done together."""

    layer: int | None  # its number where heads have masks of their own: it is done alone
    mask: int  # the id of the mask
    causal: bool
    n_keys: int
    group_size: int
    device: torch.device
    scale: float
    softcap: float | None
    has_sinks: bool
    rotary: tuple[Any, int, int] | None  # function, id of its table, width
    turned: bool
    offset: int

    @classmethod
    def of(cls, call: Call, turned: bool, offset: int) -> _Kind:
        """The kind of a layer, from its attention call and where its vectors are rotated."""
        heads_differ = call.mask is not None and call.mask.shape[1] > 1
        rotary = None
        if call.rotary:
            width = call.rotary.q.shape[-1]
            rotary = (call.rotary.function, id(call.rotary.cos), width)
        return cls(
            layer=call.layer if heads_differ else None,
            mask=id(call.mask),
            causal=call.causal,
            n_keys=call.k.shape[2],
            group_size=call.q.shape[1] // call.k.shape[1],
            device=call.q.device,
            scale=call.scale,
            softcap=call.softcap,
            has_sinks=call.sinks is not None,
            rotary=rotary,
            turned=turned,
            offset=offset,
        )


class Picker:
    """A visitor of the tap that gathers queries and keys of some heads at chosen places.

    They go into tensors that are allocated once.

    Parameters
    ----------
    facts : Facts
        What the model is.
    heads : sequence of Head
        Which heads, in the order of the result.
    places : Places
        Where to look; their device is that of the result.
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
        self.facts = facts
        self.heads = tuple(heads)
        self.places = places
        self.space = space
        self.stop = stop
        shapes = tuple((layer.n_heads, layer.n_kv_heads) for layer in facts.layers)
        self.plans, kv_of_head = layout_of(shapes, self.heads, own_keys)
        width = self._width()
        self._check_space(own_keys)
        n_rows, n_keys = places.keys.shape
        n_heads = len(heads)
        n_kv_heads = max(kv_of_head) + 1
        device = places.row.device
        self.kv_of_head = index_on(device, kv_of_head)
        self.scales = [0.0] * n_heads
        self.softcaps = [torch.inf] * n_heads
        self.q = torch.zeros(n_rows, n_heads, width, device=device)
        self.k = torch.zeros(n_rows, n_kv_heads, n_keys, width, device=device)
        self.bias = torch.zeros(n_rows, n_heads, n_keys, device=device)
        self.rest = torch.zeros(n_rows, n_heads, device=device) if rest else None
        self.top = torch.zeros(n_rows, n_heads, device=device) if rest else None
        self._one_query_each = places.row.tolist() == list(range(n_rows))
        self._on_device: dict[torch.device, Places] = {}
        self._waiting: list[_Layer] = []
        # of the calls that wait only the first is kept whole: mask and rotation are those of all
        self._first: Call | None = None
        self._kind: _Kind | None = None

    def _width(self) -> int:
        """Width of the heads' queries, which must be one."""
        widths = sorted({self.facts.layers[layer].d_head for layer in self.plans})
        if len(widths) > 1:
            raise BadInput(
                f"these heads have different widths {widths}: take each width on its own."
            )
        return widths[0]

    def _check_space(self, own_keys: frozenset[int]) -> None:
        """Refuse a space in which a layer's vectors cannot be had."""
        if self.space == "pre_rope" and not own_keys.isdisjoint(self.plans):
            raise BadInput(
                "edited keys are post_rope vectors: "
                "capture their layer in post_rope or query_frame."
            )
        for layer in self.plans:
            refusals = self.facts.layers[layer].refusals
            if self.space in refusals:
                raise BadInput(
                    f"{self.space} is not defined here: {refusals[self.space]}; use post_rope."
                )

    # ------------------------------------------------------------------ layers come and wait

    def visit(self, call: Call) -> None:
        """Take what is wanted from one attention call."""
        plan = self.plans.get(call.layer)
        if plan is not None:
            softcap = torch.inf if call.softcap is None else float(call.softcap)
            for slot in plan.slots:
                self.scales[slot] = call.scale
                self.softcaps[slot] = softcap
            self._take(call, plan)
        if call.layer == max(self.plans):
            self._work_up()
            if self.stop:
                raise Stop

    def _take(self, call: Call, plan: Plan) -> None:
        """Buffer a layer, after processing the buffered ones that are not like it."""
        rotary, offset = self._rotation(call)
        kind = _Kind.of(call, turned=rotary is not None, offset=offset)
        waiting = sum(layer.q.nbytes + layer.k.nbytes for layer in self._waiting)
        may_wait = _MAY_WAIT["cpu" if call.q.device.type == "cpu" else "gpu"]
        if waiting and (kind != self._kind or waiting > may_wait):
            self._work_up()
        if not self._waiting:
            self._kind = kind
            self._first = call
        at = self._places(call.q.device)
        # every head of one place is a small tensor: heads are chosen later
        q = call.q[at.row, :, at.query]
        self._waiting.append(_Layer(plan, q, call.k, call.sinks))
        if self.space == "pre_rope" and rotary is not None:
            all_q, all_k = rotary.unrotated(call.q, call.k, offset)
            q = _choose(all_q[at.row, :, at.query], plan.heads)
            k = _choose_keys(all_k, plan.kv, at)
            self._put_vectors(plan, q, k)

    def _rotation(self, call: Call) -> tuple[Rotary | None, int]:
        """The rotation of a layer and where its dimensions begin; None where nothing rotates."""
        offset = self.facts.layers[call.layer].offset
        if offset is None:
            return None, 0
        return call.rotary, offset

    def _places(self, device: torch.device) -> Places:
        """The places on a layer's device, padded slots pointing at column 0."""
        if device not in self._on_device:
            at = self.places.to(device)
            keys = at.keys.masked_fill(~at.key_mask, 0)
            self._on_device[device] = dataclasses.replace(at, keys=keys)
        return self._on_device[device]

    # ------------------------------------------------------------------ what is taken of them

    def _work_up(self) -> None:
        """Take queries, named keys, masks and the rest of the rows from all buffered layers."""
        layers = self._waiting
        call = self._first
        self._waiting = []
        if not layers or call is None:
            return
        plan, all_q, all_k, sinks = _joined(layers)
        all_q = all_q.float()
        at = self._places(all_q.device)
        named_mask, other_mask = self._masks(call, at)
        if named_mask.shape[1] > 1:
            named_mask = _choose(named_mask, plan.heads)
        bias = named_mask.expand(-1, len(plan.heads), -1)
        _put(self.bias, plan.slots, bias)
        if self.rest is not None and self.top is not None:
            rest, top = self._rest(call, at, all_q, all_k, other_mask)
            if sinks is not None:
                rest = torch.logaddexp(rest, sinks.float().expand_as(rest))
            _put(self.rest, plan.slots, _choose(rest, plan.heads))
            _put(self.top, plan.slots, _choose(top, plan.heads))
        rotary, offset = self._rotation(call)
        if self.space == "pre_rope" and rotary is not None:
            return  # its vectors were put when the layer came
        q = _choose(all_q, plan.heads)
        k = _choose_keys(all_k, plan.kv, at)
        if self.space == "query_frame" and rotary is not None:
            q, k = rotary.turn_back(q, k, at.row, at.query, offset)
        self._put_vectors(plan, q, k)

    def _put_vectors(self, plan: Plan, q: Tensor, k: Tensor) -> None:
        """Write queries and keys into their slots."""
        _put(self.q, plan.slots, q)
        _put(self.k, plan.kv_slots, k)

    def _masks(
        self, call: Call, at: Places
    ) -> tuple[Float[Tensor, "b m k"], Float[Tensor, "b m t"]]:
        """Additive masks of the chosen queries: of the named keys, and of all the others."""
        n_keys = call.k.shape[2]
        rows = call.mask_rows(at.row, at.query)
        keys = at.keys[:, None].expand(-1, rows.shape[1], -1)
        of_named = rows.gather(-1, keys).masked_fill(~at.key_mask[:, None], -torch.inf)
        # padded slots mark one column more, which is cut off
        columns = at.keys.masked_fill(~at.key_mask, n_keys)
        is_named = torch.zeros(len(at.row), n_keys + 1, dtype=torch.bool, device=at.row.device)
        is_named = is_named.scatter(1, columns, True)[:, None, :n_keys]
        return of_named, rows.masked_fill(is_named, -torch.inf)

    def _rest(
        self, call: Call, at: Places, q: Tensor, k: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of what is not named, and its largest logit, the sink left out."""
        n_batch, n_kv_heads = k.shape[:2]
        sums = []
        tops = []
        # at most one more copy of the keys, however many queries an example has
        for start in range(0, len(q), n_batch):
            part = slice(start, start + n_batch)
            row = at.row[part]
            k_of_row = k if self._one_query_each and len(row) == n_batch else k[row]
            grouped = q[part].unflatten(1, (n_kv_heads, -1)) * call.scale
            products = grouped @ k_of_row.float().transpose(-1, -2)
            logits = call.cap(products.flatten(1, 2)) + mask[part]
            sums.append(logits.logsumexp(-1))
            tops.append(logits.amax(-1))
        return _cat(sums, 0), _cat(tops, 0)

    def finish(
        self, example: Int[Tensor, " b"], labels: Mapping[str, Tensor], logits: Tensor | None = None
    ) -> Capture:
        """Make the capture, after the forward."""
        if not bool(self.q.sum(dtype=torch.float64).isfinite()):
            raise BadInput(
                "the model's vectors are not finite (NaN or infinite): "
                "load it with dtype='float32'."
            )
        if logits is not None and bool(logits.isnan().any()):
            raise BadInput(
                "the model's logits are NaN: load it with dtype='float32', or check its weights."
            )
        at = self.places
        self.k.masked_fill_(~at.key_mask[:, None, :, None], 0.0)
        device = at.row.device
        # one transfer for both
        factors = torch.tensor([self.scales, self.softcaps]).to(device, non_blocking=True)
        scale, softcap = factors
        has_softcap = min(self.softcaps) < torch.inf
        return Capture(
            self.heads,
            self.q,
            self.k,
            self.kv_of_head,
            at.key_mask,
            scale,
            softcap if has_softcap else None,
            self.bias,
            self.rest,
            example,
            query_positions=at.query,
            key_positions=at.keys,
            labels=labels,
            logits=logits,
            space=self.space,
            top=self.top,
        )


def _joined(layers: Sequence[_Layer]) -> _Layer:
    """Concatenate the buffered layers into one, renumbering query and key heads."""
    joined = Plan()
    n_heads = 0
    n_kv_heads = 0
    for plan, q, k, _ in layers:
        joined.heads += [n_heads + head for head in plan.heads]
        joined.kv += [n_kv_heads + kv for kv in plan.kv]
        joined.slots += plan.slots
        joined.kv_slots += plan.kv_slots
        n_heads += q.shape[-2]
        n_kv_heads += k.shape[1]
    all_q = _cat([layer.q for layer in layers], -2)
    all_k = _cat([layer.k for layer in layers], 1)
    sinks = [layer.sinks for layer in layers if layer.sinks is not None]
    return _Layer(joined, all_q, all_k, _cat(sinks, 0) if sinks else None)


def _cat(parts: list[Tensor], axis: int) -> Tensor:
    """Concatenate tensors; a single one is not copied."""
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]


def _put(out: Float[Tensor, "b n *r"], slots: list[int], value: Float[Tensor, "b m *r"]) -> None:
    """Write into some slots of a result."""
    first = slots[0]
    end = slots[-1] + 1
    if slots == list(range(first, end)):
        out[:, first:end] = value
    else:
        out.index_copy_(1, index_on(out.device, tuple(slots)), value.to(out))


def _choose(values: Float[Tensor, "b h *r"], heads: list[int]) -> Float[Tensor, "b n *r"]:
    """Select heads; no copy if all are wanted."""
    if heads == list(range(values.shape[1])):
        return values
    return values[:, index_on(values.device, tuple(heads))]


def _choose_keys(
    k: Float[Tensor, "n g t d"], kv: list[int], at: Places
) -> Float[Tensor, "b g k d"]:
    """Select key heads at the named keys of each row, in float32."""
    index = index_on(k.device, tuple(kv))
    return k[at.row[:, None, None], index[:, None], at.keys[:, None]].float()
