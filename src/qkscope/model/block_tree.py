"""Who adds what to the residual stream: take each block apart, with no table of families.

A block's output is a sum: what entered it, its heads through ``W_O``, and what its other parts (an
MLP, experts) put out, each times a number, with norms in between in some families. One short
forward records what every module of the block was given and gave; the sum is then *solved for*. A
tensor is

- what entered,
- the heads,
- a norm of a tensor that can be explained, or
- a combination of the block's parts, found by least squares,

and it must agree to rounding. A block that cannot be explained so is refused: its writers cannot be
told apart.

Norms are linear maps with their scalar held: ``N(x) = σ(x) gain ⊙ C x + bias``, found by asking
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from qkscope.errors import BadInput
from qkscope.model.inputs import forward, short_inputs
from qkscope.model.tap import Call, block_of, cleared, place_of, tap

_DEEPEST = 4  # how many modules deep a block's parts are looked for
_LONG = 1e3  # a vector so long that nothing is seen of what a norm adds under its root
_SHORT = 1e-3  # and one so short that it is seen


@dataclass(frozen=True)
class Entered:
    """What entered the block."""


@dataclass(frozen=True)
class Heads:
    """The attention's heads, added up by ``W_O`` (its bias included)."""


class Part(NamedTuple):
    """The whole output of a module: one writer."""

    module: nn.Module


class Normed(NamedTuple):
    """A norm of another part; linear once its scalar is held."""

    norm: nn.Module
    inner: Node


class Sum(NamedTuple):
    """A weighted sum of parts."""

    terms: tuple[tuple[float, Node], ...]


Node = Entered | Heads | Part | Normed | Sum


@dataclass(frozen=True)
class BlockTree:
    """One block: its modules, and the tree of what its output is made of.

    A block without attention has no heads to add up.
    """

    module: nn.Module
    attention: nn.Module | None
    output: nn.Module | None  # W_O: a linear map of the heads' outputs, head after head
    tree: Node

    @cached_property
    def parts(self) -> list[nn.Module]:
        """The modules that write besides the heads."""
        return [node.module for node in walk(self.tree) if isinstance(node, Part)]

    @cached_property
    def norms(self) -> list[nn.Module]:
        """The norms whose scalars have to be held."""
        return [node.norm for node in walk(self.tree) if isinstance(node, Normed)]


def walk(node: Node) -> Iterator[Node]:
    """Yield every part of a tree, the innermost first."""
    if isinstance(node, Sum):
        for _, term in node.terms:
            yield from walk(term)
    elif isinstance(node, Normed):
        yield from walk(node.inner)
    yield node


def _enters(node: Node) -> bool:
    """Whether a part depends on what entered the block."""
    return any(isinstance(part, Entered) for part in walk(node))


