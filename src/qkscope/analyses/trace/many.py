"""Every head at once: first writers of queries and keys, over a task's prompts or over texts.

On texts the key is the token that the head attends to most besides the first, against all the others that the query
sees; a prompt where even that one has under 5% of the attention does not count for this head. No edge is cut here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.discover.texts import text_examples
from qkscope.analyses.prompts import batches_of, made_from
from qkscope.analyses.trace.edges import writer_rows
from qkscope.analyses.trace.rows import ATTENDED, SIDES, answer_signs, words_of
from qkscope.analyses.trace.tally import Tally
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import check_visible
from qkscope.capture.marginals import marginals
from qkscope.capture.scope import Scope
from qkscope.capture.writers import BIAS, Reader, Recorded
from qkscope.draws import derived_seed
from qkscope.errors import BadInput
from qkscope.heads import Head
from qkscope.maths.writers import cancelling, relative_weights
from qkscope.runs.job import Job
from qkscope.runs.provenance import provenance
from qkscope.tasks.task import Task, Unit

SHOWN = 5  # writers of each side in the table
_TEXTS = 8  # texts run together: every token's writers are held


def trace_many(
    scope: Scope,
    what: Task | Sequence[str],
    heads: Sequence[Head],
    n: int,
    *,
    seed: int = 0,
    batch_size: int = _TEXTS,
    progress: bool | None = None,
    job: Job | None = None,
) -> dict[str, Any]:
    """Fields of a `Trace`: its tables ``heads``, ``writers`` and ``check``."""
    reader, job = Reader(scope, heads), job or Job()
    if isinstance(what, Task):
        units, chat, about = what.choose(n), what.chat, made_from(scope, what)
        words, rows_of, name = words_of(units), _named, what.name
    else:
        order = torch.randperm(len(what), generator=torch.Generator().manual_seed(derived_seed(seed, "texts")))
        examples = text_examples(scope, [what[i] for i in order.tolist()[:n]], queries=1, seed=seed)
        if not examples:
            raise BadInput("no text is long enough to ask in: give longer ones.")
        units, chat, rows_of, name = [(example,) for example in examples], False, _most_attended, "text"
        words = [f"text {i}" for i in range(len(units))]
        about = {"model": scope.name, "weights": scope.weights_hash, "tokenizer": scope.tokenizer_hash}
    asked = {"heads": [str(h) for h in heads], "seed": seed, "batch_size": batch_size, "chat": chat}
    job.begin(scope, list(units), verb="trace", **asked)
    tallies = {head: Tally() for head in heads}
    run = _runner(reader, units, words, rows_of, chat)
    for piece in job.stream("writers", batches_of(units, batch_size), run, progress):
        for head, tally in tallies.items():
            tally.merge(Tally(**piece[str(head)]))
    return {
        "experiment": f"trace/{name}",
        **_told(reader, tallies),
        "model": scope.name,
        "seed": seed,
        "provenance": provenance(**about, n=len(units)),
    }


Rows = Callable[[Reader, Encoding, Recorded], tuple[Float[Tensor, "n h k"], Float[Tensor, "n h"]]]


def _runner(
    reader: Reader, units: Sequence[Unit], words: Sequence[str], rows_of: Rows, chat: bool
) -> Callable[[list[int]], dict[str, Any]]:
    def run(indices: list[int]) -> dict[str, Any]:
        encoded = reader.scope.encode([example for i in indices for example in units[i]], chat=chat)
        unit_of = [i for i in indices for _ in units[i]]
        places = encoded.places if rows_of is _named else encoded.everywhere()
        found = reader.record(encoded.inputs, places)
        weights, attention = rows_of(reader, encoded, found)
        own = [words[unit_of[int(e)]] for e in encoded.example]
        made: dict[str, Any] = {}
        for head, by_query, by_key in marginals(reader, found, weights):
            column = reader.heads.index(head)
            used = (attention[:, column] >= ATTENDED) | (rows_of is _named)
            total = _totals(reader, found, head, weights[:, column])
            error = (by_query.sum(1) - total).abs().maximum((by_key.sum(1) - total).abs())
            error = error / by_key.abs().amax(1).maximum(by_query.abs().amax(1)).clamp_min(1e-30)
            tally = Tally()
            values = {
                "query": by_query,
                "key": by_key,
                "total": total[:, None],
                "attention": attention[:, column, None],
            }
            kept = used.nonzero()[:, 0].tolist()
            if kept:
                mine = {name: value[kept] for name, value in values.items()}
                tally.add([own[i] for i in kept], mine, error=float(error[kept].max()))
            made[str(head)] = {"counts": tally.counts, "sums": tally.sums, "largest": tally.largest}
        return made

    return run


def _totals(reader: Reader, found: Recorded, head: Head, weights: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    assert found.captured is not None
    scale = float(found.captured.scale[reader.heads.index(head)])
    q, k = reader.true(found, head, "query")[:, 0], reader.true(found, head, "key")
    return torch.einsum("nd,nkd,nk->n", q, k, weights) * scale


def _named(reader: Reader, encoded: Encoding, found: Recorded) -> tuple[Tensor, Tensor]:
    """A task's right keys against its other keys."""
    assert found.captured is not None
    named = found.columns[:, None, 1:].expand(-1, len(reader.heads), -1)
    check_visible(encoded, reader.heads, found.captured.bias.gather(-1, named), by_some=True)
    signs = answer_signs(encoded)
    attention = (found.captured.attention().gather(-1, named) * (signs > 0)[:, None]).sum(-1)
    return relative_weights(signs)[:, None].expand(-1, len(reader.heads), -1), attention


