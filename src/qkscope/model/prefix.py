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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
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
_AGREES = 1e-3  # of a vector's length, of attention, of the largest logit; or 4 ε of the dtype
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

    def part(self, call: Call, which: Int[Tensor, "b u"]) -> Call:
        """An attention call with the queries of some tokens of each prompt alone: b rows, u queries."""
        which = which.to(call.q.device)
        rows = torch.arange(len(which), device=which.device)[:, None]
        mask = call.mask_rows(rows.expand_as(which).flatten(), which.flatten())
        mask = mask.unflatten(0, which.shape).transpose(1, 2)
        q = call.q[rows, :, which].transpose(1, 2)
        return replace(call, q=q, mask=mask, causal=False)

    def logits(self, part: Call, which: Int[Tensor, "b u"]) -> Float[Tensor, "b h u k"]:
        """What the softmax of every head is given in a part of a call."""
        return part.logits([*range(part.q.shape[1])])

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

    def logits(self, part: Call, which: Int[Tensor, "b u"]) -> Float[Tensor, "b h u k"]:
        """What the softmax of every head is given in a part of a call."""
        logits = part.logits([*range(part.q.shape[1])])[0]
        return logits.unflatten(1, which.shape).transpose(0, 1)

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
    if deepest < max(scope.facts.layer_of.values()) and kind not in ways.alone:
        kind = f"{kind}, up to layer {deepest}"
    if kind not in ways.alone:
        ways.alone[kind] = _agree(scope, ids, calls, end)
    return ways.alone[kind]


class _Seen(NamedTuple):
    """What one run shows of a layer: queries and mask of the tokens that run, attention of the last."""

    queries: Float[Tensor, "s x"]
    mask: Float[Tensor, "m s t"]
    attention: Float[Tensor, "h t"]


def _agree(scope: Scope, ids: Tensor, calls: Mapping[int, Call], end: int) -> bool:
    """Whether a changed prompt has the same queries, masks, attention and logits in both ways."""
    start = min(max(end + 1 - _CHANGED, 1), end)
    at = torch.arange(start, end + 1, device=ids.device)
    changed = ids.clone()
    (other,) = short_ids(scope.model, (len(at),))
    changed[at] = other.to(ids)
    every = torch.arange(len(ids), device=ids.device)[None]
    whole = WholePrompts(prompt_of(scope, changed[None]), every, at[-1:])
    seen, logits = _shown(scope, whole, at[None], calls)
    alone = TokensAlone.of(scope, calls, changed[at][None], at[None])
    try:
        seen_alone, logits_alone = _shown(scope, alone, at[None] - start, calls)
    except Exception:  # code that wants every token before may fail in any way without them
        return False
    tolerance = max(_AGREES, 4 * torch.finfo(scope.model.dtype).eps)
    if logits is not None:
        apart = (logits - logits_alone).abs().max() / logits.abs().max()
        if not apart <= tolerance:  # nor where it is no number
            return False
    return all(_alike(seen[layer], seen_alone[layer], tolerance) for layer in seen)


def _shown(
    scope: Scope, prompts: ChangedPrompts, which: Tensor, calls: Mapping[int, Call]
) -> tuple[dict[int, _Seen], Tensor | None]:
    """Run a changed prompt up to the last layer of some calls; to its logits, if that is the last."""
    seen = dict[int, _Seen]()
    deepest = max(calls)
    whole = deepest == max(scope.facts.layer_of.values())

    def visit(call: Call) -> None:
        seen[call.layer] = _seen(prompts, call, which)
        prompts.attend(call)
        if call.layer == deepest and not whole:
            raise Stop

    first = prompts.ends.new_zeros(1)
    nothing = prompts.at[:, :0]
    read = Places(first, prompts.ends, nothing, nothing.bool())
    logits = scope.watch(prompts.inputs, visit, logits_at=read if whole else None)
    return seen, logits


def _seen(prompts: ChangedPrompts, call: Call, which: Int[Tensor, "1 s"]) -> _Seen:
    """What a run shows of a layer, keys by their places in the prompt."""
    order = prompts.columns.to(call.q.device).argsort()
    part = prompts.part(call, which)
    last = prompts.part(call, which[:, -1:])
    queries = part.q[0].transpose(0, 1).flatten(1).float()
    assert part.mask is not None
    attention = last.attention([*range(last.q.shape[1])])[0, :, 0]
    return _Seen(queries, part.mask[0][..., order], attention[..., order])


def _alike(whole: _Seen, alone: _Seen, tolerance: float) -> bool:
    """Whether two runs show the same of a layer."""
    width = min(whole.mask.shape[-1], alone.mask.shape[-1])
    if bool((whole.mask[..., width:] > -torch.inf).any()):  # sees tokens behind the query
        return False
    mask = whole.mask[..., :width]
    other = alone.mask[..., :width]
    if not torch.equal(mask == -torch.inf, other == -torch.inf):
        return False
    biases = (mask - other).nan_to_num()  # −∞ less −∞ where both hide a key
    away = (whole.queries - alone.queries).norm(dim=-1) / whole.queries.norm(dim=-1)
    moved = whole.attention[..., :width] - alone.attention[..., :width]
    return all(float(x.abs().max()) <= tolerance for x in (biases, away, moved))
