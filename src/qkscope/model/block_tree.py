"""Who adds what to the residual stream: each block taken apart by looking, no table of families.

A block's output is a sum: what entered it, its heads through ``W_O``, and what its other parts (an
MLP, experts) put out, each times a number, with norms in between in some families. One short
forward records what every module of the block was given and gave; the sum is then *solved for*: a
tensor is what entered, the heads, a norm of a tensor that can be explained, or a combination of the
block's parts found by least squares, and it must agree to rounding. What cannot be explained so is
refused: its writers cannot be told apart.

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

_DEEPEST = 4  # how far inside a block its parts are looked for
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
_Notes = tuple[
    dict[nn.Module, Any], dict[nn.Module, Any]
]  # what modules were given, and what they gave


@dataclass(frozen=True)
class BlockTree:
    """One block: its modules and what its output is made of. One without attention has no heads to
    add up.
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
    """Every part of a tree, what comes first first."""
    for inner in (
        [term for _, term in node.terms]
        if isinstance(node, Sum)
        else [getattr(node, "inner", None)]
    ):
        if inner is not None:
            yield from walk(inner)
    yield node


def _enters(node: Node) -> bool:
    """Whether a part depends on what entered the block."""
    return any(isinstance(one, Entered) for one in walk(node))


class _Seen:
    """What the modules of one block were given and gave in one forward; ``z`` are the heads'
    outputs before W_O.
    """

    def __init__(
        self,
        kind: str,
        block: nn.Module,
        attention: nn.Module | None,
        z: Tensor | None,
        notes: _Notes,
    ):
        given, gave = ({part: _main(value) for part, value in note.items()} for note in notes)
        entered = given.get(block)
        left = gave.get(block)
        if entered is None or left is None:
            raise BadInput(f"{kind} cannot be traced: what enters or leaves it was not seen.")
        if z is not None and entered.shape[:-1] != z.shape[:-1]:
            streams = (
                f"it has {entered.shape[:-1].numel() // z.shape[:-1].numel()} residual streams"
            )
            raise BadInput(
                f"{kind} cannot be traced: {streams}, and what it adds goes to all of them."
            )
        self.attention = attention
        self.entered = entered.float()
        self.left = left.float()
        self.tolerance = max(
            1e-5, 2 * torch.finfo(entered.dtype).eps
        )  # what rounding leaves of a sum of a few
        tokens = entered.shape[:-1]
        width = entered.shape[-1]

        def shaped(value: Tensor | None, width: int) -> Tensor | None:
            """The value as tokens of this width; experts are given tokens in one row."""
            fits = value is not None and value.numel() == width * tokens.numel()
            return value.reshape(*tokens, width).float() if value is not None and fits else None

        # logits, too, are rounded in half precision, so the heads' outputs are known less well
        close = 1e-4 if entered.dtype in (torch.float32, torch.float64) else 0.1
        outputs = []
        for module in block.modules() if z is not None else ():
            holds = any(True for _ in module.parameters(recurse=False)) and not any(
                module.children()
            )
            got = shaped(given.get(module), z.shape[-1]) if holds and z is not None else None
            if got is not None and z is not None and bool((got - z).norm() <= close * z.norm()):
                outputs.append(module)
        if attention is not None and not outputs:
            why = "no one matrix adds up its heads' outputs; they are changed or routed before"
            raise BadInput(f"{kind} cannot be traced: {why}.")
        self.output = outputs[0] if outputs else None
        heads = (
            torch.zeros_like(self.entered)
            if self.output is None
            else shaped(gave[self.output], width)
        )
        if heads is None:
            raise BadInput(
                f"{kind} cannot be traced: its heads are not added up to the width of the residual stream."
            )
        self.heads = heads  # through W_O; 0 where there are none
        inner = set() if attention is None else set(attention.modules()) - {attention}
        self.depth = {module: name.count(".") + 1 for name, module in block.named_modules() if name}
        outer = [module for module in self.depth if module not in inner]
        self.gave = {
            module: out for module in outer if (out := shaped(gave.get(module), width)) is not None
        }
        self.given = {
            part: x for part in self.gave if (x := shaped(given.get(part), width)) is not None
        }

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors agree at every token; the tolerance is per token, as norms differ a
        thousandfold.
        """
        return bool(((one - other).norm(dim=-1) <= 1e-6 * other.norm(dim=-1)).all())

    def explain(self, target: Tensor, inside: frozenset[nn.Module] = frozenset()) -> Node | None:
        """Express a tensor by the parts seen so far; None if that fails."""
        if self.same(target, self.entered):
            return Entered()
        if self.same(target, self.heads):
            return Heads()
        makers = [
            module
            for module, out in self.gave.items()
            if self.same(out, target) and module not in inside
        ]
        for module in makers:
            inner = self.explain(self.given[module], inside | {module}) if is_norm(module) else None
            if inner is not None and not isinstance(inner, Part):
                return Normed(module, inner)
        alone = [module for module in makers if not self._attends(module)]
        # a block may end inside a module of its own, which adds the stream; dropout may be called
        # for other parts, too
        if alone and target is not self.left:
            return Part(
                min(
                    alone,
                    key=lambda module: (
                        next(module.parameters(), None) is None,
                        self.depth[module],
                    ),
                )
            )
        for depth in range(1, _DEEPEST + 1):
            terms = self._solve(target, depth)
            if terms is not None:
                explained = [
                    (number, self.explain(out, inside | set(makers))) for number, out in terms
                ]
                nodes = [(number, node) for number, node in explained if node is not None]
                if len(nodes) == len(terms):
                    return Sum(
                        tuple(sorted(nodes, key=lambda term: not _enters(term[1])))
                    )  # what entered comes first
        return None

    def with_silent(self, tree: Node | None) -> Node | None:
        """Add the writers whose output is zero, so that every part of a block has a node."""
        if tree is None:
            return None
        heads: list[Node] = [] if self.attention is None or bool(self.heads.any()) else [Heads()]
        outer = [module for module in self.gave if self.depth[module] == 1 and not is_norm(module)]
        silent = [
            module
            for module in outer
            if not self._attends(module) and not bool(self.gave[module].any())
        ]
        parts: list[Node] = [
            Part(module) for module in silent if any(True for _ in module.parameters())
        ]
        terms = tree.terms if isinstance(tree, Sum) else ((1.0, tree),)
        place = next(
            (i + 1 for i, (_, term) in enumerate(terms) if _enters(term)), 0
        )  # heads come before other parts
        before = tuple((1.0, node) for node in heads)
        after = tuple((1.0, node) for node in parts)
        return Sum((*terms[:place], *before, *terms[place:], *after)) if heads or parts else tree

    def _attends(self, module: nn.Module) -> bool:
        """Whether a module contains part of the attention."""
        return self.attention is not None and not set(self.attention.modules()).isdisjoint(
            module.modules()
        )

    def _made_of(self, out: Tensor, others: list[Tensor]) -> bool:
        """Whether a module's output is a combination of others': BLOOM's attention adds the stream
        itself.
        """
        columns = torch.stack([other.double().flatten() for other in others], dim=1)
        wanted = out.double().flatten()
        columns = columns / columns.norm(dim=0).clamp_min(1e-30)
        numbers = torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0]
        return bool((columns @ numbers - wanted).norm() <= self.tolerance * wanted.norm())

    def _solve(self, target: Tensor, depth: int) -> list[tuple[float, Tensor]] | None:
        """Numbers that make a target of what entered, of the heads, and of what modules down to a
        depth gave.
        """
        outs = [self.entered, self.heads]
        for module in sorted(self.gave, key=lambda module: self.depth[module]):
            out = self.gave[module]
            known = self.depth[module] > depth or any(
                self.same(out, other) for other in [*outs, target]
            )
            if not known and not self._made_of(out, outs):
                outs.append(out)
        # every token counts alike, too
        weight = 1 / target.double().norm(dim=-1, keepdim=True).clamp_min(1e-30)
        columns = torch.stack([(out.double() * weight).flatten() for out in outs], dim=1)
        wanted = (target.double() * weight).flatten()
        kept = _needed(columns, wanted, self.tolerance / 10)
        if int(kept.sum()) < 2:
            return None
        numbers = torch.linalg.lstsq(columns[:, kept], wanted[:, None]).solution[:, 0]
        whole = torch.where(
            (numbers - numbers.round()).abs() < max(1e-3, self.tolerance), numbers.round(), numbers
        )
        for tried in (whole, numbers):
            if (columns[:, kept] @ tried - wanted).norm() <= self.tolerance * wanted.norm():
                used = [out for out, keep in zip(outs, kept.tolist(), strict=True) if keep]
                return list(zip(tried.tolist(), used, strict=True))
        return None


def _needed(columns: Tensor, wanted: Tensor, least: float) -> Tensor:
    """Columns that a least-squares fit needs: those well above their own standard error."""
    unit = columns / columns.norm(dim=0).clamp_min(1e-30)
    parts = torch.linalg.lstsq(unit, wanted[:, None], driver="gelsd").solution[:, 0]
    spread = torch.linalg.pinv(unit.T @ unit, hermitian=True).diagonal().sqrt()
    noise = (unit @ parts - wanted).norm() / max(len(wanted) - len(parts), 1) ** 0.5
    return parts.abs() > torch.maximum(12 * noise * spread, least * wanted.norm())


@torch.no_grad()
def read_blocks(model: PreTrainedModel, layer_of: dict[int, int]) -> list[BlockTree]:
    """Take every block of a model apart, or refuse it; ``layer_of`` maps the id of an attention
    module to its layer.
    """
    names = {module: name for name, module in model.named_modules()}
    attentions = {layer_of[id(module)]: module for module in names if id(module) in layer_of}
    blocks = {layer: block_of(model, names[module]) for layer, module in attentions.items()}
    place = place_of(model, names[attentions[min(attentions)]])
    if place is not None and len(place[0]) > len(blocks):  # layers without attention write, too
        blocks = dict(enumerate(place[0])) | blocks
    given: dict[nn.Module, Any] = {}
    gave: dict[nn.Module, Any] = {}
    heads: dict[int, Tensor] = {}
    watched = {module for block in blocks.values() for module in block.modules()}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        given[module] = (
            value.cpu().clone() if isinstance(value, Tensor) else value
        )  # the solver runs there alone

    def note_out(module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        gave[module] = None if (main := _main(out)) is None else main.cpu().clone()

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in watched]
    hooks += [module.register_forward_hook(note_out) for module in watched]

    def visit(call: Call) -> None:
        heads[call.layer] = call.attend(list(range(call.q.shape[1]))).flatten(2).cpu()

    with cleared(hooks), tap(model, visit, layers=layer_of):
        forward(model.base_model, short_inputs(model, (7,)))
    taken_apart: list[BlockTree] = []
    before: Tensor | None = None
    for layer, block in sorted(blocks.items()):
        kind = f"{model.config.model_type} layer {layer}"
        seen = _Seen(kind, block, attentions.get(layer), heads.get(layer), (given, gave))
        tree = seen.with_silent(seen.explain(seen.left))
        if (
            tree is None
            or not _enters(tree)
            or (seen.attention is not None and Heads() not in walk(tree))
        ):
            added = (
                "what it adds to the residual stream is not a sum of its heads and its other parts"
            )
            raise BadInput(
                f"{kind} cannot be traced: {added}, so its writers cannot be told apart."
            )
        if before is not None and not seen.same(seen.entered, before.to(seen.entered.device)):
            raise BadInput(
                f"{kind} cannot be traced: what enters it is not what left the layer before it."
            )
        before = seen.left
        taken_apart.append(BlockTree(block, seen.attention, seen.output, tree))
    return taken_apart


def _main(value: Any) -> Tensor | None:
    """The tensor that a module hands on: alone, or first of several."""
    if isinstance(value, tuple | list):
        value = value[0] if len(value) else None
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


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
        return ((out - self.bias.to(x)) * y).sum(-1, keepdim=True) / y.square().sum(
            -1, keepdim=True
        ).clamp_min(1e-30)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its name."""
    return "norm" in type(module).__name__.lower() and not any(module.children())


