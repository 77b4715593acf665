"""An MLP's neurons as writers: ``M9 = Σ_i a_i w_i + b``, activations times the columns of its last matrix.

Which matrix is the last one is seen in a short forward: what it puts out is all that its part of the block puts out. A
part that adds up several (experts) has none, and one that looks at other tokens, too (a state-space mixer), is no MLP.
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

from qkscope.capture.blocks import Block, Frozen
from qkscope.capture.inputs import short_inputs
from qkscope.capture.tap import cleared
from qkscope.errors import BadInput
from qkscope.heads import Head, Writer
from qkscope.linear.layer import stream_of
from qkscope.linear.run import Direction, Run


def last_modules(model: PreTrainedModel, blocks: Sequence[Block]) -> dict[nn.Module, list[nn.Module]]:
    """By part of a block that has neurons: its last matrix, and behind it the part itself where that is a norm."""
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
            given[module], gave[module] = stream_of(args, kwargs), out.clone()  # it may be added to in place

    hooks = [blocks[0].module.register_forward_pre_hook(entering, with_kwargs=True)]
    for block in blocks:
        skipped = {block.module, *(() if block.attention is None else block.attention.modules())}
        others = [module for module in block.module.modules() if module not in skipped]
        hooks += [module.register_forward_hook(inside, with_kwargs=True) for module in others]
    with cleared(hooks), torch.enable_grad():
        model.base_model(**short_inputs(model, (7,)))
    for part, modules in ((part, [*block.module.modules()]) for block in blocks for part in block.parts):
        behind = [] if any(weight.ndim == 2 for weight in part.parameters()) else [part]  # a norm, or a scale
        target = given[part] if behind else gave[part]
        seen = [m for m in modules if m in gave and m not in behind]
        makers = [m for m in seen if torch.equal(gave[m].flatten(), target.flatten())]
        matrices = [m for m in makers if getattr(getattr(m, "weight", None), "ndim", 0) == 2]
        mlp = max(makers, key=lambda m: sum(weight.numel() for weight in m.parameters()), default=part)
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
    """What the neurons of each MLP before a layer say in a direction; they sum to their MLP, less its bias."""
    along = run.answer(asked).parts
    for mlp, part in _parts(run, asked.layer).items():
        if part in run.neurons and str(mlp) in along:
            last, activations, g = run.reader.last[part], run.neurons[part][:, asked.slots], along[str(mlp)]
            with cleared(Frozen().hooks(last)), torch.enable_grad():
                x = activations.to(next(last[0].parameters()), copy=True).requires_grad_()
                out = reduce(lambda value, module: module(value), last, x)
                (pulled,) = torch.autograd.grad(out, x, g.to(out))
            yield mlp, activations * pulled.to(g)


def _parts(run: Run, layer: int) -> dict[Writer, nn.Module]:
    """The parts besides heads that write before a layer."""
    before = [(i, part) for i, block in enumerate(run.reader.blocks[:layer]) for part in block.parts]
    return {Writer.parse(run.reader.part_name(i, part)): part for i, part in before}


def first_neurons(
    run: Run, asked: Direction, named: Sequence[Writer] = (), count: int = 10
) -> list[tuple[Writer, float, int]]:
    """The neurons that say most in a direction, or those named, of one prompt.

    Returns
    -------
    list of (neuron, its value over all slots, the slot with the largest part of it)
    """
    found = []
    for mlp, parts in neuron_parts(run, asked):
        values, slots = parts[0].sum(0), asked.slots[parts[0].abs().argmax(0)]
        largest = values.abs().topk(min(count, len(values))).indices.tolist()
        chosen = [writer.index[-1] for writer in named if writer.mlp == mlp] if named else largest
        found += [(Writer(mlp.layer, "neuron", (*mlp.index, i)), float(values[i]), int(slots[i])) for i in chosen]
    found.sort(key=lambda row: -abs(row[1]))
    return found if named else found[:count]


def check_neurons(run: Run, head: Head, named: Sequence[Writer]) -> list[Writer]:
    """Refuse neurons that are not there, or do not write before a head; say which of its parts have none."""
    model, parts = run.reader.scope.name, _parts(run, head.layer)
    without = [mlp for mlp, part in parts.items() if part not in run.neurons]
    why = "it adds up experts, or is no MLP: a neuron is one row of what an MLP's last matrix is given"
    if len(without) == len(parts):
        some = without[0] if without else f"what writes before {head}"
        raise BadInput(f"{model} has no neurons to name. {some}: {why}.")
    for writer in named:
        if writer.kind != "neuron":
            raise BadInput(f"{writer} is no neuron: write one like M9.N120.")
        if writer.mlp not in parts:
            raise BadInput(
                f"{writer} does not write before {head} in {model}: take one of {', '.join(map(str, parts))}."
            )
        if writer.mlp in without:
            raise BadInput(f"{writer.mlp} has no neurons to name: {why}.")
        width = run.neurons[parts[writer.mlp]].shape[-1]
        if writer.index[-1] >= width:
            raise BadInput(f"there is no {writer}: {writer.mlp} has {width} neurons, N0 to N{width - 1}.")
    return without
