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

from qkscope import BadInput, Example, Head, Scope
from qkscope.findings.because import Because
from qkscope.findings.carriers import Carriers
from qkscope.findings.finding import Look
from qkscope.findings.next_token import Output, first_token, whole
from qkscope.findings.prompt_trace import Probe, reader_of
from qkscope.findings.published import locate
from qkscope.rerun.nodes import Nodes
from qkscope.results.work import Stage, current_work
from qkscope.sums.nulls import wilson
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
        asked = {
            "query": self.query,
            "versus": self.versus,
            "chat": self.chat,
            "carriers": self.carriers,
        }
        named = None if self.heads is None else [str(head) for head in self.heads]
        work = current_work().begin(
            self.scope, list(self.prompts), verb="why", heads=named, seed=self.seed, **asked
        )
        stage = Stage(
            "prompts",
            [[i] for i in range(len(self.prompts))],
            lambda numbers: self._tables(numbers[0]),
        )
        parts = work.run(stage, last=True)
        made = {name: [row for part in parts for row in part[name]] for name in parts[0]}
        if self.heads is None:
            return {"decides": _decides(made["heads"], len(parts)), "answers": made["answers"]}
        heads = [[row for row in made["prompts"] if row["head"] == name] for name in named or ()]
        counted = {"reasons": map(_reasons, heads), "differs": map(_differs, heads)}
        made = {
            name: [row for rows in each for row in rows] for name, each in counted.items()
        } | made
        return {name: rows for name, rows in made.items() if rows}

    def _tables(self, i: int) -> dict[str, list[Row]]:
        """The rows that one prompt gives."""
        example, right = self.prompts[i]
        last = max((head.layer for head in self.heads or ()), default=0) if self.carriers else 0
        try:
            probe = Probe(
                self.scope,
                example,
                self.scope.place(example, self.query, chat=self.chat),
                self.chat,
                last,
            )
            if probe.asked.query < 2:
                raise BadInput(
                    "besides the first token a head sees itself alone: give a longer prompt."
                )
            output = Output(probe.run, probe.asked, self.versus)
            firsts = {
                first_token(self.scope, text)
                for answer in right
                for text in (answer, f" {answer.strip()}")
            }
        except BadInput as error:
            raise BadInput(f"{example.where or f'prompt {i + 1}'}: {error}") from None
        told = {"prompt": i, "right": output.best in firsts if firsts else None}
        answers = [
            {**told, "said": example.text or example.show(), "next": output.name(output.best)[0]}
        ]
        if self.heads is None:
            return {"heads": output.head_rows(), "answers": answers}
        looks = list[Look]()
        rows = dict[Head, Row]()
        carried = list[Row]()
        for head in self.heads:
            key, attention = output.look(head)
            rows[head] = {
                **told, "head": str(head), "key": key, "token": whole(probe.asked.tokens, key),
                "attention": float(attention[key]), "kind": NO_LOOK, "text": "",
            }  # fmt: skip
            looks += [Look(head, probe.asked.query, key)] if float(attention[key]) >= LOOKS else []
        because = Because(output.again, looks, self.seed) if looks else None
        for reason in because.reasons() if because else ():
            text = reason.shown[0].text if reason.shown else ""
            rows[reason.look.head] |= {"kind": reason.kind, "text": text}
            if self.carriers and because:
                carried += [
                    {"prompt": i, **row}
                    for row in Carriers(probe.run, because, reason, self.seed).rows()
                ]
        return {"prompts": list(rows.values()), "carriers": carried, "answers": answers}


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
    made = []
    for kind, count in counts.most_common() or [(NO_LOOK, 0)]:
        own = [row["attention"] for row in rows if row["kind"] == kind]
        low, high = wilson(count, looks) if looks else (None, None)
        made.append({
            "head": rows[0]["head"], "kind": kind, "count": count, "prompts": looks, "asked": len(rows),
            "share": count / looks if looks else None, "low": low, "high": high, "attention": sum(own) / len(own),
        })  # fmt: skip
    return made


