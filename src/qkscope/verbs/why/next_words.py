"""What an answer of `why` says of the next token: the answer, its rival, and what decides between
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkscope.findings.next_token import Output, quoted, whole
from qkscope.findings.pair import ALL

Row = Mapping[str, Any]
Rows = Sequence[Row]
_MOVES = 0.1  # logits: a head that changes the answer's lead by less hardly changes it
_UNDECIDED = 0.1  # a likeliest next token with a smaller probability is no decision
_SPANS = 3  # differences of a pair in a sentence
_OTHERS = 2  # rivals that are named because another head would come first with them


def asked_sentence(output: Output, appended: str = "", says: str = "") -> str:
    """The next token, the answer that is asked about, its rival and its lead.

    Parameters
    ----------
    output : the next token.
    appended : what was put behind the prompt because answer and rival both begin with it.
    says : how the model continues the prompt.
    """
    after = quoted(whole(output.asked.tokens, output.asked.query))
    on = f"; it continues {quoted(says)}" if says else ""
    rival = output.told(output.rival, chance=True)
    chosen = f", {output.why_rival}," if output.why_rival else ","
    lead = f"{'ahead' if output.difference >= 0 else 'behind'} by {abs(output.difference):.1f}"
    answer = output.told(output.best, chance=True)
    if output.best == output.likeliest:
        told = f"The next token after {after} is {answer} rather than {rival}{chosen} {lead}"
    else:
        next_token = output.told(output.likeliest, chance=True)
        told = (
            f"The next token after {after} is {next_token}. Asked about is {answer} rather than"
            f" {rival}{chosen} {lead}"
        )
    return " ".join([f"{told} in logits{on}.", *notes(output, appended)])


def notes(output: Output, appended: str = "") -> list[str]:
    """What a reader must know of an answer and its rival: what they were before a change, whether
    the model is undecided, and what was put behind the prompt.
    """
    found = []
    if output.before is not None:
        found.append(before_sentence(output))
    if float(output.chances[output.likeliest]) < _UNDECIDED:
        found.append("The model is undecided: no next token has 10%.")
    if appended:
        found.append(f"Asked after {quoted(appended)}, with which answer and rival both begin.")
    return found


def before_sentence(output: Output) -> str:
    """What answer and rival were in the unchanged prompt, inside a ``with`` block."""
    before = output.before
    assert before is not None
    best = quoted(output.text_of("answer"))
    rival = quoted(output.text_of("rival"))
    lead = f"{'ahead' if before.difference >= 0 else 'behind'} by {abs(before.difference):.1f}"
    return (
        f"Before the change {best} had {float(before.chances[before.best]):.1%} and {rival}"
        f" {float(before.chances[before.rival]):.1%}, {lead}."
    )


def pair_sentence(output: Output, rows: Rows) -> str:
    """What each difference of a pair does to a head's attention and to the answer's lead."""
    if not rows:
        return "The prompts of the pair differ behind the query alone, which sees nothing of it."
    best = quoted(output.text_of("answer"))
    rival = quoted(output.text_of("rival"))
    told = [_span_words(row) for row in rows[:_SPANS]]
    more = f", and {len(rows) - _SPANS} more in the table" if len(rows) > _SPANS else ""
    return (
        f"In the corrupted prompt: with {', with '.join(told)}{more} (the lead of {best} over"
        f" {rival})."
    )


def _span_words(row: Row) -> str:
    """One difference, and what it does."""
    what = (
        "all of them"
        if row["text"] == ALL
        else f"{quoted(row['corrupted'])} for {quoted(row['text'])}"
    )
    lead = f"the lead goes from {row['lead_before']:.1f} to {row['lead']:.1f}"
    if "attention" not in row:
        return f"{what} {lead}"
    looks = f"{row['head']}'s attention goes from {row['attention_before']:.0%} to {row['attention']:.0%}"
    return f"{what} {looks} and {lead}"


def heads_answer(output: Output, tables: Mapping[str, Rows], appended: str, says: str) -> str:
    """The next token and its rival, how many heads decide between them, and which other rival
    would put another head first.
    """
    told = asked_sentence(output, appended, says)
    rows = tables["heads"]
    matter = {way: sum(row["direction"] == way for row in rows) for way in ("for", "against")}
    tried = f"Hide each head's main token in turn ({len(rows)} tried):"
    if not any(matter.values()):
        return f"{told} {tried} no single head changes that by 0.1."
    counts = f"{matter['for']} for it, {matter['against']} against it (by 0.1 or more)"
    return f"{told} {tried} {counts}.{_other_first(tables['rivals'])}"


def _other_first(rivals: Rows) -> str:
    """Which other rivals would put another head first."""
    first = rivals[0]["head"]
    others = [row for row in rivals[1:] if row["head"] and row["head"] != first]
    named = [f"rather than {quoted(row['token'])} {row['head']}" for row in others[:_OTHERS]]
    if not first or not named:
        return ""
    return f" The first head is {first}; {', '.join(named)} would come first."


def effect_sentence(output: Output, pushed: Rows) -> str:
    """What a head's look does for the answer: its lead with the key hidden, beside that with the
    head's second key hidden.
    """
    rival = next((row for row in pushed if row["rival"]), None)
    if rival is None or rival["difference"] is None:
        return ""
    before = output.difference
    after = rival["difference"]
    other = rival["difference_other"]
    best = output.told(output.best)
    over = output.told(output.rival)
    if abs(after - before) < _MOVES:
        does = "hardly changes"
    elif other is not None and abs(other - before) >= abs(after - before):
        return (
            f"What it does for {best} is not shown: its lead over {over} goes from {before:.1f} to"
            f" {after:.1f} with this key hidden, and to {other:.1f} with its second key hidden."
        )
    else:
        does = "helps" if after < before else "works against"
    ahead = f"{before:.1f} logits ahead of {over}"
    if before < 0:
        ahead = f"{-before:.1f} logits behind {over}"
    changed = f"{after:.1f} with this key hidden"
    if (after < 0) != (before < 0):
        changed = f"{abs(after):.1f} {'behind' if after < 0 else 'ahead'} with this key hidden"
    elif before < 0:
        changed = f"{-after:.1f} with this key hidden"
    return f"It {does} {best}: {ahead}, {changed}."


def does_line(pushed: Rows) -> str:
    """What hiding the key changes of the next token, and the head's direct effect on it and its
    rival.
    """
    if not pushed:
        return ""
    best = pushed[0]
    rival = next((row for row in pushed if row["rival"]), pushed[0])
    text = f"Effect: P({quoted(best['token'])}) {best['before']:.1%} → {best['without_key']:.1%} with this key hidden"
    if best["without_other"] is not None:
        text += f" (control, its second key: {best['without_other']:.1%})"
    if best["direct"] is not None:
        named = ", ".join(
            f"{quoted(row['token'])} {round(row['direct'], 1) + 0.0:+.1f}" for row in (best, rival)
        )
        small = max(abs(best["direct"]), abs(rival["direct"])) < _MOVES
        moves = ", it acts through later layers" * (
            abs(best["without_key"] - best["before"]) >= 0.01
        )
        text += f"; no direct effect{moves}" if small else f"; direct effect in logits: {named}"
    return text + "."
