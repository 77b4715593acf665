"""Writers: what each head, each MLP and the embedding put into the residual stream, as other heads read it.

``x(p) = Σ_c x_c(p)`` over writers c. With the norms' scalars held at what they were, all that stands between x and the
logit is linear, the rotation included:

    ``q(p) = Σ_c q_c(p)``,   ``q_c = R_p s_q W_Q σ_p x_c(p)``,   and the same for k.

Outputs of heads are recorded before ``W_O`` and only at the places asked for, so that a pass costs little more than the
forward. What no token decides (biases of any kind) is the writer `BIAS`, always the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkscope.capture.gather import Picker, index_on, layout_of
from qkscope.capture.held import HeldLayer, centred, norm_scalar
from qkscope.capture.inputs import input_device
from qkscope.capture.notes import Pushed, Recorded, Side, head_names, hooked
from qkscope.capture.pick import Places
from qkscope.capture.probe import Layer
from qkscope.capture.projection import Norm, project, record_calls, take_apart
from qkscope.capture.scope import Scope
from qkscope.capture.stream import Block, Entered, Heads, Node, Normed, Part, Scaled, Sum, read_blocks
from qkscope.capture.tap import Call
from qkscope.capture.weights import HeadWeights, can_be_folded, head_weights
from qkscope.errors import BadInput
from qkscope.heads import Head

EMBEDDING, BIAS = "embedding", "bias"
_AT_ONCE = 2**28  # bytes of W_O whose layers are done together on a GPU


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

    Attributes
    ----------
    held : layers without a weight matrix before a rotation that can be read: parts are pushed through their own code,
        norms held (`HeldLayer`). There `read` gives vectors as the dot product sees them and `turn` does nothing.
    """

    def __init__(self, scope: Scope, heads: Sequence[Head]) -> None:
        self.scope, self.heads = scope, list(heads)
        self.layers = sorted({head.layer for head in heads})
        self.blocks = read_blocks(scope.model, scope.facts.layer_of)
        self.calls = record_calls(scope.model, max(self.layers))
        self._held: dict[int, bool] = {}
        self.held = frozenset(layer for layer in self.layers if self.holds(layer))
        self._weights: dict[int, HeadWeights] = {}  # by layer, read when a head of it is
        self._groups: dict[int, list[int]] = {}
        for layer in self.held:
            HeldLayer(self.calls[layer]).check()
        self._norms: dict[nn.Module, Norm] = {}
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._speaks: dict[nn.Module | int, bool] = {}
        shapes = tuple((layer.n_heads, layer.n_kv_heads) for layer in scope.facts.layers)
        self.kv_of_head = layout_of(shapes, tuple(heads)).kv_of_head  # in what is captured
        self.columns = {head: column for column, head in enumerate(self.heads)}

    def holds(self, layer: int) -> bool:
        """Whether a layer, up to the deepest that is read, has no weights to read or no rotation to put on."""
        if layer not in self._held:
            refused = "pre_rope" in self.scope.facts.layers[layer].refusals
            self._held[layer] = refused or not can_be_folded(self.calls[layer], layer)
        return self._held[layer]

    def writers(self, layer: int) -> list[str]:
        """Names of all that write before a layer, in the order of every split, `BIAS` last."""
        names = [EMBEDDING]
        for before, block in enumerate(self.blocks[:layer]):
            for node in block.walk():
                if isinstance(node, Heads):
                    names += head_names(before, self.scope.facts.layers[before].n_heads)
                elif isinstance(node, Part):
                    names.append(part_name(block, before, node.module))
        return [*names, BIAS]

    def index(self, numbers: list[int]) -> Int[Tensor, " n"]:
        """Numbers on the model's device, brought there once."""
        return index_on(input_device(self.scope.model), tuple(numbers))

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
        rows, mask = len(next(iter(inputs.values()))), inputs.get("attention_mask")
        pickers: list[Picker] = []

        def pick(value: Tensor) -> Tensor:
            value = value.reshape(rows, -1, value.shape[-1]) if value.ndim == 2 else value  # experts: tokens in one row
            return value[found.row.to(value.device)[:, None], found.columns.to(value.device)]

        def visit(call: Call) -> None:
            if call.layer in self.layers and call.rotary is not None:
                found.rotary[call.layer] = call.rotary

        def take(call: Call) -> None:
            if not pickers:  # how many tokens an image has is seen here
                seen = torch.ones(rows, call.k.shape[2], device=places.row.device) if mask is None else mask
                everywhere = Places.everywhere(places.row, places.query, seen)
                pickers.append(Picker(self.scope.facts, self.heads, everywhere, "post_rope"))
            pickers[0].visit(call)

        kept = self.layers if layers is None else layers
        held = {layer: self.calls[layer] for layer in kept if layer in self.calls and self.holds(layer)}
        with hooked(self.blocks[: max(self.layers) + 1], kept, held, found, pick):
            self.scope.watch(inputs, visit, *visits, take, rotary=True)
        found.captured = pickers[0].finish(places.row, {})
        found.in_full()
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
                values, b = self._head_parts(found, layer), self.output_weights(layer)[1]
                names = list(head_names(layer, values.shape[1]))
                return [Parts(names, values), *self._constant(layer, b, found)]
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
                scale = norm_scalar(norm, own, given)[:, None, :, None] * own.gain.to(given)
                pieces = self._through(block, layer, found, entered, inner)
                turned = [Parts(p.writers, centred(p.values, own) * scale) for p in pieces]
                return [*turned, *self._constant(norm, own.bias, found)]

    def _head_parts(self, found: Recorded, layer: int) -> Float[Tensor, "n h p d"]:
        """What each head of a layer put into the stream; on a GPU made for many layers at once."""
        here, z = found.row.device, found.heads[layer]
        W = self.output_weights(layer)[0].to(here)
        if here.type == "cpu":
            return torch.einsum("npha,hda->nhpd", z.unflatten(-1, (len(W), -1)), W)
        if layer not in found.parts:
            alike = [one for one in found.heads if one >= layer and found.heads[one].shape == z.shape]
            layers = alike[: max(_AT_ONCE // W.nbytes, 1)]
            every = torch.stack([found.heads[one] for one in layers]).unflatten(-1, (len(W), -1))
            W = torch.stack([self.output_weights(one)[0].to(here) for one in layers])
            found.parts |= zip(layers, torch.einsum("lnpha,lhda->lnhpd", every, W).unbind(), strict=True)
        return found.parts[layer]

    def _constant(self, giver: nn.Module | int, bias: Float[Tensor, " d"], found: Recorded) -> list[Parts]:
        if giver not in self._speaks:  # asked once: every question to a GPU waits for all it has to do
            self._speaks[giver] = bool(bias.any())
        if not self._speaks[giver]:
            return []
        rows, places = found.columns.shape
        return [Parts([BIAS], bias.to(found.row.device, torch.float32).expand(rows, 1, places, -1))]

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
            assert module is not None
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

    @torch.no_grad()
    def read(
        self,
        found: Recorded,
        head: Head,
        side: Side,
        pieces: Sequence[Parts] | None = None,
        at: slice | None = None,
    ) -> Float[Tensor, "n c p d"]:
        """A head's queries or keys at the places of that side, split among `writers`, *before* the rotation.

        `turn` puts the rotation on. The scalar of QK-norm is held at what it was. In `held` layers the rotation is
        already on.

        Parameters
        ----------
        found : from `record`.
        head : one of the reader's.
        side : query or key.
        pieces : what entered its layer, from `stream`, where several heads of a layer are read.
        at : other slots to read as this side: what keys' places would ask with, for example.
        """
        if head.layer in self.held:
            shape, pushed = self.scope.facts.layers[head.layer], self._pushed(found, head.layer, pieces)
            whole = pushed.query[head.index] if side == "query" else pushed.key[_kv(head, shape)]
            return whole[:, :, found.at(side) if at is None else at]
        pieces = self.stream(found, head.layer) if pieces is None else pieces
        elsewhere, at = at is not None, found.at(side) if at is None else at
        sigma = self.scalar(found, head.layer)[:, None, :, None]
        W, c = self.matrix(head, side)
        values = [p.values[:, :, at] for p in pieces if p.writers != [BIAS]]
        if W.device.type != "cpu":  # one large product instead of many small ones
            values = [torch.cat(values, dim=1)]
        said = [p.values[:, :, at] for p in pieces if p.writers == [BIAS]]
        constant = torch.cat(said, dim=1).sum(1, keepdim=True) if said else torch.zeros_like(values[0][:, :1])
        whole = torch.cat([(part * sigma[:, :, at]) @ W[:, :-1].T for part in [*values, constant]], dim=1)
        whole[:, -1] += W[:, -1]
        if self.calls[head.layer].qk_norms:
            linear = whole.sum(1)
            if elsewhere:
                true = self.vectors(head, side, found.entered[head.layer][:, at]) - c
                s = (true * linear).sum(-1) / linear.square().sum(-1).clamp_min(1e-30)
            else:
                s = self.qk_scalar(found, head, side, linear, c)
            whole = whole * s[:, None, :, None]
        whole[:, -1] += c
        return whole

    def weights(self, layer: int) -> HeadWeights:
        """Those of a layer's heads, in the order of the reader's, read once."""
        if layer not in self._weights:
            own = [one for one in self.heads if one.layer == layer]
            self._weights[layer] = head_weights(self.scope, own).to(input_device(self.scope.model))
            self._groups[layer] = self._weights[layer].kv_of_head.tolist()
        return self._weights[layer]

    def matrix(self, head: Head, side: Side) -> tuple[Float[Tensor, "d_head d_model+1"], Float[Tensor, " d_head"]]:
        """The weights of a side, norm and biases folded in, and QK-norm's own bias."""
        if head.layer in self.held:
            raise BadInput(f"{head} has no single weight matrix to fold: its parts are pushed through its layer.")
        weights = self.weights(head.layer)
        row = weights.heads.index(head)
        if side == "query":
            return weights.W_Q[row], weights.c_Q[row]
        group = self._groups[head.layer][row]
        return weights.W_K[group], weights.c_K[group]

    def _pushed(self, found: Recorded, layer: int, pieces: Sequence[Parts] | None) -> Pushed:
        """Every part of what entered a held layer, pushed through it."""
        if layer in found.pushed and found.pushed[layer].pieces is pieces:
            return found.pushed[layer]
        call, sigma = found.calls[layer], self.scalar(found, layer)[..., None]
        norm = None if call.input_norm is None else self.taken_apart(call.input_norm, found.entered[layer])

        def normed(x: Float[Tensor, "n p d_model"]) -> Float[Tensor, "n p d_model"]:
            return x if norm is None else call.input_scale * sigma * norm.gain.to(x) * centred(x, norm)

        split = self.stream(found, layer) if pieces is None else pieces
        named = [normed(x) for p in split if p.writers != [BIAS] for x in p.values.unbind(1)]
        bias = torch.zeros_like(named[0]) if norm is None else call.input_scale * norm.bias.to(sigma) + 0 * named[0]
        bias = sum((normed(p.values[:, 0]) for p in split if p.writers == [BIAS]), bias)
        shape, heads = self.scope.facts.layers[layer], [head for head in self.heads if head.layer == layer]
        queries, keys = [head.index for head in heads], sorted({_kv(head, shape) for head in heads})
        q, k = found.layer(layer).split(named, bias, found.columns, queries, keys)
        found.pushed[layer] = Pushed(
            pieces,
            {head: q[..., i, :] for i, head in enumerate(queries)},
            {group: k[..., i, :] for i, group in enumerate(keys)},
        )
        return found.pushed[layer]

    def qk_scalar(self, found: Recorded, head: Head, side: Side, linear: Tensor, c: Tensor) -> Float[Tensor, "n p"]:
        """What QK-norm multiplies a head's vectors by: the true ones compared with their linear part."""
        turned = self.turn(found, head.layer, torch.stack([linear, c.expand_as(linear)], dim=1), side)
        part, offset = turned.unbind(1)
        true = self.true(found, head, side)
        return ((true - offset) * part).sum(-1) / part.square().sum(-1).clamp_min(1e-30)

    def true(self, found: Recorded, head: Head, side: Side) -> Float[Tensor, "n p d"]:
        """The head's own queries or keys at the places, as the dot product sees them."""
        column, some = self.columns[head], slice(found.first, found.first + len(found.row))
        if side == "query":
            return found.captured.q[some, column, None]
        keys = found.captured.k[some, self.kv_of_head[column]]
        return keys.gather(1, found.columns[:, 1:, None].expand(-1, -1, keys.shape[-1]))

    def turn(
        self, found: Recorded, layer: int, values: Float[Tensor, "n c p d"], side: Side, *, back: bool = False
    ) -> Float[Tensor, "n c p d"]:
        """The rotation of each place put on vectors (``back``: its transpose).

        None is put on where the layer has none, and in `held` layers, whose parts carry it.
        """
        rotary, offset = found.rotary.get(layer), self.scope.facts.layers[layer].offset
        if rotary is None or offset is None or self.holds(layer):
            return values
        return rotary.turn(values, found.row, found.columns[:, found.at(side)], offset, back=back)

    def vectors(
        self, head: Head, side: Side, x: Float[Tensor, "*b d_model"], found: Recorded | None = None
    ) -> Float[Tensor, "*b d_head"]:
        """What the head makes of another residual stream, norms and all, before the rotation: its own code runs.

        Parameters
        ----------
        head : one of the reader's.
        side : query or key.
        x : streams. In `held` layers they stand at the places of that side, Float [*b, n, p, d_model], and the rotation
            is already on.
        found : from `record`; `held` layers need it.
        """
        call, shape = self.calls[head.layer], self.scope.facts.layers[head.layer]
        index = head.index if side == "query" else _kv(head, shape)
        flat = x.flatten(0, -2).to(call.hidden)
        z = flat if call.input_norm is None else call.input_scale * call.input_norm(flat)
        if not self.holds(head.layer):
            made = project(call, z)
            return (made.q if side == "query" else made.k)[:, index].to(x).unflatten(0, x.shape[:-1])
        if found is None:
            raise BadInput(f"{head} makes its vectors only where a batch stands: give what was recorded of it.")
        columns, held = found.columns[:, found.at(side)], found.layer(head.layer)
        each = [held.at(one, columns, live=True) for one in z.reshape(-1, *x.shape[-3:])]
        made_there = torch.stack([(q if side == "query" else k)[:, :, index] for q, k in each])
        return made_there.to(x).reshape(*x.shape[:-1], -1)


def part_name(block: Block, layer: int, module: nn.Module) -> str:
    """``M17``, and where a block has more than one part besides its heads, their numbers behind it."""
    return f"M{layer}" if len(block.parts) == 1 else f"M{layer}.{block.parts.index(module)}"


def _kv(head: Head, layer: Layer) -> int:
    return head.kv(layer.n_heads // layer.n_kv_heads)
