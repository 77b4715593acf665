"""One layer's own code with norms frozen: its vectors as functions of the stream, by autograd.

With a norm ``N(x) = gain ⊙ σ(x) C x + bias`` frozen at what it did to the true input, everything
between the residual stream and the queries, keys and values of a head is affine: projections,
biases, QK-norm, latent attention, rotation. There are two ways to ask a layer for this map.

1. Its own code (`AffineLayer`, here): the block runs again up to its attention, at the tokens in
   question, and autograd gives the linear part: ``q = J x + c``, ``J = ∂q/∂x``, ``c = q(0)``, and
   the same for k and v. No weight is read and no rotation is written down, so it serves any
   family. If more than norms depends on the input, the layer is not affine: ``J x + c`` then misses
   the true vectors, and the error that is reported with every split shows it.
2. A closed form (``closed_form``): one product for many heads of many layers, hence fast. It is
   compared with the true vectors in every run; a layer that differs is asked by its own code.

`PartLayer` does the same for what a block's MLP puts out, where a graph goes on through it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from qkscope import Scope
from qkscope.model.block_tree import Frozen
from qkscope.model.tap import Call, Stop, cleared, tap

if TYPE_CHECKING:
    from qkscope.linear.run import Run

Projection = Literal["q", "k", "v"]
PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v")

_AGREEMENT = 1e-4  # largest difference of recomputed vectors from the true ones, of the largest
_MAX_NUMBERS = 2**26  # numbers that gradients of several directions may take at once


def stream_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Float[Tensor, "b t d_model"]:
    """The residual stream among a block's arguments."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


class BlockArguments(NamedTuple):
    """What a block was called with in a forward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def stream(self) -> Float[Tensor, "b t d_model"]:
        """The residual stream that enters the block."""
        return stream_of(self.args, self.kwargs)


def tolerance(vectors: Tensor) -> float:
    """Relative tolerance on recomputed vectors: the model rounds its own to its dtype."""
    return max(_AGREEMENT, 4 * torch.finfo(vectors.dtype).eps)


def _float_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters in float32, of a module that holds them in another dtype."""
    weights = {}
    for name, weight in module.named_parameters():
        if weight.dtype != torch.float32:
            weights[name] = weight.detach().float()
    return weights


