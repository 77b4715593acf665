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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qkscope import Scope
from qkscope.changes import Hidden, Output, Row, Words
from qkscope.heads import Head
from qkscope.model.batching import Picker
from qkscope.model.capture_types import Capture, Places
from qkscope.model.encode import Encoding
from qkscope.model.patch import Edit, Patch
from qkscope.model.prefix import prompt_of
from qkscope.model.spaces import other_forwards
from qkscope.model.tap import Call, Stop, cleared, place_of
from qkscope.model.what_if import mean_of_others
from qkscope.rerun.reads import LayerReads, Read, Reruns, layer_reads, with_words
from qkscope.rerun.reference import change_mask, module_of
from qkscope.rerun.rerun_tokens import Again

_TOKENS = 2**13  # run together
_AGREES = 1e-4  # of the largest logit: how far a run from the middle may be from a whole one
_FROM_THE_MIDDLE: WeakKeyDictionary[Scope, dict[int, bool]] = (
    WeakKeyDictionary()
)  # by first layer, once it was tried


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
        self._left = next(iter(left.values()), None)
        self.first = self.touched if self._skipped else 0

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
        left = _repeated(self._left, count)
        return other_forwards(self._skipped, lambda *_: lambda *_, **__: left)


def _module_names(scope: Scope) -> dict[int | None, str]:
    """The names of attention modules, by layer."""
    layer_of = scope.facts.layer_of
    return {layer_of.get(id(module)): name for name, module in scope.model.named_modules()}


# ---------------------------------------------------------------- one prompt, with typed changes


