"""Why: the question on the door, for any prompt, head and token, without any fit.

The answer in a dozen lines: *where* the head looks, *what matched* (parts of the logit of this token over the others),
*who wrote it*, *causal tests* (cut and swapped on this very prompt, beside random writers), and *what it does* to the
next token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qkscope.analyses.attribute import features_of
from qkscope.analyses.fit import Fit
from qkscope.analyses.prompts import check_same_model, made_with
from qkscope.analyses.trace.graph import trace_graph
from qkscope.analyses.trace.prompt import Probe, PromptTrace
from qkscope.analyses.trace.rows import ATTENDED
from qkscope.analyses.trace.verdicts import controls_of, few_controls, named_cut, no_sum, says_cancels
from qkscope.analyses.why.parts import REST, Output, part_rows, swap_row
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head
from qkscope.kinds import Count, Natural, Seed, checked_class
from qkscope.maths.attribution import Split
from qkscope.maths.subspace import Subspace
from qkscope.runs.result import Result
from qkscope.runs.work import verb

HEADS, _TRIED = 5, 12  # heads told of, and heads that are tried: those that push the likeliest token most
_LEVEL = 0.1  # a logit that is no higher than the others'
_AWAY = 0.95  # with so much attention on the first token a head rests
_WHOLE = 0.25  # a cut that leaves no more of the attention than this names all it was for; else a part of it
_POINT = 0.01  # a head that changes the next token's probability by less does not matter by itself


@checked_class
@dataclass(frozen=True)
class Why(Result):
    """The answer: in words (`str`), in tables, and as a page."""

    main = "attention"

    def __str__(self) -> str:
        return "\n".join([self.answer, *(f"  {row['line']}" for row in self.tables.get("said", ()))])


@verb("why")
def why(
    scope: Scope,
    prompt: str | Example,
    head: str | Head | None = None,
    query: int | str | None = None,
    key: int | str | None = None,
    *,
    features: Fit | Mapping[str, Subspace] | None = None,
    chat: bool = False,
    depth: Natural = 1,
    draws: Count = 20,
    seed: Seed = 0,
    split: Split = "sequential",
    out: str | Path | None = None,
) -> Why:
    """Say why a head attended to a token: where it looks, what matched, who wrote it, causal tests, what it does.

    Parameters
    ----------
    scope : the model.
    prompt : any text.
    head : like L18H6; without one, those that matter most for the next token are told, a line each (of a fit, its
        first head is asked).
    query : the token that asks, by place (from the end where negative) or by its text (``" John"``, ``"to#2"``); the
        last one by default.
    key : the token attended to; by default the one that the head attends to most besides the first.
    features : a fit, or subspaces of this head by name, to split the logit by as well.
    chat : whether the prompt goes into the chat template.
    depth : levels of the graph of writers and what they read.
    draws : random writers beside each cut and swap.
    seed : of them.
    split : among features: ``sequential``, ``average`` over all orders, or ``oblique``.
    out : folder for the result and its page; nothing is written by default.

    Returns
    -------
    Why
        ``tables["attention"]``, ``["parts"]``, ``["writers"]``, ``["cuts"]``, ``["swaps"]``, ``["output"]``,
        ``["graph"]``; without a head ``["heads"]`` alone.

    Examples
    --------
    >>> import qkscope as qk
    >>> found = qk.why(qk.Scope.load("nano:mixed"), "hat: O jam: Z jam:", "L1H0")
    >>> found.tables["cuts"][0]["verdict"] in ("supported", "not here", "unattended", "untested")
    True
    """
    if isinstance(features, Fit):  # asked as it was fitted
        chat, head = chat or features.chat, features.heads[0] if head is None else head
    query, key = (scope.place(prompt, token, chat=chat) for token in (query, key))
    last = None if head is None else scope.check(head).layer
    return answer_probe(Probe(scope, prompt, query, chat, last), head, key, features, depth, draws, seed, split)


def answer_probe(
    probe: Probe,
    head: str | Head | None = None,
    key: int | None = None,
    features: Fit | Mapping[str, Subspace] | None = None,
    depth: int = 1,
    draws: int = 20,
    seed: Seed = 0,
    split: Split = "sequential",
) -> Why:
    """Answer `why` from a prompt that has run: the live page asks many questions of one run."""
    output = Output(probe.run, probe.asked)
    if head is None:
        if key is not None:
            raise BadInput("a key is asked about with a head: name one, or leave the key out.")
        told = _which_heads(probe, output)
    else:
        one = probe.head(head, key)
        parts = part_rows(one, _features(one, features, probe.scope), split)
        told = _one_head(one, output, parts, depth, draws, seed)
    answer, lines, tables = told
    return Why(
        experiment="why",
        answer=answer,
        tables={"said": [{"line": line} for line in lines], **tables},
        seed=seed,
        **made_with(probe.scope, tokenizer=probe.scope.tokenizer_hash, **probe.asked.told(probe.prompt)),
    )


Told = tuple[str, list[str], dict[str, list[dict[str, Any]]]]


def _features(one: PromptTrace, features: Any, scope: Scope) -> dict[str, Subspace]:
    if features is None:
        return {}
    chosen, space = features_of(features, one.head)
    check_space(space)
    for name, subspace in chosen.items():
        check_same_model(subspace.about, scope, f"feature {name!r}")
    return chosen


def check_space(space: str) -> None:
    """Refuse features that were fitted in a space of their own."""
    if space != "post_rope":
        raise BadInput(f"the features were fitted in {space}, and why splits in post_rope: qk.attribute takes these.")


def _one_head(one: PromptTrace, output: Output, parts: list[dict[str, Any]], depth: int, draws: int, seed: int) -> Told:
    check = [{"head": str(one.head), "sum_error": one.error, "logit": one.total}]
    pushed = output.rows(one)
    if (wrong := no_sum(one.head, one.error, output.scope.model.dtype)) is not None:
        lines = [_where(one), _does(pushed)]
        return wrong, lines, {"attention": one.token_rows(), "output": pushed, "check": check}
    cuts, graph = one.cut_rows(draws, seed), trace_graph(one, depth)
    swaps = [swap_row(one, draws, seed)] if one.free and cuts else []
    tables = {
        "attention": one.token_rows(),
        "parts": parts,
        "writers": one.tally.writer_rows(one.head, one.writers),
        "cuts": cuts,
        "swaps": swaps,
        "output": pushed,
        "graph": graph.rows,
        "prompt": graph.prompt,
        "check": check,
    }
    lines = [*lines_of(one, parts, cuts, swaps, tables["graph"]), _does(pushed), _legend(one)]
    return answer_of(one, cuts), [line for line in lines if line], {k: v for k, v in tables.items() if v}


# ---------------------------------------------------------------------- in words


def lines_of(
    one: PromptTrace,
    parts: Sequence[Mapping[str, Any]],
    cuts: Sequence[Mapping[str, Any]],
    swaps: Sequence[Mapping[str, Any]] = (),
    graph: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Where the head looks, what matched, who wrote it, and its causal tests."""
    tested = _causal_tests(cuts, swaps) if one.attends else []
    return [line for line in (_where(one), _matched(one, parts), _written(graph), *tested) if line]


