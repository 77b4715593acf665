"""A logit split among writers, in three ways: of many heads at once, of the next token, and down to
neurons.

Relative logits of many heads: no part is carried through a head. Each head asks with directions in
the residual stream, one at its query and one at every key, and the value of writer c is ``Σ_t
x_c(t) · g_t``. So all heads of a model cost little more than its forward.

Direct effects: with every norm frozen, what leaves the last block goes to the logits by a linear
map (`Run.final_stream` and `Run.logits` are tied by it), and a block hands on what enters it. So a
direction on the logits is pulled down to every writer, one backward for all; that map, transposed
by one more gradient, pushes what a head writes up to all logits.

Neurons: ``M9 = Σ_i a_i w_i + b``, activations times the columns of an MLP's last matrix. Which
matrix is the last one is seen in a short forward: what it puts out is all that its part of the
block puts out. A part that adds up several (experts) has none, and one that looks at other tokens,
too (a state-space mixer), is no MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from qkscope.checking import grouped
from qkscope.errors import BadInput
from qkscope.heads import BIAS, Head, Writer
from qkscope.linear.layer import Kind, stream_of
from qkscope.linear.run import Answer, Direction, Parts, Run
from qkscope.model.block_tree import BlockTree, Frozen
from qkscope.model.inputs import short_inputs
from qkscope.model.tap import cleared

_ROOM = 2**25  # bytes of writers and of directions at once, for each layer that asks with others
_NEURONS = 10  # named of a side

Values = tuple[list[Head], Float[Tensor, "n h c"], Float[Tensor, "n h c"]]


def values_of(
    run: Run, weights: Float[Tensor, "n h k"], heads: Sequence[Head] | None = None
) -> Iterator[Values]:
    """Relative logits ``Σ_t w_t scale q·k_t`` of some heads, split among query writers and key
    writers.

    Layer by layer: its heads, and what each writer gives to each of them on either side.

    Parameters
    ----------
    run : from `Reader.record`.
    weights : of each head's keys, 0 in padded slots.
    heads : which; by default all that the run was recorded for.
    """
    heads = run.reader.heads if heads is None else heads
    writers = len(run.reader.writers(max(head.layer for head in heads)))
    bytes_of_row = 4 * (writers + len(heads)) * run.columns.shape[1] * run.entered[0].shape[-1]
    step = max(_ROOM * run.reader.together // bytes_of_row, 1)
    starts = range(0, len(run.row), step)
    some = (
        [run]
        if step >= len(run.row)
        else [run.slots(slice(None), slice(i, i + step)) for i in starts]
    )
    every = [
        _values(rows, heads, weights[i : i + step], writers)
        for i, rows in zip(starts, some, strict=True)
    ]
    for parts in zip(*every, strict=True):
        yield (
            parts[0][0],
            torch.cat([query for _, query, _ in parts]),
            torch.cat([key for _, _, key in parts]),
        )


def _values(run: Run, heads: Sequence[Head], weights: Tensor, writers: int) -> Iterator[Values]:
    """A few layers ask together, as long as writers' parts stay as they are: a norm of the whole
    stream changes all.
    """
    by_layer = grouped(heads, lambda head: head.layer)
    columns = {head: i for i, head in enumerate(heads)}
    parts = run.entered[0].new_empty(
        writers, *run.entered[0].shape
    )  # writers first, as products leave them
    asking: list[
        tuple[list[Head], int, Tensor | None]
    ] = []  # heads, writers before them, the sum of biases there
    taken = list[Parts]()
    fresh = list[Tensor]()
    filled = 0
    bias = None

    def answered() -> Iterator[Values]:
        every = [head for heads, *_ in asking for head in heads]
        first = 0
        if fresh:
            torch.cat(fresh, out=parts[filled - sum(map(len, fresh)) : filled])
            fresh.clear()
        own_weights = weights[:, run.reader.index([columns[head] for head in every])]
        sides = [
            (
                slots,
                directions,
                parts[:filled, :, slots].transpose(0, 1).flatten(2) @ directions.flatten(2).mT,
                said,
            )
            for slots, directions, said in _directions(run, every, own_weights)
        ]
        for heads, before, bias in asking:
            own = slice(first, first + len(heads))
            given = []
            for slots, directions, values, said in sides:
                constants = said[:, own]
                if bias is not None:
                    constants = constants + torch.einsum(
                        "nhpd,npd->nh", directions[:, own], bias[:, slots]
                    )
                given.append(torch.cat([values[:, :before, own].mT, constants[..., None]], dim=-1))
            yield heads, given[0], given[1]
            first = own.stop

    for layer, pieces in run.streams(max(by_layer)):
        changed = bool(taken) and pieces[0] is not taken[0]
        if asking and (changed or len(asking) == run.reader.together):
            yield from answered()
            asking.clear()
        if changed:
            taken = []
            filled = 0
            bias = None
            fresh.clear()
        for piece in pieces[len(taken) :]:
            if piece.writers == [BIAS]:
                bias = piece.values[:, 0] if bias is None else bias + piece.values[:, 0]
            else:
                fresh.append(piece.values.transpose(0, 1))
                filled += len(piece.writers)
        taken = pieces
        if layer in by_layer:
            asking.append((by_layer[layer], filled, bias))
    yield from answered()


def _directions(
    run: Run, heads: Sequence[Head], weights: Float[Tensor, "n h k"]
) -> Iterator[tuple[slice, Float[Tensor, "n h p d"], Float[Tensor, "n h"]]]:
    """Slots of the query, then of the keys: what every head asks there, and what constants say to
    it.
    """
    at = run.at("query")
    to = run.at("key")
    w = weights * torch.tensor([run.calls[head.layer].scale for head in heads]).to(weights)[:, None]
    q = run.vectors([(head.layer, head.index) for head in heads], "q", at)
    k = run.vectors([(head.layer, run.index(head, "k")) for head in heads], "k", to)
    asked: list[tuple[slice, Kind, Tensor]] = [
        (at, "q", w[:, :, None] @ k),
        (to, "k", q * w[..., None]),
    ]
    for slots, kind, along in asked:
        directions, said = run.pull(heads, kind, slots, along)
        yield slots, directions, said.sum(-1)


# ---------------------------------------------------------------------- the next token


def direct_effect(
    run: Run, layers: Sequence[int], written: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n v"] | None:
    """What vectors that heads write at the query add to the next token's logits.

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
        along_heads = torch.stack([answer.heads[layer][i, 0] for i, layer in enumerate(layers)])
        (effect,) = torch.autograd.grad((along_heads * written).sum(), along)
    return effect.to(run.row.device)


