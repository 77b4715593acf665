"""What a model's attention is, read off one live call per layer instead of its config.

A short forward through the tap shows which modules call the attention interface, in which order, with how many heads
of which width, and where its rotation sits in the vector. A model whose layers do not pass through the interface
(they keep their own attention code) shows no calls, and is refused with that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qkscope.capture import inputs as feed
from qkscope.capture.inputs import SIDES, PaddingSide
from qkscope.capture.layers import place_of
from qkscope.capture.own_code import own_attention
from qkscope.capture.refused import check_honoured, check_kind, refusal, replaced, without_attention
from qkscope.capture.spaces import LENGTH_DEPENDENT, Rotary, Space, rotary_types
from qkscope.capture.tap import Anatomy, Call, Stop, cleared, tap
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import checked_class


@dataclass(frozen=True)
class Layer:
    """One layer's attention. `offset` is where its rotated dimensions begin, None where nothing rotates.

    A layer without attention has no heads; `instead` names the module that it has in its place.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    offset: int | None
    refusals: dict[Space, str]
    instead: str = ""


@dataclass(frozen=True)
class Facts:
    """What the probe found.

    Attributes
    ----------
    layers : tuple of Layer
        Each layer's attention.
    layer_of : dict
        ``id(attention module) -> layer``.
    takes_positions : bool
        Whether the positions 0, 1, 2, ... may be passed.
    first_position : int
        What the model itself calls the position of a first token: 0 in nearly every family.
    sides : tuple of str
        Where prompts can be padded without a change to their vectors, the best side first.
    anatomy : Anatomy
        What the tap holds on to.
    """

    layers: tuple[Layer, ...]
    layer_of: dict[int, int]
    takes_positions: bool
    first_position: int
    sides: tuple[PaddingSide, ...]
    anatomy: Anatomy


@checked_class
class Shape:
    """What was read off live attention calls (`facts`), in words."""

    name: str
    facts: Facts

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.facts.layers)

    def _uniform(self, what: str) -> int:
        values = sorted({getattr(layer, what) for layer in self.facts.layers if layer.n_heads})
        if len(values) > 1:
            raise BadInput(f"{what} differs between layers ({values}): read it per layer from scope.facts.layers.")
        return values[0]

    @property
    def n_heads(self) -> int:
        """Query heads per layer."""
        return self._uniform("n_heads")

    @property
    def n_kv_heads(self) -> int:
        """Key heads per layer."""
        return self._uniform("n_kv_heads")

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.n_heads // self.n_kv_heads

    @property
    def d_head(self) -> int:
        """Width of a query."""
        return self._uniform("d_head")

    def heads(self) -> list[Head]:
        """Every head of the model.

        Examples
        --------
        >>> from qkscope import Scope
        >>> Scope.load("nano:mixed").heads()[:2]
        [Head L0H0, Head L0H1]
        """
        return list(_heads(tuple(layer.n_heads for layer in self.facts.layers)))

    def check(self, head: Head | str) -> Head:
        """The head, if the model has it; otherwise a sentence that names the range.

        Parameters
        ----------
        head : Head or str
            Like ``L2H3``.

        Examples
        --------
        >>> from qkscope import Scope
        >>> Scope.load("nano:mixed").check("L9H0")
        Traceback (most recent call last):
        qkscope.errors.BadInput: L9H0 does not exist: nano:mixed has layers L0 to L2.
        """
        head = Head.parse(head)
        if head.layer >= self.n_layers:
            raise BadInput(f"{head} does not exist: {self.name} has layers L0 to L{self.n_layers - 1}.")
        count, instead = self.facts.layers[head.layer].n_heads, self.facts.layers[head.layer].instead
        if instead:
            with_heads = ", ".join(f"L{i}" for i, layer in enumerate(self.facts.layers) if layer.n_heads)
            raise BadInput(
                f"{head} does not exist: layer {head.layer} of {self.name} has a {instead} instead of attention; heads"
                f" are in {with_heads}."
            )
        if head.index >= count:
            raise BadInput(f"{head} does not exist: layer {head.layer} of {self.name} has heads H0 to H{count - 1}.")
        return head

    def parse(self, heads: str | Head | Sequence[str | Head] | None) -> list[Head]:
        """Heads by name, checked.

        Parameters
        ----------
        heads : str, Head, or sequence of them
            ``"L2H3,L1H0"``, or heads; None or ``"all"`` is every head.

        Examples
        --------
        >>> from qkscope import Scope
        >>> Scope.load("nano:mixed").parse("L2H3, L1H0")
        [Head L2H3, Head L1H0]
        """
        if heads is None or heads == "all":
            return self.heads()
        return [self.check(head) for head in parse_heads(heads)]


@lru_cache(maxsize=64)  # every batch asks, and a model has a thousand
def _heads(counts: tuple[int, ...]) -> tuple[Head, ...]:
    return tuple(Head(layer, i) for layer, count in enumerate(counts) for i in range(count))