class _Forward:
    """What modules were given and gave in one short forward, and the heads' outputs of each layer.

    Tensors are copied to the CPU: the solver runs there alone.
    """

    def __init__(self) -> None:
        self.heads: dict[int, Float[Tensor, "b s z"]] = {}
        self._inputs: dict[nn.Module, Any] = {}
        self._outputs: dict[nn.Module, Tensor | None] = {}

    def hooks(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Note what some modules are given and give, until the hooks are removed."""
        modules = list(modules)
        before = [
            module.register_forward_pre_hook(self._note_input, with_kwargs=True)
            for module in modules
        ]
        after = [module.register_forward_hook(self._note_output) for module in modules]
        return before + after

    def _note_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args:
            value = args[0]
        else:
            value = kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        self._inputs[module] = value.cpu().clone() if isinstance(value, Tensor) else value

    def _note_output(self, module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        tensor = _main(out)
        self._outputs[module] = None if tensor is None else tensor.cpu().clone()

    def visit(self, call: Call) -> None:
        """Note the outputs of a layer's heads, head after head."""
        heads = list(range(call.q.shape[1]))
        self.heads[call.layer] = call.attend(heads).flatten(2).cpu()

    def input_of(self, module: nn.Module) -> Tensor | None:
        """What a module was given; None where it did not run, or was given no tensor."""
        return _main(self._inputs.get(module))

    def output_of(self, module: nn.Module) -> Tensor | None:
        """What a module gave; None where it did not run, or gave no tensor."""
        return self._outputs.get(module)


class _BlockRun:
    """One block in one forward: what entered and left it, its heads through ``W_O``, its parts.

    Parameters
    ----------
    kind : str
        The family and the layer, for messages.
    block, attention : Module
        The block, and the attention inside it, where it has one.
    z : Float [b, s, z]
        The heads' outputs before ``W_O``, where it has attention.
    run : _Forward
        What the modules were given and gave.
    """

    def __init__(
        self,
        kind: str,
        block: nn.Module,
        attention: nn.Module | None,
        z: Tensor | None,
        run: _Forward,
    ) -> None:
        entered = run.input_of(block)
        left = run.output_of(block)
        if entered is None or left is None:
            raise BadInput(f"{kind} cannot be traced: what enters or leaves it was not seen.")
        tokens = entered.shape[:-1]
        if z is not None and tokens != z.shape[:-1]:
            n_streams = tokens.numel() // z.shape[:-1].numel()
            streams = f"it has {n_streams} residual streams"
            raise BadInput(
                f"{kind} cannot be traced: {streams}, and what it adds goes to all of them."
            )
        self.run = run
        self.attention = attention
        self.dtype = entered.dtype
        self.entered = entered.float()
        self.left = left.float()
        # what rounding leaves of a sum of a few
        self.tolerance = max(1e-5, 2 * torch.finfo(self.dtype).eps)
        self.output = None if z is None else self._output_matrix(block, z)
        if attention is not None and self.output is None:
            why = "no one matrix adds up its heads' outputs; they are changed or routed before"
            raise BadInput(f"{kind} cannot be traced: {why}.")
        width = entered.shape[-1]
        heads: Tensor | None = torch.zeros_like(self.entered)
        if self.output is not None:
            heads = self._by_token(run.output_of(self.output), width)
        if heads is None:
            raise BadInput(
                f"{kind} cannot be traced: its heads are not added up to the width "
                "of the residual stream."
            )
        self.heads = heads
        self.depth = {module: name.count(".") + 1 for name, module in block.named_modules() if name}
        self.gave: dict[nn.Module, Tensor] = {}
        self.given: dict[nn.Module, Tensor] = {}
        for module in self._outside_attention():
            out = self._by_token(run.output_of(module), width)
            if out is None:
                continue
            self.gave[module] = out
            x = self._by_token(run.input_of(module), width)
            if x is not None:
                self.given[module] = x

    def _by_token(self, value: Tensor | None, width: int) -> Tensor | None:
        """A tensor as tokens of a width, None if it does not fit; experts get tokens in one row."""
        tokens = self.entered.shape[:-1]
        if value is None or value.numel() != width * tokens.numel():
            return None
        return value.reshape(*tokens, width).float()

    def _output_matrix(self, block: nn.Module, z: Tensor) -> nn.Module | None:
        """``W_O``: the first module with weights, and none inside, that is given the heads."""
        # logits, too, are rounded in half precision, so the heads' outputs are known less well
        close = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.1
        for module in block.modules():
            if any(module.children()) or not _has_weights(module):
                continue
            x = self._by_token(self.run.input_of(module), z.shape[-1])
            if x is not None and bool((x - z).norm() <= close * z.norm()):
                return module
        return None

    def _outside_attention(self) -> list[nn.Module]:
        """Modules of the block that are not inside its attention."""
        if self.attention is None:
            return list(self.depth)
        inside = set(self.attention.modules()) - {self.attention}
        return [module for module in self.depth if module not in inside]

    def same(self, left: Tensor, right: Tensor) -> bool:
        """Whether two tensors agree at every token; by its norm, as norms differ a thousandfold."""
        difference = (left - right).norm(dim=-1)
        return bool((difference <= 1e-6 * right.norm(dim=-1)).all())

    def explain(self, target: Tensor, inside: frozenset[nn.Module] = frozenset()) -> Node | None:
        """Express a tensor by parts of the block, not by those `inside`; None if that fails."""
        if self.same(target, self.entered):
            return Entered()
        if self.same(target, self.heads):
            return Heads()
        makers = [
            module
            for module, out in self.gave.items()
            if self.same(out, target) and module not in inside
        ]
        norm = self._as_norm(makers, inside)
        if norm is not None:
            return norm
        # a block may end inside a module of its own, which adds the stream
        alone = [module for module in makers if not self._attends(module)]
        if alone and target is not self.left:
            return Part(self._writer_among(alone))
        return self._as_sum(target, inside.union(makers))

    def _as_norm(self, makers: list[nn.Module], inside: frozenset[nn.Module]) -> Normed | None:
        """Explain what some modules gave as a norm of what it was given."""
        for module in makers:
            if not is_norm(module):
                continue
            inner = self.explain(self.given[module], inside | {module})
            if inner is not None and not isinstance(inner, Part):
                return Normed(module, inner)
        return None

    def _writer_among(self, modules: list[nn.Module]) -> nn.Module:
        """The outermost with weights, of modules that gave the same: a dropout may serve others."""

        def has_no_weights_then_depth(module: nn.Module) -> tuple[bool, int]:
            return next(module.parameters(), None) is None, self.depth[module]

        return min(modules, key=has_no_weights_then_depth)

    def _as_sum(self, target: Tensor, inside: frozenset[nn.Module]) -> Sum | None:
        """Explain a tensor as a sum of parts, of the outermost modules that will do."""
        for depth in range(1, _DEEPEST + 1):
            terms = self._solve(target, depth)
            if terms is None:
                continue
            nodes = []
            for number, out in terms:
                node = self.explain(out, inside)
                if node is not None:
                    nodes.append((number, node))
            if len(nodes) == len(terms):
                nodes.sort(key=lambda term: not _enters(term[1]))  # what entered comes first
                return Sum(tuple(nodes))
        return None

    def with_silent(self, tree: Node | None) -> Node | None:
        """Add the writers whose output is zero, so that every part of a block has a node."""
        if tree is None:
            return None
        heads_silent = self.attention is not None and not bool(self.heads.any())
        heads = [(1.0, Heads())] if heads_silent else []
        parts = [(1.0, Part(module)) for module in self._silent_parts()]
        if not heads and not parts:
            return tree
        terms = tree.terms if isinstance(tree, Sum) else ((1.0, tree),)
        place = 0  # behind the first term that what entered is in
        for i, (_, term) in enumerate(terms):
            if _enters(term):
                place = i + 1
                break
        return Sum((*terms[:place], *heads, *terms[place:], *parts))

    def _silent_parts(self) -> list[nn.Module]:
        """Outermost modules with weights, no norms and no attention, that gave only zeros."""
        silent = []
        for module, out in self.gave.items():
            if self.depth[module] > 1 or is_norm(module) or self._attends(module):
                continue
            has_weights = next(module.parameters(), None) is not None
            if has_weights and not bool(out.any()):
                silent.append(module)
        return silent

    def _attends(self, module: nn.Module) -> bool:
        """Whether a module contains part of the attention."""
        if self.attention is None:
            return False
        return not set(self.attention.modules()).isdisjoint(module.modules())

    def _solve(self, target: Tensor, depth: int) -> list[tuple[float, Tensor]] | None:
        """Numbers that make a target of what entered, the heads, and modules down to a depth."""
        outs = self._independent_outputs(target, depth)
        # every token counts alike, too
        weight = 1 / target.double().norm(dim=-1, keepdim=True).clamp_min(1e-30)
        columns = torch.stack([(out.double() * weight).flatten() for out in outs], dim=1)
        wanted = (target.double() * weight).flatten()
        needed = _needed(columns, wanted, self.tolerance / 10)
        if int(needed.sum()) < 2:
            return None
        columns = columns[:, needed]
        numbers = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0]
        is_whole = (numbers - numbers.round()).abs() < max(1e-3, self.tolerance)
        rounded = torch.where(is_whole, numbers.round(), numbers)
        for factors in (rounded, numbers):
            if (columns @ factors - wanted).norm() <= self.tolerance * wanted.norm():
                used = [out for out, keep in zip(outs, needed.tolist(), strict=True) if keep]
                return list(zip(factors.tolist(), used, strict=True))
        return None

    def _independent_outputs(self, target: Tensor, depth: int) -> list[Tensor]:
        """What entered, the heads, and what modules down to a depth gave that is new."""
        outs = [self.entered, self.heads]
        for module in sorted(self.gave, key=lambda module: self.depth[module]):
            if self.depth[module] > depth:
                break
            out = self.gave[module]
            known = any(self.same(out, other) for other in [*outs, target])
            if not known and not self._is_combination(out, outs):
                outs.append(out)
        return outs

    def _is_combination(self, out: Tensor, others: list[Tensor]) -> bool:
        """Whether an output is a combination of others: BLOOM's attention adds the stream."""
        columns = torch.stack([other.double().flatten() for other in others], dim=1)
        columns = columns / columns.norm(dim=0).clamp_min(1e-30)
        wanted = out.double().flatten()
        numbers = torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0]
        return bool((columns @ numbers - wanted).norm() <= self.tolerance * wanted.norm())


