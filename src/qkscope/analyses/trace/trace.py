"""Trace: who wrote what a head matched on, with causal tests.

A relative logit (the right keys against the others) is split, exactly, among the writers of the head's query and of its
keys. The test stands beside it always: their parts are replaced in this head alone, on words that nothing was chosen
on, beside rivals of the same size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qkscope.analyses.prompts import check_same_model, made_with
from qkscope.analyses.trace.edges import DRAWS
from qkscope.analyses.trace.features import check_dictionary, features_of_prompt, made_by
from qkscope.analyses.trace.graph import trace_graph
from qkscope.analyses.trace.many import TEXTS, Texts, trace_many
from qkscope.analyses.trace.prompt import PromptTrace, Question
from qkscope.analyses.trace.rows import Pass, Tables, Tally, join_tables, strongest_pairs
from qkscope.analyses.trace.task import trace_task
from qkscope.analyses.trace.verdicts import controls_of, named_cut, says_cancels, that_sum
from qkscope.capture.scope import Scope
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import Head, Writer, parse_heads, parse_writers
from qkscope.kinds import Count, Natural, Seed, checked_class
from qkscope.linear.neurons import check_neurons
from qkscope.linear.reader import Reader
from qkscope.maths.dictionaries import Dictionary
from qkscope.maths.subspace import Subspace
from qkscope.runs.result import Result
from qkscope.runs.work import current_work, verb
from qkscope.tasks.task import Task


@checked_class
@dataclass(frozen=True)
class Trace(Result):
    """Writers of queries and keys with the edges cut and kept, neurons, or pairs of a dictionary's features."""

    @property
    def main(self) -> str:  # type: ignore[override]
        """The table that answers."""
        return next((name for name in ("feature_pairs", "neurons") if name in self.tables), "writers")


