"""The three spaces a query at position m and a key at position n can be read in.

- ``post_rope``: ``R_m q``, ``R_n k``, as the dot product sees them.
- ``pre_rope``: ``q``, ``k``, before the rotation.
- ``query_frame``: both turned back by the query's position, ``R_m⁻¹ R_m q = q`` and
  ``R_m⁻¹ R_n k = R_{n-m} k``, so the logits stay and the absolute position goes.

All are read off what the modelling file's own rotary function was given. The turn back is that
function with ``(cos, -sin)`` of the query's position: partial and interleaved rotations need no
knowledge of the family. ``cos² + sin² = a²`` shows the attention scaling that YaRN hides in them;
dividing by ``a`` leaves a pure rotation.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

#: Rotary types whose frequencies depend on the length of the prompt: they have no one rotation per
#: offset.
LENGTH_DEPENDENT = ("dynamic", "longrope")

_OF_CLASS = object()  # stands for an attribute that the class has, not the object
_ORIGINAL = "original_inv_freq"  # a rotation keeps the frequencies of short prompts under this name


@dataclass
class Rotary:
    """What a rotary function was given and gave in one layer.

    Heads stand before positions; only r of a vector's d dimensions may be rotated.
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
        """Leave out the vectors: the rotation alone, to be kept for long."""
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
        """All queries and keys before the rotation, which concerns dimensions from `offset` on."""
        rotated = slice(offset, offset + self.q.shape[-1])
        q = q.to(torch.float32, copy=True)
        q[..., rotated] = self.q
        k = k.to(torch.float32, copy=True)
        k[..., rotated] = self.k  # broadcasts where latent attention shares one rotated key
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
        rotation = self.unit.at(batch, position[:, None])
        q_turned = rotation.turn(q[:, :, None], offset, back=True)[:, :, 0]
        k_turned = rotation.turn(k, offset, back=True)
        return q_turned, k_turned

    def at(self, batch: Int[Tensor, " n"], positions: Int[Tensor, "n m"]) -> Rotary:
        """The rotation of what stands at m places of n rows of the batch."""
        # a layer of a model split over devices has its tables beside it
        device = self.cos.device
        row = batch.to(device)
        positions = positions.to(device)
        # the tables are [b or 1, s, c], for every head
        if self.cos.shape[0] == 1:
            row = torch.zeros_like(row)
        place = (row[:, None], positions)
        return replace(self, cos=self.cos[place].float(), sin=self.sin[place].float())

    def turn(
        self, x: Float[Tensor, "n h m d"], offset: int = 0, back: bool = False
    ) -> Float[Tensor, "n h m d"]:
        """Rotate vectors, h at each place, as this layer rotates what stands there (`at`).

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
        if back:
            sin = -sin
        end = offset + self.q.shape[-1]
        part = x[..., offset:end].contiguous()
        turned, _ = self.function(part, part[:, :1], cos, sin)  # the family's own code
        if part.shape == x.shape:
            return turned
        return torch.cat([x[..., :offset], turned, x[..., end:]], dim=-1)


def heard_rotary(heard: deque[Rotary], q: Float[Tensor, "b h s d"]) -> Rotary | None:
    """The rotation of one attention call, from what was heard since the call before.

    A function that is given one tensor at a time was heard twice: which of the two is q is seen
    from its numbers.
    """
    if not heard:
        return None
    if not heard[-1].alone:
        return heard[-1]
    if _gave(heard[0], q):  # both are the same where only one was heard
        queries = heard[0]
        keys = heard[-1]
    else:
        queries = heard[-1]
        keys = heard[0]
    return replace(queries, k=keys.q, k_rotated=keys.q_rotated)


def _gave(rotary: Rotary, q: Float[Tensor, "b h s d"]) -> bool:
    """Whether these queries begin with what a rotation gave."""
    rotated = rotary.q_rotated.to(q)
    if rotated.shape[:3] != q.shape[:3]:
        return False
    return torch.equal(rotated, q[..., : rotated.shape[-1]])


@cache  # reading signatures takes as long as a layer
def _rotary_functions(file: ModuleType) -> tuple[str, ...]:
    """Names of a modelling file's rotary functions."""
    names = []
    for name, function in vars(file).items():
        if name.startswith("apply_rotary") and callable(function):
            parameters = list(inspect.signature(function).parameters)
            if {"q", "k", "cos", "sin"} <= set(parameters) or parameters[1:] == ["sin", "cos"]:
                names.append(name)
    return tuple(names)