def answer_of(one: PromptTrace, cuts: Sequence[Mapping[str, Any]]) -> str:
    """The answer in one sentence, with what cuts of the strongest writers showed."""
    attention, first = float(one.attention[one.key]), float(one.attention[0])
    asking = f"{one.head} at {one.token(one.asked.query)}"
    if first > _AWAY and attention < ATTENDED:
        return (
            f"{asking} rests on the first token ({first:.0%}): it attends to nothing here. {one.token(one.key)} has"
            f" {attention:.1%}; what follows explains that logit, and no attention."
        )
    if attention < ATTENDED:
        return f"{asking} does not attend to {one.token(one.key)}: {attention:.1%} of its attention is there."
    if one.key == 0:
        return f"{asking} gives {attention:.0%} to the first token, which draws attention whatever it says."
    if abs(one.total) < _LEVEL:
        return f"{asking} attends to {one.token(one.key)}, {attention:.0%}, as to other tokens: nothing matched."
    cut = named_cut(cuts)
    if cut is None:
        return f"{asking} attends to {one.token(one.key)}, {attention:.0%}: only the embedding writes before this head."
    named, left = cut["writers"].replace(", ", " and "), f"{cut['after']:.0%} is left"
    where = f"{asking} attends to {one.token(one.key)}, {attention:.0%}"
    if first > attention:
        where += f" (though most, {first:.0%}, rests on the first token)"
    if cut["verdict"] == "supported":
        part = "in part " if cut["after"] > _WHOLE * cut["before"] else ""
        return f"{where}, {part}for what {named} wrote there: without that {left}."
    if cut["verdict"] == "vacuous":
        return f"{where}. {named} gave most to its key; there is no other token to test that with."
    if cut["verdict"] == "untested":
        return f"{where}. {named} gave most to its key: without that {left}. It is untested: {few_controls(cut)}."
    return f"{where}. {named} gave most to its key, but without that {left}: they do not hold it there."


