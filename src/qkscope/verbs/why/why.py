"""Why did this head attend to that token: for any prompt, head and token, without any fit.

Of one head: *where* it looks, *because* of which words (each changed, and the model run again),
*who carried* them there, *cuts* of the strongest writers, and *what it does* for the next token
against its rival. Without a head: which heads decide between the two, every one of them tried; or
the circuit that leads from the answer back to the words.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from qkscope import BadInput, Example, Scope
from qkscope.checking import Count, Natural, Seed
from qkscope.findings.fit import Fit
from qkscope.findings.fitted_features import features_of
from qkscope.findings.next_token import Output
from qkscope.findings.pair import pair_rows
from qkscope.findings.prompt_trace import PromptRun, PromptTrace
from qkscope.findings.question import Question, same_places
from qkscope.findings.task_batches import made_with
from qkscope.findings.verdicts import no_sum
from qkscope.heads import Head, parse_heads
from qkscope.results.progress import doing
from qkscope.results.work import PartDone, current_work, verb
from qkscope.sums.feature_split import Split
from qkscope.sums.subspace import Subspace
from qkscope.texts.jsonl import read_prompts
from qkscope.texts.pairs import PromptPair, has_pairs, read_pairs
from qkscope.verbs.why import next_words
from qkscope.verbs.why.answer import Why
from qkscope.verbs.why.circuit import LOGIT, Circuit, write_graph
from qkscope.verbs.why.many_pairs import mean_leads
from qkscope.verbs.why.many_prompts import (
    Prompt,
    Prompts,
    circuit_of_prompts,
    over_answer,
    prompts_of,
)
from qkscope.verbs.why.one_head import one_head
from qkscope.verbs.why.splits import part_rows

Heads: TypeAlias = Sequence[str | Head]
Tables = dict[str, list[dict[str, Any]]]
_SUMS = 2e-5  # of the largest term: how far the edges of a circuit may miss a node, in float32
_GOES_ON = 5  # tokens of the continuation
_LONG = 2048  # tokens of a prompt that has one


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
    answer: str | None = None,
    corrupted: str | Example | None = None,
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
        "answer": " Mary"}``; or of pairs, with ``clean``, ``corrupted``, ``answer`` and ``rival``.
    head : like L18H6; without one, every head is tried, and those that decide the next token are
        named (with a fit, its first head is asked).
    query : the token that the head looks from, by place (from the end if negative) or text (``"
        John"``, ``"to#2"``); the last one by default.
    key : the token attended to; by default the one that the head attends to most besides the first.
    heads : several heads, like L18H6,L23H0, to count their reasons over many prompts.
    n : how many of the prompts, from the first on; all by default.
    carriers : whether to look for the writers that carried the words in many prompts, too, which is
        slow.
    versus : the rival of the answer, as ``" John"``; by default, where the answer is copied from the
        prompt, the other word of it that plays most alike a part there, and else the likeliest next
        token of the answer's kind. Of several tokens, the first that differs from the answer's.
    answer : the next token that is asked about, as ``" Mary"``; the likeliest one by default, and
        inside a ``with`` block that changes something that of the unchanged prompt.
    corrupted : the other prompt of a pair, of as many tokens: what differs is put into the prompt, a
        span at a time and together.
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
        ``["graph"]``, its edges; without a head ``["heads"]`` and ``["rivals"]``; always
        ``["asked"]``, and with a pair ``["pair"]``; a circuit ``["paths"]``,
        ``["nodes"]``, ``["graph"]`` and ``["kept"]``; of many prompts ``["reasons"]``,
        ``["differs"]``, ``["prompts"]`` and ``["answers"]``, or ``["decides"]``.

    Examples
    --------
    >>> import qkscope as qk
    >>> answer = qk.why(qk.Scope.load("nano:mixed"), "hat: O jam: Z jam:", "L2H3")
    >>> [(row["text"], row["cause"]) for row in answer.tables["because"]][0]
    (':', 'yes')
    """
    chosen = _named_heads(head, heads)
    if circuit:
        _leave_out(
            "a circuit starts at the answer: leave out the head, the key and the features.",
            (chosen, key, features),
        )
    if export is not None:
        _check_export(Path(export), circuit)
    if _is_file_of_pairs(prompt):
        _leave_out(
            f"{prompt} names pairs, whose mean logit difference is given: leave out heads,"
            " circuit, query, answer and versus.",
            (chosen, circuit, query, versus, answer),
        )
        return _mean_of_pairs(scope, read_pairs(str(prompt))[:n], chat, seed)
    prompts = _many_prompts(prompt, chosen)
    if prompts is not None:
        _check_many(corrupted, answer, features, key, export)
        if circuit:
            return _circuit_of_many(scope, prompts[:n], versus, chat, seed)
        checked = _checked(scope, chosen)
        return _reasons_of_many(
            Prompts(scope, prompts[:n], checked, query, versus, chat, carriers, seed)
        )
    assert isinstance(prompt, str | Example)
    if current_work().part[0] > 0:
        raise PartDone
    first = chosen[0] if chosen else None
    if isinstance(features, Fit):  # asked as it was fitted
        chat = chat or features.chat
        first = first or features.heads[0]
    question = Question(scope, prompt, corrupted, first, query, key, answer, versus, chat)
    question = _checked_pair(question, circuit).at_difference()
    if circuit:
        return _exported(answer_circuit(question, depth=depth, seed=seed), export)
    levels = 1 if depth is None else depth
    return answer_question(question, None, features, levels, draws, seed, split)


