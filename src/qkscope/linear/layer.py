"""One layer's own code, from the residual stream to its queries, keys and values, with every norm's scalar frozen.

With a norm ``N(x) = gain ⊙ σ(x) C x + bias`` frozen at what it did to the true input, all that stands between the
stream and the vectors of a head is affine: projections, biases, QK-norm, latent attention, rotation. So the block is
run again up to its attention, at the tokens that are asked about, and autograd gives its linear part:

    ``q = J x + c``,   ``J = ∂q/∂x``,   ``c = q(0)``,   and the same for k and v.

No weight is read and no rotation written down: whatever a family does, its own code does it. A layer in which more than
norms depends on the input is not affine: then ``J x + c`` misses the true vectors, as `check.sum_error` says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from qkscope.capture.blocks import Frozen
from qkscope.capture.scope import Scope
from qkscope.capture.tap import Call, Stop, cleared, tap

Kind = Literal["q", "k", "v"]
AGREES = 1e-4  # how far vectors of some tokens run alone may be from those of the whole prompt, of the largest
_ROOM = 2**26  # numbers that gradients of several directions may take at once


class Layer:
    """Queries, keys and values of one layer at p tokens of n rows, as affine functions of the stream there.

    Parameters
    ----------
    scope : the model.
    layer, block : which, and its module.
    given : what the block was called with in the forward: arguments, keyword arguments.
    true : its attention call in that forward.
    row, columns : which sequence of the batch each row is, and its tokens.
    """

    def __init__(
        self,
        scope: Scope,
        layer: int,
        block: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        true: Call,
        row: Int[Tensor, " n"],
        columns: Int[Tensor, "n p"],
    ) -> None:
        self.scope, self.layer, self.block, self.given, self.true = scope, layer, block, given, true
        self.hidden = stream_of(*given)
        self.row, self.columns = row.to(self.hidden.device), columns.to(self.hidden.device)
        self.at = self.row[:, None], self.columns
        self._jacobians: dict[tuple[Kind, int], Tensor] = {}
        self.x, self._vectors = self._found()

    # ------------------------------------------------------------------ the layer's own code

    def _made(self) -> tuple[Tensor, dict[Kind, Tensor]]:
        x = (self.hidden[self.at] if self.alone else self.hidden[self.row]).detach().float().requires_grad_()
        with torch.enable_grad():
            return x, self._push(x, self.row, self.columns, frozen=True)

    @cached_property
    @torch.no_grad()
    def constants(self) -> dict[Kind, Float[Tensor, "n p h d"]]:
        """What no stream decides: every head's vectors of a stream of 0."""
        return self._picked(self._push(torch.zeros_like(self.x), self.row, self.columns, frozen=True))

    def unit(self, unbiased: Collection[nn.Module] = ()) -> None:
        """From now on every norm's scalar is 1, and some norms have no bias."""
        self.norms.unit(unbiased)
        self._jacobians.clear()
        self.x, self._vectors = self._made()
        vars(self).pop("constants", None)

    def reads(self, kind: Kind) -> bool:
        """Whether its vectors are made of the stream at all; some layers read keys of another."""
        return self._vectors[kind].requires_grad

    def _found(self) -> tuple[Tensor, dict[Kind, Tensor]]:
        """The true stream, and its vectors: of these tokens run alone where that gives the same, else of whole prompts.

        A family may count columns, or mix tokens before its attention; then tokens alone are not what they were.
        """
        for alone in (True, False) if not self.scope.facts.anatomy.own else (False,):
            self.alone, self.norms = alone, Frozen()
            try:
                x, made = self._made()
                if not self.alone or all(self._agrees(made[kind].detach(), kind) for kind in ("q", "k")):
                    break
            except (RuntimeError, ValueError, IndexError, TypeError):  # its code wants the whole prompt
                if not self.alone:
                    raise
        return x, made

    def _agrees(self, mine: Float[Tensor, "n p h d"], kind: Kind) -> bool:
        whole = getattr(self.true, kind)
        true, close = whole.transpose(1, 2)[self.at].float(), max(AGREES, 4 * torch.finfo(whole.dtype).eps)
        return mine.shape == true.shape and bool((mine - true).abs().max() <= close * true.abs().max())

    def _push(self, x: Tensor, row: Tensor, columns: Tensor, frozen: bool) -> dict[Kind, Float[Tensor, "m t h d"]]:
        """Vectors of a stream: of these tokens, or of the whole prompts."""
        gather = partial(_at, columns=columns) if self.alone else _of_rows
        args, kwargs = _replaced(self.given, self.hidden, x, partial(gather, hidden=self.hidden, row=row))
        call = self._run(args, kwargs, frozen)
        return {kind: getattr(call, kind).float().transpose(1, 2) for kind in ("q", "k", "v")}

    def _picked(self, made: dict[Kind, Tensor]) -> dict[Kind, Float[Tensor, "n p h d"]]:
        """At the tokens asked about."""
        rows = torch.arange(len(self.row), device=self.row.device)[:, None]
        return made if self.alone else {kind: value[rows, self.columns] for kind, value in made.items()}

    def pushed(self, x: Float[Tensor, "x n p d_model"], frozen: bool = False) -> dict[Kind, Float[Tensor, "x n p h d"]]:
        """Vectors of other streams at these tokens, the norms running or frozen."""
        if self.alone:
            row, columns = self.row.repeat(len(x)), self.columns.repeat(len(x), 1)
            made = self._push(x.flatten(0, 1).to(self.x), row, columns, frozen)
            return {kind: value.unflatten(0, (len(x), -1)) for kind, value in made.items()}
        every, index = [], torch.arange(len(self.row), device=self.row.device)
        for stream in x.to(self.x):
            whole = self.x.detach().clone()
            for slot in reversed(range(stream.shape[1])):  # padded slots come last, on a token that may be named before
                whole[index, self.columns[:, slot]] = stream[:, slot]
            every.append(self._picked(self._push(whole, self.row, self.columns, frozen)))
        return {kind: torch.stack([made[kind] for made in every]) for kind in every[0]}

    def live(self, x: Float[Tensor, "x n p d_model"], kind: Kind, head: int) -> Float[Tensor, "x n p d"]:
        """A head's vectors of other streams at these tokens, its norms running."""
        return self.pushed(x)[kind][..., head, :].to(x)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], frozen: bool) -> Call:
        found: list[Call] = []
        stop = Stop()

        def take(call: Call) -> None:
            found.append(call)
            raise stop

        # half precision is for the model: what is split here is split in float32
        weights = self.block.named_parameters()
        full = {name: weight.detach().float() for name, weight in weights if weight.dtype != torch.float32}
        hooks = self.norms.hooks(self.block.modules()) if frozen else []
        layers, anatomy = {id(self.true.module): self.layer}, self.scope.facts.anatomy
        with cleared(hooks, stop), tap(self.scope.model, take, layers=layers, anatomy=anatomy, within=self.block):
            functional_call(self.block, full, args, kwargs)
        return found[0]

    # ------------------------------------------------------------------ its linear part

    def pull(
        self, kind: Kind, heads: Sequence[int], along: Float[Tensor, "b n p d"]
    ) -> tuple[Float[Tensor, "b n p d_model"], Float[Tensor, "b n p"]]:
        """Directions on heads' vectors as directions on the stream, and what the constants say in them.

        Parameters
        ----------
        kind : queries, keys or values.
        heads : of each direction, whose vectors: a query head, or a head of keys or values.
        along : directions at every token.
        """
        step = max(_ROOM // self._vectors[kind].numel(), 1)
        index = torch.tensor(heads, device=self.x.device)
        pulled = [
            self._pulled(kind, *some) for some in zip(index.split(step), along.to(self.x).split(step), strict=True)
        ]
        constants = self.constants[kind][:, :, index].permute(2, 0, 1, 3)
        return torch.cat(pulled), (along.to(constants) * constants).sum(-1)

    def _pulled(self, kind: Kind, heads: Tensor, along: Float[Tensor, "b n p d"]) -> Float[Tensor, "b n p d_model"]:
        made, every = self._vectors[kind], torch.arange(len(along), device=self.x.device)

        def pull(directions: Float[Tensor, "b n t h d"]) -> Float[Tensor, "b n t d_model"]:
            return torch.autograd.grad(made, self.x, directions, retain_graph=True, is_grads_batched=True)[0]

        directions = made.new_zeros(len(along), *made.shape)
        if self.alone:
            directions[every, :, :, heads] = along
            return pull(directions)
        found = along.new_zeros(*along.shape[:-1], self.x.shape[-1])
        # slots that name one token twice ask one after the other
        turn = (self.columns[:, :, None] == self.columns[:, None]).tril(-1).sum(-1)
        for i in range(int(turn.max()) + 1):
            row, slot = (turn == i).nonzero(as_tuple=True)
            at = row, self.columns[row, slot]
            directions.zero_()
            directions[every[:, None], at[0], at[1], heads[:, None]] = along[:, row, slot]
            found[:, row, slot] = pull(directions)[:, at[0], at[1]]
        return found

    def jacobian(self, kind: Kind, head: int) -> Float[Tensor, "n p d d_model"]:
        """``∂(a head's vector)/∂(the stream)`` at each token."""
        if (kind, head) not in self._jacobians:
            width = self._vectors[kind].shape[-1]
            basis = torch.eye(width, device=self.x.device)[:, None, None].expand(-1, *self.columns.shape, -1)
            self._jacobians[kind, head] = self.pull(kind, [head] * width, basis)[0].permute(1, 2, 0, 3)
        return self._jacobians[kind, head]

    @cached_property
    def vectors(self) -> dict[Kind, Float[Tensor, "n p h d"]]:
        """Every head's vectors, as this layer makes them."""
        return self._picked({kind: value.detach() for kind, value in self._vectors.items()})


def stream_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Float[Tensor, "b t d_model"]:
    """The residual stream among a block's arguments."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _replaced(value: Any, hidden: Tensor, new: Tensor, other: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with another stream, everything else as `other` makes it."""
    if value is hidden:
        return new
    if isinstance(value, tuple | list):
        return type(value)(_replaced(part, hidden, new, other) for part in value)
    if isinstance(value, Mapping):  # some layers hand keys on in one, and must not when they run again
        return {name: _replaced(part, hidden, new, other) for name, part in value.items()}
    if isinstance(value, Tensor):
        value = other(value)
        return value.float() if value.is_floating_point() and new.dtype == torch.float32 else value
    return value


def _of_rows(value: Tensor, *, hidden: Tensor, row: Int[Tensor, " m"]) -> Tensor:
    """An argument for some rows of the batch, in any order and number."""
    batch = len(hidden)
    if value.ndim < 2 or len(value) % batch or (len(value) == 1 and batch > 1):
        return value
    if len(value) == batch:
        return value[row.to(value.device)]
    return value.unflatten(0, (batch, -1))[row.to(value.device)].flatten(0, 1)  # ALiBi: sequences times heads


def _at(value: Tensor, *, hidden: Tensor, row: Int[Tensor, " m"], columns: Int[Tensor, "m p"]) -> Tensor:
    """An argument at some tokens of some rows: what has one entry for each token is gathered, a mask is left alone."""
    batch, tokens = hidden.shape[:2]
    row, columns = row.to(value.device), columns.to(value.device)
    if value.ndim in (2, 3) and value.shape[1] == tokens and len(value) in (1, batch):
        return value.expand(batch, *value.shape[1:])[row[:, None], columns]
    return value
