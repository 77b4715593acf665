"""Trace: who wrote what a head matched on, with causal tests.

A relative logit (the right keys against the others) is split, exactly, among the writers of the
head's query and of its keys. The test stands beside it always: their parts are replaced in this
head alone, on words that nothing was chosen on, beside rivals of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from qkscope import BadInput, Dictionary, Example, Scope
from qkscope.checking import Count, Natural, Seed
from qkscope.findings.fitted_features import features_of
from qkscope.findings.head_rows import Pass
from qkscope.findings.prompt_trace import PromptRun, PromptTrace
from qkscope.findings.question import Question
from qkscope.findings.task_batches import made_from, units_hash, with_notes
from qkscope.findings.verdicts import that_sum
from qkscope.heads import Head, parse_heads
from qkscope.linear.reader import Reader
from qkscope.results.result import Result, provenance
from qkscope.results.work import current_work, verb
from qkscope.sums.subspace import Subspace
from qkscope.texts.task import Task, Units
from qkscope.verbs.trace.edges import DRAWS
from qkscope.verbs.trace.feature_pairs import check_dictionary
from qkscope.verbs.trace.prompt_features import prompt_features
from qkscope.verbs.trace.prompt_writers import prompt_writers
from qkscope.verbs.trace.task_features import task_features
from qkscope.verbs.trace.task_writers import first_writers, task_writers


class Trace(Result):
    """Trace of queries and keys: writers with edges cut and kept, neurons, or pairs of features."""

    @property
    def main(self) -> str:  # type: ignore[override]
        """Name of the table that answers."""
        for name in ("feature_pairs", "neurons"):
            if name in self.tables:
                return name
        return "writers"


@verb("trace")
def trace(
    scope: Scope,
    what: Task | str | Example,
    head: str | Head | Sequence[str | Head] = "all",
    n: Count = 128,
    *,
    query: int | str | None = None,
    key: int | str | None = None,
    versus: int | str | None = None,
    depth: Natural = 2,
    feature: Subspace | None = None,
    dictionary: Dictionary | None = None,
    neurons: bool | str | Sequence[str] = False,
    whole: bool = True,
    draws: Count = DRAWS,
    chat: bool | None = None,
    batch_size: Count = 32,
    seed: Seed = 0,
    out: str | Path | None = None,
    part: tuple[int, int] | None = None,
    progress: bool | None = None,
) -> Trace:
    """Say which writers made a head's query and keys (QK attribution); cut and keep their edges.

    Parameters
    ----------
    scope : the model.
    what : a task (its right keys against its other keys), or one prompt.
    head : one head, several, or ``"all"``: of all heads of a task only writers are given, and no
        edge is cut.
    n : prompts of a task, for choosing and for testing each.
    query, key : tokens of one prompt, by place (from the end where negative) or by text (``"
        John"``, ``"to#2"``); by default its last token, and the token that the head attends to most
        besides the first.
    versus : the token that the key is compared with; by default all others that the query sees, but
        the first.
    depth : how many levels down the graph of one prompt (of a task: of its first) goes.
    feature : look inside this subspace alone: its projector is put between query and key.
    dictionary : split among this dictionary's features instead of writers (a transcoder's: what its
        MLP wrote), which are ablated and restored, beside copies of it without meaning.
    neurons : of one prompt, whether to name the first ten neurons a side of the MLPs before the
        head; or those to name, as ``"M9.N120"``.
    whole : whether whole heads are taken out of the running model, too (of a task).
    draws : random writers of the same layers beside those chosen; of a dictionary, copies of each
        kind.
    chat : whether a prompt goes into the chat template; a task says so itself.
    batch_size : prompts run together.
    seed : of every draw.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is
        written by default.
    part : as in `decompose`, of a task.
    progress : whether to show a bar; if not given, where stderr is a terminal.

    Returns
    -------
    Trace
        ``tables["writers"]``, ``["pairs"]``, ``["edges"]``, ``["whole"]``, ``["check"]``; of one
        prompt ``["tokens"]``, ``["cuts"]`` and ``["graph"]``, with neurons ``["neurons"]``. With a
        dictionary: ``["feature_pairs"]``, ``["features"]``, ``["copies"]``, ``["feature_edges"]``,
        ``["check"]``.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope = qk.Scope.load("nano:mixed")
    >>> found = qk.trace(scope, qk.tasks.induction(), "L1H0", 16, whole=False, progress=False)
    >>> found.table()[0]["writer"], found.tables["check"][0]["sum_error"] < 1e-4
    ('L0H2', True)
    """
    of_prompt_alone = {"query": query, "key": key, "versus": versus, "chat": chat}
    _check_options(what, head, feature, dictionary, neurons, of_prompt_alone)
    heads = [each for each in scope.parse(head) if each.layer > 0]
    if not heads:
        raise BadInput(
            f"{scope.name} has one layer, where only the embedding writes:"
            " there is nothing to trace."
        )
    asked: dict[str, Any] = {"heads": [str(each) for each in heads], "draws": draws}
    if dictionary is not None:
        check_dictionary(scope, heads, dictionary)
        dictionary = dictionary.to(scope.device)
        asked |= {"dictionary": repr(dictionary), "dictionary_hash": dictionary.fingerprint}
    projectors = dict[Head, Tensor]()
    if feature is not None:
        projectors = {each: _projector(scope, each, feature) for each in heads}

    if isinstance(what, Task):
        name = what.name
        about = made_from(scope, what)
        sums = {str(each): float(P.sum()) for each, P in projectors.items()}
        asked |= {"batch_size": batch_size, "feature": sums}
        choosing: Units = () if head == "all" else what.choose(n)
        units = what.test(n)
        work = current_work()
        prompts = [list(choosing), list(units)]
        work.begin(scope, prompts, verb="trace", seed=seed, chat=what.chat, **asked)
        examples = units_hash([*choosing, *units])
        asked |= {"n": len(units), "whole": whole, "examples": examples}
        reader = Reader(scope, heads)
        how = Pass(reader, what.chat, batch_size, seed, projectors, (), work, progress)
        if head == "all":
            answer, tables = first_writers(how, units)
        elif dictionary is None:
            answer, tables = task_writers(how, choosing, units, draws, depth, whole)
        else:
            answer, tables = task_features(how, choosing, units, dictionary, draws)
    else:
        name = "prompt"
        question = Question(scope, what, None, heads[0], query, key, chat=bool(chat))
        run = _run_prompt(question, heads, dictionary, bool(neurons))
        about = _about_prompt(run)
        traces = _traces(question, run, heads, versus, projectors)
        if dictionary is None:
            answer, tables = prompt_writers(traces, depth, draws, seed, neurons)
        else:
            answer, tables = prompt_features(traces, dictionary, draws, seed)

    result = Trace(
        f"trace/{name}",
        tables,
        answer=with_notes(answer, about),
        model=scope.name,
        seed=seed,
        provenance=provenance(**about, **asked, trace_seed=seed),
    )
    return that_sum(result, scope.model.dtype)


# ---------------------------------------------------------------------- what is asked


def _check_options(
    what: Task | str | Example,
    head: str | Head | Sequence[str | Head],
    feature: Subspace | None,
    dictionary: Dictionary | None,
    neurons: bool | str | Sequence[str],
    of_prompt_alone: Mapping[str, object],
) -> None:
    """Refuse options that do not go together, before the model is needed."""
    is_prompt = isinstance(what, str | Example)
    for each in () if head == "all" else parse_heads(head):
        if each.layer == 0:
            raise BadInput(
                f"{each} is in the first layer, where only the embedding writes:"
                " trace a later head."
            )
    if head == "all" and (feature is not None or dictionary is not None):
        raise BadInput(
            "a feature or a dictionary is for a task or a prompt, at heads that are named:"
            " name them."
        )
    if neurons and (dictionary is not None or not is_prompt):
        raise BadInput(
            "neurons are named of one prompt, and not beside a dictionary: give a prompt alone."
        )
    for name, value in of_prompt_alone.items():
        if value is not None and not is_prompt:
            raise BadInput(
                f"{name} is for one prompt, not for a task: leave it out, or give a prompt."
            )


def _projector(scope: Scope, head: Head, feature: Subspace) -> Tensor:
    """``U Uᵀ`` of a feature of this head, fitted on vectors that the dot product sees."""
    subspaces = {feature.contrast or "to look inside": feature}
    _, space = features_of(subspaces, head, scope)
    if space != "post_rope":
        raise BadInput(
            f"the feature was fitted in {space}: trace looks inside features fitted in post_rope."
        )
    basis = feature.basis("query").float()
    return basis @ basis.T


# ---------------------------------------------------------------------- one prompt


def _run_prompt(
    question: Question, heads: Sequence[Head], dictionary: Dictionary | None, neurons: bool
) -> PromptRun:
    """Run a prompt up to the last head asked about, with all that its split needs kept."""
    layers = list[int]()
    if dictionary is not None:
        layers = [dictionary.layer, *(head.layer for head in heads)]
    last = max(head.layer for head in heads)
    return question.run(last=last, logits=False, layers=layers, neurons=neurons)


def _traces(
    question: Question,
    run: PromptRun,
    heads: Sequence[Head],
    versus: int | str | None,
    projectors: Mapping[Head, Tensor],
) -> Iterator[PromptTrace]:
    """Traces of the heads on the prompt that has run, each made when it is asked for."""
    against = question.place(versus)
    for head in heads:
        projector = projectors.get(head)
        yield question.about(head).look(run, versus=against, projector=projector)


def _about_prompt(run: PromptRun) -> dict[str, Any]:
    """Facts that a result on one prompt was made from."""
    scope = run.scope
    return {
        "model": scope.name,
        "weights": scope.weights_hash,
        "tokenizer": scope.tokenizer_hash,
        **run.asked.told(run.prompt),
    }
