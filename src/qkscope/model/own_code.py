"""Attention that a modelling file computes with code of its own, watched while it runs.

GPT-Neo, GPT-J, CodeGen, BLOOM, MPT, Falcon and XGLM never ask transformers for an attention
function. While one of their attention modules runs, every torch function passes through us: a
product of two activations is ``P = q·kᵀ``, what softmax is given is made of it, ``x = f(P)``, and a
product with what softmax gave is the output. The steps of f (scale, ALiBi, masks, casts, in the
family's own order) are taken again with other numbers in the place of P:

    ``bias = f(0)``,   ``scale = (f(c) − f(0)) / c``

and f must be the straight line that these two say.

A bias counts from what the query adds to its own key: a row's softmax knows no constant, and some
families count from the end of the batch. ``torch``'s fused attention says the same in its
arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkscope.errors import BadInput
from qkscope.model.spaces import other_forwards

_PRODUCTS = ("matmul", "__matmul__", "bmm")

#: The other number tried in the place of every product: far from 0, so that a cap or a clamp shows,
#: and a power of two, so that a scale stays exact.
_C = 1024.0

#: Gets a way to the model's own output (``run``) and what was seen, as the fields of `Call`; gives
#: the output.
Serve = Callable[..., Float[Tensor, "b h s e"]]


def additive(mask: Tensor) -> Float[Tensor, "..."]:
    """A mask as numbers to add: -inf where a key is hidden by False or by "the smallest number"."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, device=mask.device)
        return zeros.masked_fill_(~mask, -torch.inf)
    smallest = torch.finfo(mask.dtype).min
    return mask.float().masked_fill(mask <= smallest / 2, -torch.inf)


def own_attention(model: nn.Module) -> list[nn.Module]:
    """The innermost attention modules of a model that never asks for an attention function.

    Empty for a model that asks for one anywhere.
    """
    attentions = [part for part in model.modules() if "Attention" in type(part).__name__]
    classes = {kind for part in attentions for kind in type(part).__mro__}
    files = {sys.modules[kind.__module__] for kind in classes}
    if any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files):
        return []
    return [part for part in attentions if not _holds_any(part, attentions)]


def _holds_any(part: nn.Module, modules: list[nn.Module]) -> bool:
    """Whether some of these modules are inside another one."""
    return any(inner in modules for inner in part.modules() if inner is not part)