@torch.no_grad()
def probe(model: Any) -> Facts:
    """Read a model's attention off a short forward, or refuse the model with the reason."""
    check_kind(model)
    inputs = feed.short_inputs(model)
    implementation = model.config._attn_implementation
    calls = _calls(model, inputs, lambda call: check_honoured(implementation, call))
    if not calls:
        code = "they hold attention code of their own, in which no softmax of one product q·k is seen"
        why = replaced(model) or (code if own_attention(model) else "none of their modules is an attention that does")
        raise refusal(model, f"its layers never call transformers' attention interface ({why})")
    modules = [id(call.module) for call in calls]
    if len(set(modules)) < len(modules):
        raise refusal(model, "one attention module is called several times in a pass")
    instead = without_attention(model, calls)
    given, seen = inputs.get("input_ids", calls[0].k[:, 0, :, 0]).shape[1], calls[0].k.shape[2]
    if given != seen:
        raise refusal(model, f"of {given} tokens its attention makes {seen}, so which is which is not known")
    if calls[0].biases:
        added = f"its attention call adds a learned {calls[0].biases[0]} to its logits"
        raise refusal(model, f"{added}, so they are not scale q·k + mask")
    family = _family_refusals(model, inputs, calls)
    takes_positions, first_position, sides = _counting(model, inputs, calls, bool(instead))
    names = {id(module): name for name, module in model.named_modules()}
    places = [place_of(model, names[module]) for module in modules]
    numbers = [i if place is None else place[1] for i, place in enumerate(places)]
    layer_of = dict(zip(modules, numbers, strict=True))
    found = {number: _layer(call, family) for number, call in zip(numbers, calls, strict=True)}
    found |= {number: Layer(0, 0, 0, None, {}, kind) for number, kind in instead.items()}
    layers = tuple(found[number] for number in sorted(found))
    return Facts(layers, layer_of, takes_positions, first_position, sides, Anatomy.of(model))


def _calls(
    model: Any, inputs: dict[str, Tensor], look: Callable[[Call], None] | None = None, last: int | None = None
) -> list[Call]:
    """Every attention call of one forward, or those up to one layer."""
    calls: list[Call] = []

    def visit(call: Call) -> None:
        if look is not None:
            look(call)
        calls.append(call)
        if call.layer == last:
            raise Stop

    try:
        with tap(model, visit, rotary=True):
            feed.forward(model.base_model, inputs)
    except BadInput:
        raise
    except Exception as error:  # whatever a foreign modelling file raises, the user needs one sentence
        raise refusal(model, replaced(model) or f"a short forward failed with {error!r}") from error
    return calls


def _family_refusals(model: Any, inputs: dict[str, Tensor], calls: list[Call]) -> dict[Space, str]:
    kind, types = model.config.model_type, rotary_types(feed.text_config(model))
    unseen = types and not any(call.rotary for call in calls) and not _holds_no_position(model, inputs, calls)
    if unseen or (calls[0].weights is not None and _turns_unheard(model, inputs, calls)):
        reason = f"{kind} rotates inside its own code, where the rotation cannot be read"
        return {"pre_rope": reason, "query_frame": reason}
    varying = sorted(types & set(LENGTH_DEPENDENT))
    if varying and any(call.rotary for call in calls):
        return {"query_frame": f"{kind}'s {varying[0]} rotation depends on the length of the prompt"}
    return {}