def _has_weights(module: nn.Module) -> bool:
    """Whether a module holds parameters itself."""
    return next(module.parameters(recurse=False), None) is not None


def _needed(columns: Tensor, wanted: Tensor, least: float) -> Tensor:
    """Columns that a least-squares fit needs: those well above their own standard error."""
    unit = columns / columns.norm(dim=0).clamp_min(1e-30)
    parts = torch.linalg.lstsq(unit, wanted[:, None], driver="gelsd").solution[:, 0]
    spread = torch.linalg.pinv(unit.T @ unit, hermitian=True).diagonal().sqrt()
    freedom = max(len(wanted) - len(parts), 1)
    noise = (unit @ parts - wanted).norm() / freedom**0.5
    return parts.abs() > torch.maximum(12 * noise * spread, least * wanted.norm())


@torch.no_grad()
def read_blocks(model: PreTrainedModel, layer_of: dict[int, int]) -> list[BlockTree]:
    """Take every block of a model apart, or refuse it.

    ``layer_of`` maps the id of an attention module to its layer.
    """
    modules = list(model.modules())
    attentions = {layer_of[id(module)]: module for module in modules if id(module) in layer_of}
    blocks = _blocks(model, attentions)
    run = _Forward()
    hooks = run.hooks({module for block in blocks.values() for module in block.modules()})
    with cleared(hooks), tap(model, run.visit, layers=layer_of):
        forward(model.base_model, short_inputs(model, (7,)))
    trees: list[BlockTree] = []
    left_before: Tensor | None = None
    for layer, block in sorted(blocks.items()):
        kind = f"{model.config.model_type} layer {layer}"
        block_run = _BlockRun(kind, block, attentions.get(layer), run.heads.get(layer), run)
        tree = _tree_of(kind, block_run)
        entered = block_run.entered
        if left_before is not None and not block_run.same(entered, left_before.to(entered.device)):
            raise BadInput(
                f"{kind} cannot be traced: what enters it is not what left the layer before it."
            )
        left_before = block_run.left
        trees.append(BlockTree(block, block_run.attention, block_run.output, tree))
    return trees


