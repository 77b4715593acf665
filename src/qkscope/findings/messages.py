"""Findings in words: every sentence about why a head looks somewhere stands here.

A clause continues *L18H6 at ':' (token 13) looks at ' Z' (token 6), 77%*; a line stands below the
answer and names its test. Numbers are attention, not shares of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkscope.findings.because import Because
from qkscope.findings.finding import Finding, Reason
from qkscope.findings.next_token import quoted, whole
from qkscope.findings.prompt_trace import AskedPrompt
from qkscope.findings.registry import (
    BOTH_AT_RANDOM,
    KEEPS,
    LEFT,
    LEVELS,
    THIS_WORD_AT_RANDOM,
    breaks_on_average,
    nearly_equal,
)
from qkscope.text import grouped

Row = Mapping[str, Any]
Rows = Sequence[Row]
_SHOWN = 4  # words of a line
_PAIRS = 2  # pairs of equal words that have a line
_KINDS = 2  # words whose level is said beside the first
_EACH = 3  # words that keep a look, or break it, in a line


@dataclass(frozen=True)
class Headline:
    """The finding that an answer gives as the reason, and what stands beside it.

    Parameters
    ----------
    finding : the reason.
    others : further findings of its kind that are shown, the clearest first.
    in_part : a kind of word that is shown where the reason nearly passes.
    """

    finding: Finding
    others: Sequence[Finding] = ()
    in_part: Finding | None = None


def headline(reason: Reason, carriers: Rows) -> Headline | None:
    """Choose what to give as the reason: the most general finding that is shown.

    Two equal words that nearly pass are given where no reason is shown, or beside a kind of word if
    they were carried there. Of several words the clearest is given, the one whose words and controls
    differ most; the query's own, which says least, comes last.
    """
    pairs = (finding for finding in reason.findings if finding.kind == "same word")
    pair = next((finding for finding in pairs if nearly_equal(finding)), None)
    if not reason.shown:
        return None if pair is None else Headline(pair)
    first = reason.shown[0]
    alike = [finding for finding in reason.shown if finding.kind == first.kind]
    if first.kind in LEVELS:
        alike.sort(key=lambda finding: (_is_query(reason, finding), _clearness(finding)))
    chosen = Headline(alike[0], alike[1:])
    if pair is None:
        return chosen
    if not first.is_reason:
        return Headline(pair)
    carried = {row["text"].strip().lower() for row in carriers if row["verdict"] == "shown"}
    if first.kind == "kind" and pair.text.strip().lower() in carried:
        return Headline(pair, in_part=alike[0])
    return chosen


def _is_query(reason: Reason, finding: Finding) -> bool:
    """Whether a finding is about the query's own word."""
    start = finding.positions[0]
    return start <= reason.look.query < reason.end_of(start)


def _clearness(finding: Finding) -> float:
    """How far a level's words and their controls are apart, the furthest first; of words that have
    no kind, how seldom others keep the look.
    """
    measured = finding.measured or 0.0
    control = finding.control or 0.0
    return control - measured if finding.kind == "kind" else control + measured


# ---------------------------------------------------------------------- clauses of the answer


def reason_clause(question: AskedPrompt, reason: Reason, carriers: Rows = ()) -> str:
    """Give the reason for a look, as a clause."""
    chosen = headline(reason, carriers)
    if chosen is None:
        return ""
    return CLAUSES[chosen.finding.kind](question, reason, chosen)


