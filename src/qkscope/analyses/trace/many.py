"""Every head at once: first writers of queries and keys, over a task's prompts or over texts.

On texts the key is the token that the head attends to most besides the first, against all the others that the query
sees; a prompt where even that one has under 5% of the attention does not count for this head. No edge is cut here.

A text comes as passages of bounded length, with one query drawn in each (`text_examples`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkscope.analyses.prompts import made_from, words_of
from qkscope.analyses.trace.rows import ATTENDED, HeadRows, Pass, Tally, answer_signs, named_columns
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
from qkscope.maths.writers import relative_weights
from qkscope.runs.result import provenance
from qkscope.tasks.task import Task, Unit
from qkscope.tasks.texts import Document, text_hash

Texts: TypeAlias = Sequence[str] | Annotated[Sequence[Document], "a list of documents"]
"""Passages, or documents to cut into them."""
_LENGTH = 96  # tokens of a passage
_CHARACTERS = 480  # of a passage, before it is tokenised: about as many tokens as it may have of English
_FIRST_QUERY = 4  # a query nearer to the start sees next to nothing


def cut(texts: Texts) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Passages, and the number of the text that each is from; a text that is a string already is a passage."""
    pieces = [
        (piece, i)
        for i, text in enumerate(texts)
        for piece in (passages(text.text) if isinstance(text, Document) else [str(text)])
    ]
    return tuple(piece for piece, _ in pieces), tuple(i for _, i in pieces)


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
    """Passages as token ids with a random query in each; what is too short to ask in, or a copy, is left out."""
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


def trace_many(how: Pass, what: Task | Texts, n: int) -> dict[str, Any]:
    """Fields of a `Trace`: its tables ``heads``, ``writers`` and ``check``."""
    scope = how.reader.scope
    if isinstance(what, Task):
        units, about, name = what.test(n), made_from(scope, what), what.name
    else:
        units, name = [(example,) for example in _drawn_passages(scope, what, n, how.seed)], "text"
        about = {"model": scope.name, "weights": scope.weights_hash, "tokenizer": scope.tokenizer_hash}
        about |= {"texts": text_hash(what)}
    asked = {"heads": [str(h) for h in how.reader.heads], "seed": how.seed, "batch_size": how.batch_size}
    how.job.begin(scope, list(units), verb="trace", chat=how.chat, **asked)
    return {
        "experiment": f"trace/{name}",
        **told(how.reader, first_writers(how, units, named=isinstance(what, Task))),
        "model": scope.name,
        "seed": how.seed,
        "provenance": provenance(**about, n=len(units)),
    }


def _drawn_passages(scope: Scope, texts: Texts, n: int, seed: int) -> list[Example]:
    """Up to n passages at random, each with the number of its text as cluster."""
    if not texts:
        raise BadInput("there are no texts: give at least one.")
    pieces, text_of = cut(texts)
    generator = torch.Generator().manual_seed(derived_seed(seed, "texts"))
    order = torch.randperm(len(pieces), generator=generator).tolist()[:n]
    examples = text_examples(scope, [pieces[i] for i in order], seed)
    if not examples:
        raise BadInput("no text is long enough to ask in: give longer ones.")
    return [replace(own, cluster=text_of[order[int(own.cluster)]]) for own in examples]


def first_writers(how: Pass, units: Sequence[Unit], named: bool = False) -> dict[Head, Tally]:
    """What each writer gives to the reader's heads, summed over prompts.

    Parameters
    ----------
    how : prompts are run.
    units : prompts of a task, or passages of text with one query each and the number of their text as cluster.
    named : whether keys are named, as a task does it; otherwise it is the most attended key.
    """
    reader = how.reader
    words = words_of(units) if named else [f"text {int(own.cluster) % _GROUPS}" for own, *_ in units]
    tallies = {}
    for head in reader.heads:
        writers = (len(reader.writers(head.layer)),)
        tallies[head] = Tally(sorted(words), {"total": (), "attention": (), "query": writers, "key": writers})

    def measure(indices: list[int]) -> Any:
        numbers, encoded = how.encode(units, indices)
        run = reader.record(encoded.inputs, encoded.places if named else encoded.everywhere())
        signs, attention = _named(run, encoded) if named else _most_attended(run)
        weights, own = relative_weights(signs.flatten(0, 1)).unflatten(0, signs.shape[:2]), [words[i] for i in numbers]
        given = []
        every = ((head, q[:, i], k[:, i]) for heads, q, k in values_of(run, weights) for i, head in enumerate(heads))
        for head, by_query, by_key in every:
            column = reader.columns[head]
            rows, looked = HeadRows(run, head, signs[:, column]), attention[:, column]
            rows.marginals = {"query": by_query, "key": by_key}  # those of all heads at once
            values, error = rows.given()
            given.append((head, own, {**values, "attention": looked}, error, (looked >= ATTENDED) | named))
        return given, None

    how.add_up("writers", units, measure, tallies, last=True)
    return tallies


def _named(run: Run, encoded: Encoding) -> tuple[Int[Tensor, "n h k"], Float[Tensor, "n h"]]:
    """A task's right keys against its other keys, and the attention on the right ones."""
    columns, signs = named_columns(run), answer_signs(encoded)
    check_visible(encoded, run.reader.heads, run.captured.bias.gather(-1, columns), by_some=True)
    attention = (run.captured.attention().gather(-1, columns) * (signs > 0)[:, None]).sum(-1)
    return signs[:, None].expand_as(columns), attention


def _most_attended(run: Run) -> tuple[Int[Tensor, "n h k"], Float[Tensor, "n h"]]:
    """The token with most attention except the first, against all others in sight."""
    attention, bias, mask = run.captured.attention(), run.captured.bias, run.captured.key_mask
    places = torch.arange(mask.shape[1], device=mask.device)
    seen = (bias > -torch.inf) & (mask & (places != mask.int().argmax(1)[:, None]))[:, None]
    top = attention.masked_fill(~seen, -1).max(-1)
    return (-seen.long()).scatter(-1, top.indices[..., None], 1), top.values


def told(reader: Reader, tallies: Mapping[Head, Tally]) -> dict[str, Any]:
    """The answer, and tables of all heads."""
    heads: list[dict[str, Any]] = []
    writers, check = [], []
    for head, tally in tallies.items():
        firsts: dict[str, Any] = dict.fromkeys(("key_writer", "key_share", "query_writer", "query_share"))
        means: dict[str, Any] = dict.fromkeys(("logit", "attention"))
        if tally.rows:
            rows = tally.writer_rows(head, reader.writers(head.layer), SHOWN + 1)
            for side in ("key", "query"):
                own = [row for row in rows if row["side"] == side and row["writer"] != BIAS][:SHOWN]
                writers += own
                firsts |= {f"{side}_writer": own[0]["writer"], f"{side}_share": own[0]["share"]}
            means = {"logit": float(tally.mean("total")), "attention": float(tally.mean("attention"))}
            check.append(tally.check_row(head))
        heads.append({"head": str(head), **firsts, **means, "n": tally.rows})
    common = Counter(row["key_writer"] for row in heads if row["n"])
    said = ", ".join(f"{name} of {count}" for name, count in common.most_common(3))
    answer = f"First key writers of {common.total()} heads, the most frequent: {said}." if said else "No head attends."
    return {"answer": answer, "tables": {"heads": heads, "writers": writers, "check": check}}
