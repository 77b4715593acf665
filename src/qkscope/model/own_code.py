"""Attention that a modelling file computes with code of its own, watched while it runs.

GPT-Neo, GPT-J, CodeGen, BLOOM, MPT, Falcon and XGLM never ask transformers for an attention
function. While one of their attention modules runs, every torch function passes through us: a
product of two activations is ``P = q·kᵀ``, what softmax is given is made of it, ``x = f(P)``, and a
product with what softmax gave is the output. The steps of f (scale, ALiBi, masks, casts, in the
family's own order) are taken again with other numbers in the place of P:

    ``bias = f(0)``,   ``scale = (f(c) − f(0)) / c``,   and f must be the straight line that these
    two say.

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
_C = 1024.0  # far from 0, so that a cap or a clamp shows, and a power of two, so that a scale stays exact


#: Gets a way to the model's own output (``run``), and what was seen as the fields of `Call`; gives the output.
Serve = Callable[..., Float[Tensor, "b h s e"]]


def additive(mask: Tensor) -> Float[Tensor, "..."]:
    """A mask as numbers to add: True or 0 shows a key, False or "the smallest number" hides it with
    -inf.
    """
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)


def own_attention(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a model that asks for no attention function anywhere, innermost
    ones; else none.
    """
    named = [part for part in model.modules() if "Attention" in type(part).__name__]
    files = {sys.modules[kind.__module__] for part in named for kind in type(part).__mro__}
    if any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files):
        return []
    return [
        part
        for part in named
        if not any(inner in named for inner in part.modules() if inner is not part)
    ]


def watched(modules: list[nn.Module], serve: Serve) -> AbstractContextManager[None]:
    """Show every attention of some modules to a function, for the duration of a ``with`` block."""

    def watching(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            given = next(
                value for value in (kwargs.get("hidden_states"), *args) if isinstance(value, Tensor)
            )
            with _Watch(module, len(given), serve):
                return forward(*args, **kwargs)

        return watch

    return other_forwards(modules, watching)


class _Product(NamedTuple):
    """A tensor made of a product: the operands, and the steps since. After softmax: what softmax
    was given and gave.
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
    """Every torch function of one forward of one attention module."""

    def __init__(self, module: nn.Module, batch: int, serve: Serve) -> None:
        super().__init__()
        self.module = module
        self.batch = batch
        self.serve = serve
        self.products: dict[int, _Product] = {}

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note what it does to products; the output of an attention may be
        changed.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._fused(func, *args, **kwargs)
        known = next(
            (
                self.products[id(arg)]
                for arg in (*args, *kwargs.values())
                if id(arg) in self.products
            ),
            None,
        )
        if name in _PRODUCTS and known is not None and known.weights is not None:
            return self._output(func, known, *args)
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        product = None
        if name == "baddbmm":
            start, q, k = args if len(args) == 3 else (args[0], kwargs["batch1"], kwargs["batch2"])
            beta = kwargs.get("beta", 1)
            alpha = kwargs.get("alpha", 1)
            product = _Product(out, q, k, out.shape, (lambda x: beta * start + alpha * x,))
        elif (
            name in _PRODUCTS and min(arg.ndim for arg in args) > 2
        ):  # a weight has two axes, activations have more
            product = _Product(out, args[0], args[1], out.shape)
        elif known is not None and name == "softmax":
            product = known._replace(tensor=out, weights=out)
        elif known is not None:
            product = known._replace(tensor=out)
            if known.weights is None:
                product = product._replace(
                    steps=(*known.steps, _again(func, args, kwargs, known.tensor))
                )
        if product is not None:
            self.products[id(out)] = product
        return out

    def _heads(self, x: Tensor) -> Float[Tensor, "b h s d"]:
        """With an axis of its own for the heads, where sequences and heads share one."""
        return x if x.ndim == 4 else x.unflatten(0, (self.batch, -1))

    def _output(self, func: Any, product: _Product, weights: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            bias, scale = self._line(product)
        q, k, softmax = (
            self._heads(product.q),
            self._heads(product.k).mT,
            self._heads(product.weights),
        )  # type: ignore[arg-type]
        out = func(weights, v)
        seen = {
            "module": self.module,
            "q": q,
            "k": k,
            "v": self._heads(v),
            "mask": bias,
            "scale": scale,
        }
        served = self.serve(
            run=lambda: self._heads(out), causal=False, weights=lambda: softmax, **seen
        )
        return served.reshape(out.shape)

    def _fused(
        self, func: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **kwargs: Any
    ) -> Tensor:
        mask = attn_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = self._counted(
                mask.float().expand(*mask.shape[:2], q.shape[2], -1), additive(mask) == -torch.inf
            )
        eye = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:3], -1)
        scale = kwargs.get("scale")
        causal = bool(kwargs.get("is_causal", False))
        scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
        seen = {
            "module": self.module,
            "q": q,
            "k": k,
            "v": v,
            "mask": mask,
            "scale": scale,
            "causal": causal,
        }
        run = partial(func, q, k, v, attn_mask, **kwargs)
        weights = partial(func, q, k, eye, attn_mask, **kwargs)
        return self.serve(run=run, weights=weights, **seen)

    def _line(self, product: _Product) -> tuple[Float[Tensor, "b h s t"], float]:
        """Bias and scale of the logits, or a refusal."""
        middle, up, down = (self._heads(product.at(number)) for number in (0.0, _C, -_C / 4))
        scales = (up - middle) / _C
        bias = self._counted(middle, scales == 0)  # what a product cannot change is hidden
        shown = bias > -torch.inf
        scale = float(scales[shown].median())
        close = (
            64
            * torch.finfo(middle.dtype).eps
            * (abs(scale) + float(middle[shown].abs().max()) / _C)
        )
        bent = ((up - middle) - 4 * (middle - down))[shown] / _C
        if not max(float((scales[shown] - scale).abs().max()), float(bent.abs().max())) <= close:
            kind = f"{type(self.module).__name__} cannot be looked into"
            raise BadInput(
                f"{kind}: what its softmax is given is not one number times q·k plus a bias."
            )
        same = torch.equal(
            bias, bias[:, :1].expand_as(bias)
        )  # no ALiBi: one for all heads takes less room
        return bias[:, :1].contiguous() if same else bias, scale

    def _counted(self, bias: Float[Tensor, "b m s t"], hidden: Tensor) -> Float[Tensor, "b m s t"]:
        """A bias with hidden keys at -inf, counted from each query's own key."""
        # half precision hides with a number that is not so small, and some families divide it by √d
        least = torch.finfo(next(self.module.parameters()).dtype).min / 32
        most = bias.amax(-1, keepdim=True)
        hidden = hidden | (bias <= most + least) | (most <= 16 * least)
        self_bias = bias.masked_fill(hidden, 0.0).diagonal(bias.shape[-1] - bias.shape[-2], -2, -1)
        return (bias - self_bias[..., None]).masked_fill(hidden, -torch.inf)


def _again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parent: Tensor
) -> Callable[[Tensor], Tensor]:
    """Make a recorded step repeatable with another tensor in place of one."""

    def step(x: Tensor) -> Tensor:
        other = {name: x if value is parent else value for name, value in kwargs.items()}
        return func(*(x if value is parent else value for value in args), **other)

    return step
