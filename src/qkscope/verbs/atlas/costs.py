"""Costs: how much worse the next token is predicted with a rule in a head's place.

One head at a time follows its rule in passages that the rule was not fitted on; the cost is the
rise of perplexity, as a share. Layers before the head's are run once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import Scope
from qkscope.changes import SaysAttention
from qkscope.heads import Head
from qkscope.model.capture_types import Places
from qkscope.rerun.rerun_layers import LaterLayers
from qkscope.rerun.rerun_tokens import prompt_of
from qkscope.texts.holdout import Passage
from qkscope.verbs.atlas.head_patterns import passage_ids


class NextTokens:
    """How well a model predicts the tokens of passages, whole or with rules in heads' places.

    Parameters
    ----------
    scope : the model.
    passages : that run together.
    """

    def __init__(self, scope: Scope, passages: Sequence[Passage]) -> None:
        self.scope = scope
        ids = passage_ids(passages)
        self.inputs = prompt_of(scope, ids)
        lengths = torch.tensor([len(passage.ids) for passage in passages])
        followed = torch.arange(ids.shape[1]) < lengths[:, None] - 1
        row, query = followed.nonzero().unbind(1)
        self.next_ids = ids[row, query + 1].to(scope.device)
        nothing = row[:, None][:, :0].to(scope.device)
        at = (row.to(scope.device), query.to(scope.device))
        self.places = Places(*at, nothing, nothing.bool())

    def log_loss(self, rules: Mapping[Head, SaysAttention] | None = None) -> float:
        """Mean log-loss of the next token, in nats."""
        with ExitStack() as stack:
            for head, rule in (rules or {}).items():
                stack.enter_context(self.scope.replace_head(head, rule))
            return self._loss(self._logits(0))

    def costs(self, rules: Mapping[Head, SaysAttention]) -> dict[Head, float]:
        """The rise of perplexity with each rule alone in its head's place, as a share."""
        found = dict[Head, float]()
        for layer in sorted({head.layer for head in rules}):
            of_layer = {head: rule for head, rule in rules.items() if head.layer == layer}
            later = LaterLayers(self.scope, layer)
            with later.noting():
                whole = self._logits(0)
            later.check(whole, partial(self._handed_on, later))
            before = self._loss(whole)
            for head, rule in of_layer.items():
                with self.scope.replace_head(head, rule):
                    after = self._loss(self._handed_on(later))
                found[head] = float(torch.tensor(after - before).expm1())
        return found

    def _handed_on(self, later: LaterLayers) -> Float[Tensor, "r v"]:
        """Logits of a run from the middle."""
        with later.handing_on(1):
            return self._logits(later.first)

    def _logits(self, first: int) -> Float[Tensor, "r v"]:
        logits = self.scope.watch(self.inputs, logits_at=self.places, first=first)
        assert logits is not None
        return logits

    def _loss(self, logits: Float[Tensor, "r v"]) -> float:
        return float(torch.nn.functional.cross_entropy(logits.float(), self.next_ids))
