"""An answer of `why` in words: first the reason, then what was tested, a line each.

Every sentence says who, what, how much, and beside what control; a verdict is *shown*, *not shown* or *untested*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkscope.analyses.because import Reason
from qkscope.analyses.trace.prompt import PromptTrace
from qkscope.analyses.trace.rows import ATTENDED
from qkscope.analyses.trace.verdicts import controls_of, few_controls, named_cut
from qkscope.analyses.why.output import Output

Row = Mapping[str, Any]
_AWAY = 0.95  # with so much attention on the first token a head rests
_SHOWN = 4  # words of a line


def answer_of(
    one: PromptTrace, reason: Reason | None, carriers: Sequence[Row], output: Output, pushed: Sequence[Row]
) -> str:
    """The reason in one sentence, who carried it, and what the head does for the answer."""
    attention, first = float(one.attention[one.key]), float(one.attention[0])
    asking, key = f"{one.head} at {one.token(one.asked.query)}", one.token(one.key)
    if first > _AWAY and attention < ATTENDED:
        return (
            f"{asking} rests on the first token ({first:.0%}): it attends to nothing here ({key} has {attention:.1%})."
        )
    if attention < ATTENDED:
        return f"{asking} does not attend to {key}: {attention:.1%} of its attention is there."
    if one.key == 0:
        return f"{asking} gives {attention:.0%} to the first token, which draws attention whatever it says."
    where = f"{asking} looks at {key}, {attention:.0%}"
    if first > attention:
        where += f" (though most, {first:.0%}, rests on the first token)"
    told = [f"{where}{because(one, reason) if reason else ''}.", _carried(carriers), _direction(output, pushed)]
    return " ".join(sentence for sentence in told if sentence)


def because(one: PromptTrace, reason: Reason) -> str:
    """The first relation that was shown, in words, with its numbers."""
    row = next((row for row in reason.relations if row["verdict"] == "shown"), None)
    near = next((row for row in reason.relations if row["kind"] == "same word" and nearly_same(row)), None)
    if row is None or (near is not None and row["kind"] in ("no single word", "few words")):
        row = near or row
    if row is None:
        return ""
    text, left = repr(row["text"]), {name: _share(row[name], reason) for name in ("alone", "together", "different")}
    match row["kind"]:
        case "same word":
            a, b = (int(place) for place in row["positions"].split(", "))
            end = next(word["end"] for word in reason.words if word["position"] == a)
            stands = "stands just before it and again" if end == one.key else "stands twice"
            stands = "stands there and again" if a <= one.key < end else stands
            both = f"with another word in one place at most {left['alone']}, with one other word in both"
            part = "" if row["verdict"] == "shown" else " in part"
            other = f"(two different words {left['different']})"
            return f",{part} because {text} {stands} (tokens {a} and {b}): {both} {left['together']} {other}"
        case "position":
            back = one.asked.query - one.key
            moved = f"a word put in after it leaves {left['alone']} there and {left['together']} at the same distance"
            return f", by position ({back} token{'s' * (back > 1)} back): {moved}"
        case "self":
            return ": at itself"
        case "key word" | "query word":
            at = "it says" if row["kind"] == "key word" else "the query says"
            return f", because {at} {text}: with another word there {left['alone']}"
        case "few words":
            words = ", ".join(f"{word['text']!r} (token {word['position']})" for word in reason.causes)
            return f", because of {words}: with any of them changed, less than half of that"
        case "no few words":
            return f": {len(reason.causes)} words matter to it, and no few of them are the reason"
    return ": no single word decides it (no change of one word reliably takes half of that away)"


def nearly_same(row: Row) -> bool:
    """Whether two equal words restore as the rule asks, though one alone does not take half of the attention away."""
    return row["together"] is not None and row["together"] - max(row["alone"], row["different"]) >= 0.25


def _share(value: float | None, reason: Reason) -> str:
    return "" if value is None else f"{value * reason.before:.0%}"


def _carried(carriers: Sequence[Row]) -> str:
    told: dict[str, list[str]] = {}
    for row in (row for row in carriers if row["verdict"] == "shown"):
        what = f"{row['writers'].replace(', ', ' and ')} carried {row['text'].strip()!r} into its {row['side']}"
        told.setdefault(what, []).append(f"changed {row['changed']:.0%}, their part put back {row['restored']:.0%}")
    return " ".join(f"{what} ({'; '.join(numbers)})." for what, numbers in told.items())


def _direction(output: Output, pushed: Sequence[Row]) -> str:
    rival = next((row for row in pushed if row["rival"]), None)
    if rival is None or rival["difference"] is None:
        return ""
    before, after = output.difference, rival["difference"]
    does = "Helps" if after < before - 0.1 else "Acts against" if after > before + 0.1 else "Hardly changes"
    return f"{does} {output.answer!r} against {rival['token']!r}: difference {before:.1f} → {after:.1f} without it."


def lines_of(
    one: PromptTrace,
    reason: Reason | None,
    carriers: Sequence[Row],
    cuts: Sequence[Row],
    pushed: Sequence[Row],
    returns: Row | None,
    parts: Sequence[Row] = (),
) -> list[str]:
    """What stands behind the answer: a line each."""
    lines = [where_line(one)]
    if reason is not None and one.attends:
        lines += [_words(reason), *_relations(reason), *(_carrier(row) for row in carriers)]
    if one.attends:
        named = [cut for side in ("key", "query") if (cut := named_cut(cuts, side)) is not None]
        lines += [_cut(cut) for cut in sorted(named, key=lambda cut: cut["after"])[:1]]
    features = ", ".join(f"{row['part']} {row['share'] or 0:.0%}" for row in parts if row["by"] == "features")
    lines.append(f"By features: {features} of a logit of {one.total:.1f}." if features else "")
    return [line for line in (*lines, does_line(pushed), _returned(returns)) if line]


def where_line(one: PromptTrace) -> str:
    """The tokens that get most attention."""
    ranked = sorted((i for i in one.others), key=lambda i: -float(one.attention[i]))[:_SHOWN]
    keys = ", ".join(f"{one.asked.tokens[i]!r} {float(one.attention[i]):.0%}" for i in ranked)
    return f"Where it looks: {keys}; the first token has {float(one.attention[0]):.0%}."


def _words(reason: Reason) -> str:
    named = [row for row in reason.words if row["after"] < 0.5 * reason.before][:_SHOWN]
    if not named:
        return f"Words changed: none of {reason.tried} takes half of the attention away."
    words = ", ".join(
        f"{row['text']!r} (token {row['position']}) {row['after']:.0%}{' (open)' * (row['cause'] == 'open')}"
        for row in named
    )
    return f"Words changed leave: {words} (of {reason.tried} tried); it goes to {named[0]['goes_to']!r}."


def _relations(reason: Reason) -> list[str]:
    """The tests that the answer does not tell: another pair of equal words, and where the attention follows."""
    lines, pairs = [], [row for row in reason.relations if row["kind"] == "same word" and row["together"] is not None]
    for row in pairs[1:2]:
        left = [_share(row[name], reason) for name in ("together", "alone", "different")]
        lines.append(
            f"Same word: {row['text']!r} (tokens {row['positions']}): both by one other word {left[0]}, one place at"
            f" most {left[1]}, two different words {left[2]}: {row['verdict']}."
        )
    for row in reason.relations:
        if row["kind"] == "follows" and row["together"] is not None:
            lines.append(
                f"Follows: {row['text']!r} (token {row['positions']}) becomes another word of the prompt (of"
                f" {row['words']}): {_share(row['together'], reason)} goes where the reason says (control"
                f" {_share(row['control'], reason)}): {row['verdict']}."
            )
    return lines


def _carrier(row: Row) -> str:
    side = row["side"]
    return (
        f"Carried by: {row['text']!r} (token {row['position']}) changed {row['changed']:.0%}; {row['writers']} put back"
        f" into the {side} {row['restored']:.0%} (20 others {row['others']:.0%}, from another run"
        f" {row['other_run']:.0%}, whole {side} {row['whole_side']:.0%}): {row['verdict']}."
    )


def _cut(cut: Row) -> str:
    live = "" if cut.get("live") is None else f", norms live {cut['live']:.0%}"
    tested = f"{controls_of(cut)}: {cut['control_low']:.0%} to {cut['control_high']:.0%}"
    tested = few_controls(cut) if cut["verdict"] == "untested" else tested
    return (
        f"Cut: {cut['writers']} from the {cut['side']}, this head alone, norms frozen: {cut['before']:.0%} to"
        f" {cut['after']:.0%}{live} ({tested}): {cut['verdict']}."
    )


def does_line(pushed: Sequence[Row]) -> str:
    """What hiding the key changes of the next token, and the head's direct effect."""
    if not pushed:
        return ""
    best = pushed[0]
    text = f"What it does: hidden, {best['token']!r} goes from {best['before']:.1%} to {best['without_key']:.1%}"
    if best["without_other"] is not None:
        text += f" (its second token instead: {best['without_other']:.1%})"
    direct = [row for row in pushed if row["direct"] is not None]
    if direct and max(abs(row["direct"]) for row in direct[:5]) >= 0.1:
        most = [best, *sorted((row for row in direct if row is not best), key=lambda row: -row["direct"])][:3]
        named = ", ".join("{!r} {:+.1f}".format(row["token"], row["direct"]) for row in most)
        text += f"; direct effect on the logits: {named}"
    elif direct:
        text += "; no direct effect on any likely token: it acts through later heads"
    return text + "."