def direct_effects(run: Run, along: Float[Tensor, "n v"]) -> Answer | None:
    """What every writer adds at the query to a direction on the logits before any soft-cap; None as
    `direct_effect`.
    """
    left = run.final_stream
    logits = run.logits
    assert left is not None
    assert logits is not None
    cap = getattr(run.reader.scope.model.config.get_text_config(), "final_logit_softcapping", None)
    at = (run.row.to(left.device), run.columns[:, 0].to(left.device))
    slots = torch.zeros(1, dtype=torch.long)
    with torch.enable_grad():
        logits = logits if cap is None else (logits / cap).atanh() * cap
        tried = torch.linspace(-1, 1, logits.shape[-1]).to(logits).expand_as(logits)
        (g,) = torch.autograd.grad(logits, left, tried, create_graph=True, retain_graph=True)
        bent = None
        if g.requires_grad:
            (bent,) = torch.autograd.grad(
                g.square().sum(), left, allow_unused=True, retain_graph=True
            )
        # a cap undone rounds
        if bent is not None and bool((bent * left).abs().max() > 1e-2 * g.detach().square().max()):
            return None
        (g,) = torch.autograd.grad(
            logits, left, along, create_graph=along.requires_grad, retain_graph=True
        )
    g = g[at].to(run.entered[0])
    said = (logits * along).sum(1).detach().to(g) - (g.detach() * left.detach()[at].to(g)).sum(-1)
    return run.answer(
        Direction(len(run.reader.blocks), slots.to(run.row.device), g[:, None], said[:, None])
    )


# ---------------------------------------------------------------------- neurons


def last_modules(
    model: PreTrainedModel, blocks: Sequence[BlockTree]
) -> dict[nn.Module, list[nn.Module]]:
    """By part of a block that has neurons: its last matrix, and behind it the part itself where
    that is a norm.
    """
    given: dict[nn.Module, Tensor] = {}
    gave: dict[nn.Module, Tensor] = {}
    found: dict[nn.Module, list[nn.Module]] = {}

    def entering(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = stream_of(args, kwargs)
        new = x.detach().requires_grad_()
        return tree_map_only(Tensor, lambda value: new if value is x else value, (args, kwargs))

    def inside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, Tensor):
            given[module], gave[module] = (
                stream_of(args, kwargs),
                out.clone(),
            )  # it may be added to in place

    hooks = [blocks[0].module.register_forward_pre_hook(entering, with_kwargs=True)]
    for block in blocks:
        skipped = {block.module, *(() if block.attention is None else block.attention.modules())}
        others = [module for module in block.module.modules() if module not in skipped]
        hooks += [module.register_forward_hook(inside, with_kwargs=True) for module in others]
    with cleared(hooks), torch.enable_grad():
        model.base_model(**short_inputs(model, (7,)))
    for part, modules in (
        (part, [*block.module.modules()]) for block in blocks for part in block.parts
    ):
        behind = (
            [] if any(weight.ndim == 2 for weight in part.parameters()) else [part]
        )  # a norm, or a scale
        target = given[part] if behind else gave[part]
        seen = [m for m in modules if m in gave and m not in behind]
        makers = [m for m in seen if torch.equal(gave[m].flatten(), target.flatten())]
        matrices = [m for m in makers if getattr(getattr(m, "weight", None), "ndim", 0) == 2]
        mlp = max(
            makers, key=lambda m: sum(weight.numel() for weight in m.parameters()), default=part
        )
        if matrices and not _looks_elsewhere(target, given[mlp]):
            found[part] = [matrices[-1], *behind]
    return found


