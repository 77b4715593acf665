"""Batches run again with edits: what comes before the first edit is computed once, and many changes
run together.

Everything below the first layer that a change touches is the same in all of them, and does not run
again (`later_layers`).

A head that is taken out puts out another vector at every token, for all that read it
(`Edit.outputs`), and every later layer follows. With MLPs held at what they put out before, their
answers to the head stay, which is no state that the model knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkscope import Scope
from qkscope.changes import Hidden, Output, Row, Words
from qkscope.heads import Head
from qkscope.model.batching import Picker
from qkscope.model.capture_types import Capture, Places
from qkscope.model.encode import Encoding
from qkscope.model.patch import Edit, Patch
from qkscope.model.prefix import prompt_of
from qkscope.model.tap import Call, Stop, cleared
from qkscope.model.what_if import mean_of_others
from qkscope.rerun.later_layers import LaterLayers, repeated
from qkscope.rerun.reads import LayerReads, Read, Reruns, layer_reads, with_words
from qkscope.rerun.reference import change_mask, module_of
from qkscope.rerun.rerun_tokens import Again

_TOKENS = 2**13  # run together


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
            together = _ChangedTogether(base, some, reads, end)
            shown.append(together.run(later.first, logits))
    attention = torch.cat([some.attention for some in shown])
    if not logits:
        return Reruns(attention, None)
    next_tokens = [some.logits for some in shown if some.logits is not None]
    return Reruns(attention, torch.cat(next_tokens))


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
        rows = call.rows(heads, prompt, reads.queries.repeat(count)).attention()
        by_prompt = rows[:, 0].unflatten(0, (count, -1))
        attention[:, reads.numbers] = by_prompt.to(attention)

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

    def _of_modules(self) -> Iterator[tuple[int, Output]]:
        """Changed outputs of modules other than heads, with the number of the prompt."""
        for prompt, own in enumerate(self.changes):
            for change in own:
                if isinstance(change, Output) and change.writer.head is None:
                    yield prompt, change

    def _hooks(self) -> list[Any]:
        """Hooks on the modules other than heads whose output is changed."""
        hooks = list[Any]()
        for prompt, change in self._of_modules():

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
        inputs = repeated(batch.inputs, count)
        logits = scope.watch(inputs, patch.visit, picker.visit, logits_at=places, first=first)
        every = picker.finish(repeated(batch.example, count), repeated(batch.labels, count), logits)
        numbers = torch.arange(len(every), device=every.example.device)
        return [every.of_rows(rows) for rows in numbers.chunk(count)]


def _repeated_places(places: Places, count: int, size: int) -> Places:
    """Places of a batch of so many sequences, in copies of it that stand one after the other."""
    fields = repeated(vars(places), count)
    copy = torch.arange(count).repeat_interleave(len(places.row))
    starts = copy.to(places.row) * size
    return Places(**fields | {"row": fields["row"] + starts})


def held_at(outputs: Mapping[nn.Module, Any]) -> AbstractContextManager[None]:
    """Let modules put out what they put out before, during a run."""
    hooks = list[Any]()
    for part, out in outputs.items():
        hooks.append(part.register_forward_hook(lambda *_, out=out: out))
    return cleared(hooks)


@torch.no_grad()
def summed_outputs(
    scope: Scope, inputs: dict[str, Tensor], shown: Bool[Tensor, "b t"]
) -> dict[int, Float[Tensor, "h e"]]:
    """By layer, the sum of every head's output over the tokens shown."""
    sums: dict[int, Tensor] = {}

    def visit(call: Call) -> None:
        z = call.attend(list(range(call.q.shape[1])))
        of_shown = z[shown.to(z.device)].double()
        sums[call.layer] = of_shown.sum(0).cpu()

    scope.watch(inputs, visit)
    return sums
