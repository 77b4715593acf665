"""Queries and keys at chosen positions, with everything needed to rebuild the model's own attention row.

For a row (one query of one example), a head h with key head g, and the named keys i:
``ℓ_i = cap(scale_h · q_h·k_gi) + bias_hi``, ``rest_h = log Σ exp ℓ`` over every key not named (and the sink), so that
``softmax([ℓ_1 … ℓ_K, rest])`` is the model's attention on the named keys, and what is left for the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.capture.gather import Gatherer, Layers
from qkscope.capture.probe import Facts
from qkscope.capture.spaces import Space
from qkscope.capture.tap import Call, overlay
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
        What is added to the logits of the named keys: 0, or -inf where the query cannot see the key (and in padded
        slots); with ALiBi, what the distance adds, 0 at the query's own token.
    rest : Float32 [b, h] or None
        Log-sum-exp of everything not named, the sink included; None when it was not asked for.
    top : Float32 [b, h] or None
        Largest logit of the tokens that are not named, with ``rest``.
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
    top: Float[Tensor, "b h"] | None = None

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
            self.q, self.k, self.scale, self.kv_of_head, self.softcap, self.bias, self.rest, self.key_mask, self.top
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
        names = ("q", "k", "key_mask", "bias", "rest", "top", "example", "query_positions", "key_positions", "logits")
        taken: dict[str, Any] = {name: value[rows] for name in names if (value := getattr(self, name)) is not None}
        labels = {name: value[rows] for name, value in self.labels.items()}
        return dataclasses.replace(self, **taken, labels=labels)


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
        super().__init__(facts, heads, places.row.device, space, stop, own_keys)
        self.places = places
        rows, keys = places.keys.shape
        self.q = torch.zeros(rows, len(heads), self.d_head, device=self.device)
        self.k = torch.zeros(rows, self.groups, keys, self.d_head, device=self.device)
        self.bias = torch.zeros(rows, len(heads), keys, device=self.device)
        others = [torch.zeros(rows, len(heads), device=self.device) if rest else None for _ in range(2)]
        self.rest, self.top = others
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

    def queries(self, device: torch.device) -> tuple[Int[Tensor, "b"], Int[Tensor, "b"]]:
        """One query for each row."""
        at = self._places(device)
        return at.row, at.query

    def work_up(self, layers: Layers) -> None:
        """Queries, named keys, their masks, and the rest of the rows."""
        call, plan, at = layers.call, layers.plan, self._places(layers.q.device)
        at_keys, elsewhere = self.once_per_mask(call, self._masks)
        every_q = layers.q.float()
        q, k = self.choose(every_q, plan.heads), self._keys(layers.k, plan.kv, at)
        bias = at_keys if at_keys.shape[1] == 1 else self.choose(at_keys, plan.heads)
        self.put(self.bias, plan.slots, self._with_set(layers, at, q, k, bias.expand(-1, len(plan.heads), -1)))
        if self.rest is not None and self.top is not None:
            for kept, value in zip((self.rest, self.top), self._rest(layers, at, every_q, elsewhere), strict=True):
                self.put(kept, plan.slots, self.choose(value, plan.heads))
        if layers.rotary is not None and self.space == "query_frame":
            q, k = layers.rotary.turn_back(q, k, at.row, at.query, layers.offset)
        elif layers.own_k is not layers.k:
            q, k = self.choose(layers.own_q, plan.heads), self._keys(layers.own_k, plan.kv, at)
        self.put(self.q, plan.slots, q)
        self.put(self.k, plan.kv_slots, k)

    def _keys(self, k: Float[Tensor, "n g t d"], chosen: list[int], at: Places) -> Float[Tensor, "b g k d"]:
        return k[at.row[:, None, None], self.index(chosen, k.device)[:, None], at.keys[:, None]].float()

    def _rest(self, layers: Layers, at: Places, q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of what is not named, and its largest logit, the sink left out."""
        call, (batch, groups, _, _) = layers.call, layers.k.shape
        sums, tops = [], []
        for start in range(0, len(q), batch):  # at most one more copy of the keys, however many queries an example has
            part = slice(start, start + batch)
            row, query = at.row[part], at.query[part]
            every_k = (layers.k if self._one_each and len(row) == batch else layers.k[row]).float()
            grouped = q[part].unflatten(1, (groups, -1)) * call.scale
            logits = call.cap((grouped @ every_k.transpose(-1, -2)).flatten(1, 2)) + mask[part]
            for head, value in call.set_logits.items():
                logits[:, head] = overlay(logits[:, head], value[row, query])
            sums.append(logits.logsumexp(-1))
            tops.append(logits.amax(-1))
        rest, top = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in (sums, tops))
        return rest if layers.sinks is None else torch.logaddexp(rest, layers.sinks.expand_as(rest)), top

    def _with_set(self, layers: Layers, at: Places, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        """A logit that was set by hand becomes part of the bias, so that `cap(scale q·k) + bias` is what was set."""
        call, plan = layers.call, layers.plan
        for head in call.set_logits.keys() & set(plan.heads):
            slot, kv = plan.heads.index(head), plan.kv.index(head // (call.q.shape[1] // call.k.shape[1]))
            logits = call.cap(call.scale * torch.einsum("bd,bkd->bk", q[:, slot], k[:, kv]))
            there = call.set_logits[head][at.row, at.query].gather(-1, at.keys)
            bias = bias.clone()
            bias[:, slot] = overlay(bias[:, slot], there - logits)
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
        scale, softcap = self.per_head()
        return Capture(
            heads=self.heads,
            q=self.q,
            k=self.k,
            kv_of_head=self.kv_of_head,
            key_mask=self.places.key_mask,
            scale=scale,
            softcap=softcap if min(self.softcaps) < torch.inf else None,
            bias=self.bias,
            rest=self.rest,
            example=example,
            query_positions=self.places.query,
            key_positions=self.places.keys,
            labels=labels,
            logits=logits,
            space=self.space,
            top=self.top,
        )