def _where(one: PromptTrace) -> str:
    ranked = sorted((i for i in one.others), key=lambda i: -float(one.attention[i]))[:4]
    keys = ", ".join(f"{one.asked.tokens[i]!r} {float(one.attention[i]):.0%}" for i in ranked)
    return f"Where it looks: {keys}; the first token has {float(one.attention[0]):.0%}."


def _legend(one: PromptTrace) -> str:
    return (
        f"{one.head} is head {one.head.index} of layer {one.head.layer}, M0 the MLP of layer 0. Cut: in this head"
        " alone, norms frozen, a part takes its mean over the tokens besides the first, the key and the query."
        " Supported: that takes more than a quarter away, and more than any random writers do."
    )


_WAYS = (
    ("writers", "key", "writers of the key"), ("writers", "query", "writers of the query"),
    ("singular", "both", "singular vectors"), ("features", "query", "features"),
)  # fmt: skip


def _matched(one: PromptTrace, parts: Sequence[Mapping[str, Any]]) -> str:
    said = []
    for by, side, name in _WAYS:
        own = [p for p in parts if p["by"] == by and p["side"] == side]
        named = [p for p in own if p["part"] != REST][:3]
        if named:
            rest = one.total - sum(p["value"] for p in named)
            said.append(
                f"{name}: {', '.join(_share(p['part'], p['value'], one) for p in named)}, {_share(REST, rest, one)}"
            )
    others = len(one.against)
    over = {0: ", with no other token to compare", 1: " over the other token"}.get(
        others, f" over the mean of {others} others"
    )
    bias = f", and {distance:+.1f} for the distance" if abs(distance := _distance(one)) >= 0.05 else ""
    split = f"By {'; by '.join(said)}.{says_cancels(one.tally.writer_rows(one.head, one.writers))}"
    return f"What matched: a logit of {one.total:.1f}{over}{bias}. {split}"


def _distance(one: PromptTrace) -> float:
    """What a bias for the distance (ALiBi) adds to the relative logit; 0 where there is none."""
    assert one.rows.bias is not None
    bias = one.rows.bias[0, 0]
    return float(bias.masked_fill(bias == -torch.inf, 0.0) @ one.weights[0].to(bias))


def _share(name: str, value: float, one: PromptTrace) -> str:
    return f"{name} {value / one.total:z.0%}" if one.total else f"{name} {value:+.1f}"


