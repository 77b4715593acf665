"""Runs of a model under the tap: watched, patched, continued.

What is changed for a ``with`` block (`what_if`) holds in whatever runs inside it: `why`,
`attention`, `generate`, and calls of ``scope.model`` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkscope import BadInput, Example
from qkscope.changes import Pattern, SaysAttention
from qkscope.checking import Count, checked_class
from qkscope.heads import Head, Writer
from qkscope.hooks import Hook
from qkscope.model.block_tree import read_blocks
from qkscope.model.capture_types import Places, Shape
from qkscope.model.encode import Encoder, Encoding, token_texts
from qkscope.model.greedy import check_prompts, greedy_config
from qkscope.model.inputs import forward, in_scope_run, logits_of, scope_run
from qkscope.model.patch import Edit, Patch
from qkscope.model.spaces import swapped
from qkscope.model.tap import ANEW, Call, Stop, tap
from qkscope.model.what_if import (
    Ablation,
    AppliedChanges,
    BlockChange,
    Changes,
    Knockout,
    Replacement,
    around_forward,
    one_scope_changes,
)


@checked_class
class Runner(Shape):
    """A model that runs under the tap, and can be changed for a ``with`` block.

    `Scope` adds how text goes in.
    """

    tokenizer: Any
    model: Any
    encoder: Encoder
    encode: Callable[..., Encoding]

    def __init__(self) -> None:
        self._changes = Changes()

    # ------------------------------------------------------------------ changed for a block

    def ablate(self, *writers: str | Head) -> AbstractContextManager[None]:
        """Ablate heads and MLPs: each puts out its mean over the prompt's other tokens.

        The first token is left out of the mean. A token that no other is left for (the second of two) stays as it is.

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
        return self._block([Ablation(self._writer(Writer.parse(name))) for name in writers])

    def hide(
        self, head: str | Head, key: int | str, query: int | str | None = None
    ) -> AbstractContextManager[None]:
        """Hide a key from a head (attention knockout): the other keys share the row.

        The attention there is 0, also where no other key is left. Without a query it is hidden from
        every token that follows; `why` hides a key from the query alone that it asks about, which
        is ``hide(head, key, query=-1)`` for the last token.

        Parameters
        ----------
        head : that may not look.
        key : the token, by place (from the end where negative) or by text; ``"to#2"`` is the second
            one. In a prompt that differs from the last one in a few words, a text that is gone
            means the place where it stood.
        query : the token from which it may not look; any, if not given.

        Examples
        --------
        >>> from qkscope import Scope
        >>> scope = Scope.load("nano:mixed")
        >>> with scope.hide("L1H0", key="Z"):
        ...     float(scope.attention("hat: O jam: Z jam:", "L1H0")[-1, 6])
        0.0
        """
        self._changes.places.clear()  # of other blocks, in other prompts
        return self._block([Knockout(self.check(head), key, query)])

    def replace_head(self, head: str | Head, rule: SaysAttention) -> AbstractContextManager[None]:
        """Put a rule in a head's place: it attends as the rule says, from every token.

        What it reads and writes there stays its own. A key hidden from it is hidden from the rule.

        Parameters
        ----------
        head : that follows the rule.
        rule : a `Rule`, as an atlas gives it, or anything whose ``attention(ids)`` gives a pattern.

        Examples
        --------
        >>> from qkscope import Scope
        >>> from qkscope.findings.rules import Offset, Rule
        >>> scope = Scope.load("nano:mixed")
        >>> with scope.replace_head("L1H0", Rule([(1.0, Offset(1))])):
        ...     float(scope.attention("hat: O jam: Z jam:", "L1H0")[-1, -2])
        1.0
        """
        return self._block([Pattern(self.check(head), rule)])

    def replace(self, place: int | str, text: str | int) -> AbstractContextManager[None]:
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
        return self._block([Replacement(place, text)])

    @property
    def is_changed(self) -> bool:
        """Whether writers are ablated, keys hidden or heads replaced now, in this thread."""
        return any(not isinstance(change, Replacement) for change in self._changes.open)

    @contextmanager
    def _block(self, changes: Sequence[BlockChange]) -> Iterator[None]:
        """Put changes in force for a block: in runs of the scope, and in calls of its model itself."""
        applied = AppliedChanges(self._changes, self.column)
        opened = ExitStack()

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if in_scope_run():  # which applies the changes itself
                return
            opened.callback(applied.end)
            opened.enter_context(self._tap(applied=applied))
            applied.begin(args, kwargs)

        def end(completed: bool) -> None:
            with nullcontext() if completed else suppress(BadInput):
                opened.close()  # of a forward that failed, layers may not have been called

        with (
            one_scope_changes(self.model, self._changes),
            self._changes.block(changes),
            around_forward([self.model, self.model.base_model], begin, end),
        ):
            yield

    def _writer(self, writer: Writer) -> Head | nn.Module:
        """A head, or the module that writes besides the heads of its layer."""
        if writer.head is not None:
            return self.check(writer.head)
        parts = list[nn.Module]()
        if writer.kind == "mlp" and writer.layer < self.n_layers:
            parts = read_blocks(self.model, self.facts.layer_of)[writer.layer].parts
        number = writer.index[0] if writer.index else 0
        if number >= len(parts) or (len(parts) > 1 and not writer.index):
            last = f"M{self.n_layers - 1}"
            known = f"write L17H8, or M0 to {last}; M0.1 where a layer has several parts"
            raise BadInput(f"{str(writer)!r} is no head and no MLP of this model: {known}.")
        return parts[number]

    def replaced(self, ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        """Apply the token replacements in force to ids."""
        replacements = self._changes.of(Replacement)
        if not replacements:
            return ids
        ids = ids.clone()
        for place, text in replacements:
            new = self._one_id(text)
            for row in range(len(ids)):
                ids[row, self.column(ids[row], mask[row].bool(), place)] = new
        return ids

    def _one_id(self, text: str | int) -> int:
        """The id of a text of one token; an id is given back."""
        if isinstance(text, int):
            self.encoder.check_id(text)
            return text
        ids = self.encoder.bare_ids(text)
        if len(ids) != 1:
            raise BadInput(
                f"{text!r} is {len(ids)} tokens here, and one is replaced by one: take another word."
            )
        if ids[0] == self.encoder.unknown:
            raise BadInput(
                f"this model has no token for {text!r}: take a word that it was trained on."
            )
        return ids[0]

    def column(self, ids: Int[Tensor, " t"], mask: Bool[Tensor, " t"], place: int | str) -> int:
        """The column of a token in a padded row, named by its place or by its text."""
        columns = mask.nonzero()[:, 0].tolist()
        if isinstance(place, str):
            return self._column_of_text(ids, columns, place)
        if not -len(columns) <= place < len(columns):
            raise BadInput(
                f"token {place} is not there: the prompt has {len(columns)}, 0 to {len(columns) - 1}."
            )
        return columns[place]

    def _column_of_text(self, ids: Int[Tensor, " t"], columns: list[int], name: str) -> int:
        """The column of a token named by its text, with its number (``"to#2"``) where it has one."""
        text, _, number = name.rpartition("#")
        if not text or not number.isdigit():
            text = name
            number = ""
        texts = [] if self.tokenizer is None else token_texts(self, ids[columns].tolist())
        read = list(zip(columns, texts, strict=False))
        there = [column for column, token in read if token == text]
        if not there:  # blanks around a word need not be typed
            there = [column for column, token in read if token.strip() == text]
        if not there or (number and not 0 < int(number) <= len(there)):
            raise BadInput(
                f"{name!r} is no token of the prompt: name one as it reads, or its place."
            )
        if len(there) > 1 and not number:
            many = f"{text!r} stands {len(there)} times in the prompt"
            raise BadInput(f"{many}: write '{text}#1' to '{text}#{len(there)}'.")
        return there[int(number or 1) - 1]

    # ------------------------------------------------------------------ runs

    @torch.no_grad()
    def watch(
        self,
        inputs: dict[str, Tensor],
        *visits: Callable[[Call], None],
        rotary: bool = False,
        logits_at: Places | None = None,
        first: int = 0,
        only: Collection[int] | None = None,
    ) -> Float[Tensor, "b v"] | None:
        """Run one batch under the tap: each visitor sees, and may change, every attention call.

        Parameters
        ----------
        inputs : keyword arguments of the model's forward.
        *visits : callable
            Get each `Call` in turn, before it runs; one that raises `Stop` ends the forward.
        rotary : bool
            Whether to record what the model's rotary function was given (`Call.rotary`).
        logits_at : Places, optional
            Run the whole model, not its body alone, and return next-token logits at these queries.
        first : int
            The first layer that runs, where those before it are made to hand on what they put out
            before.
        only : collection of int, optional
            The layers that are shown; all by default.

        Examples
        --------
        >>> from qkscope import Scope
        >>> scope, shapes = Scope.load("nano:mixed"), []
        >>> scope.watch(scope.encode(["hat: O"]).inputs, lambda call: shapes.append(tuple(call.k.shape)))
        >>> shapes
        [(1, 2, 4, 24), (1, 2, 4, 24), (1, 2, 4, 24)]
        """
        scores = None
        shown = None if self.is_changed else only  # changes are made in any layer
        with self._tap(*visits, rotary=rotary, first=first, only=shown) as called:
            if logits_at is None:
                forward(self.model.base_model, inputs)
            else:
                scores = logits_of(self.model, inputs, logits_at.row, logits_at.query)
        if not called:
            raise BadInput(f"no layer called its attention, as they did when {ANEW}")
        return scores

    @contextmanager
    def _tap(
        self,
        *visits: Callable[[Call], None],
        rotary: bool = False,
        first: int = 0,
        only: Collection[int] | None = None,
        applied: AppliedChanges | None = None,
    ) -> Iterator[list[int]]:
        """Tap this model with the changes in force, or with those that a forward has begun with."""
        facts = self.facts
        shown = facts.layer_of.values() if only is None else only
        layers = {
            module: layer
            for module, layer in facts.layer_of.items()
            if first <= layer and layer in shown
        }
        with ExitStack() as stack:
            stack.enter_context(scope_run())
            if applied is None:
                applied = AppliedChanges(self._changes, self.column)
                modules = [self.model, self.model.base_model]
                stack.enter_context(around_forward(modules, applied.begin, applied.end))
            watching = tap(
                self.model,
                applied.visit,
                *visits,
                layers=layers,
                rotary=rotary,
                anatomy=facts.anatomy,
            )
            yield stack.enter_context(watching)

    @contextmanager
    def patched(self, edits: Sequence[Edit | Hook]) -> Iterator[Any]:
        """Put edits in force for a ``with`` block: call ``scope.model`` inside it as you like.

        It runs in eval mode.

        Parameters
        ----------
        edits : sequence of Edit or Hook
            Replacements of keys, queries or logits, at columns of the batch that is run.

        Examples
        --------
        >>> from qkscope import Scope
        >>> scope = Scope.load("nano:mixed")
        >>> inputs = scope.encode(["hat jam hat"]).inputs
        >>> plain = scope.model(**inputs).logits
        >>> with scope.patched([Edit.keys("L1H0", torch.tensor([[2]]), torch.zeros(1, 1, 24))]) as model:
        ...     torch.equal(model(**inputs).logits, plain)
        False
        """
        with self._tap(Patch(edits, self).visit):
            yield self.model

    @torch.no_grad()
    def attention(
        self, prompt: str | Example, head: str | Head, query: int | str | None = None
    ) -> Float[Tensor, "*t t"]:
        """One head's attention pattern on a prompt: from each token (row) to each token (column).

        Parameters
        ----------
        prompt : a text, or an example.
        head : the head.
        query : the token whose row alone is wanted, by place or text; of a long prompt the whole
            pattern is large.

        Examples
        --------
        >>> from qkscope import Scope
        >>> Scope.load("nano:mixed").attention("hat jam hat", "L1H0").shape
        torch.Size([4, 4])
        >>> Scope.load("nano:mixed").attention("hat jam hat", "L1H0", query=-1).shape
        torch.Size([4])
        """
        watched = self.check(head)
        inputs = self.encode([prompt]).inputs
        ids = inputs["input_ids"][0]
        at = None
        if query is not None:
            at = self.column(ids, inputs["attention_mask"][0].bool(), query)
        patterns = list[Tensor]()

        def visit(call: Call) -> None:
            if call.layer != watched.layer:
                return
            if at is None:
                patterns.append(call.attention([watched.index])[0, 0])
            else:
                sequence = torch.tensor([0])
                row = call.rows(watched.index, sequence, torch.tensor([at]))
                patterns.append(row.attention()[0, 0])
            raise Stop

        self.watch(inputs, visit)
        return patterns[0]

    @torch.no_grad()
    def generate(
        self,
        prompt: str | Encoding | dict[str, Tensor],
        max_new_tokens: Count = 16,
        *,
        edits: Sequence[Edit | Hook] = (),
    ) -> Int[Tensor, "b n"] | str:
        """Greedy continuation, with edits in force at every step: of a text, or of a batch.

        Each token is the likeliest one of the model's logits, whatever its generation config asks
        for besides. It ends at an end token of the model (rows that ended are padded), or where
        the model's context does. A text gives text, a batch its new ids.

        Parameters
        ----------
        prompt : a text, or a left-padded batch.
        max_new_tokens : how far to go at most.
        edits : replacements, at columns of the batch.

        Examples
        --------
        >>> from qkscope import Scope
        >>> scope = Scope.load("nano:mixed")
        >>> scope.generate(scope.encode(["hat jam hat"]), 2).shape
        torch.Size([1, 2])
        >>> scope.generate("hat: O jam: Z jam:", 1)
        'Z'
        """
        batch = self.encode([prompt]) if isinstance(prompt, str) else prompt
        inputs = batch.inputs if isinstance(batch, Encoding) else batch
        # generate counts positions on from the mask
        inputs = {name: value for name, value in inputs.items() if name != "position_ids"}
        check_prompts(self.model, inputs, self.facts.sides)
        ids = inputs["input_ids"]
        lengths = inputs.get("attention_mask", torch.ones_like(ids)).sum(dim=1)
        room = max_new_tokens
        if self.encoder.max_length is not None:  # the last token of a context has a next one, too
            room = min(room, max(1, self.encoder.max_length - int(lengths.max()) + 1))
        config = greedy_config(self.model, self.encoder.pad_id, room)
        with self.patched(edits), swapped((self.model, "generation_config", config)):
            continued = self.model.generate(**inputs)
        new = continued[:, ids.shape[1] :]
        if isinstance(prompt, str) and self.tokenizer is not None:
            return str(self.tokenizer.decode(new[0]))
        return new
