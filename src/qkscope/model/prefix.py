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
from torch.nn.functional import pad, scaled_dot_product_attention

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

    def cell(self, prompt: int, which: int) -> tuple[int, int]:
        """The row and column of the inputs in which a token of a prompt runs."""
        return prompt, which

    @property
    def slots(self) -> Int[Tensor, "b t"]:
        """The number of each token among all that run."""
        return torch.arange(self.at.numel(), device=self.at.device).view(self.at.shape)

    def read_at(self, everywhere: bool = False) -> Places:
        """Where in the inputs the last token of each prompt is, or every token."""
        row = torch.arange(len(self.at), device=self.at.device)
        query = self.ends
        if everywhere:
            row = row.repeat_interleave(self.at.shape[1])
            query = self.at.flatten()
        nothing = row[:, None][:, :0]
        return Places(row, query, nothing, nothing.bool())

    def attend(self, call: Call) -> None:
        """Leave the call as it is: the model attends itself."""


@dataclass(frozen=True)
class TokensAlone:
    """Tokens of changed prompts that run without the others.

    What a token is depends on what precedes it alone, so that a token that several prompts share
    with all that runs before it runs once. Tokens stand in a grid of slots that is full, wherever
    they stand in their prompts: attention does not depend on the order of keys.

    Attributes
    ----------
    inputs : of the model: the grid.
    at : by prompt, places of the tokens that run, in order; −1 in front where a prompt has fewer.
    slots : by prompt, where in the grid these tokens are.
    ends : by prompt, which of the tokens that run is read last.
    places : by slot, the place of its token.
    keys : by slot, the key of `part` that stands at each place of its prompt.
    around : places of tokens that do not run in all prompts.
    calls : by layer, the attention calls of the unchanged prompt.
    """

    inputs: dict[str, Tensor]
    at: Int[Tensor, "b s"]
    slots: Int[Tensor, "b s"]
    ends: Int[Tensor, " b"]
    places: Int[Tensor, " n"]
    keys: Int[Tensor, "n t"]
    around: Int[Tensor, " r"]
    calls: Mapping[int, Call]

    @classmethod
    def of(
        cls,
        scope: Scope,
        calls: Mapping[int, Call],
        tokens: Int[Tensor, "b s"],
        at: Int[Tensor, "b s"],
        apart: Int[Tensor, " b"] | None = None,
    ) -> TokensAlone:
        """Some tokens at their places, of prompts that are as in these calls elsewhere.

        Parameters
        ----------
        scope : the model.
        calls : by layer, attention calls of the unchanged prompt.
        tokens : ids, by prompt.
        at : their places, in order; −1 in front where a prompt has fewer.
        apart : by prompt, the place from which on its tokens are no other prompt's, whatever they
            are.
        """
        length = next(iter(calls.values())).k.shape[2]
        nodes = _Nodes.of(tokens, at, apart)
        grid = _grid(scope, nodes, length)
        is_filled = grid.flatten() >= 0
        slot_of = torch.empty(len(nodes.places), dtype=torch.long)
        slot_of[grid.flatten()[is_filled]] = is_filled.nonzero()[:, 0]
        filled = grid.clamp_min(0)  # an empty slot runs any token, which nobody reads
        places = torch.tensor(nodes.places)[filled].to(at)
        inputs = {
            "input_ids": torch.tensor(nodes.tokens)[filled].to(tokens),
            "position_ids": places + scope.facts.first_position,
        }
        runs_in = torch.bincount(at[at >= 0].cpu(), minlength=length)
        around = (runs_in[: int(at.max())] < len(at)).nonzero()[:, 0]
        keys = nodes.keys(slot_of, around, grid.numel(), length)[filled.flatten()]
        ends = torch.full_like(at[:, 0], at.shape[1] - 1)
        slots = slot_of[torch.tensor(nodes.of_prompts)].to(at)
        keys = keys.to(at.device)
        around = around.to(at.device)
        return cls(inputs, at, slots, ends, places.flatten(), keys, around, calls)

    @property
    def columns(self) -> Int[Tensor, " k"]:
        """The place in the prompt of each key of `part`: of all slots, then of those around."""
        return torch.cat([self.places, self.around])

    @property
    def order(self) -> Int[Tensor, "b t"]:
        """By prompt, the key of `part` that stands at each place up to the last that runs."""
        return self.keys[self.slots[:, -1], : int(self.at.max()) + 1].long()

    def cell(self, prompt: int, which: int) -> tuple[int, int]:
        """The row and column of the inputs in which a token of a prompt runs."""
        return divmod(int(self.slots[prompt, which]), self.inputs["input_ids"].shape[1])

    def read_at(self, everywhere: bool = False) -> Places:
        """Where in the inputs the last token of each prompt is, or every slot."""
        slots = self.slots.gather(1, self.ends[:, None])[:, 0]
        if everywhere:
            slots = torch.arange(len(self.places), device=slots.device)
        width = self.inputs["input_ids"].shape[1]
        nothing = slots[:, None][:, :0]
        return Places(slots // width, slots % width, nothing, nothing.bool())

    def part(self, call: Call, which: Int[Tensor, "b u"]) -> Call:
        """An attention call with the queries of some tokens alone: one row of b·u queries.

        Keys around are the same for all prompts, so that they are not copied; of the slots each
        query sees those of its own prompt.
        """
        return self._part(call, self.slots.gather(1, which.to(self.slots)).flatten())

    def _part(self, call: Call, slots: Int[Tensor, " m"]) -> Call:
        """An attention call with the queries of some slots alone."""
        old = self.calls[call.layer]
        slots = slots.to(call.q.device)
        around = self.around.to(slots)
        q = call.q.transpose(1, 2).flatten(0, 1)[slots].transpose(0, 1)
        return replace(
            call,
            q=q[None],
            k=_new_and_old(call.k, old.k, around)[None],
            v=_new_and_old(call.v, old.v, around)[None],
            mask=self._mask(old, slots)[None],
            causal=False,
        )

    def _mask(self, old: Call, slots: Int[Tensor, " m"]) -> Float[Tensor, "h m k"]:
        """What the unchanged prompt's mask is at the places of some slots, by key of `part`."""
        until = int(self.at.max()) + 1
        places = self.places.to(slots)[slots]
        keys = self.keys.to(slots.device)[slots, :until].long()
        rows = old.mask_rows(torch.zeros_like(places), places).transpose(0, 1)[..., :until]
        count = len(self.places) + len(self.around)
        hidden = rows.new_full((*rows.shape[:2], count + 1), -torch.inf)
        return hidden.scatter(-1, keys.expand_as(rows), rows)[..., :count]

    def by_prompt(
        self, value: Float[Tensor, "1 h r k"], which: Int[Tensor, "b u"]
    ) -> Float[Tensor, "b h u k"]:
        """Queries, logits or mask of a part of a call, by prompt."""
        return value[0].unflatten(1, which.shape).transpose(0, 1)

    def values(self, part: Call, prompt: int) -> Float[Tensor, "g k e"]:
        """The values that a prompt's queries in a part read."""
        return part.v[0]

    def attend(self, call: Call) -> None:
        """Put into a call what its heads put out among all keys, some slots at a time."""
        heads = call.q.shape[1]
        numbers = heads * (len(self.places) + len(self.around))
        step = max(_ROOM.get(call.q.device.type, _MORE_ROOM) // numbers, 1)
        every = torch.arange(len(self.places), device=call.q.device)
        outputs = [_output(self._part(call, slots))[0] for slots in every.split(step)]
        call.output = torch.cat(outputs).unflatten(0, self.inputs["input_ids"].shape)


def _new_and_old(
    new: Float[Tensor, "r g w d"], old: Float[Tensor, "1 g t d"], around: Int[Tensor, " r"]
) -> Float[Tensor, "g k d"]:
    """Keys or values of all slots, then those around as the unchanged prompt has them."""
    return torch.cat([new.transpose(0, 1).flatten(1, 2), old[0, :, around]], dim=1)


@dataclass(frozen=True)
class _Nodes:
    """Tokens of changed prompts, each once: the nodes of a tree, as a token is all that precedes it.

    Attributes
    ----------
    tokens, places : by node, its id and its place.
    parents : by node, the one that runs before it; −1 where none does.
    of_prompts : by prompt, the nodes of its tokens; where it has fewer, any.
    """

    tokens: list[int]
    places: list[int]
    parents: list[int]
    of_prompts: list[list[int]]

    @classmethod
    def of(
        cls, tokens: Int[Tensor, "b s"], at: Int[Tensor, "b s"], apart: Int[Tensor, " b"] | None
    ) -> _Nodes:
        """Join what prompts share."""
        nodes = cls([], [], [], [])
        known = dict[tuple[int, int, int, int], int]()
        if apart is None:
            apart = torch.full_like(at[:, 0], int(at.max()) + 1)
        rows = zip(tokens.tolist(), at.tolist(), apart.tolist(), strict=True)
        for prompt, (ids, places, own_from) in enumerate(rows):
            own = list[int]()
            parent = -1
            for token, place in zip(ids, places, strict=True):
                if place >= 0:
                    owner = prompt if place >= own_from else -1
                    key = (parent, place, token, owner)
                    if key not in known:
                        known[key] = nodes._add(token, place, parent)
                    parent = known[key]
                own.append(max(parent, 0))
            nodes.of_prompts.append(own)
        return nodes

    def keys(
        self, slot_of: Int[Tensor, " n"], around: Int[Tensor, " r"], slots: int, length: int
    ) -> Int[Tensor, "n t"]:
        """By node, the key that stands at each place of its prompt; behind the last where none does.

        Parameters
        ----------
        slot_of : by node, where it runs, which is the number of its key.
        around : places whose keys stand behind those of all slots.
        slots : how many there are.
        length : of the prompt.
        """
        none = slots + len(around)
        keys = torch.full((len(self.places), length), none, dtype=torch.int32)
        keys[:, around] = torch.arange(slots, none, dtype=keys.dtype)
        for node, parent in enumerate(self.parents):  # one that precedes comes first
            if parent >= 0:
                keys[node] = keys[parent]
            keys[node, self.places[node]] = slot_of[node]
        return keys

    def _add(self, token: int, place: int, parent: int) -> int:
        """Add a node, and give its number."""
        self.tokens.append(token)
        self.places.append(place)
        self.parents.append(parent)
        return len(self.tokens) - 1


def _grid(scope: Scope, nodes: _Nodes, length: int) -> Int[Tensor, "r w"]:
    """The nodes in rows and columns, −1 where none is: no row is longer than the prompt.

    A model whose rotation depends on the length gets one row, which is as long as its last place.
    In several rows the prompts' last tokens stand in the first columns, so that the LM head runs
    there alone.
    """
    count = len(nodes.places)
    rows = 1 if scope.facts.anatomy.by_length else -(-count // length)
    if rows == 1:
        return torch.arange(count)[None]
    lasts = list(dict.fromkeys(own[-1] for own in nodes.of_prompts))
    is_last = set(lasts)
    others = [node for node in range(count) if node not in is_last]
    width = -(-count // rows)
    padded = torch.full((width * rows,), -1)
    padded[:count] = torch.tensor(lasts + others)
    return padded.view(width, rows).T.contiguous()


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
            of_end = (end // limit).bit_length()
            if doublings:
                words.append(f"{name} {doublings} {of_end}")
        return ", ".join(words)

    def is_beyond(self, length: int) -> bool:
        """Whether a prompt is longer than some length that the config names."""
        return any(length > limit for limit in self.lengths.values())


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
    Beyond one, tokens that may run alone are compared for every length of prompts: what a config
    names need not be all that matters there, as the size of blocks times their number is not named.

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
    question = kind
    if ways.is_beyond(len(ids)) and ways.alone.get(kind, True):
        question = f"{kind}, of {len(ids)} tokens"
    if question not in ways.alone:
        ways.alone[question] = agree(scope, ids, calls, [end])[0]
        ways.alone[kind] = ways.alone[question]
    return ways.alone[question]


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
    if len(ends) > 1 and scope.facts.anatomy.by_length:  # each is as long as its own end
        return [agree(scope, ids, calls, [end])[0] for end in ends]
    width = max(min(_CHANGED, *ends), 1)
    last = torch.tensor(ends, device=ids.device)
    back = torch.arange(width - 1, -1, -1, device=ids.device)
    at = last[:, None] - back
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

    read = prompts.read_at() if is_last else None
    logits = scope.watch(prompts.inputs, visit, logits_at=read)
    return layers, logits


def _layer(prompts: ChangedPrompts, call: Call, which: Int[Tensor, "b s"]) -> _Layer:
    """What a run shows of a layer, keys by their places in the prompt."""
    part = prompts.part(call, which)
    assert part.mask is not None
    queries = prompts.by_prompt(part.q, which).transpose(1, 2).flatten(2).float()
    last = prompts.part(call, which[:, -1:])
    every_head = [*range(last.q.shape[1])]
    weights = prompts.by_prompt(last.attention(every_head), which[:, -1:])[:, :, 0]
    # one key more stands for what a prompt that ends before another one does not see
    mask = pad(prompts.by_prompt(part.mask, which), (0, 1), value=-torch.inf)
    attention = pad(weights, (0, 1))
    order = prompts.order.to(mask.device)[:, None]
    of_mask = order[:, None].expand(*mask.shape[:3], -1)
    of_attention = order.expand(*attention.shape[:2], -1)
    return _Layer(queries, mask.gather(-1, of_mask), attention.gather(-1, of_attention))


def _alike(whole: _Layer, alone: _Layer, tolerance: float) -> Bool[Tensor, " b"]:
    """Whether two runs show the same of a layer, by prompt."""
    width = alone.mask.shape[-1]
    mask = whole.mask[..., :width]
    is_seen_later = whole.mask[..., width:] > -torch.inf
    is_seen_otherwise = (mask == -torch.inf) != (alone.mask == -torch.inf)
    alike = ~is_seen_later.flatten(1).any(1)
    alike &= ~is_seen_otherwise.flatten(1).any(1)
    bias = (mask - alone.mask).nan_to_num()  # of keys that both hide, −∞ less −∞
    moved = whole.attention[..., :width] - alone.attention
    apart = (whole.queries - alone.queries).norm(dim=-1)
    apart = apart / whole.queries.norm(dim=-1)
    for error in (bias, moved, apart):
        alike &= error.abs().flatten(1).amax(1) <= tolerance
    return alike.cpu()
