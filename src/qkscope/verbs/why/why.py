"""Why did this head attend to that token: for any prompt, head and token, without any fit.

Of one head: *where* it looks, *because* of which words (each changed, and the model run again),
*who carried* them there, *cuts* of the strongest writers, and *what it does* for the next token
against its rival. Without a head: which heads decide between the two, every one of them tried; or
the circuit that leads from the answer back to the words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch

from qkscope import BadInput, Example, Result, Scope, Subspace
from qkscope.changes import Row
from qkscope.checking import Count, Natural, Seed, checked_class
from qkscope.findings.because import Because, Look, Reason
from qkscope.findings.carriers import Carriers
from qkscope.findings.fit import Fit
from qkscope.findings.graph import trace_graph
from qkscope.findings.next_token import Output
from qkscope.findings.prompt_trace import Probe, PromptTrace
from qkscope.findings.task_batches import made_with
from qkscope.findings.verdicts import no_sum
from qkscope.heads import Head, parse_heads
from qkscope.results.progress import doing
from qkscope.results.work import PartDone, current_work, verb
from qkscope.sums.feature_split import Split
from qkscope.texts.jsonl import read_prompts
from qkscope.verbs.attribute import features_of
from qkscope.verbs.why import sentences
from qkscope.verbs.why.circuit import LOGIT, Circuit, write_graph
from qkscope.verbs.why.many_prompts import Prompts, circuit_of_prompts, over_answer, prompts_of
from qkscope.verbs.why.splits import part_rows

Heads: TypeAlias = Sequence[str | Head]
_SUMS = 2e-5  # of the largest term: how far the edges of a circuit may miss a node, in float32
# tokens of the continuation, and of a prompt that has one; other words that run
_GOES_ON = 5
_LONG = 2048
_RUNS = 4


@checked_class
@dataclass(frozen=True)
class Why(Result):
    """The answer: in words (`str`), in tables, and as a page."""

    @property
    def main(self) -> str:  # type: ignore[override]
        """The table that answers: of one head, of all heads, or of many prompts."""
        named = ("attention", "heads", "reasons", "decides", "paths", "roles")
        return next((name for name in named if name in self.tables), "")

    def __str__(self) -> str:
        return "\n".join(
            [self.answer, *(f"  {row['line']}" for row in self.tables.get("said", ()))]
        )

    def diff(self, other: Result) -> Result:
        """What differs between this answer and another: heads, or attention, words and writers,
        largest change first.

        Parameters
        ----------
        other : an answer to the same question of another prompt, head or model.
        """
        columns = {
            "heads": ("head", "difference"), "writers": ("side", "writer", "share"), "because": ("text", "after"),
            "attention": ("token", "attention"),
        }  # fmt: skip
        rows: list[dict[str, Any]] = []
        for table, (*names, number) in columns.items():
            here = {
                tuple(row[name] for name in names): row[number] or 0.0
                for row in self.tables.get(table, ())
            }
            there = {
                tuple(row[name] for name in names): row[number] or 0.0
                for row in other.tables.get(table, ())
            }
            rows += [
                {"table": table, "what": " ".join(map(str, key)), "column": number, "this": here.get(key),
                 "other": there.get(key), "change": there.get(key, 0.0) - here.get(key, 0.0)}
                for key in here.keys() | there.keys()
            ]  # fmt: skip
        rows.sort(key=lambda row: -abs(row["change"]))
        return Result(
            "why/diff", {"diff": rows}, answer=f"{self.answer}\n{other.answer}", model=self.model
        )

    def to_networkx(self) -> Any:
        """The graph of writers and what they read, as a `networkx.MultiDiGraph` from writers to
        their readers.
        """
        graph = import_module("networkx").MultiDiGraph()
        for row in self.tables.get("nodes", ()):
            graph.add_node(row["id"], **row)
        for row in self.tables.get("graph", ()):
            if row["source"] is not None:
                graph.add_edge(row["source"], row["target"], **row)
        return graph


@verb("why")
def why(
    scope: Scope,
    prompt: str | Example | Sequence[str | Example],
    head: str | Head | Heads | None = None,
    query: int | str | None = None,
    key: int | str | None = None,
    *,
    heads: str | Head | Sequence[str | Head] | None = None,
    n: Count | None = None,
    carriers: bool = False,
    versus: str | None = None,
    circuit: bool = False,
    export: str | Path | None = None,
    features: Fit | Mapping[str, Subspace] | None = None,
    chat: bool = False,
    depth: Natural | None = None,
    draws: Count = 20,
    seed: Seed = 0,
    split: Split = "sequential",
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
) -> Why:
    """Say why a head attended to a token: because of which words, carried by which writers, and to
    what effect.

    For many prompts: how often each reason decides where heads look; without heads, which heads
    decide most often.

    Parameters
    ----------
    scope : the model.
    prompt : any text; for many prompts a list, or a .jsonl file of lines like ``{"prompt": "…",
        "answer": " Mary"}``.
    head : like L18H6; without one, every head is tried, and those that decide the next token are
        named (with a fit, its first head is asked).
    query : the token that the head looks from, by place (from the end if negative) or text (``"
        John"``, ``"to#2"``); the last one by default.
    key : the token attended to; by default the one that the head attends to most besides the first.
    heads : several heads, like L18H6,L23H0, to count their reasons over many prompts.
    n : how many of the prompts, from the first on; all by default.
    carriers : whether to look for the writers that carried the words in many prompts, too, which is
        slow.
    versus : the rival of the next token, as ``" John"``; by default the likeliest other word of the
        prompt, or the likeliest other token where no such word has 0.1%.
    circuit : whether to go from the answer back to the words: nodes, edges, and what the first
        nodes keep in the running model; with many prompts, nodes are chosen on half of them and
        tested on the others.
    export : file for the circuit's graph, as circuit-tracer and Neuronpedia read it.
    features : a fit, or subspaces of this head by name, to split the logit by as well.
    chat : whether the prompt goes into the chat template.
    depth : levels of the graph of writers and what they read; 1 by default, 8 for a circuit.
    draws : random writers beside each cut.
    seed : of the random writers, and of the words that replace others.
    split : among features: ``sequential``, ``average`` over all orders, or ``oblique``.
    out : folder for the result and its page, where a stopped run over many prompts goes on; none by
        default.
    part : which part of many prompts, as in `decompose`.

    Returns
    -------
    Why
        ``tables["attention"]``, ``["because"]``, ``["relation"]``, ``["carriers"]``,
        ``["writers"]``, ``["cuts"]``, ``["output"]``, ``["parts"]``, ``["nodes"]`` and
        ``["graph"]``, its edges; without a head ``["heads"]``; a circuit ``["paths"]``,
        ``["nodes"]``, ``["graph"]`` and ``["kept"]``; of many prompts ``["reasons"]``,
        ``["differs"]``, ``["prompts"]`` and ``["answers"]``, or ``["decides"]``.

    Examples
    --------
    >>> import qkscope as qk
    >>> answer = qk.why(qk.Scope.load("nano:mixed"), "hat: O jam: Z jam:", "L2H3")
    >>> [(row["text"], row["cause"]) for row in answer.tables["because"]][0]
    (':', 'yes')
    """
    if head is not None and heads is not None:
        raise BadInput("heads are named once: as head or as heads.")
    named = heads if head is None else head
    chosen = None if named is None else parse_heads(named)
    if circuit and (chosen or key is not None or features is not None):
        raise BadInput(
            "a circuit starts at the answer: leave out the head, the key and the features."
        )
    if export is not None and (not circuit or Path(export).is_dir()):
        why = (
            "is a folder: name a file in it"
            if circuit
            else "takes a circuit: ask for one with circuit (--circuit)"
        )
        raise BadInput(f"{export} {why}.")
    file = isinstance(prompt, str) and prompt.lower().endswith(".jsonl")
    if file or not isinstance(prompt, str | Example) or (chosen is not None and len(chosen) > 1):
        if features is not None or key is not None:
            raise BadInput("features and a key are asked about in one prompt, with one head.")
        every = (read_prompts(str(prompt)) if file else prompts_of(prompt))[:n]
        if circuit:
            if export is not None:
                raise BadInput(
                    "a graph is of one prompt: leave out the export, or give one prompt."
                )
            said, tables = circuit_of_prompts(
                scope, [example for example, _ in every], versus, chat, seed
            )
            return Why(
                "why/circuit",
                tables,
                seed=seed,
                answer=said,
                **made_with(scope, prompts=len(every)),
            )
        asked = None if chosen is None else [scope.check(each) for each in chosen]
        tables = Prompts(scope, every, asked, query, versus, chat, carriers, seed).tables()
        about = {
            "prompts": len(every),
            "heads": None if asked is None else [str(each) for each in asked],
        }
        return Why(
            "why/prompts",
            tables,
            seed=seed,
            answer=over_answer(tables),
            **made_with(scope, **about),
        )
    if current_work().part[0] > 0:
        raise PartDone
    head = chosen[0] if chosen else None
    if isinstance(features, Fit):  # asked as it was fitted
        chat = chat or features.chat
        head = features.heads[0] if head is None else head
    query = scope.place(prompt, query, chat=chat)
    key = scope.place(prompt, key, chat=chat)
    probe = Probe(scope, prompt, query, chat, None if head is None else scope.check(head).layer)
    if not circuit:
        depth = 1 if depth is None else depth
        return answer_probe(probe, head, key, features, depth, draws, seed, split, versus)
    found = circuit_of(probe, versus, depth, seed)
    if export is not None and "graph" in found.tables:
        write_graph(Path(export), found)
    return found


def answer_probe(
    probe: Probe,
    head: str | Head | None = None,
    key: int | None = None,
    features: Fit | Mapping[str, Subspace] | None = None,
    depth: int = 1,
    draws: int = 20,
    seed: Seed = 0,
    split: Split = "sequential",
    versus: str | None = None,
) -> Why:
    """Answer `why` from a prompt that has run: the live page asks many questions of one run."""
    output = Output(probe.run, probe.asked, versus)
    if head is None:
        if key is not None:
            raise BadInput("a key is asked about with a head: name one, or leave the key out.")
        with doing("hiding each head's main token"):
            rows = output.head_rows()
            last = probe.asked.query == len(probe.asked.tokens) - 1 < _LONG
        says = (
            probe.scope.generate(probe.prompt, _GOES_ON)
            if last and isinstance(probe.prompt, str)
            else ""
        )
        answer = sentences.heads_answer(output, rows, str(says))
        lines = list[str]()
        tables = {"heads": rows}
    else:
        one = probe.head(head, key)
        chosen = dict[str, Subspace]()
        if features is not None:
            chosen, space = features_of(features, one.head, probe.scope)
            if space != "post_rope":
                raise BadInput(
                    f"the features were fitted in {space}, and why splits in post_rope: use qk.attribute."
                )
        answer, lines, tables = _one_head(
            one, output, part_rows(one, chosen, split), depth, draws, seed
        )
    about = made_with(
        probe.scope, tokenizer=probe.scope.tokenizer_hash, **probe.asked.told(probe.prompt)
    )
    return Why(
        "why",
        {"said": [{"line": line} for line in lines], **tables},
        seed=seed,
        answer=answer,
        **about,
    )


def circuit_of(
    probe: Probe, versus: str | None = None, depth: int | None = None, seed: Seed = 0
) -> Why:
    """The circuit of a prompt that has run, from its answer back."""
    output = Output(probe.run, probe.asked, versus)
    with doing("following the answer back"):
        made = Circuit(probe, output, depth, seed)
        answer = no_sum("the answer", made.graph.error, probe.scope.model.dtype, _SUMS)
        tables = made.tables() if answer is None else {}
    about = made_with(
        probe.scope, tokenizer=probe.scope.tokenizer_hash, **probe.asked.told(probe.prompt)
    )
    check = [{"head": LOGIT, "sum_error": made.graph.error, "logit": output.difference}]
    return Why(
        "why/circuit",
        {**tables, "check": check},
        seed=seed,
        answer=answer or made.answer(tables),
        **about,
    )


Told = tuple[str, list[str], dict[str, list[dict[str, Any]]]]


def _one_head(
    one: PromptTrace, output: Output, parts: list[dict[str, Any]], depth: int, draws: int, seed: int
) -> Told:
    check = [{"head": str(one.head), "sum_error": one.tally.error, "logit": one.total}]
    pushed = output.rows(one)
    if (wrong := no_sum(one.head, one.tally.error, output.scope.model.dtype)) is not None:
        lines = [sentences.where_line(one), sentences.does_line(pushed)]
        return wrong, lines, {"attention": one.token_rows(), "output": pushed, "check": check}
    because = None
    reason = None
    carriers = list[dict[str, Any]]()
    returns = list[dict[str, Any]]()
    with doing("changing words") as say:
        if (
            one.attends and one.key and output.scope.tokenizer is not None
        ):  # there is attention, and words to put in
            because = Because(output.again, [Look(one.head, one.asked.query, one.key)], seed)
            reason = because.reasons()[0]
            say("putting writers back")
            carriers = Carriers(one.run, because, reason, seed).rows()
            returns = _returns(one, output, because, reason)
        say("cutting writers")
        cuts = one.cut_rows(draws, seed, live=True)
        graph = trace_graph(one, depth)
    tables = {
        "attention": one.token_rows(), "because": reason.words if reason else [],
        "relation": reason.relations if reason else [], "carriers": carriers, "parts": parts,
        "writers": one.tally.writer_rows(one.head, one.writers), "cuts": cuts, "output": pushed,
        "returns": returns, **graph.tables, "check": check,
    }  # fmt: skip
    lines = sentences.lines_of(one, because, reason, tables)
    return (
        sentences.answer_of(one, reason, output, tables),
        lines,
        {k: v for k, v in tables.items() if v},
    )


@torch.no_grad()
def _returns(
    one: PromptTrace, output: Output, because: Because, reason: Reason
) -> list[dict[str, Any]]:
    """The reason's share of the answer: a word changed, and only this head's attention as it was
    before.
    """
    words = {word.start: word for word in because.words}
    causes = [
        row
        for row in reason.words
        if row["after"] < 0.5 * reason.before and row["text"].strip().isalnum()
    ]
    if not causes:
        return []
    word = words[causes[0]["position"]]
    restoring = [[], [Row(one.head, one.asked.query, one.rows.logits()[0, 0])]]
    others = torch.stack(
        [because.put((word, ids)) for ids in because.others.of(word, because.count)[:_RUNS]]
    )
    runs = because.running(others, torch.full((len(others),), one.asked.query + 1))
    logits = because.again.run(
        others.repeat_interleave(2, dim=0),
        runs.any(0).expand(2 * len(others), -1),
        rows=restoring * len(others),
        logits=True,
    ).logits
    assert logits is not None
    changed, restored = logits.float().softmax(-1)[:, output.best].view(-1, 2).mean(0).tolist()
    return [{
        "head": str(one.head), "position": word.start, "text": word.text, "token": output.name(output.best)[0],
        "before": float(output.chances[output.best]), "changed": changed, "restored": restored,
    }]  # fmt: skip
