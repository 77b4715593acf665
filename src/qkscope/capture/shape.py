"""The shape of a model's attention: how many layers and heads, how wide, and which heads exist."""

from __future__ import annotations

from collections.abc import Sequence

from qkscope.capture.probe import Facts
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_heads
from qkscope.kinds import checked_class


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
        values = sorted({getattr(layer, what) for layer in self.facts.layers})
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
        """Every head of the model."""
        return [Head(layer, i) for layer, facts in enumerate(self.facts.layers) for i in range(facts.n_heads)]

    def check(self, head: Head | str) -> Head:
        """The head, if the model has it; otherwise a sentence that names the range."""
        head = Head.parse(head)
        if head.layer >= self.n_layers:
            raise BadInput(f"{head} does not exist: {self.name} has layers L0 to L{self.n_layers - 1}.")
        count = self.facts.layers[head.layer].n_heads
        if head.index >= count:
            raise BadInput(f"{head} does not exist: layer {head.layer} of {self.name} has heads H0 to H{count - 1}.")
        return head

    def parse(self, heads: str | Head | Sequence[str | Head] | None) -> list[Head]:
        """Heads by name, checked; None or ``"all"`` is every head."""
        if heads is None or heads == "all":
            return self.heads()
        return [self.check(head) for head in parse_heads(heads)]
