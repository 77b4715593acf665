"""The three spaces a query and a key can be read in, from what the modelling file's own rotary
function was given.

``post_rope``: ``R_m q``, ``R_n k``, as the dot product sees them. ``pre_rope``: ``q``, ``k``.
``query_frame``: both turned back by the query's position, ``R_m⁻¹ R_m q = q`` and ``R_m⁻¹ R_n k =
R_{n-m} k``, so the logits stay and the absolute position goes. The turn back is the family's own
rotary function with ``(cos, -sin)`` of the query's position: partial and interleaved rotations need
no knowledge of the family. ``cos² + sin² = a²`` shows the attention scaling that YaRN hides in
them; dividing by ``a`` leaves a pure rotation.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Space = Literal["post_rope", "pre_rope", "query_frame"]
SPACES: tuple[Space, ...] = get_args(Space)
_CLASS = object()  # an attribute that the class has, not the object

#: Rotary types whose frequencies depend on the length of the prompt: one rotation per offset does not exist there.
LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass
class Rotary:
    """What a rotary function was given in one layer, heads before positions: ``[b, h, s, r]``; r
    may be under d.
    """

    function: Callable[..., tuple[Tensor, Tensor | None]]
    q: Float[Tensor, "b h s r"]
    k: Float[Tensor, "b g s r"]
    cos: Tensor
    sin: Tensor
    q_rotated: Float[Tensor, "b h s r"]
    k_rotated: Float[Tensor, "b g s r"]
    alone: bool = False  # it was given one of the two, which stands here as both

    def slim(self) -> Rotary:
        """The rotation alone, without the vectors that it was given."""
        empty = self.q.new_empty(1, 1, 1, self.q.shape[-1])
        return replace(self, q=empty, k=empty, q_rotated=empty, k_rotated=empty)

    @cached_property
    def unit(self) -> Rotary:
        """The rotation without its attention scaling."""
        scaling = (self.cos.float().square() + self.sin.float().square()).sqrt()
        return replace(self, cos=self.cos / scaling, sin=self.sin / scaling)

    def unrotated(
        self, q: Float[Tensor, "b h s d"], k: Float[Tensor, "b g t d"], offset: int
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b g t d"]]:
        """All queries and keys as they were before the rotation of the dimensions from `offset` on."""
        part = slice(offset, offset + self.q.shape[-1])
        q = q.to(torch.float32, copy=True)
        k = k.to(torch.float32, copy=True)
        q[..., part], k[..., part] = (
            self.q,
            self.k,
        )  # which broadcasts where latent attention shares one rotated key
        return q, k

    def turn_back(
        self,
        q: Float[Tensor, "n h d"],
        k: Float[Tensor, "n g m d"],
        batch: Tensor,
        position: Tensor,
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
        there = self.unit.at(batch, position[:, None])
        return there.turn(q[:, :, None], offset, back=True)[:, :, 0], there.turn(
            k, offset, back=True
        )

    def at(self, batch: Int[Tensor, " n"], positions: Int[Tensor, "n m"]) -> Rotary:
        """The rotation of what stands at m places of n rows of the batch."""
        # a layer of a model split over devices has its tables beside it; they are [b or 1, s, c],
        # for every head
        row = batch.to(self.cos.device)
        positions = positions.to(self.cos.device)
        row = (row if self.cos.shape[0] > 1 else torch.zeros_like(row))[:, None]
        return replace(
            self, cos=self.cos[row, positions].float(), sin=self.sin[row, positions].float()
        )

    def turn(
        self, x: Float[Tensor, "n h m d"], offset: int = 0, back: bool = False
    ) -> Float[Tensor, "n h m d"]:
        """Rotate vectors as this layer rotates what stands where they do (`at`); h of them at each
        place.

        Parameters
        ----------
        x : Tensor
            Vectors before the rotation.
        offset : int
            Where the rotated dimensions begin.
        back : bool
            Apply the transpose instead: what a direction among rotated vectors is among those
            before.
        """
        cos = self.cos.to(x)
        sin = self.sin.to(x)
        part = x[..., offset : offset + self.q.shape[-1]].contiguous()
        turned, _ = self.function(part, part[:, :1], cos, -sin if back else sin)  # the family's own
        rest = x[..., offset + part.shape[-1] :]
        return (
            turned if part.shape == x.shape else torch.cat([x[..., :offset], turned, rest], dim=-1)
        )


def heard_rotary(heard: deque[Rotary], q: Float[Tensor, "b h s d"]) -> Rotary | None:
    """The rotation of one attention call, from what was heard since the call before; which of two
    is q is seen.
    """
    if not heard or not heard[-1].alone:
        return heard[-1] if heard else None
    first, other = (*heard, *heard)[-2:]
    seen = first.q_rotated.to(q)
    if seen.shape[:3] != q.shape[:3] or not torch.equal(seen, q[..., : seen.shape[-1]]):
        first, other = other, first
    return replace(first, k=other.q, k_rotated=other.q_rotated)


@cache  # reading signatures takes as long as a layer
def _rotary_functions(file: ModuleType) -> tuple[str, ...]:
    """Names of a file's rotary functions."""
    functions = {
        name: value for name, value in vars(file).items() if name.startswith("apply_rotary")
    }
    given = {
        name: list(inspect.signature(value).parameters)
        for name, value in functions.items()
        if callable(value)
    }
    rotate = {"q", "k", "cos", "sin"}
    return tuple(
        name for name, names in given.items() if rotate <= set(names) or names[1:] == ["sin", "cos"]
    )


