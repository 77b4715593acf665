"""W_Q and W_K of every head, with everything that stands before them folded in.

With ``x̂`` the layer's normalised input *without* gain and a constant 1 appended,

    ``q = s_q W_Q x̂ + c_Q``,   ``k = s_k W_K x̂ + c_K``   (before the rotation),
    ``ℓ = scale · (R_m q)·(R_n k)``,

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

from qkscope import BadInput, Scope
from qkscope.heads import Head
from qkscope.linear.layer import AffineLayer, BlockArguments, Projection
from qkscope.model.batching import layout_of
from qkscope.model.block_tree import Norm, is_norm, take_apart
from qkscope.model.inputs import short_inputs
from qkscope.model.tap import Call, Stop, block_of, cleared

_FAR = 16  # length of a probe, of a usual input's: vectors that are clipped somewhere show it
_TOLERANCE = 1e-3  # distance of vectors from the form above, of their length


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
    kv_of_head: Int[Tensor, " h"]
    scale: Float[Tensor, " h"]
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
    family = scope.model.config.model_type
    layers = scope.facts.layers
    refusals = [layer.refusals["pre_rope"] for layer in layers if "pre_rope" in layer.refusals]
    if refusals and scope.facts.anatomy.own:  # where its vectors are unrotated is not known
        raise BadInput(f"{family} has no weights to read: {refusals[0]}.")
    if len({layers[head.layer].d_head for head in wanted}) > 1:
        raise BadInput("the heads asked for differ in width: ask for those of one width at a time.")
    try:
        return _read(scope, wanted)
    except (BadInput, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # its code may fail in any way on such a call
        why = f"a layer, asked for its queries and keys alone, failed with {error!r}"
        raise BadInput(f"{family} has no weights to read: {why}.") from error


def _read(scope: Scope, wanted: list[Head]) -> HeadWeights:
    shapes = tuple((layer.n_heads, layer.n_kv_heads) for layer in scope.facts.layers)
    plans, kv_of_head = layout_of(shapes, tuple(wanted))
    calls = recorded(scope, max(plans))
    device = calls[wanted[0].layer].arguments.stream.device
    queries = _Rows("q")
    keys = _Rows("k")
    for layer, plan in plans.items():
        form = form_of(scope, layer, calls[layer])
        queries.add(form, plan.heads, plan.slots)
        keys.add(form, plan.kv, plan.kv_slots)
    W_Q, c_Q = queries.stacked(device)
    W_K, c_K = keys.stacked(device)
    scales = [calls[head.layer].call.scale for head in wanted]
    return HeadWeights(
        heads=tuple(wanted),
        W_Q=W_Q,
        W_K=W_K,
        kv_of_head=torch.tensor(kv_of_head, device=device),
        scale=torch.tensor(scales).to(c_Q),
        c_Q=c_Q,
        c_K=c_K,
    )


class _Rows:
    """W and c of heads of one kind, by their slots in the result."""

    def __init__(self, kind: Projection) -> None:
        self.kind = kind
        self.W: dict[int, Float[Tensor, "d_head d_model+1"]] = {}
        self.c: dict[int, Float[Tensor, " d_head"]] = {}

    def add(self, form: Form, heads: Sequence[int], slots: Sequence[int]) -> None:
        """Read some heads of one layer."""
        jacobian, constants = form.matrices(self.kind, heads)
        W = _without_constants(form, jacobian, constants)
        for row, (head, slot) in enumerate(zip(heads, slots, strict=True)):
            self.W[slot] = W[row]
            self.c[slot] = form.offsets[self.kind][head]

    def stacked(
        self, device: torch.device
    ) -> tuple[Float[Tensor, "n d_head d_model+1"], Float[Tensor, "n d_head"]]:
        """W and c in the order of the slots."""
        slots = sorted(self.W)
        W = torch.stack([self.W[slot].to(device) for slot in slots])
        c = torch.stack([self.c[slot].to(device) for slot in slots])
        return W, c


# ---------------------------------------------------------------------- how layers are called


class BlockCall(NamedTuple):
    """A block, what it was called with, its attention call, and the norm just before it, if any."""

    block: nn.Module
    arguments: BlockArguments
    call: Call
    before: nn.Module | None


@torch.no_grad()
def recorded(scope: Scope, last: int) -> dict[int, BlockCall]:
    """How each layer up to the last one wanted is called with two tokens."""
    arguments: dict[nn.Module, BlockArguments] = {}
    calls: dict[int, Call] = {}
    norm_outputs: dict[int, tuple[nn.Module, Tensor]] = {}  # by id, which needs a living tensor
    stop = Stop()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments[module] = BlockArguments(args, kwargs)

    def note_norm(norm: nn.Module, _args: Any, out: Tensor) -> None:
        norm_outputs[id(out)] = norm, out

    def take(call: Call) -> None:
        calls[call.layer] = call
        if call.layer == last:
            raise stop

    modules = list(scope.model.modules())
    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
    hooks += [norm.register_forward_hook(note_norm) for norm in modules if is_norm(norm)]
    with cleared(hooks, stop):
        scope.watch(short_inputs(scope.model, (2,)), take)

    names = {id(module): name for name, module in scope.model.named_modules()}
    block_calls = {}
    for layer, call in calls.items():
        block = block_of(scope.model, names[id(call.module)])
        if arguments[block].stream.ndim > 3:
            block = call.module  # of several streams the attention is given one vector
        called = arguments[block]
        norm, _ = norm_outputs.get(id(called.stream), (None, None))
        block_calls[layer] = BlockCall(block, called, call, norm)
    return block_calls


# ---------------------------------------------------------------------- the form of one layer


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
    offsets: dict[Projection, Float[Tensor, "h d_head"]]
    norms: list[Norm]
    before: Norm | None
    qk_normed: bool

    @property
    def centres(self) -> bool:
        """Whether the norm before W subtracts the mean."""
        return any(norm.centres for norm in self.norms)

    def matrices(
        self, kind: Projection, heads: Sequence[int]
    ) -> tuple[Float[Tensor, "n d e"], Float[Tensor, "n d"]]:
        """W and a of some heads."""
        jacobians = [self.layer.jacobian(kind, head)[0] for head in heads]
        a = self.layer.constants[kind][0, 0, heads]
        return torch.cat(jacobians), a


def form_of(scope: Scope, number: int, called: BlockCall) -> Form:
    """Read one layer's form from its own code, or refuse it with the reason."""
    stream = called.arguments.stream
    layer = _layer_at(scope, number, called, 0)
    last = _layer_at(scope, number, called, stream.shape[1] - 1)
    family = scope.model.config.model_type
    if not layer.reads("k"):
        raise BadInput(
            f"{family} has no weights to read in every layer: some have no keys of their own but "
            "read those of a layer before them; ask for heads of the others."
        )
    qk_norms = set(layer.norms.ran) & set(called.call.module.modules())

    x = _probes(number, stream)
    probes = torch.cat([0 * x, x, x + x.roll(1, 0), _FAR * x])
    with torch.no_grad():
        live = layer.pushed(x)
        rotated = last.pushed(x)
        layer.unit()
        biased = layer.constants
        layer.unit(unbiased=qk_norms)
        linear = layer.pushed(probes, frozen=True)
    offsets = {kind: (biased[kind] - layer.constants[kind])[0, 0] for kind in biased}
    vectors: dict[Projection, str] = {"q": "queries", "k": "keys"}
    for kind, noun in vectors.items():
        reason = _misfit(live[kind], rotated[kind], linear[kind], offsets[kind], stream.dtype)
        if reason:
            raise BadInput(f"{family} layer {number}: its {noun} are {reason}.")

    norms = [take_apart(norm, stream) for norm in layer.norms.ran if norm not in qk_norms]
    before = None
    if called.before is not None and not norms:
        before = take_apart(called.before, stream)
    return Form(layer, offsets, norms, before, bool(qk_norms))


