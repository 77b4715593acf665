"""Over many prompts: how often each reason decides where heads look, or which heads decide the
answer most often.

A prompt runs once, and all its looks share every changed prompt (`Because`). A head *looks* where
it gives .3 or more of its attention to a token that is not the first; its reason is the first
relation that was shown. Shares are of the prompts where it looks, with Wilson's 95% interval. Where
answers are marked, reasons are compared between prompts that the model gets right and others: a
difference of two shares has Newcombe's interval, ``d ± √(Σ (share − end)²)``. A circuit's nodes are
chosen on half of the prompts and tested on the other half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

import torch

from qkscope import BadInput, Example, Scope
from qkscope.findings.because import Because
from qkscope.findings.carriers import Carriers
from qkscope.findings.finding import Look
from qkscope.findings.next_token import Output, first_token, rival_token, whole
from qkscope.findings.prompt_trace import PromptRun, reader_of
from qkscope.findings.published import columns_of_roles
from qkscope.findings.question import Question
from qkscope.heads import Head
from qkscope.rerun.nodes import Nodes
from qkscope.results.work import Stage, current_work
from qkscope.sums.intervals import wilson
from qkscope.texts.task import ANSWER
from qkscope.verbs.why.circuit import NodeOrder, kept_words

LOOKS = 0.3
FEW = 5
"""Attention from which on a head looks at a token, and prompts of each group under which reasons
are not compared.
"""
NO_LOOK = "no look"
_ROLES = 50  # nodes of a circuit in its table
_NAMED = 3  # heads and reasons of a sentence

Prompt = tuple[Example, tuple[str, ...]]
"""A prompt, and the answers that are right; none where they are not known."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """Many prompts, and the heads that are asked about: all of them, by what they do for the
    answer, if none is named.

    Parameters
    ----------
    scope : the model.
    prompts : with the answers that are right, where these are known.
    heads : by name.
    query : the query token, by its text; the last one by default.
    versus : the rival of every next token, where no head is named.
    chat : whether prompts go into the chat template.
    carriers : whether to look for who carried the words, which is slow.
    seed : of other words.
    """

    scope: Scope
    prompts: Sequence[Prompt]
    heads: Sequence[Head] | None
    query: int | str | None = None
    versus: str | None = None
    chat: bool = False
    carriers: bool = False
    seed: int = 0

    def tables(self) -> dict[str, list[Row]]:
        """Run all prompts, each a piece of work, and count."""
        names = None if self.heads is None else [str(head) for head in self.heads]
        work = current_work().begin(
            self.scope,
            list(self.prompts),
            verb="why",
            heads=names,
            seed=self.seed,
            query=self.query,
            versus=self.versus,
            chat=self.chat,
            carriers=self.carriers,
        )
        numbers = [[i] for i in range(len(self.prompts))]
        stage = Stage("prompts", numbers, lambda piece: self._tables(piece[0]))
        parts = work.run(stage, last=True)
        joined = {name: [row for part in parts for row in part[name]] for name in parts[0]}
        if names is None:
            return {"decides": _decides(joined["heads"], len(parts)), "answers": joined["answers"]}
        by_head = [[row for row in joined["prompts"] if row["head"] == name] for name in names]
        tables = {
            "reasons": [row for rows in by_head for row in _reasons(rows)],
            "differs": [row for rows in by_head for row in _differs(rows)],
            **joined,
        }
        return {name: rows for name, rows in tables.items() if rows}

    def _tables(self, i: int) -> dict[str, list[Row]]:
        """The rows that one prompt gives."""
        example, right = self.prompts[i]
        question = Question(
            self.scope, example, query=self.query, rival=self.versus, chat=self.chat
        )
        try:
            probe = self._run(question)
            output = question.output(probe)
            right_tokens = self._first_tokens(right)
        except BadInput as error:
            raise BadInput(f"{example.where or f'prompt {i + 1}'}: {error}") from None
        is_right = output.best in right_tokens if right_tokens else None
        answer: Row = {
            "prompt": i,
            "right": is_right,
            "said": example.text or example.show(),
            "next": output.name(output.best)[0],
        }
        if self.heads is None:
            return {"heads": output.head_rows(), "answers": [answer]}
        rows, carried = self._looks(i, probe, output)
        for row in rows:
            row["right"] = is_right
        return {"prompts": rows, "carriers": carried, "answers": [answer]}

    def _run(self, question: Question) -> PromptRun:
        """Run one prompt; with its writers, where carriers are wanted."""
        last = 0
        if self.carriers:
            last = max((head.layer for head in self.heads or ()), default=0)
        probe = question.run(last=last)
        if probe.asked.query < 2:
            raise BadInput(
                "besides the first token a head sees itself alone: give a longer prompt."
            )
        return probe

    def _first_tokens(self, answers: Sequence[str]) -> set[int]:
        """First tokens of answers, with a blank before them and without."""
        texts = [text for answer in answers for text in (answer, f" {answer.strip()}")]
        return {first_token(self.scope, text) for text in texts}

    def _looks(self, i: int, probe: PromptRun, output: Output) -> tuple[list[Row], list[Row]]:
        """Where each head looks in one prompt, for what reason, and carried by whom."""
        looks = list[Look]()
        rows = dict[Head, Row]()
        for head in self.heads or ():
            key, row = output.look(head)
            attention = float(row[key])
            rows[head] = {
                "prompt": i,
                "right": None,
                "head": str(head),
                "key": key,
                "token": whole(probe.asked.tokens, key),
                "attention": attention,
                "kind": NO_LOOK,
                "text": "",
            }
            if attention >= LOOKS:
                looks.append(Look(head, probe.asked.query, key))
        carried = list[Row]()
        if looks:
            because = Because(output.again, looks, self.seed)
            for reason in because.reasons(levels="undecided"):
                text = reason.shown[0].text if reason.shown else ""
                rows[reason.look.head] |= {"kind": reason.kind, "text": text}
                if self.carriers:
                    found = Carriers(probe.run, because, reason, self.seed).rows()
                    carried += [{"prompt": i, **row} for row in found]
        return list(rows.values()), carried


def prompts_of(texts: str | Example | Sequence[str | Example]) -> list[Prompt]:
    """Texts and examples as prompts; an example may name answers that are right."""
    texts = [texts] if isinstance(texts, str | Example) else texts
    if not texts:
        raise BadInput("there are no prompts: give at least one.")
    every = [Example(text) if isinstance(text, str) else text for text in texts]
    return [(example, example.answers.right if example.answers else ()) for example in every]


# ---------------------------------------------------------------------- counts


def _reasons(rows: Sequence[Row]) -> list[Row]:
    """How often each reason decides where one head looks, and how much attention it gives there."""
    counts = Counter(row["kind"] for row in rows)
    looks = len(rows) - counts.pop(NO_LOOK, 0)
    reasons = list[Row]()
    for kind, count in counts.most_common() or [(NO_LOOK, 0)]:
        attention = [row["attention"] for row in rows if row["kind"] == kind]
        low, high = wilson(count, looks) if looks else (None, None)
        reasons.append({
            "head": rows[0]["head"], "kind": kind, "count": count, "prompts": looks, "asked": len(rows),
            "share": count / looks if looks else None, "low": low, "high": high,
            "attention": sum(attention) / len(attention),
        })  # fmt: skip
    return reasons


def _differs(rows: Sequence[Row]) -> list[Row]:
    """How often each reason decides where the model is right, less how often where it is wrong."""
    right = [row["kind"] for row in rows if row["right"] is True]
    wrong = [row["kind"] for row in rows if row["right"] is False]
    compared = list[Row]()
    for kind in dict.fromkeys(right + wrong):
        row: Row = {
            "head": rows[0]["head"],
            "kind": kind,
            "right_prompts": len(right),
            "wrong_prompts": len(wrong),
        }
        compared.append(row | _difference(kind, right, wrong))
    return compared


def _difference(kind: str, right: Sequence[str], wrong: Sequence[str]) -> Row:
    """The difference of two shares with Newcombe's interval."""
    if min(len(right), len(wrong)) < FEW:
        empty = dict.fromkeys(("right", "wrong", "difference", "low", "high"))
        return {**empty, "verdict": "too few"}
    a = right.count(kind) / len(right)
    b = wrong.count(kind) / len(wrong)
    low_a, high_a = wilson(a * len(right), len(right))
    low_b, high_b = wilson(b * len(wrong), len(wrong))
    low = a - b - hypot(a - low_a, high_b - b)
    high = a - b + hypot(high_a - a, b - low_b)
    verdict = "differs" if low > 0 or high < 0 else "not shown"
    return {
        "right": a,
        "wrong": b,
        "difference": a - b,
        "low": low,
        "high": high,
        "verdict": verdict,
    }


