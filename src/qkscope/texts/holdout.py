"""Sides of a text that share no text: to choose on, to fit on, to test on.

Text that came to be once must not stand on two sides. So documents that share much text (a tenth or
more of the runs of eight tokens of the smaller one) are one group, each group is assigned to a side
at random, and a passage that still shares a run with another side is left out. Grouping by any
shared run would not do: "Changed in version 3." and the like tie three quarters of Python's topics
together, and a greeting ties a folder of addresses. In the end no eight tokens in a row stand on
two sides.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from qkscope.checking import Count, Seed, checked_call
from qkscope.errors import BadInput
from qkscope.seeds import derived_seed, draw_bits
from qkscope.texts.documents import Document
from qkscope.texts.task import connected, seeded

log = logging.getLogger(__name__)

SIDES = {"choose": 0.25, "fit": 0.5, "test": 0.25}  # each side's share of the tokens
RUN = 8  # tokens in a row that may not stand on two sides
LENGTH = 256  # tokens of a passage
_MUCH = 0.1  # of the smaller document's runs: documents that share as much are one group
_LINKS = 64  # documents that a run links each of its holders to: in a heading of thousands, not all with all
_EACH = 3  # groups that a side needs: intervals are by group
_LARGE = 0.5  # of a side: a group that is larger goes to another, so that a side is never one group alone


class Passage(NamedTuple):
    """A piece of a document as the model reads it.

    Parameters
    ----------
    document : the name of its document.
    group : the number of its group: documents that share much text have the same. The random unit
        of intervals.
    ids : its tokens, with what the tokenizer puts in front of a text.

    Examples
    --------
    >>> len(Passage("note", 0, (5, 6, 7)).ids)
    3
    """

    document: str
    group: int
    ids: tuple[int, ...]


@checked_call
def split(
    documents: Sequence[Document],
    encode: Callable[[str], Sequence[int]],
    sides: Mapping[str, float] = SIDES,
    length: Count = LENGTH,
    seed: Seed = 0,
) -> dict[str, tuple[Passage, ...]]:
    """Passages by side, with no eight tokens in a row on two of them.

    A document is tokenised whole, and its ids are cut into as few parts of about the same length as
    can be. What the tokenizer puts in front of any text (a `<bos>`) comes in front of every passage
    and counts towards its length; what it puts behind is left out.

    Parameters
    ----------
    documents : at least three for every side's share, and no two of them alike.
    encode : the tokenizer, from text to ids.
    sides : name and share of each.
    length : the most tokens of a passage.
    seed : of the lot that says which group goes where.

    Examples
    --------
    >>> words = [Document(str(i), " ".join(str(40 * i + j) for j in range(40))) for i in range(20)]
    >>> found = split(words, lambda text: [int(word) for word in text.split()], length=16)
    >>> {side: len(passages) for side, passages in found.items()}
    {'choose': 15, 'fit': 30, 'test': 15}
    """
    needed = math.ceil(_EACH * sum(sides.values()) / min(sides.values()))
    if len(documents) < needed:
        raise BadInput(
            f"a split needs {needed} documents or more, but got {len(documents)}: give more."
        )
    encoded = [list(encode(document.text)) for document in documents]
    around = list(encode(""))
    (start, *_), ids = zip(*(_inner(tokens, around) for tokens in encoded), strict=True)
    if length < len(start) + RUN:
        raise BadInput(f"length is at least {len(start) + RUN}, but got {length}.")
    groups = _groups(ids)
    if (count := max(groups) + 1) < needed:
        alike = f"these {len(documents)} repeat each other so much that they count as {count}"
        raise BadInput(
            f"a split needs {needed} documents or more, and {alike}: give more that share no text."
        )
    sizes = Counter[int]()
    for tokens, group in zip(ids, groups, strict=True):
        sizes[group] += len(tokens)
    side_of = _drawn(sizes, sides, seed)
    passages: dict[str, list[Passage]] = {side: [] for side in sides}
    for document, tokens, group in zip(documents, encoded, groups, strict=True):
        pieces = passages_of(tokens, around, length)
        passages[side_of[group]] += [Passage(document.name, group, piece) for piece in pieces]
    return _apart(passages, sides)


def passages_of(ids: list[int], around: list[int], length: int) -> list[tuple[int, ...]]:
    """A tokenised text cut into as few parts of about the same length as can be.

    ``around`` is what the tokenizer makes of no text at all: what it puts in front of any text
    comes in front of every part and counts towards its length; what it puts behind is left out.

    >>> passages_of([1, 5, 6, 7, 8, 9], [1], 4)
    [(1, 5, 6, 7), (1, 8, 9)]
    """
    start, tokens = _inner(ids, around)
    parts = math.ceil(len(tokens) / (length - len(start)))
    return [(*start, *piece.tolist()) for piece in (tokens.tensor_split(parts) if parts else ())]


def _inner(ids: list[int], around: list[int]) -> tuple[list[int], Int[Tensor, " t"]]:
    """What the tokenizer puts in front of a text, and the text's own tokens."""
    start = [
        a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(around, ids, strict=False))
    ]
    return start, _tensor(ids[len(start) : len(ids) - len(around) + len(start)])


