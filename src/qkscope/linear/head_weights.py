"""W_Q and W_K of every head, with everything that stands before them folded in.

With ``x̂`` the layer's normalised input *without* gain and a constant 1 appended,

    ``q = s_q W_Q x̂ + c_Q``,   ``k = s_k W_K x̂ + c_K``   (before the rotation),   ``ℓ = scale ·
    (R_m q)·(R_n k)``,

where W holds the norm's gain, its bias and the projection's bias (last column), and QK-norm's gain
and centring. Where the norm centres, ``1ᵀ x̂ = 0`` for every token, and no row of W reads anything
along **1**. s is 1, or the one scalar per token and head that QK-norm leaves; c is 0, or QK-norm's
own bias. W is the gradient of the layer's own code at the first token, where a rotation turns
nothing, with every norm's scalar set to 1 (`AffineLayer.unit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope import BadInput, Head, Scope
from qkscope.linear.layer import AffineLayer, BlockArguments, Kind, stream_of
from qkscope.model.batching import layout_of
from qkscope.model.block_tree import Norm, is_norm, take_apart
from qkscope.model.inputs import short_inputs
from qkscope.model.tap import Call, Stop, block_of, cleared

_FAR = 16  # times an input of usual length, so that vectors that are clipped somewhere show that they are
_CLOSE = 1e-3  # how far vectors may be from the form above, of their length


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

    def __getitem__(self, head: str | Head) -> tuple[Tensor, Tensor]:
        """``W_Q`` and ``W_K`` of one head, Float [d_head, d_model+1]."""
        row = self.heads.index(Head.parse(head))
        return self.W_Q[row], self.W_K[self.kv_of_head[row]]


def head_weights(model: Any, heads: str | Head | Sequence[str | Head] | None = None) -> HeadWeights:
    """Read the folded query and key weights of some heads.

    Parameters
    ----------
    model : Scope or PreTrainedModel
        Any supported model.
    heads : str, Head or sequence of them, optional
        The heads wanted, all by default.

    Returns
    -------
    HeadWeights
        On the device of the first layer asked for.

    Raises
    ------
    BadInput
        If a head does not exist, or if the layer's queries or keys are not of the form above
        (latent attention with a norm on a part of the key, a gain applied after the rotation,
        clipped projections, keys of another layer).
    """
    scope = model if isinstance(model, Scope) else Scope.from_model(model, check=False)
    wanted = scope.parse(heads)
    kind = scope.model.config.model_type
    own = [
        layer.refusals["pre_rope"] for layer in scope.facts.layers if "pre_rope" in layer.refusals
    ]
    if own and scope.facts.anatomy.own:  # at which place its vectors are not turned is not known
        raise BadInput(f"{kind} has no weights to read: {own[0]}.")
    if len({scope.facts.layers[head.layer].d_head for head in wanted}) > 1:
        raise BadInput("the heads asked for differ in width: ask for those of one width at a time.")
    try:
        return _read(scope, wanted)
    except (BadInput, MemoryError, torch.OutOfMemoryError):
        raise
    except (
        Exception
    ) as error:  # a layer asked so may fail in any way: that it has no weights is then the news
        why = f"a layer, asked for its queries and keys alone, failed with {error!r}"
        raise BadInput(f"{kind} has no weights to read: {why}.") from error


class BlockCall(NamedTuple):
    """A block, what it was called with, its attention call, and the norm whose output entered it,
    if one's did.
    """

    block: nn.Module
    given: BlockArguments
    call: Call
    before: nn.Module | None


def _read(scope: Scope, wanted: list[Head]) -> HeadWeights:
    shapes = tuple((layer.n_heads, layer.n_kv_heads) for layer in scope.facts.layers)
    plans, kv_of_head = layout_of(shapes, tuple(wanted))
    called = recorded(scope, max(plans))
    device = stream_of(*called[wanted[0].layer].given).device
    found: dict[Kind, dict[int, tuple[Tensor, Tensor]]] = {"q": {}, "k": {}}  # W and c, by slot
    for number, plan in plans.items():
        form = form_of(scope, number, called[number])
        rows: dict[Kind, tuple[list[int], list[int]]] = {
            "q": (plan.heads, plan.slots),
            "k": (plan.kv, plan.kv_slots),
        }
        for kind, (heads, slots) in rows.items():
            W = _without_constants(form, *form.matrices(kind, heads))
            found[kind] |= zip(slots, zip(W, form.offsets[kind][heads], strict=True), strict=True)
    sides = [zip(*(of[slot] for slot in sorted(of)), strict=True) for of in found.values()]
    W_Q, c_Q, W_K, c_K = (
        torch.stack([x.to(device) for x in part]) for side in sides for part in side
    )
    scale = torch.tensor([called[head.layer].call.scale for head in wanted]).to(c_Q)
    return HeadWeights(
        tuple(wanted), W_Q, W_K, torch.tensor(kv_of_head, device=device), scale, c_Q, c_K
    )


@torch.no_grad()
def recorded(scope: Scope, last: int) -> dict[int, BlockCall]:
    """How each layer up to the last one wanted is called with two tokens."""
    names = {id(module): name for name, module in scope.model.named_modules()}
    given: dict[nn.Module, BlockArguments] = {}
    calls: dict[int, Call] = {}
    made: dict[
        int, tuple[nn.Module, Tensor]
    ] = {}  # an id means something only while its tensor lives
    stop = Stop()

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[module] = BlockArguments(args, kwargs)

    def normed(norm: nn.Module, _args: Any, out: Tensor) -> None:
        made[id(out)] = norm, out

    def take(call: Call) -> None:
        calls[call.layer] = call
        if call.layer == last:
            raise stop

    hooks = [
        module.register_forward_pre_hook(entering, with_kwargs=True)
        for module in scope.model.modules()
    ]
    hooks += [norm.register_forward_hook(normed) for norm in scope.model.modules() if is_norm(norm)]
    with cleared(hooks, stop):
        scope.watch(short_inputs(scope.model, (2,)), take)
    found = {}
    for layer, call in calls.items():
        block = block_of(scope.model, names[id(call.module)])
        if (
            stream_of(*given[block]).ndim > 3
        ):  # several streams: the attention is given one vector that is made of them
            block = call.module
        norm, _ = made.get(id(stream_of(*given[block])), (None, None))
        found[layer] = BlockCall(block, given[block], call, norm)
    return found


class Form(NamedTuple):
    """One layer's vectors at the first token with every norm's scalar at 1, ``W x + a + c``.

    Attributes
    ----------
    layer : its own code, with scalars of 1.
    offsets : by kind, QK-norm's own bias c.
    norms : those that stand between the stream and the vectors.
    before : the norm whose output enters, where the layer's own code has none.
    qk_normed : whether QK-norm leaves a scalar for each token and head.
    """

    layer: AffineLayer
    offsets: dict[Kind, Float[Tensor, "h d_head"]]
    norms: list[Norm]
    before: Norm | None
    qk_normed: bool

    @property
    def centres(self) -> bool:
        """Whether the norm before W subtracts the mean."""
        return any(norm.centres for norm in self.norms)

    def matrices(
        self, kind: Kind, heads: Sequence[int]
    ) -> tuple[Float[Tensor, "n d e"], Float[Tensor, "n d"]]:
        """W and a of some heads."""
        W = torch.cat([self.layer.jacobian(kind, head)[0] for head in heads])
        return W, self.layer.constants[kind][0, 0, heads]


def form_of(scope: Scope, number: int, called: BlockCall) -> Form:
    """Ask a layer for its form, or refuse it with the reason."""
    stream = stream_of(*called.given)
    row = torch.zeros(1, 1, dtype=torch.long)
    given = scope, number, called.block, called.given, called.call, row[0]
    layer, last = (AffineLayer(*given, row + end) for end in (0, stream.shape[1] - 1))
    family = scope.model.config.model_type
    if not layer.reads("k"):
        why = "some have no keys of their own but read those of a layer before them; ask for heads of the others"
        raise BadInput(f"{family} has no weights to read in every layer: {why}.")
    qk_norms = set(layer.norms.ran) & set(called.call.module.modules())
    draw = torch.randn(
        (8, 1, 1, stream.shape[-1]), generator=torch.Generator().manual_seed(number)
    ).to(stream.device)
    x = torch.nn.functional.layer_norm(draw, draw.shape[-1:])
    with torch.no_grad():
        live = layer.pushed(x)
        turned = last.pushed(x)
        layer.unit()
        biased = layer.constants
        layer.unit(unbiased=qk_norms)
        linear = layer.pushed(torch.cat([0 * x, x, x + x.roll(1, 0), _FAR * x]), frozen=True)
    offsets = {kind: (biased[kind] - layer.constants[kind])[0, 0] for kind in biased}
    vectors: dict[Kind, str] = {"q": "queries", "k": "keys"}
    for kind, what in vectors.items():
        if reason := _misfit(live[kind], turned[kind], linear[kind], offsets[kind], stream.dtype):
            raise BadInput(f"{family} layer {number}: its {what} are {reason}.")
    norms = [take_apart(norm, stream) for norm in layer.norms.ran if norm not in qk_norms]
    before = None if called.before is None or norms else take_apart(called.before, stream)
    return Form(layer, offsets, norms, before, bool(qk_norms))


def _misfit(
    live: Tensor, turned: Tensor, linear: Tensor, offset: Tensor, dtype: torch.dtype
) -> str:
    """Why vectors are not ``s W x̂ + c``, or what their rotation does more than rotate; nothing
    where they fit.
    """
    zero, once, both, far = linear.chunk(4)

    def close(one: Tensor, other: Tensor, limit: float = _CLOSE) -> bool:
        return bool((one - other).norm(dim=-1).max() <= limit * other.norm(dim=-1).mean())

    # of two different inputs: a layer that routes them to other weights is straight along each
    if not (
        close(both, once + once.roll(1, 0) - zero) and close(far, _FAR * once - (_FAR - 1) * zero)
    ):
        return "no linear function of its input, so they have no single weight matrix"
    s = ((live - offset) * once).sum(-1, keepdim=True) / once.square().sum(
        -1, keepdim=True
    ).clamp_min(1e-30)
    if not close(s * once + offset, live):
        return "normalised in parts, so they are not one scalar times a linear map"
    rounding = max(_CLOSE, 4 * torch.finfo(dtype).eps)  # of cos and sin
    if not close(turned.norm(dim=-1, keepdim=True), live.norm(dim=-1, keepdim=True), rounding):
        return "scaled unevenly after the rotation, so no weight matrix stands before it"
    return ""


def _without_constants(
    form: Form, J: Float[Tensor, "n d e"], a: Float[Tensor, "n d"]
) -> Float[Tensor, "n d e+1"]:
    """W, less what it reads of the part of its input that is the same for every token, and a behind
    it.

    Where what enters is a norm's output as it is (post-norm models) and the norm centres, ``n·x``
    is the same for all tokens, ``n = 1/gain``. No token can say what is read along n, so it moves
    to the constant.
    """
    before = form.before
    if before is not None and form.layer.block is form.layer.call.module:  # its norm stands outside
        J, a = before.centred(J * before.gain), a + J @ before.bias
    elif (
        before is not None
        and before.centres
        and bool((before.gain.abs() > 1e-6 * before.gain.abs().max()).all())
    ):
        normal = (1 / before.gain).to(J)
        along = J @ normal / normal.square().sum()
        J, a = J - along[..., None] * normal, a + along * (normal @ before.bias.to(J))
    return torch.cat([J, a[..., None]], dim=-1)