def _blocks(model: PreTrainedModel, attentions: dict[int, nn.Module]) -> dict[int, nn.Module]:
    """The blocks of a model by layer, also those without attention: they write, too."""
    names = {module: name for name, module in model.named_modules()}
    blocks = {layer: block_of(model, names[module]) for layer, module in attentions.items()}
    first = attentions[min(attentions)]
    place = place_of(model, names[first])
    if place is None:
        return blocks
    layers, _ = place
    if len(layers) > len(blocks):
        return dict(enumerate(layers)) | blocks
    return blocks


def _tree_of(kind: str, run: _BlockRun) -> Node:
    """What a block's output is made of, or a refusal."""
    tree = run.with_silent(run.explain(run.left))
    parts = [] if tree is None else list(walk(tree))
    has_heads = run.attention is None or Heads() in parts
    if tree is None or Entered() not in parts or not has_heads:
        added = "what it adds to the residual stream is not a sum of its heads and its other parts"
        raise BadInput(f"{kind} cannot be traced: {added}, so its writers cannot be told apart.")
    return tree


def _main(value: Any) -> Tensor | None:
    """The tensor that a module hands on: alone, or first of several."""
    if isinstance(value, tuple | list):
        value = value[0] if len(value) else None
    if isinstance(value, Tensor) and value.is_floating_point():
        return value
    return None


# ---------------------------------------------------------------- norms