@contextmanager
def swapped(*values: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes, ``(object, name, value)``, for the duration of a ``with`` block."""
    before = [(thing, name, vars(thing).get(name, _CLASS)) for thing, name, _ in values]
    try:
        for thing, name, value in values:
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in before:
            delattr(thing, name) if value is _CLASS else setattr(thing, name, value)


@contextmanager
def record_rotary(files: Iterable[ModuleType]) -> Iterator[deque[Rotary]]:
    """Listen to the rotary functions of some modelling files for the duration of a ``with`` block.

    What each was given is added to a list; the attention call of the same layer takes the last of
    it (`heard_rotary`).
    """
    heard: deque[Rotary] = deque(maxlen=2)  # of layers that are not shown too
    functions = [(file, name) for file in files for name in _rotary_functions(file)]
    with swapped(*((file, name, _listen(getattr(file, name), heard)) for file, name in functions)):
        yield heard


def _listen(function: Callable[..., Any], heard: deque[Rotary]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    defaults = {name: of.default for name, of in parameters.items() if of.default is not of.empty}

    def turn_one(q: Tensor, _k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, None]:
        return function(q.transpose(1, 2), cos=cos, sin=sin).transpose(1, 2), None

    @wraps(function)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        rotated = function(*args, **kwargs)
        given = {
            **dict(zip(parameters, args, strict=False)),
            **kwargs,
        }  # in their order, defaults behind
        given |= {name: value for name, value in defaults.items() if name not in given}
        if "k" in given and given["k"] is None:  # what chooses keys turns its queries by themselves
            return rotated
        alone = "q" not in given
        x = next(iter(given.values()))
        vectors = (x, x, rotated, rotated) if alone else (x, given["k"], *rotated)
        # positions before heads, or unsqueeze_dim 2, which means the same: turn to heads before
        # positions
        if alone or given.get("unsqueeze_dim", 1) != 1:
            vectors = tuple(x.transpose(1, 2) for x in vectors)
        q, k, q_rotated, k_rotated = vectors
        turn = turn_one if alone else function
        heard.append(Rotary(turn, q, k, given["cos"], given["sin"], q_rotated, k_rotated, alone))
        return rotated

    return rotate


def rotary_settings(config: Any) -> Iterator[dict[str, Any]]:
    """What a config says about its rotations, at any depth (some families have one per kind of
    layer).
    """
    todo = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("rope_type"), str):
                yield part
            todo.extend(part.values())


@contextmanager
def rows_rotate_alone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Rotations that depend on the length go by each row's own length, for the duration of a
    ``with`` block.

    transformers takes them from the longest row of the batch, and dynamic RoPE keeps those of the
    longest batch before it; a prompt in a batch would then not be the prompt alone.
    """
    try:
        with other_forwards(modules, _row_by_row):
            yield
    finally:
        for module in modules:
            _forget_lengths(module)


def other_forwards(
    modules: Sequence[nn.Module],
    wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[None]:
    """Let modules run what ``wrap`` makes of their forward, for the duration of a ``with`` block."""
    return swapped(
        *((part, "forward", wraps(part.forward)(wrap(part, part.forward))) for part in modules)
    )


def depends_on_length(module: nn.Module) -> bool:
    """Whether a module's rotation does."""
    kinds = getattr(module, "rope_type", None)
    named = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(word in kind for kind in named if isinstance(kind, str) for word in LENGTH_DEPENDENT)


def _row_by_row(module: nn.Module, rotate: Callable[..., Any]) -> Callable[..., Any]:
    def rotate_rows(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        tables = []
        for row in position_ids.split(1) if position_ids.ndim == 2 else [position_ids]:
            _forget_lengths(module)
            tables.append(
                rotate(x[:1], row, *args, **kwargs)
            )  # which only asks x for its device and type
        return (
            tuple(torch.cat(rows) for rows in zip(*tables, strict=True))
            if len(tables) > 1
            else tables[0]
        )

    return rotate_rows


def _forget_lengths(module: nn.Module) -> None:
    """Reset a rotation to its state before the first prompt."""
    ending = "original_inv_freq"
    for name in [*module._buffers, *vars(module)]:
        if name.endswith(ending):
            buffer = name.removesuffix(ending) + "inv_freq"
            module.register_buffer(
                buffer, getattr(module, name).to(getattr(module, buffer).device), persistent=False
            )
        elif name.endswith("max_seq_len_cached"):
            setattr(module, name, module.original_max_seq_len)
