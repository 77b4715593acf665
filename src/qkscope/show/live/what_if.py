"""What if: one head's row of attention at one token, with writers cut, keys exchanged, or a key hidden.

A change is a few words, as the address of the page keeps it:

- ``cut key L17H8``: this writer's part of the key (or of the ``query``) takes its mean over the prompt's other tokens;
- ``swap 14``, ``swap 14 order,lexical``: the key changes places with that of token 14, whole or in some features;
- ``hide``: the key is hidden from this head at this token.

The row is computed in closed form, for all changes together, and the model runs on from it. Beside it stand random
changes of the same size: writers of the same layers, subspaces of the same rank, other tokens; for a hidden key, the
layer's other heads that lose it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import made_with
from qkscope.analyses.trace.prompt import PromptTrace
from qkscope.analyses.trace.verdicts import FEW, verdict
from qkscope.capture.scope import Scope
from qkscope.capture.tokens import token_texts
from qkscope.change.again import Again, Row
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import parse_writers
from qkscope.maths.bases import Projector, joint_basis, random_bases
from qkscope.maths.subspace import Subspace
from qkscope.maths.swap import swapped_keys
from qkscope.maths.writers import draw_alike
from qkscope.runs.result import Result

_SEED = 0  # of every draw
_DRAWS, _RUN = 20, 8  # random changes beside one, and how many of them run through the model
_NEXT = 8  # next tokens shown


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
        match text.split(" ", 2):
            case ["hide"]:
                return cls("hide")
            case ["cut", "query" | "key" as side, writer]:
                return cls("cut", side, writer)
            case ["swap", place, *features] if place.isascii() and place.isdigit() and len(place) < 8:
                return cls("swap", other=int(place), features=tuple(name for f in features for name in f.split(",")))
        raise BadInput(f"a change is cut, swap or hide, but got {text[:60]!r}.")


class WhatIf:
    """One head's row of attention at one token, ready to be changed.

    Parameters
    ----------
    trace : the row, and the token that it is about.
    again : the prompt, ready to be run again.
    features : of the head, by name, as the dot product sees them.
    """

    def __init__(self, trace: PromptTrace, again: Again, features: Mapping[str, Subspace]) -> None:
        self.trace, self.again, self.features = trace, again, features

    def result(self, scope: Scope, texts: Sequence[str]) -> tuple[Result, Float[Tensor, "h t"]]:
        """What changes do to the row and to the next token, beside random changes; and every head's attention after."""
        trace, changes = self.trace, [Change.parse(text) for text in texts]
        query, key = trace.asked.query, trace.key
        row, controls = self.row(changes), self.controls(changes)
        run = self.again.run_rows(query, [None, (trace.head, row), *controls[:_RUN]])
        after, before = trace.attend(row), float(trace.attention[key])
        random = [float(trace.attend(logits)[key]) for head, logits in controls if head == trace.head]
        chances = run.logits.softmax(-1)
        moved, *beside = ((chances[1:] - chances[:1]).abs().sum(-1) / 2).tolist()  # total variation
        changed = {
            "head": str(trace.head), "changes": "; ".join(map(self.words, texts)),
            "before": before, "after": float(after[key]), "random": sum(random) / len(random) if random else None,
            "random_low": min(random, default=None), "random_high": max(random, default=None), "sets": len(random),
            "moved": moved, "moved_random": max(beside, default=None),
            "verdict": self._verdict(changes, float(after[key]), random),
        }  # fmt: skip
        best = sorted(chances[:2].topk(_NEXT).indices.flatten().unique().tolist(), key=lambda i: -chances[:2, i].max())
        names = token_texts(scope, best)
        next_tokens = [
            {"token": name, "before": float(chances[0, i]), "after": float(chances[1, i])}
            for name, i in zip(names, best[:_NEXT], strict=False)
        ]
        asked: dict[str, Any] = {"head": str(trace.head), "query": query, "key": key, "changes": list(texts)}
        tables = {"changes": [changed], "next": next_tokens}
        answer = f"With {changed['changes']}: {self._sentence(changed)}"
        made = made_with(scope, tokenizer=scope.tokenizer_hash, **asked)
        return Result("what if", tables, answer=answer, **made), run.attention[1]

    def words(self, text: str) -> str:
        """A change as a sentence names it."""
        change, key = Change.parse(text), self.trace.token(self.trace.key)
        if change.kind == "hide":
            return f"{key} hidden from {self.trace.head}"
        if change.kind == "cut":
            return f"{change.writer} cut from the {change.side}"
        return f"{key} swapped with {self.trace.token(change.other)} in {', '.join(change.features) or 'its whole key'}"

    def _sentence(self, row: Mapping[str, Any]) -> str:
        trace, control, judged = self.trace, "", f": {row['verdict']}" if row["verdict"] else ""
        if row["sets"]:
            control = f" (control: {row['random_low']:.0%} to {row['random_high']:.0%} in {row['sets']} random changes)"
        beside = f" (control: at most {row['moved_random']:.0%})" if row["moved_random"] is not None else ""
        return (
            f"attention on {trace.token(trace.key)} goes from {row['before']:.0%} to {row['after']:.0%}"
            f"{control}{judged}. {row['moved']:.0%} of the next token's probability moves{beside}."
        )

    def _verdict(self, changes: Sequence[Change], after: float, random: Sequence[float]) -> str | None:
        """What the attention says of a change; None where a hidden key leaves nothing to say."""
        if any(change.kind == "hide" for change in changes):
            return None
        ranks = [int(self._projector(change).rank) for change in changes if change.kind == "swap"]
        if any(rank >= self.trace.rows.d_head for rank in ranks):
            return "vacuous"  # a whole key carries all that the head sees of a token
        return verdict(float(self.trace.attention[self.trace.key]), after, torch.tensor(random))

    # ------------------------------------------------------------------ the row, changed

    def row(self, changes: Sequence[Change]) -> Float[Tensor, " t"]:
        """The row's logits with all changes applied, as the softmax sees them."""
        swaps = [(self._place(c.other), self._projector(c)) for c in changes if c.kind == "swap"]
        return self._logits(self._writers(changes), swaps, any(change.kind == "hide" for change in changes))

    def _logits(
        self, writers: Mapping[str, Sequence[int]], swaps: Sequence[tuple[int, Projector]], hidden: bool
    ) -> Float[Tensor, " t"]:
        key, keys, q = self.trace.key, self.trace.rows.k[0, 0].cpu().clone(), self.trace.rows.q[0, 0].cpu()
        if any(writers.values()):
            away = self.trace.away(writers)
            keys[key] -= away["key"].to(keys)
            q = q - away["query"].to(q)
        for other, projector in swaps:
            pair = swapped_keys(keys[key], keys[other], projector)
            keys[key], keys[other] = pair[0].clone(), pair[1].clone()
        logits = self.trace.row_of(keys, q)
        if hidden:
            logits[key] = -torch.inf
        return logits

    def _writers(self, changes: Sequence[Change]) -> dict[str, list[int]]:
        """Places of the writers that are cut, by side."""
        chosen: dict[str, list[int]] = {"query": [], "key": []}
        for change in (change for change in changes if change.kind == "cut"):
            if not self.trace.told_apart:
                raise BadInput("this model's writers cannot be told apart, so that none can be cut.")
            if change.writer not in self.trace.writers[:-1]:
                name = f"{change.writer[:40]!r} writes nothing that {self.trace.head} reads"
                raise BadInput(f"{name}: choose a writer from the list.")
            place = self.trace.writers.index(change.writer)
            chosen[change.side] += [] if place in chosen[change.side] else [place]
        return chosen

    def _place(self, other: int) -> int:
        if other == self.trace.key:
            raise BadInput("a token cannot be swapped with itself: choose another.")
        if other not in (0, *self.trace.against):
            raise BadInput(f"token {other} is not in sight of the token that asks: choose an earlier one.")
        return other

    def _projector(self, change: Change) -> Projector:
        for name in change.features:
            if name not in self.features:
                there = ", ".join(self.features) or "nothing"
                raise BadInput(f"nothing was fitted for {name!r} at {self.trace.head}: there is {there}.")
        if not change.features:
            return Projector.orthogonal(torch.eye(self.trace.rows.d_head))
        return Projector.orthogonal(joint_basis([self.features[name].basis("key") for name in change.features]))

    # ------------------------------------------------------------------ controls

    def controls(self, changes: Sequence[Change]) -> list[Row]:
        """Different rows changed in the same way and size, at random."""
        if all(change.kind == "hide" for change in changes):
            return self._hidden_elsewhere()
        layers = parse_writers(self.trace.writers[:-1]) if self.trace.told_apart else []
        hidden, swapped = any(c.kind == "hide" for c in changes), [c for c in changes if c.kind == "swap"]
        rows: dict[object, Row] = {}  # by what was drawn: of few writers alike, many draws are one
        for draw in range(_DRAWS):
            writers = {  # the draws that `why` puts beside a cut
                side: draw_alike(chosen, layers, derived_seed(_SEED, "cut", side, len(chosen), draw), FEW)
                for side, chosen in self._writers(changes).items()
            }
            swaps = [swap for change in swapped if (swap := self._random_swap(change, draw)) is not None]
            drawn = [sorted(places) for places in writers.values()], [other for other, _ in swaps]
            name = draw if any(change.features for change in swapped) else str(drawn)
            rows.setdefault(name, (self.trace.head, self._logits(writers, swaps, hidden)))
        return list(rows.values())

    def _random_swap(self, change: Change, draw: int) -> tuple[int, Projector] | None:
        """Another subspace of its rank; of whole keys, another token."""
        seed, projector = derived_seed(_SEED, "what if", "swap", draw), self._projector(change)
        if change.features:
            basis = random_bases(self.trace.rows.d_head, int(projector.rank), 1, seed)[0]
            return change.other, Projector.orthogonal(basis)
        free = [i for i in self.trace.against if i != change.other]
        generator = torch.Generator().manual_seed(seed)
        return (free[int(torch.randint(len(free), (1,), generator=generator))], projector) if free else None

    def _hidden_elsewhere(self) -> list[Row]:
        """The layer's other heads, those that give the key most first, each without it."""
        head, query, key = self.trace.head, self.trace.asked.query, self.trace.key
        others = [other for other in self.again.scope.heads() if other.layer == head.layer and other != head]
        others.sort(key=lambda other: -float(self.again.row(query, other).attention()[0, 0, key]))
        return [self.again.without(query, other, key) for other in others[:_DRAWS]]
