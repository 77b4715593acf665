"""The tap: every attention call of a model passes through us, with nothing copied from its
modelling file.

transformers looks up its attention function by the name in the config. The tap registers a function
and a mask function under a new name, points the config there, and hands each call to a visitor: q
and k as the dot product sees them (KV heads unrepeated) and what the call itself says about ``ℓ =
cap(scale · q·k) + mask`` and the sink. Then it delegates to the implementation the model was loaded
with. On leaving, name, function and config are as before. Families with attention code of their own
are watched while it runs (`own_code`).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qkscope.attention import AttentionRows, soft
from qkscope.errors import BadInput
from qkscope.model import spaces
from qkscope.model.own_code import additive, own_attention, watched
from qkscope.model.spaces import Rotary, swapped

#: Implementations the tap can delegate to: those whose mask says which keys a query sees.
SERVED = ("sdpa", "eager")

_numbers = itertools.count()
ANEW = "the Scope was made: make a new one of the model as it is, with Scope.from_model(model)."


class _Name(str):
    """A name of our own in the tables of functions, equal to the implementation's wherever a model
    asks by name.

    Sparse attention makes its mask only ``if config._attn_implementation in ("eager", "sdpa")``.
    """

    implementation: str
    __hash__ = str.__hash__  # tables look names up by their hash

    def __eq__(self, other: object) -> bool:
        return other == self.implementation or str.__eq__(self, other) is True


class Stop(Exception):
    """Raised by a visitor that has seen enough: the rest of the forward pass is skipped."""


@contextmanager
def cleared(hooks: Iterable[Any], stop: Stop | None = None) -> Iterator[None]:
    """Remove every hook afterwards, and free the tensors in a stopped forward's frames."""
    try:
        yield
    finally:
        if stop is not None:
            stop.__traceback__ = (
                None  # its frames hold tensors, and from Python 3.12 on they hold each other
            )
        for hook in hooks:
            hook.remove()


