"""W_Q and W_K of every head, with everything that stands before them folded in.

With ``x̂`` the layer's normalised input *without* gain and a constant 1 appended,

    ``q = s_q W_Q x̂ + c_Q``,   ``k = s_k W_K x̂ + c_K``   (before the rotation),   ``ℓ = scale · (R_m q)·(R_n k)``,

where W holds the norm's gain, its bias and the projection's bias (last column), and QK-norm's gain and centring. Where
the norm centres, ``1ᵀ x̂ = 0`` for every token: a part of W's rows along **1** changes nothing and is taken out. s is
1, or the one scalar per token and head that QK-norm leaves; c is 0, or QK-norm's own bias. The rows
of W are gradients of the layer's own projections at ``z = 0``: ``W_j = ∂q_j/∂z``, exact in the model's dtype because
each is picked out by a one-hot vector, at no more memory than the factors themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from qkscope.capture.projection import FAR, LayerCall, Projected, QKNorm, project, record_calls, take_apart
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class HeadWeights:
    """Weights of some heads, in float32, keys once per KV head.

    Attributes
    ----------
    heads : tuple of Head
        The query heads, in the order asked for.
    W_Q : Float[Tensor, "h d_head d_model+1"]
        One per query head.
    W_K : Float[Tensor, "g d_head d_model+1"]
        One per key head that at least one of the heads reads.
    kv_of_head : Int[Tensor, "h"]
        Which row of `W_K` each query head reads; rows stand in order of first use, as in `Capture`.
    scale : Float[Tensor, "h"]
        What the attention call multiplies ``q·k`` by (1 where a family scales its queries instead).
    c_Q, c_K : Float[Tensor, "h d_head"], Float[Tensor, "g d_head"]
        QK-norm's own bias: zero in nearly every family.
    """

    heads: tuple[Head, ...]
    W_Q: Float[Tensor, "h d_head d_model+1"]
    W_K: Float[Tensor, "g d_head d_model+1"]
    kv_of_head: Int[Tensor, "h"]
    scale: Float[Tensor, "h"]
    c_Q: Float[Tensor, "h d_head"]
    c_K: Float[Tensor, "g d_head"]

    def to(self, device: torch.device | str) -> HeadWeights:
        """The same weights on another device."""
        tensors: Any = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def __getitem__(
        self, head: str | Head
    ) -> tuple[Float[Tensor, "d_head d_model+1"], Float[Tensor, "d_head d_model+1"]]:
        """``W_Q`` and ``W_K`` of one head."""
        head = Head.parse(head)
        if head not in self.heads:
            raise BadInput(f"{head} is not among the heads whose weights were read.")
        row = self.heads.index(head)
        return self.W_Q[row], self.W_K[self.kv_of_head[row]]


def head_weights(model: Any, heads: str | Head | Iterable[str | Head] | None = None) -> HeadWeights:
    """Read the folded query and key weights of some heads.

    Parameters
    ----------
    model : Scope or PreTrainedModel
        Any supported model.
    heads : str, Head or iterable of them, optional
        The heads wanted, all by default.

    Returns
    -------
    HeadWeights
        On the device of the first layer asked for.

    Raises
    ------
    BadInput
        If a head does not exist, or if the layer's queries or keys are not of the form above (latent attention with
        a norm on a part of the key, a gain applied after the rotation, clipped projections, keys of another layer).
    """
    wanted = None if heads is None else parse_heads(heads)
    if not isinstance(model, PreTrainedModel):
        own = [layer.refusals["pre_rope"] for layer in model.facts.layers if "pre_rope" in layer.refusals]
        if own and model.facts.anatomy.own:  # at which place its vectors are not turned is not known
            raise BadInput(f"{model.model.config.model_type} has no weights to read: {own[0]}.")
        model = model.model
    try:
        return _read_weights(model, wanted)
    except (BadInput, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a layer asked so may fail in any way: that it has no weights is then the news
        raise BadInput(
            f"{model.config.model_type} has no weights to read: a layer, asked for its queries and keys alone, failed"
            f" with {error!r}."
        ) from error


def _read_weights(model: PreTrainedModel, wanted: list[Head] | None) -> HeadWeights:
    calls = record_calls(model, last=None if wanted is None else max(head.layer for head in wanted))
    layers = list(calls) if wanted is None else {head.layer for head in wanted if head.layer in calls}
    zero = {layer: _at_zero(calls[layer]) for layer in layers}
    n_heads = {layer: at.q.shape[1] for layer, at in zero.items()}
    if wanted is None:
        wanted = [Head(layer, index) for layer in zero for index in range(n_heads[layer])]
    for head in wanted:
        if head.layer not in calls:
            raise BadInput(f"{head} does not exist: the model's layers with attention are {_listed(calls)}.")
        if head.index >= n_heads[head.layer]:
            raise BadInput(f"{head} does not exist: layer {head.layer} has {n_heads[head.layer]} heads.")
    if len({zero[head.layer].q.shape[-1] for head in wanted}) > 1:
        raise BadInput("the heads asked for differ in width: ask for those of one width at a time.")

    # one numbering for the vectors of a layer: its query heads, then its key heads
    group = {layer: n_heads[layer] // at.k.shape[1] for layer, at in zero.items()}
    queries = [(head.layer, head.index) for head in wanted]
    keys_read = [(head.layer, n_heads[head.layer] + head.kv(group[head.layer])) for head in wanted]
    keys = list(dict.fromkeys(keys_read))
    vectors, first = queries + keys, wanted[0].layer
    width, hidden = zero[first].q.shape[-1], calls[first].hidden
    W = torch.empty((len(vectors), width, hidden.shape[-1] + 1), dtype=torch.float32, device=hidden.device)
    c = torch.empty_like(W[..., 0])
    for layer in sorted({head.layer for head in wanted}):
        _check_form(calls[layer], layer)
        here = [row for row, vector in enumerate(vectors) if vector[0] == layer]
        folded, offsets = _fold(calls[layer], [vectors[row][1] for row in here], width)
        W[here], c[here] = folded.to(W.device), offsets.to(W.device)
    n = len(queries)
    return HeadWeights(
        heads=tuple(wanted),
        W_Q=W[:n],
        W_K=W[n:],
        kv_of_head=torch.tensor([keys.index(key) for key in keys_read], device=W.device),
        scale=torch.tensor([zero[head.layer].scale for head in wanted]).to(W),
        c_Q=c[:n],
        c_K=c[n:],
    )


def _listed(layers: Iterable[int]) -> str:
    return ", ".join(f"L{layer}" for layer in layers)


@torch.no_grad()
def _at_zero(call: LayerCall, qk_norm: QKNorm = "whole") -> Projected:
    return project(call, torch.zeros_like(call.hidden[0, :1]), qk_norm)


def _fold(call: LayerCall, blocks: list[int], width: int) -> tuple[Tensor, Tensor]:
    """W ``[n, width, d_model+1]`` and c ``[n, width]`` of a layer's heads; key heads are counted after query heads."""
    rows = torch.cat([torch.arange(block * width, (block + 1) * width) for block in blocks]).to(call.hidden.device)
    jacobian, at_zero = [], []
    for part in rows.split(_ROWS_AT_ONCE):
        z = torch.zeros_like(call.hidden[0, :1]).expand(len(part), -1).clone().requires_grad_()
        with torch.enable_grad():
            out = project(call, z, qk_norm="linear")
            picked = torch.cat([out.q.flatten(1), out.k.flatten(1)], dim=1).gather(1, part[:, None])
            (gradient,) = torch.autograd.grad(picked.sum(), z)
        jacobian.append(gradient.float())
        at_zero.append(picked.detach().float())
    A, a = _without_norm(call, torch.cat(jacobian), torch.cat(at_zero))
    offsets = torch.cat([c.flatten() for c in qk_norm_offsets(call)])[rows]
    return torch.cat([A, a], dim=-1).unflatten(0, (-1, width)), offsets.unflatten(0, (-1, width))


