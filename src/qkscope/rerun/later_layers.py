"""Layers before a change do not run again: what the last of them put out is handed on.

It is noted in the unchanged run. Where a model does not give its own logits again in this way (later
layers read more than the stream), all of it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qkscope import Scope
from qkscope.model.spaces import other_forwards
from qkscope.model.tap import cleared, place_of

_AGREES = 1e-4  # of the largest logit: how far a run from the middle may be from a whole one
# by first layer, once it was tried
_FROM_THE_MIDDLE: WeakKeyDictionary[Scope, dict[int, bool]] = WeakKeyDictionary()


class LaterLayers:
    """A batch that was run, whose layers before some first one need not run again.

    Parameters
    ----------
    scope : the model.
    first : the first layer that any change touches.

    Attributes
    ----------
    first : the first layer that runs; 0 where the model does not give its own logits again from
        the middle, or is changed by a ``with`` block.
    """

    def __init__(self, scope: Scope, first: int) -> None:
        self.scope = scope
        self.touched = first
        self.first = 0
        self._skipped: list[nn.Module] = []
        self._left: Any = None
        place = place_of(scope.model, _module_names(scope)[first])
        is_possible = _FROM_THE_MIDDLE.setdefault(scope, {}).get(first, True)
        if place is not None and is_possible and not scope.is_changed:
            layers, number = place
            self._skipped = list(layers)[:number]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the last layer before the first puts out, in a run of the unchanged batch."""
        with noted(self._skipped[-1:]) as left:
            yield
        self.begin(left)

    def begin(self, left: Mapping[nn.Module, Any]) -> None:
        """Begin at the first layer, given what layers put out in the unchanged run."""
        if self._skipped:
            self._left = left[self._skipped[-1]]
            self.first = self.touched

    def check(self, whole: Tensor, again: Callable[[], Tensor]) -> None:
        """Run whole batches from now on, if a run from the middle gives other logits; tried once."""
        tried = _FROM_THE_MIDDLE[self.scope]
        if not self._skipped or self.touched in tried:
            return
        try:
            moved = (whole - again()).abs().max()
            tried[self.touched] = bool(moved <= _AGREES * whole.abs().max())
        except Exception:  # a layer that misses what those before it left may fail in any way
            tried[self.touched] = False
        if not tried[self.touched]:
            self._skipped = []
            self.first = 0

    def handing_on(self, count: int) -> AbstractContextManager[None]:
        """Let the layers before the first hand on what they left, for so many copies of the batch."""
        left = repeated(self._left, count)
        return other_forwards(self._skipped, lambda *_: lambda *_, **__: left)

    def handing_on_token(self, rows: int, columns: int) -> AbstractContextManager[None]:
        """Let the layers before the first hand on what they left at one token, in a whole grid."""
        left = tree_map_only(Tensor, lambda value: _in_grid(value, rows, columns), self._left)
        return other_forwards(self._skipped, lambda *_: lambda *_, **__: left)


def _module_names(scope: Scope) -> dict[int | None, str]:
    """The names of attention modules, by layer."""
    names = dict[int | None, str]()
    for name, module in scope.model.named_modules():
        names[scope.facts.layer_of.get(id(module))] = name
    return names


def _in_grid(value: Tensor, rows: int, columns: int) -> Tensor:
    """What was put out at one token, as if it were put out everywhere in a grid of tokens."""
    if value.shape[:2] != (1, 1):
        return value
    return value.expand(rows, columns, *value.shape[2:]).contiguous()


def repeated(value: Any, count: int) -> Any:
    """The rows of every tensor in a value, one set after the other."""
    return tree_map_only(Tensor, partial(_repeated_rows, count=count), value)


def _repeated_rows(rows: Tensor, count: int) -> Tensor:
    """The rows of a tensor, one set after the other; a single number as it is."""
    if not rows.ndim:
        return rows
    return rows.repeat(count, *[1] * (rows.ndim - 1))


@contextmanager
def noted(parts: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Any]]:
    """Note what some modules put out, whole, during a run."""
    found: dict[nn.Module, Any] = {}

    def note(part: nn.Module, _args: Any, out: Any) -> None:
        found[part] = out

    with cleared([part.register_forward_hook(note) for part in parts]):
        yield found


def layers_of(scope: Scope) -> list[nn.Module]:
    """The blocks of a model that stand in one list; none where they do not."""
    any_layer = min(scope.facts.layer_of.values())
    place = place_of(scope.model, _module_names(scope)[any_layer])
    return [] if place is None else list(place[0])
