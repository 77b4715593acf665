"""Batches run again with edits: what comes before the first edit is computed once, and many changes
run together.

Everything below the first layer that a change touches is the same in all of them: its last block's
output is noted in the unchanged run, and handed on instead of running those blocks. Where a model
does not give its own logits again in this way (later layers read more than the stream), all of it
runs.

A head that is taken out puts out another vector at every token, for all that read it
(`Edit.outputs`), and every later layer follows. With MLPs held at what they put out before, their
answers to the head stay, which is no state that the model knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qkscope import Scope
from qkscope.heads import Head
from qkscope.model.batching import Picker
from qkscope.model.capture_types import Capture, Places
from qkscope.model.encode import Encoding
from qkscope.model.patch import Edit, Patch
from qkscope.model.spaces import other_forwards
from qkscope.model.tap import Call, cleared, place_of

_TOKENS = 2**13  # run together
_AGREES = 1e-4  # of the largest logit: how far a run from the middle may be from a whole one
_FROM_THE_MIDDLE: WeakKeyDictionary[Scope, dict[int, bool]] = (
    WeakKeyDictionary()
)  # by first layer, once it was tried


class Batch:
    """A batch that was run, ready to be run again with edits of later layers.

    Parameters
    ----------
    scope : the model.
    encoded : the batch.
    heads : whose queries and keys are read, next to the logits.
    first : the first layer that any change touches.
    """

    def __init__(self, scope: Scope, encoded: Encoding, heads: Sequence[Head], first: int) -> None:
        self.scope = scope
        self.encoded = encoded
        self.first = first
        self._skipped: list[nn.Module] = []
        names = {
            scope.facts.layer_of.get(id(module)): name
            for name, module in scope.model.named_modules()
        }
        place = place_of(scope.model, names[first])
        tried = _FROM_THE_MIDDLE.setdefault(scope, {})
        if place is not None and tried.get(first, True) and not scope.is_changed:
            self._skipped = list(place[0])[: place[1]]
        with noted(self._skipped[-1:]) as left:
            (self.before,) = self._runs([[]], heads, 0)
        self._left = next(iter(left.values()), None)
        if self._skipped and first not in tried:
            tried[first] = self._agrees()
            self._skipped = self._skipped if tried[first] else []

    def _agrees(self) -> bool:
        """Whether a run from the middle gives the same logits."""
        try:
            again = self.run([[]], self.before.heads[:1])[0].logits
        except Exception:  # a layer that misses what those before it left may fail in any way
            return False
        whole = self.before.logits
        assert whole is not None
        return again is not None and bool(
            (whole - again).abs().max() <= _AGREES * whole.abs().max()
        )

    def run(self, changes: Sequence[Sequence[Edit]], heads: Sequence[Head]) -> list[Capture]:
        """The batch once more for each change: its edits, all at once.

        Parameters
        ----------
        changes : edits of layers from the first on.
        heads : that are read then.
        """
        step = max(_TOKENS // self.encoded.inputs["input_ids"].numel(), 1)
        found: list[Capture] = []
        for start in range(0, len(changes), step):
            some = changes[start : start + step]
            left = _repeated(self._left, len(some))
            with other_forwards(self._skipped, lambda *_, left=left: lambda *_, **__: left):
                found += self._runs(some, heads, self.first if self._skipped else 0)
        return found

    def _runs(
        self, changes: Sequence[Sequence[Edit]], heads: Sequence[Head], first: int
    ) -> list[Capture]:
        scope = self.scope
        count = len(changes)
        batch = self.encoded
        size = len(batch.inputs["input_ids"])
        inputs = _repeated(batch.inputs, count)
        labels = _repeated(batch.labels, count)
        fields = _repeated(vars(batch.places), count)
        example = _repeated(batch.example, count)
        starts = (
            torch.arange(count).repeat_interleave(len(batch.places.row)).to(batch.places.row) * size
        )
        places = Places(**fields | {"row": fields["row"] + starts})
        patch = Patch(
            [
                replace(edit, row=edit.row + i * size)
                for i, own in enumerate(changes)
                for edit in own
            ],
            scope,
        )
        picker = Picker(scope.facts, heads, places, stop=False, own_keys=patch.own_keys)
        logits = scope.watch(inputs, patch.visit, picker.visit, logits_at=places, first=first)
        every = picker.finish(example, labels, logits)
        return [
            every.of_rows(rows)
            for rows in torch.arange(len(every), device=every.example.device).chunk(count)
        ]


def _repeated(value: Any, count: int) -> Any:
    """The rows of every tensor in a value, one set after the other."""
    return tree_map_only(
        Tensor,
        lambda rows: rows.repeat(count, *[1] * (rows.ndim - 1)) if rows.ndim else rows,
        value,
    )


@contextmanager
def noted(parts: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Any]]:
    """Note what some modules put out, whole, during a run."""
    found: dict[nn.Module, Any] = {}
    with cleared(
        [
            part.register_forward_hook(lambda part, _, out: found.__setitem__(part, out))
            for part in parts
        ]
    ):
        yield found


def held_at(outputs: Mapping[nn.Module, Any]) -> AbstractContextManager[None]:
    """Let modules put out what they put out before, during a run."""
    return cleared(
        [part.register_forward_hook(lambda *_, out=out: out) for part, out in outputs.items()]
    )


@torch.no_grad()
def summed_outputs(
    scope: Scope, inputs: dict[str, Tensor], shown: Bool[Tensor, "b t"]
) -> dict[int, Float[Tensor, "h e"]]:
    """By layer, the sum of every head's output over the tokens shown."""
    sums: dict[int, Tensor] = {}

    def visit(call: Call) -> None:
        z = call.attend(list(range(call.q.shape[1])))
        sums[call.layer] = z[shown.to(z.device)].double().sum(0).cpu()

    scope.watch(inputs, visit)
    return sums