def _most_attended(reader: Reader, encoded: Encoding, found: Recorded) -> tuple[Tensor, Tensor]:
    """The token with most attention, the first aside, against all others in sight."""
    assert found.captured is not None
    attention, bias = found.captured.attention(), found.captured.bias
    seen = (bias > -torch.inf) & found.captured.key_mask[:, None]
    seen = seen & (torch.arange(seen.shape[-1]) != found.captured.key_mask.int().argmax(1)[:, None, None].cpu()).to(
        seen.device
    )
    top = attention.masked_fill(~seen, -1).max(-1)
    signs = -seen.long()
    signs.scatter_(-1, top.indices[..., None], 1)
    return relative_weights(signs.flatten(0, 1)).unflatten(0, signs.shape[:2]), top.values


def _told(reader: Reader, tallies: Mapping[Head, Tally]) -> dict[str, Any]:
    heads: list[dict[str, Any]] = []
    writers, check = [], []
    for head, tally in tallies.items():
        if not tally.rows:
            heads.append({"head": str(head), "key_writer": None, "key_share": None, "query_writer": None,
                          "query_share": None, "logit": None, "attention": None, "n": 0})  # fmt: skip
            continue
        total = float(tally.mean("total"))
        rows = writer_rows(head, reader.writers(head.layer), tally, total, SHOWN + 1)
        firsts: dict[str, Any] = {}
        for side in ("key", "query"):
            own = [row for row in rows if row["side"] == side and row["writer"] != BIAS][:SHOWN]
            writers += own
            firsts |= {f"{side}_writer": own[0]["writer"], f"{side}_share": own[0]["share"]}
        heads.append({"head": str(head), **firsts, "logit": total, "attention": float(tally.mean("attention")),
                      "n": tally.rows})  # fmt: skip
        cancels = max(cancelling(tally.mean(side), total) for side in SIDES)
        check.append({"head": str(head), "sum_error": tally.largest["error"], "logit": total, "cancels": cancels,
                      "n": tally.rows})  # fmt: skip
    found = [row for row in heads if row["n"]]
    common: dict[str, int] = {}
    for row in found:
        common[row["key_writer"]] = common.get(row["key_writer"], 0) + 1
    most = sorted(common.items(), key=lambda item: -item[1])[:3]
    said = ", ".join(f"{name} of {count}" for name, count in most)
    answer = f"First key writers of {len(found)} heads, the most frequent: {said}." if found else "No head attends."
    return {"answer": answer, "tables": {"heads": heads, "writers": writers, "check": check}}
