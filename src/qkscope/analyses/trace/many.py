"""Every head at once: first writers of queries and keys, over a task's prompts or over texts.

On texts the key is the token that the head attends to most besides the first, against all the others that the query
sees; a prompt where even that one has under 5% of the attention does not count for this head. No edge is cut here.

A text comes as passages of bounded length, with one query drawn in each (`text_examples`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from qkscope.analyses.prompts import batches_of, made_from
from qkscope.analyses.trace.rows import ATTENDED, answer_signs, sum_errors, true_logit, units_of, words_of
from qkscope.analyses.trace.tally import Tally, tensors_of, writer_rows
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import check_visible
from qkscope.capture.scope import Scope
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.examples import Example
from qkscope.heads import BIAS, Head
from qkscope.linear.many import values_of
from qkscope.linear.reader import Reader
from qkscope.linear.run import Run
from qkscope.maths.writers import cancelling, relative_weights
from qkscope.runs.job import Job
from qkscope.runs.provenance import provenance
from qkscope.tasks.task import Task, Unit
from qkscope.tasks.texts import Document, text_hash

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"]
"""Passages, or documents to cut into them."""
_LENGTH = 96  # tokens of a passage
_CHARACTERS = 480  # of a passage, before it is tokenised: about as many tokens as it may have of English
_FIRST_QUERY = 4  # a query nearer to the start sees next to nothing


def cut(texts: Texts) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Passages, and the number of the text that each is from; a text that is a string already is a passage."""
    found: list[str] = []
    text_of: list[int] = []
    for i, text in enumerate(texts):
        found += passages(text.text) if isinstance(text, Document) else [str(text)]
        text_of += [i] * (len(found) - len(text_of))
    return tuple(found), tuple(text_of)


def passages(text: str) -> tuple[str, ...]:
    """Text cut at blank lines, short pieces joined and long ones cut at line ends or blanks."""
    found: list[str] = []
    for piece in re.split(r"\n\s*\n", text):
        piece = piece.strip("\n")
        while len(piece) > _CHARACTERS:
            cut = max(piece.rfind("\n", 1, _CHARACTERS), piece.rfind(" ", 1, _CHARACTERS))
            cut = cut if cut > _CHARACTERS // 2 else _CHARACTERS
            found.append(piece[:cut])
            piece = piece[cut:].lstrip("\n")
        if piece.strip():
            found.append(piece)
    joined: list[str] = []
    for piece in found:
        if joined and len(joined[-1]) + len(piece) < _CHARACTERS // 2:
            joined[-1] += "\n\n" + piece
        else:
            joined.append(piece)
    return tuple(joined)


def text_examples(scope: Scope, texts: Sequence[str], seed: int = 0) -> list[Example]:
    """Passages as token ids with a query drawn by lot in each; what is too short to ask in, or a copy, is left out."""
    if scope.tokenizer is None:
        raise BadInput(f"{scope.name} has no tokenizer: text cannot be read without one.")
    encoded = scope.tokenizer(list(texts), truncation=True, max_length=_LENGTH, verbose=False)["input_ids"]
    first: dict[tuple[int, ...], Example] = {}  # passages that differ only where they are cut off are copies
    for i, ids in enumerate(map(tuple, encoded)):
        if len(ids) > _FIRST_QUERY and ids not in first:
            place = _FIRST_QUERY + derived_seed(seed, "queries", i) % (len(ids) - _FIRST_QUERY)
            first[ids] = Example(ids=ids, queries=((place, place + 1),), cluster=i)
    return list(first.values())


SHOWN = 5  # writers of each side in the table
TEXTS = 8  # texts run together: every token's writers are held
_GROUPS = 64  # of texts, which intervals resample: sums are as large for many texts as for these


def trace_many(
    scope: Scope,
    what: Task | Texts,
    heads: Sequence[Head],
    n: int,
    *,
    seed: int = 0,
    batch_size: int = TEXTS,
    progress: bool | None = None,
    job: Job | None = None,
) -> dict[str, Any]:
    """Fields of a `Trace`: its tables ``heads``, ``writers`` and ``check``."""
    reader, job = Reader(scope, heads), job or Job()
    if isinstance(what, Task):
        units, chat, about, name = what.choose(n), what.chat, made_from(scope, what), what.name
    elif not what:
        raise BadInput("there are no texts: give at least one.")
    else:
        pieces, text_of = cut(what)
        lot = torch.Generator().manual_seed(derived_seed(seed, "texts"))
        order = torch.randperm(len(pieces), generator=lot).tolist()[:n]
        examples = text_examples(scope, [pieces[i] for i in order], seed)
        examples = [replace(own, cluster=text_of[order[int(own.cluster)]]) for own in examples]
        if not examples:
            raise BadInput("no text is long enough to ask in: give longer ones.")
        units, chat, name = [(example,) for example in examples], False, "text"
        about = {"model": scope.name, "weights": scope.weights_hash, "tokenizer": scope.tokenizer_hash}
        about |= {"texts": text_hash(what)}
    asked = {"heads": [str(h) for h in heads], "seed": seed, "batch_size": batch_size, "chat": chat}
    job.begin(scope, list(units), verb="trace", **asked)
    run: Any = {"named": isinstance(what, Task), "chat": chat, "batch_size": batch_size, "progress": progress}
    return {
        "experiment": f"trace/{name}",
        **told(reader, first_writers(reader, units, job, **run)),
        "model": scope.name,
        "seed": seed,
        "provenance": provenance(**about, n=len(units)),
    }


