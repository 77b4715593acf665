"""A layer's own code as a linear map: every norm inside it held at what it did to the true input.

Some layers have no single weight matrix: latent attention normalises a part of the key, other families normalise or
rescale after the rotation, or rotate where nobody can listen. With each norm ``N(x) = gain ⊙ σ(x) C x + bias`` held,
``N_held(y) = gain ⊙ σ(x) C y + bias``, what is left from the input z to the queries and keys is affine:

    ``f(z) = f(0) + Σ_c (f(z_c) − f(0))``   for any split ``z = Σ_c z_c``.

So a part is pushed through the layer's own forward, with all other arguments (positions among them) as the model gave
them, and taken where the attention function would start. A layer in which more than norms depends on the input (one
that routes its queries) does not add up so, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.capture.projection import FAR, LayerCall, Norm, is_norm, norm_unit, take_apart
from qkscope.errors import BadInput


class Vectors(NamedTuple):
    """Queries and keys as the dot product sees them, keys once per KV head; of every token [b, h, t, d] at first."""

    q: Float[Tensor, "*b d"]
    k: Float[Tensor, "*b d"]


class HeldLayer:
    """One layer of one forward, ready to be given parts of its input, or another input.

    Parameters
    ----------
    call : LayerCall
        How the model called the layer in that forward.
    row : which rows of the batch are asked about, each of them apart; all, if not given.
    """

    @torch.no_grad()
    def __init__(self, call: LayerCall, row: Int[Tensor, " n"] | None = None) -> None:
        self.call = call if row is None else _rows_of(call, row)
        self._given: dict[nn.Module, list[Tensor]] = {}
        self._held: dict[nn.Module, list[tuple[Tensor, Norm]]] = {}
        self._runs: dict[nn.Module, int] = {}
        self.true = self.push(self.call.hidden)
        for norm, given in self._given.items():
            own = take_apart(norm, given[0])
            self._held[norm] = [(norm_scalar(norm, own, x)[..., None], own) for x in given]
        self.at_zero = self.push(torch.zeros_like(self.call.hidden))

    def push(self, z: Float[Tensor, "n t d_model"], live: bool = False) -> Vectors:
        """Queries and keys of an input of the same shape, the norms as the true input left them, or their own."""
        self._runs.clear()
        norms = [part for part in self.call.attention.modules() if is_norm(part)]
        hooks = [norm.register_forward_hook(self._norm) for norm in norms if not live]
        made = self.call.attend(*self.call.given(z.to(self.call.hidden)), hooks)
        return Vectors(made.q.float(), made.k.float())

    def at(
        self, x: Float[Tensor, "n p d_model"], columns: Int[Tensor, "n p"], live: bool = False
    ) -> tuple[Float[Tensor, "n p h d"], Float[Tensor, "n p g d"]]:
        """Queries and keys of an input given at some places alone."""
        hidden = self.call.hidden
        z, columns = torch.zeros_like(hidden), columns.to(hidden.device)
        row = torch.arange(len(columns), device=hidden.device)
        for slot in reversed(range(columns.shape[1])):  # padded slots stand last, on a place that may be named before
            z = z.index_put((row, columns[:, slot]), x[:, slot].to(hidden))
        q, k = (vectors.transpose(1, 2)[row[:, None], columns].to(x) for vectors in self.push(z, live))
        return q, k

    @torch.no_grad()
    def split(
        self,
        parts: Sequence[Float[Tensor, "n p d_model"]],
        bias: Float[Tensor, "n p d_model"],
        columns: Int[Tensor, "n p"],
        heads: list[int],
        key_heads: list[int],
    ) -> Vectors:
        """Parts of the input at p places in each of n rows, as parts of some heads' queries and keys there.

        Parameters
        ----------
        parts : what is split, part by part.
        bias : the part that no writer has. What the layer adds to nothing goes with it, and it comes last.
        columns : where the places are in the batch.
        heads, key_heads : whose queries and keys: Float [n, c, p, h, d] and [n, c, p, g, d].
        """

        def through(part: Tensor) -> tuple[Tensor, Tensor]:
            q, k = self.at(part, columns)
            return q[:, :, heads], k[:, :, key_heads]

        nothing, (q, k) = through(torch.zeros_like(bias)), through(bias)
        each = [tuple(one - zero for one, zero in zip(through(part), nothing, strict=True)) for part in parts]
        return Vectors(*(torch.stack(side, dim=1) for side in zip(*each, (q, k), strict=True)))

    def pull(
        self, vectors: Literal["q", "k"], head: int, columns: Int[Tensor, "n p"], along: Float[Tensor, "n p d"]
    ) -> tuple[Float[Tensor, "n p d_model"], Float[Tensor, "n p"]]:
        """Directions among a head's queries or keys as directions in the layer's input, and what they say of nothing.

        Parameters
        ----------
        vectors : which of the two.
        head : of the queries or of the keys.
        columns : where the places are in the batch.
        along : a direction at each.
        """
        found, values = [], []
        for slot in range(columns.shape[1]):  # one by one: two places may be the same token
            there = columns[:, slot, None]
            x = torch.zeros_like(self.call.hidden[: len(there), :1], dtype=torch.float32).requires_grad_()
            with torch.enable_grad():
                made = self.at(x, there)["qk".index(vectors)][:, :, head]
                value = (made * along[:, slot, None].to(made)).sum(-1)
                (gradient,) = torch.autograd.grad(value.sum(), x)
            found.append(gradient.to(along))
            values.append(value.detach().to(along))
        return torch.cat(found, dim=1), torch.cat(values, dim=1)

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a layer that does not add up: two halves of its input, far from it, against the whole."""
        hidden = self.call.hidden
        generator = torch.Generator().manual_seed(0)
        share = torch.rand(hidden.shape, generator=generator).to(hidden)
        far = hidden * FAR * share
        one, other = self.push(far), self.push(hidden - far)
        tolerance = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 5e-2
        each = zip(("queries", "keys"), one, other, self.at_zero, self.true, strict=True)
        for what, first, second, nothing, whole in each:
            if (first + second - nothing - whole).norm() > tolerance * first.norm():
                why = "are no linear function of its input, so they are no sum of what writers put there"
                raise BadInput(f"{self.call.family} cannot be traced: even with its norms held, its {what} {why}.")

    def _norm(self, norm: nn.Module, given: tuple[Tensor, ...], _output: Tensor) -> Tensor | None:
        """Notes what a norm was truly given; once that is known, does to a part what it did there."""
        x = given[0].float()
        run = self._runs[norm] = self._runs.get(norm, -1) + 1  # one norm may serve queries, then keys
        if norm not in self._held:
            self._given.setdefault(norm, []).append(x)
            return None
        scalar, own = self._held[norm][run]
        return (own.gain * scalar * centred(x, own) + own.bias).to(given[0].dtype)