def _differs(rows: Sequence[Row]) -> list[Row]:
    """How often each reason decides where the model is right, less how often where it is wrong."""
    right = [row["kind"] for row in rows if row["right"] is True]
    wrong = [row["kind"] for row in rows if row["right"] is False]
    n = len(right)
    m = len(wrong)
    made = list[Row]()
    for kind in dict.fromkeys(right + wrong):
        row: Row = {"head": rows[0]["head"], "kind": kind, "right_prompts": n, "wrong_prompts": m}
        row |= dict.fromkeys(("right", "wrong", "difference", "low", "high")) | {
            "verdict": "too few"
        }
        if min(n, m) >= FEW:
            a = right.count(kind) / n
            b = wrong.count(kind) / m
            (low_a, high_a), (low_b, high_b) = wilson(a * n, n), wilson(b * m, m)
            low = a - b - hypot(a - low_a, high_b - b)
            high = a - b + hypot(high_a - a, b - low_b)
            verdict = "differs" if low > 0 or high < 0 else "not shown"
            row |= {
                "right": a,
                "wrong": b,
                "difference": a - b,
                "low": low,
                "high": high,
                "verdict": verdict,
            }
        made.append(row)
    return made


def _decides(rows: Sequence[Row], n: int) -> list[Row]:
    """Heads by how often they are for or against the next token, and the mean change of its lead
    without them.
    """
    ways = Counter((row["head"], row["direction"]) for row in rows)
    changes = Counter[str]()
    for row in rows:
        changes[row["head"]] += row["difference"]
    made = [
        {
            "head": head,
            "for": ways[head, "for"],
            "against": ways[head, "against"],
            "prompts": n,
            "difference": sum_ / n,
        }
        for head, sum_ in changes.items()
    ]
    return sorted(made, key=lambda row: (-row["for"] - row["against"], -abs(row["difference"])))


# ---------------------------------------------------------------------- in words


def over_answer(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What decides most often, and whether it differs where the model is right."""
    answers = tables["answers"]
    right = sum(row["right"] is True for row in answers)
    wrong = sum(row["right"] is False for row in answers)
    told = [
        f"Over {len(answers)} prompts"
        + (f" ({right} answered rightly, {wrong} wrongly)" if right + wrong else "")
    ]
    for row in tables.get("decides", ())[:_NAMED]:
        told.append(
            f"{row['head']} is for the next token in {row['for']} and against it in {row['against']}"
        )
    first = {
        row["head"]: row for row in reversed(tables.get("reasons", ()))
    }  # of each head its commonest reason
    for row in list(reversed(first.values()))[:_NAMED]:
        ends = f"(95% interval {row['low'] or 0:.0%} to {row['high'] or 0:.0%})"
        often = f", its reason {row['kind']} in {row['count']} {ends}" if row["count"] else ""
        told.append(f"{row['head']} looks at a token in {row['prompts']}{often}")
    compared = tables.get("differs", ())
    differs = [row for row in compared if row["verdict"] == "differs"]
    for row in differs[:_NAMED]:
        ends = f"{100 * row['difference']:+.0f} points, {100 * row['low']:+.0f} to {100 * row['high']:+.0f}"
        both = f"{row['right']:.0%} of right and {row['wrong']:.0%} of wrong answers"
        told.append(f"{row['kind']} decides {row['head']} in {both} ({ends})")
    if compared and not differs:
        few = compared[0]["verdict"] == "too few"
        none = "no reason is shown to differ between right and wrong answers"
        told.append(f"too few to compare ({FEW} of each are needed)" if few else none)
    return f"{told[0]}: {'; '.join(told[1:])}."


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
    inputs, columns = locate(scope, examples, roles or ["query"], chat)
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
    answer, rival = (first_token(scope, texts[sign]) for sign in (1, -1))
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
