"""The registry of findings: the rule of each kind, its threshold and its precedence.

A new reason is an entry of `RULES`, a function that proposes it (`qkscope.findings.relations`) and
a sentence (`qkscope.findings.messages`). No other file compares a number with a threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from qkscope.findings.finding import Finding, Row

LEFT = 0.5
"""Share of the attention: a cause leaves less, and what keeps a look leaves more."""
SCREENED = 0.75
"""A word of which two alternatives leave more on average is no cause, and gets no further ones."""
GAIN = 0.25
"""By how much two equal words must keep more of a look than their controls."""
FEW = 4
"""Causes that are still a reason."""
RESTORED = 0.5
"""Share of what was lost that carriers bring back at least."""
CONTROL = 0.1
"""Share of what was lost that controls of carriers bring back at most."""


@dataclass(frozen=True)
class Rule:
    """How a kind of finding is judged, and the columns of the table ``relation`` it fills.

    Parameters
    ----------
    holds : whether a finding that was measured is shown.
    measured, control : columns of its numbers.
    is_counted : whether the table says how many changes there were.
    """

    holds: Callable[[Finding], bool]
    measured: str = "together"
    control: str = "control"
    is_counted: bool = False


def equality_keeps(finding: Finding) -> bool:
    """Two words that stay equal keep the look; one of them changed, or two made different, do not."""
    alone, both, _ = numbers_of(finding)
    return alone < LEFT < both and gains(finding)


def attention_follows(finding: Finding) -> bool:
    """The attention goes where the statement says, leaves its key, and more than by chance."""
    here, there, control = numbers_of(finding)
    return there >= LEFT and here < LEFT and there - control >= GAIN


def distance_keeps(finding: Finding) -> bool:
    """The attention stays at its distance when a token is put in between, and leaves the token."""
    assert finding.alone is not None
    assert finding.measured is not None
    return finding.measured >= LEFT and finding.alone < LEFT


def always(_finding: Finding) -> bool:
    """What is proposed only where it is so."""
    return True


def gains(finding: Finding) -> bool:
    """Whether two equal words keep much more of the look than one of them changed alone."""
    alone, both, different = numbers_of(finding)
    return both - max(alone, different) >= GAIN


def nearly_equal(finding: Finding) -> bool:
    """Whether equal words restore as the rule asks, whatever one of them alone leaves."""
    return finding.measured is not None and gains(finding)


def numbers_of(finding: Finding) -> tuple[float, float, float]:
    """What is left with one word changed, what was measured, and the control."""
    assert finding.alone is not None
    assert finding.measured is not None
    assert finding.control is not None
    return finding.alone, finding.measured, finding.control


RULES: dict[str, Rule] = {
    "self": Rule(always),
    "position": Rule(distance_keeps, is_counted=True),
    "same word": Rule(equality_keeps, control="different", is_counted=True),
    "follows": Rule(attention_follows, is_counted=True),
    "key word": Rule(always, measured="alone"),
    "query word": Rule(always, measured="alone"),
    "few words": Rule(always),
    "no few words": Rule(always),
    "no single word": Rule(always),
}
"""Rules by kind, in the order of precedence."""
MEASURED_KINDS = {"position", "same word", "follows"}
"""Kinds that are untested as long as nothing was measured."""


def judge(finding: Finding) -> Finding:
    """Apply the rule of its kind to a finding."""
    if finding.measured is None and finding.kind in MEASURED_KINDS:
        return replace(finding, verdict="untested")
    holds = RULES[finding.kind].holds(finding)
    return replace(finding, verdict="shown" if holds else "not shown")


def is_carried(restored: float, *controls: float) -> bool:
    """Whether writers carried a word: shares of what was lost that they and controls bring back."""
    return restored >= RESTORED and max(controls) <= CONTROL


def cause_of(low: float, high: float) -> str:
    """Whether a word is a cause, by the interval of what its alternatives leave: yes, open, no.

    >>> cause_of(0.1, 0.3), cause_of(0.3, 0.7), cause_of(0.6, 0.9)
    ('yes', 'open', 'no')
    """
    if high < LEFT:
        return "yes"
    return "open" if low < LEFT else "no"


def breaks_on_average(row: Row, before: float) -> bool:
    """Whether a word's alternatives leave less than half on average, certain or not."""
    return row["after"] < LEFT * before


def relation_row(finding: Finding) -> Row:
    """Make a row of the table ``relation``."""
    rule = RULES[finding.kind]
    row: Row = {
        "kind": finding.kind,
        "text": finding.text,
        "positions": ", ".join(map(str, finding.positions)),
        "alone": finding.alone,
        "together": None,
        "different": None,
        "control": None,
        "low": finding.low,
        "high": finding.high,
        "words": None,
        "verdict": finding.verdict,
    }
    if finding.measured is not None:
        row[rule.measured] = finding.measured
        row[rule.control] = finding.control
    if rule.is_counted and finding.measured is not None:
        row["words"] = len(finding.changes)
    return row