def evaluated(parts: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Eval mode for the duration of a ``with`` block: no dropout. Each module's own mode is put
    back.
    """
    return swapped(*((part, "training", False) for part in parts if part.training))


@dataclass
class Call:
    """One attention call: b sequences, h query heads, g key heads, s queries, t keys.

    A visitor may replace `q`, `k` (with h heads, where heads of one group must differ) and what is
    added to the logits of a head (`own_mask`); it names the query heads concerned in `redo`, and
    their output is computed again from this record. One that knows the output of every head itself
    puts it into `output`; what a head put out, [b, s, e], can be changed by a function in
    `outputs`. `biases` names what else the call adds to its logits: the probe refuses a model where
    there is any. `weights` gives what the model's own softmax gave, where its own code was watched.
    """

    module: nn.Module
    q: Float[Tensor, "b h s d"]
    k: Float[Tensor, "b g t d"]
    v: Float[Tensor, "b g t e"]
    mask: Tensor | None
    scale: float
    causal: bool
    softcap: float | None = None
    sinks: Float[Tensor, "h"] | None = None
    layer: int = -1  # numbered when it is shown
    biases: tuple[str, ...] = ()
    rotary: Rotary | None = None
    redo: set[int] = field(default_factory=set)
    output: Float[Tensor, "b s h e"] | None = None
    redrawn: bool = False  # whether the mask is this record's, and one for each head
    outputs: dict[int, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    weights: Callable[[], Float[Tensor, "b h s t"]] | None = None

    def cap(self, logits: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Soft-cap: ``c · tanh(ℓ/c)``, or nothing."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def own_mask(self, head: int) -> Float[Tensor, "b s t"]:
        """The additive mask of one head, to be written into; its output is computed again."""
        if not self.redrawn:
            mask = self._every_mask()
            self.mask = mask.repeat(1, self.q.shape[1] // mask.shape[1], 1, 1)
            self.causal = False
            self.redrawn = True
        self.redo.add(head)
        return self.mask[:, head]  # type: ignore[index]

    def _every_mask(self) -> Float[Tensor, "b m s t"]:
        batch, _, queries, _ = self.q.shape
        every = torch.cartesian_prod(
            *(torch.arange(n, device=self.q.device) for n in (batch, queries))
        )
        return self.mask_rows(*every.unbind(1)).unflatten(0, (batch, queries)).transpose(1, 2)

    def mask_rows(self, batch: Int[Tensor, "r"], query: Int[Tensor, "r"]) -> Float[Tensor, "r m t"]:
        """The additive mask of chosen queries over all keys, 0 or -inf (or a bias); m is 1, or h
        where heads differ.
        """
        keys = self.k.shape[2]
        if self.mask is None:
            shown = torch.arange(keys, device=query.device)
            last = (
                query[:, None] + (keys - self.q.shape[2])
                if self.causal
                else torch.full_like(query, keys)[:, None]
            )
            return additive(shown <= last)[:, None]
        # a mask that is the same for every sequence, or for every query, may come without that
        # axis' length
        batch = batch if len(self.mask) > 1 else torch.zeros_like(batch)
        query = query if self.mask.shape[2] > 1 else torch.zeros_like(query)
        return additive(self.mask[batch, :, query][..., :keys])

    @torch.no_grad()
    def rows(
        self, head: int | Int[Tensor, "r"], batch: Int[Tensor, "r"], query: Int[Tensor, "r"]
    ) -> AttentionRows:
        """Attention rows of one head, or of one each, at chosen queries, over all keys."""
        batch = batch.to(self.q.device)
        query = query.to(self.q.device)
        mask = self.mask_rows(batch, query)
        group = self.q.shape[1] // self.k.shape[1]
        q = self.q[batch, head, query].float()
        k = self.k[batch, head // group].float()
        bias = mask[torch.arange(len(batch)), head if mask.shape[1] > 1 else 0]
        cap = (
            None
            if self.softcap is None
            else torch.tensor([float(self.softcap)], device=self.q.device)
        )
        rest = (
            None
            if self.sinks is None
            else self.sinks.detach()[head].float().expand(len(batch))[:, None]
        )
        return AttentionRows(
            q[:, None], k[:, None], self.scale, softcap=cap, bias=bias[:, None], rest=rest
        )

    def logits(self, heads: list[int]) -> Float[Tensor, "b n s t"]:
        """What the softmax of some query heads is given, from this record, in float32; -inf hides a
        key.
        """
        index = torch.tensor(heads, device=self.q.device)
        mask = self._every_mask()
        logits = self.cap(
            self.scale * self.q[:, index].float() @ self._of(self.k, heads).transpose(-1, -2)
        )
        return logits + (mask if mask.shape[1] == 1 else mask[:, index])

    def attention(self, heads: list[int]) -> Float[Tensor, "b n s t"]:
        """The whole attention pattern of some query heads, from this record, in float32."""
        logits = self.logits(heads)
        sink = (
            None
            if self.sinks is None
            else self.sinks.float()[heads].view(1, -1, 1).expand(logits.shape[:3])
        )
        # a padded query sees nothing: nan_to_num leaves it at 0, and nobody reads it
        return soft(logits, sink).nan_to_num()

    def _of(self, vectors: Float[Tensor, "b g t d"], heads: list[int]) -> Float[Tensor, "b n t d"]:
        """Keys or values, as some query heads read them."""
        return vectors[:, [head // (self.q.shape[1] // vectors.shape[1]) for head in heads]].float()

    def attend(self, heads: list[int]) -> Float[Tensor, "b s n e"]:
        """Output of some query heads, from this record: ``softmax([cap(scale q·k) + mask, sink])
        v``.
        """
        return (self.attention(heads) @ self._of(self.v, heads)).transpose(1, 2)


# ---------------------------------------------------------------- where its modules are


def _children(parts: Sequence[nn.Module]) -> list[nn.Module | None]:
    """Direct children of some modules: the same list means the same tree."""
    return [child for part in parts for child in part._modules.values()]


def _places_of(model: Any, name: str) -> list[tuple[nn.ModuleList, int]]:
    """The lists of layers a module stands in, outermost first, and the number of its layer in each."""
    parts = name.split(".")
    outer = [
        (model.get_submodule(".".join(parts[:end])), parts[end]) for end in range(1, len(parts))
    ]
    return [(part, int(number)) for part, number in outer if isinstance(part, nn.ModuleList)]


def place_of(model: Any, name: str) -> tuple[nn.ModuleList, int] | None:
    """The outermost list of layers a module stands in, and the number of its layer there."""
    return next(iter(_places_of(model, name)), None)


def block_of(model: Any, name: str) -> nn.Module:
    """The transformer block a module belongs to: the innermost ancestor that stands in a list of
    modules.
    """
    layers, number = _places_of(model, name)[-1]
    return layers[number]


@cache  # every attention call asks
def modelling_file(kind: type) -> ModuleType:
    """The file that defines a layer's attention; a subclass elsewhere leads to its parent's file."""
    files = [sys.modules[parent.__module__] for parent in kind.__mro__]
    return next((file for file in files if hasattr(file, "eager_attention_forward")), files[0])


class Anatomy(NamedTuple):
    """What the tap has to find in a model, found once: a walk through all modules takes as long as
    a few layers.
    """

    parts: list[nn.Module]
    children: list[nn.Module | None]
    configs: dict[int, Any]
    files: frozenset[ModuleType]
    by_length: tuple[nn.Module, ...]
    own: tuple[nn.Module, ...]

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        """Its modules, configs that name an attention function, modelling files, modules that
        rotate by the prompt's length, and attention with code of its own.
        """
        parts = list(model.modules())
        configs = [part.config for part in parts if hasattr(part, "config")]
        return cls(
            parts,
            _children(parts),
            {
                id(config): config
                for config in configs
                if hasattr(config, "_attn_implementation_internal")
            },
            frozenset(map(modelling_file, set(map(type, parts)))),
            tuple(part for part in parts if spaces.depends_on_length(part)),
            tuple(own_attention(model)),
        )


@contextmanager
def tap(
    model: Any,
    *visits: Callable[[Call], None],
    layers: Mapping[int, int] | None = None,
    rotary: bool = False,
    anatomy: Anatomy | None = None,
    within: nn.Module | None = None,
) -> Iterator[list[int]]:
    """Show every attention call of a model, in eval mode, to visitors, for the duration of a
    ``with`` block.

    Yields the list of layers, which grows as they are called. A pass that leaves out one of
    `layers` is an error.

    Parameters
    ----------
    model : PreTrainedModel
        The model; its weights and classes are not touched.
    *visits : callable
        Get each `Call` in turn before it runs. `Stop` raised inside one ends the forward (and the
        ``with`` block) quietly.
    layers : mapping, optional
        ``id(attention module) -> layer``; other modules (a vision tower) are let through. Without
        it calls are numbered in their order.
    rotary : bool
        Also record what the modelling file's rotary function was given (`Call.rotary`).
    anatomy : Anatomy, optional
        Of this model, where it was looked for before.
    within : Module, optional
        The part of it that runs, where that is a block of a model that ran just before.
    """
    called: list[int] = []
    if within is None and anatomy is not None and _children(anatomy.parts) != anatomy.children:
        raise BadInput(f"modules of the model were replaced, added or removed since {ANEW}")
    anatomy = anatomy or Anatomy.of(model)
    parts = anatomy.parts if within is None else list(within.modules())
    watcher = threading.get_ident()  # what another thread asks of the model is not shown
    with ExitStack() as stack:
        stack.enter_context(evaluated(parts))
        stack.enter_context(spaces.rows_rotate_alone(anatomy.by_length))
        heard: deque[Rotary] = (
            stack.enter_context(spaces.record_rotary(anatomy.files)) if rotary else deque()
        )

        def show(call: Call) -> None:
            call.layer = len(called) if layers is None else layers[id(call.module)]
            called.append(call.layer)
            call.rotary = spaces.heard_rotary(heard, call.q)  # none in a layer without rotation
            heard.clear()
            for visit in visits:
                visit(call)

        def serve(
            run: Callable[[], Tensor], **fields: Any
        ) -> Tensor:  # of an attention that a module computed itself
            if threading.get_ident() != watcher:
                return run()
            show(call := Call(**fields))
            return _edited(call, run().transpose(1, 2)).transpose(1, 2)

        if anatomy.own:
            stack.enter_context(
                watched(
                    [part for part in anatomy.own if layers is None or id(part) in layers], serve
                )
            )
        else:
            stack.enter_context(_interface(model, anatomy.configs, show, layers))
        expected = list((layers or {}).values())  # in the order in which they are called
        try:
            yield called
        except Stop as stop:
            stop.__traceback__ = (
                None  # its frames hold the layer's tensors, in a cycle until the collector comes by
            )
            expected = expected[: expected.index(called[-1]) + 1] if called and expected else []
        if called and (silent := set(expected) - set(called)):
            raise BadInput(f"layer {min(silent)} did not call its attention, as it did when {ANEW}")


def _edited(call: Call, output: Float[Tensor, "b s h e"]) -> Float[Tensor, "b s h e"]:
    """The output to go on with, after visitors saw the call."""
    output = output if call.output is None else call.output.to(output.dtype)
    if not call.redo and not call.outputs:
        return output
    heads = sorted(call.redo)
    output = output.clone()
    if heads:
        output[:, :, heads] = call.attend(heads).to(output.dtype)
    for head, change in call.outputs.items():
        output[:, :, head] = change(output[:, :, head]).to(output.dtype)
    return output


@contextmanager
def _interface(
    model: Any, configs: dict[int, Any], show: Callable[[Call], None], layers: Any
) -> Iterator[None]:
    """Show the calls of transformers' attention interface."""
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    watcher = threading.get_ident()

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        given = query, key, value, attention_mask
        implementation = before.get(
            id(getattr(module, "config", model.config)), before[id(model.config)]
        )
        file = modelling_file(type(module))  # type: ignore[arg-type]
        if implementation != "eager":
            # a modelling file may hold its own instance of the interface, with its own version of
            # sdpa
            run = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)[implementation]
        else:
            run = file.eager_attention_forward
        unwatched = layers is not None and id(module) not in layers
        if unwatched or threading.get_ident() != watcher:
            return run(module, *given, **kwargs)
        scale = kwargs.get("scaling")
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # sdpa reads a missing mask as causal (for more than one query), eager as no mask at all
        causal = (
            implementation == "sdpa"
            and attention_mask is None
            and bool(is_causal)
            and query.shape[2] > 1
        )
        scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
        call = Call(module, *given, scale, causal, kwargs.get("softcap"), kwargs.get("s_aux"))
        call.biases = tuple(
            name for name, value in kwargs.items() if "bias" in name and isinstance(value, Tensor)
        )
        show(call)
        if call.output is not None:
            return _edited(call, call.output.to(query.dtype)), None
        output, weights = run(module, *given, **kwargs)
        return _edited(call, output), weights

    implementation = before[id(model.config)]
    if implementation.startswith("qkscope_"):
        raise BadInput(
            "this model is being watched already: let the other thread, or the block around it, end first."
        )
    if implementation not in SERVED:
        raise BadInput(
            f"the model runs {implementation!r} attention: load it with attn='sdpa' or attn='eager'."
        )
    name = _Name(f"qkscope_{next(_numbers)}")
    name.implementation = implementation
    functions = ALL_ATTENTION_FUNCTIONS
    masks = ALL_MASK_ATTENTION_FUNCTIONS
    try:
        functions.register(name, attention)
        masks.register(name, masks[implementation])
        with swapped(
            *((config, "_attn_implementation_internal", name) for config in configs.values())
        ):
            yield
    finally:
        for interface in (functions, masks):
            interface._global_mapping.pop(name, None)