def _leave_out(sentence: str, options: Sequence[object]) -> None:
    """Refuse options that a question of this form does not take."""
    if any(option is not None and option is not False for option in options):
        raise BadInput(sentence)


def _is_file_of_pairs(prompt: str | Example | Sequence[str | Example]) -> bool:
    """Whether a prompt is the name of a .jsonl file with pairs in it."""
    return isinstance(prompt, str) and prompt.lower().endswith(".jsonl") and has_pairs(prompt)


def _check_many(
    corrupted: object, answer: object, features: object, key: object, export: object
) -> None:
    """Refuse what is asked about in one prompt only."""
    _leave_out(
        "of many prompts each line names its own answer, rival and corrupted prompt: leave"
        " them out here.",
        (corrupted, answer),
    )
    _leave_out("features and a key are asked about in one prompt, with one head.", (features, key))
    _leave_out("a graph is of one prompt: leave out the export, or give one prompt.", (export,))


def _checked_pair(question: Question, circuit: bool) -> Question:
    """The question, once its two prompts are known to have the same places."""
    if question.corrupted is None:
        return question
    same_places(question.scope, question.prompt, question.corrupted, question.chat)
    _leave_out("a circuit is of one prompt: leave the corrupted one out.", (circuit,))
    return question


def _checked(scope: Scope, heads: Sequence[Head] | None) -> list[Head] | None:
    """Heads that the model has; none where all are meant."""
    return None if heads is None else [scope.check(head) for head in heads]


def _named_heads(
    head: str | Head | Heads | None, heads: str | Head | Heads | None
) -> Sequence[Head] | None:
    """The heads that are asked about, under either name."""
    if head is not None and heads is not None:
        raise BadInput("heads are named once: as head or as heads.")
    named = heads if head is None else head
    return None if named is None else parse_heads(named)


def _many_prompts(
    prompt: str | Example | Sequence[str | Example], heads: Sequence[Head] | None
) -> Sequence[Prompt] | None:
    """The prompts of a list or a file, or one prompt with several heads; None for one question."""
    if isinstance(prompt, str) and prompt.lower().endswith(".jsonl"):
        return read_prompts(prompt)
    has_several_heads = heads is not None and len(heads) > 1
    if isinstance(prompt, str | Example) and not has_several_heads:
        return None
    return prompts_of(prompt)


def _exported(answer: Why, export: str | Path | None) -> Why:
    """The answer, its graph written to a file if one is named."""
    if export is not None and "graph" in answer.tables:
        write_graph(Path(export), answer)
    return answer


