"""Writers: what each head, each MLP and the embedding put into the residual stream, as other heads read it.

``x(p) = Σ_c x_c(p)`` over writers c. With the norms' scalars held at what they were, all that stands between x and the
logit is linear, the rotation included:

    ``q(p) = Σ_c q_c(p)``,   ``q_c = R_p s_q W_Q σ_p x_c(p)``,   and the same for k.

Outputs of heads are recorded before ``W_O`` and only at the places asked for, so that a pass costs little more than the
forward. What no token decides (biases of any kind) is the writer `BIAS`, always the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.capture.pick import Capture, Picker, Places
from qkscope.capture.projection import Norm, norm_unit, project, record_calls, take_apart
from qkscope.capture.scope import Scope
from qkscope.capture.spaces import Rotary
from qkscope.capture.stream import Block, Entered, Heads, Node, Normed, Part, Scaled, Sum, read_blocks
from qkscope.capture.tap import Call
from qkscope.capture.weights import head_weights
from qkscope.errors import BadInput
from qkscope.heads import Head

EMBEDDING, BIAS = "embedding", "bias"
Side = Literal["query", "key"]
_OF_ROWS = ("entered", "heads", "gave", "given")


@dataclass
class Recorded:
    """What one batch left at p places in each of n rows: slot 0 is the query, the others are keys.

    Attributes
    ----------
    row, columns : which row of the batch, and which of its columns.
    captured : queries and every token's keys of the heads read (with the whole attention row).
    entered : by layer, what entered the block: Float [n, p, d_model].
    heads : by layer, the heads' outputs before W_O, head after head: Float [n, p, h·e].
    gave, given : by module, what a part put out, and what a norm was given: Float [n, p, d_model].
    rotary : by layer read, its rotation.
    """

    row: Int[Tensor, " n"]
    columns: Int[Tensor, "n p"]
    captured: Capture | None = None
    entered: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)
    gave: dict[nn.Module, Tensor] = field(default_factory=dict)
    given: dict[nn.Module, Tensor] = field(default_factory=dict)
    rotary: dict[int, Rotary] = field(default_factory=dict)
    first: int = 0  # which row of `captured` is the first of these

    def at(self, side: Side) -> slice:
        """The slots of a side."""
        return slice(0, 1) if side == "query" else slice(1, None)

    def rows(self, some: slice) -> Recorded:
        """Some of the rows; what was captured of their attention stays whole."""
        kept: Any = {name: {key: value[some] for key, value in getattr(self, name).items()} for name in _OF_ROWS}
        return replace(self, row=self.row[some], columns=self.columns[some], first=self.first + some.start, **kept)


@dataclass(frozen=True)
class Parts:
    """Vectors at p places, split among writers: ``values`` is Float [n, c, p, d]."""

    writers: list[str]
    values: Float[Tensor, "n c p d"]


class Reader:
    """Some heads, ready to say who wrote what they read.

    Parameters
    ----------
    scope : the model.
    heads : whose queries and keys are split.
    """

    def __init__(self, scope: Scope, heads: Sequence[Head]) -> None:
        self.scope, self.heads = scope, list(heads)
        self.layers = sorted({head.layer for head in heads})
        for layer in self.layers:
            if "pre_rope" in scope.facts.layers[layer].refusals:
                raise BadInput(f"{scope.name} cannot be traced: {scope.facts.layers[layer].refusals['pre_rope']}.")
        self.blocks = read_blocks(scope.model, scope.facts.layer_of)
        self.weights = head_weights(scope, self.heads)
        self.calls = record_calls(scope.model, max(self.layers))
        self._norms: dict[nn.Module, Norm] = {}
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}

    def writers(self, layer: int) -> list[str]:
        """Names of all that write before a layer, in the order of every split, `BIAS` last."""
        names = [EMBEDDING]
        for before, block in enumerate(self.blocks[:layer]):
            for node in block.walk():
                if isinstance(node, Heads):
                    names += [str(Head(before, i)) for i in range(self.scope.facts.layers[before].n_heads)]
                elif isinstance(node, Part):
                    names.append(part_name(block, before, node.module))
        return [*names, BIAS]

    # ------------------------------------------------------------------ one forward

    @torch.no_grad()
    def record(
        self,
        inputs: dict[str, Tensor],
        places: Places,
        *visits: Callable[[Call], None],
        layers: Sequence[int] | None = None,
    ) -> Recorded:
        """Run a batch up to the deepest layer that is read, and keep what the writers left at these places.

        Padded slots of keys hold column 0 and mean nothing.

        Parameters
        ----------
        inputs : of the model.
        places : where to look.
        visits : who else sees each attention call.
        layers : whose input is kept; those that are read, if not given.
        """
        keys = places.keys.masked_fill(~places.key_mask, 0)
        found = Recorded(places.row, torch.cat([places.query[:, None], keys], dim=1))
        shape = next(iter(inputs.values())).shape[:2]
        everywhere = Places.everywhere(places.row, places.query, inputs["attention_mask"])
        picker = Picker(self.scope.facts, self.heads, everywhere, "post_rope")

        def pick(value: Tensor) -> Tensor:
            value = value.reshape(*shape, -1) if value.ndim == 2 else value  # experts are given tokens in one row
            return value[found.row.to(value.device)[:, None], found.columns.to(value.device)].float()

        def visit(call: Call) -> None:
            if call.layer in self.layers and call.rotary is not None:
                found.rotary[call.layer] = call.rotary

        kept = self.layers if layers is None else layers
        with _hooked(self.blocks[: max(self.layers) + 1], kept, found, pick):
            self.scope.watch(inputs, visit, *visits, picker.visit, rotary=True)
        found.captured = picker.finish(places.row, {})
        return found

    # ------------------------------------------------------------------ writers in the residual stream

    def stream(self, found: Recorded, layer: int) -> list[Parts]:
        """What entered a layer, split among its writers: in pieces, in the order of `writers`, biases between."""
        *_, (_, pieces) = self.streams(found, layer)
        return pieces

    def streams(self, found: Recorded, last: int) -> Iterator[tuple[int, list[Parts]]]:
        """The same for each layer up to the last one wanted, in turn."""
        pieces = [Parts([EMBEDDING], found.entered[0][:, None])]
        for layer in range(last + 1):
            if layer:
                block = self.blocks[layer - 1]
                pieces = self._through(block, layer - 1, found, pieces, block.tree)
            yield layer, pieces

    def _through(self, block: Block, layer: int, found: Recorded, entered: list[Parts], node: Node) -> list[Parts]:
        match node:
            case Entered():
                return entered
            case Heads():
                W, b = self.output_weights(layer)
                z = found.heads[layer].unflatten(-1, (len(W), -1))
                names = [str(Head(layer, i)) for i in range(len(W))]
                return [Parts(names, torch.einsum("npha,hda->nhpd", z, W)), *_constant(b, found)]
            case Part(module):
                return [Parts([part_name(block, layer, module)], found.gave[module][:, None])]
            case Scaled(_, gain, inner):
                pieces = self._through(block, layer, found, entered, inner)
                return [Parts(p.writers, p.values * gain.to(p.values)) for p in pieces]
            case Sum(terms):
                out = []
                for number, term in terms:
                    pieces = self._through(block, layer, found, entered, term)
                    out += pieces if number == 1 else [Parts(p.writers, p.values * number) for p in pieces]
                return out
            case Normed(norm, inner):
                own, given = self.taken_apart(norm, found.given[norm]), found.given[norm]
                scale = norm_scalar(norm, own, given)[:, None, :, None] * own.gain
                pieces = self._through(block, layer, found, entered, inner)
                turned = [Parts(p.writers, _centred(p.values, own) * scale) for p in pieces]
                return [*turned, *_constant(own.bias, found)]

    def taken_apart(self, norm: nn.Module, like: Tensor) -> Norm:
        """A norm's gain, bias and centring, asked for once."""
        if norm not in self._norms:
            self._norms[norm] = take_apart(norm, like)
        return self._norms[norm]

    @torch.no_grad()
    def output_weights(self, layer: int) -> tuple[Float[Tensor, "h d e"], Float[Tensor, " d"]]:
        """W_O of each head of a layer, and its bias, found by asking it."""
        if layer not in self._outputs:
            module = self.blocks[layer].output
            weight = next(module.parameters())
            width = weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[1]
            zero = module(torch.zeros(1, width, dtype=weight.dtype, device=weight.device))[0].float()
            W = module(torch.eye(width, dtype=weight.dtype, device=weight.device)).float() - zero
            heads = self.scope.facts.layers[layer].n_heads
            self._outputs[layer] = W.unflatten(0, (heads, -1)).mT.contiguous(), zero
        return self._outputs[layer]

    # ------------------------------------------------------------------ writers in queries and keys

    def scalar(self, found: Recorded, layer: int) -> Float[Tensor, "n p"]:
        """What the layer's own norm multiplies each place by; 1 where the stream enters as it is."""
        norm, x = self.calls[layer].input_norm, found.entered[layer]
        return torch.ones_like(x[..., 0]) if norm is None else norm_scalar(norm, self.taken_apart(norm, x), x)

    def read(
        self, found: Recorded, head: Head, side: Side, pieces: Sequence[Parts] | None = None
    ) -> Float[Tensor, "n c p d"]:
        """A head's queries or keys at the places of that side, split among `writers`, *before* the rotation.

        `turn` puts the rotation on. The scalar of QK-norm is held at what it was.

        Parameters
        ----------
        found : from `record`.
        head : one of the reader's.
        side : query or key.
        pieces : what entered its layer, from `stream`, where several heads of a layer are read.
        """
        pieces = self.stream(found, head.layer) if pieces is None else pieces
        at, sigma = found.at(side), self.scalar(found, head.layer)[:, None, :, None]
        W, c = self.matrix(head, side)
        named = [(p.values[:, :, at] * sigma[:, :, at]) @ W[:, :-1].T for p in pieces if p.writers != [BIAS]]
        bias = torch.zeros_like(named[0][:, :1]) + W[:, -1]
        for piece in pieces:
            if piece.writers == [BIAS]:
                bias = bias + (piece.values[:, :, at] * sigma[:, :, at]) @ W[:, :-1].T
        whole = torch.cat([*named, bias], dim=1)
        if self.calls[head.layer].qk_norms:
            whole = whole * self.qk_scalar(found, head, side, whole.sum(1), c)[:, None, :, None]
        whole[:, -1] += c
        return whole

    def matrix(self, head: Head, side: Side) -> tuple[Float[Tensor, "d_head d_model+1"], Float[Tensor, " d_head"]]:
        """The weights of a side, norm and biases folded in, and QK-norm's own bias."""
        row = self.weights.heads.index(head)
        if side == "query":
            return self.weights.W_Q[row], self.weights.c_Q[row]
        group = int(self.weights.kv_of_head[row])
        return self.weights.W_K[group], self.weights.c_K[group]

    def qk_scalar(self, found: Recorded, head: Head, side: Side, linear: Tensor, c: Tensor) -> Float[Tensor, "n p"]:
        """What QK-norm multiplies a head's vectors by: the true ones compared with their linear part."""
        turned = self.turn(found, head.layer, torch.stack([linear, c.expand_as(linear)], dim=1), side)
        part, offset = turned.unbind(1)
        true = self.true(found, head, side)
        return ((true - offset) * part).sum(-1) / part.square().sum(-1).clamp_min(1e-30)

    def true(self, found: Recorded, head: Head, side: Side) -> Float[Tensor, "n p d"]:
        """The head's own queries or keys at the places, as the dot product sees them."""
        assert found.captured is not None
        column, some = self.heads.index(head), slice(found.first, found.first + len(found.row))
        if side == "query":
            return found.captured.q[some, column, None]
        keys = found.captured.k[some, found.captured.kv_of_head[column]]
        return keys.gather(1, found.columns[:, 1:, None].expand(-1, -1, keys.shape[-1]))

    def turn(
        self, found: Recorded, layer: int, values: Float[Tensor, "n c p d"], side: Side, *, back: bool = False
    ) -> Float[Tensor, "n c p d"]:
        """The rotation of each place put on vectors (``back``: its transpose); none where the layer has none."""
        rotary, offset = found.rotary.get(layer), self.scope.facts.layers[layer].offset
        if rotary is None or offset is None:
            return values
        return rotary.turn(values, found.row, found.columns[:, found.at(side)], offset, back=back)

    def vectors(self, head: Head, side: Side, x: Float[Tensor, "*b d_model"]) -> Float[Tensor, "*b d_head"]:
        """What the head makes of another residual stream, norms and all, before the rotation: its own code runs."""
        call = self.calls[head.layer]
        flat = x.flatten(0, -2).to(call.hidden.dtype)
        made = project(call, flat if call.input_norm is None else call.input_norm(flat))
        shape = self.scope.facts.layers[head.layer]
        index = head.index if side == "query" else head.kv(shape.n_heads // shape.n_kv_heads)
        return (made.q if side == "query" else made.k)[:, index].float().unflatten(0, x.shape[:-1])


def norm_scalar(norm: nn.Module, own: Norm, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """What a norm multiplies its (centred) input by, besides its gain."""
    centred = x - x.mean(-1, keepdim=True) if own.centres else x
    return (norm_unit(norm, x) * centred).sum(-1) / centred.square().sum(-1).clamp_min(1e-30)


def _centred(values: Tensor, norm: Norm) -> Tensor:
    return values - values.mean(-1, keepdim=True) if norm.centres else values


def _constant(bias: Float[Tensor, " d"], found: Recorded) -> list[Parts]:
    rows, places = found.columns.shape
    return [Parts([BIAS], bias.float().expand(rows, 1, places, -1))] if bool(bias.any()) else []


def part_name(block: Block, layer: int, module: nn.Module) -> str:
    """``M17``, and where a block has more than one part besides its heads, their numbers behind it."""
    return f"M{layer}" if len(block.parts) == 1 else f"M{layer}.{block.parts.index(module)}"


@contextmanager
def _hooked(
    blocks: Sequence[Block], layers: Sequence[int], found: Recorded, pick: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Notes of what writers leave in all blocks but the last, and of what enters the layers that are read."""
    hooks = []

    def entering(layer: int) -> Any:
        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.entered[layer] = pick(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        return note

    def giving(kept: dict[Any, Tensor], key: Any) -> Any:
        def note(_module: nn.Module, args: tuple[Any, ...]) -> None:
            kept[key] = pick(args[0])

        return note

    def putting_out(module: nn.Module) -> Any:
        def note(_module: nn.Module, _args: Any, out: Any) -> None:
            found.gave[module] = pick(out[0] if isinstance(out, tuple) else out)

        return note

    for layer, block in enumerate(blocks):
        if layer in (0, *layers):
            hooks.append(block.module.register_forward_pre_hook(entering(layer), with_kwargs=True))
        if layer + 1 < len(blocks):
            hooks.append(block.output.register_forward_pre_hook(giving(found.heads, layer)))
            hooks += [norm.register_forward_pre_hook(giving(found.given, norm)) for norm in block.norms]
            hooks += [module.register_forward_hook(putting_out(module)) for module in block.parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