def _returned(row: Row | None) -> str:
    if row is None:
        return ""
    return (
        f"The reason's share: {row['text']!r} (token {row['position']}) changed, {row['token']!r} has"
        f" {row['changed']:.1%}; with only this head's attention as before {row['restored']:.1%} (unchanged"
        f" {row['before']:.1%})."
    )


def heads_answer(output: Output, rows: Sequence[Row], says: str) -> str:
    """The next token and its rival, and how many heads decide between them."""
    chance, rival = float(output.chances[output.best]), float(output.chances[output.rival])
    told = (
        f"The next token after {output.asked.tokens[output.asked.query]!r} is {output.answer!r} ({chance:.1%}) rather"
        f" than {output.token(output.rival)!r} ({rival:.1%}), by {output.difference:.1f} in logits."
    )
    matter = {way: [row["head"] for row in rows if row["direction"] == way] for way in ("for", "against")}
    tried = f"Hide each head's main token in turn ({len(rows)} tried):"
    if not any(matter.values()):
        return f"{told} {tried} no single head matters, none changes that by 0.1."
    parts = [
        f"{len(own)} {way} it ({', '.join(own[:3])}{', …' * (len(own) > 3)})" for way, own in matter.items() if own
    ]
    going = f" It goes on: {says!r}." if says else ""
    return f"{told}{going} {tried} {' and '.join(parts)} change that by 0.1 or more."