def first_writers(
    reader: Reader,
    units: Sequence[Unit],
    job: Job,
    *,
    named: bool = False,
    chat: bool = False,
    batch_size: int = TEXTS,
    progress: bool | None = None,
) -> dict[Head, Tally]:
    """What each writer gives to the reader's heads, summed over prompts.

    Parameters
    ----------
    reader : of the heads.
    units : prompts of a task, or passages of text with one query each and the number of their text as cluster.
    job : that has begun; what is done is kept in it.
    named : whether keys are named, as a task does it; otherwise it is the most attended key.
    chat : whether prompts go into the chat template.
    batch_size : prompts run together.
    progress : whether to say how far it is.
    """
    words = words_of(units) if named else [f"text {int(own.cluster) % _GROUPS}" for own, *_ in units]
    tallies = {}
    for head in reader.heads:
        writers = (len(reader.writers(head.layer)),)
        tallies[head] = Tally(words, {"total": (), "attention": (), "query": writers, "key": writers})

    def add(indices: list[int]) -> None:
        encoded = reader.scope.encode([example for i in indices for example in units[i]], chat=chat)
        run = reader.record(encoded.inputs, encoded.places if named else encoded.everywhere())
        weights, attention = _named(run, encoded) if named else _most_attended(run)
        own = [words[i] for i in units_of(encoded, units, indices)]
        made = []
        for head, by_query, by_key in values_of(run, weights):
            column = reader.columns[head]
            total, looked = true_logit(run, head, weights[:, column]), attention[:, column]
            values = {"total": total, "attention": looked, "query": by_query, "key": by_key}
            made.append((head, values, sum_errors(total, by_query, by_key), (looked >= ATTENDED) | named))
        for head, values, error, used in made:  # a batch is added whole, or not at all
            tallies[head].add(own, values, error, used)

    job.stream("writers", batches_of(units, batch_size), add, progress, tensors_of(tallies))
    return tallies


def _named(run: Run, encoded: Encoding) -> tuple[Tensor, Tensor]:
    """A task's right keys against its other keys."""
    heads = run.reader.heads
    named = run.columns[:, None, 1:].expand(-1, len(heads), -1)
    check_visible(encoded, heads, run.captured.bias.gather(-1, named), by_some=True)
    signs = answer_signs(encoded)
    attention = (run.captured.attention().gather(-1, named) * (signs > 0)[:, None]).sum(-1)
    return relative_weights(signs)[:, None].expand(-1, len(heads), -1), attention


def _most_attended(run: Run) -> tuple[Tensor, Tensor]:
    """The token with most attention, the first aside, against all others in sight."""
    attention, bias, mask = run.captured.attention(), run.captured.bias, run.captured.key_mask
    places = torch.arange(mask.shape[1], device=mask.device)
    seen = (bias > -torch.inf) & (mask & (places != mask.int().argmax(1)[:, None]))[:, None]
    top = attention.masked_fill(~seen, -1).max(-1)
    signs = -seen.long()
    signs.scatter_(-1, top.indices[..., None], 1)
    return relative_weights(signs.flatten(0, 1)).unflatten(0, signs.shape[:2]), top.values


def told(reader: Reader, tallies: Mapping[Head, Tally]) -> dict[str, Any]:
    """The answer, and tables of all heads."""
    heads: list[dict[str, Any]] = []
    writers, check = [], []
    for head, tally in tallies.items():
        if not tally.rows:
            heads.append({"head": str(head), "key_writer": None, "key_share": None, "query_writer": None,
                          "query_share": None, "logit": None, "attention": None, "n": 0})  # fmt: skip
            continue
        total = float(tally.mean("total"))
        rows = writer_rows(head, reader.writers(head.layer), tally.sides(), total, SHOWN + 1, tally.interval)
        firsts: dict[str, Any] = {}
        for side in ("key", "query"):
            own = [row for row in rows if row["side"] == side and row["writer"] != BIAS][:SHOWN]
            writers += own
            firsts |= {f"{side}_writer": own[0]["writer"], f"{side}_share": own[0]["share"]}
        heads.append({"head": str(head), **firsts, "logit": total, "attention": float(tally.mean("attention")),
                      "n": tally.rows})  # fmt: skip
        cancels = max(cancelling(own, total) for own in tally.sides().values())
        check.append({"head": str(head), "sum_error": float(tally.error), "logit": total, "cancels": cancels,
                      "n": tally.rows})  # fmt: skip
    found = [row for row in heads if row["n"]]
    common: dict[str, int] = {}
    for row in found:
        common[row["key_writer"]] = common.get(row["key_writer"], 0) + 1
    most = sorted(common.items(), key=lambda item: -item[1])[:3]
    said = ", ".join(f"{name} of {count}" for name, count in most)
    answer = f"First key writers of {len(found)} heads, the most frequent: {said}." if found else "No head attends."
    return {"answer": answer, "tables": {"heads": heads, "writers": writers, "check": check}}
