"""Norms as linear maps: ``N(x) = σ(x) gain ⊙ C x + bias`` is one, with the scalar σ frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

_LONG = 1e3  # a vector so long that nothing is seen of what a norm adds under its root
_SHORT = 1e-3  # and one so short that it is seen


class Norm(NamedTuple):
    """A norm taken apart, in float32, whatever convention it stores its weights in.

    It `centres` where it subtracts the mean (LayerNorm). For an input of mean 0 and mean square 1 the scalar σ is 1;
    ``σ(x) = 1 / sqrt(mean((C x)²) + eps)`` of every norm of the usual kind.
    """

    gain: Float[Tensor, "*b d"]
    bias: Float[Tensor, "*b d"]
    centres: bool
    eps: float = 0.0

    def centred(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Less its mean, where the norm subtracts it."""
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def scalar(self, x: Float[Tensor, "*b d"], out: Float[Tensor, "*b d"]) -> Float[Tensor, "*b 1"]:
        """What the norm multiplied its (centred) input by, besides its gain."""
        y = self.gain.to(x) * self.centred(x)
        found = ((out - self.bias.to(x)) * y).sum(-1, keepdim=True)
        return found / y.square().sum(-1, keepdim=True).clamp_min(1e-30)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its name."""
    return "norm" in type(module).__name__.lower() and not any(module.children())


@torch.no_grad()
def full_output(norm: nn.Module, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """What a norm makes of an input, in float32."""
    weights = {name: weight.detach().float() for name, weight in norm.named_parameters()}
    there = next(iter(weights.values()), x).device
    return functional_call(norm, weights, (x.to(there, torch.float32),)).to(x.device)


def take_apart(norm: nn.Module, like: Tensor) -> Norm:
    """Gain, bias and centring of a norm, found by asking it; ``like`` is what it normalises."""
    weight = next(norm.parameters(), like[(0,) * (like.ndim - 1)])
    signs = (1 - 2 * (torch.arange(weight.shape[-1], device=weight.device) % 2)).float()
    signs = signs.expand(weight.shape)  # alternating ±1: no entry of its normalised form vanishes
    above, below = full_output(norm, _LONG * signs), full_output(norm, -_LONG * signs)
    bias, flat = (above + below) / 2, full_output(norm, torch.full_like(signs, _LONG))
    centres = bool((flat - bias).abs().max() < (above - bias).abs().max() / 2)  # nothing is left of a constant vector
    unit = signs - signs.mean(-1, keepdim=True) if centres else signs
    square = unit.square().mean(-1, keepdim=True)
    own = Norm((above - below) / 2 * square.sqrt() / unit, bias, centres)
    scalar = own.scalar(_SHORT * signs, full_output(norm, _SHORT * signs))
    return own._replace(eps=float((1 / scalar.square() - _SHORT**2 * square).mean()))


class Frozen:
    """Norms that multiply by what they multiplied by when they first ran: the first run notes, later runs repeat."""

    def __init__(self) -> None:
        self._own: dict[nn.Module, Norm] = {}
        self._scalars: dict[nn.Module, list[Tensor]] = {}
        self._runs: dict[nn.Module, int] = {}
        self._asking = False

    @property
    def ran(self) -> list[nn.Module]:
        """Norms that ran, in their order."""
        return list(self._own)

    def hooks(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Make linear maps of the norms among some modules for one run, until the hooks are removed."""
        self._runs.clear()
        return [norm.register_forward_hook(self._norm) for norm in modules if is_norm(norm)]

    def unit(self, unbiased: Collection[nn.Module] = ()) -> None:
        """From now on multiply by 1 instead, and leave out the biases of some norms."""
        for norm, noted in self._scalars.items():
            self._scalars[norm] = [torch.ones((), device=scalar.device) for scalar in noted]
            if norm in unbiased:
                self._own[norm] = self._own[norm]._replace(bias=torch.zeros_like(self._own[norm].bias))

    def _norm(self, norm: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        if self._asking:
            return None
        if norm not in self._own:
            self._asking = True  # a norm is taken apart by running it
            self._own[norm] = take_apart(norm, given[0])
            self._asking = False
        x, own = given[0].float(), self._own[norm]
        run = self._runs[norm] = self._runs.get(norm, -1) + 1  # one norm may serve queries, then keys
        noted = self._scalars.setdefault(norm, [])
        if len(noted) == run:
            noted.append(own.scalar(x.detach(), out.detach().float()))
        return (noted[run] * own.gain * own.centred(x) + own.bias).to(out.dtype)
