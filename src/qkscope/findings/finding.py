"""A finding: a statement about where a head looks, with the changes of the prompt that test it.

A statement predicts what changes do: run them and their controls, and the rule of its kind
(`qkscope.findings.registry`) says whether it holds. So an answer is: propose findings, run their
changes, judge them, say what they show (`qkscope.findings.messages`).

All numbers are shares of the attention that the look has in the unchanged prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from qkscope.changes import Inserted, Words
from qkscope.heads import Head

Verdict = Literal["shown", "not shown", "untested"]
Row = dict[str, Any]
"""A row of a table."""
NO_REASONS = ("both", "this word", "few words", "no few words", "any word", "no single word")
"""Kinds that random weights show as often, or that say what was not found: no reasons. In the order
in which they are said where no reason is shown.
"""


class Look(NamedTuple):
    """A head that looks from one token (the query) at another (the key)."""

    head: Head
    query: int
    key: int


@dataclass(frozen=True)
class Finding:
    """A statement about one look, what tests it, and what that showed.

    Parameters
    ----------
    kind : of the statement; the registry knows its rule, the messages its sentence.
    text : the words that it speaks of, as they read.
    positions : where these stand.
    changes : that test it, one run each.
    controls : changes beside them, which should do something else.
    alone : what is left with only one of the words changed.
    measured : what the changes leave on average, or move to the key that the statement names.
    control : the same of the controls.
    low, high : 90% interval of what was measured, over changes.
    verdict : of the rule.
    examples : words that name the kind of word it speaks of, chosen on others than those that test
        it.
    counted : words that were put in and counted, as they read.
    """

    kind: str
    text: str
    positions: tuple[int, ...]
    changes: tuple[Words | Inserted, ...] = ()
    controls: tuple[Words | Inserted, ...] = ()
    alone: float | None = None
    measured: float | None = None
    control: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Verdict = "untested"
    examples: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()

    @property
    def is_shown(self) -> bool:
        """Whether its rule holds."""
        return self.verdict == "shown"

    @property
    def is_reason(self) -> bool:
        """Whether its rule holds, and random weights seldom show its kind."""
        return self.is_shown and self.kind not in NO_REASONS


@dataclass
class Reason:
    """What decides one look.

    Attributes
    ----------
    look : a head, a query and a key.
    before : attention of the look.
    tried, seen : words that were changed, of so many in sight.
    words : rows of the table ``because``, strongest first.
    findings : statements about the words, the most general first.
    replaced : rows of the table ``words``: every word that was put in the place of another, by its
        source.
    """

    look: Look
    before: float
    tried: int
    seen: int
    words: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    replaced: list[Row] = field(default_factory=list)

    @property
    def causes(self) -> list[Row]:
        """Words whose replacement breaks the attention."""
        return [row for row in self.words if row["cause"] == "yes"]

    @property
    def shown(self) -> list[Finding]:
        """Findings whose rule holds: reasons, the most general first, and then what is none."""
        reasons = [finding for finding in self.findings if finding.is_reason]
        others = [
            finding for finding in self.findings if finding.is_shown and not finding.is_reason
        ]
        return reasons + sorted(others, key=lambda finding: NO_REASONS.index(finding.kind))

    @property
    def kind(self) -> str:
        """The kind of the first finding that is shown, a reason before what is none."""
        return self.shown[0].kind if self.shown else "no few words"

    def first(self, kind: str) -> Finding | None:
        """The first finding of a kind, whatever its verdict."""
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def end_of(self, start: int) -> int:
        """Where the word that starts at a token ends, of those that matter."""
        return next(row["end"] for row in self.words if row["position"] == start)
