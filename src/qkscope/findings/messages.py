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
from qkscope.findings.registry import LEFT, breaks_on_average, nearly_equal
from qkscope.text import grouped

Row = Mapping[str, Any]
Rows = Sequence[Row]
_SHOWN = 4  # words of a line
_PAIRS = 2  # pairs of equal words that have a line


@dataclass(frozen=True)
class Headline:
    """The finding that an answer gives as the reason, and the words at key and query beside it.

    Parameters
    ----------
    finding : the reason.
    own_words : findings about the key's and the query's own word that are shown, too.
    is_part : whether these are said as a part of the reason.
    """

    finding: Finding
    own_words: Sequence[Finding]
    is_part: bool = False


def headline(reason: Reason, carriers: Rows) -> Headline | None:
    """Choose what to give as the reason: the first finding that is shown.

    Two equal words that nearly pass are given where nothing but the number of causes is shown, or
    beside the own word of key or query if they were carried there.
    """
    own_words = [_first_shown(reason, kind) for kind in ("key word", "query word")]
    shown_own_words = [finding for finding in own_words if finding is not None]
    pairs = (finding for finding in reason.findings if finding.kind == "same word")
    pair = next((finding for finding in pairs if nearly_equal(finding)), None)
    if not reason.shown:
        return None if pair is None else Headline(pair, shown_own_words)
    first = reason.shown[0]
    if pair is not None and first.kind in ("no single word", "few words"):
        return Headline(pair, shown_own_words)
    if pair is not None and first.kind in ("key word", "query word"):
        carried = {row["text"].strip().lower() for row in carriers if row["verdict"] == "shown"}
        if pair.text.strip().lower() in carried:
            return Headline(pair, shown_own_words, is_part=True)
    return Headline(first, shown_own_words)


def _first_shown(reason: Reason, kind: str) -> Finding | None:
    """The first shown finding of a kind."""
    return next((finding for finding in reason.shown if finding.kind == kind), None)


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
    also = f", in part because of {_own_words(reason, chosen)}" if chosen.is_part else ""
    return f",{part} because {quoted(finding.text)} appears {where} (tokens {a} and {b}){also}"


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


def _own_word_clause(_question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    return f", because of {_own_words(reason, chosen)}"


def _own_words(reason: Reason, chosen: Headline) -> str:
    return " and ".join(_own_word(finding, reason) for finding in chosen.own_words)


def _own_word(finding: Finding, reason: Reason) -> str:
    at = "there" if finding.kind == "key word" else "it looks from"
    left = share(finding.measured, reason)
    return f"the word {at}, {quoted(finding.text)} (replacing it leaves {left})"


def _few_words(_question: AskedPrompt, reason: Reason, chosen: Headline) -> str:
    words = ", ".join(word_name(row) for row in reason.causes)
    which = "any one" if len(chosen.finding.positions) > 1 else "it"
    return f", because of {words}: replacing {which} leaves less than half"


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
    "follows": _no_single_word,  # shown only behind the same word
    "key word": _own_word_clause,
    "query word": _own_word_clause,
    "few words": _few_words,
    "no few words": _no_few_words,
    "no single word": _no_single_word,
}
"""By kind, the clause that gives it as the reason."""


def carried_clause(carriers: Rows) -> str:
    """Name the writers that carried each word into the query or the key; equal words once."""
    writers_of: dict[tuple[str, str], list[str]] = {}
    for row in carriers:
        if row["verdict"] == "shown":
            word = row["text"].strip() or row["text"]
            writers_of.setdefault((word, row["side"]), []).extend(row["writers"].split(", "))
    clauses = [
        f"; {listed(writers)} carried {quoted(word)} into its {side}"
        for (word, side), writers in writers_of.items()
    ]
    return "".join(clauses)


# ---------------------------------------------------------------------- lines below the answer


def relation_lines(reason: Reason) -> Iterator[str]:
    """A line for each pair of equal words, and whether the attention follows another word."""
    pairs = [finding for finding in reason.findings if finding.kind == "same word"]
    for finding in pairs[:_PAIRS]:
        yield _pair_line(finding, reason)
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


def words_line(question: AskedPrompt, because: Because, reason: Reason) -> str:
    """The words whose replacement takes half of the attention away."""
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
    return f"{tried}, these leave less than half of it: {words}{rest}; attention goes to {to}{without}."


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
