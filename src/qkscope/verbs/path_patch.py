"""Path patching of one edge: what a sender wrote in another prompt, put into one head's query or
keys.

A pair of prompts of as many tokens, clean and corrupted, is run. The sender's part of the residual
stream, ``s``, is exchanged in the stream that the receiver alone reads there, ``x' = x - s + s_other``,
its norms running; everything between the two stays as it is (the direct edge). *Noising* puts the
corrupted prompt's part into the clean prompt, *denoising* the clean one's into the corrupted prompt.
The receiver's attention row is made anew, and the model runs on with it to the next token. Beside an
edge stand others into the same head, of the same kind: heads of the sender's layer, or MLPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope import BadInput, Example, Result, Scope
from qkscope.changes import Row
from qkscope.checking import Count, Seed
from qkscope.findings.next_token import NamedToken, Output
from qkscope.findings.prompt_trace import PromptRun, PromptTrace, reader_of
from qkscope.findings.question import Question, same_places
from qkscope.findings.task_batches import made_with
from qkscope.heads import Head, Side, Writer
from qkscope.linear.row import mean_parts, rows_with, vectors_with
from qkscope.rerun.executor import rerun
from qkscope.results.progress import doing
from qkscope.results.result import Rows
from qkscope.results.work import verb
from qkscope.seeds import derived_seed

WAYS = ("noising", "denoising")
_FEWEST = 3  # other senders, under which an edge is untested
_MOVED = 0.05  # attention that an edge has to move
_NAMED = 3  # senders of a sentence
_AT_ONCE = 32  # rows made at once

Way = Literal["noising", "denoising"]


@verb("path_patch")
def path_patch(
    scope: Scope,
    clean: str | Example,
    corrupted: str | Example,
    *,
    receiver: str | Head,
    sender: str | Head | None = None,
    side: Side = "query",
    query: int | str | None = None,
    key: int | str | None = None,
    answer: str | None = None,
    versus: str | None = None,
    draws: Count = 20,
    chat: bool = False,
    seed: Seed = 0,
    out: str | Path | None = None,
) -> Result:
    """Exchange what a sender wrote into one head's query or keys between two prompts (path
    patching), and read that head's attention and the answer's lead.

    Parameters
    ----------
    scope : the model.
    clean, corrupted : two prompts of as many tokens.
    receiver : the head that reads, like L23H0.
    sender : what wrote before it: a head, an MLP (M9) or ``embedding``; all of them by default.
    side : of the receiver: its ``query``, or its ``key`` at every token.
    query : the token that the receiver looks from; the last one by default.
    key : the token whose attention is read; by default the one that the receiver attends to most
        in the clean prompt, besides the first.
    answer : the next token of the clean prompt that is asked about; the likeliest one by default.
    versus : its rival, as in `why`.
    draws : the most other senders beside one.
    chat : whether the prompts go into the chat template.
    seed : of the other senders, where there are more.
    out : folder for the result and its page; none by default.

    Returns
    -------
    Result
        ``tables["paths"]``: an edge and a way a row, with attention and lead before, after, in the
        other prompt, and what other senders leave.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope = Scope.load("nano:mixed")
    >>> pair = "hat: O jam: Z jam:", "hat: O cat: Z jam:"
    >>> edge = qk.path_patch(scope, *pair, sender="L0H1", receiver="L1H0", side="key")
    >>> [row["way"] for row in edge.tables["paths"]]
    ['noising', 'denoising']
    """
    head = scope.check(receiver)
    question = Question.of(
        scope, clean, head, corrupted=corrupted, query=query, key=key, answer=answer,
        rival=versus, chat=chat,
    )  # fmt: skip
    names = _senders(scope, head)
    if sender is not None and str(sender) not in names:
        raise BadInput(
            f"{sender} does not write before {head}: name a head or an MLP of an earlier layer."
        )
    pair = _Pair.of(question, side)
    chosen = names if sender is None else [str(sender)]
    beside = {name: _alike(name, names, draws, seed) for name in chosen}
    tried = list(dict.fromkeys([*chosen, *(other for own in beside.values() for other in own)]))
    with doing("patching paths"):
        effects = {way: pair.patched(way, tried) for way in WAYS}
    rows = [pair.row(name, way, effects[way], beside[name]) for name in chosen for way in WAYS]
    rows.sort(
        key=lambda row: -abs(row["attention"] - row["attention_before"]) if sender is None else 0
    )
    tokens = pair.clean.asked.told(question.prompt)
    about = made_with(scope, tokenizer=scope.tokenizer_hash, **tokens)
    return Result("path_patch", {"paths": rows}, seed=seed, answer=pair.answer(rows), **about)


def _senders(scope: Scope, head: Head) -> list[str]:
    """What writes before a head, but for biases."""
    return [str(name) for name in reader_of(scope).writers(head.layer)[:-1]]


def _alike(name: str, names: Sequence[str], draws: int, seed: int) -> list[str]:
    """Other senders of a sender's kind: heads of its layer, or MLPs; as many as are drawn."""
    own = Writer.parse(name)
    others = [
        other
        for other in names
        if other != name
        and Writer.parse(other).kind == own.kind
        and (own.head is None or Writer.parse(other).layer == own.layer)
    ]
    if len(others) <= draws:
        return others
    generator = torch.Generator().manual_seed(derived_seed(seed, "senders", name))
    return [others[i] for i in torch.randperm(len(others), generator=generator)[:draws].tolist()]