def _layer_at(scope: Scope, number: int, called: BlockCall, column: int) -> AffineLayer:
    """A layer's own code at one token."""
    row = torch.zeros(1, dtype=torch.long)
    columns = row[None] + column
    return AffineLayer(scope, number, called.block, called.arguments, called.call, row, columns)


def _probes(number: int, stream: Tensor) -> Float[Tensor, "8 1 1 d_model"]:
    """Random normalised inputs of a layer."""
    generator = torch.Generator().manual_seed(number)
    width = stream.shape[-1]
    draw = torch.randn((8, 1, 1, width), generator=generator).to(stream.device)
    return torch.nn.functional.layer_norm(draw, (width,))


def _misfit(
    live: Tensor, rotated: Tensor, linear: Tensor, offset: Tensor, dtype: torch.dtype
) -> str:
    """Why vectors are not ``R (s W x̂ + c)`` with a rotation R; nothing where they are.

    Parameters
    ----------
    live : vectors of the probes at the first token, the layer as it is.
    rotated : the same at the last token.
    linear : vectors of 0, x, x + another x, and x far out, with every norm's scalar at 1.
    offset : QK-norm's own bias c.
    dtype : the model's.
    """
    zero, once, both, far = linear.chunk(4)
    # of two different inputs: a layer that routes them to other weights is linear along each
    adds_up = _close(both, once + once.roll(1, 0) - zero)
    scales = _close(far, _FAR * once - (_FAR - 1) * zero)
    if not (adds_up and scales):
        return "no linear function of its input, so they have no single weight matrix"
    products = ((live - offset) * once).sum(-1, keepdim=True)
    s = products / once.square().sum(-1, keepdim=True).clamp_min(1e-30)
    if not _close(s * once + offset, live):
        return "normalised in parts, so they are not one scalar times a linear map"
    rounding = max(_TOLERANCE, 4 * torch.finfo(dtype).eps)  # of cos and sin
    lengths = live.norm(dim=-1, keepdim=True)
    if not _close(rotated.norm(dim=-1, keepdim=True), lengths, rounding):
        return "scaled unevenly after the rotation, so no weight matrix stands before it"
    return ""


def _close(vectors: Tensor, wanted: Tensor, limit: float = _TOLERANCE) -> bool:
    """Whether all vectors are near the wanted ones, by the mean length of these."""
    error = (vectors - wanted).norm(dim=-1).max()
    return bool(error <= limit * wanted.norm(dim=-1).mean())


def _without_constants(
    form: Form, J: Float[Tensor, "n d e"], a: Float[Tensor, "n d"]
) -> Float[Tensor, "n d e+1"]:
    """W without what it reads of the constant part of its input, and a as its last column.

    Where the output of a centring norm enters as it is (post-norm models), ``n·x`` is the same for
    all tokens, ``n = 1/gain``. No token can show what is read along n, so it moves to the constant.
    """
    norm = form.before
    W = J
    if norm is not None and form.layer.block is form.layer.call.module:  # its norm stands outside
        W = norm.centred(J * norm.gain)
        a = a + J @ norm.bias
    elif norm is not None and norm.centres and _has_inverse(norm.gain):
        normal = (1 / norm.gain).to(J)
        along = J @ normal / normal.square().sum()
        W = J - along[..., None] * normal
        a = a + along * (normal @ norm.bias.to(J))
    return torch.cat([W, a[..., None]], dim=-1)


def _has_inverse(gain: Tensor) -> bool:
    """Whether no entry of a gain is 0, or nearly."""
    sizes = gain.abs()
    return bool((sizes > 1e-6 * sizes.max()).all())
