"""What if: a writer ablated, a key hidden, a token replaced, and how each acts on a run.

An ablated writer puts out, at token t, its mean over the prompt's other tokens, the first left out:
``z̃_t = Σ_{s ≠ t, s > 0} z_s / n``; every later layer follows. A hidden key is one that a head may
not look at (attention knockout): its logit is −∞. A replaced token is another one in the text, so
that positions do not move. A head that follows a rule has the rule's pattern in place of its own:
``ℓ = log a`` for every key, whatever its queries and keys are.

Changes belong to the thread that opened their block. Equal changes are one: a mean of means is
another number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkscope.changes import Pattern
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.model.tap import Call, cleared

TokenName = int | str
"""A token of a prompt: its place, from the end where negative, or its text, as in ``"to#2"``."""
FindColumn = Callable[[Int[Tensor, " t"], Bool[Tensor, " t"], TokenName], int]
"""The column of a token in a padded row, from the row's ids, its mask and the token's place."""

_NOTHING = 1e-12  # attention on a key that a rule gives none: the head still sees it
_ABOVE_SINK = 40.0  # in logits: so far above an attention sink a row has all of its attention
_ALIKE = 0.75  # of two prompts' tokens: one is the other with some words replaced


class Ablation(NamedTuple):
    """A head, or the module that writes besides the heads of its layer, set to its mean."""

    writer: Head | nn.Module


class Knockout(NamedTuple):
    """A key that a head may not look at, from one query or (None) from any."""

    head: Head
    key: TokenName
    query: TokenName | None


class Replacement(NamedTuple):
    """A token put in the place of another one: a text of one token, or its id."""

    place: TokenName
    text: str | int


BlockChange = Ablation | Knockout | Replacement | Pattern
C = TypeVar("C", Ablation, Knockout, Replacement, Pattern)


class _Open(threading.local):
    """Models that blocks of this thread change now, each with the changes of its scope."""

    def __init__(self) -> None:
        self.blocks: list[tuple[nn.Module, Changes]] = []


_OPEN = _Open()


@contextmanager
def one_scope_changes(model: nn.Module, changes: Changes) -> Iterator[None]:
    """Refuse a block inside one of another scope of this model: of the two only one would hold."""
    if any(other is model and own is not changes for other, own in _OPEN.blocks):
        raise BadInput(
            "another scope of this model has a block open here, and only one of the two would hold:"
            " open both blocks with one scope."
        )
    blocks = _OPEN.blocks  # this thread's, even if another one closes the block
    entry = (model, changes)
    blocks.append(entry)
    try:
        yield
    finally:
        blocks.remove(entry)


class Changes(threading.local):
    """The changes in force in this thread, outermost block first."""

    def __init__(self) -> None:
        self.open: list[BlockChange] = []
        # where tokens named by text stood, by name and the prompt's length: its ids, the place
        self.places: dict[tuple[TokenName, int], tuple[list[int], int]] = {}
        # the prompt whose changed versions run, and where its named tokens stand
        self.base: list[int] | None = None
        self.in_base: dict[TokenName, int] = {}

    def of(self, kind: type[C]) -> list[C]:
        """The changes of one kind, of equal ones the last."""
        chosen = [change for change in self.open if isinstance(change, kind)]
        return list(dict.fromkeys(reversed(chosen)))[::-1]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave all changes of this thread out for the duration of a ``with`` block."""
        opened = self.open
        self.open = []
        try:
            yield
        finally:
            self.open = opened

    @contextmanager
    def rerunning(self, base: list[int]) -> Iterator[None]:
        """Run changed versions of one prompt, as long as it: a named token is the one that stands
        there in the unchanged prompt, whatever the words are now.
        """
        before = self.base, self.in_base
        self.base = base
        self.in_base = {}
        try:
            yield
        finally:
            self.base, self.in_base = before

    @contextmanager
    def block(self, added: Sequence[BlockChange]) -> Iterator[None]:
        """Put changes in force for the duration of a ``with`` block."""
        opened = self.open  # this thread's, even if another one closes the block
        opened.extend(added)
        try:
            yield
        finally:
            for change in added:  # this block's, whatever was opened meanwhile
                del opened[next(i for i, other in enumerate(opened) if other is change)]