def _tensor(ids: Sequence[int]) -> Int[Tensor, " t"]:
    return torch.tensor(ids, dtype=torch.int64)


def _runs(texts: Sequence[Tensor]) -> tuple[Int[Tensor, " r"], Int[Tensor, " r"]]:
    """A hash of every eight tokens in a row, and the number of the text in which they stand; none
    straddles two.
    """
    empty = torch.zeros(0, dtype=torch.int64)
    flat = torch.cat([empty, *texts])
    owner = torch.repeat_interleave(_tensor([len(text) for text in texts]))
    count = len(flat) - RUN + 1
    if count < 1:
        return empty, empty
    within = owner[:count] == owner[RUN - 1 :]
    return draw_bits(*(flat[i : i + count] for i in range(RUN)))[within], owner[:count][within]


def _groups(texts: Sequence[Tensor]) -> list[int]:
    """The group of each text, counted in the order of their first texts: those that share much are
    together.
    """
    n = len(texts)
    runs, owner = _runs(texts)
    held = (
        runs.unique(return_inverse=True)[1] * n + owner
    ).unique()  # each text's runs once, by run and text
    run = held // n
    text = held % n
    sizes = torch.bincount(text, minlength=n)
    pairs = [torch.zeros(0, dtype=torch.int64)]
    for step in range(1, _LINKS + 1):
        same = run[step:] == run[:-step]
        if not bool(same.any()):
            break
        pairs.append((text[:-step] * n + text[step:])[same])
    pair, shared = torch.cat(pairs).unique(return_counts=True)
    ends = torch.stack([pair // n, pair % n], dim=1)
    much = shared >= _MUCH * sizes[ends].amin(dim=1)
    return connected(n, [(a, b) for a, b in ends[much].tolist()])


def _drawn(sizes: Mapping[int, int], sides: Mapping[str, float], seed: int) -> dict[int, str]:
    """The side of each group: large ones first, drawn at random among the sides that have room, in
    proportion to it.
    """
    total = sum(sizes.values()) / sum(sides.values())
    whole = {side: share * total for side, share in sides.items()}
    room = dict(whole)
    drawn = dict[int, str]()
    for group, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        fits = [side for side in sides if size <= min(room[side], _LARGE * whole[side])]
        fits = fits or [max(sides, key=lambda side: room[side])]
        lot = seeded(derived_seed(seed, "side", group))
        drawn[group] = lot.choices(fits, [max(room[side], 1e-9) for side in fits])[0]
        room[drawn[group]] -= size
    return drawn


def _apart(
    passages: Mapping[str, Sequence[Passage]], sides: Mapping[str, float]
) -> dict[str, tuple[Passage, ...]]:
    """The passages that share no run with another side: the larger side gives way, and of two the
    earlier.
    """
    kept = dict[str, tuple[Passage, ...]]()
    taken = torch.zeros(0, dtype=torch.int64)
    dropped = 0
    for side in sorted(reversed(list(passages)), key=lambda name: sides[name]):
        runs, owner = _runs([_tensor(passage.ids) for passage in passages[side]])
        shares = set(owner[torch.isin(runs, taken)].tolist())
        kept[side] = tuple(passage for i, passage in enumerate(passages[side]) if i not in shares)
        left = _runs([_tensor(passage.ids) for passage in kept[side]])[0]
        taken = torch.cat([taken, left.unique()])
        dropped = dropped + len(shares)
        if not kept[side]:
            raise BadInput(
                f"nothing is left for {side} that stands on no other side: give more text."
            )
    if dropped:
        says = "%d of %d passages share %d tokens in a row with another side and are left out."
        log.info(says, dropped, sum(map(len, passages.values())), RUN)
    return {side: kept[side] for side in passages}
