"""Some heads of a model, ready to be split: its blocks, their weights, and forwards recorded.

A `Reader` is made once for a model and its heads. It names the writers before every layer, reads
W_O and the layers' closed forms when they are first needed, and records forward passes as `Run`.
What no token decides (biases of any kind) is the writer `BIAS`, always the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope import BadInput, Scope
from qkscope.heads import BIAS, EMBEDDING, Head, Side, Writer
from qkscope.linear.attribution import last_modules
from qkscope.linear.closed_form import Matrices
from qkscope.linear.head_weights import BlockCall, Form, form_of, recorded
from qkscope.linear.layer import Projection
from qkscope.linear.recording import Recording
from qkscope.linear.run import KINDS, Run
from qkscope.model.batching import index_on
from qkscope.model.block_tree import Heads, Norm, Part, read_blocks, take_apart, walk
from qkscope.model.capture_types import Places
from qkscope.model.inputs import input_device, short_inputs
from qkscope.model.tap import Call
from qkscope.text import grouped

T = TypeVar("T")


def _cached(method: Callable[..., T]) -> Callable[..., T]:
    """Cache a method's result: a model's weights do not change while it is read."""

    @wraps(method)
    def call(self: Reader, *args: Any) -> T:
        key = method.__name__, *args
        if key not in self._cache:
            self._cache[key] = method(self, *args)
        return self._cache[key]

    return call


def _joined(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat(list(tensors)).to(device)


class Reader:
    """Some heads of a model, and its blocks.

    Parameters
    ----------
    scope : the model.
    heads : whose queries and keys are split.

    Attributes
    ----------
    layers : those of the heads, in order.
    blocks : the model's blocks, taken apart.
    together : layers in one product: on a GPU a launch costs more than the work of one layer.
    overwrites : whether blocks write into what their parts put out, as far as is known.
    """

    def __init__(self, scope: Scope, heads: Sequence[Head]) -> None:
        self.scope = scope
        self.heads = list(heads)
        self.layers = sorted({head.layer for head in heads})
        for name, weight in scope.model.named_parameters():
            if not weight.is_floating_point():
                raise BadInput(
                    f"{scope.name} cannot be traced: {name} is stored in {weight.dtype}, and what "
                    "writers give is split by gradients, which need numbers with a fraction; "
                    "load the model without quantisation."
                )
            if weight.is_inference():
                made = f"{name} was made under torch.inference_mode, where no gradient is taken"
                raise BadInput(f"{scope.name} cannot be traced: {made}; load the model outside it.")
        self.blocks = read_blocks(scope.model, scope.facts.layer_of)
        self.overwrites = False
        self.device = input_device(scope.model)
        self.together = 4 if self.device.type == "cpu" else 64
        self._norms: dict[nn.Module, Norm] = {}
        self._cache: dict[Any, Any] = {}

    def index(self, numbers: list[int]) -> Int[Tensor, " n"]:
        """Numbers on the model's device, brought there once."""
        return index_on(self.device, tuple(numbers))

    # ------------------------------------------------------------------ names of writers

    @_cached
    def writers(self, layer: int) -> list[str]:
        """Names of all writers before a layer, in the order of every split, `BIAS` last."""
        names = [EMBEDDING]
        for before, block in enumerate(self.blocks[:layer]):
            for node in walk(block.tree):
                if isinstance(node, Heads):
                    names += self.head_names(before)
                elif isinstance(node, Part):
                    names.append(self.part_name(before, node.module))
        return [*names, BIAS]

    @_cached
    def head_names(self, layer: int) -> list[str]:
        """Names of the heads of a layer."""
        count = self.scope.facts.layers[layer].n_heads
        return [str(Head(layer, i)) for i in range(count)]

    def part_name(self, layer: int, module: nn.Module) -> str:
        """Name of a part besides the heads: ``M17``, numbered if its block has several."""
        parts = self.blocks[layer].parts
        number = () if len(parts) == 1 else (parts.index(module),)
        return str(Writer(layer, "mlp", number))

    # ------------------------------------------------------------------ modules and weights

    @cached_property
    def last(self) -> dict[nn.Module, list[nn.Module]]:
        """By part that has neurons, its last matrix and what stands behind it."""
        return last_modules(self.scope.model, self.blocks)

    @_cached
    @torch.no_grad()
    def output_weights(self, layer: int) -> tuple[Float[Tensor, "h d e"], Float[Tensor, " d"]]:
        """W_O of each head of a layer, and its bias, read by running the module."""
        module = self.blocks[layer].output
        assert module is not None
        weight = next(module.parameters())
        transposed = type(module).__name__ == "Conv1D"
        width = weight.shape[0] if transposed else weight.shape[1]
        bias = module(weight.new_zeros(1, width))[0].float()
        unit_vectors = torch.eye(width, dtype=weight.dtype, device=weight.device)
        W = module(unit_vectors).float() - bias
        count = self.scope.facts.layers[layer].n_heads
        by_head = W.unflatten(0, (count, -1))
        return by_head.mT.contiguous(), bias

    @_cached
    def stacked_outputs(self, layers: tuple[int, ...]) -> Float[Tensor, "l h d e"]:
        """W_O of the heads of layers of one shape."""
        weights = [self.output_weights(layer)[0] for layer in layers]
        return torch.stack([W.to(self.device) for W in weights])

    def norm(self, module: nn.Module, like: Tensor) -> Norm:
        """A norm's gain, bias and centring, found once by running it."""
        if module not in self._norms:
            self._norms[module] = take_apart(module, like)
        return self._norms[module]

    @_cached
    def is_nonzero(self, bias: Tensor) -> bool:
        """Whether a bias is not 0, read once: every read from a GPU waits for its queue."""
        return bool(bias.any())

    # ------------------------------------------------------------------ layers in closed form

    @_cached
    def form(self, layer: int) -> Form | None:
        """A layer's closed form; None where it has none."""
        facts = self.scope.facts
        if facts.anatomy.own and "pre_rope" in facts.layers[layer].refusals:
            return None
        try:
            form = form_of(self.scope, layer, self._block_calls[layer])
        except Exception:  # its code may fail in any way on such a call, and is then used as it is
            return None
        return form if len(form.norms) < 2 else None

    @cached_property
    def _block_calls(self) -> dict[int, BlockCall]:
        return recorded(self.scope, max(self.scope.facts.layer_of.values()))

    def reject(self, layers: Iterable[int]) -> None:
        """Use the model's own code for some layers from now on, instead of the closed form."""
        for layer in layers:
            self._cache["form", layer] = None

    @_cached
    def matrices(self, kind: Projection, heads: tuple[tuple[int, int], ...]) -> Matrices:
        """W, a and c of heads by layer and number, layer by layer, and each layer's eps."""
        W = []
        a = []
        c = []
        eps: list[float] = []
        for layer, members in grouped(heads, lambda head: head[0]).items():
            form = self.form(layer)
            assert form is not None
            numbers = [number for _, number in members]
            of_layer, constants = form.matrices(kind, numbers)
            W.append(of_layer)
            a.append(constants)
            c.append(form.offsets[kind][numbers])
            eps += [norm.eps for norm in form.norms]
        device = self.device
        eps_by_layer = torch.tensor(eps, device=device) if eps else None
        return Matrices(_joined(W, device), _joined(a, device), _joined(c, device), eps_by_layer)

    def frame(self, head: Head, side: Side) -> Float[Tensor, "d_head d_model"]:
        """The Jacobian of a head's vector at one token of a short prompt, of length 1.

        Rotation and norms differ from token to token; parts of different tokens are compared in
        one frame.
        """
        run = self._short
        kind = KINDS[side]
        layer = run.layer(head.layer, run.at(side))
        J = layer.jacobian(kind, run.index(head, kind))[0, 0]
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
        """Run a batch up to the deepest layer read, and keep what writers left at these places.

        Padded slots of keys hold column 0 and mean nothing.

        Parameters
        ----------
        inputs : of the model.
        places : where to look.
        deep : whether every layer can be asked, not only those of the heads: what their writers
            read, and why; or which layers can be.
        last : layer whose writers are wanted, where the model runs on to its logits; by default
            any.
        layers : others whose input is kept, and that of their MLP.
        logits : whether to run the whole model, with next-token logits at the queries.
        neurons : whether to keep the input of every MLP's last matrix.
        visits : see, and may change, every attention call.
        """
        recording = Recording(
            self,
            inputs,
            places,
            deep=deep,
            last=last,
            layers=layers,
            logits=logits,
            neurons=neurons,
            visits=visits,
        )
        return recording.record()