@dataclass(frozen=True)
class _Effects:
    """What patched runs show, by sender.

    Attributes
    ----------
    attention : of the receiver on the key.
    lead : of the answer over its rival.
    """

    attention: dict[str, float]
    lead: dict[str, float]


@dataclass(frozen=True)
class _Pair:
    """Two prompts that were run, and the head that reads in them.

    Attributes
    ----------
    clean, corrupted : the prompts.
    looks : the receiver in each.
    outputs : the next token of each, with the clean prompt's answer and rival.
    side : of the receiver that is patched.
    """

    clean: PromptRun
    corrupted: PromptRun
    looks: dict[str, PromptTrace]
    outputs: dict[str, Output]
    side: Side

    @classmethod
    def of(cls, question: Question, side: Side) -> _Pair:
        """Run the two prompts of a question."""
        assert question.head is not None
        assert question.corrupted is not None
        clean = question.run()
        same_places(question.scope, question.prompt, question.corrupted, question.chat)
        corrupted = PromptRun(
            question.scope, question.corrupted, clean.asked.query, question.chat,
            last=question.head.layer,
        )  # fmt: skip
        look = question.look(clean)
        output = question.output(clean)
        rival = output.typed["rival"] or NamedToken(output.rival)
        answer = output.typed["answer"] or NamedToken(output.best)
        other = Output(corrupted.run, corrupted.asked, rival, answer)
        looks = {"noising": look, "denoising": corrupted.head(question.head, look.key)}
        return cls(clean, corrupted, looks, {"noising": output, "denoising": other}, side)

    def patched(self, way: Way | str, names: Sequence[str]) -> _Effects:
        """Run one of the prompts with each sender's part of the other one."""
        look = self.looks[way]
        output = self.outputs[way]
        attention = dict[str, float]()
        lead = dict[str, float]()
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            rows = self._rows(way, some)
            given = rows.attention()[:, 0, look.key].tolist()
            attention |= dict(zip(some, given, strict=True))
            changes = [[Row(look.head, look.asked.query, own)] for own in rows.logits()[:, 0]]
            logits = rerun(output.again, changes, logits=True).logits
            assert logits is not None
            ahead = (logits[:, output.best] - logits[:, output.rival]).float().tolist()
            lead |= dict(zip(some, ahead, strict=True))
        return _Effects(attention, lead)

    def _rows(self, way: str, names: Sequence[str]) -> Any:
        """The receiver's row with each sender's part of the other prompt in its query or keys."""
        here, other = self.clean.run, self.corrupted.run
        if way == "denoising":
            here, other = other, here
        look = self.looks[way]
        sets = [[name] for name in names]
        query = look.asked.query

        def vectors(token: int) -> Float[Tensor, "x d"]:
            instead = mean_parts(other, look.head.layer, [token])
            return vectors_with(here, look.head, self.side, token, instead, sets, "live")

        if self.side == "query":
            return rows_with(here, look.head, query, q=vectors(query))
        return rows_with(here, look.head, query, keys={i: vectors(i) for i in look.seen})

    def row(self, name: str, way: str, effects: _Effects, beside: Sequence[str]) -> dict[str, Any]:
        """A row of the table ``paths``."""
        look = self.looks[way]
        other_way = "denoising" if way == "noising" else "noising"
        other = self.looks[other_way]
        before = float(look.attention[look.key])
        others = [effects.attention[each] for each in beside]
        leads = [effects.lead[each] for each in beside]
        after = effects.attention[name]
        return {
            "sender": name, "receiver": str(look.head), "side": self.side, "way": way,
            "query": look.asked.query, "key": look.key, "token": look.asked.tokens[look.key],
            "attention_before": before, "attention": after,
            "attention_other": float(other.attention[other.key]),
            "attention_low": min(others, default=None), "attention_high": max(others, default=None),
            "lead_before": self.outputs[way].difference, "lead": effects.lead[name],
            "lead_other": self.outputs[other_way].difference,
            "lead_low": min(leads, default=None), "lead_high": max(leads, default=None),
            "sets": len(beside), "verdict": _verdict(before, after, others),
        }  # fmt: skip

    def answer(self, rows: Rows) -> str:
        """What patching moves most, in words."""
        look = self.looks["noising"]
        other = self.looks["denoising"]
        output = self.outputs["noising"]
        there = f"{float(other.attention[other.key]):.0%}"
        if other.token(other.key) != look.token(look.key):
            there += f" to {other.token(other.key)}"
        start = (
            f"{look.head} gives {look.token(look.key)} {float(look.attention[look.key]):.0%} of its"
            f" attention in the clean prompt and {there} in the corrupted one;"
            f" {output.told(output.best)} leads {output.told(output.rival)} by"
            f" {output.difference:.1f} and {self.outputs['denoising'].difference:.1f} logits."
        )
        if len({row["sender"] for row in rows}) == 1:
            return " ".join([start, *(_says(row) for row in rows)])
        noised = [row for row in rows if row["way"] == "noising"]
        named = [
            f"{row['sender']} ({row['attention_before']:.0%} to {row['attention']:.0%})"
            for row in noised[:_NAMED]
        ]
        return (
            f"{start} Of {len(noised)} senders into its {self.side}, the corrupted part of these"
            f" changes that attention most: {', '.join(named)}."
        )


def _says(row: dict[str, Any]) -> str:
    """What one edge does, beside its control."""
    put = "the corrupted part of" if row["way"] == "noising" else "the clean part of"
    into = "in its query" if row["side"] == "query" else "in its keys"
    control = ""
    if row["sets"]:
        control = (
            f" ({row['sets']} other senders: {row['attention_low']:.0%} to"
            f" {row['attention_high']:.0%}): {row['verdict']}"
        )
    beside = f" (others {row['lead_low']:.1f} to {row['lead_high']:.1f})" if row["sets"] else ""
    return (
        f"{row['way'].capitalize()}: with {put} {row['sender']} {into} it is"
        f" {row['attention']:.0%}{control}; the lead is {row['lead']:.1f}{beside}."
    )


def _verdict(before: float, after: float, others: Sequence[float]) -> str:
    """Whether an edge moves the attention, and further than any other sender does."""
    if len(others) < _FEWEST:
        return "untested"
    moved = abs(after - before)
    most = max(abs(other - before) for other in others)
    return "shown" if moved >= _MOVED and moved > most else "not shown"
