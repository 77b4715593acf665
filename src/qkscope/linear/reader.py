"""Some heads, ready to say who wrote what they read: a model's blocks taken apart, and forwards recorded.

Outputs of heads are recorded before ``W_O`` and only at the places asked for, so that a pass costs little more than the
forward. What no token decides (biases of any kind) is the writer `BIAS`, always the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.capture.blocks import Heads, Part, read_blocks
from qkscope.capture.encode import Encoding
from qkscope.capture.gather import Picker, index_on, layout_of
from qkscope.capture.inputs import input_device, short_inputs
from qkscope.capture.norms import Frozen, Norm, take_apart
from qkscope.capture.pick import Places
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, Stop, cleared
from qkscope.errors import BadInput
from qkscope.heads import BIAS, EMBEDDING, Head, Writer
from qkscope.linear.layer import stream_of
from qkscope.linear.neurons import last_modules
from qkscope.linear.run import KINDS, Run, Side


class Reader:
    """Some heads of a model, and its blocks.

    Parameters
    ----------
    scope : the model.
    heads : whose queries and keys are split.
    """

    def __init__(self, scope: Scope, heads: Sequence[Head]) -> None:
        self.scope, self.heads = scope, list(heads)
        self.layers = sorted({head.layer for head in heads})
        _refuse_quantised(scope)
        self.blocks = read_blocks(scope.model, scope.facts.layer_of)
        self._norms: dict[nn.Module, Norm] = {}
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._speaks: dict[int, bool] = {}
        self._short: Run | None = None
        self._writers: dict[int, list[str]] = {}
        self._heads: dict[int, list[str]] = {}
        shapes = tuple((layer.n_heads, layer.n_kv_heads) for layer in scope.facts.layers)
        self.kv_of_head = layout_of(shapes, tuple(heads)).kv_of_head  # in what is captured
        self.columns = {head: column for column, head in enumerate(self.heads)}

    def writers(self, layer: int) -> list[str]:
        """Names of all that write before a layer, in the order of every split, `BIAS` last."""
        if layer not in self._writers:
            self._writers[layer] = self._names(layer)
        return self._writers[layer]

    def _names(self, layer: int) -> list[str]:
        names = [EMBEDDING]
        for before, block in enumerate(self.blocks[:layer]):
            for node in block.walk():
                if isinstance(node, Heads):
                    names += self.head_names(before)
                elif isinstance(node, Part):
                    names.append(self.part_name(before, node.module))
        return [*names, BIAS]

    def head_names(self, layer: int) -> list[str]:
        """Names of the heads of a layer."""
        if layer not in self._heads:
            self._heads[layer] = [str(Head(layer, i)) for i in range(self.scope.facts.layers[layer].n_heads)]
        return self._heads[layer]

    def part_name(self, layer: int, module: nn.Module) -> str:
        """``M17``, and where a block has more than one part besides its heads, their numbers behind it."""
        parts = self.blocks[layer].parts
        return str(Writer(layer, "mlp", () if len(parts) == 1 else (parts.index(module),)))

    def index(self, numbers: list[int]) -> Int[Tensor, " n"]:
        """Numbers on the model's device, brought there once."""
        return index_on(input_device(self.scope.model), tuple(numbers))

    def taken_apart(self, norm: nn.Module, like: Tensor) -> Norm:
        """A norm's gain, bias and centring, asked for once."""
        if norm not in self._norms:
            self._norms[norm] = take_apart(norm, like)
        return self._norms[norm]

    def speaks(self, bias: Tensor) -> bool:
        """Whether a bias is anything but 0, asked once: every question to a GPU waits for all it has to do."""
        if id(bias) not in self._speaks:
            self._speaks[id(bias)] = bool(bias.any())
        return self._speaks[id(bias)]

    @cached_property
    def last(self) -> dict[nn.Module, list[nn.Module]]:
        """By part that has neurons, its last matrix and what stands behind it."""
        return last_modules(self.scope.model, self.blocks)

    @torch.no_grad()
    def output_weights(self, layer: int) -> tuple[Float[Tensor, "h d e"], Float[Tensor, " d"]]:
        """W_O of each head of a layer, and its bias, found by asking it."""
        if layer not in self._outputs:
            module = self.blocks[layer].output
            assert module is not None
            weight = next(module.parameters())
            width = weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
            zero = module(torch.zeros(1, width, dtype=weight.dtype, device=weight.device))[0].float()
            W = module(torch.eye(width, dtype=weight.dtype, device=weight.device)).float() - zero
            heads = self.scope.facts.layers[layer].n_heads
            self._outputs[layer] = W.unflatten(0, (heads, -1)).mT.contiguous(), zero
        return self._outputs[layer]

    def frame(self, head: Head, side: Side) -> Float[Tensor, "d_head d_model"]:
        """What a head reads of the stream at one token of a short prompt, of length 1.

        Rotation and norms differ from token to token; parts of different tokens are compared in one frame.
        """
        if self._short is None:
            inputs = short_inputs(self.scope.model, (7,))
            row = torch.zeros(1, dtype=torch.long, device=input_device(self.scope.model))
            self._short = self.record(inputs, Places(row, row + 1, row[:, None] + 2, row[:, None] == 0))
        run, kind = self._short, KINDS[side]
        J = run.layer(head.layer, run.at(side)).jacobian(kind, run.index(head, kind))[0, 0]
        return J / J.norm()

    @torch.no_grad()
    def record(
        self,
        inputs: dict[str, Tensor],
        places: Places,
        *visits: Callable[[Call], None],
        deep: bool = False,
        layers: Sequence[int] = (),
        logits: bool = False,
        neurons: bool = False,
    ) -> Run:
        """Run a batch up to the deepest layer that is read, and keep what the writers left at these places.

        Padded slots of keys hold column 0 and mean nothing.

        Parameters
        ----------
        inputs : of the model.
        places : where to look.
        visits : who else sees each attention call.
        deep : whether every layer can be asked, not only those of the heads: what their writers read, and why.
        layers : others whose input is kept.
        logits : whether to run the whole model, with next-token logits at the queries.
        neurons : whether to keep what the last matrix of every MLP is given.
        """
        keys = places.keys.masked_fill(~places.key_mask, 0)
        run = Run(self, places.row, torch.cat([places.query[:, None], keys], dim=1), inputs)
        rows, mask = len(next(iter(inputs.values()))), inputs.get("attention_mask")
        last = len(self.blocks) - 1 if logits else max(self.layers)
        kept = set(range(max(self.layers) + 1)) if deep else {*self.layers, *layers}
        last_of = self.last if neurons else {}
        pickers: list[Picker] = []

        def pick(value: Tensor) -> Tensor:
            value = value.reshape(rows, -1, value.shape[-1]) if value.ndim == 2 else value  # experts: tokens in one row
            return value[run.row.to(value.device)[:, None], run.columns.to(value.device)]

        def take(call: Call) -> None:
            if call.layer in kept:
                run.calls[call.layer] = call
                call.rotary = call.rotary and call.rotary.slim()
            if deep:  # one prompt: every row is made from its call
                if call.layer == last and not logits:
                    raise Stop
                return
            if not pickers:  # how many tokens an image has is seen here
                seen = torch.ones(rows, call.k.shape[2], device=places.row.device) if mask is None else mask
                everywhere = Places.everywhere(places.row, places.query, seen)
                pickers.append(Picker(self.scope.facts, self.heads, everywhere, "post_rope", stop=not logits))
            pickers[0].visit(call)

        def entering(layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if layer == 0 or not deep or layer in layers:
                run.entered[layer] = pick(stream_of(args, kwargs))
            if layer in kept:
                run.called[layer] = args, kwargs

        def giving(noted: dict[Any, Tensor], key: Any, _module: nn.Module, args: tuple[Any, ...]) -> None:
            noted[key] = pick(args[0])

        def putting_out(module: nn.Module, _args: Any, out: Any) -> None:
            run.gave[module] = pick(out[0] if isinstance(out, tuple | list) else out)

        def leaving(_module: nn.Module, _args: Any, out: Any) -> Any:
            """From here on, logits are a linear function of what leaves the last block."""
            torch.set_grad_enabled(True)
            inside = {module for block in self.blocks for module in block.module.modules()}
            hooks.extend(Frozen().hooks(module for module in self.scope.model.modules() if module not in inside))
            several = isinstance(out, tuple | list)
            run.left = (out[0] if several else out).detach().requires_grad_()
            return type(out)([run.left, *out[1:]]) if several else run.left

        hooks: list[Any] = []
        with cleared(hooks):
            if logits:
                hooks.append(self.blocks[-1].module.register_forward_hook(leaving))
            for layer, block in enumerate(self.blocks[: last + 1]):
                if layer == 0 or layer in kept:
                    hooks.append(block.module.register_forward_pre_hook(partial(entering, layer), with_kwargs=True))
                if layer < last or logits:
                    if block.output is not None:
                        hooks.append(block.output.register_forward_pre_hook(partial(giving, run.heads, layer)))
                    hooks += [norm.register_forward_pre_hook(partial(giving, run.given, norm)) for norm in block.norms]
                    hooks += [module.register_forward_hook(putting_out) for module in block.parts]
                    for part in last_of.keys() & block.parts:
                        hooks.append(last_of[part][0].register_forward_pre_hook(partial(giving, run.neurons, part)))
            run.logits = self.scope.watch(inputs, *visits, take, rotary=True, logits_at=places if logits else None)
        if pickers:
            run.captured = pickers[0].finish(places.row, {})
        run.in_full()
        return run

    def record_prompt(self, encoded: Encoding, query: int | None = None) -> Run:
        """Run one prompt with every token of it as a key, and keep every layer."""
        ids = encoded.inputs["input_ids"]
        if len(ids) != 1 or not bool(encoded.inputs["attention_mask"].all()):
            raise BadInput(f"one prompt is followed down its writers, but got {len(ids)}.")
        row = encoded.places.row[:1]
        at = encoded.places.query[:1] if query is None else torch.full_like(row, query)
        return self.record(encoded.inputs, Places.everywhere(row, at, encoded.inputs["attention_mask"]), deep=True)


def _refuse_quantised(scope: Scope) -> None:
    for name, weight in scope.model.named_parameters():
        if not weight.is_floating_point():
            raise BadInput(
                f"{scope.name} cannot be traced: {name} is stored in {weight.dtype}, and what writers give is split by"
                " gradients, which need numbers with a fraction; load the model without quantisation."
            )
