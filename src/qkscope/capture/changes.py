"""What if: a writer ablated, a key hidden, a token replaced, for every run of a scope inside a ``with`` block.

An ablated writer puts out, at each token, its mean over the prompt's other tokens, the first one left out; every later
layer follows. A hidden key is one that a head may not look at (attention knockout). A replaced token is another one in
the text, so that positions do not move. They hold in whatever runs inside the block: `why`, `attention`, `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkscope.capture.blocks import read_blocks
from qkscope.capture.pick import Shape
from qkscope.capture.tap import Call, cleared
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.kinds import checked_class


class Hidden(NamedTuple):
    """A key that a head may not look at, from one token or from any."""

    head: Head
    key: int | str
    query: int | str | None


@checked_class
class Changeable(Shape):
    """A model that can be changed for the duration of a ``with`` block."""

    tokenizer: Any
    model: Any

    def __init__(self) -> None:
        self._ablated: list[Head | nn.Module] = []
        self._hidden: list[Hidden] = []
        self._replaced: list[tuple[int | str, str | int]] = []

    # ------------------------------------------------------------------ what a reader says

    @contextmanager
    def ablate(self, *writers: str | Head) -> Iterator[None]:
        """Ablate heads and MLPs: each puts out its mean over the prompt's other tokens, the first one left out.

        A token that no other is left for (the second of two) stays as it is.

        Parameters
        ----------
        *writers : like ``L17H8`` (a head) or ``M9`` (the MLP of layer 9).

        Examples
        --------
        >>> from qkscope import Scope
        >>> scope = Scope.load("nano:mixed")
        >>> with scope.ablate("L0H2", "M1"):
        ...     changed = scope.attention("hat: O jam: Z jam:", "L1H0")
        >>> torch.equal(changed, scope.attention("hat: O jam: Z jam:", "L1H0"))
        False
        """
        with _pushed(self._ablated, [self._writer(writer) for writer in writers]):
            yield

    @contextmanager
    def hide(self, head: str | Head, key: int | str, query: int | str | None = None) -> Iterator[None]:
        """Hide a key from a head: its attention there is 0, and the other keys share the row, where there are any.

        Parameters
        ----------
        head : that may not look.
        key : the token, by place (from the end where negative) or by text; ``"to#2"`` is the second one.
        query : the token from which it may not look; any, if not given.

        Examples
        --------
        >>> from qkscope import Scope
        >>> scope = Scope.load("nano:mixed")
        >>> with scope.hide("L1H0", key="Z"):
        ...     float(scope.attention("hat: O jam: Z jam:", "L1H0")[-1, 6])
        0.0
        """
        with _pushed(self._hidden, [Hidden(self.check(head), key, query)]):
            yield

    @contextmanager
    def replace(self, place: int | str, text: str | int) -> Iterator[None]:
        """Put another token in the place of one, in every prompt that is encoded inside the block.

        Parameters
        ----------
        place : the token, by place or by text.
        text : the other one: a text of one token, or its id.

        Examples
        --------
        >>> from qkscope import Scope
        >>> scope = Scope.load("nano:mixed")
        >>> with scope.replace(4, "cat"):
        ...     scope.tokenizer.decode(scope.encode(["hat: O jam: Z jam:"]).inputs["input_ids"][0])
        '<s> hat: O cat: Z jam:'
        """
        with _pushed(self._replaced, [(place, text)]):
            yield

    # ------------------------------------------------------------------ what it comes to

    @property
    def is_changed(self) -> bool:
        """Whether writers are ablated or keys hidden now."""
        return bool(self._ablated or self._hidden)

    def _writer(self, writer: str | Head) -> Head | nn.Module:
        if isinstance(writer, Head) or writer.startswith("L"):
            return self.check(writer)
        layer = writer[1:]
        if not writer.startswith("M") or not layer.isdigit() or int(layer) >= len(self.facts.layers):
            last = len(self.facts.layers) - 1
            raise BadInput(f"{writer!r} is no head and no MLP of this model: write L17H8, or M0 to M{last}.")
        parts = read_blocks(self.model, self.facts.layer_of)[int(layer)].parts
        if len(parts) != 1:
            raise BadInput(f"layer {layer} has {len(parts)} parts besides its heads, so {writer} names none of them.")
        return parts[0]

    def replaced(self, ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        """Ids with the tokens put in that were replaced."""
        if not self._replaced:
            return ids
        ids = ids.clone()
        for place, text in self._replaced:
            new = text if isinstance(text, int) else self._one_token(text)
            for row in range(len(ids)):
                ids[row, self.column(ids[row], mask[row].bool(), place)] = new
        return ids

    def _one_token(self, text: str) -> int:
        found = [] if self.tokenizer is None else self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(found) != 1:
            raise BadInput(f"{text!r} is {len(found)} tokens here, and one is replaced by one: take another word.")
        return int(found[0])

    def column(self, ids: Int[Tensor, " t"], mask: Bool[Tensor, " t"], place: int | str) -> int:
        """The column of a token in a padded row, named by its place or by its text."""
        columns = mask.nonzero()[:, 0].tolist()
        if isinstance(place, int):
            if not -len(columns) <= place < len(columns):
                raise BadInput(f"token {place} is not there: the prompt has {len(columns)}, 0 to {len(columns) - 1}.")
            return columns[place]
        text, _, number = place.rpartition("#")
        text, number = (text, number) if text and number.isdigit() else (place, "")
        read = {} if self.tokenizer is None else {c: self.tokenizer.decode([int(ids[c])]) for c in columns}
        exact = [c for c, token in read.items() if token == text]
        there = exact or [c for c, token in read.items() if token.strip() == text]
        if not there or (number and not 0 < int(number) <= len(there)):
            raise BadInput(f"{place!r} is no token of the prompt: name one as it reads, or its place.")
        if len(there) > 1 and not number:
            raise BadInput(
                f"{text!r} stands {len(there)} times in the prompt: write '{text}#1' to '{text}#{len(there)}'."
            )
        return there[int(number or 1) - 1]

    @contextmanager
    def changed(self) -> Iterator[list[Callable[[Call], None]]]:
        """What is in force, as visitors of the tap; MLPs are changed by hooks on them."""
        if not self.is_changed:
            yield []
            return
        seen: dict[str, Any] = {}

        def note(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
            mask = kwargs.get("attention_mask")
            seen["ids"] = ids
            seen["mask"] = mask.bool() if mask is not None and mask.ndim == 2 else torch.ones_like(ids).bool()

        def means(z: Float[Tensor, "b t e"]) -> Float[Tensor, "b t e"]:
            mask = seen["mask"].to(z.device)
            flat = z.reshape(*mask.shape, -1)
            shown = mask & (mask.cumsum(1) > 1)  # the first token left out
            weight = shown[..., None].to(flat)
            others = weight.sum(1, keepdim=True) - weight
            mean = ((flat * weight).sum(1, keepdim=True) - flat * weight) / others.clamp_min(1)
            return torch.where(others > 0, mean, flat).reshape(z.shape)

        def visit(call: Call) -> None:
            for head in self._ablated:
                if isinstance(head, Head) and head.layer == call.layer:
                    call.outputs[head.index] = means
            for head, key, query in self._hidden:
                if head.layer == call.layer:
                    self._hide(call, head, key, query, seen)

        def ablated(_module: nn.Module, _args: Any, out: Any) -> Any:
            return (means(out[0]), *out[1:]) if isinstance(out, tuple) else means(out)

        parts = [part for part in self._ablated if isinstance(part, nn.Module)]
        hooks = [self.model.base_model.register_forward_pre_hook(note, with_kwargs=True)]
        hooks += [
            part.register_forward_hook(ablated, prepend=True) for part in parts
        ]  # before whoever notes its output
        with cleared(hooks):
            yield [visit]

    def _known(self, seen: dict[str, Any], row: int, place: int | str) -> int:
        """The column of a token; in a text that grows, the one that it was at first."""
        ids, mask = seen["ids"][row], seen["mask"][row]
        tokens, known = ids[mask].tolist(), seen.setdefault("known", {})
        before, at = known.get((row, place), (None, 0))
        if before is None or tokens[: len(before)] != before:
            at = self.column(ids, mask, place) - int(mask.int().argmax())
            known[row, place] = tokens, at
        return at + int(mask.int().argmax())

    def _hide(self, call: Call, head: Head, key: int | str, query: int | str | None, seen: dict[str, Any]) -> None:
        batch, _, queries, _ = call.q.shape
        shape = batch, queries, call.k.shape[2]
        logits = call.set_logits.setdefault(head.index, torch.full(shape, torch.nan, device=call.q.device))
        for row in range(batch):
            rows = slice(None) if query is None else self._known(seen, row, query)
            column = self._known(seen, row, key)
            if query is not None and column > rows and call.causal:  # type: ignore[operator]
                raise BadInput(f"{head} cannot see token {key} from token {query}, which stands before it.")
            logits[row, rows, column] = -torch.inf
        call.redo.add(head.index)


@contextmanager
def _pushed(stack: list[Any], more: list[Any]) -> Iterator[None]:
    stack.extend(more)
    try:
        yield
    finally:
        for one in more:  # its own, whatever was put on it meanwhile
            del stack[next(i for i, other in enumerate(stack) if other is one)]
