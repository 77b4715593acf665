"""A logit split among writers: of many heads at once, of the next token, and down to neurons.

Relative logits of many heads: no part is carried through a head. Each head has directions in the
residual stream, one at its query and one at every key, and writer c contributes ``Σ_t x_c(t)·g_t``.
So all heads of a model cost little more than its forward.

Direct effects: with every norm frozen, what leaves the last block goes to the logits by a linear
map (`Run.logits` is a function of `Run.final_stream`), and a block hands on what enters it. So a
direction on the logits is pulled down to every writer, one backward pass for all; that map,
transposed by one more gradient, pushes what a head writes up to all logits.

Neurons: ``M9 = Σ_i a_i w_i + b``, activations times the columns of an MLP's last matrix. Which
matrix is the last one is seen in a short forward: its output is all that its part of the block puts
out. A part that adds up several (experts) has none, and one that looks at other tokens, too (a
state-space mixer), is no MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from qkscope.errors import BadInput
from qkscope.heads import BIAS, Head, Side, Writer
from qkscope.linear.layer import stream_of
from qkscope.linear.run import Answer, Direction, Parts, Run
from qkscope.model.block_tree import BlockTree, Frozen
from qkscope.model.inputs import short_inputs
from qkscope.model.tap import cleared
from qkscope.text import grouped

_MAX_BYTES = 2**25  # of writers and of directions at once, for each layer that is split with others
_NEURONS = 10  # that are named, of one side


class HeadValues(NamedTuple):
    """Relative logits of h heads by writer: ``query`` and ``key`` are [n, h, c], bias last."""

    heads: list[Head]
    query: Float[Tensor, "n h c"]
    key: Float[Tensor, "n h c"]


def values_of(
    run: Run, weights: Float[Tensor, "n h k"], heads: Sequence[Head] | None = None
) -> Iterator[HeadValues]:
    """Split relative logits ``Σ_t w_t scale q·k_t`` among query writers, and among key writers.

    Yields layer by layer: its heads, and what each writer gives to each of them on either side.

    Parameters
    ----------
    run : from `Reader.record`.
    weights : of each head's keys, 0 in padded slots.
    heads : which; by default all that the run was recorded for.
    """
    heads = run.reader.heads if heads is None else heads
    rows = len(run.row)
    together = _rows_together(run, heads)
    if together >= rows:
        yield from _values(run, heads, weights)
        return
    by_chunk = []
    for start in range(0, rows, together):
        chunk = slice(start, start + together)
        some = run.slots(slice(None), chunk)
        by_chunk.append(_values(some, heads, weights[chunk]))
    for of_layer in zip(*by_chunk, strict=True):
        query = torch.cat([values.query for values in of_layer])
        key = torch.cat([values.key for values in of_layer])
        yield HeadValues(of_layer[0].heads, query, key)


def _rows_together(run: Run, heads: Sequence[Head]) -> int:
    """How many rows fit into memory at once, with all their writers and directions."""
    vectors = _writer_count(run, heads) + len(heads)
    places = run.columns.shape[1]
    width = run.entered[0].shape[-1]
    numbers = vectors * places * width
    return max(_MAX_BYTES * run.reader.together // (4 * numbers), 1)


def _writer_count(run: Run, heads: Sequence[Head]) -> int:
    """Number of writers before the deepest of some heads, biases among them."""
    return len(run.reader.writers(max(head.layer for head in heads)))


def _values(
    run: Run, heads: Sequence[Head], weights: Float[Tensor, "n h k"]
) -> Iterator[HeadValues]:
    """Split the logits of a few layers at a time, as long as writers' parts stay as they are.

    Where a norm acts on the whole stream, a block changes all parts before it.
    """
    by_layer = grouped(heads, lambda head: head.layer)
    batch = _LayerBatch(run, heads, weights)
    for layer, pieces in run.streams(max(by_layer)):
        changed = batch.has_other_parts(pieces)
        if batch.layers and (changed or len(batch.layers) == run.reader.together):
            yield from batch.split()
        if changed:
            batch.forget_parts()
        batch.add_parts(pieces)
        if layer in by_layer:
            batch.add_layer(by_layer[layer])
    yield from batch.split()


class _Layer(NamedTuple):
    """Heads that read the same stream: of so many writers, and with this sum of biases."""

    heads: list[Head]
    writers: int
    bias: Float[Tensor, "n p d_model"] | None


class _Product(NamedTuple):
    """Writers times directions, on one side of all heads of a batch."""

    slots: slice
    directions: Float[Tensor, "n h p d_model"]
    values: Float[Tensor, "n c h"]
    constants: Float[Tensor, "n h"]

    def by_writer(self, layer: _Layer, heads: slice) -> Float[Tensor, "n h c"]:
        """Values of the writers before one layer, and last what the biases give."""
        constants = self.constants[:, heads]
        if layer.bias is not None:
            directions = self.directions[:, heads]
            of_biases = torch.einsum("nhpd,npd->nh", directions, layer.bias[:, self.slots])
            constants = constants + of_biases
        values = self.values[:, : layer.writers, heads].mT
        return torch.cat([values, constants[..., None]], dim=-1)


class _LayerBatch:
    """Layers whose logits are split in one product.

    Writers' parts lie in one tensor that each layer reads from its beginning: later layers only
    add writers, unless their parts are other ones.
    """

    def __init__(self, run: Run, heads: Sequence[Head], weights: Float[Tensor, "n h k"]) -> None:
        self.run = run
        self.weights = weights
        self.column = {head: i for i, head in enumerate(heads)}
        embedding = run.entered[0]
        # writers come first, as products leave them
        self.parts = embedding.new_empty(_writer_count(run, heads), *embedding.shape)
        self.layers: list[_Layer] = []
        self.forget_parts()

    def forget_parts(self) -> None:
        """Begin with other parts."""
        self.pieces: list[Parts] = []
        self.fresh: list[Tensor] = []  # parts that are not in the tensor yet
        self.filled = 0
        self.bias: Tensor | None = None

    def has_other_parts(self, pieces: list[Parts]) -> bool:
        """Whether these are not the parts so far with some added."""
        return bool(self.pieces) and pieces[0] is not self.pieces[0]

    def add_parts(self, pieces: list[Parts]) -> None:
        """Take the pieces that were added since the last layer."""
        for piece in pieces[len(self.pieces) :]:
            if piece.writers == [BIAS]:
                bias = piece.values[:, 0]
                self.bias = bias if self.bias is None else self.bias + bias
            else:
                self.fresh.append(piece.values.transpose(0, 1))
                self.filled += len(piece.writers)
        self.pieces = pieces

    def add_layer(self, heads: list[Head]) -> None:
        """Take the heads that read the parts so far."""
        self.layers.append(_Layer(heads, self.filled, self.bias))

    def split(self) -> Iterator[HeadValues]:
        """Split the logits of the layers that wait."""
        if self.fresh:
            start = self.filled - sum(len(parts) for parts in self.fresh)
            torch.cat(self.fresh, out=self.parts[start : self.filled])
            self.fresh.clear()
        heads = [head for layer in self.layers for head in layer.heads]
        columns = self.run.reader.index([self.column[head] for head in heads])
        weights = self.weights[:, columns]
        query = self._product(heads, "query", weights)
        key = self._product(heads, "key", weights)
        first = 0
        for layer in self.layers:
            of_layer = slice(first, first + len(layer.heads))
            by_query = query.by_writer(layer, of_layer)
            by_key = key.by_writer(layer, of_layer)
            yield HeadValues(layer.heads, by_query, by_key)
            first = of_layer.stop
        self.layers.clear()

    def _product(
        self, heads: Sequence[Head], side: Side, weights: Float[Tensor, "n h k"]
    ) -> _Product:
        """Multiply all writers by the heads' directions on one side."""
        slots = self.run.at(side)
        directions, constants = _directions(self.run, heads, side, weights)
        parts = self.parts[: self.filled, :, slots].transpose(0, 1)
        values = parts.flatten(2) @ directions.flatten(2).mT
        return _Product(slots, directions, values, constants.sum(-1))