def pull_back(
    call: LayerCall, vectors: Literal["q", "k", "v"], head: int, along: Float[Tensor, "n e"]
) -> Float[Tensor, "n d_model+1"]:
    """Directions among a head's queries, keys or values as directions in its layer's input: ``uᵀ W``, W as above.

    One small backward through the layer's own projections, where the matrix itself is not wanted.

    Parameters
    ----------
    call : from `record_calls`.
    vectors : which of the three.
    head : of the queries, or of the keys and values.
    along : the directions u.
    """
    z = torch.zeros_like(call.hidden[0, :1]).expand(len(along), -1).clone().requires_grad_()
    with torch.enable_grad():
        parts = getattr(project(call, z, qk_norm="linear"), vectors)[:, head]
        value = (parts * along.to(parts)).sum(-1)
        (gradient,) = torch.autograd.grad(value.sum(), z)
    A, a = _without_norm(call, gradient.float(), value.detach().float()[:, None])
    return torch.cat([A, a], dim=-1)


@torch.no_grad()
def _without_norm(call: LayerCall, A: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """``A z + a`` as a map of the normalised input without gain, less the part of it that every token reads alike.

    A norm that centres leaves ``n·x`` the same for all tokens: ``n = 1`` with value 0 behind it, without gain; and
    ``n = 1/gain`` with value ``n·bias`` where the stream that enters is its output as it is (post-norm models). No
    token can say what is read along n, so it moves to the constant ``a``.
    """
    module = call.input_norm or call.stream_norm
    if module is None:
        return A, a
    norm, A = take_apart(module, call.hidden), A * call.input_scale
    normal, bias = torch.ones_like(A[0]), torch.zeros_like(A[0])
    if call.input_norm is not None:
        A, a = A * norm.gain, a + A @ norm.bias[:, None]
    elif bool((norm.gain.abs() < 1e-6 * norm.gain.abs().max()).any()):
        return A, a  # a dead coordinate: its value is constant by itself
    else:
        normal, bias = 1 / norm.gain, norm.bias
    if not norm.centres:
        return A, a
    normal = (normal / normal.norm())[:, None]
    along = A @ normal
    return A - along @ normal.T, a + along * (bias @ normal)


def qk_norm_offsets(call: LayerCall) -> tuple[Float[Tensor, "h d_head"], Float[Tensor, "g d_head"]]:
    """QK-norm's own bias, c of queries and of keys."""
    at_zero = _at_zero(call, "bias")
    found = at_zero.q[0].float(), at_zero.k[0].float()
    return found if call.qk_norms else (torch.zeros_like(found[0]), torch.zeros_like(found[1]))


@torch.no_grad()
def qk_norm_scales(call: LayerCall, z: Float[Tensor, "n d_model"]) -> tuple[Float[Tensor, "n h"], Float[Tensor, "n g"]]:
    """The scalar QK-norm leaves for each token and head, ``s = ⟨q − c, W x̂⟩ / |W x̂|²``; 1 without QK-norm.

    The layer's own vectors are compared with their linear part, so no layout is assumed.
    """
    whole = project(call, z)
    if not call.qk_norms:
        return torch.ones_like(whole.q[..., 0]).float(), torch.ones_like(whole.k[..., 0]).float()
    linear = project(call, z, qk_norm="linear")

    def ratio(true: Tensor, offset: Tensor, part: Tensor) -> Tensor:
        part = part.float()
        return ((true.float() - offset) * part).sum(-1) / part.square().sum(-1).clamp_min(torch.finfo(part.dtype).tiny)

    c_Q, c_K = qk_norm_offsets(call)
    return ratio(whole.q, c_Q, linear.q), ratio(whole.k, c_K, linear.k)


def can_be_folded(call: LayerCall, layer: int) -> bool:
    """Whether a layer's queries and keys are of the form above."""
    try:
        _check_form(call, layer)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # a layer asked so may fail in any way
        return False
    return True


@torch.no_grad()
def _check_form(call: LayerCall, layer: int) -> None:
    """Refuse a layer whose q and k are not ``s (A z + a) + c``, or whose rotation does more than rotate."""
    generator = torch.Generator().manual_seed(layer)
    z = torch.randn((8, call.hidden.shape[-1]), generator=generator).to(call.hidden)
    tolerance = 1e-3 if z.dtype in (torch.float32, torch.float64) else 5e-2
    whole, turned = project(call, z), project(call, z, rotated=True)
    linear = project(call, torch.cat([0 * z, z, z + z.roll(1, 0), FAR * z]), qk_norm="linear")
    seen = zip(
        ("queries", "keys"),
        whole[:2],
        turned[:2],
        linear[:2],
        qk_norm_offsets(call),
        qk_norm_scales(call, z),
        strict=True,
    )
    for what, vector, rotated, parts, offset, s in seen:
        vector, rotated = vector.float(), rotated.float()
        zero, once, both, far = parts.float().chunk(4)
        size = vector.norm(dim=-1).mean()
        # of two different inputs: a layer that routes them to other weights is straight along each
        straight = (both - once - once.roll(1, 0) + zero).norm(dim=-1).max() <= tolerance * once.norm(dim=-1).mean()
        straight &= (far - FAR * once + (FAR - 1) * zero).norm(dim=-1).max() <= tolerance * far.norm(dim=-1).mean()
        one_scalar = (vector - s[..., None] * once - offset).norm(dim=-1).max() <= tolerance * size
        turns = (vector.norm(dim=-1) - rotated.norm(dim=-1)).abs().max() <= tolerance * size
        kind = f"{call.family} layer {layer}: its {what}"
        if not straight:
            raise BadInput(f"{kind} are no linear function of its input, so they have no single weight matrix.")
        if not one_scalar:
            raise BadInput(f"{kind} are normalised in parts, so they are not one scalar times a linear map.")
        if not turns:
            raise BadInput(f"{kind} are scaled unevenly after the rotation, so no weight matrix stands before it.")
