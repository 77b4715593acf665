"""The three spaces a query and a key can be read in, from what the modelling file's own rotary function was given.

``post_rope``: ``R_m q``, ``R_n k``, as the dot product sees them. ``pre_rope``: ``q``, ``k``. ``query_frame``: both
turned back by the query's position, ``R_m⁻¹ R_m q = q`` and ``R_m⁻¹ R_n k = R_{n-m} k``, so the logits stay and the
absolute position goes. The turn back is the family's own rotary function with ``(cos, -sin)`` of the query's position:
partial and interleaved rotations need no knowledge of the family. ``cos² + sin² = a²`` shows the attention scaling that
YaRN hides in them; dividing by ``a`` leaves a pure rotation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.errors import BadInput

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


class Recorder:
    """Holds what the rotary function was given last, until the attention call of the same layer takes it."""

    def __init__(self) -> None:
        self._last: Rotary | None = None

    def take(self) -> Rotary | None:
        """What was recorded since the last call; None in a layer without rotation."""
        last, self._last = self._last, None
        return last

    def listen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a rotary function so that it is heard."""
        signature = inspect.signature(function)

        @wraps(function)
        def heard(*args: Any, **kwargs: Any) -> Any:
            rotated = function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            # unsqueeze_dim 2 means positions before heads: turn to heads before positions
            heads_first = given.arguments.get("unsqueeze_dim", 1) == 1
            q, k, q_rotated, k_rotated = (
                x if heads_first else x.transpose(1, 2) for x in (given.arguments["q"], given.arguments["k"], *rotated)
            )
            self._last = Rotary(
                function=function,
                q=q,
                k=k,
                cos=given.arguments["cos"],
                sin=given.arguments["sin"],
                q_rotated=q_rotated,
                k_rotated=k_rotated,
            )
            return rotated

        return heard


def _rotary_functions(file: ModuleType) -> dict[str, Callable[..., Any]]:
    found = {}
    for name, value in vars(file).items():
        if name.startswith("apply_rotary") and callable(value):
            try:
                given = inspect.signature(value).parameters
            except (TypeError, ValueError):
                continue
            if all(word in given for word in ("q", "k", "cos", "sin")):
                found[name] = value
    return found


@contextmanager
def record_rotary(files: Iterable[ModuleType]) -> Iterator[Recorder]:
    """Listen to the rotary functions of some modelling files for the duration of a ``with`` block."""
    recorder = Recorder()
    replaced = [(file, name, function) for file in files for name, function in _rotary_functions(file).items()]
    try:
        for file, name, function in replaced:
            setattr(file, name, recorder.listen(function))
        yield recorder
    finally:
        for file, name, function in replaced:
            setattr(file, name, function)


def rotary_types(config: Any) -> set[str]:
    """The rotary types a config names, at any depth (some families have one per kind of layer)."""
    found: set[str] = set()
    todo = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("rope_type"), str):
                found.add(part["rope_type"])
            todo.extend(part.values())
    return found


def check_space(space: str) -> None:
    """Refuse a space that does not exist."""
    if space not in SPACES:
        raise BadInput(f"there is no space {space!r}: choose one of {', '.join(SPACES)}.")