@torch.enable_grad()
def _looks_elsewhere(out: Tensor, given: Tensor) -> bool:
    """Whether what is put out at the last token depends on what was given at others."""
    last = out.reshape(-1, out.shape[-1])[-1]
    (g,) = torch.autograd.grad(last, given, last.detach(), retain_graph=True)
    return bool(g.reshape(-1, g.shape[-1])[:-1].any())


def neuron_parts(run: Run, asked: Direction) -> Iterator[tuple[Writer, Float[Tensor, "n p f"]]]:
    """What the neurons of each MLP before a layer say in a direction; they sum to their MLP, less
    its bias.
    """
    along = run.answer(asked).parts
    for mlp, part in _parts(run, asked.layer).items():
        if part in run.neurons and str(mlp) in along:
            last = run.reader.last[part]
            activations = run.neurons[part][:, asked.slots]
            g = along[str(mlp)]
            with cleared(Frozen().hooks(last)), torch.enable_grad():
                x = activations.to(next(last[0].parameters()), copy=True).requires_grad_()
                out = reduce(lambda value, module: module(value), last, x)
                (pulled,) = torch.autograd.grad(out, x, g.to(out))
            yield mlp, activations * pulled.to(g)


def _parts(run: Run, layer: int) -> dict[Writer, nn.Module]:
    """The parts besides heads that write before a layer."""
    before = [
        (i, part) for i, block in enumerate(run.reader.blocks[:layer]) for part in block.parts
    ]
    return {Writer.parse(run.reader.part_name(i, part)): part for i, part in before}


def first_neurons(
    run: Run, asked: Direction, named: Sequence[Writer] = ()
) -> list[tuple[Writer, float, int]]:
    """The neurons that say most in a direction, or those named, of one prompt.

    Returns
    -------
    list of (neuron, its value over all slots, the slot with the largest part of it)
    """
    found = []
    for mlp, parts in neuron_parts(run, asked):
        values = parts[0].sum(0)
        slots = asked.slots[parts[0].abs().argmax(0)]
        largest = values.abs().topk(min(_NEURONS, len(values))).indices.tolist()
        chosen = [writer.index[-1] for writer in named if writer.mlp == mlp] if named else largest
        found += [
            (Writer(mlp.layer, "neuron", (*mlp.index, i)), float(values[i]), int(slots[i]))
            for i in chosen
        ]
    found.sort(key=lambda row: -abs(row[1]))
    return found if named else found[:_NEURONS]


def check_neurons(run: Run, head: Head, named: Sequence[Writer]) -> list[Writer]:
    """Refuse neurons that are not there, or do not write before a head; say which of its parts have
    none.
    """
    model = run.reader.scope.name
    parts = _parts(run, head.layer)
    without = [mlp for mlp, part in parts.items() if part not in run.neurons]
    why = "it adds up experts, or is no MLP: a neuron is one row of what an MLP's last matrix is given"
    if len(without) == len(parts):
        some = without[0] if without else f"what writes before {head}"
        raise BadInput(f"{model} has no neurons to name. {some}: {why}.")
    for writer in named:
        if writer.kind != "neuron":
            raise BadInput(f"{writer} is no neuron: write one like M9.N120.")
        if writer.mlp not in parts:
            there = ", ".join(map(str, parts))
            raise BadInput(
                f"{writer} does not write before {head} in {model}: take one of {there}."
            )
        if writer.mlp in without:
            raise BadInput(f"{writer.mlp} has no neurons to name: {why}.")
        width = run.neurons[parts[writer.mlp]].shape[-1]
        if writer.index[-1] >= width:
            raise BadInput(
                f"there is no {writer}: {writer.mlp} has {width} neurons, N0 to N{width - 1}."
            )
    return without
