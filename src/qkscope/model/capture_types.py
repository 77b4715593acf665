"""A model's layers and heads, the places to look at, and the queries and keys captured there.

A capture holds everything needed to rebuild the model's own attention row. For a row (one query of
one example), a head h with key head g, and the named keys i:

    ``ℓ_i = cap(scale_h · q_h·k_gi) + bias_hi``

    ``rest_h = log Σ exp ℓ``  over every key that is not named, and the sink

so that ``softmax([ℓ_1 … ℓ_K, rest])`` is the model's attention on the named keys, and what is left
for the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope.attention import AttentionRows
from qkscope.checking import checked_class
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.model.inputs import PaddingSide
from qkscope.model.spaces import Space
from qkscope.model.tap import Anatomy

#: The fields of a `Capture` that hold one entry per row.
_PER_ROW = (
    "q", "k", "key_mask", "bias", "rest", "top", "logits",
    "example", "query_positions", "key_positions",
)  # fmt: skip


class LayerFacts(NamedTuple):
    """One layer's attention.

    A layer without attention has no heads; `instead` names the module that it has in its place.
    `offset` is where its rotated dimensions begin, None where nothing rotates. `refusals` says why
    vectors of a space cannot be had, for each space that is refused.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    offset: int | None
    refusals: dict[Space, str]
    instead: str = ""


class Facts(NamedTuple):
    """Facts about a model's attention, as the probe found them.

    Attributes
    ----------
    layers : tuple of LayerFacts
        Each layer's attention.
    layer_of : dict
        ``id(attention module) -> layer``.
    takes_positions : bool
        Whether the positions 0, 1, 2, ... may be passed.
    first_position : int
        What the model itself calls the position of a first token: 0 in nearly every family.
    sides : tuple of str
        Where prompts can be padded without a change to their vectors, the best side first.
    anatomy : Anatomy
        What the tap holds on to.
    """

    layers: tuple[LayerFacts, ...]
    layer_of: dict[int, int]
    takes_positions: bool
    first_position: int
    sides: tuple[PaddingSide, ...]
    anatomy: Anatomy


@checked_class
class Shape:
    """Layers, heads and widths of a model, as the probe read them off live calls (`facts`)."""

    name: str
    facts: Facts

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.facts.layers)

    def _uniform(self, what: str) -> int:
        """A number that is the same in every layer with attention."""
        with_heads = [layer for layer in self.facts.layers if layer.n_heads]
        values = sorted({getattr(layer, what) for layer in with_heads})
        if len(values) > 1:
            raise BadInput(
                f"{what} differs between layers ({values}): "
                "read it per layer from scope.facts.layers."
            )
        return values[0]

    @property
    def n_heads(self) -> int:
        """Query heads per layer."""
        return self._uniform("n_heads")

    @property
    def n_kv_heads(self) -> int:
        """Key heads per layer."""
        return self._uniform("n_kv_heads")

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.n_heads // self.n_kv_heads

    @property
    def d_head(self) -> int:
        """Width of a query."""
        return self._uniform("d_head")

    def heads(self) -> list[Head]:
        """Every head of the model.

        Examples
        --------
        >>> from qkscope import Scope
        >>> Scope.load("nano:mixed").heads()[:2]
        [Head L0H0, Head L0H1]
        """
        counts = tuple(layer.n_heads for layer in self.facts.layers)
        return list(_heads(counts))

    def check(self, head: Head | str) -> Head:
        """Parse a head; one that the model does not have is refused with the range.

        Parameters
        ----------
        head : Head or str
            Like ``L2H3``.

        Examples
        --------
        >>> from qkscope import Scope
        >>> Scope.load("nano:mixed").check("L9H0")
        Traceback (most recent call last):
        qkscope.errors.BadInput: L9H0 does not exist: nano:mixed has layers L0 to L2.
        """
        head = Head.parse(head)
        if head.layer >= self.n_layers:
            last = self.n_layers - 1
            raise BadInput(f"{head} does not exist: {self.name} has layers L0 to L{last}.")
        layer = self.facts.layers[head.layer]
        if head.index < layer.n_heads:
            return head
        has = f"heads H0 to H{layer.n_heads - 1}"
        if layer.instead:
            others = [f"L{i}" for i, other in enumerate(self.facts.layers) if other.n_heads]
            has = f"a {layer.instead} instead of attention; heads are in {', '.join(others)}"
        raise BadInput(f"{head} does not exist: layer {head.layer} of {self.name} has {has}.")

    def parse(self, heads: str | Head | Sequence[str | Head] | None) -> list[Head]:
        """Parse heads by name; each must exist.

        Parameters
        ----------
        heads : str, Head, or sequence of them
            ``"L2H3,L1H0"``, or heads; None or ``"all"`` is every head.

        Examples
        --------
        >>> from qkscope import Scope
        >>> Scope.load("nano:mixed").parse("L2H3, L1H0")
        [Head L2H3, Head L1H0]
        """
        if heads is None or heads == "all":
            return self.heads()
        return [self.check(head) for head in parse_heads(heads)]


