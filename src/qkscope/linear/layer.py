"""One layer, from the residual stream to its queries, keys and values with norms frozen, asked in
two ways.

With a norm ``N(x) = gain ⊙ σ(x) C x + bias`` frozen at what it did to the true input, all that
stands between the stream and the vectors of a head is affine: projections, biases, QK-norm, latent
attention, rotation.

- `AffineLayer` runs the block's own code again up to its attention, at the tokens asked about, and
  autograd gives the linear part: ``q = J x + c``, ``J = ∂q/∂x``, ``c = q(0)``, and the same for k
  and v. No weight is read and no rotation written down. A layer in which more than norms depends on
  the input is not affine: then ``J x + c`` misses the true vectors, as `check.sum_error` says.
- `ClosedForm` does many heads of many layers in a few products, where vectors are ``R (s (σ W x +
  a) + c)`` - a norm's scalar σ, one matrix, a rotation R, the scalar s of a QK-norm: a direction y
  on them is ``σ s Wᵀ Rᵀ y`` on the stream. W is read once off the layer's own code
  (`weights.form_of`); σ, s and R are those of the run. Every time the form is checked against the
  vectors that the model's attention was given: a layer that differs is asked by its own code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from qkscope import Head, Scope
from qkscope.model.block_tree import Frozen
from qkscope.model.tap import Call, Stop, cleared, tap

if TYPE_CHECKING:
    from qkscope.linear.run import Run

Kind = Literal["q", "k", "v"]
Given = tuple[tuple[Any, ...], dict[str, Any]]  # what a block is called with
_AGREES = 1e-4  # how far vectors of some tokens run alone may be from those of the whole prompt, of the largest
_ROOM = 2**26  # numbers that gradients of several directions may take at once


class AffineLayer:
    """Queries, keys and values of one layer at p tokens of n rows, as affine functions of the
    stream there.

    The tokens are run alone where that gives the same vectors, else whole prompts are: a family may
    count columns, or mix tokens before its attention.

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
        given: Given,
        true: Call,
        row: Tensor,
        columns: Tensor,
    ) -> None:
        self.scope = scope
        self.layer = layer
        self.block = block
        self.given = given
        self.true = true
        self.hidden = stream_of(*given)
        self.row = row.to(self.hidden.device)
        self.columns = columns.to(self.hidden.device)
        for self.alone in (False,) if scope.facts.anatomy.own else (True, False):
            self.norms = Frozen()
            try:
                self._trace()
                if not self.alone or all(self._agrees(kind) for kind in ("q", "k")):
                    break
            except (
                RuntimeError,
                ValueError,
                IndexError,
                TypeError,
            ):  # its code wants the whole prompt
                if not self.alone:
                    raise

    # ------------------------------------------------------------------ the layer's own code

    def _trace(self) -> None:
        """Make vectors of the true stream, which is a leaf."""
        vars(self).pop("constants", None)
        x = self.hidden[self.row[:, None], self.columns] if self.alone else self.hidden[self.row]
        self.x = x.detach().float().requires_grad_()
        with torch.enable_grad():
            self._vectors = self._push(self.x, self.row, self.columns, frozen=True)

    def _agrees(self, kind: Literal["q", "k"]) -> bool:
        whole = getattr(self.true, kind)
        mine = self._vectors[kind].detach()
        true = whole.transpose(1, 2)[self.row[:, None], self.columns].float()
        return mine.shape == true.shape and bool(
            (mine - true).abs().max() <= _close(whole) * true.abs().max()
        )

    @cached_property
    @torch.no_grad()
    def constants(self) -> dict[Kind, Float[Tensor, "n p h d"]]:
        """Constants: every head's vectors for a zero residual stream."""
        return self._picked(
            self._push(torch.zeros_like(self.x), self.row, self.columns, frozen=True), self.columns
        )

    def unit(self, unbiased: Collection[nn.Module] = ()) -> None:
        """Set every norm's scalar to 1 from now on, and drop the biases of some norms."""
        self.norms.unit(unbiased)
        self._trace()

    def reads(self, kind: Kind) -> bool:
        """Whether the layer's vectors depend on its stream; some layers use another layer's keys."""
        return self._vectors[kind].requires_grad

    def _push(
        self, x: Tensor, row: Tensor, columns: Tensor, frozen: bool
    ) -> dict[Kind, Float[Tensor, "m t h d"]]:
        """Vectors of a stream, of these tokens or of the whole prompts, in float32 whatever the
        model's dtype.
        """

        def other(value: Tensor) -> Tensor:
            if value is self.hidden:
                return x
            value = self._gathered(value, row.to(value.device), columns.to(value.device))
            return value.float() if value.is_floating_point() else value

        found: list[Call] = []
        stop = Stop()

        def take(call: Call) -> None:
            found.append(call)
            raise stop

        args, kwargs = tree_map_only(Tensor, other, self.given)
        weights = self.block.named_parameters()
        full = {
            name: weight.detach().float()
            for name, weight in weights
            if weight.dtype != torch.float32
        }
        hooks = self.norms.hooks(self.block.modules()) if frozen else []
        layers = {id(self.true.module): self.layer}
        anatomy = self.scope.facts.anatomy
        with (
            cleared(hooks, stop),
            tap(self.scope.model, take, layers=layers, anatomy=anatomy, within=self.block),
        ):
            functional_call(self.block, full, args, kwargs)
        return {kind: getattr(found[0], kind).float().transpose(1, 2) for kind in ("q", "k", "v")}

    def _gathered(
        self, value: Tensor, row: Int[Tensor, " m"], columns: Int[Tensor, "m p"]
    ) -> Tensor:
        """An argument of the block for some rows, in any order and number, at their tokens; a mask
        is left alone.
        """
        batch, tokens = self.hidden.shape[:2]
        if self.alone:
            if value.ndim in (2, 3) and value.shape[1] == tokens and len(value) in (1, batch):
                return value.expand(batch, *value.shape[1:])[row[:, None], columns]
            return value
        if value.ndim < 2 or len(value) % batch or (len(value) == 1 and batch > 1):
            return value
        return value.unflatten(0, (batch, -1))[row].flatten(0, 1)  # ALiBi: sequences times heads

    def _picked(
        self, made: dict[Kind, Tensor], columns: Tensor
    ) -> dict[Kind, Float[Tensor, "m p h d"]]:
        """Select the tokens asked about."""
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        return made if self.alone else {kind: value[rows, columns] for kind, value in made.items()}

    def pushed(
        self, x: Float[Tensor, "x n p d_model"], frozen: bool = False
    ) -> dict[Kind, Float[Tensor, "x n p h d"]]:
        """Vectors of other streams at these tokens, the norms running or frozen."""
        every = []
        for some in x.to(self.x).split(len(x) if self.alone else 1):
            stream = some.flatten(0, 1)
            row = self.row.repeat(len(some))
            columns = self.columns.repeat(len(some), 1)
            if not self.alone:
                stream, tokens = self.x.detach().clone(), stream
                for slot in reversed(
                    range(tokens.shape[1])
                ):  # padded slots come last, on a token named before
                    stream[torch.arange(len(row), device=row.device), columns[:, slot]] = tokens[
                        :, slot
                    ]
            every.append(self._picked(self._push(stream, row, columns, frozen), columns))
        return {
            kind: torch.cat([made[kind] for made in every]).unflatten(0, (len(x), -1))
            for kind in every[0]
        }

    # ------------------------------------------------------------------ its linear part

    def pull(
        self, kind: Kind, heads: Sequence[int], along: Float[Tensor, "b n p d"]
    ) -> tuple[Float[Tensor, "b n p d_model"], Float[Tensor, "b n p"]]:
        """Directions on heads' vectors as directions on the stream, and what the constants say in
        them.

        Parameters
        ----------
        kind : queries, keys or values.
        heads : of each direction, whose vectors: a query head, or a head of keys or values.
        along : directions at every token.
        """
        step = max(_ROOM // self._vectors[kind].numel(), 1)
        index = torch.tensor(heads, device=self.x.device)
        every = zip(index.split(step), along.to(self.x).split(step), strict=True)
        constants = self.constants[kind][:, :, index].permute(2, 0, 1, 3)
        return torch.cat([self._pulled(kind, *some) for some in every]), (
            along.to(constants) * constants
        ).sum(-1)

    def _pulled(
        self, kind: Kind, heads: Tensor, along: Float[Tensor, "b n p d"]
    ) -> Float[Tensor, "b n p d_model"]:
        made = self._vectors[kind]
        every = torch.arange(len(along), device=self.x.device)

        def pull(directions: Float[Tensor, "b n t h d"]) -> Float[Tensor, "b n t d_model"]:
            return torch.autograd.grad(
                made, self.x, directions, retain_graph=True, is_grads_batched=True
            )[0]

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
        width = self._vectors[kind].shape[-1]
        basis = torch.eye(width, device=self.x.device)[:, None, None].expand(
            -1, *self.columns.shape, -1
        )
        return self.pull(kind, [head] * width, basis)[0].permute(1, 2, 0, 3)


class PartLayer:
    """What the parts of one block besides its heads put out, as functions of its stream and of its
    heads' outputs.

    The block's own code runs again, norms frozen, on some tokens of one prompt; a direction is
    pulled back by autograd. A part is not linear: what its gradient misses of it is a constant.

    Parameters
    ----------
    run : of one prompt, with every token as a key.
    layer : which block.
    tokens : which tokens.
    """

    def __init__(self, run: Run, layer: int, tokens: Int[Tensor, " p"]) -> None:
        block = run.reader.blocks[layer]
        hidden = stream_of(*run.called[layer])
        self.x = hidden[:, tokens.to(hidden.device)].detach().float().requires_grad_()
        self.z = (
            run.heads[layer][:, 1 + tokens].to(hidden.device).requires_grad_()
            if layer in run.heads
            else None
        )
        self.out: dict[nn.Module, Tensor] = {}

        def float_of(value: Tensor) -> Tensor:
            if value.ndim in (2, 3) and value.shape[1] == hidden.shape[1]:
                value = self.x if value is hidden else value[:, tokens.to(value.device)]
            return value.float() if value.is_floating_point() else value

        def given(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
            return self.z.reshape(args[0].shape) if self.z is not None else args[0], *args[1:]

        def gave(part: nn.Module, _args: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if (
                out.numel() == self.x.numel()
            ):  # a norm is run on a vector of its own, too, to be taken apart
                self.out[part] = out.reshape(self.x.shape)

        def skip(call: Call) -> None:
            call.output = call.q.new_zeros(
                len(call.q), call.q.shape[2], call.q.shape[1], call.v.shape[-1]
            )

        scope = run.reader.scope
        layers = {} if self.z is None else {id(run.calls[layer].module): layer}
        hooks = Frozen().hooks(block.module.modules())
        hooks += [part.register_forward_hook(gave) for part in block.parts]
        hooks += [] if block.output is None else [block.output.register_forward_pre_hook(given)]
        full = {name: weight.detach().float() for name, weight in block.module.named_parameters()}
        # what its heads put out is known, so its attention need not run
        watched = tap(
            scope.model, skip, layers=layers, anatomy=scope.facts.anatomy, within=block.module
        )
        with cleared(hooks), watched, torch.enable_grad():
            functional_call(block.module, full, *tree_map_only(Tensor, float_of, run.called[layer]))

    def pull(
        self, part: nn.Module, along: Float[Tensor, "1 p d_model"]
    ) -> tuple[Float[Tensor, "1 p d_model"], Float[Tensor, "1 p he"], Float[Tensor, "1 p"]]:
        """A direction on what a part puts out, on the stream and on the heads' outputs; what their
        sum misses.
        """
        out = self.out[part]
        leaves = [self.x] if self.z is None else [self.x, self.z]
        pulled = torch.autograd.grad(out, leaves, along.to(out), allow_unused=True)
        found = [
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, pulled, strict=True)
        ]
        said = sum(
            ((leaf * g).sum(-1) for leaf, g in zip(leaves, found, strict=True)),
            -(out * along.to(out)).sum(-1),
        )
        x, *z = (g.detach().to(along) for g in found)
        return x, z[0] if z else x[..., :0], -said.detach().to(along)


def stream_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Float[Tensor, "b t d_model"]:
    """The residual stream among a block's arguments."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _close(vectors: Tensor) -> float:
    """How far vectors may be from the model's own, which are rounded to its dtype."""
    return max(_AGREES, 4 * torch.finfo(vectors.dtype).eps)


# ---------------------------------------------------------------------- in closed form


def alike(run: Run, layer: int) -> tuple[Any, ...] | None:
    """What layers must share to be done together; None for a layer without a closed form."""
    form = run.reader.form(layer)
    call = run.calls[layer]
    if form is None:
        return None
    rotary = call.rotary
    shapes = (call.q.shape, call.k.shape, call.v.shape)
    turn = rotary and (rotary.function, id(rotary.cos), rotary.q.shape[-1])
    return (
        shapes,
        call.q.device,
        form.centres,
        form.qk_normed,
        turn,
        run.reader.scope.facts.layers[layer].offset,
    )


class ClosedForm:
    """Heads of layers that are `alike`, at some slots of a run.

    Parameters
    ----------
    run : whose vectors.
    heads : query heads.
    kind : whether their queries, keys or values are meant; several heads may share keys and values.
    slots : of the run.

    Attributes
    ----------
    wrong : layers whose true vectors are not those of the form.
    """

    def __init__(self, run: Run, heads: Sequence[Head], kind: Kind, slots: Any) -> None:
        asked = [(head.layer, run.index(head, kind)) for head in heads]
        own = list(dict.fromkeys(asked))
        reader = run.reader
        first = heads[0].layer
        layers = list(dict.fromkeys(layer for layer, _ in own))
        self.index = None if asked == own else reader.index([own.index(at) for at in asked])
        call = run.calls[first]
        form = reader.form(first)
        offset = reader.scope.facts.layers[first].offset
        assert form is not None
        self.W, self.a, self.c, eps = reader.matrices(kind, tuple(own))
        rotary = None if kind == "v" or offset is None else call.rotary
        self._rotary = None if rotary is None else rotary.unit.at(run.row, run.columns[:, slots])
        self._offset = offset or 0
        x = run.hidden(layers, slots)
        of_layer = reader.index([layers.index(layer) for layer, _ in own])
        sigma = torch.ones_like(x[..., :1])
        if eps is not None:
            centred = x - x.mean(-1, keepdim=True) if form.centres else x
            sigma = (centred.square().mean(-1, keepdim=True) + eps[:, None, None, None]).rsqrt()
        sigma = sigma[of_layer].transpose(0, 1)
        made = torch.einsum("gnpe,gde->ngpd", x[of_layer], self.W) * sigma + self.a[:, None]
        true = run.vectors(own, kind, slots)
        before = self._turned(true, back=True) - self.c[:, None]
        self.s = torch.ones_like(sigma)
        if form.qk_normed and kind != "v":
            self.s = (before * made).sum(-1, keepdim=True) / made.square().sum(
                -1, keepdim=True
            ).clamp_min(1e-30)
        self.factor = sigma * self.s
        fine = (made * self.s - before).abs().amax((0, 2, 3)) <= _close(call.q) * true.abs().amax(
            (0, 2, 3)
        )
        self.wrong = {
            layer for (layer, _), agrees in zip(own, fine.tolist(), strict=True) if not agrees
        }

    def _turned(self, x: Float[Tensor, "n h p d"], back: bool = False) -> Float[Tensor, "n h p d"]:
        return x if self._rotary is None else self._rotary.turn(x, self._offset, back)

    def pull(
        self, along: Float[Tensor, "n h p d"]
    ) -> tuple[Float[Tensor, "n h p d_model"], Float[Tensor, "n h p"]]:
        """Directions on the heads' vectors as directions on the stream, and what the constants say
        in them.
        """
        y = self._turned(along, back=True)
        W = self.W
        a = self.a
        c = self.c
        factor = self.factor
        s = self.s
        if self.index is not None:
            W = W[self.index]
            a = a[self.index]
            c = c[self.index]
            factor = factor[:, self.index]
            s = s[:, self.index]
        said = torch.einsum("nhpd,hd->nhp", y * s, a) + torch.einsum("nhpd,hd->nhp", y, c)
        return torch.einsum("nhpd,hde->nhpe", y * factor, W), said

    def push(self, parts: Float[Tensor, "n c p d_model"]) -> Float[Tensor, "n c p d"]:
        """Parts of the stream as parts of one head's vectors; the constants go to the last one."""
        made = parts @ self.W[0].T * self.factor[:, :1]
        made[:, -1] += self.a[0] * self.s[:, 0] + self.c[0]
        return self._turned(made)
