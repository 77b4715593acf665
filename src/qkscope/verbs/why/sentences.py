"""An answer of `why` in words: first the reason, who carried it and what the head does; then the
tests, a line each.

Every line says who, what, how much, and beside what control; a verdict is *shown*, *not shown* or
*untested*. Lines stand in the order in which they matter: a terminal shows the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkscope.findings.because import Because, Reason
from qkscope.findings.head_jobs import job_of, known_jobs
from qkscope.findings.head_rows import ATTENDED
from qkscope.findings.next_token import Output, quoted, whole
from qkscope.findings.prompt_trace import PromptTrace, Question
from qkscope.text import grouped

Row = Mapping[str, Any]
Rows = Sequence[Row]
Tables = Mapping[str, Rows]
_AWAY = 0.95  # with so much attention on the first token a head rests
_SHOWN = 4  # words of a line
_OFTEN = 0.2  # of its looks on natural text: a job that a head is known for
_MOVES = 0.1  # logits: a head that changes the answer's lead by less hardly changes it


def answer_of(one: PromptTrace, reason: Reason | None, output: Output, tables: Tables) -> str:
    """The reason and who carried it in one sentence, and what the head does for the answer in
    another.
    """
    attention = float(one.attention[one.key])
    first = float(one.attention[0])
    asking = f"{one.head} at {_token(one.asked, one.asked.query)}"
    key = _token(one.asked, one.key)
    if first > _AWAY and attention < ATTENDED:
        return f"{asking} rests on the first token ({first:.0%}): it attends to nothing ({key} has {attention:.1%})."
    if attention < ATTENDED:
        return f"{asking} does not attend to {key}: {attention:.1%} of its attention is there."
    if one.key == 0:
        return f"{asking} gives {attention:.0%} to the first token, which draws attention whatever it says."
    where = f"{asking} looks at {key}, {attention:.0%}"
    if one.others == [one.asked.query]:
        return f"{where}: it sees the first token and itself alone, so there is nothing to choose; ask a longer prompt."
    if first > attention:
        where += f" (though most, {first:.0%}, rests on the first token)"
    carriers = tables["carriers"]
    why = because(one, reason, carriers) if reason else ""
    return f"{where}{why}{carried(carriers)}. {_direction(output, tables['output'])}".rstrip()


def because(one: PromptTrace, reason: Reason, carriers: Rows = ()) -> str:
    """The first relation that was shown, in words; two equal words that nearly pass, where nothing
    better did.
    """
    shown = [row for row in reason.relations if row["verdict"] == "shown"]
    near = next(
        (row for row in reason.relations if row["kind"] == "same word" and nearly_same(row)), None
    )
    carried = {row["text"].strip().lower() for row in carriers if row["verdict"] == "shown"}
    kinds = {row["kind"]: row for row in reversed(shown)}
    words = [
        _own_word(one, kinds[kind], reason) for kind in ("key word", "query word") if kind in kinds
    ]
    row = shown[0] if shown else near
    also = ""
    if near is not None and row is not None:
        if row["kind"] in ("no single word", "few words"):
            row = near
        elif row["kind"] in ("key word", "query word") and near["text"].strip().lower() in carried:
            row = near
            also = f", in part because of {' and '.join(words)}"
    if row is None:
        return ""
    match row["kind"]:
        case "same word":
            a, b = (int(place) for place in row["positions"].split(", "))
            end = next(word["end"] for word in reason.words if word["position"] == a)
            twice = (
                sum(
                    token.strip().lower() == row["text"].strip().lower()
                    for token in one.asked.tokens
                )
                <= 2
            )
            where = "just before it and again" if end == one.key else "twice" if twice else "again"
            where = "there and again" if a <= one.key < end else where
            part = "" if row["verdict"] == "shown" else " in part"
            return (
                f",{part} because {quoted(row['text'])} appears {where} (tokens {a} and {b}){also}"
            )
        case "position":
            back = one.asked.query - one.key
            left = [_share(row[name], reason) for name in ("alone", "together")]
            moved = f"with a word inserted after it, {left[0]} stays and {left[1]} moves to the token at that distance"
            return f", by position ({back} token{'s' * (back > 1)} back): {moved}"
        case "self":
            return ", which is itself"
        case "key word" | "query word":
            return f", because of {' and '.join(words)}"
        case "few words":
            named = ", ".join(map(_word, reason.causes))
            one_of = "any one" if "," in row["positions"] else "it"
            return f", because of {named}: replacing {one_of} leaves less than half"
        case "no few words":
            return f": it depends on {len(reason.causes)} words, too many to name one reason"
    likely = [row for row in reason.words if row["after"] < 0.5 * reason.before][:2]
    if likely:
        named = ", ".join(f"{_word(row)} {row['after']:.0%}" for row in likely)
        return f": no single word is certain to decide it (replacing one leaves less than half on average: {named})"
    return f": no single word decides it (of {_tried(reason)} replaced one at a time, none takes half of that away)"


def _own_word(one: PromptTrace, row: Row, reason: Reason) -> str:
    at = "there" if row["kind"] == "key word" else "it looks from"
    return (
        f"the word {at}, {quoted(row['text'])} (replacing it leaves {_share(row['alone'], reason)})"
    )


def nearly_same(row: Row) -> bool:
    """Whether two equal words restore as the rule asks, though one alone does not take half of the
    attention away.
    """
    return (
        row["together"] is not None
        and row["together"] - max(row["alone"], row["different"]) >= 0.25
    )


def _share(value: float | None, reason: Reason) -> str:
    return "" if value is None else f"{value * reason.before:.0%}"


def _word(row: Row) -> str:
    return f"{quoted(row['text'])} (token {row['position']})"


def _token(asked: Question, i: int) -> str:
    """A token with its place; a later piece of a character reads as the whole of it."""
    return f"{quoted(whole(asked.tokens, i))} (token {i})"


def carried(carriers: Rows) -> str:
    """Say which writers carried each word into the query or the key; equal words are named once."""
    told: dict[tuple[str, str], list[str]] = {}
    for row in (row for row in carriers if row["verdict"] == "shown"):
        told.setdefault((row["text"].strip() or row["text"], row["side"]), []).extend(
            row["writers"].split(", ")
        )
    return "".join(
        f"; {_and(names)} carried {quoted(text)} into its {side}"
        for (text, side), names in told.items()
    )


def _and(names: Sequence[str]) -> str:
    *some, last = dict.fromkeys(names)
    return f"{', '.join(some)} and {last}" if some else last


def _direction(output: Output, pushed: Rows) -> str:
    rival = next((row for row in pushed if row["rival"]), None)
    if rival is None or rival["difference"] is None:
        return ""
    before = output.difference
    after = rival["difference"]
    does = (
        "helps"
        if after < before - _MOVES
        else "works against"
        if after > before + _MOVES
        else "hardly changes"
    )
    best = output.told(output.best)
    other = output.told(output.rival)
    return (
        f"It {does} {best}: {before:.1f} logits ahead of {other}, {after:.1f} with this key hidden."
    )


def lines_of(
    one: PromptTrace, because: Because | None, reason: Reason | None, tables: Tables
) -> list[str]:
    """What stands behind the answer: a line each."""
    features = ", ".join(
        f"{row['part']} {row['share'] or 0:.0%}"
        for row in tables["parts"]
        if row["by"] == "features"
    )
    lines = [f"By features: {features} of a logit of {one.total:.1f}." if features else ""]
    lines += [*_relations(reason), *_carriers(tables["carriers"])] if reason else []
    lines.append(does_line(tables["output"]))
    lines += [_words(one, because, reason), _habit(one, reason)] if because and reason else []
    returned = (
        f"Share: with {_word(row)} replaced, P({quoted(row['token'])}) is {row['changed']:.1%}; restoring this head's"
        f" attention alone gives {row['restored']:.1%} (before {row['before']:.1%})."
        for row in tables["returns"]
    )
    return [line for line in (*lines, where_line(one), *returned) if line]


def where_line(one: PromptTrace) -> str:
    """The tokens that get most attention, pieces of a character together."""
    given: dict[str, float] = {}
    for i in one.others:
        name = _token(one.asked, next((j for j in range(i, -1, -1) if one.asked.tokens[j]), i))
        given[name] = given.get(name, 0.0) + float(one.attention[i])
    ranked = sorted(given, key=lambda name: -given[name])[:_SHOWN]
    keys = ", ".join(f"{name} {given[name]:.0%}" for name in ranked if given[name] >= 0.005)
    return f"Looks at: {keys or 'nothing else'}; the first token {float(one.attention[0]):.0%}."


def _habit(one: PromptTrace, reason: Reason) -> str:
    """What the head does on natural text, where that fits what it does here."""
    usual = known_jobs(one.run.reader.scope.weights_hash).get(str(one.head), {})
    job = job_of(reason)
    often = (
        0.0 if job.startswith("no ") else usual.get(job, 0.0)
    )  # that nothing was found is no habit
    return (
        f"Habit: on natural text it does the same in {often:.0%} of its looks ({job})."
        if often >= _OFTEN
        else ""
    )


def _tried(reason: Reason) -> str:
    return (
        str(reason.tried)
        if reason.tried == reason.seen
        else f"{reason.tried} (of {reason.seen} in sight)"
    )


def _words(one: PromptTrace, because: Because, reason: Reason) -> str:
    every = [row for row in reason.words if row["after"] < 0.5 * reason.before]
    named = every[:_SHOWN]
    rest = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    alone = [
        quoted(word.text) for word in because.words if not because.others.of(word, because.count)
    ]
    none = (
        f"; no other word has the shape of {', '.join(dict.fromkeys(alone))}" if alone else ""
    ) + because.held
    if not named:
        return f"Words: of {_tried(reason)} replaced one at a time, none takes half of the attention away{none}."
    told = ", ".join(
        f"{_word(row)} {row['after']:.0%}"
        + (
            f" (not certain, {row['low']:.0%} to {row['high']:.0%})"
            if row["cause"] == "open"
            else ""
        )
        for row in named
    )
    to = _token(one.asked, named[0]["goes_to_position"])
    left = f"Words: of {_tried(reason)} replaced one at a time, these leave less than half of it"
    return f"{left}: {told}{rest}; attention goes to {to}{none}."


def _relations(reason: Reason) -> list[str]:
    """Pairs of equal words, and whether the attention follows another word."""
    lines = []
    for row in [row for row in reason.relations if row["kind"] == "same word"][:2]:
        pair = f"Same word: {quoted(row['text'])}"
        if row["together"] is None:
            lines.append(
                f"{pair} (tokens {row['positions']}), too few other words fit both places: untested."
            )
            continue
        alone = _share(row["alone"], reason)
        both = _share(row["together"], reason)
        different = _share(row["different"], reason)
        few = (
            f" ({alone} is over half of {reason.before:.0%})"
            if row["alone"] >= 0.5 and nearly_same(row)
            else ""
        )
        lines.append(
            f"{pair}, replacing either leaves up to {alone} on average, both by the same word {both}, by different"
            f" words {different}: {row['verdict']}{few}."
        )
    for row in reason.relations:
        if row["kind"] == "follows" and row["together"] is not None:
            lines.append(
                f"Follows: {quoted(row['text'])} (token {row['positions']}) replaced by another word of the prompt"
                f" ({row['words']} tried), {_share(row['together'], reason)} moves to that word's key (control"
                f" {_share(row['control'], reason)}): {row['verdict']}."
            )
    return lines


def _carriers(carriers: Rows) -> Iterator[str]:
    """A line for the same writers and side, with every word that they carried."""
    groups = grouped(carriers, lambda row: (row["writers"], row["side"], row["verdict"]))
    for (writers, side, verdict), rows in groups.items():
        control = [max(row["others"], row["other_run"]) for row in rows]
        moved = (f"{_word(row)} {row['changed']:.0%} → {row['restored']:.0%}" for row in rows)
        words = ", ".join(
            f"{text} (control {value:.0%})" for text, value in zip(moved, control, strict=True)
        )
        yield f"Carried by: {_and(writers.split(', '))} restored in its {side}: {words}: {verdict}."


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


def heads_answer(output: Output, rows: Rows, says: str) -> str:
    """The next token and its rival, and how many heads decide between them."""
    after = quoted(whole(output.asked.tokens, output.asked.query))
    best = output.told(output.best, chance=True)
    rival = output.told(output.rival, chance=True)
    lead = f"ahead by {output.difference:.1f} in logits"
    on = f"; it continues {quoted(says)}" if says else ""
    told = (
        f"The next token after {after} is {best} rather than {rival}{output.why_rival}, {lead}{on}."
    )
    matter = {way: sum(row["direction"] == way for row in rows) for way in ("for", "against")}
    tried = f"Hide each head's main token in turn ({len(rows)} tried):"
    if not any(matter.values()):
        return f"{told} {tried} no single head changes that by 0.1."
    return (
        f"{told} {tried} {matter['for']} for it, {matter['against']} against it (by 0.1 or more)."
    )
