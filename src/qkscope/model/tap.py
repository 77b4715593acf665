"""The tap: show every attention call of a model to visitors, with nothing copied from its code.

transformers looks up its attention function by the name in the config. The tap registers a function
and a mask function under a new name, points the config there, and hands each call to a visitor: q
and k as the dot product sees them (KV heads unrepeated), and what the call itself says about

    ``ℓ = cap(scale · q·k) + mask``

and the sink. Then it delegates to the implementation the model was loaded with. On leaving, name,
function and config are as before. Families with attention code of their own are watched while it
runs (`own_code`).
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

#: End of the sentence that refuses a model whose modules changed under its Scope.
ANEW = "the Scope was made: make a new one of the model as it is, with Scope.from_model(model)."

_tap_numbers = itertools.count()  # each tap registers under a name that no other tap has


class _Name(str):
    """The name a tap registers under, equal to the implementation's too, for models that compare.

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
            # its frames hold tensors, and from Python 3.12 on they hold each other
            stop.__traceback__ = None
        for hook in hooks:
            hook.remove()


def evaluated(parts: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Set modules to eval mode (no dropout) for a ``with`` block; each then gets its mode back."""
    in_training = [part for part in parts if part.training]
    return swapped(*((part, "training", False) for part in in_training))


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
    sinks: Float[Tensor, " h"] | None = None
    layer: int = -1  # numbered when it is shown
    biases: tuple[str, ...] = ()
    rotary: Rotary | None = None
    redo: set[int] = field(default_factory=set)
    output: Float[Tensor, "b s h e"] | None = None
    redrawn: bool = False  # whether the mask is this record's, and one for each head
    outputs: dict[int, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    weights: Callable[[], Float[Tensor, "b h s t"]] | None = None

    def cap(self, logits: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Soft-cap the logits: ``c · tanh(ℓ/c)``, or leave them where the call has no cap."""
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    def products(self, head: int) -> Float[Tensor, "b s t"]:
        """What one head's queries and keys give, capped, before the mask."""
        k = self._read_by([head], self.k)[:, 0]
        q = self.q[:, head].float()
        return self.cap(self.scale * q @ k.transpose(-1, -2))

    def own_mask(self, head: int) -> Float[Tensor, "b s t"]:
        """One head's additive mask, to be written into; the head's output is computed again."""
        if not self.redrawn:
            mask = self._full_mask()
            n_heads = self.q.shape[1]
            self.mask = mask.repeat(1, n_heads // mask.shape[1], 1, 1)
            self.causal = False  # the mask says it now
            self.redrawn = True
        self.redo.add(head)
        return self.mask[:, head]  # type: ignore[index]

    def _full_mask(self) -> Float[Tensor, "b m s t"]:
        """The additive mask of all queries; m is 1, or h where heads differ."""
        n_batch, _, n_queries, _ = self.q.shape
        device = self.q.device
        batch = torch.arange(n_batch, device=device).repeat_interleave(n_queries)
        query = torch.arange(n_queries, device=device).repeat(n_batch)
        rows = self.mask_rows(batch, query)
        return rows.unflatten(0, (n_batch, n_queries)).transpose(1, 2)

    def mask_rows(
        self, batch: Int[Tensor, " r"], query: Int[Tensor, " r"]
    ) -> Float[Tensor, "r m t"]:
        """The additive mask (0, -inf or a bias) of chosen queries; m is 1, or h if heads differ."""
        n_keys = self.k.shape[2]
        if self.mask is None:
            return self._causal_rows(query)[:, None]
        # a mask that is the same for every sequence, or for every query, may have length 1 there
        if self.mask.shape[0] == 1:
            batch = torch.zeros_like(batch)
        if self.mask.shape[2] == 1:
            query = torch.zeros_like(query)
        rows = self.mask[batch, :, query]
        return additive(rows[..., :n_keys])

    def _causal_rows(self, query: Int[Tensor, " r"]) -> Float[Tensor, "r t"]:
        """The mask of a call that passes no tensor: the keys after a query, where it is causal."""
        n_queries = self.q.shape[2]
        n_keys = self.k.shape[2]
        keys = torch.arange(n_keys, device=query.device)
        if self.causal:
            last = query + (n_keys - n_queries)
        else:
            last = torch.full_like(query, n_keys)
        return additive(keys <= last[:, None])

    @torch.no_grad()
    def rows(
        self, head: int | Int[Tensor, " r"], batch: Int[Tensor, " r"], query: Int[Tensor, " r"]
    ) -> AttentionRows:
        """Attention rows at chosen queries over all keys, of one head or of one head a row."""
        device = self.q.device
        batch = batch.to(device)
        query = query.to(device)
        n_rows = len(batch)
        q = self.q[batch, head, query].float()
        k = self.k[batch, head // self._group_size(self.k)].float()
        mask = self.mask_rows(batch, query)
        mask_head = head if mask.shape[1] > 1 else 0
        bias = mask[torch.arange(n_rows), mask_head]
        softcap = None
        if self.softcap is not None:
            softcap = torch.tensor([float(self.softcap)], device=device)
        sink = None
        if self.sinks is not None:
            sink = self.sinks.detach()[head].float().expand(n_rows)[:, None]
        return AttentionRows(
            q[:, None], k[:, None], self.scale, softcap=softcap, bias=bias[:, None], rest=sink
        )

    def logits(self, heads: list[int]) -> Float[Tensor, "b n s t"]:
        """What the softmax of query heads is given, from this record: float32, -inf hides a key."""
        index = torch.tensor(heads, device=self.q.device)
        mask = self._full_mask()
        if mask.shape[1] > 1:
            mask = mask[:, index]
        q = self.q[:, index].float()
        k = self._read_by(heads, self.k)
        return self.cap(self.scale * q @ k.transpose(-1, -2)) + mask

    def attention(self, heads: list[int]) -> Float[Tensor, "b n s t"]:
        """The whole attention pattern of some query heads, from this record, in float32."""
        logits = self.logits(heads)
        sink = None
        if self.sinks is not None:
            by_head = self.sinks.float()[heads].view(1, -1, 1)
            sink = by_head.expand(logits.shape[:3])
        # a padded query sees nothing: nan_to_num leaves it at 0, and nobody reads it
        return soft(logits, sink).nan_to_num()

    def attend(self, heads: list[int]) -> Float[Tensor, "b s n e"]:
        """Output of query heads from this record: ``softmax([cap(scale q·k) + mask, sink]) v``."""
        v = self._read_by(heads, self.v)
        return (self.attention(heads) @ v).transpose(1, 2)

    def _group_size(self, vectors: Float[Tensor, "b g t d"]) -> int:
        """Query heads that share one head of keys or values."""
        return self.q.shape[1] // vectors.shape[1]

    def _read_by(
        self, heads: list[int], vectors: Float[Tensor, "b g t d"]
    ) -> Float[Tensor, "b n t d"]:
        """Keys or values in float32, repeated as the query heads given read them."""
        group_size = self._group_size(vectors)
        return vectors[:, [head // group_size for head in heads]].float()


# ---------------------------------------------------------------- where a model's modules are


def _children(parts: Sequence[nn.Module]) -> list[nn.Module | None]:
    """Direct children of some modules: the same list means the same tree."""
    return [child for part in parts for child in part._modules.values()]


def _places_of(model: Any, name: str) -> list[tuple[nn.ModuleList, int]]:
    """The lists of layers around a module, outermost first, and its layer's number in each."""
    path = name.split(".")
    places = []
    for end in range(1, len(path)):
        ancestor = model.get_submodule(".".join(path[:end]))
        if isinstance(ancestor, nn.ModuleList):
            number = int(path[end])
            places.append((ancestor, number))
    return places


def place_of(model: Any, name: str) -> tuple[nn.ModuleList, int] | None:
    """The outermost list of layers a module stands in, and the number of its layer there."""
    return next(iter(_places_of(model, name)), None)


def block_of(model: Any, name: str) -> nn.Module:
    """The transformer block of a module: its innermost ancestor that stands in a list of layers."""
    layers, number = _places_of(model, name)[-1]
    return layers[number]


@cache  # every attention call needs it
def modelling_file(kind: type) -> ModuleType:
    """The file that defines attention for a class; for a subclass elsewhere, its parent's file."""
    files = [sys.modules[parent.__module__] for parent in kind.__mro__]
    return next((file for file in files if hasattr(file, "eager_attention_forward")), files[0])


class Anatomy(NamedTuple):
    """What the tap needs of a model, looked up once: a walk through it costs as much as layers do.

    Attributes
    ----------
    parts : list of Module
        Every module.
    children : list of Module or None
        Their direct children, which tell whether a module was replaced since.
    configs : dict
        ``id(config) -> config``, of those that name an attention function.
    files : frozenset of module
        The modelling files its classes come from.
    by_length : tuple of Module
        Modules that rotate by the length of the prompt.
    own : tuple of Module
        Attention modules that compute attention with code of their own (`own_code`).
    """

    parts: list[nn.Module]
    children: list[nn.Module | None]
    configs: dict[int, Any]
    files: frozenset[ModuleType]
    by_length: tuple[nn.Module, ...]
    own: tuple[nn.Module, ...]

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        """Look a model up."""
        parts = list(model.modules())
        configs = {}
        for part in parts:
            config = getattr(part, "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                configs[id(config)] = config
        classes = {type(part) for part in parts}
        return cls(
            parts=parts,
            children=_children(parts),
            configs=configs,
            files=frozenset(modelling_file(kind) for kind in classes),  # type: ignore[arg-type]
            by_length=tuple(part for part in parts if spaces.depends_on_length(part)),
            own=tuple(own_attention(model)),
        )


# ---------------------------------------------------------------- the tap


@dataclass
class _Audience:
    """The visitors of one tap, and the layers that they were shown so far.

    `layers` maps the id of an attention module to its layer; None shows the calls of all modules,
    numbered in their order. `heard` is what rotary functions were given since the last call.
    """

    visits: Sequence[Callable[[Call], None]]
    layers: Mapping[int, int] | None
    heard: deque[Rotary]
    called: list[int] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    def wants(self, module: nn.Module) -> bool:
        """Whether calls of this module are shown; what another thread asks of the model is not."""
        if threading.get_ident() != self.thread:
            return False
        return self.layers is None or id(module) in self.layers

    def show(self, call: Call) -> None:
        """Number a call and let each visitor see it."""
        call.layer = len(self.called) if self.layers is None else self.layers[id(call.module)]
        self.called.append(call.layer)
        call.rotary = spaces.heard_rotary(self.heard, call.q)  # None in a layer without rotation
        self.heard.clear()
        for visit in self.visits:
            visit(call)

    def serve(self, run: Callable[[], Tensor], **fields: Any) -> Float[Tensor, "b h s e"]:
        """Show attention that a module computed by itself, and give the output to go on with."""
        if threading.get_ident() != self.thread:
            return run()
        call = Call(**fields)
        self.show(call)
        output = run().transpose(1, 2)
        return _edited(call, output).transpose(1, 2)

    def check_all_called(self, stopped: bool) -> None:
        """Refuse a pass in which a layer did not call its attention; a stopped one may be short."""
        if not self.called or self.layers is None:
            return
        expected = list(self.layers.values())  # in the order in which they are called
        if stopped and expected:
            deepest = expected.index(self.called[-1])
            expected = expected[: deepest + 1]
        silent = set(expected) - set(self.called)
        if silent:
            raise BadInput(f"layer {min(silent)} did not call its attention, as it did when {ANEW}")


@contextmanager
def tap(
    model: Any,
    *visits: Callable[[Call], None],
    layers: Mapping[int, int] | None = None,
    rotary: bool = False,
    anatomy: Anatomy | None = None,
    within: nn.Module | None = None,
) -> Iterator[list[int]]:
    """Show every attention call of a model, in eval mode, to visitors during a ``with`` block.

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
        Of this model, where it was looked up before.
    within : Module, optional
        The part of it that runs, where that is a block of a model that ran just before.
    """
    if within is None and anatomy is not None and _children(anatomy.parts) != anatomy.children:
        raise BadInput(f"modules of the model were replaced, added or removed since {ANEW}")
    anatomy = anatomy or Anatomy.of(model)
    parts = anatomy.parts if within is None else list(within.modules())
    with ExitStack() as stack:
        stack.enter_context(evaluated(parts))
        stack.enter_context(spaces.rows_rotate_alone(anatomy.by_length))
        heard: deque[Rotary] = deque()
        if rotary:
            heard = stack.enter_context(spaces.record_rotary(anatomy.files))
        audience = _Audience(visits, layers, heard)
        if anatomy.own:
            modules = [part for part in anatomy.own if audience.wants(part)]
            stack.enter_context(watched(modules, audience.serve))
        else:
            stack.enter_context(_interface(model, anatomy.configs, audience))
        stopped = False
        try:
            yield audience.called
        except Stop as stop:
            # its frames hold the layer's tensors, in a cycle until the collector comes by
            stop.__traceback__ = None
            stopped = True
        audience.check_all_called(stopped)


def _edited(call: Call, output: Float[Tensor, "b s h e"]) -> Float[Tensor, "b s h e"]:
    """The output to go on with, after visitors saw the call."""
    if call.output is not None:
        output = call.output.to(output.dtype)
    if not call.redo and not call.outputs:
        return output
    output = output.clone()
    heads = sorted(call.redo)
    if heads:
        output[:, :, heads] = call.attend(heads).to(output.dtype)
    for head, change in call.outputs.items():
        output[:, :, head] = change(output[:, :, head]).to(output.dtype)
    return output


@contextmanager
def _interface(model: Any, configs: Mapping[int, Any], audience: _Audience) -> Iterator[None]:
    """Show an audience the calls of transformers' attention interface during a ``with`` block."""
    loaded_with = {key: config._attn_implementation_internal for key, config in configs.items()}
    default = loaded_with[id(model.config)]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        config = getattr(module, "config", model.config)
        implementation = loaded_with.get(id(config), default)
        run = _attention_function(module, implementation)
        inputs = (query, key, value, attention_mask)
        if not audience.wants(module):
            return run(module, *inputs, **kwargs)
        call = _call_of(module, inputs, kwargs, implementation)
        audience.show(call)
        if call.output is not None:
            return _edited(call, call.output.to(query.dtype)), None
        output, weights = run(module, *inputs, **kwargs)
        return _edited(call, output), weights

    if default.startswith("qkscope_"):
        raise BadInput(
            "this model is being watched already: let the other thread, or the block around it, "
            "end first."
        )
    if default not in SERVED:
        raise BadInput(
            f"the model runs {default!r} attention: load it with attn='sdpa' or attn='eager'."
        )
    name = _Name(f"qkscope_{next(_tap_numbers)}")
    name.implementation = default
    renamed = [(config, "_attn_implementation_internal", name) for config in configs.values()]
    try:
        ALL_ATTENTION_FUNCTIONS.register(name, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[default])
        with swapped(*renamed):
            yield
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)


def _attention_function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The function that this module's attention would run without the tap."""
    file: Any = modelling_file(type(module))  # type: ignore[arg-type]
    if implementation == "eager":
        return file.eager_attention_forward
    # a modelling file may hold its own instance of the interface, with its own version of sdpa
    interface = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return interface[implementation]


def _call_of(
    module: nn.Module,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    kwargs: Mapping[str, Any],
    implementation: str,
) -> Call:
    """The record of one call of the attention interface: its q, k, v, mask, and keywords."""
    q, k, v, mask = inputs
    scale = kwargs.get("scaling")
    if scale is None:
        scale = q.shape[-1] ** -0.5
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # sdpa reads a missing mask as causal (for more than one query), eager as no mask at all
    reads_as_causal = implementation == "sdpa" and mask is None and q.shape[2] > 1
    biases = [name for name in kwargs if "bias" in name and isinstance(kwargs[name], Tensor)]
    return Call(
        module,
        q,
        k,
        v,
        mask,
        scale=float(scale),
        causal=reads_as_causal and bool(is_causal),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        biases=tuple(biases),
    )