@lru_cache(maxsize=64)  # needed for every batch, and a model has a thousand heads
def _heads(counts: tuple[int, ...]) -> tuple[Head, ...]:
    """All heads of layers with so many heads each."""
    return tuple(Head(layer, i) for layer, count in enumerate(counts) for i in range(count))


@dataclass(frozen=True)
class Places:
    """Where to look in a padded batch: one row per (example, query).

    `keys` holds columns of the batch; slots where `key_mask` is False are padding and may hold
    anything.
    """

    row: Int[Tensor, " b"]
    query: Int[Tensor, " b"]
    keys: Int[Tensor, "b k"]
    key_mask: Bool[Tensor, "b k"]

    @classmethod
    def everywhere(
        cls, row: Int[Tensor, " b"], query: Int[Tensor, " b"], mask: Int[Tensor, "n t"]
    ) -> Places:
        """Take each token of a query's sequence as a key: slot j is column j of the batch."""
        columns = torch.arange(mask.shape[1], device=mask.device)
        keys = columns.expand(len(row), -1)
        return cls(row, query, keys, key_mask=mask.bool()[row])

    def to(self, device: torch.device | str) -> Places:
        """Copy to another device."""
        parts = (self.row, self.query, self.keys, self.key_mask)
        return Places(*(part.to(device) for part in parts))


@dataclass(frozen=True, repr=False)
class Capture:
    """A batch of captured queries and keys; one row b per (example, query).

    Attributes
    ----------
    heads : tuple of Head
        The h axis.
    q : Float32 [b, h, d]
    k : Float32 [b, g, k, d]
        One entry per distinct (layer, key head), in order of first use by `heads`; 0 in padded
        slots.
    kv_of_head : Int [h]
        Which g a head reads.
    key_mask : Bool [b, k]
        False in padded key slots.
    scale : Float [h]
        Factor of the dot product, as the model's attention call passed it.
    softcap : Float [h] or None
        Soft-cap of the logits (inf in a head without one); None when no head has one.
    bias : Float [b, h, k]
        What is added to the logits of the named keys: 0, or -inf where the query cannot see the key
        (and in padded slots); with ALiBi, what the distance adds, 0 at the query's own token.
    rest : Float32 [b, h] or None
        Log-sum-exp of everything not named, the sink included; None when it was not wanted.
    top : Float32 [b, h] or None
        Largest logit of the tokens that are not named, with ``rest``.
    example : Int [b]
        Index of the row's example in the list that was given.
    query_positions, key_positions : Int [b], [b, k]
        Columns of the padded batch.
    labels : mapping of str to Int [b, k]
        Label of each key per contrast.
    logits : Float32 [b, v] or None
        Next-token logits at the query; None when they were not wanted.
    space : str
        `post_rope`, `pre_rope` or `query_frame`. In `pre_rope` ``scale · q·k`` is not the model's
        logit.

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
    kv_of_head: Int[Tensor, " h"]
    key_mask: Bool[Tensor, "b k"]
    scale: Float[Tensor, " h"]
    softcap: Float[Tensor, " h"] | None
    bias: Float[Tensor, "b h k"]
    rest: Float[Tensor, "b h"] | None
    example: Int[Tensor, " b"]
    query_positions: Int[Tensor, " b"]
    key_positions: Int[Tensor, "b k"]
    labels: Mapping[str, Int[Tensor, "b k"]] = field(default_factory=dict)
    logits: Float[Tensor, "b v"] | None = None
    space: Space = "post_rope"
    top: Float[Tensor, "b h"] | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.example)

    def __repr__(self) -> str:
        _, n_kv_heads, n_keys, width = self.k.shape
        heads = ", ".join(str(head) for head in self.heads[:3])
        if len(self.heads) > 3:
            heads += f", … {len(self.heads)} heads"
        keys = f"{n_keys} keys of {n_kv_heads} key heads"
        return f"Capture({len(self)} rows of {heads}; {keys}, width {width}, {self.space})"

    def rows(self) -> AttentionRows:
        """The model's own attention rows, to be looked at or edited (not in `pre_rope`)."""
        if self.space == "pre_rope":
            raise BadInput(
                "pre_rope vectors do not give the model's logits: capture post_rope or query_frame."
            )
        names = [part.name for part in dataclasses.fields(AttentionRows)]
        return AttentionRows(**{name: getattr(self, name) for name in names})

    def attention(self) -> Float[Tensor, "b h k"]:
        """The model's attention on the named keys, a part of the whole row: it sums to under 1."""
        if self.rest is None:
            raise BadInput("attention needs the whole row: capture with rest=True.")
        return self.rows().attention()

    def of_rows(self, rows: Int[Tensor, " n"]) -> Capture:
        """A capture of some of the rows, in this order."""
        changes: dict[str, Any] = {}
        for name in _PER_ROW:
            value = getattr(self, name)
            if value is not None:
                changes[name] = value[rows]
        labels = {name: value[rows] for name, value in self.labels.items()}
        return dataclasses.replace(self, labels=labels, **changes)
