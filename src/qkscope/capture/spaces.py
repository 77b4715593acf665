"""The three spaces a query and a key can be read in, from what the modelling file's own rotary function was given.

``post_rope``: ``R_m q``, ``R_n k``, as the dot product sees them. ``pre_rope``: ``q``, ``k``. ``query_frame``: both
turned back by the query's position, ``R_m⁻¹ R_m q = q`` and ``R_m⁻¹ R_n k = R_{n-m} k``, so the logits stay and the
absolute position goes. The turn back is the family's own rotary function with ``(cos, -sin)`` of the query's position:
partial and interleaved rotations need no knowledge of the family. ``cos² + sin² = a²`` shows the attention scaling that
YaRN hides in them; dividing by ``a`` leaves a pure rotation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, wraps
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Space = Literal["post_rope", "pre_rope", "query_frame"]
SPACES: tuple[Space, ...] = get_args(Space)

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary types whose frequencies depend on the length of the prompt: one rotation per offset does not exist there."""


@dataclass
class Rotary:
    """What a rotary function was given in one layer, heads before positions: ``[b, h, s, r]``; r may be under d."""

    function: Callable[..., tuple[Tensor, Tensor]]
    q: Float[Tensor, "b h s r"]
    k: Float[Tensor, "b g s r"]
    cos: Tensor
    sin: Tensor
    q_rotated: Float[Tensor, "b h s r"]
    k_rotated: Float[Tensor, "b g s r"]

    def slim(self) -> Rotary:
        """The rotation alone, without the vectors that it was given."""
        names = ("q", "k", "q_rotated", "k_rotated")
        return replace(self, **{name: getattr(self, name)[:1, :1, :1].clone() for name in names})

    def unrotated(
        self, q: Float[Tensor, "b h s d"], k: Float[Tensor, "b g t d"], offset: int
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b g t d"]]:
        """All queries and keys as they were before the rotation of the dimensions from `offset` on."""
        part = slice(offset, offset + self.q.shape[-1])
        q, k = (x.to(torch.float32, copy=True) for x in (q, k))
        q[..., part], k[..., part] = self.q, self.k  # which broadcasts where latent attention shares one rotated key
        return q, k

    def turn_back(
        self,
        q: Float[Tensor, "n h d"],
        k: Float[Tensor, "n g m d"],
        batch: Int[Tensor, "n"],
        position: Int[Tensor, "n"],
        offset: int = 0,
    ) -> tuple[Float[Tensor, "n h d"], Float[Tensor, "n g m d"]]:
        """Rotate n queries, and the m keys each of them looks at, back by the query's own position.

        Parameters
        ----------
        q, k : Tensor
            Rotated vectors; only ``r`` dimensions from `offset` on were rotated, the others pass.
        batch, position : Tensor
            Row of the batch and column of each query.
        offset : int
            Where the rotated dimensions begin.
        """
        # cos and sin are [b or 1, s, c], the same for every head; one row per query, one position
        row = batch if self.cos.shape[0] > 1 else torch.zeros_like(batch)
        cos, sin = (table[row, position][:, None].float() for table in (self.cos, self.sin))
        scaling = (cos.square() + sin.square()).sqrt()
        width = self.q.shape[-1]
        part = slice(offset, offset + width)
        turned = self.function(
            q[..., None, part].contiguous(), k[..., part].contiguous(), cos / scaling, -sin / scaling
        )
        if width == q.shape[-1]:
            return turned[0].squeeze(-2), turned[1]
        q, k = q.clone(), k.clone()
        q[..., part], k[..., part] = turned[0].squeeze(-2), turned[1]
        return q, k

    def turn(
        self,
        x: Float[Tensor, "n h m d"],
        batch: Int[Tensor, "n"],
        positions: Int[Tensor, "n m"],
        offset: int = 0,
        back: bool = False,
    ) -> Float[Tensor, "n h m d"]:
        """Rotate vectors as this layer rotates what stands at m places of n rows of the batch; h of them at each.

        Parameters
        ----------
        x : Tensor
            Vectors before the rotation.
        batch, positions : Tensor
            Rows of the batch and columns in it.
        offset : int
            Where the rotated dimensions begin.
        back : bool
            Apply the transpose instead: what a direction among rotated vectors is among those before.
        """
        # a layer of a model split over devices has its tables beside it
        row, positions = (index.to(self.cos.device) for index in (batch, positions))
        row = (row if self.cos.shape[0] > 1 else torch.zeros_like(row))[:, None]
        cos, sin = (table[row, positions].to(x) for table in (self.cos, self.sin))
        part = slice(offset, offset + self.q.shape[-1])
        turned = self.function(x[..., part].contiguous(), x[:, :1, :, part].contiguous(), cos, -sin if back else sin)[0]
        if turned.shape[-1] == x.shape[-1]:
            return turned
        x = x.clone()
        x[..., part] = turned
        return x


@dataclass(frozen=True)
class Turned:
    """What a rotary function of queries or keys alone was given, positions before heads: ``[b, s, h, r]``."""

    function: Callable[..., Tensor]
    x: Float[Tensor, "b s h r"]
    cos: Tensor
    sin: Tensor
    rotated: Float[Tensor, "b s h r"]


def heard_rotary(heard: list[Rotary | Turned], q: Float[Tensor, "b h s d"]) -> Rotary | None:
    """The rotation of one attention call, from what was heard since the call before; which of two is q is seen."""
    if not heard or isinstance(heard[-1], Rotary):
        return heard[-1] if heard else None  # type: ignore[return-value]
    one, other = (turned for turned in (*heard, *heard)[-2:] if isinstance(turned, Turned))
    seen = one.rotated.transpose(1, 2).to(q)
    if seen.shape[:3] != q.shape[:3] or not torch.equal(seen, q[..., : seen.shape[-1]]):
        one, other = other, one

    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = [one.function(x.transpose(1, 2), cos=cos, sin=sin).transpose(1, 2) for x in (q, k)]
        return turned[0], turned[1]

    q_given, k_given, *rotated = (x.transpose(1, 2) for x in (one.x, other.x, one.rotated, other.rotated))
    return Rotary(both, q_given, k_given, one.cos, one.sin, *rotated)


@cache  # reading signatures takes as long as a layer
def _rotary_functions(file: ModuleType) -> tuple[str, ...]:
    """Names of a file's rotary functions."""
    found = []
    for name, value in vars(file).items():
        if name.startswith("apply_rotary") and callable(value):
            try:
                given = inspect.signature(value).parameters
            except (TypeError, ValueError):
                continue
            if all(word in given for word in ("q", "k", "cos", "sin")) or list(given)[1:] == ["sin", "cos"]:
                found.append(name)
    return tuple(found)


@contextmanager
def record_rotary(files: Iterable[ModuleType]) -> Iterator[list[Rotary | Turned]]:
    """Listen to the rotary functions of some modelling files for the duration of a ``with`` block.

    What each was given is added to a list; the attention call of the same layer takes the last of it (`heard_rotary`).
    """
    heard: list[Rotary | Turned] = []
    replaced = [(file, name, getattr(file, name)) for file in files for name in _rotary_functions(file)]
    try:
        for file, name, function in replaced:
            setattr(file, name, _listen(function, heard))
        yield heard
    finally:
        for file, name, function in replaced:
            setattr(file, name, function)


def _listen(function: Callable[..., Any], heard: list[Rotary | Turned]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        rotated = function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if "k" in given and given["k"] is None:  # what chooses keys turns its queries by themselves
            return rotated
        if "q" not in given:
            heard.append(Turned(function, next(iter(given.values())), given["cos"], given["sin"], rotated))
            return rotated
        # unsqueeze_dim 2 means positions before heads: turn to heads before positions
        heads_first = given.get("unsqueeze_dim", 1) == 1
        vectors = (given["q"], given["k"], *rotated)
        q, k, *turned = vectors if heads_first else (x.transpose(1, 2) for x in vectors)
        heard.append(Rotary(function, q, k, given["cos"], given["sin"], *turned))
        return rotated

    return rotate


def rotary_settings(config: Any) -> Iterator[dict[str, Any]]:
    """What a config says about its rotations, at any depth (some families have one per kind of layer)."""
    todo = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("rope_type"), str):
                yield part
            todo.extend(part.values())


def rotary_types(config: Any) -> set[str]:
    """The rotary types a config names."""
    return {settings["rope_type"] for settings in rotary_settings(config)}


@contextmanager
def rows_rotate_alone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Rotations that depend on the length go by each row's own length, for the duration of a ``with`` block.

    transformers takes them from the longest row of the batch, and dynamic RoPE keeps those of the longest batch before
    it; a prompt in a batch would then not be the prompt alone.
    """
    try:
        with other_forwards(modules, _row_by_row):
            yield
    finally:
        for module in modules:
            _forget_lengths(module)


@contextmanager
def other_forwards(
    modules: Sequence[nn.Module], wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Modules run what ``wrap`` makes of their forward, for the duration of a ``with`` block."""
    before = [vars(module).get("forward") for module in modules]  # a model split over devices has its own there
    try:
        for module in modules:
            module.forward = wraps(module.forward)(wrap(module, module.forward))
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own


def depends_on_length(module: nn.Module) -> bool:
    """Whether a module's rotation does."""
    kinds = getattr(module, "rope_type", None)
    named = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(word in kind for kind in named if isinstance(kind, str) for word in LENGTH_DEPENDENT)


def _row_by_row(module: nn.Module, rotate: Callable[..., Any]) -> Callable[..., Any]:
    def rotate_rows(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        _forget_lengths(module)
        if position_ids.ndim != 2 or len(position_ids) == 1:
            return rotate(x, position_ids, *args, **kwargs)
        tables: list[Tensor] = []
        ends = position_ids.amax(-1)
        for end in ends.unique():  # from short to long: what dynamic RoPE keeps is then outgrown each time
            own = ends == end
            for i, table in enumerate(rotate(x[own], position_ids[own], *args, **kwargs)):
                if i == len(tables):
                    tables.append(table.new_empty((len(ends), *table.shape[1:])))
                tables[i][own] = table
        return tuple(tables)

    return rotate_rows


def _forget_lengths(module: nn.Module) -> None:
    """Put a rotation back to where it was before its first prompt."""
    ending = "original_inv_freq"
    for name in [*module._buffers, *vars(module)]:
        if name.endswith(ending):
            buffer = name.removesuffix(ending) + "inv_freq"
            module.register_buffer(buffer, getattr(module, name).to(getattr(module, buffer).device), persistent=False)
        elif name.endswith("max_seq_len_cached"):
            setattr(module, name, module.original_max_seq_len)
