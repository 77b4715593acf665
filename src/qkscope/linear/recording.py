"""One forward pass of a model, with hooks that keep what its writers left at chosen places.

Heads' outputs are kept before ``W_O``, and only at the places of the run, so that a pass costs
little more than the forward. On a GPU tensors of one shape wait and are gathered together at the
end; if a block wrote into one of them meanwhile, the pass is repeated with copies made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from qkscope.linear.layer import BlockArguments
from qkscope.linear.run import Run, stackable
from qkscope.model.block_tree import BlockTree, Frozen
from qkscope.model.capture_types import Places
from qkscope.model.tap import Call, Stop, cleared

if TYPE_CHECKING:
    from qkscope.linear.reader import Reader


def last_alone(call: Call) -> Call:
    """An attention call with the queries of its last token alone, which stand for those of all."""
    last = call.q[:, :, -1:].clone()
    return replace(call, q=last.expand_as(call.q))


class _Waiting(NamedTuple):
    """A tensor to be gathered after the pass, and where the result goes."""

    tensors: dict[Any, Tensor]
    key: Any
    value: Tensor
    version: int


class Recording:
    """The hooks of one recorded forward pass; parameters are those of `Reader.record`."""

    def __init__(
        self,
        reader: Reader,
        inputs: dict[str, Tensor],
        places: Places,
        *,
        deep: bool | Sequence[int],
        last: int | None,
        layers: Sequence[int],
        logits: bool,
        neurons: bool,
        visits: Sequence[Callable[[Call], None]],
    ) -> None:
        self.reader = reader
        self.inputs = inputs
        self.places = places
        self.last = last
        self.layers = layers
        self.logits = logits
        self.visits = visits
        self.last_matrices = reader.last if neurons else {}
        self.batch = len(next(iter(inputs.values())))
        # of a prompt that runs alone, the number of tokens up to its query
        self.query_end: int | None = None
        if len(places.row) == 1:
            self.query_end = int(places.query[0]) + 1
        self.deepest = max(reader.layers) if last is None else last
        self.end = len(reader.blocks) - 1 if logits else self.deepest
        if deep is True:
            self.kept = set(range(self.deepest + 1))
        else:
            self.kept = {*(reader.layers if deep is False else deep), *layers}

    def record(self) -> Run:
        """Run the model, twice if need be, and gather what it left."""
        self._forward()
        if self._was_overwritten():
            self.reader.overwrites = True
            self._forward()
        self._gather()
        return self.run

    @torch.no_grad()
    def _forward(self) -> None:
        """Run the model with the hooks in place."""
        places = self.places
        keys = places.keys.masked_fill(~places.key_mask, 0)
        columns = torch.cat([places.query[:, None], keys], dim=1)
        self.run = Run(self.reader, places.row, columns, self.inputs)
        self.waiting: dict[Any, list[_Waiting]] = {}
        self.hooks: list[Any] = []
        every_call = self.logits or self.visits
        logits_at = places if self.logits else None
        only = None if every_call else {*self.kept, self.end}
        visits = (*self.visits, self._take)
        with cleared(self.hooks):
            self._register()
            self.run.logits = self.reader.scope.watch(
                self.inputs, *visits, rotary=True, logits_at=logits_at, only=only
            )

    # ------------------------------------------------------------------ where hooks go

    def _register(self) -> None:
        blocks = self.reader.blocks
        if self.logits:
            self.hooks.append(blocks[-1].module.register_forward_hook(self._leave))
        for layer, block in enumerate(blocks[: self.end + 1]):
            if layer == 0 or layer in self.kept:
                enter = partial(self._enter, layer)
                hook = block.module.register_forward_pre_hook(enter, with_kwargs=True)
                self.hooks.append(hook)
            if layer == self.end and not self.logits:
                break  # what this block writes comes after everything that is read
            for norm in block.norms:
                self._watch_input(norm, self.run.module_inputs, norm)
            if self.last is None or layer <= self.last:
                self._watch_writers(layer, block)

    def _watch_writers(self, layer: int, block: BlockTree) -> None:
        """Note what the heads and the other parts of a block put out."""
        if block.output is not None:
            self._watch_input(block.output, self.run.heads, layer)
        for part in block.parts:
            self.hooks.append(part.register_forward_hook(self._note_output))
            if layer in self.layers:
                self._watch_input(part, self.run.module_inputs, part)
            if part in self.last_matrices:
                self._watch_input(self.last_matrices[part][0], self.run.neurons, part)

    def _watch_input(self, module: nn.Module, tensors: dict[Any, Tensor], key: Any) -> None:
        """Note what a module is given, under a key."""

        def note(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self._note(tensors, key, args)

        self.hooks.append(module.register_forward_pre_hook(note))

    # ------------------------------------------------------------------ what hooks do

    def _enter(
        self, layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Hook of a block: keep its arguments, and note the stream that enters."""
        arguments = BlockArguments(args, kwargs)
        if layer == 0 or layer in self.layers:
            self._note(self.run.entered, layer, arguments.stream)
        if layer in self.kept:
            self.run.block_arguments[layer] = arguments

    def _leave(self, _module: nn.Module, _args: Any, out: Any) -> Any:
        """Hook of the last block: from here on, logits are a linear function of the stream."""
        torch.set_grad_enabled(True)
        inside = {module for block in self.reader.blocks for module in block.module.modules()}
        outside = [module for module in self.reader.scope.model.modules() if module not in inside]
        self.hooks.extend(Frozen().hooks(outside))
        if isinstance(out, tuple | list):
            self.run.final_stream = out[0].detach().requires_grad_()
            return type(out)([self.run.final_stream, *out[1:]])
        self.run.final_stream = out.detach().requires_grad_()
        return self.run.final_stream

    def _note_output(self, part: nn.Module, _args: Any, out: Any) -> None:
        """Hook of a part: note what it puts out."""
        self._note(self.run.part_outputs, part, out)

    def _take(self, call: Call) -> None:
        """Visit an attention call: keep it if its layer is read, and stop after the last one."""
        if call.layer in self.kept or self.logits:
            if call.layer > self.deepest and call.q.shape[2] == self.query_end:
                call = last_alone(call)
            self.run.calls[call.layer] = call
            call.rotary = call.rotary and call.rotary.slim()
        if call.layer == self.end and not self.logits:
            raise Stop

    def _note(self, tensors: dict[Any, Tensor], key: Any, value: Any) -> None:
        """Keep a tensor at the places of the run: now, or together with others after the pass."""
        if isinstance(value, tuple | list):
            value = value[0]
        if value.ndim == 2:  # experts are given all tokens in one row
            value = value.reshape(self.batch, -1, value.shape[-1])
        if self.reader.overwrites or not stackable(value, len(self.reader.blocks)):
            tensors[key] = self.run.pick(value)
            return
        together = self.waiting.setdefault((id(tensors), value.shape, value.device), [])
        together.append(_Waiting(tensors, key, value, value._version))

    # ------------------------------------------------------------------ after the pass

    def _was_overwritten(self) -> bool:
        """Whether the model wrote into a tensor that waits."""
        for together in self.waiting.values():
            for item in together:
                if item.value._version != item.version:
                    return True
        return False

    def _gather(self) -> None:
        """Pick the places from the tensors that wait."""
        for together in self.waiting.values():
            picked = self.run.pick_all([item.value for item in together])
            for item, value in zip(together, picked, strict=True):
                item.tensors[item.key] = value