def _directions(
    run: Run, heads: Sequence[Head], side: Side, weights: Float[Tensor, "n h k"]
) -> tuple[Float[Tensor, "n h p d_model"], Float[Tensor, "n h p"]]:
    """Directions of heads' relative logits on the stream at one side, and their constants."""
    scales = torch.tensor([run.calls[head.layer].scale for head in heads])
    w = weights * scales.to(weights)[:, None]
    at_query = run.at("query")
    at_keys = run.at("key")
    if side == "query":
        key_heads = [(head.layer, run.index(head, "k")) for head in heads]
        k = run.vectors(key_heads, "k", at_keys)
        return run.pull(heads, "q", at_query, w[:, :, None] @ k)
    q = run.vectors([(head.layer, head.index) for head in heads], "q", at_query)
    return run.pull(heads, "k", at_keys, q * w[..., None])


# ---------------------------------------------------------------------- the next token


def direct_effect(
    run: Run, layers: Sequence[int], written: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n v"] | None:
    """Logits that vectors add to the next token when heads write them at the query.

    None where what stands between the last block and the logits is not linear.

    Parameters
    ----------
    run : with logits.
    layers : of each row's head.
    written : behind W_O.
    """
    assert run.logits is not None
    with torch.enable_grad():
        along = torch.zeros_like(run.logits, requires_grad=True)
        answer = direct_effects(run, along)
        if answer is None:
            return None
        along_heads = [answer.heads[layer][i, 0] for i, layer in enumerate(layers)]
        direct = (torch.stack(along_heads) * written).sum()
        (effect,) = torch.autograd.grad(direct, along)
    return effect.to(run.row.device)


def direct_effects(run: Run, along: Float[Tensor, "n v"]) -> Answer | None:
    """Every writer's part at the query in a direction on the logits before any soft-cap.

    None where what stands between the last block and the logits is not linear.
    """
    stream = run.final_stream
    logits = run.logits
    assert stream is not None
    assert logits is not None
    config = run.reader.scope.model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    with torch.enable_grad():
        if cap is not None:
            logits = (logits / cap).atanh() * cap
        if not _is_linear(logits, stream):
            return None
        (gradient,) = torch.autograd.grad(
            logits, stream, along, create_graph=along.requires_grad, retain_graph=True
        )
    at_query = (run.row.to(stream.device), run.columns[:, 0].to(stream.device))
    g = gradient[at_query].to(run.entered[0])
    x = stream.detach()[at_query].to(g)
    values = (logits * along).sum(1).detach().to(g)
    constants = values - (g.detach() * x).sum(-1)
    query_slot = torch.zeros(1, dtype=torch.long).to(run.row.device)
    behind_all = len(run.reader.blocks)
    asked = Direction(behind_all, query_slot, g[:, None], constants[:, None])
    return run.answer(asked)


def _is_linear(logits: Float[Tensor, "n v"], stream: Float[Tensor, "b t d_model"]) -> bool:
    """Whether logits are an affine function of the stream: their gradient does not change."""
    along = torch.linspace(-1, 1, logits.shape[-1]).to(logits).expand_as(logits)
    (g,) = torch.autograd.grad(logits, stream, along, create_graph=True, retain_graph=True)
    if not g.requires_grad:
        return True
    (bend,) = torch.autograd.grad(g.square().sum(), stream, allow_unused=True, retain_graph=True)
    if bend is None:
        return True
    # a soft-cap that is undone rounds
    allowed = 1e-2 * g.detach().square().max()
    return not bool((bend * stream).abs().max() > allowed)


# ---------------------------------------------------------------------- neurons


def last_modules(
    model: PreTrainedModel, blocks: Sequence[BlockTree]
) -> dict[nn.Module, list[nn.Module]]:
    """By part of a block that has neurons, its last matrix, and the part itself if it is a norm."""
    seen = _SeenModules(model, blocks)
    last: dict[nn.Module, list[nn.Module]] = {}
    for block in blocks:
        for part in block.parts:
            modules = seen.last_of(part, block)
            if modules:
                last[part] = modules
    return last


class _SeenModules:
    """Inputs and outputs of the modules of all blocks in one short forward, with their graph."""

    def __init__(self, model: PreTrainedModel, blocks: Sequence[BlockTree]) -> None:
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        hooks = [blocks[0].module.register_forward_pre_hook(_require_grad, with_kwargs=True)]
        for block in blocks:
            skipped = {block.module}
            if block.attention is not None:
                skipped.update(block.attention.modules())
            for module in block.module.modules():
                if module not in skipped:
                    hooks.append(module.register_forward_hook(self._note, with_kwargs=True))
        with cleared(hooks), torch.enable_grad():
            model.base_model(**short_inputs(model, (7,)))

    def _note(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, Tensor):
            self.inputs[module] = stream_of(args, kwargs)
            self.outputs[module] = out.clone()  # it may be added to in place

    def last_of(self, part: nn.Module, block: BlockTree) -> list[nn.Module]:
        """The last matrix of a part and what stands behind it; nothing if it has no neurons."""
        is_norm = not any(weight.ndim == 2 for weight in part.parameters())  # or a scale
        behind = [part] if is_norm else []
        target = self.inputs[part] if is_norm else self.outputs[part]
        makers = []
        for module in block.module.modules():
            if module in self.outputs and module not in behind:
                output = self.outputs[module]
                if torch.equal(output.flatten(), target.flatten()):
                    makers.append(module)
        matrices = [module for module in makers if _is_matrix(module)]
        mlp = max(makers, key=_size, default=part)
        if not matrices or _looks_elsewhere(target, self.inputs[mlp]):
            return []
        return [matrices[-1], *behind]


def _require_grad(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hook of the first block: make the stream that enters a leaf."""
    stream = stream_of(args, kwargs)
    leaf = stream.detach().requires_grad_()
    return tree_map_only(Tensor, lambda value: leaf if value is stream else value, (args, kwargs))


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return getattr(weight, "ndim", 0) == 2


def _size(module: nn.Module) -> int:
    """Number of a module's parameters."""
    return sum(weight.numel() for weight in module.parameters())


@torch.enable_grad()
def _looks_elsewhere(output: Tensor, x: Tensor) -> bool:
    """Whether an output at the last token depends on the input at others."""
    last = output.reshape(-1, output.shape[-1])[-1]
    (g,) = torch.autograd.grad(last, x, last.detach(), retain_graph=True)
    by_token = g.reshape(-1, g.shape[-1])
    return bool(by_token[:-1].any())


def neuron_parts(run: Run, asked: Direction) -> Iterator[tuple[Writer, Float[Tensor, "n p f"]]]:
    """Split each MLP's value in a direction among its neurons; they sum to it, less its bias."""
    along = run.answer(asked).parts
    for mlp, part in _parts(run, asked.layer).items():
        if part in run.neurons and str(mlp) in along:
            activations = run.neurons[part][:, asked.slots]
            pulled = _through_last(run.reader.last[part], activations, along[str(mlp)])
            yield mlp, activations * pulled


def _through_last(
    modules: Sequence[nn.Module],
    activations: Float[Tensor, "n p f"],
    along: Float[Tensor, "n p d_model"],
) -> Float[Tensor, "n p f"]:
    """Pull a direction on an MLP's output back to its neurons, through its last modules."""
    with cleared(Frozen().hooks(modules)), torch.enable_grad():
        weight = next(modules[0].parameters())
        x = activations.to(weight, copy=True).requires_grad_()
        out = x
        for module in modules:
            out = module(out)
        (pulled,) = torch.autograd.grad(out, x, along.to(out))
    return pulled.to(along)


def _parts(run: Run, layer: int) -> dict[Writer, nn.Module]:
    """The parts besides heads that write before a layer."""
    parts = {}
    for before, block in enumerate(run.reader.blocks[:layer]):
        for part in block.parts:
            parts[Writer.parse(run.reader.part_name(before, part))] = part
    return parts


def first_neurons(
    run: Run, asked: Direction, named: Sequence[Writer] = ()
) -> list[tuple[Writer, float, int]]:
    """The neurons with the largest values in a direction, or those named, of one prompt.

    Returns
    -------
    list of (neuron, its value over all slots, the slot with the largest part of it)
    """
    rows = []
    for mlp, parts in neuron_parts(run, asked):
        values = parts[0].sum(0)
        slots = asked.slots[parts[0].abs().argmax(0)]
        if named:
            numbers = [writer.index[-1] for writer in named if writer.mlp == mlp]
        else:
            numbers = values.abs().topk(min(_NEURONS, len(values))).indices.tolist()
        for number in numbers:
            neuron = Writer(mlp.layer, "neuron", (*mlp.index, number))
            value = float(values[number])
            rows.append((neuron, value, int(slots[number])))
    rows.sort(key=lambda row: -abs(row[1]))
    return rows if named else rows[:_NEURONS]


def check_neurons(run: Run, head: Head, named: Sequence[Writer]) -> list[Writer]:
    """Refuse neurons that do not write before a head; return the parts that have none."""
    model = run.reader.scope.name
    parts = _parts(run, head.layer)
    without = [mlp for mlp, part in parts.items() if part not in run.neurons]
    why = (
        "it adds up experts, or is no MLP: "
        "a neuron is one row of what an MLP's last matrix is given"
    )
    if len(without) == len(parts):
        place = without[0] if without else f"what writes before {head}"
        raise BadInput(f"{model} has no neurons to name. {place}: {why}.")
    for writer in named:
        if writer.kind != "neuron":
            raise BadInput(f"{writer} is no neuron: write one like M9.N120.")
        if writer.mlp not in parts:
            names = ", ".join(map(str, parts))
            raise BadInput(
                f"{writer} does not write before {head} in {model}: take one of {names}."
            )
        if writer.mlp in without:
            raise BadInput(f"{writer.mlp} has no neurons to name: {why}.")
        width = run.neurons[parts[writer.mlp]].shape[-1]
        if writer.index[-1] >= width:
            raise BadInput(
                f"there is no {writer}: {writer.mlp} has {width} neurons, N0 to N{width - 1}."
            )
    return without