def _check_export(file: Path, circuit: bool) -> None:
    """Refuse a file that no graph can be written to, before there is one."""
    if not circuit:
        raise BadInput(f"{file} takes a circuit: ask for one with circuit (--circuit).")
    if file.is_dir():
        raise BadInput(f"{file} is a folder: name a file in it.")
    if not file.parent.is_dir():
        raise BadInput(f"{file} cannot be written: there is no folder {file.parent}.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise BadInput(f"{file} cannot be written: you may not write there.")


# ---------------------------------------------------------------------- many prompts


def _reasons_of_many(asked: Prompts) -> Why:
    """How often each reason over many prompts, or which heads decide most often."""
    tables = asked.tables()
    heads = None if asked.heads is None else [str(head) for head in asked.heads]
    about = made_with(asked.scope, prompts=len(asked.prompts), heads=heads)
    answer = over_answer(tables)
    return Why("why/prompts", tables, seed=asked.seed, answer=answer, **about)


def _mean_of_pairs(scope: Scope, pairs: Sequence[PromptPair], chat: bool, seed: int) -> Why:
    """Mean logit differences over pairs, a rival a line."""
    answer, tables = mean_leads(scope, pairs, chat, seed)
    about = made_with(scope, prompts=len(pairs))
    return Why("why/pairs", tables, seed=seed, answer=answer, **about)


def _circuit_of_many(
    scope: Scope, prompts: Sequence[Prompt], versus: str | None, chat: bool, seed: int
) -> Why:
    """Nodes that half of some prompts choose, tested on the other half."""
    examples = [example for example, _ in prompts]
    answer, tables = circuit_of_prompts(scope, examples, versus, chat, seed)
    about = made_with(scope, prompts=len(prompts))
    return Why("why/circuit", tables, seed=seed, answer=answer, **about)


# ---------------------------------------------------------------------- one prompt


def answer_question(
    question: Question,
    run: PromptRun | None = None,
    features: Fit | Mapping[str, Subspace] | None = None,
    depth: int = 1,
    draws: int = 20,
    seed: Seed = 0,
    split: Split = "sequential",
) -> Why:
    """Answer a question about one head, or try every head where none is named.

    Parameters
    ----------
    question : what is asked.
    run : of its prompt, if it has run: the live page asks many questions of one run.
    features, depth, draws, seed, split : as in `why`.
    """
    run = run or question.run()
    if question.head is None:
        look = None
        output = question.output(run)
        answer, tables = _all_heads(question, run, output)
    else:
        look = question.look(run)
        output = question.output(run)
        subspaces = {} if features is None else _subspaces(features, look)
        parts = part_rows(look, subspaces, split)
        answer, tables = one_head(look, output, parts, depth, draws, seed)
        answer = " ".join([answer, *next_words.notes(output, question.appended)])
    if question.corrupted is not None:
        tables["pair"] = pair_rows(question, output, look)
        answer = f"{answer} {next_words.pair_sentence(output, tables['pair'])}"
    return Why("why", tables, seed=seed, answer=answer, **_about(run))


def answer_circuit(
    question: Question, run: PromptRun | None = None, depth: int | None = None, seed: Seed = 0
) -> Why:
    """Follow the answer to a question back to the words; parameters as in `answer_question`."""
    run = run or question.run()
    output = question.output(run)
    with doing("following the answer back"):
        circuit = Circuit(run, output, depth, seed)
        error = circuit.graph.error
        wrong = no_sum("the answer", error, run.scope.model.dtype, _SUMS)
        tables = circuit.tables() if wrong is None else {}
    check = [{"head": LOGIT, "sum_error": error, "logit": output.difference}]
    answer = circuit.answer(tables) if wrong is None else wrong
    tables = {**tables, "asked": output.asked_rows(), "check": check}
    return Why("why/circuit", tables, seed=seed, answer=answer, **_about(run))


def _about(run: PromptRun) -> dict[str, Any]:
    """What an answer was made with."""
    asked = run.asked.told(run.prompt)
    return made_with(run.scope, tokenizer=run.scope.tokenizer_hash, **asked)


def _all_heads(question: Question, run: PromptRun, output: Output) -> tuple[str, Tables]:
    """Try every head: hide its main token and see what that does to the answer."""
    with doing("hiding each head's main token"):
        tables = {
            "said": [],
            "heads": output.head_rows(),
            "asked": output.asked_rows(),
            "rivals": output.rival_rows(),
        }
    length = len(run.asked.tokens)
    is_last = run.asked.query == length - 1
    says = ""
    if is_last and length <= _LONG and isinstance(run.prompt, str):
        says = str(run.scope.generate(run.prompt, _GOES_ON))
    return next_words.heads_answer(output, tables, question.appended, says), tables


def _subspaces(features: Fit | Mapping[str, Subspace], look: PromptTrace) -> dict[str, Subspace]:
    """The subspaces of a head, by feature."""
    subspaces, space = features_of(features, look.head, look.run.reader.scope)
    if space != "post_rope":
        raise BadInput(
            f"the features were fitted in {space}, and why splits in post_rope: use qk.sums.attribute."
        )
    return subspaces