def _written(graph: Sequence[Mapping[str, Any]]) -> str:
    """Which tokens the first writers of each side read."""
    said = []
    for row in sorted((row for row in graph if row["parent"] == 0), key=lambda row: row["side"] != "key"):
        read = [r for r in graph if r["parent"] == row["id"] and r["writer"] is None and r["kind"] == "content"]
        if read:
            token = max(read, key=lambda r: abs(r["share"]))
            said.append(f"{row['writer']} ({row['side']}) read {token['token']!r} (token {token['position']})")
    return f"Who wrote it: {'; '.join(said)}." if said else ""


def _causal_tests(cuts: Sequence[Mapping[str, Any]], swaps: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for side in ("key", "query"):
        cut = named_cut(cuts, side)
        if cut is not None:
            lines.append(
                f"Causal test: {cut['writers']} cut from the {side}: {cut['before']:.0%} to {cut['after']:.0%}"
                f" ({controls_of(cut)}: {cut['random_low']:.0%} to {cut['random_high']:.0%}):"
                f" {cut['verdict']}."
            )
    for row in swaps:
        lines.append(
            f"Causal test: the same parts of the key exchanged with {row['other_token']!r} (token {row['other']}):"
            f" attention there {row['other_before']:.0%} to {row['other_after']:.0%} ({controls_of(row)}: at most"
            f" {row['random_high']:.0%}): {row['verdict']}."
        )
    return lines


def _does(pushed: Sequence[Mapping[str, Any]]) -> str:
    if not pushed:
        return ""
    best = pushed[0]
    text = (
        f"What it does: without this attention the next token {best['token']!r} goes from {best['before']:.1%} to"
        f" {best['without_key']:.1%}"
    )
    if best["without_other"] is not None:
        text += f" (without its next key: {best['without_other']:.1%})"
    direct = [row for row in pushed if row["direct"] is not None]
    if direct:
        most = [best, *sorted((row for row in direct if row is not best), key=lambda row: -row["direct"])][:3]
        named = ", ".join("{!r} {:+.1f}".format(row["token"], row["direct"]) for row in most)
        text += f"; direct effect on the logits from this key: {named}"
    return text + "."


# ---------------------------------------------------------------------- without a head


def _which_heads(probe: Probe, output: Output) -> Told:
    best = int(output.logits.argmax())
    direct = output.strongest_heads(_TRIED)
    tried = [probe.head(head) for head in direct]
    after = output.removed([(one.head, one.key) for one in tried]).softmax(-1)
    rows: list[dict[str, Any]] = [
        {"head": str(one.head), "key": one.key, "token": one.asked.tokens[one.key],
         "attention": float(one.attention[one.key]), "first": float(one.attention[0]), "direct": direct[one.head],
         "before": float(output.chances[best]), "without_key": float(changed[best])}
        for one, changed in zip(tried, after, strict=True)
    ]  # fmt: skip
    rows = sorted(rows, key=lambda row: -abs(row["before"] - row["without_key"]))[:HEADS]
    told = "It changes most where these heads may not look at their key:"
    if abs(rows[0]["before"] - rows[0]["without_key"]) < _POINT:
        told = (
            "No single head matters here: it changes by less than 1 percentage point where any one of the"
            f" {len(tried)} that push it most may not look at its key."
        )
    answer = (
        f"The next token after {output.asked.tokens[output.asked.query]!r} is {output.token(best)!r}"
        f" ({float(output.chances[best]):.1%}). {told}"
    )
    return answer, _head_lines(rows), {"heads": rows}


def _head_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each head whose change can be seen in the figures shown."""
    lines = []
    for row in rows:
        before, without = f"{row['before']:.1%}", f"{row['without_key']:.1%}"
        if before != without:
            against = " (acts against it)" if row["without_key"] > row["before"] else ""
            lines.append(
                f"{row['head']} looks at {row['token']!r} (token {row['key']}; {row['attention']:.0%}, the first token"
                f" has {row['first']:.0%}). Without that: {without}{against}; the head's direct effect on its logit:"
                f" {row['direct']:+.1f}."
            )
    return lines
