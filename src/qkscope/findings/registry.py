"""The registry of findings: the rule of each kind, its threshold and its precedence.

Levels of a cause, fixed on 2026-11-19 before any rate was measured. A word put in the place of
another *keeps* a look that has at least half of its attention left then (`KEEPS`). For each word
that has words of every source (`qkscope.findings.levels`), in this order:

- *any word*: half or more of its random words keep the look.
- *kind*: the source (near, likely or fit) is chosen whose words keep the look most often, of those
  set aside for that, a third; of its other words at least .3 more keep the look than of the random
  ones; ten or more words stand on either side. (First ten against twenty words: on random weights
  a kind was shown at 1.2% of words, in 6% of looks; so there are twenty now, and the rule stayed.)
- *this word*: less than a quarter keep the look of the random words and of each source's words, ten
  or more each. Random weights show this as often, so that it is no reason.

A new reason is an entry of `RULES`, a function that proposes it (`qkscope.findings.relations`) and
a sentence (`qkscope.findings.messages`). No other file compares a number with a threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

KEEPS = 0.5
"""Share of the attention that a word leaves which keeps a look; share of random words that keep it,
where any word does.
"""
KIND_GAIN = 0.3
"""By how much more of a kind's words than of random ones must keep the look."""
FEWEST_WORDS = 10
"""Words on either side of a comparison of shares."""
SELDOM = 0.25
"""Share of words of every source under which this word alone keeps the look."""
BOTH_AT_RANDOM = 0.06
"""Share of looks on random weights of which *both* is said (3 of 48; in text 1 of 48)."""
THIS_WORD_AT_RANDOM = 0.93
"""Share of looks on random weights of which *this word* is said (78 of 84, docs/because.md)."""


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
    """Two words that stay equal, or of one kind, keep the look; one of them changed, or two made
    different, do not.
    """
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


def any_word_keeps(finding: Finding) -> bool:
    """Half or more of the random words keep the look."""
    assert finding.measured is not None
    return finding.measured >= KEEPS


def kind_keeps(finding: Finding) -> bool:
    """Words of one source keep the look much more often than random words."""
    assert finding.measured is not None
    assert finding.control is not None
    return finding.measured - finding.control >= KIND_GAIN


def others_break(finding: Finding) -> bool:
    """Few words of any source keep the look: the most often kept source, and the random ones."""
    assert finding.measured is not None
    assert finding.control is not None
    return max(finding.measured, finding.control) < SELDOM


def either_is_enough(finding: Finding) -> bool:
    """Each of some words alone can go, all of them cannot, and as many others can."""
    alone, all_gone, control = numbers_of(finding)
    assert finding.high is not None
    return alone >= LEFT > finding.high and control - all_gone >= GAIN


def both_are_enough(finding: Finding) -> bool:
    """Words that are all needed keep the look by themselves, all others gone."""
    alone, kept, without = numbers_of(finding)
    assert finding.low is not None
    return finding.low >= LEFT > alone and kept - without >= GAIN


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
    "same kind": Rule(equality_keeps, control="different", is_counted=True),
    "follows": Rule(attention_follows, is_counted=True),
    "any word": Rule(any_word_keeps, is_counted=True),
    "kind": Rule(kind_keeps, is_counted=True),
    "either": Rule(either_is_enough, is_counted=True),
    "both": Rule(both_are_enough, is_counted=True),
    "this word": Rule(others_break, is_counted=True),
    "few words": Rule(always),
    "no few words": Rule(always),
    "no single word": Rule(always),
}
"""Rules by kind, the most general first."""
LEVELS = ("any word", "kind", "this word")
"""Levels of a cause, in the order in which they are tried."""
MEASURED_KINDS = {"position", "same word", "same kind", "follows", "either", "both", *LEVELS}
"""Kinds that are untested as long as nothing was measured."""


def judge(finding: Finding) -> Finding:
    """Apply the rule of its kind to a finding."""
    if finding.measured is None and finding.kind in MEASURED_KINDS:
        return replace(finding, verdict="untested")
    holds = RULES[finding.kind].holds(finding)
    return replace(finding, verdict="shown" if holds else "not shown")


def is_enough(*counts: int) -> bool:
    """Whether a comparison of shares has enough words on every side."""
    return min(counts) >= FEWEST_WORDS


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Findings by their kinds, the most general first."""
    kinds = list(RULES)
    return sorted(findings, key=lambda finding: kinds.index(finding.kind))


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
