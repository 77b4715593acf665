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
from qkscope.attention import soft
from qkscope.capture.pick import Capture
from qkscope.change.rows import Row
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head, parse_writers
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
    captured : every head's query and keys, as the token asks.
    head, key : whose row, and the token that it is about.
    trace : the same, split among writers; None where they cannot be told apart.
    bases : of the head's features, by name, as the dot product sees them: Float [d, r].
    """

    def __init__(
        self, captured: Capture, head: Head, key: int, trace: PromptTrace | None, bases: Mapping[str, Tensor]
    ) -> None:
        self.captured, self.head, self.key, self.trace, self.bases = captured, head, key, trace, bases
        self.column = captured.heads.index(head)
        self.rows = captured.rows().of_head(self.column)
        self.attention = self.rows.attention()[0, 0]
        seen = (captured.bias[0, self.column] > -torch.inf).tolist()
        self.others = [i for i, one in enumerate(seen) if one and i not in (0, key)]
        if not seen[key]:
            raise BadInput(f"token {key} is out of sight of {head} here: choose an earlier one.")

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
        keys, q = self.rows.k[0, 0].clone(), self.rows.q[0, 0]
        if any(writers.values()):
            assert self.trace is not None
            away = self.trace.away(writers)
            keys[self.key] -= away["key"].to(keys)
            q = q - away["query"].to(q)
        for other, projector in swaps:
            pair = swapped_keys(keys[self.key], keys[other], projector)
            keys[self.key], keys[other] = pair[0].clone(), pair[1].clone()
        logits = self.rows.logits((keys @ q * float(self.captured.scale[self.column]))[None, None])[0, 0]
        if hidden:
            logits[self.key] = -torch.inf
        return logits

    def attend(self, logits: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
        """The attention that logits give."""
        assert self.rows.rest is not None
        return soft(logits, self.rows.rest[0, 0])

    def _writers(self, changes: Sequence[Change], side: str) -> list[int]:
        names = [change.writer for change in changes if change.kind == "cut" and change.side == side]
        if names and self.trace is None:
            raise BadInput("this model's writers cannot be told apart, so that none can be cut.")
        for name in names:
            if self.trace is not None and name not in self.trace.writers[:-1]:
                raise BadInput(f"{name[:40]!r} writes nothing that {self.head} reads: choose a writer from the list.")
        return [] if self.trace is None else [self.trace.writers.index(name) for name in dict.fromkeys(names)]

    def _place(self, other: int) -> int:
        if other == self.key:
            raise BadInput("a token cannot be swapped with itself: choose another.")
        if other not in (0, *self.others):
            raise BadInput(f"token {other} is not in sight of the token that asks: choose an earlier one.")
        return other

    def _projector(self, change: Change) -> Projector:
        for name in change.features:
            if name not in self.bases:
                there = ", ".join(self.bases) or "nothing"
                raise BadInput(f"nothing was fitted for {name!r} at {self.head}: there is {there}.")
        if not change.features:
            return Projector.orthogonal(torch.eye(self.rows.d_head))
        return Projector.orthogonal(joint_basis([self.bases[name] for name in change.features]))

    # ------------------------------------------------------------------ beside it

    def random(self, changes: Sequence[Change], draws: int) -> list[Row]:
        """As many changed rows of the same kind and size that name nothing in particular."""
        if all(change.kind == "remove" for change in changes):
            return self._hidden_elsewhere(draws)
        layers = [] if self.trace is None else parse_writers(self.trace.writers[:-1])
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
                made[name] = self.head, self._logits(writers, [one for one in swaps if one], hidden)
        return list(made.values())

    def _drawn(self, change: Change, draw: int) -> tuple[int, Projector] | None:
        """Another subspace of its rank; of whole keys, another token."""
        seed = derived_seed(_SEED, "what if", "swap", draw)
        if change.features:
            rank = int(self._projector(change).rank)
            return change.other, Projector.orthogonal(random_bases(self.rows.d_head, rank, 1, seed)[0])
        free = [i for i in self.others if i != change.other]
        if not free:
            return None
        other = free[int(torch.randint(len(free), (1,), generator=torch.Generator().manual_seed(seed)))]
        return other, self._projector(change)

    def _hidden_elsewhere(self, draws: int) -> list[Row]:
        """The layer's other heads, those that give the key most first, each without it."""
        beside = [i for i, one in enumerate(self.captured.heads) if one.layer == self.head.layer and one != self.head]
        attention = self.captured.attention()[0, :, self.key]
        made = []
        for i in sorted(beside, key=lambda i: -float(attention[i]))[:draws]:
            logits = self.captured.rows().of_head(i).logits()[0, 0].clone()
            logits[self.key] = -torch.inf
            made.append((self.captured.heads[i], logits))
        return made

    # ------------------------------------------------------------------ is it so

    def judge(self, changes: Sequence[Change], after: float, beside: Sequence[float]) -> str:
        """What the attention says: a `verdict`, or vacuous; of a hidden key, nothing."""
        if any(change.kind == "remove" for change in changes):
            return ""
        swaps = [change for change in changes if change.kind == "swap"]
        if any(int(self._projector(change).rank) >= self.rows.d_head for change in swaps):
            return "vacuous"
        return verdict(float(self.attention[self.key]), after, torch.tensor(list(beside)))
