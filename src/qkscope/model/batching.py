"""Some heads of one batch, gathered layer by layer: layers that are alike wait for each other and
are done together.

On a GPU a small product costs more than its work: what is done for all layers at once is launched
once. On a CPU what waits must still be in the cache when its turn comes, so few layers do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope import BadInput, Head
from qkscope.model.capture_types import Capture, Facts, Places
from qkscope.model.spaces import Rotary, Space
from qkscope.model.tap import Call, Stop

_HELD = {"cpu": 2**21, "gpu": 2**28}  # bytes that may wait: what stays in a cache, what fills a GPU


@dataclass
class Plan:
    """What to take in one layer: query heads and key heads, and the slots they go to."""

    heads: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)
    kv_slots: list[int] = field(default_factory=list)


@lru_cache(maxsize=4096)
def index_on(device: torch.device, numbers: tuple[int, ...]) -> Int[Tensor, "n"]:
    """Numbers on a device, brought there once: small GPU calls cost more than their work."""
    return torch.tensor(numbers).to(device, non_blocking=True)


@lru_cache(maxsize=64)  # a batch comes every few milliseconds, and a model has a thousand heads
def layout_of(
    shapes: tuple[tuple[int, int], ...],
    heads: tuple[Head, ...],
    own_keys: frozenset[int] = frozenset(),
) -> tuple[dict[int, Plan], tuple[int, ...]]:
    """What each layer (of so many query and key heads) gives to which slots, and which key head
    each head reads.
    """
    plans: dict[int, Plan] = {}
    groups: dict[tuple[int, int], int] = {}
    kv_of_head = []
    for slot, head in enumerate(heads):
        n_heads, n_kv_heads = shapes[head.layer]
        kv = head.index if head.layer in own_keys else head.kv(n_heads // n_kv_heads)
        plan = plans.setdefault(head.layer, Plan())
        if (head.layer, kv) not in groups:
            groups[head.layer, kv] = len(groups)
            plan.kv.append(kv)
            plan.kv_slots.append(groups[head.layer, kv])
        plan.heads.append(head.index)
        plan.slots.append(slot)
        kv_of_head.append(groups[head.layer, kv])
    return plans, tuple(kv_of_head)


class Picker:
    """A visitor of the tap that gathers queries and keys of some heads, at chosen places, into
    tensors allocated once.

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
        widths = sorted({facts.layers[layer].d_head for layer in self.plans})
        if len(widths) > 1:
            raise BadInput(
                f"these heads have different widths {widths}: take each width on its own."
            )
        if space == "pre_rope" and own_keys & set(self.plans):
            raise BadInput(
                "edited keys are post_rope vectors: capture their layer in post_rope or query_frame."
            )
        for layer in self.plans:
            if space in facts.layers[layer].refusals:
                raise BadInput(
                    f"{space} is not defined here: {facts.layers[layer].refusals[space]}; use post_rope."
                )
        self.scales = [0.0] * len(heads)
        self.softcaps = [torch.inf] * len(heads)
        (rows, keys), device = places.keys.shape, places.row.device
        self.kv_of_head = index_on(device, kv_of_head)
        shape = (rows, len(heads))
        self.q = torch.zeros(*shape, widths[0], device=device)
        self.bias = torch.zeros(*shape, keys, device=device)
        self.k = torch.zeros(rows, max(kv_of_head) + 1, keys, widths[0], device=device)
        self.rest, self.top = (
            torch.zeros(shape, device=device) if rest else None for _ in range(2)
        )
        self._one_each = places.row.tolist() == list(range(rows))
        self._at: dict[torch.device, Places] = {}
        self._kind: tuple[Any, ...] = ()  # what the layers that wait have in common
        self._first: Call | None = (
            None  # of these calls only the first is kept whole: mask and rotation are all's
        )
        self._waiting: list[
            tuple[Plan, Tensor, Tensor, Any]
        ] = []  # queries at their places, every key, and sinks

    # ------------------------------------------------------------------ layers come, wait, and are
    # worked up

    def visit(self, call: Call) -> None:
        """Take what is wanted from one attention call."""
        plan = self.plans.get(call.layer)
        if plan is not None:
            for slot in plan.slots:
                self.scales[slot] = call.scale
                self.softcaps[slot] = torch.inf if call.softcap is None else float(call.softcap)
            self._take(call, plan)
        if call.layer == max(self.plans):
            self._work_up()
            if self.stop:
                raise Stop

    def _take(self, call: Call, plan: Plan) -> None:
        """Buffer a layer, after processing the buffered ones that are not like it."""
        rotary, offset = self._rotation(call)
        alone = (
            call.mask is not None and call.mask.shape[1] > 1
        )  # heads of this layer see what others do not
        shape = call.k.shape[2], call.q.shape[1] // call.k.shape[1], call.q.device
        turn = (
            (call.rotary.function, id(call.rotary.cos), call.rotary.q.shape[-1])
            if call.rotary
            else None
        )
        mask = call.layer if alone else None, id(call.mask), call.causal
        kind = (
            *mask,
            *shape,
            call.scale,
            call.softcap,
            call.sinks is None,
            turn,
            rotary is None,
            offset,
        )
        held = sum(q.nbytes + k.nbytes for _, q, k, _ in self._waiting)
        if held and (
            kind != self._kind or held > _HELD["cpu" if call.q.device.type == "cpu" else "gpu"]
        ):
            self._work_up()
        if not self._waiting:
            self._kind = kind
            self._first = call
        at = self._places(call.q.device)
        # every head of one place is a small tensor: heads are chosen later
        self._waiting.append((plan, call.q[at.row, :, at.query], call.k, call.sinks))
        if self.space == "pre_rope" and rotary is not None:
            every_q, every_k = rotary.unrotated(call.q, call.k, offset)
            self._put_vectors(
                plan, _choose(every_q[at.row, :, at.query], plan.heads), _keys(every_k, plan.kv, at)
            )

    def _rotation(self, call: Call) -> tuple[Rotary | None, int]:
        """The rotation of a layer and where its dimensions begin; None where nothing rotates."""
        offset = self.facts.layers[call.layer].offset
        return (None, 0) if offset is None else (call.rotary, offset)

    def _places(self, device: torch.device) -> Places:
        """The places on a layer's device, padded slots pointing at column 0."""
        if device not in self._at:
            at = self.places.to(device)
            self._at[device] = dataclasses.replace(at, keys=at.keys.masked_fill(~at.key_mask, 0))
        return self._at[device]

    # ------------------------------------------------------------------ what is taken of them

    def _work_up(self) -> None:
        """Take queries, named keys, masks and the rest of the rows from all buffered layers at
        once.
        """
        layers = self._waiting
        call = self._first
        self._waiting = []
        if not layers or call is None:
            return
        plan = Plan()
        heads = 0
        groups = 0
        for own, layer_q, layer_k, _ in layers:  # renumbering query and key heads
            plan.heads += [heads + head for head in own.heads]
            plan.kv += [groups + kv for kv in own.kv]
            plan.slots += own.slots
            plan.kv_slots += own.kv_slots
            heads = heads + layer_q.shape[-2]
            groups = groups + layer_k.shape[1]
        _, every_q, every_k, every_sink = map(list, zip(*layers, strict=True))
        all_q = _cat(every_q, -2).float()
        all_k = _cat(every_k, 1)
        sinks = None if call.sinks is None else _cat(every_sink, 0).float()
        at = self._places(all_q.device)
        at_keys, elsewhere = self._masks(call, at)
        q = _choose(all_q, plan.heads)
        k = _keys(all_k, plan.kv, at)
        bias = (at_keys if at_keys.shape[1] == 1 else _choose(at_keys, plan.heads)).expand(
            -1, len(plan.heads), -1
        )
        _put(self.bias, plan.slots, bias)
        if self.rest is not None and self.top is not None:
            rest, top = self._rest(call, at, all_q, all_k, elsewhere)
            rest = rest if sinks is None else torch.logaddexp(rest, sinks.expand_as(rest))
            _put(self.rest, plan.slots, _choose(rest, plan.heads))
            _put(self.top, plan.slots, _choose(top, plan.heads))
        rotary, offset = self._rotation(call)
        if self.space == "query_frame" and rotary is not None:
            q, k = rotary.turn_back(q, k, at.row, at.query, offset)
        if self.space != "pre_rope" or rotary is None:  # else they were put when the layer came
            self._put_vectors(plan, q, k)

    def _put_vectors(self, plan: Plan, q: Tensor, k: Tensor) -> None:
        _put(self.q, plan.slots, q)
        _put(self.k, plan.kv_slots, k)

    def _masks(
        self, call: Call, at: Places
    ) -> tuple[Float[Tensor, "b m k"], Float[Tensor, "b m t"]]:
        """Additive masks of the chosen queries: of the named keys, and of all the others."""
        keys = call.k.shape[2]
        rows = call.mask_rows(at.row, at.query)
        at_keys = rows.gather(-1, at.keys[:, None].expand(-1, rows.shape[1], -1))
        named = torch.zeros(len(at.row), keys + 1, dtype=torch.bool, device=at.row.device)
        named = named.scatter(1, at.keys.masked_fill(~at.key_mask, keys), True)[:, None, :keys]
        return at_keys.masked_fill(~at.key_mask[:, None], -torch.inf), rows.masked_fill(
            named, -torch.inf
        )

    def _rest(
        self, call: Call, at: Places, q: Tensor, k: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of what is not named, and its largest logit, the sink left out."""
        batch, groups = k.shape[:2]
        sums = []
        tops = []
        for start in range(
            0, len(q), batch
        ):  # at most one more copy of the keys, however many queries an example has
            part = slice(start, start + batch)
            row = at.row[part]
            every_k = (k if self._one_each and len(row) == batch else k[row]).float()
            grouped = q[part].unflatten(1, (groups, -1)) * call.scale
            logits = call.cap((grouped @ every_k.transpose(-1, -2)).flatten(1, 2)) + mask[part]
            sums.append(logits.logsumexp(-1))
            tops.append(logits.amax(-1))
        return _cat(sums, 0), _cat(tops, 0)

    def finish(
        self, example: Int[Tensor, "b"], labels: Mapping[str, Tensor], logits: Tensor | None = None
    ) -> Capture:
        """The batch, after the forward."""
        if not bool(self.q.sum(dtype=torch.float64).isfinite()):
            raise BadInput(
                "the model's vectors are not finite (NaN or infinite): load it with dtype='float32'."
            )
        if logits is not None and bool(logits.isnan().any()):
            raise BadInput(
                "the model's logits are NaN: load it with dtype='float32', or check its weights."
            )
        at = self.places
        self.k.masked_fill_(~at.key_mask[:, None, :, None], 0.0)
        scale, cap = torch.tensor([self.scales, self.softcaps]).to(at.row.device, non_blocking=True)
        softcap = cap if min(self.softcaps) < torch.inf else None
        vectors = (
            self.heads,
            self.q,
            self.k,
            self.kv_of_head,
            at.key_mask,
            scale,
            softcap,
            self.bias,
            self.rest,
        )
        return Capture(*vectors, example, at.query, at.keys, labels, logits, self.space, self.top)


def _cat(parts: list[Tensor], axis: int) -> Tensor:
    """Concatenate tensors; a single one is not copied."""
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]


def _put(out: Float[Tensor, "b n *r"], slots: list[int], value: Float[Tensor, "b m *r"]) -> None:
    """Write into some slots of a result."""
    first = slots[0]
    last = slots[-1] + 1
    if slots == list(range(first, last)):
        out[:, first:last] = value
    else:
        out.index_copy_(1, index_on(out.device, tuple(slots)), value.to(out))


def _choose(values: Float[Tensor, "b h *r"], heads: list[int]) -> Float[Tensor, "b n *r"]:
    """Select heads; no copy if all are wanted."""
    return (
        values
        if heads == list(range(values.shape[1]))
        else values[:, index_on(values.device, tuple(heads))]
    )


def _keys(k: Float[Tensor, "n g t d"], chosen: list[int], at: Places) -> Float[Tensor, "b g k d"]:
    return k[
        at.row[:, None, None], index_on(k.device, tuple(chosen))[:, None], at.keys[:, None]
    ].float()