@torch.no_grad()
def rerun_layers(
    base: Again,
    changes: Sequence[Sequence[Words | Row | Hidden | Output]],
    reads: Sequence[Read],
    end: int,
    logits: bool,
) -> Reruns:
    """Run whole prompts together, from the first layer that a change touches."""
    scope = base.scope
    plain = _ChangedTogether(base, [[]], [], end)
    touched = min(_layer_of(change) for own in changes for change in own)
    later = LaterLayers(scope, touched)
    if touched:
        with later.noting():
            whole = plain.run(0).logits
        assert whole is not None

        def from_the_middle() -> Tensor:
            with later.handing_on(1):
                again = plain.run(later.first).logits
            assert again is not None
            return again

        later.check(whole, from_the_middle)
    step = max(_TOKENS // len(base.ids), 1)
    shown = list[Reruns]()
    for start in range(0, len(changes), step):
        some = changes[start : start + step]
        with later.handing_on(len(some)):
            shown.append(_ChangedTogether(base, some, reads, end).run(later.first, logits))
    next_tokens = [some.logits for some in shown if some.logits is not None]
    return Reruns(
        torch.cat([some.attention for some in shown]),
        torch.cat(next_tokens) if logits else None,
    )


def _layer_of(change: Words | Row | Hidden | Output) -> int:
    """The first layer that a change touches."""
    if isinstance(change, Words):
        return 0
    if isinstance(change, Output):
        return change.writer.layer
    return change.head.layer


@dataclass
class _ChangedTogether:
    """Whole prompts that run together, each with changes of its own.

    Attributes
    ----------
    base : the unchanged prompt.
    changes : by prompt.
    reads : rows of attention that are read.
    end : the token whose next one is read.
    """

    base: Again
    changes: Sequence[Sequence[Words | Row | Hidden | Output]]
    reads: Sequence[Read]
    end: int

    def run(self, first: int, logits: bool = True) -> Reruns:
        """Run from a layer on, those before it handing on what they put out."""
        scope = self.base.scope
        reads = layer_reads(self.reads)
        ids = torch.stack([with_words(self.base.ids, own) for own in self.changes])
        attention = self.base.attention(self.reads).repeat(len(ids), 1, 1)
        last = None if logits else max(reads)

        def visit(call: Call) -> None:
            self._change(call)
            if call.layer in reads:
                self._read(call, reads[call.layer], attention)
            if call.layer == last:
                raise Stop

        prompt = torch.arange(len(ids), device=ids.device)
        nothing = prompt[:, None][:, :0]
        at = Places(prompt, torch.full_like(prompt, self.end), nothing, nothing.bool())
        with cleared(self._hooks()):
            after = scope.watch(
                prompt_of(scope, ids), visit, logits_at=at if logits else None, first=first
            )
        return Reruns(attention, after)

    def _read(self, call: Call, reads: LayerReads, attention: Float[Tensor, "b n t"]) -> None:
        """Put a layer's rows that are read into a table."""
        count = len(self.changes)
        prompt = torch.arange(count).repeat_interleave(len(reads.numbers))
        heads = torch.tensor(reads.heads).repeat(count).to(call.q.device)
        rows = call.rows(heads, prompt, reads.queries.repeat(count)).attention()[:, 0]
        attention[:, reads.numbers] = rows.unflatten(0, (count, -1)).to(attention)

    def _change(self, call: Call) -> None:
        """Apply a layer's changes of attention and of heads' outputs, prompt by prompt."""
        for prompt, own in enumerate(self.changes):
            for change in own:
                if isinstance(change, Row | Hidden) and change.head.layer == call.layer:
                    change_mask(call, change, prompt)
                elif isinstance(change, Output) and change.writer.head is not None:
                    self._put_output(call, change, change.writer.head, prompt)

    def _put_output(self, call: Call, change: Output, head: Head, prompt: int) -> None:
        """Let a head put out something else in one prompt, if this is its layer."""
        if head.layer != call.layer:
            return
        before = call.outputs.get(head.index)

        def output(z: Float[Tensor, "b s e"]) -> Float[Tensor, "b s e"]:
            new = z.clone() if before is None else before(z)
            new[prompt] = self._value(change, z[prompt])
            return new

        call.outputs[head.index] = output

    def _value(self, change: Output, own: Float[Tensor, "t e"]) -> Float[Tensor, "t e"]:
        """What a writer puts out instead: a value, or its mean over the other tokens."""
        if change.value is not None:
            return change.value.to(own).expand_as(own)
        everywhere = torch.ones(1, len(own), dtype=torch.bool)
        return mean_of_others(own[None], everywhere)[0]

    def _hooks(self) -> list[Any]:
        """Hooks on the modules other than heads whose output is changed."""
        of_modules = [
            (prompt, change)
            for prompt, own in enumerate(self.changes)
            for change in own
            if isinstance(change, Output) and change.writer.head is None
        ]
        hooks = list[Any]()
        for prompt, change in of_modules:

            def put(
                _module: nn.Module,
                _args: Any,
                output: Any,
                prompt: int = prompt,
                change: Output = change,
            ) -> Any:
                rest = output[1:] if isinstance(output, tuple) else None
                own = output if rest is None else output[0]
                new = own.view(len(self.changes), -1, own.shape[-1]).clone()
                new[prompt] = self._value(change, new[prompt])
                new = new.view_as(own)
                return new if rest is None else (new, *rest)

            hooks.append(module_of(self.base.scope, change.writer).register_forward_hook(put))
        return hooks


# ---------------------------------------------------------------- padded batches, with edits


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
        self._later = LaterLayers(scope, first)
        with self._later.noting():
            (self.before,) = self._runs([[]], heads, 0)
        assert self.before.logits is not None
        self._later.check(self.before.logits, self._logits_from_the_middle)

    def _logits_from_the_middle(self) -> Tensor:
        """The unchanged batch once more, from the first layer on."""
        again = self.run([[]], self.before.heads[:1])[0].logits
        assert again is not None
        return again

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
            with self._later.handing_on(len(some)):
                found += self._runs(some, heads, self._later.first)
        return found

    def _runs(
        self, changes: Sequence[Sequence[Edit]], heads: Sequence[Head], first: int
    ) -> list[Capture]:
        """Run as many copies of the batch as there are changes, together."""
        scope = self.scope
        count = len(changes)
        batch = self.encoded
        size = len(batch.inputs["input_ids"])
        places = _repeated_places(batch.places, count, size)
        edits = list[Edit]()
        for number, own in enumerate(changes):
            edits += [replace(edit, row=edit.row + number * size) for edit in own]
        patch = Patch(edits, scope)
        picker = Picker(scope.facts, heads, places, stop=False, own_keys=patch.own_keys)
        inputs = _repeated(batch.inputs, count)
        logits = scope.watch(inputs, patch.visit, picker.visit, logits_at=places, first=first)
        every = picker.finish(
            _repeated(batch.example, count), _repeated(batch.labels, count), logits
        )
        numbers = torch.arange(len(every), device=every.example.device)
        return [every.of_rows(rows) for rows in numbers.chunk(count)]


def _repeated_places(places: Places, count: int, size: int) -> Places:
    """Places of a batch of so many sequences, in copies of it that stand one after the other."""
    fields = _repeated(vars(places), count)
    starts = torch.arange(count).repeat_interleave(len(places.row)).to(places.row) * size
    return Places(**fields | {"row": fields["row"] + starts})


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
