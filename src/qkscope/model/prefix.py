"""A few tokens of a prompt run alone, among keys and values that it left when it ran whole.

A change at one token leaves those before it as they were, and what is read at one token does not
depend on those after it. So a changed prompt needs only the tokens from its change to the one that
is read, i ∈ R: their attention is over their own new keys and the old ones of all others,

    a(i, ·) = softmax(cap(scale · q_i · [k_new(R), k_old(not R)]) + mask_old(i, ·)).

That is the changed prompt only where nothing else goes from token to token (a recurrent state, a
convolution), where the mask does not depend on the words (sparse attention whose indexer reads
them does), and where the rotation does not depend on the length of what runs. None of this is
known from a config, so that one changed prompt is run in both ways and compared (`runs_alone`)
before the short way is taken; else whole prompts run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qkscope.model.capture_types import Places
from qkscope.model.inputs import short_ids
from qkscope.model.tap import Call, Stop
from qkscope.model.tiny_copy import named_lengths

if TYPE_CHECKING:
    from qkscope.model.scope import Scope

_CHANGED = 64  # tokens that differ in the prompt that is compared
_TELLING = 15  # the first tokens see too little to tell two ways apart: a later one is compared
_AGREES = 1e-3  # of a vector's length, of attention, of the largest logit; or 8 ε of the dtype
# numbers of attention made at once
_ROOM = {"cpu": 2**23}
_MORE_ROOM = 2**28


def prompt_of(scope: Scope, ids: Int[Tensor, "b t"]) -> dict[str, Tensor]:
    """Model inputs of prompts without padding."""
    ids = ids.to(scope.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if scope.facts.takes_positions:
        positions = torch.arange(ids.shape[1], device=scope.device) + scope.facts.first_position
        inputs["position_ids"] = positions.expand_as(ids)
    return inputs


# ---------------------------------------------------------------- two ways to run changed prompts


@dataclass(frozen=True)
class WholePrompts:
    """Changed prompts that run as they are, b of t tokens.

    Attributes
    ----------
    inputs : of the model.
    at : places of the tokens that run: every one.
    ends : by prompt, which of the tokens that run is read last.
    """

    inputs: dict[str, Tensor]
    at: Int[Tensor, "b t"]
    ends: Int[Tensor, " b"]

    @property
    def columns(self) -> Int[Tensor, " t"]:
        """The place in the prompt of each key of `part`."""
        return self.at[0]

    @property
    def order(self) -> Int[Tensor, "b t"]:
        """By prompt, the key of `part` that stands at each place."""
        return self.at

    def part(self, call: Call, which: Int[Tensor, "b u"]) -> Call:
        """An attention call with the queries of some tokens of each prompt alone: b rows, u queries."""
        which = which.to(call.q.device)
        rows = torch.arange(len(which), device=which.device)[:, None]
        mask = call.mask_rows(rows.expand_as(which).flatten(), which.flatten())
        mask = mask.unflatten(0, which.shape).transpose(1, 2)
        q = call.q[rows, :, which].transpose(1, 2)
        return replace(call, q=q, mask=mask, causal=False)

    def by_prompt(self, value: Float[Tensor, "b h u k"], which: Tensor) -> Tensor:
        """Queries, logits or mask of a part of a call, by prompt: as they are."""
        return value

    def values(self, part: Call, prompt: int) -> Float[Tensor, "g k e"]:
        """The values that a prompt's queries in a part read."""
        return part.v[prompt]

    def attend(self, call: Call) -> None:
        """Leave the call as it is: the model attends itself."""