class Norm(NamedTuple):
    """A norm taken apart, in float32; it `centres` where it subtracts the mean (LayerNorm).

    ``σ(x) = 1 / sqrt(mean((C x)²) + eps)`` of every norm of the usual kind.
    """

    gain: Float[Tensor, "*b d"]
    bias: Float[Tensor, "*b d"]
    centres: bool
    eps: float = 0.0

    def centred(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Subtract the mean, if the norm does."""
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def scalar(self, x: Float[Tensor, "*b d"], out: Float[Tensor, "*b d"]) -> Float[Tensor, "*b 1"]:
        """What the norm multiplied its (centred) input by, besides its gain."""
        y = self.gain.to(x) * self.centred(x)
        product = ((out - self.bias.to(x)) * y).sum(-1, keepdim=True)
        square = y.square().sum(-1, keepdim=True)
        return product / square.clamp_min(1e-30)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its name."""
    return "norm" in type(module).__name__.lower() and not any(module.children())


@torch.no_grad()
def full_output(norm: nn.Module, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """What a norm makes of an input, in float32."""
    weights = {name: weight.detach().float() for name, weight in norm.named_parameters()}
    device = next(iter(weights.values()), x).device
    x_there = x.to(device, torch.float32)
    return functional_call(norm, weights, (x_there,)).to(x.device)


def take_apart(norm: nn.Module, like: Tensor) -> Norm:
    """Read gain, bias, centring and eps of a norm off its outputs; ``like`` is what it normalises.

    For ``x`` of alternating ±1, whose normalised form has no entry near 0:
    ``bias = (N(x) + N(-x)) / 2``, and ``gain`` is in proportion to ``(N(x) - N(-x)) / 2``.
    """
    weight = next(norm.parameters(), like[(0,) * (like.ndim - 1)])
    index = torch.arange(weight.shape[-1], device=weight.device)
    signs = (1 - 2 * (index % 2)).float().expand(weight.shape)
    above = full_output(norm, _LONG * signs)
    below = full_output(norm, -_LONG * signs)
    bias = (above + below) / 2
    # a norm that centres leaves nothing of a constant vector
    constant = full_output(norm, torch.full_like(signs, _LONG))
    of_constant = (constant - bias).abs().max()
    centres = bool(of_constant < (above - bias).abs().max() / 2)
    unit = signs - signs.mean(-1, keepdim=True) if centres else signs
    square = unit.square().mean(-1, keepdim=True)
    gain = (above - below) / 2 * square.sqrt() / unit
    without_eps = Norm(gain, bias, centres)
    scalar = without_eps.scalar(_SHORT * signs, full_output(norm, _SHORT * signs))
    eps = 1 / scalar.square() - _SHORT**2 * square
    return without_eps._replace(eps=float(eps.mean()))


class Frozen:
    """Norms with their scalars held: the first run notes what they multiply by, later ones repeat.

    A norm that runs is replaced by the linear map ``x -> σ gain ⊙ C x + bias`` with σ as noted.
    """

    def __init__(self) -> None:
        self._norms: dict[nn.Module, Norm] = {}
        self._scalars: dict[nn.Module, list[Tensor]] = {}  # of each run: it may serve q, then k
        self._runs: dict[nn.Module, int] = {}
        self._taking_apart = False

    @property
    def ran(self) -> list[nn.Module]:
        """Norms that ran, in their order."""
        return list(self._norms)

    def hooks(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Hold the norms among some modules for one run, until the hooks are removed."""
        self._runs.clear()
        return [norm.register_forward_hook(self._hold) for norm in modules if is_norm(norm)]

    def unit(self, unbiased: Collection[nn.Module] = ()) -> None:
        """Multiply by 1 from now on, and leave out the biases of some norms."""
        for module, scalars in self._scalars.items():
            self._scalars[module] = [torch.ones((), device=scalar.device) for scalar in scalars]
            if module in unbiased:
                norm = self._norms[module]
                self._norms[module] = norm._replace(bias=torch.zeros_like(norm.bias))

    def _hold(self, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        """Replace a norm's output by that of the linear map."""
        if self._taking_apart:
            return None
        if module not in self._norms:
            self._taking_apart = True  # a norm is taken apart by running it
            self._norms[module] = take_apart(module, inputs[0])
            self._taking_apart = False
        norm = self._norms[module]
        x = inputs[0].float()
        run = self._runs.get(module, -1) + 1
        self._runs[module] = run
        scalars = self._scalars.setdefault(module, [])
        if len(scalars) == run:
            scalars.append(norm.scalar(x.detach(), out.detach().float()))
        return (scalars[run] * norm.gain * norm.centred(x) + norm.bias).to(out.dtype)
