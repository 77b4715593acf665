"""What if: one head's row of attention at one token, with writers cut, keys exchanged, or a key hidden.

A change is a few words, as the address of the page keeps it:

- ``cut key L17H8``: this writer's part of the key (or of the ``query``) takes its mean over the prompt's other tokens;
- ``swap 14``, ``swap 14 order,lexical``: the key changes places with that of token 14, whole or in some features;
- ``remove``: the key is hidden from this head at this token.

The row is made anew in closed form, for all changes together. Beside it stand random ones of the same size: writers of
the same layers, subspaces of the same rank, other tokens; for a hidden key, the layer's other heads that lose it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.trace.one import PromptTrace
from qkscope.analyses.trace.verdicts import FEW, verdict
from qkscope.change.rows import Rerun, Row
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.explorer.features import Feature
from qkscope.heads import parse_writers
from qkscope.maths.bases import Projector, joint_basis, random_bases
from qkscope.maths.swap import swapped_keys
from qkscope.maths.writers import draw_alike

_SEED = 0  # of every draw
MOVES = 0.01
"""Total variation of the next token's probabilities under which a change is said to move nothing."""


@dataclass(frozen=True)
class Change:
    """One change, parsed."""

    kind: str
    side: str = ""
    writer: str = ""
    other: int = -1
    features: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Change:
        """From its words; `WhatIf` checks that what is named is there."""
        words = text.split(" ", 2)
        if words == ["remove"]:
            return cls("remove")
        if len(words) == 3 and words[0] == "cut" and words[1] in ("query", "key"):
            return cls("cut", side=words[1], writer=words[2])
        if len(words) > 1 and words[0] == "swap" and words[1].isascii() and words[1].isdigit() and len(words[1]) < 8:
            return cls("swap", other=int(words[1]), features=tuple(words[2].split(",")) if len(words) > 2 else ())
        raise BadInput(f"a change is cut, swap or remove, but got {text[:60]!r}.")


class WhatIf:
    """One head's row of attention at one token, ready to be changed.

    Parameters
    ----------
    one : the row, and the token that it is about.
    again : the prompt, ready to be run again.
    features : of the head, by name, as the dot product sees them.
    """

    def __init__(self, one: PromptTrace, again: Rerun, features: Mapping[str, Feature]) -> None:
        self.one, self.again, self.features = one, again, features
        self.d_head = one.rows.d_head

    # ------------------------------------------------------------------ the row, changed

    def changed(self, changes: Sequence[Change]) -> Float[Tensor, " t"]:
        """The row's logits with all changes made, as the softmax sees them."""
        return self._logits(
            {side: self._writers(changes, side) for side in ("query", "key")},
            [(self._place(c.other), self._projector(c)) for c in changes if c.kind == "swap"],
            any(change.kind == "remove" for change in changes),
        )

    def _logits(
        self, writers: Mapping[str, Sequence[int]], swaps: Sequence[tuple[int, Projector]], hidden: bool
    ) -> Tensor:
        key, keys, q = self.one.key, self.one.rows.k[0, 0].cpu().clone(), self.one.rows.q[0, 0].cpu()
        if any(writers.values()):
            away = self.one.away(writers)
            keys[key] -= away["key"].to(keys)
            q = q - away["query"].to(q)
        for other, projector in swaps:
            pair = swapped_keys(keys[key], keys[other], projector)
            keys[key], keys[other] = pair[0].clone(), pair[1].clone()
        logits = self.one.row_of(keys, q)
        if hidden:
            logits[key] = -torch.inf
        return logits

    def _writers(self, changes: Sequence[Change], side: str) -> list[int]:
        names = [change.writer for change in changes if change.kind == "cut" and change.side == side]
        if names and not self.one.told_apart:
            raise BadInput("this model's writers cannot be told apart, so that none can be cut.")
        for name in names:
            if name not in self.one.writers[:-1]:
                raise BadInput(
                    f"{name[:40]!r} writes nothing that {self.one.head} reads: choose a writer from the list."
                )
        return [self.one.writers.index(name) for name in dict.fromkeys(names)]

    def _place(self, other: int) -> int:
        if other == self.one.key:
            raise BadInput("a token cannot be swapped with itself: choose another.")
        if other not in (0, *self.one.against):
            raise BadInput(f"token {other} is not in sight of the token that asks: choose an earlier one.")
        return other

    def _projector(self, change: Change) -> Projector:
        for name in change.features:
            if name not in self.features:
                there = ", ".join(self.features) or "nothing"
                raise BadInput(f"nothing was fitted for {name!r} at {self.one.head}: there is {there}.")
        if not change.features:
            return Projector.orthogonal(torch.eye(self.d_head))
        return Projector.orthogonal(joint_basis([self.features[name].basis("key") for name in change.features]))

    # ------------------------------------------------------------------ beside it

    def random(self, changes: Sequence[Change], draws: int) -> list[Row]:
        """As many changed rows of the same kind and size that name nothing in particular."""
        if all(change.kind == "remove" for change in changes):
            return self._hidden_elsewhere(draws)
        layers = parse_writers(self.one.writers[:-1]) if self.one.told_apart else []
        made: dict[object, Row] = {}  # by what was drawn: of few writers alike, many draws are one
        for draw in range(draws):
            writers: dict[str, list[int]] = {}
            for side in ("query", "key"):
                chosen = self._writers(changes, side)
                seed = derived_seed(_SEED, "cut", side, len(chosen), draw)  # the draws that `why` puts beside a cut
                writers[side] = draw_alike(chosen, layers, seed, FEW)
            swaps = [self._drawn(change, draw) for change in changes if change.kind == "swap"]
            hidden = any(change.kind == "remove" for change in changes)
            drawn = [tuple(sorted(own)) for own in writers.values()], [one and one[0] for one in swaps]
            name = draw if any(change.features for change in changes) else str(drawn)
            if name not in made:
                made[name] = self.one.head, self._logits(writers, [one for one in swaps if one], hidden)
        return list(made.values())

    def _drawn(self, change: Change, draw: int) -> tuple[int, Projector] | None:
        """Another subspace of its rank; of whole keys, another token."""
        seed = derived_seed(_SEED, "what if", "swap", draw)
        if change.features:
            rank = int(self._projector(change).rank)
            return change.other, Projector.orthogonal(random_bases(self.d_head, rank, 1, seed)[0])
        free = [i for i in self.one.against if i != change.other]
        if not free:
            return None
        other = free[int(torch.randint(len(free), (1,), generator=torch.Generator().manual_seed(seed)))]
        return other, self._projector(change)

    def _hidden_elsewhere(self, draws: int) -> list[Row]:
        """The layer's other heads, those that give the key most first, each without it."""
        head, query, key = self.one.head, self.one.asked.query, self.one.key
        beside = [other for other in self.again.scope.heads() if other.layer == head.layer and other != head]
        attention = {other: float(self.again.row(query, other).attention()[0, 0, key]) for other in beside}
        most = sorted(beside, key=lambda other: -attention[other])[:draws]
        return [self.again.without(query, other, key) for other in most]

    # ------------------------------------------------------------------ is it so

    def judge(self, changes: Sequence[Change], after: float, beside: Sequence[float]) -> str:
        """What the attention says: a `verdict`, or vacuous."""
        swaps = [change for change in changes if change.kind == "swap"]
        if any(int(self._projector(change).rank) >= self.d_head for change in swaps):
            return "vacuous"
        return verdict(float(self.one.attention[self.one.key]), after, torch.tensor(list(beside)))
