"""Whole heads taken out of the running model, beside their edges: another question, with the model's answer as well.

A head that is taken out puts out its mean over all tokens but the first, at every token, for all readers; an edge is
its part in one reader alone. MLPs are live, or held at what they put out before, their answers to the head left
standing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.analyses.prompts import batches_of
from qkscope.analyses.trace.choose import Chosen
from qkscope.analyses.trace.rows import addresses_of, answer_signs, edge_rows, is_head
from qkscope.analyses.trace.tally import Tally
from qkscope.capture.ablate import outputs_summed, parts_held, taken_out
from qkscope.capture.encode import Encoding
from qkscope.capture.inputs import answer_ids
from qkscope.capture.writers import Reader
from qkscope.draws import derived_seed
from qkscope.heads import Head
from qkscope.maths.writers import METRICS, draw_alike
from qkscope.runs.shards import stream
from qkscope.tasks.task import ANSWER, Unit

PROMPTS, MEANS, MOST = 48, 32, 3  # prompts tested, prompts that means are taken over, heads taken out at once
_BATCH = 16


def strongest_heads(chosen: Chosen, writers: Sequence[str]) -> list[Head]:
    """Head writers by the size of their shares of the query and of the key side together."""
    shares = chosen.scores["share"]
    size = shares["query"].abs() + shares["key"].abs()
    order = size[:-1].argsort(descending=True).tolist()
    return [Head.parse(writers[i]) for i in order if is_head(writers[i])][:MOST]


def whole_heads(
    reader: Reader,
    head: Head,
    chosen: Chosen,
    choosing: Sequence[Unit],
    units: Sequence[Unit],
    words: Sequence[str],
    *,
    chat: bool = False,
    seed: int = 0,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """Take out the first one, two and three head writers, and as many others of their layers."""
    names = reader.writers(head.layer)
    heads = strongest_heads(chosen, names)
    if not heads:
        return []
    instead = _mean_outputs(reader, choosing[:MEANS], chat)
    only = [name for name in names[:-1] if is_head(name)]
    layers = addresses_of([*only, names[-1]])
    tallies: dict[Any, Tally] = {}
    cases = [(size, mlps, kind) for size in range(1, len(heads) + 1) for mlps, kind in _KINDS]

    def run(indices: list[int]) -> dict[Any, tuple[list[str], Tensor]]:
        encoded = reader.scope.encode([units[i][0] for i in indices], chat=chat)
        right = _right_tokens(reader, encoded, chat)
        with parts_held(reader) as held:
            found: dict[Any, Tensor] = {None: _measure(reader, head, encoded, right)}
        own = [words[indices[int(e)]] for e in encoded.example]
        for size, mlps, kind in cases:
            masks: dict[Head, Tensor] = {}
            for row, i in enumerate(indices):
                chosen_heads = heads[:size]
                if kind == "random":  # each prompt has heads of its own
                    mine = [only.index(str(h)) for h in chosen_heads]
                    drawn = draw_alike(mine, layers, derived_seed(seed, "whole", size, i))
                    chosen_heads = [Head.parse(only[c]) for c in drawn]
                for one in chosen_heads:
                    masks.setdefault(one, torch.zeros(len(indices), dtype=torch.bool))[row] = True
            with taken_out(reader, masks, instead, held if mlps == "held" else None):
                found[size, mlps, kind] = _measure(reader, head, encoded, right)
        return {key: (own, value) for key, value in found.items()}

    tested = list(range(min(PROMPTS, len(units))))
    batches = [[tested[i] for i in batch] for batch in batches_of([units[i] for i in tested], _BATCH)]
    for part in stream(batches, run, progress):
        for key, (own, value) in part.value.items():
            tallies.setdefault(key, Tally()).add(own, {"found": value})
    return _rows(head, heads, tallies)


_KINDS = (("live", "chosen"), ("held", "chosen"), ("live", "random"))


def _rows(head: Head, heads: Sequence[Head], tallies: dict[Any, Tally]) -> list[dict[str, Any]]:
    before = tallies[None].mean("found").tolist()
    made = []
    for key, tally in tallies.items():
        size, mlps, kind = key or (0, "live", "chosen")
        values, (low, high) = tally.mean("found").tolist(), tally.interval("found")
        accuracy = METRICS.index("accuracy")
        named = ", ".join(map(str, heads[:size])) or "none"
        made.append({
            "head": str(head), "removed": f"{size} others of their layers" if kind == "random" else named,
            "size": size, "mlps": mlps, "kind": kind, **dict(zip(METRICS, values, strict=False)),
            "low": float(low[accuracy]), "high": float(high[accuracy]),
            "answer_before": before[-1], "answer": values[-1], "n": tally.rows,
            "draws": tally.rows if kind == "random" else 1,
        })  # fmt: skip
    return made


@torch.no_grad()
def _mean_outputs(reader: Reader, units: Sequence[Unit], chat: bool) -> dict[int, Float[Tensor, "h e"]]:
    sums: dict[int, Tensor] = {}
    count = 0
    for batch in batches_of(units, _BATCH):
        encoded = reader.scope.encode([units[i][0] for i in batch], chat=chat)
        shown = encoded.inputs["attention_mask"].bool().clone()
        shown[torch.arange(len(shown)), shown.int().argmax(1)] = False
        with outputs_summed(reader, shown) as found:
            reader.scope.watch(encoded.inputs)
        count += int(shown.sum())
        sums = {layer: sums.get(layer, 0) + value for layer, value in found.items()}
    return {layer: (value / count).float() for layer, value in sums.items()}


def _right_tokens(reader: Reader, encoded: Encoding, chat: bool) -> list[list[int]]:
    """The tokens that answer each prompt: those that are named, or its right keys' own."""
    named = answer_ids(reader.scope, encoded.examples, chat)
    tokens = encoded.inputs["input_ids"].gather(1, encoded.places.keys)
    right = encoded.labels[ANSWER] > 0
    return [
        tokens[row][right[row]].tolist() if found is None else found[0]
        for row, found in enumerate(named[int(e)] for e in encoded.example)
    ]


def _measure(reader: Reader, head: Head, encoded: Encoding, right: Sequence[Sequence[int]]) -> Float[Tensor, "n m"]:
    """`METRICS` of the head, and the probability of the right answer, in a run as it is now."""
    captured = reader.scope.capture_inputs(encoded, places=encoded.everywhere(), heads=[head], logits=True)
    assert captured.logits is not None
    signs = answer_signs(encoded)
    rows = edge_rows(captured, head, encoded.places.keys.masked_fill(~encoded.places.key_mask, 0), signs)
    found = rows.measure(rows.rows.q[None, :, 0], rows.keys()[None])[0]
    chances = captured.logits.softmax(-1)
    answer = torch.stack([chances[i, list(own)].sum() for i, own in enumerate(right)])
    return torch.cat([found, answer[:, None]], dim=1).cpu()
