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
from qkscope.findings.next_token import Output, quoted
from qkscope.findings.prompt_trace import PromptTrace
from qkscope.findings.shipped_atlas import known_departure
from qkscope.verbs.why.next_words import does_line, effect_sentence

Row = Mapping[str, Any]
Rows = Sequence[Row]
Tables = Mapping[str, Rows]
_AWAY = 0.95  # with so much attention on the first token a head rests
_SHOWN = 4  # words of a line


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
    effect = effect_sentence(output, tables["output"])
    return f"{where}{why}{carried_clause(carriers)}. {effect}".rstrip()


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