class AffineLayer:
    """Queries, keys and values of one layer, at p tokens of n rows, as affine functions of x.

    The tokens are run without the rest of their prompts where that gives the same vectors. Else
    whole prompts are run: a family may count columns, or mix tokens before its attention.

    Parameters
    ----------
    scope : the model.
    layer, block : number of the layer, and its module.
    arguments : what the block was called with in the forward pass.
    call : its attention call in that pass, with the true vectors.
    row, columns : sequence of the batch that each row belongs to, and its tokens.

    Attributes
    ----------
    alone : whether the tokens are run without the rest of their prompts.
    norms : the norms that ran, with their scalars.
    """

    def __init__(
        self,
        scope: Scope,
        layer: int,
        block: nn.Module,
        arguments: BlockArguments,
        call: Call,
        row: Int[Tensor, " n"],
        columns: Int[Tensor, "n p"],
    ) -> None:
        self.scope = scope
        self.layer = layer
        self.block = block
        self.arguments = arguments
        self.call = call
        self.stream = arguments.stream
        self.row = row.to(self.stream.device)
        self.columns = columns.to(self.stream.device)
        self.norms = Frozen()
        self.alone = not scope.facts.anatomy.own  # code that is watched as it runs wants it all
        if not (self.alone and self._runs_alone()):
            self.alone = False
            self.norms = Frozen()
            self._trace()

    def reads(self, kind: Projection) -> bool:
        """Whether these vectors depend on the stream: some layers use another layer's keys."""
        return self._vectors[kind].requires_grad

    def unit(self, unbiased: Collection[nn.Module] = ()) -> None:
        """Set every norm's scalar to 1 from now on, and drop the biases of some norms."""
        self.norms.unit(unbiased)
        self._trace()

    # ------------------------------------------------------------------ forward: c, and other x

    @cached_property
    @torch.no_grad()
    def constants(self) -> dict[Projection, Float[Tensor, "n p h d"]]:
        """Constants c: every head's vectors for a stream of zeros."""
        zeros = torch.zeros_like(self.x)
        vectors = self._push(zeros, self.row, self.columns, frozen=True)
        return self._at_tokens(vectors, self.columns)

    def pushed(
        self, x: Float[Tensor, "x n p d_model"], frozen: bool = False
    ) -> dict[Projection, Float[Tensor, "x n p h d"]]:
        """Vectors for other streams at these tokens, with norms live or frozen."""
        together = len(x) if self.alone else 1
        few = x.to(self.x).split(together)
        chunks = [self._push_some(streams, frozen) for streams in few]
        vectors: dict[Projection, Tensor] = {}
        for kind in PROJECTIONS:
            joined = torch.cat([chunk[kind] for chunk in chunks])
            vectors[kind] = joined.unflatten(0, (len(x), -1))
        return vectors

    def _push_some(
        self, x: Float[Tensor, "x n p d_model"], frozen: bool
    ) -> dict[Projection, Float[Tensor, "xn p h d"]]:
        """Vectors for a few streams in one pass; for one, where whole prompts are run."""
        row = self.row.repeat(len(x))
        columns = self.columns.repeat(len(x), 1)
        stream = x.flatten(0, 1)
        if not self.alone:
            stream = self._within_prompts(stream)
        return self._at_tokens(self._push(stream, row, columns, frozen), columns)

    def _within_prompts(self, tokens: Float[Tensor, "n p d_model"]) -> Float[Tensor, "n t d_model"]:
        """The stream of the whole prompts, with these vectors at the p tokens."""
        stream = self.x.detach().clone()
        rows = torch.arange(len(stream), device=stream.device)
        # padded slots come last and repeat a token: what a real slot holds must be written last
        for slot in reversed(range(tokens.shape[1])):
            stream[rows, self.columns[:, slot]] = tokens[:, slot]
        return stream

    def _at_tokens(
        self, vectors: dict[Projection, Float[Tensor, "m t h d"]], columns: Int[Tensor, "m p"]
    ) -> dict[Projection, Float[Tensor, "m p h d"]]:
        """Select the tokens in question."""
        if self.alone:
            return vectors
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        return {kind: value[rows, columns] for kind, value in vectors.items()}

    # ------------------------------------------------------------------ the block's own code

    def _runs_alone(self) -> bool:
        """Trace the tokens without their prompts; False if that fails or gives other vectors."""
        try:
            self._trace()
            return self._agrees("q") and self._agrees("k")
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False  # its code wants the whole prompt

    def _agrees(self, kind: Literal["q", "k"]) -> bool:
        """Whether recomputed vectors are those that the attention was given."""
        of_prompts = getattr(self.call, kind)
        by_token = of_prompts.transpose(1, 2)
        true = by_token[self.row[:, None], self.columns].float()
        recomputed = self._vectors[kind].detach()
        if recomputed.shape != true.shape:
            return False
        error = (recomputed - true).abs().max()
        return bool(error <= tolerance(of_prompts) * true.abs().max())

    def _trace(self) -> None:
        """Compute the vectors of the true stream, which becomes the leaf of their graph."""
        vars(self).pop("constants", None)
        if self.alone:
            x = self.stream[self.row[:, None], self.columns]
        else:
            x = self.stream[self.row]
        self.x = x.detach().float().requires_grad_()
        with torch.enable_grad():
            self._vectors = self._push(self.x, self.row, self.columns, frozen=True)

    def _push(
        self,
        x: Float[Tensor, "m t d_model"],
        row: Int[Tensor, " m"],
        columns: Int[Tensor, "m p"],
        frozen: bool,
    ) -> dict[Projection, Float[Tensor, "m t h d"]]:
        """Vectors of a stream, of these tokens or of whole prompts, in float32 for any dtype."""

        def for_stream(value: Tensor) -> Tensor:
            """An argument of the block, as it goes with x."""
            if value is self.stream:
                return x
            value = self._gathered(value, row.to(value.device), columns.to(value.device))
            return value.float() if value.is_floating_point() else value

        call = self._attention_call(tree_map_only(Tensor, for_stream, self.arguments), frozen)
        return {kind: getattr(call, kind).float().transpose(1, 2) for kind in PROJECTIONS}

    def _attention_call(self, arguments: BlockArguments, frozen: bool) -> Call:
        """Run the block up to its attention."""
        calls: list[Call] = []
        stop = Stop()

        def take(call: Call) -> None:
            calls.append(call)
            raise stop

        hooks = self.norms.hooks(self.block.modules()) if frozen else []
        weights = _float_weights(self.block)
        layers = {id(self.call.module): self.layer}
        anatomy = self.scope.facts.anatomy
        watched = tap(self.scope.model, take, layers=layers, anatomy=anatomy, within=self.block)
        with cleared(hooks, stop), watched:
            functional_call(self.block, weights, arguments.args, arguments.kwargs)
        return calls[0]

    def _gathered(
        self, value: Tensor, row: Int[Tensor, " m"], columns: Int[Tensor, "m p"]
    ) -> Tensor:
        """An argument of the block for some rows at their tokens; a mask is left as it is."""
        batch, tokens = self.stream.shape[:2]
        if self.alone:
            by_token = value.ndim in (2, 3) and value.shape[1] == tokens
            if by_token and len(value) in (1, batch):
                return value.expand(batch, *value.shape[1:])[row[:, None], columns]
            return value
        if value.ndim < 2 or len(value) % batch:
            return value
        if len(value) == 1 and batch > 1:
            return value
        return value.unflatten(0, (batch, -1))[row].flatten(0, 1)  # ALiBi: sequences times heads

    # ------------------------------------------------------------------ backward: the linear part

    def pull(
        self, kind: Projection, heads: Sequence[int], along: Float[Tensor, "b n p d"]
    ) -> tuple[Float[Tensor, "b n p d_model"], Float[Tensor, "b n p"]]:
        """Pull directions on heads' vectors back to the stream: ``Jᵀ y`` and ``c·y``.

        Parameters
        ----------
        kind : queries, keys or values.
        heads : of each direction, the head: a query head, or a head of keys or values.
        along : directions y at every token.

        Returns
        -------
        directions on the stream, and each direction's product with the constants
        """
        index = torch.tensor(heads, device=self.x.device)
        along = along.to(self.x)
        together = max(_MAX_NUMBERS // self._vectors[kind].numel(), 1)
        chunks = zip(index.split(together), along.split(together), strict=True)
        pulled = [self._pull_some(kind, chunk, directions) for chunk, directions in chunks]
        of_heads = self.constants[kind][:, :, index]
        constants = of_heads.permute(2, 0, 1, 3)
        return torch.cat(pulled), (along * constants).sum(-1)

    def _pull_some(
        self, kind: Projection, heads: Int[Tensor, " b"], along: Float[Tensor, "b n p d"]
    ) -> Float[Tensor, "b n p d_model"]:
        vectors = self._vectors[kind]
        each = torch.arange(len(along), device=self.x.device)
        directions = vectors.new_zeros(len(along), *vectors.shape)
        if self.alone:
            directions[each, :, :, heads] = along
            return self._gradient(vectors, directions)
        on_stream = along.new_zeros(*along.shape[:-1], self.x.shape[-1])
        # slots that name the same token have one gradient between them, so they take turns
        same_token = self.columns[:, :, None] == self.columns[:, None]
        turn = same_token.tril(-1).sum(-1)
        for number in range(int(turn.max()) + 1):
            row, slot = (turn == number).nonzero(as_tuple=True)
            column = self.columns[row, slot]
            directions.zero_()
            directions[each[:, None], row, column, heads[:, None]] = along[:, row, slot]
            gradient = self._gradient(vectors, directions)
            on_stream[:, row, slot] = gradient[:, row, column]
        return on_stream

    def _gradient(
        self, vectors: Float[Tensor, "n t h d"], directions: Float[Tensor, "b n t h d"]
    ) -> Float[Tensor, "b n t d_model"]:
        """The gradient with respect to the stream, of several directions in one call."""
        gradients = torch.autograd.grad(
            vectors, self.x, directions, retain_graph=True, is_grads_batched=True
        )
        return gradients[0]

    def jacobian(self, kind: Projection, head: int) -> Float[Tensor, "n p d d_model"]:
        """The Jacobian J of one head's vectors, ``∂(vector)/∂(stream)``, at each token."""
        width = self._vectors[kind].shape[-1]
        unit_vectors = torch.eye(width, device=self.x.device)[:, None, None]
        along = unit_vectors.expand(-1, *self.columns.shape, -1)
        rows, _ = self.pull(kind, [head] * width, along)
        return rows.permute(1, 2, 0, 3)


class PartLayer:
    """Outputs of one block's parts besides its heads, as functions of its stream and its heads.

    The block's own code runs again, norms frozen, on some tokens of one prompt; a direction is
    pulled back by autograd. A part is not linear: what its gradient misses of it is a constant.

    Parameters
    ----------
    run : of one prompt, with every token as a key.
    layer : number of the block.
    tokens : places in the prompt.

    Attributes
    ----------
    x : the stream at the tokens, a leaf, Float [1, p, d_model].
    z : the heads' outputs before W_O, a leaf, Float [1, p, h·e]; None in a block without heads.
    out : by part, what it puts out, Float [1, p, d_model].
    """

    def __init__(self, run: Run, layer: int, tokens: Int[Tensor, " p"]) -> None:
        block = run.reader.blocks[layer]
        arguments = run.block_arguments[layer]
        stream = arguments.stream
        x = stream[:, tokens.to(stream.device)]
        self.x = x.detach().float().requires_grad_()
        self.z: Tensor | None = None
        if layer in run.heads:
            outputs = run.heads[layer][:, 1 + tokens]  # slot 0 is the query
            self.z = outputs.to(stream.device).requires_grad_()
        self.out: dict[nn.Module, Tensor] = {}

        def at_tokens(value: Tensor) -> Tensor:
            """An argument of the block at these tokens; the leaf, if it is the stream."""
            by_token = value.ndim in (2, 3) and value.shape[1] == stream.shape[1]
            if by_token:
                value = self.x if value is stream else value[:, tokens.to(value.device)]
            return value.float() if value.is_floating_point() else value

        hooks = Frozen().hooks(block.module.modules())
        for part in block.parts:
            hooks.append(part.register_forward_hook(self._note_output))
        if block.output is not None:
            hooks.append(block.output.register_forward_pre_hook(self._give_heads))
        model = run.reader.scope.model
        anatomy = run.reader.scope.facts.anatomy
        layers = {} if self.z is None else {id(run.calls[layer].module): layer}
        # the heads' outputs are known, so the attention need not run
        watched = tap(model, _skip_attention, layers=layers, anatomy=anatomy, within=block.module)
        weights = _float_weights(block.module)
        args, kwargs = tree_map_only(Tensor, at_tokens, arguments)
        with cleared(hooks), watched, torch.enable_grad():
            functional_call(block.module, weights, args, kwargs)

    def _give_heads(
        self, _module: nn.Module, args: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        """Hook of W_O: put the heads' recorded outputs in the place of its input."""
        if self.z is None:
            return None
        return self.z.reshape(args[0].shape), *args[1:]

    def _note_output(self, part: nn.Module, _args: Any, out: Any) -> None:
        """Hook of a part: keep what it puts out."""
        out = out[0] if isinstance(out, tuple) else out
        # a frozen norm runs once more on a single vector, to be taken apart
        if out.numel() == self.x.numel():
            self.out[part] = out.reshape(self.x.shape)

    def pull(
        self, part: nn.Module, along: Float[Tensor, "1 p d_model"]
    ) -> tuple[Float[Tensor, "1 p d_model"], Float[Tensor, "1 p he"], Float[Tensor, "1 p"]]:
        """Pull a direction on a part's output back to the stream and to the heads' outputs.

        Returns
        -------
        the direction on each of them, and what their sum misses of the part's value
        """
        out = self.out[part]
        leaves = [self.x] if self.z is None else [self.x, self.z]
        gradients = torch.autograd.grad(out, leaves, along.to(out), allow_unused=True)
        missed = (out * along.to(out)).sum(-1)
        directions: list[Tensor] = []
        for leaf, gradient in zip(leaves, gradients, strict=True):
            direction = torch.zeros_like(leaf) if gradient is None else gradient
            missed = missed - (leaf * direction).sum(-1)
            directions.append(direction.detach().to(along))
        on_stream = directions[0]
        on_heads = on_stream[..., :0] if self.z is None else directions[1]
        return on_stream, on_heads, missed.detach().to(along)


def _skip_attention(call: Call) -> None:
    """Visit an attention call: put out zeros instead of computing it."""
    batch, heads, queries, _ = call.q.shape
    call.output = call.q.new_zeros(batch, queries, heads, call.v.shape[-1])