def watched(modules: list[nn.Module], serve: Serve) -> AbstractContextManager[None]:
    """Show every attention of some modules to a function, for the duration of a ``with`` block."""

    def watching(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            inputs = (kwargs.get("hidden_states"), *args)
            hidden = next(value for value in inputs if isinstance(value, Tensor))
            with _Watch(module, len(hidden), serve):
                return forward(*args, **kwargs)

        return watch

    return other_forwards(modules, watching)


class _Product(NamedTuple):
    """A tensor made of a product ``q·kᵀ``: its operands, and the steps taken since.

    After softmax: what softmax was given (by the steps), and what it gave.
    """

    tensor: Tensor  # held, so that its id is not used again
    q: Tensor
    k: Tensor
    shape: torch.Size
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    weights: Tensor | None = None

    def at(self, number: float) -> Float[Tensor, "..."]:
        """The softmax's input if all products were this number."""
        x = torch.full(self.shape, number, device=self.tensor.device)
        for step in self.steps:
            x = step(x)
        return x.float()


class _Watch(TorchFunctionMode):
    """Watch every torch function of one forward of one attention module."""

    def __init__(self, module: nn.Module, batch: int, serve: Serve) -> None:
        super().__init__()
        self.module = module
        self.batch = batch
        self.serve = serve
        self.products: dict[int, _Product] = {}

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and note what it does to products; an attention's output may change."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._fused(func, *args, **kwargs)
        parent = self._product_among((*args, *kwargs.values()))
        if name in _PRODUCTS and parent is not None and parent.weights is not None:
            return self._output(func, parent, *args)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            product = _product_after(func, name, args, kwargs, parent, out)
            if product is not None:
                self.products[id(out)] = product
        return out

    def _product_among(self, values: tuple[Any, ...]) -> _Product | None:
        """The first of some arguments that is known to be made of a product."""
        for value in values:
            if id(value) in self.products:
                return self.products[id(value)]
        return None

    def _heads(self, x: Tensor) -> Float[Tensor, "b h s d"]:
        """Give the heads an axis of their own, where sequences and heads share one."""
        return x if x.ndim == 4 else x.unflatten(0, (self.batch, -1))

    def _output(self, func: Any, product: _Product, weights: Tensor, v: Tensor) -> Tensor:
        """Show an attention whose softmax was seen, and give its output."""
        with torch.no_grad():
            bias, scale = self._line(product)
        softmax = self._heads(product.weights)  # type: ignore[arg-type]
        out = func(weights, v)
        served = self.serve(
            run=lambda: self._heads(out),
            weights=lambda: softmax,
            module=self.module,
            q=self._heads(product.q),
            k=self._heads(product.k).mT,
            v=self._heads(v),
            mask=bias,
            scale=scale,
            causal=False,
        )
        return served.reshape(out.shape)

    def _fused(
        self, func: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **kwargs: Any
    ) -> Tensor:
        """Show a call of torch's fused attention, and give its output."""
        mask = attn_mask
        if mask is not None and mask.dtype != torch.bool:
            hidden = additive(mask) == -torch.inf
            n_queries = q.shape[2]
            bias = mask.float().expand(*mask.shape[:2], n_queries, -1)
            mask = self._from_own_key(bias, hidden)
        scale = kwargs.get("scale")
        if scale is None:
            scale = q.shape[-1] ** -0.5
        # values that are unit vectors make the output the attention itself
        n_keys = k.shape[2]
        eye = torch.eye(n_keys, dtype=q.dtype, device=q.device)
        unit_values = eye.expand(*k.shape[:3], n_keys)
        return self.serve(
            run=partial(func, q, k, v, attn_mask, **kwargs),
            weights=partial(func, q, k, unit_values, attn_mask, **kwargs),
            module=self.module,
            q=q,
            k=k,
            v=v,
            mask=mask,
            scale=float(scale),
            causal=bool(kwargs.get("is_causal", False)),
        )

    def _line(self, product: _Product) -> tuple[Float[Tensor, "b m s t"], float]:
        """Bias and scale of the logits, ``x = scale · q·k + bias``, or a refusal."""
        middle = self._heads(product.at(0.0))
        up = self._heads(product.at(_C))
        down = self._heads(product.at(-_C / 4))
        scales = (up - middle) / _C
        bias = self._from_own_key(middle, hidden=scales == 0)  # a hidden key hears no product
        shown = bias > -torch.inf
        scale = float(scales[shown].median())
        size = abs(scale) + float(middle[shown].abs().max()) / _C
        close = 64 * torch.finfo(middle.dtype).eps * size
        spread = scales[shown] - scale
        bend = ((up - middle) - 4 * (middle - down))[shown] / _C
        largest_spread = float(spread.abs().max())
        largest_bend = float(bend.abs().max())
        if not max(largest_spread, largest_bend) <= close:  # a NaN is not close
            kind = f"{type(self.module).__name__} cannot be looked into"
            raise BadInput(
                f"{kind}: what its softmax is given is not one number times q·k plus a bias."
            )
        of_first = bias[:, :1]
        if torch.equal(bias, of_first.expand_as(bias)):
            bias = of_first.contiguous()  # no ALiBi: one for all heads takes less room
        return bias, scale

    def _from_own_key(
        self, bias: Float[Tensor, "b m s t"], hidden: Tensor
    ) -> Float[Tensor, "b m s t"]:
        """Count a bias from that of each query's own key; hidden keys get -inf."""
        # half precision hides with a number that is not so small, and some families divide it by √d
        least = torch.finfo(next(self.module.parameters()).dtype).min / 32
        most = bias.amax(-1, keepdim=True)
        hidden = hidden | (bias <= most + least) | (most <= 16 * least)
        n_queries, n_keys = bias.shape[-2:]
        of_shown = bias.masked_fill(hidden, 0.0)
        of_own_key = of_shown.diagonal(n_keys - n_queries, -2, -1)
        return (bias - of_own_key[..., None]).masked_fill(hidden, -torch.inf)


def _product_after(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parent: _Product | None,
    out: Tensor,
) -> _Product | None:
    """What a function's output is made of, if of a product: a new one, or its argument `parent`."""
    if name == "baddbmm":
        start = args[0]
        q = args[1] if len(args) == 3 else kwargs["batch1"]
        k = args[2] if len(args) == 3 else kwargs["batch2"]
        beta = kwargs.get("beta", 1)
        alpha = kwargs.get("alpha", 1)

        def add_start(x: Tensor) -> Tensor:
            return beta * start + alpha * x

        return _Product(out, q, k, out.shape, steps=(add_start,))
    # a weight has two axes, activations have more
    if name in _PRODUCTS and min(arg.ndim for arg in args) > 2:
        q, k = args[:2]
        return _Product(out, q, k, out.shape)
    if parent is None:
        return None
    if name == "softmax":
        return parent._replace(tensor=out, weights=out)
    if parent.weights is not None:
        return parent._replace(tensor=out)
    step = _step_of(func, args, kwargs, parent.tensor)
    return parent._replace(tensor=out, steps=(*parent.steps, step))


def _step_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parent: Tensor
) -> Callable[[Tensor], Tensor]:
    """A recorded call as a function of one of its tensors."""

    def step(x: Tensor) -> Tensor:
        other_args = [x if value is parent else value for value in args]
        other_kwargs = {name: x if value is parent else value for name, value in kwargs.items()}
        return func(*other_args, **other_kwargs)

    return step
