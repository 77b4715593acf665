"""What the writers of a query or a key read: a head's part of the logit, by how far away the token stood.

Over many prompts, ``x_c(p)·g = Σ_s a(p,s) v(s)·G`` is summed by the offset ``s − p``; at the keys, what the right key
read at an offset less the mean of what the others read there. The first token, where attention rests, stands apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkscope.capture.encode import Encoding
from qkscope.capture.sources import Trail
from qkscope.capture.writers import Reader, Side
from qkscope.errors import BadInput
from qkscope.heads import Head

FIRST, REST = "(first token)", "(rest)"


def sources_of(
    reader: Reader,
    batches: Iterable[tuple[Encoding, Float[Tensor, "n k"]]],
    head: Head,
    writers: Mapping[Side, Sequence[str]],
    *,
    width: int = 3,
) -> list[dict[str, Any]]:
    """Which tokens a head's writers read, over many prompts.

    Parameters
    ----------
    reader : of the head.
    batches : prompts, each with the weights of its keys in the logit: +1 on the right one, −1/m on m others, 0 in
        padded slots.
    head : whose logit it is.
    writers : by side, whose sources are wanted; those that are no heads have none.
    width : how many offsets are named for each writer.

    Returns
    -------
    list of dict
        ``head, side, writer, token, frequency, offset, share``: the share is of the logit, so that a writer's rows sum
        to its own share; the token is the most frequent one at that offset from the query or from the right key, and
        stands there in this fraction of the prompts that have one. What the first token gave and the rest have no
        offset.

    Examples
    --------
    >>> import qkscope as qk
    >>> scope, head = qk.Scope.load("nano:mixed"), Head.parse("L2H3")
    >>> prompt = qk.Example.mark("hat: O jam: Z jam:", keys=["O", "Z"])
    >>> batch = scope.encode([prompt]), torch.tensor([[-1.0, 1.0]])
    >>> sources_of(Reader(scope, [head]), [batch], head, {"key": ["L1H0"]}, width=1)[0]["side"]
    'key'
    """
    named = {side: [Head.parse(name) for name in names if name.startswith("L")] for side, names in writers.items()}
    for other in (other for heads in named.values() for other in heads):
        if other.layer >= head.layer:
            raise BadInput(f"{other} does not write before {head}: its sources are not asked for.")
    layers = {other.layer for heads in named.values() for other in heads}
    total, sums, tokens = 0.0, dict[tuple[Side, Head], Counter[int | str]](), dict[tuple[Side, int], Counter[int]]()
    for encoded, weights in batches:
        trail = Trail(reader, encoded.inputs, encoded.places, layers)
        keys = torch.arange(1, trail.found.columns.shape[1], device=weights.device)
        asked = trail.ask(head, 0, keys, weights)
        total += float(asked.total.double().sum())
        ids, mask = encoded.inputs["input_ids"][trail.found.row], encoded.inputs["attention_mask"][trail.found.row]
        first = mask.argmax(dim=1)
        right = trail.found.columns[:, 1:].gather(1, weights.argmax(dim=1, keepdim=True))[:, 0]
        for side, direction in asked.sides.items():
            if named.get(side):
                answer = trail.writers(direction)
                for other in named[side]:
                    along = answer.asks[other.layer][:, :, other.index]
                    brought = trail.attention(other, direction.slots) * trail.read(other, along)
                    found = _by_offset(brought, trail.found.columns[:, direction.slots], first)
                    sums.setdefault((side, other), Counter()).update(found)
                _count(tokens, side, ids, mask, trail.found.columns[:, 0] if side == "query" else right)
    return [
        {"head": str(head), "side": side, "writer": str(other), **row}
        for (side, other), found in sums.items()
        for row in _rows(found, total, {at: counts for (of, at), counts in tokens.items() if of == side}, reader, width)
    ]


def _by_offset(brought: Float[Tensor, "n p t"], columns: Tensor, first: Tensor) -> dict[int | str, float]:
    """Sums by the distance from a slot to a token, and of the first tokens."""
    length = brought.shape[-1]
    tokens = torch.arange(length, device=brought.device)
    offsets = tokens - columns[..., None] + length
    offsets = torch.where(tokens == first[:, None, None], 2 * length, offsets)
    sums = torch.zeros(2 * length + 1, dtype=torch.float64, device=brought.device)
    sums.index_add_(0, offsets.flatten(), brought.double().flatten())
    *others, at_first = sums.tolist()
    return {FIRST: at_first} | {i - length: value for i, value in enumerate(others) if value}


def _count(tokens: dict[tuple[Side, int], Counter[int]], side: Side, ids: Tensor, mask: Tensor, at: Tensor) -> None:
    """Which ids stand at which distance from a place."""
    for row, shown, place in zip(ids.tolist(), mask.tolist(), at.tolist(), strict=True):
        for column, (token, is_token) in enumerate(zip(row, shown, strict=True)):
            if is_token:
                tokens.setdefault((side, column - place), Counter())[token] += 1


def _rows(
    found: Counter[int | str], total: float, tokens: Mapping[int, Counter[int]], reader: Reader, width: int
) -> list[dict[str, Any]]:
    tokenizer = reader.scope.tokenizer
    largest = sorted(found, key=lambda at: -abs(found[at]))[:width]
    rows = []
    for at in largest:
        text, often = str(at), None
        if isinstance(at, int) and at in tokens:
            (token, count), *_ = tokens[at].most_common(1)
            text = tokenizer.decode([token]) if tokenizer else str(token)
            often = count / tokens[at].total()
        offset = at if isinstance(at, int) else None
        rows.append({"token": text, "frequency": often, "offset": offset, "share": found[at] / total})
    left = sum(value for at, value in found.items() if at not in largest)
    return [*rows, {"token": REST, "frequency": None, "offset": None, "share": left / total}]