def _decides(rows: Sequence[Row], n: int) -> list[Row]:
    """Heads by how often they are for or against the next token, and the mean change of its lead
    without them.
    """
    ways = Counter((row["head"], row["direction"]) for row in rows)
    changes = Counter[str]()
    for row in rows:
        changes[row["head"]] += row["difference"]
    heads = [
        {
            "head": head,
            "for": ways[head, "for"],
            "against": ways[head, "against"],
            "prompts": n,
            "difference": change / n,
        }
        for head, change in changes.items()
    ]
    return sorted(heads, key=lambda row: (-row["for"] - row["against"], -abs(row["difference"])))


# ---------------------------------------------------------------------- in words


def over_answer(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What decides most often, and whether it differs where the model is right."""
    answers = tables["answers"]
    right = sum(row["right"] is True for row in answers)
    wrong = sum(row["right"] is False for row in answers)
    start = f"Over {len(answers)} prompts"
    if right + wrong:
        start += f" ({right} answered rightly, {wrong} wrongly)"
    clauses = [
        f"{row['head']} is for the next token in {row['for']} and against it in {row['against']}"
        for row in tables.get("decides", ())[:_NAMED]
    ]
    commonest: dict[str, Row] = {}
    for row in tables.get("reasons", ()):
        commonest.setdefault(row["head"], dict(row))
    clauses += [_often(row) for row in list(commonest.values())[:_NAMED]]
    compared = tables.get("differs", ())
    if compared:
        clauses += _compared(compared)
    return f"{start}: {'; '.join(clauses)}."


def _often(row: Row) -> str:
    """How often a head looks at a token, and its commonest reason."""
    clause = f"{row['head']} looks at a token in {row['prompts']}"
    if not row["count"]:
        return clause
    ends = f"(95% interval {row['low'] or 0:.0%} to {row['high'] or 0:.0%})"
    return f"{clause}, its reason {row['kind']} in {row['count']} {ends}"


def _compared(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which reasons differ between right and wrong answers."""
    differs = [row for row in rows if row["verdict"] == "differs"]
    if not differs and rows[0]["verdict"] == "too few":
        return [f"too few to compare ({FEW} of each are needed)"]
    if not differs:
        return ["no reason is shown to differ between right and wrong answers"]
    clauses = []
    for row in differs[:_NAMED]:
        low, high = 100 * row["low"], 100 * row["high"]
        ends = f"{100 * row['difference']:+.0f} points, {low:+.0f} to {high:+.0f}"
        both = f"{row['right']:.0%} of right and {row['wrong']:.0%} of wrong answers"
        clauses.append(f"{row['kind']} decides {row['head']} in {both} ({ends})")
    return clauses


# ---------------------------------------------------------------------- circuits


def nodes_of(
    scope: Scope, examples: Sequence[Example], versus: str | None = None, chat: bool = False
) -> Nodes:
    """Run prompts, their tokens lined up by the roles that all have, or by their distance from the
    end.

    A token is called after the last role at or before it, and its distance to that.

    Parameters
    ----------
    scope : the model.
    examples : prompts that mark their answers, or keys that are right and wrong.
    versus : the rival of every answer, instead of the one marked.
    chat : whether prompts go into the chat template.
    """
    roles = sorted(set.intersection(*(set(example.roles) for example in examples)))
    inputs, columns = columns_of_roles(scope, examples, roles or ["query"], chat)
    labels = []
    for mask, places in zip(inputs["attention_mask"].tolist(), columns.tolist(), strict=True):
        first = (mask.index(1) if roles else places[0], "")
        marks = [first, *sorted(zip(places, roles, strict=False))]
        names = []
        for i in range(len(mask)):
            at, role = max((mark for mark in marks if mark[0] <= i), default=first)
            names.append(role if i == at and role else f"{role}{i - at:+d}")
        labels.append(names)
    pair = torch.tensor([_pair_of(scope, example, versus) for example in examples])
    return Nodes(
        reader_of(scope), inputs, torch.full((len(examples),), len(labels[0]) - 1), pair, labels
    )


def _pair_of(scope: Scope, example: Example, versus: str | None) -> tuple[int, int]:
    """The first tokens of an example's right answer and of its rival: of its answers, or of its
    marked keys.
    """
    texts: dict[int, str] = {}
    for key in reversed(example.keys):
        texts[key.label(ANSWER)] = f" {str(example.piece(key.span)).strip()}"
    if example.answers is not None:
        texts = {1: example.answers.right[0], -1: example.answers.wrong[0]}
    texts |= {} if versus is None else {-1: versus}
    if not {1, -1} <= {*texts}:
        needed = "a circuit of many prompts needs the answer of each, and a rival"
        raise BadInput(f"{needed}: {example.show(80)} marks none.")
    answer = first_token(scope, texts[1])
    rival = first_token(scope, texts[-1]) if versus is None else rival_token(scope, versus)
    if answer == rival:
        raise BadInput(
            f"{texts[1]!r} and its rival {texts[-1]!r} begin with the same token: name another rival."
        )
    return answer, rival


def circuit_of_prompts(
    scope: Scope, examples: Sequence[Example], versus: str | None, chat: bool, seed: int
) -> tuple[str, dict[str, list[Row]]]:
    """The nodes that half of some prompts choose, tested on the other half: an answer and tables."""
    if len(examples) < 4:
        raise BadInput(
            f"of {len(examples)} prompts none are left to test what others choose on: give at least four."
        )
    chosen = nodes_of(scope, examples[0::2], versus, chat)
    tested = nodes_of(scope, examples[1::2], versus, chat)
    ranking = NodeOrder(chosen, chosen.other_prompts(seed), seed)
    kept = ranking.rows(tested, tested.other_prompts(seed))
    nodes = [
        {"writer": writer, "role": role, "score": score}
        for (writer, role), score in ranking.first("circuit", _ROLES).items()
    ]
    answer = (
        f"The answer leads its rival by {float(tested.lead.mean()):.1f} logits in {len(tested.lead)} prompts:"
        f" {kept_words(kept)}. Nodes were chosen on {len(chosen.lead)} others."
    )
    return answer, {"roles": nodes, "kept": kept}
