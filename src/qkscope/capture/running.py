"""Runs of a model under the tap: watched, patched, continued, and with whatever a ``with`` block changes in force."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.capture.changes import Changeable
from qkscope.capture.encode import Encoder, Encoding
from qkscope.capture.inputs import check_ends, forward, greedy, logits_of
from qkscope.capture.patch import Edit, Patch
from qkscope.capture.pick import Places
from qkscope.capture.tap import ANEW, Call, Stop, tap
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.hooks import Hook
from qkscope.kinds import Count, checked_class


@checked_class
class Running(Changeable):
    """A model that can be run under the tap; `Scope` adds where it comes from and how text goes in."""

    encoder: Encoder
    encode: Callable[..., Encoding]

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
            The first layer that runs, where those before it are made to hand on what they put out before.
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
    ) -> Iterator[list[int]]:
        facts = self.facts
        shown = facts.layer_of.values() if only is None else only
        layers = {module: layer for module, layer in facts.layer_of.items() if first <= layer and layer in shown}
        with (
            self.changed() as changes,
            tap(self.model, *changes, *visits, layers=layers, rotary=rotary, anatomy=facts.anatomy) as called,
        ):
            yield called

    @contextmanager
    def patched(self, edits: Sequence[Edit | Hook]) -> Iterator[Any]:
        """Edits in force for a ``with`` block: call ``scope.model`` inside it in any way you like (in eval mode).

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
    def attention(self, prompt: str | Example, head: str | Head) -> Float[Tensor, "t t"]:
        """One head's attention pattern on a prompt: how much each token (row) gives to each token (column).

        Parameters
        ----------
        prompt : a text, or an example.
        head : the head.

        Examples
        --------
        >>> from qkscope import Scope
        >>> Scope.load("nano:mixed").attention("hat jam hat", "L1H0").shape
        torch.Size([4, 4])
        """
        one, found = self.check(head), list[Tensor]()

        def visit(call: Call) -> None:
            if call.layer == one.layer:
                found.append(call.attention([one.index])[0, 0])
                raise Stop

        self.watch(self.encode([prompt]).inputs, visit)
        return found[0]

    @torch.no_grad()
    def generate(
        self,
        prompt: str | Encoding | dict[str, Tensor],
        max_new_tokens: Count = 16,
        *,
        edits: Sequence[Edit | Hook] = (),
    ) -> Int[Tensor, "b n"] | str:
        """Greedy continuation, with edits in force at every step: of a text, as text; of a batch, its new ids.

        Parameters
        ----------
        prompt : a text, or a left-padded batch.
        max_new_tokens : how far to go.
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
        given = batch.inputs if isinstance(batch, Encoding) else batch
        check_ends(given, self.facts.sides)
        with self.patched(edits):
            ids = greedy(self.model, given, self.encoder.pad_id, max_new_tokens)
        return str(self.tokenizer.decode(ids[0])) if isinstance(prompt, str) and self.tokenizer else ids
