"""An answer of `why` in words: first the reason, who carried it and what the head does; then the
tests, a line each.

Every line says who, what, how much, and beside what control; a verdict is *shown*, *not shown* or
*untested*. Lines stand in the order in which they matter: a terminal shows the first ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkscope.findings.because import Because
from qkscope.findings.finding import Reason
from qkscope.findings.head_rows import ATTENDED
from qkscope.findings.messages import (
    carried_clause,
    carrier_lines,
    level_lines,
    reason_clause,
    relation_lines,
    token_name,
    word_name,
    words_line,
)
from qkscope.findings.next_token import Output, quoted, whole
from qkscope.findings.prompt_trace import PromptTrace
from qkscope.findings.shipped_atlas import known_departure

Row = Mapping[str, Any]
Rows = Sequence[Row]
Tables = Mapping[str, Rows]
_AWAY = 0.95  # with so much attention on the first token a head rests
_SHOWN = 4  # words of a line
_MOVES = 0.1  # logits: a head that changes the answer's lead by less hardly changes it


def answer_of(one: PromptTrace, reason: Reason | None, output: Output, tables: Tables) -> str:
    """The reason and who carried it in one sentence, and what the head does for the answer in
    another.
    """
    attention = float(one.attention[one.key])
    first = float(one.attention[0])
    asking = f"{one.head} at {token_name(one.asked, one.asked.query)}"
    key = token_name(one.asked, one.key)
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
    why = reason_clause(one.asked, reason, carriers) if reason else ""
    effect = _direction(output, tables["output"])
    return f"{where}{why}{carried_clause(carriers)}. {effect}".rstrip()


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
    if reason:
        groups = [[*relation_lines(reason)], [*level_lines(reason, reasons=True)]]
        for group in reversed(groups) if reason.kind == "kind" else groups:
            lines += group
        lines += carrier_lines(tables["carriers"])
    lines.append(does_line(tables["output"]))
    if because and reason:
        lines += [words_line(one.asked, because, reason), *level_lines(reason, reasons=False)]
        lines.append(_beside_rule(one))
    returned = (
        f"Share: with {word_name(row)} replaced, P({quoted(row['token'])}) is"
        f" {row['changed']:.1%}; restoring this head's attention alone gives"
        f" {row['restored']:.1%} (before {row['before']:.1%})."
        for row in tables["returns"]
    )
    return [line for line in (*lines, where_line(one), *returned) if line]


def where_line(one: PromptTrace) -> str:
    """The tokens that get most attention, pieces of a character together."""
    given: dict[str, float] = {}
    for i in one.others:
        name = token_name(one.asked, next((j for j in range(i, -1, -1) if one.asked.tokens[j]), i))
        given[name] = given.get(name, 0.0) + float(one.attention[i])
    ranked = sorted(given, key=lambda name: -given[name])[:_SHOWN]
    keys = ", ".join(f"{name} {given[name]:.0%}" for name in ranked if given[name] >= 0.005)
    return f"Looks at: {keys or 'nothing else'}; the first token {float(one.attention[0]):.0%}."


def _beside_rule(one: PromptTrace) -> str:
    """Where the look departs from what the head's rule says, where an atlas of the model ships."""
    ids = one.asked.inputs["input_ids"][0, : one.asked.query + 1].tolist()
    weights = one.run.reader.scope.weights_hash
    return known_departure(weights, one.head, ids, one.attention[: len(ids)], one.key)


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