def _rows_of(call: LayerCall, row: Int[Tensor, " n"]) -> LayerCall:
    """A call of some rows of its batch, in any order and number."""
    batch, moved = len(call.hidden), row.to(call.hidden.device)
    if row.tolist() == list(range(batch)):
        return call
    hidden = call.hidden[moved]  # one tensor, wherever it is given

    def some(value: Any) -> Any:
        if value is call.hidden:
            return hidden
        if isinstance(value, tuple | list):
            return type(value)(some(part) for part in value)
        of_rows = isinstance(value, Tensor) and value.ndim > 1 and len(value) == batch
        return value[row.to(value.device)] if of_rows else value

    kwargs = {name: some(value) for name, value in call.kwargs.items()}
    if isinstance(alibi := call.kwargs.get("alibi"), Tensor):  # one axis for sequences and their heads
        kwargs["alibi"] = alibi.unflatten(0, (batch, -1))[row.to(alibi.device)].flatten(0, 1)
    return replace(call, args=some(call.args), kwargs=kwargs)


def norm_scalar(norm: nn.Module, own: Norm, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """What a norm multiplies its (centred) input by, besides its gain."""
    given = centred(x, own)
    there = next(norm.parameters(), x).device
    return (norm_unit(norm, x.to(there)).to(x.device) * given).sum(-1) / given.square().sum(-1).clamp_min(1e-30)


def centred(x: Float[Tensor, "*b d"], norm: Norm) -> Float[Tensor, "*b d"]:
    """Less its mean, where the norm subtracts it."""
    return x - x.mean(-1, keepdim=True) if norm.centres else x