@torch.no_grad()
def full_output(norm: nn.Module, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """What a norm makes of an input, in float32."""
    weights = {name: weight.detach().float() for name, weight in norm.named_parameters()}
    there = next(iter(weights.values()), x).device
    return functional_call(norm, weights, (x.to(there, torch.float32),)).to(x.device)


def take_apart(norm: nn.Module, like: Tensor) -> Norm:
    """Gain, bias and centring of a norm, found by asking it; ``like`` is what it normalises."""
    weight = next(norm.parameters(), like[(0,) * (like.ndim - 1)])
    signs = (1 - 2 * (torch.arange(weight.shape[-1], device=weight.device) % 2)).float()
    signs = signs.expand(weight.shape)  # alternating ±1: no entry of its normalised form vanishes
    above = full_output(norm, _LONG * signs)
    below = full_output(norm, -_LONG * signs)
    bias = (above + below) / 2
    flat = full_output(norm, torch.full_like(signs, _LONG))
    centres = bool(
        (flat - bias).abs().max() < (above - bias).abs().max() / 2
    )  # nothing is left of a constant vector
    unit = signs - signs.mean(-1, keepdim=True) if centres else signs
    square = unit.square().mean(-1, keepdim=True)
    own = Norm((above - below) / 2 * square.sqrt() / unit, bias, centres)
    scalar = own.scalar(_SHORT * signs, full_output(norm, _SHORT * signs))
    return own._replace(eps=float((1 / scalar.square() - _SHORT**2 * square).mean()))


class Frozen:
    """Norms that multiply by what they multiplied by when they first ran: the first run notes,
    later runs repeat.
    """

    def __init__(self) -> None:
        self._own: dict[nn.Module, Norm] = {}
        self._scalars: dict[nn.Module, list[Tensor]] = {}
        self._runs: dict[nn.Module, int] = {}
        self._asking = False

    @property
    def ran(self) -> list[nn.Module]:
        """Norms that ran, in their order."""
        return list(self._own)

    def hooks(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Make linear maps of the norms among some modules for one run, until the hooks are
        removed.
        """
        self._runs.clear()
        return [norm.register_forward_hook(self._norm) for norm in modules if is_norm(norm)]

    def unit(self, unbiased: Collection[nn.Module] = ()) -> None:
        """Multiply by 1 from now on, and leave out the biases of some norms."""
        for norm, noted in self._scalars.items():
            self._scalars[norm] = [torch.ones((), device=scalar.device) for scalar in noted]
            if norm in unbiased:
                self._own[norm] = self._own[norm]._replace(
                    bias=torch.zeros_like(self._own[norm].bias)
                )

    def _norm(self, norm: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        if self._asking:
            return None
        if norm not in self._own:
            self._asking = True  # a norm is taken apart by running it
            self._own[norm] = take_apart(norm, given[0])
            self._asking = False
        x = given[0].float()
        own = self._own[norm]
        run = self._runs[norm] = (
            self._runs.get(norm, -1) + 1
        )  # one norm may serve queries, then keys
        noted = self._scalars.setdefault(norm, [])
        if len(noted) == run:
            noted.append(own.scalar(x.detach(), out.detach().float()))
        return (noted[run] * own.gain * own.centred(x) + own.bias).to(out.dtype)