@verb("trace")
def trace(
    scope: Scope,
    what: Task | str | Example | Texts,
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
    """Split what a head matched on among the writers of its query and of its keys, and cut and keep them.

    Parameters
    ----------
    scope : the model.
    what : a task (its right keys against its other keys), one prompt, or a list of texts or documents
        (`qkscope.tasks.texts`; the most attended token of a drawn query against all others but the first).
    head : one head, several, or ``"all"``: of all heads of a task only writers are given, and no edge is cut.
    n : prompts of a task, for choosing and for testing each; passages of texts.
    query, key : tokens of one prompt, by place (from the end where negative) or by text (``" John"``, ``"to#2"``); by
        default its last token, and the token that the head attends to most besides the first.
    versus : the token that the key is compared with; by default all others that the query sees, but the first.
    depth : how many levels down the graph of one prompt (of a task: of its first) goes.
    feature : look inside this subspace alone: its projector is put between query and key.
    dictionary : split among this dictionary's features instead of writers, beside copies of it without meaning; edges
        are not cut then.
    neurons : of one prompt, whether to name the first ten neurons a side of the MLPs before the head; or those to name,
        as ``"M9.N120"``.
    whole : whether whole heads are taken out of the running model, too (of a task).
    draws : random writers of the same layers beside those chosen; of a dictionary, copies of each kind.
    chat : whether a prompt goes into the chat template; a task says so itself.
    batch_size : prompts run together.
    seed : of every draw.
    out : folder for the result and its page, where a run that was stopped goes on; nothing is written by default.
    part : as in `decompose`, of a task or texts.
    progress : whether to show a bar; if not given, where stderr is a terminal.

    Returns
    -------
    Trace
        ``tables["writers"]``, ``["pairs"]``, ``["edges"]``, ``["whole"]``, ``["check"]``; of one prompt ``["tokens"]``,
        ``["cuts"]`` and ``["graph"]``, with neurons ``["neurons"]``. With a dictionary: ``["feature_pairs"]``,
        ``["features"]``, ``["copies"]``, ``["held"]``, ``["check"]``.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope = qk.Scope.load("nano:mixed")
    >>> found = qk.trace(scope, qk.tasks.induction(), "L1H0", 16, whole=False, progress=False)
    >>> found.table()[0]["writer"], found.tables["check"][0]["sum_error"] < 1e-4
    ('L0H2', True)
    """
    named, alone = head != "all", isinstance(what, str | Example)
    if named:
        _check_layers(parse_heads(head))
    if (feature is not None or dictionary is not None) and not (named and (alone or isinstance(what, Task))):
        raise BadInput("a feature or a dictionary is for a task or a prompt, at heads that are named: name them.")
    if neurons and (dictionary is not None or not alone):
        raise BadInput("neurons are named of one prompt, and not beside a dictionary: give a prompt alone.")
    for name, value in {"query": query, "key": key, "versus": versus, "chat": chat}.items():
        if value is not None and not alone:
            given = "a task" if isinstance(what, Task) else "texts"
            raise BadInput(f"{name} is for one prompt, not for {given}: leave it out, or give a prompt.")
    heads = _checked_heads(scope, head)
    if dictionary is not None:
        check_dictionary(scope, heads, dictionary)
    projectors = {} if feature is None else {one: _projector(scope, one, feature) for one in heads}
    if isinstance(what, str | Example):
        query, key, versus = (scope.place(what, token, chat=bool(chat)) for token in (query, key, versus))
        asked = Question.of(scope, what, query, bool(chat))
        layers = [] if dictionary is None else [dictionary.layer]
        run = Reader(scope, heads).record(
            asked.inputs, asked.places, deep=dictionary is None, layers=layers, neurons=bool(neurons)
        )
        every = []
        for one in (PromptTrace(run, asked, h, key, versus, projectors.get(h)) for h in heads):
            if dictionary is None:
                own, sentence = _writers_of(one, depth, draws, seed)
            else:
                own, sentence = features_of_prompt(one, dictionary, draws, seed, len(heads) == 1)
            if neurons:
                wanted = [] if isinstance(neurons, bool) else parse_writers(neurons)
                without = check_neurons(run, one.head, wanted)
                own["neurons"] = one.neuron_rows(wanted)
                sentence += _says_neurons(own["neurons"], without)
            every.append((own, sentence))
        about = {"heads": [str(h) for h in heads], **asked.told(what)}
        about |= {} if dictionary is None else made_by(dictionary, draws)
        fields: dict[str, Any] = {
            "experiment": "trace/prompt",
            "answer": " ".join(sentence for _, sentence in every),
            "tables": join_tables(own for own, _ in every),
            "seed": seed,
        }
        fields |= made_with(scope, tokenizer=scope.tokenizer_hash, **about)
    else:
        run_as = (what.chat, batch_size) if isinstance(what, Task) else (False, TEXTS)
        how = Pass(Reader(scope, heads), *run_as, seed, projectors, (), current_work(), progress)
        if isinstance(what, Task) and named:
            fields = trace_task(how, what, n, whole=whole, depth=depth, draws=draws, dictionary=dictionary)
        else:
            fields = trace_many(how, what, n)
    return that_sum(Trace(**fields), scope.model.dtype)


def _checked_heads(scope: Scope, head: Any) -> list[Head]:
    heads = [one for one in scope.parse(head) if head != "all" or one.layer > 0]
    if not heads:
        raise BadInput(f"{scope.name} has one layer, where only the embedding writes: there is nobody to trace.")
    return heads


def _check_layers(heads: Sequence[Head]) -> None:
    """Refuse heads that nobody but the embedding writes for."""
    for one in heads:
        if one.layer == 0:
            raise BadInput(f"{one} is in the first layer, where only the embedding writes: trace a later head.")


def _projector(scope: Scope, head: Head, feature: Subspace) -> Tensor:
    """``U Uᵀ`` of a feature of this head, this model, and of vectors as the dot product sees them."""
    if feature.head not in (None, head):
        raise BadInput(f"the feature belongs to {feature.head}, not to {head}: trace one head, with a feature of it.")
    check_same_model(feature.about, scope, "the feature")
    space = feature.about.get("space", "post_rope")
    if space != "post_rope":
        raise BadInput(f"the feature was fitted in {space}: trace looks inside features fitted in post_rope.")
    basis = feature.basis("query").float()
    if basis.shape[0] != scope.facts.layers[head.layer].d_head:
        raise BadInput(
            f"the feature has width {basis.shape[0]}, but {head} has {scope.facts.layers[head.layer].d_head}."
        )
    return basis @ basis.T


def _writers_of(one: PromptTrace, depth: int, draws: int, seed: int) -> tuple[Tables, str]:
    """Tables and the answer of one head on one prompt."""
    pairs = strongest_pairs(one.pairs[0])
    tally, cuts, graph = Tally.of_prompt(*one.given(pairs)), one.cut_rows(draws, seed), trace_graph(one, depth)
    tables = {
        "writers": tally.writer_rows(one.head, one.writers),
        "pairs": tally.pair_rows(one.head, one.writers, pairs),
        "cuts": cuts,
        "graph": graph.rows,
        "prompt": graph.prompt,
        "tokens": one.token_rows(),
        "check": [tally.check_row(
            one.head, query=one.asked.query, key=one.key, attention=float(one.attention[one.key]),
            first=float(one.attention[0]),
        )],
    }  # fmt: skip
    if not one.attends:
        return tables, one.where()
    key, query = (
        " and ".join(
            f"{one.writers[i]} ({float(one.marginals[side][0, i]) / one.total:.0%})" for i in one.strongest(side, 2)
        )
        for side in ("key", "query")
    )
    said = f"{one.where()} Its key is written by {key}, its query by {query}.{says_cancels(tables['writers'])}"
    if (cut := named_cut(cuts)) is not None:
        said += (
            f" With {cut['writers']} cut from the key, the attention there is {cut['after']:.0%}"
            f" ({controls_of(cut)}: {cut['random']:.0%}): {cut['verdict']}."
        )
    return tables, said


def _says_neurons(rows: Sequence[Mapping[str, Any]], without: Sequence[Writer]) -> str:
    key, query = (next(row for row in rows if row["side"] == side) for side in ("key", "query"))
    told = [f"{row['writer']} ({row['share'] or 0:.0%}, at {row['token']!r})" for row in (key, query)]
    missing = f" {', '.join(map(str, without))}: no neurons to name." if without else ""
    return f" The first neuron of its key is {told[0]}, of its query {told[1]}.{missing}"