@dataclass(eq=False)
class AppliedChanges:
    """The changes of this thread as they act on forwards: hooks on MLPs, and a visitor of the tap.

    Attributes
    ----------
    changes : what is in force; it is asked anew for each forward.
    column : finds the column of a token.
    ids, mask : of the batch that runs, [b, t].
    known : by row and place, the tokens of the prompt and where the token stood among them.
    """

    changes: Changes
    column: FindColumn
    ids: Int[Tensor, "b t"] | None = None
    mask: Bool[Tensor, "b t"] | None = None
    known: dict[tuple[int, TokenName], tuple[list[int], int]] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the ids and the mask that a forward is given, and hook the MLPs it ablates."""
        ablations = self.changes.of(Ablation)
        knockouts = self.changes.of(Knockout)
        if not ablations and not knockouts and not self.changes.of(Pattern):
            return
        self.ids = _given_ids(args, kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2:
            self.mask = mask.bool()
        else:
            self.mask = torch.ones_like(self.ids).bool()
        cache = kwargs.get("past_key_values")
        if self.mask.shape != self.ids.shape or (cache is not None and cache.get_seq_length()):
            raise BadInput(
                "a change holds in whole prompts: run the model without a key-value cache "
                "(use_cache=False)."
            )
        for ablation in ablations:
            if isinstance(ablation.writer, nn.Module):
                hook = ablation.writer.register_forward_hook(self._ablate_module, prepend=True)
                self.hooks.append(hook)

    def end(self, _completed: bool = True) -> None:
        """Take the hooks of a forward away."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def visit(self, call: Call) -> None:
        """Let heads of a layer follow rules, ablate them, and hide keys from them."""
        for pattern in self.changes.of(Pattern):
            if pattern.head.layer == call.layer:
                self._follow(call, pattern)
        for ablation in self.changes.of(Ablation):
            if isinstance(ablation.writer, Head) and ablation.writer.layer == call.layer:
                call.outputs[ablation.writer.index] = self._mean_of_others
        for knockout in self.changes.of(Knockout):
            if knockout.head.layer == call.layer:
                self._hide(call, knockout)

    def _ablate_module(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if threading.get_ident() != self.thread:
            return output
        if isinstance(output, tuple):
            return (self._mean_of_others(output[0]), *output[1:])
        return self._mean_of_others(output)

    def _mean_of_others(self, z: Float[Tensor, "b t e"]) -> Float[Tensor, "b t e"]:
        assert self.mask is not None
        return mean_of_others(z, self.mask)

    def _follow(self, call: Call, pattern: Pattern) -> None:
        """Write into a head's mask what its logits lack of a rule's, sequence by sequence."""
        assert self.ids is not None
        assert self.mask is not None
        head = pattern.head
        products = call.products(head.index)
        mask = call.own_mask(head.index)
        above = 0.0
        if call.sinks is not None:
            above = float(call.sinks[head.index]) + _ABOVE_SINK
        for row in range(len(mask)):
            columns = self.mask[row].nonzero()[:, 0]
            says = pattern.rule.attention(self.ids[row, columns].to(mask.device))
            if says.shape != (len(columns), len(columns)) or bool(says.triu(1).any()):
                raise BadInput(
                    f"the rule for {head} is to give each token attention on itself and what "
                    f"stands before it, a pattern of {len(columns)} by {len(columns)}."
                )
            columns = columns.to(mask.device)
            logits = says.to(mask).clamp_min(_NOTHING).log() + above
            lacking = logits - products[row][columns][:, columns]
            later = torch.ones_like(lacking).triu(1).bool()
            mask[row, columns[:, None], columns] = lacking.masked_fill(later, -torch.inf)

    def _hide(self, call: Call, knockout: Knockout) -> None:
        """Write −∞ into a head's mask, sequence by sequence."""
        head, key, query = knockout
        mask = call.own_mask(head.index)
        for row in range(len(mask)):
            column = self._column(row, key)
            if query is None:
                mask[row, :, column] = -torch.inf
                continue
            at = self._column(row, query)
            if column > at and mask[row, at, column] == -torch.inf:
                raise BadInput(
                    f"{head} cannot see token {key} from token {query}, which stands before it."
                )
            mask[row, at, column] = -torch.inf

    def _column(self, row: int, place: TokenName) -> int:
        """The column of a token; in a text that grows, the one that it was at first."""
        assert self.ids is not None
        assert self.mask is not None
        ids = self.ids[row]
        mask = self.mask[row]
        tokens = ids[mask].tolist()
        first = int(mask.int().argmax())
        base = self.changes.base
        if base is not None and len(base) == len(tokens):
            return first + self._column_in_base(base, place)
        before, at = self.known.get((row, place), (None, 0))
        if before is not None and tokens[: len(before)] == before:
            return at + first
        stood = self.changes.places
        try:
            at = self.column(ids, mask, place) - first
            stood[place, len(tokens)] = tokens, at
        except BadInput:
            # the same prompt with other words in it, as `why` asks: the token stands where it stood
            other, at = stood.get((place, len(tokens)), ([], 0))
            same = sum(a == b for a, b in zip(tokens, other, strict=False))
            if same < _ALIKE * len(tokens):
                raise
        self.known[row, place] = tokens, at
        return at + first

    def _column_in_base(self, base: list[int], place: TokenName) -> int:
        """Where a token stands in the prompt whose changed versions run."""
        known = self.changes.in_base
        if place not in known:
            ids = torch.tensor(base)
            known[place] = self.column(ids, torch.ones_like(ids).bool(), place)
        return known[place]


def mean_of_others(z: Float[Tensor, "b t e"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t e"]:
    """The mean over the other tokens of a prompt, the first left out; z where there are none."""
    mask = mask.to(z.device)
    flat = z.reshape(*mask.shape, -1)
    counted = mask & (mask.cumsum(1) > 1)  # the first token left out
    weight = counted[..., None].to(flat)
    others = weight.sum(1, keepdim=True) - weight
    total = (flat * weight).sum(1, keepdim=True)
    mean = (total - flat * weight) / others.clamp_min(1)
    return torch.where(others > 0, mean, flat).reshape(z.shape)


def _given_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Int[Tensor, "b t"]:
    """The ids that a forward is given; one without ids is refused."""
    ids = kwargs.get("input_ids")
    if ids is None and args:
        ids = args[0]
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        raise BadInput("a change names tokens of a prompt: give the model input_ids.")
    return ids


@contextmanager
def around_forward(
    modules: Sequence[nn.Module],
    begin: Callable[[tuple[Any, ...], dict[str, Any]], None],
    end: Callable[[bool], None],
) -> Iterator[None]:
    """Call `begin` before a forward of this thread and `end` after it, for a ``with`` block.

    `end` is told whether the forward came to its end. A model with an LM head may call its body,
    or a part of the body alone (OPT, Bart): `modules` are those that may be given the ids, and the
    outermost one that runs is the forward.
    """
    thread = threading.get_ident()
    running = list[nn.Module]()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != thread:
            return
        running.append(module)
        if len(running) == 1:
            begin(args, kwargs)

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        if threading.get_ident() != thread or running[-1:] != [module]:
            return
        running.pop()
        if not running:
            end(output is not None)

    hooks = list[Any]()
    for module in dict.fromkeys(modules):
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with cleared(hooks):
            yield
    finally:
        if running:  # what ended the forward was no Exception, so that `leave` was not called
            end(False)