@dataclass(frozen=True)
class TokensAlone:
    """Tokens of changed prompts that run without the others, s of each of b prompts.

    Attributes
    ----------
    inputs : of the model.
    at : places of the tokens that run, in order.
    ends : by prompt, which of the tokens that run is read last.
    around : places of tokens that do not run in all prompts.
    calls : by layer, the attention calls of the unchanged prompt.
    """

    inputs: dict[str, Tensor]
    at: Int[Tensor, "b s"]
    ends: Int[Tensor, " b"]
    around: Int[Tensor, " r"]
    calls: Mapping[int, Call]

    @classmethod
    def of(
        cls, scope: Scope, calls: Mapping[int, Call], tokens: Int[Tensor, "b s"], at: Tensor
    ) -> TokensAlone:
        """Some tokens at their places, of prompts that are as in these calls elsewhere."""
        length = next(iter(calls.values())).k.shape[2]
        runs_in = torch.bincount(at.flatten(), minlength=length)[: int(at.max())]
        around = (runs_in < len(at)).nonzero()[:, 0]
        inputs = {"input_ids": tokens, "position_ids": at + scope.facts.first_position}
        return cls(inputs, at, torch.full_like(at[:, 0], at.shape[1] - 1), around, calls)

    @property
    def columns(self) -> Int[Tensor, " k"]:
        """The place in the prompt of each key of `part`: of all that run, then of those around."""
        return torch.cat([self.at.flatten(), self.around])

    @property
    def order(self) -> Int[Tensor, "b t"]:
        """By prompt, the key of `part` that stands at each place up to the last that runs."""
        count, width = self.at.shape
        order = self.at.new_zeros(count, int(self.at.max()) + 1)
        keys = torch.arange(self.at.numel() + len(self.around), device=self.at.device)
        order[:, self.around] = keys[self.at.numel() :]
        return order.scatter(1, self.at, keys[: self.at.numel()].view(count, width))

    def part(self, call: Call, which: Int[Tensor, "b u"]) -> Call:
        """An attention call with the queries of some tokens alone: one row of b·u queries.

        Keys around are the same for all prompts, so that they are not copied; of the tokens that
        run each query sees those of its own prompt.
        """
        old = self.calls[call.layer]
        at = self.at.to(call.q.device)
        around = self.around.to(call.q.device)
        which = which.to(call.q.device)
        count, width = at.shape
        prompts = torch.arange(count, device=at.device)
        prompt = prompts.repeat_interleave(which.shape[1])  # of each query
        places = at.gather(1, which).flatten()
        mask = old.mask_rows(torch.zeros_like(prompt), places).transpose(0, 1)
        steps = torch.arange(width, device=at.device)
        own_places = at[prompt].expand(len(mask), -1, -1)
        own_columns = (prompt[:, None] * width + steps).expand(len(mask), -1, -1)
        hidden = mask.new_full((*mask.shape[:2], at.numel()), -torch.inf)
        among_new = hidden.scatter(-1, own_columns, mask.gather(-1, own_places))
        among_old = mask.scatter(-1, own_places, -torch.inf)[..., around]
        q = call.q[prompts[:, None], :, which].flatten(0, 1).transpose(0, 1)
        return replace(
            call,
            q=q[None],
            k=self._new_and_old(call.k, old.k, around)[None],
            v=self._new_and_old(call.v, old.v, around)[None],
            mask=torch.cat([among_new, among_old], dim=-1)[None],
            causal=False,
        )

    def _new_and_old(
        self, new: Float[Tensor, "b g s d"], old: Float[Tensor, "1 g t d"], around: Tensor
    ) -> Float[Tensor, "g k d"]:
        """Keys or values of all tokens that run, then those around as the unchanged prompt has them."""
        return torch.cat([new.transpose(0, 1).flatten(1, 2), old[0, :, around]], dim=1)

    def by_prompt(
        self, value: Float[Tensor, "1 h r k"], which: Int[Tensor, "b u"]
    ) -> Float[Tensor, "b h u k"]:
        """Queries, logits or mask of a part of a call, by prompt."""
        return value[0].unflatten(1, which.shape).transpose(0, 1)

    def values(self, part: Call, prompt: int) -> Float[Tensor, "g k e"]:
        """The values that a prompt's queries in a part read."""
        return part.v[0]

    def attend(self, call: Call) -> None:
        """Put into a call what its heads put out among all keys, some tokens at a time."""
        heads = call.q.shape[1]
        numbers = len(call.q) * heads * (self.at.numel() + len(self.around))
        step = max(_ROOM.get(call.q.device.type, _MORE_ROOM) // numbers, 1)
        steps = torch.arange(self.at.shape[1]).expand_as(self.at)
        outputs = [
            _output(self.part(call, which))[0].unflatten(0, which.shape)
            for which in steps.split(step, dim=1)
        ]
        call.output = torch.cat(outputs, dim=1)


ChangedPrompts = WholePrompts | TokensAlone


def _output(call: Call) -> Float[Tensor, "b s h e"]:
    """What heads put out, by torch's own kernel where it knows all that the call asks for."""
    if call.softcap is None and call.sinks is None and call.k.shape[1] == call.v.shape[1]:
        assert call.mask is not None
        given = call.q, call.k, call.v, call.mask.to(call.q)
        output = scaled_dot_product_attention(*given, scale=call.scale, enable_gqa=True)
        return output.transpose(1, 2)
    return call.attend([*range(call.q.shape[1])])


# ---------------------------------------------------------------- whether the short way is right


class Ways:
    """What was found of a model: by kind of question, whether tokens may run alone."""

    def __init__(self, scope: Scope) -> None:
        self.lengths = named_lengths(scope.model.config)
        self.alone = dict[str, bool]()

    def kind(self, length: int, end: int) -> str:
        """What a question is like, as far as it may decide whether tokens run alone.

        Parameters
        ----------
        length : of the prompt.
        end : place of the token that is read last.
        """
        words = ["last" if end == length - 1 else "before the last"]
        for name, limit in sorted(self.lengths.items()):
            doublings = ((length - 1) // limit).bit_length()
            if doublings:
                words.append(f"{name} {doublings} {(end // limit).bit_length()}")
        return ", ".join(words)


_WAYS: WeakKeyDictionary[Scope, Ways] = WeakKeyDictionary()


def ways_of(scope: Scope) -> Ways:
    """What was found of a model so far."""
    if scope not in _WAYS:
        _WAYS[scope] = Ways(scope)
    return _WAYS[scope]


@torch.no_grad()
def runs_alone(scope: Scope, ids: Int[Tensor, " t"], calls: Mapping[int, Call], end: int) -> bool:
    """Whether tokens of a prompt may run alone up to a token that is read there.

    One changed prompt is run in both ways and compared, once for each kind of question: read at the
    prompt's last token or before it, and how far it is beyond each length that the config names.

    Parameters
    ----------
    scope : the model.
    ids : the prompt.
    calls : by layer, its attention calls, up to the last layer that is read.
    end : place of the token that is read last.
    """
    if not scope.facts.takes_positions or scope.is_changed:
        return False
    ways = ways_of(scope)
    kind = ways.kind(len(ids), end)
    later = min(max(end, _TELLING), len(ids) - 2)
    if end < later and ways.kind(len(ids), later) == kind:
        end = later
    deepest = max(calls)
    if deepest < last_layer(scope) and kind not in ways.alone:
        kind = f"{kind}, up to layer {deepest}"
    if kind not in ways.alone:
        ways.alone[kind] = agree(scope, ids, calls, [end])[0]
    return ways.alone[kind]


def last_layer(scope: Scope) -> int:
    """The last layer of a model that has heads."""
    return max(scope.facts.layer_of.values())


class _Layer(NamedTuple):
    """What one run shows of a layer: queries and mask of tokens that run, attention of the last."""

    queries: Float[Tensor, "b s x"]
    mask: Float[Tensor, "b m s t"]
    attention: Float[Tensor, "b h t"]


def agree(
    scope: Scope, ids: Int[Tensor, " t"], calls: Mapping[int, Call], ends: Sequence[int]
) -> list[bool]:
    """Whether changed prompts have the same queries, masks, attention and logits in both ways.

    Parameters
    ----------
    scope : the model.
    ids : the unchanged prompt.
    calls : by layer, its attention calls, up to the last layer that is compared.
    ends : the last token of each changed prompt that is read; the tokens before it are other ones.
    """
    width = max(min(_CHANGED, *ends), 1)
    last = torch.tensor(ends, device=ids.device)
    at = last[:, None] - torch.arange(width - 1, -1, -1, device=ids.device)
    (other,) = short_ids(scope.model, (width,))
    tokens = other.to(ids).expand_as(at)
    changed = ids.repeat(len(ends), 1).scatter(1, at, tokens)
    every = torch.arange(len(ids), device=ids.device).expand_as(changed)
    whole = WholePrompts(prompt_of(scope, changed), every, last)
    layers, logits = _shown(scope, whole, at, calls)
    alone = TokensAlone.of(scope, calls, tokens, at)
    steps = torch.arange(width, device=ids.device).expand_as(at)
    try:
        others, other_logits = _shown(scope, alone, steps, calls)
    except Exception:  # code that wants every token before may fail in any way without them
        return [False] * len(ends)
    tolerance = max(_AGREES, 8 * torch.finfo(scope.model.dtype).eps)
    alike = torch.ones(len(ends), dtype=torch.bool)
    for layer, shown in layers.items():
        alike &= _alike(shown, others[layer], tolerance)
    if logits is not None and other_logits is not None:
        moved = (logits - other_logits).abs().amax(1)
        alike &= (moved <= tolerance * logits.abs().amax(1)).cpu()
    return alike.tolist()


def _shown(
    scope: Scope, prompts: ChangedPrompts, which: Int[Tensor, "b s"], calls: Mapping[int, Call]
) -> tuple[dict[int, _Layer], Float[Tensor, "b v"] | None]:
    """Run changed prompts up to the last layer of some calls, and show some of their tokens.

    Next-token logits come with it where that is the last layer of the model.
    """
    layers = dict[int, _Layer]()
    deepest = max(calls)
    is_last = deepest == last_layer(scope)

    def visit(call: Call) -> None:
        layers[call.layer] = _layer(prompts, call, which)
        prompts.attend(call)
        if call.layer == deepest and not is_last:
            raise Stop

    row = torch.arange(len(which), device=which.device)
    nothing = which[:, :0]
    read = Places(row, prompts.ends, nothing, nothing.bool())
    logits = scope.watch(prompts.inputs, visit, logits_at=read if is_last else None)
    return layers, logits


def _layer(prompts: ChangedPrompts, call: Call, which: Int[Tensor, "b s"]) -> _Layer:
    """What a run shows of a layer, keys by their places in the prompt."""
    part = prompts.part(call, which)
    assert part.mask is not None
    queries = prompts.by_prompt(part.q, which).transpose(1, 2).flatten(2).float()
    mask = prompts.by_prompt(part.mask, which)
    last = prompts.part(call, which[:, -1:])
    weights = last.attention([*range(last.q.shape[1])])
    attention = prompts.by_prompt(weights, which[:, -1:])[:, :, 0]
    order = prompts.order.to(mask.device)[:, None]
    return _Layer(
        queries,
        mask.gather(-1, order[:, None].expand(*mask.shape[:3], -1)),
        attention.gather(-1, order.expand(*attention.shape[:2], -1)),
    )


def _alike(whole: _Layer, alone: _Layer, tolerance: float) -> Bool[Tensor, " b"]:
    """Whether two runs show the same of a layer, by prompt."""
    width = alone.mask.shape[-1]
    mask = whole.mask[..., :width]
    seen_later = (whole.mask[..., width:] > -torch.inf).flatten(1).any(1)
    seen_otherwise = ((mask == -torch.inf) != (alone.mask == -torch.inf)).flatten(1).any(1)
    alike = ~(seen_later | seen_otherwise)
    bias = (mask - alone.mask).nan_to_num()  # −∞ less −∞ where both hide a key
    moved = whole.attention[..., :width] - alone.attention
    apart = (whole.queries - alone.queries).norm(dim=-1) / whole.queries.norm(dim=-1)
    for error in (bias, moved, apart):
        alike &= error.abs().flatten(1).amax(1) <= tolerance
    return alike.cpu()
