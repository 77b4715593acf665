"""Some heads, ready to say who wrote what they read: a model's blocks taken apart, and forwards
recorded.

Outputs of heads are recorded before ``W_O`` and only at the places asked for, so that a pass costs
little more than the forward. What no token decides (biases of any kind) is the writer `BIAS`,
always the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial, wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope import BadInput, Scope
from qkscope.heads import BIAS, EMBEDDING, Head, Writer
from qkscope.linear.attribution import last_modules
from qkscope.linear.head_weights import BlockCall, Form, form_of, recorded
from qkscope.linear.layer import Kind, stream_of
from qkscope.linear.run import KINDS, Run, Side, fits
from qkscope.model.batching import index_on
from qkscope.model.block_tree import Frozen, Heads, Norm, Part, read_blocks, take_apart, walk
from qkscope.model.capture_types import Places
from qkscope.model.inputs import input_device, short_inputs
from qkscope.model.tap import Call, Stop, cleared

T = TypeVar("T")


def last_alone(call: Call) -> Call:
    """An attention call with the queries of its last token alone, which stand for those of all."""
    return replace(call, q=call.q[:, :, -1:].clone().expand_as(call.q))


def _once(method: Callable[..., T]) -> Callable[..., T]:
    """Cache a method's result: a model's weights do not change while it is read."""

    @wraps(method)
    def ask(self: Reader, *args: Any) -> T:
        key = method.__name__, *args
        if key not in self._said:
            self._said[key] = method(self, *args)
        return self._said[key]

    return ask


class Reader:
    """Some heads of a model, and its blocks.

    Parameters
    ----------
    scope : the model.
    heads : whose queries and keys are split.

    Attributes
    ----------
    together : layers in one product: a GPU waits for its orders, and a call costs more than what it
        does.
    """

    def __init__(self, scope: Scope, heads: Sequence[Head]) -> None:
        self.scope = scope
        self.heads = list(heads)
        self.layers = sorted({head.layer for head in heads})
        for name, weight in scope.model.named_parameters():
            if not weight.is_floating_point():
                why = "what writers give is split by gradients, which need numbers with a fraction"
                stored = f"{name} is stored in {weight.dtype}, and {why}; load the model without quantisation"
                raise BadInput(f"{scope.name} cannot be traced: {stored}.")
            if weight.is_inference():
                made = f"{name} was made under torch.inference_mode, where no gradient is taken"
                raise BadInput(f"{scope.name} cannot be traced: {made}; load the model outside it.")
        self.blocks = read_blocks(scope.model, scope.facts.layer_of)
        self._norms: dict[nn.Module, Norm] = {}
        self._said: dict[Any, Any] = {}
        self._overwrites = False  # whether blocks write into what their parts put out
        self.device = input_device(scope.model)
        self.together = 4 if self.device.type == "cpu" else 64

    def index(self, numbers: list[int]) -> Int[Tensor, " n"]:
        """Numbers on the model's device, brought there once."""
        return index_on(self.device, tuple(numbers))

    # ------------------------------------------------------------------ who writes

    @_once
    def writers(self, layer: int) -> list[str]:
        """Names of all that write before a layer, in the order of every split, `BIAS` last."""
        names = [EMBEDDING]
        for before, block in enumerate(self.blocks[:layer]):
            for node in walk(block.tree):
                if isinstance(node, Heads):
                    names += self.head_names(before)
                elif isinstance(node, Part):
                    names.append(self.part_name(before, node.module))
        return [*names, BIAS]

    @_once
    def head_names(self, layer: int) -> list[str]:
        """Names of the heads of a layer."""
        return [str(Head(layer, i)) for i in range(self.scope.facts.layers[layer].n_heads)]

    def part_name(self, layer: int, module: nn.Module) -> str:
        """``M17``, and where a block has more than one part besides its heads, their numbers behind
        it.
        """
        parts = self.blocks[layer].parts
        return str(Writer(layer, "mlp", () if len(parts) == 1 else (parts.index(module),)))

    @cached_property
    def last(self) -> dict[nn.Module, list[nn.Module]]:
        """By part that has neurons, its last matrix and what stands behind it."""
        return last_modules(self.scope.model, self.blocks)

    @_once
    @torch.no_grad()
    def output_weights(self, layer: int) -> tuple[Float[Tensor, "h d e"], Float[Tensor, " d"]]:
        """W_O of each head of a layer, and its bias, found by asking it."""
        module = self.blocks[layer].output
        assert module is not None
        weight = next(module.parameters())
        width = weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
        zero = module(weight.new_zeros(1, width))[0].float()
        W = module(torch.eye(width, dtype=weight.dtype, device=weight.device)).float() - zero
        return W.unflatten(0, (self.scope.facts.layers[layer].n_heads, -1)).mT.contiguous(), zero

    @_once
    def stacked_outputs(self, layers: tuple[int, ...]) -> Float[Tensor, "l h d e"]:
        """W_O of the heads of layers of one shape."""
        return torch.stack([self.output_weights(layer)[0].to(self.device) for layer in layers])

    def taken_apart(self, norm: nn.Module, like: Tensor) -> Norm:
        """A norm's gain, bias and centring, asked for once."""
        if norm not in self._norms:
            self._norms[norm] = take_apart(norm, like)
        return self._norms[norm]

    @_once
    def speaks(self, bias: Tensor) -> bool:
        """Whether a bias is not 0, read once: every read from a GPU waits for its queue."""
        return bool(bias.any())

    # ------------------------------------------------------------------ layers in closed form

    @_once
    def form(self, layer: int) -> Form | None:
        """A layer's closed form; None where it has none."""
        if self.scope.facts.anatomy.own and "pre_rope" in self.scope.facts.layers[layer].refusals:
            return None
        try:
            form = form_of(self.scope, layer, self._block_calls[layer])
        except (
            Exception
        ):  # a layer asked so may fail in any way: then its own code is asked instead
            return None
        return form if len(form.norms) < 2 else None

    @cached_property
    def _block_calls(self) -> dict[int, BlockCall]:
        return recorded(self.scope, max(self.scope.facts.layer_of.values()))

    def reject(self, layers: Iterable[int]) -> None:
        """Use the model's own code for some layers from now on, instead of the closed form."""
        self._said |= {("form", layer): None for layer in layers}

    @_once
    def matrices(
        self, kind: Kind, own: tuple[tuple[int, int], ...]
    ) -> tuple[
        Float[Tensor, "h d e"],
        Float[Tensor, "h d"],
        Float[Tensor, "h d"],
        Float[Tensor, " l"] | None,
    ]:
        """W, a and c (`weights.Form`) of heads by layer and number, and what each layer's norm adds
        under its root.
        """
        found = []
        eps = []
        for layer in dict.fromkeys(layer for layer, _ in own):
            form = self.form(layer)
            heads = [index for other, index in own if other == layer]
            assert form is not None
            found.append((*form.matrices(kind, heads), form.offsets[kind][heads]))
            eps += [norm.eps for norm in form.norms]
        W, a, c = (torch.cat(parts).to(self.device) for parts in zip(*found, strict=True))
        return W, a, c, torch.tensor(eps, device=self.device) if eps else None

    def frame(self, head: Head, side: Side) -> Float[Tensor, "d_head d_model"]:
        """What a head reads of the stream at one token of a short prompt, of length 1.

        Rotation and norms differ from token to token; parts of different tokens are compared in one
        frame.
        """
        run = self._short
        kind = KINDS[side]
        J = run.layer(head.layer, run.at(side)).jacobian(kind, run.index(head, kind))[0, 0]
        return J / J.norm()

    @cached_property
    def _short(self) -> Run:
        row = torch.zeros(1, dtype=torch.long, device=self.device)
        places = Places(row, row + 1, row[:, None] + 2, row[:, None] == 0)
        return self.record(short_inputs(self.scope.model, (7,)), places)

    # ------------------------------------------------------------------ forwards

    @torch.no_grad()
    def record(
        self,
        inputs: dict[str, Tensor],
        places: Places,
        *,
        deep: bool | Sequence[int] = False,
        last: int | None = None,
        layers: Sequence[int] = (),
        logits: bool = False,
        neurons: bool = False,
        visits: Sequence[Callable[[Call], None]] = (),
    ) -> Run:
        """Run a batch up to the deepest layer that is read, and keep what the writers left at these
        places.

        Padded slots of keys hold column 0 and mean nothing.

        Parameters
        ----------
        inputs : of the model.
        places : where to look.
        deep : whether every layer can be asked, not only those of the heads: what their writers
            read, and why; or which layers can be.
        last : layer whose writers are asked about, where the model runs on to its logits; by
            default any.
        layers : others whose input is kept, and that of their MLP.
        logits : whether to run the whole model, with next-token logits at the queries.
        neurons : whether to keep what the last matrix of every MLP is given.
        visits : see, and may change, every attention call.
        """
        keys = places.keys.masked_fill(~places.key_mask, 0)
        run = Run(self, places.row, torch.cat([places.query[:, None], keys], dim=1), inputs)
        rows = len(next(iter(inputs.values())))
        deepest = max(self.layers) if last is None else last
        ends = (
            int(places.query[0]) + 1 if len(keys) == 1 else 0
        )  # where a prompt is asked about that runs alone
        end = len(self.blocks) - 1 if logits else deepest
        asked = self.layers if isinstance(deep, bool) else deep
        kept = set(range(deepest + 1)) if deep is True else {*asked, *layers}
        last_of = self.last if neurons else {}
        later = dict[Any, list[tuple[dict[Any, Tensor], Any, Tensor, int]]]()

        def note(noted: dict[Any, Tensor], key: Any, value: Any) -> None:
            value = value[0] if isinstance(value, tuple | list) else value
            value = (
                value.reshape(rows, -1, value.shape[-1]) if value.ndim == 2 else value
            )  # experts: tokens in one row
            if self._overwrites or not fits(value, len(self.blocks)):
                noted[key] = run.pick(value)
            else:
                later.setdefault((id(noted), value.shape, value.device), []).append(
                    (noted, key, value, value._version)
                )

        def given(noted: dict[Any, Tensor], key: Any, module: nn.Module) -> None:
            hooks.append(module.register_forward_pre_hook(lambda _, args: note(noted, key, args)))

        def take(call: Call) -> None:
            if call.layer in kept or logits:
                call = (
                    last_alone(call) if call.q.shape[2] == ends and call.layer > deepest else call
                )
                run.calls[call.layer] = call
                call.rotary = call.rotary and call.rotary.slim()
            if call.layer == end and not logits:
                raise Stop

        def entering(
            layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            if layer == 0 or layer in layers:
                note(run.entered, layer, stream_of(args, kwargs))
            if layer in kept:
                run.called[layer] = args, kwargs

        def leaving(_module: nn.Module, _args: Any, out: Any) -> Any:
            """From here on, logits are a linear function of what leaves the last block."""
            torch.set_grad_enabled(True)
            inside = {module for block in self.blocks for module in block.module.modules()}
            hooks.extend(
                Frozen().hooks(
                    module for module in self.scope.model.modules() if module not in inside
                )
            )
            several = isinstance(out, tuple | list)
            run.left = (out[0] if several else out).detach().requires_grad_()
            return type(out)([run.left, *out[1:]]) if several else run.left

        hooks: list[Any] = []
        with cleared(hooks):
            if logits:
                hooks.append(self.blocks[-1].module.register_forward_hook(leaving))
            for layer, block in enumerate(self.blocks[: end + 1]):
                if layer == 0 or layer in kept:
                    hooks.append(
                        block.module.register_forward_pre_hook(
                            partial(entering, layer), with_kwargs=True
                        )
                    )
                if layer == end and not logits:  # what it writes comes behind what is read
                    break
                for norm in block.norms:
                    given(run.given, norm, norm)
                if last is not None and layer > last:
                    continue
                if block.output is not None:
                    given(run.heads, layer, block.output)
                for part in block.parts:
                    hooks.append(
                        part.register_forward_hook(lambda part, _, out: note(run.gave, part, out))
                    )
                    if layer in layers:
                        given(run.given, part, part)
                    if part in last_of:
                        given(run.neurons, part, last_of[part][0])
            shown = None if logits or visits else {*kept, end}
            at = places if logits else None
            run.logits = self.scope.watch(
                inputs, *visits, take, rotary=True, logits_at=at, only=shown
            )
        if any(value._version != version for some in later.values() for *_, value, version in some):
            self._overwrites = (
                True  # a block adds to what its parts put out: what is noted must be copied at once
            )
            return self.record(
                inputs,
                places,
                deep=deep,
                last=last,
                layers=layers,
                logits=logits,
                neurons=neurons,
                visits=visits,
            )
        for some in later.values():
            for (noted, key, *_), value in zip(
                some, run.pick_all([value for *_, value, _ in some]), strict=True
            ):
                noted[key] = value
        return run