def _same_word(question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    finding = chosen.finding
    a, b = finding.positions
    where = _where(question, reason, finding)
    part = "" if finding.is_shown else " in part"
    also = f", and because {_a_word_like(reason, chosen.in_part)}" if chosen.in_part else ""
    return f",{part} because {quoted(finding.text)} appears {where} (tokens {a} and {b}){also}"


def _same_kind(_question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    finding = chosen.finding
    a, b = finding.positions
    words = " and ".join(map(quoted, finding.examples))
    kept = share(finding.measured, reason)
    return (
        f", because {words} (tokens {a} and {b}) are of one kind: other pairs of one kind leave"
        f" {kept}, of two kinds {share(finding.control, reason)}"
    )


def _where(question: AskedPrompt, reason: Reason, finding: Finding) -> str:
    """Where the earlier of two equal words stands to the key, and whether there are more of it."""
    start = finding.positions[0]
    end = reason.end_of(start)
    key = reason.look.key
    if start <= key < end:
        return "there and again"
    if end == key:
        return "just before it and again"
    copies = [
        token for token in question.tokens if token.strip().lower() == finding.text.strip().lower()
    ]
    return "twice" if len(copies) <= 2 else "again"


def _position(question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    finding = chosen.finding
    back = question.query - reason.look.key
    tokens = "token" if back == 1 else "tokens"
    stays = share(finding.alone, reason)
    moves = share(finding.measured, reason)
    return (
        f", by position ({back} {tokens} back): with a word inserted after it, {stays} stays and"
        f" {moves} moves to the token at that distance"
    )


def _self(_question: AskedPrompt, _reason: Reason, _chosen: Headline) -> str:
    return ", which is itself"


def _kind_clause(_question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    others = [_place_of(reason, finding) for finding in chosen.others[:_KINDS]]
    more = f"; words of a kind decide at {' and '.join(others)}, too" if others else ""
    return f", because {_a_word_like(reason, chosen.finding)}{more}"


def _a_word_like(reason: Reason, finding: Finding) -> str:
    """A kind of word by examples, where it stands, and how many words keep the look."""
    kind = "a word of its kind"
    if finding.examples:
        kind = f"a word like {', '.join(map(quoted, finding.examples))}"
    place = _place_of(reason, finding)
    return f"{kind} stands at {place}: {_counts(finding, 'such words')}"


def _place_of(reason: Reason, finding: Finding) -> str:
    """The place of a word, and whether it is the key or the query."""
    start = finding.positions[0]
    end = reason.end_of(start)
    role = ""
    if start <= reason.look.key < end:
        role = ", the key"
    elif start <= reason.look.query < end:
        role = ", the query"
    return f"token {start} ({quoted(finding.text)}{role})"


def _counts(finding: Finding, words: str) -> str:
    """How many words of a kind keep the look, and how many random ones."""
    assert finding.measured is not None
    kept = f"{round(finding.measured * len(finding.changes))} of {len(finding.changes)}"
    verb = "keeps" if kept.startswith("1 ") else "keep"
    if finding.control is None:
        return f"{kept} {words} {verb} it"
    random = f"{round(finding.control * len(finding.controls))} of {len(finding.controls)}"
    return f"{kept} {words} {verb} it, {random} random ones"


def _either_clause(_question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    finding = chosen.finding
    return (
        f", because of {_named(finding, 'or')}: either is enough (random words in place of one leave"
        f" at least {share(finding.alone, reason)}, of all {share(finding.measured, reason)}; of as"
        f" many others {share(finding.control, reason)})"
    )


def _both_clause(_question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    finding = chosen.finding
    return (
        f": it takes {_named(finding, 'and')} together: with all other words replaced"
        f" {share(finding.measured, reason)} stays, with one of these as well at most"
        f" {share(finding.control, reason)} (no reason yet: random weights show as much in"
        f" {BOTH_AT_RANDOM:.0%} of looks)"
    )


def _named(finding: Finding, joined: str) -> str:
    """The words of a set with their places."""
    words = [
        f"{quoted(text)} (token {start})"
        for text, start in zip(finding.examples, finding.positions, strict=True)
    ]
    return f" {joined} ".join(words)


def _any_word_clause(_question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    place = _place_of(reason, chosen.finding)
    counts = _counts(chosen.finding, "random words")
    return f": no single word is shown to decide it; at {place} any word does ({counts})"


def _this_word_clause(_question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    findings = [chosen.finding, *chosen.others][:_KINDS]
    places = " and at ".join(_place_of(reason, finding) for finding in findings)
    counts = _counts(chosen.finding, "words like it")
    return (
        f": it takes the very word at {places}: {counts} (no reason yet: random weights show as much"
        f" in {THIS_WORD_AT_RANDOM:.0%} of looks)"
    )


def _few_words(_question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    words = ", ".join(f"{word_name(row)} {row['after']:.0%}" for row in reason.causes)
    which = "one of them" if len(chosen.finding.positions) > 1 else "it"
    return (
        f": it depends on {words} (left with random words in place of {which}), but neither a kind"
        " of word nor this word alone is shown"
    )


def _no_few_words(_question: AskedPrompt, reason: Reason, _chosen: Headline) -> str:
    return f": it depends on {len(reason.causes)} words, too many to name one reason"


def _no_single_word(_question: AskedPrompt, reason: Reason, _chosen: Headline) -> str:
    likely = [row for row in reason.words if breaks_on_average(row, reason.before)][:2]
    if not likely:
        return (
            f": no single word decides it (of {tried_words(reason)} replaced one at a time, none"
            " takes half of that away)"
        )
    words = ", ".join(f"{word_name(row)} {row['after']:.0%}" for row in likely)
    return (
        ": no single word is certain to decide it (replacing one leaves less than half on average:"
        f" {words})"
    )


CLAUSES: dict[str, Callable[[AskedPrompt, Reason, Headline], str]] = {
    "self": _self,
    "position": _position,
    "same word": _same_word,
    "same kind": _same_kind,
    "follows": _no_single_word,  # shown only behind the same word
    "kind": _kind_clause,
    "either": _either_clause,
    "both": _both_clause,
    "any word": _any_word_clause,
    "this word": _this_word_clause,
    "few words": _few_words,
    "no few words": _no_few_words,
    "no single word": _no_single_word,
}
"""By kind, the clause that gives it as the reason."""


def carried_clause(carriers: Rows) -> str:
    """Name the writers that carried each word into the query or the key, and where it stands; equal
    words once.
    """
    shown = [row for row in carriers if row["verdict"] == "shown"]
    groups = grouped(shown, lambda row: (row["text"].strip() or row["text"], row["side"]))
    clauses = ""
    for (word, side), rows in groups.items():
        writers = [writer for row in rows for writer in row["writers"].split(", ")]
        places = _places([row["position"] for row in rows])
        clauses += f"; {listed(writers)} carried {quoted(word)} {places} into its {side}"
    return clauses


def _places(positions: Sequence[int]) -> str:
    """Places of tokens in brackets, each once.

    >>> _places([3]), _places([9, 3, 9])
    ('(token 3)', '(tokens 3 and 9)')
    """
    each = sorted({*positions})
    tokens = "token" if len(each) == 1 else "tokens"
    return f"({tokens} {listed([str(place) for place in each])})"


# ---------------------------------------------------------------------- lines below the answer


def relation_lines(reason: Reason) -> Iterator[str]:
    """A line for each pair of equal words, and whether the attention follows another word."""
    pairs = [finding for finding in reason.findings if finding.kind == "same word"]
    for finding in pairs[:_PAIRS]:
        yield _pair_line(finding, reason)
    for finding in reason.findings:
        if finding.kind == "same kind" and finding.is_shown:
            yield _alike_line(finding, reason)
    for finding in reason.findings:
        if finding.kind == "follows" and finding.measured is not None:
            yield _follows_line(finding, reason)


def _pair_line(finding: Finding, reason: Reason) -> str:
    pair = f"Same word: {quoted(finding.text)}"
    if finding.measured is None:
        places = ", ".join(map(str, finding.positions))
        return f"{pair} (tokens {places}), too few other words fit both places: untested."
    alone = share(finding.alone, reason)
    both = share(finding.measured, reason)
    different = share(finding.control, reason)
    too_much_alone = finding.alone is not None and finding.alone >= LEFT
    few = ""
    if too_much_alone and nearly_equal(finding):
        few = f" ({alone} is over half of {reason.before:.0%})"
    return (
        f"{pair}, replacing either leaves up to {alone} on average, both by the same word {both},"
        f" by different words {different}: {finding.verdict}{few}."
    )


def _alike_line(finding: Finding, reason: Reason) -> str:
    words = " and ".join(map(quoted, finding.examples))
    return (
        f"Same kind: {words}, replacing either leaves up to {share(finding.alone, reason)} on"
        f" average, both by two words of one kind {share(finding.measured, reason)}, of two kinds"
        f" {share(finding.control, reason)}: {finding.verdict}."
    )


def _follows_line(finding: Finding, reason: Reason) -> str:
    moved = share(finding.measured, reason)
    control = share(finding.control, reason)
    return (
        f"Follows: {quoted(finding.text)} (token {finding.positions[0]}) replaced by another word"
        f" of the prompt ({len(finding.changes)} tried), {moved} moves to that word's key (control"
        f" {control}): {finding.verdict}."
    )


def carrier_lines(carriers: Rows) -> Iterator[str]:
    """A line for the same writers and side, with every word that they carried."""
    groups = grouped(carriers, lambda row: (row["writers"], row["side"], row["verdict"]))
    for (writers, side, verdict), rows in groups.items():
        words = ", ".join(_carried_word(row) for row in rows)
        names = listed(writers.split(", "))
        yield f"Carried by: {names} restored in its {side}: {words}: {verdict}."


def _carried_word(row: Row) -> str:
    control = max(row["others"], row["other_run"])
    return f"{word_name(row)} {row['changed']:.0%} → {row['restored']:.0%} (control {control:.0%})"


def level_lines(reason: Reason, reasons: bool) -> Iterator[str]:
    """A line for each word that others were compared with, of its kind and any: those whose kind
    is shown, or the rest.
    """
    levels = [finding for finding in reason.findings if finding.kind in LEVELS]
    tested = [finding for finding in levels if finding.measured is not None]
    for finding in sorted(tested, key=lambda one: (_is_query(reason, one), _clearness(one))):
        if finding.is_reason == reasons:
            yield _level_line(reason, finding)


def _level_line(reason: Reason, finding: Finding) -> str:
    """A word's level: the words that keep the look best, those that break it, and the counts."""
    words = "random words" if finding.kind == "any word" else "words like it"
    counts = _counts(finding, words)
    place = _place_of(reason, finding)
    examples = _examples(reason, finding)
    return f"{finding.kind.capitalize()}: at {place} {counts}{examples}: {finding.verdict}."


def _examples(reason: Reason, finding: Finding) -> str:
    """Of the words that were counted, those that keep a look best and those that break it."""
    left = {
        row["word"]: row["left"]
        for row in reason.replaced
        if row["position"] == finding.positions[0] and row["word"] in finding.counted
    }
    ranked = sorted(left, key=lambda word: left[word])
    keepers = [word for word in reversed(ranked) if left[word] >= KEEPS][:_EACH]
    breakers = [word for word in ranked if left[word] < KEEPS][:_EACH]
    groups = [_with_shares(keepers, "keeps", left), _with_shares(breakers, "leaves", left)]
    named = "; ".join(group for group in groups if group)
    return f" ({named})" if named else ""


def _with_shares(words: Sequence[str], verb: str, left: Mapping[str, float]) -> str:
    """Words with what each leaves of the look; the verb stands behind the first."""
    named = [f"{quoted(word)} {left[word]:.0%}" for word in words]
    if named:
        named[0] = f"{quoted(words[0])} {verb} {left[words[0]]:.0%}"
    return ", ".join(named)


def words_line(question: AskedPrompt, because: Because, reason: Reason) -> str:
    """The words in whose place random ones leave less than half of the attention."""
    breaking = [row for row in reason.words if breaks_on_average(row, reason.before)]
    untested = [quoted(word.text) for word in because.words if not because.alternatives(word)]
    without = ""
    if untested:
        without = f"; no other word has the shape of {', '.join(dict.fromkeys(untested))}"
    without += because.held
    tried = f"Words: of {tried_words(reason)} replaced one at a time"
    if not breaking:
        return f"{tried}, none takes half of the attention away{without}."
    words = ", ".join(_breaking_word(row) for row in breaking[:_SHOWN])
    rest = f" and {len(breaking) - _SHOWN} more" if len(breaking) > _SHOWN else ""
    to = token_name(question, breaking[0]["goes_to_position"])
    return (
        f"{tried}, these leave less than half of it with random words in their place: {words}{rest};"
        f" attention goes to {to}{without}."
    )


def _breaking_word(row: Row) -> str:
    name = f"{word_name(row)} {row['after']:.0%}"
    if row["cause"] == "open":
        return f"{name} (not certain, {row['low']:.0%} to {row['high']:.0%})"
    return name


# ---------------------------------------------------------------------- names and numbers


def share(value: float | None, reason: Reason) -> str:
    """A share of a look as attention; nothing where it was not measured."""
    return "" if value is None else f"{value * reason.before:.0%}"


def word_name(row: Row) -> str:
    """A word with the place where it starts."""
    return f"{quoted(row['text'])} (token {row['position']})"


def token_name(question: AskedPrompt, place: int) -> str:
    """A token with its place; a later piece of a character reads as the whole of it."""
    return f"{quoted(whole(question.tokens, place))} (token {place})"


def tried_words(reason: Reason) -> str:
    """How many words were replaced, of how many in sight."""
    if reason.tried == reason.seen:
        return str(reason.tried)
    return f"{reason.tried} (of {reason.seen} in sight)"


def listed(names: Sequence[str]) -> str:
    """Names with commas and an *and*, each once.

    >>> listed(["L1H0", "M2", "L1H0", "M3"])
    'L1H0, M2 and M3'
    """
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} and {last}" if first else last