@contextmanager
def swapped(*values: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes, ``(object, name, value)``, for the duration of a ``with`` block."""
    before = [(thing, name, vars(thing).get(name, _OF_CLASS)) for thing, name, _ in values]
    try:
        for thing, name, value in values:
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in before:
            if value is _OF_CLASS:
                delattr(thing, name)
            else:
                setattr(thing, name, value)


@contextmanager
def record_rotary(files: Iterable[ModuleType]) -> Iterator[deque[Rotary]]:
    """Listen to the rotary functions of some modelling files for the duration of a ``with`` block.

    What each was given is added to a list; the attention call of the same layer takes the last of
    it (`heard_rotary`).
    """
    heard: deque[Rotary] = deque(maxlen=2)  # layers that are not shown add to it too
    listeners = []
    for file in files:
        for name in _rotary_functions(file):
            listener = _listener(getattr(file, name), heard)
            listeners.append((file, name, listener))
    with swapped(*listeners):
        yield heard


def _listener(function: Callable[..., Any], heard: deque[Rotary]) -> Callable[..., Any]:
    """A rotary function that also adds what it was given, and gave, to a list."""
    parameters = inspect.signature(function).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }

    @wraps(function)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        rotated = function(*args, **kwargs)
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        for name, default in defaults.items():  # behind the others: what is rotated comes first
            given.setdefault(name, default)
        if "k" in given and given["k"] is None:  # what chooses keys turns its queries by themselves
            return rotated
        heard.append(_rotary_of(function, given, rotated))
        return rotated

    return rotate


def _rotary_of(function: Callable[..., Any], given: Mapping[str, Any], rotated: Any) -> Rotary:
    """The record of one call of a rotary function, by the names of its parameters."""
    cos = given["cos"]
    sin = given["sin"]
    x = next(iter(given.values()))
    if "q" not in given:
        # one tensor at a time, positions before heads
        before = x.transpose(1, 2)
        after = rotated.transpose(1, 2)
        turn = _with_heads_first(function)
        return Rotary(turn, before, before, cos, sin, after, after, alone=True)
    vectors = (x, given["k"], *rotated)
    if given.get("unsqueeze_dim", 1) != 1:  # positions before heads
        vectors = tuple(vector.transpose(1, 2) for vector in vectors)
    q, k, q_rotated, k_rotated = vectors
    return Rotary(function, q, k, cos, sin, q_rotated, k_rotated)


def _with_heads_first(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
    """A function of one tensor, positions before heads, called like one of q and k."""

    def turn(q: Tensor, _k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, None]:
        rotated = function(q.transpose(1, 2), cos=cos, sin=sin)
        return rotated.transpose(1, 2), None

    return turn


def rotary_settings(config: Any) -> Iterator[dict[str, Any]]:
    """Yield what a config says about its rotations; some families have one per kind of layer."""
    todo = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("rope_type"), str):
                yield part
            todo.extend(part.values())


@contextmanager
def rows_rotate_alone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let rotations that depend on the length go by each row's own length in a ``with`` block.

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
    """Let modules run what ``wrap`` makes of their forward in a ``with`` block."""
    changes = []
    for module in modules:
        forward = wraps(module.forward)(wrap(module, module.forward))
        changes.append((module, "forward", forward))
    return swapped(*changes)


def depends_on_length(module: nn.Module) -> bool:
    """Whether a module's rotation depends on the length of the prompt."""
    rope_type = getattr(module, "rope_type", None)
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    names = [kind for kind in kinds if isinstance(kind, str)]
    return any(word in name for name in names for word in LENGTH_DEPENDENT)


def _row_by_row(module: nn.Module, rotate: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that makes the tables of each row of positions as if the row were alone."""

    def rotate_rows(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = position_ids.split(1) if position_ids.ndim == 2 else [position_ids]
        tables = []
        for row in rows:
            _forget_lengths(module)
            # x is only looked at for its device and type
            tables.append(rotate(x[:1], row, *args, **kwargs))
        if len(tables) == 1:
            return tables[0]
        return tuple(torch.cat(parts) for parts in zip(*tables, strict=True))

    return rotate_rows


def _forget_lengths(module: nn.Module) -> None:
    """Reset a rotation to its state before the first prompt."""
    for name in [*module._buffers, *vars(module)]:
        if name.endswith(_ORIGINAL):
            buffer = name.removesuffix(_ORIGINAL) + "inv_freq"
            device = getattr(module, buffer).device
            original = getattr(module, name).to(device)
            module.register_buffer(buffer, original, persistent=False)
        elif name.endswith("max_seq_len_cached"):
            setattr(module, name, module.original_max_seq_len)