def _turns_unheard(model: Any, inputs: dict[str, Tensor], calls: list[Call]) -> bool:
    """Whether attention code of its own turns vectors unheard: with one input at every token they differ.

    What such code adds to its logits besides q·k may know the distance, but not what stands there.
    """

    def alike(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        first = lambda x: x[:, :1].expand_as(x).contiguous()  # noqa: E731
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": first(kwargs["hidden_states"])}
        return (first(args[0]), *args[1:]), kwargs

    hooks = [call.module.register_forward_pre_hook(alike, with_kwargs=True) for call in calls]
    with cleared(hooks):
        others = _calls(model, inputs)
    close = 5e-2 if calls[0].q.dtype in (torch.float16, torch.bfloat16) else 1e-3
    apart = 0.0
    for call, other in zip(calls, others, strict=True):
        places = torch.arange(call.q.shape[2], device=call.q.device)
        before, after = (one.mask_rows(torch.zeros_like(places), places) for one in (call, other))
        if not torch.allclose(before, after, rtol=1e-3, atol=1e-3):
            why = "its attention adds to a logit what depends on the tokens, besides q·k"
            raise refusal(model, f"{why}, so they are not scale q·k + bias")
        if call.rotary is None:
            moved = [(x - x[:, :, :1]).float().norm() / x.float().norm().clamp_min(1e-12) for x in (other.q, other.k)]
            apart = max(apart, *map(float, moved))
    return apart > close


def _holds_no_position(model: Any, inputs: dict[str, Tensor], calls: list[Call]) -> bool:
    """Whether a model has no positions at all, whatever its config says: other ones change nothing."""
    if "position_ids" not in feed.forward_arguments(model.base_model) or "attention_mask" not in inputs:
        return False
    elsewhere = {"position_ids": 2 * feed.positions_of(inputs["attention_mask"]) + 3}
    return _same_vectors(calls, _calls(model, inputs | elsewhere))


def _layer(call: Call, family: dict[Space, str]) -> Layer:
    refusals = dict(family)
    offset = None
    if call.rotary is not None:
        offset = _offset(call, call.rotary)
        if offset is None:
            reason = "the vectors are changed again (normalised, rescaled or regrouped) after they are rotated"
            refusals |= {"pre_rope": reason, "query_frame": reason}
        elif not _turns_back(call, call.rotary, offset):
            refusals.setdefault("query_frame", "the rotary function is more than a rotation and cannot be turned back")
    return Layer(call.q.shape[1], call.k.shape[1], call.q.shape[-1], offset, refusals)


def _offset(call: Call, rotary: Rotary) -> int | None:
    """Where the rotated part sits in the vectors the dot product sees: at the front, at the end, or not as it was."""
    width = rotary.q_rotated.shape[-1]
    for offset in (0, call.q.shape[-1] - width):
        pairs = ((call.q, rotary.q_rotated), (call.k, rotary.k_rotated))
        if all(_holds(seen[..., offset : offset + width], rotated) for seen, rotated in pairs):
            return offset
    return None


def _holds(seen: Tensor, rotated: Tensor) -> bool:
    """Whether heads are the rotated ones: each its own, or all the same one (latent attention)."""
    return rotated.shape[1] in (1, seen.shape[1]) and torch.equal(seen, rotated.to(seen).expand_as(seen))


def _turns_back(call: Call, rotary: Rotary, offset: int) -> bool:
    last = call.q.shape[2] - 1
    row, column = (torch.tensor([value], device=call.q.device) for value in (0, last))
    q, k = call.q[:1, :, last].float(), call.k[:1, :, last:].float()
    turned, _ = rotary.turn_back(q, k, row, column, offset)
    given = rotary.q[:1, :, last].float()
    turned = turned[..., offset : offset + given.shape[-1]]
    # the attention scaling stays in the vector, so compare directions; half precision rounds the rotated vector
    return bool(torch.nn.functional.cosine_similarity(turned, given, dim=-1).min() > 0.999)


def _counting(
    model: Any, inputs: dict[str, Tensor], calls: list[Call], hybrid: bool
) -> tuple[bool, int, tuple[PaddingSide, ...]]:
    """How a model counts positions: whether 0, 1, 2, ... may be passed, where it begins, and where it can be padded.

    Nothing is believed that was not seen: positions that are accepted but change nothing (Bart's decoder counts
    columns), or that the model counts from another number (RoBERTa from behind its padding id), leave it to the padded
    prompts themselves, compared with the same prompt alone in every layer, to say which side is right. So do layers
    without attention, which may read padding.
    """
    if "attention_mask" not in inputs:  # an image has no padding
        return False, 0, SIDES
    counted = feed.positions_of(inputs["attention_mask"])

    def same_at(positions: Tensor) -> bool:
        return _same_vectors(calls, _calls(model, inputs | {"position_ids": positions}, last=0))

    takes, first = False, 0
    if "position_ids" in feed.forward_arguments(model.base_model):
        takes = same_at(counted)
        if takes and not hybrid and not same_at(counted + counted % 2):
            return True, 0, SIDES
        behind = (feed.model_pad_id(model) or 0) + 1
        limit = feed.context_limit(model)
        if not takes and (limit is None or behind + counted.shape[1] < limit) and same_at(counted + behind):
            first = behind
    return takes, first, tuple(side for side in SIDES if _padding_is_harmless(model, calls, side, takes))


def _padding_is_harmless(model: Any, calls: list[Call], side: PaddingSide, takes_positions: bool) -> bool:
    (alone,) = feed.short_ids(model, (6,))
    longer, _ = feed.short_ids(model, (9, 6))
    batch = feed.pad_rows([longer, alone], feed.model_pad_id(model) or 0, side, takes_positions)
    batch = {name: value.to(feed.input_device(model)) for name, value in batch.items()}
    own = slice(3, None) if side == "left" else slice(None, 6)
    # in half precision rounding grows from layer to layer, so there the first two have to tell
    last = 1 if calls[0].q.dtype in (torch.float16, torch.bfloat16) else None
    return _same_vectors(calls, _calls(model, batch, last=last), own)


def _same_vectors(calls: list[Call], others: list[Call], columns: slice = slice(None)) -> bool:
    """Whether two forwards gave the same queries and keys, the second in its last row and some of its columns."""
    close = 5e-2 if calls[0].q.dtype in (torch.float16, torch.bfloat16) else 1e-3
    for call, other in zip(calls, others, strict=False):
        for ours, theirs in ((call.q, other.q), (call.k, other.k)):
            apart = (theirs[-1:, :, columns] - ours).float().norm() / ours.float().norm().clamp_min(1e-12)
            if not float(apart) <= close:
                return False
    return True
